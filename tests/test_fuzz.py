"""Files of labels and texts: read as they are, or refused by one `InputError` with file and row.

Nothing is repaired silently. hypothesis makes the same examples in every run.
"""

import csv
import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import refuses

from machinery.cli import InputError
from machinery.labels import OPENAI_PAD, load_labels
from machinery.queries import load_queries, load_texts
from machinery.tokens import load_tokenizer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, own_cache: None):
    """A folder with a task and its tokenizer."""
    folder = tmp_path_factory.mktemp("fuzz")
    task = replace(tiny.write_task(folder / "task"), truncate_token=None)
    tokenizer, ids = load_tokenizer(task, 5)
    return SimpleNamespace(folder=folder, task=task, tokenizer=tokenizer, ids=ids)


def read_labels(home: Any, name: str, content: str | bytes, folder: Path) -> Any:
    """The labels of a file with this name and content."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_labels(replace(home.task, label_dataset=str(path)), home.tokenizer, home.ids)


def lines(rows: list[Any], end: str = "\n") -> str:
    return "".join(json.dumps(row) + end for row in rows)


MISSING = object()


def row(i: int, **values: Any) -> list[dict]:
    """`ROWS` with other values in row `i`, or without those that are `MISSING`."""
    new = {key: value for key, value in (ROWS[i] | values).items() if value is not MISSING}
    return [*ROWS[:i], new, *ROWS[i + 1 :]]


ROWS = [
    dict(query=[1, 2, 3, 4], sample0=[11, 12], sample1=[21, 22, 23], best=1),
    dict(query=[4, 3, 2], sample0=[0, 1, 2], sample1=[999], best=0),
    dict(query=[3, 1], sample0=[5, 3, 5], sample1=[7, 9], best=1),
]
SEP = [OPENAI_PAD]
SUFFIXES = (".txt", ".json", ".jsonl", ".csv", ".parquet")


def same(labels: Any, rows: list[dict]) -> bool:
    """Whether labels are exactly these rows."""
    read = zip(labels.queries, labels.responses, labels.best, strict=True)
    read = [[q.tolist(), *(r.tolist() for r in rs), int(best)] for q, rs, best in read]
    return read == [[r["query"], r["sample0"], r["sample1"], r["best"]] for r in rows]


ACCEPTED = {  # the same rows in other forms
    "array with BOM": ("a.json", "\ufeff" + json.dumps(ROWS)),
    "lines with BOM and empty lines": ("a.jsonl", "\ufeff" + lines(ROWS, "\r\n\n\n")),
    "floats": ("a.json", json.dumps(row(1, sample0=[0.0, 1.0, 2.0], best=0.0))),
    "padding": ("a.json", json.dumps(row(2, query=SEP * 2 + [3] + SEP + [1] + SEP))),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_form_of_a_file_makes_no_difference_to_labels(name, home, tmp_path):
    assert same(read_labels(home, *ACCEPTED[name], tmp_path), ROWS)


def test_candidates_are_sorted_by_number(home, tmp_path):
    """`best` counts them: sample10 is the eleventh."""
    many = {f"sample{k}": [k] for k in range(12)} | dict(query=[1], best=10)
    labels = read_labels(home, "a.json", json.dumps([many]), tmp_path)
    assert [ids.item() for ids in labels.responses[0]] == list(range(12))
    assert labels.best.tolist() == [10]


@pytest.mark.parametrize("missing", ["query", "sample1"])
def test_labels_without_a_column_in_one_row_are_refused_with_file_and_row(missing, home, tmp_path):
    rows = row(1, **{missing: MISSING})
    for file, text in (("a.json", json.dumps(rows)), ("a.jsonl", lines(rows))):
        words = f"--label_dataset {tmp_path / file}: ", ": row 1: "
        refuses(partial(read_labels, home, file, text, tmp_path), *words)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_of_something_else_is_refused_by_name(suffix, home, tmp_path):
    latin = json.dumps(row(1, note="é"), ensure_ascii=False).encode("latin-1")
    for content in (json.dumps(ROWS).encode()[:-9], latin):
        load = partial(read_labels, home, f"a{suffix}", content, tmp_path)
        refuses(load, f"--label_dataset {tmp_path / 'a'}{suffix}")


LEAVES = st.none() | st.integers(-3, 1002) | st.floats() | st.just(2**70)
LEAVES |= st.text("ab: é", max_size=3)  # the library reads "1" as 1
JUNK = LEAVES | st.lists(LEAVES, max_size=5) | st.lists(st.lists(LEAVES, max_size=2), max_size=2)
JUNK |= st.dictionaries(st.text(max_size=2), LEAVES, max_size=2)
IDS = st.lists(st.integers(-1, 1001) | st.floats(0, 3), min_size=1, max_size=4)
LABEL_KEYS = ("query", "sample0", "sample1", "best", "note")


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(st.integers(0, 2), st.sampled_from(LABEL_KEYS), IDS | JUNK, st.booleans())
def test_any_label_is_read_as_it_is_or_refused(home, i, key, value, as_lines):
    """What is right is decided by a loop over the plain rows."""
    rows = row(i, **{key: value})
    right = True
    for r in rows:
        for name in ("query", "sample0", "sample1"):
            ids = r[name] if isinstance(r[name], list) else [None]
            right &= all(type(x) in (int, float) and x in range(1000) for x in ids)
        right &= r["best"] in (0, 1)
    file = ("any.jsonl", lines(rows)) if as_lines else ("any.json", json.dumps(rows))
    try:
        assert same(read_labels(home, *file, home.folder), rows) and right
    except InputError as error:
        assert "--label_dataset" in str(error) and (not right or key == "note")


TEXTS = ["Anna saw a cat.", "NA", "ä\u202e\U0001f600", 'a, "b"', "007", "x\u2028y\x85z", "Ben."]


def write_texts(path: Path, texts: list[str], end: str = "\n", bom: str = "") -> str:
    """A file with a column `text`, written by other libraries than those that read it."""
    if path.suffix == ".csv":
        out = io.StringIO()
        csv.writer(out, lineterminator=end).writerows([["text"], *([text] for text in texts)])
        content = out.getvalue()
    elif path.suffix == ".txt":
        content = "".join(text + end for text in texts)
    else:
        content = lines([{"text": text} for text in texts], end)
    path.write_bytes((bom + content).encode())
    return str(path)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv"])
def test_texts_are_read_as_they_are_in_every_format_of_lines(suffix, home, tmp_path):
    """With Unix and Windows line ends, a byte-order mark, and a line of 10 MB."""
    for i, (end, bom) in enumerate([("\n", ""), ("\n", "\ufeff"), ("\r\n", "\ufeff")]):
        texts = [*TEXTS, "Anna saw it. " * 800_000 * (i == 0) + "Ben was glad."]
        path = write_texts(tmp_path / f"{i}{suffix}", texts, end, bom)
        task = replace(home.task, query_dataset=path)
        assert load_texts(task, "text")["text"][:] == texts


@pytest.mark.parametrize("values", [[1, 2], [["Anna"]], ["Anna", 1]])
def test_queries_of_something_else_than_texts_are_refused(values, home, tmp_path):
    task = replace(home.task, query_dataset=write_texts(tmp_path / "a.jsonl", values))
    load = partial(load_queries, task, home.tokenizer, home.ids, 1)
    refuses(load, f"--query_dataset {task.query_dataset}: ")
