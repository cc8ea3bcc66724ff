"""Embedded data; tasks whose answers can be checked: rewards of arithmetic and gsm8k, pass@k."""

import filecmp
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny
from conftest import SCRIPTS
from formats import GSM8K, write_rows
from test_tokens import small_tokenizer

import utils
from data import answers as data_answers
from data import tasks
from data.arithmetic import make as make_arithmetic
from data.synthetic import judge
from data.synthetic import make as make_synthetic
from machinery import cli, rewards, tokens
from machinery.labels import load_labels
from machinery.queries import load_queries
from tools import pass_at_k

TINY = "--total_episodes 16 --batch_size 16 --eval_queries 4 --run_name {0} --output_dir {0}"
WRONG = ["-72", "720", "7.2", "72.5", "72 73", "72 or 73", "72e5", "72x3=216", "7,2", "72\u0663"]
WRONG += ["72**2", "72 eggs or 73 eggs", "72/3", "72, 73", "80-8", "72 eggs in 7 days", "7 2"]
SAME = "72| 72|\n72|72.|72.0|$72|072|+72|72 clips|72\n73|**72** eggs|$72/hour|= 72|72 m²|٧٢"
NUMBERS = [  # the right answer; texts that are the same number, and others
    ("72", SAME.split("|"), WRONG),
    ("1,600", ["1600", "$1,600.00", "1,600 dollars"], ["1", "600", "1.600", "-1,600", "1 600"]),
    ("-5", ["-5", "-$5", "$-5", "-5.00", "−5"], ["5", "$5", "- 5"]),
    ("0.5", ["0.5", ".5", "0.50", "$.5"], ["5", "0", "1/2", "2/1", "-0.5"]),
    ("3", ["3 ", "3%"], ["3/4", "three", "", ".", "$", ",", "-", "\n"]),
    ("9" * 5000, ["9" * 5000], ["9" * 4999]),
]


def test_the_reward_of_arithmetic_is_1_for_exactly_the_answer_after_the_last_equals_sign():
    right = ["15,12,12,7=7225", "=7225", "15,12=9,7=7225"]  # only the answer counts
    wrong = ["15,11,11,6=6115", "15,12,12,7=07225", "15,12,12,7=7225=", "15,12,12,7= 7225", ""]
    found = data_answers.exact_match(["4758+2467="] * 8, right + wrong, ["7225"] * 8)
    assert found == [1] * 3 + [0] * 5
    assert data_answers.exact_match(["1+1=", "2+2="], ["=4", "=4"], ["2", "4"]) == [0, 1]


@pytest.mark.parametrize(("right", "same", "other"), NUMBERS)
def test_the_reward_of_gsm8k_compares_the_numbers_after_the_last_mark(right, same, other):
    """However they are written; a line with several numbers has none."""
    for text, score in [(x, 1.0) for x in same] + [(x, 0.0) for x in other]:
        responses = [f"So it is 8 + 8 = <<8+8=16>>16.\n#### {text}", f"#### 99\n#### {text}"]
        for answer in (f"8 + 8 = <<8+8=16>>16\n#### {right}", right, f" {right}\n"):
            assert data_answers.gsm8k(["?"] * 2, responses, [answer] * 2) == [score] * 2, text


def test_a_gold_answer_is_a_number_or_unread():
    assert [data_answers.read_number(x) for x in (72, 72.0, "7.50", "$72")] == [72, 72, 7.5, 72]
    for gold in ("72 clips", "\\frac{1}{2}", "1/2", "x+1", "1 000", ["72"], None, float("nan"), ""):
        assert data_answers.read_number(gold) is None
        assert data_answers.gsm8k(["?"], [f"#### {gold}"], [gold]) == [0]


def test_exact_match_reads_texts_and_whole_numbers():
    golds = ["8110", 8110, "8110\n", " 8110"]
    assert data_answers.exact_match(["?"] * 4, ["=8110"] * 4, golds) == [1] * 4
    none = [None, float("nan"), "", " ", 8110.0, ["8110"]]
    assert [data_answers.read_text(x) for x in none] == [None] * 6
    answers = ["=", "=nan", "=None", "= ", "=8110.0", "=8110"]
    assert data_answers.exact_match(["?"] * 6, answers, none) == [0] * 6


@pytest.mark.parametrize("reward", ["gsm8k", "exact_match"])
def test_answers_that_a_reward_cannot_read_are_counted_at_first(reward, task, tmp_path, capsys):
    """If it can read none, the run does not start."""
    bad = ["see the text", None] if reward == "gsm8k" else ["", None]

    def load(answers: list) -> None:
        rows = [dict(text=f"Anna saw {i}.", answer=x) for i, x in enumerate(answers)]
        files = dict(query_dataset=write_rows(tmp_path / "a.jsonl", rows))
        own = replace(task, reward_fn=f"data.answers:{reward}", **files)
        load_queries(own, *tokens.load_tokenizer(own, 5))

    load(["7", "8", "9", *bad])
    assert "cannot read 2 of 5 answers" in capsys.readouterr().out
    tiny.refuses(lambda: load(bad), "--reward_fn", "cannot read 2 of 2")


GRADES = {  # reward, right answer → strictly right, leniently right, in the right form: responses
    ("gsm8k", "7 + 65 = 72\n#### 72"): {
        (1, 1, 1): ["So 9 * 8 = 72.\n#### 72"],
        (0, 1, 1): ["#### 73\nNo: 80-8 is 72"],
        (0, 0, 1): ["#### 71"],
        (0, 1, 0): ["The answer is $72.00.", "80-72", "### 72", "72 ####"],
        (0, 0, 0): ["#### 72 or 73", "It is -72", ""],
    },
    ("exact_match", "7225"): {
        (1, 1, 1): ["15,12,12,7=7225"],
        (0, 0, 1): ["15,11,11,6=6115"],
        (0, 1, 0): ["=7225", "15,12,12,7=7,225"],  # the first is right, but without the sums
    },
}


@pytest.mark.parametrize("reward, answer", GRADES)
def test_strict_and_lenient_accuracy_and_form_by_hand(reward, answer):
    grade = partial(pass_at_k.accuracies, getattr(data_answers, reward))
    for expected, responses in GRADES[reward, answer].items():
        for response in responses:
            assert (*grade(["?"], [response], [answer]).values(),) == expected, response


TEXTS = [f"model/{name}.json" for name in ("config", "tokenizer", "tokenizer_config")]
TEXTS += ["stories.txt", "stories_eos.jsonl"]
MADE = {  # program, its words → a folder of data/, and its files that are made again
    (make_arithmetic, "--out"): (tasks.ARITHMETIC, ["problems.jsonl", "solutions.jsonl"]),
    (make_synthetic, "texts --out"): (tasks.SYNTHETIC, TEXTS),
}


@pytest.mark.parametrize(("program", "words"), MADE)
def test_embedded_texts_are_made_again_to_the_byte(program, words, tmp_path):
    folder, names = MADE[program, words]
    tiny.run_python(program.__file__, *words.split(), tmp_path)
    same, *rest = filecmp.cmpfiles(folder, tmp_path, names, shallow=False)
    assert (same, rest) == (names, [[], []])


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


def run(name: str, words: str) -> list[dict]:
    script = SCRIPTS[name]
    args = cli.parse_args(script.Args, script.PRESETS, words.split())
    script.main(args)
    return [json.loads(x) for x in Path("runs", args.run_name, "metrics.jsonl").open()]


def test_arithmetic_from_sft_to_pass_at_k_in_any_folder(here, monkeypatch, capsys):
    """The reward function is the project's, also where the folder has a `data/answers.py`."""
    Path("data").mkdir()
    Path("data/answers.py").write_text("raise SystemExit('not me')")
    run("sft", "--task arithmetic --num_queries 700 --num_epochs 1 --run_name sft")
    seen = []

    def spy(queries, responses, answer):
        assert answer == [str(sum(map(int, query[:-1].split("+")))) for query in queries]
        seen.append((queries, responses))
        return [float(i % 2) for i in range(len(queries))]

    for name in ("ppo", "rloo"):
        lines = run(name, "--task arithmetic " + TINY.format(name))
        assert lines[-1]["eval/scores"] in (0, 0.25, 0.5, 0.75, 1)
    args = ["models/arithmetic/sft", "ppo", "--queries", "6", "--samples", "3", "--k", "2"]
    capsys.readouterr()
    monkeypatch.setattr(rewards, "load_function", lambda name: spy)
    pass_at_k.main(pass_at_k.tyro.cli(pass_at_k.Args, args=args))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["model"] for line in lines] == args[:2]
    for line in lines:  # of three samples 1, 2, 1, 2, 1, 2 are right: of pairs 2 and 3 of 3
        assert line["pass@1"] == 0.5 and line["pass@2"] == pytest.approx(5 / 6, abs=1e-4)
    (queries, responses), _ = seen  # side by side, as in a run
    assert queries[::3] == queries[1::3] == queries[2::3] and len({*queries}) == 6
    assert len({*responses}) > 6


def test_gsm8k_asks_in_its_template_and_has_the_answers_beside_the_questions(tmp_path):
    tokenizer = small_tokenizer()
    for x in (tiny.config("qwen2", vocab=len(tokenizer), positions=1024), tokenizer):
        x.save_pretrained(tmp_path)
    files = dict(base_model=str(tmp_path), query_dataset=write_rows(tmp_path / "a.jsonl", GSM8K))
    task = replace(tasks.TASKS["gsm8k"], **files)
    tokenizer, ids = tokens.load_tokenizer(task, task.response_length)
    table = load_queries(task, tokenizer, ids)
    contexts = utils.add_affixes(table[:], ids)
    columns = table.columns()
    texts = tokenizer.batch_decode([row[row != ids.pad] for row in contexts])
    answers = {row["question"]: row["answer"] for row in GSM8K}
    for text, question, answer in zip(texts, columns["question"], columns["answer"], strict=True):
        assert answer == answers[question]
        assert text == (
            f"<|im_start|>user\n{question} Let's think step by step and output the final answer "
            'after "####".<|im_end|>\n<|im_start|>assistant\n'
        )


def test_pass_at_k_by_hand():
    """Of 4 samples 0, 1, 2, 4 are right. Pairs without a right one: 6, 3, 1 and 0 of 6."""
    right = np.array([[0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]], dtype=bool)
    assert pass_at_k.pass_at_k(right, 1) == pytest.approx((0 + 1 / 4 + 2 / 4 + 1) / 4)
    assert pass_at_k.pass_at_k(right, 2) == pytest.approx((0 + 3 / 6 + 5 / 6 + 1) / 4)
    assert pass_at_k.pass_at_k(right, 4) == 3 / 4
