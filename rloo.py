"""RLOO (REINFORCE leave-one-out) from human preferences in one file.

Ahmadian et al. 2024, Back to Basics: Revisiting REINFORCE Style Optimization, arXiv 2402.14740.

    python sft.py --task synthetic              # the initial policy: base_model
    python train_reward.py --task synthetic     # the reward model
    python rloo.py --task synthetic
    accelerate launch --mixed_precision bf16 rloo.py --task sentiment

One update (numbered as in `main`):

    1. Sample K responses to each query.
    2. Score each response with the reward model.
    3. Compute the log-probability of each response.
       Its reward is score - kl_coef * sum over its tokens of (log pi - log pi_ref).
    4. Its advantage is its reward minus the mean reward of the K - 1 other responses to the query.
    5. For each epoch and minibatch, take one Adam step on the clipped loss of whole responses.
    6. Adapt kl_coef to the measured KL.

A whole response is one action; there is no value function. With one epoch and one minibatch, as
for most tasks, the gradient is REINFORCE's. With more steps, ratios of whole responses are clipped
as PPO clips those of tokens. Adaptive KL and Adam are as in ppo.py.

In OpenAI's 2019 tasks, all R tokens of a response are trained on, but the reward model sees only
those up to the truncate token, such as a period. In EOS tasks (`eos_task`) the truncate token is
EOS and ends the response: what follows is masked out.

Shapes: P queries, K responses to each, B sequences (P * K in a process's batch), Q query tokens, C
context tokens (prefix + query + suffix), R response tokens, T = C + R, N real response tokens, V
vocabulary size, D hidden size. Masks are True at real tokens. Tags such as (L3): docs/details.md.
machinery/ has loading, processes, files, and faster equivalents of the model calls.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from data.tasks import Task
from machinery import cli, distributed
from machinery.cli import RunArgs
from machinery.decoding import Decoder
from machinery.models import compute_logits, load_lm
from machinery.queries import load_queries
from machinery.rewards import Reward, check_reward, load_reward
from machinery.runs import Run, check_run
from machinery.tokens import load_tokenizer
from machinery.unpadding import Unpadded
from train_reward import RewardModel
from utils import AdamTF, Timer, TokenIds, add_affixes, all_sum, average_gradients, decode
from utils import global_mean_and_var, mean_over_processes, micro_batches
from utils import query_rows, random_numbers, sample_token, truncate


@dataclass(frozen=True, kw_only=True)
class Args(RunArgs):
    """RLOO from human preferences."""

    task: Task  # model, data, lengths, temperature (data/tasks.py); its fields are also flags

    # Run
    seed: NonNegativeInt = 1
    """random seed; process r uses seed + 100003 * r"""
    total_episodes: PositiveInt = 1_000_000
    """responses in the whole run, rounded up to whole batches"""
    eval_every: PositiveInt = 50
    """updates between evaluations on held-out queries"""
    eval_queries: PositiveInt = 256
    """number of held-out queries"""
    keep_every: PositiveInt | None = None
    """also save the weights every N updates"""

    # Optimization
    batch_size: PositiveInt = 512
    """responses per update, over all processes"""
    num_ppo_epochs: PositiveInt = 1
    """passes over the batch per update"""
    num_minibatches: PositiveInt = 1
    """optimizer steps per epoch"""
    rloo_k: Annotated[int, Field(ge=2)] = 4
    """responses to each query"""
    lr: NonNegativeFloat = 3e-5
    """initial learning rate"""
    anneal_lr: bool = True
    """decay the learning rate linearly to 0"""
    adam_eps: PositiveFloat = 1e-5
    """epsilon of TensorFlow's Adam, added to sqrt(v) before the bias correction"""
    max_grad_norm: PositiveFloat | None = None
    """clip the norm of the gradient to this value; None: no clipping"""

    # Algorithm
    reward_model: str = "models/<task>/train_reward"
    """folder or hub name of the reward model"""
    ref_model: str | None = None
    """reference model of the KL penalty: folder or hub name; default: base_model"""
    kl_coef: NonNegativeFloat = 0.15
    """initial coefficient of the KL penalty"""
    kl_target: PositiveFloat | None = 6.0
    """KL per response that the adaptive kl_coef aims for; None: fixed kl_coef"""
    kl_horizon: PositiveInt = 10_000
    """horizon of the adaptive kl_coef, in episodes"""
    cliprange: PositiveFloat = 0.2
    """clip the probability ratio of a response to [1 - cliprange, 1 + cliprange]"""

    # An option from later systems
    clip_score: PositiveFloat | None = None
    """clip scores, including missing_eos_penalty, to [-clip_score, clip_score]"""

    # Memory and speed. RunArgs has more, and the flags of output files.
    rollout_batch_size: PositiveInt = 512
    """sequences that a process samples at once; affects results only by rounding"""


# --------------------------------------------------- models


class Policy(nn.Module):
    """A language model that returns log-probabilities and entropies (L5)."""

    def __init__(self, lm: Any, pad_id: int, temperature: float):
        super().__init__()
        self.lm = lm
        self.backbone = Unpadded(lm.base_model)  # real tokens only; shares lm's weights
        self.pad_id = pad_id  # outside the vocabulary: never sampled (G2)
        self.temperature = temperature

    def forward(self, contexts: Tensor, responses: Tensor) -> tuple[Tensor, ...]:
        """Log-probabilities and entropies of response tokens.

        [B, C], [B, R] → [B, R] each, 0 at padding. Entropies are NaN under no_grad: not computed.
        """
        tokens = torch.cat([contexts, responses], dim=1)  # [B, T]
        mask = tokens != self.pad_id
        position_ids = mask.cumsum(dim=1) - mask.long()  # number of real tokens before each (G3)
        where = mask[:, contexts.shape[1] :].nonzero(as_tuple=True)  # N real response tokens
        hidden = self.backbone(  # [B, T, D]; adjacent equal contexts are computed once
            tokens.masked_fill(~mask, 0), mask, position_ids, prompt_length=contexts.shape[1]
        )
        hidden = hidden[:, contexts.shape[1] - 1 : -1][where]  # [N, D]: t predicts token t + 1
        log_softmax = (compute_logits(self.lm, hidden) / self.temperature).log_softmax(dim=-1)
        logprobs = log_softmax.gather(1, responses[where][:, None]).squeeze(1)  # [N] (P1)
        entropies = torch.full_like(logprobs, math.nan)
        if torch.is_grad_enabled():  # skipped in rollouts
            with torch.no_grad():  # only logged; without this line they have a gradient
                entropies = -(log_softmax.exp() * log_softmax).sum(dim=-1)  # [N]
        zeros = logprobs.new_zeros(responses.shape)
        return tuple(zeros.index_put(where, x) for x in (logprobs, entropies))


# ------------------------------------------------- sampling


@torch.no_grad()
def sample(
    decoder: Decoder, contexts: Tensor, uniform: Tensor, ids: TokenIds, args: Args
) -> Tensor:
    """Sample R tokens after each context: [B, C], random numbers [R, B] → [B, R] (G4).

    From the full vocabulary, ignoring generation_config. In EOS tasks, ended responses leave the
    batch every 16 tokens; `score_responses` removes what was sampled after the end.
    """
    task = args.task
    responses = contexts.new_full((len(contexts), len(uniform)), ids.pad)
    batch = decoder.start(contexts, contexts != ids.pad)
    for t in range(len(uniform)):  # batch.rows [b]: rows still in the batch
        logits = batch.next_logits() / task.temperature  # [b, V], as in training (P1)
        tokens = sample_token(logits, uniform[t][batch.rows])  # [b], by inverting the CDF
        responses[batch.rows, t] = tokens
        batch.append(tokens)
        if task.eos_task and t % 16 == 15:  # not every step: `drop` waits for the GPU
            _, ended = truncate(responses[batch.rows], ids.ends, task.truncate_after, ids.pad)
            batch.drop(ended)
            if len(batch.rows) == 0:
                break
    return responses


def sample_in_batches(
    decoder: Decoder, contexts: Tensor, uniform: Tensor, ids: TokenIds, args: Args
) -> Tensor:
    """Sample in batches of contexts of similar length: [B, C], [R, B] → [B, R] (X10)."""
    responses = contexts.new_empty(uniform.T.shape)
    order = (contexts != ids.pad).sum(dim=1).argsort(stable=True).to(uniform.device)
    for rows in order.split(args.rollout_batch_size):
        responses[rows] = sample(decoder, contexts[rows], uniform[:, rows], ids, args)
    return responses


# --------------------------------- scores, rewards, rollout


def score_responses(
    reward: Callable, queries: Tensor, responses: Tensor, columns: dict, ids: TokenIds, args: Args
) -> tuple[Tensor, Tensor, Tensor]:
    """Truncate responses [B, R] after the first truncate token, then score them (P5).

    Truncate tokens before position `truncate_after` do not count. A response without one is not
    cut, and `missing_eos_penalty` replaces its score. `columns`: name → B values of the data set.
    Returns scores [B], cut responses [B, R] and `ended` [B]: found, or the task has none.
    """
    task = args.task
    cut, ended = truncate(responses, ids.ends, task.truncate_after, ids.pad)
    scores = reward(queries, cut, columns)  # [B]
    scores = torch.where(ended, scores, task.missing_eos_penalty)
    if args.clip_score is not None:
        scores = scores.clamp(-args.clip_score, args.clip_score)  # (X2)
    return scores, cut, ended


def next_kl_coef(kl_coef: float, kl: float, args: Args) -> float:
    """Proportional controller: raise kl_coef if the KL is above kl_target (P11)."""
    if args.kl_target is None:
        return kl_coef
    error = min(max(kl / args.kl_target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * args.batch_size / args.kl_horizon)


class Rollout(NamedTuple):
    """The episodes of one update or evaluation (X10). Per-token floats are 0 at padding."""

    queries: Tensor  # [B, Q] padded on the left; what the reward model reads
    contexts: Tensor  # [B, C] with prefix and suffix; what the policy reads
    responses: Tensor  # [B, R]; in EOS tasks, padding after the end
    cut: Tensor  # [B, R] responses as they were scored
    ended: Tensor  # [B] has a truncate token, or the task has none
    mask: Tensor  # [B, R] all tokens; in EOS tasks, those up to the end (X9)
    lengths: Tensor  # [B] real tokens of context and response
    logprobs: Tensor  # [B, R] under the sampling policy
    kl: Tensor  # [B, R] per-token estimate: log pi - log pi_ref
    scores: Tensor  # [B] of the reward model, or missing_eos_penalty
    rewards: Tensor  # [B] score minus KL penalty

    def select(self, rows: Tensor | slice) -> "Rollout":
        """The episodes with these indices."""
        return type(self)._make(x[rows] for x in self)


def shuffle(
    num_episodes: int, args: Args, seed: int, update: int, device: Any
) -> list[list[Tensor]]:
    """For each epoch, the indices of each minibatch (P7). The first has the batch's order (L6).

    The K responses to a query stay side by side: a micro-batch computes the query once.
    """
    rng = np.random.default_rng([seed, update, 2])  # 2: a stream of its own
    orders = [np.arange(num_episodes)]  # already random: see `query_rows`
    groups = orders[0].reshape(-1, args.rloo_k)  # [P, K]
    orders += [rng.permutation(groups).flatten() for _ in range(args.num_ppo_epochs - 1)]
    size = num_episodes // args.num_minibatches
    return [list(torch.as_tensor(rows, device=device).split(size)) for rows in orders]


# -------------------------------------- advantages and loss


def compute_advantages(rewards: Tensor, args: Args) -> Tensor:
    """Each reward minus the mean of the K - 1 other rewards of its query: [B] → [B] (L3).

    With pairwise differences, equal rewards give exactly 0.
    """
    rewards = rewards.view(-1, args.rloo_k)  # [P, K]
    differences = rewards[:, :, None] - rewards[:, None]  # [P, K, K]: i minus j
    return (differences.sum(dim=2) / (args.rloo_k - 1)).flatten()


def rloo_loss(
    logprobs: Tensor, old: Rollout, advantages: Tensor, num_responses: int, args: Args
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss and statistics of a micro-batch: [B, R], [B] → scalars.

    PPO's clipped loss with the probability ratio of whole responses (L4). `num_responses`: of a
    whole minibatch, per process.
    """

    def mean(x: Tensor) -> Tensor:
        """This micro-batch's part of the minibatch's mean over responses: [B] → scalar (P7)."""
        return x.sum() / num_responses

    log_ratio = (logprobs - old.logprobs).sum(dim=1)  # [B], over tokens; 0 at padding (L1)
    ratio = log_ratio.clamp(max=40).exp()  # no inf: 0 * inf is a NaN gradient where it is clipped
    pg_losses = -advantages * ratio
    pg_losses_clipped = -advantages * ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
    pg_loss = mean(torch.max(pg_losses, pg_losses_clipped))

    with torch.no_grad():
        stats = {
            "loss/policy_avg": pg_loss,
            "policy/approxkl_avg": 0.5 * mean(log_ratio**2),
            "policy/clipfrac_avg": mean((pg_losses_clipped > pg_losses).float()),
            "val/ratio": mean(ratio),
            "val/ratio_var": mean((ratio - 1) ** 2),  # around 1, not around its mean
        }
    return pg_loss, stats


# -------------------------------------- metrics, evaluation


def rollout_metrics(
    rollout: Rollout, columns: dict[str, list], kl_coef: float, pad_id: int, gold_reward: Any
) -> dict[str, Any]:
    """Metrics of the sampled responses; see docs/rloo.md."""
    kl = rollout.kl.sum(dim=1).mean()
    metrics = {
        "objective/scores": rollout.scores.mean(),
        "objective/scores_std": global_mean_and_var(rollout.scores)[1].sqrt(),
        "objective/kl": kl,
        "objective/kl_coef": kl_coef,
        "objective/rlhf_reward": rollout.rewards.mean(),
        "objective/entropy": -rollout.logprobs.sum(dim=1).mean(),  # Monte Carlo estimate
        "objective/ended": rollout.ended.float().mean(),
        "objective/response_length": rollout.mask.sum(dim=1).float().mean(),
        "objective/cut_length": (rollout.cut != pad_id).sum(dim=1).float().mean(),
    }
    if gold_reward:
        gold_scores = gold_reward(rollout.queries, rollout.cut, columns)
        metrics["objective/gold_score"] = gold_scores.mean()
    return metrics


# In the progress line and in curves.png:
SHOWN = [f"objective/{x}" for x in ("scores", "kl", "kl_coef", "rlhf_reward")]


def check(args: Args, processes: int) -> None:
    """Raise `InputError` for invalid flags, before anything is loaded."""
    check_run(args, processes)
    check_reward(args)
    unit = processes * args.num_minibatches * args.rloo_k
    cli.check_divisible("batch_size", args.batch_size, unit, "processes * num_minibatches * rloo_k")
    if args.kl_target and args.batch_size >= 5 * args.kl_horizon:  # kl_coef could turn negative
        raise cli.InputError(f"kl_horizon={args.kl_horizon} is below {args.batch_size // 5 + 1}")


def main(args: Args) -> None:
    """Load everything; repeat: sample, score, optimize; save the policy."""
    accelerator = distributed.start(args)
    check(args, accelerator.num_processes)
    task, device, processes = args.task, accelerator.device, accelerator.num_processes
    tokenizer, ids = load_tokenizer(task, task.response_length)
    table = load_queries(task, tokenizer, ids)
    heldout, table = table.hold_out(args.eval_queries)  # table[rows] → [len(rows), Q]
    gold_reward = Reward("gold_fn", task, tokenizer, ids.pad) if task.gold_fn else None
    reward = load_reward(args, RewardModel, tokenizer, ids, accelerator)  # model or --reward_fn

    lm = load_lm(task.base_model, length=ids.length)  # no dropout (P4); T tokens have to fit
    policy = Policy(lm, ids.pad, task.temperature)
    optimizer = AdamTF(policy.parameters(), lr=args.lr, eps=args.adam_eps)
    policy, optimizer = distributed.prepare(accelerator, policy, optimizer, args)  # no DDP
    decoder = Decoder(lm, task.response_length)
    ref_lm = load_lm(args.ref_model or task.base_model, "--ref_model", ids.length, tokenizer)
    ref = distributed.freeze(accelerator, Policy(ref_lm, ids.pad, task.temperature))
    seed = args.seed + 100003 * accelerator.process_index  # own queries and samples (G6)
    local_batch_size = args.batch_size // processes
    minibatch_size = local_batch_size // args.num_minibatches
    num_updates = math.ceil(args.total_episodes / args.batch_size)
    cli.say(f"{len(table)} queries to learn, {len(heldout)} held out, {num_updates} updates")
    num_steps = args.num_ppo_epochs * args.num_minibatches  # Adam steps per update
    timer = Timer(device)
    shown = [*SHOWN, "objective/gold_score"] if gold_reward else SHOWN
    run = Run(args, num_updates, shown, accelerator)
    start, kl_coef = run.restore(policy, optimizer, args.kl_coef)  # start = 0 if not resumed

    @torch.no_grad()
    def make_rollout(queries: Tensor, columns: dict, kl_coef: float, uniform: Tensor) -> Rollout:
        """Steps 1 to 3 for queries [B, Q], with random numbers [R, B]."""
        # 1. Sample a response to each query.
        timer.start("sample")
        contexts = add_affixes(queries, ids)  # [B, C]
        with distributed.inference(accelerator, policy):  # in eval mode; FSDP2 gathers weights
            responses = sample_in_batches(decoder, contexts, uniform, ids, args)  # [B, R]

        # 2. Score each response with the reward model.
        timer.start("score")  # includes step 3
        scores, cut, ended = score_responses(reward, queries, responses, columns, ids, args)
        responses = cut if task.eos_task else responses  # train on nothing after the end (X9)

        # 3. Compute log-probabilities and rewards.
        mask = responses != ids.pad
        lengths = (torch.cat([contexts, responses], dim=1) != ids.pad).sum(dim=1)
        logprobs, ref_logprobs = torch.zeros(2, *mask.shape, device=device)
        # In the micro-batches of the first epoch: with the same rounding, ratios start at 1 (L6).
        for rows in torch.arange(len(queries), device=device).split(minibatch_size):
            for part in micro_batches(lengths[rows], args.micro_batch_tokens):
                i = rows[part]
                logprobs[i], _ = policy(contexts[i], responses[i])
                ref_logprobs[i], _ = ref(contexts[i], responses[i])
        kl = logprobs - ref_logprobs  # Schulman's k1
        rewards = scores - kl_coef * kl.sum(dim=1)  # a response is one action (L1, L2)
        episodes = dict(queries=queries, contexts=contexts, responses=responses, cut=cut)
        episodes |= dict(ended=ended, mask=mask, lengths=lengths, scores=scores, rewards=rewards)
        return Rollout(**episodes, logprobs=logprobs, kl=kl)

    def evaluate(update: int, kl_coef: float) -> dict[str, float]:
        """Metrics on held-out queries, split over processes; the same random numbers each time."""
        rows = distributed.share(accelerator, len(heldout))
        queries, columns = heldout[rows].to(device), heldout.columns(rows)
        uniform = random_numbers(args.seed, num_updates, device, task.response_length, len(heldout))
        rollout = make_rollout(queries, columns, kl_coef, uniform[:, rows])  # steps 1 to 3
        metrics = rollout_metrics(rollout, columns, kl_coef, ids.pad, gold_reward) | reward.means()
        texts = (decode(tokenizer, x[:4], ids.pad) for x in (queries, rollout.cut))
        scores, kl, parts = rollout.scores, rollout.kl.sum(dim=1), reward.parts
        run.log_samples(update, texts, score=scores, kl=kl, total=scores - kl_coef * kl, **parts)
        metrics = mean_over_processes(metrics, device)
        return {"eval/" + name.removeprefix("objective/"): x for name, x in metrics.items()}

    for update in range(start, num_updates):
        eval_metrics = evaluate(update, kl_coef) if update % args.eval_every == 0 else {}
        lr = args.lr * (1 - update / num_updates) if args.anneal_lr else args.lr  # (G5)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # 1-3. Sample, score, and compute log-probabilities and rewards.
        rows = query_rows(len(table), local_batch_size // args.rloo_k, seed, update)  # [P]
        rows = np.repeat(rows, args.rloo_k)  # [P * K]: the responses to a query side by side
        queries, columns = table[rows].to(device), table.columns(rows)
        uniform = random_numbers(seed, update, device, task.response_length, len(rows))  # [R, B]
        rollout = make_rollout(queries, columns, kl_coef, uniform)

        # 4. Compute the advantage of each response.
        timer.start("optimize")
        all_advantages = compute_advantages(rollout.rewards, args)  # [B]

        # 5. For each epoch and minibatch, take one Adam step.
        stats: dict[str, Any] = defaultdict(float)  # means over the steps
        for minibatches in shuffle(local_batch_size, args, seed, update, device):
            for minibatch_rows in minibatches:
                minibatch = rollout.select(minibatch_rows)
                advantages = all_advantages[minibatch_rows]
                num_tokens = all_sum(minibatch.mask.sum()) / processes  # per process
                for part in micro_batches(minibatch.lengths, args.micro_batch_tokens):
                    old = minibatch.select(part)
                    logprobs, entropies = policy(old.contexts, old.responses)
                    loss, part_stats = rloo_loss(
                        logprobs, old, advantages[part], len(minibatch_rows), args
                    )
                    part_stats["policy/entropy_avg"] = entropies.sum() / num_tokens
                    for name, value in part_stats.items():
                        stats[f"ppo/{name}"] += value.detach() / num_steps
                    loss.backward()
                average_gradients(policy)  # over processes; FSDP2 already did
                if args.max_grad_norm is not None:  # (X8)
                    nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()

        seconds = timer.stop()  # of each phase's last run, in this update
        metrics = rollout_metrics(rollout, columns, kl_coef, ids.pad, gold_reward) | reward.means()
        metrics["objective/advantage_std"] = global_mean_and_var(all_advantages)[1].sqrt()
        groups = rollout.scores.view(-1, args.rloo_k)  # [P, K]
        all_equal = (groups == groups[:, :1]).all(dim=1)  # of scores
        metrics["objective/frac_reward_zero_std"] = all_equal.float().mean()
        metrics = mean_over_processes(metrics | stats, device)
        metrics |= {"ppo/lr": lr, "ppo/episode": (update + 1) * args.batch_size}
        metrics["time/episodes_per_second"] = args.batch_size / sum(seconds.values())
        run.log(update, metrics | seconds | eval_metrics)

        # 6. Adapt kl_coef to the measured KL.
        kl_coef = next_kl_coef(kl_coef, metrics["objective/kl"], args)
        run.keep_weights(update + 1, lm, tokenizer)  # the weights, every --keep_every updates
        run.checkpoint(update + 1, policy, optimizer, kl_coef)  # all that a resumed run needs

    run.save(lm, tokenizer)
    run.log(num_updates, evaluate(num_updates, kl_coef))
    run.finish()


# The defaults above are for sentiment and descriptiveness. Overrides for the other tasks:
STORIES: dict[str, Any] = dict(total_episodes=4096, eval_every=20, batch_size=128, lr=7e-4)
STORIES |= dict(kl_coef=0.08, kl_target=10.0, kl_horizon=1000)
FIXED: dict[str, Any] = dict(kl_target=None)
CHECKED = FIXED | dict(num_minibatches=4, micro_batch_tokens=8192)
PRESETS: dict[str, dict[str, Any]] = {
    "synthetic": STORIES,
    "synthetic_eos": STORIES,
    "cnndm": FIXED | dict(batch_size=32, lr=2e-6, kl_coef=0.01),
    "tldr_2019": FIXED | dict(batch_size=32, lr=2e-6, kl_coef=0.03),
    "tldr": FIXED
    | dict(num_ppo_epochs=2, num_minibatches=2, lr=3e-6, kl_coef=0.03)
    | dict(micro_batch_tokens=16_384, rollout_batch_size=256),
    "arithmetic": CHECKED
    | dict(total_episodes=16_384, eval_every=16, batch_size=128, lr=3e-4, kl_coef=0.01),
    "gsm8k": CHECKED | dict(total_episodes=112_000, batch_size=256, lr=1e-6, kl_coef=0.001),
}


if __name__ == "__main__":
    cli.run(main, Args, PRESETS)
