"""A long run that is killed again and again: does anything grow, and what does the policy become?

    python benchmarks/long_run.py ppo.py --task synthetic --total_episodes 256000 --run_name long_ppo

Starts the command with `--resume auto`, kills it (SIGKILL) at five random instants, starts it again
and lets it end. Writes results/<run name>.csv: a row per hundredth of the run with the update, the
start that made it, resident megabytes, seconds per update, KL, its coefficient, score and true
score, and the megabytes of the run's metrics, samples and events.
"""

import csv
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
KILLS = 5
MEGABYTE = 2**20
COLUMNS = {
    "kl": "objective/kl",
    "kl_coef": "objective/kl_coef",
    "score": "objective/scores",
    "true_score": "objective/gold_score",
}


def resident_megabytes(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MEGABYTE


def last_row(path: Path) -> dict:
    """The last whole line of a file of metrics; {} if there is none."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))
        lines = file.read().split(b"\n")
    return json.loads(lines[-2]) if len(lines) > 2 else {}


def size(folder: Path, pattern: str) -> float:
    return sum(path.stat().st_size for path in folder.glob(pattern)) / MEGABYTE


def main(command: list[str]) -> None:
    name = command[command.index("--run_name") + 1]
    folder = ROOT / "runs" / name
    rng = random.Random(name)
    kills = sorted(rng.random() for _ in range(KILLS))
    rows: list[dict] = []
    seen = -1
    starts = 0
    process = None
    since = time.time()
    out = ROOT / "benchmarks/results" / f"{name}.csv"
    while process is None or process.poll() is None:
        if process is None:
            starts += 1
            words = [sys.executable, *command, "--resume", "auto"]
            with open(ROOT / f"runs/{name}.log", "a") as log:
                process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        time.sleep(0.5)
        metrics = last_row(folder / "metrics.jsonl")
        if not metrics or metrics["step"] == seen or process.poll() is not None:
            continue
        if metrics["step"] < seen:  # after a kill
            rows = [row for row in rows if row["update"] < metrics["step"]]
        seen = metrics["step"]
        settings = json.loads((folder / "args.json").read_text())
        total = settings["total_episodes"] // settings["batch_size"]
        if seen == total:  # the evaluation at the end
            continue
        update_seconds = settings["batch_size"] / metrics["time/episodes_per_second"]
        if seen * 100 // total > (rows[-1]["update"] * 100 // total if rows else -1) or seen <= 10:
            row = {"update": seen, "start": starts, "minutes": round((time.time() - since) / 60, 1)}
            row["resident_mb"] = round(resident_megabytes(process.pid))
            row["update_seconds"] = round(update_seconds, 2)
            for column, key in COLUMNS.items():
                row[column] = round(metrics[key], 3)
            row["metrics_mb"] = round(size(folder, "metrics.jsonl"), 2)
            row["samples_mb"] = round(size(folder, "samples.jsonl"), 2)
            row["events_mb"] = round(size(folder, "**/events*"), 2)
            row["checkpoints_mb"] = round(size(folder, "**/*.safetensors"), 1)
            rows.append(row)
            with out.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
                writer.writerows(rows)
        if kills and seen >= kills[0] * total:
            kills.pop(0)
            time.sleep(rng.random() * update_seconds)
            process.kill()
            process.wait()
            process = None
    sys.exit(process.returncode)


if __name__ == "__main__":
    main(sys.argv[1:])
