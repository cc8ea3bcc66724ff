"""Everything that one GPU can tell about the scripts, in ten minutes and without internet.

    python benchmarks/gpu.py             # gpu.csv, gpu_profile.txt, and a line of JSON
    python benchmarks/gpu.py --more      # gpu_more.csv: profiles of tldr, larger micro-batches
    python benchmarks/gpu.py --small     # models of one layer; also on a CPU, without CUDA's parts

Each row is a process of its own, forked from one that never touched the GPU, with its own time
limit. If it fails, hangs or dies, the row says why and the next one runs: docs/speed.md.
"""

import csv
import importlib
import json
import math
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that used the GPU cannot be forked
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np  # noqa: E402
import torch  # noqa: E402
import tyro  # noqa: E402

from benchmarks import contestants, gpu_checks, speed  # noqa: E402
from benchmarks.gpu_checks import enter, verdict, watch_first_step  # noqa: E402
from machinery import queries  # noqa: E402

PEAKS = {"H200": (989.5e12, 4.8e12), "H100 80GB HBM3": (989.5e12, 3.35e12)}  # bf16, bytes: a second
COLUMNS = ("what", "result", "took", "first", "seconds", *speed.PHASES, "episodes/s", "1M min")
COLUMNS += ("of bandwidth", *(f"MFU {phase}" for phase in speed.PHASES), "reserved GB")
COLUMNS += ("kernels", "busy", "waits", "device", "versions", "date")
GPT2 = speed.Work(speed.GPT2, 512, ())
PYTHIA = dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=8, vocab_size=50304)
PYTHIA |= dict(intermediate_size=8192, max_position_embeddings=2048, n_layer=16, n_embd=2048)
PYTHIA_1B = speed.Work(PYTHIA | dict(model_type="gpt_neox"), 64, (), 53, 512, 100)
SMALL = speed.Work(dict(n_layer=1, n_embd=32, n_head=2, vocab_size=101, n_positions=600), 8, ())
TLDR = ["--task", "tldr", "--truncate_token", "w5"]  # a word is one token
start_method = "fork"


@dataclass(frozen=True)
class Args:
    """Checks and speed on a GPU."""

    minutes: float = 9.5
    """time limit of all rows together"""
    rows: str = ""
    """only rows whose name matches this regular expression"""
    more: bool = False
    """other rows, for another ten minutes"""
    small: bool = False
    """models of one layer; always so without a GPU"""
    out: Path | None = None
    """name of the .csv and of the _profile.txt; default: results/gpu, or results/gpu_more"""


def work_alone(there: Any, log: Path, function: Callable, args: tuple[Any, ...]) -> None:
    """Send what `function` returns, or its error; what it prints goes into `log`."""
    torch.set_num_threads(torch.get_num_threads())  # see same.py: a new thread pool
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        there.send(function(*args))
    except BaseException as error:  # SystemExit, too
        traceback.print_exc()
        there.send({"result": f"{type(error).__name__}: {error}"})


def alone(seconds: float, log: Path, function: Callable, *args: Any) -> dict[str, Any]:
    """What `function` returns in a process of its own, or why it returned nothing."""
    context: Any = multiprocessing.get_context(start_method)
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=work_alone, args=(there, log, function, args))
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
    """The name of the GPU, if there is one. Raises `RuntimeError` if it cannot be used here."""
    has_gpu = torch.cuda.is_available() and torch.zeros(1, device="cuda").is_cuda
    return {"result": torch.cuda.get_device_name() if has_gpu else ""}


# -------------------------------------------------------------------------------------------- speed


def make(work: speed.Work, folder: Path) -> dict[str, Any]:
    """Write a random policy, a reward model and a tokenizer."""
    folder.mkdir()
    job = speed.job(folder, work, speed.Contestant("make", "make"), 0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        contestants.make(SimpleNamespace(**job), contestants.Stopwatch())
    for name in ("policy", "reward"):  # the real models have no pad token
        path = folder / name / "config.json"
        path.write_text(path.read_text().replace('"pad_token_id": 0', '"pad_token_id": null'))
    return {"result": "ok"}


def make_queries(work: speed.Work, group: int) -> queries.TokenTable:
    """As many queries as 2,000 updates use, of random lengths: every update has new shapes."""
    import datasets
    import pyarrow

    rng, words = np.random.default_rng(0), work.config["vocab_size"]
    lengths = rng.permutation(speed.query_lengths(2000 * work.episodes // group, work))
    ends = np.array([0, *lengths]).cumsum().astype(np.int32)
    column = pyarrow.ListArray.from_arrays(ends, rng.integers(1, words, ends[-1]))
    rows = datasets.table.InMemoryTable(pyarrow.table({"tokens": column}))
    data = datasets.Dataset(rows)
    table: Any = queries.TokenTable(data, data, np.zeros(len(data)), work.query_length, words)
    split = np.split(np.arange(len(lengths)), [1])  # it would take long to look for duplicates
    table.hold_out = lambda n: [table.select(part) for part in split]
    return table


class Watch(contestants.Stopwatch):
    """A stopwatch that waits for the GPU, and a profile of the second update with its phases."""

    profile: torch.profiler.profile | None = None

    def __call__(self, phase: str | None) -> None:
        """Begin a phase; None: between two updates."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        event = phase != self.phase and (phase, len(self.updates))
        if self.profile and event == ("sample", 1):
            self.profile.start()
        if self.profile and event and torch.cuda.is_available():
            torch.cuda._sleep(1)  # a kernel that marks where a phase begins
        super().__call__(phase)
        if self.profile and event == (None, 2):
            self.profile.stop()


def update(
    work: speed.Work, folder: Path, kind: str, updates: int, flags: list[str], out: Any = None
) -> dict[str, Any]:
    """Seconds of an update of a script in bf16, as shares of what the device can do.

    With `out`, also writes a profile of an update there.
    """
    enter(folder, "bf16")
    one, watch, group = speed.Contestant(kind, kind), Watch(), speed.K if kind == "rloo" else 1
    kinds = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else None
    watch.profile = torch.profiler.profile(activities=kinds) if out else None
    script, table = importlib.import_module(kind), make_queries(work, group)
    script.load_queries = lambda *args, **kwargs: table
    gaps = watch_first_step(script)
    job = SimpleNamespace(**speed.job(folder, work, one, updates, flags=flags))
    contestants.ours(job, watch)
    shutil.rmtree("runs")  # the weights of all rows would fill the disk
    found = verdict(max(gaps) == 0, f"first log ratio up to {max(gaps):.2g}")
    found |= measured(work, watch)
    name = device_name()["result"]
    for rate, bandwidth in (PEAKS[part] for part in PEAKS if part in name):
        for phase, operations in speed.operations(work, kind, one.epochs, once=True).items():
            found[f"MFU {phase}"] = operations / found[phase] / rate
        size = contestants.script_args(script, job).rollout_batch_size
        found["of bandwidth"] = bytes_read(work, group, size) / bandwidth / found["sample"]
    if watch.profile:
        watch.profile.export_chrome_trace("trace.json")
        found |= summarize(json.loads(Path("trace.json").read_text())["traceEvents"], out)
    return found


def compiled(*row: Any) -> dict[str, Any]:
    """`update` of ppo.py with diffs/compile.diff."""
    gpu_checks.load_patched("compile")
    return update(*row)


def measured(work: speed.Work, watch: Watch) -> dict[str, Any]:
    """Seconds of the updates after the first, by phase, and memory."""
    took = {"updates": watch.updates}
    found = {phase: speed.seconds(took, 1, (phase,)) for phase in speed.PHASES}
    found |= {"first": sum(x[1] for x in watch.updates[0].values())}
    found |= {"seconds": speed.seconds(took, 1)}
    found |= {"episodes/s": work.episodes / found["seconds"]}
    found |= {"1M min": 1e6 / found["episodes/s"] / 60}
    if torch.cuda.is_available():
        found["reserved GB"] = torch.cuda.max_memory_reserved() / 1e9
    return found


def peer(work: speed.Work, folder: Path, kind: str, updates: int, micro: int) -> dict[str, Any]:
    """Seconds of an update of TRL in bf16, `micro` sequences at a time."""
    enter(folder, "bf16")
    watch, one = Watch(), speed.Contestant(kind, kind)
    job = SimpleNamespace(**speed.job(folder, work, one, updates, micro))
    contestants.CONTESTANTS[kind](job, watch)
    return verdict(True, f"{micro} sequences at a time") | measured(work, watch)


def bytes_read(work: speed.Work, group: int, batch_size: int) -> int:
    """Bytes of bf16 weights, keys and values and of the fp32 head that sampling reads."""
    layers, width, words = (work.config[name] for name in ("n_layer", "n_embd", "vocab_size"))
    lengths = np.sort(np.tile(speed.query_lengths(work.episodes // group, work), group))
    per_token = 0
    for part in np.split(lengths, range(batch_size, len(lengths), batch_size)):
        positions = len(part) * (part.max() + work.response_length)
        per_token += width * (24 * layers * width + 4 * words) + 4 * layers * width * positions
    return per_token * work.response_length


CLASSES = {  # of kernels whose names contain one of these; the first that fits
    "attention": ("fmha", "flash", "Attention"),
    "products, fp32 and TF32": ("tf32", "sgemm", "f32f32"),
    "matrix-vector": ("gemv", "dot_kernel"),
    "products, bf16": ("nvjet", "gemm", "xmma", "splitKreduce", "cutlass"),
    "layer norm": ("layer_norm", "LayerNorm", "GammaBeta"),
    "softmax": ("SoftMax", "softmax"),
    "optimizer": ("Adam", "multi_tensor", "lpnorm"),
    "casts and copies": ("copy_kernel", "copy_device", "Memcpy", "CatArray"),
    "fills": ("FillFunctor", "Memset"),
    "sums": ("reduce_kernel",),
    "gather, scatter, sort": ("index", "scatter", "gather", "sort", "scan", "searchsorted"),
    "elementwise": ("elementwise", "triton"),
}
GAPS = {3: "below 3 us", 30: "to 30 us", 300: "to 300 us", math.inf: "above"}


def by_phase(kernels: list[dict[str, Any]]) -> list[str]:
    """A table: milliseconds by class of kernels, and of gaps before kernels, in each phase.

    A kernel of `_sleep` begins each phase.
    """
    found: Counter = Counter()
    phases, end = iter(speed.PHASES), 0.0
    phase = "before"
    for x in sorted(kernels, key=lambda x: x["ts"]):
        if "spin_kernel" in x["name"]:
            phase = next(phases, "after")
        else:
            gap = max(x["ts"] - end, 0) if end else 0
            length = next(name for limit, name in GAPS.items() if gap < limit)
            fits = (kind for kind, names in CLASSES.items() if any(n in x["name"] for n in names))
            found[phase, f"idle, gaps {length}"] += gap
            found[phase, next(fits, "other")] += x["dur"]
            found[phase, "number of kernels"] += 1000
        end = max(end, x["ts"] + x["dur"])
    lines = [f"{'milliseconds':28}" + "".join(f"{phase:>10}" for phase in speed.PHASES)]
    for kind in sorted({kind for _, kind in found}):
        cells = (f"{found[phase, kind] / 1000:10.2f}" for phase in speed.PHASES)
        lines.append(f"{kind:28}{''.join(cells)}")
    return lines


def summarize(events: list[dict[str, Any]], out: Path) -> dict[str, Any]:
    """Kernels, the GPU's busy share and the host's waits in a trace; its top kernels to `out`."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = [x for x in events if x.get("cat") in kinds]
    calls = [x["name"] for x in events if x.get("cat") in ("cuda_runtime", "cuda_driver")]
    number, time_of = Counter(x["name"] for x in kernels), Counter()
    for x in kernels:
        time_of[x["name"]] += x["dur"]
    begin = min((x["ts"] for x in kernels), default=0.0)
    end = max((x["ts"] + x["dur"] for x in kernels), default=1.0)
    busy, span = time_of.total(), end - begin
    found = {"kernels": len(kernels), "waits": sum("Synchronize" in name for name in calls)}
    found |= {"busy": busy / span}  # there is one stream
    lines = [f"{len(calls)} calls, {found}, in {span / 1e6:.4f} s", "share   number  name"]
    for name, took in time_of.most_common(45):
        lines.append(f"{took / busy:6.1%} {number[name]:7}  {name[:150]}")
    out.write_text("\n".join([*lines, "", *by_phase(kernels)]) + "\n")
    return found


# --------------------------------------------------------------------------------------------- run


def plan(small: bool, folder: Path, out: Path) -> Iterator[tuple[Any, ...]]:
    """The rows: a name, its minutes, a function, its arguments; the most important come first."""
    gpt2 = SMALL if small else GPT2, folder / "gpt2"
    long = replace(SMALL, response_length=53, query_length=512, shortest=100)
    pythia = long if small else PYTHIA_1B, folder / "pythia"
    yield "attention, cuDNN first", 0.25, gpu_checks.probe, "CUDNN", "EFFICIENT", "MATH"
    yield "attention, ours", 0.2, gpu_checks.probe, "FLASH", "EFFICIENT", "MATH"
    yield "sentiment: models", 0.4, make, *gpt2
    yield "sentiment: ppo", 0.8, update, *gpt2, "ppo", 3, []
    for flags in (["--micro_batch_tokens", "4096"], ["--rollout_batch_size", "256"]):
        yield f"sentiment: ppo {' '.join(flags)}", 0.5, update, *gpt2, "ppo", 1, flags
    yield "sentiment: ppo, profile", 0.5, update, *gpt2, "ppo", 1, [], out
    if find_spec("trl"):  # installed by hand: docs/speed.md
        for micro in (64, 512):
            yield f"sentiment: TRL's PPO, {micro}", 1.0, peer, *gpt2, "trl_ppo", 2, micro
    yield "sentiment: unpadding", 0.3, gpu_checks.unpadding, *gpt2
    yield "tldr: models", 0.75, make, *pythia
    yield "tldr: ppo", 0.9, update, *pythia, "ppo", 1, TLDR
    yield "golden numbers, fp32", 0.7, gpu_checks.golden
    for name, precision in (("fp32", "no"), ("bf16", "bf16")):
        yield f"tiny scripts, {name}", 0.4, gpu_checks.tiny_runs, folder / name, precision
    yield "sentiment: rloo", 0.6, update, *gpt2, "rloo", 2, []


def plan_more(small: bool, folder: Path, out: Path) -> Iterator[tuple[Any, ...]]:
    """The rows of `--more`."""
    rows = {row[0]: row for row in plan(small, folder, out)}
    gpt2, pythia = (rows[f"{name}: models"][3:5] for name in ("sentiment", "tldr"))
    tldr = out.with_name(f"{out.name.removesuffix('_profile.txt')}_tldr_profile.txt")
    yield rows["sentiment: models"]
    yield rows["sentiment: ppo"]
    profile = out.with_name(f"{out.name.removesuffix('_profile.txt')}_compile_profile.txt")
    yield "sentiment: compile.diff, profile", 2.0, compiled, *gpt2, "ppo", 3, [], profile
    yield rows["tldr: models"]
    yield "tldr: compile.diff", 2.5, compiled, *pythia, "ppo", 1, TLDR
    yield "tldr: ppo, profile", 0.9, update, *pythia, "ppo", 1, TLDR, tldr
    larger = [*TLDR, "--micro_batch_tokens", "32768"]
    yield "tldr: ppo --micro_batch_tokens 32768", 0.9, update, *pythia, "ppo", 1, larger


def main(args: Args) -> None:
    """Run row by row until the time is over; print and write each."""
    global start_method
    end, rows = time.monotonic() + 60 * args.minutes, []
    to = args.out or HERE / ("results/gpu_more" if args.more else "results/gpu")
    with tempfile.TemporaryDirectory() as name, open(to.with_suffix(".csv"), "w") as file:
        log, out = Path(name, "log"), to.absolute().with_name(f"{to.name}_profile.txt")
        device = alone(60, log, device_name)["result"]
        if "forked" in device:  # without NVML, importing used the GPU
            start_method = "spawn"
            device = alone(60, log, device_name)["result"]
        about = {"device": device or speed.processor(), "versions": contestants.versions()}
        about["date"] = time.strftime("%Y-%m-%d")
        print(*about.values(), sep="\n", flush=True)
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        choose = plan_more if args.more else plan
        for what, minutes, function, *rest in choose(args.small or not device, Path(name), out):
            if not re.search(args.rows, what):
                continue
            begin, found = time.monotonic(), {"result": "no time left"}
            if begin < end:
                found = alone(min(end - begin, 60 * minutes), log, function, *rest)
            rows.append({"what": what, "took": time.monotonic() - begin} | found | about)
            row = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in rows[-1].items()}
            writer.writerow(row)
            file.flush()
            numbers = [f"{key} {row[key]}" for key in COLUMNS[2:-3] if key in row]
            print(what, found["result"][:200], *numbers, sep="  ", flush=True)
            if begin < end and not found["result"].startswith(("ok", "no GPU")):
                print(log.read_text()[-1500:], file=sys.stderr, flush=True)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main(tyro.cli(Args))
