"""Small helpers for the scripts: tokens, micro-batches, sums over processes, Adam, seeds, timing.

Shapes: B sequences, Q tokens per query, C per context (prefix + query + suffix), R per response,
T = C + R, V vocabulary size. Masks are True at real tokens. Tags such as (G2) are explained
in docs/details.md.
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
from accelerate.utils import gather_object
from torch import Tensor, nn

# --------------------------------------------------- tokens


class TokenIds(NamedTuple):
    """A task's special tokens and lengths."""

    pad: int  # at least V, the number of logits: never a real token (G2)
    ends: list[int]  # truncate tokens (P5); sft.py ends the responses of EOS tasks with ends[0]
    prefix: list[int]  # before each query
    suffix: list[int]  # after each query
    truncate_after: int = 0  # truncate tokens before this position of a response do not count
    total_length: int = 0  # longest context plus response
    hidden: tuple[int, ...] = ()  # special tokens that `decode` leaves out: BOS, EOS; no period


def pad_left(sequences: list[list[int]], length: int, pad_id: int) -> Tensor:
    """Token lists → [B, length], padded on the left (G2)."""
    padded = torch.full((len(sequences), length), pad_id)
    for row, tokens in zip(padded, sequences, strict=True):
        row[length - len(tokens) :] = torch.tensor(tokens)
    return padded


def add_affixes(queries: Tensor, ids: TokenIds) -> Tensor:
    """Queries [B, Q] → contexts [B, C]: prefix, query, suffix, padded on the left."""
    contexts = []
    for row in queries.tolist():
        query = [token for token in row if token != ids.pad]
        contexts.append(ids.prefix + query + ids.suffix)
    length = len(ids.prefix) + queries.shape[1] + len(ids.suffix)
    return pad_left(contexts, length, ids.pad).to(queries.device)


def truncate(responses: Tensor, ids: TokenIds) -> tuple[Tensor, Tensor]:
    """Replace everything after the first truncate token by padding: [B, R] → [B, R] (P5).

    Truncate tokens before position `ids.truncate_after` do not count. Also returns which responses
    are finished [B]: they have one that counts, or the task has no truncate tokens.
    """
    if not ids.ends:
        return responses, torch.ones_like(responses[:, 0], dtype=torch.bool)
    positions = torch.arange(responses.shape[1], device=responses.device)
    is_end = torch.isin(responses, torch.tensor(ids.ends, device=responses.device))
    is_end &= positions >= ids.truncate_after
    ends_before = is_end.cumsum(dim=1) - is_end.long()  # [B, R]
    return responses.masked_fill(ends_before > 0, ids.pad), is_end.any(dim=1)


def decode(tokenizer: Any, tokens: Tensor, ids: TokenIds) -> list[str]:
    """[B, T] → B texts without padding, BOS and EOS; other special tokens stay in."""
    hidden = {ids.pad, *ids.hidden}
    rows = [[token for token in row if token not in hidden] for row in tokens.tolist()]
    return tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)


def sample_token(logits: Tensor, uniform: Tensor) -> Tensor:
    """Sample from softmax(logits) by inverting its CDF: [B, V], [B] in [0, 1) → [B].

    With torch.multinomial, a token would depend on the other sequences in its batch.
    """
    probs = logits.float().softmax(dim=-1)
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)  # [B, V]
    thresholds = uniform * cdf[:, -1]
    tokens = torch.searchsorted(cdf, thresholds[:, None], right=True).squeeze(1)
    return tokens.clamp(max=logits.shape[1] - 1)  # NaN logits: the last token


# -------------------------------------------------- batches


def query_rows(num_queries: int, size: int, seed: int, step: int) -> np.ndarray:
    """The rows [size] of a table that a step uses. Each epoch visits all rows in a new order.

    A pure function of its arguments, so that a resumed run continues with the same rows.
    """
    rows = []
    for i in range(step * size, (step + 1) * size):
        epoch, place = divmod(i, num_queries)
        rows.append(permutation(num_queries, seed, epoch)[place])
    return np.array(rows)


@lru_cache(maxsize=2)
def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch's rows. The two most recent ones are cached."""
    rng = np.random.default_rng([seed, epoch, 1])  # 1: `main` uses 2
    return rng.permutation(size)


def count_micro_batches(lengths: Tensor, max_tokens: int) -> int:
    """The number of micro-batches of about `max_tokens` tokens for B sequences of these lengths.

    The maximum over processes, since under FSDP2 every process must run the same number of forward
    passes. So all processes must call this, with the same number of sequences.
    """
    needed = (lengths.sum() + max_tokens - 1) // max_tokens  # rounded up
    return min(int(all_max(needed)), len(lengths))


def micro_batches(lengths: Tensor, count: int) -> list[slice]:
    """Split B sequences into `count` consecutive parts with about equally many tokens.

    More parts need less memory; results differ only by rounding (P7).
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


def num_processes() -> int:
    """How many processes run this script."""
    if not dist.is_initialized():
        return 1
    return dist.get_world_size()


def all_sum(x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce: by default, the sum over all processes."""
    if num_processes() > 1:
        x = x.clone(memory_format=torch.contiguous_format)  # NCCL needs it contiguous
        dist.all_reduce(x, op)
    return x


def all_max(x: Tensor) -> Tensor:
    """Maximum over all processes."""
    return all_sum(x, dist.ReduceOp.MAX)


def average_gradients(model: nn.Module) -> None:
    """Average the gradients over all processes, with one all-reduce.

    A missing gradient counts as 0. A weight that has none on any process, such as that of an expert
    that no token has reached, keeps none: as in one process, the optimizer skips it.
    """
    if num_processes() == 1:
        return
    if hasattr(model, "unshard"):  # FSDP2 has already averaged them
        return
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    has_grad = torch.tensor([weight.grad is not None for weight in weights])
    is_used = all_max(has_grad.int().to(weights[0].device)).tolist()
    grads: list[Any] = []
    for weight, used in zip(weights, is_used, strict=True):
        if used and weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        if used:
            grads.append(weight.grad)
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat /= num_processes()
    parts = flat.split([grad.numel() for grad in grads])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view_as(grad))


def mean_over_processes(
    metrics: dict[str, Any],
    device: torch.device,
) -> dict[str, float]:
    """The mean of each metric over all processes, with one all-reduce."""
    names = sorted(metrics)
    gathered = gather_object([names])
    for others in gathered:
        if others != names:
            name = min(set(names) ^ set(others))
            raise ValueError(f"metric {name} is not on all processes: log it on all, or on none")
    values = []
    for name in names:
        value = torch.as_tensor(metrics[name], dtype=torch.float32, device=device)
        values.append(value.squeeze())
    means = all_sum(torch.stack(values)) / len(gathered)
    return dict(zip(names, means.tolist(), strict=True))


def accumulate(
    stats: dict[str, Any],
    metrics: dict[str, Tensor],
    num_steps: int,
) -> None:
    """Add metrics / num_steps to `stats`, which becomes the mean over `num_steps` steps.

    `metrics` are a step's, or shares of a micro-batch that add up to the step's. `stats` is a
    defaultdict(float); its values are detached.
    """
    for name, value in metrics.items():
        stats[name] += value.detach() / num_steps


def global_mean_and_var(
    x: Tensor,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean and population variance over all processes (X11), of x where the mask is True."""
    if mask is None:
        mask = torch.ones_like(x, dtype=torch.bool)
    count = all_sum(mask.sum())
    mean = all_sum(masked_sum(x, mask)) / count
    var = all_sum(masked_sum((x - mean) ** 2, mask)) / count
    return mean, var


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
            group["eps_hat"] = eps  # saved with the optimizer's state
            group["t"] = 0

    def step(self, closure: Callable | None = None) -> Any:
        """Take one step."""
        for group in self.param_groups:
            group["t"] += 1
            beta2 = group["betas"][1]
            group["eps"] = group["eps_hat"] / math.sqrt(1 - beta2 ** group["t"])
        return super().step(closure)


# ----------------------------------------- seeds and timing


def random_numbers(
    seed: int,
    step: int,
    device: torch.device,
    *shape: int,
) -> Tensor:
    """Uniform in [0, 1), in fp64, for one step; independent across steps and seeds."""
    sequence = np.random.SeedSequence([seed, step])
    state = sequence.generate_state(1, np.uint64)[0]
    rng = torch.Generator(device).manual_seed(int(state) >> 1)  # 63 bits: fits a signed seed
    return torch.rand(shape, generator=rng, device=device, dtype=torch.float64)


class Timer:
    """Seconds per phase: `start` begins a phase and ends the one before it."""

    def __init__(self, device: torch.device):
        self.device = device
        self.phase: str | None = None
        self.began = 0.0
        self.seconds: dict[str, float] = {}

    def start(self, phase: str | None) -> None:
        """Begin a phase; None only ends the current one. A phase's latest duration is kept."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # wait for queued kernels
        now = time.perf_counter()
        if self.phase:
            self.seconds[f"time/{self.phase}"] = now - self.began
        self.phase = phase
        self.began = now

    def stop(self) -> dict[str, float]:
        """End the current phase; return `time/<phase>` of all phases."""
        self.start(None)
        return self.seconds
