"""diffs/recipes: each passes the values that its source published, and never runs half patched."""

import ast
import os
import re
import shutil
import subprocess

import pytest
import tiny
from test_diffs import RECIPES, ROOT

import ppo
from data import tasks
from machinery import cli

ALL = "kl_target=None cliprange=0.2 gamma=1.0 lam=0.95"
ONCE = "num_ppo_epochs=1 adam_beta1=0.9 adam_beta2=0.95 weight_decay=0.0"
CODE = f"""{ONCE} vf_coef=1.0 cliprange_value=0.2 anneal_lr=True
    whiten_rewards=False whiten_advantages=False temperature=1.0"""
PUBLISHED = {  # beside what is above; by openrlhf, 59 updates of warm-up: 3% of all
    "instructgpt": f"""{ONCE} total_episodes=256000 batch_size=512 num_minibatches=8 kl_coef=0.02
        lr=5e-6 critic_lr=5e-6 anneal_lr=False warmup_updates=10 ptx_coef=27.8 ema_decay=0.992
        temperature=1.0""",
    "llama2": f"""{ONCE} total_episodes=204800 batch_size=512 num_minibatches=8 kl_coef=0.01 lr=1e-6
        critic_lr=1e-6 anneal_lr=False adam_eps=1e-5 weight_decay=0.1 max_grad_norm=1.0
        vf_coef=1.0""",
    "qwen": """num_ppo_epochs=4 samples_per_query=2 kl_coef=0.04 cliprange_value=0.15 lr=1e-6
        critic_lr=5e-6 value_warmup_updates=50 top_p=0.9 min_response_length=1""",
    "chinese_llama": f"""{CODE} total_episodes=14000 batch_size=14 num_minibatches=1 lr=5e-7
        critic_lr=1.5e-6 decay='inverse_sqrt' warmup_updates=100 adam_eps=1e-6 kl_coef=0.1
        max_grad_norm=1.0 clip_score=None temperature=0.8 top_p=0.9""",
    "deepspeed_chat": f"""{CODE} total_episodes=30528 batch_size=64 num_minibatches=1 kl_coef=0.1
        lr=9.65e-6 critic_lr=5e-6 decay='cosine' min_lr_ratio=0.0 warmup_updates=100 adam_eps=1e-8
        max_grad_norm=1.0 clip_score=5.0 ema_decay=0.992 top_p=1.0 min_response_length=3""",
    "openrlhf": f"""{CODE} batch_size=512 num_minibatches=4 kl_coef=0.01 lr=1e-6 critic_lr=9e-6
        decay='cosine' min_lr_ratio=0.1 warmup_updates=59 adam_eps=1e-8 clip_score=10.0
        max_grad_norm=1.0 whiten_advantages=True""",
    "trlx": f"""{CODE} total_episodes=12800 batch_size=128 num_minibatches=4 num_ppo_epochs=4
        kl_coef=0.001 lr=3e-5 anneal_lr=False adam_eps=1e-8 weight_decay=1e-6
        clip_score=10.0 unfrozen_layers=2 whiten_advantages=True""",
}


def run_recipe(folder, name):
    """Run a recipe, in a folder with diffs/, that only prints its command."""
    command = ["bash", folder / "diffs" / "recipes" / f"{name}.sh", "--seed", "7"]
    env = os.environ | {"LAUNCH": "echo"}
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_the_published_values_and_works_for_every_task(name, tmp_path, capsys):
    """What is not published is as in ppo.py."""
    shutil.copy(ROOT / "ppo.py", tmp_path)
    shutil.copytree(ROOT / "diffs", tmp_path / "diffs")
    file, *flags = run_recipe(tmp_path, name).stdout.split()
    assert file == f"{name}.py" and flags[-2:] == ["--seed", "7"]
    script = tiny.load_script(tmp_path / file)
    values = re.findall(r"(\w+)=(\S+)", f"{ALL} {PUBLISHED[name]}")
    published = {key: ast.literal_eval(x) for key, x in values}
    for task in tasks.TASKS:
        more = ["--task", task, "--reward_fn", "data.answers:gsm8k", "--seed", "7"]
        args = cli.parse_args(script.Args, script.PRESETS, [*flags, *more])
        script.check(args, 1)
        preset = cli.parse_args(ppo.Args, ppo.PRESETS, more)
        expected, found = (vars(x.task) | vars(x) | {"task": task} for x in (preset, args))
        found["critic_lr"] = pytest.approx(args.lr * getattr(args, "critic_lr_ratio", 1), rel=1e-3)
        expected |= published
        assert expected == {key: found[key] for key in expected}
    text = RECIPES[name].replace("\n#    ", "")
    command = re.search(rf"^# Synthetic: diffs/recipes/{name}\.sh --task (.*)$", text, re.M)[1]
    args = cli.parse_args(script.Args, script.PRESETS, [*flags, "--task", *command.split()])
    assert args.total_episodes == 4096
    with pytest.raises(SystemExit):  # what the recipe prints with --help: its own defaults
        cli.parse_args(script.Args, script.PRESETS, [*flags, "--help"])
    shown = re.search(r"--lr .*?default: ([-.e\d]+)", capsys.readouterr().out, re.S)
    assert float(shown[1]) == published["lr"]


def test_a_recipe_keeps_the_users_changes_and_never_runs_half_patched(tmp_path):
    shutil.copytree(ROOT / "diffs", tmp_path / "diffs")
    (tmp_path / "llama2.py").write_text("mine")
    assert run_recipe(tmp_path, "llama2").stdout.startswith("llama2.py")
    assert (tmp_path / "llama2.py").read_text() == "mine"
    changed = (ROOT / "ppo.py").read_text().replace("@torch.no_grad()\ndef sample(", "def sample(")
    (tmp_path / "ppo.py").write_text(changed)  # the third patch of qwen.sh does not apply to it
    for _ in range(2):
        assert run_recipe(tmp_path, "qwen").returncode != 0
