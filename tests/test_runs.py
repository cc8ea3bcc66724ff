"""What a run writes and where: folders, links, copies of scripts, own tasks and rewards."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from accelerate import Accelerator
from conftest import read_metrics
from test_resume import ROOT, SCRIPTS, settings, write_files
from transformers import AutoModelForCausalLM

import ppo
import sft
import train_reward
from data import tasks
from machinery import artifacts, cli, functions, models, plots, rewards, runs
from machinery.cli import InputError, RunError

pytestmark = pytest.mark.usefixtures("accelerator")
ALL = pytest.mark.parametrize("script", SCRIPTS)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of `settings` in a folder to work in."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_files(folder)
    return folder


def two_steps(script: str, **changes: Any) -> Any:
    """Flags of a run of two updates or steps, without a name."""
    values: dict[str, Any] = dict(total_episodes=16, num_ppo_epochs=1, eval_every=100)
    if script == "sft":
        values = dict(num_epochs=1)
    elif script == "train_reward":
        values = dict(num_labels=4)
    return settings(script, **values | changes)


def new_run(script: Path = ppo.SCRIPT, **flags: Any) -> runs.Run:
    """A run's folder without a run."""
    run = runs.Run(two_steps("ppo", **flags), script, 1, [], Accelerator(cpu=True))
    run.close()
    return run


def save(run: runs.Run, seed: int = 0) -> None:
    """Save a random policy."""
    tokenizer, _ = models.load_tokenizer(run.args.task, 5)
    run.save(tiny.make_lm(seed=seed, vocab=tiny.WORDS), tokenizer)


def freeze_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is always the same second."""
    monkeypatch.setattr(artifacts.time, "strftime", lambda *_: "20260101-000000")


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


# -------------------------------------------------------------------------------------------- names and links


@pytest.mark.parametrize("name", ["ppo", "sft"])
def test_a_copy_of_a_script_has_runs_and_weights_of_its_own(name, home, monkeypatch, capsys):
    """`cp ppo.py mine.py`: the baseline's link and weights stay what they were."""
    copy = home / "mine.py"
    copy.write_text((ROOT / f"{name}.py").read_text() + "# mine\n")
    baseline, link = home / "runs/baseline/model", home / "models/synthetic" / name
    for folder in (baseline, link.parent):
        folder.mkdir(parents=True)
    (baseline / "weights").write_text("of the baseline")
    link.symlink_to("../../runs/baseline/model")

    spec = importlib.util.spec_from_file_location("mine", copy)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mine", module)
    spec.loader.exec_module(module)
    module.main(two_steps(name))

    (run,) = [path for path in (home / "runs").iterdir() if path.name != "baseline"]
    assert run.name.startswith("synthetic__mine__1__")
    assert (run / "mine.py").read_text() == copy.read_text() and not (run / f"{name}.py").exists()
    assert sorted(os.listdir(link.parent)) == sorted([name, "mine"])
    assert (link.parent / "mine").resolve() == (run / "model").resolve()
    policy = AutoModelForCausalLM.from_pretrained("models/synthetic/mine")
    assert policy.config.vocab_size == tiny.WORDS
    assert os.readlink(link) == "../../runs/baseline/model"
    assert tree(baseline) == {"weights": b"of the baseline"}
    printed = capsys.readouterr().out
    assert "models/synthetic/mine" in printed and run.name in printed


@pytest.mark.parametrize("script", ["ppo", "rloo"])
def test_a_much_too_high_lr_is_said_once_for_each_metric(script, home, capsys):
    flags = dict(total_episodes=40, eval_every=100, num_ppo_epochs=4, run_name="broken")
    SCRIPTS[script].main(two_steps(script, **flags, lr=0.03))
    warnings = [line for line in capsys.readouterr().out.splitlines() if "healthy" in line]
    for name in ("ppo/policy/approxkl_avg", "ppo/policy/clipfrac_avg"):
        (text,) = [line for line in warnings if line.startswith(f"{name} is ")]
        far = SCRIPTS[script].LIMITS[name][1]
        value = next(line[name] for line in read_metrics("broken") if line[name] > far)
        assert f"{value:.2g}" in text and "--lr" in text and "--num_ppo_epochs" in text
    assert len(warnings) == 2


@pytest.mark.parametrize("script", ["ppo", "rloo"])
def test_a_run_with_healthy_steps_has_no_warning(script, home, capsys):
    SCRIPTS[script].main(two_steps(script, lr=1e-4))
    assert "healthy" not in capsys.readouterr().out


def test_runs_of_one_second_have_a_folder_each(home, monkeypatch):
    """Two learning rates, one seed: own flags, source, metrics, weights; the link is the last one's."""
    freeze_clock(monkeypatch)
    before, moved = models.load_lm("task/model").state_dict(), []
    names = ["synthetic__ppo__1__20260101-000000", "synthetic__ppo__1__20260101-000000-2"]
    for lr in (1e-2, 0.0):
        ppo.main(two_steps("ppo", lr=lr))
    assert sorted(os.listdir("runs")) == names
    for name, lr in zip(names, (1e-2, 0.0), strict=True):
        run = Path("runs", name)
        assert json.loads((run / "args.json").read_text())["lr"] == lr
        assert (run / "ppo.py").read_bytes() == ppo.SCRIPT.read_bytes()
        assert [line["step"] for line in read_metrics(name)] == [0, 1]
        assert read_metrics(name)[0]["ppo/lr"] == lr
        after = AutoModelForCausalLM.from_pretrained(run / "model").state_dict()
        moved.append(max((after[key] - before[key]).abs().max().item() for key in before))
    assert moved[0] > moved[1] == 0
    assert Path("models/synthetic/ppo").resolve() == Path("runs", names[1], "model").resolve()


@pytest.mark.parametrize("run_name", [None, "one/name"])
def test_runs_that_begin_at_the_same_instant_never_share_a_folder(run_name, home, monkeypatch):
    """Sixteen at once; all but one of those with a --run_name are refused."""
    freeze_clock(monkeypatch)
    folders, refused, barrier = [], [], threading.Barrier(16)
    args = two_steps("ppo", run_name=run_name)

    def begin() -> None:
        barrier.wait()
        try:
            folders.append(artifacts.create_run_folder(args, ppo.SCRIPT))
        except InputError as error:
            refused.append(error)

    threads = [threading.Thread(target=begin) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == len(folders) == (1 if run_name else 16)
    assert len(folders) + len(refused) == 16


def test_the_link_moves_to_the_new_run_and_the_old_weights_stay(home):
    links = []
    for seed in (1, 2):
        run = new_run(seed=seed)
        save(run, seed)
        links.append(os.readlink("models/synthetic/ppo"))
        assert Path("models/synthetic/ppo").resolve() == (run.folder / "model").resolve()
    assert len(set(links)) == 2 and not any(Path(link).is_absolute() for link in links)
    assert all(Path("models/synthetic", link, "model.safetensors").is_file() for link in links)
    assert os.listdir("models/synthetic") == ["ppo"]
    shutil.rmtree(Path("models/synthetic", links[1]))  # a broken link is in nobody's way
    ppo.check(two_steps("ppo"), 1)


@pytest.mark.parametrize("linked", ["models", "runs"])
def test_models_or_runs_on_another_disk_by_a_link_work(linked, home, tmp_path):
    """A relative link is read from where it really is."""
    (tmp_path / "big/disk" / linked).mkdir(parents=True)
    Path(linked).symlink_to(tmp_path / "big/disk" / linked)
    save(new_run())
    assert Path("models/synthetic/ppo/model.safetensors").is_file()


# ---------------------------------------------------------------------------------- nothing is overwritten

IN_THE_WAY = {  # the file that is there → flags, what the error names; `SCRIPT` stands for the script
    "runs/mine/metrics.jsonl": (dict(run_name="mine"), "--run_name mine"),
    "out/thesis.tex": (dict(output_dir="out"), "--output_dir out"),
    "out": (dict(output_dir="out"), "--output_dir out"),
    "models/synthetic/SCRIPT/model.safetensors": ({}, "models/synthetic/SCRIPT"),
    "models/synthetic/SCRIPT": ({}, "models/synthetic/SCRIPT"),
}


@ALL
@pytest.mark.parametrize("there", IN_THE_WAY)
def test_what_is_in_the_way_is_refused_before_anything_loads(script, there, home, no_weights):
    flags, named = IN_THE_WAY[there]
    path = Path(there.replace("SCRIPT", script))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    before = tree(home)
    with pytest.raises(InputError, match=named.replace("SCRIPT", script)):
        SCRIPTS[script].main(two_steps(script, **flags))
    assert tree(home) == before


def test_an_output_folder_gets_the_weights_and_no_link_is_made(home):
    """A real folder where the link would be is then in nobody's way."""
    Path("models/synthetic/sft").mkdir(parents=True)
    Path("models/synthetic/sft/old").write_text("mine")
    sft.main(two_steps("sft", output_dir="deep/out", run_name="mine"))
    policy = AutoModelForCausalLM.from_pretrained("deep/out")
    assert policy.config.vocab_size == tiny.WORDS and os.listdir("deep") == ["out"]
    assert tree(Path("models")) == {"synthetic/sft/old": b"mine"}
    assert not Path("runs/mine/model").exists()


def test_a_file_that_appears_in_the_output_folder_during_the_run_survives(home):
    """Nor is the training lost: the weights are beside it."""
    run = new_run(output_dir="out")
    Path("out").mkdir()
    Path("out/thesis.tex").write_text("mine")
    with pytest.raises(RunError, match=r"out has other files.* (\.out\.part)") as caught:
        save(run)
    assert Path("out/thesis.tex").read_text() == "mine" and len(os.listdir("out")) == 1
    beside = str(caught.value).split()[-1]
    assert AutoModelForCausalLM.from_pretrained(beside).config.vocab_size == tiny.WORDS


def test_a_folder_beside_the_output_folder_survives(home):
    """Weights are written beside their final name, where something else may be."""
    Path("out.part").mkdir()
    Path("out.part/thesis.tex").write_text("mine")
    with suppress(InputError):
        ppo.check(two_steps("ppo", output_dir="out"), 1)
        save(new_run(output_dir="out"))
    assert Path("out.part/thesis.tex").read_text() == "mine"


def test_half_a_folder_of_a_killed_run_is_replaced(home):
    Path(".out.part").mkdir()
    Path(".out.part/model.safetensors").write_text("half")
    save(new_run(output_dir="out"))
    AutoModelForCausalLM.from_pretrained("out")
    assert not Path(".out.part").exists()


def test_a_temperature_near_0_is_no_fault_of_the_model(home):
    args = two_steps("ppo", run_name="cold")
    ppo.main(replace(args, task=replace(args.task, temperature=1e-4)))
    assert read_metrics("cold")[0]["objective/kl"] == 0


def test_an_installed_copy_has_every_module_and_every_file_of_the_tasks():
    """`pip install .`, then `python -m ppo` in any folder."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    modules = {path.stem for path in ROOT.glob("*.py")}
    assert set(setup["py-modules"]) == modules
    assert set(setup["packages"]) == {"data", "machinery"}
    files = {
        path for pattern in setup["package-data"]["data"] for path in (ROOT / "data").glob(pattern)
    }
    task = tasks.TASKS["synthetic"]
    named = [task.query_dataset, task.label_dataset, task.gold_fn.partition(":")[0]]
    named += [
        tasks.TASKS["synthetic_eos"].query_dataset,
        tasks.TASKS["synthetic_eos"].label_dataset,
    ]
    named += [tasks.TASKS["arithmetic"].query_dataset]
    named += [sft.PRESETS["arithmetic"]["query_dataset"]]
    assert {Path(name) for name in named} <= files
    assert set((tasks.SYNTHETIC / "model").iterdir()) <= files


# ------------------------------------------------------------------------------------- what a run remembers


def git(folder: Path, *words: str) -> str:
    """A git command in a repository that only the test knows."""
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false")
    options = dict(cwd=folder, check=True, capture_output=True, text=True, errors="replace")
    return subprocess.run(["git", *who, *words], **options).stdout


def test_a_run_keeps_its_source_and_what_is_not_committed(home, tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("utils.py", "ppo.py"):
        shutil.copy(ROOT / name, checkout)
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "one")):
        git(checkout, *words)
    monkeypatch.setattr(artifacts, "ROOT", checkout)

    clean = new_run(checkout / "ppo.py").folder
    record = json.loads((clean / "args.json").read_text())
    assert record["commit"] == git(checkout, "rev-parse", "HEAD").strip()
    assert record["changes"] is False and not (clean / "changes.diff").exists()

    with open(checkout / "utils.py", "a", encoding="latin-1", newline="\r\n") as file:
        file.write("# mine, naïve\n")  # not UTF-8, with the line ends of Windows
    changed = new_run(checkout / "ppo.py").folder
    assert json.loads((changed / "args.json").read_text())["changes"] is True
    assert (changed / "ppo.py").read_bytes() == (checkout / "ppo.py").read_bytes()
    git(checkout, "checkout", "-q", "utils.py")
    git(checkout, "apply", str((changed / "changes.diff").resolve()))  # makes the same state again
    assert (checkout / "utils.py").read_bytes().endswith("# mine, naïve\r\n".encode("latin-1"))


@pytest.mark.parametrize("missing", ["git", "repository"])
def test_a_run_needs_neither_git_nor_a_repository(missing, home, tmp_path, monkeypatch):
    if missing == "git":
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(artifacts, "ROOT", home)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    record = json.loads((new_run().folder / "args.json").read_text())
    assert record["commit"] is None and record["changes"] is False


# ---------------------------------------------------------------------------------------------------- tasks


def test_a_task_that_is_only_an_entry_of_TASKS_runs_in_all_four_scripts(home, monkeypatch):
    """No script has a preset for it; each finds what the one before it has made."""
    task = replace(settings("ppo").task, task="mine")
    flags = {
        "sft": "--num_heldout 4 --batch_size 4 --block_size 10",
        "train_reward": "--num_labels 12 --batch_size 4 --normalize_samples 4 --rollout_batch_size 4",
        "ppo": "--total_episodes 8 --batch_size 8 --eval_queries 4",
        "rloo": "--total_episodes 8 --batch_size 8 --rloo_k 2 --eval_queries 4",
    }
    for name, words in flags.items():
        base_model = "task/model" if name == "sft" else "models/mine/sft"
        monkeypatch.setitem(tasks.TASKS, "mine", replace(task, base_model=base_model))
        script = SCRIPTS[name]
        assert "mine" not in script.PRESETS
        script.main(cli.parse_args(script.Args, script.PRESETS, ["--task", "mine", *words.split()]))
        assert Path(f"models/mine/{name}").is_symlink()
        assert Path(f"models/mine/{name}/model.safetensors").is_file()
    assert len(os.listdir("runs")) == 4


@ALL
def test_25_every_task_passes_its_own_checks_on_1_2_4_and_8_processes(script, home):
    module = SCRIPTS[script]
    for name in tasks.TASKS:
        args = cli.parse_args(module.Args, module.PRESETS, ["--task", name])
        for processes in (1, 2, 4, 8):
            module.check(args, processes)


@ALL
def test_a_preset_is_of_a_task_that_exists_and_repeats_no_default(script):
    module = SCRIPTS[script]
    assert set(module.PRESETS) <= set(tasks.TASKS)
    for name, preset in module.PRESETS.items():
        default = module.Args(task=tasks.TASKS[name])
        sizes = {"micro_batch_tokens", "rollout_batch_size"}  # whose defaults depend on the device
        for field in set(preset) - sizes:
            owner = default.task if hasattr(default.task, field) else default
            assert getattr(owner, field) != preset[field], (name, field)


# ---------------------------------------------------------------------------------------------- own rewards

COMPOSED = """
def composed(queries, responses, scores):
    assert isinstance(scores, list) and all(isinstance(score, float) for score in scores)
    return [10 + 2 * score for score in scores]

def plain(queries, responses):
    return [1.0] * len(responses)
"""


@pytest.fixture
def reward_folder(home: Path) -> str:
    """A reward model of the tiny task's vocabulary, and functions in mine.py."""
    (home / "mine.py").write_text(COMPOSED)
    return tiny.write_reward(home / "reward")


def load_reward(**flags: Any) -> Any:
    """The reward of these flags, as ppo loads it, and the token ids."""
    args = two_steps("ppo", **flags)
    tokenizer, ids = models.load_tokenizer(args.task, 5)
    rest = tokenizer, ids, Accelerator(cpu=True)
    return rewards.load_reward(args, train_reward.RewardModel, *rest), ids


def test_a_reward_function_with_an_argument_scores_gets_the_reward_models(reward_folder):
    queries = tiny.make_contexts([8, 3, 1, 5], 8, vocab=tiny.WORDS)
    responses = tiny.make_contexts([5, 5, 5, 5], 5, seed=1, vocab=tiny.WORDS)
    responses[1, 1:], responses[2, 3:] = tiny.WORDS, tiny.WORDS  # padding
    model = rewards.load_reward_model(train_reward.RewardModel, reward_folder)
    alone = []
    for row in torch.cat([queries, responses], dim=1):
        with torch.no_grad():
            alone.append(model(row[row != tiny.WORDS][None]).item())
    alone = torch.tensor(alone)
    assert alone.std() > 0.1
    expected = {None: alone, "composed": 10 + 2 * alone, "plain": torch.ones(4)}
    for function, scores in expected.items():
        spec = function and f"mine.py:{function}"
        reward, ids = load_reward(reward_model=reward_folder, reward_fn=spec)
        assert ids.pad == tiny.WORDS
        torch.testing.assert_close(reward(queries, responses), scores, atol=1e-5, rtol=0)


def test_a_composed_reward_needs_the_reward_model_and_a_plain_one_does_not(reward_folder):
    with pytest.raises(InputError, match="no reward model in ./nowhere"):
        load_reward(reward_fn="mine.py:composed", reward_model="./nowhere")
    load_reward(reward_fn="mine.py:plain", reward_model="./nowhere")


class Scorer:
    """A reward that is an object."""

    def __call__(self, queries: list[str], responses: list[str], scores: list[float]) -> None:
        """Three arguments besides itself."""


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        (lambda queries, responses: 0, []),
        (lambda queries, responses, weight=2.0: 0, []),  # its default stands
        (lambda prompts, completions, *, answer, queries: 0, ["answer", "queries"]),
        (lambda queries, responses, answer=None, scores=None: 0, ["answer", "scores"]),
        (lambda queries, responses, **columns: 0, ["answer", "scores"]),  # the first two are given
        (Scorer(), ["scores"]),
        (max, []),  # has no signature
    ],
)
def test_arguments_after_the_first_two_are_given_by_name(function, taken):
    assert functions.names_taken(function, ["answer", "queries", "scores"]) == taken


def test_metrics_that_cannot_be_written_end_the_run_with_a_sentence(tmp_path):
    """Of a file that is not there yet, in a folder that somebody removed."""
    run = SimpleNamespace(folder=tmp_path / "gone")
    with pytest.raises(RunError, match="metrics.jsonl cannot be written: No such file"):
        runs.Run.append(run, "metrics.jsonl", [{"step": 0}])


def test_curves_have_no_empty_panels(tmp_path, monkeypatch):
    """A task without a true score logs no `objective/gold_score`."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    drawn, make_panels = [], plots.make_panels
    spy = lambda names, label: drawn.extend(names) or make_panels(names, label)  # noqa: E731
    monkeypatch.setattr(plots, "make_panels", spy)
    plots.plot_run(tmp_path, ["loss", "objective/gold_score"])
    assert drawn == ["loss"] and (tmp_path / "curves.png").is_file()
