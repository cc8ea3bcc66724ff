"""A long run that is killed again and again: does anything grow, and what does the policy become?

    python benchmarks/long_run.py ppo.py --task synthetic --total_episodes 256000 --run_name ppo
    python benchmarks/long_run.py rloo.py --task synthetic --total_episodes 128000 --run_name rloo
    python benchmarks/long_run.py ppo.py --task synthetic --total_episodes 128000 --run_name no_kl \
        --kl_coef 0 --kl_target None
    python benchmarks/long_run.py plot ppo rloo no_kl    # results/long_run.csv and .png

Starts the command with `--resume auto`, kills it (SIGKILL) at five random instants, starts it again
and lets it end. The same command continues after this script was ended, too. Writes
runs/<run name>.csv: a row for each of the first ten updates and for each hundredth of the run, with
the start that made it, resident megabytes, wall and CPU seconds per update, KL, its coefficient,
score and true score, and the megabytes of the run's files.
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


def cpu_seconds(pid: int) -> float:
    """User and system seconds of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    table = ROOT / f"runs/{name}.csv"
    rows = read(table) if table.exists() else []
    seen = -1
    starts = rows[-1]["start"] if rows else 0
    kills = kills[max(starts - 1, 0) :]
    process = None
    since = time.time()
    used = (0, 0, 0.0)  # start, update and CPU seconds of the last row
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
            cpu = cpu_seconds(process.pid)
            if used[0] == starts:
                row["cpu_seconds"] = round((cpu - used[2]) / (seen - used[1]), 2)
            used = (starts, seen, cpu)
            for column, key in COLUMNS.items():
                row[column] = round(metrics[key], 3)
            row["metrics_mb"] = round(size(folder, "metrics.jsonl"), 2)
            row["samples_mb"] = round(size(folder, "samples.jsonl"), 2)
            row["events_mb"] = round(size(folder, "**/events*"), 2)
            row["checkpoints_mb"] = round(size(folder, "**/*.safetensors"), 1)
            rows.append(row)
            write(rows, table)
        if kills and seen >= kills[0] * total:
            kills.pop(0)
            time.sleep(rng.random() * update_seconds)
            process.kill()
            process.wait()
            process = None
    sys.exit(process.returncode)


def write(rows: list[dict], path: Path) -> None:
    columns = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        rows: list[dict] = list(csv.DictReader(file))
    for row in rows:
        for name, value in row.items():
            row[name] = float(value) if "." in value else int(value or 0)
    return rows


def plot(names: list[str]) -> None:
    """Join the tables of these runs; draw what has to be flat, and what is learned."""
    from matplotlib.figure import Figure

    tables: dict[str, list[dict]] = {}
    for name in names:
        tables[name] = [{"run": name, **row} for row in read(ROOT / f"runs/{name}.csv")]
    out = ROOT / "benchmarks/results/long_run"
    write(sum(tables.values(), []), out.with_suffix(".csv"))
    figure = Figure(figsize=(10, 6), layout="constrained")
    panels = ("resident_mb", "cpu_seconds", "kl", "kl_coef", "score", "true_score")
    for axis, column in zip(figure.subplots(2, 3).flat, panels, strict=True):
        for name, rows in tables.items():
            points = [(row["update"], row[column]) for row in rows if row.get(column)]
            axis.plot(*zip(*points, strict=True), label=name)
        axis.set_title(column)
        axis.grid(alpha=0.3)
        if column in ("resident_mb", "cpu_seconds"):
            axis.set_ylim(bottom=0)
    figure.supxlabel("update")
    figure.axes[0].legend()
    figure.savefig(out.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    if sys.argv[1] == "plot":
        plot(sys.argv[2:])
    else:
        main(sys.argv[1:])
