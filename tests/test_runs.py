"""What a run writes and where, what ends it, its tracker; nothing is lost or overwritten."""

import json
import os
import pickle
import shutil
import subprocess
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
import wandb
from accelerate import Accelerator
from conftest import SCRIPTS, read_args, read_metrics, settings
from pydantic import ValidationError
from safetensors.torch import load_file
from test_resume import at_call, exit_code
from transformers import AutoModelForCausalLM

import ppo
import sft
from data import tasks
from machinery import checkpoints, distributed, runs, tokens

pytestmark = pytest.mark.usefixtures("accelerator")
RL = dict(total_episodes=16, num_ppo_epochs=1, eval_every=100)
SHORT = {"ppo": RL, "rloo": RL, "sft": dict(num_epochs=1), "train_reward": dict(num_labels=4)}
IN_THE_WAY = {  # the file that is there → flags, what the error names
    "runs/mine/metrics.jsonl": (dict(run_name="mine"), "--run_name mine"),
    "out/thesis.tex": (dict(output_dir="out"), "--output_dir out"),
    "models/synthetic/SCRIPT/model.safetensors": ({}, "models/synthetic/SCRIPT"),
}


def two_steps(script, **changes):
    return settings(script, **{**SHORT[script], **changes})


def new_run(**flags):
    """A run's folder without a run."""
    run = runs.Run(two_steps("ppo", **flags), 1, [], Accelerator(cpu=True))
    run.close()
    return run


def save(run, seed=0):
    tokenizer, _ = tokens.load_tokenizer(run.args.task, 5)
    run.save(tiny.make_lm(seed=seed, vocab=tiny.WORDS), tokenizer)


def tree(folder):
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_records_flags_versions_and_curves(name, runs):
    folder = runs.folder / "runs" / name
    record = read_args(folder)
    assert record["task"] == "synthetic" and record["lr"] == runs.args[name].lr
    assert record["versions"]["torch"] == torch.__version__
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    weights = runs.folder / runs.args[name].output_dir  # as readable for others as any file
    modes = {path.stat().st_mode for path in (folder / "args.json", *weights.iterdir())}
    assert len(modes) == 1 and (weights / "model.safetensors").is_file()


def test_a_wandb_that_fails_ends_the_run_before_training_and_names_a_way_on(home, monkeypatch):
    """Without a network W&B writes files; it is imported for --track only."""
    monkeypatch.setenv("WANDB_MODE", "no such mode")
    start = lambda: ppo.main(two_steps("ppo", run_name="ran", track=True))  # noqa: E731
    tiny.refuses(start, "--track; WANDB_MODE=offline ", "no such mode")
    assert not Path("runs/ran/metrics.jsonl").exists()
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    ppo.main(two_steps("ppo", run_name="offline", track=True))
    assert [row["step"] for row in read_metrics("offline")] == [0, 1]
    wandb.teardown()  # as at the end of the process
    (data,) = Path("runs/offline/wandb").glob("offline-run-*/*.wandb")
    assert b"objective/kl_coef" in data.read_bytes()
    paths = list(Path("runs/offline/wandb").glob("offline-run-*/files/media/table/*.json"))
    assert len(paths) == 2
    for path in paths:
        table = json.loads(path.read_text())
        assert table["columns"] == ["query", "response", "score", "kl", "total"]
        assert "Clara" in str(table["data"])


def test_a_resumed_run_continues_its_wandb_run(home, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert exit_code("sft", settings("sft", run_name="ran", save_every=4, track=True)) == 0
    wandb.teardown()
    time.sleep(1)  # the names of their folders are of seconds
    shutil.rmtree("runs/ran/model")
    assert exit_code("sft", "--resume runs/ran") == 0
    wandb.teardown()
    first, second = Path("runs/ran/wandb").glob("offline-run-*")
    ids = {path.name.split("-")[-1] for path in (first, second)}
    assert ids == {read_args("runs/ran")["wandb_id"]}


def test_the_next_command_finds_the_weights_or_is_not_printed(home, capsys):
    """It would need the task's flags that were changed, too."""
    plain = replace(tasks.TASKS["synthetic"], base_model=sft.PRESETS["synthetic"]["base_model"])
    changed = replace(plain, query_length=9)
    line = "next: python train_reward.py --task synthetic --base_model models/synthetic/sft"
    for task, out, count in ((plain, None, 1), (plain, "out", 0), (changed, None, 0)):
        args = replace(two_steps("sft"), task=task, output_dir=out)
        run = runs.Run(args, 1, ["loss"], Accelerator(cpu=True))
        run.log(0, {"loss": 1.0})
        run.finish(then="train_reward", flag="base_model")
        assert capsys.readouterr().out.count(line) == count


def test_a_copy_of_a_script_has_runs_and_weights_of_its_own(home, monkeypatch):
    """`cp ppo.py mine.py`: the baseline's link stays what it was."""
    copy = home / "mine.py"
    copy.write_text((runs.ROOT / "ppo.py").read_text() + "# mine\n")
    monkeypatch.setitem(SCRIPTS, "ppo", tiny.load_script(copy))
    SCRIPTS["ppo"].main(two_steps("ppo"))
    (run,) = Path("runs").iterdir()
    assert run.name.startswith("synthetic__mine__1__")
    assert (run / "mine.py").read_text() == copy.read_text() and not (run / "ppo.py").exists()
    assert os.listdir("models/synthetic") == ["mine"]
    assert Path("models/synthetic/mine").resolve() == (run / "model").resolve()


def test_two_runs_never_share_a_folder(home):
    first, second = new_run(), new_run()
    assert first.folder != second.folder
    new_run(run_name="one/name")
    tiny.refuses(lambda: new_run(run_name="one/name"), "--run_name one/name")


def test_the_link_moves_to_the_new_run_and_the_old_weights_stay(home, tmp_path):
    """Also where models/ is a link to another disk."""
    (tmp_path / "big/disk").mkdir(parents=True)
    Path("models").symlink_to(tmp_path / "big/disk")
    folders = []
    for seed in (1, 2):
        run = new_run(seed=seed)
        save(run, seed)
        folders.append(run.folder / "model")
        assert read_args(run.folder)["seed"] == seed
        assert not Path(os.readlink("models/synthetic/ppo")).is_absolute()
        assert Path("models/synthetic/ppo").resolve() == folders[-1].resolve()
    assert tree(folders[0]) != tree(folders[1])
    shutil.rmtree(folders[-1])  # a broken link is in nobody's way
    ppo.check(two_steps("ppo"), 1)


def test_two_runs_that_end_together_leave_a_link(home, monkeypatch):
    one, two, link = (Path(x) for x in ("runs/one/model", "runs/two/model", "models/x/ppo"))
    for folder in (one, two):
        folder.mkdir(parents=True)

    def other(function, *args):
        runs.replace_link(link, two)
        function(*args)

    at_call(monkeypatch, Path, "symlink_to", 1, other)
    monkeypatch.setattr("os.getpid", iter([1, 2]).__next__)  # other processes
    runs.replace_link(link, one)
    assert link.is_symlink() and link.resolve() == one.resolve()
    assert os.listdir(link.parent) == ["ppo"]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("there", IN_THE_WAY)
def test_what_is_in_the_way_is_refused_before_anything_loads(script, there, home, no_weights):
    flags, named = IN_THE_WAY[there]
    path = Path(there.replace("SCRIPT", script))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    before = tree(home)
    start = lambda: SCRIPTS[script].main(two_steps(script, **flags))  # noqa: E731
    tiny.refuses(start, named.replace("SCRIPT", script))
    assert tree(home) == before


def test_an_output_folder_gets_the_weights_and_no_link_is_made(home):
    """A real folder where the link would be is then in nobody's way."""
    Path("models/synthetic/sft").mkdir(parents=True)
    Path("models/synthetic/sft/old").write_text("mine")
    sft.main(two_steps("sft", output_dir="deep/out", run_name="mine"))
    assert Path("deep/out/model.safetensors").is_file() and os.listdir("deep") == ["out"]
    assert tree(Path("models")) == {"synthetic/sft/old": b"mine"}
    assert not Path("runs/mine/model").exists()


def test_files_in_the_output_folder_or_beside_it_survive(home):
    """Nor is the training lost: the weights are beside it. Half a folder of a kill is replaced."""
    run = new_run(output_dir="out")
    for name in ("out", "out.part", ".out.part"):
        Path(name).mkdir()
        Path(name, "thesis.tex").write_text("mine")
    with pytest.raises(OSError, match=r"\.out\.part"):
        save(run)
    assert tree(Path("out")) == tree(Path("out.part")) == {"thesis.tex": b"mine"}
    assert AutoModelForCausalLM.from_pretrained(".out.part").config.vocab_size == tiny.WORDS
    shutil.rmtree("out")
    save(run)
    AutoModelForCausalLM.from_pretrained("out")
    assert not Path("out/thesis.tex").exists() and not Path(".out.part").exists()


def test_a_temperature_near_0_is_no_fault_of_the_model(home):
    args = two_steps("ppo", run_name="cold")
    ppo.main(replace(args, task=replace(args.task, temperature=1e-4)))
    assert read_metrics("cold")[0]["objective/kl"] == 0


def test_an_installed_copy_has_every_module_and_every_file_of_the_tasks():
    """`pip install .`, then `python -m ppo` in any folder."""
    setup = tomllib.loads((runs.ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(setup["py-modules"]) == {path.stem for path in runs.ROOT.glob("*.py")}
    assert set(setup["packages"]) == {"data", "machinery", "tools"}
    patterns = setup["package-data"]["data"]
    files = set()
    for pattern in patterns:
        files.update((runs.ROOT / "data").glob(pattern))
    needed = {sft.PRESETS["arithmetic"]["query_dataset"], *(tasks.SYNTHETIC / "model").iterdir()}
    for name in ("synthetic", "synthetic_eos", "arithmetic"):
        task = tasks.TASKS[name]
        needed.update([task.query_dataset, task.label_dataset or task.query_dataset])
    needed.add(tasks.TASKS["synthetic"].gold_fn.partition(":")[0])
    assert {Path(name) for name in needed} <= files


def make_commit(folder):
    """Commit all files of a folder in a new repository."""
    git = "git -c user.name=me -c user.email=me@here -c commit.gpgsign=false"
    command = f"git init -q && git add . && {git} commit -qm one && git rev-parse HEAD"
    options = dict(cwd=folder, check=True, capture_output=True, text=True)
    return subprocess.run(command, shell=True, **options).stdout.strip()


def test_a_run_keeps_its_source_and_the_commit(home, tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("utils.py", "ppo.py"):
        shutil.copy(runs.ROOT / name, checkout)
    monkeypatch.setattr(runs, "ROOT", checkout)

    commit = make_commit(checkout)
    monkeypatch.setitem(SCRIPTS, "ppo", tiny.load_script(checkout / "ppo.py"))
    assert read_args(new_run().folder)["commit"] == commit
    with open(checkout / "utils.py", "a") as file:
        file.write("# mine\n")
    changed = new_run().folder
    assert (changed / "ppo.py").read_bytes() == (checkout / "ppo.py").read_bytes()
    assert read_args(changed)["commit"] == f"{commit}-dirty"


@pytest.mark.parametrize("missing", ["git", "own repository"])
def test_a_run_needs_neither_git_nor_a_repository(missing, home, tmp_path, monkeypatch):
    """Nor is the commit of a repository around the project's folder recorded, or of GIT_DIR."""
    monkeypatch.setattr(runs, "ROOT", home)
    if missing == "git":
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    else:
        make_commit(tmp_path)
        monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert read_args(new_run().folder)["commit"] is None


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/tmp/x", "."])
def test_a_run_stays_inside_of_runs(name):
    with pytest.raises(ValidationError, match="run_name"):
        two_steps("ppo", run_name=name)


def test_a_restart_by_torchrun_is_not_taken_for_a_new_run(home, no_weights, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    tiny.refuses(lambda: ppo.check(two_steps("ppo"), 1), "--run_name NAME --resume auto")
    ppo.check(two_steps("ppo", run_name="ran", resume="auto"), 1)


def sentence(capsys, *words):
    """Assert that the last sentence on standard error has all words."""
    err = capsys.readouterr().err
    last = err.partition("script.py: error")[2]
    assert [word for word in words if word not in last] == [], err


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_non_finite_gradient_stops_the_run_before_the_step(script, home, capsys, monkeypatch):
    """After steps of size 10^6, which are finite themselves."""
    check, seen = distributed.check_gradients, []

    def spy(optimizer, *args):
        params = optimizer.param_groups[0]["params"]
        seen.append((params, [p.detach().clone() for p in params]))
        check(optimizer, *args)

    monkeypatch.setattr(distributed, "check_gradients", spy)
    assert exit_code(script, settings(script, lr=1e6)) == 2
    sentence(capsys, "the norm of the gradient is", "the step was not taken", "--lr")
    params, before = seen[-1]
    assert len(seen) > 1 and all(p.isfinite().all() for p in before)
    assert all(map(torch.equal, params, before))


def test_a_policy_whose_logits_are_not_finite_stops_the_run_too(home, capsys):
    """It diverged in the last step of an update, so that sampling meets it first."""
    assert exit_code("ppo", settings("ppo", lr=1e6, num_minibatches=1, num_ppo_epochs=1)) == 2
    sentence(capsys, "--lr")


def test_a_model_with_its_own_code_is_refused_and_nobody_is_asked(home, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    Path("task/model/mine.py").write_text("import os\nos.mkdir('exploded')\n")
    path = Path("task/model/config.json")
    auto = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}
    config = json.loads(path.read_text()) | dict(model_type="mine", auto_map=auto)
    path.write_text(json.dumps(config))
    assert exit_code("sft", settings("sft")) == 2
    sentence(capsys, "--base_model task/model: ", "code of its own")
    assert not Path("exploded").exists()


def weights(step):
    """The policy after so many updates, from a checkpoint."""
    state = load_file(f"runs/ran/checkpoints/{step:08}.safetensors")
    return {key.removeprefix("model/lm."): x for key, x in state.items() if "model/lm." in key}


@pytest.mark.parametrize("script", ["ppo", "rloo"])
def test_kept_policies_are_those_after_that_many_updates(script, home, monkeypatch):
    monkeypatch.setattr(checkpoints, "KEPT", 100)
    flags = dict(run_name="ran", save_every=1, keep_every=2, eval_every=2, num_ppo_epochs=1)
    assert exit_code(script, settings(script, **flags)) == 0
    final = AutoModelForCausalLM.from_pretrained("runs/ran/model").state_dict()
    for step, expected in ((2, weights(2)), (4, weights(4)), (6, final)):
        folder = Path(f"runs/ran/keep_{step}")
        kept = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert expected and all(x.equal(kept[name]) for name, x in expected.items())
        assert (folder / "tokenizer.json").exists()
    assert len(list(Path("runs/ran").glob("keep_*"))) == 3


class Bomb:
    """Unpickling it makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_no_pickle_is_opened(home, capsys):
    """Beside the weights, as data, and in place of the weights."""
    bomb = pickle.dumps(Bomb())
    for name in ("pytorch_model.bin", "optimizer.pt", "tokenizer.pkl"):
        Path("task/model", name).write_bytes(bomb)
    assert exit_code("sft", settings("sft")) == 0
    Path("rows.pkl").write_bytes(bomb)
    args = settings("sft", run_name="other")
    assert exit_code("sft", replace(args, task=replace(args.task, query_dataset="rows.pkl"))) == 2
    sentence(capsys, "--query_dataset rows.pkl")
    Path("task/model/model.safetensors").unlink()
    assert exit_code("ppo", settings("ppo", run_name="ppo")) == 2
    sentence(capsys, "task/model", "safetensors")
    assert not Path("exploded").exists() and pickle.loads(bomb) is None  # it works
    assert Path("exploded").exists()
