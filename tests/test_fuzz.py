"""Files of labels and texts: read as they are, or refused by one `InputError` with file and row.

Nothing is repaired silently. hypothesis makes the same examples in every run.
"""

import csv
import functools
import io
import json
import math
from dataclasses import replace
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

from machinery.cli import InputError
from machinery.data import load_queries, load_texts
from machinery.labels import OPENAI_PAD, load_labels
from machinery.models import load_tokenizer
from machinery.sources import load_rows

examples = functools.partial(
    settings, derandomize=True, deadline=None, database=None, suppress_health_check=HealthCheck
)


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


def row(i: int, rows: list[dict], **values: Any) -> list[dict]:
    """The rows with other values in row `i`."""
    return [old | values if j == i else old for j, old in enumerate(rows)]


def without(i: int, key: str, rows: list[dict]) -> list[dict]:
    """The rows without a key in row `i`."""
    return [{k: v for k, v in old.items() if j != i or k != key} for j, old in enumerate(rows)]


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
    "array": ("a.json", json.dumps(ROWS)),
    "indented array with CRLF": ("a.json", json.dumps(ROWS, indent=2).replace("\n", "\r\n")),
    "array with BOM": ("a.json", "\ufeff" + json.dumps(ROWS)),
    "lines": ("a.jsonl", lines(ROWS)),
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


REFUSED = {  # rows → what the message names besides the file; in JSON Lines, if that differs
    "best is a bool": (row(1, ROWS, best=True), "row 1: best=True"),
    "best is a text": (row(1, ROWS, best="first"), "best"),
    "best is a fraction": (row(1, ROWS, best=0.5), "row 1: best=0.5"),
    "best is NaN": (row(1, ROWS, best=math.nan), "row 1: best="),
    "best is a list": ([old | {"best": [1]} for old in ROWS], "row 0: best=[1]"),
    "best is negative": (row(2, ROWS, best=-1), "row 2: best=-1"),
    "best is too high": (row(2, ROWS, best=2), "row 2: best=2 is not in 0...1"),
    "best is huge": (row(2, ROWS, best=10**30), "", "row 2: best=1e+30"),
    "no best": ([without(0, "best", [old])[0] for old in ROWS], "has no best"),
    "no best in one row": (without(1, "best", ROWS), "row 1: best=None"),
    "no query": ([without(0, "query", [old])[0] for old in ROWS], "has no query"),
    "no query in one row": (without(2, "query", ROWS), "row 2: query=None"),
    "one candidate": ([without(0, "sample1", [old])[0] for old in ROWS], "has no sample1"),
    "a gap in the candidates": (
        [{k.replace("1", "2"): v for k, v in old.items()} for old in ROWS],
        "has no sample1",
    ),
    "no candidate in one row": (without(1, "sample1", ROWS), "row 1: sample1=None"),
    "an id is a text": (row(1, ROWS, sample0=[0, "one"]), "sample0"),
    "an id is a list": (row(1, ROWS, sample0=[[0]]), "row 1: sample0=[[0]"),
    "an id is null": (row(1, ROWS, sample0=[0, None]), "row 1: sample0"),
    "an id is a fraction": (row(1, ROWS, sample0=[0, 3.5]), "row 1: sample0"),
    "an id is infinite": (row(1, ROWS, sample0=[math.inf, 1]), "row 1: sample0"),
    "an id is 2**63": (row(1, ROWS, sample0=[2**63]), "row 1: sample0"),
    "an id is negative": (row(1, ROWS, query=[-8, 1]), "row 1: query has id -8"),
    "an id is past the vocabulary": (row(1, ROWS, sample0=[1000]), "row 1: sample0 has id 1000"),
    "a text for ids": ([old | {"query": "Anna"} for old in ROWS], "row 0: query"),
    "a number for ids": ([old | {"sample0": 7} for old in ROWS], "row 0: sample0"),
    "only padding": (row(1, ROWS, query=SEP * 4), "row 1: query"),
    "an object with an array": ({"data": ROWS}, "has no query"),
    "a row is null": ([ROWS[0], None, ROWS[1]], "row 1: query=None"),
    "a row is empty": ([ROWS[0], {}, ROWS[1]], "row 1: query=None"),
    "no rows": ([], ""),
    "rows are empty": ([{}, {}], "empty"),
    "rows are lists": ([[1, 2], [3]], "has no query", "cannot be read"),
    "rows are numbers": ([1, 2], "has no query", "cannot be read"),
    "a text": ("abc", ""),
    "no chosen in one row": (without(1, "chosen", PAIRS), "row 1: chosen and rejected"),
    "no prompt in one row": (without(1, "prompt", PAIRS), "row 1: prompt=None"),
    "prompts are numbers": ([old | {"prompt": 7} for old in PAIRS], "row 0: prompt=7"),
    "a prompt is a list": (row(0, PAIRS, prompt=["Anna"]), "row 0: prompt"),
    "chosen is a bool": ([old | {"chosen": True} for old in PAIRS], "row 0: chosen"),
    "chosen is a number in one row": (row(1, PAIRS, chosen=3), "row 1: chosen"),
    "chosen is an object": ([old | {"chosen": {"a": 1}} for old in PAIRS], "row 0: chosen"),
    "messages are texts": ([dict(chosen=["a"], rejected=["b"])], "row 0: 'a' is not a message"),
    "a message without content": (
        [dict(prompt=MESSAGE, chosen=[{"role": "user"}], rejected=MESSAGE)],
        "is not a message",
    ),
    "all are blank": ([dict(prompt=" \n", chosen="a", rejected="b")], "blank"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_labels_are_refused_with_file_row_and_value(name, home, tmp_path):
    content, *words = REFUSED[name]
    files = [("a.json", json.dumps(content), words[0])]
    if isinstance(content, list):
        files.append(("a.jsonl", lines(content), words[-1]))
    for file, text, word in files:
        with pytest.raises(InputError) as caught:
            read_labels(home, file, text, tmp_path)
        message = str(caught.value)
        assert f"--label_dataset {tmp_path / file}" in message and word in message
        assert len(message) < 600


def test_an_error_of_the_chat_template_names_the_row(home, tmp_path, monkeypatch):
    template = "{{ raise_exception('roles have to alternate') }}"
    monkeypatch.setattr(home.tokenizer, "chat_template", template)
    answer = [dict(role="assistant", content="Hi.")]
    content = lines([dict(prompt=MESSAGE, chosen=answer, rejected=answer)])
    with pytest.raises(InputError, match="a.jsonl row 0: roles have to alternate"):
        read_labels(home, "a.jsonl", content, tmp_path)


GARBAGE = {
    "empty": b"",
    "blank": b" \n\r\n\t ",
    "truncated": json.dumps(ROWS).encode()[:-9],
    "two arrays": 2 * json.dumps(ROWS).encode(),
    "text after it": json.dumps(ROWS).encode() + b"?",
    "nested without end": b"[" * 100_000,
    "nested deep": b'[{"query":' + b"[" * 5000 + b"]" * 5000 + b"}]",
    "bytes": bytes(range(256)) * 99,
    "NULs": b"\0" * 99,
    "UTF-16": json.dumps(ROWS).encode("utf-16"),
    "Latin-1": json.dumps(row(1, ROWS, note="é"), ensure_ascii=False).encode("latin-1"),
    "zip": b"PK\3\4" + bytes(99),
}
NO_TEXT = ("empty", "bytes", "UTF-16", "Latin-1")  # a .txt or .csv file may hold anything else


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("file", ["a.json", "a.jsonl", "a.csv", "a.parquet", "a.txt"])
def test_a_file_of_something_else_is_refused_by_name(file, name, home, tmp_path):
    with pytest.raises(InputError, match=f"--label_dataset {tmp_path / file}"):
        read_labels(home, file, GARBAGE[name], tmp_path)
    if name in NO_TEXT or file not in ("a.txt", "a.csv"):
        task = replace(home.task, query_dataset=str(tmp_path / file))
        with pytest.raises(InputError, match=f"--query_dataset {tmp_path / file}"):
            load_queries(task, home.tokenizer, home.ids, 1)


JUNK = st.recursive(
    st.none()
    | st.integers(-3, 1002)
    | st.floats()
    | st.text("ab: é", max_size=3)  # the library reads "1" as 1
    | st.just(2**70),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=6,
)
IDS = st.lists(st.integers(-1, 1001) | st.floats(0, 3), min_size=1, max_size=4)
LABEL_KEYS = ("query", "sample0", "sample1", "best", "note")


@examples(max_examples=60)
@given(st.integers(0, 2), st.sampled_from(LABEL_KEYS), IDS | JUNK, st.booleans())
def test_a_label_with_anything_in_one_place_is_read_as_it_is_or_refused(
    home, i, key, value, as_lines
):
    """What is right is decided by a loop over the plain rows."""
    rows = row(i, ROWS, **{key: value})
    right = True
    for r in rows:
        for name in ("query", "sample0", "sample1"):
            ids = r[name] if isinstance(r[name], list) else [None]
            right &= all(type(x) in (int, float) and x in range(1000) for x in ids)
        right &= r["query"] != []
        right &= type(r["best"]) in (int, float) and r["best"] in (0, 1)
    name, content = ("any.jsonl", lines(rows)) if as_lines else ("any.json", json.dumps(rows))
    try:
        labels = read_labels(home, name, content, home.folder)
    except InputError as error:
        assert "--label_dataset" in str(error) and (not right or key == "note"), error
    else:
        assert right and same(labels, rows)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PAIR_KEYS = ("prompt", "chosen", "rejected")


@examples(max_examples=60)
@given(st.integers(0, 1), st.sampled_from(PAIR_KEYS), TEXT | JUNK, st.booleans())
def test_a_pair_with_anything_in_one_place_is_read_as_it_is_or_refused(
    home, i, key, value, as_lines
):
    rows = row(i, PAIRS, **{key: value})
    name, content = ("any.jsonl", lines(rows)) if as_lines else ("any.json", json.dumps(rows))
    try:
        labels = read_labels(home, name, content, home.folder)
    except InputError as error:
        assert "--label_dataset" in str(error) and not isinstance(value, str), error
    else:
        assert isinstance(value, str)
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
    for i, (end, bom) in enumerate(
        [("\n", ""), ("\n", "\ufeff"), ("\r\n", ""), ("\r\n", "\ufeff")]
    ):
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
def test_a_column_of_something_else_than_texts_is_refused(values, home, tmp_path):
    for suffix in (".json", ".jsonl", ".parquet"):
        path = tmp_path / f"a{suffix}"
        if suffix == ".parquet" and values[-1] != 1:  # parquet holds one type
            pq.write_table(pa.table({"text": values}), path)
        elif isinstance(values[0], bytes) or suffix == ".parquet":
            continue
        else:
            write_texts(path, values)
        with pytest.raises(InputError, match=rf"--query_dataset {path}: column 'text' .* texts"):
            read_texts(home, str(path))


# ------------------------------------------------------------------------------------------ sources

PIECES = ("/", ".", "..", ":", "@", "train", "test", "task", "empty", "stories.txt", "labels.json")
PIECES += ("../home", "ä b", "nowhere", "owner")


@examples(max_examples=80)
@given(st.lists(st.sampled_from(PIECES), max_size=4).map("".join))
def test_any_source_is_loaded_or_refused_with_its_flag(home, source):
    """What may be loaded: the two files, and the folder around them."""
    try:
        rows = load_rows(source, "--query_dataset")
    except InputError as error:
        assert "--query_dataset" in str(error)
    else:
        assert len(rows) in (16, 40) and ("stories" in source or "labels" in source)


@pytest.mark.parametrize("source", [".", "..", "/", "../home"])
def test_the_current_folder_is_not_a_dataset(source, home):
    """Everything in it would be searched for minutes, or trained on."""
    with pytest.raises(InputError, match=f"--query_dataset {source} is the current folder"):
        load_rows(source, "--query_dataset")


@pytest.mark.parametrize("name", ["a.json", "a.txt", "a.parquet", "a"])
def test_a_folder_without_data_is_refused(name, home, tmp_path):
    (tmp_path / name / "within").mkdir(parents=True)
    with pytest.raises(InputError, match=f"--query_dataset {tmp_path / name}"):
        load_rows(str(tmp_path / name), "--query_dataset")
