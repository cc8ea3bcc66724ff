"""Embedded data; tasks whose answers can be checked: rewards of arithmetic and gsm8k, pass@k."""

import filecmp
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from conftest import read_lines, run_script
from formats import GSM8K, write_rows
from test_tokens import small_tokenizer

import utils
from data import answers, tasks
from data.answers import exact_match, gsm8k
from data.arithmetic import make as make_arithmetic
from data.synthetic import judge
from data.synthetic import make as make_synthetic
from machinery import rewards, tokens
from machinery.labels import load_labels
from machinery.queries import load_queries
from tools import pass_at_k

TINY = "--task arithmetic --total_episodes 16 --batch_size 16 --eval_queries 4 "
TINY += "--run_name {0} --output_dir {0}"
NUMBERS = [  # the right answer; texts that are the same number; others
    (
        "72",
        "72| 72|\n72|72.|72.0|$72|072|+72|72 clips|72\n73|**72** eggs|$72/hour|= 72|72 m²|٧٢",
        "-72|720|7.2|72.5|72 73|72 or 73|72e5|72x3=216|7,2|72\u0663|72**2|72 eggs or 73 eggs|72/3"
        "|72, 73|80-8|72 eggs in 7 days|7 2",
    ),
    ("1,600", "1600|$1,600.00|1,600 dollars", "1|600|1.600|-1,600|1 600"),
    ("-5", "-5|-$5|$-5|-5.00|−5", "5|$5|- 5"),
    ("0.5", "0.5|.5|0.50|$.5", "5|0|1/2|2/1|-0.5"),
    ("3", "3 |3%", "3/4|three||.|$|,|-|\n"),
    ("9" * 5000, "9" * 5000, "9" * 4999),
]


def test_the_reward_of_arithmetic_is_1_for_exactly_the_answer_after_the_last_equals_sign():
    for response in ("15,12,12,7=7225", "=7225", "15,12=9,7=7225"):  # only the answer counts
        assert exact_match(["4758+2467="], [response], ["7225"]) == [1]
    for response in ("15,11,11,6=6115", "=07225", "=7225=", "= 7225", ""):
        assert exact_match(["4758+2467="], [response], ["7225"]) == [0]
    assert exact_match(["1+1=", "2+2="], ["=4", "=4"], ["2", "4"]) == [0, 1]


@pytest.mark.parametrize("right, same, other", NUMBERS)
def test_the_reward_of_gsm8k_compares_the_numbers_after_the_last_mark(right, same, other):
    """However they are written; a line with several numbers has none."""
    for texts, score in ((same, 1.0), (other, 0.0)):
        for text in texts.split("|"):
            responses = [f"So it is 8 + 8 = <<8+8=16>>16.\n#### {text}", f"#### 99\n#### {text}"]
            for answer in (f"8 + 8 = <<8+8=16>>16\n#### {right}", right, f" {right}\n"):
                assert gsm8k(["?"] * 2, responses, [answer] * 2) == [score] * 2, text


def test_a_gold_answer_is_a_number_or_unread():
    assert [answers.read_number(x) for x in (72, 72.0, "7.50", "$72")] == [72, 72, 7.5, 72]
    for gold in ("72 clips", "\\frac{1}{2}", "1/2", "x+1", "1 000", ["72"], None, float("nan"), ""):
        assert answers.read_number(gold) is None
        assert gsm8k(["?"], [f"#### {gold}"], [gold]) == [0]


def test_exact_match_reads_texts_and_whole_numbers():
    for gold in ("8110", 8110, "8110\n", " 8110"):
        assert exact_match(["?"], ["=8110"], [gold]) == [1]
    for gold in (None, float("nan"), "", " ", 8110.0, ["8110"]):
        assert answers.read_text(gold) is None
        assert exact_match(["?"] * 2, [f"={gold}", "=8110"], [gold] * 2) == [0, 0]


@pytest.mark.parametrize("reward, bad", [("gsm8k", "see the text"), ("exact_match", "")])
def test_answers_that_a_reward_cannot_read_are_counted_at_first(reward, bad, task, here, capsys):
    """If it can read none, the run does not start."""

    def load(*golds):
        rows = [dict(text=f"Anna saw {i}.", answer=gold) for i, gold in enumerate(golds)]
        path = write_rows(here / "a.jsonl", rows)
        own = replace(task, reward_fn=f"data.answers:{reward}", query_dataset=path)
        load_queries(own, *tokens.load_tokenizer(own, 5))

    load("7", "8", "9", bad, None)
    assert "cannot read 2 of 5 answers" in capsys.readouterr().out
    tiny.refuses(lambda: load(bad, None), "--reward_fn", "cannot read 2 of 2")


GRADES = [  # response → strictly right, leniently right, in the right form
    ("So 9 * 8 = 72.\n#### 72", 1, 1, 1),
    ("#### 73\nNo: 80-8 is 72", 0, 1, 1),
    ("#### 71", 0, 0, 1),
    ("The answer is $72.00.", 0, 1, 0),
    ("80-72", 0, 1, 0),
    ("### 72", 0, 1, 0),
    ("72 ####", 0, 1, 0),
    ("#### 72 or 73", 0, 0, 0),
    ("It is -72", 0, 0, 0),
    ("", 0, 0, 0),
]
GRADES_OF_SUMS = [
    ("15,12,12,7=7225", 1, 1, 1),
    ("15,11,11,6=6115", 0, 0, 1),
    ("=7225", 0, 1, 0),  # right, but without the sums
    ("15,12,12,7=7,225", 0, 1, 0),
]


@pytest.mark.parametrize(
    "reward, answer, grades",
    [(gsm8k, "7 + 65 = 72\n#### 72", GRADES), (exact_match, "7225", GRADES_OF_SUMS)],
)
def test_strict_and_lenient_accuracy_and_form_by_hand(reward, answer, grades):
    for response, *expected in grades:
        found = pass_at_k.accuracies(reward, ["?"], [response], [answer])
        assert [*found.values()] == expected, response


ARITHMETIC = ["problems.jsonl", "solutions.jsonl"]
SYNTHETIC = [
    "model/config.json",
    "model/tokenizer.json",
    "model/tokenizer_config.json",
    "stories.txt",
    "stories_eos.jsonl",
]
MADE = [  # a program and its words, a folder of data/, and its files that are made again
    (make_arithmetic.__file__, ["--out"], tasks.ARITHMETIC, ARITHMETIC),
    pytest.param(
        make_synthetic.__file__,
        ["texts", "--out"],
        tasks.SYNTHETIC,
        SYNTHETIC,
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("program, words, folder, names", MADE)
def test_embedded_texts_are_made_again_to_the_byte(program, words, folder, names, tmp_path):
    tiny.run_python(program, *words, tmp_path)
    same, _, _ = filecmp.cmpfiles(folder, tmp_path, names, shallow=False)
    assert same == names


def test_the_5504_synthetic_labels_prefer_what_the_judge_likes(hers):
    """A perfect predictor's accuracy is near its ceiling, a coin's would be a quarter."""
    stop = hers.encode(".")[0]
    ids = utils.TokenIds(tiny.WORDS, [stop], [], [])
    labels = load_labels(tasks.TASKS["synthetic"], hers, ids)
    assert len(labels) == 5504 and np.bincount(labels.best).min() > 1000  # the order tells nothing
    queries, responses, best = labels.batch(np.arange(1000), tiny.WORDS)
    queries = utils.decode(hers, queries, ids)
    texts = [utils.decode(hers, responses[:, k], ids) for k in range(4)]
    scores = np.array([judge.gold_score(queries, side) for side in texts]).T
    accuracy = (scores.argmax(axis=1) == best.numpy()).mean()
    assert accuracy == pytest.approx(judge.best_accuracy(scores.tolist()), abs=0.05)
    assert accuracy > 0.5


def test_arithmetic_from_sft_to_pass_at_k_in_any_folder(here, monkeypatch, capsys):
    """The reward function is the project's, also where the folder has a `data/answers.py`."""
    Path("data").mkdir()
    Path("data/answers.py").write_text("raise SystemExit('not me')")
    words = "--task arithmetic --num_queries 700 --num_epochs 1 --run_name sft"
    run_script("sft", words.split())
    for name in ("ppo", "rloo"):
        run_script(name, TINY.format(name).split())
        last = read_lines(f"runs/{name}/metrics.jsonl")[-1]
        assert last["eval/scores"] in (0, 0.25, 0.5, 0.75, 1)
    seen = []

    def spy(queries, responses, answer):
        for query, gold in zip(queries, answer, strict=True):
            first, second = query.removesuffix("=").split("+")
            assert gold == str(int(first) + int(second))
        seen.append((queries, responses))
        return [float(i % 2) for i in range(len(queries))]

    monkeypatch.setattr(rewards, "load_function", lambda name: spy)
    policies = "models/arithmetic/sft", "ppo"
    capsys.readouterr()
    pass_at_k.main(pass_at_k.Args(models=policies, queries=6, samples=3, k=2))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["model"] for line in lines] == [*policies]
    for line in lines:  # of three samples 1, 2, 1, 2, 1, 2 are right: of pairs 2 and 3 of 3
        assert line["pass@1"] == 0.5
        assert line["pass@2"] == pytest.approx(5 / 6, abs=1e-4)
    queries, responses = seen[0]  # side by side, as in a run
    assert queries[::3] == queries[1::3] == queries[2::3]
    assert len(set(queries)) == 6 < len(set(responses))


def test_gsm8k_asks_in_its_template_and_has_the_answers_beside_the_questions(tmp_path):
    folder = tiny.write_config(tmp_path, small_tokenizer(), positions=1024)
    path = write_rows(tmp_path / "a.jsonl", GSM8K)
    task = replace(tasks.TASKS["gsm8k"], base_model=folder, query_dataset=path)
    tokenizer, ids = tokens.load_tokenizer(task, task.response_length)
    table = load_queries(task, tokenizer, ids)
    columns = table.columns()
    answers = {row["question"]: row["answer"] for row in GSM8K}
    for i, context in enumerate(utils.add_affixes(table[:], ids)):
        question = columns["question"][i]
        assert columns["answer"][i] == answers[question]
        assert tokenizer.decode(context[context != ids.pad]) == (
            f"<|im_start|>user\n{question} Let's think step by step and output the final answer "
            'after "####".<|im_end|>\n<|im_start|>assistant\n'
        )


def test_pass_at_k_by_hand():
    """Of 4 samples 0, 1, 2, 4 are right. Pairs without a right one: 6, 3, 1 and 0 of 6."""
    number_right = np.array([0, 1, 2, 4])
    right = np.arange(4)[:, None] < number_right  # [sample, query]
    assert pass_at_k.pass_at_k(right, 1) == pytest.approx((0 + 1 / 4 + 2 / 4 + 1) / 4)
    assert pass_at_k.pass_at_k(right, 2) == pytest.approx((0 + 3 / 6 + 5 / 6 + 1) / 4)
    assert pass_at_k.pass_at_k(right, 4) == 3 / 4
