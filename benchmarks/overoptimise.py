"""Over-optimisation, which only shows where the truth is known: the reward model's score and the true one against KL.

    python sft.py --task synthetic && python benchmarks/overoptimise.py     # overoptimise.csv, .png, and a table

A reward model each of a few, of more and of all labels, the same for all seeds; PPO and RLOO with it at several fixed β; beside
them best of n: of n responses of the reference the one with the highest score, at a KL of log n − (n − 1)/n. All on the
held-out queries, after Gao, Schulman and Hilton 2022, "Scaling Laws for Reward Model Overoptimization" (arXiv 2210.10760), where
a larger reward model plays the truth. A score is in standard deviations of the reference's (R3), each reward model's own.
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
import packing
import ppo  # noqa: E402
import records  # noqa: E402
import tasks  # noqa: E402
import utils  # noqa: E402
from benchmarks import sweep  # noqa: E402

METRICS = ("KL", "score", "true score")
WAYS = {"ppo": "C0", "rloo": "C1", "best_of_n": "k"}  # and their colours
NS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Args:
    """Reward-model score and true score against KL."""

    out: Path = Path(__file__).with_suffix(".csv")
    """CSV to write, or to go on with; a picture beside it"""
    labels: tuple[int, ...] = (256, 1000, 4992)
    """that a reward model learns from"""
    betas: tuple[float, ...] = (0.0, 0.02, 0.08, 0.3)
    """weights of the KL penalty, fixed over a run"""
    seeds: int = 3
    """runs of each"""
    workers: int = os.cpu_count() or 1
    """runs at a time"""
    flags: str = ""
    """for every run; write --flags="--total_episodes 512" with its ="""
    only: str | None = None
    """one job as JSON, in this process"""


def best_of(values: Tensor, n: int) -> Tensor:
    """Values [Q, N] in the order in which they are chosen, the best last → the mean [Q], over all n of the N, of the best."""
    ranks = range(values.shape[1])
    weights = [math.comb(rank, n - 1) / math.comb(len(ranks), n) for rank in ranks]  # n − 1 others stand before it
    return values @ torch.tensor(weights, dtype=values.dtype)


def best_of_n(args: ppo.Args) -> list[dict[str, float]]:
    """A row for each of NS, from as many responses of the reference to each held-out query as the last of them."""
    queries, tokenizer, models = sweep.held_out(args)
    rows, task = queries.repeat_interleave(NS[-1], dim=0), args.task
    contexts, gen = utils.add_affixes(rows, models.ids), utils.generator(args.seed, 0, rows.device)
    decoder = packing.Decoder(models.ref.lm)
    responses = ppo.sample_all(decoder, contexts, task, models.ids, gen, args.rollout_batch_size)
    score = ppo.score_responses(models.reward, rows, responses, task, models.ids)
    gold = utils.text_scores(
        tasks.load_function(task.gold_fn), task.gold_fn, tokenizer, rows, score.cut, models.ids.pad
    )
    scores, order = score.scores.view(len(queries), -1).double().sort(dim=1)
    pairs = scores, gold.view(len(queries), -1).double().gather(1, order)
    means = {n: [best_of(x, n).mean().item() for x in pairs] for n in NS}
    return [dict(zip(METRICS, (math.log(n) - (n - 1) / n, *means[n]), strict=True)) | {"at": n} for n in NS]


def measure(job: sweep.Job) -> list[dict[str, float]]:
    """The rows of one run: one for each evaluation, or for each n."""
    reward = sweep.reward_model(f"labels_{job['labels']}", f"--num_labels {job['labels']}")
    flags = f"{job['flags']} --seed {job['seed']} --reward_model {reward}"
    if job["way"] == "best_of_n":
        return best_of_n(sweep.settings(ppo, flags))
    script = importlib.import_module(job["way"])
    flags += f" --kl_coef {job['beta']} --kl_target None --eval_every 2 --run_name run --output_dir policy"
    script.main(sweep.settings(script, flags))
    names = dict(zip(METRICS, ("eval/kl", "eval/scores", "eval/gold_score"), strict=True))
    lines = [line for line in sweep.metrics("run") if "eval/kl" in line]
    return [{name: line[theirs] for name, theirs in names.items()} | {"at": line["step"]} for line in lines]


def curves_of(rows: list[dict[str, str]]) -> dict[tuple[str, str, str], np.ndarray]:
    """Way, labels and β → KL, score and true score of its seeds [metrics, seeds, evaluations]."""
    found: dict[tuple[str, str, str], dict[str, list]] = {}
    for row in rows:
        line = found.setdefault((row["way"], row["labels"], row["beta"]), {}).setdefault(row["seed"], [])
        line.append([float(row[name]) for name in METRICS])
    return {key: np.array(list(seeds.values())).transpose(2, 0, 1) for key, seeds in found.items()}


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: where each way ends, means and bands over the seeds; above them where each number of labels begins."""
    lines = [f"| labels | way | β | {' | '.join(METRICS)} | highest true score, at a KL of |", "|" + "---|" * 7]
    begun = set()
    for (way, labels, beta), found in curves_of(rows).items():
        if labels not in begun:
            lines.append(
                f"| {labels} | reference | | {' | '.join(f'{x:.3g}' for x in found[:, :, 0].mean(axis=1))} | |"
            )
            begun.add(labels)
        cells = ["{:.3g} ({:.3g} … {:.3g})".format(*sweep.interval(values[:, -1])) for values in found]
        kl, _, true = found.mean(axis=1)
        best = f"{true.max():.3g}, {kl[true.argmax()]:.3g}"
        lines.append(f"| {labels} | {way} | {beta} | {' | '.join(cells)} | {best} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """A column for each number of labels, above the score, below the true one: a line through the means of each way and β,
    and a point where each seed ends."""
    plt, labels = records.pyplot(), list(dict.fromkeys(row["labels"] for row in rows))
    styles = dict(zip(dict.fromkeys(row["beta"] for row in rows if row["beta"]), ("-", "--", ":", "-."), strict=False))
    size = 4.4 * len(labels), 6.4
    figure, axes = plt.subplots(
        2, len(labels), figsize=size, sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    shown = {}
    for (way, count, beta), found in curves_of(rows).items():
        for axis, values in zip(axes[:, labels.index(count)], found[1:], strict=True):
            look = dict(color=WAYS[way], linestyle=styles.get(beta, "-"), linewidth=1.2)
            (shown[f"{way}, β {beta}" if beta else way],) = axis.plot(
                found[0].mean(axis=0), values.mean(axis=0), **look
            )
            axis.plot(found[0][:, -1], values[:, -1], "o", color=WAYS[way], markersize=3)
    for axis, count in zip(axes[0], labels, strict=True):
        axis.set_title(f"{count} labels", fontsize=10)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))  # as Gao et al. draw it
        axis.set_xlim(left=0)
        axis.set_xticks((0, 3, 10, 30, 100), ("0", "3", "10", "30", "100"))
    for row, name in zip(axes, METRICS[1:], strict=True):
        row[0].set_ylabel(name)
    figure.supxlabel("KL from the reference, nats (square-root scale)", fontsize=10)
    axes[1, 0].legend(shown.values(), shown, fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def jobs(args: Args) -> list[sweep.Job]:
    """Every way, number of labels, β and seed."""
    settings = [(way, beta) for way in WAYS for beta in (args.betas if way != "best_of_n" else ("",))]
    return [
        dict(way=way, labels=labels, beta=beta, seed=seed, flags=args.flags)
        for labels in args.labels
        for way, beta in settings
        for seed in range(1, args.seeds + 1)
    ]


if __name__ == "__main__":
    sweep.main(__file__, tyro.cli(Args), measure, jobs, table, draw)
