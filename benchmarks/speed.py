"""Ours and the peers on the same work, in turn, each in a process of one thread: seconds, episodes per second, memory.

    python benchmarks/speed.py --workload gpt2                # table, CSV and picture; the last line is one JSON object
    python benchmarks/speed.py --workload tiny --waterfall    # what each of our ideas gains over the plain way
    python benchmarks/speed.py --scale                        # ours as batch, response and model grow; two processes
    python benchmarks/speed.py --workload gpt2 --profile      # where ours spends its CPU time

Ours are `ppo.py` and `rloo.py` themselves, at the defaults of `--task sentiment`. `plain` is benchmarks/plain_ppo.py;
`trl-ppo` is the `PPOTrainer` of TRL 1.12.0, the last version that has one, `trl-rloo` the `RLOOTrainer` of TRL 1.16.0, each
in a virtual environment that is made once in the user's cache. Same random weights and queries, response length, epochs,
fp32, no dropout, no gradient checkpointing; the peers have the fastest of a few micro-batches, TRL's PPO the critic of its
own that it demands, and TRL's RLOO no clipping of gradients. Ratios are of CPU seconds, contestants of one round against each other.
`bound`: what the matrix products of real tokens alone would take at the rate measured beside it (sampling, reference and
reward one forward each, an epoch three), as a share of the seconds.
"""

import csv
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "onefile-rlhf"
TRL = {"trl-ppo": "trl==1.12.0", "trl-rloo": "trl==1.16.0"}
IDEAS = ("sampler", "logits", "reward", "adam", "gelu", "pack")  # of plain_ppo.py, in the order of the waterfall
PHASES = ("sample", "score", "optimize")
K = 4  # completions per prompt
PRODUCTS, PRODUCT = 50, 2 * 512 * 768 * 3072  # an update of contestants.matmul, and the operations of each


@dataclass(frozen=True)
class Args:
    """Ours and the peers on the same work."""

    workload: Literal["tiny", "gpt2"] = "tiny"
    """GPT-2 of 4 layers of 128, 1000 words, 64 episodes; or of 124M parameters, 16 episodes"""
    peers: str = "plain,trl-ppo,trl-rloo"
    """some of these, comma-separated"""
    updates: int = 3
    """updates of each process that are measured, behind one that warms up"""
    rounds: int = 3
    """processes of each contestant, in turn"""
    out: Path = HERE / "speed"
    """.csv and .png to write; rows of the other workload stay"""
    micro: int | None = None
    """the peers' micro-batch; None: the best of a few"""
    waterfall: bool = False
    """the plain way with our ideas, one more in each row; out gets _waterfall behind its name"""
    scale: bool = False
    """ours alone, as the work grows; out gets _scale behind its name"""
    profile: bool = False
    """ours alone under torch.profiler: the operators with the most CPU time of their own"""


@dataclass(frozen=True)
class Work:
    """What there is to do in an update."""

    config: dict[str, int]
    episodes: int
    micro: tuple[int, ...]
    """micro-batches of which a peer gets its best"""
    response_length: int = 24
    query_length: int = 64


TINY = dict(n_layer=4, n_embd=128, n_head=4, vocab_size=1000, n_positions=1024)
GPT2 = dict(n_layer=12, n_embd=768, n_head=12, vocab_size=50257, n_positions=1024)
WORKS = {"tiny": Work(TINY, 64, (8, 16, 32, 64)), "gpt2": Work(GPT2, 16, (2, 4, 8, 16))}


@dataclass(frozen=True)
class Contestant:
    """A row of the table."""

    name: str
    kind: str
    epochs: int = 4
    ideas: tuple[str, ...] = ()
    rival: str | None = None
    """whose seconds its own are divided by"""


def contestants(peers: list[str]) -> list[Contestant]:
    """Ours, and the peers that are wanted."""
    found = [Contestant("ppo", "ppo")]
    found += [Contestant(f"rloo {n}", "rloo", n) for n in (4, 1)]
    for peer in peers:
        if peer == "trl-rloo":
            found += [Contestant(f"{peer} {n}", peer, n, rival=f"rloo {n}") for n in (4, 1)]
        elif peer in ("plain", "trl-ppo"):
            found.append(Contestant(peer, peer, rival="ppo"))
        else:
            raise SystemExit(f"--peers {peer}: it has to be some of plain,trl-ppo,trl-rloo")
    return found


def query_lengths(n: int) -> list[int]:
    """Like sentences of a novel: 5% of 7 tokens or fewer, half of 17, 95% of 40; the longest has 64, as in large batches."""
    shares = (np.arange(n) + 0.5) / n
    lengths = np.exp(np.interp(shares, (0, 0.05, 0.5, 0.95, 1), np.log((5, 7, 17, 40, 64)))).round().astype(int)
    return [*lengths[:-1].tolist(), 64]


def operations(work: Work, kind: str, epochs: int, once: bool = False) -> dict[str, float]:
    """Floating-point operations of the matrix products that an update's phases need, over real tokens; of the language
    model with a prompt `once` for all of its completions."""
    layers, width = work.config["n_layer"], work.config["n_embd"]
    group = K if "rloo" in kind else 1
    prompts = np.array(query_lengths(work.episodes // group))
    lengths = np.tile(prompts, group) + work.response_length

    def trunk(rows: np.ndarray) -> int:
        return 24 * layers * width**2 * rows.sum() + 2 * layers * width * (rows * (rows + 1)).sum()

    lm = trunk(lengths) + 2 * width * work.config["vocab_size"] * work.response_length * len(lengths)
    lm -= (group - 1) * trunk(prompts) * once
    critic = trunk(lengths) if kind == "separate_critic" else 0
    found = {"sample": lm, "score": lm + trunk(lengths), "optimize": 3 * epochs * (lm + critic)}
    return {phase: float(x) for phase, x in found.items()}


def peer_python(peer: str) -> str:
    """The interpreter of a peer's own virtual environment; made where there is none, or one of other versions."""
    if peer not in TRL:
        return sys.executable
    folder, wanted = CACHE / peer, TRL[peer] + "\n" + (HERE / "requirements-peers.txt").read_text()
    if not (folder / "made").is_file() or (folder / "made").read_text() != wanted:
        print(f"making {folder}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "-r", HERE / "requirements-peers.txt"]
        subprocess.run([*pip, TRL[peer]], check=True)
        (folder / "made").write_text(wanted)
    return str(folder / "bin" / "python")


def job(folder: Path, work: Work, one: Contestant, updates: int, micro: int = 1, **more: Any) -> dict[str, Any]:
    """What contestants.py has to know; the queries are written into the folder."""
    rng = np.random.default_rng(0)
    lengths = query_lengths(work.episodes // (K if "rloo" in one.kind else 1))
    queries = [rng.integers(1, work.config["vocab_size"], n).tolist() for n in lengths]
    wanted = asdict(work) | dict(kind=one.kind.replace("-", "_"), folder=str(folder), queries=queries, updates=updates)
    wanted |= dict(epochs=one.epochs, ideas=one.ideas, micro=micro, k=K, products=PRODUCTS, profile=False, flags=[])
    held_out = np.random.default_rng(0).permutation(len(queries) + 1)[0]  # the row that ours keep for evaluation
    texts = [" ".join(f"w{token}" for token in row) for row in queries]
    (folder / "queries.txt").write_text("\n".join([*texts[:held_out], "w1 w2 w3", *texts[held_out:]]) + "\n")
    return wanted | more


def run(
    folder: Path, work: Work, one: Contestant, updates: int, micro: int = 1, processes: int = 1, **more: Any
) -> Any:
    """One contestant in a process of its own (or `processes`) → what it printed: seconds of each update, peak, …"""
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    command = [peer_python(one.kind), *launch, str(HERE / "contestants.py")]
    command.append(json.dumps(job(folder, work, one, updates, micro, **more)))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    if done.returncode:
        raise SystemExit(f"{one.name} failed:\n{done.stderr[-3000:]}")
    *printed, last = done.stdout.strip().splitlines()
    found = json.loads(last) | {"printed": "\n".join(printed)}
    if found["updates"]:
        print(f"{one.name}, micro-batch {micro or 'default'}: {seconds(found, 0):.3g} CPU s an update", file=sys.stderr)
    return found


@contextmanager
def made(work: Work) -> Iterator[Path]:
    """A folder with the work's models, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), work, Contestant("make", "make"), 0)
        yield Path(folder)


def seconds(found: dict[str, Any], which: int, phases: tuple[str, ...] = PHASES) -> float:
    """Median over a process's updates behind its first, in these phases; which: 0 CPU, 1 wall."""
    updates = found["updates"][1:] or found["updates"]
    return statistics.median(sum(update[phase][which] for phase in phases if phase in update) for update in updates)


def best_micro(folder: Path, work: Work, one: Contestant) -> int:
    """Of a peer: the micro-batch with the fewest CPU seconds in one update."""
    if one.kind in ("ppo", "rloo"):
        return 0  # its own default
    if len(work.micro) == 1:
        return work.micro[0]
    return min(work.micro, key=lambda micro: seconds(run(folder, work, one, 0, micro), 0))


def race(work: Work, field: list[Contestant], updates: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Everybody in turn, `rounds` times → name → medians."""
    heats: list[dict[str, Any]] = []
    with made(work) as folder:
        tuned = cache(lambda kind, ideas: best_micro(folder, work, Contestant(kind, kind, epochs=1, ideas=ideas)))
        micro = {one.name: tuned(one.kind, one.ideas) for one in field}
        for _ in range(rounds):
            heats.append({one.name: run(folder, work, one, updates, micro[one.name]) for one in field})
            heats[-1]["matmul"] = run(folder, work, Contestant("matmul", "matmul"), updates)

    def median(function: Callable) -> float:
        return statistics.median(map(function, heats))

    rate = PRODUCTS * PRODUCT / median(lambda heat: seconds(heat["matmul"], 0))
    table = {}
    for one in field:
        name, rival = one.name, one.rival or one.name
        row = {"micro": micro[name] or "default", "cpu": median(lambda heat: seconds(heat[name], 0))}
        row["wall"] = median(lambda heat: seconds(heat[name], 1))
        row["episodes/s"] = work.episodes / row["wall"]
        row["peak GB"] = median(lambda heat: heat[name]["peak"])
        row |= {phase: median(lambda heat: seconds(heat[name], 0, (phase,))) for phase in PHASES}
        row["ratio"] = median(lambda heat: seconds(heat[name], 0) / seconds(heat[rival], 0))
        row["bound"] = sum(operations(work, one.kind, one.epochs).values()) / rate / row["cpu"]
        table[name] = row | {"of": rival, "GFLOP/s": rate / 1e9, "versions": heats[0][name]["versions"]}
    return table


def processor() -> str:
    """The machine in words."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())
    return f"{os.cpu_count()} cores {model}, one thread a process, load {os.getloadavg()[1]:.1f}"


def write(path: Path, workload: str, table: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """Print the table; put it into the CSV in place of the workload's old rows → all rows of the CSV."""
    shown = ("micro", "cpu", "wall", "episodes/s", "peak GB", *PHASES, "ratio", "bound")
    print(f"{workload:34}" + "".join(f"{name:>11}" for name in shown))
    for name, row in table.items():
        cells = (f"{x:11.3g}" if isinstance(x, float) else f"{x:>11}" for x in (row[n] for n in shown))
        print(f"{name:34}" + "".join(cells))
    rows = [{"workload": workload, "contestant": name} | row for name, row in table.items()]
    old = list(csv.DictReader(path.read_text().splitlines())) if path.is_file() else []
    return write_csv(path, [row for row in old if row["workload"] != workload], rows)


def write_csv(path: Path, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, to the new ones of which date, machine and command are added."""
    command = " ".join(["python", "benchmarks/speed.py", *sys.argv[1:]])
    about = dict(date=time.strftime("%Y-%m-%d"), hardware=processor(), command=command)
    rows = old + [{k: f"{v:.4g}" if isinstance(v, float) else v for k, v in (row | about).items()} for row in new]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[-1])
        writer.writeheader()
        writer.writerows(rows)
    return rows


def draw_race(rows: list[dict[str, str]], path: Path) -> None:
    """A panel for each workload: CPU seconds of the phases, stacked."""
    plt = pyplot()
    panels = list(dict.fromkeys(row["workload"] for row in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 3.2), layout="constrained", squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        mine = [row for row in rows if row["workload"] == panel][::-1]
        names, left = [row["contestant"] for row in mine], np.zeros(len(mine))
        for phase in PHASES:
            width = np.array([float(row[phase]) for row in mine])
            axis.barh(names, width, left=left, label=phase)
            left += width
        axis.set(title=f"{panel}: CPU seconds per update, one thread", xlim=(0, 1.15 * left.max()))
        for i, row in enumerate(mine):
            axis.text(left[i], i, f" {float(row['ratio']):.2f} ×", va="center", fontsize=8)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)


def pyplot() -> Any:
    """Imported at the end: what a process inherits from a large one counts as its peak."""
    sys.path.insert(0, str(HERE.parent))
    import records

    return records.pyplot()


def waterfall() -> list[Contestant]:
    """The plain way, one idea more in each row, and ppo.py."""
    steps = [IDEAS[:n] for n in range(len(IDEAS) + 1)]
    rows = [Contestant(f"+ {ideas[-1]}" if ideas else "plain", "plain", ideas=ideas, rival="plain") for ideas in steps]
    return [*rows, Contestant("ppo", "ppo", rival="plain")]


def scaled() -> dict[str, dict[str, tuple[Work, int]]]:
    """What grows → its values → (the work, processes)."""
    tiny, sizes = WORKS["tiny"], ((2, 64), (4, 128), (6, 256), (8, 512))
    shapes = {f"{n}×{d}": replace(tiny, config=TINY | dict(n_layer=n, n_embd=d, n_head=d // 32)) for n, d in sizes}
    return {
        "episodes": {str(n): (replace(tiny, episodes=n), 1) for n in (16, 64, 128, 256, 512)},
        "response": {str(n): (replace(tiny, response_length=n), 1) for n in (24, 64, 128, 256, 512)},
        "layers×width": {name: (work, 1) for name, work in shapes.items()},
        "processes": {str(n): (tiny, n) for n in (1, 2)},
    }


def scale(args: Args, out: Path) -> None:
    """ppo.py as one thing at a time grows: print, write, draw."""
    rows, whats = [], scaled()
    for what, values in whats.items():
        for value, (work, processes) in values.items():
            with made(work) as folder:
                found = run(folder, work, Contestant("ppo", "ppo"), args.updates, 0, processes)
            row = dict(what=what, value=value, cpu=seconds(found, 0), wall=seconds(found, 1))
            took = row["wall" if what == "processes" else "cpu"]  # of one thread: what it takes on an idle machine
            rows.append(row | {"episodes/s": work.episodes / took, "peak GB": found["peak"]})
            print(*(f"{x:.3g}" if isinstance(x, float) else x for x in rows[-1].values()), flush=True)
    write_csv(out.with_suffix(".csv"), [], rows)
    alone, two = (row["episodes/s"] for row in rows[-2:])
    print(f"two processes on two cores: {two / alone / 2:.0%} of twice the episodes per second of one")
    plt = pyplot()
    figure, axes = plt.subplots(
        2, len(whats), figsize=(3.2 * len(whats), 5), layout="constrained", sharey="row", squeeze=False
    )
    for column, what in zip(axes.T, whats, strict=True):
        mine = [row for row in rows if row["what"] == what]
        for axis, name in zip(column, ("episodes/s", "peak GB"), strict=True):
            axis.plot([row["value"] for row in mine], [row[name] for row in mine], "o-")
            axis.set(xlabel=what, ylabel=name, yscale="log")
    figure.savefig(out.with_suffix(".png"), dpi=110)


def profile(workload: str) -> None:
    """Where ours spends its CPU time in an update."""
    with made(WORKS[workload]) as folder:
        for name in ("ppo", "rloo"):
            printed = run(folder, WORKS[workload], Contestant(name, name), 1, profile=True)["printed"]
            print(name, workload, printed[printed.index("---") :])


def main(args: Args) -> None:
    """Measure, print, write, draw."""
    if args.profile:
        return profile(args.workload)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.scale:
        return scale(args, args.out.with_name(f"{args.out.name}_scale"))
    field = waterfall() if args.waterfall else contestants(args.peers.split(","))
    out = args.out.with_name(f"{args.out.name}_waterfall" if args.waterfall else args.out.name)
    work = WORKS[args.workload]
    work = replace(work, micro=(args.micro,)) if args.micro else work
    table = race(work, field, args.updates, args.rounds)
    draw_race(write(out.with_suffix(".csv"), args.workload, table), out.with_suffix(".png"))
    rivals = [(name, row, table[row["of"]]) for name, row in table.items() if row["of"] != name]
    ratios = {f"{name} / {row['of']}": row["ratio"] for name, row, _ in rivals}
    peaks = {f"{row['of']} / {name}": of["peak GB"] / row["peak GB"] for name, row, of in rivals}
    result = {"workload": args.workload, "medians": table, "ratios": ratios, "peaks": peaks}
    print(json.dumps(json.loads(json.dumps(result), parse_float=lambda x: float(f"{float(x):.4g}"))))


if __name__ == "__main__":
    main(tyro.cli(Args))
