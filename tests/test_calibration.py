"""benchmarks/calibration.py: stated and true confidence of a reward model."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from benchmarks import calibration
from data import tasks


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
