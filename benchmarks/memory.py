"""What a PPO or RLOO run takes of memory, by model, task and flags: computed by running it without any numbers.

    python benchmarks/memory.py                     # the table of known shapes, also as CSV: computed
    python benchmarks/memory.py --check             # GPT-2 124M: computed, the same with real numbers, and the process's own

An update of the script itself (sample, score, optimise) runs over torch's fake tensors: every shape, no contents; a `Tracker`
adds up what is alive. Every row is as long as the task allows, the reward model is of the policy's shape, Adam's state is there
from the start, one process. Of sampling only the last two tokens, so its prefill is R − 2 tokens too long. Not in it: what a kernel takes for itself, the CUDA context (about 0.5 GiB), what the
allocator cannot use for splits, and DDP's buckets (4 bytes per parameter more on several processes). A CPU's attention
and autocast rules stand in for CUDA's.
"""

import copy
import csv
import json
import resource
import subprocess
import sys
import tempfile
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from accelerate import Accelerator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig, PretrainedConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
import packing
import ppo  # noqa: E402
import rloo  # noqa: E402
import tasks  # noqa: E402
import utils  # noqa: E402

GIB = 2**30
CARDS = (24, 80, 141)  # GB as sold
HEADROOM = 0.9  # of a card; the rest is for what is not computed
SCRIPTS = {"ppo": ppo, "rloo": rloo}


def gpt2(width: int, layers: int, heads: int) -> GPT2Config:
    return GPT2Config(n_embd=width, n_layer=layers, n_head=heads)


def pythia(width: int, layers: int, heads: int, vocab: int = 50304) -> GPTNeoXConfig:
    sizes = dict(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads)
    return GPTNeoXConfig(vocab_size=vocab, max_position_embeddings=2048, rotary_pct=0.25, **sizes)


LLAMA = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
SHAPES = {
    "GPT-2 124M": gpt2(768, 12, 12),
    "GPT-2 355M": gpt2(1024, 24, 16),
    "GPT-2 774M": gpt2(1280, 36, 20),
    "GPT-2 1.5B": gpt2(1600, 48, 25),
    "Pythia 410M": pythia(1024, 24, 16),
    "Pythia 1B": pythia(2048, 16, 8),
    "Pythia 2.8B": pythia(2560, 32, 32),
    "Pythia 6.9B": pythia(4096, 32, 32, 50432),
    "Llama 8B": LlamaConfig(vocab_size=128256, num_key_value_heads=8, max_position_embeddings=8192, **LLAMA),
}


@dataclass(frozen=True)
class Args:
    """What a run takes of memory."""

    out: Path = Path(__file__).with_suffix(".csv")
    """CSV to write"""
    precision: Literal["no", "bf16"] = "bf16"
    """as `accelerate launch --mixed_precision`"""
    shapes: tuple[str, ...] = tuple(SHAPES)
    """models of the table"""
    scripts: tuple[str, ...] = tuple(SCRIPTS)
    """scripts of the table"""
    check: bool = False
    """computed against measured, in fp32: GPT-2 124M, 8 episodes of `sentiment`, each row in a process of its own"""
    only: str | None = None
    """script,checkpointing,real: one number of the check, in this process"""


class Tracker(TorchDispatchMode):
    """Bytes of all tensors that are alive, each storage once; their peak since `restart`."""

    def __init__(self):
        super().__init__()
        self.alive, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.drop, key)

    def drop(self, key: int) -> None:
        self.now -= self.alive.pop(key)

    def restart(self) -> int:
        """The peak until now, in bytes; another one begins."""
        peak, self.peak = self.peak, self.now
        return peak


def parts(config: PretrainedConfig, task: tasks.Task, micro: int, rollout: int, precision: str) -> dict[str, int]:
    """The large parts by hand, in bytes: weights and optimizer by parameters, cache and logits by sequences."""
    reward = utils.RewardConfig(copy.deepcopy(config), config.vocab_size)
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", text.num_attention_heads)
    tokens = task.query_length + task.response_length
    width = text.hidden_size // text.num_attention_heads * heads * (2 if precision == "bf16" else 4)
    return {
        "policy, gradients, Adam, reference": 20 * utils.count_parameters(config),  # 4 + 4 + 8 + 4
        "reward model": 4 * utils.count_parameters(reward),
        "cache": 2 * text.num_hidden_layers * width * rollout * tokens,
        "logits of a micro-batch, one copy": 4 * micro * task.response_length * text.vocab_size // tokens,
    }


def run_update(script: Any, name: str, args: Any, precision: str, fake: bool) -> dict[str, int]:
    """The peak in bytes of each phase of an update of `script` with the model in folder `name`, and what is alive between
    two updates."""
    accelerator, task = Accelerator(cpu=True, mixed_precision=precision), args.task
    pad_id = utils.AutoConfig.from_pretrained(name).vocab_size
    full = lambda tokens: (np.arange(len(tokens)), np.zeros(len(tokens), int), np.full(len(tokens), tokens.shape[1]))  # noqa: E731
    packing.shared_prompts = lambda tokens, real, prompt: full(tokens)  # what is fake has no pads, and no row twice
    packing.distinct = torch.flatten  # so no place either
    packing.keeps_rows_apart = lambda base: True
    packing.row_lengths = lambda tokens, pad_id: full(tokens)[2]
    packing.row_sizes = lambda tokens, pad_id, prompt=0: np.stack(full(tokens)[::-2], axis=1)
    utils.check_gradients = lambda *args, **numbers: None  # and no numbers that could be looked at
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext(), Tracker() as tracker:
        kind = getattr(script, "PolicyAndValue", None) or script.Policy
        policy = kind(utils.load_lm(name), pad_id, task.temperature)
        ref = script.Policy(utils.load_lm(name), pad_id, task.temperature).eval().requires_grad_(False)
        reward = utils.RewardModel(utils.RewardConfig(ref.lm.config, pad_id)).eval().requires_grad_(False)
        if args.gradient_checkpointing:
            utils.checkpoint_activations(policy.lm)
        lm, optimizer = policy.lm, script.AdamTF(policy.parameters(), lr=1e-5)
        policy, optimizer = accelerator.prepare(policy, optimizer, device_placement=[False, False])
        score = lambda queries, cut: reward.score(queries, cut, size=args.micro_batch_tokens)  # noqa: E731
        models = script.Models(policy, ref, score, utils.Ids(pad_id, 13, [], []))

        def step(batch: Any) -> int:
            policy.train()
            targets = (script.estimate(batch, args),) if hasattr(script, "estimate") else ()
            script.train_step(policy, optimizer, batch, *targets, args, accelerator)
            return tracker.restart()

        policy.eval()
        peaks, (rows, r) = {}, (args.batch_size, task.response_length)
        with accelerator.autocast():
            contexts = torch.randint(0, pad_id, (rows, task.query_length + r - 2))  # the last two tokens: a full cache
            script.sample(lm, contexts, torch.rand(2, rows, 1, dtype=torch.float64), task, models.ids)
            peaks["sample"] = tracker.restart()
            order, queries = np.arange(rows), torch.randint(0, pad_id, (rows, task.query_length))
            responses = torch.randint(0, pad_id, (rows, r))
            rollout, _ = script.make_rollout(models, queries, responses, order, 0.15, args)
            peaks["score"] = tracker.restart()
        rollout = rollout._replace(forward=None)  # a run's first step frees its graph
        before = tracker.now
        step(rollout.take(order[:1]))
        state = tracker.now - before  # Adam's, from the second update on there while sampling too
        peaks = {"live": tracker.now} | {name: peak + state for name, peak in peaks.items()}
        batch = rollout.take(order[: 2 * args.micro_batch_tokens // (task.query_length + r)])  # two micro-batches
        peaks["optimise"] = step(batch)
        if fake and not args.gradient_checkpointing:
            utils.checkpoint_activations(lm)
            peaks["optimise, checkpointing"] = step(batch)
    return peaks


def settings(script: str, task: str, **changes: Any) -> Any:
    """The task's own sizes; of the batch, which costs next to nothing, one sampling forward."""
    module = SCRIPTS[script]
    args = tasks.parse_args(module.Args, module.PRESETS, ["--task", task])
    args = replace(args, **changes)
    return replace(args, batch_size=args.rollout_batch_size, num_minibatches=1)


def compute(shape: str, script: str, args: Any, precision: str, fake: bool = True) -> dict[str, int]:
    """`run_update` of a known shape with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        SHAPES[shape].save_pretrained(folder)
        return run_update(SCRIPTS[script], folder, args, precision, fake)


def one_row(only: str) -> dict[str, float]:
    """A row of the check: peaks in GiB, and the largest memory of this process less that of the libraries."""
    script, checkpointing, real = only.split(",")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sizes = dict(micro_batch_tokens=704, rollout_batch_size=8, gradient_checkpointing=checkpointing == "1")
    peaks = compute("GPT-2 124M", script, settings(script, "sentiment", **sizes), "no", fake=real == "0")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak": peaks["optimise"] / GIB, "process": (after - before) / 2**20}


def check() -> None:
    """Computed against measured: the same update with real numbers, and the largest memory of its process."""
    print(f"{'GPT-2 124M, 8 × 88 tokens, GiB':32}{'computed':>10}{'real tensors':>14}{'process less libraries':>24}")
    for script in SCRIPTS:
        for checkpointing in (0, 1):
            found = []
            for real in (0, 1):
                command = [sys.executable, __file__, "--only", f"{script},{checkpointing},{real}"]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found.append(json.loads(out.splitlines()[-1]))
            name, (fake, real) = script + ", checkpointing" * checkpointing, found
            print(f"{name:32}{fake['peak']:10.2f}{real['peak']:14.2f}{real['process']:24.2f}", flush=True)


def fits(peak: int) -> str:
    """The smallest card that holds a peak."""
    return next((str(card) for card in CARDS if peak <= HEADROOM * card * 1e9), "–")


def main(args: Args) -> None:
    """Compute, print, write."""
    if args.only:
        print(json.dumps(one_row(args.only)))
        return
    if args.check:
        check()
        return
    rows = []
    for script, shape, task in product(args.scripts, args.shapes, ("sentiment", "tldr")):
        run = settings(script, task)
        sizes = run.task, run.micro_batch_tokens, run.rollout_batch_size, args.precision
        found = parts(SHAPES[shape], *sizes) | compute(shape, script, run, args.precision)
        row = {"script": script, "shape": shape, "task": task}
        row |= {name: f"{size / GIB:.2f}" for name, size in found.items()}
        others = max(found["sample"], found["score"])
        row["card"] = fits(max(others, found["optimise"]))
        row["card, checkpointing"] = fits(max(others, found["optimise, checkpointing"]))
        rows.append(row)
        print(*row.values(), flush=True)
        with open(args.out, "w", newline="") as file:
            csv.writer(file).writerows([rows[0], *(row.values() for row in rows)])


if __name__ == "__main__":
    main(tyro.cli(Args))
