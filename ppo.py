"""PPO from human preferences, as OpenAI's `lm-human-preferences` runs it (Ziegler et al. 2019), in one file.

    python sft.py --task synthetic && python train_reward.py --task synthetic && python ppo.py --task synthetic
    accelerate launch ppo.py --task sentiment

Deviations from the original: whitening moments are taken over all processes (X11), and old log-probabilities come from
the training forward instead of the sampling loop (L6); both change nothing on one process in exact arithmetic.

Letters: `B` sequences of one process, `C` context tokens (prefix + query + suffix), `Q` query tokens, `R` response
tokens, `V` vocabulary. A minibatch is one optimizer step, a micro-batch one forward. Masks are True at real tokens.
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
    """PPO from human preferences."""

    task: Task
    seed: int = 1
    """of everything random; process r uses seed + 100003 r (G6)"""
    total_episodes: int = 1_000_000
    """responses sampled in the whole run, over all processes"""
    batch_size: int = 512
    """episodes per update, over all processes"""
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
    gamma: float = 1.0
    """discount (P6)"""
    lam: float = 0.95
    """λ of generalised advantage estimation (P6)"""
    cliprange: float = 0.2
    """the probability ratio is clipped to 1 ± this"""
    cliprange_value: float = 0.2
    """a new value is clipped to the old one ± this (P10)"""
    vf_coef: float = 0.1
    """weight of the value loss (P10)"""
    whiten_rewards: bool = True
    """scale the rewards of a minibatch to unit variance, mean kept (P9)"""
    reward_model: str | None = None
    """folder of the reward model; None: models/<task>/train_reward"""
    reward_fn: str | None = None
    """`module:function` or `path.py:function` of (queries, responses) → floats, in place of the reward model"""
    gradient_checkpointing: bool = False
    """less memory for activations, one more forward"""
    output_dir: str | None = None
    """folder of the trained policy; None: models/<task>/ppo"""
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
    "synthetic_eos": SMALL | dict(whiten_rewards=False),  # kept means would reward short responses, see LOG.md
    "sentiment": dict(),
    "descriptiveness": dict(),
    "cnndm": dict(batch_size=32, lr=2e-6, kl_coef=0.01, kl_target=None, whiten_rewards=False, micro_batch_size=8),
    "tldr": dict(
        lr=3e-6,
        kl_coef=0.05,
        kl_target=None,
        whiten_rewards=False,
        micro_batch_size=8,
        rollout_batch_size=64,
    ),
    "tldr_2019": dict(batch_size=32, lr=2e-6, kl_coef=0.03, kl_target=None, whiten_rewards=False, micro_batch_size=8),
}


class PolicyAndValue(nn.Module):
    """One trunk, two heads: the language model's and a scalar value on every token (G1)."""

    def __init__(self, lm: PreTrainedModel, pad_id: int, temperature: float):
        super().__init__()
        self.lm, self.pad_id, self.temperature = lm, pad_id, temperature
        self.value_head = nn.Linear(lm.config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)  # P2
        nn.init.zeros_(self.value_head.bias)

    def forward(self, contexts: Tensor, responses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, C], [B, R] → log-probabilities, entropies and values [B, R], each where its token is predicted; the
        vocabulary head sees these R positions only. The one forward behind old and new numbers (L6)."""
        tokens = torch.cat([contexts, responses], dim=1)
        hidden = utils.hidden_states(self.lm.base_model, tokens, self.pad_id)[:, -responses.shape[1] - 1 : -1]
        logits = self.lm.get_output_embeddings()(hidden)  # [B, R, V]
        values = self.value_head(hidden).squeeze(-1).float()
        return *utils.token_logprobs(logits, responses, self.temperature), values


class Rollout(NamedTuple):
    """What one update learns from; the rows are episodes."""

    lengths: np.ndarray  # [B] real tokens of each context, on the host: they plan the micro-batches
    contexts: Tensor  # [B, C] prefix + query + suffix, left-padded: what policy and reference read
    responses: Tensor  # [B, R] as sampled; pads behind the end of an EOS task
    mask: Tensor  # [B, R] True through the end of the response; all True unless the task ends at EOS (X9)
    logprobs: Tensor  # [B, R] of the sampling policy (L6)
    values: Tensor  # [B, R]
    ref_logprobs: Tensor  # [B, R]
    scores: Tensor  # [B] the reward model's, or the penalty
    rewards: Tensor  # [B, R] KL penalty, and the score on the last token


# ---------------------------------------------------------------------------------------- pure functions of tensors


def kl_penalised_rewards(
    logprobs: Tensor, ref_logprobs: Tensor, scores: Tensor, mask: Tensor, kl_coef: float
) -> Tensor:
    """P8: −β·(log π − log π_ref) at every token [B, R], the score [B] added at the last. [B, R]"""
    rewards = (-kl_coef * (logprobs - ref_logprobs)).masked_fill(~mask, 0)
    return rewards.scatter_add(1, mask.sum(dim=1, keepdim=True) - 1, scores[:, None])


def advantages_and_returns(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """P6: generalised advantage estimation, [B, R] each. Behind an end rewards and values are 0, and so are both."""
    advantages, following, next_value = [], 0.0, 0.0
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        following = delta + gamma * lam * following
        advantages.append(following)
        next_value = values[:, t]
    advantages = torch.stack(advantages[::-1], dim=1)
    return advantages, advantages + values


def loss_terms(
    logprobs: Tensor, values: Tensor, old: Rollout, advantages: Tensor, returns: Tensor, args: Args
) -> dict[str, Tensor]:
    """Clipped policy and value loss, and what to watch, per token [B, R]; their means are loss and metrics."""
    log_ratio = logprobs - old.logprobs
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
    policy, policy_clipped = -advantages * ratio, -advantages * clipped_ratio
    values_clipped = values.clamp(old.values - args.cliprange_value, old.values + args.cliprange_value)
    error, error_clipped = (values - returns) ** 2, (values_clipped - returns) ** 2
    return {
        "loss/policy_avg": torch.max(policy, policy_clipped),
        "loss/value_avg": 0.5 * torch.max(error, error_clipped),  # P10
        "policy/approxkl_avg": 0.5 * log_ratio**2,
        "policy/clipfrac_avg": (policy_clipped > policy).float(),
        "val/vpred": values,
        "val/error": error,
        "val/clipfrac": (error_clipped > error).float(),
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

    policy: nn.Module  # PolicyAndValue, perhaps wrapped for several processes
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
    logprobs, values = torch.empty_like(ref_logprobs), torch.empty_like(ref_logprobs)
    lengths = utils.row_lengths(contexts, pad_id)
    for rows in minibatches(order, args):  # L6: exactly the forwards of the first epoch
        for part, width in utils.micro_batches(lengths[rows], args.micro_batch_size):
            index = rows[part]
            logprobs[index], _, values[index] = models.policy(contexts[index, -width:], responses[index])
    rewards = kl_penalised_rewards(logprobs, ref_logprobs, score.scores, mask, kl_coef)
    return Rollout(lengths, contexts, responses, mask, logprobs, values, ref_logprobs, score.scores, rewards), score


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
    """Whiten, GAE, clipped losses: leaves the gradient of one minibatch in the parameters, whatever the micro-batches.
    Returns its statistics as this process's share: they sum to the mean over all processes."""
    mask = batch.mask
    clean = {name: getattr(batch, name).masked_fill(~mask, 0) for name in ("logprobs", "values", "rewards")}
    batch = batch._replace(**clean)
    rewards = utils.whiten(batch.rewards, mask, shift_mean=False) if args.whiten_rewards else batch.rewards  # P9
    advantages, returns = advantages_and_returns(rewards, batch.values, args.gamma, args.lam)
    advantages = utils.whiten(advantages, mask)  # P9
    count, totals = utils.all_sum(mask.sum()), {}
    parts = utils.micro_batches(batch.lengths, args.micro_batch_size)
    for i, (part, width) in enumerate(parts):
        old, outside = Rollout(*(x[part] for x in batch)), ~mask[part]
        with accelerator.no_sync(policy) if i + 1 < len(parts) else nullcontext():
            logprobs, entropies, values = policy(old.contexts[:, -width:], old.responses)
            logprobs, values = (x.masked_fill(outside, 0) for x in (logprobs, values))  # now: later NaN · 0 is NaN
            terms = loss_terms(logprobs, values, old, advantages[part], returns[part], args)
            terms["policy/entropy_avg"] = entropies
            means = {name: term.masked_fill(outside, 0).sum() / count for name, term in terms.items()}
            means["loss/total"] = means["loss/policy_avg"] + args.vf_coef * means["loss/value_avg"]
            accelerator.backward(means["loss/total"] * accelerator.num_processes)  # DDP averages; P7 wants the sum
        totals = {name: totals.get(name, 0) + mean.detach() for name, mean in means.items()}
    for name, x in (("returns", returns), ("val", batch.values)):
        mean, variance = utils.moments(x, mask)
        totals[f"{name}/mean"] = mean / accelerator.num_processes
        totals[f"{name}/var"] = variance / accelerator.num_processes
    return totals


def summarise(rollout: Rollout, score: utils.Score, stats: dict[str, Tensor], kl_coef: float) -> dict[str, Any]:
    """The metrics of one update; README explains each."""
    log_ratio = (rollout.logprobs - rollout.ref_logprobs).masked_fill(~rollout.mask, 0)
    stats = {f"ppo/{name}": values.mean() for name, values in stats.items()}
    return stats | {
        "objective/kl": log_ratio.sum(dim=1).mean(),
        "objective/entropy": -rollout.logprobs.masked_fill(~rollout.mask, 0).sum(dim=1).mean(),
        "objective/scores": rollout.scores.mean(),
        "objective/scores_std": utils.moments(rollout.scores, torch.ones_like(rollout.scores).bool())[1].sqrt(),
        "objective/score_total": rollout.rewards.masked_fill(~rollout.mask, 0).sum(dim=1).mean(),
        "objective/rlhf_reward": rollout.scores.mean() - kl_coef * log_ratio.sum(dim=1).mean(),
        "objective/kl_coef": kl_coef,
        "objective/ended": score.ended.float().mean(),
        "objective/response_length": rollout.mask.sum(dim=1).float().mean(),
        "ppo/val/var_explained": 1 - stats["ppo/val/error"] / stats["ppo/returns/var"],
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
    unit, what = processes * args.num_minibatches, f"{processes} processes × {args.num_minibatches} minibatches"
    utils.check_divides("batch_size", args.batch_size, unit, what)
    if args.kl_target is not None and args.kl_target <= 0:
        raise InputError(f"kl_target={args.kl_target} has to be positive, or None for a fixed kl_coef")


PANELS = [
    "objective/scores",
    "objective/gold_score",
    "objective/kl",
    "objective/kl_coef",
    "ppo/loss/value_avg",
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
    policy = PolicyAndValue(utils.load_lm(task.base_model), pad_id, task.temperature)
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
    run = utils.Run(args, "ppo", num_updates, PANELS, accelerator)

    for update in range(num_updates):
        queries = table[utils.rows_of_step(len(table), local_batch, update, seed)].to(device)  # [B, Q]
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
        utils.check_finite(metrics, "ppo/loss/total", update)
        kl_coef = next_kl_coef(kl_coef, metrics["objective/kl"], args)  # P11
        run.log(update, metrics, SHOWN)

    policy.eval()
    folder = args.output_dir or f"models/{task.task}/ppo"
    utils.save_model(lm, tokenizer, folder, accelerator)
    if accelerator.is_main_process:
        run.samples(num_updates, sample_table(models, lm, few, tokenizer, args), "samples after the last update")
        run.compare_samples()
    run.finish(f"policy: {folder}")
    utils.stop_accelerator(accelerator)


if __name__ == "__main__":
    utils.cli(main, lambda: utils.parse_args(Args, PRESETS))
