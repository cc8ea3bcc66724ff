"""machinery/packing.py: the packed call gives what the plain call gives, or is not used (G3)."""

import copy

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import PAD
from torch import Tensor, nn

from machinery import packing

OTHERS = ("gemma2", "opt", "gptj", "mixtral", "cohere")
PROMPT = 8  # columns of a prompt in `make_batch`


def make_lm(kind: str, **settings):
    return tiny.make_lm(kind) if kind in tiny.KINDS else tiny.make_other_lm(kind, **settings)


def make_inputs(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T] → input_ids, attention_mask and position_ids."""
    mask = tokens != PAD
    return tokens.masked_fill(~mask, 0), mask, mask.cumsum(dim=1) - mask.long()


def make_batch(width: int = 16, pads_anywhere: bool = True) -> tuple[Tensor, int]:
    """Sequences [60, width], of which 1 to 4 neighbors have one prompt, and tokens of all prompts.

    Padding is anywhere, or on the left of prompts and on the right of the rest.
    """
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(1, tiny.VOCAB, (60, width)))
    real = torch.from_numpy(rng.random((60, width)) < 0.65)
    real[:, PROMPT - 1] = True
    if not pads_anywhere:
        real[:, :PROMPT] = real[:, :PROMPT].sort(dim=1).values
        real[:, PROMPT:] = real[:, PROMPT:].sort(dim=1, descending=True).values
    tokens = tokens.masked_fill(~real, PAD)
    prompts = tokens[:, :PROMPT].clone()
    copies = np.repeat(np.arange(60), rng.integers(1, 5, 60))[:60]
    tokens[:, :PROMPT] = prompts[copies]
    return tokens, int((prompts[np.unique(copies)] != PAD).sum())


def spy_tokens(lm) -> list[tuple[int, int]]:
    """For each call from here on: the real tokens (none is 0) and all tokens that it reads."""
    read = []
    count = lambda module, args: read.append((args[0].count_nonzero().item(), args[0].numel()))  # noqa: E731
    lm.get_input_embeddings().register_forward_pre_hook(count)
    return read


def hidden_and_gradients(lm, call, inputs, bf16: bool, **options) -> list[Tensor]:
    """Hidden states of real tokens, and the gradients of a random sum of them."""
    mask = inputs[1]
    weights = torch.randn(int(mask.sum()), 32, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        hidden = call(*inputs, **options)
    assert hidden.isfinite().all() and hidden.shape == (*mask.shape, 32)
    loss = (hidden[mask].float() * weights).sum()
    return [hidden[mask].float(), *torch.autograd.grad(loss, list(lm.base_model.parameters()))]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", (*tiny.KINDS, *OTHERS))
def test_G3_packed_hidden_states_and_gradients_are_those_of_the_plain_call(kind, bf16):
    """Padding anywhere, several packed sequences, prompts computed for each sequence or once."""
    lm = make_lm(kind)
    tokens, prompt_tokens = make_batch()
    inputs = make_inputs(tokens)
    plain = lambda *x: packing.run_plain(lm.base_model, *x)  # noqa: E731
    expected = hidden_and_gradients(lm, plain, inputs, bf16)
    total = torch.cat([x.flatten() for x in expected[1:]]).norm()
    run, read = packing.Packed(lm.base_model), spy_tokens(lm)
    own_tokens = int((tokens[:, PROMPT:] != PAD).sum())
    for prompt_length, real in ((0, int(inputs[1].sum())), (PROMPT, prompt_tokens + own_tokens)):
        ours = hidden_and_gradients(lm, run, inputs, bf16, prompt_length=prompt_length)
        assert (ours[0] - expected[0]).norm() < (5e-3 if bf16 else 1e-6) * expected[0].norm()
        for x, y in zip(ours[1:], expected[1:], strict=True):
            assert (x - y).norm() < (2e-2 if bf16 else 1e-5) * (y.norm() + 1e-2 * total)
        if kind == "falcon_alibi":  # alibi is made from a mask of two dimensions
            assert all(map(torch.equal, ours, expected)) and read[-1][1] == tokens.numel()
        else:
            assert read[-1][0] == real and read[-1][1] < 1.1 * real


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("mistral", dict(sliding_window=6)),
        ("gemma3_text", dict(sliding_window=6)),  # in some of its layers
    ],
)
def test_G3_local_attention_reaches_as_far_as_without_packing(kind, settings):
    """Each sequence gives what it gives alone, also where its prompt is shared."""
    lm = tiny.make_other_lm(kind, **settings)
    tokens, _ = make_batch(12, pads_anywhere=False)
    inputs = make_inputs(tokens)
    with torch.no_grad():
        hidden = packing.Packed(lm.base_model)(*inputs, prompt_length=PROMPT)
        for row, states in zip(tokens, hidden, strict=True):
            alone = lm.base_model(row[row != PAD][None]).last_hidden_state[0]
            torch.testing.assert_close(states[row != PAD], alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [15, 16])
def test_a_batch_wider_than_the_sliding_window_is_not_packed(window):
    lm = tiny.make_other_lm("mistral", sliding_window=window)
    inputs = make_inputs(make_batch()[0])
    run, read = packing.Packed(lm.base_model), spy_tokens(lm)
    with torch.no_grad():
        hidden = run(*inputs)
        same = torch.equal(hidden, packing.run_plain(lm.base_model, *inputs))
    assert same == (window == 15) == (read[-2][1] == 60 * 16)


def see_other_sequences(base, args, kwargs):
    """Every token sees all tokens before it in its packed sequence."""
    mask = kwargs["attention_mask"]
    if mask.dim() == 4:
        kwargs["attention_mask"] = torch.full_like(mask, torch.finfo(mask.dtype).min).triu(1)
    return args, kwargs


def take_mask_of_first(base, args, kwargs):
    """All packed sequences get the mask of the first."""
    kwargs["attention_mask"] = kwargs["attention_mask"][:1].expand_as(kwargs["attention_mask"])
    return (args, kwargs) if kwargs["attention_mask"].dim() == 4 else None


def take_positions_of_first(base, args, kwargs):
    """All packed sequences get the positions of the first."""
    if kwargs["attention_mask"].dim() == 4:
        positions = kwargs["position_ids"]
        kwargs["position_ids"] = positions[:1].expand_as(positions)
    return args, kwargs


def mix_batch(base, args, kwargs, output):
    """All sequences of a batch change each other."""
    output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.mean(dim=0)
    return output


def mix_a_little(base, args, kwargs, output):
    """The same, by a twentieth: more than rounding."""
    output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.mean(dim=0) / 20
    return output


MIXERS = [see_other_sequences, take_mask_of_first, take_positions_of_first, mix_batch, mix_a_little]


@pytest.mark.parametrize("mix", MIXERS)
def test_36_the_probe_notices_a_model_that_mixes_sequences(mix):
    """Sequences of one packed sequence, or packed sequences of one batch."""
    base = tiny.make_lm().base_model
    assert packing.is_packable(base)
    if mix in (mix_batch, mix_a_little):
        base.register_forward_hook(mix, with_kwargs=True)
    else:
        base.register_forward_pre_hook(mix, with_kwargs=True)
    assert not packing.is_packable(base)


def test_36_the_probe_reads_two_packed_sequences_in_fp32_and_changes_nothing():
    """GPT-2's last states reach hundreds, and TF32 keeps three digits of them."""
    base, seen = tiny.make_lm().base_model.train(), []
    base.register_forward_pre_hook(
        lambda module, args: seen.append((len(args[0]), torch.get_float32_matmul_precision()))
    )
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert packing.is_packable(base)
        assert torch.get_float32_matmul_precision() == "high" and base.training
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == [(4, "highest"), (2, "highest")]


def test_the_probe_runs_once():
    lm = tiny.make_lm()
    inputs, run, read = make_inputs(make_batch()[0]), packing.Packed(lm.base_model), spy_tokens(lm)
    for calls in (3, 4):
        run(*inputs)
        assert len(read) == calls


def test_a_deep_copy_computes_with_its_own_weights():
    """As an average of a policy's weights, or a reference made of a policy, has to."""
    policy = tiny.make_policy()
    contexts, responses = tiny.make_contexts([8, 3], 8), tiny.make_responses(2, 5)
    before = policy(contexts, responses)[0]
    other = copy.deepcopy(policy)
    nn.init.normal_(policy.lm.transformer.wpe.weight)
    assert torch.equal(other(contexts, responses)[0], before)
    assert not torch.allclose(policy(contexts, responses)[0], before)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=80), st.sampled_from([16, 768, 4096]))
def test_every_group_has_a_place_of_its_own_in_one_packed_sequence(lengths, features):
    lengths[0] += 1  # a batch has a token
    starts, count, width = packing.place(np.array(lengths), 256, features)
    used = np.zeros(count * width, dtype=int)
    for start, length in zip(starts, lengths, strict=True):
        used[start : start + length] += 1
        assert length == 0 or start // width == (start + length - 1) // width
    assert used.max() == 1 and used.sum() == sum(lengths)


@pytest.mark.parametrize("size, longest", [(512, 88), (64, 700), (16, 88), (2, 500)])
def test_packing_leaves_little_unused(size, longest):
    """Of random lengths, as in the tasks: one token in fifty, or in ten if there are few."""
    lengths = np.random.default_rng(0).integers(longest // 4, longest + 1, size)
    _, count, width = packing.place(lengths, 256, 768)
    assert count * width < (1.02 if size > 64 else 1.1) * lengths.sum()
