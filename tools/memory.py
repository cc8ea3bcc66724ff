r"""GPU memory of a PPO or RLOO run by model, task and flags, computed without any numbers.

    python tools/memory.py --tasks sentiment \
        --flags="--micro_batch_tokens 32768 --rollout_batch_size 512"    # a GPU's defaults
    python tools/memory.py --tasks tldr --flags="--gradient_checkpointing"

The script's own `main` runs over fake tensors, which have a shape but no contents, while the bytes
of all living tensors are added up: GiB by phase of an update, and between two updates (`live`). One
process; the reward model has the policy's shape. Queries that are sampled from have full length:
the cache is largest. Those that are trained on have the length at which a minibatch just fits into
a micro-batch: it has the most tokens, and the most logits. Not included: what kernels take, the
CUDA context (about 0.5 GiB), fragmentation, and with several copies the message of gradients
(4 bytes per parameter). A CPU's attention and autocast stand in for CUDA's.
"""

import copy
import importlib
import itertools
import os
import sys
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
import train_reward  # noqa: E402
from machinery import cli, distributed, models  # noqa: E402
from utils import TokenIds  # noqa: E402

GIB = 2**30
CARDS = (24, 80, 141)  # GB as sold, of which a tenth has to stay free
PHASES = ("sample", "score", "optimize")


def gpt2(width: int, layers: int, heads: int) -> GPT2Config:
    return GPT2Config(n_embd=width, n_layer=layers, n_head=heads)


def pythia(width: int, layers: int, heads: int) -> GPTNeoXConfig:
    sizes = dict(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers)
    return GPTNeoXConfig(**sizes, num_attention_heads=heads, vocab_size=50304)


LLAMA = dict(hidden_size=4096, intermediate_size=14336, vocab_size=128256, num_hidden_layers=32)
SHAPES = {
    "GPT-2 124M": gpt2(768, 12, 12),
    "GPT-2 355M": gpt2(1024, 24, 16),
    "GPT-2 774M": gpt2(1280, 36, 20),
    "GPT-2 1.5B": gpt2(1600, 48, 25),
    "Pythia 410M": pythia(1024, 24, 16),
    "Pythia 1B": pythia(2048, 16, 8),
    "Pythia 2.8B": pythia(2560, 32, 32),
    "Pythia 6.9B": pythia(4096, 32, 32),
    "Llama 8B": LlamaConfig(**LLAMA, num_attention_heads=32, num_key_value_heads=8),
}


@dataclass(frozen=True)
class Args:
    """GPU memory of a PPO or RLOO run by model, task and flags, computed without any numbers."""

    scripts: tuple[str, ...] = ("ppo", "rloo")
    """scripts, also copies of yours"""
    shapes: tuple[str, ...] = tuple(SHAPES)
    """models, see SHAPES"""
    tasks: tuple[str, ...] = ("sentiment", "tldr")
    """tasks, whose lengths and defaults count"""
    flags: str = ""
    """flags for every run, such as --flags="--gradient_checkpointing" with the ="""


class Tracker(TorchDispatchMode):
    """Adds up the bytes of all living tensors, and their maximum since `restart`."""

    def __init__(self):
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator. There is no padding, and no batch of responses ends early."""
        if func is torch.ops.aten._local_scalar_dense.default and not args[0].is_floating_point():
            return 0  # also the first column that is not padding everywhere
        if func is torch.ops.aten.nonzero.default:
            out = args[0].new_empty(args[0].numel(), args[0].ndim, dtype=torch.long)
        else:
            out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, once, for as long as it lives."""
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.drop, key)

    def drop(self, key: int) -> None:
        """A storage is freed."""
        self.now -= self.alive.pop(key)

    def restart(self) -> int:
        """Return the maximum so far and start another."""
        peak, self.peak = self.peak, self.now
        return peak


class Finished(Exception):
    """All phases of interest are measured."""


class Recorder:
    """In place of a script's `Run`, `Timer` and table of queries."""

    def __init__(self, args: Any, tracker: Tracker, until: str):
        self.args, self.tracker, self.until = args, tracker, until
        self.phase = "live"
        self.found: dict[str, float] = {}

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, rows: Any) -> Tensor:
        return torch.ones(len(rows), self.args.task.query_length, dtype=torch.long)

    def hold_out(self, n: int, needed: int = 1) -> tuple["Recorder", "Recorder"]:
        return self, self

    def restore(self, policy: Any, optimizer: Any, kl_coef: float) -> tuple[int, float]:
        for weight in filter(lambda x: x.requires_grad, policy.parameters()):
            weight.grad = torch.zeros_like(weight)
        optimizer.step()  # now Adam has its moments
        optimizer.zero_grad()
        return 1, kl_coef  # update 0 would begin with an evaluation

    def start(self, phase: str) -> None:
        peak = self.tracker.restart()
        self.found[self.phase] = (self.tracker.now if self.phase == "live" else peak) / GIB
        self.phase = phase
        if phase == self.until:
            raise Finished

    def stop(self) -> None:
        self.start("live")

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None  # the rest of a `Run` does nothing


def each_alone(prompts: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """In place of `Tensor.unique`: no prompt is equal to another."""
    return prompts, torch.arange(len(prompts))


def cast(module: torch.nn.Module, to: Any, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """In place of `Module.to`: casts, but moves nothing."""
    if dtype := to if isinstance(to, torch.dtype) else dtype:  # PEFT passes a device and a dtype
        for weight in module.parameters():
            weight.data = weight.data.to(dtype)  # in place: the optimizer has frozen weights too
    return module


def random_lm(config: Any) -> Any:
    """A model as `load_lm` makes it."""
    lm = AutoModelForCausalLM.from_config(models.disable_dropout(copy.deepcopy(config)))
    lm.get_output_embeddings().__class__ = models.Float32Linear
    models.choose_kernels(lm)
    return lm


def run_update(script: Any, args: Any, config: Any, until: str) -> dict[str, float]:
    """GiB by phase of an update of `script`, without padding and equal prompts.

    It ends before the phase `until`, which is `score` or the next update's `live`. In the latter
    case nothing is sampled.
    """
    tracker = Tracker()
    recorder = Recorder(args, tracker, until)
    ids = TokenIds(config.vocab_size, [], [], [])
    size = args.micro_batch_tokens // (args.task.query_length + args.task.response_length)

    def random_reward(args: Any, tokenizer: Any, ids: Any, accelerator: Any) -> Any:
        config_of_reward = train_reward.RewardConfig(copy.deepcopy(config), ids.pad)
        model = train_reward.RewardModel(config_of_reward)
        score = accelerator.autocast()(train_reward.RewardModel.score)
        models.store_as_cast(model.eval().requires_grad_(False))

        def reward(queries: Tensor, responses: Tensor, columns: dict) -> tuple[Tensor, dict]:
            return score(model, torch.cat([queries, responses], 1), args.micro_batch_tokens), {}

        return reward

    def micro_batches(lengths: Tensor, count: int) -> list[slice]:
        n = len(lengths)
        return [slice(i, min(i + size, n)) for i in range(0, n, size)]

    replaced = dict(load_reward=random_reward, count_micro_batches=lambda *a: 1)
    replaced |= dict(load_lm=lambda *_, **__: random_lm(config))
    replaced |= dict(load_tokenizer=lambda *a: (None, ids), load_queries=lambda *a, **k: recorder)
    replaced |= dict(Run=lambda *a: recorder, Timer=lambda device: recorder, check=lambda *a: None)
    if until == "live":
        shape = args.batch_size, args.task.response_length
        replaced |= dict(sample_in_batches=lambda *a: torch.ones(shape, dtype=torch.long))
    with (
        patch.multiple(script, micro_batches=micro_batches, **replaced),
        patch.object(train_reward, "micro_batches", micro_batches),
        patch.object(train_reward, "count_micro_batches", lambda *a: 1),
        patch.object(train_reward, "load_lm", replaced["load_lm"]),  # of a separate critic
        patch.object(distributed, "check_gradients", lambda *a: None),
        patch.object(torch.nn.Module, "to", cast),
        patch.object(Tensor, "unique", each_alone),
        FakeTensorMode(allow_non_fake_inputs=True),
        tracker,
    ):
        try:
            script.main(args)
        except Finished:
            return recorder.found


def measure(script: Any, shape: str, args: Any) -> dict[str, float]:
    """GiB by phase of a script's updates in bf16."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    query_length, response_length = args.task.query_length, args.task.response_length
    shorter = args.micro_batch_tokens * args.num_minibatches // args.batch_size - response_length
    shorter = min(max(shorter, 1), query_length)
    found = {}
    for length, size, until in (
        (shorter, args.batch_size, "live"),
        (query_length, min(args.rollout_batch_size, args.batch_size), "score"),
    ):
        task = replace(args.task, gold_fn=None, query_length=length)
        sizes = dict(batch_size=size, total_episodes=2 * size, num_ppo_epochs=1)
        sized = replace(args, task=task, **sizes)
        found |= run_update(script, sized, SHAPES[shape], until)
    return found


def main(args: Args) -> None:
    """Print a Markdown table: memory by phase, and the smallest card that fits."""
    columns = ("shape", "task", "script", "live", *PHASES, "fits, GB")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for shape, task, name in itertools.product(args.shapes, args.tasks, args.scripts):
        script = importlib.import_module(name)
        argv = ["--task", task, *args.flags.split()]
        found = measure(script, shape, cli.parse_args(script.Args, script.PRESETS, argv))
        cards = [card for card in CARDS if max(found.values()) * GIB <= 0.9 * card * 1e9]
        sizes = [f"{found[phase]:.2f}" for phase in ("live", *PHASES)]
        print("|", " | ".join([shape, task, name, *sizes, str((cards or ["none"])[0])]), "|")


if __name__ == "__main__":
    cli.run(main, Args)
