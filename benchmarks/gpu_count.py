"""Kernels, bytes and operations of an update on a GPU, counted without one.

    python benchmarks/gpu_count.py sentiment    # GPT-2 124M, 512 episodes; a minute on one core
    python benchmarks/gpu_count.py tldr         # Pythia 1B, 64 episodes

The script's own `main` runs in bf16 with the flags of gpu.py. Tensors of integers and masks have
numbers, so that batches are real ones; other tensors have a shape only (`FakeTensor`). Each operator
is one kernel that reads its inputs and writes its results, unless it is a view. CUDA graphs replay
the kernels that were recorded. The update counted is the second. A row's milliseconds are the larger
of its bytes and its operations at the rates below, plus a microsecond per kernel. Where a kernel is
slower than these rates, only a profile shows it (gpu.py, docs/speed.md).
"""

import contextlib
import csv
import importlib
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
import torch  # noqa: E402
import transformers  # noqa: E402
import tyro  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.nn.attention import varlen  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from benchmarks import gpu, speed  # noqa: E402
from machinery import cli, models, rewards, unpadding  # noqa: E402
from tools import memory  # noqa: E402
from utils import TokenIds  # noqa: E402

BANDWIDTH, LAUNCH = 3.9e12, 1e-6  # of an H200: bytes per second that kernels reach; seconds
RATES = {
    "products, bf16": 680e12,
    "products, fp32": 350e12,
}  # operations per second that they reach
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view"}
FREE |= {"_local_scalar_dense", "lift_fresh", "_reshape_alias", "split", "split_with_sizes"}
MADE = {"zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones"}
MADE |= {"new_full", "arange", "fill_", "zero_", "scalar_tensor", "rand"}  # nothing is read
TAKEN = {"index", "index_select", "gather", "embedding", "slice_backward", "select_backward"}
PUT = {"index_copy_": 3, "index_put_": 2, "copy_": 1}  # → which argument is written
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


class FlatAttention(torch.autograd.Function):
    """In place of `varlen_attn`: counts what attention within flat sequences would compute."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        lengths = bounds.diff()  # n causal tokens have n (n + 1) / 2 pairs
        ctx.operations = 2.0 * q.shape[1:].numel() * (lengths * (lengths + 1)).sum().item()
        ctx.save_for_backward(q, k, v)
        Tally.current.add("attention", sum(map(size, (q, k, v, q))), ctx.operations)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        Tally.current.add("attention", 2 * sum(map(size, (*tensors, grad))), 2.5 * ctx.operations)
        return *map(torch.empty_like, tensors), None


class Tally(TorchDispatchMode):
    """Counts operators by phase and class in `rows`: kernels, bytes, operations."""

    current: "Tally"

    def __init__(self, vocabulary: int = 0, weights: set[Any] | None = None):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.vocabulary, self.weights = vocabulary, weights or set()  # shapes of weights
        self.phase = "load"
        self.rows: Counter = Counter()
        Tally.current = self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator, of shapes only if one of its inputs has no numbers."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        fake = any(isinstance(x, FakeTensor) for x in given)
        if fake and name == "_local_scalar_dense":
            return 1.0 if args[0].is_floating_point() else 0
        if not given or name.startswith("new_"):  # a new tensor: floats have no numbers
            integers = name in ("arange", "full") and not any(type(x) is float for x in args)
            dtype = torch.long if integers else given[0].dtype if given else torch.float32
            dtype = kwargs.get("dtype") or dtype
            fake = dtype.is_floating_point
        with self.fake if fake else contextlib.nullcontext():
            out = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        is_view = any(x.alias_info and not x.alias_info.is_write for x in func._schema.returns)
        if not is_view and name not in FREE and func.namespace != "prim":
            self.add(*self.describe(name, args, given, made))
        return out

    def add(self, kind: str, nbytes: int, operations: float) -> None:
        """Count a kernel."""
        for what, number in (("kernels", 1), ("bytes", nbytes), ("operations", operations)):
            self.rows[self.phase, kind, what] += number

    def describe(
        self, name: str, args: Any, given: list[Tensor], made: list[Tensor]
    ) -> tuple[str, int, float]:
        """The class of a call, its bytes and its operations."""
        nbytes, both = sum(map(size, given + made)), given + made
        if name in MADE | TAKEN:
            nbytes = (2 if name in TAKEN else 1) * sum(map(size, made))
        elif name in PUT:
            nbytes = 2 * size(args[PUT[name]])
        if name in PRODUCTS:
            a, b = given[-2:]
            kind = "products, bf16" if a.dtype == torch.bfloat16 else "products, fp32"
            if name == "bmm" and not self.has_logits(made[0]):
                kind = "attention of one token"
            elif min(*a.shape[-2:], b.shape[-1]) == 1 and name != "bmm":
                kind = "matrix-vector"
            return kind, nbytes, 2.0 * a.numel() * b.shape[-1]
        if "scaled_dot_product" in name:
            q, k = given[:2]
            kind = "attention of one token" if q.shape[2] == 1 else "attention of prompts"
            return kind, nbytes, 4.0 * q.numel() * k.shape[2]
        if name.startswith(("_fused_adam", "_foreach", "linalg_vector_norm")):
            return "optimizer", nbytes, 0
        if any(x.numel() > 1e6 and self.has_logits(x) for x in both):
            return "softmax and elementwise, logits", nbytes, 0
        if name in ("_to_copy", "copy_", "clone"):
            weight = tuple(given[-1].shape) in self.weights
            return "casts of weights" if weight else "casts and copies", nbytes, 0
        if "layer_norm" in name:
            return "layer norm", nbytes, 0
        largest = max((x.numel() for x in both), default=0)
        return "adds, gelu, sums, the rest" if largest > 1e6 else "small", nbytes, 0

    def has_logits(self, x: Tensor) -> bool:
        """Whether a tensor is of logits; the head's weights have the other shape."""
        return bool(self.vocabulary) and 0 <= x.shape[-1] - self.vocabulary < 8


def size(x: Tensor) -> int:
    """Bytes of a tensor, each of its memory once."""
    expanded = 0 in x.stride()
    return x.untyped_storage().nbytes() if expanded else x.numel() * x.element_size()


class Recorder(memory.Recorder):
    """In place of a script's `Run`, `Timer` and table of queries."""

    def __init__(self, args: Any, tally: Tally, table: Any):
        self.args, self.tally, self.table = args, tally, table
        self.updates = 0

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, rows: Any) -> Tensor:
        return self.table[rows]

    def start(self, phase: str) -> None:
        self.tally.phase = phase

    def stop(self) -> dict[str, float]:
        self.updates += 1
        if self.updates == 2:
            raise memory.Finished
        self.tally.rows.clear()
        return {"time/all": 1.0}


def count_update(work: speed.Work, kind: str, flags: list[str]) -> Counter:
    """Run a script's second update; kernels, bytes and operations by phase and class."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    script, length = importlib.import_module(kind), work.query_length + work.response_length
    sizes = dict(batch_size=work.episodes, micro_batch_tokens=32_768)
    sizes |= dict(query_length=work.query_length, response_length=work.response_length)
    words = [str(word) for name, value in sizes.items() for word in (f"--{name}", value)]
    args = cli.parse_args(script.Args, script.PRESETS, ["--task", "sentiment", *words, *flags])
    shapes = dict(model_type="gpt2", bos_token_id=0, eos_token_id=0) | work.config
    config = transformers.AutoConfig.for_model(**shapes)
    with torch.device("meta"):
        weights = memory.random_lm(config).parameters()
    tally = Tally(config.vocab_size, {tuple(x.shape) for x in weights})
    table = gpu.make_queries(work, speed.K if kind == "rloo" else 1)
    recorder, sample = Recorder(args, tally, table), script.sample_in_batches
    ids = TokenIds(config.vocab_size, [5], [], [], length)  # no response has token 5

    def random_lm(*_: Any, **__: Any) -> Any:
        lm = memory.random_lm(config)
        unpadding.set_unpadding(lm.base_model, length)
        return lm

    def random_reward(args: Any, cls: type, tokenizer: Any, ids: Any, accelerator: Any) -> Any:
        model = cls(rewards.RewardConfig(config, ids.pad)).eval().requires_grad_(False)
        unpadding.set_unpadding(model.backbone, length)
        models.store_as_cast(model)
        score, inputs = accelerator.autocast()(rewards.score_in_parts), args.micro_batch_tokens

        def reward(*x: Any) -> Tensor:
            return score(model, torch.cat(x[:2], dim=1), inputs, work.query_length)

        reward.metrics = lambda *a: {}  # no named parts
        return reward

    def sample_in_batches(decoder: Any, contexts: Tensor, *rest: Any) -> Tensor:
        sample(decoder, contexts, *rest)
        return torch.ones(len(contexts), work.response_length, dtype=torch.long)  # numbers

    replaced: dict[str, Any] = dict(load_reward=random_reward, load_lm=random_lm)
    replaced |= dict(load_tokenizer=lambda *_: (None, ids), load_queries=lambda *_, **__: recorder)
    replaced |= dict(Run=lambda *_: recorder, Timer=lambda _: recorder, check=lambda *_: None)
    with (
        patch.multiple(script, **replaced, sample_in_batches=sample_in_batches),
        patch.dict(models.ALIGNMENT, cpu=8),
        patch.object(unpadding, "ONE_TOKEN", {"cpu"}),
        patch.object(unpadding, "can_use_varlen", lambda *_: True),
        patch.object(varlen, "varlen_attn", lambda *x, **_: FlatAttention.apply(*x[:4])),
        patch.object(Tensor, "data_ptr", lambda x: id(x)),
        patch.object(torch.nn.Module, "to", memory.cast),
        contextlib.suppress(memory.Finished),
        tally,
    ):
        script.main(args)
    return tally.rows


@dataclass(frozen=True)
class Args:
    """Kernels, bytes and operations of an update."""

    work: tyro.conf.Positional[Literal["sentiment", "tldr"]]
    """model and batch, as in gpu.py"""
    script: Literal["ppo", "rloo"] = "ppo"
    """script"""
    flags: str = ""
    """flags for it, such as --flags="--no-tf32" with the ="""


def main(args: Args) -> None:
    """Print a table by phase and class as CSV, and the sums."""
    work, flags = (gpu.GPT2, []) if args.work == "sentiment" else (gpu.PYTHIA_1B, gpu.TLDR)
    rows = count_update(work, args.script, [*flags, *args.flags.split()])
    writer = csv.writer(sys.stdout)
    writer.writerow(("phase", "class", "kernels", "GB", "TFLOP", "ms"))
    names, total = ("kernels", "bytes", "operations"), [0.0] * 4
    for phase, kind in sorted({key[:2] for key in rows}):
        kernels, nbytes, operations = (rows[phase, kind, name] for name in names)
        if not kernels:
            continue
        seconds = max(nbytes / BANDWIDTH, operations / RATES.get(kind, 680e12)) + kernels * LAUNCH
        numbers = kernels, nbytes / 1e9, operations / 1e12, 1000 * seconds
        total = [x + y for x, y in zip(total, numbers, strict=True)]
        writer.writerow((phase, kind, *(f"{x:.4g}" for x in numbers)))
    writer.writerow(("all", "", *(f"{x:.4g}" for x in total)))


if __name__ == "__main__":
    main(tyro.cli(Args))
