"""Files of labels and texts: read as they are, or refused by one `InputError` with file and row.

Nothing is repaired silently. hypothesis makes the same examples in every run.
"""

import csv
import io
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import refuses

from machinery.cli import InputError
from machinery.labels import OPENAI_PAD, load_labels
from machinery.queries import load_queries, load_texts
from machinery.sources import load_rows
from machinery.tokens import load_tokenizer

FIXED = dict(derandomize=True, deadline=None, database=None, suppress_health_check=HealthCheck)
examples = partial(settings, **FIXED)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, own_cache: None):
    """A folder with a task and its tokenizer; no hub can be reached."""
    folder = tmp_path_factory.mktemp("fuzz") / "home"
    task = tiny.write_task(folder / "task")
    task = replace(task, query_length=64, truncate_token=None)
    (folder / "empty").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
        for constants in (huggingface_hub.constants, datasets.config):
            patch.setattr(constants, "HF_HUB_OFFLINE", True)
        tokenizer, ids = load_tokenizer(replace(task, query_length=8), 5)
        yield SimpleNamespace(folder=folder, task=task, tokenizer=tokenizer, ids=ids)


def read_labels(home: Any, name: str, content: str | bytes, folder: Path) -> Any:
    """The labels of a file with this name and content."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_labels(replace(home.task, label_dataset=str(path)), home.tokenizer, home.ids)


def lines(rows: list[Any], end: str = "\n") -> str:
    return "".join(json.dumps(row) + end for row in rows)


MISSING = object()


def row(i: int, rows: list[dict], **values: Any) -> list[dict]:
    """The rows with other values in row `i`, or without those that are `MISSING`."""
    new = {key: value for key, value in (rows[i] | values).items() if value is not MISSING}
    return [*rows[:i], new, *rows[i + 1 :]]


# ------------------------------------------------------------------------------------------- labels

ROWS = [
    dict(query=[1, 2, 3, 4], sample0=[11, 12], sample1=[21, 22, 23], best=1),
    dict(query=[4, 3, 2], sample0=[0, 1, 2], sample1=[999], best=0),
    dict(query=[3, 1], sample0=[5, 3, 5], sample1=[7, 9], best=1),
]
PAIRS = [
    dict(prompt="Anna saw it.", chosen=" It was good.", rejected=" It was cold."),
    dict(prompt="Ben saw it.", chosen=" So did Anna.", rejected=" It was cold."),
]
MESSAGE = [dict(role="user", content="Hello.")]
SEP = [OPENAI_PAD]


def same(labels: Any, rows: list[dict]) -> bool:
    """Whether labels are exactly these rows."""
    read = zip(labels.queries, labels.responses, labels.best, strict=True)
    read = [[q.tolist(), *(r.tolist() for r in rs), int(best)] for q, rs, best in read]
    return read == [[r["query"], r["sample0"], r["sample1"], r["best"]] for r in rows]


ACCEPTED = {  # the same rows in other forms
    "indented array with CRLF": ("a.json", json.dumps(ROWS, indent=2).replace("\n", "\r\n")),
    "array with BOM": ("a.json", "\ufeff" + json.dumps(ROWS)),
    "lines with CRLF": ("a.jsonl", lines(ROWS, "\r\n")),
    "lines with BOM": ("a.jsonl", "\ufeff" + lines(ROWS)),
    "empty lines between": ("a.jsonl", "\n" + lines(ROWS, "\n\n\n")),
    "no final newline": ("a.jsonl", lines(ROWS).strip()),
    "more keys": ("a.json", json.dumps(row(1, ROWS, note="ä\u202e\U0001f600", sample=3))),
    "a line of 10 MB": ("a.jsonl", lines(row(1, ROWS, note="x" * 10_000_000))),
    "an array of 10 MB": ("a.json", json.dumps(row(1, ROWS, note="x" * 10_000_000))),
    "floats": ("a.json", json.dumps(row(1, ROWS, sample0=[0.0, 1.0, 2.0], best=0.0))),
    "padding": ("a.json", json.dumps(row(2, ROWS, query=SEP * 2 + [3] + SEP + [1] + SEP))),
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


REFUSED = {  # rows → the row that the message names; -1: the file only
    "best is a text": (row(1, ROWS, best="first"), -1),
    "best is a fraction": (row(1, ROWS, best=0.5), 1),
    "best is NaN": (row(1, ROWS, best=math.nan), 1),
    "best is negative": (row(2, ROWS, best=-1), 2),
    "best is too high": (row(2, ROWS, best=2), 2),
    "no best": (row(0, ROWS[:1], best=MISSING), 0),
    "no query in one row": (row(2, ROWS, query=MISSING), 2),
    "one candidate": (row(0, ROWS[:1], sample1=MISSING), 0),
    "a gap in the candidates": (row(0, ROWS[:1], sample1=MISSING, sample2=[1]), 0),
    "no candidate in one row": (row(1, ROWS, sample1=MISSING), 1),
    "an id is null": (row(1, ROWS, sample0=[0, None]), 1),
    "an id is a fraction": (row(1, ROWS, sample0=[0, 3.5]), 1),
    "an id is past the vocabulary": (row(1, ROWS, sample0=[1000]), 1),
    "a text for ids": (row(0, ROWS[:1], query="Anna"), 0),
    "an object with an array": ({"data": ROWS}, 0),
    "a row is empty": ([ROWS[0], {}, ROWS[1]], 1),
    "no rows": ([], -1),
    "no chosen in one row": (row(1, PAIRS, chosen=MISSING), 1),
    "no prompt in one row": (row(1, PAIRS, prompt=MISSING), 1),
    "chosen is an object": (row(0, PAIRS[:1], chosen={"a": 1}), 0),
    "no content": ([dict(prompt=MESSAGE, chosen=[{"role": "user"}], rejected=MESSAGE)], -1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_labels_are_refused_with_file_and_row(name, home, tmp_path):
    content, i = REFUSED[name]
    files = [("a.json", json.dumps(content))]
    if isinstance(content, list):
        files.append(("a.jsonl", lines(content)))
    for file, text in files:
        words = f"--label_dataset {tmp_path / file}: ", f": row {i}: " if i >= 0 else ""
        refuses(partial(read_labels, home, file, text, tmp_path), *words)


def test_an_error_of_the_chat_template_names_the_row(home, tmp_path, monkeypatch):
    monkeypatch.setattr(home.tokenizer, "chat_template", "{{ raise_exception('roles') }}")
    answer = [dict(role="assistant", content="Hi.")]
    content = lines([dict(prompt=MESSAGE, chosen=answer, rejected=answer)])
    refuses(partial(read_labels, home, "a.jsonl", content, tmp_path), "a.jsonl: row 0: ", "roles")


GARBAGE = {
    "empty": b"",
    "blank": b" \n\r\n\t ",
    "truncated": json.dumps(ROWS).encode()[:-9],
    "two arrays": 2 * json.dumps(ROWS).encode(),
    "nested without end": b"[" * 100_000,
    "nested deep": b'[{"query":' + b"[" * 5000 + b"]" * 5000 + b"}]",
    "bytes": bytes(range(256)) * 99,
    "UTF-16": json.dumps(ROWS).encode("utf-16"),
    "Latin-1": json.dumps(row(1, ROWS, note="é"), ensure_ascii=False).encode("latin-1"),
    "zip": b"PK\3\4" + bytes(99),
}
NO_TEXT = ("empty", "bytes", "UTF-16", "Latin-1")  # a .txt or .csv file may hold anything else


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("file", ["a.json", "a.jsonl", "a.csv", "a.parquet", "a.txt"])
def test_a_file_of_something_else_is_refused_by_name(file, name, home, tmp_path):
    labels = partial(read_labels, home, file, GARBAGE[name], tmp_path)
    refuses(labels, f"--label_dataset {tmp_path / file}")
    if name in NO_TEXT or file not in ("a.txt", "a.csv"):
        task = replace(home.task, query_dataset=str(tmp_path / file))
        queries = partial(load_queries, task, home.tokenizer, home.ids, 1)
        refuses(queries, f"--query_dataset {tmp_path / file}")


LEAVES = st.none() | st.integers(-3, 1002) | st.floats() | st.just(2**70)
LEAVES |= st.text("ab: é", max_size=3)  # the library reads "1" as 1
JUNK = LEAVES | st.lists(LEAVES, max_size=5) | st.lists(st.lists(LEAVES, max_size=2), max_size=2)
JUNK |= st.dictionaries(st.text(max_size=2), LEAVES, max_size=2)
IDS = st.lists(st.integers(-1, 1001) | st.floats(0, 3), min_size=1, max_size=4)
LABEL_KEYS = ("query", "sample0", "sample1", "best", "note")


def read_any(home: Any, rows: list[dict], as_lines: bool) -> Any:
    """The labels of these rows, or None if they are refused."""
    file = ("any.jsonl", lines(rows)) if as_lines else ("any.json", json.dumps(rows))
    try:
        return read_labels(home, *file, home.folder)
    except InputError as error:
        assert "--label_dataset" in str(error)


@examples(max_examples=60)
@given(st.integers(0, 2), st.sampled_from(LABEL_KEYS), IDS | JUNK, st.booleans())
def test_any_label_is_read_as_it_is_or_refused(home, i, key, value, as_lines):
    """What is right is decided by a loop over the plain rows."""
    rows = row(i, ROWS, **{key: value})
    right = True
    for r in rows:
        for name in ("query", "sample0", "sample1"):
            ids = r[name] if isinstance(r[name], list) else [None]
            right &= all(type(x) in (int, float) and x in range(1000) for x in ids)
        right &= r["best"] in (0, 1)
    labels = read_any(home, rows, as_lines)
    assert right and same(labels, rows) if labels else not right or key == "note"


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PAIR_KEYS = ("prompt", "chosen", "rejected")


@examples(max_examples=60)
@given(st.integers(0, 1), st.sampled_from(PAIR_KEYS), TEXT | JUNK, st.booleans())
def test_any_pair_is_read_as_it_is_or_refused(home, i, key, value, as_lines):
    rows = row(i, PAIRS, **{key: value})
    labels = read_any(home, rows, as_lines)
    assert isinstance(value, str) == (labels is not None)
    if labels is not None:
        read = zip(labels.queries, *zip(*labels.responses, strict=True), strict=True)
        decoded = [[home.tokenizer.decode(ids) for ids in parts] for parts in read]
        kept = [r for r in rows if r["prompt"].strip() and r["chosen"] and r["rejected"]]
        assert decoded == [[r[name] for name in PAIR_KEYS] for r in kept]
        assert labels.best.tolist() == [0] * len(kept)


# ------------------------------------------------------------------------------------------- texts

TEXTS = ["Anna saw a cat.", "NA", "ä\u202e\U0001f600", 'a, "b"', "007", "x\u2028y\x85z", "Ben."]
SUFFIXES = (".txt", ".json", ".jsonl", ".csv", ".parquet")


def write_texts(path: Path, texts: list[str], end: str = "\n", bom: str = "") -> str:
    """A file with a column `text`, written by other libraries than those that read it."""
    rows = [{"text": text} for text in texts]
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path)
        return str(path)
    if path.suffix == ".csv":
        out = io.StringIO()
        csv.writer(out, lineterminator=end).writerows([["text"], *([text] for text in texts)])
        content = out.getvalue()
    elif path.suffix == ".json":
        content = json.dumps(rows, indent=1).replace("\n", end)
    else:
        content = lines(rows, end) if path.suffix == ".jsonl" else "".join(t + end for t in texts)
    path.write_bytes((bom + content).encode())
    return str(path)


def read_texts(home: Any, path: str) -> list[str]:
    return load_texts(replace(home.task, query_dataset=path), "text")["text"][:]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_texts_are_read_as_they_are_in_every_format(suffix, home, tmp_path):
    """With Unix and Windows line ends, a byte-order mark, and lines of 10 MB."""
    for i, (end, bom) in enumerate([("\n", ""), ("\n", "\ufeff"), ("\r\n", "\ufeff")]):
        path = write_texts(tmp_path / f"{i}{suffix}", TEXTS, end, bom)
        assert read_texts(home, path) == TEXTS
    long = ["Anna saw it. " * 800_000, "Ben was glad."]
    assert read_texts(home, write_texts(tmp_path / f"long{suffix}", long)) == long


ONE_LINE = st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\ufeff\0")


@examples(max_examples=40)
@given(st.lists(st.text(ONE_LINE, min_size=1), min_size=1), st.sampled_from(SUFFIXES))
def test_any_texts_are_read_as_they_are(home, texts, suffix):
    texts = ["a text, so that a column of numbers is one of texts", *texts]
    assert read_texts(home, write_texts(home.folder / f"any{suffix}", texts)) == texts


@pytest.mark.parametrize(
    "values",
    [[1, 2], [0.5, None], [True, False], [["Anna"]], [{"a": 1}], ["Anna", 1], [b"Anna", b"\xff"]],
    ids=["ints", "floats", "bools", "lists", "objects", "mixed", "bytes"],
)
def test_queries_of_something_else_than_texts_are_refused(values, home, tmp_path):
    for suffix in (".json", ".jsonl", ".parquet"):
        path = tmp_path / f"a{suffix}"
        if suffix == ".parquet" and values[-1] != 1:  # parquet holds one type
            pq.write_table(pa.table({"text": values}), path)
        elif isinstance(values[0], bytes) or suffix == ".parquet":
            continue
        else:
            write_texts(path, values)
        task = replace(home.task, query_dataset=str(path))
        load = partial(load_queries, task, home.tokenizer, home.ids, 1)
        refuses(load, f"--query_dataset {path}: ")


# ------------------------------------------------------------------------------------------ sources

PIECES = ("/", ".", "..", ":", "@", "train", "test", "task", "empty", "stories.txt", "labels.json")
PIECES += ("../home", "ä b", "nowhere", "owner")


@examples(max_examples=80)
@given(st.lists(st.sampled_from(PIECES), max_size=4).map("".join))
def test_any_source_is_loaded_or_refused_with_its_flag(home, source):
    """What may be loaded: the two files, and the folder around them."""
    try:
        load_rows(source, "--query_dataset")
    except InputError as error:
        assert "--query_dataset" in str(error)
    else:
        assert "stories" in source or "labels" in source or Path(source).exists()


@pytest.mark.parametrize("name", ["a.json", "a.txt", "a.parquet", "a"])
def test_a_folder_without_data_is_refused(name, home, tmp_path):
    (tmp_path / name / "within").mkdir(parents=True)
    load = partial(load_rows, str(tmp_path / name), "--query_dataset")
    refuses(load, f"--query_dataset {tmp_path / name}")
