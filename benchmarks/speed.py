"""Speed and memory of ppo.py and rloo.py beside other implementations, on the same work.

    python benchmarks/speed.py --workload long            # table, CSV and picture

Ours are the scripts themselves at the defaults of `--task sentiment`. `plain` is
benchmarks/plain_ppo.py. `trl-ppo` is the PPOTrainer of TRL 1.12.0, the last version that has one,
and `trl-rloo` the RLOOTrainer of TRL 1.16.0. Each of these two runs in a virtual environment of its
own, which is created once in the user's cache.

All have the same random weights and queries, response length and number of epochs, in fp32 without
dropout and gradient checkpointing. The peers get the fastest of a few micro-batch sizes. TRL's PPO
has a separate critic, which it demands; TRL's RLOO does not clip gradients. In `long`, the weights
that all read make w1 as likely at every position as it has to be, and responses end there.

Contestants take turns, each in a process of one thread. Ratios are of CPU seconds within a round.
`full` is the time of `sample` divided by that of its real tokens in full batches, of ppo in `long`.
`bound` is the time that the matrix products of real tokens alone would take at the rate that is
measured in the same round, as a share of the CPU seconds: one forward pass each for sampling,
reference and reward model, and three times that for an epoch.
"""

import csv
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "onefile-rlhf"
TRL = {"trl-ppo": "trl==1.12.0", "trl-rloo": "trl==1.16.0"}
PHASES = ("sample", "score", "optimize")
K = 4  # responses per query of RLOO
PRODUCTS = 50  # matrix products in an update of contestants.matmul
PRODUCT = 2 * 512 * 768 * 3072  # operations of one of them


@dataclass(frozen=True)
class Args:
    """Speed and memory beside other implementations."""

    workload: Literal["tiny", "gpt2", "tldr", "long"] = "tiny"
    """see WORKS"""
    peers: str = "plain,trl-ppo,trl-rloo"
    """some of these, comma-separated"""
    updates: int = 3
    """measured updates per process, after one for warm-up"""
    rounds: int = 3
    """processes per contestant; contestants take turns"""
    out: Path = HERE / "results/speed"
    """name of the .csv and .png; rows of other workloads stay in the .csv"""
    micro: int | None = None
    """sequences per micro-batch of the peers; None: the fastest of a few"""


@dataclass(frozen=True)
class Work:
    """The work of one update."""

    config: dict[str, int]  # of the language model
    episodes: int
    micro: tuple[int, ...]  # micro-batch sizes that the peers try
    response_length: int = 24
    query_length: int = 64
    shortest: int | None = None  # query, lengths are even; None: those of a novel's sentences
    mean_length: int | None = None  # of responses that end; None: none ends
    epochs: tuple[int, ...] = (4, 1)  # of RLOO; PPO has the first
    flags: tuple[str, ...] = ()  # of ours


TINY = dict(n_layer=4, n_embd=128, n_head=4, vocab_size=1000, n_positions=1024)
GPT2 = dict(n_layer=12, n_embd=768, n_head=12, vocab_size=50257, n_positions=1024)
TLDR = ("--micro_batch_tokens", "16384")  # as in its preset
WORKS = {
    "tiny": Work(TINY, 64, (8, 16, 32, 64)),
    "gpt2": Work(GPT2, 16, (2, 4, 8, 16)),
    "tldr": Work(TINY, 64, (4, 8, 16), 53, 512, 100, None, (1,), TLDR),
    "long": Work(TINY, 256, (4, 8, 16), 512, mean_length=128, epochs=(1,)),
}


@dataclass(frozen=True)
class Contestant:
    """A row of the table."""

    name: str
    kind: str
    epochs: int = 4
    rival: str | None = None  # its seconds are divided by those of this one


def contestants(peers: list[str], epochs: tuple[int, ...] = (4, 1)) -> list[Contestant]:
    """Ours, and the requested peers."""
    found = [Contestant("ppo", "ppo", epochs[0])]
    found += [Contestant(f"rloo {n}", "rloo", n) for n in epochs]
    for peer in peers:
        if peer == "trl-rloo":
            found += [Contestant(f"{peer} {n}", peer, n, rival=f"rloo {n}") for n in epochs]
        elif peer in ("plain", "trl-ppo"):
            found.append(Contestant(peer, peer, epochs[0], rival="ppo"))
        else:
            raise SystemExit(f"--peers {peer}: it has to be some of plain,trl-ppo,trl-rloo")
    return found


def query_lengths(n: int, work: Work | None = None) -> list[int]:
    """Lengths like those of a novel's sentences: 7, 17, 40 tokens at 5, 50, 95%; one of 64.

    Even ones for a work with a shortest query.
    """
    if work and work.shortest:
        return np.linspace(work.shortest, work.query_length, n).round().astype(int).tolist()
    shares = (np.arange(n) + 0.5) / n
    logs = np.interp(shares, (0, 0.05, 0.5, 0.95, 1), np.log((5, 7, 17, 40, 64)))
    return [*np.exp(logs[:-1]).round().astype(int).tolist(), 64]


def operations(work: Work, kind: str, epochs: int, once: bool = False) -> dict[str, float]:
    """Floating-point operations of the matrix products of an update, of real tokens, by phase.

    With `once`, the language model reads a query once for all of its responses.
    """
    layers, width = work.config["n_layer"], work.config["n_embd"]
    group = K if "rloo" in kind else 1
    prompts = np.array(query_lengths(work.episodes // group, work))
    response_length = work.mean_length or work.response_length
    lengths = np.tile(prompts, group) + response_length

    def trunk(rows: np.ndarray) -> int:
        return 24 * layers * width**2 * rows.sum() + 2 * layers * width * (rows * (rows + 1)).sum()

    head = 2 * width * work.config["vocab_size"] * response_length * len(lengths)
    lm = trunk(lengths) + head - (group - 1) * trunk(prompts) * once
    critic = trunk(lengths) if kind == "separate_critic" else 0
    found = {"sample": lm, "score": lm + trunk(lengths), "optimize": 3 * epochs * (lm + critic)}
    return {phase: float(x) for phase, x in found.items()}


def peer_python(peer: str) -> str:
    """The Python of a contestant; a peer's environment is created if it has other versions."""
    if peer not in TRL:
        return sys.executable
    folder, wanted = CACHE / peer, TRL[peer] + "\n" + (HERE / "requirements-peers.txt").read_text()
    if not (folder / "made").is_file() or (folder / "made").read_text() != wanted:
        print(f"creating {folder}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", TRL[peer]]
        subprocess.run([*pip, "-r", HERE / "requirements-peers.txt"], check=True)
        (folder / "made").write_text(wanted)
    return str(folder / "bin" / "python")


def job(
    folder: Path, work: Work, one: Contestant, updates: int, micro: int = 1, **more: Any
) -> dict[str, Any]:
    """The input of contestants.py; also writes the queries into the folder."""
    rng, group = np.random.default_rng(0), K if "rloo" in one.kind else 1
    lengths = query_lengths(work.episodes // group, work)
    queries = [rng.integers(1, work.config["vocab_size"], n).tolist() for n in lengths]
    found = asdict(work) | dict(kind=one.kind.replace("-", "_"), folder=str(folder), micro=micro)
    found |= dict(queries=queries, updates=updates, epochs=one.epochs)
    found |= dict(k=K, products=PRODUCTS, flags=work.flags)
    texts = [" ".join(f"w{token}" for token in tokens) for tokens in queries]
    held_out = np.random.default_rng(0).permutation(len(queries) + 1)[0]  # by ours, for evaluation
    texts.insert(held_out, "w1 w2 w3")
    (folder / "queries.txt").write_text("\n".join(texts) + "\n")
    return found | more


def run(folder: Path, work: Work, one: Contestant, updates: int, micro: int = 1) -> dict[str, Any]:
    """Run a contestant in a new process; return seconds per update, peak and versions."""
    command = [peer_python(one.kind), str(HERE / "contestants.py"), str(folder / "job.json")]
    (folder / "job.json").write_text(json.dumps(job(folder, work, one, updates, micro)))
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
    if done.returncode:
        raise SystemExit(f"{one.name} failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if found["updates"]:
        took = f"{seconds(found, 0):.3g} CPU seconds per update"
        print(f"{one.name}, micro-batch {micro or 'default'}: {took}", file=sys.stderr)
    return found


def seconds(found: dict[str, Any], which: int, phases: tuple[str, ...] = PHASES) -> float:
    """Median seconds of these phases over the updates after the first; which: 0 CPU, 1 wall."""
    updates = found["updates"][1:] or found["updates"]
    return statistics.median(sum(x[p][which] for p in phases if p in x) for x in updates)


def best_micro(folder: Path, work: Work, one: Contestant) -> int:
    """The micro-batch size of a peer with the fewest CPU seconds in one update."""
    if one.kind in ("ppo", "rloo"):
        return 0  # the scripts' own default
    if len(work.micro) == 1:
        return work.micro[0]
    return min(work.micro, key=lambda micro: seconds(run(folder, work, one, 0, micro), 0))


def race(
    work: Work, field: list[Contestant], updates: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Run all contestants in turn, `rounds` times; return the medians of each by name."""
    heats: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(folder, work, Contestant("make", "make"), 0)
        tuned = cache(lambda kind: best_micro(folder, work, Contestant(kind, kind, epochs=1)))
        micro = {one.name: tuned(one.kind) for one in field}
        for _ in range(rounds):
            heat = {one.name: run(folder, work, one, updates, micro[one.name]) for one in field}
            heat["matmul"] = run(folder, work, Contestant("matmul", "matmul"), updates)
            heats.append(heat)

    def median(function: Callable) -> float:
        return statistics.median(map(function, heats))

    rate = PRODUCTS * PRODUCT / median(lambda heat: seconds(heat["matmul"], 0))
    table = {}
    for one in field:
        name, rival = one.name, one.rival or one.name
        row = {"micro": micro[name] or "default"}
        row["cpu"] = median(lambda heat: seconds(heat[name], 0))
        row["wall"] = median(lambda heat: seconds(heat[name], 1))
        row["episodes/s"] = work.episodes / row["wall"]
        row["peak GB"] = median(lambda heat: heat[name]["peak"])
        row |= {phase: median(lambda heat: seconds(heat[name], 0, (phase,))) for phase in PHASES}
        ratios = [seconds(heat[name], 0) / seconds(heat[rival], 0) for heat in heats]
        row["ratio"] = statistics.median(ratios)
        row["range"] = f"{min(ratios):.2f}-{max(ratios):.2f}"
        row["full"] = median(lambda heat: heat[name]["full"])
        row["bound"] = sum(operations(work, one.kind, one.epochs).values()) / rate / row["cpu"]
        row |= {"of": rival, "GFLOP/s": rate / 1e9, "versions": heats[0][name]["versions"]}
        table[name] = row
    return table


def processor() -> str:
    """The machine in words."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor()
    return f"{os.cpu_count()} cores {model}, one thread a process, load {os.getloadavg()[1]:.1f}"


def write(path: Path, workload: str, table: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """Print the table; replace the workload's rows in the CSV; return all rows of the CSV."""
    names = "micro,cpu,wall,episodes/s,peak GB,sample,score,optimize,ratio,range,full,bound"
    shown = names.split(",")
    print(f"{workload:34}" + "".join(f"{name:>11}" for name in shown))
    for name, row in table.items():
        line = f"{name:34}"
        for column in shown:
            x = row[column]
            line += f"{x:11.3g}" if isinstance(x, float) else f"{x:>11}"
        print(line)

    # Imported late: the memory of this process counts in the peak of its children.
    from tools.curves import provenance

    command = " ".join(["python", "benchmarks/speed.py", *sys.argv[1:]])
    about = dict(hardware=processor(), command=command) | provenance()
    old = list(csv.DictReader(path.read_text().splitlines())) if path.is_file() else []
    rows = [row for row in old if row["workload"] != workload]
    for name, row in table.items():
        cells = dict(workload=workload, contestant=name) | row | about
        for column, x in cells.items():
            if isinstance(x, float):
                cells[column] = f"{x:.4g}"
        rows.append(cells)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[-1])
        writer.writeheader()
        writer.writerows(rows)
    return rows


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """A panel per workload: stacked CPU seconds of the phases."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(row["workload"] for row in rows))
    rows_of_panels = math.ceil(len(panels) / 2)
    figure = Figure(figsize=(12, 3.2 * rows_of_panels), layout="constrained")
    axes = figure.subplots(rows_of_panels, 2, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, panel in zip(axes.flat, panels, strict=False):
        mine = [row for row in rows if row["workload"] == panel][::-1]
        names, left = [row["contestant"] for row in mine], np.zeros(len(mine))
        for phase in PHASES:
            width = np.array([float(row[phase]) for row in mine])
            axis.barh(names, width, left=left, label=phase)
            left += width
        axis.set(title=f"{panel}: CPU seconds per update, one thread", xlim=(0, 1.15 * left.max()))
        for i, row in enumerate(mine):
            axis.text(left[i], i, f" {float(row['ratio']):.2f} ×", va="center", fontsize=8)
    labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)


def main(args: Args) -> None:
    """Measure, print, write, draw."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    work = WORKS[args.workload]
    field = contestants(args.peers.split(","), work.epochs)
    work = replace(work, micro=(args.micro,)) if args.micro else work
    table = race(work, field, args.updates, args.rounds)
    rows = write(args.out.with_suffix(".csv"), args.workload, table)
    draw(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main(tyro.cli(Args))
