"""The command line: flags and their bounds, errors as one sentence, before any weights load."""

import contextlib
import errno
import json
import re
import runpy
import sys
import typing
from dataclasses import replace

import pytest
import tiny
from conftest import SCRIPTS
from pydantic import ValidationError

import ppo
import rloo
import sft
import train_reward
from data import tasks
from machinery import cli

pytestmark = pytest.mark.usefixtures("accelerator")
LABELS = dict(num_labels=12, batch_size=4)
DIVIDE = [  # script, processes, flags, the flag that is wrong, what to use
    (ppo, 64, dict(batch_size=500, num_minibatches=8), "batch_size=500", 512),
    (rloo, 2, dict(batch_size=30, num_minibatches=3), "batch_size=30", 48),
    (ppo, 1, dict(kl_target=1.0, kl_horizon=102), "kl_horizon=102", 103),
    (sft, 2, dict(batch_size=5), "batch_size=5", 6),
    (train_reward, 4, dict(LABELS, rollout_batch_size=6), "rollout_batch_size=6", 8),
    (train_reward, 1, dict(LABELS, num_labels=13), "num_labels=13", 16),
]
BAD = [  # a command, words of the error
    ("ppo.py --lr -1e-5", ("lr", "-1e-05")),
    ("train_reward.py --no_such_flag 3", ("--no_such_flag",)),
    ("rloo.py --batch-size 10 --reward_fn=data.answers:gsm8k", ("batch_size=10", "8 or 12")),
    ("ppo.py --learning-rate=1", ("--learning_rate is --lr",)),
    ("rloo.py --num_generations 8", ("--rloo_k",)),
    ("sft.py --task=sentimental", ("--task", "sentimental", "synthetic")),
    (f"sft.py --seed {2**64}", ("seed", f"{2**64}")),
]
MAY_BE_0 = {"seed", "truncate_after", "num_heldout", "lr", "kl_coef", "vf_coef", "weight_decay"}
MAY_BE_0.update(["gamma", "lam", "warmup"])
OTHER_BOUNDS = dict(rloo_k=1, normalize_samples=1, block_size=3, gamma=1.01, lam=1.01, warmup=1.01)


@pytest.mark.parametrize("script, processes, changes, wrong, use", DIVIDE)
def test_a_size_that_does_not_divide_names_the_next_that_works(
    script, processes, changes, wrong, use
):
    args = script.Args(task=tiny.make_task(reward_fn="data.answers:gsm8k"), **changes)
    message = tiny.refuses(lambda: script.check(args, processes), wrong)
    assert message.endswith(f" {use}")
    script.check(replace(args, **{wrong.split("=")[0]: use}), processes)


@pytest.mark.parametrize("script", SCRIPTS.values())
def test_every_number_has_its_bounds(script):
    task = tiny.make_task()
    may_be_0 = MAY_BE_0 - ({"lr", "num_heldout"} if script is sft else set())
    for cls, default in ((tasks.Task, task), (script.Args, script.Args(task=task))):
        for name, hint in typing.get_type_hints(cls).items():
            kinds = {hint, *typing.get_args(hint)}
            wrong = []
            if float in kinds:
                wrong = [float("nan"), float("inf"), float("-inf")]
            if kinds & {int, float} and name != "unfinished_score":  # any number is right there
                wrong.append(-1)
                if name in may_be_0:
                    replace(default, **{name: 0})
                else:
                    wrong.append(0)
            if name in OTHER_BOUNDS:
                wrong.append(OTHER_BOUNDS[name])
            for value in wrong:
                with pytest.raises(ValidationError, match=rf"\n{name}\n"):
                    replace(default, **{name: value})


@pytest.mark.parametrize("command, words", BAD)
def test_bad_flags_are_named_on_stderr_with_exit_code_2(command, words, here, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(cli.ROOT / sys.argv[0]), run_name="__main__")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and not list(here.iterdir()) and "Traceback" not in error
    assert [word for word in words if word not in error] == []


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that raises an error in a script; returns exit code and stderr."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/ppo.py"])

    def run(error, name=""):
        def main(args):
            with cli.about(name) if name else contextlib.nullcontext():
                raise error

        with pytest.raises(SystemExit) as stop:
            cli.run(main, ppo.Args, ppo.PRESETS)
        return stop.value.code, capsys.readouterr().err

    return run


def test_the_first_process_speaks_and_a_rank_left_by_another_job_silences_none(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    cli.say("skipped 2 rows")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for rank in (0, 1):
        monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
        cli.say(f"rank {rank}")
    assert capsys.readouterr().out == "skipped 2 rows\nrank 0\n"


def test_exit_codes_tell_bad_input_from_bugs(run):
    """A bug, or a full disk, keeps its traceback."""
    assert run(cli.InputError("bad")) == (2, "ppo.py: error: bad\n")
    for bug in (ZeroDivisionError(), ValueError("a bug"), OSError(errno.ENOSPC, "full")):
        with pytest.raises(type(bug)):
            run(bug)


def test_what_is_raised_about_a_flag_ends_with_its_traceback_and_then_one_sentence(run):
    """Also if the user's code calls sys.exit; our own sentences have no traceback."""
    for error in (KeyError("mood"), OSError("no such file"), SystemExit(0)):
        name = type(error).__name__
        code, message = run(error, "--label_dataset x.jsonl")
        *above, last = message.splitlines()
        assert (code, last) == (2, f"ppo.py: error: --label_dataset x.jsonl: {name}: {error}")
        assert above[0].startswith("Traceback") and above[-1].startswith(name)
        assert message.count("Traceback") == 1
    message = run(cli.InputError("is too small"), "--base_model x")[1]
    assert message == "ppo.py: error: --base_model x: is too small\n"


ALL, RL, SCORED = tuple(SCRIPTS), ("ppo", "rloo"), ("ppo", "rloo", "train_reward")
UNTRAINED = dict(reward_model="models/synthetic/train_reward", query_dataset="x")
MISTAKES = [  # scripts, flags, words of the error
    (SCORED, dict(response_length=60), ("query_length=8", "68 tokens", "64", "gpt2")),
    (ALL, dict(base_model="./nowhere"), ("--base_model ./nowhere",)),
    (ALL, dict(base_model="models/x/sft"), ("models/x/sft", "python sft.py --task x")),
    (ALL, dict(query_dataset="nowhere.txt"), ("--query_dataset nowhere.txt",)),
    (RL, dict(query_dataset="blank.txt"), ("--query_dataset",)),
    (ALL, dict(query_column="story"), ("--query_column story", "text")),
    (ALL, dict(clean_fn="broken.py:f"), ("--clean_fn broken.py:f", "JSONDecodeError")),
    (ALL, dict(truncate_token=". ."), ("--truncate_token",)),
    (RL, dict(reward_fn="nowhere.py:f"), ("--reward_fn nowhere.py:f",)),
    (RL, UNTRAINED, ("python train_reward.py --task synthetic",)),
    (RL, dict(reward_model="task"), ("--reward_model task",)),
    (("sft",), dict(block_size=64, response_length=50), ("66", "64")),  # 64 / 4 + 50
    (("sft",), dict(query_dataset="twice.txt"), ("--num_heldout", "4 of 9")),
    (("train_reward",), dict(label_dataset="long.json"), ("num_labels=12", "has only 0")),
    (("train_reward",), dict(num_labels=20), ("16", "num_labels=20")),
    (("train_reward",), dict(label_tokenizer="./nowhere"), ("--label_tokenizer ./nowhere: ",)),
]
MISTAKES = [(script, *rest) for scripts, *rest in MISTAKES for script in scripts]


@pytest.mark.parametrize("script, flags, words", MISTAKES)
def test_bad_input_is_refused_before_any_weights(script, flags, words, start, no_weights, tmp_path):
    (tmp_path / "blank.txt").write_text("\n  \n\n\t\n")
    (tmp_path / "twice.txt").write_text("Anna saw a cat.\n" * 120)  # equal blocks
    (tmp_path / "broken.py").write_text("import json\njson.loads('{')\n")
    row = dict(query=[1] * 60, sample0=[1] * 10, sample1=[2], best=0)
    (tmp_path / "long.json").write_text(json.dumps([row] * 12))
    tiny.refuses(lambda: start(script, **flags), *words)
    assert not (tmp_path / "runs").exists()


STYLE = (64, 24, 0.7, ".", 16, "", "")
SETTINGS = {  # task → (query, response, temperature, stop, from, prefix, suffix) as published
    "cnndm": (500, 75, 0.5, "\n", 55, "Article:\n\n", "\n\nTL;DR:"),
    "tldr_2019": (500, 75, 0.7, "\n", 55, "", "\n\nTL;DR:"),
    "tldr": (512, 53, 0.7, "<|endoftext|>", 0, "", ""),
} | dict.fromkeys(("sentiment", "descriptiveness", "synthetic"), STYLE)
STYLE = (1e-5, 1_000_000, 512, 0.15, 6.0, 10_000, True), (5e-5, 32, 4992)
PPO_SETTINGS = {  # (lr, episodes, batch, β, target, horizon, whitening), (lr, batch, labels)
    "sentiment": STYLE,
    "descriptiveness": STYLE,
    "cnndm": ((2e-6, 1_000_000, 32, 0.01, None, 10_000, False), (2.5e-5, 16, 46_000)),
    "tldr_2019": ((2e-6, 1_000_000, 32, 0.03, None, 10_000, False), (2.5e-5, 16, 46_000)),
}


def parse(script, *argv):
    return cli.parse_args(script.Args, script.PRESETS, list(argv))


def values(args, names):
    return tuple(getattr(args, name) for name in names.split())


@pytest.mark.parametrize("name", SETTINGS)
def test_the_tasks_have_their_published_settings(name):
    task = parse(ppo, "--task", name).task
    names = "query_length response_length temperature truncate_token truncate_after"
    assert values(task, f"{names} query_prefix query_suffix") == SETTINGS[name]
    found = values(task, "eos_task unfinished_score start_text task")
    assert found == (name == "tldr", -1.0, None, name)


@pytest.mark.parametrize("name", PPO_SETTINGS)
def test_ppo_and_reward_training_have_their_published_settings(name):
    args, (of_ppo, of_rewards) = parse(ppo, "--task", name), PPO_SETTINGS[name]
    names = "lr total_episodes batch_size kl_coef kl_target kl_horizon whiten_rewards"
    assert values(args, names) == of_ppo
    names = "num_minibatches num_ppo_epochs gamma lam cliprange cliprange_value vf_coef adam_eps"
    assert values(args, names) == (1, 4, 1.0, 0.95, 0.2, 0.2, 0.1, 1e-5)
    args = parse(train_reward, "--task", name)
    assert values(args, "lr batch_size num_labels") == of_rewards


@pytest.mark.parametrize("script", SCRIPTS.values())
def test_help_shows_the_resolved_defaults_of_the_task(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse(script, "--task", "cnndm", "--help")
    text = capsys.readouterr().out
    pattern = r"--(\w+)\b(?:(?!\n\s*--).)*?\(default:\s(.*?)\)\s*\n"
    shown = dict(re.findall(pattern, text, re.S))
    assert list(shown)[0] == "task" and list(shown)[-2:] == ["save_every", "track"]
    args = parse(script, "--task", "cnndm")
    found = tuple(float(shown[x]) for x in ("lr", "batch_size", "query_length"))
    assert found == (args.lr, args.batch_size, args.task.query_length)
    assert shown["task"] == "cnndm"
    assert max(map(len, text.splitlines())) <= 80
