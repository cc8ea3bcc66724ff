"""Sampling token by token with a static cache.

Shapes: `B` sequences, `b` of them still in the batch, `P` distinct prompts, `C` context tokens.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import compare_versions
from torch import Tensor
from transformers.cache_utils import StaticCache

from machinery.cli import say_once

BLOCK = 64  # columns by which the cache grows; kernels prefer multiples of it
CACHE = "cache" if compare_versions("transformers", ">=", "5.24") else "past_key_values"
LARGEST = 0.05  # of a GPU's memory: the part that a cache may keep for CUDA graphs
MIN_ROWS = 16  # with fewer, fp32 products round differently: tokens depend on others


def generate(decoder: "Decoder", contexts: Tensor, pad_id: int, temperature: float) -> Tensor:
    """Sample exactly `response_length` tokens after each context: [B, C] → [B, R].

    From the full vocabulary, without a stop at EOS, with torch's global generator (G4); ppo.py and
    rloo.py have their own `sample`.
    """
    batch = decoder.start(contexts, contexts != pad_id)
    tokens = []
    for _ in range(decoder.response_length):
        probs = (batch.next_logits() / temperature).softmax(dim=-1)  # [B, V]
        tokens.append(torch.multinomial(probs, num_samples=1)[:, 0])
        batch.append(tokens[-1])
    return torch.stack(tokens, dim=1)


class Decoder:
    """Samples token by token, at most `response_length` tokens.

    With `cuda_graphs`, on a GPU, the step of one token is recorded once for each shape of the cache
    and replayed in all later batches. The cache's memory stays for this, and there can be one batch
    at a time. There is no graph for a cache above `LARGEST`, under FSDP2 (weights move), with
    sliding windows or linear layers (the CPU manages them), or for Falcon (it indexes with lists).
    """

    def __init__(self, lm: Any, response_length: int, cuda_graphs: bool = False):
        self.lm = lm
        self.response_length = response_length
        sharded = any(hasattr(module, "unshard") for module in lm.modules())
        cache = KeyValueCache(config=lm.config, max_cache_len=1)
        self.linear = any(hasattr(layer, "conv_states") for layer in cache.layers)
        on_cpu = self.linear or any(cache.is_sliding) or lm.config.model_type == "falcon"
        self.cuda_graphs = cuda_graphs and lm.device.type == "cuda" and not (sharded or on_cpu)
        self.graphs: dict[tuple[int, ...], Callable[..., Tensor]] = {}
        self.kept: dict[str, Tensor] = {}  # memory that they read and write
        self.weights: list[int] = []  # addresses of the weights that they read
        if self.cuda_graphs:
            self.stream = torch.cuda.Stream()
            self.pool: Any = None  # memory for the tensors of a step; graphs use it in turn
            self.limit = LARGEST * torch.cuda.mem_get_info()[1]

    def start(self, contexts: Tensor, mask: Tensor) -> "DecodingBatch":
        """A batch of contexts [B, C], mask True at real tokens; computes nothing yet."""
        return DecodingBatch(self, contexts, mask)

    def keep(self, name: str, x: Tensor, rows: int, columns: int) -> Tensor:
        """A copy of `x`, [b, ..., c, D] or a number, in kept memory for `rows` and `columns`."""
        shape = (rows, *x.shape[1:-2], columns, x.shape[-1]) if x.dim() else ()
        kept = self.kept.get(name, x)
        shape = tuple(map(max, shape, kept.shape))
        if name not in self.kept or (shape, x.dtype) != (kept.shape, kept.dtype):
            kept = self.kept[name] = x.new_zeros(shape)
            self.graphs.clear()
        return kept[tuple(map(slice, x.shape))].copy_(x)


class DecodingBatch:
    """Sequences that grow token by token: `next_logits`, then `append`, in turn."""

    cache: "KeyValueCache"  # from the first `next_logits` on

    def __init__(self, decoder: Decoder, contexts: Tensor, mask: Tensor):
        self.decoder = decoder
        # For MPS, which has no float64, random numbers are on the CPU: `rows` index them.
        device = torch.device("cpu") if contexts.device.type == "mps" else contexts.device
        self.rows = torch.arange(len(contexts), device=device)  # [b]: still in the batch
        self.tokens = contexts.masked_fill(~mask, 0)  # [b, C], then [b, 1]: not yet computed
        self.mask = mask  # [b, C], then [b, columns of the cache]
        self.size, width = mask.shape
        self.longest = width + decoder.response_length  # columns of the cache, at most
        self.length = 0  # columns of the cache that are in use
        self.steps = 0  # since the shape of the cache changed
        self.graphs = decoder.cuda_graphs  # whether steps are replayed
        self.replay: Callable[..., Tensor] | None = None  # the step as a CUDA graph

    @torch.no_grad()
    def next_logits(self) -> Tensor:
        """Logits [b, V] of the next token in fp32. The next call overwrites them."""
        if self.length == 0:
            return self.prefill()
        if self.length == self.mask.shape[1]:
            self.grow()
        position_ids = self.mask.sum(dim=1, keepdim=True)  # the real tokens before
        self.mask[:, self.length] = True
        self.length += 1
        inputs = self.tokens, self.mask, position_ids
        if self.graphs and self.replay is None and self.steps > 0:
            self.replay = self.record(*inputs)
        self.steps += 1
        return self.replay(*inputs) if self.replay else self.compute(*inputs)

    def append(self, tokens: Tensor) -> None:
        """Add one token [b] to each sequence."""
        self.tokens = tokens[:, None]

    def drop(self, ended: Tensor) -> None:
        """Remove the sequences that have ended [b]; waits for the GPU.

        At least `MIN_ROWS` sequences stay, ended ones if necessary, or none if all have ended.
        With CUDA graphs, their number falls by powers of two: each number needs a new graph.
        """
        left = int((~ended).sum())
        number = max(left, MIN_ROWS) if left else 0
        if self.graphs and number:
            number = 1 << (number - 1).bit_length()
        if number >= len(ended):
            return
        # Those that have not ended come first:
        order: Any = ended.byte().argsort(stable=True)[:number]
        self.rows = self.rows[order.to(self.rows.device)]
        self.tokens, self.mask = self.tokens[order], self.mask[order]
        self.cache.reorder_cache(order)
        self.settle()

    def prefill(self) -> Tensor:
        """Compute each distinct prompt once, without columns of padding only."""
        first = int(self.mask.any(dim=0).byte().argmax())
        tokens, mask = self.tokens[:, first:], self.mask[:, first:]
        prompts, which = tokens.masked_fill(~mask, -1).unique(dim=0, return_inverse=True)  # [P, C]
        real = prompts >= 0
        position_ids = real.cumsum(dim=1) - real.long()
        self.length = mask.shape[1]
        self.cache = KeyValueCache(config=self.decoder.lm.config, max_cache_len=self.room())
        self.mask, real = (F.pad(x, (0, self.room() - self.length)) for x in (mask, real))
        logits = self.compute(prompts.clamp(min=0), real, position_ids)
        self.cache.reorder_cache(which)
        tensors = [x for layer in self.cache.layers for x in vars(layer).values()]
        size = sum(x.nbytes for x in tensors if isinstance(x, Tensor)) * self.longest / self.room()
        if self.graphs and size > (limit := self.decoder.limit):
            self.graphs = False
            say_once(
                f"sampling without CUDA graphs, whose cache would keep over {limit / 1e9:.1f} GB; "
                "a smaller --rollout_batch_size keeps less"
            )
        self.settle()
        logits = logits[which]
        if self.graphs:
            self.logits = self.decoder.keep("logits", logits[:, None], self.size, 1)[:, 0]
        return logits

    def grow(self) -> None:
        """Make room for one more token, and for the rest of its block."""
        larger = KeyValueCache(config=self.decoder.lm.config, max_cache_len=self.room())
        for layer, like in zip(self.cache.layers, larger.layers, strict=True):
            if not hasattr(layer, "max_cache_len"):
                continue  # a linear layer
            more = 0, 0, 0, like.max_cache_len - layer.max_cache_len  # 0 if its window is full
            for name in ("keys", "values", "indexer_keys"):
                if (x := getattr(layer, name, None)) is not None:
                    setattr(layer, name, F.pad(x, more))
            layer.max_cache_len = like.max_cache_len
        self.mask = F.pad(self.mask, (0, self.room() - self.length))
        self.settle()

    def settle(self) -> None:
        """After the cache has a new shape: move it to where CUDA graphs read and write it."""
        self.steps, self.replay = 0, None
        if not self.graphs:
            return
        decoder = self.decoder
        weights = [x.data_ptr() for x in (*decoder.lm.parameters(), *decoder.lm.buffers())]
        if weights != decoder.weights:
            decoder.weights = weights
            decoder.graphs.clear()
        for i, layer in enumerate(self.cache.layers):
            for name, x in [*vars(layer).items()]:
                if isinstance(x, Tensor):
                    setattr(layer, name, decoder.keep(f"{i} {name}", x, self.size, self.longest))
        self.replay = decoder.graphs.get(self.mask.shape)

    def room(self) -> int:
        """Columns with room for one more token: whole blocks, but at most `longest`."""
        return min(math.ceil((self.length + 1) / BLOCK) * BLOCK, self.longest)

    def record(self, *inputs: Tensor) -> Callable | None:
        """A function that does what `compute` does, for inputs of these shapes, as a CUDA graph.

        Its kernels read and write the same memory each time; the next call overwrites the result.
        They also cast the weights to bf16 each time, since an update changes them. None if
        recording fails; then no other graph is tried.
        """
        decoder, inputs = self.decoder, tuple(x.clone() for x in inputs)
        graph, result = torch.cuda.CUDAGraph(), self.logits[: len(inputs[0])]
        if not decoder.graphs:  # no graph may use the memory of those that are gone
            decoder.pool = torch.cuda.graph_pool_handle()
        torch.set_autocast_cache_enabled(False)
        try:
            with (
                torch.cuda.stream(decoder.stream),  # is left even if ending the graph fails
                torch.cuda.graph(graph, decoder.pool, decoder.stream, "thread_local"),
            ):
                result.copy_(self.compute(*inputs))
        except RuntimeError as error:
            cause = error.__context__ or error  # the end of the graph hides the first one
            print(f"sampling without CUDA graphs, which failed: {cause!s:.200}", flush=True)
            self.graphs = decoder.cuda_graphs = False
            return None
        finally:
            torch.set_autocast_cache_enabled(True)

        def replay(*new: Tensor) -> Tensor:
            for old, x in zip(inputs, new, strict=True):
                old.copy_(x)
            graph.replay()
            return result

        decoder.graphs[self.mask.shape] = replay
        return replay

    def compute(self, tokens: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        """Logits [b, V] after more tokens of each sequence; mask [b, columns of the cache]."""
        if self.decoder.linear:
            mask = mask[:, : self.length]  # linear layers read the last columns
        inputs = {"attention_mask": mask, "position_ids": position_ids, CACHE: self.cache}
        lm = self.decoder.lm
        return lm(tokens, use_cache=True, logits_to_keep=1, **inputs).logits[:, -1].float()


class KeyValueCache(StaticCache):
    """A static cache for autocast, under which keys with rotary angles are fp32."""

    layers: Any  # a hybrid's linear layers have no keys and values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Add those of one layer; return all. Attention casts the keys anyway."""
        return super().update(key_states.to(value_states.dtype), value_states, *args, **kwargs)
