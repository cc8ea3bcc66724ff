"""Records, uploads and trackers, with a stand-in for the hub's API."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import wandb
from conftest import SCRIPTS, read_metrics, settings

import ppo
from machinery.cli import InputError


@pytest.fixture
def api(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Somebody is logged in; what is asked of the hub."""
    calls: list[tuple] = []

    def upload_folder(*, repo_id: str, folder_path: Path) -> str:
        calls.append((repo_id, {path.name for path in Path(folder_path).iterdir()}))
        return f"https://hub/{repo_id}"

    create_repo = lambda repo_id, *, private: calls.append((repo_id, private))  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub, "upload_folder", upload_folder)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_s3cr3t")
    return calls


def two_updates(**flags: Any) -> ppo.Args:
    """ppo, 2 updates of 2 epochs of 2 minibatches, in runs/a."""
    return settings("ppo", **dict(total_episodes=16, run_name="a", push_to_hub="me/it") | flags)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_records_flags_versions_and_curves(name, runs):
    folder = runs.folder / "runs" / name
    record = json.loads((folder / "args.json").read_text())
    assert record["task"] == "synthetic" and record["lr"] == runs.args[name].lr
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["datasets"] == version("datasets")
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"


# -------------------------------------------------------------------------------------------------- the hub


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_missing_token_is_named_before_anything_is_loaded(name, home, no_weights):
    with pytest.raises(InputError, match="--push_to_hub me/it needs a token"):
        SCRIPTS[name].main(settings(name, push_to_hub="me/it"))
    assert not Path("runs").exists()


def test_the_weights_are_uploaded_into_a_new_private_repository_after_training(api, capsys):
    ppo.main(two_updates())
    create, (name, names) = api
    assert create == ("me/it", True) and name == "me/it"
    files = {"config.json", "model.safetensors", "tokenizer.json", "value_head.safetensors"}
    assert files <= names
    assert "https://hub/me/it" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------- Weights & Biases


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
