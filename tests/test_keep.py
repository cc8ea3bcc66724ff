"""Kept policies and the end of a run at a KL: --keep_every, --keep_best, --stop_kl."""

import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from safetensors.torch import load_file
from test_resume import at_call, exit_code, pair, run_jobs, send, settings, write_files
from transformers import AutoModelForCausalLM

import ppo
import rloo
from machinery import artifacts, checkpoints, distributed
from machinery.cli import InputError
from machinery.runs import Run

BOTH = pytest.mark.parametrize("script", ["ppo", "rloo"])
KEEP = dict(keep_every=2, keep_best="eval/scores")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The files of `settings` in a folder to work in; checkpoints of all updates stay."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoints, "KEPT", 100)
    write_files(tmp_path)
    return tmp_path


def lines(name):
    """metrics.jsonl without times."""
    rows = map(json.loads, Path("runs", name, "metrics.jsonl").read_text().splitlines())
    return [{key: x for key, x in row.items() if "time/" not in key} for row in rows]


def evaluations(name, metric):
    """Step → value of the metric."""
    return {row["step"]: row[metric] for row in lines(name) if metric in row}


def weights(name, step):
    """The policy after so many updates, from a checkpoint or the start."""
    if step == 0:
        return AutoModelForCausalLM.from_pretrained("task/model").state_dict()
    state = load_file(f"runs/{name}/checkpoints/{step:08}.safetensors")
    return {key.removeprefix("model/lm."): x for key, x in state.items() if "model/lm." in key}


def assert_weights(folder, expected):
    """The folder is a language model with these weights, and there is its tokenizer."""
    lm, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()) and (Path(folder) / "tokenizer.json").exists()
    state = lm.state_dict()
    assert all(torch.equal(state[key], x) for key, x in expected.items()) and expected


def test_of_equal_evaluations_the_first_is_the_best(accelerator, tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "save_model", lambda *args, **_: args[-1].mkdir())
    args = SimpleNamespace(keep_every=None, keep_best="eval/scores")
    run = SimpleNamespace(args=args, folder=tmp_path, main=True, accelerator=accelerator)
    for update, score in enumerate((1.0, 2.0, 2.0, 1.5)):
        Run.keep(run, update, {"eval/scores": score}, torch.nn.Linear(1, 1), None)
    assert json.loads((tmp_path / "best/evaluation.json").read_text())["step"] == 1


@pytest.mark.parametrize(("script", "metric"), [("ppo", "eval/scores"), ("rloo", "eval/kl")])
def test_kept_policies_are_those_after_that_many_updates_and_of_the_best_evaluation(
    script, metric, home
):
    """Six updates, evaluated before each and at the end."""
    flags = dict(keep_every=2, keep_best=metric, eval_every=1, save_every=1)
    assert exit_code(script, settings(script, run_name="run", lr=3e-2, **flags)) == 0
    found = evaluations("run", metric)
    best = max(found, key=lambda step: found[step])
    assert list(found) == list(range(7))
    final = AutoModelForCausalLM.from_pretrained("runs/run/model").state_dict()
    expected = {step: weights("run", step) for step in range(6)} | {6: final}
    for step in (2, 4, 6):
        assert_weights(f"runs/run/keep_{step}", expected[step])
    assert_weights("runs/run/best", expected[best])
    record = json.loads(Path("runs/run/best/evaluation.json").read_text())
    assert record["step"] == best and record[metric] == found[best]
    kept = [path.name for path in Path("runs/run").glob("*") if path.is_dir()]
    kept = {name for name in kept if not name.startswith(".best")} - {"checkpoints"}
    assert kept == {"best", "keep_2", "keep_4", "keep_6", "model"}
    assert len(list(Path("runs/run").glob(".best_*"))) == 1
    task = replace(settings(script).task, base_model="runs/run/best")  # another run starts from it
    again = replace(settings(script, run_name="again", total_episodes=8), task=task)
    assert exit_code(script, again) == 0
    assert lines("again")[0]["objective/kl"] == 0


@BOTH
def test_a_run_ends_after_the_first_update_whose_kl_exceeds_the_limit(script, home, capsys):
    """Until then it is the full run, with its learning rates, also if it was stopped and resumed."""
    assert exit_code(script, settings(script, run_name="full", save_every=1)) == 0
    kl = [row["objective/kl"] for row in lines("full")[:6]]
    last = next(i for i in range(2, 5) if kl[i] > max(kl[:i]))
    limit = dict(stop_kl=math.nextafter(kl[last], 0), keep_best="eval/scores")
    assert exit_code(script, settings(script, run_name="short", **limit)) == 0
    assert exit_code(script, settings(script, run_name="same", stop_kl=max(kl))) == 0
    assert lines("same") == lines("full")  # it has to exceed the limit
    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, distributed, "check_gradients", 5, send(signal.SIGTERM))
        assert exit_code(script, settings(script, run_name="resumed", **limit)) == 143
    assert exit_code(script, settings(script, resume="runs/resumed", **limit)) == 0
    for name in ("short", "resumed"):
        *updates, evaluation = lines(name)
        assert updates == lines("full")[: last + 1] and evaluation["step"] == last + 1
        assert all(key == "step" or key.startswith("eval/") for key in evaluation)
        assert_weights(f"runs/{name}/model", weights("full", last + 1))
        assert all((Path("runs", name, "model") / x).exists() for x in ("README.md", "curves.png"))
    link = Path(f"models/synthetic/{script}")
    assert link.resolve() == Path("runs/resumed/model").resolve()


@pytest.mark.slow
def test_17_killed_and_resumed_runs_keep_the_same_policies(tmp_path):
    """Killed in the middle of keeping one, before and after it is in its place."""
    kills = {
        "ppo": "before the weights 2, before the link 1, after the weights 3, in an update 9",
        "rloo": "before the link 2, in a checkpoint 1, after the weights 2",
    }
    jobs = [job for script, where in kills.items() for job in pair(script, where, **KEEP)]
    two = pair("ppo", "before the weights 2 0, in an update 9 1", 2, **KEEP)
    jobs += [job | dict(name=f"{job['name']}_2") for job in two]
    done = run_jobs(tmp_path / "home", jobs)
    for name in ("ppo_killed", "rloo_killed", "ppo_killed_2"):
        assert len(done.codes[name]) > 2 and set(done.codes[name][-1]) == {0}, done.logs
        ours, theirs = (kept(done.runs / x) for x in (name, name.replace("killed", "straight")))
        assert ours == theirs and len(ours) == 4, done.logs


def kept(run):
    """Kept folder → the bytes of its files."""
    folders = [*run.glob("keep_*"), run / "best"]
    return {x.name: {path.name: path.read_bytes() for path in x.iterdir()} for x in folders}


@BOTH
def test_unknown_metrics_and_updates_without_evaluation_are_refused_at_the_start(
    script, home, no_weights
):
    """The true score is a metric where the task knows it."""
    module = dict(ppo=ppo, rloo=rloo)[script]
    known = dict(keep_best="eval/gold_score"), "eval/gold_score.*eval/scores.*eval/kl"
    for flags, words in ((dict(keep_best="scores"), "scores.*eval/scores.*eval/kl,"), known):
        with pytest.raises(InputError, match=words):
            module.main(settings(script, **flags))
    with pytest.raises(InputError, match="keep_every=3 .* eval_every = 2; use 4"):
        module.main(settings(script, keep_every=3))
    task = replace(tiny.make_task(), gold_fn="reward.py:score")
    for metric in ("eval/gold_score", "eval/rlhf_reward", "eval/cut_length"):
        module.check(replace(settings(script, keep_best=metric), task=task), 1)
    with pytest.raises(ValueError, match="stop_kl"):
        settings(script, stop_kl=0.0)
