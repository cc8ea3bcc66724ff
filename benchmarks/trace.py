"""Do two checkouts compute the same? Train with both in float64 and compare.

    git worktree add /tmp/before main
    python benchmarks/trace.py /tmp/before .              # needs the models of both synthetic tasks

20 updates of ppo.py and rloo.py on both synthetic tasks, on one process and on two. Prints the
largest differences of final weights and of metrics. In float64 rounding cannot change a sampled
token, so equal mathematics shows as differences below 1e-8; exit code 1 if one is larger.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.sweep import ENVIRONMENT, copy_project  # noqa: E402

LIMIT = 1e-8
RUNNER = """
import runpy, sys, torch
torch.set_default_dtype(torch.float64)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Args:
    """Compare what two checkouts compute."""

    checkouts: tyro.conf.Positional[tuple[Path, Path]]
    """folders of the project, such as before and after a change"""
    models: Path = Path("models")
    """folder with <task>/sft and <task>/train_reward"""
    tasks: tuple[str, ...] = ("synthetic", "synthetic_eos")
    """tasks to train on"""
    scripts: tuple[str, ...] = ("ppo", "rloo")
    """scripts to run"""
    processes: tuple[int, ...] = (1, 2)
    """numbers of processes"""
    total_episodes: int = 2560
    """episodes of each run"""
    ignore: tuple[str, ...] = ()
    """metrics that were changed on purpose"""


def copy_in_float64(checkout: Path, folder: Path) -> Path:
    """A copy of a checkout that computes in float64."""
    for path in copy_project(checkout, folder).rglob("*.py"):
        text = path.read_text().replace("torch.float32", "torch.float64")
        text = text.replace(".float()", ".double()")
        path.write_text(re.sub(r"dtype=torch\.float\b", "dtype=torch.float64", text))
    (folder / "run_in_float64.py").write_text(RUNNER)
    return folder


def train(
    project: Path, script: str, processes: int, flags: list[str]
) -> tuple[dict[str, np.ndarray], list[dict[str, float]]]:
    """Run a script of a copy of the project; return final weights and lines of metrics."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *launch, "run_in_float64.py", f"{script}.py", *flags]
    with tempfile.TemporaryDirectory() as folder:
        out = ["--run_name", Path(folder).name, "--output_dir", f"{folder}/model"]
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(project)}
        options = dict(cwd=project, env=environment, capture_output=True, text=True)
        done = subprocess.run([*command, *out], check=False, **options)
        if done.returncode:
            sys.exit(f"{project} {script} failed:\n{done.stderr[-2000:]}")
        lines = (project / "runs" / Path(folder).name / "metrics.jsonl").read_text().splitlines()
        return load_file(f"{folder}/model/model.safetensors"), [json.loads(x) for x in lines]


def differences(before: tuple, after: tuple) -> dict[str, float]:
    """The largest difference of weights, and of each metric that both have."""
    weights = [abs(x - after[0][name]).max() for name, x in before[0].items()]
    found = {"weights": float(np.max(weights))}
    for old, new in zip(before[1], after[1], strict=True):
        for name in old.keys() & new.keys():
            if not name.startswith("time/"):
                gap = abs(old[name] - new[name])
                found[name] = float(np.maximum(found.get(name, 0.0), gap))  # keeps NaN
    return found


def main(args: Args) -> None:
    """Train with both checkouts, print a line for each case."""
    worst, models = 0.0, args.models.resolve()
    with tempfile.TemporaryDirectory() as folder:
        copies = [copy_in_float64(x, Path(folder, str(i))) for i, x in enumerate(args.checkouts)]
        cases = itertools.product(args.processes, args.tasks, args.scripts)
        for processes, task, script in cases:
            flags = ["--task", task, "--total_episodes", str(args.total_episodes)]
            flags += ["--base_model", f"{models}/{task}/sft"]
            flags += ["--reward_model", f"{models}/{task}/train_reward"]
            found = differences(*(train(copy, script, processes, flags) for copy in copies))
            found = {name: gap for name, gap in found.items() if name not in args.ignore}
            worst = float(np.max([worst, *found.values()]))
            largest = sorted(found.items(), key=lambda item: -item[1])[:4]
            text = ", ".join(f"{name} {gap:.1e}" for name, gap in largest)
            name = f"{script} {task}, {processes} processes"
            print(f"{name:34} weights {found['weights']:.1e}; largest: {text}", flush=True)
    print("equal" if worst < LIMIT else f"not equal: {worst:.1e}")
    sys.exit(worst >= LIMIT)


if __name__ == "__main__":
    main(tyro.cli(Args))
