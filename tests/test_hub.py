"""The card beside the weights, the hub and W&B; a stand-in of the hub's API, since tests have no network."""

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import tiny
import torch
from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError
from transformers import AutoModelForCausalLM

import ppo
import records
import rloo
import sft
import tasks
import train_reward
import utils

SCRIPTS = {"ppo": ppo, "rloo": rloo, "train_reward": train_reward, "sft": sft}
REWARD = "def reward(queries, responses):\n    return [len(response) / 10 for response in responses]\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a reward that needs no model, and nobody logged in."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    Path("lengths.py").write_text(REWARD)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    return tmp_path / "home"


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Somebody is logged in; what is asked of the API is in `calls`. `public`: the repositories that everybody reads;
    `down`: the function that fails, and `error` how."""
    stand_in = SimpleNamespace(calls=[], public=set(), down=None, error=HTTPError("no connection"))

    def call(function, repo_id, **settings):
        stand_in.calls.append((function, repo_id, settings))
        if stand_in.down == function:
            raise stand_in.error

    def create_repo(repo_id, *, private, exist_ok):
        call("create_repo", repo_id, private=private)
        assert exist_ok
        if not private:
            stand_in.public.add(repo_id)

    def model_info(repo_id):
        return SimpleNamespace(private=repo_id not in stand_in.public)

    def upload_folder(*, repo_id, folder_path):
        call("upload_folder", repo_id, files=sorted(path.name for path in Path(folder_path).iterdir()))
        return f"https://hub/{repo_id}"

    for function in (create_repo, model_info, upload_folder):
        monkeypatch.setattr(huggingface_hub, function.__name__, function)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
    return stand_in


def arguments(task: tasks.Task, **shown) -> ppo.Args:
    """Two updates of ppo."""
    settings = dict(total_episodes=16, reward_fn="lengths.py:reward", run_name="a", lr=1e-2, eval_every=1)
    return tiny.make_args(task, **settings, shown=tasks.Shown(**shown))


# ------------------------------------------------------------------------------------------------------------ the card


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_card_says_task_scores_arguments_and_versions(name, runs):
    folder = runs.folder / {"train_reward": "reward"}.get(name, name)
    card = huggingface_hub.ModelCard.load(folder / "README.md")
    assert card.data.to_dict() == {"tags": ["rlhf", name]}  # its base model is a folder here
    assert f"# {name} on synthetic\n" in card.text and "![Learning curves](curves.png)" in card.text
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    lines = [json.loads(line) for line in (runs.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    rows = {row[0]: row[1:] for row in re.findall(r"^\| `(.+)` \| (.+) \| (.+) \|$", card.text, flags=re.M)}
    for metric in {"ppo": ("objective/scores", "eval/kl"), "rloo": ("objective/kl", "eval/scores")}.get(
        name, ("loss",)
    ):
        values = [line[metric] for line in lines if metric in line]
        assert [float(x) for x in rows[metric]] == pytest.approx([values[0], values[-1]], rel=1e-3)
        assert values[0] != values[-1]
    assert not any(metric.startswith(("time/", "ppo/", "step")) for metric in rows)
    (setting,) = re.findall(r"```json\n(.*?)\n```", card.text, flags=re.S)
    setting, record = json.loads(setting), json.loads((runs.folder / "runs" / name / "args.json").read_text())
    assert setting["versions"] == record["versions"] and setting["versions"]["torch"] == torch.__version__
    assert setting["lr"] == record["lr"] and setting["task"]["temperature"] == record["task"]["temperature"]
    assert set(setting) & {"command", "inputs", "shown", "output_dir", "run_name", "commit"} == set()


def test_the_card_holds_no_secret_and_no_path_of_the_project_or_of_its_user(task, hub, home, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "wandb_secret")
    monkeypatch.setattr(sys, "argv", ["ppo.py", "argv_secret"])
    monkeypatch.setenv("HOME", str(home.parent))
    ppo.main(
        replace(arguments(task, push_to_hub="me/it"), task=replace(task, gold_fn=tasks.TASKS["synthetic"].gold_fn))
    )
    card = Path("runs/a/model/README.md").read_text()
    assert "secret" not in card and str(utils.ROOT) not in card and str(home.parent) not in card
    assert '"data/synthetic/judge.py:gold_score"' in card and '"~/task/stories.txt"' in card
    assert "argv_secret" in Path("runs/a/args.json").read_text()


@pytest.mark.parametrize("home", ["/", "/somebody"])
def test_a_base_model_of_the_hub_is_named_in_the_cards_header(tmp_path, task, home, monkeypatch):
    """In a container whose user has the root for a home, too."""
    monkeypatch.setenv("HOME", home)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.5}\n')
    (tmp_path / "curves.png").write_bytes(b"")
    (tmp_path / "model").mkdir()
    args = ppo.Args(task=replace(task, base_model="EleutherAI/pythia-160m"))
    record = asdict(args) | dict(processes=1, mixed_precision="no", device="cpu", python="3", versions={})
    (tmp_path / "args.json").write_text(json.dumps(record))
    records.write_card(args, tmp_path, "mine", tmp_path / "model")
    card = huggingface_hub.ModelCard.load(tmp_path / "model/README.md")
    assert card.data.to_dict() == {"base_model": "EleutherAI/pythia-160m", "tags": ["rlhf", "mine"]}
    assert "| `loss` | 1.5 | 1.5 |" in card.text


# ------------------------------------------------------------------------------------------------------------- the hub


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_missing_token_is_named_before_anything_is_loaded(name, task, home, no_weights):
    script = SCRIPTS[name]
    args = script.Args(task=task, shown=tasks.Shown(push_to_hub="me/it"))
    with pytest.raises(tasks.InputError, match="--push_to_hub me/it needs a token that may write; run `hf auth login`"):
        script.main(args)
    assert not Path("runs").exists()


@pytest.mark.parametrize("public", [False, True])
def test_the_repository_is_made_before_training_and_gets_the_weights_behind_it(public, task, hub, monkeypatch, capsys):
    step = ppo.train_step
    monkeypatch.setattr(ppo, "train_step", lambda *args: hub.calls.append(("step",)) or step(*args))
    ppo.main(arguments(task, push_to_hub="me/it", push_public=public))
    assert hub.calls[0] == ("create_repo", "me/it", {"private": not public})
    assert hub.calls[1:-1] == [("step",)] * 8  # 2 updates × 2 epochs × 2 minibatches
    files = {"config.json", "model.safetensors", "tokenizer.json", "value_head.safetensors", "README.md", "curves.png"}
    assert hub.calls[-1][:2] == ("upload_folder", "me/it") and files <= set(hub.calls[-1][2]["files"])
    assert "on the hub: https://hub/me/it" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained("runs/a/model").config.vocab_size == tiny.WORDS


def test_a_public_repository_gets_nothing_unasked(task, hub):
    hub.public.add("me/it")
    with pytest.raises(tasks.InputError, match="me/it: it is there already and public; add --push_public"):
        ppo.main(arguments(task, push_to_hub="me/it"))
    assert [call[0] for call in hub.calls] == ["create_repo"] and not Path("runs").exists()


def test_a_hub_that_is_down_stops_a_run_before_training_and_never_behind_it(task, hub, capsys):
    hub.down = "create_repo"
    with pytest.raises(tasks.InputError, match="--push_to_hub me/it: no connection"):
        ppo.main(arguments(task, push_to_hub="me/it"))
    assert not Path("runs").exists()
    hub.down = "upload_folder"
    ppo.main(arguments(task, push_to_hub="me/it"))
    assert (
        "not on the hub (HTTPError: no connection); `hf upload me/it runs/a/model` sends it later"
        in capsys.readouterr().out
    )
    assert Path("models/synthetic/ppo/model.safetensors").is_file()
    hub.error = RuntimeError("Data processing error: CAS service error")  # as hf_xet raises
    assert "not on the hub (RuntimeError: Data" in records.push("me/it", Path("runs/a/model"))


def test_what_the_library_raises_without_a_token_is_caught_too(monkeypatch):
    monkeypatch.setattr(
        huggingface_hub, "create_repo", lambda *a, **k: (_ for _ in ()).throw(LocalTokenNotFoundError("x"))
    )
    with pytest.raises(tasks.InputError, match="--push_to_hub me/it: x"):
        records.make_repository("me/it", public=False)


def test_only_the_main_process_talks_to_the_hub(task, hub):
    accelerator = SimpleNamespace(is_main_process=False)
    records.Run(arguments(task, push_to_hub="me/it"), ppo.SCRIPT, 1, [], accelerator).close()
    assert hub.calls == []


# -------------------------------------------------------------------------------------------------------------- W&B


def test_project_and_entity_reach_wandb(tmp_path, monkeypatch):
    seen = []

    class Tracker:
        name = "wandb"

        def __init__(self, project, **settings):
            seen.append((project, settings["entity"], settings["name"]))

        def start(self):
            pass

    monkeypatch.setattr(records, "WandBTracker", Tracker)
    for shown in (
        tasks.Shown(track=True),
        tasks.Shown(track=True, wandb_project="mine", wandb_entity="us"),
        tasks.Shown(),
    ):
        records.start_trackers(tmp_path, {}, shown)
    assert seen == [("onefile-rlhf", None, tmp_path.name), ("mine", "us", tmp_path.name)]


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        (dict(wandb_project="mine"), "--wandb_project changes nothing without --track"),
        (dict(wandb_entity="us"), "--wandb_entity changes nothing without --track"),
        (dict(push_public=True), "--push_public changes nothing without --push_to_hub"),
    ],
)
def test_a_flag_that_would_change_nothing_is_refused(shown, message, task, home):
    with pytest.raises(tasks.InputError, match=message):
        ppo.check(arguments(task, **shown), 1)


def test_the_flags_are_those_of_every_script():
    argv = ["--track", "--wandb-project", "mine", "--wandb_entity", "us", "--push_to_hub", "me/it", "--push_public"]
    for script in SCRIPTS.values():
        args = tasks.parse_args(script.Args, script.PRESETS, argv)
        assert args.shown == tasks.Shown(True, "mine", "us", "me/it", True)


# ------------------------------------------------------------------------------------------------------------- README


def test_readmes_snippet_continues_a_prompt_before_and_after(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("sft", "ppo")):
        tiny.write_model(tmp_path / "models/synthetic" / name, seed=i)
    (snippet,) = re.findall(
        r"^```python\n(from transformers.*?)^```", (utils.ROOT / "README.md").read_text(), flags=re.M | re.S
    )
    exec(snippet, {})
    before, after = (line for line in capsys.readouterr().out.splitlines() if line.startswith("models/"))
    for line, name in ((before, "sft"), (after, "ppo")):
        assert line.startswith(f"models/synthetic/{name}: Emma worked near the hill in the morning.")
    assert before.split("morning.")[1] != after.split("morning.")[1]
