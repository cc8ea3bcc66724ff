"""Lay the curves of several runs over each other: a picture, and beside it a CSV with where each curve starts and ends.

python benchmarks/plot.py --runs PPO=runs/demo_ppo RLOO=runs/demo_rloo --out runs/demo.png
"""

import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
import records  # noqa: E402

PANELS = (
    "objective/scores",
    "objective/gold_score",
    "objective/kl",
    "objective/kl_coef",
    "ppo/loss/value_avg",
    "objective/entropy",
)


@dataclass(frozen=True)
class Args:
    """Lay the curves of several runs over each other."""

    runs: tuple[str, ...]
    """label=folder of each run; runs of one label share a colour"""
    out: Path
    """picture to write"""
    metrics: tuple[str, ...] = PANELS
    """a panel each"""


def write_csv(runs: list[tuple[str, Path]], metrics: tuple[str, ...], path: Path) -> None:
    """A row for each run and metric: the first value, the mean of the last five, and the last."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("label", "run", "metric", "values", "first", "last five", "last"))
        for label, folder in runs:
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for name in metrics:
                values = [line[name] for line in lines if name in line]
                if values:
                    shown = (values[0], sum(values[-5:]) / len(values[-5:]), values[-1])
                    writer.writerow((label, folder.name, name, len(values), *(f"{value:.4f}" for value in shown)))


if __name__ == "__main__":
    args = tyro.cli(Args)
    runs = [(label, Path(folder)) for label, folder in (run.split("=", 1) for run in args.runs)]
    records.plot_runs(runs, list(args.metrics), args.out)
    write_csv(runs, args.metrics, args.out.with_suffix(".csv"))
    print(args.out, args.out.with_suffix(".csv"))
