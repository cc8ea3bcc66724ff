"""Every patch and every recipe of diffs/ on the synthetic task: score, true score, KL, time, memory.

    python sft.py --task synthetic && python train_reward.py --task synthetic
    python benchmarks/recipes.py                            # writes recipes.csv, prints a table
    python benchmarks/recipes.py --names qwen ptx --seeds 1 --out mine.csv

Each run is the command in the header of the patch or recipe, in a copy of the project. Scores and
KL are means over the last five updates, then over the seeds, with their range. Seconds are CPU
seconds per update of the whole run. Memory is the peak of the process. `lora` needs peft.
"""

import os
import re
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import sweep  # noqa: E402

METRICS = {"score": "objective/scores", "true score": "objective/gold_score", "KL": "objective/kl"}
FOLDER = sweep.ROOT / "diffs"
DIFFS = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.diff"))}
RECIPES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("recipes/*.sh"))}
GROUPS = {"recipe": ["ppo", *RECIPES]}
for script in ("ppo", "rloo"):
    names = [name for name, text in DIFFS.items() if f"\n--- {script}.py\n" in text]
    GROUPS[f"patch of {script}.py"] = [script, *names]


def command_of(name: str) -> str:
    """The command of a script, patch or recipe on the synthetic task."""
    if name in RECIPES:
        text = RECIPES[name].replace("\n#    ", "")  # joins continued lines
        return re.search("^# Synthetic: (.*)$", text, re.M)[1]
    if name in DIFFS:
        return " && ".join(re.search(r"^Command: (.*)\n +(.*)$", DIFFS[name], re.M).groups())
    return f"python {name}.py --task synthetic"


@dataclass(frozen=True)
class Args:
    """Every patch and every recipe on the synthetic task."""

    out: Path = Path(__file__).with_suffix(".csv")
    """CSV to write or to continue"""
    names: tuple[str, ...] = tuple(dict.fromkeys(sum(GROUPS.values(), [])))
    """scripts, patches and recipes"""
    seeds: int = 3
    """runs of each"""
    workers: int = os.cpu_count() or 1
    """runs at a time"""
    flags: str = ""
    """flags for every run; write --flags="--total_episodes 512" with the ="""
    only: str | None = None
    """one job as JSON, in this process"""


def measure(job: sweep.Job) -> list[dict[str, float]]:
    """The row of one run: means over its last five updates."""
    project = sweep.copy_project(sweep.ROOT, Path("project"))
    (project / "models").symlink_to(Path("models").resolve())
    if job["name"] in RECIPES:
        (project / f"{job['name']}.py").unlink(missing_ok=True)  # made by an earlier run
    command = f"{command_of(job['name'])} --seed {job['seed']} --run_name run {job['flags']}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-c", f"{command} --output_dir {Path('policy').resolve()}"]
    subprocess.run(command, cwd=project, env=os.environ | {"PATH": path}, stdout=2, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    os.chdir(project)
    lines = [line for line in sweep.metrics("run") if "objective/kl" in line]
    row = {x: np.mean([line[metric] for line in lines[-5:]]) for x, metric in METRICS.items()}
    row["seconds"] = (used.ru_utime + used.ru_stime) / len(lines)
    row["peak MiB"] = used.ru_maxrss / 1024
    return [{name: float(f"{x:.4g}") for name, x in row.items()}]


def cell(values: list[float]) -> str:
    """The mean and the range."""
    mean, low, high = (f"{x:.3g}" for x in (np.mean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} … {high})"


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: a table for each group."""
    columns = [*METRICS, "seconds", "peak MiB"]
    lines = []
    for group, names in GROUPS.items():
        lines += ["", f"| {group} | seeds | {' | '.join(columns)} |", "|---" * 7 + "|"]
        for name in names:
            runs = [row for row in rows if row["name"] == name]
            if runs:
                cells = [cell([float(run[column]) for run in runs]) for column in columns]
                lines.append(f"| `{name}` | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def jobs(args: Args) -> list[sweep.Job]:
    """Every name and seed; first one seed of everything."""
    seeds = range(1, args.seeds + 1)
    return [dict(name=name, seed=seed, flags=args.flags) for seed in seeds for name in args.names]


if __name__ == "__main__":
    sweep.main(__file__, tyro.cli(Args), measure, jobs, table)
