"""Every diff and every recipe beside the script that it is made of, on the synthetic task: score, true score, KL, time, memory.

    python sft.py --task synthetic && python train_reward.py --task synthetic
    python benchmarks/recipes.py                                # recipes.csv, .png and the tables
    python benchmarks/recipes.py --names qwen ptx --seeds 1 --out mine.csv

Each run at the defaults of its patch. Of a run's updates the first and the mean of the last five, over the seeds their mean
and range; seconds are CPU seconds of the whole run over its updates, peak memory the process's. `lora` needs peft.
"""

import os
import resource
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
import records  # noqa: E402
from benchmarks import sweep  # noqa: E402

METRICS = {"score": "objective/scores", "true score": "objective/gold_score", "KL": "objective/kl"}


def made_of(folder: str, source: str) -> tuple[str, ...]:
    """`source`, and the names of the diffs in `folder` that start from it."""
    diffs = sorted((sweep.ROOT / folder).glob("*.diff"))
    return (source, *(path.stem for path in diffs if f"\n--- {source}.py" in path.read_text()))


GROUPS = {"diffs of ppo.py": made_of("diffs", "ppo"), "diffs of rloo.py": made_of("diffs", "rloo")}
GROUPS |= {"recipes": made_of("diffs/recipes", "ppo")}


@dataclass(frozen=True)
class Args:
    """Every diff and every recipe on the synthetic task."""

    out: Path = Path(__file__).with_suffix(".csv")
    """CSV to write, or to go on with; a picture beside it"""
    names: tuple[str, ...] = tuple(dict.fromkeys(name for group in GROUPS.values() for name in group))
    """scripts, diffs and recipes"""
    seeds: int = 3
    """runs of each"""
    workers: int = os.cpu_count() or 1
    """runs at a time"""
    flags: str = ""
    """for every run; write --flags="--total_episodes 512" with its ="""
    only: str | None = None
    """one job as JSON, in this process"""


def measure(job: sweep.Job) -> list[dict[str, float]]:
    """A row for each update of one run."""
    script, begin = sweep.load_script(job["name"]), time.process_time()
    flags = f"--run_name run --output_dir policy --seed {job['seed']} {job['flags']}"
    if "critic_from" in {field.name for field in fields(script.Args)}:
        flags += " --critic_from models/synthetic/train_reward"
    script.main(sweep.settings(script, flags))
    lines = [line for line in sweep.metrics("run") if "objective/kl" in line]
    seconds = (time.process_time() - begin) / len(lines)
    run = {"seconds": seconds, "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    rows = [{"at": line["step"]} | {name: line[theirs] for name, theirs in METRICS.items()} for line in lines]
    return [{name: float(f"{x:.4g}") for name, x in (row | run).items()} for row in rows]


def curves_of(rows: list[dict[str, str]], metric: str) -> dict[str, np.ndarray]:
    """Script, diff or recipe → [seeds, updates]."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        found.setdefault(row["name"], {}).setdefault(row["seed"], []).append(float(row[metric]))
    return {name: np.array(list(seeds.values())) for name, seeds in found.items()}


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: a table for each group."""
    columns = {metric: curves_of(rows, metric) for metric in (*METRICS, "seconds", "peak MiB")}
    lines = []
    for group, names in GROUPS.items():
        lines += ["", f"| {group} | seeds | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 2)]
        for name in names:
            if name in columns["KL"]:
                cells = [cell(curves[name], metric in METRICS) for metric, curves in columns.items()]
                lines.append(f"| `{name}` | {len(columns['KL'][name])} | {' | '.join(cells)} |".replace("-", "−"))
    return "\n".join(lines)


def cell(curves: np.ndarray, ends: bool) -> str:
    """[seeds, updates]: the mean of the last five updates over the seeds, and its range, if there is one."""
    last = curves[:, -5:].mean(axis=1) if ends else curves[:, -1]
    low, mean, high = (f"{x:.3g}" if abs(x) < 1000 else f"{x:.0f}" for x in (last.min(), last.mean(), last.max()))
    return mean if low == high else f"{mean} ({low} … {high})"


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """A row of panels for each group: means over the seeds, the script that all start from in black with its range."""
    plt = records.pyplot()
    figure, axes = plt.subplots(3, len(METRICS), figsize=(13, 10), sharex=True, sharey="col", layout="constrained")
    for line, (group, names) in zip(axes, GROUPS.items(), strict=True):
        for axis, metric in zip(line, METRICS, strict=True):
            found = curves_of(rows, metric)
            for i, name in enumerate(names):
                if name in found:
                    color, at = "black" if i == 0 else f"C{i - 1}", np.linspace(0, 1, found[name].shape[1])
                    axis.plot(at, found[name].mean(axis=0), color=color, linewidth=1.2, label=name)
            if names[0] in found:
                low, high = found[names[0]].min(axis=0), found[names[0]].max(axis=0)
                axis.fill_between(np.linspace(0, 1, len(low)), low, high, color="black", alpha=0.12, linewidth=0)
            axis.set_title(f"{group}: {metric}", fontsize=10)
            axis.grid(alpha=0.3)
        axis.legend(*axis.get_legend_handles_labels(), fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.supxlabel("share of the run", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def jobs(args: Args) -> list[sweep.Job]:
    """Every name and seed, a seed of all first."""
    return [dict(name=name, seed=seed, flags=args.flags) for seed in range(1, args.seeds + 1) for name in args.names]


if __name__ == "__main__":
    sweep.main(__file__, tyro.cli(Args), measure, jobs, table, draw)
