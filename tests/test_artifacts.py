"""Records, uploads and trackers, with a stand-in for the hub's API."""

import json
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import wandb
from conftest import SCRIPTS, read_metrics, settings
from huggingface_hub.errors import HTTPError
from test_resume import free_port

import ppo
from machinery import artifacts, runs
from machinery.cli import InputError


@pytest.fixture
def api(home: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Somebody is logged in; `calls` are what is asked of the hub, `down` the call that fails."""
    fake = SimpleNamespace(calls=[], down=None)

    def call(function: str, repo_id: str, value: Any) -> None:
        fake.calls.append((function, repo_id, value))
        if fake.down == function:
            raise HTTPError("no connection")

    def create_repo(repo_id: str, *, private: bool) -> None:
        call("create_repo", repo_id, private)

    def upload_folder(*, repo_id: str, folder_path: Path) -> str:
        call("upload_folder", repo_id, {path.name for path in Path(folder_path).iterdir()})
        return f"https://hub/{repo_id}"

    for function in (create_repo, upload_folder):
        monkeypatch.setattr(huggingface_hub, function.__name__, function)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_s3cr3t")
    return fake


def two_updates(**flags: Any) -> ppo.Args:
    """ppo, 2 updates of 2 epochs of 2 minibatches, in runs/a."""
    return settings("ppo", **dict(total_episodes=16, run_name="a", push_to_hub="me/it") | flags)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_records_flags_versions_and_curves(name, runs):
    folder = runs.folder / "runs" / name
    record = json.loads((folder / "args.json").read_text())
    assert record["task"]["task"] == "synthetic" and record["lr"] == runs.args[name].lr
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["datasets"] == version("datasets")
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_the_build_of_torch_is_recorded_where_its_metadata_lack_it(tmp_path, monkeypatch):
    """The default wheel for Linux calls itself 2.13.0+cu130, its metadata 2.13.0."""
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    assert artifacts.describe_environment(tmp_path)["versions"]["torch"] == "2.13.0+cu130"


# -------------------------------------------------------------------------------------------------- the hub


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_missing_token_is_named_before_anything_is_loaded(name, home, no_weights):
    with pytest.raises(InputError, match="--push_to_hub me/it needs a token"):
        SCRIPTS[name].main(settings(name, push_to_hub="me/it"))
    assert not Path("runs").exists()


def test_the_weights_are_uploaded_into_a_new_private_repository_after_training(api, capsys):
    ppo.main(two_updates())
    create, (*upload, names) = api.calls
    assert create == ("create_repo", "me/it", True) and upload == ["upload_folder", "me/it"]
    files = {"config.json", "model.safetensors", "tokenizer.json", "value_head.safetensors"}
    assert files <= names
    assert "https://hub/me/it" in capsys.readouterr().out


@pytest.mark.parametrize("down", ["create_repo", "upload_folder"])
def test_a_hub_that_fails_at_the_end_is_named_and_the_weights_are_kept(down, api, capsys):
    api.down = down
    with pytest.raises(InputError, match="--push_to_hub me/it: .*no connection"):
        ppo.main(two_updates())
    assert Path("models/synthetic/ppo/model.safetensors").is_file()
    assert "weights: runs/a/model" in capsys.readouterr().out


def test_only_the_main_process_talks_to_the_hub(api):
    accelerator = SimpleNamespace(is_main_process=False)
    runs.Run(two_updates(), ppo.SCRIPT, 1, [], accelerator).finish()
    assert api.calls == [] and not Path("runs").exists()


# --------------------------------------------------------------------------------------------- Weights & Biases


@pytest.mark.parametrize(("track", "project"), [(True, None), (True, "mine"), (False, None)])
def test_wandb_gets_the_run_only_with_track(track, project, tmp_path, monkeypatch):
    """Its project is W&B's own environment variable, or ours."""
    seen = []

    def tracker(project: str, **values: Any) -> SimpleNamespace:
        seen.append((project, values["name"], values["config"]))
        return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr(artifacts, "WandBTracker", tracker)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    if project:
        monkeypatch.setenv("WANDB_PROJECT", project)
    artifacts.start_trackers(tmp_path, {"lr": 1}, track)
    assert seen == ([(project or "onefile-rlhf", tmp_path.name, {"lr": 1})] if track else [])


def test_an_unreachable_wandb_ends_the_run_before_training(home, monkeypatch):
    """The message names a way on; wandb has its own retries, cut short here."""
    wandb_settings = wandb.Settings
    monkeypatch.setattr(wandb, "Settings", lambda **x: wandb_settings(**x | dict(init_timeout=2)))
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    begin = time.monotonic()
    flags = dict(track=True, num_ppo_epochs=1, eval_every=100)
    with pytest.raises(InputError, match="--track; WANDB_MODE=offline "):
        ppo.main(settings("ppo", run_name="ran", **flags))
    assert time.monotonic() - begin < 30 and not Path("runs/ran/metrics.jsonl").exists()
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
    assert all(table["columns"] == ["query", "response", "score"] for table in samples)
    assert all("Clara" in str(table["data"]) for table in samples)
