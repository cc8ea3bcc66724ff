"""What goes wrong around a run ends it in one sentence with the way on, or does not touch it; nothing logged is lost.

Checkpoints that are damaged and inputs that changed are in test_resume.py, bad flags and data in test_errors.py. This file
is also the program whose runs lose their terminal or another process: it imports everything once and forks each of them.
"""

import ast
import gc
import json
import math
import os
import pickle
import pty
import re
import resource
import signal
import subprocess
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_resume
import tiny
import torch
import wandb
from conftest import read_metrics
from safetensors.torch import load_file, save_file
from test_resume import SCRIPTS, at_call, settings, wait, write_files

import ppo
import records
import tasks
import utils

pytestmark = pytest.mark.usefixtures("accelerator")
ALL = pytest.mark.parametrize("script", SCRIPTS)
BOTH = pytest.mark.parametrize("script", ["ppo", "rloo"])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of `settings` in a folder to work in; what a test patches in a script or in records is put back."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    write_files(folder)
    for owner in (*SCRIPTS.values(), records, records.Run, utils):
        for name, value in list(vars(owner).items()):
            if callable(value):
                monkeypatch.setattr(owner, name, value)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}
    yield folder
    for number, handler in handlers.items():  # a run that an error ended leaves its own
        signal.signal(number, handler)


def ends(script: str, args: Any) -> int:
    """A script's exit code, as from the command line."""
    with pytest.raises(SystemExit) as stop:
        tasks.cli(SCRIPTS[script].main, lambda: args)
    code = stop.value.code
    del stop
    gc.collect()  # the run, which holds the lock of its folder
    return code


def sentence(capsys: pytest.CaptureFixture, *words: str) -> str:
    """The one line on stderr, which holds all the words."""
    line = capsys.readouterr().err.removeprefix("\n")
    assert line.count("\n") == 1 and line.startswith("script.py: "), line
    for word in words:
        assert str(word) in line, f"{word!r} is not in: {line}"
    return line


def small(script: str, home: Path, **changes: Any) -> Any:
    """Six updates with a checkpoint behind each, in runs/ran; the cheapest that there are."""
    cheap = dict(num_ppo_epochs=1, eval_every=100) if script in ("ppo", "rloo") else {}
    return settings(script, home, **dict(run_name="ran", save_every=1) | cheap | changes)


def steps_kept() -> list[int]:
    """The updates behind which runs/ran has checkpoints, each of which reads."""
    return [records.read_checkpoint(path)[1]["step"] for path in test_resume.checkpoints()]


def function_file(folder: Path, name: str, body: str) -> str:
    """The flag of a reward function of this body, which knows `calls`, the number of its calls so far. The evaluation in
    front of update 1 is the first."""
    path = folder / f"{name}.py"  # never the same: a function is loaded once
    lines = ["import os, signal, time", "count = []", "def score(queries, responses):", "    count.append(1)"]
    lines += ["    calls = len(count)", *(f"    {line}" for line in body.splitlines())]
    path.write_text("\n".join([*lines, "    return [len(r) / 10 for r in responses]", ""]))
    return f"{path}:score"


# ------------------------------------------------------------------------------------------------------- a full disk


@contextmanager
def full_at(owner: Any, name: str, n: int, room: Callable[[], int]) -> Iterator[None]:
    """From the `n`-th call of `owner.name` on no file can be longer than `room()`: the kernel refuses to write more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(function: Callable, *args: Any, **heads: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room(), hard))
        return function(*args, **heads)

    at_call(owner, name, n, fill)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@ALL
@pytest.mark.parametrize("file", ["checkpoint", "metrics", "weights"])
def test_a_full_disk_leaves_the_last_checkpoint_whole_lines_and_nothing_half(script, file, home, capsys):
    """And says which file, and how to go on, which works once there is room."""
    metrics = Path("runs/ran/metrics.jsonl")
    where = {
        "checkpoint": (records, "write_checkpoint", 3, lambda: 50_000),  # a tenth of one
        "metrics": (records.Run, "log", 4, lambda: metrics.stat().st_size + 20),  # in the middle of a line
        "weights": (records, "save_model", 1, lambda: 50_000),
    }[file]
    with full_at(*where):
        assert ends(script, small(script, home)) == 1
    named = {"checkpoint": "runs/ran/checkpoints/00000003.safetensors", "metrics": metrics, "weights": "runs/ran/model"}
    done = {"checkpoint": 2, "metrics": 3, "weights": 5}[file]
    lines = {"checkpoint": 3, "metrics": 3, "weights": 6}[file]
    line = sentence(capsys, f"{named[file]} could not be written", "File too large", "make room")
    assert line.endswith(f"add  --resume runs/ran  to the command to go on after update {done}\n")
    assert steps_kept() == [done - 1, done]
    rows = [json.loads(row) for row in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows][:lines] == list(range(lines)) and metrics.read_text().endswith("\n")
    assert not list(Path().rglob("*tmp*")) and not Path("runs/ran/model").exists()
    if script == "ppo":
        ppo.main(small(script, home, run_name=None, resume="runs/ran"))
        assert len(read_metrics("ran")) == 6 and Path("runs/ran/model/model.safetensors").is_file()


def test_a_disk_that_is_full_from_the_start_leaves_no_folder(home, capsys):
    with full_at(records, "new_folder", 1, lambda: 100):
        assert ends("ppo", small("ppo", home)) == 1
    sentence(capsys, "runs/ran/args.json could not be written", "File too large")
    assert not Path("runs/ran").exists()


def test_a_row_is_on_the_disk_when_log_returns(home, monkeypatch):
    """Seen from another process, as behind a SIGKILL."""
    seen, log = [], records.Run.log

    def spy(run, step, *args):
        log(run, step, *args)
        seen.append(subprocess.run(["cat", run.folder / "metrics.jsonl"], capture_output=True, check=True).stdout)

    monkeypatch.setattr(records.Run, "log", spy)
    ppo.main(small("ppo", home, total_episodes=16))
    assert [[json.loads(line)["step"] for line in text.splitlines()] for text in seen] == [[0], [0, 1], [0, 1, 2]]


# --------------------------------------------------------------------------------------------------- reward functions


@BOTH
@pytest.mark.parametrize("what", ["reward_fn", "gold_fn"])
def test_a_function_that_raises_is_named_with_its_line_its_words_and_the_update(script, what, home, capsys):
    body = "scores = {}\nif calls == 4:\n    scores['mood']"  # line 8 of the file; the first call is the evaluation's
    spec = function_file(home, f"raises_{script}_{what}", body)
    args = small(script, home, **{what: spec} if what == "reward_fn" else {})
    if what == "gold_fn":
        args = replace(args, task=replace(args.task, gold_fn=spec))
    assert ends(script, args) == 1
    sentence(
        capsys, f"{spec} raised KeyError: 'mood' at {spec.removesuffix(':score')}:8; in update 3 of 6; add  --resume"
    )
    assert steps_kept() == [1, 2]


def test_without_any_checkpoint_the_update_is_named_too(home, capsys):
    spec = function_file(home, "raises_alone", "if calls == 4:\n    raise ValueError('tired')")
    assert ends("ppo", small("ppo", home, reward_fn=spec, save_every=None)) == 1
    sentence(capsys, "in update 3 of 6; no checkpoint to go on from")


RETURNS = {  # what the function returns in update 2 → what the error says of it
    "[1.0] * 7 + [float('nan')]": "returned nan for 1 responses",
    "[float('-inf')] * 2 + [0.0] * 6": "returned -inf for 2 responses",
    "[1e39] + [0.0] * 7": "returned inf for 1 responses",
    "[1.0] * 9": "returned shape [9]",
    "[[1.0]] * 8": "returned shape [8, 1]",
    "1.0": "returned shape []",
    "[0.5, None] * 4": "returned list [0.5, None, 0.5",
    "{'good': 1.0}": "returned dict {'good': 1.0}",
    "(1.0 for _ in responses)": "returned generator",
}


@pytest.mark.parametrize("returned", RETURNS)
def test_a_function_that_returns_no_finite_scores_is_told_what_it_returned_for_which_rows(returned, home, capsys):
    body = f"open('seen', 'w').write(repr([queries, responses]))\nif calls == 3:\n    return {returned}"
    spec = function_file(home, "returns", body)
    assert ends("ppo", small("ppo", home, reward_fn=spec)) == 2
    line = sentence(capsys, f"{spec} {RETURNS[returned]}", "one finite float for each of the 8", "in update 2 of 6")
    if "for" in RETURNS[returned]:
        queries, responses = ast.literal_eval(Path("seen").read_text())
        row = {"nan": 7, "-inf": 0, "inf": 0}[RETURNS[returned].split()[1]]
        assert f"such as {responses[row][:60]!r} to {queries[row][:60]!r}" in line
    assert steps_kept() == [1]


def test_a_function_that_takes_a_minute_says_so_and_the_run_goes_on(home, capsys, monkeypatch):
    seconds, timer = [], threading.Timer

    def soon(after, *args):
        seconds.append(after)
        return timer(0.05, *args)

    monkeypatch.setattr(tasks.threading, "Timer", soon)
    spec = function_file(home, "slow", "time.sleep(0.3 * (calls == 2))")
    ppo.main(small("ppo", home, reward_fn=spec, total_episodes=8))
    said = [line for line in capsys.readouterr().out.splitlines() if "minute" in line]
    assert said == [f"{spec} has been at 8 responses for a minute; SIGTERM waits for it, Ctrl-C does not"]
    assert set(seconds) == {60} and len(read_metrics("ran")) == 1


def test_ctrl_c_ends_a_function_that_hangs_and_names_the_way_on(home, capsys):
    spec = function_file(home, "hangs", "if calls == 3:\n    signal.alarm(1)\n    time.sleep(60)")
    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    begin = time.monotonic()
    try:
        assert ends("ppo", small("ppo", home, reward_fn=spec)) == 130
    finally:
        signal.signal(signal.SIGALRM, before)
    sentence(capsys, "stopped by Ctrl-C; in update 2 of 6; add  --resume runs/ran ", "after update 1")
    assert time.monotonic() - begin < 30 and steps_kept() == [1]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_while_the_function_runs_still_writes_a_checkpoint(name, home, capsys):
    """SIGHUP is what a closed terminal sends."""
    signal.signal(getattr(signal, name), signal.SIG_DFL)  # a test's run that ended by an error has left its own
    spec = function_file(home, name, f"if calls == 3:\n    os.kill(os.getpid(), signal.{name})")
    assert ends("ppo", small("ppo", home, reward_fn=spec, save_every=None)) == 143
    assert steps_kept() == [2] and "add  --resume runs/ran  to the command" in capsys.readouterr().out
    assert signal.getsignal(getattr(signal, name)) == signal.SIG_DFL


# ------------------------------------------------------------------------------------- numbers that are not finite


def poison(script: str, home: Path) -> list[str]:
    """In the second update one row's number is no number: the rows' texts, once there are any."""
    texts, tokenizer = [], utils.load_tokenizer(settings(script, home).task, 0)[0]

    def text(row: torch.Tensor) -> str:
        return tokenizer.decode([token for token in row.tolist() if token < tiny.WORDS])[:60]

    def rollout(function: Callable, models: Any, queries: torch.Tensor, responses: torch.Tensor, *args: Any) -> Any:
        def ref(contexts: torch.Tensor, answers: torch.Tensor) -> tuple[torch.Tensor, ...]:
            out = models.ref(contexts, answers)
            out[0][(answers == responses[2]).all(dim=1), 1] = math.nan
            return out

        texts.append(text(queries[2]))
        return function(models._replace(ref=ref), queries, responses, *args)

    def step(function: Callable, model: Any, optimizer: Any, labels: Any, *args: Any) -> Any:
        texts.extend(map(text, labels.query))
        rewards = module.candidate_rewards
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "candidate_rewards", lambda *args: rewards(*args) * math.inf)
            return function(model, optimizer, labels, *args)

    def losses(function: Callable, lm: Any, rows: torch.Tensor, *args: Any) -> Any:
        loss, mask = function(lm, rows, *args)
        texts.append(text(rows[2]))
        return loss * torch.tensor([1, 1, math.nan, 1])[:, None], mask

    module = SCRIPTS[script]
    if script == "train_reward":
        at_call(module, "train_step", 2, step)
    elif script == "sft":
        at_call(module, "token_losses", 2, losses)
    else:
        at_call(module, "make_rollout", 2, rollout)
    return texts


@ALL
def test_a_number_that_is_not_finite_stops_the_run_with_its_row_and_without_the_step(script, home, capsys, monkeypatch):
    """In ppo and rloo it is one of the reference's, which whitening carries into all rows of the minibatch, and baselines
    into the query's other completion, which rloo happens to meet first."""
    texts, weights, step = poison(script, home), [], SCRIPTS[script].train_step

    def spy(model: Any, *args: Any) -> Any:
        weights[:] = [model, *(p.detach().clone() for p in model.parameters())]
        return step(model, *args)

    monkeypatch.setattr(SCRIPTS[script], "train_step", spy)
    assert ends(script, small(script, home)) == 1
    name = {"train_reward": "reward", "sft": "loss", "ppo": "ref_logprobs", "rloo": "advantages"}[script]
    line = sentence(capsys, "the norm of the gradient is nan", f"{name} is not finite either for {len(texts)} rows")
    assert texts and f"such as {', '.join(map(repr, texts))}; the step was not taken" in line
    assert "; in update 2 of 6; add  --resume runs/ran " in line and line.endswith("after update 1\n")
    model, *before = weights
    assert all(p.equal(old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(p.isfinite().all() for p in before) and steps_kept() == [1]
    assert [row["step"] for row in read_metrics("ran")] == [0]


@ALL
def test_a_run_that_diverges_stops_at_once(script, home, capsys):
    """A step of a million is finite itself; no forward behind it is."""
    assert ends(script, small(script, home, lr=1e6, save_every=None)) == 1
    line = sentence(capsys, "the norm of the gradient is", "the step was not taken", "no checkpoint to go on from")
    assert "not finite either for" in line and ("in update 1 of 6" in line or "in update 2 of 6" in line)


# ----------------------------------------------------------------------------------------------------------- folders

IN_THE_WAY = {  # flags → the file that is where a folder has to be, or nothing that can be written
    "runs": ({}, "runs", "is no folder"),
    "a sweep": (dict(run_name="sweep/one"), "runs/sweep", "is no folder"),
    "models": ({}, "models", "is no folder"),
    "output": (dict(output_dir="out/deep/model"), "out", "is no folder"),
    "output, no disk": (dict(output_dir="/proc/model"), None, "cannot be written"),
    "runs elsewhere": (dict(run_name="/proc/ran"), None, "is no folder in runs/"),
}


@ALL
@pytest.mark.parametrize("what", IN_THE_WAY)
def test_a_folder_that_cannot_be_written_is_found_before_anything_loads(
    script, what, home, capsys, monkeypatch, no_weights
):
    flags, file, why = IN_THE_WAY[what]
    if file:
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text("mine")
    monkeypatch.setattr(utils, "load_rows", lambda *a, **k: pytest.fail("rows were loaded"))
    assert ends(script, settings(script, home, **flags)) == 2
    sentence(capsys, why, file or "/proc", "out" if "output" in what else "")
    assert not file or Path(file).read_text() == "mine"


# ---------------------------------------------------------------------------------------------------------- trackers


class Server(ThreadingHTTPServer):
    """As much of W&B's as a run needs to begin; once `gone` it answers nobody."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.gone, self.asked = False, 0
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    """To one request."""

    def log_message(self, *args: Any) -> None:
        """Nothing."""

    def do_POST(self) -> None:
        """GraphQL, or a piece of the metrics' file."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        self.close_connection = True
        if self.server.gone:
            return
        project = {"id": "p", "name": "onefile-rlhf", "entity": {"id": "e", "name": "me"}}
        bucket = {"id": "b", "name": "n", "displayName": "d", "config": "{}", "project": project, "historyLineCount": 0}
        data = {"viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        data |= {"upsertBucket": {"bucket": bucket, "inserted": True}}
        answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


@pytest.fixture
def wandb_server(monkeypatch: pytest.MonkeyPatch):
    """A server that W&B is logged in to; its patience is a second or three."""
    server, timeouts = Server(), {}
    settings = wandb.Settings

    def impatient(**values: Any) -> wandb.Settings:
        timeouts.update({name: value for name, value in values.items() if "timeout" in name})
        return settings(**values | dict(init_timeout=2, finish_timeout=4))

    monkeypatch.setattr(wandb, "Settings", impatient)
    for name, value in (("BASE_URL", f"http://127.0.0.1:{server.server_port}"), ("API_KEY", "0" * 40)):
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    yield server
    server.shutdown()
    server.server_close()
    assert timeouts == dict(init_timeout=30, finish_timeout=60)


@pytest.mark.parametrize("when", ["at the start", "in the middle"])
def test_training_goes_on_without_wandb(when, home, wandb_server, monkeypatch, capfd):
    wandb_server.gone = when == "at the start"
    log = records.Run.log

    def spy(run: records.Run, step: int, *args: Any) -> None:
        wandb_server.gone |= step == 2
        log(run, step, *args)

    monkeypatch.setattr(records.Run, "log", spy)
    begin = time.monotonic()
    ppo.main(small("ppo", home, shown=tasks.Shown(track=True)))
    assert time.monotonic() - begin < 30 and wandb_server.asked > 0
    assert [row["step"] for row in read_metrics("ran")] == list(range(6))
    assert Path("runs/ran/model/model.safetensors").is_file()
    out, err = capfd.readouterr()
    assert ("W&B goes offline" in out) == (when == "at the start")
    wandb.teardown()  # as at the end of the process; its service knows this server alone, too
    kind = "offline-run" if when == "at the start" else "run"
    (data,) = Path("runs/ran/wandb").glob(f"{kind}-*/*.wandb")
    assert b"objective/kl_coef" in data.read_bytes()  # to be sent later
    pages = {path.name: path.read_text() for path in Path("runs/ran/wandb").glob("*run-*/files/media/html/*.html")}
    assert len(pages) == 2  # of both evaluations
    assert all("<td>query<td>response<td>score" in page and "Clara" in page for page in pages.values())


@pytest.mark.parametrize("name", ["log", "finish"])
def test_a_tracker_that_raises_is_passed_over(name, home, monkeypatch, capsys):
    def broken(*args: Any, **kwargs: Any) -> None:
        raise BrokenPipeError("the service is gone")

    monkeypatch.setattr(records.TensorBoardTracker, name, broken)
    ppo.main(small("ppo", home, total_episodes=16))
    assert len(read_metrics("ran")) == 2
    assert capsys.readouterr().out.count("tensorboard lacks something (BrokenPipeError: the service is gone)") == 1


# -------------------------------------------------------------------------------------------------- two runs, one name


def test_two_processes_that_begin_a_run_of_one_name_at_one_instant_have_a_folder_each(home):
    pids = []
    for lr in (0.1, 0.2):
        if not (pid := os.fork()):
            try:
                Path(f"at{lr}").touch()
                while not (Path("at0.1").exists() and Path("at0.2").exists()):
                    pass
                args = small("ppo", home, lr=lr)
                run = records.Run(args, ppo.SCRIPT, 1, [], utils.Accelerator(cpu=True))
                run.log(0, {"lr": lr}, {})
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    assert [wait(pid, 30) for pid in pids] == [0, 0]
    assert sorted(os.listdir("runs")) == ["ran", "ran-2"]
    found = []
    for name in ("ran", "ran-2"):
        (row,) = read_metrics(name)
        found.append(row["lr"])
        assert json.loads(Path("runs", name, "args.json").read_text())["lr"] == row["lr"]
    assert sorted(found) == [0.1, 0.2]


# ------------------------------------------------------------------------------------- what must not get in, or out


class Bomb:
    """Whoever unpickles it makes a folder."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("exploded",)


def bomb(path: Path) -> None:
    """A pickle in a file, or a file of torch's with one in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".bin", ".pt", ".pth"):
        torch.save({"weight": Bomb()}, path)
    else:
        path.write_bytes(pickle.dumps(Bomb()))


def test_the_bomb_works(home):
    bomb(Path("bomb.pt"))
    torch.load("bomb.pt", weights_only=False)
    assert Path("exploded").is_dir()


@ALL
def test_a_model_folder_with_a_pickle_in_place_of_its_weights_is_refused(script, home, capsys):
    Path("task/model/model.safetensors").unlink()
    bomb(Path("task/model/pytorch_model.bin"))
    assert ends(script, settings(script, home)) == 2
    sentence(capsys, "task/model holds pytorch_model.bin but no safetensors")
    assert not Path("exploded").exists()


@BOTH
def test_a_reward_folder_with_a_pickle_in_place_of_its_weights_is_refused(script, home, capsys):
    tiny.write_reward(home / "reward")
    Path("reward/model.safetensors").unlink()
    bomb(Path("reward/pytorch_model.bin"))
    assert ends(script, settings(script, home, reward_fn=None, reward_model="reward")) == 2
    sentence(capsys, "there is no reward model in reward")
    assert not Path("exploded").exists()


@ALL
def test_pickles_beside_the_weights_and_in_checkpoints_are_not_read(script, home, capsys):
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "tokenizer.pkl"):
        bomb(Path("task/model", name))
    SCRIPTS[script].main(small(script, home, save_every=3))
    bomb(Path("runs/ran/checkpoints/00000099.safetensors"))
    assert ends(script, small(script, home, save_every=3, run_name=None, resume="runs/ran")) == 2
    assert "00000099.safetensors is damaged" in capsys.readouterr().err and not Path("exploded").exists()


@pytest.mark.parametrize("name", ["rows.pkl", "rows.pt", "folder/rows.pkl", "folder/rows.tar"])
@pytest.mark.parametrize("script", ["sft", "train_reward", "ppo"])
def test_pickled_data_is_refused_unread(name, script, home, capsys):
    path = Path(name)
    bomb(path.with_suffix(".pickle") if path.suffix == ".tar" else path)
    if path.suffix == ".tar":
        with tarfile.open(path, "w") as file:
            for suffix in (".pickle", ".pyd", ".pth"):
                bomb(home / f"0{suffix}")
                file.add(f"0{suffix}")
        path.with_suffix(".pickle").unlink()
    source = str(path if path.parent == Path() else path.parent)
    args = settings(script, home)
    changed = {"label_dataset": source} if script == "train_reward" else {"query_dataset": source}
    assert ends(script, replace(args, task=replace(args.task, **changed))) == 2
    assert source in capsys.readouterr().err and not Path("exploded").exists()


@ALL
def test_a_model_that_brings_its_own_code_is_refused_and_nobody_is_asked(script, home, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    Path("task/model/mine.py").write_text("import os\nos.mkdir('exploded')\n")
    tokenizer, config = Path("task/model/tokenizer_config.json"), Path("task/model/config.json")
    brought = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | brought))
    SCRIPTS[script].main(small(script, home))  # with the library's own, which there is
    auto = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "mine", "auto_map": auto}))
    capsys.readouterr()
    assert ends(script, settings(script, home)) == 2
    sentence(capsys, "--base_model=task/model cannot be loaded", "custom code")
    assert not Path("exploded").exists()


SECRETS = {
    "HF_TOKEN": "hf_" + "Qx7" * 11,
    "WANDB_API_KEY": "ab12cd34" * 5,
    "OPENAI_API_KEY": "sk-" + "Zt9" * 12,
    "AWS_SECRET_ACCESS_KEY": "Kp5" * 12,
}


@ALL
def test_keys_of_the_environment_are_in_nothing_that_a_run_writes_or_says(script, home, monkeypatch, capfd):
    """With W&B, offline; its file holds a value that is no secret, so that it is known to be read."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    SCRIPTS[script].main(small(script, home, save_every=3, seed=7654321, shown=tasks.Shown(track=True)))
    wandb.teardown()
    texts = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    out, err = capfd.readouterr()
    texts["said"] = (out + err).encode()
    for secret in SECRETS.values():
        assert [path for path, text in texts.items() if secret.encode() in text] == []
    found = {str(path) for path, text in texts.items() if b"7654321" in text}
    assert any(name.endswith("args.json") for name in found) and any(name.endswith(".wandb") for name in found)


@pytest.mark.parametrize("what", ["reward model", "gold_fn"])
def test_what_a_run_read_and_that_changed_since_is_refused_by_name(what, home, capsys):
    """Data, labels, policy, --reward_fn: in test_resume.py."""
    tiny.write_reward(home / "reward")
    spec = function_file(home, "gold", "")
    args = small("ppo", home, reward_fn=None, reward_model="reward", total_episodes=16)
    args = replace(args, task=replace(args.task, gold_fn=spec))
    ppo.main(args)
    file = {"reward model": "reward/model.safetensors", "gold_fn": "gold.py"}[what]
    if what == "gold_fn":
        Path(file).write_text(Path(file).read_text().replace("/ 10", "/ 11"))
    else:
        weights = load_file(file)
        weights["bias"] += 1
        save_file(weights, file, {"format": "pt"})
    assert ends("ppo", replace(args, run_name=None, resume="runs/ran")) == 2
    line = sentence(capsys, "--resume goes on with runs/ran, and these would change its numbers: contents of ")
    named = {"reward model": "reward_model reward=", "gold_fn": f"gold_fn {home}/gold.py="}[what]
    assert f"contents of {named}" in line and line.count("contents of") == 1


# ------------------------------------------------------------------------------------- terminals that are odd or go away


def in_terminal(name: str, script: str) -> dict[str, Any]:
    """A run in a terminal of its own, in a fork: how it ends and what it showed. `closed` and `nohup` lose theirs as soon
    as an update is done; `head` writes into a pipe that nobody reads any more."""
    pipe = os.pipe() if name == "head" else None
    pid, master = pty.fork()  # the child's only terminal
    if not pid:
        if pipe:
            os.dup2(pipe[1], 1)
            os.close(pipe[0])  # else somebody might still read it
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.environ.update(
            {"narrow": {"COLUMNS": "20"}, "plain": {"NO_COLOR": "1"}}.get(name, {}), TERM="xterm-256color"
        )
        if name == "nohup":
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            args = settings(script, Path(), run_name=f"{name}_{script}", reward_fn="slow.py:score", eval_every=100)
            tasks.cli(SCRIPTS[script].main, lambda: args)
            os._exit(0)
        except SystemExit as error:
            os._exit(error.code)
        except BaseException:
            Path(f"{name}.log").write_text(traceback.format_exc())
        finally:
            os._exit(99)
    shown, source = b"", master
    if pipe:
        os.close(pipe[1])
        source = pipe[0]
    lost = name in ("closed", "nohup", "head")
    with suppress(OSError):  # the other side is gone
        while not (lost and Path("runs", f"{name}_{script}", "metrics.jsonl").exists()):
            if not (part := os.read(source, 2**16)):
                break
            shown += part
    os.close(source)
    return {"code": wait(pid, 60), "shown": shown.decode()}


TERMINALS = ("narrow", "plain", "closed", "nohup", "head")


@pytest.fixture(scope="module")
def terminals(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """`in_terminal` of each, in a process that has done nothing else."""
    folder = tmp_path_factory.mktemp("terminals")
    write_files(folder)
    body = (
        "import time\ndef score(queries, responses):\n    time.sleep(0.1)\n    return [len(r) / 9 for r in responses]\n"
    )
    (folder / "slow.py").write_text(body)
    env = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"ACCELERATE_USE_CPU": "true"}
    env["PYTHONPATH"] = os.pathsep.join([str(utils.ROOT), str(Path(__file__).parent)])
    command = [sys.executable, __file__, "terminals"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(folder=folder, **json.loads((folder / "terminals.json").read_text()))


def visible(shown: str) -> list[str]:
    """The lines of a terminal, without what colours them and moves its cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "\n").splitlines()


def rows_of(terminals: SimpleNamespace, name: str) -> list[int]:
    """Updates in the metrics of a run."""
    lines = (terminals.folder / "runs" / f"{name}_ppo" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize("name", ["narrow", "plain"])
def test_progress_is_readable_in_a_narrow_terminal_and_without_colours(name, terminals):
    """A bar, or lines where there is no room for one; the last update and the texts are there."""
    run = getattr(terminals, name)
    lines = visible(run["shown"])
    assert run["code"] == 0 and any("6/6" in line and "score" in line for line in lines), lines
    assert sum("Clara found the sea." in line for line in lines) >= 2  # of both evaluations
    if name == "plain":
        colour = re.compile(r"\x1b\[[0-9;]*(3[0-7]|38;[0-9;]+|9[0-7])m")
        assert not colour.search(run["shown"]) and colour.search(terminals.nohup["shown"])
        assert run["shown"].rindex("\x1b[?25h") > run["shown"].rindex("\x1b[?25l")  # the cursor is back


def test_a_closed_terminal_leaves_a_checkpoint(terminals):
    assert terminals.closed["code"] == 143
    done = len(rows_of(terminals, "closed"))
    (path,) = (terminals.folder / "runs/closed_ppo/checkpoints").glob("*.safetensors")
    assert records.read_checkpoint(path)[1]["step"] == done < 6


@pytest.mark.parametrize("name", ["nohup", "head"])
def test_a_run_outlives_a_terminal_under_nohup_and_the_reader_of_its_pipe(name, terminals):
    assert getattr(terminals, name)["code"] == 0, getattr(terminals, name)
    assert rows_of(terminals, name) == [0, 1, 2, 3, 4, 5, 6]
    assert (terminals.folder / f"runs/{name}_ppo/model/model.safetensors").is_file()
    assert (terminals.folder / f"runs/{name}_ppo/curves.png").is_file()


# ------------------------------------------------------------------------------------------------- two processes


def launch(folder: Path, *command: str) -> SimpleNamespace:
    """A launcher's command: its exit code, what it said, when it ended."""
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(utils.ROOT), str(Path(__file__).parent)])
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)
    return SimpleNamespace(code=done.returncode, said=done.stdout + done.stderr, at=time.time())


def test_a_rank_that_dies_ends_the_others_in_seconds(home):
    """Process 1 is killed in its second update; what the first one logged is on the disk."""
    body = "if calls == 3 and os.environ['RANK'] == '1':\n    open('killed', 'w')\n    os.kill(os.getpid(), signal.SIGKILL)"
    flags = dict(base_model="task/model", query_dataset="task/stories.txt", query_length=8, response_length=5)
    flags |= dict(truncate_after=2, batch_size=8, total_episodes=48, num_ppo_epochs=1, eval_queries=4, run_name="ran")
    flags |= dict(reward_fn=function_file(home, "kills", body), save_every=1)
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    done = launch(home, *accelerate, str(utils.ROOT / "ppo.py"), "--task", "sentiment", *words)
    assert done.code != 0 and done.at - Path("killed").stat().st_mtime < 20, done.said
    assert [row["step"] for row in read_metrics("ran")] == [0] and steps_kept() == [1]


def test_a_row_of_another_process_is_named_by_the_first_and_both_end(home):
    """A reference that gives no number to process 1 in its second update. Both would wait a day for each other."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    begin = time.time()
    done = launch(home, *torchrun, __file__, "row")
    assert done.code != 0 and done.at - begin < 60, done.said
    row = Path("row").read_text()
    words = f"ref_logprobs is not finite either for 1 rows, such as {row!r}; the step was not taken"
    assert re.search(
        rf"test_bad_days.py: error: .*{re.escape(words)}.*in update 2 of 6; add  --resume runs/ran", done.said
    )
    assert Path("patience").read_text() == "1 day, 0:00:00" and steps_kept() == [1]


def other_row() -> None:
    """The run of that test, on each of its processes."""
    args = small("ppo", Path(), reward_fn="reward.py:score")
    if os.environ["RANK"] == "1":
        texts = poison("ppo", Path())
        check = utils.check_gradients

        def spy(*args: Any, **numbers: Any) -> None:
            if texts:
                Path("row").write_text(texts[0])
            group = torch.distributed.distributed_c10d._get_default_group()
            Path("patience").write_text(str(group._get_backend(torch.device("cpu")).options._timeout))
            check(*args, **numbers)

        utils.check_gradients = spy
    tasks.cli(ppo.main, lambda: args)


if __name__ == "__main__" and "row" in sys.argv:
    other_row()
elif __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    Path("terminals.json").write_text(json.dumps({name: in_terminal(name, "ppo") for name in TERMINALS}))
