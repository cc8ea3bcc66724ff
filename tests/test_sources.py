"""Data sources: files, folders, the hub; what is not read."""

import bz2
import errno
import gzip
import lzma
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import datasets
import hub as hubs
import pyarrow.parquet
import pytest
import tiny
from conftest import read_args
from formats import write_rows
from test_resume import exit_code
from tiny import refuses

from machinery import checkpoints, cli, models
from machinery.sources import load_function, load_rows

TEXTS = ["2024-01-05", "2024-01-05T10:00:00Z", "007", "true", "null", "NA", "", " x ", "é\u2028"]
VALUES = [
    *TEXTS,
    7,
    2.5,
    1.0,
    True,
    None,
    2**53 + 1,
    [],
    ["1", 2],
    {"a": "007", "b": None},
    0.3,
    0.35,
    1 / 3,
    10**30,
    [0.3, -(10**30)],
    {"a": 10**30},
]
WRONG = {  # source → the names that a sentence about it has
    "owner/none": ("owner/none",),
    "owner/none:a.json": ("owner/none/",),
    "owner/labels:b.json": ("b.json",),
    "owner/labels:a/5k.json@test": ("test",),
    "owner/rows:mine": ("mine", "main"),
    "owner/rows:main@last": ("last", "train"),
}


def read(source):
    return load_rows(str(source), "--flag")


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_json_values_are_those_of_the_file(suffix, tmp_path):
    rows = [{"all": x, "texts": str(x), "date": TEXTS[0]} for x in VALUES]
    rows += [{"all": [{"role": "user", "content": TEXTS[0]}]}, {"late": "007"}]
    path = write_rows(tmp_path / f"a.{suffix}", rows)
    names = ("all", "texts", "date", "late")
    expected = [{name: row.get(name) for name in names} for row in rows]
    assert repr(list(read(path))) == repr(expected)


def test_half_of_an_emoji_is_dropped(tmp_path):
    """JSON can hold it; tokenizers refuse it."""
    path = write_rows(tmp_path / "a.jsonl", [{"text": "a\ud83db"}])
    assert read(path)["text"][:] == ["ab"]


def test_lines_of_a_text_file_are_texts(tmp_path):
    (tmp_path / "a.txt").write_text("NA\n007 \n\n é\u2028", encoding="utf-8-sig")
    assert read(tmp_path / "a.txt")["text"][:] == ["NA", "007 ", "", " é\u2028"]


@pytest.mark.parametrize("name", ["a[1].jsonl", "a?.jsonl", "[a-b].json", "*.txt", "a@b:c.jsonl"])
def test_a_name_with_characters_of_patterns_is_that_of_one_file(name, tmp_path):
    path = tmp_path / name
    for other in ("a1", "ab", "a", "b", path.stem):
        write_rows(tmp_path / f"{other}{path.suffix}", [{"text": other}])
    assert list(read(path)) == [{"text": path.stem}]


@pytest.mark.parametrize("suffix", ["json", "jsonl", "txt"])
def test_a_file_that_is_replaced_is_read_again(suffix, tmp_path):
    """Also if it keeps its time and its size."""
    for text in ("Anna .", "Ben. ."):
        path = write_rows(tmp_path / f"f@home.{suffix}", [{"text": text}])
        os.utime(path, (1, 1))
        assert read(path)["text"][:] == [text]


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.xlsx", "folder"])
def test_other_files_and_folders_are_refused_with_what_converts_them(name, tmp_path):
    path = tmp_path / name
    path.mkdir() if name == "folder" else path.write_text('{"text": "2024-01-05"}\n')
    refuses(lambda: read(path), "--flag", name, "tools/convert.py")


@pytest.mark.parametrize("pack", [gzip, bz2, lzma], ids=["gz", "bz2", "xz"])
def test_compressed_files_have_the_values_of_the_others(pack, tmp_path):
    ending = {gzip: "gz", bz2: "bz2", lzma: "xz"}[pack]
    contents = {
        "csv": "text,answer\nNA,007\n",
        "tsv": "text\tanswer\nNA\t007\n",
        "ndjson": '{"text": "NA", "answer": "007"}\n',
        "json": '[{"text": "NA", "answer": "007"}]',
    }
    for form, content in contents.items():
        path = tmp_path / f"a.{form}.{ending}"
        path.write_bytes(pack.compress(content.encode()))
        assert list(read(path)) == [{"text": "NA", "answer": "007"}]


def test_text_files_of_a_hub_name_are_read_like_local_ones(hub):
    """`datasets` would take 007 for 7, NA for null and the text for a date."""
    folder = hub.commit("datasets", "owner/rows")
    (folder / "train-1.csv").write_text("text,answer\nNA,007\n")
    (folder / "train-2.csv").write_text("text,answer\n2024-01-01,1.0\n")
    (folder / "test.csv").write_text("text,answer\nheld out,8\n")
    expected = [{"text": "NA", "answer": "007"}, {"text": "2024-01-01", "answer": "1.0"}]
    assert list(read("owner/rows")) == expected
    assert read("owner/rows@test")["answer"][:] == ["8"]
    refuses(lambda: read("owner/rows@last"), "last", "train", "test")


BROKEN = {  # name → content, words of the sentence
    "empty.jsonl": ("", ["no rows"]),
    "header.csv": ("text,answer\n", ["no rows"]),
    "objects.jsonl": ("{}\n{}\n", ["no rows"]),
    "texts.json": ('["Anna", "Ben"]', ["row 0", "Anna"]),
    "null.json": ("null", ["row 0", "None"]),
    "late.json": ('[{"text": "a"}, null]', ["row 1", "None"]),
    "line.jsonl": ('{"text": "a"}\n\n{"text": b}\n', ["line 3", "column 10"]),
    "list.json": ('[\n{"text": "a"},\n{"text": b}]', ["line 3", "column 10"]),
    "twice.csv": ("text,id,text\na,1,b\n", ["'text'"]),
    "more.csv": ("text,id\nAnna, who left,1\n", ["header"]),
    "fewer.csv": ("text,id\nAnna\n", ["header"]),
    "twice.jsonl": ('{"text": "a", "id": 1, "text": "b"}\n', ["'text'"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_one_sentence_with_its_place(name, tmp_path):
    content, words = BROKEN[name]
    (tmp_path / name).write_text(content)
    refuses(lambda: read(tmp_path / name), f"--flag {tmp_path}/{name}", *words)


def test_a_column_of_a_parquet_file_that_is_there_twice_is_refused(tmp_path):
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    refuses(lambda: read(tmp_path / "a.parquet"), "a.parquet", "'text'")


def test_spaces_before_a_list_and_long_fields_are_read(tmp_path):
    (tmp_path / "a.json").write_text(' \n [{"text": "a"}]')
    (tmp_path / "b.csv").write_text(f"text\n{'b' * 200_000}\n")
    assert read(tmp_path / "a.json")["text"][:] == ["a"]
    assert len(read(tmp_path / "b.csv")[0]["text"]) == 200_000


def test_rows_stay_on_the_disk_whatever_the_library_would_keep_in_memory(hub, monkeypatch):
    monkeypatch.setattr(datasets.config, "IN_MEMORY_MAX_SIZE", 1e9)
    folder = hub.commit("datasets", "owner/rows")
    datasets.Dataset.from_list([{"text": "a"}]).to_parquet(folder / "train.parquet")
    assert read("owner/rows").cache_files


def test_a_disk_without_locks_is_named_with_its_variable(hub, tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    datasets.Dataset.from_list([{"text": "a"}]).to_parquet(
        hub.commit("datasets", "owner/rows") / "train.parquet"
    )
    path = write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    for source in (path, "owner/rows"):
        refuses(lambda: read(source), source, "HF_DATASETS_CACHE")


@pytest.mark.parametrize("source", ["abisee/cnn_dailymail:3.0.0", "OpenAI/lm:a/5k.json"])
def test_a_dataset_that_cannot_be_reached_is_named_at_once(source, unreachable_hub):
    began = time.perf_counter()
    with pytest.raises(cli.InputError, match=f"--query_dataset {source}: ") as caught:
        load_rows(source, "--query_dataset")
    assert caught.value.__cause__ is None  # whose pages would come first
    assert time.perf_counter() - began < 15  # the libraries retry for 23 s


def test_a_model_that_cannot_be_reached_is_named_at_once(unreachable_hub, tmp_path):
    """Also if the cache has its configuration and no weights, after an interrupted download."""
    began = time.perf_counter()
    refuses(lambda: models.load_lm("gpt2"), "--base_model gpt2: ")
    commit, cached = "0" * 40, tmp_path / "cache" / "models--gpt2"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    tiny.config().save_pretrained(cached / "snapshots" / commit)
    refuses(lambda: models.load_lm("gpt2"), "--base_model gpt2: ")
    assert time.perf_counter() - began < 15  # the libraries retry for 23 s


def test_files_and_models_of_the_hub_are_read_by_name(hub, capsys):
    """Under their own names, of which the cache's files are links; names without owner, too."""
    write_rows(hub.commit("datasets", "owner/labels") / "a/5k.json", [{"text": "007"}])
    lm = tiny.make_lm(vocab=tiny.WORDS)
    lm.save_pretrained(tiny.write_tokenizer(hub.commit("models", "openai-community/gpt2")))
    hub.delay = 2.5
    assert list(read("owner/labels:a/5k.json")) == [{"text": "007"}]
    found = models.load_lm("gpt2").state_dict()
    assert all(x.equal(found[name]) for name, x in lm.state_dict().items())
    assert "offline" not in capsys.readouterr().out


def test_a_wrong_owner_file_configuration_or_split_is_one_sentence(hub):
    write_rows(hub.commit("datasets", "owner/labels") / "a/5k.json", [{"text": "007"}])
    folder = hub.commit("datasets", "owner/rows")
    datasets.Dataset.from_list([{"text": "a"}]).to_parquet(folder / "main/train-1-of-1.parquet")
    (folder / "README.md").write_text(hubs.CARD.format("main"))
    for source, words in WRONG.items():
        message = refuses(lambda: read(source), f"--flag {source}: ", *words)
        assert "\n" not in message
    refuses(lambda: models.load_lm("owner/model"), "--base_model owner/model: ", "owner/model")


OAI, BOOKS = "vwxyzjn/lm-human-preferences:", "SamuelYang/bookcorpus"
HUB = {  # task → models of the hub, those of sft.py, queries, labels
    "sentiment": ("gpt2", "gpt2", BOOKS, f"{OAI}sentiment/offline_5k.json"),
    "descriptiveness": ("gpt2", "gpt2", BOOKS, f"{OAI}descriptiveness/offline_5k.json"),
    "cnndm": ("gpt2", "gpt2", "abisee/cnn_dailymail:3.0.0", f"{OAI}cnndm/online_45k.json"),
    "tldr_2019": ("gpt2", "gpt2", "dim/tldr_17_50k", f"{OAI}tldr/online_45k.json"),
    "tldr": (None, "EleutherAI/pythia-1b-deduped", "trl-lib/tldr", "trl-lib/tldr-preference"),
    "gsm8k": (*["Qwen/Qwen2.5-0.5B-Instruct"] * 2, "openai/gsm8k:main", None),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", HUB)
def test_every_task_runs_with_its_own_names(task, hub, here):
    """All scripts, with small sizes. args.json has the commit of each name that was read."""
    hubs.publish(hub)
    model, first, queries, labels = HUB[task]
    for script in tiny.FLAGS:
        if script == "train_reward" and not labels:
            continue
        assert exit_code(script, f"--task {task} --run_name {script} {tiny.FLAGS[script]}") == 0
        record = read_args(f"runs/{script}")
        commits = {key[10:]: x for key, x in record.items() if key.startswith("commit of ")}
        read = {first if script == "sft" else model, queries}
        read |= {labels} if script == "train_reward" else set()
        assert commits == dict.fromkeys(read - {None}, f"{1:040x}")


JUDGE = """
from __future__ import annotations
from dataclasses import dataclass
import beside_the_judge
@dataclass
class Weights:
    length: float = beside_the_judge.LENGTH
print("once")
def f(responses):
    return [Weights().length * len(response) for response in responses]
"""


def test_a_file_of_functions_is_a_module_and_imported_once(here, capsys):
    """Whatever its path is called. It finds modules beside it."""
    (here / "our_judge.py").write_text(JUDGE)
    (here / "beside_the_judge.py").write_text("LENGTH = 2.0")
    names = ["our_judge.py:f", "./our_judge.py:f", f"{here}/our_judge.py:f"]
    assert [load_function(name)(["ab"]) for name in names] == [[4.0]] * 3
    assert capsys.readouterr().out == "once\n" and load_function(names[0]).__module__ == "our_judge"


NAMES = """
import data.part, utils
from utils import decode, truncate
def score(responses):
    return [decode(), truncate(), data.part.NAME, utils.__file__]
"""


def test_modules_beside_a_file_come_before_ours_of_the_same_name(here):
    """`decode` and `truncate` are names in both; ours stay."""
    ours = {name: sys.modules[name] for name in ("utils", "data", "data.tasks")}
    (here / "data").mkdir()
    (here / "data" / "__init__.py").write_text("")
    (here / "data" / "part.py").write_text("NAME = 'part'")
    (here / "utils.py").write_text("def decode(): return 'd'\ndef truncate(): return 't'")
    (here / "mine.py").write_text(NAMES)
    assert load_function("mine.py:score")([]) == ["d", "t", "part", f"{here}/utils.py"]
    assert load_function("utils.py:decode")() == "d"
    assert {name: sys.modules[name] for name in ours} == ours


def test_the_error_names_a_utils_of_ones_own_in_the_folder_of_a_copied_script(here):
    (here / "utils.py").write_text("")
    (here / "mine.py").write_text("from machinery import cli")  # as in a script
    env = os.environ | {"PYTHONPATH": str(Path(checkpoints.__file__).parents[1])}
    run = subprocess.run([sys.executable, "mine.py"], env=env, capture_output=True, text=True)
    last = run.stderr.splitlines()[-1]
    assert f"{here}/utils.py is imported in place of" in last and "rename it" in last
