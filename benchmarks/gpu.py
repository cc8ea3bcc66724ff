r"""What a GPU makes of the scripts: checks, then speed, in less than ten minutes on a machine that starts bare.

    pip download -q -d wheels --no-deps --only-binary=:all: --python-version 3.12 datasets==5.2.0 dill==0.4.1 \
        multiprocess==0.70.19 tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.0
    python3 -m pip install -q --no-index --no-deps --target wheels/site wheels/*.whl && \
        PYTHONPATH="$PWD/wheels/site" python3 benchmarks/gpu.py --out "${OUT:-benchmarks}/gpu"

The first command fetches what a machine with torch, transformers and accelerate may lack; the second stands there, in the
project's root, with the folder `wheels`, which git ignores, carried along. Every row is a process of its own, forked from
one that has imported everything and never touched the GPU; what fails, or is stopped at the time limit, is a row with its
reason.

Checks: the golden tests with all of their tensors on the GPU, in units of their own tolerances (`LIMITS` of them are
allowed); an update of each script on a tiny model; sampling with `--compile` has to draw the tokens that it draws without.
Speed: `ppo.py` and `rloo.py` from their command lines at the defaults of `--task sentiment`, on benchmarks/speed.py's
queries, weights random. `ok` is said of an update whose first ratio is exactly 1 (L6). MFU: operations of the matrix
products over real tokens alone, a prompt once for RLOO's completions, over what the data sheet promises for the precision;
the head is fp32 in bf16 too, and `tf32` is `--tf32`. Tokens a second are with reading the prompts. Of bandwidth: how long
reading weights, keys and values once a token would take, over how long sampling did. `1M min`: minutes of OpenAI's million
episodes by `ppo.py` at this pace, without evaluations; `TARGETS` are what it shall take.
"""

import csv
import importlib
import itertools
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tyro

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that has touched the GPU cannot be forked
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import tiny
import torch

import packing
import ppo
import utils
from benchmarks import contestants, speed

HERE = Path(__file__).parent
SCRIPTS = ("sft", "train_reward", "ppo", "rloo")
PRECISIONS = {"fp32": [], "tf32": ["--tf32"], "bf16": [], "bf16 tf32": ["--tf32"]}  # and the flags that make it
LIMITS = {"fp32": 1, "tf32": 2e3, "bf16": 1e4}  # tolerances of the golden tests, most of which are 1e-5
PEAKS = {  # operations a second by precision, dense, and bytes a second, by the makers' data sheets
    "H200": dict(fp32=67e12, tf32=494.5e12, bf16=989.5e12, bytes=4.8e12),
    "H100 80GB HBM3": dict(fp32=67e12, tf32=494.5e12, bf16=989.5e12, bytes=3.35e12),
    "A100-SXM4-80GB": dict(fp32=19.5e12, tf32=156e12, bf16=312e12, bytes=2.039e12),
}
ORIGINAL = 16212  # seconds of OpenAI's million episodes on eight V100s
TARGETS = 15, 10  # minutes
COLUMNS = ("what", "result", "took", *speed.PHASES, "seconds", "episodes/s", "tokens/s", "of bandwidth")
COLUMNS += *(f"MFU {phase}" for phase in speed.PHASES), "peak GB", "1M min"

GPT2 = speed.Work(speed.GPT2, 512, ())
LARGE = replace(GPT2, config=speed.GPT2 | dict(n_layer=36, n_embd=1280, n_head=20))
NEOX = dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=8, intermediate_size=8192, vocab_size=50304)
PYTHIA = replace(GPT2, config=NEOX | dict(model_type="gpt_neox", n_layer=16, n_embd=2048, max_position_embeddings=2048))
SMALL = speed.Work(dict(n_layer=1, n_embd=32, n_head=2, vocab_size=101, n_positions=96), 8, ())


@dataclass(frozen=True)
class Args:
    """Checks and speed on a GPU."""

    minutes: float = 9
    """nothing goes on for longer"""
    small: bool = False
    """all of it in little: models of a layer, one measured update; so without a GPU anyway"""
    out: Path = HERE / "gpu"
    """.csv and .png to write"""


def alone(seconds: float, log: Path, function: Callable, *args: Any) -> dict[str, Any]:
    """What `function` returns in a forked process, whose words go to `log`; or the reason why there is nothing."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)

    def work() -> None:
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        try:
            there.send(function(*args))
        except BaseException as error:  # a script's way out is one too
            traceback.print_exc()
            there.send({"result": f"{type(error).__name__}: {error}"})

    process = fork.Process(target=work)
    process.start()
    there.close()  # so that a process that dies is noticed
    try:
        return here.recv() if here.poll(seconds) else {"result": f"stopped after {seconds:.0f} s"}
    except EOFError:
        return {"result": "the process died"}
    finally:
        process.kill()
        process.join()


def device_name() -> dict[str, str]:
    """The GPU's, if there is one."""
    return {"result": torch.cuda.get_device_name() if torch.cuda.is_available() else ""}


# -------------------------------------------------------------------------------------------------------------- checks


def golden(precision: str) -> dict[str, Any]:
    """The golden tests, every tensor on the device: the largest deviation from OpenAI's numbers, in tolerances."""
    import pytest
    import test_golden
    from accelerate import Accelerator

    device, limit, found, from_numpy = Accelerator().device, LIMITS[precision], [], torch.from_numpy

    def close(ours: torch.Tensor, theirs: torch.Tensor, *, atol: float, rtol: float, msg: Any = None) -> None:
        off = ((ours - theirs).abs() / (atol + rtol * theirs.abs())).max().item()
        found.append((off if math.isfinite(off) else math.inf, case))

    class Approx:
        def __init__(self, expected: Any, rel: float = 0.0, abs: float = 0.0):
            self.expected, self.tolerances = expected, dict(atol=abs, rtol=rel if rel or abs else 1e-6)

        def __eq__(self, ours: Any) -> bool:
            close(*(torch.tensor(x, dtype=torch.float64) for x in (ours, self.expected)), **self.tolerances)
            return True

    torch.set_default_device(device)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.from_numpy = lambda array: from_numpy(array).to(device)
    torch.testing.assert_close, pytest.approx, test_golden.Accelerator = close, Approx, lambda cpu: Accelerator()
    for name, test in [(name, f) for name, f in vars(test_golden).items() if name.startswith("test_")]:
        if precision != "fp32" and "reproduces" in name:
            continue  # training makes rounding grow: 4e5 tolerances in bf16
        names, values = zip(*(mark.args for mark in test.pytestmark), strict=True)
        for chosen in itertools.product(*values):
            case = f"{name}{list(chosen)}"
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                test(**dict(zip(names, chosen, strict=True)))
    off, case = max(found)
    said = "ok" if off <= limit else "too far off"
    return {"result": f"{said}: {len(found)} numbers, at most {off:.2g} tolerances ({limit:g} allowed) in {case}"}


def compiled() -> dict[str, Any]:
    """Whether a step that is replayed draws the tokens of a plain one, also when other weights stand in its place."""
    device = utils.start_accelerator(tiny.make_args()).device
    lm, uniform = tiny.make_lm().to(device), tiny.uniform(24, 8).to(device)
    contexts, same = tiny.make_contexts(tiny.LENGTHS, 8).to(device), []
    for decoders in [[packing.Decoder(lm), packing.Decoder(lm, compiled=True)]] * 3:
        plain, replayed = (ppo.sample(x, contexts, uniform, *tiny.sampling(0.7)) for x in decoders)
        same.append((plain == replayed).float().mean().item())
        with torch.no_grad():
            lm.lm_head.weight.mul_(1.1)
    said = "ok" if min(same) == 1 else "not the same"
    return {"result": f"{said}: of 192 tokens {' '.join(f'{x:.1%}' for x in same)}{graphs_skipped()}"}


def graphs_skipped() -> str:
    """What torch.compile did not make a CUDA graph of, which it says in its log only."""
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    return f", {skipped} CUDA graphs skipped" if skipped else ""


def tiny_updates(precision: str, folder: Path) -> dict[str, Any]:
    """What is said of each script."""
    return {"result": "; ".join(f"{tiny_update(name, precision, folder / name)}: {name}" for name in SCRIPTS)}


def tiny_update(name: str, precision: str, folder: Path) -> str:
    """One run of a script on tiny files, each in several micro-batches: a few steps of sft.py, one of the others."""
    script, task = importlib.import_module(name), tiny.write_task(enter(folder, precision) / "task")
    common = dict(task=task, batch_size=4, tf32=bool(PRECISIONS[precision]), output_dir="out", run_name=name)
    own = dict(total_episodes=4, eval_queries=4, reward_model=tiny.write_reward(folder / "reward"))
    own |= dict(micro_batch_tokens=24) | (dict(rloo_k=2) if name == "rloo" else {})
    own = {"sft": dict(num_heldout=6, block_size=10)}.get(name, own)
    own = {"train_reward": dict(num_labels=4, normalize_samples=8, rollout_batch_size=4)}.get(name, own)
    ratios = first_ratios(script)
    script.main(script.Args(**common, **own))
    return said_of(ratios)


def enter(folder: Path, precision: str) -> Path:
    """What a script finds when it starts: a folder, and accelerate's setting."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if "bf16" in precision else "no"
    return folder


def first_ratios(script: Any) -> list[float]:
    """Filled with the smallest and the largest probability ratio of the script's first optimizer step, if it has any."""
    ratios, step = [], script.train_step

    def spied(*args: Any) -> Any:
        sums = step(*args)
        if isinstance(sums, dict) and "val/ratio" in sums and not ratios:
            low, high = sums["val/ratio"][2:].tolist()
            ratios[:] = [-low, high]
        return sums

    script.train_step = spied
    return ratios


def said_of(ratios: list[float]) -> str:
    """L6, in a word."""
    return "ok" if set(ratios) <= {1.0} else f"first ratio {ratios[0]:.9g} … {ratios[1]:.9g}"


# --------------------------------------------------------------------------------------------------------------- speed


def make(work: speed.Work, folder: Path) -> dict[str, Any]:
    """The models of a size."""
    folder.mkdir()
    contestants.make(SimpleNamespace(**speed.job(folder, work, speed.Contestant("make", "make"), 0)), None)
    return {"result": "ok"}


def update(work: speed.Work, folder: Path, kind: str, precision: str, flags: list[str], updates: int) -> dict[str, Any]:
    """A script from its command line: what an update takes, and how that stands to what the device can do."""
    enter(folder, precision)
    if kind == "separate_critic":
        patch = ["patch", "-s", "-o", f"{kind}.py", str(HERE.parent / "ppo.py")]
        subprocess.run([*patch, str(HERE.parent / "diffs" / f"{kind}.diff")], check=True)
        sys.path.insert(0, str(folder))
    one, watch = speed.Contestant(kind, kind), contestants.Stopwatch()
    ratios = first_ratios(importlib.import_module(kind))
    flags = [*PRECISIONS[precision], *flags]
    contestants.ours(SimpleNamespace(**speed.job(folder, work, one, updates, flags=flags)), watch)
    took = {"updates": watch.updates}
    found = {phase: speed.seconds(took, 1, (phase,)) for phase in speed.PHASES} | {"seconds": speed.seconds(took, 1)}
    shutil.rmtree("runs")  # the weights: no disk has room for those of all rows
    found |= {"result": said_of(ratios) + graphs_skipped(), "episodes/s": work.episodes / found["seconds"]}
    found["tokens/s"] = work.episodes * work.response_length / found["sample"]
    found["peak GB"] = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else watch.peak
    if work is GPT2 and kind == "ppo":
        found["1M min"] = 1e6 / work.episodes * found["seconds"] / 60
    name = device_name()["result"]
    if peak := next((peak for part, peak in PEAKS.items() if part in name), None):
        for phase, operations in speed.operations(work, kind, one.epochs, once=True).items():
            found[f"MFU {phase}"] = operations / found[phase] / peak[precision.split()[0]]
        read = bytes_read(work, kind, precision, "--compile" in flags)
        found["of bandwidth"] = read / peak["bytes"] / found["sample"]
    return found


def bytes_read(work: speed.Work, kind: str, precision: str, compiled: bool) -> int:
    """While sampling, a token at a time for each part of the rows: blocks, keys and values in the run's precision, these
    for all positions of the cache; the head in fp32."""
    layers, width, words = (work.config[name] for name in ("n_layer", "n_embd", "vocab_size"))
    each, read = 2 if "bf16" in precision else 4, 0
    group = speed.K if kind == "rloo" else 1
    lengths = np.tile(speed.query_lengths(work.episodes // group), group)
    for rows, longest in packing.by_length(lengths, ppo.Args.rollout_batch_size):
        positions = longest + work.response_length
        positions = math.ceil(positions / 128) * 128 if compiled else positions
        read += width * (12 * layers * width * each + 4 * words) + 2 * layers * width * each * len(rows) * positions
    return read * work.response_length


# ---------------------------------------------------------------------------------------------------------------- run


def plan(small: bool, folder: Path) -> Iterator[tuple[Any, ...]]:
    """The rows: what it is, a function, its arguments; what matters most comes first."""
    for precision in LIMITS:
        yield f"golden numbers, {precision}", golden, precision
    for precision in LIMITS:
        yield f"tiny scripts, {precision}", tiny_updates, precision, folder / precision
    yield "sampling compiled, fp32", compiled
    works = {"one layer": SMALL} if small else {"GPT-2 124M": GPT2, "GPT-2 large": LARGE, "Pythia 1B": PYTHIA}
    fast = "bf16 tf32"
    for size, work in works.items():
        where, updates = folder / size, 1 if small else 3
        yield f"{size}: models", make, work, where
        rows = [("ppo", fast, []), ("ppo", fast, ["--compile"]), ("rloo", fast, []), ("rloo", fast, ["--compile"])]
        if work in (GPT2, SMALL):
            rows += [("separate_critic", fast, []), *(("ppo", precision, []) for precision in LIMITS)]
        for kind, precision, flags in rows:
            what = " ".join([f"{size}: {kind},", precision, *flags])
            yield what, update, work, where, kind, precision, flags, updates
        shutil.rmtree(where, ignore_errors=True)


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """All rows so far."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, "device", "versions", "date"])
        writer.writeheader()
        writer.writerows({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)


def draw(rows: list[dict[str, Any]], path: Path, device: str) -> None:
    """The seconds of the phases, stacked."""
    plt, rows = speed.pyplot(), rows[::-1]
    figure, axis = plt.subplots(figsize=(8, 1 + 0.3 * len(rows)), layout="constrained")
    names, left = [row["what"] for row in rows], [0.0] * len(rows)
    for phase in speed.PHASES:
        axis.barh(names, [row[phase] for row in rows], left=left, label=phase)
        left = [x + row[phase] for x, row in zip(left, rows, strict=True)]
    axis.set(title=f"seconds per update, {device}")
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(args: Args) -> None:
    """Row by row until the time is over: print and write each, then the picture."""
    end, rows = time.monotonic() + 60 * args.minutes, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        device = alone(60, folder / "log", device_name)["result"]
        about = {"device": device or speed.processor(), "versions": contestants.versions()}
        about["date"] = time.strftime("%Y-%m-%d")
        print(*about.values(), sep="\n", flush=True)
        for what, function, *rest in plan(args.small or not device, folder):
            begin = time.monotonic()
            seconds = min(end - begin, 60 * args.minutes / 4)  # one that hangs leaves time for the others
            found = alone(seconds, folder / "log", function, *rest) if seconds > 0 else {"result": "no time was left"}
            rows.append({"what": what, "took": time.monotonic() - begin} | found | about)
            numbers = (f"{name} {rows[-1][name]:.3g}" for name in COLUMNS[2:] if name in rows[-1])
            print(f"{what:40} {found['result'][:200]:4}", *numbers, sep="  ", flush=True)
            write(rows, args.out.with_suffix(".csv"))
            if seconds > 0 and not found["result"].startswith("ok"):
                print((folder / "log").read_text()[-1500:], file=sys.stderr, flush=True)
    if timed := [row for row in rows if "seconds" in row]:
        draw(timed, args.out.with_suffix(".png"), device or "CPU")
    if minutes := [row["1M min"] for row in timed if "1M min" in row]:
        targets = ", ".join(f"{x} {'reached' if min(minutes) <= x else 'not reached'}" for x in TARGETS)
        print(
            f"OpenAI's million episodes: {min(minutes):.1f} min ({targets}); {ORIGINAL / 60:.0f} on their eight V100s"
        )
    print(json.dumps(about | {"rows": [{k: v for k, v in row.items() if k not in about} for row in rows]}))


if __name__ == "__main__":
    main(tyro.cli(Args))
