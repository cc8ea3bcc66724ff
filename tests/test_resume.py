"""A run that is killed at any instant and resumed writes, bit for bit, what others write. As a
program, this file runs the scripts and kills them: it imports once and forks each process."""

import contextlib
import functools
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import socket
import sys
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import datasets
import filelock
import huggingface_hub
import pytest
import tiny
import torch
from conftest import SCRIPTS, SIGNALS, read_metrics, settings, without_times, write_files
from safetensors import safe_open
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.testing import assert_close

import ppo
from machinery import checkpoints, cli, distributed, rewards, runs, sources
from tools import policies

FORK = get_context("fork")
RAN = Path("runs/ran")


@contextmanager
def process():
    """At the end, locks of a failed run are released, and what names stand for is found anew."""
    locks = []
    sources.PINNED.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filelock, "FileLock", tiny.keep(filelock.FileLock, locks))
        try:
            yield
        finally:
            for lock in locks:
                lock.release(force=True)


def exit_code(script, args):
    """The exit code of a script; `args` may be the flags as one text."""
    module = SCRIPTS[script]
    with process(), pytest.MonkeyPatch.context() as patch:
        if isinstance(args, str):
            patch.setattr(sys, "argv", ["script.py", *args.split()])
        else:
            patch.setattr(cli, "parse_args", lambda *_: args)
        try:
            cli.run(module.main, module.Args, module.PRESETS)
        except SystemExit as stop:
            stop.__traceback__ = stop.__context__ = None
            return stop.code
    return 0


def written(folder=RAN):
    """What a run writes, except times and names: metrics, samples, the bytes of all weights."""
    found = {}
    for path in folder.glob("*.jsonl"):
        found[path.name] = without_times(map(json.loads, path.open()))
    for path in [*folder.glob("model/*.safetensors"), *folder.glob("keep_*/[!a]*")]:  # not args
        found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def assert_same_run(expected, folder=RAN):
    found = written(folder)
    wanted = written(expected)
    assert len(wanted["metrics.jsonl"]) >= 6 and "model/model.safetensors" in wanted
    assert [name for name in wanted if found.get(name) != wanted[name]] == []


def at_call(patch, owner, name, n, do, when=None):
    """At the `n`-th call of `owner.name` with `when(*arguments)`: `do(function, *arguments)`."""
    function = getattr(owner, name)
    calls = []

    def patched(*args, **kwargs):
        if when is None or when(*args):
            calls.append(args)
            if len(calls) == n:
                patch.setattr(owner, name, function)
                return do(function, *args, **kwargs)
        return function(*args, **kwargs)

    patch.setattr(owner, name, patched)


def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after(function, *args, **kwargs):
    function(*args, **kwargs)
    kill()


def half_a_file(function, tensors, path, metadata):
    function(tensors, path, metadata)
    os.truncate(path, path.stat().st_size // 2)
    kill()


def half_a_line(function, run, *_):
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "objective/kl": 0.1')
    kill()


def send(number, times=2):
    """The signal twice, as launchers send it."""

    def do(function, *args):
        for _ in range(times):
            os.kill(os.getpid(), number)
        return function(*args)

    return do


def fail(*_):
    raise TimeoutError("no answer")


def is_checkpoint(path, *_):
    return path.suffix == ".part"


KILLS = {  # what → owner and name of the function that is called then, what happens instead, when
    "in a checkpoint": (checkpoints, "save_file", half_a_file),
    "before its rename": (Path, "replace", kill, is_checkpoint),
    "after its rename": (Path, "replace", kill_after, is_checkpoint),
    "in an update": (distributed, "check_gradients", kill),
    "in a reward": (rewards, "call_reward_function", fail),
    "in a line": (runs.Run, "append", half_a_line, lambda run, name, _: "metrics" in name),
    "after samples": (runs.Run, "log_samples", kill_after),
    "in a resume": (runs.Run, "cut_back", kill_after),
    "before the weights": (Path, "rename", kill, lambda path, *_: ".part" in path.name),
    "after the weights": (runs, "save_model", kill_after),
    "before the link": (Path, "symlink_to", kill, lambda path, *_: path.parts[0] == "models"),
    "SIGTERM": (distributed, "check_gradients", send(signal.SIGTERM)),
    "SIGUSR1": (distributed, "check_gradients", send(signal.SIGUSR1)),
}


def run_job(script, args, what, n, log, env):
    """Run a script, which ends at the `n`-th `what`, in this process."""
    with open(log, "a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ.update(env)
    if what:
        owner, name, do, *when = KILLS[what]
        at_call(pytest.MonkeyPatch(), owner, name, n, do, *when)
    sys.exit(exit_code(script, args))


def wait(process):
    """The exit code of a process; -9 if it was killed, here because it hangs."""
    process.join(timeout=200)
    process.kill()
    process.join()
    return process.exitcode


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_killed(script, name, processes, kills, **flags):
    """Run a script to its end, killed on the way; return the exit codes: round → rank. Without a
    checkpoint, a killed run starts anew."""
    folder = Path("runs", name)
    codes = []
    for what, n, killed in [*kills, (None, 0, 0)]:
        args = f"--resume {folder}"
        if not any(folder.glob("checkpoints/*.safetensors")):
            args = settings(script, **flags, run_name=name)
            shutil.rmtree(folder, ignore_errors=True)
        jobs = []
        port = free_port()
        for rank in range(processes):
            env = {}
            if processes > 1:
                env = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                env.update(WORLD_SIZE=str(processes), RANK=str(rank), LOCAL_RANK=str(rank))
            here = what if rank == killed else None
            log = f"{name}.{rank}.log"
            job = FORK.Process(target=run_job, args=[script, args, here, n, log, env])
            job.start()
            jobs.append(job)
        codes.append(list(map(wait, jobs)))
    return codes


def drive(processes):
    """Run every script undisturbed and killed; return their exit codes."""
    for module in ("rich.table", "torch.utils.tensorboard", "matplotlib.figure"):
        importlib.import_module(module)  # once instead of in every fork
    codes = {}
    for script, kills in WHERE[processes].items():
        flags = {}
        if processes == 3:
            flags = dict(batch_size=3, block_size=4, num_epochs=2)
        elif processes == 1 and script in ("ppo", "rloo"):
            flags = dict(keep_every=2)
        straight = run_killed(script, f"{script}_straight", processes, [], **flags)
        flags["save_every"] = 2
        killed = run_killed(script, f"{script}_killed", processes, read_kills(kills), **flags)
        codes[script] = straight, killed
    return codes


ONE = {  # script → where its run is killed: what, at which call, which process
    "ppo": "before its rename 2 0, in a checkpoint 1 0, in a resume 1 0, in a line 3 0, "
    "after samples 2 0, after the weights 1 0",
    "rloo": "in a checkpoint 2 0, in an update 9 0, after its rename 1 0, before the weights 1 0",
    "train_reward": "before its rename 2 0, in an update 2 0, in a line 4 0, before the link 1 0",
    "sft": "in a checkpoint 2 0, in a line 2 0, before its rename 1 0, before the weights 1 0",
}
TWO = {  # the same of two processes
    "ppo": "SIGTERM 6 1, before its rename 1 0, in an update 3 1",
    "rloo": "in a reward 6 1, in a checkpoint 1 0, SIGUSR1 2 0, after the weights 1 0",
    "train_reward": "in a line 4 0",
    "sft": "in an update 4 1",
}
THREE = {"sft": "before its rename 2 0"}  # the order in which they add up matters to rounding
WHERE = {1: ONE, 2: TWO, 3: THREE}


def read_kills(text):
    kills = [kill.rsplit(" ", 2) for kill in text.split(", ")]
    return [[what, int(n), int(rank)] for what, n, rank in kills]


@pytest.mark.slow
@pytest.mark.parametrize("processes", WHERE)
def test_a_run_that_is_killed_anywhere_and_resumed_equals_an_undisturbed_run(processes, tmp_path):
    """Every script, at every kind of instant, also as it keeps weights. Nobody is killed alone."""
    write_files(tmp_path)
    out = tiny.run_python(__file__, processes, cwd=tmp_path, timeout=400)
    ended = json.loads(out.splitlines()[-1])
    logs = ""
    for path in sorted(tmp_path.glob("*.log")):
        logs += f"== {path.name}\n{path.read_text()[-1500:]}"
    for script, kills in WHERE[processes].items():
        straight, (*codes, last) = ended[script]
        assert straight == [last] == [[0] * processes], logs
        log = (tmp_path / f"{script}_killed.0.log").read_text()
        for (what, _, rank), code in zip(read_kills(kills), codes, strict=True):
            others = {*code[:rank], *code[rank + 1 :]}
            if what.startswith("SIG"):
                assert code == [143] * processes, logs
            elif what == "in a reward":  # of one process: all save the update before it, and end
                assert code == [2] * processes and "3 of 6 updates are saved" in log
            else:
                assert code[rank] == -9 and not others & {0, -9}, logs
        assert log.count("resuming runs/") >= len(codes) - 1
        runs_of = tmp_path / "runs"
        assert_same_run(runs_of / f"{script}_straight", runs_of / f"{script}_killed")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A function: the run of a script over six updates, with a checkpoint after each."""

    @functools.cache
    def run(script):
        folder = tmp_path_factory.mktemp(script)
        write_files(folder)
        with contextlib.chdir(folder):
            assert exit_code(script, settings(script, save_every=1, run_name="ran")) == 0
        return folder / RAN

    return run


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_signal_loses_no_finished_update(script, undisturbed, home, monkeypatch, capsys):
    """Without --save_every. The resumed run equals an undisturbed one; handlers are restored."""
    number = dict(zip(SCRIPTS, [*SIGNALS, signal.SIGTERM], strict=True))[script]
    handlers = [signal.getsignal(number) for number in SIGNALS]
    steps = 4 if script in ("ppo", "rloo") else 1
    for args, n in ((settings(script, run_name="ran"), 2), ("--resume latest", 4)):
        at_call(monkeypatch, SCRIPTS[script], "average_gradients", steps + 1, send(number))
        assert exit_code(script, args) == 143
        assert f"{n} of 6 updates are saved: --resume runs/ran" in capsys.readouterr().out
    assert [int(path.stem) for path in checkpoint_files()] == [2, 4]
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert exit_code(script, "--resume runs/ran") == 0
    assert_same_run(undisturbed(script))


def test_ctrl_c_says_what_is_saved_and_ends_within_the_update(home, monkeypatch, capsys):
    """A second one would end the process at once."""
    for save_every, said in ((99, "nothing is saved yet"), (2, "2 of 6 updates are saved: ")):
        at_call(monkeypatch, distributed, "check_gradients", 4 * 2 + 1, send(signal.SIGINT, 1))
        flags = dict(run_name=f"every_{save_every}", save_every=save_every)
        assert exit_code("ppo", settings("ppo", **flags)) == 130
        out, err = capsys.readouterr()
        assert out.splitlines()[-1].startswith(said) and "Traceback" not in err
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert out.endswith("--resume runs/every_2\n")
    assert len(read_metrics("every_2")) == 2
    assert exit_code("ppo", "--resume runs/every_2") == 0


def test_auto_begins_a_run_or_resumes_it(home, monkeypatch, capsys):
    """What has no checkpoint is moved aside; another's flags are compared as always."""
    assert again("--run_name ran --resume auto").resume == "auto"
    args = settings("ppo", run_name="ran", resume="auto", save_every=2)
    at_call(monkeypatch, distributed, "check_gradients", 1, fail)
    pytest.raises(TimeoutError, exit_code, "ppo", args)
    Path("runs/ran/notes.txt").write_text("mine")
    assert exit_code("ppo", args) == 0
    assert "runs/ran has no checkpoint: it is runs/ran-2" in capsys.readouterr().out
    (aside,) = Path("runs").glob("ran-*")
    assert (aside / "notes.txt").read_text() == "mine"
    before = written()
    assert exit_code("ppo", "--run_name ran --resume auto") == 0
    assert "resuming runs/ran after 4 of 6" in capsys.readouterr().out
    assert written() == before
    with refused("lr=0.5 instead of 0.01"):
        ppo.main(again("--run_name ran --resume auto --lr 0.5"))
    with refused("--resume auto", "--run_name"):
        again("--resume auto")
    with refused("--resume runs/ran has no checkpoint of rloo.py"):
        again("--run_name ran --resume auto", SCRIPTS["rloo"])


FAILING = """
import asyncio, pathlib
def fails():
    calls = pathlib.Path("calls")
    calls.write_text(calls.read_text() + "x")
    return len(calls.read_text()) == 6  # in update 3, after two evaluations
def plain(responses, step):  # as the function in conftest.py, whose run it has to equal
    divisor = 0 if fails() else 4
    return [response.count("e") / divisor + step / 8 for response in responses]
async def slow(responses, step):
    await asyncio.sleep(60 if fails() else 0.01)
    return [response.count("e") / 4 + step / 8 for response in responses]
slow.timeout = 0.2
"""


CAUSES = [
    ("ppo", "plain", "ZeroDivisionError"),
    ("rloo", "slow", "at most 0.2 s: TimeoutError"),
]


@pytest.mark.parametrize(("script", "name", "why"), CAUSES)
def test_a_reward_function_that_fails_or_takes_too_long_loses_no_update(
    script, name, why, undisturbed, home, capsys
):
    Path("mine.py").write_text(FAILING)
    Path("calls").write_text("")
    args = settings(script, run_name="ran", reward_fn=f"mine.py:{name}")
    assert exit_code(script, args) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"--reward_fn mine.py:{name}: " in said and why in said
    assert said.endswith("3 of 6 updates are saved: --resume runs/ran")
    assert exit_code(script, "--resume runs/ran") == 0
    assert_same_run(undisturbed(script))


@pytest.fixture
def ran(undisturbed):
    return undisturbed("ppo")


@pytest.fixture
def copy(ran, tmp_path, monkeypatch):
    """A copy of its folder to work in; the run lost its last update and the weights."""
    folder = tmp_path / "copy"
    shutil.copytree(ran.parents[1], folder, symlinks=True)
    shutil.rmtree(folder / "runs/ran/model")
    monkeypatch.chdir(folder)


def checkpoint_files(run="ran"):
    return sorted(Path("runs", run, "checkpoints").iterdir())


def read_state(path):
    with safe_open(path, "pt") as file:
        return load_file(path), json.loads(file.metadata()["state"])


def again(flags="--resume runs/ran", script=ppo):
    return cli.parse_args(script.Args, script.PRESETS, flags.split())


@contextmanager
def refused(*words):
    """`InputError` with these words; what a run has written so far stays as it is."""

    def files():
        found = Path("runs").rglob("*.[js]*")  # .json, .jsonl, .safetensors
        return {path: path.read_bytes() for path in found}

    before = files()
    with process():
        with pytest.raises(cli.InputError) as caught:
            yield
        assert all(str(word) in str(caught.value) for word in words), caught.value
        caught.value.__traceback__ = None
    assert files() == before


def test_a_checkpoint_is_one_safetensors_file_and_the_newest_two_are_kept(copy):
    """Weights and moments by name, tied weights once; all else is JSON in the header."""
    names = [path.name for path in checkpoint_files()]
    assert names == ["00000004.safetensors", "00000005.safetensors"]
    mode = Path("runs/ran/args.json").stat().st_mode  # as readable as other files
    assert {path.stat().st_mode for path in checkpoint_files()} == {mode}
    tensors, state = read_state(checkpoint_files()[-1])
    for end in ("", "/exp_avg", "/exp_avg_sq", "/step"):
        kind = "optimizer/state" if end else "model"
        assert f"{kind}/value_head.bias{end}" in tensors
        assert f"{kind}/lm.lm_head.weight{end}" not in tensors
    following = read_metrics("ran")[5]["objective/kl_coef"]
    assert state["step"] == 5 and state["state"] == pytest.approx(following, rel=1e-6)
    group = state["optimizer"]["param_groups"][0]
    assert group["t"] == 5 * 4 and group["eps_hat"] == 1e-5


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_checkpoint_of_every_kind_of_model_is_read_back(kind, tmp_path):
    """Rotary angles are buffers that no state has."""
    (tmp_path / "args.json").touch()
    first = tiny.make_lm(kind)
    second = tiny.make_lm(kind, seed=1)
    adam = torch.optim.Adam(first.parameters())
    first(torch.arange(4)[None], labels=torch.arange(4)[None]).loss.backward()
    adam.step()
    x = torch.arange(1, 3)
    state = {"adam": adam.state_dict(), "queue": [(True, None), {"x": x, "again": x}]}
    checkpoints.save_checkpoint(tmp_path / "checkpoints", 1, first, adam, state)
    path = tmp_path / "checkpoints/00000001.safetensors"
    restored = torch.optim.Adam(second.parameters())
    state = checkpoints.load_checkpoint(path, second, restored)["state"]
    own = torch.optim.Adam(second.parameters())
    own.load_state_dict(state["adam"])
    exactly = dict(rtol=0, atol=0)
    assert_close(state["queue"], [[True, None], {"x": x, "again": x}])
    assert_close(second.state_dict(), first.state_dict(), **exactly)
    for optimizer in (restored, own):
        found = optimizer.state_dict()["state"]
        assert_close(found, adam.state_dict()["state"], **exactly)


def test_files_of_the_project_are_found_from_another_copy_of_it(home, accelerator, monkeypatch):
    """Their names are relative to it, others as given."""
    judge = "data/synthetic/judge.py:gold_score"
    record = checkpoints.describe(settings("ppo", gold_fn=f"{cli.ROOT}/{judge}"), 1)
    assert record["gold_fn"] == judge and record["query_dataset"] == "task/stories.txt"
    Path("args.json").write_text(json.dumps(record))
    other = home / "other"
    (other / "data/synthetic").mkdir(parents=True)
    (other / "data/synthetic/judge.py").touch()
    monkeypatch.setattr(cli, "ROOT", other)
    assert policies.read_run(".") == record | dict(gold_fn=f"{other}/{judge}")


def test_a_run_that_has_finished_can_be_resumed_and_stays_the_same(ran, copy):
    """Also beside a copy of a checkpoint, which is none by its name."""
    best = shutil.copy(checkpoint_files()[-1], "runs/ran/checkpoints/best.safetensors")
    with refused("has no checkpoint of ppo.py"):
        again(f"--resume {best}")
    for flags in ("--resume runs/ran", "--resume latest"):  # without and with the weights
        ppo.main(again(f"{flags} --save_every 1"))
        assert_same_run(ran)
    assert [path.stem for path in checkpoint_files()] == ["00000004", "00000005", "best"]
    assert os.listdir("runs") == ["ran"] and not list(Path().rglob("*.part*"))
    events = EventAccumulator("runs/ran").Reload().Scalars("objective/scores")
    assert [event.step for event in events] == list(range(6))  # each once


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_gives_the_same_run(ran, copy):
    before, newest = checkpoint_files()
    os.truncate(newest, newest.stat().st_size // 2)
    with refused(f"{newest} is damaged", "--resume"):
        ppo.main(again())
    ppo.main(again(f"--resume {before}"))
    assert_same_run(ran)
    assert read_state(checkpoint_files()[-1])[1]["step"] == 5


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_that_changes_numbers_is_refused_by_name(script, bf16_accelerator, tmp_path):
    """No other is. Those that only save memory change rounding. Also the launcher's precision."""
    args = settings(script, resume=str(tmp_path / "checkpoints/1"))
    record = checkpoints.describe(args, 1)
    assert (record["mixed_precision"], record["processes"]) == ("bf16", 1)
    free = {"save_every", "keep_every", "resume", "run_name", "output_dir", "track"}
    if script != "train_reward":
        free.add("label_dataset")  # it is not read
    if script in ("sft", "train_reward"):
        free.update(["reward_fn", "gold_fn"])
    for name in record:
        (tmp_path / "args.json").write_text(json.dumps(record | {name: "another"}))
        if name not in free:
            named = f"numbers: {name}={record[name]} instead of another"
            tiny.refuses(lambda: checkpoints.check_same_run(args, 1), named)
        else:
            checkpoints.check_same_run(args, 1)


def test_changed_flags_are_all_named_before_anything_is_loaded(copy, no_weights):
    with refused("seed=3 instead of 1", "lr=0.5 instead of 0.01"):
        ppo.main(again("--resume runs/ran --lr 0.5 --seed 3"))
    with refused("total_episodes=512", "docs/using.md"):
        ppo.main(again("--resume runs/ran --total_episodes 512"))
    Path("out").mkdir()  # hours before the weights would have to be there
    with refused("--output_dir out exists"):
        ppo.check(again("--resume runs/ran --output_dir out"), 1)


def test_a_file_that_was_edited_is_refused_if_the_script_reads_it(copy, capsys, accelerator):
    """The functions that will run are named before they are imported."""
    Path("task/labels.json").write_text("[]")
    ppo.check(again(), 1)
    edited = b"assert False, 'imported'"
    found = hashlib.sha256(edited).hexdigest()[:8]
    for file, name in (
        ("task/stories.txt", "query_dataset"),
        ("reward.py", "reward_fn"),
        ("task/model/model.safetensors", "base_model/model.safetensors"),
    ):
        known = Path(file).read_bytes()
        was = hashlib.sha256(known).hexdigest()[:8]
        Path(file).write_bytes(edited)
        with refused(f"sha256 of {name}={found} instead of {was}"):
            ppo.check(again(), 1)
        Path(file).write_bytes(known)
    line = "runs/ran runs the code of --reward_fn reward.py:score"
    assert capsys.readouterr().out.splitlines() == [line] * 4


def test_a_link_that_moves_changes_nothing(home):
    """Nor does a reward model that is trained later: the run has none."""
    Path("first").symlink_to("task/model")
    ppo.main(settings("ppo", run_name="ran", save_every=4, base_model="first"))
    before = written()
    tiny.write_model(Path("second"), seed=5)
    Path("first").unlink()
    Path("first").symlink_to("second")
    tiny.write_reward(home / "runs/r1/model")
    runs.replace_link(Path("models/synthetic/train_reward"), Path("runs/r1/model"))
    shutil.rmtree("runs/ran/model")
    assert exit_code("ppo", "--resume runs/ran") == 0 and written() == before
    with refused("base_model=second instead of task/model"):
        ppo.main(again("--resume runs/ran --base_model first"))
    Path("first").unlink()
    Path("first").symlink_to("task/model")
    ppo.check(again("--resume runs/ran --base_model first"), 1)


def test_a_resumed_run_reads_the_commits_of_the_hub_it_began_with(hub, home, tmp_path, monkeypatch):
    """Also if the cache has the newer ones. If they are gone, the run ends with one sentence."""
    model, rows = "owner/model", "owner/rows"

    def publish(number, text):
        tiny.write_model(hub.commit("models", model, number), seed=number)
        texts = [{"text": f"{name} {text} {x}."} for name in "ABCDE" for x in tiny.THINGS]
        file = hub.commit("datasets", rows, number) / "x.parquet"
        datasets.Dataset.from_list(texts).to_parquet(file)

    publish(1, "saw the")
    names = dict(base_model=model, query_dataset=rows)
    ppo.main(settings("ppo", run_name="ran", save_every=4, **names))
    before = written()
    publish(2, "lost a")
    assert exit_code("sft", settings("sft", **names)) == 0
    shutil.rmtree("runs/ran/model")
    assert exit_code("ppo", "--resume runs/ran") == 0 and written() == before
    shutil.rmtree(hub.commit("datasets", rows))
    with refused(f"--query_dataset {rows}: DatasetNotFoundError: Revision '{1:040x}'"):
        ppo.main(again())
    for offline in (huggingface_hub.constants, datasets.config):  # the library takes the newest
        monkeypatch.setattr(offline, "HF_HUB_OFFLINE", True)
    with refused(f"--query_dataset {rows}: commit {1:040x}"):
        ppo.main(again())
    shutil.rmtree(tmp_path / "cache" / "models--owner--model")
    with refused(f"--base_model {model}: "):
        ppo.main(again())


def test_a_copys_own_state_and_flags_of_any_type_are_resumed(here, monkeypatch):
    """The edits of docs/your-experiment.md; here, the price is taken from kl_coef."""
    monkeypatch.setattr(checkpoints, "KEPT", 100)
    write_files(here)
    page = (cli.ROOT / "docs/your-experiment.md").read_text()
    edits = "".join(re.findall(r"```diff\n(.*?)```", page, flags=re.S))
    text = Path(ppo.__file__).read_text()
    for mark, old, new in re.findall(r"^([- ])(.*\n)((?:^\+.*\n)+)", edits, flags=re.M):
        assert text.count(old) == 1
        text = text.replace(old, old * (mark == " ") + re.sub(r"^\+", "", new, flags=re.M))
    flags = "    max_length: tuple[float, ...] = (2.0, 9.0)\n    notes: Path = Path('notes')\n"
    text = text.replace("import math\n", "import math\nfrom pathlib import Path\n", 1)
    text = text.replace("    # Optimization\n", f"{flags}\n    # Optimization\n", 1)
    text = text.replace("[args.max_length -", "[args.max_length[0] -")
    line = "table.columns(rows)\n"  # before the update's `make_rollout`
    assert text.count(line) == 1
    text = text.replace(line, f"{line}        kl_coef += price.item()\n")
    Path("mine.py").write_text(text)
    monkeypatch.setitem(SCRIPTS, "mine", tiny.load_script(Path("mine.py")))
    SCRIPTS["mine"].main(settings("mine", run_name="full", save_every=1))
    shutil.copytree("runs/full", "runs/again")
    shutil.rmtree("runs/again/model")
    states = [read_state(path) for path in checkpoint_files("full")]
    saved = [tensors[rest["state"]["price"]["tensor"]].item() for tensors, rest in states]
    assert saved == sorted(saved) and saved[0] < saved[-1]  # the price, which rises
    assert exit_code("mine", "--resume runs/again/checkpoints/00000003.safetensors") == 0
    assert_same_run(Path("runs/full"), Path("runs/again"))


def test_latest_is_the_newest_run_of_this_script_and_task_that_has_a_checkpoint(copy):
    record = json.loads(Path("runs/ran/args.json").read_text())

    def add(name, age, **changes):
        folder = shutil.copytree("runs/ran", Path("runs", name))
        (folder / "args.json").write_text(json.dumps(record | changes))
        os.utime(folder / "args.json", (age, age))
        return folder

    os.utime("runs/ran/args.json", (1, 1))
    new, other = add("sweep/new", 20), add("task", 40, task="sentiment", lr=3)
    shutil.rmtree(add("bare", 50) / "checkpoints")
    (add("script", 60) / "ppo.py").rename("runs/script/mine.py")

    def found(flags):
        args = again(f"--resume {flags}")
        assert args.resume.endswith("/checkpoints/00000005.safetensors")
        return Path(args.resume).parents[1], args.lr

    assert found("latest") == (other, 3) and found("latest --task synthetic") == (new, 0.01)
    assert found("runs/ran") == (RAN, 0.01)
    for name in ("latest", "runs/bare", "runs/nowhere", "runs/ran"):
        with refused(f"--resume {name} has no checkpoint of rloo.py"):
            again(f"--resume {name}", SCRIPTS["rloo"])
    with refused("no checkpoint of ppo.py on task tldr"):
        again("--resume latest --task tldr")


def test_a_run_that_another_process_writes_is_left_alone(copy, no_weights):
    with filelock.FileLock("runs/ran/.lock"), refused("another process", "runs/ran"):
        ppo.main(again())


def test_state_that_is_neither_json_nor_a_tensor_fails_when_the_run_starts():
    with pytest.raises(TypeError, match="Path"):
        runs.Run.restore(None, None, None, [torch.ones(1), Path("x")])


def test_a_signal_changes_nothing_under_nohup_or_in_the_last_update(home, monkeypatch):
    """nohup ignores SIGHUP. No checkpoint is written after the last update: the weights follow."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number, step in ((signal.SIGHUP, 1), (signal.SIGUSR1, 6)):
        at_call(monkeypatch, distributed, "check_gradients", step, send(number))
        assert exit_code("sft", settings("sft", run_name=number.name)) == 0
        assert not list(Path("runs", number.name).glob("checkpoints/*"))
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


if __name__ == "__main__":
    datasets.config.HF_DATASETS_CACHE = Path("cache").resolve()
    print(json.dumps(drive(int(sys.argv[1]))))
