"""diffs/: each patch applies alone and in pairs and does what its header says; so do the recipes.

`python tests/test_diffs.py --fix` updates patches whose context or line numbers have changed.
"""

import ast
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
import transformers
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ppo
import rloo
import sft
import train_reward
from data import tasks
from machinery import checkpoints, cli, labels, models
from machinery.rewards import load_reward_model
from machinery.tokens import load_tokenizer
from train_reward import RewardModel
from utils import TokenIds, decode

ROOT = Path(ppo.__file__).parent
README = (ROOT / "diffs" / "README.md").read_text()
DIFFS = {path.stem: path.read_text() for path in sorted((ROOT / "diffs").glob("*.diff"))}
BASES = {name: re.search(r"^--- (\w+)\.py", text, flags=re.M)[1] for name, text in DIFFS.items()}
OF_PPO, OF_RLOO = ([n for n, base in BASES.items() if base == x] for x in ("ppo", "rloo"))
ALGORITHMS = [name for name in OF_RLOO if name != "lora_rloo"]  # alternatives
LIMITS = {"dpo": 45}  # added lines; others 25
EXCLUSIVE = [{"lora", x} for x in ("freeze_layers", "ema", "keep_best")]  # what is trained, saved
MEANINGLESS = [{"lora", "reference_on_cpu"}, {"trlx_kl", "reference_on_cpu"}]  # no reference there
PAIRS = [x for x in itertools.combinations(OF_PPO, 2) if {*x} not in EXCLUSIVE + MEANINGLESS]
STACKS = [
    "separate_critic+ema",
    "ptx+ema",
    "lora+length_penalty",
    "grpo+lora_rloo",
    "lora_rloo+dapo",
    "separate_critic+value_warmup+schedule+adamw+early_stop+ptx",
    "samples_per_query+sampling+dense_rewards+reference_on_cpu+freeze_layers",
]
SIZES = dict(batch_size=16, num_minibatches=2, num_ppo_epochs=2, eval_queries=4, lr=1e-2)
SIZES |= dict(total_episodes=32, micro_batch_tokens=60, rollout_batch_size=5, eval_every=1)
EOS = dict(truncate_token=".", truncate_after=0, eos_task=True)
every_patch = pytest.mark.parametrize("name", DIFFS)


def added(name):
    """The lines that a patch adds."""
    lines = DIFFS[name].split("\n+++ ")[1].splitlines()[1:]
    return [line[1:] for line in lines if line.startswith("+")]


def apply(path, *names):
    """Whether each patch applies to the script `path`, with its context exactly as it is."""
    command = ["patch", "--fuzz=0", "--quiet", "--no-backup-if-mismatch", "--reject-file=-", path]
    diffs = [ROOT / "diffs" / f"{name}.diff" for name in names]
    return all(subprocess.run([*command, x], capture_output=True).returncode == 0 for x in diffs)


def load(path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fix(name):
    """Apply a patch, also where the context around it has changed, and write it again."""
    path, base = ROOT / "diffs" / f"{name}.diff", f"{BASES[name]}.py"
    command = ["patch", "--output=-", "--reject-file=-", ROOT / base, path]
    new = subprocess.run(command, capture_output=True, text=True)
    if new.returncode:
        sys.exit(f"diffs/{name}.diff: change what it says about the changed lines\n{new.stderr}")
    command = ["diff", "-u", f"--label={base}", f"--label={name}.py", ROOT / base, "-"]
    lines = subprocess.run(command, input=new.stdout, capture_output=True, text=True).stdout
    path.write_text(DIFFS[name].split("--- ", 1)[0] + lines)


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    """Names of patches → the patched script as a module; `ppo` alone is ppo.py itself."""
    folder, modules = tmp_path_factory.mktemp("patched"), {("ppo",): ppo}

    def patched(*names):
        if names not in modules:
            path = folder / f"mine_{'_'.join(names)}.py"
            shutil.copy(ROOT / f"{BASES[names[0]]}.py", path)
            assert apply(path, *names)
            modules[names] = load(path)
        return modules[names]

    return patched


# ------------------------------------------------------------------------------------------ patches


def test_the_readme_lists_every_patch_with_its_script_and_number_of_lines():
    rows = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.diff\) \| `(\w+)\.py` \| (\d+) \|", README, re.M)
    assert sorted(rows) == [(name, name, BASES[name], str(len(added(name)))) for name in DIFFS]


@every_patch
def test_a_patch_adds_few_lines_and_its_command_works(name, patched):
    header = " ".join(DIFFS[name].split("\n--- ")[0].split()).replace("\\ ", "")
    assert header.startswith(f"{name}: ") and " Source: " in header
    command, flags = header.split(" Command: ")[1].split(" python mine.py ")
    assert command == f"cp {BASES[name]}.py mine.py && patch --fuzz=0 mine.py diffs/{name}.diff"
    script = patched(name)
    assert cli.parse_args(script.Args, script.PRESETS, flags.split()).task.task == "synthetic"
    assert 0 < len(added(name)) <= LIMITS.get(name, 25) and max(map(len, added(name))) <= 100


@pytest.mark.parametrize("first", OF_PPO)
def test_a_patch_of_ppo_applies_after_every_other_one(first, patched, tmp_path):
    for second in set(OF_PPO) - {first}:
        path = Path(shutil.copy(patched(first).__file__, tmp_path))
        assert apply(path, second) == ({first, second} not in EXCLUSIVE), second
        if {first, second} not in EXCLUSIVE:
            ast.parse(path.read_text())
            assert {*added(first), *added(second)} <= {*path.read_text().split("\n")}


@pytest.mark.parametrize("pair", list(itertools.permutations(OF_RLOO, 2)), ids="+".join)
def test_patches_of_rloo_are_alternatives_but_lora_goes_with_each(pair, patched, tmp_path):
    path = Path(shutil.copy(patched(pair[0]).__file__, tmp_path))
    assert apply(path, pair[1]) == ("lora_rloo" in pair)


# --------------------------------------------------------------------------------------------- runs


class KeptRun(tiny.FakeRun):
    """Keeps the rollouts, what the losses of each update report, every step, and saved weights."""

    def __init__(self):
        super().__init__()
        self.folder, self.main = Path(), False
        self.rollouts, self.parts, self.steps, self.saved, self.loaded = [], [], [], {}, []

    def save(self, model, tokenizer, name="model", **heads):
        self.saved[name] = {key: x.clone() for key, x in model.state_dict().items()}

    def copy(self, number):
        """A number, such as the gradient, of each parameter."""
        tensors = {name: number(p) for name, p in self.model.named_parameters()}
        return {name: None if x is None else x.clone() for name, x in tensors.items()}


def sizes_of(script, task):
    """Flags of a run of a few steps on a task."""
    if hasattr(script.Args, "num_ppo_epochs"):
        return dict(task=task, reward_model=folder_of(task), **SIZES)
    sizes = dict(batch_size=4, micro_batch_tokens=60, num_heldout=4, lr=1e-2, block_size=10)
    sizes |= dict(num_labels=8, normalize_samples=8, rollout_batch_size=8, task=task)
    return {name: x for name, x in sizes.items() if hasattr(script.Args, name) or name == "task"}


def run_main(script, task, precision="no", moved=False, names=None, **flags):
    """Two updates by `main` on tiny models; `names` are replaced in the script.

    With `moved`, the policy differs from the reference, and the ratio from 1, at the start.
    """
    run, optimizer = KeptRun(), getattr(script, "AdamTF", torch.optim.AdamW)
    run.args = tiny.new_args(script, **sizes_of(script, task) | flags)
    load_lm, rollout_class, step = models.load_lm, getattr(script, "Rollout", None), optimizer.step
    losses = "ppo_losses" if hasattr(script, "ppo_losses") else "rloo_loss"
    compute_losses = getattr(script, losses, None)

    def spy_step(optimizer, closure=None):
        seen = SimpleNamespace(lrs=[group["lr"] for group in optimizer.param_groups])
        seen.grads, seen.before = run.copy(lambda p: p.grad), run.copy(torch.Tensor.detach)
        step(optimizer, closure)
        seen.weights = run.copy(torch.Tensor.detach)
        run.steps.append(seen)

    def spy_lm(*names, **settings):
        run.loaded.append(load_lm(*names, **settings))
        if moved and len(run.loaded) == 2:
            run.loaded[1].transformer.h[0].mlp.c_fc.weight.data *= 1.3
        return run.loaded[-1]

    def spy_rollout(*fields):
        rollout = rollout_class(*fields)
        if len(rollout.scores) != run.args.batch_size:  # an evaluation
            return rollout
        noise = 0.2 * moved * torch.randn(rollout.mask.shape) * rollout.mask
        old = rollout._replace(logprobs=rollout.logprobs + noise, kl=rollout.kl + noise)
        run.rollouts.append((rollout, old))
        run.parts.append([])
        return old

    def spy_losses(*inputs):
        result = compute_losses(*inputs)
        run.parts[-1].append({key: x.item() for key, x in result[-1].items()})
        return result

    spies = dict(load_lm=spy_lm, Rollout=spy_rollout) | {losses: spy_losses}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "step", spy_step)
        patch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        AcceleratorState._reset_state(True)
        torch.manual_seed(0)
        spies = spies if rollout_class else {}
        tiny.run_main(script, run.args, dict(Run=run) | spies | (names or {}))
    AcceleratorState._reset_state(True)
    return run


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """A task whose folder has a reward model and other texts, too."""
    task = tiny.write_task(tmp_path_factory.mktemp("task"), truncate_token=None)
    tiny.write_reward(Path(folder_of(task)))
    texts = [f"Anna saw {n} {thing}." for n in range(10) for thing in ("cats", "old red houses")]
    Path(folder_of(task), "other.txt").write_text("\n".join(texts))
    return task


def folder_of(task):
    return str(Path(task.base_model).parent)


@pytest.fixture(scope="session")
def run_of(patched, task):
    """Names of patches and flags → `run_main`, run once."""
    runs = {}

    def run_of(*names, **flags):
        key = names, *flags.items()
        if key not in runs:
            runs[key] = run_main(patched(*names), task, **flags)
        return runs[key]

    return run_of


def new_policy(task, weights=None):
    """The initial policy of ppo.py, or one with these weights of the language model."""
    lm = models.load_lm(task.base_model)
    lm.load_state_dict(weights or lm.state_dict())
    return ppo.PolicyAndValue(lm, tiny.WORDS, task.temperature)


def same_numbers(run, other):
    for line, expected in zip(run.metrics, other.metrics, strict=True):
        assert line.keys() == expected.keys() and len(expected) > 8
        assert all(line[key] == x for key, x in expected.items() if not key.startswith("time/"))


def first_ratio_is_1(run):
    first = [parts[0] for parts in run.parts]
    return all(x["policy/approxkl_avg"] == x["val/ratio_var"] == 0 for x in first) and len(first)


ONLINE = [*OF_PPO, *OF_RLOO]
SLOW_RUNS = [(name, "bf16") for name in ONLINE] + [("+".join(pair), "no") for pair in PAIRS]
RUNS = [(name, "no") for name in ONLINE]
RUNS += [pytest.param(*run, marks=pytest.mark.slow) for run in SLOW_RUNS]


@pytest.mark.parametrize(("names", "precision"), RUNS)
def test_L6_a_patched_script_runs_and_its_first_ratio_is_exactly_1(
    names, precision, patched, task, run_of
):
    fast = names in ONLINE and precision == "no"
    run = run_of(names) if fast else run_main(patched(*names.split("+")), task, precision)
    assert [line["ppo/episode"] for line in run.metrics[:2]] == [16, 32]
    assert first_ratio_is_1(run) == 2 and len(run.parts[0]) >= 4  # several micro-batches
    assert run.parts[-1][-1]["policy/approxkl_avg"] > 0 or "value_warmup" in names


@pytest.mark.slow
@pytest.mark.parametrize("names", [*DIFFS, *STACKS])
def test_a_run_writes_its_folder_and_the_saved_weights_load(
    names, patched, task, tmp_path, monkeypatch
):
    script, base = patched(*names.split("+")), BASES[names.split("+")[0]]
    monkeypatch.chdir(tmp_path)
    script.main(script.Args(run_name="run", **sizes_of(script, task)))
    if base == "train_reward" and names != "dpo":
        load_reward_model(RewardModel, "runs/run/model")
        return
    for name in ("model", "ema") if "ema" in names else ("model",):
        folder = f"runs/run/{name}"
        _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values())


RESUMED = {
    ("separate_critic", "value_warmup"): dict(total_episodes=64, value_warmup_updates=1),
    ("ema",): dict(total_episodes=64),
    ("keep_best",): dict(total_episodes=64, lr=3e-2, reward_model=None, reward_fn="mine.py:f"),
    ("resid_dropout",): dict(num_epochs=2),
}


@pytest.mark.parametrize("names", RESUMED, ids="+".join)
def test_X5_X6_P4_a_resumed_run_writes_what_an_undisturbed_run_writes(
    names, patched, task, tmp_path, monkeypatch
):
    """The average, the frozen policy's missing moments, the best score so far, dropout's masks."""
    script, flags = patched(*names), dict(save_every=1, run_name="run") | RESUMED[names]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoints, "KEPT", 100)
    Path("mine.py").write_text(
        "calls, scores = [], [1, 3, 2, 2.5, 4, 3, 3.5]\n"  # of evaluations, every second call
        "def f(queries, responses):\n"
        "    calls.append(queries)\n"
        "    texts = [len(response) for response in responses]\n"
        "    return [scores[len(calls) // 2]] * len(texts) if len(calls) % 2 else texts\n"
    )
    flags = dict(reward_fn="mine.py:f", eval_every=1, save_every=1, run_name="run")
    args = tiny.make_args(task, script, total_episodes=48, truncate_token=None, **flags)
    script.main(args)
    lines = [json.loads(x) for x in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    assert [line["eval/scores"] for line in lines if "eval/scores" in line][4] == 4
    best = {0, 1, 4}  # not 3 nor 6, which are better than the one before
    assert {path.name for path in Path("runs/run").glob("best_*")} == {f"best_{i}" for i in best}
    for i in best - {0}:  # which has no checkpoint
        state = load_file(f"runs/run/checkpoints/{i:08}.safetensors")
        saved = AutoModelForCausalLM.from_pretrained(f"runs/run/best_{i}").state_dict()
        of_lm = {k.removeprefix("model/lm."): x for k, x in state.items() if "model/lm." in k}
        assert of_lm and all(torch.equal(saved[key], x) for key, x in of_lm.items())


if __name__ == "__main__":
    if sys.argv[1:] != ["--fix"]:
        sys.exit(__doc__)
    for name in DIFFS:
        fix(name)
