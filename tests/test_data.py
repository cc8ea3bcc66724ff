"""Queries from local files in the forms of the hub's datasets; the table of tokens and its cache;
sequences of sft.py; the embedded synthetic task; the tasks' settings."""

import copy
import doctest
import filecmp
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import formats
import huggingface_hub
import numpy as np
import pytest
import tiny
import torch
from tiny import WORDS
from tokenizers.processors import TemplateProcessing

import ppo
import rloo
import sft
import train_reward
import utils
from data import tasks
from machinery import data, hub, sequences
from machinery.cli import InputError, parse_args
from machinery.functions import load_function
from machinery.labels import load_labels
from machinery.models import load_lm, load_tokenizer
from machinery.rewards import same_tokens
from machinery.sources import load_rows
from utils import TokenIds, query_rows

ROOT = Path(__file__).parent.parent
SENTENCES = [
    "Anna saw the old red house .",
    "",
    "  \t",
    "Ben was glad .",
    "The cat slept under the table in the kitchen .",
    "So .",
]


def write_rows(path: Path, rows: list[dict]) -> str:
    """A data file in the format that its name ends with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".txt":
        path.write_text("\n".join(row["text"] for row in rows) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        getattr(datasets.Dataset.from_list(rows), f"to_{path.suffix[1:]}")(str(path))
    return str(path)


def write_sentences(path: Path, n: int = 100) -> str:
    """A file of `n` different sentences."""
    return write_rows(path, [{"text": f"Anna saw {i} cats. So did Ben."} for i in range(n)])


def tokenizer_of(task: tasks.Task):
    return load_tokenizer(task, task.response_length)[0]


def load_queries(task: tasks.Task, max_queries: int = 1000, tokenizer=None) -> data.TokenTable:
    """The table of queries with the task's own tokenizer or another one."""
    own, ids = load_tokenizer(task, task.response_length)
    return data.load_queries(task, tokenizer or own, ids, max_queries)


def rows_of(table) -> list[tuple[int, ...]]:
    return [tuple(row) for row in table[:].tolist()]


# ------------------------------------------------------------------------------------------ queries


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "json", "parquet", "csv"])
def test_G2_books_are_one_sentence_a_row_in_any_format_padded_on_the_left(suffix, task, tmp_path):
    rows = [{"text": sentence} for sentence in SENTENCES]
    task = replace(task, query_dataset=write_rows(tmp_path / f"books.{suffix}", rows))
    table, tokenizer = load_queries(task), tokenizer_of(task)
    expected = [tokenizer.encode(SENTENCES[i])[:8] for i in (0, 3, 4, 5)]  # blank rows: no queries
    assert {len(row) for row in expected} != {8}
    assert sorted(rows_of(table)) == sorted((WORDS,) * (8 - len(r)) + tuple(r) for r in expected)


def test_a_large_source_is_sampled_without_replacement(task):
    few, everything = replace(task, num_queries=30), set(rows_of(load_queries(task)))
    sample = rows_of(load_queries(few))
    assert len(sample) == len(set(sample)) == 30 and set(sample) < everything
    assert len(everything) == 40 and rows_of(load_queries(few)) == sample


ARTICLES = [*formats.CNNDM[2:], formats.CNNDM[2] | {"article": "Nothing here ends a sentence"}]


@pytest.fixture
def cnndm(task, tmp_path) -> tasks.Task:
    """The task's own settings; lengths and model are tiny."""
    return replace(
        tasks.TASKS["cnndm"],
        base_model=task.base_model,
        query_dataset=write_rows(tmp_path / "cnn.parquet", ARTICLES),
        query_length=40,
        response_length=8,
        truncate_after=4,
    )


def test_P3_cnndm_queries_are_cleaned_end_a_sentence_and_have_prefix_and_suffix(cnndm):
    tokenizer, ids = load_tokenizer(cnndm, 8)
    queries = load_queries(cnndm)[:]
    texts = [
        "The Senate voted on Tuesday. The bill passed by 51 to 49, a clerk said .",
        "Rain fell on Sunday. It did not stop.",
    ]
    assert utils.decode(tokenizer, queries, ids.pad) == texts
    contexts = utils.add_affixes(queries, ids)
    expected = [f"Article:\n\n{text}\n\nTL;DR:" for text in texts]
    assert utils.decode(tokenizer, contexts, ids.pad) == expected
    for row in contexts.tolist():  # all padding is on the left
        assert row == sorted(row, key=lambda token: token != ids.pad)
    assert [ids.truncate] == tokenizer.encode("\n")


@pytest.mark.parametrize("script", [ppo, rloo])
def test_prefix_and_suffix_go_to_the_policy_and_not_to_the_reward_model(script, cnndm):
    tokenizer, ids = load_tokenizer(cnndm, 8)
    queries, seen = load_queries(cnndm)[:], []
    policy = tiny.make_policy(script=script, vocab=WORDS)
    rollout = tiny.make_rollout(
        policy,
        tiny.make_args(cnndm, script),
        script,
        ref=policy,
        reward=lambda q, r: seen.append(q) or torch.zeros(2),
        queries=queries,
        responses=torch.full((2, 8), 20),
        minibatches=[torch.arange(2)],
        ids=ids,
    )
    assert torch.equal(seen[0], queries)
    texts = utils.decode(tokenizer, rollout.contexts, ids.pad)
    assert all(text.startswith("Article:") and text.endswith("TL;DR:") for text in texts)


POST = "TITLE: soup\n\nPOST: Anna saw it.\nBen saw it too.\nThe end.\n\nTL;DR:"
SHORTER = [
    "TITLE: soup\n\nPOST: Anna saw it.\nBen saw it too.\n\nTL;DR:",
    "TITLE: soup\n\nPOST: Anna saw it.\n\nTL;DR:",
]


def test_a_prompt_that_is_too_long_loses_lines_before_its_last_one(task):
    """TL;DR: as in [N+]: whole lines go until it fits."""
    tokenizer = tokenizer_of(task)
    length = {text: len(tokenizer.encode(text)) for text in (POST, *SHORTER)}
    for query_length, expected in (
        (length[POST], POST),
        (length[SHORTER[0]], SHORTER[0]),
        (length[SHORTER[0]] - 1, SHORTER[1]),  # one token less is one line less
        (length[SHORTER[1]], SHORTER[1]),
    ):
        task = replace(task, keep_last_line=True, query_length=query_length)
        assert data.tokenize_queries([POST], task, tokenizer) == [tokenizer.encode(expected)]
    line = "Anna saw the old red house"  # there is no other line to drop
    (cut,) = data.tokenize_queries([line], replace(task, query_length=2), tokenizer)
    assert cut == tokenizer.encode(line)[:2]


def test_the_id_of_a_text_is_the_one_that_it_has_inside_of_a_text():
    """In Llama 2's form "." alone is not the token that ends "dog."."""
    tokenizer = formats.llama2_tokenizer(["dog"])
    period, _, dog = (tokenizer.convert_tokens_to_ids(piece) for piece in (".", "▁.", "▁dog"))
    assert tokenizer.encode(".") != [period] and tokenizer.encode("dog. dog.") == [dog, period] * 2
    assert data.single_token(tokenizer, ".", "--truncate_token") == period
    assert data.single_token(tokenizer, "dog", "--truncate_token") == dog  # as it is in a text
    with pytest.raises(InputError, match="--truncate_token 'dog.'"):
        data.single_token(tokenizer, "dog.", "--truncate_token")


# ------------------------------------------------------------------------------------------ sources


def save_splits(path: Path, form: str) -> str:
    """The splits train and test, or only train, in one of the forms that people have."""
    texts = {"train": "Anna .", "test": "Ben ."}
    splits = {name: datasets.Dataset.from_dict({"text": [text]}) for name, text in texts.items()}
    if form == "file":
        return write_rows(path.with_suffix(".csv"), list(splits["train"]))
    if form == "parquet files":
        for name, rows in splits.items():
            write_rows(path / f"data/{name}-00000-of-00001.parquet", list(rows))
    elif form == "DatasetDict":
        datasets.DatasetDict(splits).save_to_disk(path)
    else:
        splits["train"].save_to_disk(path)
    return str(path)


@pytest.mark.parametrize("form", ["file", "parquet files", "Dataset", "DatasetDict"])
def test_files_and_folders_are_data_sources_of_which_at_selects_a_split(form, tmp_path):
    source = save_splits(tmp_path / "f@home", form)  # what is in a name that exists selects nothing
    for name in (source, f"{source}@train"):
        assert load_rows(name, "--flag")["text"][:] == ["Anna ."]
    if form in ("parquet files", "DatasetDict"):
        assert load_rows(f"{source}@test", "--flag")["text"][:] == ["Ben ."]
    with pytest.raises(InputError, match="--flag .*dev"):
        load_rows(f"{source}@dev", "--flag")


def test_a_folder_without_rows_is_refused(tmp_path):
    """As `Dataset.filter` and `save_to_disk` write it."""
    rows = datasets.Dataset.from_dict({"text": ["Anna ."]}).filter(lambda row: False)
    rows.save_to_disk(tmp_path / "none")
    with pytest.raises(InputError, match="--flag .*none has no rows"):
        load_rows(str(tmp_path / "none"), "--flag")


def test_a_missing_dataset_is_not_called_an_unreachable_hub(monkeypatch):
    """The hub answers that there is none, or that access is denied: datasets raises an OSError."""

    def load_dataset(name, *rest, **options):
        raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")

    monkeypatch.setattr(hub, "go_offline_if_unreachable", lambda: None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match="--flag me/tldrr .* doesn't exist on the Hub"):
        load_rows("me/tldrr", "--flag")


def test_the_table_of_tokens_is_not_written_into_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.Dataset.from_dict({"text": SENTENCES})
    rows.save_to_disk(tmp_path / "mine")
    before = sorted((tmp_path / "mine").iterdir())
    task = tiny.make_task(
        base_model=str(tiny.write_model(tmp_path / "m")), query_dataset=str(tmp_path / "mine")
    )
    tokenizer, ids = load_tokenizer(task, 5)
    assert len(data.load_queries(task, tokenizer, ids, 8)) == 4
    assert sorted((tmp_path / "mine").iterdir()) == before
    assert list((tmp_path / "cache").glob("*.arrow"))


def test_end_text_with_keep_last_line_is_refused(tmp_path):
    task = tiny.make_task(keep_last_line=True, end_text=".")
    with pytest.raises(InputError, match="end_text .*--no-keep_last_line"):
        data.load_queries(task, None, None, 8)


def test_the_advice_for_an_unreachable_configuration_works_once_it_is_followed(
    tmp_path, monkeypatch
):
    """Its command makes a folder of three configurations, which any path may name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError) as caught:
        load_rows("abisee/cnn_dailymail:3.0.0", "--query_dataset")
    advice = str(caught.value).split("--query_dataset ")[-1].split()[0]
    configs = ""
    for version in ("1.0.0", "2.0.0", "3.0.0"):
        file = Path("cnn_dailymail", version, "train-00000-of-00001.parquet")
        write_rows(file, [{"article": f"of {version}"}])
        configs += f"- config_name: {version}\n  data_files:\n"
        configs += f"  - split: train\n    path: {version}/train-*\n"
    Path("cnn_dailymail/README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for source in (advice, f"{advice}@train", f"./{advice}", f"{tmp_path}/{advice}"):
        assert load_rows(source, "--query_dataset")["article"][:] == ["of 3.0.0"]


# ------------------------------------------------------------------------------- sequences of sft.py

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
    tokenizer, ids = load_tokenizer(eos_task, 8)
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
    contexts = utils.add_affixes(load_queries(eos_task)[:], ids).tolist()
    assert {tuple(row) for row in found[:, :-8].tolist()} <= set(map(tuple, contexts))


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
    names = ("Anna", "Ben ")
    texts = [f"  {name} saw {i} cats." for i in range(20) for name in names]
    texts += [""] * 8 + ["The end."] * 30
    task = replace(task, query_dataset=write_rows(tmp_path / "t.txt", [{"text": t} for t in texts]))
    dataset_map = datasets.Dataset.map
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")  # an empty one
    monkeypatch.setattr(
        datasets.Dataset, "map", lambda *a, **k: dataset_map(*a, **k | dict(batch_size=batch))
    )
    tokenizer = tokenizer_of(task)
    expected = blocks_by_hand(texts, tokenizer, 11)
    assert load_blocks(task, 11) == expected and len(expected) > 20
    starts = {tokenizer.encode(text)[0] for text in ("Anna", "Ben", "The")}
    assert {row[0] for row in expected} <= starts
    assert not starts & {tokenizer.encode(text)[0] for text in (" Anna", " Ben", " The")}


def test_another_way_to_make_blocks_makes_another_table(task, tmp_path, monkeypatch):
    """A changed copy of the code never gets the cached blocks of the original."""
    original = load_blocks(task, 10)
    source = Path(sequences.__file__).read_text()
    changed = source.replace("append(rest[:block_size])", "append(rest[:block_size][::-1])")
    assert changed != source
    (tmp_path / "mine.py").write_text(changed)
    mine = load_module(tmp_path / "mine.py", monkeypatch)
    assert load_blocks(task, 10, load=mine.load_blocks) == [row[::-1] for row in original]


def load_module(path: Path, monkeypatch=None):
    """A Python file as a module of another name; with monkeypatch `inspect` finds it."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    if monkeypatch:
        monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_a_tokenizer_that_adds_a_token_in_front_adds_none_anywhere(task, eos_task, tmp_path):
    """Llama's and Gemma's `encode` do: queries, prompts that lose lines, affixes, stop tokens,
    labels and sequences of sft.py have the texts' own ids only."""
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
            data.keep_last_line("Anna saw the old red house", 3, tokenizer),
            [row.tolist() for row in labels.batch(np.arange(2), WORDS)],
            load_responses(eos_task, tokenizer).tolist(),
            load_blocks(task, 9, tokenizer),
        )

    with pytest.MonkeyPatch.context() as patch:
        expected = everything(plain, patch)
        assert expected[0] == [tuple(plain.encode(SHORTER[0]))]
        assert everything(adds, patch) == expected


# ------------------------------------------------------------------------------ the table of tokens


@pytest.fixture
def tokenized(monkeypatch) -> list[str]:
    """Every text that is tokenized as a query from now on."""
    seen, tokenize = [], data.tokenize_queries

    def spy(texts, *rest):
        seen.extend(texts)
        return tokenize(texts, *rest)

    monkeypatch.setattr(data, "tokenize_queries", spy)
    return seen


@pytest.fixture
def many(task, tmp_path) -> tasks.Task:
    """A task of 100 different sentences."""
    return replace(task, query_dataset=write_sentences(tmp_path / "many.txt"))


def test_a_run_of_few_episodes_tokenizes_few_rows_and_holds_out_the_same_ones(
    many, tokenized, monkeypatch
):
    """A table of all would take minutes; one below SMALL_TABLE is not worth a cache of its own."""
    monkeypatch.setattr(data, "SMALL_TABLE", 8)
    heldout = []
    for needed, expected in ((1, 8), (8, 8), (30, 30), (1000, 100)):
        tokenized.clear()
        table = load_queries(many, needed)
        assert len(set(tokenized)) == len(tokenized) == (0 if needed == 8 else expected)  # cached
        held, rest = map(rows_of, table.hold_out(5))
        assert len(table) == expected and len(set(rest) - set(held)) == len(rest) == expected - 5
        heldout.append(held)
    assert all(held == heldout[0] for held in heldout) and len(heldout[0]) == 5
    with pytest.raises(InputError, match="100 of 100"):
        table.hold_out(100)


def test_a_heldout_query_is_not_trained_on_where_it_is_once_more(task, tmp_path):
    lines = [{"text": f"Anna saw {i} cats."} for i in range(30)]
    task = replace(task, query_dataset=write_rows(tmp_path / "twice.txt", lines * 2))
    held, rest = map(rows_of, load_queries(task).hold_out(10))
    assert not set(held) & set(rest) and len(set(held) | set(rest)) == 30
    assert len(rest) == 60 - 2 * len(set(held))  # duplicates of others stay
    one = replace(task, query_dataset=write_rows(tmp_path / "one.txt", lines[:1] * 8))
    with pytest.raises(InputError, match="2 of 8"):
        load_queries(one).hold_out(2)


def test_every_script_asks_for_the_queries_that_it_can_use_and_needs_prompts_only(
    eos_task, tmp_path, monkeypatch
):
    """PPO takes one query an episode, RLOO one for `rloo_k` of them, train_reward two for each of its
    samples, in whole batches (R3). Only sft.py reads `response_column`."""
    prompts = write_rows(
        tmp_path / "prompts.jsonl", [{"prompt": f"Ben saw {i}."} for i in range(9)]
    )
    pairs = [{"prompt": "So", "chosen": " the end", "rejected": " Ben"}] * 16
    labels = write_rows(tmp_path / "pairs.jsonl", pairs)
    task, seen = replace(eos_task, query_dataset=prompts, label_dataset=labels), []

    def spy(task, tokenizer, ids, max_queries, *functions):
        seen.append((len(data.load_queries(task, tokenizer, ids, max_queries)), max_queries))
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


def test_only_sft_starts_from_a_model_folder_without_weights(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("score.py").write_text("def score(queries, responses): return [0.0] * len(queries)")
    empty = tiny.write_model(tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    start, reward = replace(task, base_model=str(empty)), dict(reward_fn="score.py:score")
    sizes = dict(num_labels=12, batch_size=4, normalize_samples=5, rollout_batch_size=4)

    monkeypatch.setattr(sft, "LanguageModel", lambda lm, pad_id: seen.append(lm) or 1 / 0)
    seen = []
    with pytest.raises(ZeroDivisionError):
        sft.main(sft.Args(task=start, num_heldout=1, batch_size=1, block_size=10))
    assert seen[0].get_output_embeddings().weight.std() > 0.1  # random
    for script, args, flag in (
        (ppo, tiny.make_args(start, ppo, **reward), "base_model"),
        (rloo, tiny.make_args(start, rloo, **reward), "base_model"),
        (train_reward, train_reward.Args(task=start, **sizes), "base_model"),
        (
            train_reward,
            train_reward.Args(task=task, policy_model=str(empty), **sizes),
            "policy_model",
        ),
    ):
        with pytest.raises(InputError, match=f"--{flag} {empty} .*safetensors"):
            script.main(args)


def test_the_second_start_tokenizes_nothing(many, tokenized, monkeypatch):
    first = load_queries(many)
    assert len(tokenized) == 100
    assert torch.equal(first[:], load_queries(many)[:]) and len(tokenized) == 100
    for _ in range(2):  # a sample is found again, too
        load_queries(replace(many, num_queries=50))
        assert len(tokenized) == 150
    blocks = load_blocks(many, 16)
    monkeypatch.delattr(sequences, "make_blocks")
    assert load_blocks(many, 16) == blocks


CLEANER = """
import functools
import helper

def clean(text):
    return text.replace("cat", helper.word)

class Cleaner:
    def __call__(self, text):
        return clean(text)

part, thing = functools.partial(clean), Cleaner()
"""


@pytest.mark.parametrize("name", ["clean", "part", "thing"])
def test_what_a_users_function_cleaned_is_not_taken_from_an_earlier_run(
    name, task, tmp_path, monkeypatch
):
    """It may be of any kind and call anything: here a module that is edited between two runs."""
    (tmp_path / "mine.py").write_text(CLEANER)
    monkeypatch.setitem(sys.modules, "helper", SimpleNamespace(word="dog"))
    task = replace(task, clean_fn=f"{tmp_path / 'mine.py'}:{name}")
    load_function.cache_clear()
    first, blocks = load_queries(task)[:], load_blocks(task, 10)
    monkeypatch.setitem(sys.modules, "helper", SimpleNamespace(word="sea"))
    load_function.cache_clear()
    second = load_queries(task)[:]
    assert first.shape == second.shape and not torch.equal(first, second)
    assert load_blocks(task, 10) != blocks


def test_the_table_is_int32_in_a_file_and_gives_int64_rows_in_any_order(task):
    table = load_queries(task)
    assert table.rows.features["tokens"].feature.dtype == "int32" and table.rows.cache_files
    rows = np.array([5, 0, 39, 5])
    assert table[rows].dtype == torch.int64 and table[rows].shape == (4, 8)
    assert torch.equal(table[rows], table[:][rows]) and torch.equal(table[1:3], table[:][1:3])


CHANGES = {  # what makes another table
    "query_length": dict(query_length=7),
    "query_column": dict(query_column="title"),
    "start_text": dict(start_text="."),
    "end_text": dict(end_text="."),
    "keep_last_line": dict(keep_last_line=True),
    "num_queries": dict(num_queries=50),
    "clean_fn": dict(clean_fn="clean.py:short"),  # another function of the same file
}


@pytest.mark.parametrize("change", [*CHANGES, "source", "content", "tokenizer", "pad"])
def test_what_a_table_depends_on_makes_another_one(change, task, tmp_path, tokenized, monkeypatch):
    """A stale table would be silent: the run trains on other queries than it says."""
    monkeypatch.chdir(tmp_path)
    Path("clean.py").write_text("def same(x): return x\ndef short(x): return x[:9]\n")
    rows = [
        {"text": f"Anna saw {i} cats. So did Ben.", "title": f"Ben saw {i}."} for i in range(100)
    ]
    settings = dict(clean_fn="clean.py:same", truncate_token=None)
    task = replace(task, query_dataset=write_rows(tmp_path / "a.jsonl", rows), **settings)
    tokenizer, pad_id = tokenizer_of(task), WORDS
    before = rows_of(load_queries(task))
    tokenized.clear()
    if change in ("source", "content"):
        for row in rows:
            row["text"] = "The " + row["text"]
        name = "b.jsonl" if change == "source" else "a.jsonl"
        task = replace(task, query_dataset=write_rows(tmp_path / name, rows))
    elif change == "tokenizer":  # without its merges
        folder = tiny.write_model(tmp_path / "other")
        words = json.loads((folder / "tokenizer.json").read_text())
        words["model"]["merges"] = []
        (folder / "tokenizer.json").write_text(json.dumps(words))
        tokenizer = tokenizer_of(replace(task, base_model=str(folder)))
    elif change == "pad":
        pad_id += 1
    task = replace(task, **CHANGES.get(change, {}))
    after = rows_of(data.load_queries(task, tokenizer, TokenIds(pad_id, None, [], []), 1))
    assert len(tokenized) == len(after) == (50 if change == "num_queries" else 100)
    if change not in ("keep_last_line", "pad"):  # here nothing is cut or padded
        assert before != after


CHILD = """
import sys, time
from dataclasses import replace
from pathlib import Path
from data.tasks import TASKS
from machinery import data, models
folder = Path(sys.argv[1])
tokenize = data.tokenize_queries
def hang(texts, *rest):
    if (folder / "started").exists():
        time.sleep(600)
    (folder / "started").touch()
    return tokenize(texts, *rest)
data.tokenize_queries = hang
files = dict(base_model=sys.argv[2], query_dataset=str(folder / "many.txt"))
task = replace(TASKS["synthetic"], query_length=8, response_length=5, **files)
data.load_queries(task, *models.load_tokenizer(task, 5), 10**6)
"""


def test_processes_wait_at_a_file_lock_and_a_killed_one_leaves_no_table(
    task, tmp_path, monkeypatch, tokenized
):
    """No collective: these three know nothing of each other. The child is killed in its second
    batch; of two that waited for it one tokenizes, and the other one reads its table."""
    many = replace(task, query_dataset=write_sentences(tmp_path / "many.txt", 2500))
    cache = tmp_path / "cache"
    env = os.environ | {"HF_DATASETS_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, str(tmp_path), task.base_model]
    child = subprocess.Popen(command, env=env)
    try:
        end = time.monotonic() + 120
        while not (tmp_path / "started").exists():
            assert time.monotonic() < end and child.poll() is None
            time.sleep(0.02)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(load_queries, many, 10**6) for _ in range(2)]
            time.sleep(1)
            assert not tokenized and not any(future.done() for future in waiting)
            child.kill()
            tables = [future.result(timeout=60)[:] for future in waiting]
    finally:
        child.kill()
        child.wait()
    assert len(tokenized) == 2500 and torch.equal(*tables)
    tokenizer, order = tokenizer_of(task), np.random.default_rng(0).permutation(2500)
    for i in (0, 999, 1000, 2499):
        expected = tokenizer.encode(f"Anna saw {order[i]} cats. So did Ben.")[:8]
        assert tables[0][i].tolist() == expected


# -------------------------------------------------------------------------------------------- order


def test_G6_rows_of_a_step_are_a_pure_function_and_visit_every_row_once_an_epoch():
    """10 rows, 4 a step: steps 0 to 4 are two epochs, whatever was asked for before; every process,
    which has a seed of its own, visits all rows in another order."""
    orders = []
    for seed in (1, 100_004, 200_007):
        steps = [query_rows(10, 4, step, seed).tolist() for step in range(5)]
        assert [query_rows(10, 4, step, seed).tolist() for step in (4, 0)] == [steps[4], steps[0]]
        flat = sum(steps, [])
        orders += [tuple(flat[:10]), tuple(flat[10:])]
    assert all(sorted(order) == list(range(10)) for order in orders) and len(set(orders)) == 6
    assert np.bincount(query_rows(3, 9, 0, 1)).tolist() == [3, 3, 3]  # fewer than a step's


def test_generators_are_a_pure_function_of_seed_and_step():
    def numbers(seed, step):
        rng = utils.generator(seed, step, torch.device("cpu"))
        return tuple(torch.rand(3, generator=rng).tolist())

    assert numbers(1, 2) == numbers(1, 2)
    assert len({numbers(seed, step) for seed in (1, 2, 100_004) for step in range(5)}) == 15


# ------------------------------------------------------------------------------- the synthetic task


@pytest.fixture(scope="module")
def synthetic():
    """judge.py, generate.py and the tokenizer of the synthetic task."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tasks.SYNTHETIC))  # generate.py imports judge.py from its folder
        modules = [load_module(tasks.SYNTHETIC / f"{name}.py") for name in ("judge", "generate")]
    task = replace(tasks.TASKS["synthetic"], base_model=str(tasks.SYNTHETIC / "model"))
    return *modules, tokenizer_of(task)


def test_the_synthetic_texts_are_made_again_to_the_byte(tmp_path):
    command = [sys.executable, str(tasks.SYNTHETIC / "generate.py"), "texts", "--out"]
    subprocess.run([*command, str(tmp_path)], check=True, capture_output=True, timeout=120)
    names = ["stories.txt", "stories_eos.jsonl"]
    names += [f"model/{n}.json" for n in ("config", "tokenizer", "tokenizer_config")]
    same, different, missing = filecmp.cmpfiles(tasks.SYNTHETIC, tmp_path, names, shallow=False)
    assert (sorted(same), different, missing) == (sorted(names), [], [])


def test_the_examples_in_the_synthetic_tasks_docstrings_hold(synthetic):
    for module in synthetic[:2]:
        failed, tried = doctest.testmod(module)
        assert failed == 0 and tried > 0


def test_synthetic_stories_and_completions_have_the_lengths_that_the_tasks_expect(synthetic):
    """Stories: 6 to 8 and 36 to 44 tokens at their 5% and 95% quantiles. Rows of the EOS task are a
    prompt and a completion that begins with a space."""

    def lengths(texts: list[str]) -> list[int]:
        return sorted(map(len, synthetic[2](texts)["input_ids"]))

    stories = (tasks.SYNTHETIC / "stories.txt").read_text().splitlines()
    found = lengths(stories)
    assert len(stories) == len(set(stories)) == 20_000
    assert 6 <= found[1000] <= 8 and 36 <= found[19_000] <= 44 and found[-1] <= 64
    lines = (tasks.SYNTHETIC / "stories_eos.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 12_000 and all(set(row) == {"prompt", "completion"} for row in rows)
    assert all(row["prompt"].endswith(".") and row["completion"].startswith(" ") for row in rows)
    found = lengths([row["completion"] for row in rows])
    assert found[0] >= 4 and found[-1] <= 40


def test_the_synthetic_tokenizer_has_its_stop_and_end_as_one_token_each_and_no_pad(synthetic):
    tokenizer = synthetic[2]
    assert len(tokenizer) == WORDS and tokenizer.pad_token_id is None
    for text in (".", "<|endoftext|>", "\n"):
        assert len(tokenizer.encode(text)) == 1
    assert tokenizer.encode("Anna saw it.")[-1:] == tokenizer.encode(".")  # not merged with another
    text = "Anna was not very happy, but Ben smiled."
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_synthetic_labels_are_5504_rows_in_openais_form_that_prefer_what_the_judge_likes(
    synthetic,
):
    """Responses are cut for scoring. A perfect predictor's accuracy is near its ceiling, a coin's
    would be a quarter."""
    judge, _, tokenizer = synthetic
    rows = json.loads((tasks.SYNTHETIC / "labels.json").read_text())
    samples = ["sample0", "sample1", "sample2", "sample3"]
    stop = tokenizer.encode(".")[0]
    for row in rows:
        assert row.keys() == {"query", *samples, "best"} and len(row["query"]) == 64
        for response in (row[name] for name in samples):
            real = [token for token in response if token != 50259]
            assert len(response) == 24 and response[: len(real)] == real and max(real) < WORDS
            assert stop not in real[16:-1]
            assert len(real) == 24 or (real[-1] == stop and len(real) > 16)
    best = np.array([row["best"] for row in rows])
    assert len(rows) == 5504 and np.bincount(best).min() > 1000  # the order tells nothing

    labels = load_labels(tasks.TASKS["synthetic"], tokenizer, TokenIds(WORDS, stop, [], []))
    assert labels.best.tolist() == best.tolist()
    queries, responses, best = labels.batch(np.arange(1000), WORDS)
    queries = utils.decode(tokenizer, queries, WORDS)
    texts = [utils.decode(tokenizer, responses[:, k], WORDS) for k in range(4)]
    scores = np.array([judge.gold_score(queries, side) for side in texts]).T
    accuracy = (scores.argmax(axis=1) == best.numpy()).mean()
    assert accuracy == pytest.approx(judge.best_accuracy(scores.tolist()), abs=0.05)
    assert accuracy > 0.5


# -------------------------------------------------------------------------------- presets and flags

SETTINGS = {  # task → (query, response, temperature, stop, from, prefix, suffix) as published
    "sentiment": (64, 24, 0.7, ".", 16, "", ""),
    "descriptiveness": (64, 24, 0.7, ".", 16, "", ""),
    "cnndm": (500, 75, 0.5, "\n", 55, "Article:\n\n", "\n\nTL;DR:"),
    "tldr_2019": (500, 75, 0.7, "\n", 55, "", "\n\nTL;DR:"),
    "synthetic": (64, 24, 0.7, ".", 16, "", ""),
    "tldr": (512, 53, 0.7, "<|endoftext|>", 0, "", ""),
}
PPO_SETTINGS = {  # task → (lr, episodes, batch, β, target, horizon, whitening of rewards)
    "sentiment": (1e-5, 1_000_000, 512, 0.15, 6.0, 10_000, True),
    "descriptiveness": (1e-5, 1_000_000, 512, 0.15, 6.0, 10_000, True),
    "cnndm": (2e-6, 1_000_000, 32, 0.01, None, 10_000, False),
    "tldr_2019": (2e-6, 1_000_000, 32, 0.03, None, 10_000, False),
}
REWARD_SETTINGS = {  # task → (lr, batch, labels)
    "sentiment": (5e-5, 32, 4992),
    "descriptiveness": (5e-5, 32, 4992),
    "cnndm": (2.5e-5, 16, 46_000),
    "tldr_2019": (2.5e-5, 16, 46_000),
}


def parse(script, *argv: str):
    return parse_args(script.Args, script.PRESETS, list(argv))


def values(args, names: str) -> tuple:
    return tuple(getattr(args, name) for name in names.split())


@pytest.mark.parametrize("name", SETTINGS)
def test_the_tasks_have_their_published_settings(name):
    task = parse(ppo, "--task", name).task
    names = "query_length response_length temperature truncate_token truncate_after"
    assert values(task, f"{names} query_prefix query_suffix") == SETTINGS[name]
    found = values(task, "eos_task missing_eos_penalty start_text task")
    assert found == (name == "tldr", -1.0, None, name)


@pytest.mark.parametrize("name", PPO_SETTINGS)
def test_ppo_and_reward_training_have_their_published_settings(name):
    args = parse(ppo, "--task", name)
    names = "lr total_episodes batch_size kl_coef kl_target kl_horizon whiten_rewards"
    assert values(args, names) == PPO_SETTINGS[name]
    names = "num_minibatches num_ppo_epochs gamma lam cliprange cliprange_value vf_coef adam_eps"
    assert values(args, names) == (1, 4, 1.0, 0.95, 0.2, 0.2, 0.1, 1e-5)
    args = parse(train_reward, "--task", name)
    assert values(args, "lr batch_size num_labels") == REWARD_SETTINGS[name]


def shown_help(script, name: str, capsys) -> dict[str, str]:
    """Flag → its resolved default in `--task NAME --help`."""
    with pytest.raises(SystemExit) as stop:
        parse(script, "--task", name, "--help")
    assert stop.value.code == 0
    text = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", capsys.readouterr().out)
    pattern = r"--([a-z0-9-]+)\b(?:(?!\n\s*--).)*?\(default:\s(.*?)\)\s*\n"
    return {flag: " ".join(text.split()) for flag, text in re.findall(pattern, text, re.S)}


@pytest.mark.parametrize("name", tasks.TASKS)
@pytest.mark.parametrize("script", [ppo, rloo, train_reward, sft])
def test_help_shows_the_resolved_defaults_of_the_task(script, name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = shown_help(script, name, capsys)
    args = parse(script, "--task", name)
    flags = {flag: getattr(args, flag) for flag in ("lr", "batch_size")}
    names = ("query_length", "response_length", "temperature", "truncate_after")
    flags |= {flag: getattr(args.task, flag) for flag in names}
    assert {flag: float(shown[flag.replace("_", "-")]) for flag in flags} == flags
    assert shown["task"] == name and Path(shown["base-model"]) == Path(args.task.base_model)
    if script is ppo:
        assert (shown["kl-coef"], shown["kl-target"]) == (str(args.kl_coef), str(args.kl_target))


def test_flags_override_the_tasks_defaults_in_both_spellings():
    flags = "--lr 3e-5 --task=cnndm --batch_size 64 --kl-coef 0.5 --response-length 10"
    args = parse(ppo, *flags.split(), "--no-whiten-rewards", "--kl-target", "None")
    names = "lr batch_size kl_coef kl_target whiten_rewards"
    assert values(args, names) == (3e-5, 64, 0.5, None, False)
    names = "task response_length query_length"  # the last one keeps the task's default
    assert values(args.task, names) == ("cnndm", 10, 500)
    assert parse(ppo).task.task == "synthetic"
