"""What goes wrong around a run ends it with one sentence, or does not touch it; nothing is lost.

Damaged checkpoints are in test_resume.py, bad flags and data in test_errors.py. This file is also
a program whose runs lose their terminal: it imports everything once and forks each of them.
"""

import json
import os
import pickle
import pty
import re
import resource
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import wandb
from accelerate import Accelerator
from conftest import read_metrics
from test_resume import (  # noqa: F401
    ROOT,
    SCRIPTS,
    at_call,
    checkpoint_files,
    exit_code,
    free_port,
    read_state,
    settings,
    signals,
    wait,
    write_files,
)
from transformers import PreTrainedTokenizerBase

import ppo
from machinery import artifacts, checkpoints, distributed, plots, rewards, runs
from machinery.cli import RunError

pytestmark = pytest.mark.usefixtures("accelerator", "signals")
ALL = pytest.mark.parametrize("script", SCRIPTS)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of `settings` in a folder to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    write_files(tmp_path)
    return tmp_path


def small(script: str, **changes: Any) -> Any:
    """Six cheap updates with a checkpoint after each, in runs/ran."""
    cheap = dict(num_ppo_epochs=1, eval_every=100) if script in ("ppo", "rloo") else {}
    return settings(script, **dict(run_name="ran", save_every=1) | cheap | changes)


def sentence(capsys: pytest.CaptureFixture, *words: Any, traceback: bool = False) -> str:
    """The error on stderr, which is one line and has all the words; what else is there."""
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if line.startswith("script.py: error")]
    assert ("Traceback" in err) == traceback
    for word in words:
        assert str(word) in line, f"{word!r} is not in: {line}"
    return err


def steps_kept() -> list[int]:
    """The updates after which runs/ran has checkpoints, all of which can be read."""
    return [read_state(path)[1]["step"] for path in checkpoint_files()]


# ---------------------------------------------------------------------------------------------- a full disk

FULL = {  # what → script, the call before which the disk gets full, bytes that a file can have
    "checkpoint": ("ppo", checkpoints, "save_file", 3, lambda: 50_000),
    "metrics": ("rloo", runs.Run, "log", 4, lambda: size("metrics.jsonl") + 20),
    "samples": ("ppo", runs.Run, "log_samples", 2, lambda: size("samples.jsonl") + 20),
    "weights": ("train_reward", artifacts, "save_model", 1, lambda: 50_000),
    "tokenizer": ("sft", PreTrainedTokenizerBase, "save_pretrained", 1, lambda: 2000),
    "curves": ("train_reward", runs, "plot_run", 1, lambda: 2000),
}


def size(name: str) -> int:
    return Path("runs/ran", name).stat().st_size


@contextmanager
def full_at(owner: Any, name: str, n: int, room: Callable[[], int]) -> Iterator[None]:
    """From the `n`-th call of `owner.name` on, the kernel refuses to make a file longer than `room()`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(function: Callable, *args: Any, **settings: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room(), hard))
        return function(*args, **settings)

    try:
        with pytest.MonkeyPatch.context() as patch:
            at_call(patch, owner, name, n, fill)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_ends_a_run_with_a_sentence_and_leaves_nothing_half(what, home, capsys):
    """Whole lines and whole checkpoints stay, and no weights; once there is room, the run goes on."""
    script, *where = FULL[what]
    flags = dict(eval_every=3) if what == "samples" else {}
    with full_at(*where):
        assert exit_code(script, small(script, **flags)) == 1
    err = sentence(capsys, "File too large")
    if what != "curves":  # the last file of all
        assert "with --resume runs/ran\n" in err
        assert not Path("runs/ran/model").exists() and not Path("models").exists()
    done = {"checkpoint": 2, "metrics": 3, "samples": 3}.get(what, 5)
    assert steps_kept() == [done - 1, done]
    text = Path("runs/ran/metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()][:done] == list(range(done))
    assert text.endswith("\n") and not list(Path().rglob("*.part*"))
    if script == "ppo":
        assert Path("runs/ran/samples.jsonl").read_text().endswith("}\n")
    if what in ("checkpoint", "tokenizer"):
        again = small(script, **flags, run_name=None, resume="runs/ran")
        assert exit_code(script, again) == 0 and len(read_metrics("ran")) == 6
        assert Path("runs/ran/model/model.safetensors").is_file()


def test_a_first_line_that_does_not_fit_leaves_an_empty_file(tmp_path):
    run = SimpleNamespace(folder=tmp_path)
    with full_at(runs.Run, "append", 1, lambda: 5), pytest.raises(RunError, match="metrics.jsonl"):
        runs.Run.append(run, "metrics.jsonl", [{"loss": 1.0}])
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_disk_that_is_full_from_the_start_is_one_sentence(home, capsys):
    with full_at(artifacts, "create_run_folder", 1, lambda: 100):
        assert exit_code("ppo", small("ppo")) == 1
    sentence(capsys, "File too large")


# ------------------------------------------------------------------------------------------ reward functions


def function_file(folder: Path, name: str, body: str) -> str:
    """The flag of a reward function with this body, which knows the number of its calls so far.

    The first call is the evaluation before update 1.
    """
    path = folder / f"{name}.py"  # a function is loaded only once, so names differ
    lines = ["import os, signal, sys, time", "count = []", "def score(queries, responses):"]
    lines += ["    count.append(1)", "    calls = len(count)"]
    lines += [f"    {line}" for line in body.splitlines()]
    path.write_text("\n".join([*lines, "    return [len(r) / 10 for r in responses]", ""]))
    return f"{path}:score"


FAILS = {  # flag → script, body, what the error says of it
    "reward_fn raises": ("ppo", "{}['mood']", "raised KeyError: 'mood'"),
    "gold_fn raises": ("rloo", "raise ValueError('no')", "raised ValueError: no"),
    "reward_fn exits": ("rloo", "sys.exit(0)", "raised SystemExit: 0"),
    "reward_fn returns": ("ppo", "return [float('nan')] * 8", "returned nan for"),
}


@pytest.mark.parametrize("what", FAILS)
def test_a_function_that_fails_is_named_after_its_traceback(what, home, capsys):
    """And the update, with a checkpoint to resume from or without."""
    script, code, words = FAILS[what]
    spec = function_file(home, what.replace(" ", "_"), f"if calls == 4:\n    {code}")  # line 7
    args = small(script, reward_fn=spec, save_every=None if "returns" in what else 1)
    if what.startswith("gold_fn"):
        args = replace(args, reward_fn="reward.py:score", task=replace(args.task, gold_fn=spec))
    assert exit_code(script, args) == 1
    err = sentence(capsys, f"{spec} {words}", traceback="returns" not in what)
    if "returns" not in what:
        assert f'File "{spec.removesuffix(":score")}", line 7, in score' in err
    if args.save_every:
        assert "stopped after 2 of 6 updates; resume after 2 with --resume runs/ran" in err
        assert steps_kept() == [1, 2]
    else:
        assert "stopped after 2 of 6 updates; no checkpoint to resume from" in err


RETURNS = {  # what a function returns for two responses → what the error says of it
    "[1.0, float('nan')]": "returned nan for 'second'",
    "[float('-inf'), 0.0]": "returned -inf for 'first'",
    "[1e39, 0.0]": "returned",
    "[1.0] * 3": "returned shape [3]",
    "[[1.0]] * 2": "returned shape [2, 1]",
    "1.0": "returned shape []",
    "[0.5, None]": "returned [0.5, None]",
    "['a', 'b']": "returned ['a', 'b']",
    "{'good': 1.0}": "returned {'good': 1.0}",
    "(1.0 for _ in range(2))": "returned <generator",
    "None": "returned None",
}


@pytest.mark.parametrize("returned", RETURNS)
def test_a_function_that_returns_no_finite_scores_is_told_what_it_returned(returned):
    texts = [["a", "b"], ["first", "second"]]
    with pytest.raises(RunError) as caught:
        rewards.call_reward_function(lambda *_: eval(returned), "f.py:score", texts, {})
    message = str(caught.value)
    assert message.startswith("f.py:score ") and RETURNS[returned] in message
    assert "one finite number for each of 2 responses" in message


def test_ctrl_c_ends_a_function_that_hangs(home, capsys):
    spec = function_file(home, "hangs", "if calls == 3:\n    signal.alarm(1)\n    time.sleep(60)")
    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    begin = time.monotonic()
    try:
        assert exit_code("ppo", small("ppo", reward_fn=spec)) == 130
    finally:
        signal.signal(signal.SIGALRM, before)
    assert "resume after 1 with --resume runs/ran" in sentence(capsys, "stopped by Ctrl-C")
    assert time.monotonic() - begin < 30 and steps_kept() == [1]


# ----------------------------------------------------------------------------- numbers that are not finite


@ALL
def test_a_gradient_that_is_not_finite_stops_the_run_before_the_step(
    script, home, capsys, monkeypatch
):
    """After steps of size 10^6, which are finite themselves."""
    check, seen = distributed.check_gradients, []

    def spy(optimizer: Any, args: Any, kwargs: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        seen.append((params, [p.detach().clone() for p in params]))
        check(optimizer, args, kwargs)

    monkeypatch.setattr(distributed, "check_gradients", spy)
    assert exit_code(script, small(script, lr=1e6)) == 1
    sentence(capsys, "the norm of the gradient is", "the step was not taken", "--lr")
    params, before = seen[-1]
    assert len(seen) > 1 and all(p.isfinite().all() for p in before)
    assert all(p.equal(old) for p, old in zip(params, before, strict=True))


@pytest.mark.parametrize("script", ["ppo", "rloo"])
def test_a_policy_whose_logits_are_not_finite_stops_the_run_too(script, home, capsys):
    """It diverged in the last step of an update, so that sampling meets it first."""
    assert exit_code(script, small(script, lr=1e6, num_minibatches=1)) == 1
    sentence(capsys, "--lr")


# ---------------------------------------------------------------------------------------- Weights & Biases


def test_a_run_whose_wandb_cannot_be_reached_goes_offline(home, monkeypatch, capfd):
    """Its file is complete, to be uploaded later."""
    timeouts, wandb_settings = {}, wandb.Settings

    def impatient(**values: Any) -> wandb.Settings:
        timeouts.update({name: value for name, value in values.items() if "timeout" in name})
        return wandb_settings(**values | dict(init_timeout=2, finish_timeout=4))

    monkeypatch.setattr(wandb, "Settings", impatient)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    begin = time.monotonic()
    ppo.main(small("ppo", track=True))
    assert time.monotonic() - begin < 30 and timeouts == dict(init_timeout=30, finish_timeout=60)
    assert [row["step"] for row in read_metrics("ran")] == list(range(6))
    assert Path("runs/ran/model/model.safetensors").is_file()
    assert "W&B is offline" in capfd.readouterr().out
    wandb.teardown()  # as at the end of the process
    (data,) = Path("runs/ran/wandb").glob("offline-run-*/*.wandb")
    assert b"objective/kl_coef" in data.read_bytes()
    tables = list(Path("runs/ran/wandb").glob("offline-run-*/files/media/table/*.json"))
    samples = [json.loads(table.read_text()) for table in tables]
    assert len(samples) == 2
    assert all(table["columns"] == ["query", "response", "score"] for table in samples)
    assert all("Clara" in str(table["data"]) for table in samples)


# ------------------------------------------------------------------------------- what must not get in, or out


class Bomb:
    """Unpickling it makes a folder."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("exploded",)


def bomb(path: Path | str) -> None:
    """A pickle in a file, or a file of torch's with one in it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".bin", ".pt", ".pth"):
        torch.save({"weight": Bomb()}, path)
    else:
        path.write_bytes(pickle.dumps(Bomb()))


def test_the_bomb_works(home):
    bomb("bomb.pt")
    torch.load("bomb.pt", weights_only=False)
    assert Path("exploded").is_dir()


@ALL
def test_a_model_folder_with_a_pickle_in_place_of_its_weights_is_refused(script, home, capsys):
    Path("task/model/model.safetensors").unlink()
    bomb("task/model/pytorch_model.bin")
    assert exit_code(script, small(script)) == 2
    sentence(capsys, "task/model", "safetensors")
    assert not Path("exploded").exists()


def test_a_reward_folder_with_a_pickle_in_place_of_its_weights_is_refused(home, capsys):
    tiny.write_reward(home / "reward")
    Path("reward/model.safetensors").unlink()
    bomb("reward/pytorch_model.bin")
    assert exit_code("ppo", small("ppo", reward_fn=None, reward_model="reward")) == 2
    sentence(capsys, "--reward_model reward has no model.safetensors")
    assert not Path("exploded").exists()


def test_pickles_beside_the_weights_and_in_checkpoints_are_not_read(home, capsys):
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "tokenizer.pkl"):
        bomb(f"task/model/{name}")
    assert exit_code("sft", small("sft", save_every=3)) == 0
    bomb("runs/ran/checkpoints/00000099.safetensors")
    capsys.readouterr()
    assert exit_code("sft", small("sft", save_every=3, run_name=None, resume="runs/ran")) == 2
    sentence(capsys, "00000099.safetensors is damaged")
    assert not Path("exploded").exists()


@pytest.mark.parametrize("name", ["rows.pkl", "rows.pt", "folder/rows.pkl", "folder/rows.tar"])
@pytest.mark.parametrize("script", ["sft", "train_reward"])
def test_pickled_data_is_refused_unread(name, script, home, capsys):
    path = Path(name)
    if path.suffix == ".tar":
        path.parent.mkdir()
        with tarfile.open(path, "w") as file:
            for suffix in (".pickle", ".pyd", ".pth"):
                bomb(f"0{suffix}")
                file.add(f"0{suffix}")
    else:
        bomb(path)
    source = str(path if path.parent == Path() else path.parent)
    args = small(script)
    changed = {"label_dataset" if script == "train_reward" else "query_dataset": source}
    assert exit_code(script, replace(args, task=replace(args.task, **changed))) == 2
    sentence(capsys, source)
    assert not Path("exploded").exists()


def test_a_model_with_its_own_code_is_refused_and_nobody_is_asked(home, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    Path("task/model/mine.py").write_text("import os\nos.mkdir('exploded')\n")

    def bring(name: str, **values: Any) -> None:
        path = Path("task/model", name)
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    auto = {"AutoTokenizer": ["mine.Mine", None]}
    bring("tokenizer_config.json", tokenizer_class="Mine", auto_map=auto)
    assert exit_code("sft", small("sft")) == 0  # with the library's own tokenizer
    auto = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}
    bring("config.json", model_type="mine", auto_map=auto)
    capsys.readouterr()
    assert exit_code("sft", small("sft", run_name=None)) == 2
    sentence(capsys, "--base_model task/model cannot be loaded", "custom code")
    assert not Path("exploded").exists()


SECRETS = {
    "HF_TOKEN": "hf_" + "Qx7" * 11,
    "WANDB_API_KEY": "ab12cd34" * 5,
    "OPENAI_API_KEY": "sk-" + "Zt9" * 12,
    "AWS_SECRET_ACCESS_KEY": "Kp5" * 12,
}


def test_keys_of_the_environment_are_in_nothing_that_a_run_writes_or_prints(
    home, monkeypatch, capfd
):
    """With W&B, offline; its file has a value that is no secret, so that it is known to be read."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    ppo.main(small("ppo", save_every=3, seed=7654321, track=True))
    wandb.teardown()
    texts = {str(path): path.read_bytes() for path in home.rglob("*") if path.is_file()}
    texts["printed"] = "".join(capfd.readouterr()).encode()
    for secret in SECRETS.values():
        assert [name for name, text in texts.items() if secret.encode() in text] == []
    found = [name for name, text in texts.items() if b"7654321" in text]
    assert any(name.endswith("args.json") for name in found)
    assert any(name.endswith(".wandb") for name in found)


# ---------------------------------------------------------------------------------------- terminals and logs


def test_without_a_terminal_a_line_is_printed_at_least_once_a_minute(home, monkeypatch, capsys):
    """And 20 times in a run, with the last update; the metrics are in the file at once."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def printed(total: int, seconds: float) -> list[int]:
        run = runs.Run(
            small("ppo", run_name=None), ppo.SCRIPT, total, ["a/b"], Accelerator(cpu=True)
        )
        run.restore(torch.nn.Linear(1, 1), None)
        for step in range(total):
            now[0] += seconds
            run.log(step, {"a/b": 0.5, "other": 1.0})
            assert len((run.folder / "metrics.jsonl").read_text().splitlines()) == step + 1
        run.close()
        lines = [line for line in capsys.readouterr().out.splitlines() if " b 0.5 " in line]
        return [int(line.split("/")[0]) for line in lines]

    with monkeypatch.context() as patch:
        patch.setattr(runs.atexit, "register", lambda _: None)
        assert printed(100, 1) == [*range(1, 100, 5), 100]
        slow = printed(300, 25)
    assert max(b - a for a, b in zip(slow, slow[1:], strict=False)) * 25 <= 60 + 25
    assert 300 in slow and len(slow) < 150


def in_terminal(name: str, **flags: Any) -> dict[str, Any]:
    """The exit code of a run in a terminal of its own, and what it printed there.

    `closed` ones lose theirs as soon as an update is done.
    """
    pid, master = pty.fork()  # the child has no other terminal
    if not pid:
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.environ.update({"COLUMNS": "20"} if name == "narrow" else {}, TERM="xterm-256color")
        code = 99
        try:
            args = settings("ppo", run_name=name, reward_fn="slow.py:score", **flags)
            code = exit_code("ppo", args)
        except BaseException:
            Path(f"{name}.log").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    printed = b""
    with suppress(OSError):  # the other side is gone
        while not ("closed" in name and Path("runs", name, "metrics.jsonl").exists()):
            if not (part := os.read(master, 2**16)):
                break
            printed += part
    os.close(master)
    return {"code": wait(pid, 60), "printed": printed.decode()}


TERMINALS = {
    "narrow": {},
    "wide": {},
    "closed": dict(eval_every=100),
    "closed_evaluating": dict(eval_every=1),
}


@pytest.mark.slow
def test_progress_is_readable_in_terminals_and_a_closed_one_leaves_a_checkpoint(home):
    """Lines where there is no room for a bar; the last update and the samples are there.

    After a terminal is closed, neither progress nor samples can be printed any more.
    """
    lines = ["import time", "def score(queries, responses):", "    time.sleep(0.1)"]
    Path("slow.py").write_text("\n".join([*lines, "    return [len(r) / 9 for r in responses]"]))
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    options = dict(env=env, capture_output=True, text=True, timeout=200)
    done = subprocess.run([sys.executable, __file__], **options, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(Path("terminals.json").read_text())
    for name in ("narrow", "wide"):
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", found[name]["printed"])  # colors and cursor
        lines = text.replace("\r", "\n").splitlines()
        assert found[name]["code"] == 0, text
        assert any("6/6" in line and "score" in line for line in lines), text
        assert sum("Clara found the sea." in line for line in lines) >= 2  # of both evaluations
        assert ("━" in text) == (name == "wide")
    printed = found["wide"]["printed"]  # shows the cursor again
    assert printed.rindex("\x1b[?25h") > printed.rindex("\x1b[?25l")
    for name in ("closed", "closed_evaluating"):
        updates = len(Path(f"runs/{name}/metrics.jsonl").read_text().splitlines())
        kept = [read_state(path)[1]["step"] for path in checkpoint_files(name)]
        assert kept == [updates] and updates < 6
        assert found[name]["code"] == 143


if __name__ == "__main__":
    plots.pyplot()
    found = {name: in_terminal(name, **flags) for name, flags in TERMINALS.items()}
    Path("terminals.json").write_text(json.dumps(found))
