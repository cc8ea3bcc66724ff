"""The files in configs/, read by launchers: real launches on a CPU, and Slurm with stand-ins."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import tiny
import torch
import yaml
from accelerate import ParallelismConfig
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.state import AcceleratorState
from conftest import read_args, read_lines, without_times
from test_resume import free_port

from data import tasks
from machinery import distributed
from machinery.cli import ROOT

CONFIGS = ROOT / "configs"
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
REFUSED = [  # a variable, its value, words of the error
    ("ACCELERATE_USE_DEEPSPEED", "true", ("DeepSpeed", "configs/fsdp2.yaml")),
    ("ACCELERATE_USE_MEGATRON_LM", "true", ("MEGATRON_LM", "configs/fsdp2.yaml")),
    ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", ("=INDUCTOR", "compile.diff")),
    ("ACCELERATE_MIXED_PRECISION", "fp16", ("fp16", "use bf16")),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", ("=4", "--micro_batch_tokens")),
    ("FSDP_ACTIVATION_CHECKPOINTING", "true", ("--gradient_checkpointing",)),
]
SFT = dict(num_queries=20, num_heldout=2, batch_size=4, block_size=10, lr=1e-3)
PPO = dict(response_length=5, batch_size=8, num_minibatches=2, eval_every=99, eval_queries=2)
RUNNING = (ROOT / "docs/running.md").read_text()


def command(script, task, **values):
    """A script and its flags."""
    words = [
        ROOT / script,
        "--task=synthetic",
        "--query_length=8",
        f"--base_model={task.base_model}",
        f"--query_dataset={task.query_dataset}",
    ]
    return words + [f"--{name}={value}" for name, value in values.items()]


def start(folder, words, **env):
    """Start a command on a CPU in a folder that is not the project's."""
    kept = dict(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    for name, value in os.environ.items():
        if not name.startswith(("ACCELERATE", "FSDP", "PYTEST")):
            kept.setdefault(name, value)
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen([str(word) for word in words], cwd=folder, env=kept | env, **streams)


def finish(process, code=0):
    text = process.communicate(timeout=200)[0]
    assert process.returncode == code, text
    return text


def exported(name):
    """The variables of a line of docs/running.md, of which `name` begins the first."""
    (words,) = re.findall(rf"`export ({name}.*?)`", RUNNING)
    return dict(word.split("=") for word in words.split())


def metrics(folder, name):
    return without_times(read_lines(folder / f"runs/{name}/metrics.jsonl"))


def wait_until(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_every_file_and_its_commands(path):
    """With accelerate's own reader, which refuses keys that it does not know."""
    text = path.read_text()
    assert load_config_from_file(str(path)).mixed_precision == "bf16"
    commands = re.findall(r"#     accelerate launch (.*)", text)
    assert commands
    for command in commands:
        args = launch_command_parser().parse_args(shlex.split(command))
        assert ROOT / args.config_file == path and (ROOT / args.training_script).is_file()
        assert args.training_script_args[0] == "--task"
        assert args.training_script_args[1] in tasks.TASKS
    known = {action.dest for action in launch_command_parser()._actions}
    assert set(yaml.safe_load(text).get("fsdp_config", {})) <= known


ALONE = """
import datetime
import ppo
from machinery import cli, distributed
distributed.JOIN_LIMIT = datetime.timedelta(seconds=2)
cli.run(lambda args: distributed.start(args), ppo.Args, ppo.PRESETS)
"""


def test_a_process_whose_partner_never_starts_says_so_and_ends(tmp_path):
    """Within the limit for joining; work has a longer one."""
    (tmp_path / "alone.py").write_text(ALONE)
    place = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), RANK="0", LOCAL_RANK="0")
    text = finish(start(tmp_path, [sys.executable, "alone.py"], **place, WORLD_SIZE="2"), code=1)
    assert "1/2 clients joined" in text


WINDOWS = """
import contextlib, os, runpy, signal, sys
del signal.SIGUSR1, signal.SIGHUP
def refuse(*args, **kwargs):
    raise OSError("A required privilege is not held by the client")
os.symlink = refuse
script, *flags = sys.argv[1:]
for sys.argv in ([script, "--help"], [script, *flags]):
    with contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
sys.exit("wandb" in sys.modules)
"""


def test_a_run_needs_neither_unix_signals_nor_links_nor_utf8(task, tmp_path):
    """Played on Unix. The weights are copied to where a link would be. Nor is wandb imported."""
    (tmp_path / "windows.py").write_text(WINDOWS)
    env = dict(PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C")
    words = command("sft.py", task, **SFT, run_name="a")
    assert "--run_name" in tiny.run_python("windows.py", *words, cwd=tmp_path, env=env)
    copied, weights = tmp_path / "models/synthetic/sft", tmp_path / "runs/a/model"
    assert not copied.is_symlink()
    for path in weights.iterdir():
        assert (copied / path.name).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_ddp_and_two_machines_give_the_same_numbers_and_fsdp2_is_refused_on_a_cpu(task, tmp_path):
    """All at once. On a CPU accelerate makes something else of configs/fsdp2.yaml."""
    port = 29611 + os.getpid() % 1000

    def launch(name, offset, *more):
        words = [*ACCELERATE, "--config_file", CONFIGS / f"{name}.yaml", "--num_processes", 2]
        words += ["--main_process_port", port + offset, *more]
        return start(tmp_path, words + command("sft.py", task, **SFT, run_name=name))

    here = "--main_process_ip", "127.0.0.1", "--machine_rank"
    runs = [launch("two_machines", 1, *here, rank) for rank in range(2)]
    for run in (*runs, launch("ddp", 0)):
        finish(run)
    found = metrics(tmp_path, "ddp")
    assert found == metrics(tmp_path, "two_machines") and len(found) >= 3
    args = read_args(tmp_path / "runs/two_machines")
    assert (args["processes"], args["mixed_precision"]) == (2, "bf16")
    assert "FSDP2 did not start" in finish(launch("fsdp2", 2), code=1)
    assert not (tmp_path / "runs/fsdp2").exists()


KILLER = """
import os, signal
from pathlib import Path
rank = int(os.environ["RANK"])
def score(responses):
    calls = Path(f"{Path.cwd()}/calls{rank}")
    with calls.open("a") as file:
        file.write("x")
    number = calls.stat().st_size
    if "KILL" in os.environ and (number, rank) == (3, 0):
        os._exit(1)
    if "KILL" in os.environ and (number, rank) == (7, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(response)) for response in responses]
"""


@pytest.mark.slow
def test_a_run_that_torchrun_restarts_equals_an_undisturbed_one(task, tmp_path):
    """One process ends itself, later the other one is killed. Without the variable of
    docs/running.md new processes find the addresses of old ones."""
    (tmp_path / "killer.py").write_text(KILLER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc_per_node", 2, "--max_restarts", 3]
    values = dict(total_episodes=48, reward_fn="killer.py:score", save_every=1, resume="auto")

    def launch(name, **env):
        words = torchrun + command("ppo.py", task, **PPO, **values, run_name=name)
        return finish(start(tmp_path, words, **exported("TORCH_DISABLE"), **env))

    launch("whole")
    for path in tmp_path.glob("calls?"):
        path.unlink()
    assert launch("killed", KILL="1").count("resuming runs/killed after") == 2
    whole = metrics(tmp_path, "whole")
    assert whole == metrics(tmp_path, "killed") and len(whole) == 7


SLEEPY = """
import time
def score(queries, responses):
    open("asked", "a").write("x")
    time.sleep(35)
    return [float(len(response)) for response in responses]
"""


@pytest.mark.slow
def test_launched_processes_finish_a_long_update_and_its_checkpoint(task, tmp_path):
    """As docs/running.md says; without its two variables the launcher ends them before that."""
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    words = [*ACCELERATE, "--multi_gpu", "--num_processes", 2, "--main_process_port", free_port()]
    values = dict(total_episodes=32, reward_fn="sleepy.py:score", run_name="a")
    words += command("ppo.py", task, **PPO, **values)
    job = start(tmp_path, words, **exported("PET_"))
    wait_until((tmp_path / "runs/a/metrics.jsonl").exists)
    asked = (tmp_path / "asked").read_text()
    wait_until(lambda: (tmp_path / "asked").read_text() != asked)  # the next update asks for scores
    begin = time.monotonic()
    job.send_signal(signal.SIGUSR1)
    finish(job, code=1)
    assert time.monotonic() - begin > 30
    (saved,) = (tmp_path / "runs/a/checkpoints").iterdir()
    assert saved.suffix == ".safetensors"


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
PYTHON = f'#!/bin/sh\nexec {sys.executable} "$@"\n'


@pytest.mark.slow
def test_slurm_saves_a_checkpoint_in_time_and_the_requeued_job_resumes(task, tmp_path):
    """Slurm's signal reaches every task; the job asks to be queued again, and then resumes."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    env = dict(
        PATH=f"{programs}{os.pathsep}{os.environ['PATH']}",
        MASTER_PORT=str(free_port()),
        SLURM_JOB_ID="7",
        SLURM_NTASKS="2",
        SLURM_JOB_NODELIST="here",
        SLURM_CPUS_PER_TASK="8",
    )
    words = ["bash", CONFIGS / "slurm.sh", *command("sft.py", task, **SFT, num_epochs=60)]
    (tmp_path / "runs/slurm-7").mkdir(parents=True)  # of a start that ended before its checkpoint
    job = start(tmp_path, words, **env)
    written = tmp_path / "runs/slurm-7/metrics.jsonl"
    wait_until(lambda: written.exists() or job.poll() is not None, 100)
    assert written.exists(), "".join(path.read_text() for path in tmp_path.glob("task*.log"))
    for i in range(2):
        os.kill(int((tmp_path / f"task{i}.pid").read_text()), signal.SIGUSR1)
    finish(job, code=143)
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert len(list(tmp_path.glob("runs/slurm-7-*"))) == 1  # nothing was removed
    before = len(metrics(tmp_path, "slurm-7"))
    finish(start(tmp_path, words, **env))
    assert f"after {before} of" in (tmp_path / "task0.log").read_text()
    steps = [line["step"] for line in metrics(tmp_path, "slurm-7")]
    assert steps == list(range(len(steps))) and len(steps) > before


@pytest.fixture
def launch(monkeypatch):

    def launch(args=None, **env):
        AcceleratorState._reset_state(True)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        return distributed.start(args or tiny.make_args())

    yield launch
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("name, value, words", REFUSED)
def test_a_launch_that_would_silently_change_the_mathematics_is_refused(name, value, words, launch):
    tiny.refuses(lambda: launch(**{name: value}), *words)


def test_processes_whose_gradients_fsdp2_would_not_average_are_refused():
    """With tp_size=2, two copies were trained, each on half of the batch; one was saved."""
    plan = SimpleNamespace(gradient_accumulation_steps=1, mixed_precision="no", num_processes=1)
    plan.parallelism_config = ParallelismConfig(dp_shard_size=2, dp_replicate_size=2)
    distributed.check_launch(plan)
    plan.parallelism_config = ParallelismConfig(dp_shard_size=2, tp_size=2)
    tiny.refuses(lambda: distributed.check_launch(plan), "tp_size", "configs/fsdp2.yaml")


def test_fsdp_has_to_be_version_2(launch, monkeypatch):
    tiny.shard_on_a_cpu(monkeypatch.setattr)
    env = dict(ACCELERATE_USE_FSDP="true", FSDP_VERSION="1")
    tiny.refuses(lambda: launch(**env), "FSDP2 did not start", "--fsdp_version 2")
    assert launch(FSDP_VERSION="2").is_fsdp2


def test_fp32_and_bf16_start_and_bf16_has_tf32_unless_it_is_off(launch):
    for precision, tf32, found in (
        ("no", 1, "highest"),
        ("bf16", 0, "highest"),
        ("bf16", 1, "high"),
    ):
        accelerator = launch(tiny.make_args(tf32=bool(tf32)), ACCELERATE_MIXED_PRECISION=precision)
        assert accelerator.mixed_precision == precision
        assert torch.get_float32_matmul_precision() == found
    assert not torch.backends.cuda.cudnn_sdp_enabled()
