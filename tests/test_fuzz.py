"""Bad input by the hundred: whatever stands in a flag, a label file or a query file, a script runs, or one `InputError`
(tyro's own exit code 2 for a flag that it cannot read) names the field or the file; nothing is repaired in silence. The
examples are the same in every run; `FUZZ=300 pytest tests/test_fuzz.py` makes 300 of each kind."""

import contextlib
import csv
import functools
import io
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import ppo
import records
import rloo
import sft
import tasks
import train_reward
import utils

pytestmark = pytest.mark.usefixtures("home")
SCRIPTS = {"ppo": ppo, "rloo": rloo, "train_reward": train_reward, "sft": sft}
LONG = "a" * 100_000


def examples(n: int) -> settings:
    """The first `n` of hypothesis's examples, or as many as the environment variable asks for."""
    n = int(os.environ.get("FUZZ", n))
    return settings(derandomize=True, max_examples=n, deadline=None, database=None, suppress_health_check=HealthCheck)


AFFIXES = ("query_prefix", "query_suffix")  # where only half a surrogate pair is wrong, of all texts
WRONG = {  # what no field of a type may be
    int: [-1, 2**63, 10**30, 10**400],
    float: [math.nan, math.inf, -math.inf, 1e300],
    str: ["", "a\0b", LONG, "\udcff", "a" * 256],
}
EXTREME = {
    bool: [True, False],
    int: [*WRONG[int], 0, 1, 2, 2**31 - 1, 2**31],
    float: [*WRONG[float], -1.0, 0.0, 1e-300, 1e-30, 1.0, 1e6],
    str: [*WRONG[str], "ä\U0001f600", "a\nb", "folder", "file.txt", "missing.py:f", "a:b", ":", "..:f", "../..", "/"],
}
NONE = {bool: [], int: [None], float: [None], str: [None]}  # a bool's flag takes no value


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, own_cache: None):
    """The folder that all scripts run in, with small files; no hub can be reached."""
    folder = tmp_path_factory.mktemp("fuzz") / "home"
    task = tiny.write_task(folder / "task")
    tiny.write_reward(folder / "reward")
    (folder / "folder").mkdir()
    (folder / "folder" / "notes").touch()
    (folder / "file.txt").write_text("Anna saw a cat.\n")
    (folder / "odd.py").write_text("def number(*a):\n    return 1\n\ndef raises(*a):\n    raise KeyError('no')\n")
    (folder / "broken.py").write_text("import json\njson.loads('{')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for constants in (huggingface_hub.constants, datasets.config):
            patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
        yield task


@pytest.fixture(scope="module")
def home_folder(home: Any) -> Path:
    """Where files may be left behind: hypothesis takes no folder of one test alone."""
    return Path.cwd()


def kinds(cls: type) -> dict[str, tuple[type, bool]]:
    """Field of `Args`, and of its task → its type, and whether it may be None."""
    found = {}
    for name, hint in get_type_hints(cls).items():
        parts = (hint, *get_args(hint))
        kind = next(
            (kind for kind in (bool, int, float, str) if kind in parts), str if get_origin(hint) is Literal else None
        )
        found |= {name: (kind, type(None) in parts)} if kind else kinds(hint)
    return found


FIELDS = {name: kinds(script.Args) for name, script in SCRIPTS.items()}


def changed(args: Any, **values: Any) -> Any:
    """`args` with other values of its own fields and of its task's."""
    own = {field.name: getattr(args, field.name) for field in fields(args)}
    parts = {name: changed(part, **values) for name, part in own.items() if is_dataclass(part)}
    return replace(args, **{name: value for name, value in values.items() if name in own} | parts)


def refusal(call: Any) -> str | None:
    """The words with which `call` is refused, on one screen; None where it is not. Anything else is an error here."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            call()
    except utils.InputError as error:
        assert str(error)
        return str(error)
    except SystemExit as stop:
        assert stop.code == 2 and printed.getvalue()
        return printed.getvalue()
    return None


def names(text: str, fields: Iterable[str]) -> bool:
    """Whether a message names one of these fields: --lr, lr= or, with an underscore in it, as a word."""
    found = re.findall(r"--([a-z0-9_-]+)|\b([a-z0-9_]+)=|\b([a-z]+(?:_[a-z]+)+)\b", text)
    return not set(fields).isdisjoint(name.replace("-", "_") for parts in found for name in parts)


# -------------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_no_field_of_a_type_may_be_is_refused_by_name_in_every_field(script):
    module = SCRIPTS[script]
    args = tasks.parse_args(module.Args, module.PRESETS, [])
    assert refusal(lambda: module.check(args, 1)) is None
    for field, (kind, _) in FIELDS[script].items():
        for value in WRONG.get(kind, []):
            text = refusal(lambda value=value, field=field: module.check(changed(args, **{field: value}), 1))
            free = field in AFFIXES and value != "\udcff"
            assert (text is None) if free else text and text.startswith(f"{field}="), (field, value, text)


def as_flag(field: str, value: Any) -> str:
    """As a command line has it."""
    return f"--{'no-' * (value is False)}{field}" if isinstance(value, bool) else f"--{field}={value}"


@st.composite
def command_lines(draw: Any) -> tuple[str, dict[str, Any]]:
    """A script, and extreme values of one to three of its fields, None also where it is not allowed."""
    script = draw(st.sampled_from(sorted(SCRIPTS)))
    chosen = draw(st.lists(st.sampled_from(sorted(FIELDS[script])), min_size=1, max_size=3, unique=True))
    kinds = {field: FIELDS[script][field][0] for field in chosen}
    return script, {field: draw(st.sampled_from(EXTREME[kind] + NONE[kind])) for field, kind in kinds.items()}


@examples(250)
@given(command_lines())
def test_any_command_line_passes_or_names_one_of_its_flags(case):
    """Every value of `WRONG` and None where it is not allowed are refused; the others may be."""
    script, values = case
    module = SCRIPTS[script]
    argv = [as_flag(field, value) for field, value in values.items()]
    text = refusal(lambda: module.check(tasks.parse_args(module.Args, module.PRESETS, argv), 1))
    for field, value in values.items():
        kind, may_be_none = FIELDS[script][field]
        wrong = value is None and not may_be_none and kind is not str  # as a text None is a name like any other
        wrong |= field not in AFFIXES and repr(value) in map(repr, WRONG.get(kind, []))
        assert text is not None or not wrong, field
    assert text is None or names(text, values), text


@pytest.mark.parametrize(
    ("script", "values", "words"),
    [
        ("ppo", dict(output_dir="."), "output_dir=. is where the run itself is written"),
        ("sft", dict(output_dir="runs/mine", run_name="mine"), "output_dir=runs/mine is where the run itself"),
        ("ppo", dict(run_name="../elsewhere"), "run_name=../elsewhere is no folder in runs/"),
        ("ppo", dict(run_name="."), "run_name=. is no folder in runs/"),
        ("rloo", dict(eos_task=True, truncate_token=None), "eos_task needs truncate_token"),
        ("rloo", dict(resume="file.txt"), "--resume file.txt"),
        ("ppo", dict(reward_fn="broken.py:f"), "reward_fn='broken.py:f' cannot be imported: JSONDecodeError"),
        ("sft", dict(clean_fn="..:f"), "clean_fn='..:f' cannot be imported"),
    ],
)
def test_what_would_fail_late_or_write_elsewhere_is_refused_by_name_before_anything_loads(script, values, words):
    module = SCRIPTS[script]
    args = changed(tasks.parse_args(module.Args, module.PRESETS, []), **values)
    assert words in refusal(lambda: module.check(args, 1))


# --------------------------------------------------------------------------------------------- starts, to one update

SIZES = (
    "batch_size",
    "num_ppo_epochs",
    "rollout_batch_size",
    "normalize_samples",
    "rloo_k",
    "num_minibatches",
    "samples_per_prompt",
)
FUNCTIONS = ["odd.py:number", "broken.py:f", "builtins:max"]
NO_TEXTS = ["odd.py:number", "odd.py:raises", "broken.py:f", "builtins:len", "json:loads"]
STARTS = {
    bool: [True, False],
    int: [1, 2, 3, 4, 5, 8, 12, 56, 60, 64, 65, 2**31 - 1],
    float: [0.0, 1e-30, 1e-20, 1e-4, 0.5, 1.0, 1e4, 1e6],
    str: [
        *("ä\U0001f600", "a\nb", " ", ".", "!", "text", "folder", "file.txt", "../..", "/", "a:b", "a/b/c"),
        *("task/model", "reward", "task/stories.txt", "task/labels.json", "folder:x", "file.txt:x"),
    ],
}


@st.composite
def starts(draw: Any, script: str) -> dict[str, Any]:
    """Values of one or two fields."""

    def value(field: str) -> Any:
        kind, may_be_none = FIELDS[script][field]
        values = [v for v in STARTS[kind] if field not in SIZES or v <= 12] + [None] * may_be_none
        return draw(st.sampled_from(values + FUNCTIONS * field.endswith("_fn")))

    free = sorted(FIELDS[script].keys() - {"task", "track", "push_to_hub"})
    return {field: value(field) for field in draw(st.lists(st.sampled_from(free), min_size=1, max_size=2, unique=True))}


class FirstUpdate(Exception):
    """A run got as far as its first line of metrics."""


class Hang(BaseException):
    """A minute without an update: no `except Exception` may take it for bad input."""


@functools.cache
def base(script: str) -> Any:
    """Arguments of a run on the tiny files of `home`."""
    folder = Path.cwd()
    files = dict(query_dataset=str(folder / "task/stories.txt"), label_dataset=str(folder / "task/labels.json"))
    task = tiny.make_task(base_model=str(folder / "task/model"), **files)
    if script == "sft":
        return sft.Args(task=task, num_heldout=4, batch_size=2, block_size=10)
    if script == "train_reward":
        return train_reward.Args(task=task, num_labels=12, batch_size=4, normalize_samples=4, rollout_batch_size=4)
    return tiny.make_args(task, SCRIPTS[script], reward_model=str(folder / "reward"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_any_start_gets_to_its_first_update_or_names_a_flag(script, accelerator, monkeypatch):
    def stop(run, *args):
        run.close()
        for tracker in run.accelerator.trackers:
            tracker.finish()
        raise FirstUpdate

    def hang(*args):
        raise Hang

    monkeypatch.setattr(records.Run, "log", stop)
    signal.signal(signal.SIGALRM, hang)
    reached = []

    @examples(40)
    @given(starts(script))
    @example({})
    def start(values: dict[str, Any]) -> None:
        signal.alarm(60)
        try:
            text = refusal(lambda: SCRIPTS[script].main(changed(base(script), **values)))
        except FirstUpdate:
            reached.append(values)
        else:
            functions = [value for field, value in values.items() if field.endswith("_fn") and value]
            assert text and (names(text, FIELDS[script]) or any(map(text.count, functions))), text
        finally:
            signal.alarm(0)
            shutil.rmtree("runs", ignore_errors=True)
            torch.set_float32_matmul_precision("highest")

    start()
    assert {} in reached and len(reached) > 1


@pytest.mark.parametrize(
    ("script", "values", "words"),
    [
        ("sft", dict(block_size=64, response_length=60), "a quarter of block_size and response_length need 76 tokens"),
        ("train_reward", dict(policy_model="folder"), "--policy_model=folder cannot be loaded"),
        ("train_reward", dict(base_model="file.txt"), "--base_model=file.txt is a file"),
        ("train_reward", dict(num_labels=32, batch_size=32), "16 labels, num_labels=32; a batch_size=32 is more"),
        ("ppo", dict(reward_model="task/model"), "a reward model"),
    ],
)
def test_what_files_and_flags_do_not_allow_together_is_refused_before_any_update(script, values, words, accelerator):
    assert words in refusal(lambda: SCRIPTS[script].main(changed(base(script), **values)))
    assert not Path("runs").exists()


def test_samples_that_all_score_the_same_cannot_be_normalised_on():
    """Their standard deviation is 0, and the gain would be infinite."""
    rows = torch.full((4, 6), 7)
    assert "--normalize_samples" in refusal(lambda: train_reward.normalise(tiny.make_reward(), rows, size=4))


# -------------------------------------------------------------------------------------------------------------- labels

IDS = [  # what the label files below hold: query, candidates, best
    ([1, 2, 3, 4, 5, 6, 7, 8], [[11, 12, 13, 14, 15], [21, 22, 23, 24, 25]], 1),
    ([8, 7, 6, 5, 4, 3, 2, 1], [[0, 1, 2, 3, 4], [999, 998, 997, 996, 995]], 0),
    ([3, 1, 4, 1, 5, 9, 2, 6], [[5, 3, 5, 8, 9], [7, 9, 3, 2, 3]], 1),
]
ROWS = [{"query": q, "sample0": a, "sample1": b, "best": best} for q, (a, b), best in IDS]
PAIRS = [
    {"prompt": "Anna saw it.", "chosen": " It was good.", "rejected": " It was cold."},
    {"prompt": "Ben saw it.", "chosen": " So did Anna.", "rejected": " It was cold."},
]


def row(i: int, rows: list[dict] = ROWS, **values: Any) -> list[dict]:
    """The rows with other values in row `i`."""
    return [old | values if j == i else old for j, old in enumerate(rows)]


def without(i: int, key: str, rows: list[dict] = ROWS) -> list[dict]:
    """The rows without a key in row `i`."""
    return [{k: v for k, v in old.items() if j != i or k != key} for j, old in enumerate(rows)]


def lines(rows: list[Any], end: str = "\n") -> str:
    return "".join(json.dumps(row) + end for row in rows)


def read_labels(name: str, content: str | bytes, folder: Path) -> train_reward.Labels:
    """The labels of a file of this name and content."""
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    task = replace(base("train_reward").task, label_dataset=str(folder / name))
    return train_reward.load_labels(task, tokenizer(), tiny.WORDS)


@functools.cache
def tokenizer() -> Any:
    return utils.load_tokenizer(base("train_reward").task, 5)[0]


def same_labels(labels: train_reward.Labels, ids: list[tuple] = IDS) -> bool:
    """Whether labels are just these."""
    parts = (labels.query, labels.responses, labels.best)
    return [part.tolist() for part in parts] == [list(column) for column in zip(*ids, strict=True)]


ACCEPTED = {  # the same rows, in the forms that files of text have
    "array": ("a.json", json.dumps(ROWS)),
    "indented array": ("a.json", json.dumps(ROWS, indent=2)),
    "array with CRLF": ("a.json", json.dumps(ROWS, indent=2).replace("\n", "\r\n")),
    "array with BOM": ("a.json", "\ufeff" + json.dumps(ROWS)),
    "lines": ("a.jsonl", lines(ROWS)),
    "lines with CRLF": ("a.jsonl", lines(ROWS, "\r\n")),
    "lines with BOM": ("a.jsonl", "\ufeff" + lines(ROWS)),
    "empty lines between": ("a.jsonl", "\n" + lines(ROWS, "\n\n\n")),
    "no end of line": ("a.jsonl", lines(ROWS).strip()),
    "more keys": ("a.json", json.dumps(row(1, note="ä\u202e\U0001f600", sample=3))),
    "a line of 10 MB": ("a.jsonl", lines(row(1, note="x" * 10_000_000))),
    "an array of 10 MB": ("a.json", json.dumps(row(1, note="x" * 10_000_000))),
    "whole numbers with a point": ("a.json", json.dumps(row(1, sample0=[0.0, 1.0, 2.0, 3.0, 4.0], best=0.0))),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_forms_of_text_make_no_difference_to_labels(name, tmp_path):
    assert same_labels(read_labels(*ACCEPTED[name], tmp_path))


def test_candidates_are_numbered_not_sorted_as_texts(tmp_path):
    """`best` counts them: sample10 is the eleventh."""
    many = {f"sample{k}": [k] * 5 for k in range(12)}
    labels = read_labels("a.json", json.dumps([ROWS[0] | many | {"best": 10}]), tmp_path)
    assert labels.responses[0, :, 0].tolist() == list(range(12)) and labels.best.tolist() == [10]


MESSAGE = [{"role": "user", "content": "Hello."}]
REFUSED = {  # rows → what the message names besides the file
    "best is a bool": (row(1, best=True), "row 1: best=True is not in 0 … 1"),
    "all are bools": ([old | {"best": False} for old in ROWS], "row 0: best=False"),
    "best is a text in one row": (row(1, best="1"), "best"),
    "best is no number": (row(1, best=math.nan), "row 1: best="),
    "best is infinite": (row(1, best=math.inf), "row 1: best="),
    "best is a list": ([old | {"best": [1]} for old in ROWS], "row 0: best=[1]"),
    "best out of range": (row(2, best=2), "row 2: best=2 is not in 0 … 1"),
    "best is huge": (row(2, best=10**30), "Value is too big", "row 2: best=1e+30"),
    "no best in one row": (without(1, "best"), "row 1: best=None"),
    "no candidate in one row": (without(1, "sample1"), "row 1: sample1=None"),
    "no query in one row": (without(2, "query"), "row 2: query=None"),
    "a gap in the candidates": ([{k.replace("1", "2"): v for k, v in old.items()} for old in ROWS], "has no sample1"),
    "an id is a bool": (row(1, sample0=[0, True, 2, 3, 4]), "row 1: sample0=[0, True"),
    "an id is a text": (row(1, sample0=[0, "1", 2, 3, 4]), "sample0"),
    "an id is a list": (row(1, sample0=[[0]] * 5), "row 1: sample0=[[0]"),
    "an id is 2**63": (row(1, sample0=[2**63] * 5), "row 1: sample0=[9"),
    "an id is -1": (row(1, sample0=[-1, 1, 2, 3, 4]), "row 1: sample0 holds id -1"),
    "an id is one past the vocabulary": (row(1, sample0=[1000, 1, 2, 3, 4]), "row 1: sample0 holds id 1000"),
    "an id is infinite": (row(1, sample0=[math.inf, 1, 2, 3, 4]), "row 1: sample0="),
    "ragged": (row(1, sample0=[1, 2, 3]), "row 1: sample0 has 3 ids, not 5"),
    "nothing but padding": (row(1, query=[train_reward.LABEL_PAD] * 8), "row 1: query holds nothing"),
    "an object in an array": ({"data": ROWS}, "has no query"),
    "a row is null": ([ROWS[0], None, ROWS[1]], "row 1: query=None"),
    "a row is empty": ([ROWS[0], {}, ROWS[1]], "row 1: query=None"),
    "rows are empty": ([{}, {}], "empty"),
    "rows are lists": ([[1, 2], [3]], "has no query", "cannot be read"),
    "rows are numbers": ([1, 2], "has no query", "cannot be read"),
    "a text": ("abc", ""),
    "a number": (3, ""),
    "null": (None, "begins with null"),
    "null at first": ([None, *ROWS], "begins with null"),
    "chosen is missing": (without(1, "chosen", PAIRS), "row 1: chosen and rejected have to be"),
    "prompt is missing": (without(1, "prompt", PAIRS), "row 1: prompt=None has to be a text"),
    "prompts are numbers": ([old | {"prompt": i} for i, old in enumerate(PAIRS)], "row 0: prompt=0"),
    "a prompt is a list": (row(0, PAIRS, prompt=["Anna"]), "row 0: prompt="),
    "a prompt is blank": (row(1, PAIRS, prompt=" \n"), "row 1: prompt, chosen or rejected is blank"),
    "chosen is a bool": ([old | {"chosen": True} for old in PAIRS], "row 0: chosen"),
    "chosen is a number in one row": (row(1, PAIRS, chosen=3), "row 1: chosen"),
    "chosen is an object": ([old | {"chosen": {"a": 1}} for old in PAIRS], "row 0: chosen"),
    "messages are texts": ([old | {"chosen": ["a"], "rejected": ["b"]} for old in PAIRS], "row 0: a is no message"),
    "a message has no content": ([dict(prompt=MESSAGE, chosen=[{"role": "user"}], rejected=MESSAGE)], "is no message"),
    "dialogues are empty": ([{"chosen": "", "rejected": ""}], "row 0: prompt, chosen or rejected is blank"),
}
GARBAGE = {
    "empty": b"",
    "blank": b" \n\r\n\t ",
    "truncated": json.dumps(ROWS).encode()[:-9],
    "two arrays": 2 * json.dumps(ROWS).encode(),
    "text behind it": json.dumps(ROWS).encode() + b"?",
    "nested without end": b"[" * 100_000,
    "nested deep": b'[{"query":' + b"[" * 5000 + b"]" * 5000 + b"}]",
    "bytes": bytes(range(256)) * 99,
    "NULs": b"\0" * 99,
    "UTF-16": json.dumps(ROWS).encode("utf-16"),
    "Latin-1": json.dumps(row(1, note="é"), ensure_ascii=False).encode("latin-1"),
    "zip": b"PK\3\4" + bytes(99),
}


@pytest.mark.parametrize("name", REFUSED)
def test_labels_that_are_not_right_are_refused_with_row_and_value(name, tmp_path):
    content, *words = REFUSED[name]
    forms = {"a.json": json.dumps(content)} | ({"a.jsonl": lines(content)} if isinstance(content, list) else {})
    for (file, text), wanted in zip(forms.items(), (words[0], words[-1]), strict=False):
        text = refusal(lambda file=file, text=text: read_labels(file, text, tmp_path))
        assert text and f"--label_dataset={tmp_path / file}" in text and wanted in text and len(text) < 600, text


def test_messages_that_the_chat_template_refuses_are_named_with_their_row(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer(), "chat_template", "{{ raise_exception('roles have to alternate') }}")
    content = lines([dict(prompt=MESSAGE, chosen=MESSAGE, rejected=MESSAGE)])
    text = refusal(lambda: read_labels("a.jsonl", content, tmp_path))
    assert text == f"--label_dataset={tmp_path / 'a.jsonl'} row 0: roles have to alternate"


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("file", ["a.json", "a.jsonl", "a.csv", "a.parquet", "a.txt"])
def test_a_file_that_is_something_else_is_refused_by_name(file, name, tmp_path):
    for flag in ("label_dataset", "query_dataset"):
        if (
            flag == "query_dataset"
            and file in ("a.txt", "a.csv")
            and name not in ("empty", "UTF-16", "Latin-1", "bytes")
        ):
            continue  # a line of text is a text
        (tmp_path / file).write_bytes(GARBAGE[name])
        task = replace(base("train_reward").task, **{flag: str(tmp_path / file)})
        load = train_reward.load_labels if flag == "label_dataset" else functools.partial(utils.load_queries, needed=1)
        text = refusal(lambda load=load, task=task: load(task, tokenizer(), tiny.WORDS))
        assert text and f"--{flag}={tmp_path / file}" in text, text


@pytest.mark.parametrize("name", ["a.json", "a.txt", "a.parquet", "a"])
def test_a_folder_without_data_is_refused_by_name(name, tmp_path):
    (tmp_path / name / "within").mkdir(parents=True)
    for flag in ("--label_dataset", "--query_dataset"):
        assert f"{flag}={tmp_path / name}" in refusal(lambda flag=flag: utils.load_rows(str(tmp_path / name), flag))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1002) | st.floats() | st.text(max_size=3) | st.just(2**70),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)
IDS_OR_JUNK = st.lists(st.integers(-1, 1001) | st.booleans() | st.floats(0, 3), min_size=4, max_size=8) | JUNK


@examples(60)
@given(st.integers(0, 2), st.sampled_from(["query", "sample0", "sample1", "best", "note"]), IDS_OR_JUNK, st.booleans())
def test_a_label_with_anything_in_one_place_is_read_as_it_stands_or_refused(home_folder, i, key, value, as_lines):
    """What is right is told by a loop over the plain rows."""
    rows = row(i, **{key: value})
    content = lines(rows) if as_lines else json.dumps(rows)
    right = True
    for r in rows:
        for name, length in (("query", 8), ("sample0", 5), ("sample1", 5)):
            ids = r[name] if isinstance(r[name], list) else []
            right &= len(ids) == length and all(type(x) in (int, float) and x in range(1000) for x in ids)
        right &= type(r["best"]) in (int, float) and r["best"] in (0, 1)
    try:
        labels = read_labels("any.jsonl" if as_lines else "any.json", content, home_folder)
    except utils.InputError as error:
        assert "--label_dataset=" in str(error) and (not right or key == "note"), error
    else:
        assert right and same_labels(labels, [(r["query"], [r["sample0"], r["sample1"]], r["best"]) for r in rows])


# ------------------------------------------------------------------------------------------------------------- queries

TEXTS = ["Anna saw a cat.", "NA", "ä\u202e\U0001f600", 'a, "b"', "007", "x\u2028y\x85z", "Ben was glad."]


def write_texts(path: Path, texts: list[str], end: str = "\n", bom: str = "") -> str:
    """A query file of column `text`, written by other libraries than those that read it."""
    if path.suffix == ".txt":
        content = "".join(text + end for text in texts)
    elif path.suffix == ".json":
        content = json.dumps([{"text": text} for text in texts], indent=1).replace("\n", end)
    elif path.suffix == ".jsonl":
        content = lines([{"text": text} for text in texts], end)
    elif path.suffix == ".csv":
        out = io.StringIO()
        csv.writer(out, lineterminator=end).writerows([["text"], *([text] for text in texts)])
        content = out.getvalue()
    else:
        pq.write_table(pa.table({"text": texts}), path)
        return str(path)
    path.write_bytes((bom + content).encode())
    return str(path)


def read_texts(path: str) -> list[str]:
    return utils.load_texts(replace(base("ppo").task, query_dataset=path))["text"][:]


SUFFIXES = (".txt", ".json", ".jsonl", ".csv", ".parquet")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_queries_are_read_as_they_stand_in_every_format(suffix, tmp_path):
    for end in ("\n", "\r\n"):
        for bom in ("", "\ufeff"):
            assert read_texts(write_texts(tmp_path / f"{len(end)}{len(bom)}{suffix}", TEXTS, end, bom)) == TEXTS


@examples(40)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\ufeff\0"), min_size=1), min_size=1
    ),
    st.sampled_from(SUFFIXES),
)
def test_any_texts_are_read_as_they_stand(home_folder, texts, suffix):
    texts = ["a text, so that a column of numbers is none", *texts]
    assert read_texts(write_texts(home_folder / f"any{suffix}", texts)) == texts


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_line_of_10_mb_is_one_text(suffix, tmp_path):
    texts = ["Anna saw it. " * 800_000, "Ben was glad."]
    assert read_texts(write_texts(tmp_path / f"long{suffix}", texts)) == texts


COLUMNS = {  # what is not a column of texts
    "numbers": [1, 2],
    "points": [0.5, None],
    "bools": [True, False],
    "lists": [["Anna"], ["Ben"]],
    "objects": [{"a": 1}, {"a": 2}],
    "numbers among texts": ["Anna", 1],
    "bytes": [b"Anna", b"\xff"],
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_of_something_else_than_texts_is_refused_by_name(name, tmp_path):
    rows = [{"text": value} for value in COLUMNS[name]]
    if name == "bytes":
        pq.write_table(pa.table({"text": COLUMNS[name]}), tmp_path / "a.parquet")
        files = ["a.parquet"]
    else:
        (tmp_path / "a.json").write_text(json.dumps(rows))
        (tmp_path / "a.jsonl").write_text(lines(rows))
        files = ["a.json", "a.jsonl"]
    for file in files:
        text = refusal(lambda file=file: read_texts(str(tmp_path / file)))
        assert text.startswith(f"column 'text' of --query_dataset={tmp_path / file} holds ") and "texts" in text


@pytest.mark.parametrize("source", [".", "..", "/", ":", "../home"])
def test_the_folder_of_the_run_is_no_data_set(source):
    """All that lies in it would be searched, for minutes, or trained on."""
    assert refusal(lambda: utils.load_rows(source, "--query_dataset")).startswith(
        f"--query_dataset={source} is the folder"
    )


@pytest.mark.parametrize("function", NO_TEXTS)
def test_a_clean_fn_that_makes_no_texts_is_refused_by_name(function):
    text = refusal(lambda: ppo.main(changed(base("ppo"), clean_fn=function)))
    assert names(text, ["clean_fn"]) and function in text
