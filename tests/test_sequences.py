"""Sequences that sft.py learns: blocks of texts, prompts with responses."""

import copy
import functools
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from formats import write_rows
from test_queries import POST, SHORTER, load_queries, rows_of, tokenizer_of
from tiny import WORDS
from tokenizers.processors import TemplateProcessing

import ppo
import rloo
import sft
import train_reward
from data import tasks
from machinery import queries, sequences
from machinery.cli import InputError
from machinery.functions import import_file
from machinery.labels import load_labels
from machinery.models import load_lm
from machinery.tokens import load_tokenizer, same_tokens
from utils import TokenIds

EOS_ROWS = [
    {"prompt": "Anna saw it.", "completion": " Ben saw it too."},
    {"prompt": "Ben saw Anna.", "completion": " So."},
    {"prompt": "Ben saw Anna.", "completion": " So.<|endoftext|>"},  # some datasets have the end
    {"prompt": " ", "completion": " nothing"},
    {"prompt": "Anna", "completion": ""},
    {"prompt": "So", "completion": " the end of the story was that Ben was glad and so was Anna."},
]


@pytest.fixture
def eos_task(task, tmp_path) -> tasks.Task:
    """The embedded EOS task's settings on rows that are written by hand."""
    return replace(
        tasks.TASKS["synthetic_eos"],
        base_model=task.base_model,
        query_dataset=write_rows(tmp_path / "eos.jsonl", EOS_ROWS),
        query_length=6,
        query_prefix="So",
        query_suffix=" was Anna.",
        response_length=8,
        gold_fn=None,
    )


def load_responses(task: tasks.Task, tokenizer=None) -> torch.Tensor:
    own, ids = load_tokenizer(task, task.response_length)
    return sequences.load_responses(task, tokenizer or own, ids)[:]


def test_X9_sft_sequences_of_an_eos_task_are_context_response_and_one_end(eos_task):
    """Contexts are padded on the left, as the policy sees them, and responses after their end; a
    response that is too long has none."""
    tokenizer, _ = load_tokenizer(eos_task, 8)
    expected = []
    for row in (EOS_ROWS[i] for i in (0, 1, 1, 5)):
        prompt = tokenizer.encode(row["prompt"])[:6]
        response = [*tokenizer.encode(row["completion"]), tokenizer.eos_token_id][:8]
        context = [*tokenizer.encode("So"), *prompt, *tokenizer.encode(" was Anna.")]
        padded = [WORDS] * (6 - len(prompt)) + context + response + [WORDS] * (8 - len(response))
        expected.append(padded)
    found = load_responses(eos_task)
    assert found.tolist() == expected
    assert (found == tokenizer.eos_token_id).sum(dim=1).tolist() == [1, 1, 1, 0]


def test_X9_sft_learns_responses_with_their_end_and_neither_prompts_nor_padding(eos_task):
    """Each sequence alone, without padding, token by token."""
    rows, lm = load_responses(eos_task), load_lm(eos_task.base_model)
    losses = sft.LanguageModel(lm, WORDS)(rows, rows.shape[1] - 8)
    for i, row in enumerate(rows.tolist()):
        context, response = [token for token in row[:-8] if token != WORDS], row[-8:]
        for t in range(8):
            expected = 0
            if response[t] != WORDS:
                logits = lm(torch.tensor([context + response[:t]])).logits[0, -1]
                expected = -logits.log_softmax(0)[response[t]].item()
            assert losses[i, t].item() == pytest.approx(expected, abs=1e-4)


def blocks_by_hand(texts: list[str], tokenizer, size: int) -> list[list[int]]:
    """Text after text; all but the first of a block with a space before them; what does not fit
    into a block that is full is dropped."""
    blocks, block = [], []
    for text in filter(None, map(str.strip, texts)):
        block = block + tokenizer.encode(" " + text if block else text)
        if len(block) >= size:
            blocks, block = [*blocks, block[:size]], []
    return blocks


def load_blocks(task: tasks.Task, block_size: int, tokenizer=None, load=sequences.load_blocks):
    ids = TokenIds(WORDS, None, [], [])
    return load(task, block_size, tokenizer or tokenizer_of(task), ids)[:].tolist()


@pytest.mark.parametrize("batch", [1, 3, 10_000])
def test_sft_blocks_do_not_depend_on_the_batches_that_texts_come_in(
    batch, task, tmp_path, monkeypatch
):
    """A block continues in the next batch, also over blank ones, and begins with a text's start."""
    texts = [f"  {name} saw {i} cats." for i in range(20) for name in ("Anna", "Ben ")]
    texts += [""] * 8 + ["The end."] * 30
    task = replace(task, query_dataset=write_rows(tmp_path / "t.txt", [{"text": t} for t in texts]))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")  # an empty one
    in_batches = functools.partialmethod(datasets.Dataset.map, batch_size=batch)
    monkeypatch.setattr(datasets.Dataset, "map", in_batches)
    tokenizer = tokenizer_of(task)
    expected = blocks_by_hand(texts, tokenizer, 11)
    assert load_blocks(task, 11) == expected and len(expected) > 20


def test_another_way_to_make_blocks_makes_another_table(task, tmp_path, monkeypatch):
    """A changed copy of the code never gets the cached blocks of the original."""
    original = load_blocks(task, 10)
    source = Path(sequences.__file__).read_text()
    changed = source.replace("append(rest[:block_size])", "append(rest[:block_size][::-1])")
    assert changed != source
    (tmp_path / "mine.py").write_text(changed)
    mine = import_file(str(tmp_path / "mine.py"))
    assert load_blocks(task, 10, load=mine.load_blocks) == [row[::-1] for row in original]


def test_a_tokenizer_that_adds_a_token_in_front_adds_none_anywhere(task, eos_task, tmp_path):
    """As Llama's and Gemma's `encode` add one."""
    plain = tokenizer_of(task)
    adds = copy.deepcopy(plain)
    special = [("<|endoftext|>", 0)]
    template = TemplateProcessing(single="<|endoftext|> $A", special_tokens=special)
    adds.backend_tokenizer.post_processor = template
    assert adds.encode("Anna") == [0, *plain.encode("Anna")]
    assert same_tokens(adds, plain) and same_tokens(plain, adds)  # 29

    pairs = [{"prompt": POST, "chosen": " the end", "rejected": " Ben"}] * 2
    post = replace(
        task,
        query_dataset=write_rows(tmp_path / "posts.jsonl", [{"text": POST}]),
        label_dataset=write_rows(tmp_path / "pairs.jsonl", pairs),
        keep_last_line=True,
        query_length=len(plain.encode(SHORTER[0])),
    )

    def everything(tokenizer, monkeypatch):
        monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda name: tokenizer)
        labels = load_labels(post, tokenizer, TokenIds(WORDS, 7, [], []))
        return (
            rows_of(load_queries(post, tokenizer=tokenizer)),
            load_tokenizer(replace(task, query_prefix="Anna", query_suffix=" the end"), 5)[1],
            [row.tolist() for row in labels.batch(np.arange(2), WORDS)],
            load_responses(eos_task, tokenizer).tolist(),
            load_blocks(task, 9, tokenizer),
        )

    with pytest.MonkeyPatch.context() as patch:
        expected = everything(plain, patch)
        assert expected[0] == [tuple(plain.encode(SHORTER[0]))]
        assert everything(adds, patch) == expected


def test_every_script_asks_for_the_queries_that_it_can_use_and_needs_prompts_only(
    eos_task, tmp_path, monkeypatch
):
    """PPO takes one query an episode, RLOO one for `rloo_k` of them, train_reward two for each of its
    samples, in whole batches (R3). Only sft.py reads `response_column`."""
    rows = [{"prompt": f"Ben saw {i}."} for i in range(9)]
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    pairs = [{"prompt": "So", "chosen": " the end", "rejected": " Ben"}] * 16
    labels = write_rows(tmp_path / "pairs.jsonl", pairs)
    task, seen = replace(eos_task, query_dataset=prompts, label_dataset=labels), []

    def spy(task, tokenizer, ids, max_queries, *functions):
        seen.append((len(queries.load_queries(task, tokenizer, ids, max_queries)), max_queries))
        raise KeyError("enough")

    monkeypatch.chdir(tmp_path)
    settings = dict(num_labels=12, batch_size=4, normalize_samples=5, rollout_batch_size=4)
    for script, args in (
        (ppo, ppo.Args(task=task, total_episodes=1234, batch_size=4)),
        (rloo, rloo.Args(task=task, total_episodes=1236, batch_size=4, rloo_k=4)),
        (train_reward, train_reward.Args(task=task, **settings)),
    ):
        monkeypatch.setattr(script, "load_queries", spy)
        with pytest.raises(KeyError, match="enough"):
            script.main(args)
    assert seen == [(9, 1234), (9, 309), (9, 16)]
    with pytest.raises(InputError, match="'completion'"):
        sft.main(sft.Args(task=task, num_heldout=1, batch_size=1))
