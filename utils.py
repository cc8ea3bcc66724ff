"""Small helpers of the scripts: tokens, micro-batches, sums over processes, Adam, seeds, timing.

Shapes: `B` sequences, `Q` query, `C` context, `R` response and `T` all tokens. Masks are True at
real tokens. Tags such as (G2) are explained in docs/details.md.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

# --------------------------------------------------- tokens


class TokenIds(NamedTuple):
    """Token ids that a task needs."""

    pad: int  # one past the vocabulary (G2)
    ends: list[int]  # end a response (P5); SFT and labels write the first one
    prefix: list[int]  # before each query
    suffix: list[int]  # after each query
    total_length: int = 0  # of a context and its response
    hidden: tuple[int, ...] = ()  # special tokens that texts are shown without: BOS, ends


def pad_left(sequences: list[list[int]], length: int, pad_id: int) -> Tensor:
    """Token lists → [B, length], padded on the left (G2)."""
    padded = [[pad_id] * (length - len(tokens)) + tokens for tokens in sequences]
    return torch.tensor(padded, dtype=torch.long).view(len(sequences), length)


def add_affixes(queries: Tensor, ids: TokenIds) -> Tensor:
    """Queries [B, Q] → contexts [B, C]: prefix, query, suffix, padded on the left."""
    rows = [[token for token in row if token != ids.pad] for row in queries.tolist()]
    rows = [ids.prefix + row + ids.suffix for row in rows]
    length = len(ids.prefix) + queries.shape[1] + len(ids.suffix)
    return pad_left(rows, length, ids.pad).to(queries.device)


def truncate(responses: Tensor, ends: list[int], after: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """Replace what follows the first of `ends` at or after position `after` by padding (P5).

    Returns the responses [B, R], and whether each has such a token [B]; True if there are no ends.
    """
    if not ends:
        return responses, torch.ones_like(responses[:, 0], dtype=torch.bool)
    positions = torch.arange(responses.shape[1], device=responses.device)
    is_end = torch.stack([responses == end for end in ends]).any(dim=0) & (positions >= after)
    ended = is_end.any(dim=1)
    last = torch.where(ended, is_end.byte().argmax(dim=1), len(positions) - 1)
    return responses.masked_fill(positions > last[:, None], pad_id), ended


def decode(tokenizer: Any, tokens: Tensor, ids: TokenIds) -> list[str]:
    """[B, T] → B texts without padding, BOS and ends; other special tokens are in them."""
    hidden = {ids.pad, *ids.hidden}
    rows = [[token for token in row if token not in hidden] for row in tokens.tolist()]
    return tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)


def sample_token(logits: Tensor, uniform: Tensor) -> Tensor:
    """Sample from softmax(logits) by inverting its CDF: [B, V], [B] in [0, 1) → [B].

    With torch.multinomial a token would depend on the other sequences of its batch.
    """
    probs = logits.float().softmax(dim=-1)
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)  # [B, V]
    tokens = torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True)[:, 0]
    return tokens.clamp(max=logits.shape[1] - 1)  # NaN logits: the last token


# -------------------------------------------------- batches


def query_rows(num_queries: int, size: int, seed: int, step: int) -> np.ndarray:
    """The rows [size] of a table that step `step` uses; every epoch is a new permutation of all.

    A pure function of its arguments, so that a resumed run continues with the same rows.
    """
    rows = []
    for i in range(step * size, (step + 1) * size):
        epoch, place = divmod(i, num_queries)
        rows.append(permutation(num_queries, seed, epoch)[place])
    return np.array(rows)


@lru_cache(maxsize=2)
def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of all rows; the last two are kept, for the other steps of their epochs."""
    return np.random.default_rng([seed, epoch, 1]).permutation(size)


def count_micro_batches(lengths: Tensor, max_tokens: int) -> int:
    """How many micro-batches of about `max_tokens` tokens B sequences of these lengths need.

    The most that a process needs: under FSDP2 all have to run equally many forward passes. So all
    processes have to call this, with equally many sequences.
    """
    needed = (lengths.sum() + max_tokens - 1) // max_tokens  # rounded up
    return min(int(all_max(needed)), len(lengths))


def micro_batches(lengths: Tensor, count: int) -> list[slice]:
    """Split B sequences into `count` consecutive parts with about equally many tokens.

    Parts change memory, and results only by rounding (P7).
    """
    ends = lengths.cumsum(dim=0).tolist()  # tokens up to the end of each sequence
    parts = []
    begin = 0
    for number in range(1, count + 1):
        end = bisect_right(ends, ends[-1] * number / count)
        end = max(end, begin + 1)  # this part is not empty,
        end = min(end, len(ends) - (count - number))  # nor are those that follow
        parts.append(slice(begin, end))
        begin = end
    return parts


# ------------------------------------------------ processes


def all_sum(x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce: by default, the sum over all processes."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        x = x.clone(memory_format=torch.contiguous_format)  # as NCCL needs it
        dist.all_reduce(x, op)
    return x


def all_max(x: Tensor) -> Tensor:
    """Maximum over all processes."""
    return all_sum(x, dist.ReduceOp.MAX)


def average_gradients(model: nn.Module) -> None:
    """Average the gradients over all processes, in one message. FSDP2 has already done so.

    A weight without a gradient counts as 0, unless it has none on any process.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or hasattr(model, "unshard"):
        return
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    has_grad = [weight.grad is not None for weight in weights]
    is_used = all_max(torch.tensor(has_grad, device=weights[0].device).int()).tolist()
    weights = [weight for weight, used in zip(weights, is_used, strict=True) if used]
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in weights]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for weight, mean in zip(weights, flat.split([x.numel() for x in weights]), strict=True):
        weight.grad = mean.view_as(weight)


def mean_over_processes(metrics: dict[str, Any], device: torch.device) -> dict[str, float]:
    """The mean of each metric over all processes, with one all-reduce."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    names: list[Any] = [set(metrics)] * world_size
    if world_size > 1:
        dist.all_gather_object(names, names[0])
    missing = set.union(*names) - set.intersection(*names)
    if missing:
        raise ValueError(f"metric {min(missing)} is not on all processes: log it on all, or none")
    values = [torch.as_tensor(metrics[name], dtype=torch.float32) for name in sorted(metrics)]
    sums = all_sum(torch.stack([value.to(device).squeeze() for value in values]))
    return dict(zip(sorted(metrics), (sums / world_size).tolist(), strict=True))


def accumulate(stats: dict[str, Any], metrics: dict[str, Tensor], num_steps: int) -> None:
    """Add metrics of one of `num_steps` steps, or of a part of it, to their means over the steps."""
    for name, value in metrics.items():
        stats[name] += value.detach() / num_steps


def global_mean_and_var(x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and population variance over all processes (X11), of x where the mask is True."""
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    count = all_sum(mask.sum())
    mean = all_sum(masked_sum(x, mask)) / count
    return mean, all_sum(masked_sum((x - mean) ** 2, mask)) / count


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x where the mask is True; values elsewhere, even NaN, have no effect."""
    return x.masked_fill(~mask, 0).sum()


# ------------------------------------------------ optimizer


class AdamTF(torch.optim.Adam):
    """TensorFlow's Adam, which OpenAI used (A1).

    PyTorch:     m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
    TensorFlow:  m / (1 - beta1^t) * sqrt(1 - beta2^t) / (sqrt(v) + eps)

    So TensorFlow's eps acts as eps / sqrt(1 - beta2^t) in PyTorch, which is larger at first.
    """

    def __init__(self, params: Any, lr: float, eps: float = 1e-5, **settings: Any):
        super().__init__(params, lr=lr, eps=eps, fused=True, **settings)
        for group in self.param_groups:
            group["eps_hat"], group["t"] = eps, 0  # saved with the optimizer's state

    def step(self, closure: Callable | None = None) -> Any:
        """Take one step."""
        for group in self.param_groups:
            group["t"] += 1
            group["eps"] = group["eps_hat"] / math.sqrt(1 - group["betas"][1] ** group["t"])
        return super().step(closure)


# ----------------------------------------- seeds and timing


def random_numbers(seed: int, step: int, device: torch.device, *shape: int) -> Tensor:
    """Uniform in [0, 1), in fp64, for one step of one process; independent of all other steps."""
    state = np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0]
    rng = torch.Generator(device).manual_seed(int(state >> np.uint64(1)))  # 63 bits, as torch takes
    return torch.rand(shape, generator=rng, device=device, dtype=torch.float64)


class Timer:
    """Seconds per phase: `start` begins a phase and ends the one before it."""

    def __init__(self, device: torch.device):
        self.device = device
        self.phase: str | None = None
        self.began = 0.0
        self.seconds: dict[str, float] = {}

    def start(self, phase: str | None) -> None:
        """Begin a phase, or none. If a phase occurs twice, only its last seconds are kept."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # wait for queued kernels
        now = time.perf_counter()
        if self.phase:
            self.seconds[f"time/{self.phase}"] = now - self.began
        self.phase, self.began = phase, now

    def stop(self) -> dict[str, float]:
        """End the current phase; return `time/<phase>` of all phases."""
        self.start(None)
        return self.seconds
