"""A device that is not the host, played on a CPU: tensors that say they are elsewhere, hold their numbers, and refuse to
be mixed with tensors of the host. What a GPU would stop at, these tests stop at, and they count what crosses to the host.
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

import packing
import ppo
import rloo
import sft
import train_reward
import utils

AWAY = torch.device("meta")  # a device that autograd knows and that nobody uses; its tensors here have numbers
aten = torch.ops.aten
INDEXING = {
    aten.index.Tensor: 1,
    aten.index_put_.default: 1,
    aten.index_put.default: 1,
    aten._index_put_impl_.default: 1,
}
READS = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.unique_dim.default)


class Far(Tensor):
    """A tensor elsewhere; `near` are its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near: Tensor):
        what = dict(strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype, device=AWAY)
        far = torch.Tensor._make_wrapper_subclass(cls, near.shape, **what)
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
    """While it lasts tensors can be made and moved elsewhere; `reads` are the operations that make the host wait."""

    current: "Elsewhere"

    def __enter__(self):
        self.reads, Elsewhere.current = [], self
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.call(function, args, kwargs or {})

    def call(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`function` of the numbers. Errors: `RuntimeError` for what a GPU would refuse."""
        far = any(isinstance(x, Far) for x in tensors(args, kwargs))
        moves = function in (aten._to_copy.default, aten.copy_.default)
        checked = args[:1] + args[2:] if function in INDEXING else args  # indices may be the host's
        strangers = [x for x in tensors(checked, kwargs) if not isinstance(x, Far) and x.dim()]
        if far and strangers and not moves:
            raise RuntimeError(
                f"{function} of tensors here and elsewhere: {[list(x.shape) for x in strangers]} is here"
            )
        wanted = kwargs.get("device")
        here = wanted is not None and torch.device(wanted) != AWAY
        if function is aten.copy_.default:
            here = not isinstance(args[0], Far)
        bools = function in INDEXING and any(isinstance(x, Far) and x.dtype == torch.bool for x in tensors(args[1]))
        if far and (moves and here or function in READS or bools):
            self.reads.append(function)
        if wanted is not None:
            kwargs = kwargs | {"device": "cpu"}
        args, kwargs = tree_map(lambda x: x.near if isinstance(x, Far) else x, (args, kwargs))
        out = function(*args, **kwargs)
        away = not here and (far or wanted is not None)
        return tree_map(lambda x: Far(x) if away and isinstance(x, Tensor) else x, out)


@pytest.fixture
def elsewhere(monkeypatch):
    """What there is none of elsewhere: autocast, generators (random numbers are the host's), a direct way for data."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
    monkeypatch.setattr(utils, "generator", lambda *args: SimpleNamespace(device=args[-1]))
    rand = torch.rand
    monkeypatch.setattr(
        torch,
        "rand",
        lambda *size, device, generator, **more: rand(*size, **more, generator=torch.Generator().manual_seed(1)).to(
            device
        ),
    )
    for name in ("tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, partial(make_and_move, getattr(torch, name)))


def make_and_move(make: Any, *args: Any, device: Any = None, **more: Any) -> Tensor:
    """`torch.tensor` makes a tensor of the meta device without numbers."""
    return make(*args, **more) if device is None else make(*args, **more).to(device)


def test_tensors_here_and_elsewhere_do_not_mix(elsewhere):
    """What the other tests rest on, by hand."""
    with Elsewhere() as mode:
        x = torch.arange(4.0).to(AWAY)
        assert x.device == AWAY and (x + 1).device == AWAY and torch.zeros(2, device=AWAY).device == AWAY
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


HERE, KINDS = torch.device("cpu"), ("gpt2", "gpt_neox", "llama", "falcon_alibi")


def moved(model: Any, device: torch.device) -> Any:
    """`model.to(device)`; weights elsewhere are new ones, and have to be tied again."""
    model = model.to(device)
    for module in model.modules():
        if hasattr(module, "tie_weights"):
            module.tie_weights()
    return model


def update(script: Any, kind: str, device: torch.device, length: int, accelerator: Any) -> tuple[dict[str, Any], int]:
    """Sampling with all of its flags, scoring and an optimizer step of an EOS task → what comes out, and how often
    sampling read from the device."""
    reward = moved(tiny.make_reward(kind), device)
    policy, ref = (moved(tiny.make_policy(kind, seed, script=script), device) for seed in (0, 3))
    models = tiny.make_models(policy, lambda q, r: reward.score(q, r, size=36), ref, script, prefix=[7], suffix=[8, 9])
    task = tiny.make_task(eos_task=True, top_p=0.9, min_response_length=3, response_length=length)
    args, order = tiny.make_args(task, script, max_grad_norm=1.0), np.random.default_rng(0).permutation(8)
    queries, decoder = tiny.make_contexts(tiny.LENGTHS, 8).to(device), packing.Decoder(policy.lm)
    responses = script.sample_all(
        decoder, utils.add_affixes(queries, models.ids), task, models.ids, utils.generator(1, 0, device), 3
    )
    reads = len(Elsewhere.current.reads) if device == AWAY else 0
    rollout, score = script.make_rollout(models, queries, responses, order, 0.1, args)
    optimizer = tiny.Gradients(policy)
    steps = tiny.update(script, policy, optimizer, rollout, [order], args, accelerator)
    found = rollout._asdict() | tiny.summarise(script, rollout, score, steps, 0.1, args) | optimizer.steps[0]
    return {name: x for name, x in found.items() if isinstance(x, Tensor)}, reads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("script", [ppo, rloo], ids=["ppo", "rloo"])
def test_an_update_elsewhere_makes_the_same_numbers_and_sampling_reads_none_of_its_tokens(
    script, kind, elsewhere, accelerator
):
    expected, _ = update(script, kind, HERE, 9, accelerator)
    with Elsewhere():
        found, reads = update(script, kind, AWAY, 9, accelerator)
    with Elsewhere():
        _, fewer = update(script, kind, AWAY, 5, accelerator)
    assert reads == fewer > 0
    assert found.keys() == expected.keys() and len(found) > 40
    for name, x in found.items():
        assert x.device == AWAY, name
        torch.testing.assert_close(x.near, expected[name], atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_a_reward_model_is_trained_elsewhere_to_the_same_numbers(elsewhere, accelerator):
    def trained(device: torch.device) -> list[Tensor]:
        model, args = moved(tiny.make_reward(), device), train_reward.Args(task=tiny.make_task(), micro_batch_tokens=40)
        rng = np.random.default_rng(0)
        responses = torch.from_numpy(rng.integers(1, tiny.VOCAB, (6, 4, 5)))
        labels = train_reward.Labels(tiny.make_contexts([8, 2, 5, 1, 7, 3], 8), responses, torch.arange(6) % 4)
        labels = labels.to(device)
        mean_and_std = train_reward.normalise(model, labels.query, labels.responses[:, 0], size=40)
        optimizer = tiny.Gradients(model)
        stats = train_reward.train_step(model, optimizer, labels, tiny.PAD, args, accelerator)
        rewards = train_reward.predict(model, labels, tiny.PAD, args)
        return [*mean_and_std, *stats.values(), rewards, *optimizer.steps[0].values()]

    with Elsewhere():
        found = trained(AWAY)
    for x, expected in zip(found, trained(HERE), strict=True):
        torch.testing.assert_close(x.near, expected, atol=1e-4, rtol=1e-4)


def test_a_language_model_is_tuned_elsewhere_to_the_same_numbers(elsewhere, accelerator):
    def tuned(device: torch.device) -> list[Tensor | float]:
        lm, args = moved(tiny.make_lm(), device), sft.Args(task=tiny.make_task(), micro_batch_tokens=40)
        rows = tiny.make_contexts([13, 7, 10, 9, 12, 8], 13).to(device)
        optimizer = tiny.Gradients(lm)
        loss = sft.train_step(lm, optimizer, rows, 8, tiny.PAD, args, accelerator)
        held_out = sft.heldout_loss(lm, rows, 8, tiny.PAD, args, accelerator)
        return [loss.item(), held_out, *(x.cpu() for x in optimizer.steps[0].values())]

    with Elsewhere():
        found = tuned(AWAY)
    for x, expected in zip(found, tuned(HERE), strict=True):
        torch.testing.assert_close(x, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture
def tf32():
    """As `--tf32` has it, which changes nothing on a CPU."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def test_whether_rows_are_kept_apart_is_measured_in_fp32(tf32):
    """GPT-2's last states reach hundreds, and TF32 keeps three digits of them."""
    base, seen = tiny.make_lm().base_model, []
    base.register_forward_pre_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    assert packing.keeps_rows_apart(base) and seen == ["highest"] * 2
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize(("precision", "passes"), [("highest", False), ("high", True)])
def test_a_policy_is_checked_as_closely_as_its_precision_allows(precision, passes, tf32, accelerator, monkeypatch):
    torch.set_float32_matmul_precision(precision)
    right = ppo.token_logprobs
    monkeypatch.setattr(ppo, "token_logprobs", lambda *inputs: [x + 0.1 for x in right(*inputs)])
    with nullcontext() if passes else pytest.raises(utils.InputError, match="0.1 nats off"):
        utils.check_policy(tiny.make_policy(), tiny.make_contexts([8], 8), 0.7, accelerator)
