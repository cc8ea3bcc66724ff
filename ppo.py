"""PPO from human preferences, as OpenAI's `lm-human-preferences` runs it (Ziegler et al. 2019), in one file.

    python sft.py --task synthetic && python train_reward.py --task synthetic && python ppo.py --task synthetic
    accelerate launch ppo.py --task sentiment

Deviations from its algorithm: whitening moments are taken over all processes (X11), and old log-probabilities come from
the training forward instead of the sampling loop (L6); both change nothing on one process in exact arithmetic. Those
of its data: README.

Letters: `B` sequences of one process, `C` context tokens (prefix + query + suffix), `Q` query tokens, `R` response
tokens, `V` vocabulary. A minibatch is one optimizer step, a micro-batch one forward. Masks are True at real tokens.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

import packing
import records
import utils
from tasks import Beta, Count, NonNegative, Positive, Share, Shown, Size, Task, Whole, cli, load_function, parse_args


@dataclass(frozen=True)
class Args:
    """PPO from human preferences."""

    task: Task
    seed: Whole = 1  # random seed; process r uses seed + 100003 r (G6)
    total_episodes: Count = 1_000_000  # responses of the whole run, over all processes; rounded up to whole batches
    batch_size: Size = 512  # episodes per update, over all processes
    samples_per_prompt: Size = 1  # episodes of one query in an update
    num_minibatches: Count = 1  # optimizer steps per epoch (P7)
    num_ppo_epochs: Size = 4  # passes over the batch per update
    max_kl: Positive | None = None  # an epoch with a ppo/policy/approxkl_avg above this is its update's last (X12)
    micro_batch_tokens: Count = 4096  # tokens per forward of each model on one process: memory only (P7)
    rollout_batch_size: Count = 256  # sequences sampled at a time on one process: memory only (X10)
    lr: NonNegative = 1e-5  # learning rate of the first update, or behind the warm-up; falls linearly to 0 (G5)
    lr_schedule: Literal["linear", "constant", "cosine"] = "linear"  # how lr falls, or that it does not (X8)
    warmup_updates: Whole = 0  # updates in which lr rises linearly, from lr / warmup_updates (X8)
    adam_eps: Positive = 1e-5  # TensorFlow's ε̂ (A1)
    adam_beta1: Beta = 0.9  # Adam's decay of the gradient's running mean (X8)
    adam_beta2: Beta = 0.999  # and of its square's (X8)
    weight_decay: NonNegative = 0.0  # AdamW's: a step takes lr times this share off every weight (X8)
    max_grad_norm: Positive | None = None  # gradients are scaled down to this norm (X8)
    kl_coef: NonNegative = 0.15  # β at the start: weight of the KL penalty (P8)
    kl_target: Positive | None = 6.0  # nats per response that β is steered to; None keeps β fixed (P11)
    kl_horizon: Count = 10_000  # time scale of β's changes, in episodes (P11)
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"  # of log π − log π_ref = x: x, x² / 2, or exp(−x) − 1 + x (X3)
    clip_score: Positive | None = None  # scores are clipped to ± this (X2)
    gamma: Share = 1.0  # discount (P6)
    lam: Share = 0.95  # λ of generalised advantage estimation (P6)
    cliprange: Positive = 0.2  # the probability ratio is clipped to 1 ± this
    cliprange_value: Positive = 0.2  # a new value is clipped to the old one ± this (P10)
    vf_coef: NonNegative = 0.1  # weight of the value loss (P10)
    value_warmup_updates: Whole = 0  # updates at the start in which the value head alone learns (X6)
    whiten_rewards: bool = True  # scale the rewards of a minibatch to unit variance, mean kept (P9)
    whiten_advantages: bool = True  # scale the advantages of a minibatch to unit variance, mean 0 (P9, X14)
    reward_model: str | None = None  # its folder; None: models/<task>/train_reward, the last one trained
    reward_fn: str | None = None
    """`module:function` or `path.py:function` of (queries, responses) → floats, in place of the reward model; with a
    third argument it gets the reward model's scores there"""
    gradient_checkpointing: bool = False  # less memory for activations, one more forward
    compile: bool = False  # sample with a compiled step, on a GPU as a CUDA graph: faster, behind a minute of compiling
    tf32: bool = False  # fp32 matrix products in TensorFloat-32 on NVIDIA GPUs: faster, 10 bits of mantissa
    output_dir: str | None = None  # new folder for the policy; None: the run's, with a link to it at models/<task>/ppo
    run_name: str | None = None  # new folder in runs/; None: task, script, seed and time
    shown: Shown = Shown()
    save_every: Count | None = None  # updates between checkpoints that `--resume` goes on from; None: see save_minutes
    save_minutes: Positive | None = None
    """minutes between two checkpoints; with neither only SIGTERM, SIGUSR1 and SIGHUP make one, and stop the run"""
    resume: str | None = None
    """runs/<name> to go on with, by the same command; `latest`: the newest of this task and script with a checkpoint"""
    eval_every: Count = 50  # updates between evaluations on held-out queries: metrics eval/… and a table of samples
    eval_queries: Count = 256  # number of queries that are kept out of training for evaluation


SMALL = dict(total_episodes=4096, batch_size=128, num_minibatches=2, num_ppo_epochs=2, lr=5e-4) | dict(
    kl_coef=0.08, kl_target=10.0, kl_horizon=1000, eval_every=20
)  # 32 updates of a model of one million parameters: a higher lr, and β found faster
SUMMARIES = dict(kl_target=None, whiten_rewards=False)
PRESETS: dict[str, dict[str, Any]] = {  # what differs from the defaults above, by task
    "synthetic": SMALL,
    "synthetic_eos": SMALL | dict(whiten_rewards=False),  # kept means would reward short responses, see LOG.md
    "cnndm": SUMMARIES | dict(batch_size=32, lr=2e-6, kl_coef=0.01),
    "tldr_2019": SUMMARIES | dict(batch_size=32, lr=2e-6, kl_coef=0.03),
    "tldr": SUMMARIES | dict(lr=3e-6, kl_coef=0.05, rollout_batch_size=64),
}
SCRIPT = Path(__file__)  # run and weight folders are named after this file: a copy has its own


# ------------------------------------------------------------------------------------------------ policy and sampling


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """P1: logits [B, R, V], tokens [B, R] → log-probabilities [B, R] of the tokens and entropies [B, R] (no gradient).
    At a pad, which is no token of the vocabulary, the log-probability is an arbitrary finite number."""
    tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return packing.ChosenLogprobs.apply(logits.float(), tokens, temperature)  # fp32, also under autocast


class Policy(nn.Module):
    """A language model that gives log-probabilities: a policy without a critic (L5), or the reference."""

    def __init__(self, lm: PreTrainedModel, pad_id: int, temperature: float):
        super().__init__()
        self.lm, self.pad_id, self.temperature = lm, pad_id, temperature

    def hidden_states(self, contexts: Tensor, responses: Tensor) -> Tensor:
        """[B, C], [B, R] → [B, R, D], each where its token is predicted; the vocabulary head sees these only."""
        tokens = torch.cat([contexts, responses], dim=1)
        where = torch.arange(contexts.shape[1] - 1, tokens.shape[1] - 1, device=tokens.device).expand_as(responses)
        return packing.hidden_states(self.lm.base_model, tokens, where, self.pad_id, prompt=contexts.shape[1])  # G3

    def forward(self, contexts: Tensor, responses: Tensor) -> tuple[Tensor, Tensor]:
        """[B, C], [B, R] → log-probabilities and entropies [B, R]. The one forward behind old and new numbers (L6)."""
        logits = packing.vocabulary_logits(self.lm, self.hidden_states(contexts, responses))
        return token_logprobs(logits, responses, self.temperature)


class PolicyAndValue(Policy):
    """One trunk, two heads: the language model's and a scalar value on every token (G1)."""

    def __init__(self, lm: PreTrainedModel, pad_id: int, temperature: float):
        super().__init__(lm, pad_id, temperature)
        self.value_head = utils.Float32Head(lm.config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)  # P2
        nn.init.zeros_(self.value_head.bias)

    def forward(self, contexts: Tensor, responses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, C], [B, R] → log-probabilities, entropies and values [B, R] (L6), see `Policy`."""
        hidden = self.hidden_states(contexts, responses)
        logits = packing.vocabulary_logits(self.lm, hidden)
        return *token_logprobs(logits, responses, self.temperature), self.value_head(hidden).squeeze(-1)


def draw(logits: Tensor, uniform: Tensor, top_p: float = 1.0) -> Tensor:
    """One token a row from softmax(logits) by inverting its CDF. logits [B, V], uniform [B, 1] in [0, 1) → [B, 1].
    In fp64, and below the CDF's very top: a token of probability 0 is never drawn, not even at u = 0 or by rounding."""
    probs = logits.to(uniform.device).double().softmax(dim=-1)
    if top_p < 1:  # X7: only the likeliest tokens, the fewest that together have this probability
        falling = probs.sort(dim=-1, descending=True).values
        least = falling.where(falling.cumsum(dim=-1) - falling < top_p, 1).amin(dim=-1, keepdim=True)
        probs = probs.masked_fill(probs < least, 0)
    cdf = probs.cumsum(dim=-1)
    total = cdf[:, -1:]
    point = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, point, right=True).to(logits.device)


@torch.no_grad()
def sample(lm: PreTrainedModel, contexts: Tensor, uniform: Tensor, task: Task, ids: utils.Ids) -> Tensor:
    """G4: exactly R tokens for each left-padded context [B, C], drawn with `uniform` [R, B, 1] → [B, R]: full
    vocabulary unless the task says otherwise (X7), no stop at EOS, no `generation_config` of the checkpoint. Prefill
    once, then a token a step over a static cache."""
    start, response_length = contexts.shape[1], len(uniform)
    inputs = packing.model_inputs(F.pad(contexts, (0, response_length), value=0), ids.pad)  # 0: a token to come
    mask, positions = inputs["attention_mask"], inputs["position_ids"]  # G3
    mask[:, start:] = 0  # filled in, never grown: static shapes, and alibi is built from it
    cache = packing.empty_cache(lm, len(contexts), start + response_length)
    responses = torch.empty(len(contexts), response_length, dtype=torch.long, device=contexts.device)
    tokens, begin = inputs["input_ids"][:, :start], 0
    every = dict(attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
    for t in range(response_length):
        end = start + t
        logits = lm(tokens, position_ids=positions[:, begin:end], **every).logits[:, -1]
        logits = logits.float() / task.temperature  # P1
        if t + 1 < task.min_response_length:
            logits[:, ids.truncate] = -math.inf  # X7: no end yet
        tokens, begin = draw(logits, uniform[t], task.top_p), end
        responses[:, t], mask[:, end] = tokens[:, 0], 1
    return responses


def sample_all(lm: nn.Module, contexts: Tensor, task: Task, ids: utils.Ids, gen: torch.Generator, size: int) -> Tensor:
    """`sample` for any number of rows: `size` at a time, by length, trimmed; each with its own random numbers (X10).
    [B, C] → [B, R]"""
    shape = task.response_length, len(contexts), 1
    uniform = torch.rand(shape, generator=gen, device=gen.device, dtype=torch.float64)
    responses = torch.empty(shape[1], shape[0], dtype=torch.long, device=contexts.device)
    for rows, width in packing.by_length(packing.row_lengths(contexts, ids.pad), size):
        responses[rows] = sample(lm, contexts[rows, -width:], uniform[:, rows], task, ids)
    return responses


# --------------------------------------------------------------------------------------------------- reward and score


@torch.no_grad()
def logprobs_of(policy: nn.Module, contexts: Tensor, responses: Tensor, sizes: np.ndarray, size: int) -> Tensor:
    """Log-probabilities [B, R] that a policy, such as the reference, gives the responses [B, R] behind contexts [B, C];
    `sizes` [B, 2] as in `Rollout`, `size` tokens a forward."""
    out = torch.empty(responses.shape, device=responses.device)
    for rows in utils.micro_batches(sizes, size):
        out[rows] = policy(contexts[rows], responses[rows])[0]
    return out


def truncate(responses: Tensor, token: int | None, after: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """P5: cut each response behind its first `token` at or after position `after`, pads behind it.
    [B, R] → the cut responses [B, R], and whether the token was there [B]; always True if `token` is None."""
    if token is None:
        return responses, torch.ones_like(responses[:, 0]).bool()
    positions = torch.arange(responses.shape[1], device=responses.device)
    hits = (responses == token) & (positions >= after)
    ended = hits.any(dim=1)
    last = torch.where(ended, hits.byte().argmax(dim=1), responses.shape[1] - 1)
    return responses.masked_fill(positions > last[:, None], pad_id), ended


class Score(NamedTuple):
    """What scoring makes of B responses."""

    scores: Tensor  # [B] reward, or the penalty
    cut: Tensor  # [B, R] what the reward model saw
    ended: Tensor  # [B] whether the truncate token was there


def score_responses(reward: Callable, queries: Tensor, responses: Tensor, task: Task, ids: utils.Ids) -> Score:
    """P5: cut [B, R], ask `reward`(queries, cut) → [B], and put the penalty where the truncate token is missing."""
    cut, ended = truncate(responses, ids.truncate, task.truncate_after, ids.pad)
    return Score(torch.where(ended, reward(queries, cut), task.missing_eos_penalty), cut, ended)


def kl_terms(log_ratio: Tensor, estimator: str) -> Tensor:
    """X3: KL(π‖π_ref) as each token [B, R] that π drew estimates it, from log π − log π_ref; k3's r is π_ref / π."""
    return {"k1": log_ratio, "k2": 0.5 * log_ratio**2, "k3": (-log_ratio).expm1() + log_ratio}[estimator]


def kl_penalised_rewards(
    logprobs: Tensor, ref_logprobs: Tensor, scores: Tensor, mask: Tensor, kl_coef: float, estimator: str = "k1"
) -> Tensor:
    """P8: −β·(log π − log π_ref) at every token [B, R], the score [B] added at the last real one. [B, R]"""
    rewards = -kl_coef * kl_terms(logprobs - ref_logprobs, estimator)
    return rewards.scatter_add(1, mask.sum(dim=1, keepdim=True) - 1, scores[:, None])


def next_kl_coef(kl_coef: float, kl: float, args: Args) -> float:
    """P11: β of the next update from this one's KL (nats per response, mean over the batch)."""
    if args.kl_target is None:
        return kl_coef
    error = min(max(kl / args.kl_target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * args.batch_size / args.kl_horizon)


# ------------------------------------------------------------------------------------------------------------ rollout


class Rollout(NamedTuple):
    """What one update learns from (X10); the rows are episodes. Past a response's end the [B, R] numbers are 0."""

    sizes: np.ndarray  # [B, 2] tokens of each episode, and a number for its prompt, on the host: for micro-batches
    contexts: Tensor  # [B, C] prefix + query + suffix, left-padded: what policy and reference read
    responses: Tensor  # [B, R] as sampled; pads after EOS in an EOS task
    mask: Tensor  # [B, R] True through the end of the response; all True unless the task ends at EOS (X9)
    logprobs: Tensor  # [B, R] of the sampling policy (L6)
    values: Tensor  # [B, R]
    ref_logprobs: Tensor  # [B, R]
    scores: Tensor  # [B] the reward model's, or the penalty
    rewards: Tensor  # [B, R] KL penalty, and the score on the last token
    forward: tuple | None = None  # [B, R] each, with its graph: where one micro-batch is all, the first step's too

    def take(self, rows: np.ndarray) -> "Rollout":
        """Some of the episodes; the index crosses to the device once."""
        index = torch.as_tensor(rows, device=self.mask.device)
        return Rollout(self.sizes[rows], *(x[index] for x in self[1:-1]))


class Models(NamedTuple):
    """Everything that a rollout is made with."""

    policy: nn.Module  # PolicyAndValue, perhaps wrapped for several processes
    ref: Policy  # what the policy was at the start
    reward: Callable[[Tensor, Tensor], Tensor]  # (queries [B, Q], responses [B, R]) → [B]
    ids: utils.Ids


def minibatches(order: np.ndarray, args: Args) -> list[np.ndarray]:
    """P7: a permutation [B] → the rows of each minibatch; sorted: a set of rows always makes the same micro-batches."""
    return [np.sort(rows) for rows in np.split(order, args.num_minibatches)]


@torch.no_grad()
def make_rollout(
    models: Models, queries: Tensor, responses: Tensor, order: np.ndarray, kl_coef: float, args: Args
) -> tuple[Rollout, Score]:
    """Everything that the update needs to know about sampled responses [B, R]; `order` [B] is the first epoch's."""
    pad_id = models.ids.pad
    score = score_responses(models.reward, queries, responses, args.task, models.ids)  # P5: only this cuts
    limit = args.clip_score or math.inf
    score = score._replace(scores=score.scores.clamp(-limit, limit))  # X2
    responses = score.cut if args.task.eos_task else responses  # X9
    mask = responses != pad_id
    contexts = utils.add_affixes(queries, models.ids)
    sizes = packing.row_sizes(torch.cat([contexts, responses], dim=1), pad_id, contexts.shape[1])
    logprobs, values, ref_logprobs = (torch.empty(responses.shape, device=responses.device) for _ in range(3))
    for rows in minibatches(order, args):  # L6: exactly the forwards of the first epoch
        for part in utils.micro_batches(sizes[rows], args.micro_batch_tokens):
            index = torch.as_tensor(rows[part], device=contexts.device)
            with torch.set_grad_enabled(len(part) == len(order)):  # see Rollout.forward
                forward = models.policy(contexts[index], responses[index])
            logprobs[index], _, values[index] = forward
            ref_logprobs[index] = models.ref(contexts[index], responses[index])[0]
    logprobs, values, ref_logprobs = (x.masked_fill(~mask, 0) for x in (logprobs, values, ref_logprobs))
    rewards = kl_penalised_rewards(logprobs, ref_logprobs, score.scores, mask, kl_coef, args.kl_estimator)
    rollout = Rollout(sizes, contexts, responses, mask, logprobs, values, ref_logprobs, score.scores, rewards)
    return rollout._replace(forward=forward if forward[0].requires_grad else None), score


# ----------------------------------------------------------------------------------------------- advantages and losses


def moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance of x[mask] over all processes (X11), whatever stands outside the mask."""
    count = utils.all_sum(mask.sum())
    mean = utils.all_sum(x.masked_fill(~mask, 0).sum()) / count
    variance = utils.all_sum(((x - mean) ** 2).masked_fill(~mask, 0).sum()) / count
    return mean, variance


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """P9: unit variance over x[mask]; the mean goes to 0 unless it is kept. 0 outside the mask."""
    mean, variance = moments(x, mask)
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8)
    return (whitened if shift_mean else whitened + mean).masked_fill(~mask, 0)


def advantages_and_returns(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """P6: generalised advantage estimation, [B, R] each. Past an end rewards and values are 0, and so are both."""
    advantages, following, next_value = [], 0.0, 0.0
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        following = delta + gamma * lam * following
        advantages.append(following)
        next_value = values[:, t]
    advantages = torch.stack(advantages[::-1], dim=1)
    return advantages, advantages + values


def estimate(batch: Rollout, args: Args) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, R] of a minibatch: whiten, GAE, whiten (P9, P6, X14)."""
    rewards = whiten(batch.rewards, batch.mask, shift_mean=False) if args.whiten_rewards else batch.rewards
    advantages, returns = advantages_and_returns(rewards, batch.values, args.gamma, args.lam)
    return whiten(advantages, batch.mask) if args.whiten_advantages else advantages, returns


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
        "val/ratio_spread": (ratio - 1) ** 2,
    }


# ------------------------------------------------------------------------------------------------------- optimisation


class AdamTF(torch.optim.Adam):
    """A1: TensorFlow's Adam. There ε is added to √v without its bias correction (ε̂ in Kingma & Ba); PyTorch's formula
    with ε_t = ε̂ / √(1 − β₂ᵗ) is the same, so the library's fused kernel does the work."""

    def __init__(self, params: Any, lr: float, eps: float = 1e-5, **settings: Any):
        super().__init__(params, lr=lr, eps=eps, fused=True, decoupled_weight_decay=True, **settings)
        for group in self.param_groups:
            group["eps_hat"], group["t"] = eps, 0  # in the group, so that state_dict() keeps them

    def step(self, closure: Callable | None = None) -> Any:
        """One step; sets ε_t first. A group without gradients takes none."""
        for group in self.param_groups:
            if any(x.grad is not None for x in group["params"]):
                group["t"] += 1
                group["eps"] = group["eps_hat"] / math.sqrt(1 - group["betas"][1] ** group["t"])
        return super().step(closure)


def anneal(lr: float, step: int, steps: int, schedule: str = "linear", warmup: int = 0) -> float:
    """G5: linear from `lr` at step 0 to 0 at step `steps`. X8: or otherwise, and behind `warmup` steps up to `lr`."""
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    return lr * {"linear": 1 - done, "constant": 1.0, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}[schedule]


def add_up(sums: dict[str, Tensor], terms: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Statistics of a minibatch, one micro-batch more: name → [sum, count, −min, max] of this process's terms[mask]."""
    sums = dict(sums)
    for name, x in terms.items():
        low, high = x.masked_fill(~mask, math.inf).min(), x.masked_fill(~mask, -math.inf).max()
        new = torch.stack([x.masked_fill(~mask, 0).sum(), mask.sum(), -low, high]).detach()
        old = sums.get(name)
        sums[name] = new if old is None else torch.cat([old[:2] + new[:2], torch.maximum(old[2:], new[2:])])
    return sums


def means(steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sums of `add_up` → means [optimizer steps] over all processes: exact with uneven lengths, one crossing."""
    table = torch.stack([torch.stack(list(step.values())) for step in steps]).permute(2, 1, 0)  # [4, names, steps]
    total, count = utils.all_sum(table[:2])
    values = dict(zip(steps[0], total / count, strict=True))
    values["val/ratio_var"] = values.pop("val/ratio_spread") - (values["val/ratio"] - 1) ** 2
    low, high = utils.all_max(table[2:, list(steps[0]).index("val/ratio")])
    return values | {"val/ratio_min": -low, "val/ratio_max": high}


def train_step(
    policy: nn.Module, optimizer: Any, batch: Rollout, targets: tuple, args: Args, accelerator: Accelerator
) -> dict[str, Tensor]:
    """One optimizer step on a minibatch and its advantages and returns [B, R] (P7); its statistics, see `add_up`."""
    (advantages, returns), losses = targets, torch.empty_like(batch.scores)
    count = utils.all_sum(batch.mask.sum()) / accelerator.num_processes  # DDP averages the processes' gradients
    sums, parts = {}, utils.micro_batches(batch.sizes, args.micro_batch_tokens)
    for i, part in enumerate(parts):
        old = batch.take(part)
        outside = ~old.mask
        with accelerator.no_sync(policy) if i + 1 < len(parts) else nullcontext():
            logprobs, entropies, values = batch.forward or policy(old.contexts, old.responses)
            logprobs, values = (x.masked_fill(outside, 0) for x in (logprobs, values))  # past an end
            terms = loss_terms(logprobs, values, old, advantages[part], returns[part], args)
            parted = [terms[name].masked_fill(outside, 0) for name in ("loss/policy_avg", "loss/value_avg")]
            policy_loss, value_loss = (x.sum() / count for x in parted)
            losses[part] = sum(parted).detach().sum(dim=1)
            accelerator.backward(policy_loss + args.vf_coef * value_loss)
        sums = add_up(sums, terms | {"policy/entropy_avg": entropies}, old.mask)
    norm = utils.gradient_norm(policy)
    utils.check_gradients(norm, args.task, batch.contexts, **batch._asdict() | {"loss": losses})
    if args.max_grad_norm:
        nn.utils.clip_grads_with_norm_(policy.parameters(), args.max_grad_norm, norm)  # X8
    optimizer.step()
    optimizer.zero_grad()
    for name, x in (("returns", returns), ("val", batch.values)):
        deviations = x - moments(x, batch.mask)[0]
        sums = add_up(sums, {f"{name}/mean": x, f"{name}/var": deviations**2}, batch.mask)
    return sums


# ---------------------------------------------------------------------------------------------------------------- run


def summarise(
    rollout: Rollout, score: Score, steps: list[dict[str, Tensor]], kl_coef: float, pad_id: int, args: Args
) -> dict[str, Any]:
    """The metrics of one update, means over its optimizer steps; README explains each."""
    stats = means(steps)
    stats["loss/total"] = stats["loss/policy_avg"] + args.vf_coef * stats["loss/value_avg"]
    extremes = {"val/ratio_min": torch.min, "val/ratio_max": torch.max}
    stats = {f"ppo/{name}": extremes.get(name, torch.mean)(values) for name, values in stats.items()}
    kl = kl_terms(rollout.logprobs - rollout.ref_logprobs, args.kl_estimator).sum(dim=1).mean()
    return stats | {
        "objective/kl": kl,
        "objective/entropy": -rollout.logprobs.sum(dim=1).mean(),
        "objective/scores": rollout.scores.mean(),
        "objective/scores_std": moments(rollout.scores, torch.ones_like(rollout.scores).bool())[1].sqrt(),
        "objective/score_total": rollout.rewards.sum(dim=1).mean(),
        "objective/rlhf_reward": rollout.scores.mean() - kl_coef * kl,
        "objective/kl_coef": kl_coef,
        "objective/ended": score.ended.float().mean(),
        "objective/response_length": rollout.mask.sum(dim=1).float().mean(),
        "objective/cut_length": (score.cut != pad_id).sum(dim=1).float().mean(),
        "ppo/val/var_explained": 1 - stats["ppo/val/error"] / stats["ppo/returns/var"],
    }


@torch.no_grad()
def evaluate(
    models: Models, lm: PreTrainedModel, queries: Tensor, gold: Callable | None, tokenizer: Any, args: Args
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Held-out queries [B, Q], always the same random numbers → metrics, a few samples. Every process repeats it."""
    task, pad_id, gen = args.task, models.ids.pad, utils.generator(args.seed, 0, queries.device)
    contexts = utils.add_affixes(queries, models.ids)
    responses = sample_all(lm, contexts, task, models.ids, gen, args.rollout_batch_size)
    score = score_responses(models.reward, queries, responses, task, models.ids)
    responses = score.cut if task.eos_task else responses
    mask = responses != pad_id
    sizes = packing.row_sizes(torch.cat([contexts, responses], dim=1), pad_id, contexts.shape[1])
    episodes = contexts, responses, sizes, args.micro_batch_tokens
    logprobs, ref_logprobs = (logprobs_of(x, *episodes) for x in (models.policy, models.ref))
    metrics = {
        "eval/scores": score.scores.mean().item(),
        "eval/kl": kl_terms(logprobs - ref_logprobs, args.kl_estimator).masked_fill(~mask, 0).sum(dim=1).mean().item(),
        "eval/response_length": mask.sum(dim=1).float().mean().item(),
        "eval/ended": score.ended.float().mean().item(),
    }
    if gold:
        gold_scores = utils.text_scores(gold, task.gold_fn, tokenizer, queries, score.cut, pad_id)
        metrics["eval/gold_score"] = gold_scores.mean().item()
    columns = *(utils.decode(tokenizer, x[:4], pad_id) for x in (queries, score.cut)), score.scores[:4].tolist()
    return metrics, [{"query": q, "response": r, "score": s} for q, r, s in zip(*columns, strict=True)]


def check(args: Args, processes: int) -> None:
    """Errors: `InputError` for values that cannot work, before anything is loaded."""
    records.check_args(args, SCRIPT, processes)
    unit = processes * math.lcm(args.num_minibatches, args.samples_per_prompt)
    what = f"{processes} processes × {args.num_minibatches} minibatches and {args.samples_per_prompt} per prompt"
    records.check_divides("batch_size", args.batch_size, unit, what)


PANELS = ["objective/scores", "objective/gold_score", "objective/kl", "objective/kl_coef"]
PANELS += ["ppo/loss/value_avg", "objective/entropy"]
SHOWN = {"objective/scores": "score", "objective/kl": "kl", "time/episodes_per_second": "episodes/s"}


def main(args: Args) -> None:
    """The run: sample → score → a few epochs of minibatches → next β."""
    accelerator = utils.start_accelerator(args)
    check(args, accelerator.num_processes)
    task, device = args.task, accelerator.device
    tokenizer, config, pad_id = utils.load_tokenizer(task, task.response_length, f"python sft.py --task {task.task}")
    utils.check_memory(config, 20, "policy, gradients, Adam's two moments and the reference", device, args)
    ids = utils.task_ids(task, tokenizer, pad_id)
    gold = load_function(task.gold_fn) if task.gold_fn else None
    table = utils.load_queries(task, tokenizer, pad_id, args.total_episodes)
    heldout, table = table.hold_out(args.eval_queries, "eval_queries")  # [E, Q], and [N, Q] to train on
    reward = utils.load_reward(args, tokenizer, pad_id, device)

    torch.manual_seed(args.seed)
    policy = PolicyAndValue(utils.load_lm(task.base_model), pad_id, task.temperature)
    ref = utils.freeze(accelerator, Policy(utils.load_lm(task.base_model), pad_id, task.temperature))
    if args.gradient_checkpointing:
        utils.checkpoint_activations(policy.lm)
    groups = [{"params": part.parameters()} for part in (policy.lm, policy.value_head)]
    adam = dict(betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps, weight_decay=args.weight_decay)  # X8
    policy, optimizer = utils.prepare(accelerator, policy, AdamTF(groups, lr=args.lr, **adam))
    models = Models(policy, ref, reward, ids)
    lm = accelerator.unwrap_model(policy).lm
    decoder = packing.Decoder(lm, args.compile)
    utils.check_policy(policy, heldout[:1].to(device), task.temperature, accelerator)

    seed = args.seed + 100003 * accelerator.process_index  # G6
    local_batch = args.batch_size // accelerator.num_processes
    num_updates = math.ceil(args.total_episodes / args.batch_size)
    clock = utils.Clock(device)
    run = records.Run(args, SCRIPT, num_updates, PANELS, accelerator, heldout, table)
    start, kl_coef = run.restore(policy, optimizer, args.kl_coef)

    def evaluation(update: int) -> dict[str, float]:
        with utils.inference(accelerator, policy):
            metrics, samples = evaluate(models, decoder, heldout.to(device), gold, tokenizer, args)
        run.samples(update, samples)
        return metrics

    for update in range(start, num_updates):
        evaluated = evaluation(update) if update % args.eval_every == 0 else {}
        rows = utils.rows_of_step(len(table), local_batch // args.samples_per_prompt, update, seed)
        queries = table[rows].to(device).repeat(args.samples_per_prompt, 1)  # [B, Q]
        rng, gen = np.random.default_rng([seed, update]), utils.generator(seed, update, device)
        epochs = [rng.permutation(local_batch) for _ in range(args.num_ppo_epochs)]

        with clock("sample"), utils.inference(accelerator, policy):
            contexts = utils.add_affixes(queries, ids)
            responses = sample_all(decoder, contexts, task, ids, gen, args.rollout_batch_size)  # G4  [B, R]
        policy.train()  # no dropout (P4); checkpointing needs it
        with clock("score"), accelerator.autocast():
            rollout, score = make_rollout(models, queries, responses, epochs[0], kl_coef, args)  # P5, P8

        lr = anneal(args.lr, update, num_updates, args.lr_schedule, args.warmup_updates)  # G5
        for i, group in enumerate(optimizer.param_groups):  # no prepared scheduler, which would step once a process
            group["lr"] = lr * (i > 0 or update >= args.value_warmup_updates)  # X6
        steps = []
        with clock("optimise"):
            for order in epochs:  # P7
                for rows in minibatches(order, args):
                    batch = rollout.take(rows)._replace(forward=None if steps else rollout.forward)
                    targets = estimate(batch, args)  # P9, P6
                    steps.append(train_step(policy, optimizer, batch, targets, args, accelerator))
                if args.max_kl and means(steps[-args.num_minibatches :])["policy/approxkl_avg"].mean() > args.max_kl:
                    break  # X12: on all processes alike

        metrics = summarise(rollout, score, steps, kl_coef, pad_id, args)
        if gold:
            gold_scores = utils.text_scores(gold, task.gold_fn, tokenizer, queries, score.cut, pad_id)
            metrics["objective/gold_score"] = gold_scores.mean()
        metrics, seconds = utils.mean_over_processes(metrics, device) | evaluated, clock.pop()
        metrics["objective/kl_per_token"] = metrics["objective/kl"] / metrics["objective/response_length"]
        metrics["objective/sqrt_kl"] = math.sqrt(max(metrics["objective/kl"], 0))
        metrics |= seconds | {"time/episodes_per_second": args.batch_size / sum(seconds.values())}
        metrics |= {"ppo/lr": lr, "ppo/episode": (update + 1) * args.batch_size}
        kl_coef = next_kl_coef(kl_coef, metrics["objective/kl"], args)  # P11
        run.log(update, metrics, SHOWN)
        run.checkpoint(update + 1, policy, optimizer, kl_coef)

    run.save(lm, tokenizer, value_head=accelerator.unwrap_model(policy).value_head)
    run.log(num_updates, evaluation(num_updates), SHOWN)
    run.compare_samples()
    run.finish()
    utils.stop_accelerator(accelerator)


if __name__ == "__main__":
    cli(main, lambda: parse_args(Args, PRESETS))
