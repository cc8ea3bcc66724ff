"""A device that is not the host, played on a CPU: its tensors have numbers, and refuse to be mixed
with the host's. What a GPU would refuse fails here, and waits of the host are counted."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

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
from utils import TokenIds

HERE = torch.device("cpu")
AWAY = torch.device("meta")  # a device that autograd knows; its tensors here have numbers
aten = torch.ops.aten
INDEXING = {
    aten.index.Tensor,
    aten._index_put_impl_.default,
    aten.index_put_.default,
    aten.index_put.default,
}
READS = {  # operations whose result the host needs: a number, or a size
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_dim.default,
    aten.masked_scatter_backward.default,
}
SLOW = pytest.mark.slow
MODELS = [
    (ppo, "llama"),
    (rloo, "falcon_alibi"),
    pytest.param(ppo, "gpt2", marks=SLOW),
    pytest.param(rloo, "gpt_neox", marks=SLOW),
]
FROZEN = ("gpt2", "gpt_neox", "llama", "qwen2", "mistral", "gptj", "opt", "gemma2")


class Far(torch.Tensor):
    """A tensor elsewhere; `near` are its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near):
        far = torch.Tensor._make_wrapper_subclass(
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=AWAY,
        )
        far.near = near
        return far

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return Elsewhere.current.__torch_dispatch__(function, types, args, kwargs)


def tensors(*tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Elsewhere(TorchDispatchMode):
    """Inside, tensors can be elsewhere; `reads` are the operations that made the host wait."""

    def __enter__(self):
        self.reads = []
        Elsewhere.current = self
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """`function` of the numbers. Raises `RuntimeError` for what a GPU would refuse."""
        kwargs = dict(kwargs or {})
        far = any(isinstance(x, Far) for x in tensors(args, kwargs))
        moves = function in (aten._to_copy.default, aten.copy_.default)
        checked = args
        by_mask = False
        if function in INDEXING:
            checked = args[:1] + args[2:]  # the indices may be the host's
            by_mask = any(isinstance(x, Far) and x.dtype == torch.bool for x in tensors(args[1]))
        for x in tensors(checked, kwargs):
            if far and not moves and not isinstance(x, Far) and x.dim():
                raise RuntimeError(f"{function} of tensors elsewhere: {x.shape} is here")
        device = kwargs.get("device")
        here = device is not None and torch.device(device) != AWAY
        if function is aten.copy_.default:
            here = not isinstance(args[0], Far)
        if far and (moves and here or function in READS or by_mask):
            self.reads.append(function)
        if device is not None:
            kwargs["device"] = HERE
        args, kwargs = tree_map(lambda x: x.near if isinstance(x, Far) else x, (args, kwargs))
        out = function(*args, **kwargs)
        if here or not (far or device is not None):
            return out
        return tree_map(lambda x: Far(x) if isinstance(x, torch.Tensor) else x, out)


@pytest.fixture
def elsewhere(monkeypatch):
    """`use(device)` is where scripts run from then on; autocast and random numbers are fake."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    monkeypatch.setattr(torch, "tensor", partial(make_and_move, torch.tensor))
    monkeypatch.setattr(torch, "as_tensor", partial(make_and_move, torch.as_tensor))
    for script in (ppo, rloo):
        monkeypatch.setattr(script, "random_numbers", random_numbers)

    def use(device):
        accelerator = SimpleNamespace(
            device=device,
            num_processes=1,
            process_index=0,
            is_fsdp2=False,
            mixed_precision="no",
            autocast=lambda: torch.profiler.record_function(""),  # also a decorator
        )
        monkeypatch.setattr(distributed, "start", lambda args: accelerator)
        return Elsewhere()

    return use


def random_numbers(seed, step, device, *size):
    return tiny.uniform(*size).to(device)


def make_and_move(make, *args, device=None, **options):
    """`torch.tensor` makes a tensor of the meta device without numbers."""
    made = make(*args, **options)
    return made if device is None else made.to(device)


def moved(model, device):
    """`model.to(device)`; weights elsewhere are new ones, and have to be tied again."""
    model = model.to(device)
    for module in model.modules():
        if hasattr(module, "tie_weights"):
            module.tie_weights()
    return model


def update(script, kind, device, length, use, micro=4096, **spies):
    """One update of an EOS task: tensors, metrics, and how often sampling and all of it read."""
    reads = []
    sample = script.sample_in_batches

    def spy_sample(*args):
        before = len(Elsewhere.current.reads)
        responses = sample(*args)
        reads.append(len(Elsewhere.current.reads) - before)
        return responses

    args = tiny.make_args(
        script=script,
        eos_task=True,
        response_length=length,
        total_episodes=8,
        num_ppo_epochs=1,
        num_minibatches=1,
        max_grad_norm=1.0,
        micro_batch_tokens=micro,
    )
    rollouts = []
    with use(device) as mode:
        policy = moved(tiny.make_policy(kind, script=script), device)
        ref = moved(tiny.make_policy(kind, seed=3, script=script), device)
        reward = tiny.reward_function(moved(tiny.make_reward(kind), device), 4096)
        run = tiny.start(
            script,
            args,
            policy,
            ref,
            reward,
            ids=TokenIds(tiny.PAD, [tiny.EOS], [7], [8, 9]),
            sample_in_batches=spy_sample,
            AdamTF=tiny.Recorder,
            Rollout=tiny.keep(script.Rollout, rollouts),
            **spies,
        )
    found = [*rollouts[1], *sum(run.optimizer.gradients, [])]
    return found, without_times(run.metrics)[0], reads, len(mode.reads)


@pytest.mark.parametrize("script, kind", MODELS)
def test_an_update_elsewhere_makes_the_same_numbers_without_waiting(script, kind, elsewhere):
    """The host waits as often for responses of 3 tokens as for those of 5."""
    expected, metrics, *_ = update(script, kind, HERE, 5, elsewhere)
    found, metrics_away, *reads = update(script, kind, AWAY, 5, elsewhere)
    assert len(found) == len(expected) > 20
    for x, y in zip(found, expected, strict=True):
        assert x.device == AWAY
        torch.testing.assert_close(x.near, y, atol=1e-4, rtol=1e-4)
    assert metrics_away == pytest.approx(metrics, rel=1e-4, abs=1e-4)
    *_, sampling, total = update(script, kind, AWAY, 3, elsewhere)
    assert reads == [sampling, total]
    assert sampling[1] > 0


@tiny.both
def test_the_host_waits_at_most_twice_per_micro_batch(script, elsewhere):
    """Once for the lengths of the sequences, once for the number of response tokens."""
    loss = "ppo_losses" if script is ppo else "rloo_loss"
    compute_loss = getattr(script, loss)
    reads = []

    def spy(*args):
        reads.append(len(Elsewhere.current.reads))
        return compute_loss(*args)

    update(script, "gpt2", AWAY, 5, elsewhere, micro=20, **{loss: spy})
    assert len(reads) >= 3
    assert set(np.diff(reads)) == {2}


class CountCasts(TorchDispatchMode):
    """Counts conversions of tensors of these shapes."""

    def __init__(self, shapes):
        super().__init__()
        self.shapes = shapes
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is aten._to_copy.default:
            self.count += args[0].shape in self.shapes
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", FROZEN)
@torch.no_grad()
def test_frozen_weights_are_stored_as_autocast_casts_them(kind, bf16_accelerator):
    """The same logits to the bit, of a forward pass and of a step with a cache, without casts."""
    contexts = tiny.make_contexts([8, 3, 5], 8)
    mask = contexts != tiny.PAD
    model = tiny.make_lm(kind).requires_grad_(False)  # autocast keeps the casts of others
    model.get_output_embeddings().__class__ = Float32Linear
    shapes = set()
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and "embed" not in name:
            shapes.add(weight.shape)

    def compute(lm):
        """Logits, and the number of weights that a step with a cache converts."""
        with bf16_accelerator.autocast():
            plain = lm(contexts.masked_fill(~mask, 0), attention_mask=mask).logits
            batch = decoding.DecodingBatch(lm, contexts, mask, 2)
            first = batch.next_logits()
            batch.append(torch.full((3,), 7))
            with CountCasts(shapes) as casts:
                second = batch.next_logits()
        return [plain, first, second], casts.count

    expected, before = compute(model)
    found, after = compute(distributed.freeze(bf16_accelerator, model))
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert before >= 8
    assert after == 0
    assert model.get_output_embeddings().weight.dtype == torch.float32


def test_weights_under_adapters_are_stored_in_bf16_and_other_frozen_ones_are_not(bf16_accelerator):
    """Frozen layers of a model that is trained may be saved; under adapters they are not."""
    plain = tiny.make_lm("llama")
    plain.model.layers[0].requires_grad_(False)
    adapted = tiny.make_lm("llama")
    adapted.add_adapter(LoraConfig(r=2, target_modules="all-linear"))
    for lm in (plain, adapted):
        optimizer = torch.optim.SGD(w for w in lm.parameters() if w.requires_grad)
        distributed.prepare(bf16_accelerator, lm, optimizer, tiny.make_args())
    for weight in plain.parameters():
        assert weight.dtype == torch.float32
    for name, weight in adapted.named_parameters():
        assert (weight.dtype == torch.bfloat16) == ("base_layer" in name)
