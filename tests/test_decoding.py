"""machinery/decoding.py: logits with a static cache, and samples, as the plain model has (G4)."""

import inspect
import math
import re
import textwrap

import pytest
import tiny
import torch
from tiny import PAD, make_contexts, make_lm

import ppo
import utils
from machinery import decoding
from utils import TokenIds, truncate

OTHERS = ("gemma2", "opt", "gptj", "deepseek_v3")  # whose values are narrower than its keys
KINDS = [(kind, {}) for kind in (*tiny.KINDS, *OTHERS, *tiny.HYBRIDS)]
# Local attention as wide as context and response; windows narrower than the contexts, and in one of
# two layers, full after the first block of columns:
KINDS += [
    ("gpt_neo", dict(window_size=13)),
    ("mistral", dict(sliding_window=6)),
    ("gemma2", dict(sliding_window=20)),
]
LENGTH = 5  # tokens of a response
CONTEXTS = make_contexts([8, 3, 5, 8, 1], 11).repeat(3, 1)  # 3 columns are pads


@torch.no_grad()
def next_logits(lm, tokens):
    """Logits [B, V] after sequences [B, T] by the plain model, without a cache."""
    mask = tokens != PAD
    inputs = dict(attention_mask=mask, position_ids=mask.cumsum(dim=1) - mask.long())
    return lm(tokens.masked_fill(~mask, 0), use_cache=False, **inputs).logits[:, -1].float()


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind, settings", KINDS)
def test_G4_decoder_gives_the_logits_of_the_plain_model(kind, settings, bf16, monkeypatch):
    """With any ids as padding, prompts that repeat, a cache that grows."""
    monkeypatch.setattr(decoding, "BLOCK", 3)
    lm = make_lm(kind, **settings)
    mask = CONTEXTS != PAD
    responses = tiny.make_responses(15, LENGTH)
    read = []

    def keep_shape(module, args):
        read.append(tuple(args[0].shape))

    limit = 1e-5
    if bf16:
        limit = 0.1 if kind in tiny.HYBRIDS else 0.03  # the plain hybrid itself is off by as much
    pads = torch.randint(-1, 999, CONTEXTS.shape)
    batch = decoding.DecodingBatch(lm, CONTEXTS.where(mask, pads), mask, LENGTH)
    for step in range(LENGTH):
        tokens = torch.cat([CONTEXTS, responses[:, :step]], dim=1)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            expected = next_logits(lm, tokens)
            handle = lm.get_input_embeddings().register_forward_pre_hook(keep_shape)
            logits = batch.next_logits()
            handle.remove()
        assert logits.dtype == torch.float32
        error = (logits - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.max() < limit, step
        batch.append(responses[:, step])
    first = (1, 25) if lm.base_model.max_unpadded else (5, 8)  # distinct prompts, real tokens only
    assert read == [first] + [(15, 1)] * (LENGTH - 1)


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_G4_responses_that_have_ended_leave_the_batch(number, monkeypatch):
    """Up to their ends all are the same to the bit as when none leaves, whatever the batch size."""
    kind, settings = KINDS[number]
    size = (1, 17, 40)[number % 3]
    monkeypatch.setattr(decoding, "BLOCK", 16)
    rows = tiny.end_soon(monkeypatch)  # an EOS task ends at token 0
    lm = make_lm(kind, **settings)
    inputs = make_contexts([8, 3, 5, 8, 1] * 8, 8)[:size], tiny.uniform(50, size)
    with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 1):
        full = tiny.sample(lm, *inputs)
        assert rows == [size] * 50
        for after in (0, 4):
            rows.clear()
            found = tiny.sample(lm, *inputs, eos_task=True, truncate_after=after)
            ids = TokenIds(PAD, [0], [], [], after)
            expected, ended = truncate(full, ids)
            assert torch.equal(truncate(found, ids)[0], expected)
            lengths = (expected != PAD).sum(dim=1).masked_fill(~ended, 50)
            for begin in range(0, len(rows), 16):  # checked after every 16 tokens
                left = int((lengths > begin).sum())
                expected_rows = min(max(left, decoding.MIN_ROWS), size)
                assert set(rows[begin : begin + 16]) == {expected_rows}
            assert len(rows) == min(math.ceil(lengths.max() / 16) * 16, 50)
        assert size < 40 or rows[-1] < 40


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_G4_generate_samples_what_a_loop_without_a_cache_does(kind):
    lm, tokens = make_lm(kind), CONTEXTS
    torch.manual_seed(0)
    for _ in range(LENGTH):
        probs = (next_logits(lm, tokens) / 0.7).softmax(dim=-1)
        new = torch.multinomial(probs, num_samples=1)
        tokens = torch.cat([tokens, new], dim=1)
    torch.manual_seed(0)
    found = decoding.generate(lm, CONTEXTS, PAD, LENGTH, 0.7)
    assert torch.equal(found, tokens[:, -LENGTH:])


def test_G4_the_plain_loop_in_the_comment_of_sample_finds_the_same_tokens():
    contexts = make_contexts([8, 2, 5], 8)
    uniform = utils.random_numbers(1, 0, contexts.device, 6, 3)
    found = tiny.sample(make_lm(), contexts, uniform)
    comment = re.search(r"Without it:\n +#\n((?: +#  .*\n)+)", inspect.getsource(ppo.sample))[1]
    code = textwrap.dedent(re.sub("^ +#", "", comment, flags=re.M))
    sampled = []

    def sample_token(logits, numbers):
        sampled.append(utils.sample_token(logits, numbers))
        return sampled[-1]

    names = dict(lm=make_lm(), contexts=contexts, uniform=uniform, ids=tiny.IDS)
    names |= dict(R=6, temperature=0.7, sample_token=sample_token, F=torch.nn.functional)
    with torch.no_grad():
        exec(code, names)
    assert torch.equal(torch.stack(sampled, dim=1), found)
