"""Many runs, each in a process of its own, and a CSV that remembers which are done.

Used by ablations.py, debugging.py, memory.py and patches.py. For each job that its CSV lacks, a
tool calls itself with `--only JOB` in a temporary folder and prints the job's rows as a line of
JSON. To measure a job again, delete its rows, or write another CSV with `--out`.
"""

import csv
import importlib
import json
import os
import shlex
import shutil
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
from accelerate import Accelerator
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import train_reward  # noqa: E402
from benchmarks import curves  # noqa: E402
from machinery import cli, data, models, rewards  # noqa: E402

Job = dict[str, Any]  # names and values of a run: the first columns of its rows
ENVIRONMENT = dict(OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true", TOKENIZERS_PARALLELISM="false")


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV, if there is one."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append to a CSV. Raises `ValueError` if it has other columns."""
    old = read_rows(path)
    if old and list(old[0]) != list(rows[0]):
        raise ValueError(f"{path} has columns {list(old[0])}, not {list(rows[0])}")
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if not old:
            writer.writeheader()
        writer.writerows(rows)


def rows_of(jobs: list[Job], rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows of these jobs, in the order of the jobs."""
    return [row for job in jobs for row in rows if all(row[k] == str(v) for k, v in job.items())]


def measure_alone(tool: str, job: Job) -> list[dict[str, Any]]:
    """The rows of a job, from a process of its own. Raises `RuntimeError` if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "models").symlink_to(Path("models").resolve())
        command = [sys.executable, tool, "--only", json.dumps(job)]
        options = dict(cwd=folder, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
        done = subprocess.run(command, check=False, **options)
    if done.returncode:
        raise RuntimeError(f"{job} failed:\n{done.stderr[-2000:]}")
    line = [line for line in done.stdout.splitlines() if line.startswith("[{")][-1]
    return [job | row | curves.provenance() for row in json.loads(line)]


def sweep(tool: str, jobs: list[Job], out: Path, workers: int) -> list[dict[str, str]]:
    """The rows of all jobs, measured now unless `out` has them. Exits if some failed, at the end."""
    old, failed, lock = read_rows(out), [], Lock()
    if old and not set(jobs[0]) <= set(old[0]):
        sys.exit(f"{out} has the columns {', '.join(old[0])}; move it away, or pass another --out")
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
        list(pool.map(work, (job for job in jobs if not rows_of([job], old))))
    if failed:
        sys.exit("\n".join(failed))
    return rows_of(jobs, read_rows(out))


def main(
    tool: str, args: Any, measure: Callable, jobs: Callable, table: Callable, draw: Any = None
) -> None:
    """Run a tool: one job with `--only`, or all jobs, then print the table and draw the picture."""
    if args.only:
        print(json.dumps(measure(json.loads(args.only))))
        return
    rows = sweep(tool, jobs(args), args.out, getattr(args, "workers", 1))
    print(table(rows))
    if draw:
        draw(rows, args.out.with_suffix(".png"))


# -------------------------------------------------------------------------------------- in one job


def copy_project(source: Path, folder: Path) -> Path:
    """Copy a checkout without its runs and pictures."""
    names = (".git", ".venv", "*cache*", "runs", "models", "wandb", "*.png", "*.egg-info")
    return Path(shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*names)))


def load_script(name: str) -> ModuleType:
    """ppo, rloo, or the script that diffs/**/<name>.diff makes, written into this folder."""
    for diff in (ROOT / "diffs").rglob(f"{name}.diff"):
        source = next(x.split()[1] for x in diff.read_text().splitlines() if x.startswith("--- "))
        command = ["patch", "--fuzz=0", "-o", f"{name}.py", ROOT / source, diff]
        subprocess.run(command, check=True, capture_output=True)
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def settings(script: ModuleType, flags: str) -> Any:
    """The arguments of a command line with `--task synthetic`; the last of equal flags counts."""
    flags = ["--task", "synthetic", *shlex.split(flags)]
    return cli.parse_args(script.Args, script.PRESETS, flags)


def metrics(name: str) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(x) for x in Path("runs", name, "metrics.jsonl").read_text().splitlines()]


def run_script(script: Path, flags: str, processes: int = 1) -> None:
    """Run a script on the synthetic task in a process of its own, or in several."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *launch * (processes > 1), script, "--task", "synthetic"]
    subprocess.run([*command, *shlex.split(flags)], check=True)


def reward_model(name: str, flags: str, project: Path = ROOT) -> str:
    """The folder of a reward model trained with these flags by the first job that needs it."""
    folder = Path("models", "sweep", name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{folder}.lock"):
        if not folder.exists():
            flags = f"{flags} --output_dir {folder} --run_name {name}"
            run_script(project / "train_reward.py", flags)
    return str(folder)


def heldout(args: Any) -> tuple[Tensor, Any, Callable, Callable]:
    """What the scripts evaluate with: queries [E, Q], token ids, reward and true reward."""
    task = args.task
    tokenizer, ids = models.load_tokenizer(task, task.response_length)
    queries = data.load_queries(task, tokenizer, ids, args.total_episodes)
    queries, _ = queries.hold_out(args.eval_queries)
    inputs = args, train_reward.RewardModel, tokenizer, ids, Accelerator(cpu=True)
    gold_reward = rewards.load_gold_reward(task, tokenizer, ids)
    return queries[:], ids, rewards.load_reward(*inputs), gold_reward


def interval(values: list[float]) -> tuple[float, float, float]:
    """Center of a few seeds and its 95% interval."""
    return tuple(x.item() for x in curves.band(np.array(values)[:, None]))
