"""Runs that are broken on purpose, beside healthy ones: the pictures of docs/debugging.md.

    python sft.py --task synthetic && python train_reward.py --task synthetic
    python sft.py --task synthetic_eos
    python benchmarks/debugging.py    # the runs that debugging.csv lacks, and docs/img/debugging_*.png

A run is broken by flags, or by changing a line in a copy of the project, as in ablations.py.
"""

import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import ablations, sweep  # noqa: E402
from benchmarks.ablations import Off  # noqa: E402
from machinery import plots  # noqa: E402

UNITS = {  # the columns of the CSV, and the y labels
    "objective/scores": "per response",
    "objective/scores_std": "over responses",
    "objective/gold_score": "true score per response",
    "objective/rlhf_reward": "per response",
    "objective/kl": "nats per response",
    "objective/entropy": "nats per response",
    "objective/ended": "fraction of responses",
    "objective/response_length": "tokens",
    "objective/advantage_std": "over responses",
    "ppo/policy/approxkl_avg": "nats per token, mean of the update",
    "ppo/policy/clipfrac_avg": "fraction of tokens",
    "ppo/loss/value_avg": "mean of the update",
    "ppo/val/var_explained": "fraction of the variance",
    "ppo/val/ratio": "mean of the update",
    "loss": "nats per label",
    "accuracy": "fraction of labels",
}
LOG = {"ppo/policy/approxkl_avg", "ppo/loss/value_avg"}  # log scale


@dataclass(frozen=True)
class Args:
    """Runs that are broken on purpose."""

    out: Path = Path(__file__).with_suffix(".csv")
    """CSV to write or to continue"""
    pictures: Path = sweep.ROOT / "docs" / "img"
    """folder of the pictures"""
    runs: tuple[str, ...] = ()
    """only these, and no pictures; default: all"""
    workers: int = 2
    """runs at a time"""
    only: str | None = None
    """one job as JSON, measured in this process"""


def never(queries: list[str], responses: list[str]) -> list[float]:
    """A reward rule that no response satisfies: it asks for a number."""
    return [float(any(map(str.isdigit, response))) for response in responses]


REWARD = "--num_labels 2496 --num_heldout 64"
PPO = "--total_episodes 1024 --batch_size 64 --eval_queries 4"
ONE_STEP = f"{PPO} --num_ppo_epochs 1 --num_minibatches 1"
JUDGE = "--reward_fn project/data/synthetic/judge.py:gold_score"  # instead of a reward model
EOS = f"{PPO} --task synthetic_eos {JUDGE}"
OFF = {off.what: off for off in ablations.PPO}
OLD = "            logprobs[index], _, values[index] = policy(contexts[index], responses[index])\n"
OLD_AT_1 = f"            policy.temperature = 1.0\n{OLD}            policy.temperature = args.task.temperature\n"
SCORES, LABELS = (
    "torch.where(ended, reward(queries, truncated), ",
    "dim=2).to(device), best.to(device)",
)
PENALTY, LOGITS = "(-kl_coef * kl).scatter_add", "  # as in training (P1)\n"
NO_END = "        logits[:, ids.truncate] -= 1e4 * (t < 16)\n"
RULE = "--reward_fn project/benchmarks/debugging.py:never --missing_eos_penalty 0"
# fmt: off
RUNS = {  # name in the legend: script, and what is broken
    "healthy": ("ppo", Off("", "", PPO)),
    "healthy, one step per update": ("ppo", Off("", "", ONE_STEP)),
    "dropout": ("ppo", OFF["dropout 0.1 in training"]._replace(flags=ONE_STEP)),
    "old log-probs at temperature 1": ("ppo", Off("P1", "", ONE_STEP, "ppo.py", OLD, OLD_AT_1)),
    "top-5 sampling": ("ppo", OFF["samples from the top 50 tokens"]._replace(
        flags=PPO, wrong=ablations.TOP_50.replace("50", "5") + "\n    probs = logits.to(")),
    "sampling temperature 0.3": ("ppo", Off("P1", "", PPO, "ppo.py", "task.temperature" + LOGITS, "0.3" + LOGITS)),
    "no KL penalty": ("ppo", Off("P8", "", f"{PPO} --kl_coef 0 --kl_target None")),
    "sign of the KL penalty": ("ppo", Off("P8", "", PPO, "ppo.py", PENALTY, PENALTY.replace("-", ""))),
    "penalty missing in the reward": ("ppo", Off("P8", "", PPO, "ppo.py", PENALTY, "(0 * kl).scatter_add")),
    "lr × 10": ("ppo", Off("", "", f"{PPO} --lr 5e-3")),
    "lr / 1000": ("ppo", Off("", "", f"{PPO} --lr 5e-7")),
    "responses never end": ("ppo", Off("P5", "", f"{PPO} --response_length 17")),
    "scores of other responses": ("ppo", Off("", "", PPO, "ppo.py", SCORES, SCORES.replace("ed),", "ed).roll(1),"))),
    "healthy, rewards not whitened": ("ppo", Off("", "", f"{PPO} --no-whiten_rewards")),
    "scores × 10, not whitened": ("ppo", Off("R3", "", f"{PPO} --no-whiten_rewards", "ppo.py",
        SCORES, SCORES.replace("reward", "10 * reward"))),
    "PyTorch's Adam": ("ppo", OFF["PyTorch's Adam"]._replace(flags=PPO)),
    "healthy, EOS task": ("ppo", Off("", "", EOS)),
    "end token suppressed": ("ppo", Off("G4", "", EOS, "ppo.py", LOGITS, LOGITS + NO_END)),
    "rewards whitened": ("ppo", Off("P9", "", f"{EOS} --whiten_rewards")),
    "no penalty for a missing end": ("ppo", Off("P5", "", f"{EOS} --missing_eos_penalty 3")),
    "healthy RLOO": ("rloo", Off("", "", PPO)),
    "a rule that none satisfies": ("rloo", Off("", "", f"{PPO} {RULE}")),
    "healthy reward model": ("train_reward", Off("", "", REWARD)),
    "shuffled labels": ("train_reward", Off("", "", REWARD, "train_reward.py", LABELS,
        LABELS.replace("best.", "best[torch.randperm(len(best))]."))),
    "learning rate × 100": ("train_reward", Off("", "", f"{REWARD} --lr 0.1")),
    "responses cut before they differ": ("train_reward", Off("", "", REWARD, "train_reward.py",
        "torch.cat([queries, responses]", "torch.cat([queries, responses[:, :, :0]]")),
}
# fmt: on


class Picture(NamedTuple):
    """A panel for each metric, a line for each run; the first is healthy."""

    runs: tuple[str, ...]
    metrics: tuple[str, ...]


SCORE, KL = "objective/scores", "objective/kl"
APPROXKL, CLIPFRAC = "ppo/policy/approxkl_avg", "ppo/policy/clipfrac_avg"
PICTURES = {  # a section of docs/debugging.md: the runs, the first is healthy, and the panels
    "ratio": Picture(
        ("healthy, one step per update", "dropout", "old log-probs at temperature 1"),
        ("ppo/val/ratio", APPROXKL, SCORE),
    ),
    "negative_kl": Picture(
        ("healthy", "top-5 sampling", "sampling temperature 0.3"), (KL, SCORE, "objective/entropy")
    ),
    "kl": Picture(("healthy", "no KL penalty", "lr × 10"), (KL, SCORE, "objective/gold_score")),
    "flat_score": Picture(
        ("healthy", "lr / 1000", "responses never end", "scores of other responses"),
        (SCORE, KL, "objective/scores_std"),
    ),
    "rlhf_reward": Picture(
        ("healthy", "penalty missing in the reward"), (SCORE, "objective/rlhf_reward", KL)
    ),
    "value_loss": Picture(
        ("healthy, rewards not whitened", "scores × 10, not whitened"),
        ("ppo/loss/value_avg", "ppo/val/var_explained", KL),
    ),
    "entropy": Picture(
        ("healthy", "sign of the KL penalty", "lr × 10"), ("objective/entropy", KL, SCORE)
    ),
    "length": Picture(
        ("healthy, EOS task", "rewards whitened", "no penalty for a missing end"),
        ("objective/response_length", "objective/ended", SCORE),
    ),
    "approxkl": Picture(("healthy", "PyTorch's Adam", "lr × 10"), (APPROXKL, CLIPFRAC, SCORE)),
    "clip_fraction": Picture(
        ("healthy", "lr / 1000", "old log-probs at temperature 1"), (CLIPFRAC, APPROXKL, SCORE)
    ),
    "advantages": Picture(
        ("healthy RLOO", "a rule that none satisfies"),
        ("objective/advantage_std", "objective/scores_std", KL),
    ),
    "reward_model": Picture(
        (
            "healthy reward model",
            "shuffled labels",
            "learning rate × 100",
            "responses cut before they differ",
        ),
        ("loss", "accuracy"),
    ),
}

# -------------------------------------------------------------------------------------------- a run


def measure(job: sweep.Job) -> list[dict[str, float | str]]:
    """The curves of one run, in this folder: at most 32 points, each a mean."""
    script, off = RUNS[job["run"]]
    project = sweep.copy_project(sweep.ROOT, Path("project"))
    ablations.remove_detail(off, project)
    sweep.run_script(project / f"{script}.py", f"--run_name run --output_dir weights {off.flags}")
    took = resource.getrusage(resource.RUSAGE_CHILDREN)
    git = ["git", "-C", str(sweep.ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    about = dict(commit=commit, date=time.strftime("%Y-%m-%d"))
    about["cpu_seconds"] = round(took.ru_utime + took.ru_stime)
    lines = [line | {"step": line["step"] + 1} for line in sweep.metrics("run")]
    lines = [line for line in lines if "loss" in line or "ppo/lr" in line]
    parts = np.array_split(lines, min(len(lines), 32))

    def mean(name: str, part: list[dict]) -> float | str:
        return np.mean([line[name] for line in part]) if name in part[0] else ""

    return [about | {name: mean(name, part) for name in ("step", *UNITS)} for part in parts]


def draw(rows: list[dict[str, str]], folder: Path) -> None:
    """Draw all pictures."""
    for symptom, picture in PICTURES.items():
        label = "optimizer step" if "loss" in picture.metrics else "update"
        figure, panels = plots.make_panels(picture.metrics, label)
        for metric, axis in panels.items():
            for i, name in enumerate(picture.runs):
                mine = [row for row in rows if row["run"] == name and row[metric]]
                x, y = ([float(row[key]) for row in mine] for key in ("step", metric))
                axis.plot(x, y, f"C{i}", marker=".", markersize=3, linewidth=1.2, label=name)
            axis.set_ylabel(UNITS[metric], fontsize=8)
            axis.set_yscale("log" if metric in LOG else "linear")
        panels[picture.metrics[0]].legend(fontsize=7)
        figure.savefig(folder / f"debugging_{symptom}.png", dpi=90)
        plots.pyplot().close(figure)


def last(rows: list[dict[str, str]]) -> str:
    """The last point of each run, as text."""
    found = {row["run"]: {k: v for k, v in row.items() if v} for row in rows}
    return "\n".join(" ".join(f"{k}={v}" for k, v in row.items()) for row in found.values())


if __name__ == "__main__":
    args = tyro.cli(Args)
    sweep.main(
        __file__,
        args,
        measure,
        lambda args: [dict(run=name) for name in args.runs or RUNS],
        last,
        None if args.runs else lambda rows, _: draw(rows, args.pictures),
    )
