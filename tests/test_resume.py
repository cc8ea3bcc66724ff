"""A run that is killed at any instant and resumed writes, to the bit, what the run writes that nobody killed (pitfall 17).

This file is also the program that does the killing: it imports everything once and forks a process for every run.
"""

import gc
import importlib
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import filelock
import pytest
import tiny
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import ppo
import records
import rloo
import sft
import tasks
import train_reward
import utils

SCRIPTS = {"ppo": ppo, "rloo": rloo, "train_reward": train_reward, "sft": sft}
REWARD = "def score(queries, responses):\n    return [response.count('e') / 4 for response in responses]\n"


def settings(script: str, folder: Path, **changes: Any) -> Any:
    """Arguments of a run of six updates or steps on the files of `folder`; β, Adam's moments and gain all move."""
    task = replace(tiny.make_task(), base_model="task/model", query_dataset="task/stories.txt", truncate_token=None)
    task = replace(task, label_dataset="task/labels.json")
    if script == "sft":
        values = dict(num_heldout=4, batch_size=4, block_size=6, num_epochs=3, lr=1e-2, eval_every=2)
        task = replace(task, num_queries=18)
    elif script == "train_reward":
        values = dict(num_labels=12, batch_size=2, normalize_samples=4, rollout_batch_size=4, lr=1e-2)
    else:
        values = dict(total_episodes=48, batch_size=8, num_minibatches=2, num_ppo_epochs=2, micro_batch_tokens=36)
        values |= dict(rollout_batch_size=5, lr=1e-2, eval_queries=4, eval_every=2, reward_fn="reward.py:score")
        values |= dict(kl_horizon=20, rloo_k=2) if script == "rloo" else dict(kl_horizon=20)
    return SCRIPTS[script].Args(task=task, **values | changes)


def write_files(folder: Path) -> None:
    """What `settings` reads."""
    tiny.write_task(folder / "task")
    (folder / "reward.py").write_text(REWARD)


def written(folder: Path) -> dict[str, Any]:
    """What a run writes, times aside: metrics, samples, the bytes of all weights."""
    lines = {
        name: [json.loads(line) for line in (folder / name).read_text().splitlines()]
        if (folder / name).exists()
        else []
        for name in ("metrics.jsonl", "samples.jsonl")
    }
    lines = {name: [{k: v for k, v in x.items() if "time/" not in k} for x in rows] for name, rows in lines.items()}
    return lines | {path.name: path.read_bytes() for path in sorted(folder.glob("model/*.safetensors"))}


# ------------------------------------------------------------------------------------ runs that are killed, in forks


def at_call(owner: Any, name: str, n: int, do: Callable, when: Callable = lambda *args: True) -> None:
    """At the `n`-th call of `owner.name` of which `when`(arguments) is true, `do`(the function, arguments) instead."""
    function, calls = getattr(owner, name), [0]

    def patched(*args, **kwargs):
        calls[0] += when(*args)
        return do(function, *args) if calls[0] == n and when(*args) else function(*args, **kwargs)

    setattr(owner, name, patched)


def kill(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def behind(function: Callable, *args) -> None:
    function(*args)
    kill()


def half_a_file(function: Callable, *args) -> None:
    function(*args)
    os.truncate(args[1], args[1].stat().st_size // 2)
    kill()


def half_a_line(function: Callable, run: records.Run, *args) -> None:
    if run.main:
        with open(run.folder / "metrics.jsonl", "a") as file:
            file.write('{"step": 3, "objective/kl": 0.1')
    kill()


def ask(number: int) -> Callable:
    def send(function: Callable, *args):
        os.kill(os.getpid(), number)
        return function(*args)

    return send


KILLS = {  # where a process of `script` ends, at the n-th time
    "inside a checkpoint": lambda script, n: at_call(
        records, "save_file", n, half_a_file, lambda tensors, path, *_: path.name == "unfinished.tmp"
    ),
    "before the rename": lambda script, n: at_call(
        records, "sync", n, kill, lambda path: path.name == "unfinished.tmp"
    ),
    "behind the rename": lambda script, n: at_call(records, "sync", n, kill, lambda path: path.name == "checkpoints"),
    "inside an update": lambda script, n: at_call(script, "train_step", n, kill),
    "inside a line": lambda script, n: at_call(records.Run, "log", n, half_a_line),
    "behind samples": lambda script, n: at_call(records.Run, "samples", n, behind),
    "before the weights": lambda script, n: at_call(Path, "rename", n, kill, lambda a, b: ".tmp" in a.name),
    "behind the weights": lambda script, n: at_call(records, "save_model", n, behind),
    "SIGTERM": lambda script, n: at_call(script, "train_step", n, ask(signal.SIGTERM)),
    "SIGUSR1": lambda script, n: at_call(script, "train_step", n, ask(signal.SIGUSR1)),
}


def fork(script: str, flags: dict, where: str | None, n: int, log: Path) -> int:
    """`main` of a script in a process of its own, which ends at the `n`-th `where`. Its id."""
    if pid := os.fork():
        return pid
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1), os.dup2(out, 2)
    code = 1
    try:
        if where:
            KILLS[where](SCRIPTS[script], n)
        tasks.cli(SCRIPTS[script].main, lambda: settings(script, Path(), **flags))
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def wait(pid: int, seconds: float) -> int:
    """How a process ended, as `subprocess` says it; killed after so many seconds."""
    end = time.monotonic() + seconds
    while not (done := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(done[1])


def meet(name: str, rank: int, processes: int) -> None:
    """All ranks come here before any goes on."""
    Path(f"{name}.{rank}").touch()
    while not all(Path(f"{name}.{other}").exists() for other in range(processes)):
        time.sleep(0.01)


def drive(jobs: list[dict]) -> None:
    """Each job is a run: {script, name, flags, kills: [[where, n, rank]]}. It is resumed after each kill, or begins anew
    where there is no checkpoint yet; the last time nobody kills it. How its processes ended: <name>.<rank>.json."""
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # every run has a store of its own
    datasets.config.HF_DATASETS_CACHE = Path("cache").resolve()
    records.pyplot()
    for module in ("rich.progress", "rich.table", "torch.utils.tensorboard"):
        importlib.import_module(module)  # once, and not in every fork
    for job in jobs:
        ends = []
        for i, (where, n, which) in enumerate([*job["kills"], [None, 0, 0]]):
            meet(f"{job['name']}{i}before", rank, processes)
            folder = Path("runs") / job["name"]
            there = any(folder.glob("checkpoints/*.safetensors"))
            begin = dict(resume=job.get("resume", str(folder))) if there else dict(run_name=job["name"])
            meet(f"{job['name']}{i}seen", rank, processes)
            if rank == 0 and not there:
                shutil.rmtree(folder, ignore_errors=True)
            os.environ["MASTER_PORT"] = str(job["ports"][i])
            mine = where if which == rank and where != "some time" else None
            pid = fork(job["script"], job["flags"] | begin, mine, n, Path(f"{job['name']}.{rank}.log"))
            if where == "some time":
                ends.append(wait(pid, n))
            else:
                ends.append(wait(pid, 60))
        Path(f"{job['name']}.{rank}.json").write_text(json.dumps(ends))


def free_ports(n: int) -> list[int]:
    """Ports that nobody has now."""
    sockets = [socket.socket() for _ in range(n)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def run_jobs(folder: Path, jobs: list[dict], processes: int) -> SimpleNamespace:
    """`drive` in `folder`; on two processes under torch.distributed.run."""
    folder.mkdir()
    write_files(folder)
    for job in jobs:
        job["ports"] = free_ports(len(job["kills"]) + 1)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launch if processes > 1 else []), __file__]
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(utils.ROOT), str(Path(__file__).parent)])
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    logs = "".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(folder.glob("*.log")))
    assert done.returncode == 0, done.stderr + logs
    ends = {
        job["name"]: [json.loads((folder / f"{job['name']}.{r}.json").read_text()) for r in range(processes)]
        for job in jobs
    }
    return SimpleNamespace(folder=folder, ends=ends, logs=logs, runs=folder / "runs")


ONE = {  # script → how its run ends, again and again
    "ppo": [
        ["before the rename", 2],
        ["inside a checkpoint", 1],
        ["inside a line", 3],
        ["behind samples", 2],
        ["behind the weights", 1],
    ],
    "rloo": [["inside a checkpoint", 2], ["inside an update", 3], ["behind the rename", 1], ["before the weights", 1]],
    "train_reward": [
        ["before the rename", 2],
        ["inside an update", 1],
        ["inside a line", 4],
        ["behind the weights", 1],
    ],
    "sft": [["inside a checkpoint", 2], ["inside a line", 2], ["before the rename", 1], ["before the weights", 1]],
}
TWO = {
    "ppo": [["before the rename", 2, 0], ["inside an update", 6, 1], ["SIGTERM", 1, 1]],
    "rloo": [["inside a checkpoint", 2, 0], ["SIGUSR1", 2, 0], ["behind the weights", 1, 0]],
    "train_reward": [["inside a line", 4, 0]],
    "sft": [["inside an update", 4, 1]],
}


def assert_same_run(runs: Path, name: str, straight: str) -> None:
    """Compared by file, so that a difference is shown and not megabytes."""
    found, expected = written(runs / name), written(runs / straight)
    assert len(expected["metrics.jsonl"]) >= 6 and "model.safetensors" in expected
    assert found["metrics.jsonl"] == expected["metrics.jsonl"]
    assert found["samples.jsonl"] == expected["samples.jsonl"]
    assert [file for file in expected if found.get(file) != expected[file]] == [] and found.keys() == expected.keys()


def straight_and_killed(script: str, kills: list[list], **flags: Any) -> list[dict]:
    """A run without a checkpoint that nobody kills, and one that is killed again and again."""
    killed = dict(flags, save_every=2)
    kills = [[where, n, *(rank or [0])] for where, n, *rank in kills]
    return [
        dict(script=script, name=f"{script}_straight", flags=flags, kills=[]),
        dict(script=script, name=f"{script}_killed", flags=killed, kills=kills),
    ]


def test_17_a_run_that_is_killed_anywhere_and_resumed_is_the_run_that_nobody_killed(tmp_path):
    """Of every script; inside the writing of a checkpoint too. Every kill really was one, and each was resumed from."""
    jobs = [job for script, kills in ONE.items() for job in straight_and_killed(script, kills)]
    done = run_jobs(tmp_path / "home", jobs, 1)
    for script, kills in ONE.items():
        assert done.ends[f"{script}_straight"] == [[0]], done.logs
        assert done.ends[f"{script}_killed"] == [[-9] * len(kills) + [0]], done.logs
        assert (done.folder / f"{script}_killed.0.log").read_text().count("goes on after") == len(kills)
        assert_same_run(done.runs, f"{script}_killed", f"{script}_straight")


def test_17_random_instants_and_signals(tmp_path):
    """SIGTERM and SIGUSR1 save at the end of the update, without --save_every, and exit with 143; on with `latest`."""
    seconds, stops = random.Random(1), [["SIGTERM", 5, 0], ["SIGUSR1", 8, 0]]
    times = [["some time", seconds.uniform(0.3, 2), 0] for _ in range(4)]
    jobs = [
        dict(script="ppo", name="straight", flags={}, kills=[]),
        dict(script="ppo", name="times", flags=dict(save_every=1), kills=times),
        dict(script="ppo", name="stopped", flags={}, kills=stops, resume="latest"),
    ]
    done = run_jobs(tmp_path / "home", jobs, 1)
    assert done.ends["times"][0][-1] == 0 and -9 in done.ends["times"][0], done.logs
    assert_same_run(done.runs, "times", "straight")
    assert done.ends["stopped"] == [[143, 143, 0]], done.logs
    log = (done.folder / "stopped.0.log").read_text()
    assert "stopped after update 2 of 6; add  --resume runs/stopped " in log
    assert "goes on after 2 of 6" in log and "goes on after 4 of 6" in log
    assert_same_run(done.runs, "stopped", "straight")


def test_17_on_two_processes_of_which_one_is_killed(tmp_path):
    """Or gets the signal: both leave with 143."""
    jobs = [job for script, kills in TWO.items() for job in straight_and_killed(script, kills)]
    done = run_jobs(tmp_path / "home", jobs, 2)
    for script, kills in TWO.items():
        assert done.ends[f"{script}_straight"] == [[0], [0]], done.logs
        ends = done.ends[f"{script}_killed"]
        for i, (where, _, rank) in enumerate(kills):
            if where.startswith("SIG"):
                assert [ends[0][i], ends[1][i]] == [143, 143], done.logs
            else:
                assert ends[rank][i] == -9 and ends[1 - rank][i] != 0, done.logs
        assert [ends[0][-1], ends[1][-1]] == [0, 0], done.logs
        assert_same_run(done.runs, f"{script}_killed", f"{script}_straight")


def test_17_three_processes_add_up_in_the_same_order_behind_a_resume(tmp_path):
    """DDP would make other buckets behind the first step of every process, and the straight run has one such step."""
    jobs = straight_and_killed("sft", [["before the rename", 2]], batch_size=3, block_size=4, num_epochs=2)
    done = run_jobs(tmp_path / "home", jobs, 3)
    assert done.ends == {"sft_straight": [[0]] * 3, "sft_killed": [[-9, 0], [1, 0], [1, 0]]}, done.logs
    assert_same_run(done.runs, "sft_killed", "sft_straight")


# ------------------------------------------------------------------------------------------- one run, looked at closely


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory):
    """A run of ppo over six updates with a checkpoint behind each; nobody writes into it."""
    folder = tmp_path_factory.mktemp("ran")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_files(folder)
        ppo.main(settings("ppo", folder, save_every=1, run_name="ran"))
    return folder


@pytest.fixture
def home(ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder to work in, with the run that lost its last update."""
    folder = tmp_path / "home"
    shutil.copytree(ran, folder, symlinks=True)
    shutil.rmtree(folder / "runs/ran/model")
    monkeypatch.chdir(folder)
    return folder


def checkpoints(run: str = "ran") -> list[Path]:
    return sorted(Path("runs", run, "checkpoints").iterdir())


def again(**changes: Any) -> Any:
    """The arguments of `ran`, to go on with it."""
    return settings("ppo", Path(), **dict(save_every=1, run_name="ran", resume="runs/ran") | changes)


def refused(args: Any, *words: str, script: Any = ppo, processes: int = 1) -> str:
    """The message of the refusal, before anything is loaded; these words are in it, and no file is touched."""
    before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")}
    with pytest.raises(utils.InputError) as caught:
        script.check(args, processes)
    assert all(word in str(caught.value) for word in words), caught.value
    assert {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")} == before
    return str(caught.value)


@contextmanager
def raises(message: str):
    """`InputError` with this; what the run held is free again, as behind the end of a process."""
    with pytest.raises(utils.InputError, match=message):
        yield
    gc.collect()


def test_a_checkpoint_is_one_safetensors_file_and_the_newest_two_are_kept(home):
    """Weights and moments by name, tied weights once; all else is JSON in the header."""
    assert [path.name for path in checkpoints()] == ["00000004.safetensors", "00000005.safetensors"]
    tensors, state = records.read_checkpoint(checkpoints()[-1])
    policy = ppo.PolicyAndValue(utils.load_lm("task/model"), tiny.WORDS, 0.7)
    names = [name for name, _ in policy.named_parameters()]
    assert "lm.lm_head.weight" not in names and "value_head.bias" in names
    assert sorted(tensors) == sorted(f"{k}/{n}" for k in ("weight", "exp_avg", "exp_avg_sq", "step") for n in names)
    lines = [json.loads(line) for line in Path("runs/ran/metrics.jsonl").read_text().splitlines()]
    assert state["step"] == 5 and state["rest"] == pytest.approx(lines[5]["objective/kl_coef"], rel=1e-6)
    assert lines[5]["objective/kl_coef"] != lines[4]["objective/kl_coef"]
    assert state["groups"][0]["t"] == 5 * 4 and state["groups"][0]["eps_hat"] == 1e-5
    size = state["lengths"]["metrics.jsonl"]
    assert Path("runs/ran/metrics.jsonl").read_bytes()[:size].count(b"\n") == 5


def test_a_run_that_has_finished_can_be_resumed_and_stays_what_it_was(ran, home):
    ppo.main(again())
    assert_same_run(home / "runs", "ran", ran / "runs/ran")
    ppo.main(again(resume="latest", run_name=None))  # with the weights there
    assert_same_run(home / "runs", "ran", ran / "runs/ran")
    assert not list(Path("runs/ran").glob("model.tmp*")) and os.listdir("runs") == ["ran"]


@pytest.mark.parametrize("how", ["truncated", "flipped", "empty"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_offered(how, ran, home):
    """The words of the message are the command; what it makes is the run as it would have been."""
    before, newest = checkpoints()
    data = bytearray(newest.read_bytes())
    if how == "flipped":
        data[-1000] ^= 1
    newest.write_bytes(data if how == "flipped" else data[: len(data) // 2 if how == "truncated" else 0])
    with raises(f"{newest} is damaged.*--resume {before}$"):
        ppo.main(again())
    written_so_far = written(home / "runs/ran")
    assert len(written_so_far["metrics.jsonl"]) == 7  # nothing was cut
    ppo.main(again(resume=str(before)))
    assert_same_run(home / "runs", "ran", ran / "runs/ran")
    assert records.read_checkpoint(checkpoints()[-1])[1]["step"] == 5


def test_every_byte_of_a_checkpoint_counts(tmp_path):
    """Any flipped bit is found, or reads as what was written; any shorter file is found."""
    path, wrong = tmp_path / "checkpoints/1.safetensors", tmp_path / "wrong.safetensors"
    tensors = {"weight/a": torch.tensor([[1.5, -2.0]]), "step/a": torch.tensor(3.0), "b": torch.tensor([1, 2])}
    records.write_checkpoint(path, tensors, {"step": 3, "rest": 0.1})
    data = path.read_bytes()
    expected, state = records.read_checkpoint(path)
    found = 0
    for i in range(len(data)):
        flipped = bytearray(data)
        flipped[i] ^= 1 << i % 7
        wrong.write_bytes(flipped)
        try:
            tensors, other = records.read_checkpoint(wrong)
        except utils.InputError:
            found += 1
            continue
        assert other == state and all(tensors[name].equal(x) for name, x in expected.items()), i
    assert found > 0.95 * len(data)
    for length in range(0, len(data), 5):
        wrong.write_bytes(data[:length])
        with pytest.raises(utils.InputError, match="there is none before it"):
            records.read_checkpoint(wrong)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_that_changes_a_number_is_refused_by_name_and_no_other(script, home):
    """Of `Args` and `Task`; memory-only ones too, since they change rounding."""
    args = settings(script, home)
    for number, field in enumerate([*fields(args), *fields(args.task)]):
        if field.name == "task" and not isinstance(args, tasks.Task) and number == 0:
            continue
        owner = args if number < len(fields(args)) else args.task
        value = getattr(owner, field.name)
        new = not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else "another"
        changed = replace(owner, **{field.name: new})
        changed = changed if owner is args else replace(args, task=changed)
        record = asdict(args) | dict(processes=1, inputs={})
        Path("runs/ran/args.json").write_text(json.dumps(record))
        free = {"save_every", "save_minutes", "resume", "output_dir", "shown"}
        if owner is args and field.name in free:
            records.check_same(asdict(changed) | dict(processes=1), Path("runs/ran"))
        else:
            with pytest.raises(utils.InputError, match=rf"{field.name}={new} \(it has {value}\)"):
                records.check_same(asdict(changed) | dict(processes=1), Path("runs/ran"))


def test_changed_arguments_are_all_listed_before_anything_is_loaded(home, no_weights):
    message = refused(again(lr=0.5, seed=3, micro_batch_tokens=24), "seed=3 (it has 1)", "lr=0.5 (it has 0.01)")
    assert "micro_batch_tokens=24 (it has 36)" in message and "add --resume" in message and "longer" not in message
    refused(again(total_episodes=480), "total_episodes=480 (it has 48)", "lr falls over the whole run")
    refused(again(run_name="other"), "run_name=other")
    refused(replace(again(), task=replace(again().task, temperature=0.6)), "temperature=0.6 (it has 0.7)")
    ppo.check(again(run_name=None, output_dir="out", save_every=None, save_minutes=5.0), 1)


def test_another_number_of_processes_is_refused_with_the_right_one(home, no_weights):
    refused(again(), "processes=2 (it has 1)", processes=2)


@pytest.mark.parametrize("what", ["query", "model", "reward_fn", "precision"])
def test_inputs_that_changed_since_are_refused(what, home, monkeypatch):
    """A word of another text of the same length; a weight; the source of the reward; the launcher's precision."""
    if what == "query":
        text = Path("task/stories.txt").read_text()
        Path("task/stories.txt").write_text(text.replace("Tom the baker found the sea", "Tom the baker found the cat"))
    elif what == "model":
        weights = load_file("task/model/model.safetensors")
        weights["transformer.ln_f.bias"][0] += 1e-3
        save_file(weights, "task/model/model.safetensors", {"format": "pt"})
    elif what == "reward_fn":
        Path("reward.py").write_text(REWARD.replace("/ 4", "/ 5"))
    else:
        AcceleratorState._reset_state(True)
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    before = written(home / "runs/ran")
    named = {"query": "contents of the data", "model": "contents of base_model", "precision": "mixed_precision=bf16"}
    with raises(named.get(what, "contents of reward_fn")):
        ppo.main(again())
    assert written(home / "runs/ran") == before
    AcceleratorState._reset_state(True)


def test_labels_that_changed_since_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    train_reward.main(settings("train_reward", tmp_path, save_every=2, run_name="ran"))
    rows = json.loads(Path("task/labels.json").read_text())
    rows[3]["best"] = (rows[3]["best"] + 1) % 4
    Path("task/labels.json").write_text(json.dumps(rows))
    with raises("contents of the data"):
        train_reward.main(settings("train_reward", tmp_path, save_every=2, resume="latest"))


def test_a_policy_of_another_reward_model_folder_is_another_input(tmp_path, monkeypatch):
    """The link models/<task>/train_reward may have moved on; without a reward model in use it may do so."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    Path("third.py").write_text("def f(queries, responses, scores):\n    return scores\n")
    found = []
    for seed in (1, 2):
        tiny.write_reward(tmp_path / "models/synthetic/train_reward", seed=seed) if seed == 1 else None
        path = tmp_path / "models/synthetic/train_reward/model.safetensors"
        path.write_bytes(path.read_bytes() + b" " * (seed - 1))
        options = (None, "third.py:f", "reward.py:score")
        found.append([records.fingerprints(settings("ppo", tmp_path, reward_fn=each), ()) for each in options])
    for first, second, uses in zip(*found, (True, True, False), strict=True):
        assert any("contents of reward_model" in name for name in first) == uses and (first != second) == uses


def test_latest_is_the_newest_run_of_this_task_and_script_that_has_a_checkpoint(home):
    def copy(name: str, age: int, **changes: Any) -> Path:
        folder = Path("runs", name)
        shutil.copytree("runs/ran", folder)
        record = json.loads((folder / "args.json").read_text())
        (folder / "args.json").write_text(json.dumps(record | changes))
        os.utime(folder / "args.json", (age, age))
        return folder

    task = json.loads(Path("runs/ran/args.json").read_text())["task"]
    os.utime("runs/ran/args.json", (1, 1))
    old, new = copy("old", 10), copy("sweep/new", 20)
    shutil.rmtree(copy("bare", 30) / "checkpoints")
    copy("task", 40, task=task | dict(task="sentiment"))
    (copy("script", 50) / "ppo.py").rename("runs/script/mine.py")
    assert records.find_checkpoint(again(resume="latest"), ppo.SCRIPT) == new / "checkpoints/00000005.safetensors"
    assert records.find_checkpoint(again(resume=str(old)), ppo.SCRIPT) == old / "checkpoints/00000005.safetensors"
    assert records.find_checkpoint(again(resume="latest"), Path("mine.py")).parents[1] == Path("runs/script")
    for name in ("latest", "runs/bare", "runs/nowhere", "runs/ran/args.json"):
        args = settings("rloo", home, resume=name)
        refused(args, f"--resume {name}:", "no checkpoint of rloo.py on task synthetic", script=rloo)


def test_a_run_that_is_still_being_written_is_left_alone(home):
    lock = filelock.FileLock("runs/ran/.lock")
    with lock, raises("another process is still writing runs/ran"):
        ppo.main(again())
    assert len(written(home / "runs/ran")["metrics.jsonl"]) == 7


def test_metrics_that_somebody_shortened_are_not_filled_up(home):
    Path("runs/ran/metrics.jsonl").write_text("")
    with raises("runs/ran/metrics.jsonl was changed"):
        ppo.main(again())


def test_another_version_or_source_is_said(home, capsys):
    path = Path("runs/ran/args.json")
    record = json.loads(path.read_text())
    record["versions"]["torch"] = "2.0"
    path.write_text(json.dumps(record))
    Path("runs/ran/ppo.py").write_text(ppo.SCRIPT.read_text() + "# mine\n")
    ppo.main(again())
    assert "changed since runs/ran began, so its numbers may too: torch, ppo.py" in capsys.readouterr().out


class Stepper:
    """A run without training: `step(n)` is the end of the n-th update."""

    def __init__(self, task: tasks.Task, total: int = 10, **flags: Any):
        self.accelerator = utils.Accelerator(cpu=True)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = ppo.AdamTF(self.model.parameters(), lr=1e-3)
        self.run = records.Run(tiny.make_args(task, **flags), ppo.SCRIPT, total, [], self.accelerator)

    def step(self, n: int) -> list[int]:
        """The updates behind which there are checkpoints now."""
        self.run.checkpoint(n, self.model, self.optimizer)
        return [int(path.stem) for path in sorted((self.run.folder / "checkpoints").glob("*.safetensors"))]


def test_when_checkpoints_are_written(task, tmp_path, monkeypatch):
    """By number, by minutes, by both, by neither; never behind the last update, which the weights follow."""
    monkeypatch.chdir(tmp_path)
    now = [0.0]
    monkeypatch.setattr(utils.time, "monotonic", lambda: now[0])

    def newest(**flags: Any) -> list[int]:
        now[0] = 0.0
        stepper, found = Stepper(task, 10, **flags), []
        for n in range(1, 11):
            now[0] += 45
            found.append(max(stepper.step(n), default=0))
        return found

    assert newest() == [0] * 10
    assert newest(save_every=3) == [0, 0, 3, 3, 3, 6, 6, 6, 9, 9]
    assert newest(save_every=5) == [0, 0, 0, 0, 5, 5, 5, 5, 5, 5]
    assert newest(save_minutes=1.5) == [0, 2, 2, 4, 4, 6, 6, 8, 8, 8]
    assert newest(save_every=3, save_minutes=1.5) == [0, 2, 3, 3, 5, 6, 6, 8, 9, 9]


def test_a_signal_waits_for_the_end_of_the_update_and_is_what_it_was_behind_the_run(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    stepper = Stepper(task)
    assert stepper.step(1) == []
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # a launcher sends it once more
    with pytest.raises(SystemExit) as caught:
        stepper.step(2)
    assert caught.value.code == 143 and signal.getsignal(signal.SIGTERM) is before[0]
    stepper = Stepper(task, total=2)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stepper.step(2) == []  # nothing is left to do but to save the weights
    stepper.run.close()
    assert signal.getsignal(signal.SIGUSR1) is before[1]


def test_a_loss_that_is_no_number_leaves_the_last_checkpoint_and_no_later_one(ran, home, monkeypatch):
    """Resumed from the older of two, whose lines alone are left then: the newer one would miss its own."""
    monkeypatch.setattr(ppo, "summarise", ppo.summarise)
    at_call(ppo, "summarise", 1, lambda f, *args: f(*args) | {"ppo/loss/total": torch.tensor(math.nan)})
    with pytest.raises(tasks.RunError, match="ppo/loss/total is nan"):
        ppo.main(again(resume=str(checkpoints()[0])))
    gc.collect()
    assert [path.name for path in checkpoints()] == ["00000004.safetensors"]
    assert len(written(home / "runs/ran")["metrics.jsonl"]) == 4
    ppo.main(again())
    assert_same_run(home / "runs", "ran", ran / "runs/ran")


def test_the_table_of_before_and_after_begins_with_the_first_samples_of_the_run(home, monkeypatch):
    seen = []
    monkeypatch.setattr(records.Run, "compare_samples", lambda run: seen.extend(run.sampled))
    ppo.main(again())
    rows = written(home / "runs/ran")["samples.jsonl"]
    assert [len(table) for table in seen] == [4, 4] and {row["step"] for row in rows} == {0, 2, 4, 6}
    for table, step in zip(seen, (0, 6), strict=True):
        assert [row | {"step": step} for row in table] == [row for row in rows if row["step"] == step]


def test_a_run_with_a_single_sample_so_far_goes_on(home, monkeypatch):
    seen, flags = [], dict(run_name="one", eval_queries=1, eval_every=6)
    monkeypatch.setattr(records.Run, "compare_samples", lambda run: seen.append(run.sampled))
    ppo.main(again(**flags, resume=None))
    shutil.rmtree("runs/one/model")
    ppo.main(again(**flags, resume="runs/one"))
    assert seen[0] == seen[1] and [len(table) for table in seen[1]] == [1, 1]


def test_processes_that_mean_different_checkpoints_stop(home, monkeypatch):
    monkeypatch.setattr(records, "all_max", lambda x: torch.maximum(x, torch.tensor(7)))  # what the other one has
    with raises("is runs/ran/checkpoints/00000005.safetensors here and something else to another process"):
        ppo.main(again())


def test_weights_of_another_model_are_refused_by_name(tmp_path):
    model, other = torch.nn.Linear(2, 1), torch.nn.Sequential(torch.nn.Linear(2, 1))
    packed = records.pack_state(model, torch.optim.AdamW(model.parameters()), keep=True)
    with pytest.raises(utils.InputError, match="another model, see 0.bias"):
        records.unpack_state(*packed, other, torch.optim.AdamW(other.parameters()))


def test_the_value_head_lies_beside_the_policy_which_still_loads(ran):
    """It is the one of the last update: what a critic is started from."""
    folder = ran / "runs/ran/model"
    lm = AutoModelForCausalLM.from_pretrained(folder)
    policy = ppo.PolicyAndValue(utils.load_lm(str(folder)), tiny.WORDS, 0.7)
    policy.value_head.load_state_dict(load_file(folder / "value_head.safetensors"))
    assert policy.value_head.weight.abs().max() > 0
    tensors, _ = records.read_checkpoint(ran / "runs/ran/checkpoints/00000005.safetensors")
    moved = (policy.value_head.weight - tensors["weight/value_head.weight"]).abs().max()
    assert 0 < moved < 4 * 1e-2 / 6 * 1.01  # four steps of the last update, whose lr is a sixth
    assert lm.config.vocab_size == tiny.WORDS


if __name__ == "__main__":
    drive(json.loads(Path("jobs.json").read_text()))
