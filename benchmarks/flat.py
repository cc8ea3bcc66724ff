"""Does a long run stay as large as it was? Memory, open files and threads of a run, update by update, with checkpoints on.

    python benchmarks/flat.py --updates 500         # benchmarks/flat.csv and flat.png

The synthetic task's model with random weights, its own judge as reward, a checkpoint every 5 updates, an evaluation every 25;
ppo.py, then rloo.py, each half of the updates, in one process. A slope is a least-squares fit behind the first fifth of a
run; its noise is the standard deviation of the slopes of 200 resamples of blocks of 20 residuals. Exit code 1 if memory grows
by more than three times that, and by more than a MiB in a hundred updates, or if files or threads grow at all.
"""

import csv
import ctypes
import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import ppo  # noqa: E402
import records  # noqa: E402
import rloo  # noqa: E402
import tasks  # noqa: E402


@dataclass(frozen=True)
class Args:
    """Memory, open files and threads over a long run."""

    updates: int = 500
    """of both runs together"""
    batch_size: int = 32
    """episodes per update"""


def slope(values: np.ndarray, block: int = 20) -> tuple[float, float]:
    """Of values by index: least squares, and its noise where neighbours are alike."""
    x, rng = np.arange(len(values)), np.random.default_rng(0)
    fit = np.polyfit(x, values, 1)
    rest = values - np.polyval(fit, x)
    starts = rng.integers(0, len(rest) - block + 1, (200, -(-len(rest) // block)))
    again = [np.concatenate([rest[s : s + block] for s in row])[: len(x)] for row in starts]
    return float(fit[0]), float(np.std([np.polyfit(x, y, 1)[0] for y in again]))


def measure(args: Args) -> list[dict[str, Any]]:
    """A row an update: script, MiB, files, threads."""
    rows: list[dict[str, Any]] = []
    log = records.Run.log

    def look(run: records.Run, step: int, metrics: dict, shown: dict) -> None:
        log(run, step, metrics, shown)
        ctypes.CDLL("libc.so.6").malloc_trim(
            0
        )  # what is free goes back to the system, else it comes and goes by chance
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        rows.append(
            dict(
                script=run.script.stem,
                mib=mib,
                files=len(os.listdir("/proc/self/fd")),
                threads=threading.active_count(),
            )
        )

    records.Run.log = look
    task = tasks.TASKS["synthetic"]
    sizes = dict(total_episodes=args.updates // 2 * args.batch_size, batch_size=args.batch_size, micro_batch_tokens=192)
    sizes |= dict(save_every=5, eval_every=25, eval_queries=64, reward_fn=task.gold_fn, lr=1e-4)
    task = tasks.replace(task, base_model=str(tasks.SYNTHETIC / "model"))
    for script in (ppo, rloo):
        script.main(script.Args(task=task, **sizes))
    return rows


def main(args: Args) -> None:
    """Measure, write, draw, judge."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        rows = measure(args)
        os.chdir(ROOT)
    with open(ROOT / "benchmarks" / "flat.csv", "w") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    plt = records.pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(12, 3), layout="constrained")
    grows = False
    for axis, name in zip(axes, ("mib", "files", "threads"), strict=True):
        axis.set(title=name, xlabel="update")
        for script in ("ppo", "rloo"):
            values = np.array([row[name] for row in rows if row["script"] == script], dtype=float)
            axis.plot(values, linewidth=1, label=script)
            late = values[len(values) // 5 :]
            each, noise = slope(late)
            grows |= each > max(3 * noise, 0.01) if name == "mib" else late[-1] > late[0]
            ends = f"{late[:20].mean():.1f} … {late[-20:].mean():.1f}, most {values.max():.1f}"
            print(f"{script:5} {name:8} {ends}; {each:+.4f} ± {noise:.4f} an update")
        axis.set_ylim(0, 1.2 * max(row[name] for row in rows))
    axes[0].legend()
    figure.savefig(ROOT / "benchmarks" / "flat.png", dpi=110)
    sys.exit(int(grows))


if __name__ == "__main__":
    main(tyro.cli(Args))
