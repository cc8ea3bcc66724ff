"""Over-optimization: the reward model's score and the true score over KL, with and without penalty.

    python sft.py --task synthetic
    python benchmarks/overoptimize.py             # runs/, results/overoptimize_seeds.csv, .png

A reward model of each seed learns from few labels, and RLOO maximizes its score at a constant
learning rate. Numbers are of the responses of each update. Scores are in standard deviations of the
initial policy's (R3), true scores in the judge's units. After Gao, Schulman and Hilton 2022, Scaling
Laws for Reward Model Overoptimization, arXiv 2210.10760.
"""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tools.curves import make_panels, provenance  # noqa: E402

METRICS = {"KL": "objective/kl", "score": "objective/scores"}
METRICS |= {"true score": "objective/gold_score"}


@dataclass(frozen=True)
class Args:
    """The reward model's score and the true score over KL."""

    labels: int = 64
    """labels that a reward model learns from"""
    betas: tuple[float, ...] = (0.0, 0.02)
    """values of kl_coef, fixed over a run"""
    seeds: int = 5
    """reward models, and runs with each kl_coef"""
    total_episodes: int = 4096
    """sampled responses of a run"""
    out: Path = ROOT / "benchmarks/results/overoptimize_seeds.csv"
    """CSV to write; the picture is beside it"""


def reward_command(labels: int, seed: int) -> str:
    """The command that trains a reward model."""
    return f"train_reward.py --task synthetic --seed {seed} --num_labels {labels}"


def policy_command(reward_model: str, beta: float, seed: int) -> str:
    """The command that maximizes its score."""
    command = f"rloo.py --task synthetic --seed {seed} --reward_model {reward_model}"
    return f"{command} --kl_coef {beta} --kl_target None --no-anneal_lr --eval_every 1000"


def run(command: str) -> Path:
    """The folder of a run, named after its command; it is made if it is not there."""
    folder = Path("runs", re.sub(r"\W+", "_", command))
    if not (folder / "model").exists():
        script, *flags = command.split()
        flags += ["--run_name", folder.name, "--output_dir", f"{folder}/model"]
        subprocess.run([sys.executable, ROOT / script, *flags], check=True)
    return folder


def read_run(folder: Path) -> list[dict[str, float]]:
    """KL, score and true score of each update."""
    found = []
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if "objective/kl" in line:  # the last one is an evaluation
            found.append({name: line[metric] for name, metric in METRICS.items()})
    return found


def read_csv(path: Path) -> dict[float, np.ndarray]:
    """kl_coef → KL, score and true score [3, seeds, updates]."""
    found: dict[float, dict[str, list]] = {}
    for row in csv.DictReader(path.read_text().splitlines()):
        seeds = found.setdefault(float(row["kl_coef"]), {})
        seeds.setdefault(row["seed"], []).append([float(row[name]) for name in METRICS])
    return {beta: np.array([*seeds.values()]).transpose(2, 0, 1) for beta, seeds in found.items()}


def draw(curves: dict[float, np.ndarray], axes: Sequence[Any]) -> None:
    """Score and true score over KL: a thin line for each seed, and the means of each update."""
    for color, (beta, (kl, *scores)) in enumerate(curves.items()):
        for axis, values in zip(axes, scores, strict=True):
            axis.plot(kl.T, values.T, color=f"C{color}", linewidth=0.5, alpha=0.6)
            means = kl.mean(axis=0), values.mean(axis=0)
            axis.plot(*means, color=f"C{color}", linewidth=1.8, label=f"β = {beta:g}")
    axes[0].legend(fontsize=8)


def main(args: Args) -> None:
    """Train, write the CSV, draw it."""
    rows = []
    for seed in range(1, args.seeds + 1):
        reward_model = run(reward_command(args.labels, seed)) / "model"
        for beta in args.betas:
            command = policy_command(str(reward_model), beta, seed)
            folder = run(f"{command} --total_episodes {args.total_episodes}")
            for i, update in enumerate(read_run(folder)):
                row = {"labels": args.labels, "kl_coef": beta, "seed": seed, "update": i}
                rows.append(row | update | provenance())
    with open(args.out, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    figure, panels = make_panels([*METRICS][1:], "KL from the initial policy, nats")
    draw(read_csv(args.out), [*panels.values()])
    figure.savefig(args.out.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Args))
