"""Data sources: files, folders, the hub; what is not read."""

import gzip
import json
import os
import sys
import time
from pathlib import Path

import datasets
import pytest
import tiny
import transformers
from formats import write_rows
from tiny import refuses

import utils
from machinery.models import load_lm
from machinery.sources import load_function, load_rows
from machinery.tokens import load_tokenizer


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


TEXTS = ["2024-01-05", "2024-01-05T10:00:00Z", "007", "true", "null", "NA", "", " x ", "é\u2028"]
VALUES = [*TEXTS, 7, 2.5, 1.0, True, None, 2**53 + 1, [], ["1", 2], {"a": "007", "b": None}]
VALUES += [0.3, 0.35, 1 / 3, 10**30, [0.3, -(10**30)], {"a": 10**30}]


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_json_values_are_those_of_the_file(suffix, tmp_path):
    """In columns of one kind, of all kinds, and of another kind in each of a folder's files."""
    rows = [{"all": x, "texts": str(x), "date": TEXTS[0]} for x in VALUES]
    rows += [{"all": [{"role": "user", "content": TEXTS[0]}]}, {"late": "007"}]
    other = [{"all": 7, "texts": 8}, {"all": "7", "date": "soon"}]
    for name, part in (("b", other[:1]), ("a", rows), ("c", other[1:])):
        write_rows(tmp_path / f"{name}.{suffix}", part)
    for source, expected in ((f"a.{suffix}", rows), ("", rows + other)):
        found = list(load_rows(str(tmp_path / source), "--flag"))
        names = ("all", "texts", "date", "late")
        assert repr(found) == repr([{name: row.get(name) for name in names} for row in expected])


def test_half_of_an_emoji_is_dropped(tmp_path):
    """JSON can hold it; tokenizers refuse it."""
    path = write_rows(tmp_path / "a.jsonl", [{"text": "a\ud83db"}])
    assert load_rows(path, "--flag")["text"][:] == ["ab"]


def test_csv_values_are_texts_and_a_byte_order_mark_is_none(tmp_path):
    rows = [f'"{text}",{i:03}' for i, text in enumerate([*TEXTS, "a\nb"])]
    (tmp_path / "a.csv").write_text("\n".join(["text,id", *rows, ""]), encoding="utf-8-sig")
    found = load_rows(str(tmp_path / "a.csv"), "--flag")[:]
    assert found == {"text": [*TEXTS, "a\nb"], "id": [f"{i:03}" for i in range(len(rows))]}
    for row in ("Anna,1,", "Anna, who left,1"):  # pandas would take the first field as an index
        (tmp_path / "b.csv").write_text(f"text,id\n{row}\n")
        refuses(lambda: load_rows(str(tmp_path / "b.csv"), "--flag"), "--flag", "header")
    (tmp_path / "a.txt").write_text("NA\n007\n", encoding="utf-8-sig")
    assert load_rows(str(tmp_path / "a.txt"), "--flag")["text"][:] == ["NA", "007"]


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "parquet", "txt"])
def test_a_file_that_is_replaced_is_read_again(suffix, tmp_path):
    """Also if it keeps its time and its size, alone and in a folder."""
    for text in ("Anna .", "Ben. ."):
        path = write_rows(tmp_path / f"data.{suffix}", [{"text": text}])
        os.utime(path, (1, 1))
        for source in (path, str(tmp_path)):
            assert load_rows(source, "--flag")["text"][:] == [text]


def test_all_files_of_a_folder_are_read_or_named(tmp_path, capsys):
    names = ["b10.jsonl", "b9.jsonl", "a.json", "in/c.jsonl", ".hidden.jsonl", "README.md"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    folder = str(tmp_path)
    read = ["a.json", "b10.jsonl", "b9.jsonl", "in/c.jsonl"]  # in the order of their names
    assert load_rows(folder, "--flag")["text"][:] == read
    assert "not read" not in capsys.readouterr().out
    (tmp_path / "more.csv").write_text("text\nmore\n")
    refuses(lambda: load_rows(folder, "--flag"), "--flag", "more.csv")
    for name in ("train", "train-2", "dev"):
        write_rows(tmp_path / f"{name}.jsonl", [{"text": name}])
    assert load_rows(folder, "--flag")["text"][:] == ["train-2", "train"]
    assert load_rows(f"{folder}@validation", "--flag")["text"][:] == ["dev"]
    said = capsys.readouterr().out
    assert [name for name in (*read, "more.csv") if name not in said] == [] and "train" in said


@pytest.mark.parametrize("form", ["file", "parquet files", "Dataset", "DatasetDict"])
def test_files_and_folders_are_data_sources_of_which_at_selects_a_split(form, tmp_path):
    source = save_splits(tmp_path / "f@home", form)  # what is in a name that exists selects nothing
    for name in (source, f"{source}@train"):
        assert load_rows(name, "--flag")["text"][:] == ["Anna ."]
    if form in ("parquet files", "DatasetDict"):
        assert load_rows(f"{source}@test", "--flag")["text"][:] == ["Ben ."]
    refuses(lambda: load_rows(f"{source}@dev", "--flag"), "--flag", "dev")
    refuses(lambda: load_rows(__file__, "--flag"), "is not a file of .txt, ")


def test_a_saved_data_set_has_the_rows_that_were_saved(tmp_path):
    """Without caches of `map` beside its files, as Python values; `train_sft` is no part of `train`."""
    rows = datasets.Dataset.from_dict({"text": ["Anna .", "Ben ."], "n": [1, 2]})
    splits = dict(train_sft=rows.with_format("torch"), train_prefs=rows.select([1]))
    datasets.DatasetDict(splits).save_to_disk(tmp_path)
    datasets.load_from_disk(tmp_path)["train_sft"].map(lambda row: {"text": "other"})
    assert list(tmp_path.glob("train_sft/cache-*.arrow"))
    for split, expected in (("train_sft", rows[:]), ("train_prefs", rows[1:])):
        assert repr(load_rows(f"{tmp_path}@{split}", "--flag")[:]) == repr(expected)
    refuses(lambda: load_rows(str(tmp_path), "--flag"), "no split train;", "train_sft, train_prefs")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.ndjson", "a.tsv"])
def test_files_whose_types_the_library_would_guess_are_refused(name, tmp_path):
    content = b'{"text": "2024-01-05"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    for source in (tmp_path, tmp_path / name):
        refuses(lambda source=source: load_rows(str(source), "--flag"), "--flag", f"{name} is not")


def test_a_link_is_read_under_its_own_name(tmp_path):
    """As in the cache of the hub's client, where files are links to blobs without a suffix."""
    blob = tmp_path / "blobs" / ("5" * 64)
    Path(write_rows(tmp_path / "a.jsonl", [{"text": "Anna ."}])).rename(blob.parent.mkdir() or blob)
    for name in ("snapshots/1/labels.jsonl", "train.jsonl"):
        link = tmp_path / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
        assert list(load_rows(str(link), "--flag")) == [{"text": "Anna ."}]


@pytest.mark.parametrize("source", ["abisee/cnn_dailymail:3.0.0", "OpenAI/lm:a/5k.json"])
def test_a_dataset_that_cannot_be_reached_is_named_at_once(source, unreachable_hub):
    began = time.perf_counter()
    refuses(lambda: load_rows(source, "--query_dataset"), f"--query_dataset {source}: ")
    assert time.perf_counter() - began < 15  # the libraries retry for 23 s


def test_a_model_that_cannot_be_reached_is_named_at_once(unreachable_hub, tmp_path):
    """Also if the cache has its configuration and no weights, after an interrupted download."""
    began = time.perf_counter()
    refuses(lambda: load_tokenizer(tiny.make_task(base_model="gpt2"), 5), "--base_model gpt2: ")
    commit, cached = "0" * 40, tmp_path / "cache" / "models--gpt2"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    tiny.config().save_pretrained(cached / "snapshots" / commit)
    config = transformers.AutoConfig.from_pretrained("gpt2", cache_dir=tmp_path / "cache")
    assert config.vocab_size == tiny.VOCAB
    refuses(lambda: load_lm("gpt2"), "--base_model gpt2: ")
    assert time.perf_counter() - began < 15  # the libraries retry for 23 s


JUDGE = """
from __future__ import annotations
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
import beside_the_judge

@dataclass
class Weights:
    length: float = beside_the_judge.LENGTH

print("once")

def one(response):
    return Weights().length * len(response)

def f(responses):
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return list(pool.map(one, responses))
"""


def test_a_file_of_functions_is_a_module_and_imported_once(here, capsys):
    """Whatever its path is called. It finds modules beside it; other processes can call it."""
    (here / "our_judge.py").write_text(JUDGE)
    (here / "beside_the_judge.py").write_text("LENGTH = 2.0")
    names = ["our_judge.py:f", "./our_judge.py:f", f"{here}/our_judge.py:f"]
    assert [load_function(name)(["ab"]) for name in names] == [[4.0]] * 3
    assert capsys.readouterr().out == "once\n"
    assert load_function(names[0]).__module__ == "our_judge"


def test_a_file_hides_no_module_of_its_name(tmp_path):
    (tmp_path / "utils.py").write_text("def score(): return 'mine'")
    assert load_function(f"{tmp_path}/utils.py:score")() == "mine" and sys.modules["utils"] is utils


def test_a_function_that_a_file_does_not_have_is_refused_with_those_that_it_has(tmp_path):
    code = "import json\ndef score(x): return x\ndef other(x): return x\n"
    (tmp_path / "mine.py").write_text(code)
    refuses(lambda: load_function(f"{tmp_path}/mine.py:scor"), "'scor'", "other, score")
