"""machinery/unpadding.py: no padding gives what the plain call gives, or is not used (G3)."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import tiny
import torch
from accelerate.utils import compare_versions
from tiny import PAD, make_lm
from torch.nn.attention import varlen

from machinery import models, unpadding

OTHERS = ("gemma2", "opt", "gptj", "mixtral", "cohere", "phi", "afmoe")
PADDED = {"falcon", "falcon_alibi", "gemma2"}  # models that take the plain call
PADDED |= {"gptj"} if compare_versions("transformers", "<", "5.24") else set()
PROMPT = 8  # columns of a prompt in `make_batch`


def make_inputs(tokens):
    """[B, T] → input_ids, attention_mask and position_ids."""
    mask = tokens != PAD
    return tokens.masked_fill(~mask, 0), mask, mask.cumsum(dim=1) - mask.long()


def make_batch(width=16, pads_anywhere=True):
    """60 sequences, of which 1 to 4 neighbors have one prompt, and the tokens of all prompts."""
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(1, tiny.VOCAB, (60, width)))
    real = torch.from_numpy(rng.random((60, width)) < 0.65)
    real[:, PROMPT - 1] = True
    if not pads_anywhere:
        real[:, :PROMPT] = real[:, :PROMPT].sort(dim=1).values
        real[:, PROMPT:] = real[:, PROMPT:].sort(dim=1, descending=True).values
    tokens = tokens.masked_fill(~real, PAD)
    copies = np.repeat(np.arange(60), rng.integers(1, 5, 60))[:60]
    tokens[:, :PROMPT] = tokens[copies, :PROMPT]
    return tokens, int(real[np.unique(copies), :PROMPT].sum())


def run_plain(backbone, input_ids, mask, position_ids, **_):
    """Hidden states [B, T, D] of the padded batch."""
    inputs = dict(attention_mask=mask, position_ids=position_ids, use_cache=False)
    return backbone(input_ids, **inputs).last_hidden_state


def spy_tokens(lm):
    """For each call from here on: the real tokens (none is 0) and all tokens that it reads."""
    read = []

    def count(module, args):
        tokens = args[0]
        read.append((tokens.count_nonzero().item(), tokens.numel()))

    lm.get_input_embeddings().register_forward_pre_hook(count)
    return read


def unpadded(lm):
    return partial(unpadding.compute_hidden, lm.base_model)


def hidden_and_gradients(lm, call, inputs, bf16=False, **options):
    """Hidden states of real tokens, and the gradients of a random sum of them."""
    mask = inputs[1]
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        hidden = call(*inputs, **options)
    assert hidden.isfinite().all()
    real = hidden[mask].float()
    torch.manual_seed(0)
    loss = (real * torch.randn(real.shape)).sum()
    trained = [weight for weight in lm.base_model.parameters() if weight.requires_grad]
    return [real, *torch.autograd.grad(loss, trained)]


def plain(lm, inputs, bf16=False):
    """The same by the model's own call."""
    return hidden_and_gradients(lm, partial(run_plain, lm.base_model), inputs, bf16)


def assert_close(found, expected, bf16=False):
    """Hidden states, and gradients; in bf16 the plain call's are off by up to 0.13."""
    limit, limit_of_gradients = 1e-6, 2e-5
    if bf16:
        limit, limit_of_gradients = 5e-3, 5e-2
    assert (found[0] - expected[0]).norm() < limit * expected[0].norm()
    total = torch.cat([x.flatten() for x in expected[1:]]).norm()
    for x, y in zip(found[1:], expected[1:], strict=True):
        size = y.norm() + 1e-2 * total
        assert (x - y).norm() < limit_of_gradients * size


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", (*tiny.KINDS, *OTHERS))
def test_G3_hidden_states_and_gradients_are_those_of_the_plain_call(kind, bf16):
    """Padding anywhere, prompts computed for each sequence or once; no padding is read."""
    lm = make_lm(kind)
    tokens, prompt_tokens = make_batch()
    inputs = make_inputs(tokens)
    expected = plain(lm, inputs, bf16)
    models.check_model(lm, tokens.shape[1])
    read = spy_tokens(lm)
    real = int(inputs[1].sum())
    own = int(inputs[1][:, PROMPT:].sum())
    for prompt_length, count in ((0, real), (PROMPT, prompt_tokens + own)):
        options = dict(bf16=bf16, prompt_length=prompt_length)
        found = hidden_and_gradients(lm, unpadded(lm), inputs, **options)
        assert_close(found, expected, bf16)
        if kind in PADDED:
            assert all(map(torch.equal, found, expected)) and read[-1][1] == tokens.numel()
        else:
            assert read[-1] == (count, count)


@torch.autocast("cpu", enabled=False)
def naive_varlen(q, k, v, bounds_q, bounds_k, max_q, max_k, *, scale, window_size):
    """`varlen_attn` as torch describes it, in a loop: causal, aligned at the bottom right."""
    assert window_size == (-1, 0) and q.dtype == k.dtype == v.dtype
    assert bounds_q.dtype == bounds_k.dtype == torch.int32
    assert bounds_q[-1] == len(q) and bounds_k[-1] == len(k)
    outputs = []
    for i in range(len(bounds_q) - 1):
        own = slice(bounds_q[i], bounds_q[i + 1])
        seen = slice(bounds_k[i], bounds_k[i + 1])
        queries = q[own].float()
        keys, values = k[seen].float(), v[seen].float()
        assert len(queries) <= max_q and len(keys) <= max_k
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * (scale or q.shape[2] ** -0.5)
        unseen = torch.ones_like(scores, dtype=torch.bool).triu(1 + len(keys) - len(queries))
        shares = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", shares, values).to(v.dtype))
    return torch.cat(outputs)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama", "opt"])
def test_varlen_attn_gives_what_the_plain_call_gives(kind, bf16, monkeypatch):
    """Prompts shared or not, with gradient checkpointing; no layer calls SDPA. A CPU stands in."""
    lm = make_lm(kind)
    inputs = make_inputs(make_batch()[0])
    expected = plain(lm, inputs, bf16)
    unpadding.set_unpadding(lm.base_model, 16)
    calls = Mock(side_effect=naive_varlen)
    monkeypatch.setattr(varlen, "varlen_attn", calls)
    monkeypatch.setattr(unpadding, "can_use_varlen", lambda *_: True)
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    lm.train()
    layers = lm.config.num_hidden_layers
    for count, n in ((2, PROMPT), (4, 0)):  # the forward pass and its repetition
        found = hidden_and_gradients(lm, unpadded(lm), inputs, bf16, prompt_length=n)
        if bf16:  # the naive loop rounds elsewhere
            ours = torch.cat([x.flatten() for x in found])
            theirs = torch.cat([x.flatten() for x in expected])
            assert (ours - theirs).norm() < 0.05 * theirs.norm()
        else:
            assert_close(found, expected)
        assert calls.call_count == count * layers


def test_varlen_attn_is_called_where_flash_attention_can_run(monkeypatch):
    """In bf16 since Ampere, for heads of 8, 16, … 256 features, as wide in keys as in values."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))

    def fits(key, value, **other):
        k = SimpleNamespace(shape=(9, 2, key))
        v = SimpleNamespace(**dict(dtype=torch.bfloat16, is_cuda=True) | other)
        v.shape = (9, 2, value)
        return unpadding.can_use_varlen(k, v)

    assert fits(64, 64) and fits(256, 256)
    assert not fits(264, 264) and not fits(100, 100) and not fits(192, 128)  # DeepSeek-V3's
    assert not fits(64, 64, dtype=torch.float32) and not fits(64, 64, is_cuda=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert not fits(64, 64)


@pytest.mark.parametrize("own", [0, 1, 5])
@pytest.mark.parametrize("prompt", [0, 1, 8])
def test_few_or_no_tokens_in_prompts_or_after_them(prompt, own):
    """Two prompts for five sequences, one of which has one own token more than the others."""
    tokens = torch.full((5, 14), PAD)
    of_prompt = torch.tensor([1, 1, 1, 2, 2])
    tokens[:, 8 - prompt : 8] = of_prompt[:, None] + torch.arange(prompt)
    tokens[:, 8 : 8 + own] = torch.arange(1, 1 + 5 * own).view(5, own)
    tokens[4, 8 + own] = 7
    lm = make_lm("llama")
    inputs = make_inputs(tokens)
    found = hidden_and_gradients(lm, unpadded(lm), inputs, prompt_length=8)
    assert_close(found, plain(lm, inputs))


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama", "opt"])
def test_gradients_with_checkpointing_are_those_without(kind):
    """Two calls before one backward pass, which computes both again."""
    lm = make_lm(kind)
    inputs = make_inputs(make_batch()[0])
    unpadding.set_unpadding(lm.base_model, 16)

    def call(*inputs):
        first = unpadded(lm)(*(x[:30] for x in inputs), prompt_length=PROMPT)
        return torch.cat([first, unpadded(lm)(*(x[30:] for x in inputs))])

    expected = hidden_and_gradients(lm, call, inputs)
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    lm.train()
    assert_close(hidden_and_gradients(lm, call, inputs), expected)


def test_calls_with_padding_and_caches_are_those_of_sdpa():
    """`lm(...)` and `generate` do not notice; a saved configuration stays."""
    lm = make_lm("llama")
    inputs, mask, position_ids = make_inputs(make_batch()[0])
    before = lm.config.to_json_string()
    results = []
    for longest in (0, 16):
        unpadding.set_unpadding(lm.base_model, longest)
        logits = lm(inputs, attention_mask=mask, position_ids=position_ids).logits
        tokens = lm.generate(inputs, attention_mask=mask, max_new_tokens=4, do_sample=False)
        results.append((logits, tokens))
    assert lm.config._attn_implementation == unpadding.NAME
    assert all(map(torch.equal, *results))
    assert lm.config.to_json_string() == before


@pytest.mark.parametrize("window", [15, 16])
@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])  # Gemma: in some layers
def test_G3_padding_is_computed_if_local_attention_reaches_less_far(kind, window, capsys):
    """And a run says so, once; also for a sequence that is longer than those of the check."""
    unpadding.say_once.cache_clear()
    lm = make_lm(kind, sliding_window=window)
    tokens, _ = make_batch(16, pads_anywhere=False)
    inputs = make_inputs(tokens)
    tokens, _ = make_batch(17, pads_anywhere=False)
    tokens[0] = 1  # a sequence of 17 tokens
    longer = make_inputs(tokens)
    models.check_model(lm, 16)
    run = unpadded(lm)
    read = spy_tokens(lm)
    with torch.no_grad():
        hidden = run(*inputs)
        assert torch.equal(hidden, run_plain(lm.base_model, *inputs)) == (window == 15)
        assert torch.equal(run(*longer), run_plain(lm.base_model, *longer))
    assert (window == 15) == (read[0][1] == 60 * 16)
    assert capsys.readouterr().out.count("padding is computed") == 1


def test_a_wide_batch_of_sequences_that_are_short_enough_has_no_padding():
    """Long prompts beside long answers: the batch is wider than any of its sequences."""
    lm = make_lm()
    models.check_model(lm, 10)
    tokens = torch.full((3, 16), PAD)
    for row, (prompt, answer) in enumerate([(8, 2), (2, 8), (1, 1)]):
        tokens[row, 8 - prompt : 8 + answer] = 1
    inputs = make_inputs(tokens)
    read = spy_tokens(lm)
    with torch.no_grad():
        hidden = unpadded(lm)(*inputs, prompt_length=8)
        expected = run_plain(lm.base_model, *inputs)
    assert read[0] == (22, 22)
    real = inputs[1]
    torch.testing.assert_close(hidden[real], expected[real], atol=1e-5, rtol=1e-5)


def see_all_tokens(plan, input_ids):
    return {"plan": None}


def see_no_prompt(plan, input_ids):
    return {"plan": plan._replace(seen=plan.lengths, shared=None)}


def continue_positions(plan, input_ids):
    return {"position_ids": torch.arange(input_ids.shape[1])[None]}


@pytest.mark.parametrize("mistake", [see_all_tokens, see_no_prompt, continue_positions])
def test_the_check_notices_a_model_that_mixes_sequences(mistake):
    """Such a model is called as it is, with the attention that it had."""

    def mix(base, args, kwargs):
        if kwargs.get("plan"):
            kwargs = kwargs | mistake(kwargs["plan"], args[0])
        return args, kwargs

    lm = make_lm()
    lm.base_model.register_forward_pre_hook(mix, with_kwargs=True)
    models.check_model(lm, 16)
    assert lm.base_model.max_unpadded == 0 and lm.config._attn_implementation == "sdpa"


def test_a_model_that_makes_its_own_attention_masks_is_refused():
    """Those of Doge have weights, which would get no gradient."""
    tiny.refuses(lambda: models.check_model(make_lm("doge"), 16), "")
