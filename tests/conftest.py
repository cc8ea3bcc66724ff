"""Fixtures that more than one test file uses. All tests run on a CPU, without a network."""

import os
import signal
import sys

os.environ["ACCELERATE_USE_CPU"] = "true"  # before accelerate is imported; also where a GPU is
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are too small for more

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import formats
import huggingface_hub
import pytest
import tiny
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hub import Hub
from transformers import AutoTokenizer

import ppo
import rloo
import sft
import train_reward
from data import tasks
from machinery import cli, sources
from machinery.runs import SIGNALS

# They fork, make pseudo-terminals, limit resources, or call bash and patch.
UNIX = ["diffs", "docs", "experiments", "launch", "pitfalls", "progress", "readme"]
UNIX += ["resume", "rewards", "runs"]
collect_ignore = [f"test_{x}.py" for x in UNIX] + ["benchmarks"] if os.name == "nt" else []
# `nohup` and `&` ignore these signals, and so would the processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if os.name != "nt":  # torch makes its thread pool anew in a fork; two threads at once would abort
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
SCRIPTS = {"ppo": ppo, "rloo": rloo, "train_reward": train_reward, "sft": sft}
REWARD = """
def score(queries, responses, step=0):
    return [response.count('e') / 4 + step / 8 for response in responses]
"""


def settings(script: str, **changes: Any) -> Any:
    """Flags of six updates or steps in which kl_coef, Adam's moments, gain and bias all move."""
    values = dict(base_model="task/model", query_dataset="task/stories.txt", truncate_token=None)
    values |= dict(label_dataset="task/labels.json", lr=1e-2)
    if script == "sft":
        values |= dict(num_queries=18, eval_every=2)
    elif script != "train_reward":
        values |= dict(total_episodes=48, eval_every=2, reward_fn="reward.py:score", kl_horizon=20)
    return tiny.make_args(script=SCRIPTS[script], **values | changes)


def write_files(folder: Path) -> None:
    tiny.write_task(folder / "task")
    (folder / "reward.py").write_text(REWARD)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of `settings` in the working folder of a user who is not logged in."""
    folder = tmp_path / "jürgen" / "work"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    write_files(folder)
    return folder


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    """A run imports functions once, has one precision, and leaves its signal handlers on an error."""
    AcceleratorState._reset_state(True)
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)}
    sources.import_file.cache_clear()
    cli.rescues.clear()
    cli.saved[:] = ["nothing is saved yet"]
    yield
    AcceleratorState._reset_state(True)  # fixtures of a module are made before the next reset
    sources.PINNED.clear()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """What data sets are turned into stays out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.fixture
def bf16_accelerator():
    return Accelerator(cpu=True, mixed_precision="bf16")


@pytest.fixture
def task(tmp_path: Path) -> tasks.Task:
    return tiny.write_task(tmp_path / "task")


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model's weights fails: a test that passes raised its error before."""

    def refuse(*args, **kwargs):
        raise AssertionError("a model's weights were loaded before the input was checked")

    for script in SCRIPTS.values():
        monkeypatch.setattr(script, "load_lm", refuse)
    monkeypatch.setattr(train_reward, "load_model", refuse)


@pytest.fixture
def start(task: tasks.Task, here: Path):
    """A function that runs a script on tiny files, with other values of its flags."""
    reward_model = tiny.write_reward(here / "reward")

    def start(script: str, **changes) -> None:
        model = dict(reward_model=reward_model) if script in ("ppo", "rloo") else {}
        files = model | dict(reward_fn=None, truncate_token=".")
        SCRIPTS[script].main(settings(script, **files | changes))

    return start


def ask(patch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Let the client ask this hub, with an empty cache."""
    own = dict(ENDPOINT=url, HF_HUB_DISABLE_XET=True, HF_HUB_OFFLINE=False, HF_HUB_CACHE=str(cache))
    own["HUGGINGFACE_CO_URL_TEMPLATE"] = url + "/{repo_id}/resolve/{revision}/{filename}"
    of_datasets = dict(HF_ENDPOINT=url, HF_HUB_OFFLINE=False, HF_DATASETS_CACHE=cache)
    for module, values in ((huggingface_hub.constants, own), (datasets.config, of_datasets)):
        for name, value in values.items():
            patch.setattr(module, name, value)


@pytest.fixture
def unreachable_hub(monkeypatch, tmp_path):
    ask(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with Hub(tmp_path / "hub") as hub:
        ask(monkeypatch, hub.url, tmp_path / "cache")
        yield hub
        hub.shutdown()


@pytest.fixture(scope="session")
def gpt2():
    return formats.gpt2_tokenizer()


@pytest.fixture
def hers():
    """The synthetic task's tokenizer: another vocabulary than GPT-2's."""
    return AutoTokenizer.from_pretrained(tasks.SYNTHETIC / "model")


@pytest.fixture
def chat(hers):
    hers.chat_template = formats.CHATML
    return hers


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What two runs of the same flags have in common."""
    return [{name: x for name, x in row.items() if "time/" not in name} for row in rows]


def read_metrics(name: str) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl, without the evaluation after the last update."""
    text = Path("runs", name, "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if not all(key.startswith(("step", "eval/")) for key in line)]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """`args`, `metrics` and `epochs` of one run of each script on tiny files."""
    folder = tmp_path_factory.mktemp("runs")
    seen = SimpleNamespace(folder=folder, args={}, epochs={})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        task = tiny.write_task(folder / "task")
        labels = dict(batch_size=4, micro_batch_tokens=96, normalize_samples=5)
        rl = dict(total_episodes=20, eval_every=2, reward_model="train_reward")
        sizes = dict(train_reward=labels, ppo=rl, rloo=rl)
        sizes["sft"] = dict(num_heldout=6, batch_size=2, block_size=10, eval_every=3, num_epochs=1)
        for name in ("sft", "train_reward", "ppo", "rloo"):
            script = SCRIPTS[name]
            files = dict(output_dir=name, run_name=name)
            seen.args[name] = tiny.make_args(task, script, **sizes[name] | files, lr=1e-3)
            if name in ("ppo", "rloo"):
                seen.epochs[name] = []
                spy = tiny.keep_epochs(script, seen.args[name], seen.epochs[name])
                patch.setattr(script, "epoch_order", spy)
            script.main(seen.args[name])
            task = tiny.replace(task, base_model="sft", truncate_token=None)
        seen.metrics = {name: read_metrics(name) for name in seen.args}
    return seen
