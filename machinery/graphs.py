"""CUDA graphs of sampling: the step of a `DecodingBatch`, recorded once and replayed."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from machinery.cli import say_once
from machinery.decoding import Decoder, DecodingBatch, KeyValueCache

LARGEST = 0.05  # of a GPU's memory: the part that a cache may keep for graphs


def can_record(lm: Any) -> bool:
    """Whether steps can be recorded.

    Not under FSDP2 (weights move), with sliding windows or linear layers (the CPU manages them), or
    for Falcon (it indexes with lists).
    """
    sharded = any(hasattr(module, "unshard") for module in lm.modules())
    cache = KeyValueCache(config=lm.config, max_cache_len=1)
    on_cpu = cache.has_states() or any(cache.is_sliding) or lm.config.model_type == "falcon"
    return lm.device.type == "cuda" and not (sharded or on_cpu)


class Graphs:
    """Recorded steps for all batches of a `Decoder`, and the memory that they read and write.

    The memory stays for the whole run, and there can be one batch at a time.
    """

    def __init__(self) -> None:
        self.batch = GraphBatch
        self.steps: dict[tuple[int, ...], Callable[..., Tensor]] = {}  # shape of the mask → step
        self.kept: dict[str, Tensor] = {}
        self.casts: list[tuple[Tensor, Tensor]] = []  # weights in bf16, and where they come from
        self.weights: list[int] = []  # addresses of the weights that the steps read
        self.stream = torch.cuda.Stream()
        self.pool: Any = None  # memory for the tensors of a step; graphs use it in turn
        self.limit = LARGEST * torch.cuda.mem_get_info()[1]

    def keep(self, name: str, x: Tensor, rows: int, columns: int) -> Tensor:
        """A copy of `x`, [b, ..., c, D] or a number, in kept memory for `rows` and `columns`."""
        shape = (rows, *x.shape[1:-2], columns, x.shape[-1]) if x.dim() else ()
        kept = self.kept.get(name, x)
        shape = tuple(map(max, shape, kept.shape))
        if name not in self.kept or (shape, x.dtype) != (kept.shape, kept.dtype):
            kept = self.kept[name] = x.new_zeros(shape)
            self.steps.clear()
        return kept[tuple(map(slice, x.shape))].copy_(x)

    @torch.no_grad()
    def cast(self, lm: Any) -> Any:
        """`lm` with bf16 copies of its linear weights, as autocast casts them; a graph would do so
        at each token."""
        if not self.casts:
            weights = [*lm.parameters(), *lm.buffers()]
            self.lm = copy.deepcopy(lm, {id(x): x for x in weights})  # shares them
            for module in self.lm.modules():
                if type(module) in (nn.Linear, Conv1D):
                    for name, x in [*module.named_parameters(recurse=False)]:
                        setattr(module, name, nn.Parameter(x.bfloat16(), requires_grad=False))
                        self.casts.append((getattr(module, name), x))
        for new, old in self.casts:
            new.copy_(old)
        return self.lm


class GraphBatch(DecodingBatch):
    """A batch whose steps are replayed, a graph for each shape of the cache."""

    def __init__(self, decoder: Decoder, contexts: Tensor, mask: Tensor):
        super().__init__(decoder, contexts, mask)
        self.decoder, self.graphs, self.size = decoder, decoder.graphs, len(contexts)
        if self.graphs and torch.is_autocast_enabled(contexts.device.type):
            self.lm = self.graphs.cast(decoder.lm)

    def round_up(self, number: int) -> int:
        """A power of two: each number of sequences needs a new graph."""
        return 1 << (number - 1).bit_length() if self.graphs else number

    def cache_changed(self) -> None:
        """Move the cache to where graphs read and write it, unless it is too large."""
        self.logits: Tensor | None = None  # of the first step with this shape: it is not recorded
        self.replay: Callable[..., Tensor] | None = None
        if not (graphs := self.graphs):
            return
        tensors = [x for layer in self.cache.layers for x in vars(layer).values()]
        size = sum(x.nbytes for x in tensors if isinstance(x, Tensor))
        if size * self.size * self.max_columns > graphs.limit * self.mask.numel():
            self.graphs = None
            say_once(
                "sampling without CUDA graphs, whose cache would keep over "
                f"{graphs.limit / 1e9:.1f} GB; a smaller --rollout_batch_size keeps less"
            )
            return
        weights = [x.data_ptr() for x in (*self.lm.parameters(), *self.lm.buffers())]
        if weights != graphs.weights:
            graphs.weights = weights
            graphs.steps.clear()
        for i, layer in enumerate(self.cache.layers):
            for name, x in [*vars(layer).items()]:
                if isinstance(x, Tensor):
                    kept = graphs.keep(f"{i} {name}", x, self.size, self.max_columns)
                    setattr(layer, name, kept)
        self.replay = graphs.steps.get(self.mask.shape)

    def step(self, *inputs: Tensor) -> Tensor:
        """`compute`, or its replay from the second step with this shape on."""
        if self.graphs and self.logits is not None and self.replay is None:
            self.replay = self.record(self.graphs, self.logits, *inputs)
        if self.replay:
            return self.replay(*inputs)
        self.logits = self.compute(*inputs)
        return self.logits

    def record(self, graphs: Graphs, like: Tensor, *inputs: Tensor) -> Callable | None:
        """`compute` for inputs of these shapes as a CUDA graph, with a result like `like`.

        Its kernels read and write the same memory each time; the next call overwrites the result.
        None if recording fails; then no other graph is tried.
        """
        result = graphs.keep("logits", like[:, None], self.size, 1)[:, 0]
        graph, inputs = torch.cuda.CUDAGraph(), tuple(x.clone() for x in inputs)
        if not graphs.steps:  # no graph may use the memory of those that are gone
            graphs.pool = torch.cuda.graph_pool_handle()
        torch.set_autocast_cache_enabled(False)
        try:
            with (
                torch.cuda.stream(graphs.stream),  # is left even if ending the graph fails
                torch.cuda.graph(graph, graphs.pool, graphs.stream, "thread_local"),
            ):
                result.copy_(self.compute(*inputs))
        except RuntimeError as error:
            cause = error.__context__ or error  # the end of the graph hides the first one
            print(f"sampling without CUDA graphs, which failed: {cause!s:.200}", flush=True)
            self.graphs = self.decoder.graphs = None
            return None
        finally:
            torch.set_autocast_cache_enabled(True)

        def replay(*new: Tensor) -> Tensor:
            for old, x in zip(inputs, new, strict=True):
                old.copy_(x)
            graph.replay()
            return result

        graphs.steps[self.mask.shape] = replay
        return replay
