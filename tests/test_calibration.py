"""benchmarks/calibration.py: stated and true confidence of a reward model."""

import json
import math
from dataclasses import replace
from pathlib import Path

import formats
import pytest
import tiny
import torch
from test_from_trl import write_classifier
from transformers import AutoTokenizer

from benchmarks import calibration, overoptimize
from data import tasks
from machinery.rewards import load_reward_model


def test_labels_are_compared_in_fifths_of_similar_confidence():
    """Ten labels: the probability of the model's favorite of two, and whether it is preferred."""
    sure = {0.9: True, 0.6: False, 0.7: True, 0.8: True, 0.95: True, 0.55: False, 0.65: True}
    sure |= {0.75: True, 0.85: False, 0.52: False}
    rewards = torch.tensor([[math.log(p), math.log(1 - p)] for p in sure])
    best = torch.tensor([0 if right else 1 for right in sure.values()])
    rows = calibration.calibration(rewards, best)
    expected = [(0.535, 0), (0.625, 0.5), (0.725, 1), (0.825, 0.5), (0.925, 1)]
    assert [row["labels"] for row in rows] == [2] * 5
    found = [x for row in rows for x in (row["predicted"], row["accuracy"])]
    assert found == pytest.approx([x for pair in expected for x in pair], abs=1e-6)


def test_a_model_on_its_held_out_labels(task, here, monkeypatch, capsys):
    monkeypatch.setitem(tasks.TASKS, "mine", replace(task, task="mine"))
    presets = {"mine": dict(num_labels=8, batch_size=4)}
    monkeypatch.setattr(calibration.train_reward, "PRESETS", presets)
    folder = tiny.write_reward(here / "reward")
    calibration.main(folder, "mine", "out.png")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(row["labels"] for row in rows) == 8 and Path("out.png").is_file()


@pytest.mark.parametrize("ids", [False, True])
@torch.no_grad()
def test_labels_are_the_texts_of_training(ids, task, gpt2, here, monkeypatch):
    """Pairs with the truncate token, or ids of the task's model, of which this one is not."""
    end = "." if ids else ","
    rows = [dict(prompt=f"Anna saw {i}.", chosen=f" Ben {i}", rejected=" Rain") for i in range(6)]
    texts = [[row["prompt"] + row[x] + end for x in ("chosen", "rejected")] for row in rows]
    if ids:
        task = replace(task, base_model="g", label_tokenizer="g")
        gpt2.save_pretrained("g")
        parts = [[row["prompt"], row["chosen"] + ".", row["rejected"] + "."] for row in rows]
        names = "query", "sample0", "sample1", "best"
        rows = [dict(zip(names, [*map(gpt2.encode, x), 0], strict=True)) for x in parts]
    monkeypatch.setitem(tasks.TASKS, "mine", replace(task, task="mine", query_length=32))
    seen = []
    monkeypatch.setattr(calibration, "calibration", lambda *given: seen.extend(given) or [])
    folder, path = tiny.write_reward(here / "reward"), formats.write_rows(here / "l.jsonl", rows)
    flags = "--truncate_token", end
    calibration.main(folder, "mine", label_dataset=path, num_labels=4, flags=flags)
    model = load_reward_model(calibration.train_reward.RewardModel, folder)
    encode = AutoTokenizer.from_pretrained(folder).encode
    expected = [model(torch.tensor([encode(text)])).item() for row in texts[4:] for text in row]
    assert seen[0].flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_messages_for_a_classifier_are_refused(here):
    """It would read what its template writes after the end token, which labels leave out."""
    write_classifier(here / "reward")
    path = formats.write_rows(here / "l.jsonl", formats.MESSAGES)
    tiny.refuses(lambda: calibration.main(str(here / "reward"), label_dataset=path), "messages")


def test_overoptimization_reads_runs_of_its_own_flags_only(here, monkeypatch):
    """A run that is there is kept: other flags, other names."""
    made, seen = [], {}

    def run(name, command):
        made.append(name)
        assert seen.setdefault(name, command) == command
        return Path(name)

    monkeypatch.setattr(overoptimize, "run", run)
    monkeypatch.setattr(overoptimize, "read_run", lambda folder: [])
    for flags in (dict(), dict(labels=32), dict(total_episodes=8), dict(betas=(0.0, 1.0))):
        with pytest.raises(IndexError):  # there are no updates to write
            overoptimize.main(overoptimize.Args(seeds=2, out=here / "a.csv", **flags))
    assert len(made) == 4 * 2 * 3
