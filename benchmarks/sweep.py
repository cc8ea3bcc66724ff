"""What ablations.py, overoptimise.py and what_rloo_saves.py share: many runs, each in processes of its own of one thread, as
many at a time as there are cores, and a CSV that knows which are done.

For a job that its CSV lacks a tool calls itself with `--only JOB`, in a folder that is gone afterwards, and prints its rows as a
line of JSON. To measure something again, take its rows out of the CSV, or name another with `--out`.
"""

import csv
import importlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

import filelock
import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import ppo  # noqa: E402
import tasks  # noqa: E402
import train_reward  # noqa: E402
import utils  # noqa: E402
from benchmarks import curves  # noqa: E402

Job = dict[str, Any]  # names and values of a run; the first columns of its rows
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}


def read_rows(path: Path) -> list[dict[str, str]]:
    """A CSV's; none where there is no file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Behind those of a CSV, which begins with their names. Errors: `ValueError` where its columns are others."""
    there = read_rows(path)
    if there and list(there[0]) != list(rows[0]):
        raise ValueError(f"{path} has columns {list(there[0])}, not {list(rows[0])}")
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writerows(rows if there else [dict(zip(rows[0], rows[0], strict=True)), *rows])


def rows_of(jobs: list[Job], rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows of these jobs, in their order."""
    return [row for job in jobs for row in rows if all(row[name] == str(value) for name, value in job.items())]


def measure_alone(tool: str, job: Job) -> list[dict[str, Any]]:
    """The rows that a tool measures in processes of their own. Errors: `RuntimeError` with the end of what it said."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(job.get("processes", 1))]
    command = [sys.executable, *launch * (job.get("processes", 1) > 1), tool, "--only", json.dumps(job)]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "models").symlink_to(Path("models").resolve())
        done = subprocess.run(command, cwd=folder, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{job} failed:\n{done.stderr[-2000:]}")
    line = [line for line in done.stdout.splitlines() if line.startswith("[{")][-1]
    return [job | row for row in json.loads(line)]


def sweep(tool: str, jobs: list[Job], out: Path, workers: int) -> list[dict[str, str]]:
    """The rows of all jobs, those that `out` has not measured now. Errors: `SystemExit` behind the last with those that
    failed."""
    there, failed, lock = read_rows(out), [], Lock()
    out.parent.mkdir(parents=True, exist_ok=True)

    def work(job: Job) -> None:
        try:
            rows = measure_alone(tool, job)
        except RuntimeError as error:
            failed.append(str(error))
            return
        with lock:
            append_rows(out, rows)
            print(*rows[-1].values(), file=sys.stderr, flush=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, (job for job in jobs if not rows_of([job], there))))
    if failed:
        sys.exit("\n".join(failed))
    return rows_of(jobs, read_rows(out))


def load_script(name: str) -> ModuleType:
    """ppo, rloo, or what the diff of this name makes of the script that it is for, as a file in this folder."""
    for diff in (ROOT / "diffs").rglob(f"{name}.diff"):
        source = next(line.split()[1] for line in diff.read_text().splitlines() if line.startswith("--- "))
        command = ["patch", "--fuzz=0", "-o", f"{name}.py", ROOT / source, diff]
        subprocess.run(command, check=True, capture_output=True)
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def settings(script: ModuleType, flags: str) -> Any:
    """What a command line of `--task synthetic` gives; of a flag that stands there twice the last."""
    return tasks.parse_args(script.Args, script.PRESETS, ["--task", "synthetic", *shlex.split(flags)])


def metrics(name: str) -> list[dict[str, float]]:
    """The lines of a run."""
    return [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]


def reward_model(name: str, flags: str) -> str:
    """Folder of a reward model that `train_reward.py` with these flags makes; the first that asks makes it, others wait."""
    folder = Path("models", "sweep", name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{folder}.lock"):
        if not folder.exists():
            train_reward.main(settings(train_reward, f"{flags} --output_dir {folder} --run_name {name}"))
    return str(folder)


def held_out(args: ppo.Args) -> tuple[Tensor, Any, ppo.Models]:
    """What ppo.py measures policies on: queries [E, Q], tokenizer, and models without a policy."""
    task, device = args.task, torch.device("cpu")
    tokenizer, _, pad_id = utils.load_tokenizer(task, task.response_length)
    table = utils.load_queries(task, tokenizer, pad_id, args.total_episodes)
    queries, _ = table.hold_out(args.eval_queries, "eval_queries")
    ref = ppo.Policy(utils.load_lm(task.base_model), pad_id, task.temperature).eval()
    reward = utils.load_reward(args, tokenizer, pad_id, device)
    return queries, tokenizer, ppo.Models(None, ref, reward, utils.task_ids(task, tokenizer, pad_id))


def interval(values: list[float]) -> tuple[float, float, float]:
    """Centre of a few seeds, and the ends of its band."""
    return tuple(x.item() for x in curves.band(np.array(values)[:, None]))


def main(
    tool: str, args: Any, measure: Callable, jobs: Callable, table: Callable, draw: Callable | None = None
) -> None:
    """A tool's command line: `--only` measures one job in this process; else what the CSV lacks is measured, one process a
    job, then all is printed and drawn."""
    if args.only:
        print(json.dumps(measure(json.loads(args.only))))
        return
    rows = sweep(tool, jobs(args), args.out, getattr(args, "workers", 1))
    print(table(rows))
    if draw:
        draw(rows, args.out.with_suffix(".png"))
