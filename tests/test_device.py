"""A device that is not the host, played on a CPU: its tensors have numbers, and refuse to be mixed
with the host's. What a GPU would refuse fails here, and waits of the host are counted."""

import copy
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from conftest import without_times
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import ppo
import rloo
from machinery import decoding, distributed
from machinery.models import Float32Linear

HERE = torch.device("cpu")
AWAY = torch.device("meta")  # a device that autograd knows; its tensors here have numbers
aten = torch.ops.aten
CONTEXTS = tiny.make_contexts([8, 3, 5], 8)
INDEXING = {aten.index.Tensor, aten._index_put_impl_.default}
INDEXING |= {aten.index_put_.default, aten.index_put.default}
# Operations whose result the host needs: a number, or a size
READS = {aten._local_scalar_dense.default, aten.nonzero.default}
READS |= {aten.masked_select.default, aten.unique_dim.default, aten.masked_scatter_backward.default}
MODELS = [(ppo, "gpt2"), (ppo, "llama"), (rloo, "gpt_neox"), (rloo, "falcon_alibi")]
FROZEN = [*(kind for kind in tiny.KINDS if "falcon" not in kind), "gptj", "opt", "gemma2"]


class Far(torch.Tensor):
    """A tensor elsewhere; `near` are its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near: torch.Tensor):
        form = dict(strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype)
        far = torch.Tensor._make_wrapper_subclass(cls, near.shape, device=AWAY, **form)
        far.near = near
        return far

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return Elsewhere.current.call(function, args, kwargs or {})


def tensors(*tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Elsewhere(TorchDispatchMode):
    """Inside, tensors can be elsewhere; `reads` are the operations that made the host wait."""

    current: "Elsewhere"

    def __enter__(self):
        self.reads = []
        Elsewhere.current = self
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.call(function, args, kwargs or {})

    def call(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`function` of the numbers. Raises `RuntimeError` for what a GPU would refuse."""
        far = any(isinstance(x, Far) for x in tensors(args, kwargs))
        moves = function in (aten._to_copy.default, aten.copy_.default)
        checked = args[:1] + args[2:] if function in INDEXING else args  # the host's may be indices
        mixed = [x for x in tensors(checked, kwargs) if not isinstance(x, Far) and x.dim()]
        if far and mixed and not moves:
            shapes = [list(x.shape) for x in mixed]
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
        return tree_map(lambda x: Far(x) if away and isinstance(x, torch.Tensor) else x, out)


@pytest.fixture
def elsewhere(monkeypatch):
    """`use(device)` is where scripts run from then on; autocast and random numbers are fake."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    for name in ("tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, partial(make_and_move, getattr(torch, name)))
    for script in (ppo, rloo):
        make = lambda seed, step, device, *size: tiny.uniform(*size).to(device)  # noqa: E731
        monkeypatch.setattr(script, "random_numbers", make)

    def use(device: torch.device) -> Any:
        one = dict(num_processes=1, process_index=0, is_fsdp2=False, mixed_precision="no")
        accelerator = SimpleNamespace(**one, device=device)
        accelerator.autocast = lambda: torch.profiler.record_function("")  # also a decorator
        monkeypatch.setattr(distributed, "start", lambda args: accelerator)
        return Elsewhere()

    return use


def make_and_move(make: Any, *args: Any, device: Any = None, **options: Any) -> torch.Tensor:
    """`torch.tensor` makes a tensor of the meta device without numbers."""
    return make(*args, **options) if device is None else make(*args, **options).to(device)


def moved(model: Any, device: torch.device) -> Any:
    """`model.to(device)`; weights elsewhere are new ones, and have to be tied again."""
    model = model.to(device)
    for module in model.modules():
        if hasattr(module, "tie_weights"):
            module.tie_weights()
    return model


def update(script, kind: str, device, length: int, use, micro=4096, **spies: Any) -> tuple:
    """One update of an EOS task: tensors, metrics, and how often sampling and all of it read."""
    reads = []
    rollouts = []
    sample = script.sample_in_batches

    def spy_sample(*args):
        before = len(Elsewhere.current.reads)
        responses = sample(*args)
        reads.append(len(Elsewhere.current.reads) - before)
        return responses

    spies |= dict(sample_in_batches=spy_sample, AdamTF=tiny.Recorder)
    spies |= dict(Rollout=tiny.keep(script.Rollout, rollouts))
    task = tiny.make_task(eos_task=True, response_length=length)
    flags = dict(total_episodes=8, num_ppo_epochs=1, max_grad_norm=1.0, micro_batch_tokens=micro)
    args = tiny.make_args(task, script, **flags)
    with use(device) as mode:
        models = (tiny.make_policy(kind, seed, script=script) for seed in (0, 3))
        policy, ref = (moved(model, device) for model in models)
        reward = tiny.reward_function(moved(tiny.make_reward(kind), device), 4096)
        ids = tiny.utils.TokenIds(tiny.PAD, [tiny.EOS], [7], [8, 9])
        inputs = dict(ref=ref, reward=reward, ids=ids)
        run = tiny.start(script, args, policy, **inputs, **spies)
    found = [*rollouts[1], *sum(run.optimizer.gradients, [])]
    return found, without_times(run.metrics)[0], reads, len(mode.reads)


@pytest.mark.parametrize("script, kind", MODELS)
def test_an_update_elsewhere_makes_the_same_numbers_without_waiting(script, kind, elsewhere):
    """The host waits as often for responses of 3 tokens as for those of 5."""
    expected, metrics, *_ = update(script, kind, HERE, 5, elsewhere)
    found, metrics_away, *reads = update(script, kind, AWAY, 5, elsewhere)
    assert len(found) == len(expected) > 20
    for x, y in zip(found, expected, strict=True):
        assert x.device == AWAY and y.device == HERE
        torch.testing.assert_close(x.near, y, atol=1e-4, rtol=1e-4)
    assert metrics_away == pytest.approx(metrics, rel=1e-4, abs=1e-4)
    *_, sampling, total = update(script, kind, AWAY, 3, elsewhere)
    assert reads == [sampling, total] and sampling[1] > 0


@pytest.mark.parametrize("script", [ppo, rloo])
def test_the_host_waits_at_most_twice_per_micro_batch(script, elsewhere):
    """Once for the lengths of the sequences, once for the number of response tokens."""
    reads = []
    loss = "ppo_losses" if script is ppo else "rloo_loss"
    compute_loss = getattr(script, loss)

    def spy(*args):
        reads.append(len(Elsewhere.current.reads))
        return compute_loss(*args)

    update(script, "gpt2", AWAY, 5, elsewhere, micro=20, **{loss: spy})
    reads = np.array(reads).reshape(2, -1)  # of two minibatches
    assert reads.shape[1] >= 2 and set(np.diff(reads).flatten()) == {2}


class Count(TorchDispatchMode):
    def __init__(self, condition):
        super().__init__()
        self.condition = condition
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += self.condition(function, args)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", FROZEN)
def test_frozen_weights_are_stored_as_autocast_casts_them(kind, bf16_accelerator):
    """The same logits to the bit, of a forward pass and of a step with a cache, without casts."""
    model = tiny.make_lm(kind)
    contexts = CONTEXTS
    mask = CONTEXTS != tiny.PAD
    model.get_output_embeddings().__class__ = Float32Linear
    named = model.named_parameters()
    shapes = {w.shape for name, w in named if w.dim() == 2 and "embed" not in name}
    is_cast = lambda function, x: function is aten._to_copy.default and x[0].shape in shapes  # noqa: E731
    found = []
    for lm in (copy.deepcopy(model), distributed.freeze(bf16_accelerator, model)):
        lm.requires_grad_(False)
        with torch.no_grad(), bf16_accelerator.autocast():
            batch = decoding.DecodingBatch(lm, contexts, mask, 2)
            plain = lm(contexts.masked_fill(~mask, 0), attention_mask=mask).logits
            logits = [plain, batch.next_logits()]
            batch.append(contexts[:, 0] * 0 + 7)
            with Count(is_cast) as casts:
                found.append([*logits, batch.next_logits()])
            found[-1].append(casts.count)
    (*expected, before), (*frozen, after) = found
    assert all(map(torch.equal, expected, frozen)) and before >= 8 and after == 0
    assert model.get_output_embeddings().weight.dtype == torch.float32


def test_weights_under_adapters_are_stored_in_bf16_and_other_frozen_ones_are_not(bf16_accelerator):
    """Frozen layers of a model that is trained may be saved; under adapters they are not."""
    plain = tiny.make_lm("llama")
    adapted = tiny.make_lm("llama")
    plain.model.layers[0].requires_grad_(False)
    adapted.add_adapter(LoraConfig(r=2, target_modules="all-linear"))
    for lm in (plain, adapted):
        weights = (w for w in lm.parameters() if w.requires_grad)
        distributed.prepare(bf16_accelerator, lm, torch.optim.SGD(weights), tiny.make_args())
    assert {w.dtype for w in plain.parameters()} == {torch.float32}
    bf16 = {name for name, w in adapted.named_parameters() if w.dtype == torch.bfloat16}
    assert bf16 == {name for name, _ in adapted.named_parameters() if "base_layer" in name}
