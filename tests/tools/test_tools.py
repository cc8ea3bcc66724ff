"""Tools of benchmarks/: numbers by hand, and the commands on tiny models."""

import csv
import json
import re
import tarfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import formats
import numpy as np
import pytest
import tiny
import torch
from conftest import SCRIPTS, settings
from test_readme import blocks

import rloo
import sft
from benchmarks import against_trl, growth, human, overoptimize
from tools import calibration, llm_judge

# isort: split
from data import tasks
from machinery.labels import load_labels
from machinery.sources import import_file, load_function
from machinery.tokens import load_tokenizer
from tools import pass_at_k, policies, sample, winrate


def test_ties_count_half_and_the_interval_is_of_pairs():
    a, b = np.array([1.0, 2.0, 3.0, 3.0]), np.array([0.0, 2.0, 4.0, 1.0])
    rate, low, high = winrate.win_rate(a, b, seed=1)
    assert rate == 0.625 and 0 <= low < rate < high <= 1  # a win, a tie, a loss, a win
    a = np.random.default_rng(0).normal(size=400)
    assert winrate.win_rate(a, a, seed=1) == (0.5, 0.5, 0.5)
    assert winrate.win_rate(a + 1e-9, a, seed=1) == (1, 1, 1)  # paired, however queries differ
    wins = np.where(np.arange(400) < 240, 1.0, -1.0)  # 60%; ±1.96 · √(0.24 / 400) = ±4.8%
    assert winrate.win_rate(wins, 0 * wins, seed=1) == pytest.approx((0.6, 0.552, 0.648), abs=0.006)


def test_the_data_is_judged_as_a_policy_is(task, here, monkeypatch, capsys):
    """On the queries as policies read them, without end tokens, and in both orders alike."""
    rows = [dict(prompt=f"Anna saw {i} cats and ran.", text=f" Ben {i}.") for i in range(6)]
    ended = rows[:3] + [row | {"text": row["text"] + "<|endoftext|>\n"} for row in rows[3:]]
    eos = replace(tiny.eos_task(task, here), task="mine", response_column="text", query_length=16)
    path = formats.write_rows(here / "own.jsonl", ended)
    monkeypatch.setitem(tasks.TASKS, "mine", replace(eos, query_dataset=path))
    code = "def judge(queries, a, b):\n    seen.append((queries, a, b))\n"
    code += "    return [1 / (1 + len(q + x)) for q, x in zip(queries, a)]\nseen = []"
    (here / "judge.py").write_text(code)
    rates, settings = [], dict(task="mine", judge="judge.py:judge", queries=6)
    for a, b in (("data", eos.base_model), (eos.base_model, "data")):
        winrate.main(winrate.Args(a=a, b=b, **settings))
        rates.append(json.loads(capsys.readouterr().out.splitlines()[-1])["win_rate"])
    assert sum(rates) == pytest.approx(1) and rates[0] != 0.5
    seen = load_function("judge.py:judge").__globals__["seen"]
    expected = {row["text"]: "Anna saw" for row in rows}
    assert [x.split()[:2] for x in seen[0][0]] == [["Anna", "saw"]] * 6 and seen[0][0] == seen[2][0]
    assert sorted(seen[0][1]) == sorted(expected) == sorted(seen[2][2])
    rows[2]["text"] = ""
    formats.write_rows(here / "own.jsonl", rows)
    settings |= dict(a="data", b=eos.base_model)
    tiny.refuses(lambda: winrate.main(winrate.Args(**settings)), "no response")
    answers = lambda task, *_: (["Hi"], ["Hi"], {"prompt": [task.base_model]})  # noqa: E731
    monkeypatch.setattr(winrate.policies, "sample_responses", answers)
    settings["a"] = "x"  # one tokenizer skips the first
    tiny.refuses(lambda: winrate.main(winrate.Args(**settings)), "different queries")


def test_a_judge_of_pairs_is_asked_in_both_orders():
    """Probabilities of a: 0.9 and 1 - 0.3, 0.5 twice (a tie), 0.8 and 1 - 0.8, 0 and 1 - 1."""
    answers, asked = [[0.9, 0.5, 0.8, 0.0], [0.3, 0.5, 0.8, 1.0]], []

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
    ask = partial(winrate.ask_in_both_orders, lambda *_: [1.5], "judge")
    tiny.refuses(lambda: ask(["1"], ["a"], ["b"]), "1.5")


def test_samples_become_labels_when_best_is_filled_in(task, tmp_path, monkeypatch, capsys):
    """Distinct responses to the queries after the held-out ones; the text is that of the ids.

    Of three responses to each query the first is as if it had not ended: three more are sampled.
    """
    sampled = policies.Policy.sample

    def sample_some(policy, queries, seed):
        responses, ended = sampled(policy, queries, seed)
        ended[:] = True
        ended[::3] = False
        return responses, ended

    monkeypatch.setattr(policies.Policy, "sample", sample_some)
    monkeypatch.setitem(tasks.TASKS, "mine", task)
    out = tmp_path / "samples.jsonl"
    settings = dict(model=task.base_model, task="mine", queries=5, samples=3, out=out)
    (Path(task.base_model).parent / "args.json").write_text('{"response_length": 3}')  # of its run
    sample.main(sample.Args(**settings, first=2))
    printed = capsys.readouterr().out
    assert "3 responses to each of 5 queries" in printed
    assert "dropped 10 responses that have not ended, and so 0 queries" in printed
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    tokenizer, ids = load_tokenizer(task, task.response_length)
    table = policies.load_queries(task, tokenizer, ids)
    for i, row in enumerate(rows):
        responses = [row["sample0"], row["sample1"], row["sample2"]]
        assert row["best"] is None and len(set(row["texts"])) == 3
        assert [len(x) for x in responses] == [3, 3, 3]
        assert row["query"] == [x for x in table[[i + 2]][0].tolist() if x != ids.pad]
        assert tokenizer.decode(row["query"]) == row["query_text"]
        assert [tokenizer.decode(x) for x in responses] == row["texts"]
    labeled = [json.dumps(row | {"best": i % 3}) + "\n" for i, row in enumerate(rows)]
    (tmp_path / "labels.jsonl").write_text("".join(labeled))
    task = replace(task, label_dataset=str(tmp_path / "labels.jsonl"))
    labels = load_labels(task, tokenizer, ids)
    assert labels.best.tolist() == [0, 1, 2, 0, 1]
    assert labels.responses[4][2].tolist() == rows[4]["sample2"]
    tiny.refuses(lambda: sample.main(sample.Args(**settings, first=2)), "exists")
    settings["out"] = tmp_path / "new"
    tiny.refuses(lambda: sample.main(sample.Args(**settings)), "--first 256")


def test_a_policy_answers_prompts_with_the_scores_of_its_runs_reward(home, capsys, monkeypatch):
    """Of conftest: a score is the number of the letter e, divided by four."""
    SCRIPTS["ppo"].main(settings("ppo", total_episodes=8, output_dir="mine"))
    capsys.readouterr()
    monkeypatch.setattr(sample.sys.stdin, "isatty", lambda: True)
    asked = iter(["A cat", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(asked))
    printed = []
    for prompts in ((), ("A cat",)):
        sample.main(sample.Args(model="mine", prompt=prompts, samples=6))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    title, *answers = printed[0].strip().splitlines()
    assert title == "A cat" and len(answers) == 6
    scores = [float(answer.split()[0]) for answer in answers]
    texts = [answer.strip().partition(" ")[2] for answer in answers]
    assert scores == [text.removesuffix(" … (no end)").count("e") / 4 for text in texts]
    assert scores == sorted(scores, reverse=True)
    Path("reward.py").unlink()
    import_file.cache_clear()
    sample.main(sample.Args(model="mine", prompt=("A cat",)))
    assert "no scores: --reward_fn" in capsys.readouterr().err
    long = sample.Args(model="mine", prompt=("A cat " * 50,))
    tiny.refuses(lambda: sample.main(long), "--query_length")


def test_a_chat_model_is_asked_through_its_template(task, tmp_path, monkeypatch, capsys):
    """Without a run's args.json, and with --no-template: the text itself."""
    monkeypatch.setitem(tasks.TASKS, "mine", replace(task, query_length=40))
    tokenizer, _ = load_tokenizer(task, task.response_length)
    tokenizer.chat_template = formats.CHATML
    tokenizer.save_pretrained(task.base_model)
    read = []
    tokenize = sample.tokenize_queries
    monkeypatch.setattr(sample, "tokenize_queries", lambda x, *y: read.append(x) or tokenize(x, *y))
    for template in (True, False):
        flags = dict(model=task.base_model, task="mine", prompt=("A cat",), template=template)
        sample.main(sample.Args(**flags))
    chat = "<|im_start|>user\nA cat<|im_end|>\n<|im_start|>assistant\n"
    assert read == [[chat], ["A cat"]]
    assert "no scores" in capsys.readouterr().err


def test_tools_take_data_columns_lengths_and_held_out_queries_from_the_run(home, capsys):
    """Of 14 prompts, six are held out. The judge and the reward know which; sampling skips them."""
    rows = [dict(ask=f"Anna saw {i} cats.", answer=str(i)) for i in range(14)]
    data = dict(query_dataset=formats.write_rows(home / "own.jsonl", rows), query_column="ask")
    code = "def score(queries, responses, answer):\n    seen.append(answer)\n"
    Path("own.py").write_text(code + "    return [float(len(x)) for x in responses]\nseen = []")
    changes = data | dict(response_length=5, eval_queries=6, reward_fn="own.py:score")
    SCRIPTS["ppo"].main(settings("ppo", **changes, total_episodes=8, output_dir="mine"))
    seen = load_function("own.py:score").__globals__["seen"]
    evaluated, trained = sorted(seen[0]), {*seen[1]}
    assert len(evaluated) == 6 and not trained & {*evaluated}

    def asked(tool, **flags):
        seen.clear()
        capsys.readouterr()
        tool.main(tool.Args(**flags))
        out, err = capsys.readouterr()
        assert "own.jsonl, column ask; held out: 6" in err and " + 5 tokens" in err
        return sorted({*seen[0]}) if seen else [], out

    pair = dict(a="mine", b="task/model", judge="own.py:score")
    numbers, out = asked(winrate, **pair)
    assert numbers == evaluated and " of 6 held-out queries " in out
    numbers, out = asked(winrate, **pair, queries=9)
    assert len(numbers) == 9 and " of 9 queries, 6 of them held out " in out
    numbers, out = asked(pass_at_k, models=("mine",), samples=2, k=1)
    assert numbers == evaluated and json.loads(out)["held_out"] == 6
    import_file.cache_clear()
    Path("own.py").unlink()  # sampling needs no reward
    asked(sample, model="mine", samples=1, out=home / "samples.jsonl")
    lines = map(json.loads, Path("samples.jsonl").read_text().splitlines())
    texts = [line["query_text"] for line in lines]
    assert len(texts) == 8 and not {*texts} & {f"Anna saw {i} cats." for i in evaluated}
    tiny.refuses(lambda: policies.policy_tasks(["task/model"], policies.PolicyArgs()), "--task")


def test_a_chat_model_judges_summaries(tmp_path, monkeypatch):
    """Its answer is the letter that follows the template's prompt; C is a tie."""
    monkeypatch.setenv("JUDGE", str(tmp_path))
    lm = tiny.make_lm(vocab=tiny.WORDS, positions=512)
    lm.save_pretrained(tiny.write_tokenizer(tmp_path))
    monkeypatch.setattr(llm_judge, "PROMPT", "{query}|{a}|{b}")
    llm_judge.load.cache_clear()
    tokenizer, _ = llm_judge.load()
    tokenizer.chat_template = formats.CHATML
    text = "<|im_start|>user\nA cat.|Cat|A dog.<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    odds = lm(torch.tensor([tokens])).logits[0, -1].double().exp()
    a, b, c = (odds[tokenizer.convert_tokens_to_ids(letter)].item() for letter in "ABC")
    found = llm_judge.prefer(["A cat. "], [" Cat"], ["A dog."])
    assert found == pytest.approx([(a + c / 2) / (a + b + c)], abs=1e-5)


def test_copied_words_by_hand():
    copying: dict = {}
    (code,) = (x for x in blocks("docs/tldr.md", "python") if "rouge" in x)
    exec(code, copying)
    query = "The red house of my aunt, by the sea, burned down."
    responses = ["Red house burned down.", "burned house red", "My aunt is sad", "", "x"]
    queries = [query] * len(responses)
    assert copying["copied"](queries, responses) == [1, 1 / 3, 0.5, 0, 0]


def test_overoptimization_reads_runs_of_its_own_flags_only(here, monkeypatch):
    """A run that is there is kept: other flags, other names."""
    commands: list[tuple] = []
    monkeypatch.setattr(overoptimize, "run", lambda *x: commands.append(x) or Path(x[0]))
    monkeypatch.setattr(overoptimize, "read_run", lambda folder: [])
    for flags in (dict(), dict(labels=32), dict(total_episodes=8), dict(betas=(0.0, 1.0))):
        with pytest.raises(IndexError):  # there are no updates to write
            overoptimize.main(overoptimize.Args(seeds=2, out=here / "a.csv", **flags))
    distinct = {name: command for name, command in commands}
    assert len(commands) == 4 * 2 * 3 and all(distinct[x] == command for x, command in commands)


@pytest.mark.slow
def test_growth_measures_rows_and_those_of_other_names_stay(here, monkeypatch):
    sizes = {"batch": ({}, (8,)), "labels": ({}, (20,)), "queries": ({}, (30,))}
    monkeypatch.setattr(growth, "ROWS", sizes)
    for names in (("batch",), ("labels", "queries")):
        growth.main(growth.Args(names, here / "growth.csv"))
    rows = list(csv.DictReader(Path("growth.csv").read_text().splitlines()))
    assert [float(x["tokens"]) for x in rows] == [8 * (16 + 24), 20 * (16 + 24 + 24), 30 * 16]
    assert all(float(x["peak GB"]) > 0.1 and float(x["cpu s"]) > 0 for x in rows)


def test_calibration_reads_the_labels_that_a_models_run_held_out(task, here, monkeypatch, capsys):
    monkeypatch.setitem(tasks.TASKS, "mine", replace(task, task="mine"))
    folder = tiny.write_reward(here / "reward")
    (here / "reward/args.json").write_text('{"task": "mine", "num_labels": 12, "batch_size": 4}')
    calibration.main(calibration.Args(str(folder), out=Path("out.png")))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(row["labels"] for row in rows) == 4 and Path("out.png").is_file()


def test_parts_share_no_snippet_and_halves_no_rating(here, monkeypatch):
    """From a file in the true form. The first half of raters likes large numbers, the other not."""
    for name, value in dict(TRAIN=12, HELDOUT=6, PAIRS=40, HELDOUT_PAIRS=30).items():
        monkeypatch.setattr(human, f"NUM_{name}", value)
    ratings = [[i // 8 + 1, -(i // 8) - 1] * 7 for i in range(24)]
    films = [f"{i}\t0\tcafé  {i} is a film of eight  words.\r\n" for i in range(24)]
    ratings = [f"{i}\t0\t0\t{row}\r\n" for i, row in enumerate(ratings)]
    tables = dict(GroundTruth=films, anonDataRatings=ratings)
    with tarfile.open("ratings.tar.gz", "w:gz") as archive:
        for name, lines in tables.items():
            path = Path(f"movieReviewSnippets_{name}.txt")
            path.write_bytes("".join(lines).encode("latin-1"))
            archive.add(path)
    human.main(human.Args("data", here / "ratings.tar.gz"))
    data = {path.stem: path.read_text() for path in human.DATA.iterdir()}
    assert data["first"].count("\n") == 40 and data["heldout"].count("\n") == 30
    parts = data["texts"] + data["first"] + data["second"], data["heldout"], data["queries"]
    numbers = [set(re.findall(r"\\u00e9 (\d+) is a film of", part)) for part in parts]
    assert len(set.union(*numbers)) == sum(map(len, numbers)) == 24
    for half, sign in (("first", 1), ("second", -1)):
        for pair in human.read_lines(human.DATA / f"{half}.jsonl"):
            better, worse = (int(pair[side].split()[1]) // 8 for side in ("chosen", "rejected"))
            assert sign * better > sign * worse


def test_against_trl_records_our_steps(here, monkeypatch):
    """RLOO's first ratio is 1, its second is not. The losses are those of test_pitfalls and test_rloo."""
    for script, name in ((sft, "normalize"), (rloo, "normalize"), (rloo, "sample_in_batches")):
        monkeypatch.setattr(script, name, getattr(script, name, None), raising=False)
    against_trl.make(here)
    rows = (row for row in against_trl.ROWS if row.name in ("SFT", "RLOO"))
    (of_sft,), of_rloo = map(against_trl.ours, rows)
    assert of_sft["loss"] > 1 and len(of_sft) > 20  # with all gradients
    assert [abs(x["loss"]) > 0.01 for x in of_rloo] == [False, True]
