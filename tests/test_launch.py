"""configs/ as a launcher reads them: real launches on gloo, two machines on loopback, Slurm's with stand-ins of its commands."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

import tasks
import utils

CONFIGS = sorted((utils.ROOT / "configs").glob("*.yaml"))
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


def flags(task: tasks.Task, **more: object) -> list[str]:
    """Of a short run of sft.py on the files of a task."""
    values = dict(base_model=task.base_model, query_dataset=task.query_dataset, query_length=8, num_queries=20)
    values |= dict(num_heldout=2, batch_size=4, block_size=10, lr=1e-3) | more
    return ["--task", "synthetic", *(word for name, value in values.items() for word in (f"--{name}", str(value)))]


def environment(**more: str) -> dict[str, str]:
    """Of a launch on a CPU from a folder that is not the project's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE", "FSDP"))}
    return kept | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(utils.ROOT)} | more


def start(folder: Path, command: list[str], **env: str) -> subprocess.Popen:
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(list(map(str, command)), cwd=folder, env=environment(**env), **streams)


def finish(process: subprocess.Popen, code: int = 0) -> str:
    text = process.communicate(timeout=200)[0]
    assert process.returncode == code, text
    return text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_every_file(path):
    """With its own reader, which refuses keys that it does not know."""
    config = load_config_from_file(str(path))
    plain = yaml.safe_load(path.read_text())
    assert config.mixed_precision == "bf16" and config.num_processes == plain["num_processes"]
    for line in re.findall(r"#     accelerate launch (.*)", path.read_text()):
        args = launch_command_parser().parse_args(shlex.split(line))
        assert utils.ROOT / args.config_file == path
        assert (utils.ROOT / args.training_script).is_file() and args.training_script_args[0] == "--task"
        assert args.training_script_args[1] in tasks.TASKS
    if plain["distributed_type"] == "FSDP":
        known = {action.dest for action in launch_command_parser()._actions}
        assert set(plain["fsdp_config"]) <= known and plain["fsdp_config"]["fsdp_version"] == 2


def test_readme_uses_every_file():
    text = (utils.ROOT / "README.md").read_text()
    for path in [*CONFIGS, utils.ROOT / "configs" / "slurm.sh"]:
        assert f"configs/{path.name}" in text


def test_launches_on_gloo(task, tmp_path):
    """By configs/ddp.yaml; by configs/two_machines.yaml on loopback; by configs/fsdp2.yaml, which on a CPU comes up as
    something else and is refused. All at once."""
    config, script = utils.ROOT / "configs", utils.ROOT / "sft.py"
    few = ["--num_processes", 2]
    ports = {name: str(29611 + os.getpid() % 1000 + i) for i, name in enumerate(("ddp", "two", "fsdp2"))}
    ddp = start(
        tmp_path,
        [*ACCELERATE, "--config_file", config / "ddp.yaml", *few, "--main_process_port", ports["ddp"], script]
        + flags(task, run_name="ddp"),
    )
    two = [
        start(
            tmp_path,
            [*ACCELERATE, "--config_file", config / "two_machines.yaml", *few, "--machine_rank", rank]
            + ["--main_process_ip", "127.0.0.1", "--main_process_port", ports["two"], script]
            + flags(task, run_name="two"),
        )
        for rank in range(2)
    ]
    for process in (ddp, *two):
        finish(process)
    lines = [[json.loads(x) for x in (tmp_path / f"runs/{n}/metrics.jsonl").open()] for n in ("ddp", "two")]
    ours, theirs = ([{k: v for k, v in line.items() if "time/" not in k} for line in each] for each in lines)
    assert ours == theirs and len(ours) >= 3
    args = json.loads((tmp_path / "runs/two/args.json").read_text())
    assert (args["processes"], args["mixed_precision"]) == (2, "bf16")
    text = finish(
        start(
            tmp_path,
            [*ACCELERATE, "--config_file", config / "fsdp2.yaml", *few, "--main_process_port", ports["fsdp2"], script]
            + flags(task, run_name="fsdp2"),
        ),
        code=1,
    )
    assert "FSDP was asked for and MULTI_CPU came up" in text and "configs/fsdp2.yaml" in text
    assert not (tmp_path / "runs/fsdp2").exists()


SRUN = """#!/usr/bin/env bash
# as Slurm's: a copy of the command for each task, the highest exit code
while [[ "$1" == --* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=$i "$@" > "task$i.log" 2>&1 &
    echo $! > "task$i.pid"
done
highest=0
for pid in $(jobs -p); do wait "$pid"; code=$?; ((code > highest)) && highest=$code; done
exit $highest
"""
SCONTROL = '#!/usr/bin/env bash\n[ "$1" = show ] && echo 127.0.0.1 || echo "$@" > requeued\n'


def test_slurm_gets_a_checkpoint_in_time_and_the_job_goes_on(task, tmp_path):
    """Its signal reaches every task; the job asks to be queued again; started again, it resumes."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    env = dict(PATH=f"{commands}{os.pathsep}{os.environ['PATH']}", SLURM_JOB_ID="7", SLURM_NTASKS="2")
    env |= dict(SLURM_JOB_NODELIST="here", MASTER_PORT=str(30611 + os.getpid() % 1000))
    command = ["bash", utils.ROOT / "configs" / "slurm.sh", utils.ROOT / "sft.py", *flags(task, num_epochs=60)]
    (tmp_path / "runs/slurm-7").mkdir(parents=True)  # of a start that ended before its first checkpoint
    job = start(tmp_path, command, **env)
    metrics, end = tmp_path / "runs/slurm-7/metrics.jsonl", time.monotonic() + 100
    while not metrics.exists() and time.monotonic() < end and job.poll() is None:
        time.sleep(0.1)
    assert metrics.exists(), "".join(path.read_text() for path in tmp_path.glob("task*.log"))
    for i in range(2):
        os.kill(int((tmp_path / f"task{i}.pid").read_text()), signal.SIGUSR1)
    finish(job, code=143)
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert len(list((tmp_path / "runs").glob("slurm-7-*"))) == 1  # nothing was removed
    before = len(metrics.read_text().splitlines())
    finish(start(tmp_path, command, **env))
    assert f"goes on after {before} of" in (tmp_path / "task0.log").read_text()
    steps = [json.loads(line)["step"] for line in metrics.open()]
    assert steps == list(range(len(steps))) and len(steps) > before
