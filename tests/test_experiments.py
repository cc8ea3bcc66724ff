"""diffs/: experiments that change what is sampled. Their losses are in test_diffs.py."""

from pathlib import Path

import formats
import numpy as np
import pytest
import test_diffs
import test_tokens
import tiny
import torch

import utils
from machinery.decoding import Decoder
from machinery.tokens import load_tokenizer

patched, start, task = test_diffs.patched, test_diffs.start, test_diffs.task
SLOW = pytest.mark.slow


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_tools_sampling_continues_after_what_the_tool_inserts(calls, patched, monkeypatch):
    """The answer depends on the response so far, and is cut at R tokens."""
    script, lm, task = patched("tools"), tiny.make_lm(), tiny.make_task(response_length=12)
    contexts, uniform = tiny.make_contexts([3, 6, 8, 1] * 4, 8), tiny.uniform(12, 16)
    decoder, tokenizer = Decoder(lm, 12), tiny.Tokenizer()
    caller = tiny.sample(decoder, contexts, uniform).flatten().mode().values.item()
    encode = lambda _, texts, own: ([[int(x) for x in texts[0].split()]], [], 0)  # noqa: E731
    monkeypatch.setattr(script, "encode_after", encode)
    tool = lambda contexts, responses: [f"{len(x.split())} 7" for x in responses]  # noqa: E731
    monkeypatch.setattr(script, "load_tool", lambda args: (tool, tokenizer, caller))
    args = tiny.make_args(task, script, tool_fn="mine.py:tool", tool_calls=calls)
    found = script.sample(decoder, contexts, uniform, tiny.IDS, args)
    for row, context in enumerate(contexts):
        tokens, expected, answer, left = context[context != tiny.PAD].tolist(), [], [], calls
        for t in range(12):
            logits = lm(torch.tensor([tokens])).logits[:, -1] / task.temperature
            own = utils.sample_token(logits, uniform[t, row : row + 1]).item()
            mark = 1 if answer else 0
            tokens.append(answer.pop(0) if mark else own)
            if own == caller and left and not mark:
                mark, answer, left = -1, [t + 1, 7], left - 1
            expected.append(tokens[-1] + mark * (tiny.PAD + 1))
        assert found[row].tolist() == expected
    assert (found > tiny.PAD).any() == (calls > 0)


@pytest.mark.parametrize("kind", ["llama2", "small", pytest.param("smollm2", marks=SLOW)])
def test_tools_an_answer_is_a_text_or_the_users_turn(kind, patched, here):
    """Without the space that a tokenizer adds. A call ends no response, not even by an end token."""
    tool_token = end = test_tokens.END
    turns = [f"It is.{end}", f"I saw.{end}"]
    answer = f"\n<|im_start|>user\nWhy?{end}\n<|im_start|>assistant\n"
    text = answer.join(turns)
    if kind == "llama2":
        tool_token, end, turns, answer, text = "?", "</s>", ["7?", "8</s>"], "42", "7?42 8</s>"
    tokenizer = getattr(formats if kind == "llama2" else test_tokens, f"{kind}_tokenizer")()
    tiny.make_lm(vocab=len(tokenizer)).save_pretrained(here / "model")
    tokenizer.save_pretrained(here / "model")
    Path("tool.py").write_text(f"def ask(*texts): return [{answer!r}]")
    model = str(here / "model")  # `load_tool` is cached
    task = tiny.make_task(base_model=model, truncate_token=end, truncate_after=0, eos_task=True)
    script, ids = patched("tools"), load_tokenizer(task, 5)[1]
    args = tiny.make_args(task, script, tool_fn="tool.py:ask", tool_token=tool_token)
    responses, start = torch.full((1, 60), ids.pad), 0
    for turn in turns:  # the second may call no more
        assert not script.truncate(responses, ids.ends, 0, ids.pad)[1]
        tokens = tokenizer.encode(turn, add_special_tokens=False)
        responses[0, start : start + len(tokens)] = torch.tensor(tokens)
        script.insert_answers(responses, responses, start + len(tokens) - 1, ids, args)
        start = int((responses != ids.pad).sum())
    responses[0, start:] = tokens[0]
    truncated, ended = script.truncate(responses, ids.ends, 0, ids.pad)
    tokens = (truncated % (ids.pad + 1))[truncated != ids.pad]
    assert ended and tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("limit", [0, 1, 20])
def test_dynamic_sampling_replaces_groups_with_equal_scores_until_the_limit(limit, start):
    score, scored = lambda responses: (responses.sum(dim=1) % 4 == 0).float(), []
    spy = lambda *_: tiny.FakeReward(lambda *x: scored.append(x) or score(x[1]))  # noqa: E731
    flags = dict(max_resamples=limit, eval_queries=3, num_minibatches=1)
    run = start("dynamic_sampling", load_reward=spy, **flags)
    batches = iter([torch.cat(x, dim=1) for x in scored if len(x[0]) != 3])  # no evaluations
    for rollout, line in zip(run.rollouts, run.metrics, strict=False):
        missing, kept, sizes = range(4), {}, []
        while missing and len(sizes) <= limit:
            batch = next(batches)
            sizes.append(len(missing))
            kept |= {query: batch[4 * i : 4 * i + 4] for i, query in enumerate(missing)}
            missing = [i for i in missing if len(score(kept[i][:, 8:]).unique()) == 1]
        found = torch.cat([rollout.queries, rollout.responses], dim=1)
        assert all(torch.equal(found[4 * i : 4 * i + 4], kept[i]) for i in kept)
        assert line["objective/sampled_batches"] == sum(sizes) / 4
        dropped = sum(sizes[1:]) + len(missing)
        assert line["objective/frac_reward_zero_std"] == pytest.approx(dropped / sum(sizes))
    assert not [*batches]


def test_curriculum_draws_queries_by_1_minus_the_mean_score_of_their_last_responses(patched, start):
    """Weights are at least 0.3, and frequencies are those of weights."""
    own, draws = patched("curriculum").query_rows, []
    spy = lambda weights, *x: draws.append((weights, own(weights, *x))) or draws[-1][1]  # noqa: E731
    flags = dict(total_episodes=256, min_weight=0.3, score=lambda x: x[:, 0] % 3 - 1.0)
    run = start("curriculum", query_rows=spy, **flags)
    success, again = np.zeros(len(draws[0][0])), 0
    for rollout, (weights, rows) in zip(run.rollouts, draws, strict=True):
        assert weights == pytest.approx(np.maximum(1 - success, 0.3))
        again += success[rows].astype(bool).sum()
        for i, row in enumerate(rows):
            success[row] = min(max(rollout.scores[4 * i : 4 * i + 4].mean().item(), 0), 1)
    assert again > 4 and len(np.unique(success)) > 3
    found = np.bincount([own(np.array([0.3, 0.5, 1.2]), 1, 1, i).item() for i in range(2000)])
    assert found / 2000 == pytest.approx([0.15, 0.25, 0.6], abs=0.05)


@pytest.mark.parametrize("name", ["rloo", "dapo", "dynamic_sampling"])
def test_scores_of_a_group_are_equal_by_their_own_spread(name, start):
    """Not by one relative to their size, nor if only their mean is another one than the others'."""
    for base, spread in ((1e6, 1.0), (1e3, 0.01), (1e6, 0.0)):
        score = lambda x, b=base, s=spread: b + s * (torch.arange(len(x)) % 4 == 1)  # noqa: E731
        run = start(name, rloo_k=4, eval_queries=4, score=score)
        assert {line["objective/frac_reward_zero_std"] for line in run.metrics[:2]} == {spread == 0}
