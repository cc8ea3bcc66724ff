"""Over-optimization: the reward model's score and the true score against KL.

    python sft.py --task synthetic
    python benchmarks/overoptimize.py             # overoptimize.csv, overoptimize.png, and a table

Reward models learn from a few, more, or all labels. PPO and RLOO use each with several fixed
kl_coef; best of n picks, of n responses of the reference, the one with the highest score, at a KL
of log n - (n - 1) / n. All on held-out queries, after Gao, Schulman and Hilton 2022, Scaling Laws
for Reward Model Overoptimization (arXiv 2210.10760), where a larger reward model plays the truth.
Scores are in standard deviations of the reference's (R3), different for each reward model.
"""

import importlib
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import ppo  # noqa: E402
from benchmarks import sweep  # noqa: E402
from machinery.decoding import Decoder  # noqa: E402
from machinery.models import load_lm  # noqa: E402
from machinery.plots import pyplot  # noqa: E402
from utils import add_affixes, generator  # noqa: E402

METRICS = {"KL": "eval/kl", "score": "eval/scores", "true score": "eval/gold_score"}
WAYS = {"ppo": "C0", "rloo": "C1", "best_of_n": "k"}  # and their colors
NS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Args:
    """Reward model's score and true score against KL."""

    out: Path = Path(__file__).with_suffix(".csv")
    """CSV to write or to continue; the picture is beside it"""
    labels: tuple[int, ...] = (256, 1000, 4992)
    """labels that a reward model learns from"""
    betas: tuple[float, ...] = (0.0, 0.02, 0.08, 0.3)
    """values of kl_coef, fixed over a run"""
    seeds: int = 3
    """runs of each"""
    workers: int = os.cpu_count() or 1
    """runs at a time"""
    flags: str = ""
    """flags for every run; write --flags="--total_episodes 512" with the ="""
    only: str | None = None
    """one job as JSON, measured in this process"""


def best_of(values: Tensor, n: int) -> Tensor:
    """The mean of the best over all choices of n of N values, sorted, best last: [Q, N] → [Q]."""
    ranks = range(values.shape[1])
    weights = [math.comb(rank, n - 1) / math.comb(len(ranks), n) for rank in ranks]
    return values @ torch.tensor(weights, dtype=values.dtype)


def best_of_n(args: ppo.Args) -> list[dict[str, float]]:
    """A row for each n, from 64 responses of the reference to each held-out query."""
    queries, ids, reward, gold_reward = sweep.heldout(args)
    rows, task = queries.repeat_interleave(NS[-1], dim=0), args.task
    decoder = Decoder(load_lm(task.base_model).eval(), task.response_length)
    rng = generator(args.seed, 0, rows.device)
    responses = ppo.sample_in_batches(decoder, add_affixes(rows, ids), ids, args, rng)
    scores, truncated, _ = ppo.score_responses(reward, rows, responses, ids, args)
    scores, order = scores.view(len(queries), -1).double().sort(dim=1)
    true = gold_reward(rows, truncated).view(len(queries), -1).double().gather(1, order)
    found = []
    for n in NS:
        means = [best_of(x, n).mean().item() for x in (scores, true)]
        found.append(dict(zip(METRICS, (math.log(n) - (n - 1) / n, *means), strict=True), at=n))
    return found


def measure(job: sweep.Job) -> list[dict[str, float]]:
    """A row for each evaluation of a run, or for each n."""
    reward = sweep.reward_model(f"labels_{job['labels']}", f"--num_labels {job['labels']}")
    flags = f"{job['flags']} --seed {job['seed']} --reward_model {reward}"
    if job["way"] == "best_of_n":
        return best_of_n(sweep.settings(ppo, flags))
    flags += f" --kl_coef {job['beta']} --kl_target None --eval_every 2"
    script = importlib.import_module(job["way"])
    script.main(sweep.settings(script, f"{flags} --run_name run --output_dir policy"))
    lines = [line for line in sweep.metrics("run") if "eval/kl" in line]
    return [{k: line[v] for k, v in METRICS.items()} | {"at": line["step"]} for line in lines]


def curves(rows: list[dict[str, str]]) -> dict[tuple[str, str, str], np.ndarray]:
    """Way, labels and kl_coef → KL, score and true score [metrics, seeds, evaluations]."""
    found: dict[tuple[str, str, str], dict[str, list]] = {}
    for row in rows:
        seeds = found.setdefault((row["way"], row["labels"], row["beta"]), {})
        seeds.setdefault(row["seed"], []).append([float(row[name]) for name in METRICS])
    return {key: np.array(list(seeds.values())).transpose(2, 0, 1) for key, seeds in found.items()}


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: the reference with each reward model, and where each way ends."""
    lines = [f"| labels | way | kl_coef | {' | '.join(METRICS)} | highest true score, at a KL of |"]
    lines += ["|" + "---|" * 7]
    seen = set()
    for (way, labels, beta), found in curves(rows).items():
        if labels not in seen:
            start = " | ".join(f"{x:.3g}" for x in found[:, :, 0].mean(axis=1))
            lines.append(f"| {labels} | reference | | {start} | |")
            seen.add(labels)
        ends = [sweep.interval(values[:, -1]) for values in found]
        cells = ["{:.3g} ({:.3g} … {:.3g})".format(*end) for end in ends]
        kl, _, true = found.mean(axis=1)
        best = f"{true.max():.3g}, {kl[true.argmax()]:.3g}"
        lines.append(f"| {labels} | {way} | {beta} | {' | '.join(cells)} | {best} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """A column for each number of labels: score above, true score below; a point for each seed."""
    plt, labels = pyplot(), list(dict.fromkeys(row["labels"] for row in rows))
    betas = dict.fromkeys(row["beta"] for row in rows if row["beta"])
    styles = dict(zip(betas, ("-", "--", ":", "-."), strict=False))
    shape = dict(figsize=(4.4 * len(labels), 6.4), sharex=True, sharey="row", squeeze=False)
    figure, axes = plt.subplots(2, len(labels), layout="constrained", **shape)
    legend = {}
    for (way, count, beta), (kl, *scores) in curves(rows).items():
        for axis, values in zip(axes[:, labels.index(count)], scores, strict=True):
            look = dict(color=WAYS[way], linestyle=styles.get(beta, "-"), linewidth=1.2)
            (line,) = axis.plot(kl.mean(axis=0), values.mean(axis=0), **look)
            legend[f"{way}, kl_coef {beta}" if beta else way] = line
            axis.plot(kl[:, -1], values[:, -1], "o", color=WAYS[way], markersize=3)
    for axis, count in zip(axes[0], labels, strict=True):
        axis.set_title(f"{count} labels", fontsize=10)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        root = (lambda x: np.sqrt(np.maximum(x, 0)), np.square)  # as in Gao et al.
        axis.set_xscale("function", functions=root)
        axis.set_xticks((0, 3, 10, 30, 100), ("0", "3", "10", "30", "100"))
        axis.set_xlim(left=0)
    for axis, name in zip(axes[:, 0], ("score", "true score"), strict=True):
        axis.set_ylabel(name)
    figure.supxlabel("KL from the reference, nats (square-root scale)", fontsize=10)
    axes[1, 0].legend(legend.values(), legend, fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def jobs(args: Args) -> list[sweep.Job]:
    """All numbers of labels, ways, kl_coef and seeds."""
    settings = [(way, beta) for way in ("ppo", "rloo") for beta in args.betas]
    return [
        dict(way=way, labels=labels, beta=beta, seed=seed, flags=args.flags)
        for labels in args.labels
        for way, beta in [*settings, ("best_of_n", "")]
        for seed in range(1, args.seeds + 1)
    ]


if __name__ == "__main__":
    sweep.main(__file__, tyro.cli(Args), measure, jobs, table, draw)
