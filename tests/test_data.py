"""Texts and labels in the forms of the hub's data sets, from small local files; the table of tokens and its cache; the
embedded synthetic task."""

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
from dataclasses import replace
from pathlib import Path

import datasets
import formats
import numpy as np
import pytest
import tiny
import tokenizers
import torch
import transformers
from tiny import WORDS
from tokenizers.processors import TemplateProcessing

import ppo
import rloo
import sft
import tasks
import train_reward
import utils

SENTENCES = [
    "Anna saw the old red house .",
    "",
    "  \t",
    "Ben was glad .",
    "The cat slept under the table in the kitchen .",
    "So .",
]


def tokenizer_of(task: tasks.Task):
    return utils.load_tokenizer(task, task.response_length)[0]


def write_rows(path: Path, rows: list[dict]) -> None:
    """In the format that the file's name ends with."""
    if path.suffix == ".txt":
        path.write_text("\n".join(row["text"] for row in rows) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(rows).to_parquet(str(path))


@pytest.mark.parametrize("name", ["books.txt", "books.jsonl", "books.json", "books.parquet"])
def test_books_are_one_sentence_a_row_in_any_format_padded_on_the_left(name, task, tmp_path):
    write_rows(tmp_path / name, [{"text": sentence} for sentence in SENTENCES])
    task = replace(task, query_dataset=str(tmp_path / name))
    tokenizer = tokenizer_of(task)
    table = utils.load_queries(task, tokenizer, WORDS, 1)
    expected = [tokenizer.encode(SENTENCES[i])[:8] for i in (0, 3, 4, 5)]  # blank rows are no queries
    assert len(table) == 4 and {len(row) for row in expected} != {8}
    assert sorted(table[:].tolist()) == sorted([WORDS] * (8 - len(row)) + row for row in expected)


def test_a_large_source_is_sampled_without_replacement(task):
    table = utils.load_queries(replace(task, num_queries=10), tokenizer_of(task), WORDS, 99)[:]
    everything = {tuple(row) for row in utils.load_queries(task, tokenizer_of(task), WORDS, 99)[:].tolist()}
    rows = {tuple(row) for row in table.tolist()}
    assert len(table) == len(rows) == 10 and rows < everything and len(everything) == 40
    again = utils.load_queries(replace(task, num_queries=10), tokenizer_of(task), WORDS, 99)[:]
    assert torch.equal(table, again)


ARTICLES = [*formats.CNNDM[2:], formats.CNNDM[2] | {"article": "Nothing here ends a sentence"}]


def cnndm(task: tasks.Task, source: Path) -> tasks.Task:
    """The task's own settings; lengths and model are tiny."""
    return replace(
        tasks.TASKS["cnndm"],
        base_model=task.base_model,
        query_dataset=str(source),
        query_length=40,
        response_length=8,
        truncate_after=4,
    )


def test_P3_cnndm_queries_are_cleaned_end_a_sentence_and_stand_between_prefix_and_suffix(task, tmp_path):
    write_rows(tmp_path / "cnn.parquet", ARTICLES)
    task = cnndm(task, tmp_path / "cnn.parquet")
    tokenizer, _, pad_id = utils.load_tokenizer(task, task.response_length)
    ids = utils.task_ids(task, tokenizer, pad_id)
    queries = utils.load_queries(task, tokenizer, pad_id, 1)[:]
    texts = [
        "The Senate voted on Tuesday. The bill passed by 51 to 49, a clerk said .",
        "Rain fell on Sunday. It did not stop.",
    ]
    assert utils.decode(tokenizer, queries, pad_id) == texts
    contexts = utils.add_affixes(queries, ids)
    assert utils.decode(tokenizer, contexts, pad_id) == [f"Article:\n\n{text}\n\nTL;DR:" for text in texts]
    for row in contexts.tolist():  # all pads on the left
        assert row == sorted(row, key=lambda token: token != pad_id)
    assert [ids.truncate] == tokenizer.encode("\n")


def test_prefix_and_suffix_go_to_the_policy_and_not_to_the_reward_model(task, tmp_path):
    write_rows(tmp_path / "cnn.parquet", ARTICLES)
    task = cnndm(task, tmp_path / "cnn.parquet")
    tokenizer, _, pad_id = utils.load_tokenizer(task, task.response_length)
    queries, seen = utils.load_queries(task, tokenizer, pad_id, 1)[:], []
    models = ppo.Models(
        ppo.PolicyAndValue(utils.load_lm(task.base_model), pad_id, 0.7),
        ppo.PolicyAndValue(utils.load_lm(task.base_model), pad_id, 0.7),
        lambda q, r: seen.append(q) or torch.zeros(2),
        utils.task_ids(task, tokenizer, pad_id),
    )
    args = tiny.make_args(task, num_minibatches=1)
    rollout, _ = ppo.make_rollout(models, queries, torch.full((2, 8), 20), np.arange(2), 0.1, args)
    assert torch.equal(seen[0], queries)
    assert rollout.contexts.shape[1] > queries.shape[1]
    assert all(text.endswith("TL;DR:") for text in utils.decode(tokenizer, rollout.contexts, pad_id))


def test_a_local_folder_with_parquet_files_is_a_data_source(tmp_path):
    for split, text in (("train", "Anna ."), ("test", "Ben .")):
        write_rows(tmp_path / "data" / f"{split}-00000-of-00001.parquet", [{"text": text}] * 3)
    assert list(utils.load_rows(str(tmp_path), "--query_dataset")["text"]) == ["Anna ."] * 3
    assert list(utils.load_rows(str(tmp_path), "--query_dataset", split="test")["text"]) == ["Ben ."] * 3


def test_the_advice_for_an_unreachable_configuration_works_once_it_is_followed(tmp_path, monkeypatch):
    """`hf download abisee/cnn_dailymail --local-dir cnn_dailymail` gives a folder of three configurations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(utils.huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(utils.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(utils.InputError) as caught:
        utils.load_rows("abisee/cnn_dailymail:3.0.0", "--query_dataset")
    advice = str(caught.value).split("--query_dataset ")[-1].split()[0]
    configs = ""
    for version in ("1.0.0", "2.0.0", "3.0.0"):
        write_rows(
            tmp_path / "cnn_dailymail" / version / "train-00000-of-00001.parquet", [{"article": f"of {version}"}]
        )
        configs += f"- config_name: {version}\n  data_files:\n  - split: train\n    path: {version}/train-*\n"
    (tmp_path / "cnn_dailymail" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert list(utils.load_rows(advice, "--query_dataset")["article"]) == ["of 3.0.0"]


POST = "TITLE: soup\n\nPOST: Anna saw it.\nBen saw it too.\nThe end.\n\nTL;DR:"
SHORTER = [
    "TITLE: soup\n\nPOST: Anna saw it.\nBen saw it too.\n\nTL;DR:",
    "TITLE: soup\n\nPOST: Anna saw it.\n\nTL;DR:",
]


def test_a_prompt_that_is_too_long_loses_lines_before_its_last_one(task):
    """TL;DR: as in [N+]: whole lines go until it fits."""
    tokenizer = tokenizer_of(task)
    for text, fitting in ((POST, POST), (POST, SHORTER[0]), (POST, SHORTER[1])):
        length = len(tokenizer.encode(fitting))
        task = replace(task, keep_last_line=True, query_length=length)
        assert utils.tokenise_queries([text], task, tokenizer) == [tokenizer.encode(fitting)]
    (shorter,) = utils.tokenise_queries(
        [POST], replace(task, query_length=len(tokenizer.encode(SHORTER[0])) - 1), tokenizer
    )
    assert tokenizer.decode(shorter) == SHORTER[1]  # one token less is one line less
    (cut,) = utils.tokenise_queries(["Anna saw the old red house"], replace(task, query_length=2), tokenizer)
    assert cut == tokenizer.encode("Anna saw the old red house")[:2]  # there is no other line


def eos_task(task: tasks.Task, tmp_path: Path) -> tasks.Task:
    """The embedded EOS task's settings on rows that are written by hand."""
    rows = [
        {"prompt": "Anna saw it.", "completion": " Ben saw it too."},
        {"prompt": "Ben saw Anna.", "completion": " So."},
        {"prompt": " ", "completion": " nothing"},
        {"prompt": "Anna", "completion": ""},
        {"prompt": "So", "completion": " the end of the story was that Ben was glad and so was Anna."},
    ]
    write_rows(tmp_path / "eos.jsonl", rows)
    return replace(
        tasks.TASKS["synthetic_eos"],
        base_model=task.base_model,
        query_dataset=str(tmp_path / "eos.jsonl"),
        query_length=6,
        response_length=8,
        gold_fn=None,
    )


def test_X9_sft_rows_of_an_eos_task_are_prompt_response_and_end(task, tmp_path):
    """Prompts are padded on the left, responses behind their end; a response that is too long has none."""
    task = eos_task(task, tmp_path)
    tokenizer = tokenizer_of(task)
    rows, first = sft.load_rows(sft.Args(task=task, num_heldout=1, batch_size=1), tokenizer, WORDS)
    expected = []
    for prompt, response in (
        ("Anna saw it.", " Ben saw it too."),
        ("Ben saw Anna.", " So."),
        ("So", " the end of the story was that Ben was glad and so was Anna."),
    ):
        prompt, response = tokenizer.encode(prompt)[:6], (tokenizer.encode(response) + [tokenizer.eos_token_id])[:8]
        expected.append([WORDS] * (6 - len(prompt)) + prompt + response + [WORDS] * (8 - len(response)))
    assert first == 6 and rows[:].tolist() == expected
    assert (rows[:] == tokenizer.eos_token_id).sum(dim=1).tolist() == [1, 1, 0]


def test_sft_rows_have_the_texts_around_a_query_that_a_policy_sees(task, tmp_path):
    task = replace(eos_task(task, tmp_path), query_prefix="So", query_suffix=" was Anna.")
    tokenizer = tokenizer_of(task)
    table, first = sft.load_rows(sft.Args(task=task, num_heldout=1, batch_size=1), tokenizer, WORDS)
    queries = utils.load_queries(task, tokenizer, WORDS, 10)
    contexts = utils.add_affixes(queries[:], utils.task_ids(task, tokenizer, WORDS)).tolist()
    rows = table[:]
    assert first == 6 + len(tokenizer.encode("So")) + len(tokenizer.encode(" was Anna."))
    assert {tuple(row) for row in rows[:, :first].tolist()} <= {tuple(row) for row in contexts}
    without, _ = sft.load_rows(sft.Args(task=eos_task(task, tmp_path), num_heldout=1, batch_size=1), tokenizer, WORDS)
    assert torch.equal(without[:][:, 6:], rows[:, first:])


def test_X9_a_response_that_has_its_end_already_gets_no_second_one(task, tmp_path):
    task = eos_task(task, tmp_path)
    row = {"prompt": "Ben saw Anna.", "completion": " So."}
    write_rows(tmp_path / "eos.jsonl", [row, row | {"completion": " So.<|endoftext|>"}])
    rows, _ = sft.load_rows(sft.Args(task=task, num_heldout=1, batch_size=1), tokenizer_of(task), WORDS)
    first, second = rows[:].tolist()
    assert first == second and first.count(tokenizer_of(task).eos_token_id) == 1


def test_X9_sft_learns_responses_with_their_end_and_neither_prompts_nor_pads(task, tmp_path):
    """Each row alone, without padding, token by token."""
    task = eos_task(task, tmp_path)
    tokenizer, lm = tokenizer_of(task), utils.load_lm(task.base_model).eval()
    rows, first = sft.load_rows(sft.Args(task=task, num_heldout=1, batch_size=1), tokenizer, WORDS)
    losses, mask = sft.token_losses(lm, rows[:], first, WORDS)
    for i, row in enumerate(rows[:].tolist()):
        prompt = [token for token in row[:6] if token != WORDS]
        for t in range(8):
            if row[6 + t] == WORDS:
                assert not mask[i, t] and losses[i, t] == 0
                continue
            logits = lm(torch.tensor([prompt + row[6 : 6 + t]])).logits[0, -1]
            assert mask[i, t] and losses[i, t].item() == pytest.approx(
                -logits.log_softmax(0)[row[6 + t]].item(), abs=1e-4
            )


# --------------------------------------------------------------------------------------------- the table of tokens


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that is tokenised as a query from now on."""
    seen, tokenise = [], utils.tokenise_queries
    monkeypatch.setattr(utils, "tokenise_queries", lambda texts, *rest: (seen.extend(texts), tokenise(texts, *rest))[1])
    return seen


def write_sentences(path: Path, n: int = 100) -> str:
    """`n` different sentences."""
    path.write_text("".join(f"Anna saw {i} cats. So did Ben.\n" for i in range(n)))
    return str(path)


def test_the_heldout_queries_are_the_same_for_a_run_of_any_length(task, tmp_path, monkeypatch):
    write_sentences(tmp_path / "many.txt", 100)
    task = replace(task, query_dataset=str(tmp_path / "many.txt"))
    monkeypatch.setattr(utils, "FEW", 8)
    heldout = []
    for needed in (1, 30, 1000):
        held, rest = utils.load_queries(task, tokenizer_of(task), WORDS, needed).hold_out(5, "eval_queries")
        rows = {tuple(row) for row in rest[:].tolist()}
        assert len(rest) == len(rows) and not rows & {tuple(row) for row in held.tolist()}
        heldout.append(held.tolist())
    assert heldout[0] == heldout[1] == heldout[2] and len(heldout[0]) == 5
    with pytest.raises(utils.InputError, match="eval_queries=100 leaves none of the 100 rows"):
        utils.load_queries(task, tokenizer_of(task), WORDS, 1000).hold_out(100, "eval_queries")


def test_a_heldout_query_is_not_trained_on_where_it_stands_once_more(task, tmp_path):
    write_sentences(tmp_path / "many.txt", 30)
    lines = (tmp_path / "many.txt").read_text().splitlines()
    (tmp_path / "twice.txt").write_text("\n".join(lines * 2))
    task = replace(task, query_dataset=str(tmp_path / "twice.txt"))
    held, rest = utils.load_queries(task, tokenizer_of(task), WORDS, 100).hold_out(10, "eval_queries")
    held, rest = ([tuple(row) for row in rows[:].tolist()] for rows in (held, rest))
    assert not set(held) & set(rest) and len(set(held) | set(rest)) == 30  # others may be there twice
    assert len(held) + len(rest) == 60 - len(set(held)) * 2 + len(held)
    (tmp_path / "one.txt").write_text("Anna saw it. Ben saw it too.\n" * 8)
    task = replace(task, query_dataset=str(tmp_path / "one.txt"))
    with pytest.raises(utils.InputError, match="eval_queries=2 leaves none of the 8 rows"):
        utils.load_queries(task, tokenizer_of(task), WORDS, 100).hold_out(2, "eval_queries")


def test_functions_of_one_file_that_clean_have_caches_of_their_own(task, tmp_path):
    write_sentences(tmp_path / "many.txt", 8)
    (tmp_path / "clean.py").write_text("def alike(x):\n    return x\ndef twice(x):\n    return f'{x} {x}'\n")
    task = replace(task, query_dataset=str(tmp_path / "many.txt"), end_text=None)
    tables = []
    for name in ("alike", "twice", "alike"):
        cleaned = replace(task, clean_fn=f"{tmp_path}/clean.py:{name}", query_length=64)
        tables.append(utils.load_queries(cleaned, tokenizer_of(task), WORDS, 8)[:])
    once, twice, again = ((table != WORDS).sum(dim=1) for table in tables)
    assert (twice >= 2 * once).all() and torch.equal(once, again)


def test_the_id_of_a_text_is_the_one_that_it_has_inside_of_a_text():
    """Llama 2's form (Prepend and Replace, as transformers' converter of it makes them): "." alone is not the token that ends "dog."."""
    pieces = {piece: i for i, piece in enumerate(["<unk>", "▁", ".", "d", "o", "g", "▁.", "▁d", "▁do", "▁dog"])}
    merges = [("▁", "."), ("▁", "d"), ("▁d", "o"), ("▁do", "g")]
    words = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, merges, unk_token="<unk>"))
    spaces = tokenizers.normalizers.Replace(" ", "▁")
    words.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"), spaces])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.encode(".") == [6] and tokenizer.encode("dog. dog.") == [9, 2, 9, 2]
    assert utils.token_id(tokenizer, ".", "--truncate_token") == 2
    assert utils.token_id(tokenizer, "dog", "--truncate_token") == 9  # as it stands in a text
    with pytest.raises(utils.InputError, match="--truncate_token='dog.' is 2 tokens"):
        utils.token_id(tokenizer, "dog.", "--truncate_token")


@pytest.mark.parametrize(("needed", "tokenised"), [(1, 8), (8, 8), (30, 30), (1000, 100)])
def test_a_run_of_few_episodes_tokenises_few_rows(needed, tokenised, task, tmp_path, monkeypatch):
    """A larger table is not worth the wait, one smaller than `FEW` not a cache entry of its own."""
    monkeypatch.setattr(utils, "FEW", 8)
    task, seen = replace(task, query_dataset=write_sentences(tmp_path / "many.txt")), counted(monkeypatch)
    table = utils.load_queries(task, tokenizer_of(task), WORDS, needed)
    assert len(seen) == len(set(seen)) == len(table) == tokenised
    assert len(utils.load_queries(replace(task, num_queries=5), tokenizer_of(task), WORDS, needed)) == 5


def test_every_script_asks_for_the_rows_that_it_can_use(task, tmp_path, monkeypatch):
    """PPO one query an episode; the reward model twice its samples, rounded up to whole batches of a rollout (R3)."""
    seen = []

    def spy(task, tokenizer, pad_id, needed):
        seen.append(needed)
        raise KeyError("enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(utils, "load_queries", spy)
    for script in (ppo, rloo):
        with pytest.raises(KeyError):
            script.main(script.Args(task=task, total_episodes=1234, batch_size=4))
    with pytest.raises(KeyError):
        train_reward.main(
            train_reward.Args(task=task, num_labels=12, batch_size=4, normalize_samples=5, rollout_batch_size=4)
        )
    assert seen == [1234, 1234, 16]


def test_the_second_start_tokenises_nothing(task, tmp_path, monkeypatch):
    task, seen = replace(task, query_dataset=write_sentences(tmp_path / "many.txt")), counted(monkeypatch)
    first = utils.load_queries(task, tokenizer_of(task), WORDS, 1)
    assert len(seen) == 100
    second = utils.load_queries(task, tokenizer_of(task), WORDS, 1)
    assert len(seen) == 100 and torch.equal(first[:], second[:])
    for expected in (150, 150):  # a sample is found again too
        utils.load_queries(replace(task, num_queries=50), tokenizer_of(task), WORDS, 1)
        assert len(seen) == expected
    args = sft.Args(task=task, num_heldout=1, batch_size=1, block_size=16)
    blocks, calls, pack = sft.load_rows(args, tokenizer_of(task), WORDS)[0], [], sft.pack
    monkeypatch.setattr(sft, "pack", lambda *a: calls.append(a) or pack(*a))
    assert torch.equal(sft.load_rows(args, tokenizer_of(task), WORDS)[0][:], blocks[:]) and calls == []


def test_the_table_is_int32_in_a_file_and_gives_int64_rows_in_any_order(task):
    table = utils.load_queries(task, tokenizer_of(task), WORDS, 1)
    assert table.rows.features["tokens"].feature.dtype == "int32" and table.rows.cache_files
    rows = np.array([5, 0, 39, 5])
    assert table[rows].dtype == torch.int64 and table[rows].shape == (4, 8)
    assert torch.equal(table[rows], table[:][rows]) and torch.equal(table[1:3], table[:][1:3])


def other_tokenizer(task: tasks.Task, tmp_path: Path):
    """The task's tokenizer without its last merge, saved under another name."""
    folder = tiny.write_model(tmp_path / "other")
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(words))
    return tokenizer_of(replace(task, base_model=str(folder)))


CHANGES = {  # what makes another table
    "query_length": dict(query_length=7),
    "query_column": dict(query_column="title"),
    "start_text": dict(start_text="."),
    "end_text": dict(end_text="."),
    "keep_last_line": dict(keep_last_line=True),
    "num_queries": dict(num_queries=50),
}


@pytest.mark.parametrize("change", [*CHANGES, "source", "content", "tokenizer", "pad"])
def test_what_a_table_depends_on_makes_another_one(change, task, tmp_path, monkeypatch):
    """A stale table would be silent: the run trains on other queries than it says."""
    rows = [{"text": f"Anna saw {i} cats. So did Ben.", "title": f"Ben saw {i}."} for i in range(100)]
    write_rows(tmp_path / "a.jsonl", rows)
    task, tokenizer = replace(task, query_dataset=str(tmp_path / "a.jsonl"), truncate_token=None), tokenizer_of(task)
    before, seen = utils.load_queries(task, tokenizer, WORDS, 1)[:], counted(monkeypatch)
    pad_id = WORDS + (change == "pad")
    if change in ("source", "content"):
        for row in rows:
            row["text"] = "The " + row["text"]
        name = "b.jsonl" if change == "source" else "a.jsonl"
        write_rows(tmp_path / name, rows)
        task = replace(task, query_dataset=str(tmp_path / name))
    elif change == "tokenizer":
        tokenizer = other_tokenizer(task, tmp_path)
    task = replace(task, **CHANGES.get(change, {}))
    after = utils.load_queries(task, tokenizer, pad_id, 1)[:]
    assert len(seen) == len(after) == (50 if change == "num_queries" else 100)
    same = change in ("keep_last_line", "pad")  # in these rows nothing is cut or padded: only the calls tell
    assert torch.equal(before, after) if same else before.tolist() != after.tolist()


CHILD = """
import sys, time
from dataclasses import replace
from pathlib import Path
import torch.distributed
import accelerate
import tiny, utils

def refuse(*args, **kwargs):
    raise AssertionError("a collective: one process that fails would leave the others waiting")

for name in ("barrier", "all_reduce", "all_gather_object", "broadcast_object_list", "broadcast", "monitored_barrier"):
    setattr(torch.distributed, name, refuse)
accelerate.Accelerator.wait_for_everyone = accelerate.PartialState.wait_for_everyone = refuse
folder, name, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
task = tiny.make_task(base_model=str(folder / "task/model"), query_dataset=str(folder / "many.txt"))
tokenizer = utils.load_tokenizer(task, 5)[0]
tokenise, batches = utils.tokenise_queries, []

def spy(texts, *rest):
    queries = tokenise(texts, *rest)
    batches.append(len(texts))
    (folder / f"{name}.batches").write_text(" ".join(map(str, batches)))
    if mode == "hang" and len(batches) == 2:
        time.sleep(600)
    time.sleep(0.02)
    return queries

utils.tokenise_queries = spy
(folder / f"{name}.ready").touch()
end = time.monotonic() + 120
while not (folder / "go").exists():
    assert time.monotonic() < end  # the test is gone
    time.sleep(0.01)
table = utils.load_queries(task, tokenizer, tiny.WORDS, 10**6)
print(sum(batches), len(table), int(table[:].sum()))
"""


def start_child(folder: Path, name: str, mode: str) -> subprocess.Popen:
    """A process that makes the table of `many.txt` in a cache of this folder, once there is a file `go`."""
    paths = os.pathsep.join((str(utils.ROOT), str(Path(__file__).parent)))
    env = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(folder), name, mode]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(path: Path, *children: subprocess.Popen) -> None:
    """Until a child has written this file."""
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end and all(child.poll() is None for child in children), f"no {path}"
        time.sleep(0.02)


def test_two_processes_at_once_tokenise_once_and_wait_at_a_file_not_in_a_collective(task, tmp_path):
    write_sentences(tmp_path / "many.txt", 25_000)
    children = [start_child(tmp_path, name, "run") for name in "ab"]
    for name in "ab":
        wait_for(tmp_path / f"{name}.ready", *children)
    (tmp_path / "go").touch()
    results = []
    for child in children:
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
        results.append([int(word) for word in out.split()])
    assert sorted(result[0] for result in results) == [0, 25_000]
    assert results[0][1:] == results[1][1:] and results[0][1] == 25_000


def test_a_process_killed_while_it_tokenises_leaves_nothing_that_is_taken_for_a_table(task, tmp_path, monkeypatch):
    write_sentences(tmp_path / "many.txt", 25_000)
    (tmp_path / "go").touch()
    child = start_child(tmp_path, "a", "hang")
    wait_for(tmp_path / "a.ready", child)
    end = time.monotonic() + 120
    while len((tmp_path / "a.batches").read_text().split() if (tmp_path / "a.batches").exists() else []) < 2:
        assert time.monotonic() < end and child.poll() is None
        time.sleep(0.05)
    child.kill()
    child.communicate()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    task, seen = replace(task, query_dataset=str(tmp_path / "many.txt")), counted(monkeypatch)
    tokenizer = tokenizer_of(task)
    table = utils.load_queries(task, tokenizer, WORDS, 10**6)  # does not wait for the dead process's lock
    assert len(seen) == len(table) == 25_000
    order = np.random.default_rng(0).permutation(25_000)
    for i in (0, 9_999, 10_000, 24_999):
        assert table[np.array([i])].tolist()[0] == tokenizer.encode(f"Anna saw {order[i]} cats. So did Ben.")[:8]
    assert len(utils.load_queries(task, tokenizer, WORDS, 10**6)) == len(seen) == 25_000


# ---------------------------------------------------------------------------------------------------- rows of sft.py


def blocks_by_hand(texts: list[str], tokenizer, size: int) -> list[list[int]]:
    """Text after text; the first of a block as it stands, those behind it with a space in front; what does not fit into
    a block that is full is dropped."""
    blocks, block = [], []
    for text in map(str.strip, texts):
        if not text:
            continue
        block = block + tokenizer.encode(" " + text if block else text)
        if len(block) >= size:
            blocks, block = [*blocks, block[:size]], []
    return blocks


@pytest.mark.parametrize("batch", [1, 3, 7, 10_000])
def test_sft_blocks_do_not_depend_on_the_batches_that_texts_come_in(batch, task, tmp_path, monkeypatch):
    """A block goes on from batch to batch, also over blank ones, and starts with the start of a text as it stands."""
    texts = [f"  {name} saw {i} cats." for i in range(20) for name in ("Anna", "Ben ")] + [""] * 8 + ["The end."] * 30
    (tmp_path / "t.txt").write_text("\n".join(texts) + "\n")
    task, dataset_map = replace(task, query_dataset=str(tmp_path / "t.txt")), datasets.Dataset.map
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")  # of its own: nothing is found in it
    monkeypatch.setattr(datasets.Dataset, "map", lambda *a, **k: dataset_map(*a, **k | dict(batch_size=batch)))
    tokenizer = tokenizer_of(task)
    rows, first = sft.load_rows(sft.Args(task=task, num_heldout=1, batch_size=1, block_size=11), tokenizer, WORDS)
    expected = blocks_by_hand(texts, tokenizer, 11)
    assert first == 1 and rows[:].tolist() == expected and len(expected) > 20
    starts = {tokenizer.encode(text)[0] for text in ("Anna", "Ben", "The")}
    spaced = {tokenizer.encode(text)[0] for text in (" Anna", " Ben", " The")}
    assert {row[0] for row in expected} <= starts and not starts & spaced


def test_pack_goes_on_in_the_block_that_the_last_call_left():
    texts, behind = [[1, 2], [3, 4, 5], [6], [7, 8]], [[11, 12], [13, 14, 15], [16], [17, 18]]
    whole = sft.pack(texts, behind, [], 4)
    assert whole == [[1, 2, 13, 14]]  # and [6, 17, 18] is left
    for cut in range(5):
        left = []
        pieces = sft.pack(texts[:cut], behind[:cut], left, 4) + sft.pack(texts[cut:], behind[cut:], left, 4)
        assert pieces == whole and left == [6, 17, 18]


def test_another_way_to_pack_makes_another_table(task, tmp_path, monkeypatch):
    """A copy of sft.py whose `pack` was changed never gets the blocks of the original."""
    source = sft.SCRIPT.read_text()
    changed = source.replace("blocks.append(left[:block_size])", "blocks.append(left[:block_size][::-1])")
    assert changed != source
    (tmp_path / "mine.py").write_text(changed)
    spec = importlib.util.spec_from_file_location("mine_pack", tmp_path / "mine.py")
    mine = sys.modules["mine_pack"] = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mine_pack", mine)
    spec.loader.exec_module(mine)
    args, tokenizer = sft.Args(task=task, num_heldout=1, batch_size=1, block_size=10), tokenizer_of(task)
    original = sft.load_rows(args, tokenizer, WORDS)[0][:]
    assert torch.equal(mine.load_rows(args, tokenizer, WORDS)[0][:], original.flip(1))


def with_bos(tokenizer):
    """The same tokenizer, but `encode` puts an id in front, as Llama's and Gemma's do."""
    tokenizer = copy.deepcopy(tokenizer)
    template = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = template
    assert tokenizer.encode("Anna") == [0, *tokenizer.encode("Anna", add_special_tokens=False)]
    return tokenizer


def test_29_a_tokenizer_that_adds_an_id_in_front_reads_the_ids_of_one_that_does_not(task):
    plain = tokenizer_of(task)
    adds = with_bos(plain)
    assert utils.reads_ids_of(adds, plain) and utils.reads_ids_of(plain, adds)


def test_a_tokenizer_that_adds_an_id_in_front_adds_none_anywhere(task, tmp_path):
    """Queries, prompts that lose lines, affixes, stop tokens, labels, rows of sft.py: the texts' own ids only."""
    (tmp_path / "posts.jsonl").write_text(json.dumps({"text": POST}) + "\n")
    write_rows(tmp_path / "pairs.jsonl", [{"prompt": POST, "chosen": " the end", "rejected": " Ben"}] * 2)
    plain = tokenizer_of(task)
    lines = len(plain.encode(SHORTER[0]))
    books = replace(task, query_prefix="Anna", query_suffix=" the end")
    post = replace(
        task, query_dataset=str(tmp_path / "posts.jsonl"), keep_last_line=True, query_length=lines, response_length=5
    )
    labels = replace(post, label_dataset=str(tmp_path / "pairs.jsonl"))
    eos = eos_task(task, tmp_path)
    sizes = dict(num_heldout=1, batch_size=1)

    def everything(tokenizer):
        found = [utils.load_queries(t, tokenizer, WORDS, 1)[:].tolist() for t in (books, post)]
        found += [utils.task_ids(books, tokenizer, WORDS), utils.keep_last_line(POST, lines, tokenizer)]
        found += [
            utils.keep_last_line(text, 3, tokenizer) for text in ("Anna saw the old red house", "\n\nTL;DR: Anna")
        ]
        found += [train_reward.load_labels(labels, tokenizer, WORDS).responses.tolist()]
        found += [train_reward.load_labels(labels, tokenizer, WORDS).query.tolist()]
        found += [sft.load_rows(sft.Args(task=eos, **sizes), tokenizer, WORDS)[0][:].tolist()]
        found += [sft.load_rows(sft.Args(task=books, **sizes, block_size=9), tokenizer, WORDS)[0][:].tolist()]
        return found

    expected = everything(plain)
    assert expected[3] == plain.encode(SHORTER[0]) and expected[1] == [expected[3]]
    assert everything(with_bos(plain)) == expected


# ------------------------------------------------------------------------------------------------------------ labels


@pytest.mark.parametrize("name", ["labels.json", "labels.jsonl"])
def test_R4_openais_labels_load_from_an_array_and_from_lines_with_their_pad_mapped_to_ours(name, tmp_path):
    """Queries go to the right, responses keep their pads behind them."""
    p = 50259
    rows = [
        {
            "query": [7, 8, p, p],
            "sample0": [1, p, p],
            "sample1": [2, 3, p],
            "sample2": [4, 5, 6],
            "sample3": [9, 9, 9],
            "best": 2,
        },
        {
            "query": [1, 2, 3, 4],
            "sample0": [5, p, p],
            "sample1": [6, p, p],
            "sample2": [7, p, p],
            "sample3": [0, p, p],
            "best": 0,
        },
    ]
    write_rows(tmp_path / name, rows)
    labels = train_reward.load_labels(
        tiny.make_task(query_length=4, response_length=3, label_dataset=str(tmp_path / name)), None, 100
    )
    assert labels.query.tolist() == [[100, 100, 7, 8], [1, 2, 3, 4]]
    assert labels.responses.tolist() == [
        [[1, 100, 100], [2, 3, 100], [4, 5, 6], [9, 9, 9]],
        [[5, 100, 100], [6, 100, 100], [7, 100, 100], [0, 100, 100]],
    ]
    assert labels.best.tolist() == [2, 0]
    tokens = train_reward.candidate_tokens(labels)
    assert tokens.shape == (2, 4, 7)
    assert tokens[0, 0].tolist() == [100, 100, 7, 8, 1, 100, 100] and tokens[1, 3].tolist() == [1, 2, 3, 4, 0, 100, 100]
    assert labels.rows(np.array([1])).best.tolist() == [0]


def test_R4_pairs_are_labels_with_two_candidates(tmp_path):
    rows = [{"query": [7, 8], "sample0": [1, 2], "sample1": [3, 4], "best": 1}]
    write_rows(tmp_path / "pairs.json", rows)
    labels = train_reward.load_labels(
        tiny.make_task(query_length=2, response_length=2, label_dataset=str(tmp_path / "pairs.json")), None, 100
    )
    assert labels.responses.tolist() == [[[1, 2], [3, 4]]] and labels.best.tolist() == [1]


def test_R4_pairs_of_texts_are_labels_whose_first_candidate_was_chosen(task, tmp_path):
    """trl-lib/tldr-preference's columns; both candidates end with EOS, the shorter one is padded behind it."""
    rows = [
        {"prompt": "Anna saw it.", "chosen": " Ben saw it too.", "rejected": " So."},
        {"prompt": "So", "chosen": " the end", "rejected": " Ben"},
    ]
    write_rows(tmp_path / "pairs.jsonl", rows)
    task = replace(eos_task(task, tmp_path), label_dataset=str(tmp_path / "pairs.jsonl"))
    tokenizer = tokenizer_of(task)
    labels = train_reward.load_labels(task, tokenizer, WORDS)
    sides = [
        [tokenizer.encode(row[name]) + [tokenizer.eos_token_id] for name in ("chosen", "rejected")] for row in rows
    ]
    length = max(len(side) for row in sides for side in row)
    assert labels.responses.tolist() == [[side + [WORDS] * (length - len(side)) for side in row] for row in sides]
    assert [[t for t in row if t != WORDS] for row in labels.query.tolist()] == [
        tokenizer.encode(row["prompt"])[:6] for row in rows
    ]
    assert labels.best.tolist() == [0, 0]
    write_rows(tmp_path / "blank.jsonl", [rows[0], rows[1] | {"prompt": ""}])
    with pytest.raises(utils.InputError, match="row 1"):
        train_reward.load_labels(replace(task, label_dataset=str(tmp_path / "blank.jsonl")), tokenizer, WORDS)


def test_gpt2s_own_pad_is_50257_and_the_files_50259_becomes_it(tmp_path):
    rows = [{"query": [50256, 50259], "sample0": [13, 50259], "sample1": [50256, 13], "best": 1}]
    write_rows(tmp_path / "l.json", rows)
    labels = train_reward.load_labels(
        tiny.make_task(query_length=2, response_length=2, label_dataset=str(tmp_path / "l.json")), None, 50257
    )
    assert labels.query.tolist() == [[50257, 50256]]
    assert labels.responses.tolist() == [[[13, 50257], [50256, 13]]]


def test_in_a_vocabulary_of_more_ids_50259_is_a_token_like_any_other(tmp_path):
    """Only a file of the model's own ids can be meant then; its padding is the model's pad id."""
    rows = [{"query": [50259, 60_000], "sample0": [50259, 60_000], "sample1": [59_999, 50258], "best": 1}]
    write_rows(tmp_path / "l.json", rows)
    task = tiny.make_task(query_length=2, response_length=2, label_dataset=str(tmp_path / "l.json"))
    labels = train_reward.load_labels(task, None, 60_000)
    assert labels.query.tolist() == [[60_000, 50259]]
    assert labels.responses.tolist() == [[[50259, 60_000], [59_999, 50258]]]
    write_rows(tmp_path / "l.json", [{"query": [7, 50259], "sample0": [1, 50259], "sample1": [2, 3], "best": 0}])
    for pad_id, query in ((50_260, [7, 50259]), (50_259, [50259, 7])):  # the last id; the pad
        assert train_reward.load_labels(task, None, pad_id).query.tolist() == [query]


# ------------------------------------------------------------------------------------------------------------- order


def test_rows_of_step_are_a_pure_function_and_visit_every_row_once_an_epoch():
    """10 rows, 4 a step: steps 0 to 4 are two whole epochs, whatever was asked for before."""
    steps = [utils.rows_of_step(10, 4, step, 7).tolist() for step in range(5)]
    flat = sum(steps, [])
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10)) and flat[:10] != flat[10:]
    assert [utils.rows_of_step(10, 4, step, 7).tolist() for step in (4, 0, 2)] == [steps[4], steps[0], steps[2]]
    assert utils.rows_of_step(10, 4, 0, 8).tolist() != steps[0]
    assert len(utils.rows_of_step(3, 8, 0, 1)) == 8  # a table smaller than a step
    assert np.bincount(utils.rows_of_step(3, 9, 0, 1)).tolist() == [3, 3, 3]


def test_G6_processes_take_other_rows_and_each_visits_all_of_them():
    orders = [
        sum((utils.rows_of_step(12, 4, step, 1 + 100_003 * rank).tolist() for step in range(3)), [])
        for rank in range(3)
    ]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len(set(map(tuple, orders))) == 3


def test_generators_are_a_pure_function_of_seed_and_step():
    def numbers(seed, step):
        return tuple(torch.rand(3, generator=utils.generator(seed, step, torch.device("cpu"))).tolist())

    assert numbers(1, 2) == numbers(1, 2)
    assert len({numbers(seed, step) for seed in (1, 2, 100_004) for step in range(5)}) == 15


# ----------------------------------------------------------------------------------------------- the synthetic task


def load_module(name: str):
    """judge.py or generate.py, which imports it from beside itself."""
    spec = importlib.util.spec_from_file_location(f"synthetic_{name}", tasks.SYNTHETIC / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(tasks.SYNTHETIC))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(tasks.SYNTHETIC))
    return module


def test_the_synthetic_texts_are_made_again_to_the_byte(tmp_path):
    command = [sys.executable, str(tasks.SYNTHETIC / "generate.py"), "texts", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    names = [
        "stories.txt",
        "stories_eos.jsonl",
        *(f"model/{n}" for n in ("config.json", "tokenizer.json", "tokenizer_config.json")),
    ]
    same, different, missing = filecmp.cmpfiles(tasks.SYNTHETIC, tmp_path, names, shallow=False)
    assert (sorted(same), different, missing) == (sorted(names), [], [])


@pytest.mark.parametrize("name", ["judge", "generate"])
def test_the_examples_in_the_synthetic_tasks_docstrings_hold(name):
    failed, tried = doctest.testmod(load_module(name))
    assert failed == 0 and tried > 0


def synthetic_tokenizer():
    return tokenizer_of(replace(tasks.TASKS["synthetic"], base_model=str(tasks.SYNTHETIC / "model")))


def test_synthetic_stories_are_6_to_8_and_36_to_44_tokens_at_their_5_and_95_percent_quantiles():
    stories = (tasks.SYNTHETIC / "stories.txt").read_text().splitlines()
    assert len(stories) == len(set(stories)) == 20_000
    lengths = sorted(map(len, synthetic_tokenizer()(stories)["input_ids"]))
    assert 6 <= lengths[1000] <= 8 and 36 <= lengths[19_000] <= 44 and lengths[-1] <= 64


def test_the_synthetic_tokenizer_has_its_stop_and_end_as_one_token_each_and_no_pad():
    tokenizer = synthetic_tokenizer()
    assert len(tokenizer) == WORDS and tokenizer.pad_token_id is None
    for text in (".", "<|endoftext|>", "\n"):
        assert len(tokenizer.encode(text)) == 1
    assert tokenizer.encode("Anna saw it.")[-1:] == tokenizer.encode(".")  # not merged with a neighbour
    text = "Anna was not very happy, but Ben smiled."
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_synthetic_eos_rows_are_a_prompt_and_a_completion_that_goes_on_after_a_space():
    rows = [json.loads(line) for line in (tasks.SYNTHETIC / "stories_eos.jsonl").read_text().splitlines()]
    assert len(rows) == 12_000 and all(set(row) == {"prompt", "completion"} for row in rows)
    assert all(row["prompt"].endswith(".") and row["completion"].startswith(" ") for row in rows)
    lengths = list(map(len, synthetic_tokenizer()([row["completion"] for row in rows])["input_ids"]))
    assert min(lengths) >= 4 and max(lengths) <= 40


def test_the_synthetic_labels_are_5504_rows_in_openais_form_cut_for_scoring():
    task = tasks.TASKS["synthetic"]
    rows = json.loads((tasks.SYNTHETIC / "labels.json").read_text())
    assert len(rows) == 5504 == len(train_reward.load_labels(task, None, WORDS).best)
    stop = synthetic_tokenizer().encode(".")[0]
    for row in rows:
        assert set(row) == {"query", "sample0", "sample1", "sample2", "sample3", "best"}
        assert len(row["query"]) == 64 and row["best"] in range(4)
        for name in ("sample0", "sample1", "sample2", "sample3"):
            response = row[name]
            real = [token for token in response if token != 50259]
            assert len(response) == 24 and response[: len(real)] == real and all(0 <= token < WORDS for token in real)
            assert stop not in real[16:-1] and (len(real) == 24 or (real[-1] == stop and len(real) > 16))
    best = np.bincount([row["best"] for row in rows])
    assert best.min() > 1000  # the order of the candidates tells nothing


def test_the_synthetic_labels_prefer_what_the_judge_likes():
    """A perfect predictor's accuracy on them is near its ceiling, a coin's would be a quarter."""
    judge, tokenizer = load_module("judge"), synthetic_tokenizer()
    labels = train_reward.load_labels(tasks.TASKS["synthetic"], None, WORDS)
    queries = utils.decode(tokenizer, labels.query[:1000], WORDS)
    scores = np.array(
        [judge.gold_score(queries, utils.decode(tokenizer, labels.responses[:1000, k], WORDS)) for k in range(4)]
    ).T
    accuracy = (scores.argmax(axis=1) == labels.best[:1000].numpy()).mean()
    assert accuracy == pytest.approx(judge.best_accuracy(scores.tolist()), abs=0.05)
    assert accuracy > 0.5


# ---------------------------------------------------------------------------------------------------------- presets

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
REWARD_SETTINGS = {
    "sentiment": (5e-5, 32, 4992),
    "descriptiveness": (5e-5, 32, 4992),
    "cnndm": (2.5e-5, 16, 46_000),
    "tldr_2019": (2.5e-5, 16, 46_000),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_tasks_have_their_published_settings(name):
    task = tasks.parse_args(ppo.Args, ppo.PRESETS, ["--task", name]).task
    found = (
        task.query_length,
        task.response_length,
        task.temperature,
        task.truncate_token,
        task.truncate_after,
        task.query_prefix,
        task.query_suffix,
    )
    assert task.eos_task == (name == "tldr")
    assert (
        found == SETTINGS[name] and task.missing_eos_penalty == -1.0 and task.start_text is None and task.task == name
    )


@pytest.mark.parametrize("name", PPO_SETTINGS)
def test_ppo_and_reward_training_have_their_published_settings(name):
    args = tasks.parse_args(ppo.Args, ppo.PRESETS, ["--task", name])
    assert (
        args.lr,
        args.total_episodes,
        args.batch_size,
        args.kl_coef,
        args.kl_target,
        args.kl_horizon,
        args.whiten_rewards,
    ) == PPO_SETTINGS[name]
    assert (
        args.num_minibatches,
        args.num_ppo_epochs,
        args.gamma,
        args.lam,
        args.cliprange,
        args.cliprange_value,
        args.vf_coef,
        args.adam_eps,
    ) == (1, 4, 1.0, 0.95, 0.2, 0.2, 0.1, 1e-5)
    args = tasks.parse_args(train_reward.Args, train_reward.PRESETS, ["--task", name])
    assert (args.lr, args.batch_size, args.num_labels) == REWARD_SETTINGS[name]


def shown_help(script, name: str, capsys: pytest.CaptureFixture) -> dict[str, str]:
    """Flag → its resolved default in `--task NAME --help`."""
    with pytest.raises(SystemExit) as stop:
        tasks.parse_args(script.Args, script.PRESETS, ["--task", name, "--help"])
    assert stop.value.code == 0
    text = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", capsys.readouterr().out)
    return {
        flag: " ".join(default.split())
        for flag, default in re.findall(r"--([a-z0-9-]+)\b(?:(?!\n\s*--).)*?\(default:\s(.*?)\)\s*\n", text, re.S)
    }


@pytest.mark.parametrize(("script", "name"), [(s, n) for s in (ppo, rloo, train_reward, sft) for n in tasks.TASKS])
def test_help_shows_the_resolved_defaults_of_the_task(script, name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = shown_help(script, name, capsys)
    args = tasks.parse_args(script.Args, script.PRESETS, ["--task", name])
    assert shown["task"] == name
    for flag, value in (
        ("lr", args.lr),
        ("batch-size", args.batch_size),
        ("response-length", args.task.response_length),
        ("temperature", args.task.temperature),
        ("truncate-after", args.task.truncate_after),
    ):
        assert float(shown[flag]) == value, flag
    assert Path(shown["base-model"]) == Path(args.task.base_model)


def test_help_of_cnndm_shows_its_own_numbers(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = shown_help(ppo, "cnndm", capsys)
    names = ("lr", "batch-size", "kl-coef", "kl-target", "query-length", "response-length", "temperature")
    assert [shown[name] for name in names] == ["2e-06", "32", "0.01", "None", "500", "75", "0.5"]


def test_flags_override_the_tasks_defaults_in_both_spellings():
    args = tasks.parse_args(
        ppo.Args,
        ppo.PRESETS,
        [
            "--lr",
            "3e-5",
            "--task=cnndm",
            "--batch_size",
            "64",
            "--kl-coef",
            "0.5",
            "--response-length",
            "10",
            "--no-whiten-rewards",
            "--kl-target",
            "None",
        ],
    )
    assert (args.lr, args.batch_size, args.kl_coef, args.task.response_length) == (3e-5, 64, 0.5, 10)
    assert args.kl_target is None and not args.whiten_rewards and args.task.task == "cnndm"
    assert args.task.query_length == 500  # what was not named keeps the task's default
    assert tasks.parse_args(ppo.Args, ppo.PRESETS, []).task.task == "synthetic"
