"""Fixtures that more than one test file uses. All tests run on a CPU, without a network."""

import os

os.environ["ACCELERATE_USE_CPU"] = "true"  # before accelerate is imported: also where there is a GPU
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are too small for more

import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import tiny
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import ppo
import sft
import train_reward
import utils


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
def task(tmp_path: Path) -> utils.Task:
    """A task of small local files."""
    return tiny.write_task(tmp_path / "task")


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would load a model's weights fails: what passes with this raised its error before."""

    def refuse(*args, **kwargs):
        raise AssertionError("a model's weights were loaded before the input was checked")

    monkeypatch.setattr(utils, "load_lm", refuse)
    monkeypatch.setattr(utils.RewardModel, "from_pretrained", refuse)
    monkeypatch.setattr(utils.RewardModel, "from_lm", refuse)


def read_metrics(name: str) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """sft, train_reward and ppo, run once from end to end on tiny files: arguments, metrics and what was seen."""
    folder = tmp_path_factory.mktemp("runs")
    seen = SimpleNamespace(folder=folder, epochs=[], rollouts=[], steps={})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        optimise, step = ppo.optimise, utils.AdamTF.step

        def spy_optimise(policy, optimizer, rollout, epochs, *rest):
            seen.rollouts.append(rollout)
            seen.epochs.append(epochs)
            seen.ppo_optimizer = optimizer
            return optimise(policy, optimizer, rollout, epochs, *rest)

        def spy_step(self, closure=None):
            seen.steps[id(self)] = seen.steps.get(id(self), 0) + 1
            return step(self, closure)

        patch.setattr(ppo, "optimise", spy_optimise)
        patch.setattr(utils.AdamTF, "step", spy_step)
        task = tiny.write_task(folder / "task")
        common = dict(task=task, output_dir="sft", run_name="sft")
        seen.sft = sft.Args(**common, num_heldout=6, batch_size=2, block_size=10, eval_every=3, lr=1e-3)
        sft.main(seen.sft)
        task = tiny.replace(task, base_model="sft", truncate_token=None)
        seen.train_reward = train_reward.Args(
            task=task,
            num_labels=12,
            batch_size=4,
            micro_batch_size=8,
            lr=1e-3,
            normalize_samples=5,
            rollout_batch_size=4,
            output_dir="reward",
            run_name="train_reward",
        )
        train_reward.main(seen.train_reward)
        seen.reward_steps, seen.steps = list(seen.steps.values()), {}
        seen.ppo = tiny.make_args(
            task, total_episodes=20, reward_model="reward", output_dir="ppo", run_name="ppo", sample_every=2
        )
        ppo.main(seen.ppo)
        seen.ppo_steps = list(seen.steps.values())
        seen.metrics = {name: read_metrics(name) for name in ("sft", "train_reward", "ppo")}
    return seen
