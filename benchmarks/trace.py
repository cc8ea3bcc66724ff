"""Do two checkouts compute the same? Train with both in float64 and compare.

    git worktree add /tmp/before main
    python benchmarks/trace.py /tmp/before .              # needs the models of both synthetic tasks

20 updates of ppo.py and rloo.py on both synthetic tasks, on one process and on two. Prints the
largest differences of final weights and of metrics. In float64 rounding cannot change a sampled
token, so equal mathematics shows as differences below 1e-8; exit code 1 if one is larger.
"""

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


def to_float64(project: Path) -> None:
    """Rewrite a copy of the project."""
    for path in project.rglob("*.py"):
        text = path.read_text().replace("torch.float32", "torch.float64")
        text = text.replace(".float()", ".double()")
        path.write_text(re.sub(r"dtype=torch\.float\b", "dtype=torch.float64", text))
    (project / "run_in_float64.py").write_text(RUNNER)


def train(project: Path, name: str, processes: int, flags: dict[str, str]) -> None:
    """Run a script of a copy of the project, there."""
    script, words = name.split("-")[0], [word for pair in flags.items() for word in pair]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *launch, "run_in_float64.py", f"{script}.py", *words]
    command += ["--run_name", name, "--output_dir", f"trained/{name}"]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(project)}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{project} {name} failed:\n{done.stderr[-2000:]}")


def load(project: Path, name: str) -> tuple[dict[str, np.ndarray], list[dict[str, float]]]:
    """Weights and metrics of a run."""
    lines = (project / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return load_file(project / "trained" / name / "model.safetensors"), list(map(json.loads, lines))


def differences(name: str, a: Path, b: Path) -> dict[str, float]:
    """The largest difference of weights and of each metric that both have."""
    (weights, lines), (other_weights, other_lines) = load(a, name), load(b, name)
    gaps = {"weights": max(abs(x - other_weights[k]).max() for k, x in weights.items())}
    for line, other in zip(lines, other_lines, strict=True):
        for key in line.keys() & other.keys():
            if not key.startswith("time/"):
                gaps[key] = max(gaps.get(key, 0.0), abs(line[key] - other[key]))
    return gaps


def main(args: Args) -> None:
    """Train, print a line for each run."""
    worst, models = 0.0, args.models.resolve()
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder, name) for name in ("a", "b")]
        for checkout, copy in zip(args.checkouts, copies, strict=True):
            to_float64(copy_project(checkout, copy))
        for processes in args.processes:
            for task in args.tasks:
                for script in args.scripts:
                    name = f"{script}-{task}-{processes}"
                    flags = {"--task": task, "--total_episodes": str(args.total_episodes)}
                    flags |= {"--base_model": str(models / task / "sft")}
                    flags |= {"--reward_model": str(models / task / "train_reward")}
                    for copy in copies:
                        train(copy, name, processes, flags)
                    gaps = differences(name, *copies)
                    worst = max(worst, *gaps.values())
                    largest = sorted(gaps.items(), key=lambda gap: -gap[1])[:4]
                    text = ", ".join(f"{key} {gap:.1e}" for key, gap in largest)
                    print(f"{name:24} weights {gaps['weights']:.1e}; largest: {text}", flush=True)
    print("equal" if worst < LIMIT else f"not equal: {worst:.1e}")
    sys.exit(worst >= LIMIT)


if __name__ == "__main__":
    main(tyro.cli(Args))
