"""Patches and recipes of diffs/ on the synthetic task: curves, a picture and a table.

    python sft.py --task synthetic && python train_reward.py --task synthetic
    python benchmarks/patches.py --flags="--total_episodes 2048"    # patches of rloo.py and others
    python benchmarks/patches.py --names ppo qwen ptx --seeds 1 --out mine.csv

Each run is the command in the header of the patch or recipe, in a copy of the project. A curve has
at most 16 points, means over consecutive steps; the table has the last one. Seconds are CPU seconds
of the whole run. Memory is the peak of the process. The patches of LoRA need peft.
"""

import datetime
import os
import re
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
import rloo  # noqa: E402
from benchmarks import sweep  # noqa: E402
from machinery.decoding import Decoder  # noqa: E402
from machinery.models import load_lm  # noqa: E402
from machinery.plots import pyplot  # noqa: E402
from utils import add_affixes, generator  # noqa: E402

FOLDER = sweep.ROOT / "diffs"
DIFFS = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.diff"))}
RECIPES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("recipes/*.sh"))}
BASES = {name: re.search(r"^--- (\w+)\.py", text, re.M)[1] for name, text in DIFFS.items()}
SCRIPTS = ("ppo", "rloo", "train_reward", "sft")
GROUPS = {x: [x, *(name for name, base in BASES.items() if base == x)] for x in SCRIPTS}
GROUPS["ppo"] += RECIPES
PANELS = {  # metrics of the groups in the picture, and what they are
    "objective/gold_score": "true score",
    "objective/kl": "KL, nats",
    "accuracy": "accuracy on training labels",
    "heldout/loss": "held-out loss of language models",
}
METRICS = (*PANELS, "objective/scores", "heldout/accuracy", "margin")


@dataclass(frozen=True)
class Args:
    """Patches and recipes on the synthetic task."""

    out: Path = Path(__file__).with_suffix(".csv")
    """CSV to write or to continue; the picture is beside it"""
    names: tuple[str, ...] = (*GROUPS["rloo"], *GROUPS["train_reward"], *GROUPS["sft"])
    """scripts, patches and recipes"""
    seeds: int = 2
    """runs of each"""
    workers: int = 1
    """runs at a time"""
    flags: str = ""
    """flags for runs of ppo.py and rloo.py; write --flags="--total_episodes 512" with the ="""
    only: str | None = None
    """one job as JSON, in this process"""


def command_of(name: str) -> str:
    """The command of a script, patch or recipe on the synthetic task."""
    if name in RECIPES:
        text = RECIPES[name].replace("\n#    ", "")  # joins continued lines
        return re.search("^# Synthetic: (.*)$", text, re.M)[1]
    if name in DIFFS:
        return " && ".join(re.search(r"^Command: (.*)\n +(.*)$", DIFFS[name], re.M).groups())
    return f"python {name}.py --task synthetic"


def curve(lines: list[dict[str, float]], metric: str) -> list[dict[str, float | str]]:
    """At most 16 points of a metric; none if the run does not have it."""
    points = np.array([(line["step"], line[metric]) for line in lines if metric in line])
    parts = np.array_split(points, min(16, len(points))) if len(points) else []
    means = [part.mean(axis=0).tolist() for part in parts]
    return [dict(metric=metric, at=round(at, 1), value=float(f"{x:.4g}")) for at, x in means]


@torch.no_grad()
def evaluate(folder: Path, seed: int) -> dict[str, float]:
    """Metrics of a policy that was trained offline, on the held-out queries."""
    args = sweep.settings(rloo, f"--seed {seed}")
    queries, ids, reward, gold_reward = sweep.heldout(args)
    models = (load_lm(str(name)).eval() for name in (folder, args.task.base_model))
    policy, ref = (rloo.Policy(lm, ids.pad, args.task.temperature) for lm in models)
    decoder, rng = Decoder(policy.lm, args.task.response_length), generator(seed, 0, queries.device)
    responses = rloo.sample_in_batches(decoder, add_affixes(queries, ids), ids, args, rng)
    inputs = policy, ref, reward, queries, responses, [torch.arange(len(queries))]
    rollout = rloo.make_rollout(*inputs, 0.0, ids, args)
    return rloo.rollout_metrics(rollout, 0.0, ids.pad, gold_reward)


def measure(job: sweep.Job) -> list[dict[str, float | str]]:
    """The curves of one run, its CPU seconds and its memory."""
    project, folder = sweep.copy_project(sweep.ROOT, Path("project")), Path("policy").resolve()
    (project / "models").symlink_to(Path("models").resolve())
    if job["name"] in RECIPES:
        (project / f"{job['name']}.py").unlink(missing_ok=True)  # made by an earlier run
    command = f"{command_of(job['name'])} --seed {job['seed']} --run_name run {job['flags']}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-c", f"{command} --output_dir {folder}"]
    subprocess.run(command, cwd=project, env=os.environ | {"PATH": path}, stdout=2, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    os.chdir(project)
    lines = sweep.metrics("run")
    if job["name"] == "dpo":
        lines[-1] |= evaluate(folder, job["seed"])
    lines[-1] |= {"seconds": used.ru_utime + used.ru_stime, "peak MiB": used.ru_maxrss / 1024}
    git = ["git", "-C", sweep.ROOT, "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    when = {"commit": commit, "date": str(datetime.date.today())}
    metrics = (*METRICS, "seconds", "peak MiB")
    return [when | point for metric in metrics for point in curve(lines, metric)]


def last(rows: list[dict[str, str]], name: str, metric: str) -> list[float]:
    """The last value of a metric in each run of a script, patch or recipe."""
    found = [row for row in rows if (row["name"], row["metric"]) == (name, metric)]
    return list({row["seed"]: float(row["value"]) for row in found}.values())


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: a table for each script, of the last points: mean and range over the seeds."""
    lines = []
    for script, names in GROUPS.items():
        names = [name for name in names if any(row["name"] == name for row in rows)]
        metrics = dict.fromkeys(row["metric"] for row in rows if row["name"] in names)
        lines += ["", f"| {script}.py | seeds | {' | '.join(metrics)} |"] * bool(names)
        lines += ["|---" * (len(metrics) + 2) + "|"] * bool(names)
        for name in names:
            values = [last(rows, name, metric) for metric in metrics]
            cells = [f"{np.mean(x):.3g} ({min(x):.3g} … {max(x):.3g})" if x else "" for x in values]
            lines.append(f"| `{name}` | {max(map(len, values))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """A panel for each metric: a thin line for each seed; the script itself in black."""
    plt, names = pyplot(), list(dict.fromkeys(row["name"] for row in rows))
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    colors = {name: f"C{i}" for i, name in enumerate(x for x in names if x not in SCRIPTS)}
    for axis, (metric, what) in zip(axes.flat, PANELS.items(), strict=True):
        for name, seed in dict.fromkeys((row["name"], row["seed"]) for row in rows):
            if metric == "heldout/loss" and name not in GROUPS["sft"]:
                continue  # another loss
            run = [r for r in rows if (r["name"], r["seed"], r["metric"]) == (name, seed, metric)]
            x, y = ([float(row[key]) for row in run] for key in ("at", "value"))
            label = name if run and seed == "1" else None
            look = dict(color=colors.get(name, "k"), linewidth=1.2, label=label)
            if len(run) == 1:  # after training
                axis.axhline(y[0], linestyle="--", **look)
            elif run:
                axis.plot(x, y, **look)
        axis.set(xlabel="optimizer step" if "objective" not in metric else "update", ylabel=what)
        if metric == "objective/kl":
            axis.set_yscale("symlog", linthresh=10)  # dpo is far from the others
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def jobs(args: Args) -> list[sweep.Job]:
    """Every name and seed; first one seed of everything."""
    online = {*GROUPS["ppo"], *GROUPS["rloo"]}
    return [
        dict(name=name, seed=seed, flags=args.flags if name in online else "")
        for seed in range(1, args.seeds + 1)
        for name in args.names
    ]


if __name__ == "__main__":
    sweep.main(__file__, tyro.cli(Args), measure, jobs, table, draw)
