"""diffs/: each patch applies alone and in pairs and does what its header says.
`python tests/test_diffs.py --fix` updates patches whose context or line numbers have changed."""

import ast
import functools
import itertools
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from conftest import without_times
from formats import write_rows
from test_details import naive_gae
from tiny import (
    IDS,
    WORDS,
    FakeRun,
    fake_reward,
    keep_epochs,
    load_script,
    make_args,
    make_policy,
    make_reward,
    make_rollout,
    run_alone,
    write_model,
    write_reward,
    write_task,
    write_tokenizer,
)
from torch.testing import assert_close

import ppo
import rloo
import utils
from machinery import cli, labels, models
from machinery.tokens import load_tokenizer

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "diffs"
README = (FOLDER / "README.md").read_text()
DIFFS = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.diff"))}
BASES = {name: re.search(r"^--- (\w+)\.py", text, re.M)[1] for name, text in DIFFS.items()}
EXPERIMENTS = (
    "curriculum",
    "dynamic_sampling",
    "online_dpo",
    "raft",
    "stale",
    "tools",
    "vine",
    "vllm",
    "vllm_ppo",
)
OTHERS = [name for name in DIFFS if name not in EXPERIMENTS]
OF_PPO = [name for name in OTHERS if BASES[name] == "ppo"]
OF_RLOO = [name for name in OTHERS if BASES[name] == "rloo"]
WHITENED = "whiten_advantages"
ADD_ONS = {"lora_rloo", "entropy_rloo"}  # to each algorithm; the algorithms are alternatives
ALGORITHMS = [name for name in OF_RLOO if name not in ADD_ONS | {WHITENED}]
EXCLUSIVE = [
    {"lora", "freeze_layers"},  # what is trained; the others change the same lines
    {"kl_estimator", "schedule"},
    {"kl_estimator", "dense_rewards"},
    {"kl_estimator", "reference_on_cpu"},
    {"lora_rloo", "distill"},  # the teacher
    *(set(pair) for pair in combinations(OF_RLOO, 2) if not ADD_ONS & set(pair)),
]
MEANINGLESS = [
    {"lora", "reference_on_cpu"},  # no reference there
    {"scale_scores", "dense_rewards"},  # scales the score of the last token
]
PAIRS = [pair for pair in combinations(OF_PPO, 2) if set(pair) not in EXCLUSIVE + MEANINGLESS]
RECIPES = {path.stem: path.read_text() for path in (FOLDER / "recipes").glob("*.sh")}
OF_RECIPES = [re.search("for name in (.*); do", text)[1] for text in RECIPES.values()]
WITH_TOOLS = ["tools", *(f"tools+{name}" for name in ALGORITHMS)]
FLAGGED = ["grpo, correct", "reinforce_plus_plus, baseline"]
STACKS = [
    *(names.replace(" ", "+") for names in OF_RECIPES),
    "grpo+lora_rloo+entropy_rloo",
    "lora_rloo+dapo",
    "grpo+curriculum",
    "separate_critic+value_warmup+schedule+adamw+early_stop+ptx",
    "samples_per_query+sampling+dense_rewards+reference_on_cpu+freeze_layers",
]
ONLINE = [*OF_PPO, *OF_RLOO, "tools", "stale", "vine", "dynamic_sampling", "curriculum"]
SLOW = pytest.mark.slow
EOS = dict(truncate_token=".", truncate_after=0, eos_task=True)


def added(name):
    """The lines that a patch adds."""
    _, changes = DIFFS[name].split("\n+++ ")
    lines = changes.splitlines()[1:]
    return [line[1:] for line in lines if line.startswith("+")]


def apply(path, *names):
    """Whether each patch applies to the script `path`, without fuzz."""
    new = path.with_suffix(".new")
    for name in names:
        command = ["patch", "--fuzz=0", "--reject-file=-", f"--output={new}", path]
        done = subprocess.run([*command, FOLDER / f"{name}.diff"], capture_output=True, text=True)
        if done.returncode:
            return False
        assert done.stdout.count("patching file") == 1, (
            f"{name}: a hunk has more lines than it says"
        )
        new.replace(path)
    return True


def fix(name):
    """Apply a patch, also where the context around it has changed, and write it again."""
    path = FOLDER / f"{name}.diff"
    base = f"{BASES[name]}.py"
    options = dict(cwd=ROOT, capture_output=True, text=True)
    new = subprocess.run(["patch", "--output=-", "--reject-file=-", base, path], **options)
    if new.returncode:
        sys.exit(f"{path}: change what it says about the changed lines\n{new.stderr}")
    hunks = re.findall(r"^@@.*\n((?: .*\n)*)", DIFFS[name], re.M)  # the context before a change
    context = max(before.count("\n") for before in hunks)
    command = ["diff", f"-U{context}", f"--label={base}", f"--label={name}.py", base, "-"]
    lines = subprocess.run(command, input=new.stdout, **options).stdout
    header, _ = DIFFS[name].split("--- ", 1)
    path.write_text(header + lines)


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    """Names of patches → the patched script as a module."""
    folder = tmp_path_factory.mktemp("patched")
    modules = {("ppo",): ppo, ("rloo",): rloo}

    def patched(*names):
        if names not in modules:
            path = folder / f"mine_{'_'.join(names)}.py"
            shutil.copy(ROOT / f"{BASES[names[0]]}.py", path)
            assert apply(path, *names)
            modules[names] = load_script(path)
        return modules[names]

    return patched


@pytest.mark.parametrize("name", DIFFS)
def test_a_patch_adds_few_lines_and_has_a_command_that_works_and_a_row(name, patched):
    header, _ = DIFFS[name].split("\n--- ")
    header = " ".join(header.split()).replace("\\ ", "")
    assert header.startswith(f"{name}: ")
    assert " Source: " in header
    _, command = header.split(" Command: ")
    command, flags = command.split(" python mine.py ")
    assert command == f"cp {BASES[name]}.py mine.py && patch --fuzz=0 mine.py diffs/{name}.diff"
    script = patched(name)
    args = cli.parse_args(script.Args, script.PRESETS, flags.split())
    assert args.task.task in ("synthetic", "arithmetic")
    lines = added(name)
    most = 100 if name in (*EXPERIMENTS, "dpo") else 30
    assert 0 < len(lines) <= most
    assert max(map(len, lines)) <= 100
    assert f"\n| [`{name}`]({name}.diff) | `{BASES[name]}.py` | {len(lines)} |" in README


@pytest.mark.parametrize("first", OF_PPO + OF_RLOO)
def test_a_patch_applies_after_every_other_one_but_its_alternatives(first, patched, tmp_path):
    group = OF_PPO if first in OF_PPO else OF_RLOO
    for second in set(group) - {first}:
        path = Path(shutil.copy(patched(first).__file__, tmp_path))
        applies = {first, second} not in EXCLUSIVE
        assert apply(path, second) == applies, second
        if applies:
            text = path.read_text()
            ast.parse(text)
            assert set(added(first) + added(second)) <= set(text.split("\n"))


SIZES = dict(
    total_episodes=32,
    batch_size=16,
    rloo_k=4,
    num_epochs=1,
    lr=1e-2,
    micro_batch_tokens=60,
    rollout_batch_size=8,
    eval_every=1,
    num_labels=8,
    num_heldout=4,
    normalize_samples=8,
    block_size=10,
)


def two_updates(script, task, precision="no", score=None, **flags):
    """Two updates of tiny models; the reference is another one. Keeps rollouts, epochs, steps, weights.
    Functions in `flags` are in place of the script's, `score(responses)` of the reward."""
    folder = Path(task.base_model).parent
    values = dict(SIZES, reward_model=str(folder), ref_model=str(folder / "reference"))
    has_rollouts = hasattr(script, "Rollout")
    if not has_rollouts:
        values["batch_size"] = 4
    values = {name: x for name, x in values.items() if hasattr(script.Args, name)}
    spies = {}
    for name, x in flags.items():
        if callable(x):
            spies[name] = x
        else:
            values[name] = x

    run = FakeRun()
    run.rollouts = []
    run.epochs = []
    run.steps = []
    run.saved = {}
    run.args = make_args(task, script, **values)
    optimizer = getattr(script, "AdamTF", torch.optim.AdamW)
    own_step = optimizer.step

    def step(optimizer, closure=None):
        params = dict(run.model.named_parameters())
        seen = SimpleNamespace(before=deepcopy(params))
        seen.lrs = [group["lr"] for group in optimizer.param_groups]
        seen.grads = {name: deepcopy(p.grad) for name, p in params.items()}
        own_step(optimizer, closure)
        seen.after = deepcopy(params)
        run.steps.append(seen)

    def save(model, tokenizer, name="model", **heads):
        run.saved[name] = deepcopy(model.state_dict())
        type(model)(model.config).load_state_dict(run.saved[name])  # has the names of a plain one

    def finish(*messages, **options):
        run.save = None  # the processes have left their group

    run.save = save
    run.finish = finish
    if score:
        reward = fake_reward(lambda queries, responses: score(responses))
        spies["load_reward"] = lambda *inputs: reward
    if has_rollouts:
        spies["Rollout"] = tiny.keep(script.Rollout, run.rollouts)
        spies["epoch_order"] = keep_epochs(script, run.args, run.epochs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "step", step)
        patch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        torch.manual_seed(0)
        tiny.start(script, run.args, files=True, Run=run, **spies)
    run.rollouts = run.rollouts[1::2]  # without those of evaluations
    return run


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """A task whose folder has a reward model, a reference and other texts, too."""
    folder = tmp_path_factory.mktemp("task")
    task = write_task(folder, truncate_token=None)
    write_reward(folder)
    reference = models.load_lm(task.base_model)
    reference.transformer.h[0].mlp.c_fc.weight.data *= 1.3
    reference.save_pretrained(folder / "reference")
    write_tokenizer(folder / "reference")
    texts = [f"Anna saw {n} {thing}." for n in range(10) for thing in ("cats", "old red houses")]
    (folder / "other.txt").write_text("\n".join(texts))
    return task


@pytest.fixture(scope="session")
def start(patched, task):
    """Names of patches and flags, also of the task → `two_updates`."""
    return lambda *names, **flags: two_updates(patched(*names), task, **flags)


@pytest.fixture(scope="session")
def plain(start):
    """A script and flags → `two_updates`, which several tests compare with."""
    return functools.cache(start)


def load_policy(folder):
    return rloo.Policy(models.load_lm(str(folder)), WORDS, 0.7).eval()


def assert_step(step, model, loss):
    """Assert that a step had the gradients of `loss`."""
    model.zero_grad()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert_close(step.grads, grads, atol=2e-5, rtol=2e-3)


RUNS = [(name, "no") for name in ONLINE]
for name in ONLINE:
    RUNS.append(pytest.param(name, "bf16", marks=SLOW))
for names in (*map("+".join, PAIRS), *STACKS):
    RUNS.append(pytest.param(names, "no", marks=SLOW))


@pytest.mark.parametrize(("names", "precision"), RUNS)
def test_L6_a_patched_script_runs_and_its_first_ratios_are_exactly_1(names, precision, start):
    run = start(*names.split("+"), precision=precision, lr=0.0, num_ppo_epochs=1)
    first, second, _ = run.metrics
    assert first["ppo/episode"] == 16
    assert second["ppo/episode"] == 32
    for line in (first, second):
        assert line["ppo/policy/approxkl_avg"] == line["ppo/val/ratio_var"] == 0
    grads = [grad for grad in run.steps[-1].grads.values() if grad is not None]
    assert any(grad.any() for grad in grads)
    assert ("ema" in run.saved) == ("ema" in names)


# ------------------------------------------------------------------------------- patches, one by one


@pytest.mark.parametrize("own", [True, False], ids=["reward model", "policy"])
def test_X1_a_value_is_the_reward_of_the_text_so_far_by_an_own_model(own, start, tmp_path):
    """Also of another vocabulary. Without a reward model, the critic is a copy of the policy."""
    reward = make_reward(pad_id=WORDS + 8)
    reward.save_pretrained(tmp_path)
    critic_from = str(tmp_path) if own else None
    run = start("separate_critic", lr=0.0, gradient_checkpointing=True, critic_from=critic_from)
    rollout = run.rollouts[0]
    for i, t in product(range(4), range(5)):  # a copy has a head of zeros
        tokens = torch.cat([rollout.contexts[i], rollout.responses[i, :t]])
        expected = reward(tokens[tokens != WORDS][None])[0] * own
        assert_close(rollout.values[i, t], expected, rtol=1e-4, atol=1e-4)
    critic = run.model.value_head.backbone
    lm = run.model.lm.base_model
    assert critic is not lm
    assert lm.is_gradient_checkpointing
    assert critic.is_gradient_checkpointing
    if not own:
        assert_close(critic.state_dict(), lm.state_dict(), atol=0, rtol=0)


def test_X1_policy_and_critic_have_their_own_learning_rates_and_gradient_norms(start):
    """The norm of both together would shrink the smaller one, too."""
    run = start("separate_critic", critic_lr_ratio=0.3, max_grad_norm=2.0)
    assert run.steps[3].lrs == pytest.approx([1e-2, 3e-3])
    assert run.steps[4].lrs == pytest.approx([5e-3, 1.5e-3])
    clipped = run.steps[0].grads
    free = start("separate_critic", critic_lr_ratio=0.3).steps[0].grads
    for part in ("lm.", "value_head."):
        names = [name for name in free if name.startswith(part)]
        norm = math.hypot(*(free[name].norm() for name in names))
        assert (norm > 2) == (part == "lm.")
        for name in names:
            assert_close(clipped[name], free[name] * min(1, 2 / norm), rtol=1e-4, atol=1e-8)


def test_X4_each_step_adds_the_gradient_of_the_mean_loss_of_other_texts(patched, start, task):
    other = Path(task.base_model).parent / "other.txt"
    ptx_loss = Mock(wraps=patched("ptx").ptx_loss)
    flags = dict(lr=0.0, micro_batch_tokens=20)
    run = start(
        "ptx", ptx_loss=ptx_loss, ptx_coef=0.5, ptx_dataset=str(other), ptx_ratio=2, **flags
    )
    without = start("ppo", **flags)
    seen = [call.args[1] for call in ptx_loss.call_args_list]
    assert len(seen) > len(run.steps) == 8  # micro-batches
    batches = torch.cat(seen).split(16)  # two texts for each of 8 responses
    assert not torch.equal(batches[0], batches[1])
    means = []
    for i, texts in enumerate(batches):
        losses = []
        for row in texts:
            tokens = row[row != WORDS]
            logits = run.model.lm(tokens[None]).logits[0, :-1]
            losses.append(F.cross_entropy(logits, tokens[1:], reduction="none"))
        loss = torch.cat(losses).mean()
        means.append(loss.item())
        others = 0
        for name, p in run.model.named_parameters():
            others += (p * without.steps[i].grads[name]).sum()
        assert_step(run.steps[i], run.model, 0.5 * loss + others)
    tokenizer, ids = load_tokenizer(task, 5)
    for text in utils.decode(tokenizer, batches[0], ids):
        assert text in other.read_text()
    first, second, _ = run.metrics
    assert first["ppo/loss/ptx_avg"] == pytest.approx(np.mean(means[:4]), rel=1e-4)
    assert second["ppo/loss/ptx_avg"] == pytest.approx(np.mean(means[4:]), rel=1e-4)


def test_X5_the_average_is_updated_after_every_step(start, task):
    run = start("ema", ema_decay=0.9)
    for name, average in models.load_lm(task.base_model).named_parameters():
        for step in run.steps:
            average = 0.9 * average + 0.1 * step.after[f"lm.{name}"]
        assert_close(run.saved["ema"][name], average, atol=1e-6, rtol=0)
        assert not torch.equal(average, run.saved["model"][name])


@pytest.mark.parametrize("names", ["value_warmup", "separate_critic+value_warmup"])
def test_X6_at_first_only_the_value_function_learns_and_is_clipped_alone(names, start):
    """The policy has no moments, and its KL is no reason to adapt kl_coef."""
    flags = dict(max_grad_norm=0.01, kl_target=0.01, kl_horizon=50, kl_coef=0.5)
    run = start(*names.split("+"), value_warmup_updates=1, **flags)
    for i, step in enumerate(run.steps):
        moved = set()
        for name in step.after:
            if not torch.equal(step.after[name], step.before[name]):
                moved.add(name.split(".")[0])
        assert moved == ({"value_head"} if i < 4 else {"value_head", "lm"})
        if i < 4:
            norms = [grad.norm() for grad in step.grads.values() if grad is not None]
            assert math.hypot(*norms) == pytest.approx(0.01, rel=1e-3)
    for name, p in run.model.named_parameters():  # Adam's count of steps with a gradient
        assert run.optimizer.state[p]["step"] == (4 if name.startswith("lm.") else 8)
    assert run.metrics[1]["objective/kl_coef"] == 0.5


@pytest.mark.parametrize(("top_p", "size"), [(0, 1), (0.6, 2), (0.8, 3), (1, 5)])
def test_X7_tokens_are_of_the_nucleus_and_no_response_ends_too_early(
    top_p, size, patched, monkeypatch
):
    """The nucleus is the fewest tokens with probability top_p. Token 1 ends a response."""
    script = patched("sampling")
    probs = torch.tensor([0.15, 0.5, 0.05, 0.2, 0.1])
    batch = Mock(rows=torch.arange(400))
    batch.next_logits.return_value = (0.7 * probs.log()).repeat(400, 1)
    args = make_args(script=script, top_p=top_p, min_response_length=3)
    uniform = (torch.arange(400).double() + 0.5).expand(5, -1) / 400
    contexts = torch.zeros(400, 1).long()
    ids = utils.TokenIds(5, [1], [], [])
    monkeypatch.setattr(script, "DecodingBatch", lambda *inputs, **options: batch)
    found = script.sample(None, contexts, uniform, ids, args)
    likely_first = torch.tensor([1, 3, 0, 4, 2])
    for t, tokens in enumerate(found.T):
        candidates = likely_first[1:] if t < 2 else likely_first
        nucleus = candidates[:size]
        expected = torch.zeros(5)
        expected[nucleus] = probs[nucleus] / probs[nucleus].sum()
        assert_close(tokens.bincount(minlength=5) / 400, expected, atol=1 / 300, rtol=0)


DECAYS = [
    ({}, [1, 0.75, 0.5, 0.25]),
    (dict(decay="cosine", min_lr_ratio=0.2), [1, 0.882843, 0.6, 0.317157]),
    (dict(decay="inverse_sqrt"), [1, 0.816497, 0.707107, 0.632456]),
    (dict(anneal_lr=False), [1, 1, 1, 1]),
]


@pytest.mark.parametrize(("flags", "expected"), DECAYS)
def test_X8_the_learning_rate_warms_up_for_two_updates_and_decays(flags, expected, start):
    run = start("schedule", batch_size=8, total_episodes=48, num_ppo_epochs=1, lr=2e-4, **flags)
    rates = [step.lrs[0] / 2e-4 for step in run.steps[::2]]
    assert rates == pytest.approx([0.5, 1, *expected], rel=1e-5)


def test_X8_adamw_is_the_librarys(start):
    """Up to epsilon, which A1 defines otherwise."""
    run = start("adamw", adam_beta1=0.8, adam_beta2=0.7, weight_decay=0.3, adam_eps=1e-20)
    params = run.steps[0].before
    optimizer = torch.optim.AdamW(params.values(), betas=(0.8, 0.7), weight_decay=0.3, eps=1e-20)
    for step in run.steps:
        optimizer.param_groups[0]["lr"] = step.lrs[0]
        for name, p in params.items():
            p.grad = step.grads[name]
        optimizer.step()
        assert_close(step.after, params, atol=1e-6, rtol=1e-5)


def test_X12_an_update_ends_after_the_epoch_that_moved_the_policy_too_far(start):
    lines = {}
    for epochs in (1, 2, 4):
        lines[epochs] = start("ppo", num_ppo_epochs=epochs, total_episodes=16).metrics[0]
    one = lines[1]["ppo/policy/approxkl_avg"]
    two = lines[2]["ppo/policy/approxkl_avg"]
    assert one < 2 * two - one  # the KL in the second epoch
    for limit, epochs in ((two, 2), (1e3, 4)):
        run = start("early_stop", max_approxkl=limit, num_ppo_epochs=4, total_episodes=16)
        assert len(run.steps) == 2 * epochs
        for name, value in run.metrics[0].items():
            if name.startswith("ppo/"):
                assert value == pytest.approx(lines[epochs][name], rel=1e-4, abs=1e-6)


def test_X14_a_token_gets_what_it_adds_to_the_score_and_the_last_one_gets_the_rest(start):
    """The score of a text is the sum of its ids, and 10."""

    def score(responses):
        return 10 + responses.masked_fill(responses == WORDS, 0).sum(dim=1).float()

    flags = dict(truncate_token=".", unfinished_score=-3.0, kl_coef=0.5)
    run = start("dense_rewards", sample_in_batches=uneven_responses, score=score, **flags)
    rollout = run.rollouts[0]
    expected = rollout.cut.masked_fill(rollout.cut == WORDS, 0).float()
    expected[:, -1] += rollout.scores - expected.sum(dim=1)
    assert_close(rollout.rewards + 0.5 * rollout.kl, expected)
    assert rollout.finished.any() and not rollout.finished.all()


def test_two_lambdas_returns_have_their_own_and_that_of_advantages_rises_with_the_length(patched):
    """Of 5, 4 and 2 tokens: 1 - 1 / (0.3 * length), but 0 instead of -2 / 3."""
    script = patched("two_lambdas")
    mask = torch.arange(5) < torch.tensor([[5], [4], [2]])
    rewards, values = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)) * mask
    flags = dict(whiten_rewards=False, whiten_advantages=False, lam_alpha=0.3, value_lam=0.9)
    args = make_args(script=script, gamma=0.8, **flags)
    minibatch = SimpleNamespace(rewards=rewards, values=values, mask=mask)
    advantages, returns = script.compute_advantages(minibatch, args)
    for i, lam in enumerate((1 / 3, 1 / 6, 0.0)):
        inputs = rewards[i].numpy(), values[i].numpy(), 0.8
        expected = torch.tensor(naive_gae(*inputs, lam)).float()
        assert_close(advantages[i], expected)
        expected = torch.tensor(naive_gae(*inputs, 0.9)).float()
        assert_close(returns[i], expected + values[i])


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_scores_are_scaled_by_the_moments_of_those_so_far(first, shift, patched, start):
    """Of updates alone, by the formulas of Python's own library."""
    compute_advantages = Mock(wraps=patched("scale_scores").compute_advantages)
    flags = dict(scale_by_first=first, shift_scores=shift, num_ppo_epochs=1, kl_coef=0.5)
    run = start("scale_scores", compute_advantages=compute_advantages, **flags)
    seen = [call.args[0] for call in compute_advantages.call_args_list]
    scores = []
    for update in range(2):
        line = run.metrics[update]
        new = []
        found = []
        for minibatch in seen[2 * update : 2 * update + 2]:  # in the order of the batch
            new += minibatch.scores.tolist()
            scaled = minibatch.rewards + line["objective/kl_coef"] * minibatch.kl
            found += scaled.sum(dim=1).tolist()
        if update == 0 or not first:
            scores += new
        mean = statistics.mean(scores) if shift else 0.0
        expected = [(x - mean) / statistics.stdev(scores) for x in new]
        assert found == pytest.approx(expected, abs=1e-4)
        assert line["objective/scores"] == pytest.approx(statistics.mean(new))
    assert run.model.state_dict()["score_moments"][0] == len(scores)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_X3_the_estimate_is_penalized_and_logged(estimator, patched):
    script = patched("kl_estimator")
    policy = make_policy(script=script)
    ref = make_policy(seed=3, script=script)
    args = make_args(script=script, kl_estimator=estimator)
    rollout = make_rollout(policy, args, script, ref=ref)
    metrics = script.rollout_metrics(rollout, {}, 0.15, IDS)
    sums = []
    for context, response in zip(rollout.contexts, rollout.responses, strict=True):
        logprobs, *_ = run_alone(policy, context, response)
        ref_logprobs, *_ = run_alone(ref, context, response)
        log_ratio = logprobs - ref_logprobs
        terms = 0.5 * log_ratio**2
        if estimator == "k3":
            terms = torch.exp(-log_ratio) - 1 + log_ratio
        sums.append(terms.sum())
    kl = torch.stack(sums)
    rewards = rollout.rewards.sum(dim=1)
    assert_close(rewards, rollout.scores - 0.15 * kl, rtol=1e-4, atol=1e-4)
    assert_close(metrics["objective/kl"], kl.mean(), rtol=1e-4, atol=0)


LORA = {  # patch → what is trained besides adapters
    "lora": ("value_head.",),
    "lora_train_reward": ("head.", "gain", "bias"),
    "lora_rloo": (),
    "lora_sft": (),
}


@pytest.mark.parametrize("name", LORA)
def test_lora_trains_adapters_and_saves_them_merged(name, start, task, tmp_path):
    """Into the model that a link, such as `models/<task>/sft`, pointed to at first."""
    loaded = []
    link = tmp_path / "link"
    link.symlink_to(task.base_model)

    def timer(device):
        link.unlink()
        return utils.Timer(device)

    load_lm = tiny.keep(models.load_lm, loaded)
    run = start(name, lora_rank=2, base_model=str(link), Timer=timer, load_lm=load_lm)
    of_reward = name == "lora_train_reward"
    assert len(loaded) == (3 if of_reward else 2)  # not in evaluations
    policy = load_policy(task.base_model)
    for i, rollout in enumerate(run.rollouts):  # the reference is the initial policy
        ref, _ = policy(rollout.contexts, rollout.responses)
        assert_close(rollout.logprobs - rollout.kl, ref, rtol=1e-4, atol=1e-4)
        assert rollout.kl.any() == (i > 0)
    ranks = []
    saved = run.saved["model"]
    for key, grad in run.steps[-1].grads.items():
        own = key.startswith(LORA[name])
        assert (grad is not None) == (own or "lora_" in key)
        if "lora_" in key:
            ranks.append(min(grad.shape))
        if own and of_reward:
            assert torch.equal(saved[key], run.model.get_parameter(key))
    assert ranks == [2] * 16  # A and B of 4 layers in each of 2 blocks
    plain = policy.lm.base_model
    model = run.model.backbone if of_reward else run.model.lm.base_model
    prefix = "backbone." if of_reward else "transformer."
    inputs = torch.arange(1, 9)[None]
    before = plain(inputs).last_hidden_state
    found = model(inputs).last_hidden_state
    plain.load_state_dict({key: saved[prefix + key] for key in plain.state_dict()})
    assert_close(found, plain(inputs).last_hidden_state, rtol=1e-4, atol=1e-4)
    assert (found - before).abs().max() > 0.01


def test_reference_on_cpu_is_on_the_device_only_for_its_forward_passes(patched):
    script = patched("reference_on_cpu")
    events = []
    ref = make_policy()
    ref.to = lambda device: events.append(device) or ref
    ref.register_forward_pre_hook(lambda *inputs: events.append("forward"))
    make_rollout(make_policy(), make_args(script=script), script, ref=ref)
    _, there, *forwards, back = events  # `distributed.freeze` moves it first
    assert there == torch.device("cpu")
    assert back == "cpu"
    assert set(forwards) == {"forward"}
    assert len(forwards) > 1


def test_samples_per_query_are_different_responses_to_the_same_queries(start):
    for rollout in start("samples_per_query", samples_per_query=4).rollouts:
        _, counts = rollout.contexts.unique(dim=0, return_counts=True)
        assert counts.tolist() == [4] * 4
        assert len(rollout.responses.unique(dim=0)) > 12


UPPER = {  # not a head that is the embeddings
    "gpt2": ("transformer.h.1.", "transformer.ln_f."),
    "gpt_neox": ("gpt_neox.layers.1.", "gpt_neox.final_layer_norm.", "lm_head."),
}


@pytest.mark.parametrize("kind", UPPER)
def test_freeze_layers_trains_what_is_after_the_lower_layers(kind, start, tmp_path):
    model = str(write_model(tmp_path / "model", kind))
    after = start("freeze_layers", unfrozen_layers=1, base_model=model).saved["model"]
    for name, before in models.load_lm(model).state_dict().items():
        assert torch.equal(after[name], before) != name.startswith(UPPER[kind]), name


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_P4_residual_dropout_drops_what_attention_and_mlp_add(kind, start, tmp_path):
    """Only in training, the same in each run; embeddings and attention have no dropout."""
    model = str(write_model(tmp_path / "m", kind, dropout=0.5))

    def timer(device):
        torch.seed()  # as another process would
        return utils.Timer(device)

    def losses(run):
        return [line.get("loss") for line in run.metrics]

    flags = dict(base_model=model, lr=1e-20, Timer=timer)
    without = start("resid_dropout", resid_dropout=0.0, **flags)
    first = start("resid_dropout", resid_dropout=0.25, **flags)
    again = start("resid_dropout", resid_dropout=0.25, **flags)
    assert losses(first) == losses(again)
    assert losses(first)[0] != losses(without)[0]
    assert first.metrics[0]["heldout/loss"] == without.metrics[0]["heldout/loss"]
    lm = first.model.lm
    for key, value in lm.config.to_dict().items():
        assert "drop" not in key or not value
    seen = []
    dropouts = [x for x in lm.modules() if isinstance(x, torch.nn.Dropout) and x.p]
    for module in dropouts:
        module.register_forward_hook(lambda module, *_: seen.append(module.p))
    lm(torch.arange(1, 33)[None])
    assert seen == [0.25] * len(dropouts) == [0.25] * 4  # two in each of two layers


# -------------------------------------------------------------- algorithms and labels, by slow loops


def uneven_responses(lm, contexts, uniform, ids, args):
    """Random tokens, and the end after 1 to 5."""
    responses = (20 + 70 * uniform.T).long()
    return responses.scatter(1, torch.arange(len(contexts))[:, None] % 5, ids.ends[0])


def inserted_responses(*inputs):
    """The same, but a tool wrote tokens 1 and 2, which are then no end."""
    return uneven_responses(*inputs) + INSERTED * (WORDS + 1)


def some_equal(responses):
    """Scores; those of the responses to the first of four queries are equal."""
    is_first = torch.arange(len(responses)) < len(responses) / 4
    return torch.where(is_first, 0.5, responses.sum(dim=1) % 7)


EQUAL = dict(lr=2e-3, score=some_equal, kl_coef=0.3, kl_target=0.01, kl_horizon=50)
ENDS = torch.arange(16)[:, None] % 5
OWN = torch.arange(5) <= ENDS  # [16, R] tokens that the policy wrote
INSERTED = torch.tensor([False, True, True, False, False])
OWN_BESIDE_TOOL = ~INSERTED & (OWN | INSERTED[ENDS])  # an inserted end ends nothing
BOUNDS = dict(dapo=(0.9, 1.2), gspo=(0.9, 1.05), cispo=(0.0, 1.1))  # of the ratio; others 0.8, 1.2
OF_RESPONSES = ("rloo", WHITENED, "grpo", "gspo", "sapo", "stale")  # means over responses


def standardize(x):
    return (x - x.mean()) / (x.std() + 1e-4)


def minus_others(rewards):
    """Rewards [4] minus the mean of the other three."""
    return rewards - (rewards.sum() - rewards) / 3


GROUPS = {  # scores and KL penalties of a query's four responses → advantages
    "rloo": lambda s, p: minus_others(s - p),
    "grpo": lambda s, p: standardize(s),
    "dr_grpo": lambda s, p: s - p - (s - p).mean(),
    "dapo": lambda s, p: standardize(s - p),
    "sapo": lambda s, p: standardize(s - p),
    "cispo": lambda s, p: standardize(s) - p + p.mean(),
    "gspo": lambda s, p: standardize(s) - p + p.mean(),
}
AS_RLOO = (WHITENED, "entropy_rloo", "openrlhf_rloo")  # at first


def returns_to_go(name, rollout, kl, kl_coef, args):
    """Rewards from each own token to the last, which has the score minus a baseline: [n] each."""
    scores = rollout.scores
    if name == "openrlhf_rloo":
        scores = torch.cat([minus_others(group) for group in scores.split(4)])
    elif args.group_baseline:
        scores = torch.cat([group - group.mean() for group in scores.split(4)])
        kl_coef = 0.0  # in the loss
    returns = []
    for score, kl_of_tokens in zip(scores, kl, strict=True):
        rewards = -kl_coef * kl_of_tokens
        rewards[-1] += score
        returns.append(torch.stack([rewards[t:].sum() for t in range(len(rewards))]))
    return returns


def slow_advantages(name, rollout, kl, kl_coef, args=None):
    """The advantages of own tokens from their `kl` to the reference: [n] for each response."""
    if name == "distill":
        return [-x for x in kl]
    if name in ("reinforce_plus_plus", "openrlhf_rloo"):
        returns = returns_to_go(name, rollout, kl, kl_coef, args)
        if name == "openrlhf_rloo":
            return returns
        tokens = torch.cat(returns)
        return [(x - tokens.mean()) / tokens.std(correction=0) for x in returns]
    advantages = torch.zeros(16)
    penalties = kl_coef * torch.stack([x.sum() for x in kl])
    of_group = GROUPS["rloo" if name == WHITENED else name]
    for i in range(0, 16, 4):  # the responses to a query
        part = slice(i, i + 4)
        advantages[part] = of_group(rollout.scores[part], penalties[part])
    if name == WHITENED:
        advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
    return [advantages[i].expand(len(kl[i])) for i in range(16)]


def slow_losses(name, new, old, ref, advantages, kl_coef, args):
    """Ratios and losses of a response's own tokens, from log-probabilities: [n] each."""
    low, high = BOUNDS.get(name, (0.8, 1.2))
    log_ratio = new - old
    if name in ("rloo", WHITENED, "stale"):
        log_ratio = log_ratio.sum().expand(len(new))
    if name == "gspo":  # the geometric mean
        log_ratio = log_ratio.mean().expand(len(new))
    ratio = log_ratio.exp()
    objective = torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    if name == "stale":  # each token has a weight, here in its advantage
        is_clipped = objective < ratio * advantages
        objective = len(new) * ratio.detach() * advantages * new * ~is_clipped
    if name == "sapo":
        tau = torch.where(advantages > 0, args.tau_pos, args.tau_neg)
        objective = 4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantages
    if name == "cispo":
        objective = ratio.clamp(max=high).detach() * advantages * new
    if name == "reinforce_plus_plus" and args.group_baseline:
        objective = objective - kl_coef * (new - ref) ** 2 / 2
    if name == "grpo":
        k3 = (ref - new).exp() - 1 - (ref - new)
        objective = objective - kl_coef * k3 * (ratio if args.correct_kl_gradient else 1)
    return ratio, -objective


def alone(model, rollout, own):
    """Log-probabilities and entropies of own tokens, text by text: [n] each."""
    found = []
    for context, response, is_own in zip(rollout.contexts, rollout.responses, own, strict=True):
        response = response % (WORDS + 1)  # tools.diff marks inserted ids
        logprobs, entropies, *_ = run_alone(model, context, response)
        is_own = is_own[response != WORDS]
        found.append((logprobs[is_own], entropies[is_own]))
    return found


def assert_updates(name, run, own=OWN, advantages_of=slow_advantages):
    """Assert that a run has the steps and metrics of a slow loop over its responses."""
    ref = load_policy(run.args.ref_model)
    steps = iter(run.steps)
    low, high = BOUNDS.get(name, (0.8, 1.2))
    clipped = 0
    for rollout, epochs, line in zip(run.rollouts, run.epochs, run.metrics, strict=False):
        kl_coef = line["objective/kl_coef"]
        scores = rollout.scores.view(4, 4)  # [P, K]
        alike = (scores == scores[:, :1]).all(dim=1).repeat_interleave(4)  # [16]
        with torch.no_grad():
            refs = [logprobs for logprobs, _ in alone(ref, rollout, own)]
        olds = [rollout.logprobs[i][own[i]] for i in range(16)]
        kl = [olds[i] - refs[i] for i in range(16)]
        advantages = advantages_of(name, rollout, kl, kl_coef, run.args)
        ratios = []  # means over a minibatch
        entropies = []
        for rows in itertools.chain(*epochs):
            step = next(steps)
            run.model.load_state_dict(step.before, strict=False)
            texts = alone(run.model, rollout.select(rows), own[rows])
            entropies.append(torch.cat([entropy for _, entropy in texts]).mean().item())
            learned = rows[~alike[rows]] if name == "dapo" else rows
            num_tokens = own[learned].sum()
            loss = 0.0
            ratio_of_step = 0.0
            for i, (new, _) in zip(rows, texts, strict=True):
                if i not in learned:
                    continue
                inputs = new, olds[i], refs[i], advantages[i], kl_coef, run.args
                ratio, losses = slow_losses(name, *inputs)
                size = len(ratio) * len(rows) if name in OF_RESPONSES else num_tokens
                ratio_of_step += ratio.sum().item() / size
                loss += losses.sum() / (5 * len(rows) if name == "dr_grpo" else size)
                clipped += (ratio != ratio.clamp(low, high)).sum()
            ratios.append(float(ratio_of_step))
            assert_step(step, run.model, loss)
        assert line["ppo/val/ratio"] == pytest.approx(np.mean(ratios), rel=1e-4)
        assert line["ppo/policy/entropy_avg"] == pytest.approx(np.mean(entropies), rel=1e-4)
        assert line["objective/response_length"] == own.sum() / 16
        if name in (*GROUPS, *AS_RLOO):
            assert line["objective/frac_reward_zero_std"] == alike.sum() / 16
    assert clipped > 10
    assert run.metrics[0]["objective/kl_coef"] != kl_coef
    assert run.optimizer.param_groups[0]["t"] == len(run.steps)  # one optimizer for all updates


@pytest.mark.parametrize("names", [*ALGORITHMS, WHITENED, *FLAGGED, *WITH_TOOLS])
def test_gradients_of_updates_are_those_of_a_slow_loop(names, patched, start):
    """What a tool wrote is in no loss, KL, entropy or length. Only dapo leaves equal scores out."""
    patches = names.split(",")[0].split("+")
    tools = names in WITH_TOOLS
    name = "rloo" if names == "tools" else patches[-1]
    low, high = BOUNDS.get(name, (0.8, 1.2))
    flags = dict(
        cliprange=1 - low,
        cliprange_high=high - 1,
        whiten_advantages=True,
        correct_kl_gradient="correct" in names,
        group_baseline="baseline" in names,
        tau_pos=0.5,
        tau_neg=3.0,
    )
    script = patched(*patches)
    flags = {key: x for key, x in flags.items() if hasattr(script.Args, key)}
    responses = inserted_responses if tools else uneven_responses
    run = start(*patches, sample_in_batches=responses, **EQUAL | EOS | flags)
    assert_updates(name, run, OWN_BESIDE_TOOL if tools else OWN)


@pytest.mark.parametrize("name", [*GROUPS, *AS_RLOO])
def test_a_batch_of_equal_scores_changes_nothing(name, start):
    """Exactly: the mean of 0.9 0.9 0.9 is not 0.9 in fp32, and is divided by 0 + 1e-4."""
    flags = dict(rloo_k=3, batch_size=12, total_episodes=12, kl_coef=0.0)
    run = start(name, score=lambda responses: torch.full([len(responses)], 0.9), **flags)
    for step in run.steps:
        assert not any(grad.any() for grad in step.grads.values())
    assert run.metrics[0]["objective/frac_reward_zero_std"] == 1


def assert_label_steps(run, loss_of):
    """Assert that gradients and losses of two steps are the means of `loss_of(row)`, a label's."""
    order = np.random.default_rng([1, 0, 1]).permutation(8)
    for i, rows in enumerate(order.reshape(2, 4)):
        run.model.load_state_dict(run.steps[i].before, strict=False)
        loss = sum(loss_of(row) for row in rows) / 4
        assert_step(run.steps[i], run.model, loss)
        assert run.metrics[i]["loss"] == pytest.approx(loss.item(), abs=1e-5)


def test_dpo_gradients_and_metrics_are_those_of_a_slow_loop(start, task):
    """Of three responses: minus the log of the softmax of beta times their log-ratios."""
    every = labels.load_labels(task, *load_tokenizer(task, 5))
    few = labels.Labels(every.queries, [x[:3] for x in every.responses], every.best % 3)
    prefix = load_tokenizer(replace(task, query_prefix="Story: "), 5)[1].prefix
    run = start("dpo", load_labels=lambda *_: few, beta=0.3, query_prefix="Story: ")
    ref = load_policy(task.base_model)
    margins = []
    accuracies = []

    def loss_of(row):
        context = torch.tensor([*prefix, *few.queries[row]])
        rewards = []
        for response in map(torch.tensor, few.responses[row]):
            ours, _ = run_alone(run.model, context, response)
            theirs, _ = run_alone(ref, context, response)
            rewards.append(0.3 * (ours.sum() - theirs.sum().detach()))
        best = rewards[few.best[row]]
        margins.append(sum(best - x for x in rewards).item() / 2)
        ties = rewards.count(max(rewards))  # at first all rewards are 0: 1/3
        accuracies.append((best >= max(rewards)).item() / ties)
        return torch.log(sum(torch.exp(x - best) for x in rewards))

    assert_label_steps(run, loss_of)
    for i, line in enumerate(run.metrics[:2]):
        rows = slice(4 * i, 4 * i + 4)
        assert line["margin"] == pytest.approx(np.mean(margins[rows]), abs=1e-5)
        assert line["accuracy"] == pytest.approx(np.mean(accuracies[rows]), abs=1e-5)


@pytest.mark.parametrize("last", [2, 4])
def test_X15_gradients_are_those_of_a_slow_loop_over_the_labels(last, start, task, tmp_path):
    """The mean over a prompt's comparisons; 0 if all are tied. Without `ranks`, all others rank 2."""
    rows = json.loads(Path(task.label_dataset).read_text())
    ranks = []
    for row in rows:
        ranks.append([min(1 + (k - row["best"]) % 4, last) for k in range(4)])
    if last == 4:
        ranks[0] = [1, 1, 1, 1]
        for i, row in enumerate(rows):
            row["ranks"] = ranks[i]
    path = write_rows(tmp_path / "labels.json", rows)
    few = labels.load_labels(task, *load_tokenizer(task, 5))
    run = start("ranking", label_dataset=path)

    def loss_of(i):
        rewards = []
        for response in few.responses[i]:
            rewards.append(run.model(torch.tensor([[*few.queries[i], *response]])))
        losses = []
        for a, b in product(range(4), repeat=2):
            if ranks[i][a] < ranks[i][b]:
                losses.append(torch.log(1 + torch.exp(rewards[b] - rewards[a])))
        return sum(losses) / max(len(losses), 1)

    assert_label_steps(run, loss_of)


def test_R4_each_pair_is_there_once_and_those_of_a_prompt_side_by_side(patched, start, tmp_path):
    rows = [{"prompt": f"Q{i % 3}", "chosen": f" a{i}", "rejected": " no"} for i in range(8)]
    path = write_rows(tmp_path / "pairs.jsonl", rows)
    candidate_tokens = Mock(wraps=patched("prompt_batches").candidate_tokens)
    start("prompt_batches", label_dataset=path, candidate_tokens=candidate_tokens)
    first, second, *_ = candidate_tokens.call_args_list  # the rest is held out
    seen = [*first.args[1], *second.args[1]]
    assert sorted(seen) == list(range(8))
    assert sum(a % 3 != b % 3 for a, b in pairwise(seen)) == 2  # three runs of equal prompts


# -------------------------------------------------------------------------------------- experiments


OFF = {  # flags with which a patch only logs or saves
    "ema": {},
    "reference_on_cpu": {},
    "sampling": {},
    "stale": {},
    "entropy_rloo": {},
    WHITENED: {},
    "value_warmup": dict(value_warmup_updates=0),
    "samples_per_query": dict(samples_per_query=1),
    "scale_scores": dict(scale_scores=False),
    "tools": dict(tool_fn="json:dumps", tool_calls=0),
    "dynamic_sampling": dict(max_resamples=0),
}


@pytest.mark.parametrize("name", OFF)
def test_a_patch_that_is_off_or_only_logs_or_saves_trains_as_its_script(name, start, plain):
    run = start(name, **OFF[name])
    base = plain(BASES[name])
    assert_close(run.saved["model"], base.saved["model"], atol=0, rtol=0)
    for line, expected in zip(run.metrics, without_times(base.metrics), strict=True):
        assert expected.items() <= line.items()


CUTS = [  # level, cut, min_weight, max_weight
    ("sequence", "truncate", 0.0, 1.2),
    ("sequence", "mask", 0.6, 1.7),
    ("token", "mask", 0.8, 5),
    ("token", "truncate", 0.95, 1.05),
]


@pytest.mark.parametrize(("level", "cut", "low", "high"), CUTS)
def test_stale_samples_from_an_older_policy_and_weights_gradients(level, cut, low, high, start):
    """Of two updates ago, first from the initial policy; in an evaluation, from today's."""
    samplers = []
    weights = []

    def sample(lm, *inputs):
        samplers.append(deepcopy(lm.state_dict()))
        return rloo.sample_in_batches(lm, *inputs)

    flags = dict(EQUAL, weight_level=level, weight_cut=cut, min_weight=low, max_weight=high)
    run = start("stale", total_episodes=64, sampler_lag=2, sample_in_batches=sample, **flags)
    model = load_policy(run.args.task.base_model)

    def load_of_update(update, sampler):
        model.load_state_dict(run.steps[4 * update].before, strict=False)
        assert_close(model.lm.state_dict(), sampler, atol=0, rtol=0)

    def advantages_of(name, rollout, kl, kl_coef, args):
        update = len(weights)
        line = run.metrics[update]
        text = rollout.contexts, rollout.responses
        with torch.no_grad():
            load_of_update(update, samplers[2 * update])
            logprobs, _ = model(*text)
            load_of_update(max(update - 2, 0), samplers[2 * update + 1])
            of_sampler, _ = model(*text)
        assert_close(rollout.logprobs, logprobs)
        assert_close(rollout.sampler_logprobs, of_sampler)
        log_ratios = logprobs - of_sampler  # [16, R]
        gap = log_ratios.abs().mean().item()
        assert line["objective/sampling_gap"] == pytest.approx(gap, rel=1e-3)
        kl_of_sampler = torch.stack([x.sum() for x in kl]) - log_ratios.sum(dim=1)
        assert_close(rollout.kl.sum(dim=1), kl_of_sampler, atol=1e-4, rtol=1e-4)
        if level == "sequence":
            log_ratios = log_ratios.sum(dim=1, keepdim=True).repeat(1, 5)
        ratios = log_ratios.exp()
        is_cut = (ratios < low) | (ratios > high)
        bounded = ratios.clamp(low, high)
        if cut == "mask":
            bounded = torch.where(is_cut, 0.0, ratios)
        weights.append(bounded)
        assert line["ppo/val/weight"] == pytest.approx(bounded.mean().item(), rel=1e-3)
        assert line["ppo/val/weight_cut"] == pytest.approx(is_cut.float().mean().item(), rel=1e-3)
        advantages = slow_advantages("rloo", rollout, kl, kl_coef)
        return [bounded[i] * advantages[i] for i in range(16)]

    assert_updates("stale", run, torch.ones(16, 5).bool(), advantages_of)
    assert len(weights[-1].unique()) > 2


ADAPTIVE = [  # patches, target, coefficients of two updates
    ("entropy", None, [3.0, 3.0]),
    ("entropy", 99.0, [3.005, 3.01]),  # the entropy is too low
    ("entropy", 0.01, [0.0, 0.0]),  # too high
    ("entropy_rloo", None, [3.0, 3.0]),
    ("entropy_rloo+dapo", 99.0, [3.005, 3.01]),
]


@pytest.mark.parametrize(("names", "target", "coefs"), ADAPTIVE)
def test_entropy_adds_the_gradient_of_the_mean_entropy(names, target, coefs, start, plain):
    """Checkpoints have the coefficient's change."""
    flags = dict(EOS, lr=0.0, sample_in_batches=uneven_responses, micro_batch_tokens=20)
    base = {"entropy": "ppo", "entropy_rloo": "rloo"}.get(names, "dapo")
    without = iter(plain(base, **flags).steps)
    run = start(*names.split("+"), entropy_coef=3.0, entropy_target=target, **flags)
    found = [line.get("ppo/policy/entropy_coef") for line in run.metrics]
    assert found == pytest.approx([*coefs, None])
    steps = iter(run.steps)
    for rollout, epochs, coef in zip(run.rollouts, run.epochs, coefs, strict=True):
        entropies = [entropy for _, entropy in alone(run.model, rollout, OWN)]
        for rows in itertools.chain(*epochs):
            step = next(steps)
            step_without = next(without)
            run.model.zero_grad()
            bonus = coef * torch.cat([entropies[i] for i in rows]).mean()
            (-bonus).backward(retain_graph=True)
            for name, p in run.model.lm.named_parameters(prefix="lm"):
                difference = step.grads[name] - step_without.grads[name]
                assert_close(difference, p.grad, atol=2e-5, rtol=1e-3)
    assert "entropy_coef_change" in run.model.state_dict()


RAFT = [dict(), dict(select_best=False), dict(min_score=4.0), dict(min_score=99.0)]


@pytest.mark.parametrize("flags", RAFT)
def test_raft_raises_the_likelihood_of_the_best_response_to_each_query(flags, start):
    """Or of the first; the mean over tokens, and of none with a score below the minimum."""
    run = start("raft", sample_in_batches=uneven_responses, **EQUAL | EOS | flags)
    steps = iter(run.steps)
    for rollout, epochs, line in zip(run.rollouts, run.epochs, run.metrics, strict=False):
        rewards = rollout.scores - line["objective/kl_coef"] * rollout.kl.sum(dim=1)
        losses = []
        for rows in itertools.chain(*epochs):
            step = next(steps)
            chosen = []
            for group in rows.view(-1, 4):
                best = group[0]
                if "select_best" not in flags:
                    best = group[rewards[group].argmax()]
                if rollout.scores[best] >= flags.get("min_score", -99):
                    chosen.append(best.item())
            assert bool(chosen) == any(x.any() for x in step.grads.values())
            losses.append(0.0)
            if chosen:
                run.model.load_state_dict(step.before, strict=False)
                texts = alone(run.model, rollout.select(chosen), OWN[chosen])
                loss = -torch.cat([logprobs for logprobs, _ in texts]).mean()
                losses[-1] = loss.item()
                assert_step(step, run.model, loss)
        assert line["ppo/loss/policy_avg"] == pytest.approx(np.mean(losses), rel=1e-4)


def test_vine_advantages_are_what_parts_add_to_mean_scores_of_continuations(start):
    """Of two continuations one ends at once, one never; a score is a number of tokens."""

    def responses(lm, contexts, uniform, ids, args):
        if len(uniform) == args.task.response_length:
            return uneven_responses(lm, contexts, uniform, ids, args)
        assert not (contexts[:, -1] == ids.pad).any()
        tokens = torch.tensor([ids.ends[0], 40]).repeat(len(contexts) // 2)
        return tokens[:, None].expand(uniform.T.shape)

    def score(responses):
        return (responses != WORDS).sum(dim=1).float()

    def advantages_of(name, rollout, kl, kl_coef, args):
        equal = rollout._replace(scores=torch.zeros(16))
        penalties = slow_advantages("rloo", equal, kl, kl_coef)
        found = []
        for i in range(16):
            length = i % 5 + 1
            first = i // 4 * 4
            others = [j % 5 + 1 for j in range(first, first + 4) if j != i]
            values = [sum(others) / 3]
            for t in (2, 4):
                values.append(length if length <= t else (t + 1 - 2) / 2)
            parts = np.diff([*values, length]).repeat(2)  # of two tokens each
            found.append(penalties[i] + torch.tensor(parts[:length]).float())
        return found

    flags = EQUAL | EOS | dict(vine_every=2, vine_samples=2, unfinished_score=-2.0)
    flags.update(score=score, sample_in_batches=responses)
    assert_updates("vine", start("vine", **flags), OWN, advantages_of)


@pytest.mark.parametrize("alike", [False, True])
def test_online_dpo_raises_the_best_response_and_lowers_the_worst(alike, start):
    """With log-probabilities of each response alone. Equal scores: no gradient."""

    def score(responses):
        return (1 - alike) * responses.sum(dim=1).float()

    run = start("online_dpo", lr=0.0, num_minibatches=1, kl_coef=0.3, kl_target=None, score=score)
    rollout = run.rollouts[0]
    ours = alone(run.model, rollout, rollout.mask)
    theirs = alone(load_policy(run.args.ref_model), rollout, rollout.mask)
    log_ratios = [(ours[i][0] - theirs[i][0]).sum() for i in range(16)]
    loss = 0
    for query in range(0, 16, 4):  # the first of several that are the best, or the worst
        scores = rollout.scores[query : query + 4]
        best = query + scores.argmax()
        worst = query + scores.argmin()
        loss -= torch.sigmoid(0.3 * (log_ratios[best] - log_ratios[worst])).log() / 4
    assert_step(run.steps[0], run.model, loss)


if __name__ == "__main__":
    if sys.argv[1:] != ["--fix"]:
        sys.exit(__doc__)
    for name in DIFFS:
        fix(name)
