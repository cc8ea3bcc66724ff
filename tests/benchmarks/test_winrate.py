"""benchmarks/winrate.py: numbers by hand, and the command on tiny models."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny

from benchmarks import winrate
from data import tasks
from machinery.cli import InputError


def test_ties_count_half_and_the_interval_is_of_pairs():
    a, b = np.array([1.0, 2.0, 3.0, 3.0]), np.array([0.0, 2.0, 4.0, 1.0])
    rate, low, high = winrate.win_rate(a, b, seed=1)
    assert rate == 0.625 and 0 <= low < rate < high <= 1  # a win, a tie, a loss, a win
    a = np.random.default_rng(0).normal(size=400)
    assert winrate.win_rate(a, a, seed=1) == (0.5, 0.5, 0.5)
    assert winrate.win_rate(a + 1e-9, a, seed=1) == (1, 1, 1)  # paired, however queries differ
    wins = np.where(np.arange(400) < 240, 1.0, -1.0)  # 60%; ±1.96 · √(0.24 / 400) = ±4.8%
    rates = winrate.win_rate(wins, 0 * wins, seed=1)
    assert rates == pytest.approx((0.6, 0.552, 0.648), abs=0.006)


def test_policies_and_the_data_are_compared_on_the_same_queries(
    task, tmp_path, monkeypatch, capsys
):
    eos = replace(tiny.eos_task(task, tmp_path), task="mine")
    monkeypatch.setitem(tasks.TASKS, "mine", eos)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text(
        "seen = []\n\n"
        "def judge(queries, responses, prompt):\n"
        "    assert all(p.startswith(q) for p, q in zip(prompt, queries))\n"
        "    seen.append(queries)\n"
        "    assert seen[0] == queries\n"
        "    return [r.startswith((' Anna saw', ' Ben saw')) for r in responses]\n"
    )
    other = str(tiny.write_model(tmp_path / "other", seed=3))
    settings = dict(b=other, task="mine", judge="judge.py:judge", queries=6)
    rates = {}
    for a in (other, "data"):
        winrate.main(winrate.Args(a=a, **settings))
        line = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert line["queries"] == 6
        rates[a] = line["win_rate"]
    assert rates[other] == 0.5 and rates["data"] > 0.5
    with pytest.raises(InputError, match="true score"):
        winrate.main(winrate.Args(a=other, b=other, task="mine"))
    with pytest.raises(InputError, match="response_column"):
        winrate.main(winrate.Args(a="data", b=other, task="synthetic"))


def test_a_judge_of_pairs_is_asked_in_both_orders():
    """Probabilities of a: 0.9 and 1 - 0.3, 0.5 twice (a tie), 0.8 and 1 - 0.8, 0 and 1 - 1."""
    answers = [[0.9, 0.5, 0.8, 0.0], [0.3, 0.5, 0.8, 1.0]]
    asked = []

    def judge(queries, a, b):
        asked.append((queries, a, b))
        return answers[len(asked) - 1]

    a, b = list("abcd"), list("efgh")
    wins, agreement = winrate.ask_in_both_orders(judge, "judge", list("1234"), a, b)
    assert asked == [(list("1234"), a, b), (list("1234"), b, a)]
    assert wins.tolist() == pytest.approx([0.8, 0.5, 0.5, 0.0])
    assert agreement == 0.75  # the third prefers what is first
    rate, low, high = winrate.mean_and_interval(wins, seed=1)
    assert rate == pytest.approx(0.45) and 0 <= low < rate < high <= 0.8
    with pytest.raises(InputError, match="1.5"):
        winrate.ask_in_both_orders(lambda queries, a, b: [1.5], "judge", ["1"], ["a"], ["b"])


def test_policies_are_compared_by_a_judge_of_pairs(task, tmp_path, monkeypatch, capsys):
    """One that always prefers the first has no preference and never agrees with itself."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.py").write_text(
        "def first(queries, a, b):\n    return [1.0] * len(a)\n\n"
        "def longer(queries, a, b):\n    return [(len(x) > len(y)) + 0.5 * (len(x) == len(y))"
        " for x, y in zip(a, b)]\n"
    )
    monkeypatch.setitem(tasks.TASKS, "mine", replace(task, truncate_token=None))
    settings = dict(task="mine", queries=6, b=task.base_model)
    settings |= dict(a=str(tiny.write_model(tmp_path / "other", seed=3)))
    winrate.main(winrate.Args(judge="pairs.py:longer", **settings))
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["agreement"] == 1 and 0 < line["win_rate"] < 1 and line["queries"] == 6
    winrate.main(winrate.Args(judge="pairs.py:first", **settings))
    *_, agree, sentence, line = capsys.readouterr().out.splitlines()
    assert "0.0%" in agree and "50.0%" in sentence
    assert json.loads(line)["win_rate"] == 0.5 and json.loads(line)["agreement"] == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [("--task foo", "--task foo"), ("--judge bad.py:judge", "ZeroDivisionError")],
)
def test_a_bad_task_or_judge_is_one_sentence(words, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text("def judge(queries, responses):\n    return 1 / 0\n")
    words = ["data", str(tasks.SYNTHETIC / "model"), "--task", "synthetic_eos", *words.split()]
    monkeypatch.setattr(sys, "argv", ["winrate.py", *words])
    with pytest.raises(SystemExit) as error:
        runpy.run_path(winrate.__file__, run_name="__main__")
    assert error.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()  # after the traceback of a judge
    assert line.startswith("winrate.py: error: ") and named in line
