"""Lay the curves of several runs over each other.

    python benchmarks/plot.py --runs PPO=runs/demo_ppo RLOO=runs/demo_rloo --out runs/demo.png
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
import utils  # noqa: E402

PANELS = ("objective/scores", "objective/gold_score", "objective/kl", "objective/kl_coef", "ppo/loss/value_avg", "objective/entropy")


@dataclass(frozen=True)
class Args:
    """Lay the curves of several runs over each other."""

    runs: tuple[str, ...]
    """label=folder of each run; runs of one label share a colour"""
    out: Path
    """picture to write"""
    metrics: tuple[str, ...] = PANELS
    """a panel each"""


if __name__ == "__main__":
    args = tyro.cli(Args)
    runs = [(label, Path(folder)) for label, folder in (run.split("=", 1) for run in args.runs)]
    utils.plot_runs(runs, list(args.metrics), args.out)
    print(args.out)
