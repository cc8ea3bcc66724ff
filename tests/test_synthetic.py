"""The embedded synthetic task: its texts, tokenizer and labels."""

import doctest
import filecmp
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from tiny import WORDS

import utils
from benchmarks import synthetic_data
from data import tasks
from data.synthetic import judge
from machinery.labels import load_labels
from machinery.tokens import load_tokenizer
from utils import TokenIds


@pytest.fixture(scope="module")
def tokenizer():
    """Of the synthetic task."""
    task = replace(tasks.TASKS["synthetic"], base_model=str(tasks.SYNTHETIC / "model"))
    return load_tokenizer(task, task.response_length)[0]


def test_the_synthetic_texts_are_made_again_to_the_byte(tmp_path):
    command = [sys.executable, synthetic_data.__file__, "texts", "--out"]
    subprocess.run([*command, str(tmp_path)], check=True, capture_output=True, timeout=120)
    names = ["stories.txt", "stories_eos.jsonl"]
    names += [f"model/{n}.json" for n in ("config", "tokenizer", "tokenizer_config")]
    same, different, missing = filecmp.cmpfiles(tasks.SYNTHETIC, tmp_path, names, shallow=False)
    assert (sorted(same), different, missing) == (sorted(names), [], [])


@pytest.mark.parametrize("module", [judge, synthetic_data])
def test_the_examples_in_the_synthetic_tasks_docstrings_hold(module):
    failed, tried = doctest.testmod(module)
    assert failed == 0 and tried > 0


def test_the_synthetic_tokenizer_has_its_stop_and_end_as_one_token_each_and_no_pad(tokenizer):
    assert len(tokenizer) == WORDS and tokenizer.pad_token_id is None
    for text in (".", "<|endoftext|>", "\n"):
        assert len(tokenizer.encode(text)) == 1
    assert tokenizer.encode("Anna saw it.")[-1:] == tokenizer.encode(".")  # not merged with another
    text = "Anna was not very happy, but Ben smiled."
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_synthetic_labels_are_5504_rows_in_openais_form_that_prefer_what_the_judge_likes(
    tokenizer,
):
    """Responses are cut for scoring. A perfect predictor's accuracy is near its ceiling, a coin's
    would be a quarter."""
    rows = json.loads((tasks.SYNTHETIC / "labels.json").read_text())
    samples = ["sample0", "sample1", "sample2", "sample3"]
    stop = tokenizer.encode(".")[0]
    for row in rows:
        assert row.keys() == {"query", *samples, "best"} and len(row["query"]) == 64
        for response in (row[name] for name in samples):
            real = [token for token in response if token != 50259]
            assert len(response) == 24 and response[: len(real)] == real and max(real) < WORDS
            assert stop not in real[16:-1]
            assert len(real) == 24 or (real[-1] == stop and len(real) > 16)
    best = np.array([row["best"] for row in rows])
    assert len(rows) == 5504 and np.bincount(best).min() > 1000  # the order tells nothing

    labels = load_labels(tasks.TASKS["synthetic"], tokenizer, TokenIds(WORDS, stop, [], []))
    assert labels.best.tolist() == best.tolist()
    queries, responses, best = labels.batch(np.arange(1000), WORDS)
    queries = utils.decode(tokenizer, queries, WORDS)
    texts = [utils.decode(tokenizer, responses[:, k], WORDS) for k in range(4)]
    scores = np.array([judge.gold_score(queries, side) for side in texts]).T
    accuracy = (scores.argmax(axis=1) == best.numpy()).mean()
    assert accuracy == pytest.approx(judge.best_accuracy(scores.tolist()), abs=0.05)
    assert accuracy > 0.5
