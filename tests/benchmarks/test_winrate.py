"""benchmarks/winrate.py: numbers by hand, and the command on tiny models."""

import json
from dataclasses import replace

import formats
import numpy as np
import pytest
import tiny
import torch

from benchmarks import copying, llm_judge, sample, winrate
from data import tasks
from machinery.cli import InputError
from machinery.labels import load_labels
from machinery.sources import load_function
from machinery.tokens import load_tokenizer


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


def test_policies_and_the_data_are_compared_on_the_same_queries(task, here, monkeypatch, capsys):
    eos = replace(tiny.eos_task(task, here), task="mine")
    monkeypatch.setitem(tasks.TASKS, "mine", eos)
    (here / "judge.py").write_text(
        "seen = []\n\n"
        "def judge(queries, responses, prompt):\n"
        "    assert all(p.startswith(q) for p, q in zip(prompt, queries))\n"
        "    seen.append(queries)\n"
        "    assert seen[0] == queries\n"
        "    return [r.startswith((' Anna saw', ' Ben saw')) for r in responses]\n"
    )
    other = str(tiny.write_model(here / "other", seed=3))
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


def test_the_data_is_judged_as_a_policy_is(task, here, monkeypatch, capsys):
    """On the queries as policies read them, without end tokens, and in both orders alike."""
    rows = [dict(prompt=f"Anna saw {i} cats and ran.", text=f" Ben {i}.") for i in range(6)]
    ended = [row | {"text": [{"role": "assistant", "content": row["text"]}]} for row in rows[:3]]
    ended += [row | {"text": row["text"] + "<|endoftext|>\n"} for row in rows[3:]]
    eos = replace(tiny.eos_task(task, here), task="mine", response_column="text", query_length=5)
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
    rows[2]["text"] = [{"role": "user", "content": "Why?"}]
    formats.write_rows(here / "own.jsonl", rows)
    with pytest.raises(InputError, match="no response"):
        winrate.main(winrate.Args(a="data", b=eos.base_model, **settings))
    answers = lambda task, args: (["Hi"], ["Hi"], {"prompt": [task.base_model]})  # noqa: E731
    monkeypatch.setattr(winrate, "sample_responses", answers)
    with pytest.raises(InputError, match="different queries"):  # one tokenizer skips the first
        winrate.main(winrate.Args(a="x", b="y", **settings))


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
    with pytest.raises(InputError, match="1.5"):
        winrate.ask_in_both_orders(lambda queries, a, b: [1.5], "judge", ["1"], ["a"], ["b"])


def test_a_chat_model_judges_summaries(tmp_path, monkeypatch):
    """Its answer is the letter that follows the template's prompt; equal summaries are a tie."""
    monkeypatch.setenv("JUDGE", str(tmp_path))
    lm = tiny.make_lm(vocab=tiny.WORDS, positions=512)
    lm.save_pretrained(tiny.write_tokenizer(tmp_path))
    monkeypatch.setattr(llm_judge, "PROMPT", "{query}|{a}|{b}")
    llm_judge.load.cache_clear()
    tokenizer, _ = llm_judge.load()
    tokenizer.chat_template = formats.CHATML
    queries, a, b = ["A cat. ", "It rained."], [" Cat", "Rain"], ["A dog.", " Rain"]
    expected = []
    for texts in (("A cat.", "Cat", "A dog."), ("It rained.", "Rain", "Rain")):
        text = f"<|im_start|>user\n{'|'.join(texts)}<|im_end|>\n<|im_start|>assistant\n"
        tokens = tokenizer.encode(text, add_special_tokens=False)
        odds = lm(torch.tensor([tokens])).logits[0, -1].double().exp()
        odds = [odds[tokenizer.convert_tokens_to_ids(letter)].item() for letter in "ABC"]
        expected.append((odds[0] + odds[2] / 2) / sum(odds))
    assert llm_judge.prefer(queries, a, b) == pytest.approx(expected, abs=1e-5)
    wins, _ = winrate.ask_in_both_orders(llm_judge.prefer, "judge", queries, a, b)
    assert wins[1] == pytest.approx(0.5, abs=1e-6) and wins[0] != pytest.approx(0.5, abs=1e-6)


def test_copied_words_and_novel_bigrams():
    query = "The red house of my aunt, by the sea, burned down."
    responses = ["Red house burned down.", "burned house red", "My aunt is sad", "", "x"]
    queries = [query] * len(responses)
    assert copying.copied(queries, responses) == [1, 1 / 3, 0.5, 0, 0]
    assert copying.novel_bigrams(queries, responses) == [1 / 3, 1, 2 / 3, 0, 0]
    assert copying.rouge_l(["", ""], ["a red cat", "b"], ["a cat", "c"]) == [0.8, 0]


def test_samples_become_labels_when_best_is_filled_in(task, tmp_path, monkeypatch):
    """Distinct responses to the queries after the held-out ones; the text is that of the ids."""
    monkeypatch.setitem(tasks.TASKS, "mine", task)
    out = tmp_path / "samples.jsonl"
    settings = dict(model=task.base_model, task="mine", queries=5, samples=3, out=out)
    sample.main(sample.Args(**settings, first=2))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    tokenizer, ids = load_tokenizer(task, task.response_length)
    table = winrate.load_queries(task, tokenizer, ids, 7)
    for i, row in enumerate(rows):
        assert row["best"] is None and len(row["texts"]) == len(set(row["texts"])) == 3
        assert row["query"] == [x for x in table[[i + 2]][0].tolist() if x != ids.pad]
        assert tokenizer.decode(row["query"]) == row["query_text"]
        assert [tokenizer.decode(row[f"sample{k}"]) for k in range(3)] == row["texts"]
    labeled = [json.dumps(row | {"best": i % 3}) + "\n" for i, row in enumerate(rows)]
    (tmp_path / "labels.jsonl").write_text("".join(labeled))
    task = replace(task, label_dataset=str(tmp_path / "labels.jsonl"))
    labels = load_labels(task, tokenizer, ids)
    assert labels.best.tolist() == [0, 1, 2, 0, 1]
    assert labels.responses[4][2].tolist() == rows[4]["sample2"]
    for change, named in ((dict(first=2), "exists"), (dict(out=tmp_path / "new"), "--first 256")):
        with pytest.raises(InputError, match=named):
            sample.main(sample.Args(**settings | change))
