"""A device that is not the host, played on a CPU: its tensors have their numbers, and refuse to be
mixed with tensors of the host. What a GPU would stop at, these tests stop at, and they count how
often the host waits for the device.
"""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import ppo
import rloo
import sft
import train_reward
from machinery import distributed, unpadding
from machinery.labels import Labels

HERE = torch.device("cpu")
AWAY = torch.device("meta")  # a device that autograd knows; its tensors here have numbers
aten = torch.ops.aten
INDEXING = (
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
)
READS = (  # operations whose result the host needs: a number, or a size
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_dim.default,
)


class Far(Tensor):
    """A tensor elsewhere; `near` are its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near: Tensor):
        form = dict(strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype)
        far = torch.Tensor._make_wrapper_subclass(cls, near.shape, device=AWAY, **form)
        far.near = near
        return far

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return Elsewhere.current.call(function, args, kwargs or {})


def tensors(*tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class Elsewhere(TorchDispatchMode):
    """Inside, tensors can be elsewhere; `reads` are the operations that made the host wait."""

    current: "Elsewhere"

    def __enter__(self):
        self.reads, Elsewhere.current = [], self
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.call(function, args, kwargs or {})

    def call(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`function` of the numbers. Raises `RuntimeError` for what a GPU would refuse."""
        far = any(isinstance(x, Far) for x in tensors(args, kwargs))
        moves = function in (aten._to_copy.default, aten.copy_.default)
        checked = args[:1] + args[2:] if function in INDEXING else args  # the host's may be indices
        strangers = [x for x in tensors(checked, kwargs) if not isinstance(x, Far) and x.dim()]
        if far and strangers and not moves:
            shapes = [list(x.shape) for x in strangers]
            raise RuntimeError(f"{function} of tensors here and elsewhere: {shapes} is here")
        device = kwargs.get("device")
        here = device is not None and torch.device(device) != AWAY
        if function is aten.copy_.default:
            here = not isinstance(args[0], Far)
        masks = tensors(args[1]) if function in INDEXING else []
        by_mask = any(isinstance(x, Far) and x.dtype == torch.bool for x in masks)
        if far and (moves and here or function in READS or by_mask):
            self.reads.append(function)
        if device is not None:
            kwargs = kwargs | {"device": "cpu"}
        args, kwargs = tree_map(lambda x: x.near if isinstance(x, Far) else x, (args, kwargs))
        out = function(*args, **kwargs)
        away = not here and (far or device is not None)
        return tree_map(lambda x: Far(x) if away and isinstance(x, Tensor) else x, out)


class Accelerator(SimpleNamespace):
    """One process without autocast on `device`, where its models are already."""

    num_processes, process_index, is_fsdp2 = 1, 0, False

    def prepare(self, *objects: Any) -> tuple:
        return objects

    def unwrap_model(self, model: Any) -> Any:
        return model

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip_grad_norm_(self, parameters: Any, max_norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def no_sync(self, model: Any) -> Any:
        return nullcontext()

    def autocast(self) -> Any:
        return torch.profiler.record_function("")  # a context and a decorator without an effect


@pytest.fixture
def elsewhere(monkeypatch):
    """`use(device)` is where scripts run from then on.

    What there is none of elsewhere: autocast, random numbers and a direct way for data.
    """
    rand = torch.rand

    def rand_here(*size, device, generator, **options):
        generator = torch.Generator().manual_seed(1)
        return rand(*size, **options, generator=generator).to(device)

    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    monkeypatch.setattr(torch, "rand", rand_here)
    for name in ("tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, partial(make_and_move, getattr(torch, name)))
    for script in (ppo, rloo):
        make = lambda seed, step, device: SimpleNamespace(device=device)  # noqa: E731
        monkeypatch.setattr(script, "generator", make)

    def use(device: torch.device) -> Any:
        accelerator = Accelerator(device=device)
        monkeypatch.setattr(distributed, "start", lambda args: accelerator)
        return Elsewhere() if device == AWAY else nullcontext()

    return use


def make_and_move(make: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
    """`torch.tensor` makes a tensor of the meta device without numbers."""
    return make(*args, **options) if device is None else make(*args, **options).to(device)


def moved(model: Any, device: torch.device) -> Any:
    """`model.to(device)`; weights elsewhere are new ones, and have to be tied again."""
    model = model.to(device)
    for module in model.modules():
        if hasattr(module, "tie_weights"):
            module.tie_weights()
    return model


def test_tensors_here_and_elsewhere_do_not_mix(elsewhere):
    """What the other tests rest on, by hand."""
    with Elsewhere() as mode:
        x = torch.arange(4.0).to(AWAY)
        assert x.device == (x + 1).device == torch.zeros(2, device=AWAY).device == AWAY
        with pytest.raises(RuntimeError, match="here and elsewhere"):
            x + torch.ones(4)
        with pytest.raises(RuntimeError, match="here and elsewhere"):
            torch.where(torch.ones(4).bool(), x, 0)
        assert (x * torch.tensor(2.0)).device == AWAY  # a number may be the host's
        assert x[np.array([1, 2])].device == AWAY and not mode.reads
        assert x[2].item() == 2 and x.cpu().tolist() == [0, 1, 2, 3] and len(mode.reads) == 2
        w = torch.nn.Parameter(torch.ones(4).to(AWAY))
        (w * x).sum().backward()
        assert w.grad.device == AWAY and w.grad.cpu().tolist() == [0, 1, 2, 3]
        x[x > 1] = 0
        assert len(mode.reads) == 4


def test_models_elsewhere_are_unpadded(elsewhere):
    for kind in ("gpt2", "gpt_neox", "llama", "qwen2", "mistral"):
        lm = tiny.make_lm(kind)
        with elsewhere(AWAY):
            assert unpadding.find_max_length(moved(lm, AWAY).base_model) > 0


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Tensors elsewhere have the numbers of those here."""
    assert len(found) == len(expected) > 20
    for x, y in zip(found, expected, strict=True):
        assert x.device == AWAY and y.device == HERE
        torch.testing.assert_close(x.near, y, atol=1e-4, rtol=1e-4)


def update(script: Any, kind: str, device: torch.device, length: int, use: Any) -> tuple:
    """One update of an EOS task: tensors, metrics, and how often sampling and all of it read."""
    reads, rollouts, sample, make_rollout = [], [], script.sample_in_batches, script.make_rollout

    def spy_sample(*args):
        before = len(Elsewhere.current.reads) if device == AWAY else 0
        responses = sample(*args)
        reads.append(len(Elsewhere.current.reads) - before if device == AWAY else 0)
        return responses

    def spy_rollout(*args):
        rollouts.append(make_rollout(*args))
        return rollouts[-1]

    spies = dict(sample_in_batches=spy_sample, make_rollout=spy_rollout, AdamTF=tiny.Recorder)
    task = tiny.make_task(eos_task=True, response_length=length)
    flags = dict(total_episodes=8, num_ppo_epochs=1, max_grad_norm=1.0, micro_batch_tokens=4096)
    args = tiny.small_args(script, task, **flags)
    with use(device) as mode:
        policy, ref = (
            moved(tiny.make_policy(kind, seed, script=script), device) for seed in (0, 3)
        )
        reward = tiny.reward_function(moved(tiny.make_reward(kind), device), 4096)
        ids = tiny.utils.TokenIds(tiny.PAD, tiny.EOS, [7], [8, 9])
        inputs = dict(ref=ref, reward=reward, ids=ids)
        run = tiny.run_episodes(script, args, policy, **inputs, **spies)
    found = [*rollouts[1], *sum(run.optimizer.gradients, [])]
    return found, run.metrics[0], reads, len(mode.reads) if device == AWAY else 0


@pytest.mark.parametrize(
    "script, kind",
    [(ppo, "gpt2"), (ppo, "llama"), (rloo, "gpt_neox"), (rloo, "falcon_alibi")],
)
def test_an_update_elsewhere_makes_the_same_numbers_without_waiting_for_tokens(
    script, kind, elsewhere
):
    """The host waits as often for responses of 4 tokens as for those of 7."""
    expected, metrics, *_ = update(script, kind, HERE, 7, elsewhere)
    found, metrics_away, *reads = update(script, kind, AWAY, 7, elsewhere)
    assert_same(found, expected)
    for name in (name for name in metrics if not name.startswith("time/")):
        assert metrics_away[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-4), name
    *_, sampling, total = update(script, kind, AWAY, 4, elsewhere)
    assert reads == [sampling, total] and sampling[1] > 0


@pytest.mark.parametrize("script", [ppo, rloo])
def test_the_host_waits_at_most_twice_per_micro_batch(script, elsewhere):
    """Once for the lengths of the sequences, once for the number of response tokens."""
    reads, loss = [], "ppo_losses" if script is ppo else "rloo_loss"
    compute_loss = getattr(script, loss)

    def spy(*args):
        reads.append(len(Elsewhere.current.reads))
        return compute_loss(*args)

    flags = dict(total_episodes=8, num_ppo_epochs=1, num_minibatches=1, micro_batch_tokens=20)
    args = tiny.small_args(script, tiny.make_task(eos_task=True), **flags)
    with elsewhere(AWAY):
        policy, ref = (moved(tiny.make_policy(seed=seed, script=script), AWAY) for seed in (0, 3))
        reward = tiny.reward_function(moved(tiny.make_reward(), AWAY), 4096)
        ids = tiny.utils.TokenIds(tiny.PAD, tiny.EOS, [], [])
        inputs = dict(ref=ref, reward=reward, ids=ids, sample_in_batches=script.sample_in_batches)
        tiny.run_episodes(script, args, policy, **inputs, **{loss: spy, "AdamTF": tiny.Recorder})
    assert len(reads) == 4 and set(np.diff(reads)) == {2}


def test_a_reward_model_is_trained_elsewhere_to_the_same_numbers(elsewhere):
    def train(device: torch.device) -> tuple[list[Tensor], list[float]]:
        rng = np.random.default_rng(0)
        queries = [rng.integers(1, tiny.PAD, n) for n in (8, 2, 5, 1, 7, 3)]
        responses = [[rng.integers(1, tiny.PAD, 5) for _ in range(4)] for _ in queries]
        sizes = dict(num_labels=4, batch_size=4, num_heldout=2, micro_batch_tokens=40)
        args = train_reward.Args(task=tiny.make_task(), **sizes)
        rewards = []
        spies = dict(AdamTF=tiny.Recorder, report=lambda run, *found: rewards.extend(found) or {})
        with elsewhere(device):
            labels, model = Labels(queries, responses, np.arange(6) % 4), tiny.make_reward()
            run = tiny.run_reward_training(args, moved(model, device), labels, **spies)
        metrics = [x for line in run.metrics for name, x in line.items() if "time/" not in name]
        return [*rewards, *run.optimizer.gradients[0]], metrics

    (found, metrics), (expected, expected_metrics) = train(AWAY), train(HERE)
    assert_same(found, expected)
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-4)


def test_a_language_model_is_tuned_elsewhere_to_the_same_numbers(elsewhere, monkeypatch):
    def tune(device: torch.device) -> tuple[list[Tensor], list[float]]:
        args = sft.Args(task=tiny.make_task(), micro_batch_tokens=40, batch_size=4, num_heldout=2)
        rows = tiny.make_contexts([13, 7, 10, 9, 12, 8], 13)
        with elsewhere(device):
            run = tiny.run_sft(args, moved(tiny.make_lm(), device), rows)
        metrics = [x for name, x in run.metrics[0].items() if "time/" not in name]
        return run.optimizer.gradients[0], metrics

    monkeypatch.setattr(torch.optim, "AdamW", tiny.Recorder)
    (found, metrics), (expected, expected_metrics) = tune(AWAY), tune(HERE)
    assert_same(found, expected)
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-4)
