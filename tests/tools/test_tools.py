"""Tools of benchmarks/: numbers by hand, and the commands on tiny models."""

import csv
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import formats
import numpy as np
import pytest
import tiny
import torch
from conftest import SCRIPTS, read_lines, settings
from test_readme import code_of

import rloo
import sft
from benchmarks import against_trl, growth, human
from tools import calibration, llm_judge

# isort: split
from data import tasks
from machinery.labels import load_labels
from machinery.sources import import_file, load_function
from machinery.tokens import load_tokenizer
from tools import pass_at_k, policies, sample, winrate

JUDGE = """
seen = []
def judge(queries, a, b):
    seen.append((queries, a, b))
    return [1 / (1 + len(query + text)) for query, text in zip(queries, a)]
"""
REWARD = """
seen = []
def score(queries, responses, answer):
    seen.append(answer)
    return [float(len(response)) for response in responses]
"""


@pytest.fixture
def mine(task, here, monkeypatch):
    """A task of tiny files under a name of its own."""
    task = replace(task, task="mine")
    monkeypatch.setitem(tasks.TASKS, "mine", task)
    return task


def test_ties_count_half_and_the_interval_is_of_pairs():
    a, b = np.array([1.0, 2.0, 3.0, 3.0]), np.array([0.0, 2.0, 4.0, 1.0])
    rate, low, high = winrate.win_rate(a, b, seed=1)
    assert rate == 0.625 and 0 <= low < rate < high <= 1  # a win, a tie, a loss, a win
    assert winrate.win_rate(a + 1e-9, a, seed=1) == (1, 1, 1)  # paired, however queries differ
    wins = np.where(np.arange(400) < 240, 1.0, -1.0)  # 60%; ±1.96 · √(0.24 / 400) = ±4.8%
    assert winrate.win_rate(wins, 0 * wins, seed=1) == pytest.approx((0.6, 0.552, 0.648), abs=0.006)


def test_the_data_is_judged_as_a_policy_is(task, here, monkeypatch, capsys):
    """On the queries as policies read them, without end tokens, and in both orders alike."""
    rows = [dict(prompt=f"Anna saw {i} cats and ran.", text=f" Ben {i}.") for i in range(6)]
    texts = [row["text"] for row in rows]
    for row in rows[3:]:
        row["text"] += "<|endoftext|>\n"
    path = formats.write_rows(here / "own.jsonl", rows)
    changes = dict(task="mine", query_dataset=path, response_column="text", query_length=16)
    monkeypatch.setitem(tasks.TASKS, "mine", replace(tiny.eos_task(task, here), **changes))
    (here / "judge.py").write_text(JUDGE)
    model = task.base_model

    def compare(a, b):
        winrate.main(winrate.Args(a=a, b=b, task="mine", judge="judge.py:judge", queries=6))
        return json.loads(capsys.readouterr().out.splitlines()[-1])["win_rate"]

    rate = compare("data", model)
    assert compare(model, "data") == pytest.approx(1 - rate) and rate != 0.5
    seen = load_function("judge.py:judge").__globals__["seen"]
    queries, data, _ = seen[0]
    assert all(query.startswith("Anna saw") for query in queries)
    assert queries == seen[2][0] and sorted(data) == texts == sorted(seen[2][2])
    rows[2]["text"] = ""
    formats.write_rows(here / "own.jsonl", rows)
    tiny.refuses(lambda: compare("data", model), "no response")
    answers = lambda task, *_: (["Hi"], ["Hi"], {"prompt": [task.base_model]})  # noqa: E731
    monkeypatch.setattr(policies, "sample_responses", answers)  # one tokenizer skips the first
    tiny.refuses(lambda: compare("x", model), "different queries")


def test_a_judge_of_pairs_is_asked_in_both_orders():
    """Probabilities of a: 0.9 and 1 - 0.3, 0.5 twice (a tie), 0.8 and 1 - 0.8, 0 and 1 - 1."""
    queries, a, b = list("1234"), list("abcd"), list("efgh")
    answers = {"a": [0.9, 0.5, 0.8, 0.0], "e": [0.3, 0.5, 0.8, 1.0]}

    def judge(asked, first, second):
        assert asked == queries and sorted(first + second) == a + b
        return answers[first[0]]

    wins, agreement = winrate.ask_in_both_orders(judge, "judge", queries, a, b)
    assert wins.tolist() == pytest.approx([0.8, 0.5, 0.5, 0.0])
    assert agreement == 0.75  # the third prefers what is first
    answers["a"][0] = 1.5
    ask = partial(winrate.ask_in_both_orders, judge, "judge", queries, a, b)
    tiny.refuses(ask, "1.5")


def test_samples_become_labels_when_best_is_filled_in(mine, monkeypatch, capsys):
    """Distinct responses to the queries after the held-out ones; the text is that of the ids.

    Of three responses to each query the first is as if it had not ended: three more are sampled.
    """
    sampled = policies.Policy.sample

    def sample_some(policy, queries, seed):
        responses, _ = sampled(policy, queries, seed)
        return responses, torch.arange(len(queries)) % 3 > 0

    monkeypatch.setattr(policies.Policy, "sample", sample_some)
    Path("task/args.json").write_text('{"response_length": 3}')  # of its run
    flags = dict(model=mine.base_model, task="mine", queries=5, samples=3)
    args = sample.Args(**flags, out=Path("samples.jsonl"), first=2)
    sample.main(args)
    printed = capsys.readouterr().out
    assert "3 responses to each of 5 queries" in printed
    assert "dropped 10 responses that have not ended, and so 0 queries" in printed
    rows = read_lines("samples.jsonl")
    tokenizer, ids = load_tokenizer(mine, mine.response_length)
    table = policies.load_queries(mine, tokenizer, ids)
    for i, row in enumerate(rows):
        query = table[[i + 2]][0]
        assert row["query"] == query[query != ids.pad].tolist()
        assert tokenizer.decode(row["query"]) == row["query_text"]
        for k, text in enumerate(row["texts"]):
            response = row[f"sample{k}"]
            assert len(response) == 3 and tokenizer.decode(response) == text
        assert row["best"] is None and len(set(row["texts"])) == 3
        row["best"] = i % 3
    labeled = formats.write_rows(Path("labels.jsonl"), rows)
    labels = load_labels(replace(mine, label_dataset=labeled), tokenizer, ids)
    assert labels.best.tolist() == [0, 1, 2, 0, 1]
    assert labels.responses[4][2].tolist() == rows[4]["sample2"]
    tiny.refuses(lambda: sample.main(args), "exists")
    new = sample.Args(**flags, out=Path("new"))
    tiny.refuses(lambda: sample.main(new), "--first 256")


def test_a_policy_answers_prompts_with_the_scores_of_its_runs_reward(home, capsys, monkeypatch):
    """Of conftest: a score is the number of the letter e, divided by four."""
    SCRIPTS["ppo"].main(settings("ppo", total_episodes=8, output_dir="mine"))
    monkeypatch.setattr(sample.sys.stdin, "isatty", lambda: True)
    typed = iter(["A cat", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))

    def answers(*prompts):
        capsys.readouterr()
        sample.main(sample.Args(model="mine", prompt=prompts, samples=6))
        return capsys.readouterr()

    printed = answers().out
    assert printed == answers("A cat").out
    title, *lines = printed.strip().splitlines()
    assert title == "A cat" and len(lines) == 6
    scores = []
    for line in lines:
        score, _, text = line.strip().partition(" ")
        scores.append(float(score))
        assert scores[-1] == text.removesuffix(" … (no end)").count("e") / 4
    assert scores == sorted(scores, reverse=True)
    Path("reward.py").unlink()
    import_file.cache_clear()
    assert "no scores: --reward_fn" in answers("A cat").err
    tiny.refuses(lambda: answers("A cat " * 50), "--query_length")


def test_a_chat_model_is_asked_through_its_template(mine, chat, monkeypatch, capsys):
    """Without a run's args.json, and with --no-template: the text itself."""
    chat.save_pretrained(mine.base_model)
    read = []
    tokenize = sample.tokenize_queries
    monkeypatch.setattr(sample, "tokenize_queries", lambda x, *y: read.append(x) or tokenize(x, *y))
    for template in (True, False):
        flags = dict(model=mine.base_model, task="mine", prompt=("A cat",), query_length=40)
        sample.main(sample.Args(**flags, template=template))
    assert read == [["<|im_start|>user\nA cat<|im_end|>\n<|im_start|>assistant\n"], ["A cat"]]
    assert "no scores" in capsys.readouterr().err


def test_tools_take_data_columns_lengths_and_held_out_queries_from_the_run(home, capsys):
    """Of 14 prompts, six are held out. The judge and the reward know which; sampling skips them."""
    rows = [dict(ask=f"Anna saw {i} cats.", answer=str(i)) for i in range(14)]
    path = formats.write_rows(home / "own.jsonl", rows)
    Path("own.py").write_text(REWARD)
    args = settings(
        "ppo",
        query_dataset=path,
        query_column="ask",
        eval_queries=6,
        reward_fn="own.py:score",
        total_episodes=8,
        output_dir="mine",
    )
    SCRIPTS["ppo"].main(args)
    seen = load_function("own.py:score").__globals__["seen"]
    evaluated = sorted(seen[0])
    assert len(evaluated) == 6 and not set(evaluated).intersection(seen[1])

    def asked(tool, **flags):
        """The answers of the queries that a tool reads, and what it prints."""
        seen.clear()
        capsys.readouterr()
        tool.main(tool.Args(**flags))
        out, err = capsys.readouterr()
        assert "own.jsonl, column ask; held out: 6" in err and " + 5 tokens" in err
        return sorted(set(*seen[:1])), out

    pair = dict(a="mine", b="task/model", judge="own.py:score")
    numbers, out = asked(winrate, **pair)
    assert numbers == evaluated and " of 6 held-out queries " in out
    numbers, out = asked(winrate, **pair, queries=9)
    assert len(numbers) == 9 and " of 9 queries, 6 of them held out " in out
    numbers, out = asked(pass_at_k, models=("mine",), samples=2, k=1)
    assert numbers == evaluated and json.loads(out)["held_out"] == 6
    import_file.cache_clear()
    Path("own.py").unlink()  # sampling needs no reward
    asked(sample, model="mine", samples=1, out=Path("samples.jsonl"))
    sampled = {line["query_text"] for line in read_lines("samples.jsonl")}
    assert len(sampled) == 8 and sampled.isdisjoint(f"Anna saw {i} cats." for i in evaluated)
    tiny.refuses(lambda: policies.policy_tasks(["task/model"], policies.PolicyArgs()), "--task")


def test_a_chat_model_judges_summaries(task, chat, monkeypatch):
    """Its answer is the letter that follows the template's prompt; C is a tie."""
    chat.save_pretrained(task.base_model)
    monkeypatch.setenv("JUDGE", task.base_model)
    monkeypatch.setattr(llm_judge, "PROMPT", "{query}|{a}|{b}")
    llm_judge.load.cache_clear()
    _, lm = llm_judge.load()
    text = "<|im_start|>user\nA cat.|Cat|A dog.<|im_end|>\n<|im_start|>assistant\n"
    tokens = chat.encode(text, add_special_tokens=False, return_tensors="pt")
    odds = lm(tokens).logits[0, -1].double().exp()
    a, b, c = odds[chat.convert_tokens_to_ids(["A", "B", "C"])].tolist()
    found = llm_judge.prefer(["A cat. "], [" Cat"], ["A dog."])
    assert found == pytest.approx([(a + c / 2) / (a + b + c)], abs=1e-5)


def test_copied_words_by_hand():
    copying = {}
    exec(code_of("docs/tldr.md", "rouge"), copying)
    queries = ["The red house of my aunt, by the sea, burned down."] * 5
    responses = ["Red house burned down.", "burned house red", "My aunt is sad", "", "x"]
    assert copying["copied"](queries, responses) == [1, 1 / 3, 0.5, 0, 0]


@pytest.mark.slow
def test_growth_measures_rows_and_those_of_other_names_stay(here, monkeypatch):
    sizes = {"batch": ({}, (8,)), "labels": ({}, (20,)), "queries": ({}, (30,))}
    monkeypatch.setattr(growth, "ROWS", sizes)
    for names in (("batch",), ("labels", "queries")):
        growth.main(growth.Args(names, here / "growth.csv"))
    rows = list(csv.DictReader(Path("growth.csv").read_text().splitlines()))
    assert [float(row["tokens"]) for row in rows] == [8 * (16 + 24), 20 * (16 + 24 + 24), 30 * 16]
    assert all(float(row["peak GB"]) > 0.1 and float(row["cpu s"]) > 0 for row in rows)


def test_calibration_reads_the_labels_that_a_models_run_held_out(mine, capsys):
    tiny.write_reward(Path("reward"))
    Path("reward/args.json").write_text('{"task": "mine", "num_labels": 12, "batch_size": 4}')
    calibration.main(calibration.Args("reward", out=Path("out.png")))
    rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert sum(row["labels"] for row in rows) == 4
    assert Path("out.png").is_file()


def test_parts_share_no_snippet_and_halves_no_rating(here, monkeypatch):
    """The first half of raters likes large numbers, the other does not."""
    for name, value in dict(TRAIN=12, HELDOUT=6, PAIRS=40, HELDOUT_PAIRS=30).items():
        monkeypatch.setattr(human, f"NUM_{name}", value)
    films = [(f"{i} is a film of eight words.", [i // 8, -(i // 8)] * 7) for i in range(24)]
    monkeypatch.setattr(human, "read_archive", lambda path: films)
    human.write_data(here)
    data = {path.stem: path.read_text() for path in human.DATA.iterdir()}
    assert data["first"].count("\n") == 40 and data["heldout"].count("\n") == 30
    used = []  # numbers of the films of each part
    for part in (data["texts"] + data["first"] + data["second"], data["heldout"], data["queries"]):
        used += set(re.findall(r"(\d+) is a film of", part))
    assert len(set(used)) == len(used) == 24
    for half, sign in (("first", 1), ("second", -1)):
        for pair in read_lines(human.DATA / f"{half}.jsonl"):
            better, worse = (int(pair[side].split()[0]) // 8 for side in human.SIDES)
            assert sign * better > sign * worse


def test_against_trl_records_our_steps(here, monkeypatch):
    """RLOO's first ratio is 1, its second is not. The losses are those of test_pitfalls and test_rloo."""
    for script in (sft, rloo):
        for name in ("normalize", "sample_in_batches"):  # `ours` replaces them
            monkeypatch.setattr(script, name, None, raising=False)
    against_trl.make(here)
    rows = {row.name: row for row in against_trl.ROWS}
    (step,) = against_trl.ours(rows["SFT"])
    assert step["loss"] > 1 and len(step) > 20  # with all gradients
    first, second = against_trl.ours(rows["RLOO"])
    assert abs(first["loss"]) <= 0.01 < abs(second["loss"])
