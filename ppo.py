"""PPO from human preferences in one file, following OpenAI's lm-human-preferences.

Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593.

    python sft.py --task synthetic              # trains the initial policy, the task's base_model
    python train_reward.py --task synthetic     # trains the reward model
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

Differences from OpenAI's code, such as whitening over all processes (X11), are listed in
docs/details.md. A tag such as (P9) refers to that page, which says more.

Shapes: B sequences, Q query tokens, C context tokens (prefix + query + suffix), R response tokens,
T = C + R, N real response tokens, V vocabulary size, D hidden size. Masks are True at real tokens.
machinery/ has model loading, multiple processes, output files, and faster equivalents of the model
calls; utils.py has small helpers.
"""

import machinery  # noqa: F401  # before torch: sets how torch's idle CPU threads wait

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
from machinery.decoding import DecodingBatch
from machinery.models import ScalarHead, compute_logits, load_lm
from machinery.queries import load_queries
from machinery.runs import Run, check_run
from machinery.tokens import load_tokenizer
from machinery.unpadding import compute_hidden
from train_reward import load_reward
from utils import AdamTF, Timer, TokenIds, accumulate, add_affixes, all_sum, average_gradients
from utils import count_micro_batches, global_mean_and_var, mean_over_processes, micro_batches
from utils import query_rows, random_numbers, sample_token, truncate


@dataclass(frozen=True, kw_only=True)
class Args(cli.RunArgs):
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
    """folder or hub name of the reward model; a --reward_fn can replace it"""
    ref_model: str | None = None
    """reference model of the KL penalty: folder or hub name; default: base_model"""
    kl_coef: NonNegativeFloat = 0.15
    """initial coefficient of the KL penalty"""
    kl_target: PositiveFloat | None = 6.0
    """KL per response that the adaptive kl_coef aims for; None: fixed kl_coef"""
    kl_horizon: PositiveInt = 10_000
    """horizon of the adaptive kl_coef, in episodes"""
    gamma: cli.UnitFloat = 1.0
    """discount factor"""
    lam: cli.UnitFloat = 0.95
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

    # Off by default
    clip_score: PositiveFloat | None = None
    """clip scores, including unfinished_score, to [-clip_score, clip_score]"""

    # Memory and speed. RunArgs has more, such as micro_batch_tokens (real tokens in a forward
    # pass), and the flags of output files.
    rollout_batch_size: PositiveInt = 512
    """sequences that a process samples at once; affects results only by rounding"""


def check(args: Args, processes: int) -> None:
    """Raise `InputError` for invalid flags, before anything is loaded."""
    check_run(args, processes)
    unit = processes * args.num_minibatches
    cli.check_divisible("batch_size", args.batch_size, unit, "processes * num_minibatches")
    if args.kl_target and args.batch_size >= 5 * args.kl_horizon:
        # An update can multiply kl_coef by 1 - 0.2 * batch_size / kl_horizon, which has to be
        # positive.
        raise cli.InputError(f"kl_horizon={args.kl_horizon} is below {args.batch_size // 5 + 1}")


# --------------------------------------------------- models


class PolicyAndValue(nn.Module):
    """A language model with a value head (unused in the reference model).

    Weights are fp32. Under --mixed_precision bf16 the transformer computes in bf16 by autocast
    (`distributed.prepare`); the LM head, the value head, log-probabilities and losses remain fp32.
    """

    def __init__(self, lm: Any, pad_id: int, temperature: float):
        super().__init__()
        self.lm = lm
        self.value_head = ScalarHead(lm.config)
        nn.init.zeros_(self.value_head.weight)  # values start at 0
        nn.init.zeros_(self.value_head.bias)
        self.pad_id = pad_id  # at least V, the number of logits: never sampled
        self.temperature = temperature

    def forward(self, contexts: Tensor, responses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and values of response tokens.

        [B, C] padded on the left, [B, R] padded on the right → [B, R] each, 0 at padding.
        """
        tokens = torch.cat([contexts, responses], dim=1)  # [B, T]
        mask = tokens != self.pad_id
        position_ids = mask.cumsum(dim=1) - mask.long()  # number of real tokens before each
        # At real tokens, equals lm.base_model(input_ids, mask, position_ids).last_hidden_state:
        input_ids = tokens.masked_fill(~mask, 0)  # the pad id has no embedding
        hidden = compute_hidden(self.lm.base_model, input_ids, mask, position_ids)  # [B, T, D]
        hidden = hidden[:, contexts.shape[1] - 1 : -1]  # [B, R, D]: position t predicts token t + 1

        # The rest is computed at the N real response tokens only.
        real = (responses != self.pad_id).nonzero(as_tuple=True)
        hidden = hidden[real]  # [N, D]
        values = self.value_head(hidden).squeeze(1)  # [N]
        # Logits are divided by the sampling temperature in training, too (P1). They are not
        # assigned to a variable, which would keep this large tensor [N, V] in memory.
        log_softmax = (compute_logits(self.lm, hidden) / self.temperature).log_softmax(dim=-1)
        logprobs = log_softmax.gather(1, responses[real][:, None]).squeeze(1)  # [N]
        with torch.no_grad():  # entropies are only logged
            entropies = -log_softmax.exp().mul_(log_softmax).sum(dim=-1)  # [N]

        zeros = torch.zeros(responses.shape, device=responses.device)
        logprobs = zeros.index_put(real, logprobs)  # [B, R]
        entropies = zeros.index_put(real, entropies)
        values = zeros.index_put(real, values)
        return logprobs, entropies, values


# ------------------------------------------------- sampling


@torch.no_grad()
def sample(lm: Any, contexts: Tensor, uniform: Tensor, ids: TokenIds, args: Args) -> Tensor:
    """Sample R tokens after each context: [B, C], random numbers [R, B] → [B, R].

    Samples from the full vocabulary and ignores generation_config: `sample_token` inverts the CDF
    at the numbers in [0, 1). In EOS tasks, every 16 tokens, responses that have ended are dropped
    from the batch; `score_responses` removes what was sampled after the end.
    """
    # `DecodingBatch` calls the language model and manages its cache of keys and values. Without it:
    #
    #     mask = contexts != ids.pad
    #     inputs, cache = contexts.masked_fill(~mask, 0), None
    #     positions = mask.cumsum(dim=1) - mask.long()
    #     for t in range(R):
    #         out = lm(inputs, attention_mask=mask, position_ids=positions, past_key_values=cache)
    #         logits = out.logits[:, -1]                                 # next_logits
    #         tokens = sample_token(logits / temperature, uniform[t])
    #         inputs, cache = tokens[:, None], out.past_key_values       # append
    #         positions = mask.sum(dim=1, keepdim=True)
    #         mask = F.pad(mask, (0, 1), value=True)
    task = args.task
    responses = contexts.new_full((len(contexts), len(uniform)), ids.pad)
    batch = DecodingBatch(lm, contexts, contexts != ids.pad, max_new_tokens=len(uniform))
    for t in range(len(uniform)):
        logits = batch.next_logits() / task.temperature  # [b, V]
        # batch.rows [b]: the rows of `contexts` that are still in the batch; initially all.
        tokens = sample_token(logits, uniform[t][batch.rows])  # [b]
        responses[batch.rows, t] = tokens
        batch.append(tokens)
        if task.eos_task and t % 16 == 15:  # not every step: `drop` waits for the GPU
            _, finished = truncate(responses[batch.rows], ids)
            batch.drop(finished)
            if len(batch.rows) == 0:
                break
    return responses


def sample_in_batches(
    lm: Any, contexts: Tensor, uniform: Tensor, ids: TokenIds, args: Args
) -> Tensor:
    """Sample in batches of contexts of similar length: [B, C], [R, B] → [B, R]."""
    responses = contexts.new_empty(uniform.T.shape)
    context_lengths = (contexts != ids.pad).sum(dim=1)
    order = context_lengths.argsort(stable=True)  # `DecodingBatch` drops shared padding
    for rows in order.split(args.rollout_batch_size):
        responses[rows] = sample(lm, contexts[rows], uniform[:, rows], ids, args)
    return responses


# --------------------------------- scores, rewards, rollout


def score_responses(
    reward: Callable, queries: Tensor, responses: Tensor, columns: dict, ids: TokenIds, args: Args
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Cut responses [B, R] after the first truncate token, then score them (P5).

    Truncate tokens before position `ids.truncate_after` do not count. A response without one that
    counts is unfinished: it is not cut, and `unfinished_score` replaces its score. `columns`
    holds the data set's columns, for a --reward_fn (see `main`).
    Returns scores [B], cut responses [B, R], which of them are finished [B] (all, if the task has
    no truncate token), and other numbers to log: {metric: [B]}.
    """
    cut, finished = truncate(responses, ids)
    scores, components = reward(queries, cut, columns)
    scores = torch.where(finished, scores, args.task.unfinished_score)
    if args.clip_score is not None:
        scores = scores.clamp(-args.clip_score, args.clip_score)
    return scores, cut, finished, components


def kl_penalized_rewards(kl: Tensor, scores: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """-kl_coef * KL at every token [B, R], plus the score [B] at the last real one."""
    last = mask.cumsum(dim=1).argmax(dim=1, keepdim=True)  # [B, 1]: index of the first maximum
    rewards = -kl_coef * kl
    return rewards.scatter_add(1, last, scores[:, None])


def next_kl_coef(kl_coef: float, kl: float, args: Args) -> float:
    """Proportional controller: raise kl_coef if the KL is above kl_target."""
    if args.kl_target is None:
        return kl_coef
    error = kl / args.kl_target - 1
    error = min(max(error, -0.2), 0.2)
    return kl_coef * (1 + error * args.batch_size / args.kl_horizon)


class Rollout(NamedTuple):
    """The episodes of one update or evaluation. Per-token floats are 0 at padding."""

    queries: Tensor  # [B, Q] padded on the left; the reward model reads queries, then cut
    contexts: Tensor  # [B, C] with prefix and suffix; what the policy reads
    responses: Tensor  # [B, R]; in EOS tasks, padding after the end
    cut: Tensor  # [B, R] responses as they were scored
    finished: Tensor  # [B] cut at a truncate token, or the task has none
    mask: Tensor  # [B, R] all tokens; in EOS tasks, those up to the end
    lengths: Tensor  # [B] real tokens of context and response
    logprobs: Tensor  # [B, R] under the sampling policy
    values: Tensor  # [B, R] of the sampling policy
    kl: Tensor  # [B, R] per-token estimate: log pi - log pi_ref
    scores: Tensor  # [B] from `score_responses`
    rewards: Tensor  # [B, R] KL penalty, and the score at the last token

    def select(self, rows: Tensor | slice) -> "Rollout":
        """The episodes with these indices."""
        return type(self)(*[x[rows] for x in self])


@torch.no_grad()
def compute_logprobs(
    policy: Any,
    ref: Any,
    contexts: Tensor,
    responses: Tensor,
    lengths: Tensor,
    minibatch_size: int,
    args: Args,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and values of the policy, and log-probabilities of the reference.

    [B, C], [B, R] → [B, R] each. Uses the minibatches and micro-batches of the first epoch: the
    last bits of a forward pass depend on how it is batched, and this way all ratios are exactly 1
    at the first Adam step (L6).
    """
    logprobs = torch.zeros(responses.shape, device=responses.device)
    values = torch.zeros_like(logprobs)
    ref_logprobs = torch.zeros_like(logprobs)
    for minibatch_rows in torch.arange(len(lengths), device=lengths.device).split(minibatch_size):
        minibatch_lengths = lengths[minibatch_rows]
        # The count is the same on all processes, as FSDP2 requires.
        count = count_micro_batches(minibatch_lengths, args.micro_batch_tokens)
        for part in micro_batches(minibatch_lengths, count):
            rows = minibatch_rows[part]
            logprobs[rows], _, values[rows] = policy(contexts[rows], responses[rows])
            ref_logprobs[rows], _, _ = ref(contexts[rows], responses[rows])
    return logprobs, values, ref_logprobs


def make_rollout(
    policy: Any,
    ref: Any,
    reward: Callable,
    queries: Tensor,
    responses: Tensor,
    columns: dict,
    kl_coef: float,
    minibatch_size: int,
    ids: TokenIds,
    args: Args,
) -> tuple[Rollout, dict[str, Tensor]]:
    """Steps 2 and 3 for queries [B, Q] and sampled responses [B, R].

    Returns the episodes, and other numbers to log: {metric: [B]}.
    """
    # 2. Score each response with the reward model.
    scores, cut, finished, components = score_responses(
        reward, queries, responses, columns, ids, args
    )
    if args.task.eos_task:
        responses = cut  # train on nothing after the end

    # 3. Compute the log-probability, value and reward of each token.
    contexts = add_affixes(queries, ids)  # [B, C]
    mask = responses != ids.pad
    lengths = (contexts != ids.pad).sum(dim=1) + mask.sum(dim=1)
    logprobs, values, ref_logprobs = compute_logprobs(
        policy, ref, contexts, responses, lengths, minibatch_size, args
    )
    kl = logprobs - ref_logprobs  # Schulman's k1
    rollout = Rollout(
        queries=queries,
        contexts=contexts,
        responses=responses,
        cut=cut,
        finished=finished,
        mask=mask,
        lengths=lengths,
        logprobs=logprobs,
        values=values,
        kl=kl,
        scores=scores,
        rewards=kl_penalized_rewards(kl, scores, mask, kl_coef),
    )
    return rollout, components


def epoch_order(epoch: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """The order [size] in which an epoch goes through the batch (P7).

    The first epoch keeps the batch's order, which is already random; `compute_logprobs` relies on
    this.
    """
    if epoch == 0:
        return np.arange(size)
    return rng.permutation(size)


# ------------------------------------ advantages and losses


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale x to unit variance and, if `shift_mean`, mean 0. 0 where mask is False."""
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
    """Advantages and returns [B, R] of a minibatch, with its rewards and advantages whitened (P9).

    Scaling rewards but keeping their mean adds a constant, mean * (1 - 1 / std), to every token's
    reward. If lengths differ, as in EOS tasks, that rewards or punishes length: set
    whiten_rewards=False.
    """
    rewards = minibatch.rewards
    if args.whiten_rewards:
        rewards = whiten(rewards, minibatch.mask, shift_mean=False)
    advantages, returns = gae(rewards, minibatch.values, args.gamma, args.lam)
    if args.whiten_advantages:
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
    """Policy loss, value loss and metrics of a micro-batch: [B, R] each → scalars.

    `old`: the micro-batch as sampled. `num_tokens`: the number of tokens in the minibatch,
    averaged over processes. Losses are shares: their sum over micro-batches, averaged over
    processes, is the mean over all tokens of the minibatch (P7).
    """

    def share_of_mean(x: Tensor) -> Tensor:
        return x.masked_fill(~old.mask, 0).sum() / num_tokens

    log_ratio = logprobs - old.logprobs
    # Without the clamp, exp can overflow; where `max` picks the clipped loss, the backward pass
    # would then compute 0 * inf = NaN. At 40, the square of the ratio, a metric, is finite, too.
    ratio = log_ratio.clamp(max=40).exp()
    clipped_ratio = ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
    pg_losses = -advantages * ratio
    pg_losses_clipped = -advantages * clipped_ratio
    pg_loss = share_of_mean(torch.max(pg_losses, pg_losses_clipped))

    lowest = old.values - args.cliprange_value
    highest = old.values + args.cliprange_value
    vf_losses = (values - returns) ** 2
    vf_losses_clipped = (values.clamp(lowest, highest) - returns) ** 2
    vf_loss = 0.5 * share_of_mean(torch.max(vf_losses, vf_losses_clipped))

    with torch.no_grad():
        stats = {
            "ppo/loss/policy_avg": pg_loss,
            "ppo/loss/value_avg": vf_loss,
            "ppo/policy/approxkl_avg": 0.5 * share_of_mean(log_ratio**2),
            "ppo/policy/clipfrac_avg": share_of_mean((pg_losses_clipped > pg_losses).float()),
            "ppo/val/clipfrac": share_of_mean((vf_losses_clipped > vf_losses).float()),
            "ppo/val/error": share_of_mean(vf_losses),  # mean squared error
            "ppo/val/vpred": share_of_mean(values),
            "ppo/val/ratio": share_of_mean(ratio),  # the policy's; the name is TRL's
            "ppo/val/ratio_var": share_of_mean((ratio - 1) ** 2),  # around 1, not around its mean
        }
    return pg_loss, vf_loss, stats


# -------------------------------------------------- metrics


def rollout_metrics(
    rollout: Rollout, components: dict[str, Tensor], kl_coef: float, ids: TokenIds
) -> dict[str, Any]:
    """Metrics of this process's responses; variances are over all processes (docs/ppo.md)."""
    kl = rollout.kl.sum(dim=1).mean()
    scores = rollout.scores.mean()
    _, scores_var = global_mean_and_var(rollout.scores)
    metrics = {
        "objective/scores": scores,
        "objective/scores_std": scores_var.sqrt(),
        "objective/kl": kl,
        "objective/kl_coef": kl_coef,
        "objective/rlhf_reward": scores - kl_coef * kl,
        "objective/score_total": rollout.rewards.sum(dim=1).mean(),  # the same, from tokens
        "objective/entropy": -rollout.logprobs.sum(dim=1).mean(),  # Monte Carlo estimate
        "objective/ended": rollout.finished.float().mean(),
        "objective/response_length": rollout.mask.sum(dim=1).float().mean(),
        "objective/cut_length": (rollout.cut != ids.pad).sum(dim=1).float().mean(),
    }
    for name, x in components.items():
        _, var = global_mean_and_var(x)
        metrics[name] = x.mean()
        metrics[f"{name}_std"] = var.sqrt()
    return metrics


def minibatch_metrics(minibatch: Rollout, returns: Tensor) -> dict[str, Tensor]:
    """Mean and variance of a minibatch's returns and old values, over all processes."""
    returns_mean, returns_var = global_mean_and_var(returns, minibatch.mask)
    values_mean, values_var = global_mean_and_var(minibatch.values, minibatch.mask)
    return {
        "ppo/returns/mean": returns_mean,
        "ppo/returns/var": returns_var,
        "ppo/val/mean": values_mean,
        "ppo/val/var": values_var,
    }


# ----------------------------------------------------- main


def main(args: Args) -> None:
    """Load everything; repeat: sample, score, optimize; save the policy."""
    # `accelerate launch` runs this function in several processes. Each samples and trains on
    # batch_size / processes episodes per update. They communicate in all_sum, global_mean_and_var,
    # average_gradients, mean_over_processes and count_micro_batches; under FSDP2, also wherever
    # weights are used.
    accelerator = distributed.start(args)
    device, processes = accelerator.device, accelerator.num_processes
    check(args, processes)
    # Task fields used in this file (see data/tasks.py): base_model, response_length, temperature,
    # eos_task, unfinished_score and gold_fn (a true score, which is only logged).
    task = args.task
    seed = args.seed + 100003 * accelerator.process_index  # own order of queries, own samples (G6)

    # table[rows] → queries [B, Q]; table.columns(rows) → {name: B values} of the data set;
    # reward(queries, responses, columns) → scores [B] and other numbers to log: {metric: [B]}, such
    # as "objective/gold_score". Scores come from the reward model, normalized by train_reward.py,
    # or from the task's --reward_fn, a Python function.
    tokenizer, ids = load_tokenizer(task, task.response_length)  # pad, truncate tokens, affixes
    heldout, table = load_queries(task, tokenizer, ids).hold_out(args.eval_queries)
    reward = load_reward(args, tokenizer, ids, accelerator)

    # `load_lm` checks that a model can read C + R tokens, and that the reference has the same
    # tokenizer. `prepare` and `freeze` move a model to the device and set its precision. A model
    # stays the same object (no DDP wrapper; FSDP2 shards it in place): `lm` is still the policy's.
    # Sampling calls it by itself, without `policy`: `inference` turns on its autocast.
    lm = load_lm(task.base_model, length=ids.total_length)  # no dropout (P4)
    policy = PolicyAndValue(lm, ids.pad, task.temperature)
    optimizer = AdamTF(policy.parameters(), lr=args.lr, eps=args.adam_eps)
    policy, optimizer = distributed.prepare(accelerator, policy, optimizer, args)
    ref_lm = load_lm(
        args.ref_model or task.base_model,
        flag="--ref_model",  # for errors
        length=ids.total_length,
        tokenizer=tokenizer,
    )
    ref = distributed.freeze(accelerator, PolicyAndValue(ref_lm, ids.pad, task.temperature))

    local_batch_size = args.batch_size // processes
    minibatch_size = local_batch_size // args.num_minibatches
    num_steps = args.num_ppo_epochs * args.num_minibatches  # Adam steps per update
    num_updates = math.ceil(args.total_episodes / args.batch_size)
    cli.say(f"{len(table)} training queries, {len(heldout)} held out, {num_updates} updates")
    timer = Timer(device)
    shown = ["objective/scores", "objective/kl", "objective/kl_coef", "objective/rlhf_reward"]
    if task.gold_fn:
        shown.append("objective/gold_score")
    run = Run(args, num_updates, shown, accelerator)  # `shown` in the terminal and in curves.png
    start, kl_coef = run.restore(policy, optimizer, args.kl_coef)  # start = 0 if not resumed

    def evaluate(update: int, kl_coef: float) -> dict[str, float]:
        """Steps 1 to 3 on held-out queries, with the same random numbers each time; not timed."""
        # This process's share, or all rows if they cannot be split evenly.
        rows = distributed.own_rows(accelerator, len(heldout))
        queries = heldout[rows].to(device)
        columns = heldout.columns(rows)
        # Update u uses random numbers with index u; evaluations, those with index num_updates.
        uniform = random_numbers(args.seed, num_updates, device, task.response_length, len(heldout))
        contexts = add_affixes(queries, ids)
        with distributed.inference(accelerator, policy):
            responses = sample_in_batches(lm, contexts, uniform[:, rows], ids, args)
        rollout, components = make_rollout(
            policy, ref, reward, queries, responses, columns, kl_coef, minibatch_size, ids, args
        )
        kl = rollout.kl.sum(dim=1)
        samples = {
            "query": rollout.queries,
            "response": rollout.cut,
            "score": rollout.scores,
            "kl": kl,
            "total": rollout.scores - kl_coef * kl,
            **components,
        }
        run.log_samples(update, samples, tokenizer, ids)
        metrics = mean_over_processes(rollout_metrics(rollout, components, kl_coef, ids), device)
        return {"eval/" + name.removeprefix("objective/"): x for name, x in metrics.items()}

    for update in range(start, num_updates):
        reward.step = update  # for a --reward_fn with the parameter `step`
        eval_metrics = evaluate(update, kl_coef) if update % args.eval_every == 0 else {}
        lr = args.lr * (1 - update / num_updates) if args.anneal_lr else args.lr
        for group in optimizer.param_groups:
            group["lr"] = lr

        # 1. Sample a response to each query.
        rows = query_rows(len(table), local_batch_size, seed, update)  # a new order in every pass
        queries = table[rows].to(device)  # [B, Q]
        uniform = random_numbers(seed, update, device, task.response_length, len(rows))  # [R, B]
        timer.start("sample")
        contexts = add_affixes(queries, ids)  # [B, C]
        with distributed.inference(accelerator, policy):  # autocast; FSDP2 gathers weights
            responses = sample_in_batches(lm, contexts, uniform, ids, args)  # [B, R]

        # 2-3. Score the responses; compute log-probabilities, values and rewards of their tokens.
        timer.start("score")
        columns = table.columns(rows)
        rollout, components = make_rollout(
            policy, ref, reward, queries, responses, columns, kl_coef, minibatch_size, ids, args
        )

        # 4. For each epoch and minibatch, compute advantages and take one Adam step.
        timer.start("optimize")
        stats: dict[str, Any] = defaultdict(float)  # means over the steps, detached
        rng = np.random.default_rng([seed, update, 2])  # 2: not the stream of `query_rows`
        for epoch in range(args.num_ppo_epochs):
            order = epoch_order(epoch, local_batch_size, rng)
            for minibatch_rows in torch.as_tensor(order, device=device).split(minibatch_size):
                minibatch = rollout.select(minibatch_rows)
                advantages, returns = compute_advantages(minibatch, args)
                # Averaged over processes, since `average_gradients` averages, too:
                num_tokens = all_sum(minibatch.mask.sum()) / processes
                count = count_micro_batches(minibatch.lengths, args.micro_batch_tokens)
                for part in micro_batches(minibatch.lengths, count):
                    old = minibatch.select(part)
                    logprobs, entropies, values = policy(old.contexts, old.responses)
                    pg_loss, vf_loss, part_metrics = ppo_losses(
                        logprobs, values, old, advantages[part], returns[part], num_tokens, args
                    )
                    loss = pg_loss + args.vf_coef * vf_loss
                    loss.backward()
                    part_metrics["ppo/loss/total"] = loss
                    part_metrics["ppo/policy/entropy_avg"] = entropies.sum() / num_tokens
                    accumulate(stats, part_metrics, num_steps)
                average_gradients(policy)  # over processes; nothing to do under FSDP2
                if args.max_grad_norm is not None:
                    nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                accumulate(stats, minibatch_metrics(minibatch, returns), num_steps)
        seconds = timer.stop()

        # 5. Adapt kl_coef to the measured KL, for the next update.
        stats.update(rollout_metrics(rollout, components, kl_coef, ids))
        metrics = mean_over_processes(stats, device)
        kl_coef = next_kl_coef(kl_coef, metrics["objective/kl"], args)

        # Log and save.
        var_explained = 1 - metrics["ppo/val/error"] / max(metrics["ppo/returns/var"], 1e-8)
        metrics["ppo/val/var_explained"] = var_explained
        metrics["ppo/lr"] = lr
        metrics["ppo/episode"] = (update + 1) * args.batch_size
        metrics["time/episodes_per_second"] = args.batch_size / sum(seconds.values())
        run.log(update, {**metrics, **seconds, **eval_metrics})
        run.keep_weights(update + 1, lm, tokenizer)  # the weights, every --keep_every updates
        run.checkpoint(update + 1, policy, optimizer, kl_coef)  # every --save_every updates

    run.save(lm, tokenizer, value_head=policy.value_head)
    reward.step = num_updates
    run.log(num_updates, evaluate(num_updates, kl_coef))
    run.finish()


# The defaults above are for sentiment and descriptiveness. Overrides for the other tasks:
SYNTHETIC = dict(
    total_episodes=4096,
    eval_every=20,
    batch_size=128,
    num_ppo_epochs=2,
    num_minibatches=2,
    lr=5e-4,
    kl_coef=0.08,
    kl_target=10.0,
    kl_horizon=1000,
)
FIXED_KL_RAW_REWARDS = dict(kl_target=None, whiten_rewards=False)
# Tasks whose reward_fn compares with the right answer:
ANSWERS = dict(FIXED_KL_RAW_REWARDS, num_ppo_epochs=1, num_minibatches=4, micro_batch_tokens=8192)
PRESETS: dict[str, dict[str, Any]] = {
    "synthetic": SYNTHETIC,
    "synthetic_eos": dict(SYNTHETIC, whiten_rewards=False),
    "cnndm": dict(FIXED_KL_RAW_REWARDS, batch_size=32, lr=2e-6, kl_coef=0.01),
    "tldr_2019": dict(FIXED_KL_RAW_REWARDS, batch_size=32, lr=2e-6, kl_coef=0.03),
    "tldr": dict(
        FIXED_KL_RAW_REWARDS,
        lr=3e-6,
        kl_coef=0.05,
        micro_batch_tokens=16_384,
        rollout_batch_size=256,
    ),
    "arithmetic": dict(
        ANSWERS, total_episodes=16_384, eval_every=16, batch_size=128, lr=3e-4, kl_coef=0.1
    ),
    "gsm8k": dict(ANSWERS, total_episodes=112_000, batch_size=256, lr=1e-6, kl_coef=0.001),
}


if __name__ == "__main__":
    cli.run(main, Args, PRESETS)
