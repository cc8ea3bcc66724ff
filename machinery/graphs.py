"""CUDA graphs of sampling: the step of a `DecodingBatch`, recorded once and replayed."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from machinery.cli import about, say_once
from machinery.decoding import Decoder, DecodingBatch, KeyValueCache

LARGEST = 0.05  # of a GPU's memory: the part that a cache may keep for graphs


def can_record(lm: Any) -> bool:
    """Whether steps can be recorded: not under FSDP2 (weights move), for Falcon (it indexes with
    lists), or with sliding windows or linear layers (the CPU manages them).
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
        self.graphs, self.size = decoder.graphs, len(contexts)
        self.replay: Callable[..., Tensor] | None = None
        self.logits: Any = None  # of the first step with a shape; it is not recorded
        if self.graphs and torch.is_autocast_enabled(contexts.device.type):
            self.lm = self.graphs.cast(decoder.lm)

    def round_up(self, number: int) -> int:
        """A power of two: each number of sequences needs a new graph."""
        return 1 << (number - 1).bit_length() if self.graphs else number

    def cache_changed(self) -> None:
        """Move the cache to where graphs read and write it, unless it is too large."""
        self.logits, self.replay, graphs = None, None, self.graphs
        if not graphs:
            return
        layers = self.cache.layers
        tensors = [(i, *x) for i, layer in enumerate(layers) for x in vars(layer).items()]
        tensors = [x for x in tensors if isinstance(x[-1], Tensor)]
        size = sum(x.nbytes for *_, x in tensors) * self.size * self.max_columns
        if size > graphs.limit * self.mask.numel():
            say_once("the cache is too large to keep for CUDA graphs: lower --rollout_batch_size")
            self.graphs = None
            return
        weights = [x.data_ptr() for x in (*self.lm.parameters(), *self.lm.buffers())]
        if weights != graphs.weights:
            graphs.weights = weights
            graphs.steps.clear()
        for i, name, x in tensors:
            kept = graphs.keep(f"{i} {name}", x, self.size, self.max_columns)
            setattr(layers[i], name, kept)
        self.replay = graphs.steps.get(self.mask.shape)

    def compute(self, *inputs: Tensor) -> Tensor:
        """Logits, replayed from the second step with this shape on."""
        if self.graphs and self.replay is None and self.logits is not None:
            with about("a CUDA graph (use --no-cuda_graphs)"):
                self.replay = self.record(self.graphs, *inputs)
        if self.replay:
            return self.replay(*inputs)
        self.logits = super().compute(*inputs)
        return self.logits

    def record(self, graphs: Graphs, *inputs: Tensor) -> Callable[..., Tensor]:
        """The computation for inputs of these shapes as a CUDA graph.

        Its kernels read and write the same memory each time; the next call overwrites the result.
        """
        result = graphs.keep("logits", self.logits[:, None], self.size, 1)[:, 0]
        graph, inputs = torch.cuda.CUDAGraph(), tuple(x.clone() for x in inputs)
        if not graphs.steps:  # no graph may use the memory of those that are gone
            graphs.pool = torch.cuda.graph_pool_handle()
        device, record = result.device.type, (graph, graphs.pool, graphs.stream, "thread_local")
        enabled = torch.is_autocast_enabled(device)
        # Without autocast's cache: it would keep weights of today for all replays.
        with (
            torch.autocast(device, enabled=enabled, cache_enabled=False),
            torch.cuda.graph(*record),
        ):
            result.copy_(super().compute(*inputs))

        def replay(*new: Tensor) -> Tensor:
            for old, x in zip(inputs, new, strict=True):
                old.copy_(x)
            graph.replay()
            return result

        graphs.steps[self.mask.shape] = replay
        return replay
