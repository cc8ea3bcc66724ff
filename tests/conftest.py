"""Fixtures that more than one test file uses. All tests run on a CPU, without a network."""

import os
import signal
import sys

os.environ["ACCELERATE_USE_CPU"] = "true"  # before accelerate is imported; also where a GPU is
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are too small for more

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

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
collect_ignore = []
if os.name == "nt":
    posix = "diffs docs experiments launch pitfalls progress readme resume rewards runs"
    collect_ignore += [f"test_{name}.py" for name in posix.split()]
    collect_ignore.append("benchmarks")
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


def settings(script, **changes):
    """Flags of six updates or steps in which kl_coef, Adam's moments, gain and bias all move."""
    values = dict(
        base_model="task/model",
        query_dataset="task/stories.txt",
        label_dataset="task/labels.json",
        truncate_token=None,
        lr=1e-2,
    )
    if script == "sft":
        values.update(num_queries=18, eval_every=2)
    elif script != "train_reward":
        values.update(total_episodes=48, eval_every=2, kl_horizon=20, reward_fn="reward.py:score")
    values.update(changes)
    return tiny.make_args(script=SCRIPTS[script], **values)


def write_files(folder):
    tiny.write_task(folder / "task")
    (folder / "reward.py").write_text(REWARD)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def home(tmp_path, monkeypatch):
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
def own_cache(tmp_path_factory):
    """What data sets are turned into stays out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture
def bf16_accelerator():
    return Accelerator(cpu=True, mixed_precision="bf16")


@pytest.fixture
def task(tmp_path):
    return tiny.write_task(tmp_path / "task")


@pytest.fixture
def no_weights(monkeypatch):
    """Loading a model's weights fails: a test that passes raised its error before."""

    def refuse(*args, **kwargs):
        raise AssertionError("a model's weights were loaded before the input was checked")

    for script in SCRIPTS.values():
        monkeypatch.setattr(script, "load_lm", refuse)
    monkeypatch.setattr(train_reward, "load_model", refuse)


@pytest.fixture
def start(task, here):
    """A function that runs a script on tiny files, with other values of its flags."""
    reward_model = tiny.write_reward(here / "reward")

    def start(script, **changes):
        changes.setdefault("truncate_token", ".")
        if script in ("ppo", "rloo"):
            changes.setdefault("reward_model", reward_model)
            changes.setdefault("reward_fn", None)
        SCRIPTS[script].main(settings(script, **changes))

    return start


def ask(patch, url, cache):
    """Let the client ask this hub, with an empty cache."""
    client = huggingface_hub.constants
    patch.setattr(client, "ENDPOINT", url)
    patch.setattr(client, "HF_HUB_CACHE", str(cache))
    patch.setattr(client, "HF_HUB_OFFLINE", False)
    patch.setattr(client, "HF_HUB_DISABLE_XET", True)
    address = url + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(client, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    patch.setattr(datasets.config, "HF_ENDPOINT", url)
    patch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)


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


def without_times(rows):
    """What two runs of the same flags have in common."""
    return [{name: x for name, x in row.items() if "time/" not in name} for row in rows]


def run_script(name, words):
    """Run a script with flags as on the command line."""
    script = SCRIPTS[name]
    script.main(cli.parse_args(script.Args, script.PRESETS, words))


def read_lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def read_args(folder):
    """What a run has recorded."""
    return json.loads(Path(folder, "args.json").read_text())


def read_metrics(name):
    """The lines of a run's metrics.jsonl, without the evaluation after the last update."""
    lines = read_lines(Path("runs", name, "metrics.jsonl"))
    return [line for line in lines if not all(key.startswith(("step", "eval/")) for key in line)]


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """`args`, `metrics` and `epochs` of one run of each script on tiny files."""
    folder = tmp_path_factory.mktemp("runs")
    seen = SimpleNamespace(folder=folder, args={}, epochs={}, metrics={})
    rl = dict(total_episodes=20, eval_every=2, reward_model="train_reward")
    sizes = {
        "sft": dict(num_heldout=6, batch_size=2, block_size=10, eval_every=3, num_epochs=1),
        "train_reward": dict(batch_size=4, micro_batch_tokens=96, normalize_samples=5),
        "ppo": rl,
        "rloo": rl,
    }
    task = tiny.write_task(folder / "task")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, size in sizes.items():
            script = SCRIPTS[name]
            args = tiny.make_args(task, script, output_dir=name, run_name=name, lr=1e-3, **size)
            if name in ("ppo", "rloo"):
                seen.epochs[name] = []
                spy = tiny.keep_epochs(script, args, seen.epochs[name])
                patch.setattr(script, "epoch_order", spy)
            script.main(args)
            seen.args[name] = args
            seen.metrics[name] = read_metrics(name)
            task = replace(task, base_model="sft", truncate_token=None)
    return seen
