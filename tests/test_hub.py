"""The model card and the hub, with a stand-in for the hub's API, since tests have no network."""

import json
import re
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError
from test_resume import ROOT, SCRIPTS, settings, write_files

import ppo
from data import tasks
from machinery import artifacts, distributed, hub, runs
from machinery.cli import InputError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of `settings` in the folder of a user who is not logged in."""
    folder = tmp_path / "jürgen" / "work"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    write_files(folder)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    return folder


@pytest.fixture
def api(home: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Somebody is logged in; `calls` are what is asked of the API.

    `public` are the repositories that everybody can read, `down` is the function that fails with
    `error`.
    """
    fake = SimpleNamespace(calls=[], public=set(), down=None, error=HTTPError("no connection"))

    def call(function: str, repo_id: str, **values: Any) -> None:
        fake.calls.append((function, repo_id, values))
        if fake.down == function:
            raise fake.error

    def create_repo(repo_id: str, *, private: bool, exist_ok: bool) -> None:
        call("create_repo", repo_id, private=private)
        assert exist_ok

    def model_info(repo_id: str) -> SimpleNamespace:
        return SimpleNamespace(private=repo_id not in fake.public)

    def upload_folder(*, repo_id: str, folder_path: Path) -> str:
        call("upload_folder", repo_id, files={path.name for path in Path(folder_path).iterdir()})
        return f"https://hub/{repo_id}"

    for function in (create_repo, model_info, upload_folder):
        monkeypatch.setattr(huggingface_hub, function.__name__, function)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_s3cr3t")
    return fake


def two_updates(**flags: Any) -> ppo.Args:
    """ppo, 2 updates of 2 epochs of 2 minibatches, in runs/a."""
    return settings("ppo", **dict(total_episodes=16, run_name="a", push_to_hub="me/it") | flags)


# ------------------------------------------------------------------------------------------------- the card

METRICS = {
    "ppo": ("objective/scores", "eval/kl"),
    "rloo": ("objective/kl", "eval/scores"),
    "train_reward": ("loss",),
    "sft": ("loss", "heldout/loss"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_card_has_task_metrics_flags_and_versions(name, runs):
    folder = runs.folder / {"train_reward": "reward"}.get(name, name)
    card = huggingface_hub.ModelCard.load(folder / "README.md")
    assert card.data.to_dict() == {"tags": ["rlhf", name]}  # its base model is a folder here
    assert f"# {name} on synthetic\n" in card.text and "![Learning curves](curves.png)" in card.text
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    run = runs.folder / "runs" / name
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = re.findall(r"^\| `(.+)` \| (.+) \| (.+) \|$", card.text, flags=re.M)
    found = {name: (float(first), float(last)) for name, first, last in rows}
    for metric in METRICS[name]:
        values = [line[metric] for line in lines if metric in line]
        assert found[metric] == pytest.approx((values[0], values[-1]), rel=1e-3)
        assert values[0] != values[-1]
    assert not any(metric.startswith(("time/", "ppo/", "step")) for metric in found)
    (flags,) = re.findall(r"```json\n(.*?)\n```", card.text, flags=re.S)
    flags, record = json.loads(flags), json.loads((run / "args.json").read_text())
    assert flags["versions"] == record["versions"]
    assert flags["versions"]["torch"] == torch.__version__
    assert flags["versions"]["datasets"] == version("datasets")
    assert flags["lr"] == record["lr"]
    assert flags["task"]["temperature"] == record["task"]["temperature"]
    assert flags.keys() & {"command", "track", "output_dir", "run_name", "commit"} == set()


def test_the_build_of_torch_is_recorded_where_its_metadata_lack_it(tmp_path, monkeypatch):
    """The default wheel for Linux calls itself 2.13.0+cu130, its metadata 2.13.0."""
    monkeypatch.setattr(artifacts, "version", lambda package: "2.13.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    assert artifacts.describe_environment(tmp_path)["versions"]["torch"] == "2.13.0+cu130"


def test_the_card_has_no_secret_and_no_path_of_this_machine(api, home, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_s3cr3t")
    monkeypatch.setenv("WANDB_API_KEY", "wandb_s3cr3t")
    monkeypatch.setattr(sys, "argv", ["ppo.py", "argv_s3cr3t"])
    monkeypatch.setenv("HOME", str(home.parent))
    args = two_updates()
    changes = dict(
        query_dataset=str(home / "task/stories.txt"), gold_fn=tasks.TASKS["synthetic"].gold_fn
    )
    ppo.main(replace(args, task=replace(args.task, **changes)))
    card = Path("runs/a/model/README.md").read_text()
    assert "s3cr3t" not in card and str(ROOT) not in card
    assert '"data/synthetic/judge.py:gold_score"' in card and '"~/work/task/stories.txt"' in card
    assert "rgen" not in card  # nor is the user's name there in another spelling
    assert "argv_s3cr3t" in Path("runs/a/args.json").read_text()


@pytest.mark.parametrize("home", ["/", "/somebody"])
def test_a_base_model_of_the_hub_is_named_in_the_cards_header(tmp_path, home, monkeypatch):
    """Also in a container whose user has the root as home folder."""
    monkeypatch.setenv("HOME", home)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.5}\n')
    (tmp_path / "curves.png").write_bytes(b"")
    (tmp_path / "model").mkdir()
    task = replace(tasks.BOOKS, base_model="EleutherAI/pythia-160m")
    record = dict(processes=1, mixed_precision="no", device="cpu", python="3", versions={})
    (tmp_path / "args.json").write_text(json.dumps(record))
    artifacts.write_card(ppo.Args(task=task), tmp_path, "mine", tmp_path / "model")
    card = huggingface_hub.ModelCard.load(tmp_path / "model/README.md")
    header = {"base_model": "EleutherAI/pythia-160m", "tags": ["rlhf", "mine"]}
    assert card.data.to_dict() == header and "| `loss` | 1.5 | 1.5 |" in card.text


# -------------------------------------------------------------------------------------------------- the hub


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_missing_token_is_named_before_anything_is_loaded(name, home, no_weights):
    with pytest.raises(InputError, match="--push_to_hub me/it needs a token"):
        SCRIPTS[name].main(settings(name, push_to_hub="me/it"))
    assert not Path("runs").exists()


def test_the_private_repository_is_made_before_training_and_gets_the_weights_after_it(
    api, monkeypatch, capsys
):
    check = distributed.check_gradients
    spy = lambda *args: api.calls.append(("step",)) or check(*args)  # noqa: E731
    monkeypatch.setattr(distributed, "check_gradients", spy)
    ppo.main(two_updates())
    first, *steps, last = api.calls
    assert first == ("create_repo", "me/it", {"private": True}) and steps == [("step",)] * 8
    files = {"config.json", "model.safetensors", "tokenizer.json", "value_head.safetensors"}
    assert last[:2] == ("upload_folder", "me/it")
    assert files | {"README.md", "curves.png"} <= last[2]["files"]
    assert "https://hub/me/it" in capsys.readouterr().out


def test_a_public_repository_gets_nothing(api):
    api.public.add("me/it")
    with pytest.raises(InputError, match="--push_to_hub me/it: .* public"):
        ppo.main(two_updates())
    assert [call[0] for call in api.calls] == ["create_repo"] and not Path("runs").exists()


@pytest.mark.parametrize("error", [HTTPError("no connection"), LocalTokenNotFoundError("no token")])
def test_a_hub_that_fails_at_the_start_stops_the_run_before_training(error, api):
    api.down, api.error = "create_repo", error
    with pytest.raises(InputError, match=f"--push_to_hub me/it: {error}"):
        ppo.main(two_updates())
    assert not Path("runs").exists()


def test_a_hub_that_fails_at_the_end_keeps_the_weights(api, capsys):
    """hf_xet raises a RuntimeError."""
    api.down, api.error = "upload_folder", RuntimeError("Data processing error: CAS service error")
    ppo.main(two_updates())
    printed = capsys.readouterr().out
    assert "CAS service error" in printed and "`hf upload me/it runs/a/model`" in printed
    assert Path("models/synthetic/ppo/model.safetensors").is_file()
    api.error = HTTPError("no connection")
    assert "no connection" in hub.upload("me/it", Path("runs/a/model"))


def test_only_the_main_process_talks_to_the_hub(api):
    accelerator = SimpleNamespace(is_main_process=False)
    runs.Run(two_updates(), ppo.SCRIPT, 1, [], accelerator).close()
    assert api.calls == [] and not Path("runs").exists()


# --------------------------------------------------------------------------------------------- Weights & Biases


@pytest.mark.parametrize(("track", "project"), [(True, None), (True, "mine"), (False, None)])
def test_wandb_gets_the_run_only_with_track(track, project, tmp_path, monkeypatch):
    """Its project is W&B's own environment variable, or ours."""
    seen = []

    class Tracker:
        def __init__(self, project: str, **values: Any):
            seen.append((project, values["name"], values["config"]))

        def start(self) -> None:
            """Nothing."""

    monkeypatch.setattr(artifacts, "WandBTracker", Tracker)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    if project:
        monkeypatch.setenv("WANDB_PROJECT", project)
    artifacts.start_trackers(tmp_path, {"lr": 1}, track)
    assert seen == ([(project or "onefile-rlhf", tmp_path.name, {"lr": 1})] if track else [])
