"""What each implementation detail is worth on the synthetic task: runs without one, beside runs with all.

    python sft.py --task synthetic && python train_reward.py --task synthetic
    python benchmarks/ablations.py                    # ablations.csv, ablations.png, and a table
    python benchmarks/ablations.py --details P9 A1 --seeds 2 --out mine.csv

A detail is removed by flags, or by changing a line in a copy of the project. Score, true score and
KL are of the final policy on held-out queries, measured by the unchanged code with the usual reward
model: a run without P1 or G3 measures itself wrongly. The other metrics are the run's own: approxkl
of its first update, and means over all updates. Intervals are 95%: of a bootstrap over the seeds,
which is narrow with five, and Student's for Δ, the true score minus that of the run with all
details and the same seed. Of twenty details worth nothing, one seems to be worth something.
"""

import math
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
import ppo  # noqa: E402
from benchmarks import sweep  # noqa: E402
from machinery.decoding import Decoder  # noqa: E402
from machinery.models import load_lm  # noqa: E402
from machinery.plots import pyplot  # noqa: E402
from utils import add_affixes, generator  # noqa: E402

METRICS = ("score", "true score", "KL", "first approxkl", "approxkl", "clip fraction")
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # 97.5% quantile, 2 … 10 seeds


@dataclass(frozen=True)
class Args:
    """What each implementation detail is worth."""

    out: Path = Path(__file__).with_suffix(".csv")
    """CSV to write or to continue; the picture is beside it"""
    details: tuple[str, ...] = ()
    """only these, such as P9; default: all"""
    seeds: int = 5
    """runs of each"""
    workers: int = os.cpu_count() or 1
    """runs at a time"""
    flags: str = ""
    """flags for every run; write --flags="--total_episodes 512" with the ="""
    only: str | None = None
    """one job as JSON, measured in this process"""


class Off(NamedTuple):
    """A detail that is removed, by flags or by replacing `right` by `wrong` in a file."""

    detail: str
    what: str
    flags: str = ""
    file: str = ""
    right: str = ""
    wrong: str = ""
    processes: int = 1
    new_reward: bool = False  # the reward model is trained without the detail, too


POSITIONS = "torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)"
TOP_50 = "logits = logits.masked_fill(logits < logits.topk(50).values[:, -1:], -torch.inf)"
ADAM = ' / math.sqrt(1 - group["betas"][1] ** group["t"])'
NORMALIZED = "model.gain.fill_(gain)\n    model.bias.fill_(-gain * mean.item())"
ZEROS = "nn.init.zeros_(self.value_head.weight)  # values start at 0 (P2)\n        nn.init.zeros_("
# fmt: off
PPO = (
    Off("", "all details"),
    Off("A1", "PyTorch's Adam", "", "ppo.py", ADAM, ""),
    Off("A1", "Adam is reset in every update", "", "ppo.py", "seconds = timer.stop()\n",
        "optimizer.state.clear()\n        optimizer.param_groups[0]['t'] = 0\n"
        "        seconds = timer.stop()\n"),
    Off("G3", "position ids count padding", "", "ppo.py", "mask.cumsum(dim=1) - mask.long()", POSITIONS),
    Off("G4", "samples from the top 50 tokens", "", "utils.py", "probs = logits.to(",
        TOP_50 + "\n    probs = logits.to("),
    Off("G5", "constant learning rate", "--no-anneal_lr"),
    Off("R2", "reward head of std 0.02", "", "train_reward.py",
        "std=1 / math.sqrt(self.head.in_features + 1)", "std=0.02", new_reward=True),
    Off("R3", "gain 1, bias 0", "", "train_reward.py", NORMALIZED, "gain = 1", new_reward=True),
    Off("P1", "log-probabilities at temperature 1", "", "ppo.py", " / self.temperature).log", ").log"),
    Off("P2", "PyTorch's initial value head", "", "ppo.py", ZEROS, "("),
    Off("P4", "dropout 0.1 in training", "", "ppo.py", "    policy = PolicyAndValue(",
        "    for module in lm.modules():\n        module.p = 0.1\n    policy = PolicyAndValue("),
    Off("P5", "neither truncation nor penalty", "--truncate_token None"),
    Off("P5", "truncation, but no penalty", "", "ppo.py",
        "torch.where(ended, reward(queries, truncated), task.missing_eos_penalty)",
        "reward(queries, truncated)"),
    Off("P5", "KL and losses end at the truncation, too", "--eos_task"),
    Off("P6", "λ = 1", "--lam 1"),
    Off("P7", "same minibatches every epoch", "", "ppo.py", "rng.permutation(num_", "np.arange(num_"),
    Off("P8", "no KL penalty", "--kl_coef 0 --kl_target None"),
    Off("P8", "KL penalty on the last token", "", "ppo.py",
        "(-kl_coef * kl).scatter_add(1, last, scores[:, None])",
        "(0 * kl).scatter_add(1, last, (scores - kl_coef * kl.sum(dim=1))[:, None])"),
    Off("P9", "advantages not whitened", "--no-whiten_advantages"),
    Off("P9", "rewards not whitened", "--no-whiten_rewards"),
    Off("P9", "rewards whitened to mean 0", "", "ppo.py", "minibatch.mask, shift_mean=False)",
        "minibatch.mask)"),
    Off("P10", "values not clipped", "--cliprange_value 1e6"),
    Off("P10", "value loss without ½", "--vf_coef 0.2"),
    Off("P10", "no critic: values stay 0", "--vf_coef 0"),
    Off("P11", "fixed kl_coef", "--kl_target None"),
    Off("L4", "ratio not clipped", "--cliprange 1e6"),
    Off("", "all details", processes=2),
    Off("X11", "each process whitens alone", "", "ppo.py", "global_mean_and_var(x, mask)  # over",
        "x[mask].mean(), x[mask].var(correction=0)  # not over", 2),
    Off("G6", "processes sample the same", "", "ppo.py", " + 100003 * accelerator.process_index", "", 2),
)
MEAN = "(differences.sum(dim=1) / (k - 1))"
RLOO = (
    Off("", "all details"),
    Off("A1", "PyTorch's Adam", "", "rloo.py", ADAM, ""),
    Off("G5", "constant learning rate", "--no-anneal_lr"),
    Off("R3", "gain 1, bias 0", "", "train_reward.py", NORMALIZED, "gain = 1", new_reward=True),
    Off("P8", "no KL penalty", "--kl_coef 0 --kl_target None"),
    Off("P11", "fixed kl_coef", "--kl_target None"),
    Off("L3", "no baseline", "", "rloo.py", MEAN, "rewards"),
    Off("L3", "baseline of the whole batch", "", "rloo.py", MEAN, "(rewards - rewards.mean())"),
    Off("L4", "ratio not clipped", "--cliprange 1e6"),
)
# fmt: on
OFF = {"ppo": PPO, "rloo": RLOO}

# -------------------------------------------------------------------------------------------- a run


def remove_detail(off: Off, project: Path) -> None:
    """Change the copy of the project. Raises `ValueError` if it lacks the text to replace."""
    if off.file:
        path = project / off.file
        text = path.read_text()
        if off.right not in text:
            raise ValueError(f"{off.detail}: {off.right!r} is not in {off.file}")
        path.write_text(text.replace(off.right, off.wrong))


def judge(policy: str, args: ppo.Args) -> list[float]:
    """Score, true score and KL of a policy: four responses to each held-out query."""
    queries, ids, reward, gold_reward = sweep.heldout(args)
    queries, task = queries.repeat(4, 1), args.task
    models = [
        ppo.PolicyAndValue(load_lm(x), ids.pad, task.temperature) for x in (policy, task.base_model)
    ]
    decoder = Decoder(models[0].lm, task.response_length)
    rng = generator(args.seed, 0, queries.device)
    responses = ppo.sample_in_batches(decoder, add_affixes(queries, ids), ids, args, rng)
    rows = [torch.arange(len(queries))]
    rollout = ppo.make_rollout(*models, reward, queries, responses, rows, 0.0, ids, args)
    found = ppo.rollout_metrics(rollout, 0.0, ids.pad, gold_reward)
    return [found[f"objective/{name}"].item() for name in ("scores", "gold_score", "kl")]


def measure(job: sweep.Job) -> list[dict[str, float]]:
    """The row of one run, in this folder."""
    found = [off for off in OFF[job["script"]] if off.processes == job["processes"]]
    (off,) = (off for off in found if off[:2] == (job["detail"], job["what"]))
    project = sweep.copy_project(sweep.ROOT, Path("project"))
    remove_detail(off, project)
    flags = f"--run_name run --output_dir policy {job['flags']} --seed {job['seed']} {off.flags}"
    if off.new_reward:
        flags += f" --reward_model {sweep.reward_model(f'without_{off.detail}', '', project)}"
    sweep.run_script(project / f"{job['script']}.py", flags, off.processes)
    took = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [line for line in sweep.metrics("run") if "ppo/lr" in line]
    kls = [line["ppo/policy/approxkl_avg"] for line in lines]
    clipped = [line["ppo/policy/clipfrac_avg"] for line in lines]
    values = judge("policy", sweep.settings(ppo, job["flags"]))
    values += [kls[0], float(np.mean(kls)), float(np.mean(clipped))]
    return [dict(zip(METRICS, values, strict=True)) | {"seconds": took.ru_utime + took.ru_stime}]


# ------------------------------------------------------------------------------------------- output


def by_seed(rows: list[dict[str, str]], metric: str) -> dict[tuple, dict[str, float]]:
    """Script, processes, detail and what is removed → seed → value."""
    found: dict[tuple, dict[str, float]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("script", "processes", "detail", "what"))
        found.setdefault(key, {})[row["seed"]] = float(row[metric])
    return found


def student(values: list[float]) -> str:
    """Mean and Student's 95% interval of two values or more."""
    if len(values) < 2:
        return ""
    quantile = STUDENT[min(len(values), 10) - 2]
    half = quantile * np.std(values, ddof=1) / math.sqrt(len(values))
    return f"{np.mean(values):.2g} ± {half:.2g}"


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: a line for each detail, with means and intervals over its seeds."""
    names = ("", "detail", "removed", "seeds", *METRICS[:2], "Δ", *METRICS[2:])
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    found = {metric: by_seed(rows, metric) for metric in METRICS}
    for key, values in found["true score"].items():
        script, processes, detail, what = key
        base = found["true score"].get((script, processes, "", "all details"), {}) if detail else {}
        bands = [sweep.interval(list(found[metric][key].values())) for metric in METRICS]
        cells = ["{:.3g} ({:.3g} … {:.3g})".format(*band) for band in bands]
        delta = student([value - base[seed] for seed, value in values.items() if seed in base])
        where = script + " on two processes" * (processes == "2")
        cells = [where, detail, what, str(len(values)), *cells[:2], delta, *cells[2:]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """A panel for each metric, a line for each detail; behind them the interval of "all details"."""
    plt, keys = pyplot(), list(by_seed(rows, "score"))
    size = 2.6 * len(METRICS) + 3, 0.26 * len(keys) + 1
    figure, axes = plt.subplots(1, len(METRICS), figsize=size, sharey=True, layout="constrained")
    for axis, metric in zip(axes, METRICS, strict=True):
        for y, (key, values) in enumerate(by_seed(rows, metric).items()):
            middle, low, high = sweep.interval(list(values.values()))
            color = f"C{list(OFF).index(key[0]) + 2 * (key[1] == '2')}"
            axis.plot([low, high], [y, y], color=color, linewidth=1.4)
            axis.plot(middle, y, "o", color=color, markersize=4)
            if key[3] == "all details":
                last = max(i for i, other in enumerate(keys) if other[:2] == key[:2])
                axis.fill_betweenx([y - 0.4, last + 0.4], low, high, color=color, alpha=0.15)
        axis.set_title(metric, fontsize=10)
        axis.grid(alpha=0.3, axis="x")
        axis.set_xscale("log" if "approxkl" in metric or metric == "KL" else "linear")
    labels = [" ".join(filter(None, (key[0], "× 2" * (key[1] == "2"), *key[2:]))) for key in keys]
    axes[0].set_yticks(range(len(keys)), labels, fontsize=8)
    axes[0].set_ylim(len(keys) - 0.4, -0.6)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def jobs(args: Args) -> list[sweep.Job]:
    """The wanted details, each group after its runs with all details."""
    found = []
    for script, processes in (("ppo", 1), ("rloo", 1), ("ppo", 2)):
        group = [off for off in OFF[script] if off.processes == processes]
        wanted = [off for off in group if off.detail in args.details or not args.details]
        found += [(script, off) for off in group if wanted and (off in wanted or not off.detail)]
    return [
        dict(script=script, detail=off.detail, what=off.what, processes=off.processes, seed=seed)
        | dict(flags=args.flags)
        for script, off in found
        for seed in range(1, args.seeds + 1)
    ]


if __name__ == "__main__":
    sweep.main(__file__, tyro.cli(Args), measure, jobs, table, draw)
