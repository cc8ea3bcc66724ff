"""RLOO (REINFORCE leave-one-out) from human preferences, as Ahmadian et al. 2024 describe it, in one file.

    python sft.py --task synthetic && python train_reward.py --task synthetic && python rloo.py --task synthetic
    accelerate launch rloo.py --task sentiment

A whole completion is one action; its baseline is the mean reward of the prompt's other completions; there is no critic.
`diff ppo.py rloo.py` shows the algorithm. Minibatches are drawn by completion, not by prompt group: advantages are
fixed before the first step, so a group need not stay together, and minibatches are as mixed as PPO's.

Letters: `B` sequences of one process, `K` completions per prompt, `P` prompts (`B = K · P`), `C` context tokens (prefix
+ query + suffix), `Q` query tokens, `R` response tokens, `V` vocabulary. Masks are True at real tokens.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

import utils
from utils import InputError, Task


@dataclass(frozen=True)
class Args:
    """RLOO from human preferences."""

    task: Task
    seed: int = 1
    """of everything random; process r uses seed + 100003 r (G6)"""
    total_episodes: int = 1_000_000
    """responses sampled in the whole run, over all processes"""
    batch_size: int = 512
    """episodes per update, over all processes"""
    rloo_k: int = 4
    """completions per prompt (L3)"""
    num_minibatches: int = 1
    """optimizer steps per epoch (P7)"""
    num_ppo_epochs: int = 4
    """passes over the batch per update"""
    micro_batch_size: int = 64
    """sequences per training forward on one process: memory only (P7)"""
    rollout_batch_size: int = 256
    """sequences per sampling or scoring forward on one process: memory only (X10)"""
    lr: float = 1e-5
    """learning rate of the first update; falls linearly to 0 (G5)"""
    adam_eps: float = 1e-5
    """TensorFlow's ε̂ (A1)"""
    kl_coef: float = 0.15
    """β at the start: weight of the KL penalty (P8)"""
    kl_target: float | None = 6.0
    """nats per response that β is steered to; None keeps β fixed (P11)"""
    kl_horizon: int = 10_000
    """episodes over which β moves (P11)"""
    cliprange: float = 0.2
    """the probability ratio of a completion is clipped to 1 ± this (L4)"""
    reward_model: str | None = None
    """folder of the reward model; None: models/<task>/train_reward"""
    reward_fn: str | None = None
    """`module:function` or `path.py:function` of (queries, responses) → floats, in place of the reward model"""
    gradient_checkpointing: bool = False
    """less memory for activations, one more forward"""
    output_dir: str | None = None
    """folder of the trained policy; None: models/<task>/rloo"""
    run_name: str | None = None
    """folder in runs/; None: task, script, seed and time"""
    track: bool = False
    """log to Weights & Biases too"""
    sample_every: int = 50
    """updates between two tables of samples"""


SMALL = dict(  # 32 updates of a model of one million parameters: a higher lr, and β found faster
    total_episodes=4096,
    batch_size=128,
    num_minibatches=2,
    num_ppo_epochs=2,
    lr=5e-4,
    kl_coef=0.08,
    kl_target=10.0,
    kl_horizon=1000,
    sample_every=20,
)
PRESETS: dict[str, dict[str, Any]] = {  # what differs from the defaults above
    "synthetic": SMALL,
    "synthetic_eos": SMALL,
    "sentiment": dict(),
    "descriptiveness": dict(),
    "cnndm": dict(batch_size=32, lr=2e-6, kl_coef=0.01, kl_target=None, micro_batch_size=8),
    "tldr": dict(lr=3e-6, kl_coef=0.05, kl_target=None, micro_batch_size=8, rollout_batch_size=64),
    "tldr_2019": dict(batch_size=32, lr=2e-6, kl_coef=0.03, kl_target=None, micro_batch_size=8),
}


class Policy(nn.Module):
    """The language model; there is no value head (L5)."""

    def __init__(self, lm: PreTrainedModel, pad_id: int, temperature: float):
        super().__init__()
        self.lm, self.pad_id, self.temperature = lm, pad_id, temperature

    def forward(self, contexts: Tensor, responses: Tensor) -> tuple[Tensor, Tensor]:
        """[B, C], [B, R] → log-probabilities and entropies [B, R], each where its token is predicted; the vocabulary
        head sees these R positions only. The one forward behind old and new numbers (L6)."""
        tokens = torch.cat([contexts, responses], dim=1)
        hidden = utils.hidden_states(self.lm.base_model, tokens, self.pad_id)[:, -responses.shape[1] - 1 : -1]
        logits = self.lm.get_output_embeddings()(hidden)  # [B, R, V]
        return utils.token_logprobs(logits, responses, self.temperature)


class Rollout(NamedTuple):
    """What one update learns from; the rows are episodes."""

    lengths: np.ndarray  # [B] real tokens of each context, on the host: they plan the micro-batches
    contexts: Tensor  # [B, C] prefix + query + suffix, left-padded: what policy and reference read
    responses: Tensor  # [B, R] as sampled; pads behind the end of an EOS task
    mask: Tensor  # [B, R] True through the end of the response; all True unless the task ends at EOS (X9)
    logprobs: Tensor  # [B] of whole completions under the sampling policy (L1, L6)
    ref_logprobs: Tensor  # [B]
    scores: Tensor  # [B] the reward model's, or the penalty
    rewards: Tensor  # [B] score less KL penalty
    advantages: Tensor  # [B] reward less the mean of the prompt's other completions


# ---------------------------------------------------------------------------------------- pure functions of tensors


def sequence_logprobs(logprobs: Tensor, mask: Tensor) -> Tensor:
    """L1: the completion is one action: Σ_t log π(y_t) over its real tokens. [B, R] → [B]"""
    return logprobs.masked_fill(~mask, 0).sum(dim=1)


def kl_penalised_rewards(logprobs: Tensor, ref_logprobs: Tensor, scores: Tensor, kl_coef: float) -> Tensor:
    """L2: score − β·(log π(y) − log π_ref(y)), [B] each."""
    return scores - kl_coef * (logprobs - ref_logprobs)


def leave_one_out_advantages(rewards: Tensor, k: int) -> Tensor:
    """L3: each reward less the mean of the prompt's k − 1 others. [K · P] laid out [K, P] → [K · P]"""
    rewards = rewards.view(k, -1)
    rewards = rewards - rewards[0]  # changes nothing, but makes equal rewards' advantages exactly 0
    return (rewards - (rewards.sum(dim=0) - rewards) / (k - 1)).flatten()


def loss_terms(logprobs: Tensor, old: Rollout, args: Args) -> dict[str, Tensor]:
    """L4: clipped loss on the ratio of whole completions [B], and what to watch; their means are loss and metrics."""
    log_ratio = logprobs - old.logprobs
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
    policy, policy_clipped = -old.advantages * ratio, -old.advantages * clipped_ratio
    return {
        "loss/policy_avg": torch.max(policy, policy_clipped),
        "policy/approxkl_avg": 0.5 * log_ratio**2,
        "policy/clipfrac_avg": (policy_clipped > policy).float(),
        "val/ratio": ratio,
    }


def minibatches(order: np.ndarray, args: Args) -> list[np.ndarray]:
    """P7: a permutation [B] → the rows of each minibatch; sorted: a set of rows always makes the same micro-batches."""
    return [np.sort(rows) for rows in np.split(order, args.num_minibatches)]


def next_kl_coef(kl_coef: float, kl: float, args: Args) -> float:
    """P11: β of the next update from this one's KL (nats per response, mean over the batch)."""
    if args.kl_target is None:
        return kl_coef
    error = min(max(kl / args.kl_target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * args.batch_size / args.kl_horizon)


# ------------------------------------------------------------------------------------------------------- the phases


class Models(NamedTuple):
    """Everything that a rollout is made with."""

    policy: nn.Module  # Policy, perhaps wrapped for several processes
    ref: PreTrainedModel
    reward: Callable[[Tensor, Tensor], Tensor]  # (queries [B, Q], responses [B, R]) → [B]
    ids: utils.Ids


@torch.no_grad()
def evaluate(
    models: Models, queries: Tensor, responses: Tensor, order: np.ndarray, kl_coef: float, args: Args
) -> tuple[Rollout, utils.Score]:
    """Everything that the update needs to know about sampled responses [B, R]."""
    pad_id, temperature = models.ids.pad, args.task.temperature
    score = utils.score_responses(models.reward, queries, responses, args.task, models.ids)  # P5: only this cuts
    responses = score.cut if args.task.eos_task else responses  # X9
    mask = responses != pad_id
    contexts = utils.add_affixes(queries, models.ids)
    ref_logprobs = utils.lm_logprobs(models.ref, contexts, responses, temperature, pad_id, args.rollout_batch_size)
    ref_logprobs = sequence_logprobs(ref_logprobs, mask)
    logprobs = torch.empty_like(ref_logprobs)
    lengths = utils.row_lengths(contexts, pad_id)
    for rows in minibatches(order, args):  # L6: exactly the forwards of the first epoch
        for part, width in utils.micro_batches(lengths[rows], args.micro_batch_size):
            index = rows[part]
            tokens = models.policy(contexts[index, -width:], responses[index])[0]
            logprobs[index] = sequence_logprobs(tokens, mask[index])
    rewards = kl_penalised_rewards(logprobs, ref_logprobs, score.scores, kl_coef)
    advantages = leave_one_out_advantages(rewards, args.rloo_k)
    return Rollout(lengths, contexts, responses, mask, logprobs, ref_logprobs, score.scores, rewards, advantages), score


def optimise(
    policy: nn.Module, optimizer: Any, rollout: Rollout, epochs: list[np.ndarray], args: Args, accelerator: Accelerator
) -> dict[str, Tensor]:
    """P7: passes over the batch in the orders `epochs` [B] → statistics [optimizer steps], each before its step."""
    steps = []
    for order in epochs:
        for rows in minibatches(order, args):
            steps.append(minibatch_gradient(policy, Rollout(*(x[rows] for x in rollout)), args, accelerator))
            optimizer.step()
            optimizer.zero_grad()
    table = utils.all_sum(torch.stack([torch.stack(list(step.values())) for step in steps], dim=1))
    return dict(zip(steps[0], table, strict=True))


def minibatch_gradient(policy: nn.Module, batch: Rollout, args: Args, accelerator: Accelerator) -> dict[str, Tensor]:
    """Clipped loss: leaves the gradient of one minibatch in the parameters, whatever the micro-batches. Returns its
    statistics as this process's share: they sum to the mean over all processes."""
    count, tokens, totals = len(batch.scores) * accelerator.num_processes, utils.all_sum(batch.mask.sum()), {}
    parts = utils.micro_batches(batch.lengths, args.micro_batch_size)
    for i, (part, width) in enumerate(parts):
        old = Rollout(*(x[part] for x in batch))
        with accelerator.no_sync(policy) if i + 1 < len(parts) else nullcontext():
            logprobs, entropies = policy(old.contexts[:, -width:], old.responses)
            terms = loss_terms(sequence_logprobs(logprobs, old.mask), old, args)
            means = {name: term.sum() / count for name, term in terms.items()}
            accelerator.backward(means["loss/policy_avg"] * accelerator.num_processes)  # DDP averages; P7 wants the sum
        means["policy/entropy_avg"] = entropies.masked_fill(~old.mask, 0).sum() / tokens
        totals = {name: totals.get(name, 0) + mean.detach() for name, mean in means.items()}
    return totals


def summarise(rollout: Rollout, score: utils.Score, stats: dict[str, Tensor], kl_coef: float) -> dict[str, Any]:
    """The metrics of one update; README explains each."""
    kl = (rollout.logprobs - rollout.ref_logprobs).mean()
    return {f"ppo/{name}": values.mean() for name, values in stats.items()} | {
        "objective/kl": kl,
        "objective/entropy": -rollout.logprobs.mean(),
        "objective/scores": rollout.scores.mean(),
        "objective/scores_std": utils.moments(rollout.scores, torch.ones_like(rollout.scores).bool())[1].sqrt(),
        "objective/rlhf_reward": rollout.rewards.mean(),
        "objective/kl_coef": kl_coef,
        "objective/ended": score.ended.float().mean(),
        "objective/response_length": rollout.mask.sum(dim=1).float().mean(),
        "objective/advantage_std": rollout.advantages.std(correction=0),
    }


def sample_table(
    models: Models, lm: PreTrainedModel, queries: Tensor, tokenizer: Any, args: Args
) -> list[dict[str, Any]]:
    """A response to each of a few queries [B, Q], always with the same random numbers: text and score."""
    gen = utils.generator(args.seed, 0, queries.device)
    contexts = utils.add_affixes(queries, models.ids)
    responses = utils.sample(lm, contexts, args.task.response_length, args.task.temperature, models.ids.pad, gen)
    score = utils.score_responses(models.reward, queries, responses, args.task, models.ids)
    columns = *(utils.decode(tokenizer, x, models.ids.pad) for x in (queries, score.cut)), score.scores.tolist()
    return [{"query": q, "response": r, "score": s} for q, r, s in zip(*columns, strict=True)]


def check(args: Args, processes: int) -> None:
    """Errors: `InputError` for values that cannot work, before anything is loaded."""
    utils.check_task(args.task)
    positive = (
        "total_episodes",
        "batch_size",
        "num_minibatches",
        "num_ppo_epochs",
        "micro_batch_size",
        "rollout_batch_size",
        "kl_horizon",
        "sample_every",
    )
    utils.check_positive(args, positive)
    if args.rloo_k < 2:
        raise InputError(
            f"rloo_k={args.rloo_k}: the baseline is the mean of the other completions of a prompt, so 2 at least"
        )
    unit = processes * math.lcm(args.num_minibatches, args.rloo_k)
    what = f"{processes} processes × {args.num_minibatches} minibatches and {args.rloo_k} completions per prompt"
    utils.check_divides("batch_size", args.batch_size, unit, what)
    if args.kl_target is not None and args.kl_target <= 0:
        raise InputError(f"kl_target={args.kl_target} has to be positive, or None for a fixed kl_coef")


PANELS = [
    "objective/scores",
    "objective/gold_score",
    "objective/kl",
    "objective/kl_coef",
    "objective/advantage_std",
    "objective/entropy",
]
PHASES = ("sample", "score", "optimise")
SHOWN = {"objective/scores": "score", "objective/kl": "kl", "time/episodes_per_second": "episodes/s"}


def main(args: Args) -> None:
    """The run: sample and score → optimise → log."""
    accelerator = utils.start_accelerator()
    check(args, accelerator.num_processes)
    task, device = args.task, accelerator.device
    tokenizer, config, pad_id = utils.load_tokenizer(task, task.response_length, f"python sft.py --task {task.task}")
    ids = utils.task_ids(task, tokenizer, pad_id)
    gold = utils.load_function(task.gold_fn) if task.gold_fn else None
    with accelerator.main_process_first():
        table = utils.load_queries(task, tokenizer, pad_id)  # [N, Q]
    few = table[:4].to(device)  # queries of the sample tables
    reward = utils.load_reward(args, tokenizer, pad_id, device)

    torch.manual_seed(args.seed)
    policy = Policy(utils.load_lm(task.base_model), pad_id, task.temperature)
    ref = utils.load_lm(task.base_model).to(device).eval().requires_grad_(False)
    if args.gradient_checkpointing:
        policy.lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy, optimizer = accelerator.prepare(policy, utils.AdamTF(policy.parameters(), lr=args.lr, eps=args.adam_eps))
    models = Models(policy, ref, reward, ids)
    lm = accelerator.unwrap_model(policy).lm

    seed = utils.process_seed(args.seed, accelerator.process_index)  # G6
    local_batch = args.batch_size // accelerator.num_processes
    num_updates = math.ceil(args.total_episodes / args.batch_size)
    kl_coef, clock = args.kl_coef, utils.Clock(device)
    run = utils.Run(args, "rloo", num_updates, PANELS, accelerator)

    for update in range(num_updates):
        prompts = table[utils.rows_of_step(len(table), local_batch // args.rloo_k, update, seed)].to(device)  # [P, Q]
        queries = prompts.repeat(args.rloo_k, 1)  # [K · P, Q]
        rng = np.random.default_rng([seed, update])
        epochs = [rng.permutation(local_batch) for _ in range(args.num_ppo_epochs)]

        policy.eval()
        if update % args.sample_every == 0 and accelerator.is_main_process:
            run.samples(update, sample_table(models, lm, few, tokenizer, args), f"samples before update {update}")
        with clock("sample"), accelerator.autocast():
            contexts, gen = utils.add_affixes(queries, ids), utils.generator(seed, update, device)
            responses = utils.sample_all(lm, contexts, task, pad_id, gen, args.rollout_batch_size)
        with clock("score"), accelerator.autocast():
            rollout, score = evaluate(models, queries, responses, epochs[0], kl_coef, args)
        policy.train()
        with clock("optimise"):
            utils.set_lr(optimizer, lr := utils.anneal(args.lr, update, num_updates))  # G5
            stats = optimise(policy, optimizer, rollout, epochs, args, accelerator)

        metrics = summarise(rollout, score, stats, kl_coef)
        if gold:
            gold_scores = utils.text_scores(gold, task.gold_fn, tokenizer, queries, score.cut, pad_id)
            metrics["objective/gold_score"] = gold_scores.mean()
        metrics = utils.mean_over_processes(metrics, device) | clock.pop()
        metrics["time/episodes_per_second"] = args.batch_size / sum(metrics[f"time/{p}"] for p in PHASES)
        metrics |= {"ppo/lr": lr, "ppo/episode": (update + 1) * args.batch_size}
        utils.check_finite(metrics, "ppo/loss/policy_avg", update)
        kl_coef = next_kl_coef(kl_coef, metrics["objective/kl"], args)  # P11
        run.log(update, metrics, SHOWN)

    policy.eval()
    folder = args.output_dir or f"models/{task.task}/rloo"
    utils.save_model(lm, tokenizer, folder, accelerator)
    if accelerator.is_main_process:
        run.samples(num_updates, sample_table(models, lm, few, tokenizer, args), "samples after the last update")
        run.compare_samples()
    run.finish(f"policy: {folder}")
    utils.stop_accelerator(accelerator)


if __name__ == "__main__":
    utils.cli(main, lambda: utils.parse_args(Args, PRESETS))
