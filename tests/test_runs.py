"""What a run leaves behind and where: folders, links, copies of scripts, sweeps, tasks and rewards of one's own."""

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from conftest import read_metrics
from transformers import AutoModelForCausalLM

import ppo
import records
import rloo
import sft
import tasks
import train_reward
import utils

pytestmark = pytest.mark.usefixtures("accelerator")
SCRIPTS = {"ppo": ppo, "rloo": rloo, "train_reward": train_reward, "sft": sft}
LENGTHS = "def reward(queries, responses):\n    return [len(response) / 10 for response in responses]\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a reward that needs no model."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "lengths.py").write_text(LENGTHS)
    return folder


def arguments(script: str, task: tasks.Task, **changes):
    """Settings of a run of a few steps; no folder is named."""
    if script == "sft":
        values = dict(num_heldout=4, batch_size=4, block_size=10, lr=1e-3)
    elif script == "train_reward":
        values = dict(num_labels=12, batch_size=4, normalize_samples=4, rollout_batch_size=4, lr=1e-3)
    else:
        values = dict(total_episodes=16, batch_size=8, num_ppo_epochs=1, eval_queries=4, reward_fn="lengths.py:reward")
    return SCRIPTS[script].Args(task=task, **values | changes)


def freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is always the same second."""
    monkeypatch.setattr(utils.time, "strftime", lambda *args: "20260101-000000")


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def new_run(args, script: Path = ppo.SCRIPT) -> records.Run:
    """A run's folder without a run."""
    return records.Run(args, script, 1, [], utils.Accelerator(cpu=True))


# ------------------------------------------------------------------------------------------------------------ copies


@pytest.mark.parametrize("name", ["ppo", "sft"])
def test_a_copy_of_a_script_has_runs_and_weights_of_its_own(name, task, home):
    """`cp ppo.py mine.py`, a line changed: the baseline's link and weights stay what they were."""
    for module in ("utils.py", "tasks.py", "records.py", "packing.py"):
        shutil.copy(utils.ROOT / module, home)
    copy = home / "mine.py"
    copy.write_text((utils.ROOT / f"{name}.py").read_text().replace("PANELS = [", 'PANELS = [\n    "ppo/lr",', 1))
    baseline = home / "runs/baseline/model"
    baseline.mkdir(parents=True)
    (baseline / "weights").write_text("of the baseline")
    link = home / "models/sentiment" / name
    link.parent.mkdir(parents=True)
    link.symlink_to("../../runs/baseline/model")

    flags = dict(base_model=task.base_model, query_dataset=task.query_dataset, query_length=8, response_length=5)
    flags |= dict(truncate_after=2, batch_size=8, micro_batch_tokens=48)
    if name == "ppo":
        flags |= dict(total_episodes=8, reward_fn="lengths.py:reward", num_ppo_epochs=1, eval_queries=4)
    else:
        flags |= dict(block_size=10, num_heldout=4)
    command = [sys.executable, "mine.py", "--task", "sentiment"]
    command += [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr

    (run,) = [path for path in (home / "runs").iterdir() if path.name != "baseline"]
    assert run.name.startswith("sentiment__mine__1__")
    assert (run / "mine.py").read_text() == copy.read_text() and not (run / f"{name}.py").exists()
    assert sorted(os.listdir(link.parent)) == sorted([name, "mine"])
    assert (link.parent / "mine").resolve() == (run / "model").resolve()
    assert AutoModelForCausalLM.from_pretrained(home / "models/sentiment/mine").config.vocab_size == tiny.WORDS
    assert os.readlink(link) == "../../runs/baseline/model" and tree(baseline) == {"weights": b"of the baseline"}
    assert "models/sentiment/mine" in done.stdout and str(run.name) in done.stdout


# -------------------------------------------------------------------------------------------- two runs, one folder each


def test_a_sweep_within_one_second_keeps_every_run(task, home, monkeypatch):
    """Three learning rates, one seed: three folders with settings, metrics and weights; the link is the last one's."""
    freeze(monkeypatch)
    before = utils.load_lm(task.base_model).state_dict()
    for lr in (1e-2, 1e-3, 0.0):
        ppo.main(arguments("ppo", task, lr=lr))
    names = [f"synthetic__ppo__1__20260101-000000{end}" for end in ("", "-2", "-3")]
    assert sorted(os.listdir("runs")) == sorted(names)
    moved = []
    for name, lr in zip(names, (1e-2, 1e-3, 0.0), strict=True):
        assert json.loads((home / "runs" / name / "args.json").read_text())["lr"] == lr
        assert [line["step"] for line in read_metrics(name)] == [0, 1]
        assert read_metrics(name)[0]["ppo/lr"] == lr
        after = AutoModelForCausalLM.from_pretrained(f"runs/{name}/model").state_dict()
        moved.append(max((after[key] - before[key]).abs().max().item() for key in before))
    assert moved[0] > moved[1] > moved[2] == 0
    assert Path("models/synthetic/ppo").resolve() == (home / "runs" / names[2] / "model").resolve()


def test_runs_that_begin_at_the_same_instant_never_share_a_folder(task, home):
    """Sixteen at once, of one name."""
    folders, barrier = [], threading.Barrier(16)

    def begin():
        barrier.wait()
        folders.append(records.new_folder(Path("runs/one__name")))

    threads = [threading.Thread(target=begin) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 16 == len(os.listdir("runs"))


def test_two_runs_of_one_second_have_their_own_settings_and_source(task, home, monkeypatch):
    freeze(monkeypatch)
    first, second = new_run(tiny.make_args(task, lr=1e-2)), new_run(tiny.make_args(task, lr=1e-4))
    assert first.folder != second.folder
    for run, lr in ((first, 1e-2), (second, 1e-4)):
        assert json.loads((run.folder / "args.json").read_text())["lr"] == lr
        assert (run.folder / "ppo.py").read_bytes() == ppo.SCRIPT.read_bytes()


# ------------------------------------------------------------------------------- nothing that is there is overwritten


IN_THE_WAY = {  # the file that is there → flags, what the error names; `SCRIPT` stands for the script
    "runs/mine/metrics.jsonl": (dict(run_name="mine"), "runs/mine"),
    "out/thesis.tex": (dict(output_dir="out"), "output_dir=out"),
    "out": (dict(output_dir="out"), "output_dir=out"),
    "models/synthetic/SCRIPT/model.safetensors": ({}, "models/synthetic/SCRIPT"),
    "models/synthetic/SCRIPT": ({}, "models/synthetic/SCRIPT"),
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("there", IN_THE_WAY)
def test_what_is_in_the_way_is_refused_before_anything_loads_and_stays(
    script, there, task, home, monkeypatch, no_weights
):
    flags, named = IN_THE_WAY[there]
    path = Path(there.replace("SCRIPT", script))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    before = tree(home)
    monkeypatch.setattr(utils, "load_rows", lambda *a, **k: pytest.fail("rows were loaded"))
    with pytest.raises(utils.InputError) as caught:
        SCRIPTS[script].main(arguments(script, task, **flags))
    assert named.replace("SCRIPT", script) in str(caught.value)
    assert tree(home) == before


@pytest.mark.parametrize("exists", [True, False])
def test_an_output_folder_gets_the_weights_and_no_link_is_made(exists, task, home):
    """An empty folder is as good as none; a real folder where the link would be is then in nobody's way."""
    if exists:
        Path("deep/out").mkdir(parents=True)
    Path("models/synthetic/sft").mkdir(parents=True)
    Path("models/synthetic/sft/old").write_text("mine")
    sft.main(arguments("sft", task, output_dir="deep/out", run_name="mine"))
    assert AutoModelForCausalLM.from_pretrained("deep/out").config.vocab_size == tiny.WORDS
    assert not Path("models/synthetic/sft").is_symlink() and tree(Path("models")) == {"synthetic/sft/old": b"mine"}
    assert not Path("runs/mine/model").exists() and os.listdir("deep") == ["out"]


def test_a_file_that_appears_in_the_output_folder_during_the_run_survives(task, home):
    """Weights are written beside their final name and renamed; the rename removes nothing."""
    run = new_run(tiny.make_args(task, output_dir="out"))
    Path("out").mkdir()
    Path("out/thesis.tex").write_text("mine")
    tokenizer = utils.load_tokenizer(task, 5)[0]
    with pytest.raises(tasks.RunError, match=r"out holds other files than this run made, which are in out\.tmp\d+"):
        run.save(utils.load_lm(task.base_model), tokenizer)
    assert Path("out/thesis.tex").read_text() == "mine"
    (beside,) = [path for path in home.iterdir() if path.name.startswith("out.tmp")]
    assert AutoModelForCausalLM.from_pretrained(beside).config.vocab_size == tiny.WORDS  # nor is the training lost


def test_the_link_moves_to_the_new_run_and_the_old_ones_weights_stay(task, home):
    tokenizer, links = utils.load_tokenizer(task, 5)[0], []
    for seed in (1, 2):
        run = new_run(tiny.make_args(task, seed=seed))
        run.save(tiny.make_lm(seed=seed, vocab=tiny.WORDS), tokenizer)
        links.append(os.readlink("models/synthetic/ppo"))
        assert Path("models/synthetic/ppo").resolve() == (run.folder / "model").resolve()
    assert len(set(links)) == 2 and not any(Path(link).is_absolute() for link in links)
    assert all((Path("models/synthetic") / link / "model.safetensors").is_file() for link in links)
    assert os.listdir("models/synthetic") == ["ppo"]
    shutil.rmtree(Path("models/synthetic") / links[1])  # a link to nothing is in nobody's way
    records.check_folders(tiny.make_args(task), ppo.SCRIPT)


@pytest.mark.parametrize("linked", ["models", "runs"])
def test_models_or_runs_on_another_disk_by_a_link_work(linked, task, home, tmp_path):
    """A relative link is read from where it really lies."""
    (tmp_path / "big/disk" / linked).mkdir(parents=True)
    Path(linked).symlink_to(tmp_path / "big/disk" / linked)
    run = new_run(tiny.make_args(task))
    run.save(tiny.make_lm(vocab=tiny.WORDS), utils.load_tokenizer(task, 5)[0])
    assert (Path("models/synthetic/ppo") / "model.safetensors").is_file()


# ----------------------------------------------------------------------------------------------- what a run remembers


def git(folder: Path, *words: str) -> str:
    """A git command in a repository that only the test knows."""
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_a_run_keeps_its_source_and_what_is_not_committed(task, home, tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("utils.py", "tasks.py", "records.py", "packing.py", "ppo.py"):
        shutil.copy(utils.ROOT / name, checkout)
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "one")
    monkeypatch.setattr(records, "ROOT", checkout)

    clean = new_run(tiny.make_args(task), checkout / "ppo.py").folder
    record = json.loads((clean / "args.json").read_text())
    assert record["commit"] == git(checkout, "rev-parse", "HEAD").strip() and record["changes"] is False
    assert not (clean / "changes.diff").exists()

    with open(checkout / "utils.py", "a") as file:
        file.write("# mine\n")
    dirty = new_run(tiny.make_args(task), checkout / "ppo.py").folder
    assert json.loads((dirty / "args.json").read_text())["changes"] is True
    assert "+# mine" in (dirty / "changes.diff").read_text().splitlines()
    assert (dirty / "ppo.py").read_bytes() == (checkout / "ppo.py").read_bytes()
    git(checkout, "checkout", "-q", "utils.py")
    git(checkout, "apply", str((dirty / "changes.diff").resolve()))  # the very state can be made again
    assert (checkout / "utils.py").read_text().endswith("# mine\n")


@pytest.mark.parametrize("lack", ["git", "repository"])
def test_a_machine_without_git_and_a_folder_without_a_repository_run_too(lack, task, home, tmp_path, monkeypatch):
    if lack == "git":
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(records, "ROOT", home)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    record = json.loads((new_run(tiny.make_args(task)).folder / "args.json").read_text())
    assert record["commit"] is None and record["changes"] is False


# -------------------------------------------------------------------------------------------------------- tasks


def test_a_task_that_is_only_an_entry_of_TASKS_runs_in_all_four_scripts(task, home, monkeypatch):
    """No script has a preset for it; each finds what the one before has made."""
    task = replace(task, task="mine", base_model=task.base_model, truncate_token=None)
    monkeypatch.setitem(tasks.TASKS, "mine", task)
    start = task.base_model
    flags = {
        "sft": f"--base_model {start} --num_heldout 4 --batch_size 4 --block_size 10",
        "train_reward": "--num_labels 12 --batch_size 4 --normalize_samples 4 --rollout_batch_size 4",
        "ppo": "--total_episodes 8 --batch_size 8 --eval_queries 4",
        "rloo": "--total_episodes 8 --batch_size 8 --rloo_k 2 --eval_queries 4",
    }
    assert all("mine" not in script.PRESETS for script in SCRIPTS.values())
    for name, words in flags.items():
        if name != "sft":
            monkeypatch.setitem(tasks.TASKS, "mine", replace(task, base_model="models/mine/sft"))
        script = SCRIPTS[name]
        args = tasks.parse_args(script.Args, script.PRESETS, ["--task", "mine", *words.split()])
        assert args.task.query_length == 8
        script.main(args)
        assert Path(f"models/mine/{name}").is_symlink() and Path(f"models/mine/{name}/model.safetensors").is_file()
    assert len(os.listdir("runs")) == 4


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_task_passes_its_own_checks_on_1_2_4_and_8_processes(script, home):
    """Pitfall 25."""
    module = SCRIPTS[script]
    for name in tasks.TASKS:
        args = tasks.parse_args(module.Args, module.PRESETS, ["--task", name])
        for processes in (1, 2, 4, 8):
            module.check(args, processes)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_preset_is_of_a_task_there_is_and_repeats_no_default(script):
    module = SCRIPTS[script]
    assert set(module.PRESETS) <= set(tasks.TASKS)
    for name, preset in module.PRESETS.items():
        default = module.Args(task=tasks.TASKS[name])
        assert preset and all(
            getattr(default.task if hasattr(default.task, field) else default, field) != value
            for field, value in preset.items()
        )


# ------------------------------------------------------------------------------------------------ rewards of one's own

COMPOSED = """
def composed(queries, responses, scores):
    assert isinstance(scores, list) and all(isinstance(score, float) for score in scores)
    return [10 + 2 * score for score in scores]

def plain(queries, responses):
    return [1.0] * len(responses)
"""


@pytest.fixture
def reward_folder(home: Path) -> str:
    """A reward model of the tiny task's vocabulary."""
    (home / "mine.py").write_text(COMPOSED)
    return tiny.write_reward(home / "reward")


@pytest.mark.parametrize("script", [ppo, rloo])
def test_a_reward_function_with_a_third_argument_gets_the_reward_models_scores(script, task, reward_folder):
    tokenizer, _, pad_id = utils.load_tokenizer(task, 5)
    settings = dict(reward_model=reward_folder, rollout_batch_size=2)
    queries = tiny.make_contexts([8, 3, 1, 5], 8, vocab=tiny.WORDS)
    responses = tiny.make_contexts([5, 5, 5, 5], 5, seed=1, vocab=tiny.WORDS)
    cut = responses.masked_fill(torch.arange(5) > torch.tensor([[4], [0], [2], [4]]), pad_id)
    model = utils.RewardModel.from_folder(reward_folder, "")
    alone = torch.stack([model.score(queries[i : i + 1], cut[i : i + 1], size=1)[0] for i in range(4)])
    device = torch.device("cpu")
    for function, expected in ((None, alone), ("composed", 10 + 2 * alone), ("plain", torch.ones(4))):
        args = tiny.make_args(task, script, **settings, reward_fn=function and f"mine.py:{function}")
        found = utils.load_reward(args, tokenizer, pad_id, device)(queries, cut)
        assert torch.allclose(found, expected, atol=1e-5), function
    assert alone.std() > 0.1


@pytest.mark.parametrize("script", [ppo, rloo])
def test_a_composed_reward_needs_the_reward_model_and_a_plain_one_does_not(script, task, reward_folder, no_weights):
    tokenizer, _, pad_id = utils.load_tokenizer(task, 5)
    args = tiny.make_args(task, script, reward_fn="mine.py:composed", reward_model="nowhere")
    with pytest.raises(utils.InputError, match="no reward model in nowhere"):
        utils.load_reward(args, tokenizer, pad_id, torch.device("cpu"))
    utils.load_reward(replace(args, reward_fn="mine.py:plain"), tokenizer, pad_id, torch.device("cpu"))


@pytest.mark.parametrize("script", [ppo, rloo])
def test_a_run_learns_from_the_composed_reward(script, task, reward_folder):
    """The first update's mean score is 10 + 2 × the mean of the reward model's, for the same samples."""
    task, scores = replace(task, truncate_token=None), []
    for name, function in (("alone", None), ("composed", "mine.py:composed")):
        script.main(arguments(script.__name__, task, reward_model=reward_folder, reward_fn=function, run_name=name))
        scores.append(read_metrics(name)[0]["objective/scores"])
    assert scores[1] == pytest.approx(10 + 2 * scores[0], abs=1e-4)


def test_a_setting_of_a_reward_function_is_not_taken_for_the_scores(task, reward_folder, home):
    """`def f(queries, responses, weight=2.0)` is a function of texts; its default stands."""
    (home / "weighted.py").write_text("def f(queries, responses, weight=2.0):\n    return [weight] * len(responses)\n")
    tokenizer, _, pad_id = utils.load_tokenizer(task, 5)
    args = tiny.make_args(task, reward_fn="weighted.py:f", reward_model=reward_folder)
    reward = utils.load_reward(args, tokenizer, pad_id, torch.device("cpu"))
    assert reward(torch.full((3, 2), 7), torch.full((3, 2), 7)).tolist() == [2.0, 2.0, 2.0]
