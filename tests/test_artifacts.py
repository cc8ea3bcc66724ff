"""Records and trackers of a run."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import wandb
from conftest import SCRIPTS, read_metrics, settings

import ppo
from machinery.cli import InputError


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_records_flags_versions_and_curves(name, runs):
    folder = runs.folder / "runs" / name
    record = json.loads((folder / "args.json").read_text())
    assert record["task"] == "synthetic" and record["lr"] == runs.args[name].lr
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["datasets"] == version("datasets")
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    weights = runs.folder / runs.args[name].output_dir  # as readable for others as any file
    modes = {path.stat().st_mode for path in (folder / "args.json", *weights.iterdir())}
    assert len(modes) == 1 and (weights / "model.safetensors").is_file()


def test_a_wandb_that_fails_ends_the_run_before_training_and_names_a_way_on(home, monkeypatch):
    """Without a network W&B writes files; it is imported for --track only."""
    monkeypatch.setenv("WANDB_MODE", "no such mode")
    flags = dict(track=True, num_ppo_epochs=1, eval_every=100)
    with pytest.raises(InputError, match="(?s)--track; WANDB_MODE=offline .*no such mode"):
        ppo.main(settings("ppo", run_name="ran", **flags))
    assert not Path("runs/ran/metrics.jsonl").exists()
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    ppo.main(settings("ppo", run_name="offline", **flags))
    assert [row["step"] for row in read_metrics("offline")] == list(range(6))
    wandb.teardown()  # as at the end of the process
    (data,) = Path("runs/offline/wandb").glob("offline-run-*/*.wandb")
    assert b"objective/kl_coef" in data.read_bytes()
    tables = list(Path("runs/offline/wandb").glob("offline-run-*/files/media/table/*.json"))
    samples = [json.loads(table.read_text()) for table in tables]
    assert len(samples) == 2
    columns = ["query", "response", "score", "kl", "total"]
    assert all(table["columns"] == columns for table in samples)
    assert all("Clara" in str(table["data"]) for table in samples)
