"""diffs/: each patch applies alone and in pairs and does what its header says; so do the recipes.

`python tests/test_diffs.py --fix` updates patches whose context or line numbers have changed.
"""

import ast
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
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import test_tokens
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
from machinery.decoding import Decoder
from machinery.rewards import load_reward_model
from machinery.tokens import load_tokenizer
from train_reward import RewardModel
from utils import TokenIds, decode, sample_token

ROOT = Path(ppo.__file__).parent
README = (ROOT / "diffs" / "README.md").read_text()
DIFFS = {path.stem: path.read_text() for path in sorted((ROOT / "diffs").glob("*.diff"))}
BASES = {name: re.search(r"^--- (\w+)\.py", text, flags=re.M)[1] for name, text in DIFFS.items()}
# Added lines at most:
EXPERIMENTS = {"tools": 60, "stale": 45, "vine": 60, "sampling_gap": 20, "online_dpo": 40}
EXPERIMENTS |= {"dynamic_sampling": 35}
SMALL = [name for name in DIFFS if name not in EXPERIMENTS]
OF_PPO, OF_RLOO = ([name for name in SMALL if BASES[name] == x] for x in ("ppo", "rloo"))
ALGORITHMS = [x for x in OF_RLOO if x not in ("lora_rloo", "whiten_advantages")]  # alternatives
OF_TOKENS = ("distill", "reinforce_plus_plus")  # responses to a query are not compared
LIMITS = EXPERIMENTS | {"dpo": 46}  # others 25
EXCLUSIVE = [{"lora", x} for x in ("freeze_layers", "ema")]  # what is trained, saved
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
BATCH = tiny.make_contexts([3, 6], 6, vocab=tiny.WORDS), torch.tensor([[4, 9, 2], [7, 1, 30]])


def added(name):
    """The lines that a patch adds."""
    lines = DIFFS[name].split("\n+++ ")[1].splitlines()[1:]
    return [line[1:] for line in lines if line.startswith("+")]


def apply(path, *names):
    """Whether each patch applies to the script `path`, with its context exactly as it is."""
    command = ["patch", "--fuzz=0", "--quiet", "--no-backup-if-mismatch", "--reject-file=-", path]
    diffs = [ROOT / "diffs" / f"{name}.diff" for name in names]
    return all(subprocess.run([*command, x], capture_output=True).returncode == 0 for x in diffs)


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
    folder, modules = tmp_path_factory.mktemp("patched"), {("ppo",): ppo, ("rloo",): rloo}

    def patched(*names):
        if names not in modules:
            path = folder / f"mine_{'_'.join(names)}.py"
            shutil.copy(ROOT / f"{BASES[names[0]]}.py", path)
            assert apply(path, *names)
            modules[names] = tiny.load_script(path)
        return modules[names]

    return patched


# ------------------------------------------------------------------------------------------ patches


def test_the_readme_lists_every_patch_with_its_script_and_number_of_lines():
    rows = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.diff\) \| `(\w+)\.py` \| (\d+) \|", README, re.M)
    assert sorted(rows) == [(name, name, BASES[name], str(len(added(name)))) for name in DIFFS]


@pytest.mark.parametrize("name", DIFFS)
def test_a_patch_adds_few_lines_and_its_command_works(name, patched):
    header = " ".join(DIFFS[name].split("\n--- ")[0].split()).replace("\\ ", "")
    assert header.startswith(f"{name}: ") and " Source: " in header
    command, flags = header.split(" Command: ")[1].split(" python mine.py ")
    assert command == f"cp {BASES[name]}.py mine.py && patch --fuzz=0 mine.py diffs/{name}.diff"
    script = patched(name)
    args = cli.parse_args(script.Args, script.PRESETS, flags.split())
    assert args.task.task in ("synthetic", "arithmetic")
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
    """But not with distill: its teacher would be the initial policy."""
    path = Path(shutil.copy(patched(pair[0]).__file__, tmp_path))
    assert apply(path, pair[1]) == ("lora_rloo" in pair and "distill" not in pair)


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
        teacher = (
            dict(ref_model=f"{folder_of(task)}/teacher") if "distill" in script.__name__ else {}
        )
        return dict(task=task, reward_model=folder_of(task), **SIZES | teacher)
    sizes = dict(batch_size=4, micro_batch_tokens=60, num_heldout=4, lr=1e-2, block_size=10)
    sizes |= dict(num_labels=8, normalize_samples=8, rollout_batch_size=8, task=task)
    return {name: x for name, x in sizes.items() if hasattr(script.Args, name) or name == "task"}


def run_main(script, task, precision="no", moved=False, names=None, run=None, **flags):
    """Two updates by `main` on tiny models; `names` are replaced in the script.

    With `moved`, the policy differs from the reference, and the ratio from 1, at the start.
    """
    run, optimizer = run or KeptRun(), getattr(script, "AdamTF", torch.optim.AdamW)
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
        if moved and len(run.loaded) == 1:
            run.loaded[0].transformer.h[0].mlp.c_fc.weight.data *= 1.3
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

    spies = dict(load_lm=spy_lm, Rollout=spy_rollout)
    spies |= {losses: spy_losses} if compute_losses else {}
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
    tiny.write_model(Path(folder_of(task), "teacher"), seed=5)
    texts = [f"Anna saw {n} {thing}." for n in range(10) for thing in ("cats", "old red houses")]
    Path(folder_of(task), "other.txt").write_text("\n".join(texts))
    return task


def folder_of(task):
    return str(Path(task.base_model).parent)


@pytest.fixture(scope="session")
def start(patched, task):
    """Names of patches and flags, also of the task → `run_main`. Runs of flags alone are kept."""
    runs = {}

    def start(*names, **flags):
        if flags.keys() & {"names", "precision"}:
            return run_main(patched(*names), task, **flags)
        key = names, *flags.items()
        if key not in runs:
            runs[key] = run_main(patched(*names), task, **flags)
        return runs[key]

    return start


def new_policy(task, weights=None):
    """The initial policy of ppo.py, or one with these weights of the language model."""
    lm = models.load_lm(task.base_model)
    lm.load_state_dict(weights or lm.state_dict())
    return ppo.PolicyAndValue(lm, tiny.WORDS, task.temperature)


def assert_step(step, model, loss, atol=2e-5, rtol=2e-3):
    """Assert that a step had the gradient of a loss, which a slow loop computes with the model."""
    model.zero_grad()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(step.grads, grads, atol=atol, rtol=rtol)


def same_numbers(run, other):
    for line, expected in zip(run.metrics, other.metrics, strict=True):
        assert expected.keys() <= line.keys() and len(expected) > 8
        assert all(line[key] == x for key, x in expected.items() if not key.startswith("time/"))


def first_ratio_is_1(run):
    first = [parts[0] for parts in run.parts]
    return all(x["policy/approxkl_avg"] == x["val/ratio_var"] == 0 for x in first) and len(first)


ONLINE = [*OF_PPO, *OF_RLOO, *(x for x in EXPERIMENTS if x != "online_dpo")]  # with ratios
RUNS = [pytest.param(name, "bf16", marks=pytest.mark.slow) for name in ONLINE]
RUNS += [pytest.param("+".join(pair), "no", marks=pytest.mark.slow) for pair in PAIRS]


@pytest.mark.parametrize(("names", "precision"), [(name, None) for name in ONLINE] + RUNS)
def test_L6_a_patched_script_runs_and_its_first_ratio_is_exactly_1(names, precision, start):
    run = start(*names.split("+"), **dict(precision=precision) if precision else {})
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
    ("resid_dropout",): dict(num_epochs=2),
    ("stale",): dict(total_episodes=64, sampler_lag=2),
}


@pytest.mark.parametrize("names", RESUMED, ids="+".join)
def test_X5_X6_P4_a_resumed_run_writes_what_an_undisturbed_run_writes(
    names, patched, task, tmp_path, monkeypatch
):
    """The average, missing moments, the best score so far, dropout's masks, older weights."""
    script, flags = patched(*names), dict(save_every=1, run_name="run") | RESUMED[names]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoints, "KEPT", 100)
    Path("mine.py").write_text("def f(queries, responses): return [len(r) for r in responses]")
    args = tiny.new_args(script, **sizes_of(script, task) | flags)
    script.main(args)
    first = Path("runs/run/checkpoints/00000001.safetensors")
    expected = {path: load_file(path) for path in Path("runs/run").rglob("*.safetensors")}
    for folder in {path.parent for path in expected} - {first.parent}:
        if folder.name not in ("best_0", "best_1"):
            shutil.rmtree(folder)
    for path in {*first.parent.iterdir()} - {first}:
        path.unlink()
    script.main(replace(args, run_name=None, resume=str(first)))
    assert {*Path("runs/run").rglob("*.safetensors")} == {*expected} and len(expected) > 3
    for path, weights in expected.items():
        torch.testing.assert_close(load_file(path), weights, atol=0, rtol=0)


# ------------------------------------------------------------------------------- patches, one by one


@pytest.mark.parametrize("own", [True, False], ids=["reward model", "policy"])
def test_X1_no_loss_reaches_the_other_model_and_a_value_is_the_reward_of_the_text_so_far(
    own, start, tmp_path
):
    """Also if their vocabularies have different sizes. Without a reward model the critic is a copy."""
    reward = tiny.make_reward(pad_id=tiny.WORDS + 8)
    reward.save_pretrained(tmp_path)
    flags = dict(critic_from=str(tmp_path)) if own else {}
    flags |= dict(lr=0.0, gradient_checkpointing=True)
    policy = start("separate_critic", **flags).model
    assert policy.lm.is_gradient_checkpointing
    assert policy.value_head.backbone.is_gradient_checkpointing
    for i, t in product(range(2), range(3)):
        tokens = torch.cat([BATCH[0][i], BATCH[1][i, :t]])
        expected = reward(tokens[tokens != tiny.WORDS][None])[0] * own
        torch.testing.assert_close(policy(*BATCH)[2][i, t], expected, rtol=1e-4, atol=1e-4)
    if not own:  # a head of zeros
        copy, lm = policy.value_head.backbone.state_dict(), policy.lm.base_model.state_dict()
        torch.testing.assert_close(copy, lm, atol=0, rtol=0)
        torch.nn.init.normal_(policy.value_head.head.weight)
    for output, part in ((0, "lm"), (2, "value_head")):
        policy.zero_grad()
        (policy(*BATCH)[output] ** 2).sum().backward()
        reached = {n.split(".")[0] for n, p in policy.named_parameters() if p.grad is not None}
        assert reached == {part}


def test_X1_policy_and_critic_have_their_own_learning_rates_and_gradient_norms(start):
    """The norm of both together would shrink the smaller one, too."""
    steps = start("separate_critic", critic_lr_ratio=0.3).steps
    expected = 4 * [1e-2, 3e-3] + 4 * [5e-3, 1.5e-3]
    assert [lr for step in steps for lr in step.lrs] == pytest.approx(expected)
    plain, run = (start("separate_critic", lr=0.0, max_grad_norm=x) for x in (None, 2.0))
    for step, expected in zip(run.steps, plain.steps, strict=True):
        for part in ("lm.", "value_head."):
            grads = {name: x for name, x in expected.grads.items() if name.startswith(part)}
            norm = math.sqrt(sum((x**2).sum() for x in grads.values()))
            assert (norm > 2) == (part == "lm.")
            for name, x in grads.items():
                scaled = x * min(1, 2 / norm)
                torch.testing.assert_close(step.grads[name], scaled, rtol=1e-4, atol=1e-8)


def test_X4_each_step_adds_the_gradient_of_the_mean_loss_of_other_texts(patched, start, task):
    script, batches = patched("ptx"), []
    spy = lambda policy, texts, *x: batches.append(texts) or ptx_loss(policy, texts, *x)  # noqa: E731
    ptx_loss, other = script.ptx_loss, Path(folder_of(task), "other.txt")
    flags = dict(lr=0.0, ptx_coef=0.5, ptx_dataset=str(other), micro_batch_tokens=20)
    run = start("ptx", names=dict(ptx_loss=spy), **flags)
    plain = start("ppo", lr=0.0, micro_batch_tokens=20)
    assert len(batches) > len(run.steps) == 8  # micro-batches
    batches, means = torch.cat(batches).split(8), []
    assert not torch.equal(batches[0], batches[1])
    for step, without, texts in zip(run.steps, plain.steps, batches, strict=True):
        losses = []
        for row in [row[row != tiny.WORDS] for row in texts]:  # at temperature 1
            logprobs = run.model.lm(row[None]).logits[0, :-1].log_softmax(dim=-1)
            losses.append(-logprobs.gather(1, row[1:, None]))
        means.append(torch.cat(losses).mean())
        others = sum((p * without.grads[name]).sum() for name, p in run.model.named_parameters())
        assert_step(step, run.model, 0.5 * means[-1] + others, atol=1e-5, rtol=1e-3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(task.base_model)
    assert all(x in other.read_text() for x in decode(tokenizer, batches[0], tiny.WORDS))
    found = [line["ppo/loss/ptx_avg"] for line in run.metrics[:2]]
    assert found == pytest.approx([sum(x).item() / 4 for x in (means[:4], means[4:])], rel=1e-4)


def test_X5_the_average_is_updated_after_every_step_and_training_is_unchanged(start, task):
    run = start("ema", ema_decay=0.9)
    for name, x in new_policy(task).lm.named_parameters():
        for step in run.steps:
            x = 0.9 * x + 0.1 * step.weights[f"lm.{name}"]
        torch.testing.assert_close(run.saved["ema"][name], x, atol=1e-6, rtol=0)
        assert not torch.equal(x, run.saved["model"][name])
    assert len(run.steps) == 8
    same_numbers(run, start("ppo"))


def test_X6_at_first_only_the_value_function_learns(start):
    run = start("value_warmup", value_warmup_updates=1)
    initial = start("ppo", lr=0.0).steps[0].weights
    for step, learning in ((run.steps[3], {"value_head"}), (run.steps[-1], {"value_head", "lm"})):
        weights = step.weights.items()
        assert {n.split(".")[0] for n, x in weights if not torch.equal(x, initial[n])} == learning
    steps = {n: run.optimizer.state[p]["step"].item() for n, p in run.model.named_parameters()}
    assert steps == {name: 4 if name.startswith("lm.") else 8 for name in steps}  # Adam's


@pytest.mark.parametrize(("updates", "factor"), [(0, 0.992), (1, 1.0)])
def test_X6_the_adaptive_kl_coef_waits_for_the_policy(updates, factor, start):
    """A frozen policy has a KL of 0, which is no reason to lower the penalty."""
    flags = dict(kl_target=1.0, kl_horizon=400, kl_coef=0.5)
    lines = start("value_warmup", value_warmup_updates=updates, **flags).metrics
    assert lines[0]["objective/kl"] == 0
    found = [line["objective/kl_coef"] for line in lines[:2]]
    assert found == pytest.approx([0.5, 0.5 * factor])


def test_X6_a_frozen_policy_has_no_moments_and_its_gradient_clips_nothing(start):
    """With a critic of its own, as in Qwen. The critic learns as if there was no policy."""
    flags = dict(value_warmup_updates=2, max_grad_norm=0.01)
    run = start("separate_critic", "value_warmup", **flags)
    for name, p in run.model.named_parameters():
        assert (p not in run.optimizer.state) == name.startswith("lm.")
        assert all((step.grads[name] is None) == name.startswith("lm.") for step in run.steps)
    for step in start("value_warmup", **flags).steps:  # the value head is all that learns
        head = [x.flatten() for x in step.grads.values() if x is not None]
        assert len(head) == 2 and torch.cat(head).norm() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("top_p", [0.0, 0.9, 1.0])
def test_X7_the_nucleus_is_the_fewest_tokens_with_probability_top_p(patched, top_p):
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 2
    kept = patched("sampling").keep_top_p(logits, top_p)
    for row, result in zip(logits, kept, strict=True):
        tokens, probs = [], row.softmax(dim=0)
        for token in row.argsort(descending=True).tolist():
            if not tokens or probs[tokens].sum() < top_p - 1e-6:
                tokens.append(token)
        assert {*result.isfinite().nonzero()[:, 0].tolist()} == {*tokens}
        assert torch.equal(result[tokens], row[tokens])


def test_X7_no_response_ends_before_its_minimum_length_or_leaves_the_nucleus(patched):
    script = patched("sampling")
    logits = torch.tensor([3.0, 2.0, 2.0, 1.0, -1.0]) * 0.7  # token 0 ends a response
    batch = dict(rows=torch.arange(400), next_logits=lambda: logits.repeat(400, 1))
    batch = SimpleNamespace(**batch, append=lambda tokens: None)
    inputs = SimpleNamespace(start=lambda *x: batch), torch.zeros(400, 1).long()
    inputs = *inputs, tiny.uniform(5, 400)

    def sample(**flags):
        args = tiny.make_args(script=script, **flags)
        return script.sample(*inputs, TokenIds(5, 0, [], []), args)

    assert torch.equal(sample(), tiny.sample(*inputs, 5))
    ends = (sample(min_response_length=3) == 0).float().mean(dim=0)
    assert not ends[:2].any() and (ends[2:] > 0.4).all()
    nucleus = sample(top_p=0.6)  # probabilities 0.519 0.191 0.191 0.070 0.010 at T = 0.7
    assert nucleus.max() == 1
    assert (nucleus == 0).float().mean().item() == pytest.approx(0.519 / 0.710, abs=0.03)


def test_X8_the_learning_rate_warms_up_and_decays(patched, start):
    script = patched("schedule")
    for flags, expected in (
        (dict(), [0.5, 1, 1, 0.75, 0.5, 0.25]),
        (dict(decay="cosine"), [0.5, 1, 1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]),
        (
            dict(decay="cosine", min_lr_ratio=0.2),
            [0.5, 1, 1, 0.6 + 0.4 * 0.5**0.5, 0.6, 0.6 - 0.4 * 0.5**0.5],
        ),
        (dict(decay="inverse_sqrt"), [0.5, 1, 1, (2 / 3) ** 0.5, 0.5**0.5, 0.4**0.5]),
        (dict(anneal_lr=False), [0.5, 1, 1, 1, 1, 1]),
    ):
        args = tiny.make_args(script=script, **dict(lr=2.0) | flags)
        rates = [script.learning_rate(update, 6, args) for update in range(6)]
        assert rates == pytest.approx([2 * x for x in expected])
    assert [line["ppo/lr"] for line in start("schedule").metrics[:2]] == [5e-3, 1e-2]  # is used


def test_X8_adamw_is_the_librarys(start):
    """Up to epsilon, which A1 defines otherwise."""
    settings = dict(weight_decay=0.3, adam_eps=1e-20)
    run = start("adamw", adam_beta1=0.8, adam_beta2=0.7, **settings)
    params = {name: torch.nn.Parameter(x) for name, x in run.steps[0].before.items()}
    optimizer = torch.optim.AdamW(params.values(), betas=(0.8, 0.7), weight_decay=0.3, eps=1e-20)
    for step in run.steps:
        optimizer.param_groups[0]["lr"] = step.lrs[0]
        for name, p in params.items():
            p.grad = step.grads[name]
        optimizer.step()
        weights = {name: p.data for name, p in params.items()}
        torch.testing.assert_close(step.weights, weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("epochs", [2, 4])
def test_X12_an_update_ends_after_the_epoch_that_moved_the_policy_too_far(start, epochs):
    """Metrics are means over the steps that were taken."""
    flags = dict(num_ppo_epochs=4, total_episodes=16)
    (parts,) = start("ppo", **flags).parts  # without the patch
    size = len(parts) // 4  # micro-batches in an epoch of two steps
    kl = [sum(x["policy/approxkl_avg"] for x in parts[i * size :][:size]) / 2 for i in range(4)]
    assert kl[0] < kl[1] < max(kl[2:])
    limit = {2: (kl[0] + kl[1]) / 2, 4: 2 * max(kl)}[epochs]
    run = start("early_stop", max_approxkl=limit, **flags)
    assert len(run.steps) == 2 * epochs
    for name in parts[0]:
        mean = sum(part[name] for part in parts[: epochs * size]) / (2 * epochs)
        assert run.metrics[0][f"ppo/{name}"] == pytest.approx(mean, rel=1e-4, abs=1e-6)


def test_length_penalty_is_subtracted_for_each_token_of_the_truncated_response(patched):
    task, script = tiny.make_task(truncate_after=0), patched("length_penalty")
    args = tiny.make_args(task, script, length_penalty=0.25)
    responses = [[9, 5, 9, 9, 9], [5, 5, 5, 5, 5], [9, 9, 9, 9, 5], [9, 9, 9, 9, 9]]  # 5 ends
    reward = lambda *texts: torch.tensor([1.0, 2.0, 3.0, 4.0])  # noqa: E731
    inputs = reward, None, torch.tensor(responses), {}, tiny.IDS, args
    expected = [1 - 0.25 * 2, 2 - 0.25, 3 - 0.25 * 5, -1 - 0.25 * 5]
    assert script.score_responses(*inputs)[0].tolist() == expected


def test_X14_a_token_gets_what_it_adds_to_the_score_and_the_last_one_gets_the_rest(patched):
    """The score of a text is the sum of its ids, of each query 10; 5 ends three of the responses."""
    task = tiny.make_task(truncate_after=0, missing_eos_penalty=-3.0)
    script = patched("dense_rewards")
    queries = torch.full((4, 8), tiny.PAD).index_fill(1, torch.tensor([7]), 10)
    responses = [[2, 5, 9, 9, 9], [2, 3, 4, 1, 5], [2, 3, 4, 1, 1], [5, 9, 9, 9, 9]]
    reward = lambda *x: sum((y * (y != tiny.PAD)).sum(dim=1) for y in x).float()  # noqa: E731
    inputs = dict(queries=queries, responses=torch.tensor(responses), reward=reward, kl_coef=0.5)
    rollout = tiny.make_rollout(tiny.make_policy(), tiny.make_args(task, script), script, **inputs)
    dense = [[2, 5, 0, 0, 10], [2, 3, 4, 1, 5 + 10], [2, 3, 4, 1, 1 - 3 - 11], [5, 0, 0, 0, 10]]
    torch.testing.assert_close(rollout.rewards + 0.5 * rollout.kl, torch.tensor(dense).float())


def test_X14_rloo_whitens_advantages_over_the_batch(patched):
    script = patched("whiten_advantages")
    rewards = torch.randn(8, generator=torch.Generator().manual_seed(0))
    r = rewards.double().numpy().reshape(4, 2)  # [K, P]
    plain = np.array([r[i] - (r.sum(axis=0) - r[i]) / 3 for i in range(4)]).ravel()
    for whiten, expected in ((False, plain), (True, (plain - plain.mean()) / plain.std())):
        args = tiny.make_args(script=script, rloo_k=4, whiten_advantages=whiten)
        found = script.compute_advantages(rewards, args)
        assert found.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("eos", [False, True])
def test_X3_trlx_kl_is_what_a_slow_loop_over_queries_and_responses_gives(eos, start, task):
    """By trlX's formula, exp(x) - 1 - x with x = log pi - log pi_ref; roots of the means."""
    run = start("trlx_kl", lr=0.0, moved=True, **EOS if eos else {})
    rollout, _ = run.rollouts[0]
    sums, positions = [], rollout.contexts.numel() + rollout.responses.numel() - 16  # padding, too
    for texts in zip(rollout.contexts, rollout.responses, strict=True):
        ids = torch.cat([text[text != tiny.WORDS] for text in texts])
        x = 0
        for sign, lm in ((1, run.model.lm), (-1, new_policy(task).lm)):
            logps = (lm(ids[None]).logits[0, :-1] / 0.7).log_softmax(dim=-1)
            x = x + sign * logps.gather(1, ids[1:, None])
        sums.append((x.exp() - 1 - x).sum().item())
    expected = math.sqrt(sum(sums) / 16), math.sqrt(sum(sums) / positions)
    found = [run.metrics[0][f"trlx/policy/{name}"] for name in ("sqrt_kl", "kl_per_token")]
    assert found == pytest.approx(expected, rel=1e-3) and expected[0] > 0.01


@pytest.mark.parametrize("name", ["lora", "lora_rloo"])
def test_lora_the_base_model_is_the_reference(name, start, task):
    (first, _), (second, _) = start(name).rollouts
    assert not first.kl.any() and second.kl.any()
    expected = new_policy(task)(second.contexts, second.responses)[0]
    torch.testing.assert_close(second.logprobs - second.kl, expected, rtol=1e-4, atol=1e-4)
    assert len(start(name).loaded) == 2  # to train and to save: evaluations merge what is kept


LORA = {"lora": 2, "lora_rloo": 0, "lora_train_reward": 4, "lora_sft": 0}  # weights beside adapters


@pytest.mark.parametrize("name", LORA)
def test_lora_trains_adapters_and_saves_them_merged(name, start, task):
    run = start(name, lora_rank=2)
    trained = {x for x, grad in run.steps[-1].grads.items() if grad is not None}
    assert {x for x in run.steps[-1].grads if "lora_" in x} <= trained
    assert len(trained) == 2 * 2 * 4 + LORA[name]  # A and B of 4 layers in 2 blocks
    lm, saved = models.load_lm(task.base_model, length=16), run.saved["model"]
    prefix = "backbone." if name == "lora_train_reward" else "transformer."
    for key, before in lm.base_model.state_dict().items():
        change = (saved[prefix + key] - before).double()
        assert change.any() == bool(re.fullmatch(r"h\.\d\.(attn|mlp)\.c_\w+\.weight", key)), key
        assert not change.any() or torch.linalg.matrix_rank(change, rtol=1e-4) <= 2
    tokens = tiny.make_contexts([8, 3, 5], 8, vocab=tiny.WORDS)
    if name == "lora_train_reward":
        merged, inputs = train_reward.new_reward_model(task.base_model, tiny.WORDS), (tokens,)
        merged.load_state_dict(saved)
    elif name == "lora_sft":
        lm.load_state_dict(saved)
        merged, inputs = sft.LanguageModel(lm, tiny.WORDS), (tokens, 1)
    else:
        merged, inputs = new_policy(task, saved), (tokens, tokens[:, 5:].flip(1))
    found, expected = (model(*inputs) for model in (run.model, merged))
    if isinstance(found, tuple):
        found, expected = found[0], expected[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_lora_adapters_are_merged_into_the_model_that_a_link_pointed_to(start, task, tmp_path):
    """Another run may change `models/<task>/sft` meanwhile. The adapters start as a change of 0."""
    link = tmp_path / "sft"
    link.symlink_to(task.base_model)
    other = tiny.write_model(tmp_path / "other", seed=5)

    def relink(device):
        link.unlink()
        link.symlink_to(other)
        return sft.Timer(device)

    run = start("lora_sft", base_model=str(link), names=dict(Timer=relink), lr=1e-9)
    expected = load_file(f"{task.base_model}/model.safetensors")["transformer.wte.weight"]
    assert link.resolve() == other
    assert torch.equal(run.saved["model"]["transformer.wte.weight"], expected)


def test_reference_on_cpu_is_on_the_device_only_for_its_forward_passes(patched, start):
    policy, ref, events = tiny.make_policy(), tiny.make_policy(), []
    ref.to = lambda device: events.append(device) or ref
    ref.register_forward_pre_hook(lambda *inputs: events.append("forward"))
    script = patched("reference_on_cpu")
    tiny.make_rollout(policy, tiny.make_args(script=script), script, ref=ref)
    _, *events = events  # `distributed.freeze` moves it first
    forwards = ["forward"] * (len(events) - 2)
    assert events == [torch.device("cpu"), *forwards, "cpu"] and len(forwards) > 1
    same_numbers(start("reference_on_cpu"), start("ppo"))


def test_samples_per_query_are_different_responses_to_the_same_queries(start):
    for rollout, _ in start("samples_per_query", samples_per_query=4).rollouts:
        assert rollout.contexts.unique(dim=0, return_counts=True)[1].tolist() == [4] * 4
        assert len(rollout.responses.unique(dim=0)) > 12


@pytest.mark.parametrize("tied", [True, False])
def test_freeze_layers_trains_what_is_after_the_lower_layers(tied, patched, task):
    """A head that is the embeddings is frozen, too."""
    settings = dict(tie_word_embeddings=tied)
    config = transformers.AutoConfig.from_pretrained(task.base_model, **settings)
    lm = AutoModelForCausalLM.from_config(config)
    patched("freeze_layers").freeze_below(lm, 1)
    above = ("transformer.h.1.", "transformer.ln_f.", "lm_head")
    for name, p in lm.named_parameters():
        assert p.requires_grad == name.startswith(above), name


def test_freeze_layers_saves_what_has_learned(start, task):
    after = start("freeze_layers", unfrozen_layers=1).saved["model"]
    for name, before in new_policy(task).lm.state_dict().items():
        top = name.startswith(("transformer.h.1.", "transformer.ln_f."))
        assert torch.equal(after[name], before) != top


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_P4_residual_dropout_drops_what_attention_and_mlp_add_in_training_only(
    kind, patched, tmp_path
):
    """Entries are 0 or scaled by 1 / (1 - p); embeddings and attention weights have no dropout."""
    folder = str(tiny.write_model(tmp_path / "m", kind, dropout=0.5))
    plain, lm = models.load_lm(folder), models.load_lm(folder)
    patched("resid_dropout").set_residual_dropout(lm, 0.25)
    tokens, seen = torch.arange(1, 33)[None], []
    assert torch.equal(lm.eval()(tokens).logits, plain(tokens).logits)
    assert not any("drop" in key and value for key, value in lm.config.to_dict().items())
    for module in lm.train().modules():
        if isinstance(module, torch.nn.Dropout) and module.p:
            module.register_forward_hook(lambda module, inputs, out: seen.append((*inputs, out)))
    lm(tokens)
    assert len(seen) == 4  # two in each of two layers
    for before, after in seen:
        kept = after != 0
        assert kept.float().mean().item() == pytest.approx(0.75, abs=0.06)
        torch.testing.assert_close(after[kept], before[kept] / 0.75)


def test_P4_dropout_is_in_training_of_sft(start):
    flags = dict(resid_dropout=0.0), dict(resid_dropout=0.1), dict(resid_dropout=0.1, seed=1)
    runs = [start("resid_dropout", **x) for x in flags]
    losses = [[line["loss"] for line in run.metrics if "loss" in line] for run in runs]
    assert losses[1] == losses[2] and losses[0][0] != losses[1][0]


# ------------------------------------------------------------------------- algorithms, by slow loops


def uneven_responses(lm, contexts, ids, args, rng):
    """In place of `sample_in_batches`: random tokens, and the end after 1 to 5."""
    responses = torch.randint(20, 90, (len(contexts), args.task.response_length), generator=rng)
    return responses.scatter(1, torch.arange(len(contexts))[:, None] % 5, ids.truncate)


UNEVEN = dict(sample_in_batches=uneven_responses)


def slow_advantages(name, rollout, kl_coef):
    """An advantage for each real token of each response."""
    scores, contexts = rollout.scores.tolist(), rollout.contexts.tolist()
    kl = [row[:n] for row, n in zip(rollout.kl.tolist(), rollout.mask.sum(dim=1), strict=True)]
    rows = range(len(kl))
    if name == "distill":
        return [[-x for x in row] for row in kl]
    if name == "reinforce_plus_plus":
        returns = [[scores[i] - kl_coef * sum(kl[i][t:]) for t in range(len(kl[i]))] for i in rows]
        tokens = sum(returns, [])
        mean, deviation = statistics.mean(tokens), statistics.pstdev(tokens)
        return [[(x - mean) / deviation for x in row] for row in returns]
    penalties = [(name != "grpo") * kl_coef * sum(kl[i]) for i in rows]
    after = name in ("cispo", "gspo")  # the penalty is subtracted from the standardized score
    rewards = [scores[i] - (not after) * penalties[i] for i in rows]
    advantages = []
    for i in rows:
        group = [j for j in rows if contexts[j] == contexts[i]]
        values = [rewards[j] for j in group]
        scale = 1 if name == "dr_grpo" else statistics.stdev(values) + 1e-4
        advantages.append((rewards[i] - statistics.mean(values)) / scale)
        if after:
            advantages[i] -= penalties[i] - statistics.mean(penalties[j] for j in group)
    return [[advantages[i]] * len(kl[i]) for i in rows]


BOUNDS = dict(dapo=(0.9, 1.2), gspo=(0.9, 1.05), cispo=(0.0, 1.1))  # of the ratio; others 0.8, 1.2


def slow_losses(name, log_ratios, logprobs, advantages, ref_logprobs, kl_coef):
    """A loss for each real token of one response: [n] each → [n]."""
    low, high = BOUNDS.get(name, (0.8, 1.2))
    if name == "gspo":  # the same for all tokens: the geometric mean
        log_ratios = [sum(log_ratios) / len(log_ratios)] * len(log_ratios)
    losses, clipped = [], 0
    for t, (log_ratio, advantage) in enumerate(zip(log_ratios, advantages, strict=True)):
        ratio = torch.exp(log_ratio)
        objective = torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
        clipped += not low < ratio < high
        if name == "cispo":
            objective = min(ratio.item(), high) * advantage * logprobs[t]
        if name == "grpo":
            log_r = ref_logprobs[t] - logprobs[t]
            objective = objective - kl_coef * (torch.exp(log_r) - 1 - log_r)
        losses.append(-objective)
    return losses, clipped


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_of_updates_are_those_of_a_slow_loop(name, patched, start):
    """With responses of uneven length, a KL to the reference, and ratios that clip.

    In some groups all scores are equal; only dapo leaves those out.
    """
    script, epochs, (low, high) = patched(name), [], BOUNDS.get(name, (0.8, 1.2))
    own_reward = script.load_reward

    def load_reward(*inputs):
        score = own_reward(*inputs)
        return lambda x, *texts: torch.where(x.sum(dim=1) % 2 == 0, 0.5, score(x, *texts))

    names = UNEVEN | dict(shuffle=tiny.keep(rloo.shuffle, epochs), load_reward=load_reward)
    flags = dict(kl_coef=0.3, kl_target=0.01, kl_horizon=50, lr=0.0, num_ppo_epochs=1, rloo_k=4)
    flags |= dict(cliprange=1 - low, cliprange_high=high - 1)
    flags = {key: x for key, x in flags.items() if hasattr(script.Args, key)}
    run = start(name, moved=True, names=names, **EOS, **flags)
    steps, clipped, kl_coefs, left_out = iter(run.steps), 0, [], 0
    for (rollout, old), (minibatches,), line in zip(
        run.rollouts, epochs, run.metrics, strict=False
    ):
        kl_coefs.append(line["objective/kl_coef"])
        seen = old if name in ("cispo", "gspo") else rollout  # whose kl or rewards main reads
        advantages = slow_advantages(name, seen, kl_coefs[-1])
        assert {len(row) for row in advantages} == {1, 2, 3, 4, 5}
        assert rollout.kl.abs().sum(dim=1).mean() > 0.1
        groups = [(rollout.contexts == context).all(dim=1) for context in rollout.contexts]
        alike = [len(rollout.scores[group].unique()) == 1 for group in groups]
        if name not in OF_TOKENS:
            assert line["objective/frac_reward_zero_std"] == sum(alike) / 16
        left_out += sum(alike)
        for rows in minibatches:
            loss, logprobs = 0.0, run.model(rollout.contexts, rollout.responses)[0]
            learned = [i for i in rows.tolist() if name != "dapo" or not alike[i]]
            tokens = sum(len(advantages[i]) for i in learned)
            for i in learned:
                n = len(advantages[i])
                log_ratios = logprobs[i, :n] - old.logprobs[i, :n]
                ref_logprobs = rollout.logprobs[i] - rollout.kl[i]
                inputs = logprobs[i], advantages[i], ref_logprobs, kl_coefs[-1]
                losses, outside = slow_losses(name, list(log_ratios), *inputs)
                weight = {"grpo": 1 / n / 8, "gspo": 1 / n / 8, "dr_grpo": 1 / 8 / 5}
                loss += sum(losses) * weight.get(name, 1 / tokens)
                clipped += outside
            assert_step(next(steps), run.model, loss)
    kl = run.rollouts[0][1].kl.sum(dim=1).mean()  # may be negative: the policy did not sample these
    assert kl_coefs == pytest.approx([0.3, 0.3 * (1.064 if kl > 0.012 else 0.936)])
    assert clipped > 10 and not 0.008 < kl < 0.012
    assert 0 < left_out < 32


@pytest.mark.parametrize("name", [x for x in ALGORITHMS if x not in OF_TOKENS])
def test_a_group_with_equal_rewards_has_advantages_of_exactly_zero(name, patched):
    rewards = torch.tensor([1.0, 0.1, 2.0, 0.1, 3.0, 0.1])  # of two queries: 1 2 3 and 0.1
    of_scores = SimpleNamespace(scores=rewards, kl=torch.zeros(6, 1)), 0.5
    inputs, script = of_scores if name in ("cispo", "gspo") else (rewards,), patched(name)
    advantages = script.compute_advantages(*inputs, tiny.make_args(script=script, rloo_k=3))
    torch.testing.assert_close(advantages[::2], torch.tensor([-1.0, 0, 1]), atol=2e-4, rtol=0)
    assert not advantages[1::2].any()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_statistics_are_means_over_what_is_learned_also_in_eos_tasks(name, start):
    """Not over a constant: in a first step the mean ratio is 1, however short responses are."""
    run = start(name, names=UNEVEN, num_ppo_epochs=1, num_minibatches=1, **EOS)
    for line, (rollout, _) in zip(run.metrics, run.rollouts, strict=False):
        assert rollout.mask.float().mean() < 0.8
        assert line["ppo/val/ratio"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("score", "kl_estimator"), [(0.0, "k1"), (5.0, "k3")])
def test_distill_the_reward_of_a_token_is_its_log_ratio_to_the_teacher(
    score, kl_estimator, start, task
):
    """Of each text alone, 0 at padding, whatever the score and the estimator of the metric."""
    reward = lambda queries, *inputs: torch.full([len(queries)], score)  # noqa: E731
    names = UNEVEN | dict(load_reward=lambda *inputs: reward)
    run = start("distill", names=names, kl_estimator=kl_estimator, lr=0.0, **EOS)
    lm = models.load_lm(f"{folder_of(task)}/teacher")
    teacher, (rollout, _), kl = rloo.Policy(lm, tiny.WORDS, 0.7), run.rollouts[0], 0
    for i, texts in enumerate(zip(rollout.contexts, rollout.responses, strict=True)):
        x, y = (tiny.run_alone(model, *texts)[0] for model in (teacher, run.model))
        expected = torch.nn.functional.pad(x - y, (0, 4 - i % 5))
        torch.testing.assert_close(rollout.rewards[i], expected, atol=1e-4, rtol=1e-4)
        kl += ((y - x) if kl_estimator == "k1" else (x - y).exp() - 1 - (x - y)).sum().item()
    assert run.metrics[0]["objective/kl"] == pytest.approx(kl / 16, abs=1e-4)
    assert run.metrics[0]["objective/scores"] == score


def test_dapo_a_batch_without_signal_changes_nothing(start):
    names = dict(load_reward=lambda *a: lambda queries, *inputs: torch.ones(len(queries)))
    run = start("dapo", names=names)
    assert not any(grad.any() for step in run.steps for grad in step.grads.values())
    assert [x["objective/frac_reward_zero_std"] for x in run.metrics[:2]] == [1, 1]


ORDER = np.random.default_rng([1, 0, 1]).permutation(8).reshape(2, 4)  # of labels, in two steps


@pytest.mark.parametrize("k", [2, 4])
def test_dpo_gradients_and_metrics_are_those_of_a_slow_loop(k, start, task):
    """Of two responses, the loss is -log sigmoid of beta times the difference of log-ratios."""
    every = labels.load_labels(task, *load_tokenizer(task, 5))
    few = labels.Labels(every.queries, [x[:k] for x in every.responses], every.best % k)
    flags = dict(beta=0.3, query_prefix="Story: ")
    prefix = load_tokenizer(replace(task, query_prefix="Story: "), 5)[1].prefix
    run = start("dpo", names=dict(load_labels=lambda *a: few), **flags)

    def logprob(lm, query, response):
        tokens = torch.tensor([[*prefix, *query, *response]])
        logps = (lm(tokens).logits[0, :-1] / 0.7).log_softmax(dim=-1)
        return logps.gather(1, tokens[0, 1:, None])[-len(response) :].sum()

    ref = models.load_lm(task.base_model)
    for step, rows, line in zip(run.steps, ORDER, run.metrics, strict=False):
        run.model.load_state_dict(step.before, strict=False)
        losses, margins, correct = [], [], 0
        for row in rows:
            query, best = few.queries[row], few.best[row]
            pairs = [
                [logprob(x, query, y) for x in (run.model.lm, ref)] for y in few.responses[row]
            ]
            rewards = [0.3 * (ours - theirs.detach()) for ours, theirs in pairs]
            others = [x for i, x in enumerate(rewards) if i != best]
            losses.append(torch.log(1 + sum(torch.exp(x - rewards[best]) for x in others)))
            margins.append((rewards[best] - sum(others) / (k - 1)).item())
            correct += (rewards[best] >= max(rewards)) / rewards.count(max(rewards))
        assert_step(step, run.model, sum(losses) / 4, atol=1e-5)
        assert line["loss"] == pytest.approx(sum(losses).item() / 4, abs=1e-5)
        assert line["margin"] == pytest.approx(sum(margins) / 4, abs=1e-5)
        assert line["accuracy"] == correct / 4  # at first all rewards are 0: 1/k
    assert prefix and len(run.steps) == 2


@pytest.mark.parametrize("ranked", [True, False])
def test_X15_gradients_are_those_of_a_slow_loop_over_the_labels(ranked, start, task, tmp_path):
    """The mean over the comparisons of one prompt; 0 if all of its responses are tied."""
    rows, path = json.loads(Path(task.label_dataset).read_text()), tmp_path / "labels.json"
    ranks = [[1 + int(k != row["best"]) for k in range(4)] for row in rows]
    if ranked:
        ranks = [[1 + (k - row["best"]) % 4 for k in range(4)] for row in rows]
        ranks[0] = [1, 1, 1, 1]
        rows = [row | {"ranks": x} for row, x in zip(rows, ranks, strict=True)]
    path.write_text(json.dumps(rows))
    run = start("ranking", label_dataset=str(path))
    few = labels.load_labels(task, *load_tokenizer(task, 5))
    assert len(run.steps) == 2
    for step, batch, line in zip(run.steps, ORDER, run.metrics, strict=False):
        run.model.load_state_dict(step.before, strict=False)
        loss = 0
        for i in batch:
            rewards = [run.model(torch.tensor([[*few.queries[i], *x]])) for x in few.responses[i]]
            pairs = [(a, b) for a, b in product(range(4), repeat=2) if ranks[i][a] < ranks[i][b]]
            losses = [torch.log(1 + torch.exp(rewards[b] - rewards[a])) for a, b in pairs]
            loss = loss + sum(losses) / max(len(losses), 1) / 4
        assert_step(step, run.model, loss, atol=1e-5)
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-4)


def test_R4_prompt_batches_has_each_pair_once_and_those_of_a_prompt_side_by_side(
    patched, start, tmp_path
):
    rows = [{"prompt": f"Q{i % 3}", "chosen": f" a{i}", "rejected": " no"} for i in range(8)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script, seen = patched("prompt_batches"), []
    own = script.candidate_tokens
    spy = lambda labels, rows, *rest: seen.extend(rows) or own(labels, rows, *rest)  # noqa: E731
    start("prompt_batches", label_dataset=str(path), names={"candidate_tokens": spy})
    trained = [int(row) for row in seen[:8]]  # the rest is held out
    prompts = [row % 3 for row in trained]
    assert sorted(trained) == list(range(8))
    assert sum(a != b for a, b in itertools.pairwise(prompts)) == 2  # three runs of equal ones


# ---------------------------------------------------------------------------------- experiments


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("tools", dict(tool_fn="json:dumps", tool_calls=0)),
        ("stale", dict(sampler_lag=0)),
        ("sampling_gap", dict()),
    ],
)
def test_an_experiment_that_is_off_is_rloo(name, flags, start):
    run, plain = start(name, **flags), start("rloo")
    weights = [[step.weights for step in x.steps] for x in (run, plain)]
    torch.testing.assert_close(*weights, atol=0, rtol=0)
    same_numbers(run, plain)
    if name == "sampling_gap":  # rounding
        assert 0 < run.metrics[0]["objective/sampling_gap"] < 1e-5


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_tools_sampling_continues_after_what_the_tool_inserts(calls, patched, monkeypatch):
    """As a slow loop does; the answer depends on the response so far, and is cut at R tokens."""
    script, lm, task = patched("tools"), tiny.make_lm(), tiny.make_task(response_length=12)
    contexts, uniform = tiny.make_contexts([3, 6, 8, 1] * 4, 8), tiny.uniform(12, 16)
    decoder = Decoder(lm, 12)
    caller = tiny.sample(decoder, contexts, uniform).flatten().mode().values.item()
    tokenizer = tiny.Tokenizer()
    tokenizer.encode = lambda text, **settings: [int(x) for x in text.split()]
    tool = lambda contexts, responses: [f"{len(x.split())} 7" for x in responses]  # noqa: E731
    monkeypatch.setattr(script, "load_tool", lambda args: (tool, tokenizer, caller))
    args = tiny.make_args(task, script, tool_fn="mine.py:tool", tool_calls=calls)
    found = script.sample(decoder, contexts, uniform, tiny.IDS, args)
    for row, context in enumerate(contexts):
        tokens, expected, waiting, left = context[context != tiny.PAD].tolist(), [], [], calls
        for t in range(12):
            inserted = bool(waiting)
            logits = lm(torch.tensor([tokens])).logits[:, -1] / task.temperature
            token = waiting.pop(0) if waiting else sample_token(logits, uniform[t, row : row + 1])
            tokens.append(int(token))
            called = token == caller and not inserted and left
            expected.append(int(token) + (inserted - bool(called)) * (tiny.PAD + 1))
            if called:
                waiting, left = [t + 1, 7], left - 1
        assert found[row].tolist() == expected
    assert (found > tiny.PAD).any() == (calls > 0)


def inserted_responses(lm, contexts, ids, args, rng):
    """In place of `sample_in_batches`: a tool wrote tokens 1 and 2; the end is at 3, 4 or missing."""
    responses = torch.randint(20, 90, (len(contexts), 5), generator=rng)
    ends = 3 + torch.arange(len(contexts)) % 3
    responses[torch.arange(5) == ends[:, None]] = ids.truncate
    responses[:, 1:3] += ids.pad + 1
    return responses


@pytest.mark.parametrize("name", [None, *ALGORITHMS])
def test_tools_inserted_tokens_are_in_no_loss_kl_or_length(name, start):
    names = dict(sample_in_batches=inserted_responses)
    run = start(*filter(None, ("tools", name)), moved=True, names=names, lr=0.0, **EOS)
    (rollout, old), line = run.rollouts[0], run.metrics[0]
    expected = [[True, False, False, True, i % 3 > 0] for i in range(16)]
    assert old.mask.tolist() == expected
    assert line["objective/response_length"] == pytest.approx(sum(map(sum, expected)) / 16)
    logprobs, entropies = run.model(old.contexts, old.responses)
    for x in (logprobs, entropies, rollout.logprobs, rollout.kl):
        assert torch.equal(x != 0, old.mask)
    for i, (context, response) in enumerate(zip(old.contexts, old.responses, strict=True)):
        alone = tiny.run_alone(run.model, context, response % (tiny.WORDS + 1))[0]
        torch.testing.assert_close(logprobs[i][old.mask[i]], alone[old.mask[i][: len(alone)]])
    if name == "reinforce_plus_plus":  # the score is at the last token, not at the number of tokens
        rewards = rollout.rewards + line["objective/kl_coef"] * rollout.kl
        last = torch.tensor([[4 if row[4] else 3] for row in expected])
        scores = torch.zeros(16, 5).scatter(1, last, rollout.scores[:, None])
        torch.testing.assert_close(rewards, scores, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["small", pytest.param("smollm2", marks=pytest.mark.slow)])
def test_tools_a_message_becomes_the_users_turn_and_does_not_end_the_response(
    kind, patched, tmp_path, monkeypatch
):
    """The token that ends the policy's turn calls the tool. Written out by hand in ChatML."""
    script, end = patched("tools"), test_tokens.END
    tokenizer = getattr(test_tokens, f"{kind}_tokenizer")()
    tiny.make_lm(vocab=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    Path("user.py").write_text("def ask(*texts): return [dict(role='user', content='Why?')]")
    changes = dict(truncate_token=end, truncate_after=0, eos_task=True)
    changes |= dict(base_model=str(tmp_path / "model"))  # `load_tool` is cached
    flags = dict(tool_fn="user.py:ask", tool_token=end)
    args = tiny.make_args(tiny.make_task(**changes), script, **flags)
    ids = load_tokenizer(args.task, 5)[1]
    responses, start = torch.full((1, 60), ids.pad), 0
    for message in ("It is.", "I saw."):  # the second may call no more
        assert not script.truncate(responses, ids.truncate, 0, ids.pad)[1]
        tokens = tokenizer.encode(message + end, add_special_tokens=False)
        responses[0, start : start + len(tokens)] = torch.tensor(tokens)
        script.insert_answers(responses, responses, start + len(tokens) - 1, ids, args)
        start = int((responses != ids.pad).sum())
    responses[0, start:] = tokens[0]
    truncated, ended = script.truncate(responses, ids.truncate, 0, ids.pad)
    text = f"It is.{end}\n<|im_start|>user\nWhy?{end}\n<|im_start|>assistant\nI saw.{end}"
    tokens = (truncated % (ids.pad + 1))[truncated != ids.pad]
    assert ended and tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text


def test_stale_responses_are_those_of_the_policy_of_two_updates_ago(start):
    """Those before the first update are of the initial policy; an evaluation is of today's."""
    flags = dict(total_episodes=64, sampler_lag=2, kl_coef=0.3, kl_target=None)
    run = start("stale", **flags)
    starts = [step.before for step in run.steps[::4]]  # of each update
    for update, ((rollout, _), line) in enumerate(zip(run.rollouts, run.metrics, strict=False)):
        logprobs = []
        for weights in (starts[max(update - 2, 0)], starts[update], starts[0]):
            run.model.load_state_dict(weights, strict=False)
            logprobs.append(run.model(rollout.contexts, rollout.responses)[0].detach())
        sampler, policy, ref = logprobs
        torch.testing.assert_close(rollout.sampler_logprobs, sampler, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(rollout.logprobs, policy, atol=1e-4, rtol=1e-4)
        assert (update == 0) == torch.equal(rollout.logprobs, rollout.sampler_logprobs)
        expected = rollout.scores - 0.3 * (policy - ref).sum(dim=1)
        torch.testing.assert_close(rollout.rewards, expected, atol=1e-3, rtol=1e-3)
        kl = (sampler - ref).sum(dim=1).mean().item()  # of the policy that sampled
        assert line["objective/kl"] == pytest.approx(kl, abs=1e-3)
    assert run.metrics[0]["ppo/val/weight"] == 1 and 0 < run.metrics[-2]["ppo/val/weight"] < 2
    expected = start("stale", **flags | dict(sampler_lag=0)).metrics[0]
    assert run.metrics[0] | expected == run.metrics[0] | dict(expected)


@pytest.mark.parametrize("max_weight", [None, 1.5])
def test_stale_the_loss_of_a_response_is_weighted_by_its_truncated_ratio(max_weight, patched):
    script, generator = patched("stale"), torch.Generator().manual_seed(0)
    args = tiny.make_args(script=script, max_weight=max_weight)
    sampler, old, new = -torch.rand(3, 8, 5, generator=generator)
    record = SimpleNamespace(sampler_logprobs=sampler, logprobs=old)
    advantages = torch.randn(8, generator=generator)
    loss, stats = script.rloo_loss(new, record, advantages, 8, args)
    weights = [min(math.exp((old - sampler)[i].sum()), 1.5) if max_weight else 1 for i in range(8)]
    rows = [slice(i, i + 1) for i in range(8)]
    inputs = [(new[i], SimpleNamespace(logprobs=old[i]), advantages[i], 8, args) for i in rows]
    each = [rloo.rloo_loss(*x)[0].item() for x in inputs]
    assert loss.item() == pytest.approx(sum(w * x for w, x in zip(weights, each, strict=True)))
    assert stats["val/weight"].item() == pytest.approx(sum(weights) / 8)
    assert stats["val/weight_truncated"] == sum(w == 1.5 for w in weights) / 8 < 1


def test_vine_values_are_mean_scores_of_continuations_and_advantages_are_what_parts_add(
    patched, start
):
    """Each first continuation ends at once, each second one never; a score is a number of tokens."""
    script, seen, token_advantages = patched("vine"), [], patched("vine").token_advantages

    def continue_responses(decoder, contexts, ids, args, rng, length=0):
        if not length:
            return uneven_responses(decoder, contexts, ids, args, rng)
        assert not (contexts[:, -1] == ids.pad).any()
        half = torch.full((len(contexts) // 2, length), 40)
        return torch.cat([torch.full_like(half, ids.truncate), half])

    def spy(*inputs):
        seen.append((*inputs, token_advantages(*inputs)))
        return seen[-1][-1]

    count = lambda queries, responses, columns: (responses != tiny.WORDS).sum(dim=1).float()  # noqa: E731
    names = dict(sample_in_batches=continue_responses, token_advantages=spy)
    names |= dict(load_reward=lambda *inputs: count)
    flags = dict(vine_every=2, vine_samples=2, kl_coef=0.3, missing_eos_penalty=-2.0)
    start("vine", moved=True, names=names, **EOS, **flags)
    for rollout, values, args, advantages in seen:
        scores = rollout.scores.view(4, -1)
        start = ((scores.sum(dim=0) - scores) / 3).flatten()  # the mean of the others
        penalties = script.compute_advantages(rollout.rewards - rollout.scores, args)
        assert penalties.all()
        for i, row in enumerate(advantages - penalties[:, None]):
            length = i % 5 + 1
            expected = [length if length <= t else (t + 1 - 2) / 2 for t in (2, 4)] + [length]
            assert values[i].tolist() == expected
            parts = np.diff([start[i].item(), *expected])
            assert row.tolist() == pytest.approx(parts.repeat(2)[:5].tolist(), abs=1e-5)


def test_vine_without_values_in_between_has_the_gradient_of_rloo(start):
    """At a first step; up to a factor, since the loss is a mean over tokens, not responses."""
    flags = dict(lr=0.0, micro_batch_tokens=1000)
    run = start("vine", vine_every=5, **flags)
    expected = start("rloo", **flags).steps[0].grads
    found = {name: 5 * x for name, x in run.steps[0].grads.items()}
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("alike", [False, True])
def test_online_dpo_raises_the_best_response_and_lowers_the_worst(alike, start, task):
    """Query by query, with log-probabilities of each response alone. Equal scores: no gradient."""
    reward = lambda *texts: (1 - alike) * texts[1].sum(dim=1).float()  # noqa: E731
    flags = dict(lr=0.0, num_minibatches=1, kl_coef=0.3, kl_target=None)
    names = dict(load_reward=lambda *inputs: reward)
    run = start("online_dpo", moved=True, names=names, **flags)
    (rollout, _), loss = run.rollouts[0], 0
    ref = rloo.Policy(run.loaded[1].requires_grad_(False), tiny.WORDS, task.temperature)
    for query in range(4):
        log_ratios = []
        for choose in (max, min):  # the first of several
            i = choose(range(query, 16, 4), key=lambda i: rollout.scores[i])
            text = rollout.contexts[i], rollout.responses[i]
            ours, theirs = (tiny.run_alone(model, *text)[0] for model in (run.model, ref))
            log_ratios.append((ours - theirs).sum())
        loss -= torch.sigmoid(0.3 * (log_ratios[0] - log_ratios[1])).log() / 4
    assert alike == (max(x.abs().max() for x in run.steps[0].grads.values()) < 1e-6)
    assert_step(run.steps[0], run.model, loss, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("correct", [False, True])
def test_grpo_the_expected_gradient_of_the_kl_loss_is_that_of_one_of_the_two_kls(correct, patched):
    """k3's is KL(pi_ref || pi)'s, with the ratio KL(pi || pi_ref)'s: over all 8 equal chances."""
    logits = torch.tensor([4.0, 2, 1, 1]).log().requires_grad_()
    ref, tokens = torch.tensor([-1.0, 0.3, 0.0, 1.2]).log_softmax(dim=0), [0, 0, 0, 0, 1, 1, 2, 3]
    logprobs = logits.log_softmax(dim=0)
    new = logprobs[tokens][:, None]
    old = SimpleNamespace(logprobs=new.detach(), mask=new == new)
    old.kl = old.logprobs - ref[tokens][:, None]
    script = patched("grpo")
    args = tiny.make_args(script=script, correct_kl_gradient=correct)
    _, kl_loss, _ = script.rloo_loss(new, old, torch.zeros(8), 8, args)
    kl = logprobs.exp() @ (logprobs - ref) if correct else ref.exp() @ (ref - logprobs)
    found, expected = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (kl_loss, kl))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("limit", [0, 1, 20])
def test_dynamic_sampling_replaces_groups_with_equal_scores_until_the_limit(limit, start):
    calls, reward = [], lambda queries, responses, columns: (responses.sum(dim=1) % 4 == 0).float()
    names = dict(load_reward=lambda *inputs: lambda *x: calls.append(x[:2]) or reward(*x))
    flags = dict(max_resamples=limit, eval_queries=3, num_minibatches=1)
    run = start("dynamic_sampling", names=names, **flags)
    calls = [x for x in calls if len(x[0]) != 3]  # no evaluations
    for (rollout, _), line in zip(run.rollouts, run.metrics, strict=False):
        missing, kept, sizes = range(4), {}, []
        while missing and len(sizes) <= limit:
            sizes.append(len(missing))
            groups = [torch.cat(calls[0], dim=1)[i :: len(missing)] for i in range(len(missing))]
            kept |= dict(zip(missing, groups, strict=True))
            missing = [i for i in missing if reward(0, kept[i][:, 8:], 0).unique().numel() == 1]
            calls.pop(0)
        found = torch.cat([rollout.queries, rollout.responses], dim=1)
        assert all(torch.equal(found[i::4], kept[i]) for i in kept)
        assert line["objective/sampled_batches"] == sum(sizes) / 4
        dropped = sum(sizes[1:]) + len(missing)
        assert line["objective/frac_reward_zero_std"] == pytest.approx(dropped / sum(sizes))
    assert not calls


# ------------------------------------------------------------------------------------------ recipes

RECIPES = {  # the published values
    "instructgpt": """total_episodes=256000 batch_size=512 num_minibatches=8 num_ppo_epochs=1
        kl_coef=0.02 lr=5e-6 critic_lr=5e-6 anneal_lr=False warmup_updates=10 adam_beta1=0.9
        adam_beta2=0.95 weight_decay=0.0 ptx_coef=27.8 ema_decay=0.992 temperature=1.0""",
    "llama2": """total_episodes=204800 batch_size=512 num_minibatches=8 num_ppo_epochs=1
        kl_coef=0.01 lr=1e-6 critic_lr=1e-6 anneal_lr=False adam_beta1=0.9 adam_beta2=0.95
        adam_eps=1e-5 weight_decay=0.1 max_grad_norm=1.0 vf_coef=1.0""",
    "qwen": """num_ppo_epochs=4 samples_per_query=2 kl_coef=0.04 cliprange_value=0.15 lr=1e-6
        critic_lr=5e-6 value_warmup_updates=50 top_p=0.9 min_response_length=1""",
    "chinese_llama": """total_episodes=14000 batch_size=14 num_minibatches=1 num_ppo_epochs=1 lr=5e-7
        critic_lr=1.5e-6 anneal_lr=True decay='inverse_sqrt' warmup_updates=100 adam_beta1=0.9
        adam_beta2=0.95 adam_eps=1e-6 weight_decay=0.0 max_grad_norm=1.0 vf_coef=1.0 kl_coef=0.1
        cliprange_value=0.2 clip_score=None temperature=0.8 top_p=0.9 whiten_rewards=False
        whiten_advantages=False""",
    "deepspeed_chat": """total_episodes=30528 batch_size=32 num_minibatches=1 num_ppo_epochs=1
        kl_coef=0.1 lr=9.65e-6 critic_lr=5e-6 anneal_lr=True decay='cosine' min_lr_ratio=0.0
        warmup_updates=100 adam_beta1=0.9 adam_beta2=0.95 adam_eps=1e-8
        weight_decay=0.0 max_grad_norm=1.0 vf_coef=1.0 clip_score=5.0 cliprange_value=0.2
        ema_decay=0.992 temperature=1.0 top_p=1.0 min_response_length=3 whiten_rewards=False
        whiten_advantages=False""",
    # 59 updates of warm-up: 3% of all
    "openrlhf": """batch_size=512 num_minibatches=4 num_ppo_epochs=1 kl_coef=0.01 lr=1e-6
        critic_lr=9e-6 anneal_lr=True decay='cosine' min_lr_ratio=0.1 warmup_updates=59
        adam_beta1=0.9 adam_beta2=0.95 adam_eps=1e-8 weight_decay=0.0 max_grad_norm=1.0 vf_coef=1.0
        clip_score=10.0 cliprange_value=0.2
        temperature=1.0 kl_estimator='k1' whiten_rewards=False whiten_advantages=True""",
    "trlx": """total_episodes=12800 batch_size=128 num_minibatches=4 num_ppo_epochs=4 kl_coef=0.001 vf_coef=1.0 lr=3e-5
        anneal_lr=False adam_beta1=0.9 adam_beta2=0.95 adam_eps=1e-8 weight_decay=1e-6
        clip_score=10.0 cliprange_value=0.2 unfrozen_layers=2 temperature=1.0 kl_estimator='k1'
        whiten_rewards=False whiten_advantages=True""",
}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def published(name):
    values = (item.split("=") for item in RECIPES[name].split())
    common = dict(kl_target=None, cliprange=0.2, gamma=1.0, lam=0.95)
    return common | {key: ast.literal_eval(value) for key, value in values}


def run_recipe(checkout, name):
    """Run a recipe that only prints its command."""
    command = ["bash", checkout / "diffs" / "recipes" / f"{name}.sh", "--seed", "7"]
    env = os.environ | {"LAUNCH": "echo"}
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.fixture(scope="session")
def recipe(tmp_path_factory):
    """Name → the script that a recipe writes, as a module, and the arguments that it passes."""
    checkout, found = tmp_path_factory.mktemp("checkout"), {}
    shutil.copy(ROOT / "ppo.py", checkout)
    shutil.copytree(ROOT / "diffs", checkout / "diffs")

    def recipe(name, task="synthetic", *more):
        if name not in found:
            script, *flags = run_recipe(checkout, name).stdout.split()
            assert script == f"{name}.py" and flags[-2:] == ["--seed", "7"]
            found[name] = tiny.load_script(checkout / script), flags[:-2]
        script, flags = found[name]
        return script, cli.parse_args(script.Args, script.PRESETS, [*flags, "--task", task, *more])

    return recipe


@every_recipe
def test_a_recipe_passes_the_published_values_and_works_for_every_task(name, recipe):
    for task in tasks.TASKS:
        script, args = recipe(name, task, "--reward_fn", "math:sqrt")
        script.check(args, 1)
        # What is not published is as in ppo.py.
        preset = cli.parse_args(ppo.Args, ppo.PRESETS, ["--task", task])
        for key, value in (dict(whiten_rewards=preset.whiten_rewards) | published(name)).items():
            if key == "critic_lr":
                assert args.lr * args.critic_lr_ratio == pytest.approx(value, rel=1e-3)
            elif key != "num_ppo_epochs" or key in RECIPES[name]:
                assert getattr(args, key, getattr(args.task, key, None)) == value, key
    text = (ROOT / "diffs" / "recipes" / f"{name}.sh").read_text().replace("\n#    ", "")
    command = re.search(rf"^# Synthetic: diffs/recipes/{name}\.sh --task (.*)$", text, re.M)[1]
    assert recipe(name, *command.split())[1].total_episodes == 4096


def test_a_recipe_keeps_the_users_changes_and_never_runs_half_patched(tmp_path):
    shutil.copytree(ROOT / "diffs", tmp_path / "diffs")
    assert {path.stem for path in (tmp_path / "diffs" / "recipes").iterdir()} == set(RECIPES)
    (tmp_path / "llama2.py").write_text("mine")
    assert run_recipe(tmp_path, "llama2").stdout.startswith("llama2.py")
    assert (tmp_path / "llama2.py").read_text() == "mine"
    changed = (ROOT / "ppo.py").read_text().replace("@torch.no_grad()\ndef sample(", "def sample(")
    (tmp_path / "ppo.py").write_text(changed)  # the third patch of qwen.sh does not apply to it
    for _ in range(2):
        assert run_recipe(tmp_path, "qwen").returncode != 0


@pytest.mark.slow
@every_recipe
def test_L6_a_recipe_runs_and_its_first_ratio_is_exactly_1(name, recipe, task):
    script, args = recipe(name, "synthetic", "--lr", "1e-2")
    own = ("num_minibatches", "num_ppo_epochs")
    values = vars(args) | SIZES | {key: getattr(args, key) for key in own}
    values |= dict(reward_model=folder_of(task), task=task)
    values |= dict(critic_from=folder_of(task)) if "critic_from" in values else {}
    run = run_main(script, **values)
    assert first_ratio_is_1(run) == 2
    assert len(run.steps) == 2 * args.num_minibatches * args.num_ppo_epochs
    assert ("ema" in run.saved) == ("ema_decay" in RECIPES[name])
    (betas,) = {group["betas"] for group in run.optimizer.param_groups}
    assert betas == (0.9, published(name).get("adam_beta2", 0.999))


if __name__ == "__main__":
    if sys.argv[1:] != ["--fix"]:
        sys.exit(__doc__)
    for name in DIFFS:
        fix(name)
