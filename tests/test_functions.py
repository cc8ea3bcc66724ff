"""Columns of the query data set reach reward functions by parameter name, row by row."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from conftest import read_metrics
from formats import write_rows
from test_diffs import apply, load
from tiny import refuses

import ppo
import rloo
from machinery import functions, queries
from machinery.cli import about
from machinery.functions import load_function
from machinery.tokens import load_tokenizer

# A query names its number; so do an int and a list. 5 occurs three times, with other values of `twin`.
ROWS = [dict(prompt=f"Anna saw {i} cats.", number=i, tags=[str(i), "x"], twin=0) for i in range(40)]
ROWS += [ROWS[5] | {"twin": 1}, ROWS[5] | {"twin": 2}, ROWS[7] | {"prompt": " "}]
REWARD = """
import json

def check(queries, number, tags):
    assert len(queries) == len(number) == len(tags) > 0
    for query, n, (tag, x) in zip(queries, number, tags):
        assert type(n) is int and query.split()[2] == tag == str(n) and x == "x"

def score(queries, responses, tags, twin, number, missing=3.0):
    check(queries, number, tags)
    assert missing == 3.0
    with open("seen.jsonl", "a") as seen:
        print(json.dumps([number, twin]), file=seen)
    return [response.count("e") / 4 for response in responses]

def gold(queries, responses, *, number, **columns):
    check(queries, number, columns["tags"])
    assert columns.keys() == {"prompt", "tags", "twin"} and columns["prompt"][0] == queries[0]
    return [float(n) for n in number]

def composed(queries, responses, scores, number):
    assert len(scores) == len(number) == len(queries)
    return [s + 100 * n for s, n in zip(scores, number)]

"""


@pytest.fixture
def home(task, tmp_path, monkeypatch):
    """A task of `ROWS`; by_column.py in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "by_column.py").write_text(REWARD)
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    return replace(task, query_dataset=rows, query_column="prompt", truncate_token=None)


def table(task, **changes):
    task = replace(task, **changes)
    return queries.load_queries(task, *load_tokenizer(task, 5), 1000)


def pairs(table, task):
    """(query, number, twin) of each row."""
    tokenizer = load_tokenizer(task, 5)[0]
    texts = [tokenizer.decode(row[row < tiny.WORDS]) for row in table[:]]
    columns = table.columns(slice(None))
    return list(zip(texts, columns["number"], columns["twin"], strict=True))


def expected(rows):
    return [(row["prompt"], row["number"], row["twin"]) for row in rows]


def test_columns_stay_beside_their_queries_in_every_table(home):
    """Also where rows are dropped or subsampled, and the second time, from the cache."""
    for _ in range(2):
        found = table(home)
        assert Counter(pairs(found, home)) == Counter(expected(ROWS[:42]))  # without the blank one
        assert set(found.columns(np.array([3, 3, 0]))) == set(ROWS[0])
        some = pairs(table(home, num_queries=20), home)
        assert len(some) in (19, 20) and set(some) < set(expected(ROWS))
        held, rest = found.hold_out(30)
        assert len(pairs(held, home)) == 30 and len(pairs(rest, home)) in (10, 11, 12)
        assert not {x[0] for x in pairs(held, home)} & {x[0] for x in pairs(rest, home)}
        assert set(pairs(held, home) + pairs(rest, home)) <= set(expected(ROWS))


@pytest.mark.parametrize("name", ["ppo", "rloo", "samples_per_query"])
def test_a_reward_sees_the_columns_of_each_query_in_training_and_evaluation(name, home, tmp_path):
    script = {"ppo": ppo, "rloo": rloo}.get(name)
    if script is None:
        copy = Path(shutil.copy(ppo.SCRIPT, tmp_path / "mine.py"))
        assert apply(copy, name)
        script = load(copy)
    task = replace(home, gold_fn="by_column.py:gold")
    flags = dict(reward_fn="by_column.py:score", run_name="run", output_dir="out", eval_every=1)
    flags |= dict(total_episodes=48, eval_queries=6, rollout_batch_size=3)
    script.main(tiny.make_args(task, script, **flags))
    calls = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    sizes = [len(numbers) for numbers, _ in calls]
    assert sizes == [6, 8] * 6 + [6]
    heldout = calls[0]
    assert all(call == heldout for call in calls[::2])
    if name != "ppo":  # in each group of queries [K, P], all rows are the same
        k = {"rloo": 4, "samples_per_query": 2}[name]
        assert all(values == values[: 8 // k] * k for call in calls[1::2] for values in call)
    assert Path("runs/run/by_column.py").read_text() == Path("by_column.py").read_text()
    line = read_metrics("run")[0]
    assert line["eval/gold_score"] == pytest.approx(np.mean(heldout[0]))
    assert line["objective/gold_score"] == pytest.approx(np.mean(calls[1][0]))


def test_scores_of_the_reward_model_and_columns_together(home, tmp_path):
    flags = dict(reward_model=tiny.write_reward(tmp_path / "rm"), run_name="run", eval_every=1)
    ppo.main(tiny.make_args(home, reward_fn="by_column.py:composed", total_episodes=8, **flags))
    assert all(line["eval/scores"] > 100 for line in read_metrics("run"))


FILES = {  # with a function → what the error says
    "no_colon": ("", "no_colon"),
    "mine.py:g": ("def f(): pass", "g"),
    "exits.py:f": ("import sys; sys.exit(0)", "SystemExit"),
    "broken.py:f": ("{}['no']", "KeyError"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_function_that_cannot_be_imported_ends_the_run(name, tmp_path):
    """Also if its file ends the process."""
    content, words = FILES[name]
    (tmp_path / name.split(":")[0]).write_text(content)

    def load():
        with about(f"--clean_fn {name}"):
            load_function(f"{tmp_path}/{name}")

    refuses(load, f"--clean_fn {name}: ", words)


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


class Scorer:
    def __call__(self, queries: list[str], responses: list[str], scores: list[float]) -> None: ...


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        (lambda queries, responses: 0, []),
        (lambda queries, responses, weight=2.0: 0, []),  # its default stands
        (lambda prompts, completions, *, answer, queries: 0, ["answer", "queries"]),
        (lambda queries, responses, answer=None, scores=None: 0, ["answer", "scores"]),
        (lambda queries, responses, **columns: 0, ["answer", "scores"]),  # the first two are given
        (Scorer(), ["scores"]),
    ],
)
def test_arguments_after_the_first_two_are_given_by_name(function, taken):
    assert functions.names_taken(function, ["answer", "queries", "scores"]) == taken
