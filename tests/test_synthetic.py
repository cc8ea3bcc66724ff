"""The embedded synthetic task: its texts and labels."""

import doctest
import filecmp
import subprocess
import sys

import numpy as np
import pytest
from tiny import WORDS

import utils
from benchmarks import synthetic_data
from data import tasks
from data.synthetic import judge
from machinery.labels import load_labels
from utils import TokenIds


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


def test_the_5504_synthetic_labels_prefer_what_the_judge_likes(hers):
    """A perfect predictor's accuracy is near its ceiling, a coin's would be a quarter."""
    stop = hers.encode(".")[0]
    labels = load_labels(tasks.TASKS["synthetic"], hers, TokenIds(WORDS, stop, [], []))
    assert len(labels) == 5504 and np.bincount(labels.best).min() > 1000  # the order tells nothing
    queries, responses, best = labels.batch(np.arange(1000), WORDS)
    queries = utils.decode(hers, queries, WORDS)
    texts = [utils.decode(hers, responses[:, k], WORDS) for k in range(4)]
    scores = np.array([judge.gold_score(queries, side) for side in texts]).T
    accuracy = (scores.argmax(axis=1) == best.numpy()).mean()
    assert accuracy == pytest.approx(judge.best_accuracy(scores.tolist()), abs=0.05)
    assert accuracy > 0.5
