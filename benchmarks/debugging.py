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

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import ablations, sweep  # noqa: E402
from benchmarks.ablations import Off  # noqa: E402
from machinery import plots  # noqa: E402


@dataclass(frozen=True)
class Args:
    """Runs that are broken on purpose."""

    out: Path = Path(__file__).with_suffix(".csv")
    """CSV to write or to continue"""
    runs: tuple[str, ...] = ()
    """only these, and no pictures; default: all"""
    workers: int = 2
    """runs at a time"""
    only: str | None = None
    """one job as JSON, measured in this process"""


def never(queries: list[str], responses: list[str]) -> list[float]:
    """A reward rule that no response satisfies: it asks for a number."""
    return [float(any(map(str.isdigit, response))) for response in responses]


# fmt: off
SCORE, STD, TRUE = "objective/scores", "objective/scores_std", "objective/gold_score"
TOTAL, KL, ENTROPY = "objective/rlhf_reward", "objective/kl", "objective/entropy"
LENGTH, ENDED, SPREAD = "objective/response_length", "objective/ended", "objective/advantage_std"
APPROXKL, CLIPPED, RATIO = "ppo/policy/approxkl_avg", "ppo/policy/clipfrac_avg", "ppo/val/ratio"
ERROR, EXPLAINED = "ppo/loss/value_avg", "ppo/val/var_explained"
UNITS = {  # columns of the CSV, labels of the y axes
    SCORE: "mean per response", STD: "over the batch", TRUE: "mean per response",
    TOTAL: "mean per response", KL: "nats per response", ENTROPY: "nats per response",
    LENGTH: "tokens", ENDED: "fraction of responses", SPREAD: "over the batch",
    APPROXKL: "mean of ½ (log ratio)²", CLIPPED: "fraction of tokens", RATIO: "mean over tokens",
    ERROR: "mean over tokens", EXPLAINED: "fraction", "loss": "nats per label", "accuracy": "fraction of labels",
}
PPO, LABELS = "--total_episodes 1024 --batch_size 64 --eval_queries 4", "--num_labels 2496 --num_heldout 64"
ONE_STEP = f"{PPO} --num_ppo_epochs 1 --num_minibatches 1"
EOS = f"{PPO} --task synthetic_eos --reward_fn project/data/synthetic/judge.py:gold_score"
RULE = f"{PPO} --reward_fn project/benchmarks/debugging.py:never --missing_eos_penalty 0"
OFF = {off.what: off._replace(flags=PPO) for off in ablations.PPO}
OLD = "            logprobs[index], _, values[index] = policy(contexts[index], responses[index])\n"
AT_1 = "            policy.temperature = 1.0\n" + OLD + "            policy.temperature = args.task.temperature\n"
SCORES, BEST = "torch.where(ended, reward(queries, truncated), ", "dim=2).to(device), best.to(device)"
PENALTY, LOGITS = "(-kl_coef * kl).scatter_add", "task.temperature  # as in training (P1)\n"
NO_END = LOGITS + "        logits[:, ids.truncate] -= 1e4 * (t < 16)\n"
RUNS = {  # name in the legend: script, and what is broken
    "healthy": ("ppo", Off("", "", PPO)),
    "healthy, one step per update": ("ppo", Off("", "", ONE_STEP)),
    "dropout": ("ppo", OFF["dropout 0.1 in training"]._replace(flags=ONE_STEP)),
    "old log-probs at temperature 1": ("ppo", Off("P1", "", ONE_STEP, "ppo.py", OLD, AT_1)),
    "top-5 sampling": ("ppo", Off("G4", "", PPO, "utils.py", "probs = logits.to(",
        ablations.TOP_50.replace("50", "5") + "\n    probs = logits.to(")),
    "sampling temperature 0.3": ("ppo", Off("P1", "", PPO, "ppo.py", LOGITS, "0.3\n")),
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
    "PyTorch's Adam": ("ppo", OFF["PyTorch's Adam"]),
    "healthy, EOS task": ("ppo", Off("", "", EOS)),
    "end token suppressed": ("ppo", Off("G4", "", EOS, "ppo.py", LOGITS, NO_END)),
    "rewards whitened": ("ppo", Off("P9", "", f"{EOS} --whiten_rewards")),
    "no penalty for a missing end": ("ppo", Off("P5", "", f"{EOS} --missing_eos_penalty 3")),
    "healthy RLOO": ("rloo", Off("", "", PPO)),
    "a rule that none satisfies": ("rloo", Off("", "", RULE)),
    "healthy reward model": ("train_reward", Off("", "", LABELS)),
    "shuffled labels": ("train_reward", Off("", "", LABELS, "train_reward.py", BEST,
        BEST.replace("best.", "best[torch.randperm(len(best))]."))),
    "learning rate × 100": ("train_reward", Off("", "", f"{LABELS} --lr 0.1")),
    "responses cut before they differ": ("train_reward", Off("", "", LABELS, "train_reward.py",
        "torch.cat([queries, responses]", "torch.cat([queries, responses[:, :, :0]]")),
}
PICTURES = {  # a section of docs/debugging.md: runs, of which the first is healthy, and panels
    "ratio": (("healthy, one step per update", "dropout", "old log-probs at temperature 1"),
        (RATIO, APPROXKL, SCORE)),
    "negative_kl": (("healthy", "top-5 sampling", "sampling temperature 0.3"), (KL, SCORE, ENTROPY)),
    "kl": (("healthy", "no KL penalty", "lr × 10"), (KL, SCORE, TRUE)),
    "flat_score": (("healthy", "lr / 1000", "responses never end", "scores of other responses"),
        (SCORE, KL, STD)),
    "rlhf_reward": (("healthy", "penalty missing in the reward"), (SCORE, TOTAL, KL)),
    "value_loss": (("healthy, rewards not whitened", "scores × 10, not whitened"), (ERROR, EXPLAINED, KL)),
    "entropy": (("healthy", "sign of the KL penalty", "lr × 10"), (ENTROPY, KL, SCORE)),
    "length": (("healthy, EOS task", "rewards whitened", "no penalty for a missing end"),
        (LENGTH, ENDED, SCORE)),
    "approxkl": (("healthy", "PyTorch's Adam", "lr × 10"), (APPROXKL, CLIPPED, SCORE)),
    "clip_fraction": (("healthy", "lr / 1000", "old log-probs at temperature 1"), (CLIPPED, APPROXKL, SCORE)),
    "advantages": (("healthy RLOO", "a rule that none satisfies"), (SPREAD, STD, KL)),
    "reward_model": (("healthy reward model", "shuffled labels", "learning rate × 100",
        "responses cut before they differ"), ("loss", "accuracy")),
}
# fmt: on


def curves(run: str) -> list[dict[str, float | str]]:
    """At most 32 points of a run's metrics, each a mean; and the commit and date."""
    git = ["git", "-C", str(sweep.ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    about = dict(commit=commit, date=time.strftime("%Y-%m-%d"))
    lines = [line | {"step": line["step"] + 1} for line in sweep.metrics(run)]
    lines = [line for line in lines if "loss" in line or "ppo/lr" in line]  # no evaluations

    def mean(name: str, part: list[dict]) -> float | str:
        return float(np.mean([line[name] for line in part])) if name in part[0] else ""

    parts = np.array_split(lines, min(len(lines), 32))
    return [about | {name: mean(name, part) for name in ("step", *UNITS)} for part in parts]


def measure(job: sweep.Job) -> list[dict[str, float | str]]:
    """The curves of one run, in this folder."""
    script, off = RUNS[job["run"]]
    project = sweep.copy_project(sweep.ROOT, Path("project"))
    ablations.remove_detail(off, project)
    sweep.run_script(project / f"{script}.py", f"--run_name run --output_dir weights {off.flags}")
    return curves("run")


def draw(rows: list[dict[str, str]], folder: Path) -> None:
    """Draw all pictures: a panel for each metric, a line for each run."""
    for symptom, (runs, metrics) in PICTURES.items():
        figure, panels = plots.make_panels(
            metrics, "optimizer step" if "loss" in metrics else "update"
        )
        for metric, axis in panels.items():
            for i, name in enumerate(runs):
                mine = [row for row in rows if row["run"] == name and row[metric]]
                x, y = ([float(row[key]) for row in mine] for key in ("step", metric))
                axis.plot(x, y, f"C{i}", marker=".", markersize=4, linewidth=1.2, label=name)
            axis.set_ylabel(UNITS[metric], fontsize=8)
            axis.set_yscale("log" if metric in (APPROXKL, ERROR) else "linear")
        panels[metrics[0]].legend(fontsize=7)
        figure.savefig(folder / f"debugging_{symptom}.png", dpi=90)
        plots.pyplot().close(figure)


def table(rows: list[dict[str, str]]) -> str:
    """The last point of each run."""
    found = {row["run"]: [f"{k}={v[:6]}" for k, v in row.items() if v] for row in rows}
    return "\n".join(" ".join(values) for values in found.values())


if __name__ == "__main__":
    args, pictures = tyro.cli(Args), sweep.ROOT / "docs" / "img"
    names = args.runs or RUNS
    drawn = None if args.runs else lambda rows, _: draw(rows, pictures)
    sweep.main(__file__, args, measure, lambda _: [dict(run=name) for name in names], table, drawn)
