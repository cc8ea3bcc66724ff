"""What a language model reads at once: rows packed into lines without padding, and a token a step over a cache.

Machinery that `utils.py` and the scripts build on. The letters are those of `utils.py`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import StaticCache, StaticLayer
from transformers.modeling_outputs import CausalLMOutput

# ------------------------------------------------------------------------------------------------- rows without padding


def model_inputs(tokens: Tensor, pad_id: int) -> dict[str, Tensor]:
    """G3: [B, T] → the arguments that make padding invisible, wherever it is. A pad's id is never embedded."""
    mask = tokens != pad_id
    positions = mask.cumsum(dim=1) - mask.long()  # exclusive: a pad does not move what follows it
    return dict(input_ids=tokens.masked_fill(~mask, 0), attention_mask=mask.long(), position_ids=positions)


def row_lengths(tokens: Tensor, pad_id: int) -> np.ndarray:
    """Real tokens of each row, on the host: they plan the micro-batches."""
    return (tokens != pad_id).sum(dim=1).cpu().numpy()


def row_sizes(tokens: Tensor, pad_id: int, prompt: int = 0) -> np.ndarray:
    """[B, T] → [B, 2]: real tokens of each row, and a number that it shares with the rows which are the same in their
    first `prompt` columns, on the host."""
    prompts = tokens[:, :prompt].unique(dim=0, return_inverse=True)[1] if prompt else torch.arange(len(tokens))
    return np.stack([row_lengths(tokens, pad_id), prompts.cpu().numpy()], axis=1)


def by_length(lengths: np.ndarray, size: int) -> list[tuple[np.ndarray, int]]:
    """Rows of like length, `size` at a time: [(rows, length of the longest)], for what is trimmed instead of packed."""
    rows = np.argsort(lengths, kind="stable")
    return [(part, int(lengths[part].max())) for part in np.split(rows, range(size, len(rows), size))]


LINE = 128  # tokens: a line is up to twice as long, or twice as the longest row


def fill_lines(lengths: list[int], width: int) -> tuple[np.ndarray, int]:
    """Rows in lines of `width` tokens: in each the longest row that is left and, of all choices of others, one that
    leaves least of it empty. Where each row begins when the lines are laid end to end [B], and number of lines."""
    left = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    begins, count = np.empty(len(lengths), dtype=np.int64), 0
    while left:
        line = [left.pop(0)]
        room, sums = width - lengths[line[0]], [1]  # bit s of sums[i]: some of the first i rows have s tokens in all
        for row in left:
            if sums[-1] >> room:
                break
            sums.append((sums[-1] | sums[-1] << lengths[row]) & (2 << room) - 1)
        filled = sums[-1].bit_length() - 1
        for i in range(len(sums) - 2, -1, -1):
            if not sums[i] >> filled & 1:  # not without the row behind these
                line.append(left.pop(i))
                filled -= lengths[line[-1]]
        begins[line] = count * width + np.cumsum([0, *(lengths[row] for row in line)])[:-1]
        count += 1
    return begins, count


@lru_cache(maxsize=64)
def lay_out(lengths: tuple[int, ...], features: int) -> tuple[np.ndarray, int, int]:
    """Rows one behind the other in lines, which are as long as costs least: where each begins when the lines are laid
    end to end [B], number of lines, tokens of a line. In lines of four times a model's `features` tokens attention
    takes half of the time, as measured with 128 and 768. Remembered: epochs and models ask again."""
    total, longest, least, best = sum(lengths), -(-max(lengths) // 8) * 8, math.inf, None
    prices = {width: width * (4 * features + width) for width in range(longest, 2 * max(longest, LINE) + 1, 8)}
    for width in sorted(prices, key=lambda width: math.ceil(total / width) * prices[width]):
        if math.ceil(total / width) * prices[width] >= least:  # with as few lines as there could be
            break
        begins, count = fill_lines(lengths, width)
        if count * prices[width] < least:
            least, best = count * prices[width], (begins, count, width)
    return best


@torch.no_grad()
def keeps_rows_apart(base: PreTrainedModel) -> bool:
    """Whether rows in one line are read as if alone, also with the last MLP at one of their tokens. The library makes
    the mask for it out of position ids that start anew, in most of its models: measured, once a model."""
    if not hasattr(base, "_keeps_rows_apart"):
        ids, precision = torch.arange(6, device=base.device)[None], torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")  # TF32 is further off than rows that see each other may be
        with torch.autocast(base.device.type, enabled=False):
            with last_mlp_at(base, ids[0, -1:]):
                line = base(input_ids=ids, position_ids=ids % 3, use_cache=False).last_hidden_state[:, -1]
            alone = base(input_ids=ids[:, 3:], position_ids=ids[:, :3], use_cache=False).last_hidden_state[:, -1]
        torch.set_float32_matmul_precision(precision)
        base._keeps_rows_apart = torch.allclose(line.float(), alone.float(), rtol=1e-3, atol=5e-3)
    return base._keeps_rows_apart


def shared_prompts(tokens: Tensor, real: Tensor, prompt: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows [B, T] whose first `prompt` columns are the same make a block, the prompt and then what follows it in each:
    the block of each row [B], tokens of others between prompt and row [B], and tokens of each block, on the host."""
    blocks = tokens.masked_fill(~real, -1)[:, :prompt].unique(dim=0, return_inverse=True)[1]
    blocks, prompts, own = torch.stack([blocks, real[:, :prompt].sum(dim=1), real[:, prompt:].sum(dim=1)]).cpu().numpy()
    rows = np.argsort(blocks, kind="stable")
    before = (np.cumsum(own[rows]) - own[rows])[np.argsort(rows, kind="stable")]
    first = rows[np.unique(blocks[rows], return_index=True)[1]]
    return blocks, before - before[first][blocks], prompts[first] + np.bincount(blocks, own).astype(int)


def tree_mask(rows: Tensor, blocks: Tensor) -> Tensor:
    """Of lines [L, W] with the row that a token belongs to, 0 in a prompt, and its block: a float mask [L, 1, W, W] by
    which every token sees what stands before it of its row and of its block's prompt."""
    sees = (rows[:, None] == 0) | (rows[:, None] == rows[:, :, None])
    sees &= (blocks[:, None] == blocks[:, :, None]) & sees.new_ones(sees.shape[-2:]).tril()
    return torch.zeros(sees.shape, device=rows.device).masked_fill(~sees, -1e30)[:, None]


def into_lines(
    config: PretrainedConfig, tokens: Tensor, real: Tensor, prompt: int = 0, cached: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """Rows [B, T] with pads anywhere → the arguments of a model that reads them one behind the other in lines, and
    where each token stands when the lines are laid end to end [B, T]. What rows have in common in their first `prompt`
    columns stands there once. `cached`: for a model that keeps keys and values and does not make the mask by itself."""
    if prompt:
        blocks, before, lengths = shared_prompts(tokens, real, prompt)
    else:
        lengths = row_lengths(real, False)
        blocks, before = np.arange(len(tokens)), np.zeros(len(tokens), dtype=int)
    begins, count, width = lay_out(tuple(lengths.tolist()), config.hidden_size)
    positions = (real.cumsum(dim=1) - 1).clamp(min=0)  # G3
    plan = torch.as_tensor(np.stack([begins[blocks], before, blocks + 1]), device=tokens.device)
    begins, before, blocks = plan[:, :, None]  # [B, 1] each
    where = begins + positions
    where[:, prompt:] += before
    target = where.masked_fill(~real, count * width).flatten()  # pads go behind the last line, and are cut off

    def lines(x: Tensor) -> Tensor:
        """[B, T] → [lines, tokens of a line], 0 where a line stays empty."""
        return x.new_zeros(count * width + 1).scatter(0, target, x.flatten())[:-1].view(count, width)

    inputs = dict(input_ids=lines(tokens), position_ids=lines(positions))  # these start anew, also where it is empty
    if cached or len(lengths) < len(tokens):
        rows = torch.arange(1, len(tokens) + 1, device=tokens.device)[:, None].expand_as(tokens).clone()
        rows[:, :prompt] = 0
        inputs["attention_mask"] = tree_mask(lines(rows), lines(blocks.expand_as(tokens)))
    return inputs, where


def in_window(config: PretrainedConfig, tokens: int) -> bool:
    """Whether so many tokens see each other in all layers; the mask of shared prompts knows no sliding windows."""
    return tokens <= (getattr(config, "sliding_window", None) or math.inf)


def distinct(places: Tensor) -> Tensor:
    """Each place once: what is written twice would have its gradient twice."""
    return places.unique()


@contextmanager
def last_mlp_at(base: PreTrainedModel, index: Tensor) -> Iterator[None]:
    """Inside, the MLP of the last block, which reads each token alone, leaves 0 where nobody looks: all but `index`, of
    tokens laid end to end. Recomputed activations would not know of it, so not with gradient checkpointing."""
    kinds, modules = set(base._no_split_modules or ()), reversed([*base.modules()])
    block = next((x for x in modules if kinds & {kind.__name__ for kind in type(x).__mro__}), base)
    mlp = getattr(block, "mlp", None)
    if mlp is None or any(getattr(x, "gradient_checkpointing", False) for x in (base, block)):
        yield
        return
    full, index = mlp.forward, distinct(index)

    def forward(hidden: Tensor) -> Tensor:
        """[lines, width, D] → [lines, width, D]"""
        part = full(hidden.flatten(0, 1)[index][None])
        if not isinstance(part, Tensor):  # experts that tell more
            return full(hidden)
        return part.new_zeros(hidden.shape).flatten(0, 1).index_copy(0, index, part[0]).view(hidden.shape)

    mlp.forward = forward
    try:
        yield
    finally:
        del mlp.forward


def hidden_states(base: PreTrainedModel, tokens: Tensor, columns: Tensor, pad_id: int, prompt: int = 0) -> Tensor:
    """Last hidden states [B, n, D] at `columns` [B, n] of rows [B, T] with pads anywhere, which cost nothing. At a pad
    an arbitrary finite number. What rows have in common in their first `prompt` columns is read once."""
    real = tokens != pad_id
    if not keeps_rows_apart(base):  # Falcon: trimmed rows, the pads masked
        first = int(real.any(dim=0).byte().argmax())
        hidden = base(**model_inputs(tokens[:, first:], pad_id), use_cache=False).last_hidden_state
        return hidden[torch.arange(len(tokens), device=tokens.device)[:, None], columns - first]
    inputs, where = into_lines(base.config, tokens, real, prompt if in_window(base.config, tokens.shape[1]) else 0)
    where = where.gather(1, columns)
    with last_mlp_at(base, where):
        return base(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[where]


def vocabulary_logits(lm: PreTrainedModel, hidden: Tensor) -> Tensor:
    """What `lm` makes of its last hidden states: [..., D] → [..., V]. Errors: see `check_policy`."""
    logits, config = lm.get_output_embeddings()(hidden), lm.config
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / scale
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    return logits if cap is None else cap * torch.tanh(logits / cap)


class Product(torch.autograd.Function):
    """Rows [N, D] by a weight [V, D] → [N, V], as `linear` does it. There the weight's gradient is a view, to which
    autograd adds what a tied embedding's is in a third tensor [V, D]; here it is none, and that is added in place."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        """rows · weightᵀ"""
        ctx.save_for_backward(rows, weight)
        return rows @ weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Of rows and weight, where wanted."""
        (rows, weight), (first, second) = ctx.saved_tensors, ctx.needs_input_grad
        return grad @ weight if first else None, grad.T @ rows if second else None


class ChosenLogprobs(torch.autograd.Function):
    """P1: logits [..., V] and tokens [...] → the tokens' log-probabilities at a temperature, and entropies, [...] each.
    The gradient, of the former alone, is one pass over one copy of the logits; autograd makes three."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """log softmax(logits / temperature) at the tokens; −Σ p log p."""
        logprobs = (logits / temperature).log_softmax(dim=-1)
        chosen, probs = logprobs.gather(-1, tokens[..., None]).squeeze(-1), logprobs.exp()
        entropies = -logprobs.mul_(probs).sum(dim=-1)
        ctx.save_for_backward(probs, tokens)
        ctx.mark_non_differentiable(entropies)
        ctx.temperature = temperature
        return chosen, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        """∂ log p(a) / ∂ logits = (1[a] − p) / temperature."""
        (probs, tokens), grad = ctx.saved_tensors, grad[..., None] / ctx.temperature
        return (probs * -grad).scatter_add_(-1, tokens[..., None], grad), None, None


# ------------------------------------------------------------------------------------------------------ token by token


class KeyValueCache(StaticCache):
    """A static cache takes its dtype from the keys, which rotary positions leave in fp32 under autocast, and cannot
    hold the bf16 values. Keys become what the values are, as attention makes them anyway; else nothing changes."""

    def __init__(self, config: PretrainedConfig, length: int, row: int | None = None):
        """`row`: tokens of the longest row, where several stand in a line of `length`."""
        super().__init__(config=config, max_cache_len=length)
        self.length, self.begun = length, False
        if in_window(config, row or length):  # no window slides, and layers that have one count in Python: compiled
            self.layers = [StaticLayer(max_cache_len=length) for _ in self.layers]  # anew at every step

    def reset(self) -> None:
        """Empty it; the memory stays where it is."""
        super().reset()
        self.begun = False

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, T, D / heads] of one layer → all of them so far."""
        return super().update(key_states.to(value_states.dtype), value_states, *args, **kwargs)


class Decoder:
    """A language model to sample with. A prompt that stands in several rows is read once. With `compiled` the step of a
    token is compiled and, on a GPU, replayed as a CUDA graph: then caches stay where they are, one for each shape."""

    def __init__(self, lm: PreTrainedModel, compiled: bool = False):
        self.lm, self.config, self.compiled, self.caches = lm, lm.config, compiled, {}
        self.step = torch.compile(lm, mode="reduce-overhead", fullgraph=True, dynamic=False) if compiled else lm
        if compiled:
            torch._dynamo.config.recompile_limit = 64  # shapes: of whole parts and of the last, by multiples of 128

    def cache(self, rows: int, length: int) -> KeyValueCache:
        """An empty cache for so many rows and tokens; compiled, for 128 tokens or a multiple, and kept."""
        if not self.compiled:
            return KeyValueCache(self.config, length)
        shape = rows, -(-length // 128) * 128
        if shape not in self.caches:
            self.caches[shape] = KeyValueCache(self.config, shape[1])
        self.caches[shape].reset()
        return self.caches[shape]

    def __call__(self, tokens: Tensor, attention_mask: Tensor, past_key_values: KeyValueCache, **more: Any) -> Any:
        """What `lm(…)` gives for prompts [B, C], or for one token more [B, 1]."""
        attention_mask = nn.functional.pad(attention_mask, (0, past_key_values.length - attention_mask.shape[1]))
        if not past_key_values.begun:
            past_key_values.begun = True
            return self.prefill(tokens, attention_mask, past_key_values, **more)
        if self.compiled:
            torch.compiler.cudagraph_mark_step_begin()
            # a column of a wider tensor has its strides, for which the step would be compiled anew
            tokens, more["position_ids"] = (
                x.clone(memory_format=torch.contiguous_format) for x in (tokens, more["position_ids"])
            )
        return self.step(tokens, attention_mask=attention_mask, past_key_values=past_key_values, **more)

    def prefill(
        self, tokens: Tensor, attention_mask: Tensor, cache: KeyValueCache, position_ids: Tensor, **more: Any
    ) -> Any:
        """Reads every prompt once and without its pads, and copies keys and values to where the rows have them."""
        if not (keeps_rows_apart(self.lm.base_model) and in_window(self.config, cache.length)):
            inputs = dict(attention_mask=attention_mask, position_ids=position_ids, past_key_values=cache)
            return self.lm(tokens, **inputs, **more)
        real, length = attention_mask[:, : tokens.shape[1]] > 0, tokens.shape[1]
        inputs, where = into_lines(self.config, tokens, real, prompt=length, cached=True)
        inputs["position_ids"].view(-1)[where[real]] = position_ids[real]  # as they are asked for
        lines = KeyValueCache(self.config, inputs["input_ids"].shape[1], row=cache.length)
        with last_mlp_at(self.lm.base_model, where[:, -1]):
            states = self.lm.base_model(**inputs, past_key_values=lines, use_cache=True).last_hidden_state
        for i, layer in enumerate(lines.layers):
            cache.update(
                *(x.transpose(1, 2).flatten(0, 1)[where].transpose(1, 2) for x in (layer.keys, layer.values)), i
            )
        return CausalLMOutput(logits=vocabulary_logits(self.lm, states.flatten(0, 1)[where[:, -1:]]))


def empty_cache(lm: PreTrainedModel | Decoder, rows: int, length: int) -> KeyValueCache:
    """Room for `length` tokens in each of the rows."""
    return lm.cache(rows, length) if isinstance(lm, Decoder) else KeyValueCache(lm.config, length)
