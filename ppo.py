"""PPO from human preferences in one file, following OpenAI's lm-human-preferences.

Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593.

    python sft.py --task synthetic              # the initial policy: base_model
    python train_reward.py --task synthetic     # the reward model
    python ppo.py --task synthetic
    accelerate launch --mixed_precision bf16 ppo.py --task sentiment

One update (numbered as in `main`):

    1. Sample a response to each query.
    2. Score each response with the reward model.
    3. Compute the log-probability and value of each token of the responses.
       A token's reward is -kl_coef * (log pi - log pi_ref), plus the score at the last token.
    4. For each epoch, for each minibatch:
       whiten rewards, compute advantages and returns with GAE, whiten advantages,
       take one Adam step on the clipped policy loss + vf_coef * the clipped value loss.
    5. Adapt kl_coef to the measured KL.

In OpenAI's 2019 tasks, all R tokens of a response are trained on, but the reward model sees only
those up to the truncate token, such as a period. In EOS tasks (`eos_task`) the truncate token is
EOS and ends the response: what follows is masked out.

Tags such as (P9) refer to docs/details.md. Three things differ from OpenAI's code: whitening is
over all processes (X11), old log-probabilities and values are from a forward pass, not from
sampling (L6), and each process shuffles the queries with its own seed (G6).

Shapes: B sequences, Q query tokens, C context tokens (prefix + query + suffix), R response tokens,
T = C + R, N real response tokens, V vocabulary size, D hidden size. Masks are True at real tokens.
machinery/ has loading, processes, files, and faster equivalents of the model calls.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from data.tasks import Task
from machinery import cli, distributed
from machinery.cli import RunArgs, UnitFloat
from machinery.decoding import Decoder
from machinery.models import Float32Linear, compute_logits, hidden_size, load_lm
from machinery.queries import load_queries
from machinery.rewards import Reward, check_reward, load_reward
from machinery.runs import Run, check_run
from machinery.tokens import load_tokenizer
from machinery.unpadding import Unpadded
from train_reward import RewardModel
from utils import AdamTF, Timer, TokenIds, add_affixes, all_sum, average_gradients, decode
from utils import global_mean_and_var, masked_sum, mean_over_processes, micro_batches
from utils import query_rows, random_numbers, sample_token, truncate


@dataclass(frozen=True, kw_only=True)
class Args(RunArgs):
    """PPO from human preferences."""

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
    num_ppo_epochs: PositiveInt = 4
    """passes over the batch per update"""
    num_minibatches: PositiveInt = 1
    """optimizer steps per epoch"""
    lr: NonNegativeFloat = 1e-5
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
    gamma: UnitFloat = 1.0
    """discount factor"""
    lam: UnitFloat = 0.95
    """lambda of GAE"""
    cliprange: PositiveFloat = 0.2
    """clip the probability ratio to [1 - cliprange, 1 + cliprange]"""
    cliprange_value: PositiveFloat = 0.2
    """clip values to within this distance of the old ones"""
    vf_coef: NonNegativeFloat = 0.1
    """coefficient of the value loss"""
    whiten_rewards: bool = True
    """scale the rewards of a minibatch to unit variance but keep their mean"""
    whiten_advantages: bool = True
    """whiten the advantages of a minibatch"""

    # An option from later systems
    clip_score: PositiveFloat | None = None
    """clip scores, including missing_eos_penalty, to [-clip_score, clip_score]"""

    # Memory and speed. RunArgs has more, and the flags of output files.
    rollout_batch_size: PositiveInt = 512
    """sequences that a process samples at once; affects results only by rounding"""


# --------------------------------------------------- models


class PolicyAndValue(nn.Module):
    """A language model with a value head, which the reference model does not use."""

    def __init__(self, lm: Any, pad_id: int, temperature: float):
        super().__init__()
        self.lm = lm
        self.backbone = Unpadded(lm.base_model)  # real tokens only; shares lm's weights
        self.value_head = Float32Linear(hidden_size(lm.config), 1)
        nn.init.zeros_(self.value_head.weight)  # values start at 0 (P2)
        nn.init.zeros_(self.value_head.bias)
        self.pad_id = pad_id  # outside the vocabulary: never sampled (G2)
        self.temperature = temperature

    def forward(self, contexts: Tensor, responses: Tensor) -> tuple[Tensor, ...]:
        """Log-probabilities, entropies and values of response tokens.

        [B, C], [B, R] → [B, R] each, 0 at padding. Entropies are NaN under no_grad: not computed.
        """
        tokens = torch.cat([contexts, responses], dim=1)  # [B, T]
        mask = tokens != self.pad_id
        position_ids = mask.cumsum(dim=1) - mask.long()  # number of real tokens before each (G3)
        where = mask[:, contexts.shape[1] :].nonzero(as_tuple=True)  # N real response tokens
        # Equals self.lm.base_model(input_ids, attention_mask, position_ids).last_hidden_state:
        hidden = self.backbone(tokens.masked_fill(~mask, 0), mask, position_ids)  # [B, T, D]
        # Contexts are padded on the left. Position t predicts token t + 1.
        hidden = hidden[:, contexts.shape[1] - 1 : -1][where]  # [N, D]
        values = self.value_head(hidden).squeeze(1)  # [N] (G1)
        log_softmax = (compute_logits(self.lm, hidden) / self.temperature).log_softmax(dim=-1)
        logprobs = log_softmax.gather(1, responses[where][:, None]).squeeze(1)  # [N] (P1)
        entropies = torch.full_like(logprobs, math.nan)
        if torch.is_grad_enabled():  # skipped in rollouts
            with torch.no_grad():  # only logged; without this line they have a gradient
                entropies = -(log_softmax.exp() * log_softmax).sum(dim=-1)  # [N]
        zeros = logprobs.new_zeros(responses.shape)
        return tuple(zeros.index_put(where, x) for x in (logprobs, entropies, values))


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


def kl_penalized_rewards(kl: Tensor, scores: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """-kl_coef * KL at every token [B, R], plus the score [B] at the last real one (P8)."""
    last = mask.cumsum(dim=1).argmax(dim=1, keepdim=True)  # first maximum: the last True
    return (-kl_coef * kl).scatter_add(1, last, scores[:, None])


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
    values: Tensor  # [B, R] of the sampling policy
    kl: Tensor  # [B, R] per-token estimate: log pi - log pi_ref
    scores: Tensor  # [B] of the reward model, or missing_eos_penalty
    rewards: Tensor  # [B, R] KL penalty, and the score at the last token

    def select(self, rows: Tensor | slice) -> "Rollout":
        """The episodes with these indices."""
        return type(self)._make(x[rows] for x in self)


def shuffle(
    num_episodes: int, args: Args, seed: int, update: int, device: Any
) -> list[list[Tensor]]:
    """For each epoch, the indices of each minibatch (P7). The first has the batch's order (L6)."""
    rng = np.random.default_rng([seed, update, 2])  # 2: a stream of its own
    orders = [np.arange(num_episodes)]  # already random: see `query_rows`
    orders += [rng.permutation(num_episodes) for _ in range(args.num_ppo_epochs - 1)]
    size = num_episodes // args.num_minibatches
    return [list(torch.as_tensor(rows, device=device).split(size)) for rows in orders]


# ------------------------------------ advantages and losses


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale x to unit variance and, if `shift_mean`, mean 0 (P9). 0 where mask is False."""
    mean, var = global_mean_and_var(x, mask)  # population variance, all processes (X11)
    whitened = (x - mean) * torch.rsqrt(var + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return whitened.masked_fill(~mask, 0)


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: [B, R] → advantages and returns [B, R] (P6).

    Rewards and values are 0 after the end of a response; so are advantages and returns.
    """
    advantages = torch.zeros_like(rewards)
    last_gae = torch.zeros_like(rewards[:, 0])
    next_value = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        last_gae = delta + gamma * lam * last_gae
        advantages[:, t] = last_gae
        next_value = values[:, t]
    return advantages, advantages + values


def compute_advantages(minibatch: Rollout, args: Args) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, R] of a minibatch. Rewards may be scaled over it first (P9)."""
    rewards = minibatch.rewards
    if args.whiten_rewards:
        rewards = whiten(rewards, minibatch.mask, shift_mean=False)
    advantages, returns = gae(rewards, minibatch.values, args.gamma, args.lam)
    if args.whiten_advantages:  # (X14)
        advantages = whiten(advantages, minibatch.mask)
    return advantages, returns


def ppo_losses(
    logprobs: Tensor,
    values: Tensor,
    old: Rollout,
    advantages: Tensor,
    returns: Tensor,
    num_tokens: Tensor,
    args: Args,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Policy loss, value loss and statistics of a micro-batch: [B, R] each → scalars.

    `old`: the micro-batch as sampled. `num_tokens`: tokens of the minibatch on all processes, over
    the number of processes, since gradients are averaged over those.
    """

    def mean(x: Tensor) -> Tensor:
        """This micro-batch's part of the minibatch's mean over tokens: [B, R] → scalar (P7)."""
        return masked_sum(x, old.mask) / num_tokens

    log_ratio = logprobs - old.logprobs
    ratio = log_ratio.clamp(max=40).exp()  # no inf: 0 * inf is a NaN gradient where it is clipped
    pg_losses = -advantages * ratio
    pg_losses_clipped = -advantages * ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
    pg_loss = mean(torch.max(pg_losses, pg_losses_clipped))

    low, high = old.values - args.cliprange_value, old.values + args.cliprange_value
    vf_losses = (values - returns) ** 2
    vf_losses_clipped = (values.clamp(low, high) - returns) ** 2
    vf_loss = 0.5 * mean(torch.max(vf_losses, vf_losses_clipped))  # (P10)

    with torch.no_grad():
        stats = {
            "loss/policy_avg": pg_loss,
            "loss/value_avg": vf_loss,
            "policy/approxkl_avg": 0.5 * mean(log_ratio**2),
            "policy/clipfrac_avg": mean((pg_losses_clipped > pg_losses).float()),
            "val/clipfrac": mean((vf_losses_clipped > vf_losses).float()),
            "val/error": mean(vf_losses),  # mean squared error
            "val/vpred": mean(values),
            "val/ratio": mean(ratio),
            "val/ratio_var": mean((ratio - 1) ** 2),  # around 1, not around its mean
        }
    return pg_loss, vf_loss, stats


# -------------------------------------- metrics, evaluation


def rollout_metrics(
    rollout: Rollout, columns: dict[str, list], kl_coef: float, pad_id: int, gold_reward: Any
) -> dict[str, Any]:
    """Metrics of the sampled responses; docs/ppo.md explains each."""
    kl = rollout.kl.sum(dim=1).mean()
    metrics = {
        "objective/scores": rollout.scores.mean(),
        "objective/scores_std": global_mean_and_var(rollout.scores)[1].sqrt(),
        "objective/kl": kl,
        "objective/kl_coef": kl_coef,
        "objective/rlhf_reward": rollout.scores.mean() - kl_coef * kl,
        "objective/score_total": rollout.rewards.sum(dim=1).mean(),  # the same, from tokens
        "objective/entropy": -rollout.logprobs.sum(dim=1).mean(),  # Monte Carlo estimate
        "objective/ended": rollout.ended.float().mean(),
        "objective/response_length": rollout.mask.sum(dim=1).float().mean(),
        "objective/cut_length": (rollout.cut != pad_id).sum(dim=1).float().mean(),
    }
    if gold_reward:
        gold_scores = gold_reward(rollout.queries, rollout.cut, columns)
        metrics["objective/gold_score"] = gold_scores.mean()
    return metrics


SHOWN = [f"objective/{x}" for x in ("scores", "kl", "kl_coef", "rlhf_reward")]  # in curves.png


def check(args: Args, processes: int) -> None:
    """Raise `InputError` for invalid flags, before anything is loaded."""
    check_run(args, processes)
    check_reward(args)
    unit = processes * args.num_minibatches
    cli.check_divisible("batch_size", args.batch_size, unit, "processes * num_minibatches")
    if args.kl_target and args.batch_size >= 5 * args.kl_horizon:  # kl_coef could turn negative
        raise cli.InputError(f"kl_horizon={args.kl_horizon} is below {args.batch_size // 5 + 1}")
    size = args.batch_size // args.num_minibatches
    if size < 8 and (args.whiten_rewards or args.whiten_advantages):  # OpenAI raises here (P9)
        cli.say(f"{size} responses per minibatch are too few to whiten; raise --batch_size")


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
    policy = PolicyAndValue(lm, ids.pad, task.temperature)
    optimizer = AdamTF(policy.parameters(), lr=args.lr, eps=args.adam_eps)
    policy, optimizer = distributed.prepare(accelerator, policy, optimizer, args)  # no DDP
    decoder = Decoder(lm, task.response_length)
    ref_lm = load_lm(args.ref_model or task.base_model, "--ref_model", ids.length, tokenizer)
    ref = distributed.freeze(accelerator, PolicyAndValue(ref_lm, ids.pad, task.temperature))
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

        # 3. Compute the log-probability, value and reward of each token.
        mask = responses != ids.pad
        lengths = (torch.cat([contexts, responses], dim=1) != ids.pad).sum(dim=1)
        logprobs, values, ref_logprobs = torch.zeros(3, *mask.shape, device=device)
        # In the micro-batches of the first epoch: with the same rounding, ratios start at 1 (L6).
        for rows in torch.arange(len(queries), device=device).split(minibatch_size):
            for part in micro_batches(lengths[rows], args.micro_batch_tokens):
                i = rows[part]
                logprobs[i], _, values[i] = policy(contexts[i], responses[i])
                ref_logprobs[i], _, _ = ref(contexts[i], responses[i])
        kl = logprobs - ref_logprobs  # Schulman's k1
        rewards = kl_penalized_rewards(kl, scores, mask, kl_coef)
        episodes = dict(queries=queries, contexts=contexts, responses=responses, cut=cut)
        episodes |= dict(ended=ended, mask=mask, lengths=lengths, scores=scores, rewards=rewards)
        return Rollout(**episodes, logprobs=logprobs, values=values, kl=kl)

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

        # 1-3. Sample, score, compute log-probabilities, values and rewards.
        rows = query_rows(len(table), local_batch_size, seed, update)  # reshuffled every pass
        queries, columns = table[rows].to(device), table.columns(rows)
        uniform = random_numbers(seed, update, device, task.response_length, len(rows))  # [R, B]
        rollout = make_rollout(queries, columns, kl_coef, uniform)

        # 4. For each epoch and minibatch, compute advantages and take one Adam step.
        timer.start("optimize")
        stats: dict[str, Any] = defaultdict(float)  # means over the steps
        for minibatches in shuffle(local_batch_size, args, seed, update, device):
            for minibatch_rows in minibatches:
                minibatch = rollout.select(minibatch_rows)
                advantages, returns = compute_advantages(minibatch, args)
                num_tokens = all_sum(minibatch.mask.sum()) / processes  # per process
                for part in micro_batches(minibatch.lengths, args.micro_batch_tokens):
                    old = minibatch.select(part)
                    logprobs, entropies, values = policy(old.contexts, old.responses)
                    pg_loss, vf_loss, part_stats = ppo_losses(
                        logprobs, values, old, advantages[part], returns[part], num_tokens, args
                    )
                    loss = pg_loss + args.vf_coef * vf_loss
                    loss.backward()
                    part_stats["loss/total"] = loss
                    part_stats["policy/entropy_avg"] = entropies.sum() / num_tokens
                    for name, value in part_stats.items():
                        stats[f"ppo/{name}"] += value.detach() / num_steps
                average_gradients(policy)  # over processes; FSDP2 already did
                if args.max_grad_norm is not None:  # (X8)
                    nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                for name, x in (("returns", returns), ("val", minibatch.values)):
                    mean, var = global_mean_and_var(x, minibatch.mask)
                    stats[f"ppo/{name}/mean"] += mean / num_steps
                    stats[f"ppo/{name}/var"] += var / num_steps

        seconds = timer.stop()  # of each phase's last run, in this update
        metrics = rollout_metrics(rollout, columns, kl_coef, ids.pad, gold_reward) | reward.means()
        metrics = mean_over_processes(metrics | stats, device)
        var_explained = 1 - metrics["ppo/val/error"] / max(metrics["ppo/returns/var"], 1e-8)
        metrics["ppo/val/var_explained"] = var_explained
        metrics |= {"ppo/lr": lr, "ppo/episode": (update + 1) * args.batch_size}
        metrics["time/episodes_per_second"] = args.batch_size / sum(seconds.values())
        run.log(update, metrics | seconds | eval_metrics)

        # 5. Adapt kl_coef to the measured KL.
        kl_coef = next_kl_coef(kl_coef, metrics["objective/kl"], args)
        run.keep_weights(update + 1, lm, tokenizer)  # the weights, every --keep_every updates
        run.checkpoint(update + 1, policy, optimizer, kl_coef)  # all that a resumed run needs

    run.save(lm, tokenizer, value_head=policy.value_head)
    run.log(num_updates, evaluate(num_updates, kl_coef))
    run.finish()


# The defaults above are for sentiment and descriptiveness. Overrides for the other tasks:
STORIES = dict(total_episodes=4096, eval_every=20, batch_size=128, lr=5e-4, kl_coef=0.08)
STORIES |= dict(num_ppo_epochs=2, num_minibatches=2, kl_target=10.0, kl_horizon=1000)
FIXED: dict[str, Any] = dict(kl_target=None, whiten_rewards=False)
CHECKED = FIXED | dict(num_ppo_epochs=1, num_minibatches=4, micro_batch_tokens=8192)
PRESETS: dict[str, dict[str, Any]] = {
    "synthetic": STORIES,
    # Scaling rewards but not their mean adds a constant to each: length would matter.
    "synthetic_eos": STORIES | dict(whiten_rewards=False),
    "cnndm": FIXED | dict(batch_size=32, lr=2e-6, kl_coef=0.01),
    "tldr_2019": FIXED | dict(batch_size=32, lr=2e-6, kl_coef=0.03),
    "tldr": FIXED | dict(lr=3e-6, kl_coef=0.05, micro_batch_tokens=16_384, rollout_batch_size=256),
    "arithmetic": CHECKED
    | dict(total_episodes=16_384, eval_every=16, batch_size=128, lr=3e-4, kl_coef=0.1),
    "gsm8k": CHECKED | dict(total_episodes=112_000, batch_size=256, lr=1e-6, kl_coef=0.001),
}


if __name__ == "__main__":
    cli.run(main, Args, PRESETS)
