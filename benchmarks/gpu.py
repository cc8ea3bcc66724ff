"""Checks and speed of the scripts on a GPU, in ten minutes on a machine without internet.

    python benchmarks/gpu.py             # gpu.csv, and a line of JSON
    python benchmarks/gpu.py --small     # one layer, one measured update; also on a CPU

Each row is a process of its own, forked from one that never touched the GPU; if it fails, the row
says why. Checks: the golden tests with their tensors on the GPU, a tiny run of each script, and
whether `--compile` samples the same tokens. Speed: the scripts at the defaults of `--task
sentiment` with random weights, on the queries of speed.py. docs/gpu.md explains rows and columns,
and how to run this without internet.
"""

import csv
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that used the GPU cannot be forked
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402
import tyro  # noqa: E402

import ppo  # noqa: E402
from benchmarks import contestants, speed, sweep  # noqa: E402
from machinery import distributed  # noqa: E402
from machinery.decoding import Decoder  # noqa: E402

SCRIPTS = ("sft", "train_reward", "ppo", "rloo")
PRECISIONS = ("fp32", "tf32", "bf16")
PEAKS = {  # dense operations and bytes per second in the data sheets
    "H200": dict(fp32=67e12, tf32=494.5e12, bf16=989.5e12, bytes=4.8e12),
    "H100 80GB HBM3": dict(fp32=67e12, tf32=494.5e12, bf16=989.5e12, bytes=3.35e12),
    "A100-SXM4-80GB": dict(fp32=19.5e12, tf32=156e12, bf16=312e12, bytes=2.039e12),
}
COLUMNS = ("what", "result", "took", *speed.PHASES, "seconds", "episodes/s", "tokens/s")
COLUMNS += ("of bandwidth", *(f"MFU {phase}" for phase in speed.PHASES), "peak GB", "1M min")

GPT2 = speed.Work(speed.GPT2, 512, ())
LARGE = replace(GPT2, config=speed.GPT2 | dict(n_layer=36, n_embd=1280, n_head=20))
PYTHIA = dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=8, vocab_size=50304)
PYTHIA |= dict(intermediate_size=8192, max_position_embeddings=2048, n_layer=16, n_embd=2048)
PYTHIA_1B = replace(GPT2, config=PYTHIA | dict(model_type="gpt_neox"))
SMALL = speed.Work(dict(n_layer=1, n_embd=32, n_head=2, vocab_size=101, n_positions=96), 8, ())


@dataclass(frozen=True)
class Args:
    """Checks and speed on a GPU."""

    minutes: float = 9
    """time limit"""
    small: bool = False
    """models of one layer, one measured update; always so without a GPU"""
    out: Path = HERE / "gpu"
    """name of the .csv"""


def alone(seconds: float, log: Path, function: Callable, *args: Any) -> dict[str, Any]:
    """What `function` returns in a forked process, or why it returned nothing."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)

    def work() -> None:
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            there.send(function(*args))
        except BaseException as error:  # SystemExit, too
            traceback.print_exc()
            there.send({"result": f"{type(error).__name__}: {error}"})

    process = fork.Process(target=work)
    process.start()
    there.close()  # so that the end of the process is noticed
    try:
        return here.recv() if here.poll(seconds) else {"result": f"stopped after {seconds:.0f} s"}
    except EOFError:
        return {"result": "the process died"}
    finally:
        process.kill()
        process.join()


def device_name() -> dict[str, str]:
    """The name of the GPU, if there is one."""
    return {"result": torch.cuda.get_device_name() if torch.cuda.is_available() else ""}


# ------------------------------------------------------------------------------------------- checks


def golden() -> dict[str, Any]:
    """Run the golden tests with their tensors on the device."""
    import pytest
    from accelerate import Accelerator

    class Fixtures:
        @pytest.fixture
        def accelerator(self) -> Accelerator:
            return Accelerator()

    device, from_numpy = Accelerator().device, torch.from_numpy
    torch.set_default_device(device)
    torch.from_numpy = lambda array: from_numpy(array).to(device)
    options = ["--noconftest", "-p", "no:cacheprovider", str(HERE.parent / "tests/test_golden.py")]
    code = pytest.main(options, plugins=[Fixtures()])
    return {"result": "ok" if code == 0 else f"golden tests end with exit code {code}"}


def compiled() -> dict[str, Any]:
    """Whether a compiled decoding step samples the same tokens, also after the weights changed."""
    device = distributed.start(tiny.make_args()).device
    lm, uniform = tiny.make_lm().to(device), tiny.uniform(24, 8).to(device)
    contexts, same = tiny.make_contexts(tiny.LENGTHS, 8).to(device), []
    decoders = Decoder(lm, 24), Decoder(lm, 24, compile=True)
    for _ in range(3):
        plain, replayed = (tiny.sample(x, contexts, uniform) for x in decoders)
        same.append((plain == replayed).float().mean().item())
        with torch.no_grad():
            lm.lm_head.weight.mul_(1.1)
    word = "ok" if min(same) == 1 else "different tokens"
    return {"result": f"{word}: equal {' '.join(f'{x:.1%}' for x in same)}{graphs_skipped()}"}


def graphs_skipped() -> str:
    """How many CUDA graphs torch.compile did not make, which it only logs."""
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    return f", {skipped} CUDA graphs skipped" if skipped else ""


def tiny_runs(precision: str, folder: Path) -> dict[str, Any]:
    """Run each script on tiny files."""
    results = [f"{tiny_run(name, precision, folder / name)}: {name}" for name in SCRIPTS]
    return {"result": "; ".join(results)}


def tiny_run(name: str, precision: str, folder: Path) -> str:
    """Run one script on tiny files, in several micro-batches."""
    enter(folder, precision)
    script, task = importlib.import_module(name), tiny.write_task(folder / "task")
    settings = dict(task=task, batch_size=4, tf32=precision == "tf32", run_name=name)
    if name == "sft":
        settings |= dict(num_heldout=6, block_size=10)
    elif name == "train_reward":
        settings |= dict(num_labels=4, normalize_samples=8, rollout_batch_size=4)
    else:
        settings |= dict(total_episodes=4, eval_queries=4, micro_batch_tokens=24)
        settings |= dict(reward_model=tiny.write_reward(folder / "reward"))
    if name == "rloo":
        settings |= dict(rloo_k=2)
    gaps = watch_first_step(script)
    script.main(script.Args(**settings))
    return describe(gaps)


def enter(folder: Path, precision: str) -> None:
    """Make a folder the current one; set accelerate's precision."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if "bf16" in precision else "no"


def watch_first_step(script: Any) -> list[float]:
    """A list that gets max |log ratio| of each micro-batch before the first optimizer step."""
    gaps: list[float] = []
    done = []
    name = "ppo_losses" if hasattr(script, "ppo_losses") else "rloo_loss"
    if not hasattr(script, name):
        return gaps
    losses, step = getattr(script, name), script.AdamTF.step

    def spy_losses(logprobs: torch.Tensor, *rest: Any) -> Any:
        if not done:
            old = rest[1].logprobs if name == "ppo_losses" else rest[0]
            gaps.append((logprobs - old).abs().max().item())
        return losses(logprobs, *rest)

    def spy_step(self: Any, closure: Any = None) -> Any:
        done.append(True)
        return step(self, closure)

    setattr(script, name, spy_losses)
    script.AdamTF.step = spy_step
    return gaps


def describe(gaps: list[float]) -> str:
    """Whether all ratios of the first step are exactly 1 (L6)."""
    return "ok" if max(gaps, default=0.0) == 0 else f"first log ratio up to {max(gaps):.2g}"


# -------------------------------------------------------------------------------------------- speed


def make(work: speed.Work, folder: Path) -> dict[str, Any]:
    """Write the models."""
    folder.mkdir()
    job = speed.job(folder, work, speed.Contestant("make", "make"), 0)
    contestants.make(SimpleNamespace(**job), None)
    return {"result": "ok"}


def update(
    work: speed.Work, folder: Path, kind: str, precision: str, flags: list[str], updates: int
) -> dict[str, Any]:
    """Seconds of an update of a script, and how they compare with what the device can do."""
    enter(folder, precision)
    sys.path.insert(0, str(folder))
    one, watch = speed.Contestant(kind, kind), contestants.Stopwatch()
    gaps = watch_first_step(sweep.load_script(kind))
    more = [*flags, "--tf32"] if "tf32" in precision else flags
    job = speed.job(folder, work, one, updates, flags=more)
    contestants.ours(SimpleNamespace(**job), watch)
    shutil.rmtree("runs")  # the weights of all rows would fill the disk
    took = {"updates": watch.updates}
    found = {phase: speed.seconds(took, 1, (phase,)) for phase in speed.PHASES}
    found |= {"seconds": speed.seconds(took, 1), "result": describe(gaps) + graphs_skipped()}
    found["episodes/s"] = work.episodes / found["seconds"]
    found["tokens/s"] = work.episodes * work.response_length / found["sample"]
    found["peak GB"] = watch.peak
    if torch.cuda.is_available():
        found["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    if work is GPT2 and kind == "ppo":
        found["1M min"] = 1e6 / found["episodes/s"] / 60
    name = device_name()["result"]
    for peak in (PEAKS[part] for part in PEAKS if part in name):
        for phase, operations in speed.operations(work, kind, one.epochs, once=True).items():
            found[f"MFU {phase}"] = operations / found[phase] / peak[precision.split()[0]]
        found["of bandwidth"] = bytes_read(work, kind, precision) / peak["bytes"] / found["sample"]
    return found


def bytes_read(work: speed.Work, kind: str, precision: str) -> int:
    """Bytes of weights, keys and values that sampling reads; the head is in fp32."""
    layers, width, words = (work.config[name] for name in ("n_layer", "n_embd", "vocab_size"))
    size, per_token = 2 if "bf16" in precision else 4, 0
    group = speed.K if kind == "rloo" else 1
    lengths = np.sort(np.tile(speed.query_lengths(work.episodes // group), group))
    batch_size = ppo.Args.rollout_batch_size
    for part in np.split(lengths, range(batch_size, len(lengths), batch_size)):
        positions = len(part) * (part.max() + work.response_length)
        per_token += width * (12 * layers * width * size + 4 * words)
        per_token += 2 * layers * width * size * positions
    return per_token * work.response_length


# --------------------------------------------------------------------------------------------- run


def plan(small: bool, folder: Path) -> Iterator[tuple[Any, ...]]:
    """The rows: a name, a function, its arguments; the most important ones come first."""
    yield "golden numbers, fp32", golden
    for precision in PRECISIONS:
        yield f"tiny scripts, {precision}", tiny_runs, precision, folder / precision
    yield "sampling compiled, fp32", compiled
    works = {"GPT-2 124M": GPT2, "GPT-2 large": LARGE, "Pythia 1B": PYTHIA_1B}
    for size, work in ({"one layer": SMALL} if small else works).items():
        where, updates, fast = folder / size, 1 if small else 3, "bf16 tf32"
        yield f"{size}: models", make, work, where
        rows = [(kind, fast, flags) for kind in ("ppo", "rloo") for flags in ([], ["--compile"])]
        if work in (GPT2, SMALL):
            rows += [("separate_critic", fast, []), *(("ppo", name, []) for name in PRECISIONS)]
        for kind, precision, flags in rows:
            name = " ".join([f"{size}: {kind},", precision, *flags])
            yield name, update, work, where, kind, precision, flags, updates
        shutil.rmtree(where, ignore_errors=True)


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Write all rows so far."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, "device", "versions", "date"])
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})


def main(args: Args) -> None:
    """Run row by row until the time is over; print and write each."""
    limit, rows = 60 * args.minutes, []
    end = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        device = alone(60, folder / "log", device_name)["result"]
        about = {"device": device or speed.processor(), "versions": contestants.versions()}
        about["date"] = time.strftime("%Y-%m-%d")
        print(*about.values(), sep="\n", flush=True)
        for what, function, *rest in plan(args.small or not device, folder):
            begin = time.monotonic()
            seconds = min(end - begin, limit / 4)  # one that hangs leaves time for others
            found = {"result": "no time left"}
            if seconds > 0:
                found = alone(seconds, folder / "log", function, *rest)
            rows.append({"what": what, "took": time.monotonic() - begin} | found | about)
            numbers = [f"{key} {found[key]:.3g}" for key in COLUMNS[3:] if key in found]
            print(f"{what:40} {found['result'][:200]:4}", *numbers, sep="  ", flush=True)
            write(rows, args.out.with_suffix(".csv"))
            if seconds > 0 and not found["result"].startswith("ok"):
                print((folder / "log").read_text()[-1500:], file=sys.stderr, flush=True)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main(tyro.cli(Args))
