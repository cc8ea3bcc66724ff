"""Fixtures that more than one test file uses. All tests run on a CPU, without a network."""

import os
import signal

os.environ["ACCELERATE_USE_CPU"] = "true"  # before accelerate is imported: also where there is a GPU
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are too small for more

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import datasets
import pytest
import tiny
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import ppo
import rloo
import sft
import tasks
import train_reward
import utils

for number, action in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    signal.signal(number, action)  # behind `nohup` or `&` both are ignored, and so they would be in what tests start


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """What data sets are turned into stays out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture
def accelerator() -> Accelerator:
    """One process in fp32."""
    return Accelerator(cpu=True)


@pytest.fixture
def bf16_accelerator():
    """One process in bf16 autocast; the libraries' shared state is as before afterwards."""
    AcceleratorState._reset_state(True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(True)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A random tiny GPT-2 with the synthetic task's tokenizer."""
    return tiny.write_model(tmp_path / "model")


@pytest.fixture
def task(tmp_path: Path) -> tasks.Task:
    """A task of small local files."""
    return tiny.write_task(tmp_path / "task")


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would load a model's weights fails: what passes with this raised its error before."""

    def refuse(*args, **kwargs):
        raise AssertionError("a model's weights were loaded before the input was checked")

    monkeypatch.setattr(utils, "load_lm", refuse)
    monkeypatch.setattr(utils.RewardModel, "from_pretrained", refuse)
    monkeypatch.setattr(train_reward, "new_reward_model", refuse)


def read_metrics(name: str) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl, without the one behind the last update, which is an evaluation alone."""
    lines = [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if not all(key == "step" or key.startswith("eval/") for key in line)]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """sft, train_reward, ppo and rloo, run once from end to end on tiny files: arguments, metrics and what was seen.
    `epochs`, `rollouts`, `ppo_optimizer`, `ppo_steps` are ppo's; `of["ppo"]` and `of["rloo"]` hold the same of both."""
    folder = tmp_path_factory.mktemp("runs")
    seen = SimpleNamespace(folder=folder, of={})
    counts: dict[int, int] = {}

    def spy_on(script: ModuleType, patch: pytest.MonkeyPatch) -> SimpleNamespace:
        """Rollouts, orders of the epochs (without the cut that `make_rollout` makes) and optimizer of a run."""
        mine = SimpleNamespace(rollouts=[], epochs=[], optimizer=None, looping=False)
        make_rollout, minibatches, train_step = script.make_rollout, script.minibatches, script.train_step

        def spy_rollout(*args):
            mine.looping = False
            rollout, score = make_rollout(*args)
            mine.looping = True
            mine.rollouts.append(rollout)
            mine.epochs.append([])
            return rollout, score

        def spy_minibatches(order, args):
            if mine.looping:
                mine.epochs[-1].append(order)
            return minibatches(order, args)

        def spy_train_step(policy, optimizer, *rest):
            mine.optimizer = optimizer
            return train_step(policy, optimizer, *rest)

        patch.setattr(script, "make_rollout", spy_rollout)
        patch.setattr(script, "minibatches", spy_minibatches)
        patch.setattr(script, "train_step", spy_train_step)
        return mine

    def count_steps(script: ModuleType, patch: pytest.MonkeyPatch) -> None:
        step = script.AdamTF.step

        def spy_step(self, closure=None):
            counts[id(self)] = counts.get(id(self), 0) + 1
            return step(self, closure)

        patch.setattr(script.AdamTF, "step", spy_step)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for script in (train_reward, ppo, rloo):
            count_steps(script, patch)
        task = tiny.write_task(folder / "task")
        common = dict(task=task, output_dir="sft", run_name="sft")
        seen.sft = sft.Args(**common, num_heldout=6, batch_size=2, block_size=10, eval_every=3, lr=1e-3)
        sft.main(seen.sft)
        task = tiny.replace(task, base_model="sft", truncate_token=None)
        seen.train_reward = train_reward.Args(
            task=task,
            num_labels=12,
            batch_size=4,
            micro_batch_tokens=96,
            lr=1e-3,
            normalize_samples=5,
            rollout_batch_size=4,
            output_dir="reward",
            run_name="train_reward",
        )
        train_reward.main(seen.train_reward)
        seen.reward_steps = list(counts.values())
        for script, name in ((ppo, "ppo"), (rloo, "rloo")):
            counts.clear()
            common = dict(total_episodes=20, reward_model="reward", output_dir=name, run_name=name, eval_every=2)
            args, mine = tiny.make_args(task, script, **common), spy_on(script, patch)
            script.main(args)
            mine.args, mine.steps = args, list(counts.values())
            seen.of[name] = mine
        seen.ppo, seen.rollouts, seen.epochs = (getattr(seen.of["ppo"], x) for x in ("args", "rollouts", "epochs"))
        seen.ppo_optimizer, seen.ppo_steps = seen.of["ppo"].optimizer, seen.of["ppo"].steps
        seen.metrics = {name: read_metrics(name) for name in ("sft", "train_reward", "ppo", "rloo")}
    return seen
