"""Every recipe of diffs/recipes/ beside ppo.py on the synthetic task: score, true score, KL, seconds and peak memory.

    python benchmarks/recipes.py                                # three seeds of each: half an hour and more on an idle core
    python benchmarks/recipes.py --names qwen --seeds 1         # one run
    python benchmarks/recipes.py --table                        # of what is in the CSV

One process of one thread at a time. Scores and KL are means of the last five lines, seconds the CPU time of the whole run over its
updates, peak memory the process's. Needs the weights of `synthetic`, see demo.sh.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).parents[1]
NAMES = ("ppo", *sorted(path.stem for path in (ROOT / "diffs" / "recipes").glob("*.diff")))
COLUMNS = {"objective/scores": "score", "objective/gold_score": "true score", "objective/kl": "KL"}
ROW = ("name", "seed", "updates", *COLUMNS.values(), "seconds", "peak MiB")


@dataclass(frozen=True)
class Args:
    """Which runs."""

    names: tuple[str, ...] = NAMES  # recipes, and ppo
    seeds: tuple[int, ...] = (1, 2, 3)
    total_episodes: int = 4096  # of each run
    models: Path = ROOT / "models" / "synthetic"  # folder with sft and train_reward
    out: Path = ROOT / "benchmarks" / "recipes.csv"  # rows are added; a run that has one is not repeated
    table: bool = False  # run nothing


def run(name: str, seed: int, args: Args) -> dict[str, float | str]:
    """One run of the patched script, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, f"{name}.py")
        if name == "ppo":
            script.write_text((ROOT / "ppo.py").read_text())
        else:
            patch = ROOT / "diffs" / "recipes" / f"{name}.diff"
            subprocess.run(["patch", "-s", "-o", script, ROOT / "ppo.py", patch], check=True)
        flags = ["--task", "synthetic", "--seed", seed, "--total_episodes", args.total_episodes, "--run_name", "run"]
        flags += [
            "--base_model",
            args.models / "sft",
            "--reward_model",
            args.models / "train_reward",
            "--output_dir",
            "out",
        ]
        if "critic_from:" in script.read_text():
            flags += ["--critic_from", args.models / "train_reward"]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        child = subprocess.Popen(
            [sys.executable, script, *map(str, flags)], cwd=folder, env=env, stdout=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(child.pid, 0)
        if status:
            sys.exit(f"{name}, seed {seed}: exit code {os.waitstatus_to_exitcode(status)}")
        lines = map(json.loads, Path(folder, "runs/run/metrics.jsonl").read_text().splitlines())
        lines = [line for line in lines if "objective/kl" in line]
    means = {short: sum(line[long] for line in lines[-5:]) / len(lines[-5:]) for long, short in COLUMNS.items()}
    seconds = (usage.ru_utime + usage.ru_stime) / len(lines)
    return dict(name=name, seed=seed, updates=len(lines), **means, seconds=seconds) | {
        "peak MiB": usage.ru_maxrss / 1024
    }


def show(rows: list[dict[str, str]]) -> None:
    """A Markdown table: the mean over the seeds, and their range."""
    print(f"| recipe | seeds | {' | '.join(ROW[2:])} |\n|{'---|' * (len(ROW))}")
    for name in NAMES:
        mine = [row for row in rows if row["name"] == name]
        cells = []
        for column in ROW[2:] if mine else ():
            values = [float(row[column]) for row in mine]
            digits = {"updates": 0, "peak MiB": 0, "KL": 1}.get(column, 2)
            low, mean, high = (f"{x:.{digits}f}" for x in (min(values), sum(values) / len(values), max(values)))
            cells.append(mean if low == high else f"{mean} ({low} … {high})")
        if mine:
            print(f"| `{name}` | {len(mine)} | {' | '.join(cells)} |".replace("-", "−"))


def main(args: Args) -> None:
    """Run what the CSV lacks, then show it."""
    rows = list(csv.DictReader(args.out.open())) if args.out.exists() else []
    for seed in () if args.table else args.seeds:
        for name in args.names:
            if not any(row["name"] == name and row["seed"] == str(seed) for row in rows):
                rows.append(run(name, seed, args))
                with args.out.open("w", newline="") as file:
                    writer = csv.DictWriter(file, ROW)
                    writer.writeheader()
                    writer.writerows(rows)
    show(rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
