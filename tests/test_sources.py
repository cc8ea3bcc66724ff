"""Data sources: files, folders, the hub; what is not read."""

import time
from pathlib import Path

import datasets
import pytest
import tiny
import transformers
from formats import write_rows
from tiny import refuses

from machinery import sources
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


@pytest.mark.parametrize(("name", "text"), [("a.csv", "text\nNA\n"), ("a.txt", "\ufeffNA\n")])
def test_na_is_a_text_and_a_byte_order_mark_is_none(name, text, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert sources.load_rows(str(tmp_path / name), "--query_dataset")["text"][:] == ["NA"]


@pytest.mark.parametrize("form", ["file", "parquet files", "Dataset", "DatasetDict"])
def test_files_and_folders_are_data_sources_of_which_at_selects_a_split(form, tmp_path):
    source = save_splits(tmp_path / "f@home", form)  # what is in a name that exists selects nothing
    for name in (source, f"{source}@train"):
        assert load_rows(name, "--flag")["text"][:] == ["Anna ."]
    if form in ("parquet files", "DatasetDict"):
        assert load_rows(f"{source}@test", "--flag")["text"][:] == ["Ben ."]
    refuses(lambda: load_rows(f"{source}@dev", "--flag"), "--flag", "dev")
    refuses(lambda: load_rows(__file__, "--flag"), "is not a file of .txt, ")


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


WITH_A_DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Weights:
    length: float = 2.0

print("once")

def f(queries, responses):
    return [Weights().length] * len(queries)
"""


def test_a_file_of_functions_is_imported_once(tmp_path, capsys):
    """A judge that loads a model at its top must not load it for every use."""
    (tmp_path / "judge.py").write_text(WITH_A_DATACLASS)
    name = f"{tmp_path / 'judge.py'}:f"
    assert [load_function(name)(["a"], ["b"]) for _ in range(3)] == [[2.0]] * 3
    assert capsys.readouterr().out == "once\n"
