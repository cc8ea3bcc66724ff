"""Runs that are broken on purpose, beside healthy ones: the pictures of docs/debugging.md.

    python sft.py --task synthetic && python train_reward.py --task synthetic
    python sft.py --task synthetic_eos
    python benchmarks/debugging.py    # the runs that the CSV lacks, and docs/img/debugging_*.png

A run is broken by flags, or by changing a line in a copy of the project, as in ablations.py.
"""

import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import ablations, sweep  # noqa: E402
from machinery import plots  # noqa: E402


@dataclass(frozen=True)
class Args:
    """Runs that are broken on purpose."""

    out: Path = Path(__file__).with_suffix(".csv")
    """CSV to write or to continue"""
    workers: int = 2
    """runs at a time"""
    only: str | None = None
    """one job as JSON, measured in this process"""


def never(queries: list[str], responses: list[str]) -> list[float]:
    """A reward rule that no response satisfies: it asks for a digit."""
    return [float(any(map(str.isdigit, response))) for response in responses]


PPO = "--total_episodes 1024 --batch_size 64 --eval_queries 4"
BUDGET = dict(ppo=PPO, rloo=PPO, train_reward="--num_labels 2496 --num_heldout 64")


def run(script: str, flags: str = "", right: str = "", wrong: str = "", file: str = "") -> tuple:
    """A script, and what to change: flags, or a text in a file, which is the script by default."""
    file = file or f"{script}.py" * bool(right)
    return script, ablations.Off(script, "", f"{BUDGET[script]} {flags}", file, right, wrong)


# fmt: off
ONE_STEP = "--num_ppo_epochs 1 --num_minibatches 1"
EOS = "--task synthetic_eos --reward_fn project/data/synthetic/judge.py:gold_score"
RULE = "--reward_fn project/benchmarks/debugging.py:never --missing_eos_penalty 0"
DROPOUT, ADAM = ([x for x in ablations.PPO if x.detail == y][0][4:6] for y in ("P4", "A1"))
TOP_5 = ablations.TOP_50.replace("50", "5") + "\n    probs = logits.to("
LOGITS = "task.temperature  # as in training (P1)\n"
NO_END = LOGITS + "        logits[:, ids.truncate] -= 1e4 * (t < 16)\n"
T, T_OR_1 = "/ self.temperature)", "/ (self.temperature if torch.is_grad_enabled() else 1))"
PENALTY = "(-kl_coef * kl).scatter_add(1, last, scores[:, None])"
SCORES = "torch.where(ended, reward(queries, truncated)"
RUNS = {  # name in the legends → run
    "healthy": run("ppo"),
    "healthy, one step": run("ppo", ONE_STEP),
    "dropout": run("ppo", ONE_STEP, *DROPOUT),
    "old log-probs at T = 1": run("ppo", ONE_STEP, T, T_OR_1),
    "old log-probs off by one": run("ppo", "", "- old.logprobs\n", "- old.logprobs.roll(1, 1)\n"),
    "sampling at T = 1": run("ppo", "", LOGITS, "1\n"),
    "top-5 sampling": run("ppo", "", "probs = logits.to(", TOP_5, "utils.py"),
    "no KL penalty": run("ppo", "--kl_coef 0 --kl_target None"),
    "wrong sign of the penalty": run("ppo", "", "(-kl_coef * kl)", "(kl_coef * kl)"),
    "penalty not in the rewards": run("ppo", "", "(-kl_coef * kl)", "(0 * kl)"),
    "lr × 10": run("ppo", "--lr 5e-3"),
    "lr / 1000": run("ppo", "--lr 5e-7"),
    "few responses end": run("ppo", "--response_length 17"),
    "scores of others": run("ppo", "", SCORES, SCORES + ".roll(1)"),
    "healthy, not whitened": run("ppo", "--no-whiten_rewards"),
    "scores × 10, not whitened": run("ppo", "--no-whiten_rewards", SCORES, SCORES + " * 10"),
    "PyTorch's Adam": run("ppo", "", *ADAM),
    "healthy, EOS task": run("ppo", EOS),
    "end token suppressed": run("ppo", f"{EOS} --kl_coef 0.5 --kl_target None", LOGITS, NO_END),
    "rewards whitened": run("ppo", f"{EOS} --whiten_rewards"),
    "score at every token": run("ppo", EOS, PENALTY, "(scores[:, None] - kl_coef * kl) * mask"),
    "healthy RLOO": run("rloo"),
    "a rule that none satisfies": run("rloo", RULE),
    "healthy reward model": run("train_reward"),
    "shuffled labels": run("train_reward", "", "), best.to(", "), best[torch.randperm(len(best))].to("),
    "lr × 100": run("train_reward", "--lr 0.1"),
    "responses cut off": run("train_reward", "", "[queries, responses]", "[queries, responses[:, :, :0]]"),
}
UNITS = {  # columns of the CSV → y labels
    "objective/scores": "mean", "objective/scores_std": "over the batch",
    "objective/gold_score": "mean", "objective/rlhf_reward": "mean",
    "objective/kl": "nats per response", "objective/entropy": "nats per response",
    "objective/response_length": "tokens", "objective/ended": "fraction of responses",
    "objective/advantage_std": "over the batch", "ppo/policy/approxkl_avg": "mean over tokens",
    "ppo/policy/clipfrac_avg": "fraction of tokens", "ppo/val/ratio": "mean over tokens",
    "ppo/loss/value_avg": "mean over tokens", "ppo/val/var_explained": "fraction",
    "loss": "nats per label", "accuracy": "fraction of labels",
}
SCORE, STD, TRUE, TOTAL, KL, ENTROPY, LENGTH, ENDED, SPREAD, *_ = UNITS
APPROXKL, CLIPPED, RATIO, ERROR, EXPLAINED, LOSS, ACCURACY = list(UNITS)[9:]
COLUMNS = "step", *UNITS
PICTURES = {  # a section of docs/debugging.md: panels, and runs, of which the first is healthy
    "ratio": ((RATIO, APPROXKL, SCORE), "healthy, one step", "dropout", "old log-probs at T = 1"),
    "negative_kl": ((KL, SCORE, ENTROPY),
        "healthy", "dropout", "end token suppressed", "sampling at T = 1", "top-5 sampling"),
    "kl": ((KL, SCORE, TRUE), "healthy", "no KL penalty", "lr × 10", "wrong sign of the penalty"),
    "flat_score": ((SCORE, KL, ENDED), "healthy", "few responses end", "lr / 1000", "scores of others"),
    "rlhf_reward": ((SCORE, TOTAL, KL), "healthy", "penalty not in the rewards"),
    "value_loss": ((ERROR, EXPLAINED, KL), "healthy, not whitened", "scores × 10, not whitened"),
    "entropy": ((ENTROPY, KL, SCORE), "healthy", "lr × 10", "no KL penalty"),
    "length": ((LENGTH, ENDED, SCORE), "healthy, EOS task", "rewards whitened", "score at every token"),
    "approxkl": ((APPROXKL, CLIPPED, KL), "healthy", "PyTorch's Adam", "lr × 10"),
    "clip_fraction": ((CLIPPED, APPROXKL, SCORE), "healthy", "lr / 1000", "old log-probs off by one"),
    "advantages": ((SPREAD, STD, KL), "healthy RLOO", "a rule that none satisfies"),
    "reward_model": ((LOSS, ACCURACY), "healthy reward model", "shuffled labels", "lr × 100", "responses cut off"),
}
# fmt: on


def measure(job: sweep.Job) -> list[dict[str, float | str]]:
    """The curves of one run, in this folder: at most 32 points, each a mean."""
    script, off = RUNS[job["run"]]
    project = sweep.copy_project(sweep.ROOT, Path("project"))
    ablations.remove_detail(off, project)
    sweep.run_script(project / f"{script}.py", f"--run_name run --output_dir weights {off.flags}")
    git = ["git", "-C", sweep.ROOT, "rev-parse", "--short", "HEAD"]
    about = dict(commit=subprocess.check_output(git, text=True).strip(), date=str(date.today()))
    lines = [line | {"step": line["step"] + 1} for line in sweep.metrics("run")]
    lines = [line for line in lines if LOSS in line or RATIO in line]  # of training
    return [
        about | {name: float(np.mean([x.get(name, np.nan) for x in part])) for name in COLUMNS}
        for part in np.array_split(lines, min(len(lines), 32))
    ]


def draw(rows: list[dict[str, str]], folder: Path) -> None:
    """All pictures: a panel for each metric, a line for each run."""
    for symptom, (metrics, *names) in PICTURES.items():
        figure, panels = plots.make_panels(metrics, "step" if LOSS in metrics else "update")
        for metric, axis in panels.items():
            for i, name in enumerate(names):
                mine = [row for row in rows if row["run"] == name]
                x, y = ([float(row[key]) for row in mine] for key in ("step", metric))
                axis.plot(x, y, f"C{i}", marker=".", markersize=4, linewidth=1.2, label=name)
            axis.set_ylabel(UNITS[metric], fontsize=8)
            if metric in (RATIO, APPROXKL):
                axis.set_yscale("symlog", linthresh=1e-4)  # logarithmic, and shows 0
        handles, _ = axis.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=8)
        figure.savefig(folder / f"debugging_{symptom}.png", dpi=90)
        plots.pyplot().close(figure)


if __name__ == "__main__":
    jobs, pictures = [dict(run=name) for name in RUNS], sweep.ROOT / "docs" / "img"
    outputs = lambda rows: f"{len(rows)} points", lambda rows, _: draw(rows, pictures)  # noqa: E731
    sweep.main(__file__, tyro.cli(Args), measure, lambda _: jobs, *outputs)
