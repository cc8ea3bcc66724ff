"""diffs/: each patch applies alone and in pairs and does what its header says; so do the recipes.

`python tests/test_diffs.py --fix` updates patches whose context or line numbers have changed.
"""

import ast
import json
import math
import os
import re
import shutil
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path
from types import SimpleNamespace

import formats
import numpy as np
import pytest
import test_tokens
import tiny
import torch
import torch.nn.functional as F
from test_details import naive_gae
from torch.testing import assert_close

import ppo
import rloo
import utils
from data import tasks
from machinery import cli, labels, models
from machinery.decoding import Decoder
from machinery.tokens import load_tokenizer

ROOT = Path(__file__).parents[1]
README = (ROOT / "diffs" / "README.md").read_text()
DIFFS = {path.stem: path.read_text() for path in sorted((ROOT / "diffs").glob("*.diff"))}
BASES = {name: re.search(r"^--- (\w+)\.py", text, flags=re.M)[1] for name, text in DIFFS.items()}
EXPERIMENTS = ("tools", "stale", "vine", "vllm", "online_dpo", "dynamic_sampling", "curriculum")
LIMITS = dict.fromkeys(EXPERIMENTS, 60) | {"dpo": 46, "curriculum": 25}  # added; others 25
OF_PPO = [name for name in DIFFS if BASES[name] == "ppo"]
OF_RLOO = [name for name in DIFFS if BASES[name] == "rloo" and name not in EXPERIMENTS]
ALGORITHMS = [x for x in OF_RLOO if x not in ("lora_rloo", "whiten_advantages")]  # alternatives
EXCLUSIVE = [{"lora", x} for x in ("freeze_layers", "ema")]  # what is trained, what is saved
EXCLUSIVE += [{"two_lambdas", "length_penalty"}]  # their flags
EXCLUSIVE += [{*x} for x in combinations(OF_RLOO, 2) if "lora_rloo" not in x]
EXCLUSIVE += [{"lora_rloo", "distill"}]  # its teacher would be the initial policy
MEANINGLESS = [{x, "reference_on_cpu"} for x in ("lora", "trlx_kl")]  # no reference there
PAIRS = [x for x in combinations(OF_PPO, 2) if {*x} not in EXCLUSIVE + MEANINGLESS]
RECIPES = {path.stem: path.read_text() for path in (ROOT / "diffs" / "recipes").glob("*.sh")}
STACKS = [re.search("for name in (.*); do", x)[1].replace(" ", "+") for x in RECIPES.values()]
STACKS += ["lora+length_penalty", "grpo+lora_rloo", "lora_rloo+dapo", "grpo+curriculum"]
STACKS += ["separate_critic+value_warmup+schedule+adamw+early_stop+ptx"]
STACKS += ["samples_per_query+sampling+dense_rewards+reference_on_cpu+freeze_layers"]
EOS = dict(truncate_token=".", truncate_after=0, eos_task=True)


def added(name):
    lines = DIFFS[name].split("\n+++ ")[1].splitlines()[1:]
    return [line[1:] for line in lines if line.startswith("+")]


def apply(path, *names):
    """Whether each patch applies to the script `path`, without fuzz."""
    command = ["patch", "--fuzz=0", "--quiet", "--no-backup-if-mismatch", "--reject-file=-", path]
    diffs = [ROOT / "diffs" / f"{name}.diff" for name in names]
    return all(subprocess.run([*command, x], capture_output=True).returncode == 0 for x in diffs)


def fix(name):
    """Apply a patch, also where the context around it has changed, and write it again."""
    path, base = ROOT / "diffs" / f"{name}.diff", f"{BASES[name]}.py"
    command = ["patch", "--output=-", "--reject-file=-", base, path]
    new = subprocess.run(command, cwd=ROOT, capture_output=True)
    if new.returncode:
        reason = new.stderr.decode()
        sys.exit(f"diffs/{name}.diff: change what it says about the changed lines\n{reason}")
    command = ["diff", "-u", f"--label={base}", f"--label={name}.py", base, "-"]
    lines = subprocess.run(command, cwd=ROOT, input=new.stdout, capture_output=True).stdout
    path.write_text(DIFFS[name].split("--- ", 1)[0] + lines.decode())


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    """Names of patches → the patched script as a module."""
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


@pytest.mark.parametrize("name", DIFFS)
def test_a_patch_adds_few_lines_and_has_a_command_that_works_and_a_row(name, patched):
    header = " ".join(DIFFS[name].split("\n--- ")[0].split()).replace("\\ ", "")
    assert header.startswith(f"{name}: ") and " Source: " in header
    command, flags = header.split(" Command: ")[1].split(" python mine.py ")
    assert command == f"cp {BASES[name]}.py mine.py && patch --fuzz=0 mine.py diffs/{name}.diff"
    script = patched(name)
    args = cli.parse_args(script.Args, script.PRESETS, flags.split())
    assert args.task.task in ("synthetic", "arithmetic")
    assert 0 < len(added(name)) <= LIMITS.get(name, 25) and max(map(len, added(name))) <= 100
    assert f"\n| [`{name}`]({name}.diff) | `{BASES[name]}.py` | {len(added(name))} |" in README


@pytest.mark.parametrize("first", OF_PPO + OF_RLOO)
def test_a_patch_applies_after_every_other_one_but_its_alternatives(first, patched, tmp_path):
    for second in {*(OF_PPO if first in OF_PPO else OF_RLOO)} - {first}:
        path = Path(shutil.copy(patched(first).__file__, tmp_path))
        applies = {first, second} not in EXCLUSIVE
        assert apply(path, second) == applies, second
        if applies:
            ast.parse(path.read_text())
            assert {*added(first), *added(second)} <= {*path.read_text().split("\n")}


# --------------------------------------------------------------------------------------------- runs


def run_main(script, task, precision="no", score=None, responses=None, names=None, **flags):
    """Two updates by `main` on tiny models: rollouts, epochs, steps, saved weights.

    `responses` are in place of `sample_in_batches`, `score(responses)` of the reward, and `names`
    of others. The reference is not the initial policy.
    """
    run, folder = tiny.FakeRun(), Path(task.base_model).parent
    run.rollouts, run.epochs, run.steps, run.saved = [], [], [], {}
    sizes = dict(batch_size=16 if hasattr(script, "Rollout") else 4, micro_batch_tokens=60, lr=1e-2)
    sizes |= dict(total_episodes=32, num_minibatches=2, num_ppo_epochs=2, rollout_batch_size=5)
    sizes |= dict(num_labels=8, num_heldout=4, normalize_samples=8, block_size=10)
    sizes |= dict(reward_model=str(folder), ref_model=str(folder / "reference"))
    sizes |= dict(eval_queries=4, eval_every=1)
    sizes = {name: x for name, x in sizes.items() if hasattr(script.Args, name)}
    run.args = tiny.new_args(script, task, **sizes | flags)
    optimizer = getattr(script, "AdamTF", torch.optim.AdamW)
    own_step = optimizer.step

    def step(optimizer, closure=None):
        params = dict(run.model.named_parameters())
        seen = SimpleNamespace(lrs=[group["lr"] for group in optimizer.param_groups])
        seen.grads = {name: deepcopy(p.grad) for name, p in params.items()}
        seen.before = {name: p.detach().clone() for name, p in params.items()}
        own_step(optimizer, closure)
        seen.after = {name: p.detach().clone() for name, p in params.items()}
        run.steps.append(seen)

    def save(model, tokenizer, name="model", **heads):
        run.saved[name] = deepcopy(model.state_dict())
        type(model)(model.config).load_state_dict(run.saved[name])  # has the names of a plain one

    run.save, spies = save, {}
    run.finish = lambda *_, **__: setattr(run, "save", None)  # the processes have left their group
    if score:
        spies["load_reward"] = lambda *_: lambda queries, responses, columns: score(responses)
    if responses:
        spies["sample_in_batches"] = responses
    for name, kept in (("shuffle", run.epochs), ("Rollout", run.rollouts)):
        if hasattr(script, name):
            spies[name] = tiny.keep(getattr(script, name), kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "step", step)
        patch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        torch.manual_seed(0)
        tiny.run_main(script, run.args, dict(Run=run) | spies | (names or {}))
    size, rollouts = run.args.batch_size, run.rollouts
    run.rollouts = [x for x in rollouts if len(x.scores) == size]  # of updates
    run.evaluations = [x for x in rollouts if len(x.scores) != size]
    return run


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """A task whose folder has a reward model, a reference and other texts, too."""
    folder = tmp_path_factory.mktemp("task")
    task = tiny.write_task(folder, truncate_token=None)
    tiny.write_reward(folder)
    reference = models.load_lm(task.base_model)
    reference.transformer.h[0].mlp.c_fc.weight.data *= 1.3
    reference.save_pretrained(folder / "reference")
    tiny.write_tokenizer(folder / "reference")
    texts = [f"Anna saw {n} {thing}." for n in range(10) for thing in ("cats", "old red houses")]
    (folder / "other.txt").write_text("\n".join(texts))
    return task


@pytest.fixture(scope="session")
def start(patched, task):
    """Names of patches and flags, also of the task → `run_main`."""
    return lambda *names, **flags: run_main(patched(*names), task, **flags)


def load_policy(folder):
    return rloo.Policy(models.load_lm(str(folder)), tiny.WORDS, 0.7).eval()


def assert_step(step, model, loss, atol=2e-5, rtol=2e-3):
    """Assert that a step had the gradient of a loss."""
    model.zero_grad()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert_close(step.grads, grads, atol=atol, rtol=rtol)


def norm_of(grads, part):
    return math.hypot(*(x.norm() for name, x in grads.items() if name.startswith(part)))


ONLINE = [*OF_PPO, *OF_RLOO, *(x for x in EXPERIMENTS if x not in ("online_dpo", "vllm"))]
RUNS = [pytest.param(name, "bf16", marks=pytest.mark.slow) for name in ONLINE]
OF_SEVERAL = [*map("+".join, PAIRS), *STACKS]
RUNS += [pytest.param(names, "no", marks=pytest.mark.slow) for names in OF_SEVERAL]


@pytest.mark.parametrize(("names", "precision"), [(name, "no") for name in ONLINE] + RUNS)
def test_L6_a_patched_script_runs_and_its_first_ratios_are_exactly_1(names, precision, start):
    run = start(*names.split("+"), precision=precision, lr=0.0, num_ppo_epochs=1)
    assert [line["ppo/episode"] for line in run.metrics[:2]] == [16, 32]
    for line in run.metrics[:2]:
        assert line["ppo/policy/approxkl_avg"] == line["ppo/val/ratio_var"] == 0
    assert any(x is not None and x.any() for x in run.steps[-1].grads.values())
    assert run.saved.keys() == ({"model", "ema"} if "ema" in names else {"model"})


# ------------------------------------------------------------------------------- patches, one by one


@pytest.mark.parametrize("own", [True, False], ids=["reward model", "policy"])
def test_X1_a_value_is_the_reward_of_the_text_so_far_by_an_own_model(own, start, tmp_path):
    """Also of another vocabulary. Without a reward model, the critic is a copy of the policy."""
    reward = tiny.make_reward(pad_id=tiny.WORDS + 8)
    reward.save_pretrained(tmp_path)
    flags = dict(critic_from=str(tmp_path)) if own else {}
    run = start("separate_critic", lr=0.0, gradient_checkpointing=True, **flags)
    rollout, policy = run.rollouts[0], run.model
    for i, t in product(range(4), range(5)):  # a copy has a head of zeros
        tokens = torch.cat([rollout.contexts[i], rollout.responses[i, :t]])
        expected = reward(tokens[tokens != tiny.WORDS][None])[0] * own
        assert_close(rollout.values[i, t], expected, rtol=1e-4, atol=1e-4)
    critic, lm = policy.value_head.backbone, policy.lm.base_model
    assert lm.is_gradient_checkpointing and critic.is_gradient_checkpointing
    if not own:
        assert_close(critic.state_dict(), lm.state_dict(), atol=0, rtol=0)
    for output, part in ((0, "lm"), (2, "value_head")):  # no loss reaches the other model
        policy.zero_grad()
        (policy(rollout.contexts, rollout.responses)[output] ** 2).sum().backward()
        reached = {n.split(".")[0] for n, p in policy.named_parameters() if p.grad is not None}
        assert reached == {part}


def test_X1_policy_and_critic_have_their_own_learning_rates_and_gradient_norms(start):
    """The norm of both together would shrink the smaller one, too."""
    clips = (None, 2.0)
    runs = [start("separate_critic", critic_lr_ratio=0.3, max_grad_norm=x) for x in clips]
    expected = 4 * [1e-2, 3e-3] + 4 * [5e-3, 1.5e-3]
    assert [lr for step in runs[1].steps for lr in step.lrs] == pytest.approx(expected)
    plain, clipped = (run.steps[0].grads for run in runs)
    for part in ("lm.", "value_head."):
        norm = norm_of(plain, part)
        assert (norm > 2) == (part == "lm.")
        for name in (x for x in plain if x.startswith(part)):
            assert_close(clipped[name], plain[name] * min(1, 2 / norm), rtol=1e-4, atol=1e-8)


def test_X4_each_step_adds_the_gradient_of_the_mean_loss_of_other_texts(patched, start, task):
    own, other, seen = patched("ptx").ptx_loss, Path(task.base_model).parent / "other.txt", []
    names = dict(ptx_loss=lambda policy, texts, *x: seen.append(texts) or own(policy, texts, *x))
    flags = dict(lr=0.0, micro_batch_tokens=20)
    run = start("ptx", names=names, ptx_coef=0.5, ptx_dataset=str(other), **flags)
    assert len(seen) > len(run.steps) == 8  # micro-batches
    batches, losses = torch.cat(seen).split(8), []
    assert not torch.equal(batches[0], batches[1])
    for step, plain, texts in zip(run.steps, start("ppo", **flags).steps, batches, strict=True):
        rows = [row[row != tiny.WORDS] for row in texts]
        logits = torch.cat([run.model.lm(x[None]).logits[0, :-1] for x in rows])
        losses.append(F.cross_entropy(logits, torch.cat([x[1:] for x in rows])))
        others = sum((p * plain.grads[name]).sum() for name, p in run.model.named_parameters())
        assert_step(step, run.model, 0.5 * losses[-1] + others, atol=1e-5, rtol=1e-3)
    tokenizer, _ = load_tokenizer(task, 5)
    assert all(x in other.read_text() for x in utils.decode(tokenizer, batches[0], tiny.WORDS))
    found = [line["ppo/loss/ptx_avg"] for line in run.metrics[:2]]
    assert found == pytest.approx([sum(x).item() / 4 for x in (losses[:4], losses[4:])], rel=1e-4)


def test_X5_the_average_is_updated_after_every_step(start, task):
    run = start("ema", ema_decay=0.9)
    for name, x in models.load_lm(task.base_model).named_parameters():
        for step in run.steps:
            x = 0.9 * x + 0.1 * step.after[f"lm.{name}"]
        assert_close(run.saved["ema"][name], x, atol=1e-6, rtol=0)
        assert not torch.equal(x, run.saved["model"][name])
    assert len(run.steps) == 8


@pytest.mark.parametrize("names", ["value_warmup", "separate_critic+value_warmup"])
def test_X6_at_first_only_the_value_function_learns_and_is_clipped_alone(names, start):
    """The policy has no moments, and its KL is no reason to adapt kl_coef."""
    flags = dict(max_grad_norm=0.01, kl_target=0.01, kl_horizon=50, kl_coef=0.5)
    run = start(*names.split("+"), value_warmup_updates=1, **flags)
    for i, step in enumerate(run.steps):
        moved = [n for n, x in step.after.items() if not torch.equal(x, step.before[n])]
        assert {x.split(".")[0] for x in moved} == {"value_head", *(["lm"] if i > 3 else [])}
        if i < 4:
            assert norm_of(step.grads, "value_head.") == pytest.approx(0.01, rel=1e-3)
    counts = {n: run.optimizer.state[p]["step"].item() for n, p in run.model.named_parameters()}
    # Adam's, of weights that have a gradient.
    assert counts == {name: 4 if name.startswith("lm.") else 8 for name in counts}
    assert run.metrics[1]["objective/kl_coef"] == 0.5


@pytest.mark.parametrize("top_p", [0.0, 0.6, 0.8, 1.0])
def test_X7_tokens_are_of_the_nucleus_and_no_response_ends_too_early(top_p, patched):
    """The nucleus is the fewest tokens with probability top_p. Token 0 ends a response."""
    script, probs = patched("sampling"), torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])
    batch = SimpleNamespace(rows=torch.arange(400), append=lambda tokens: None)
    batch.next_logits = lambda: (0.7 * probs.log()).repeat(400, 1)
    decoder, contexts = SimpleNamespace(start=lambda *x: batch), torch.zeros(400, 1).long()
    args = tiny.make_args(script=script, top_p=top_p, min_response_length=3)
    ids = utils.TokenIds(5, 0, [], [])
    found = script.sample(decoder, contexts, tiny.uniform(5, 400), ids, args)
    for t, tokens in enumerate(found.T):
        left = probs / probs.sum() if t > 1 else probs * torch.tensor([0, 2, 2, 2, 2])
        order = left.argsort(descending=True)
        size = next(n for n in range(1, 6) if left[order[:n]].sum() >= top_p - 1e-6)
        expected = torch.zeros(5).index_copy(0, order[:size], left[order[:size]])
        frequencies = tokens.bincount(minlength=5) / 400
        assert torch.equal(frequencies > 0, expected > 0)
        assert_close(frequencies, expected / expected.sum(), atol=0.08, rtol=0)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (dict(), [1, 0.75, 0.5, 0.25]),
        (dict(decay="cosine"), [1, 0.853553, 0.5, 0.146447]),
        (dict(decay="cosine", min_lr_ratio=0.2), [1, 0.882843, 0.6, 0.317157]),
        (dict(decay="inverse_sqrt"), [1, 0.816497, 0.707107, 0.632456]),
        (dict(anneal_lr=False), [1, 1, 1, 1]),
    ],
)
def test_X8_the_learning_rate_warms_up_for_two_updates_and_decays(flags, expected, start):
    run = start("schedule", batch_size=8, total_episodes=48, num_ppo_epochs=1, lr=2e-4, **flags)
    rates = [step.lrs[0] / 2e-4 for step in run.steps[::2]]
    assert rates == pytest.approx([0.5, 1, *expected], rel=1e-5)


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
        assert_close(step.after, weights, atol=1e-6, rtol=1e-5)


def test_X12_an_update_ends_after_the_epoch_that_moved_the_policy_too_far(start):
    few = dict(total_episodes=16)
    lines = {n: start("ppo", num_ppo_epochs=n, **few).metrics[0] for n in (1, 2, 4)}
    one, two = (lines[n]["ppo/policy/approxkl_avg"] for n in (1, 2))
    assert one < 2 * two - one  # the KL in the second epoch
    for limit, epochs in ((two, 2), (1e3, 4)):
        run = start("early_stop", max_approxkl=limit, num_ppo_epochs=4, **few)
        assert len(run.steps) == 2 * epochs
        found = {name: x for name, x in run.metrics[0].items() if name.startswith("ppo/")}
        expected = {name: lines[epochs][name] for name in found}
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_length_penalty_is_subtracted_for_each_token_of_the_truncated_response(start):
    flags = EOS | dict(responses=uneven_responses, truncate_after=2)
    runs = start("length_penalty", length_penalty=0.25, **flags), start("ppo", **flags)
    found, plain = (run.rollouts[0] for run in runs)
    tokens = (plain.cut != tiny.WORDS).sum(dim=1)
    assert_close(found.scores, plain.scores - 0.25 * tokens)
    assert {*tokens.tolist()} == {3, 4, 5} and (plain.scores == -1).any()  # some have no end


def test_X14_a_token_gets_what_it_adds_to_the_score_and_the_last_one_gets_the_rest(patched):
    """The score of a text is the sum of its ids, 10 of a query; 5 ends three responses."""
    task = tiny.make_task(truncate_after=0, missing_eos_penalty=-3.0)
    script = patched("dense_rewards")
    queries = torch.full((4, 8), tiny.PAD).index_fill(1, torch.tensor([7]), 10)
    responses = [[2, 5, 9, 9, 9], [2, 3, 4, 1, 5], [2, 3, 4, 1, 1], [5, 9, 9, 9, 9]]
    reward = lambda *x: sum((y * (y != tiny.PAD)).sum(dim=1) for y in x).float()  # noqa: E731
    inputs = dict(queries=queries, responses=torch.tensor(responses), reward=reward, kl_coef=0.5)
    rollout = tiny.make_rollout(tiny.make_policy(), tiny.make_args(task, script), script, **inputs)
    dense = [[2, 5, 0, 0, 10], [2, 3, 4, 1, 5 + 10], [2, 3, 4, 1, 1 - 3 - 11], [5, 0, 0, 0, 10]]
    assert_close(rollout.rewards + 0.5 * rollout.kl, torch.tensor(dense).float())


def test_two_lambdas_returns_have_their_own_and_that_of_advantages_rises_with_the_length(patched):
    """Of 5, 3 and 1 tokens: 1 - 1 / (0.5 * length), but 0 instead of -1."""
    lengths, lams = (5, 3, 1), (0.6, 1 / 3, 0.0)
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    r, v = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)) * mask
    flags = dict(whiten_rewards=False, whiten_advantages=False, lam_alpha=0.5, value_lam=0.9)
    args = tiny.make_args(script=patched("two_lambdas"), gamma=0.8, **flags)
    minibatch = SimpleNamespace(rewards=r, values=v, mask=mask)
    advantages, returns = patched("two_lambdas").compute_advantages(minibatch, args)
    for i, lam in enumerate(lams):
        expected, other = (naive_gae(r[i].numpy(), v[i].numpy(), 0.8, x) for x in (lam, 0.9))
        assert_close(advantages[i], torch.tensor(expected).float())
        assert_close(returns[i], torch.tensor(other).float() + v[i])


@pytest.mark.parametrize("eos", [False, True])
def test_X3_trlx_kl_is_what_a_slow_loop_over_queries_and_responses_gives(eos, start, task):
    """By trlX's formula, exp(x) - 1 - x with x = log pi - log pi_ref; roots of the means."""
    run = start("trlx_kl", **EOS if eos else {})
    policies, rollout = [*map(load_policy, (task.base_model, run.args.ref_model))], run.rollouts[0]
    texts, total = torch.cat([rollout.contexts, rollout.responses], dim=1), 0.0
    for ids in (text[text != tiny.WORDS] for text in texts):
        ours, theirs = (tiny.run_alone(model, ids[:1], ids[1:])[0] for model in policies)
        total += ((ours - theirs).exp() - 1 - (ours - theirs)).sum().item()
    positions = texts.numel() - 16  # padding, too
    expected = math.sqrt(total / 16), math.sqrt(total / positions)
    found = [run.metrics[0][f"trlx/policy/{name}"] for name in ("sqrt_kl", "kl_per_token")]
    assert found == pytest.approx(expected, rel=1e-3) and expected[0] > 0.01


LORA = {"lora": ("value_head.",), "lora_train_reward": ("head.", "gain", "bias")}  # trained, too
LORA |= {"lora_rloo": (), "lora_sft": ()}


@pytest.mark.parametrize("name", LORA)
def test_lora_trains_adapters_and_saves_them_merged(name, start, task, tmp_path):
    """Into the model that a link, such as `models/<task>/sft`, pointed to at first."""
    (tmp_path / "link").symlink_to(task.base_model)

    def relink(device):  # once the model is loaded
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to(tiny.write_model(tmp_path / "other", seed=5))
        return utils.Timer(device)

    loaded, flags = [], dict(lora_rank=2, base_model=str(tmp_path / "link"))
    names = dict(Timer=relink, load_lm=tiny.keep(models.load_lm, loaded))
    run, policy = start(name, names=names, **flags), load_policy(task.base_model)
    of_lm, saved = name != "lora_train_reward", run.saved["model"]
    assert len(loaded) == (2 if of_lm else 3)  # not in evaluations
    for i, rollout in enumerate(run.rollouts):  # the reference is the initial policy
        ref, _ = policy(rollout.contexts, rollout.responses)
        assert_close(rollout.logprobs - rollout.kl, ref, rtol=1e-4, atol=1e-4)
        assert rollout.kl.any() == (i > 0)
    trained = [x for x, grad in run.steps[-1].grads.items() if grad is not None]
    others = [x for x in run.steps[-1].grads if x.startswith(LORA[name])]
    assert len([x for x in trained if "lora_" in x]) == 2 * 2 * 4  # A and B of 4 layers
    assert others == [x for x in trained if "lora_" not in x]
    model = run.model.lm.base_model if of_lm else run.model.backbone
    merged, prefix = policy.lm.base_model, "transformer." if of_lm else "backbone."
    for key, before in merged.state_dict().items():
        change = (saved[prefix + key] - before).double()
        assert change.any() == bool(re.fullmatch(r"h\.\d\.(attn|mlp)\.c_\w+\.weight", key)), key
        assert not change.any() or torch.linalg.matrix_rank(change, rtol=1e-4) <= 2
    merged.load_state_dict({key: saved[prefix + key] for key in merged.state_dict()})
    found, expected = (x(torch.arange(1, 9)[None]).last_hidden_state for x in (model, merged))
    assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for key in others if not of_lm else ():
        assert torch.equal(saved[key], run.model.get_parameter(key))


def test_reference_on_cpu_is_on_the_device_only_for_its_forward_passes(patched):
    policy, ref, events = tiny.make_policy(), tiny.make_policy(), []
    ref.to = lambda device: events.append(device) or ref
    ref.register_forward_pre_hook(lambda *inputs: events.append("forward"))
    script = patched("reference_on_cpu")
    tiny.make_rollout(policy, tiny.make_args(script=script), script, ref=ref)
    _, *events = events  # `distributed.freeze` moves it first
    forwards = ["forward"] * (len(events) - 2)
    assert events == [torch.device("cpu"), *forwards, "cpu"] and len(forwards) > 1


def test_samples_per_query_are_different_responses_to_the_same_queries(start):
    for rollout in start("samples_per_query", samples_per_query=4).rollouts:
        assert rollout.contexts.unique(dim=0, return_counts=True)[1].tolist() == [4] * 4
        assert len(rollout.responses.unique(dim=0)) > 12


UPPER = {  # a head that is the embeddings is frozen, too
    "gpt2": ("transformer.h.1.", "transformer.ln_f."),
    "gpt_neox": ("gpt_neox.layers.1.", "gpt_neox.final_layer_norm.", "lm_head."),
}


@pytest.mark.parametrize("kind", UPPER)
def test_freeze_layers_trains_what_is_after_the_lower_layers(kind, start, tmp_path):
    model = str(tiny.write_model(tmp_path / "model", kind))
    after = start("freeze_layers", unfrozen_layers=1, base_model=model).saved["model"]
    for name, before in models.load_lm(model).state_dict().items():
        assert torch.equal(after[name], before) != name.startswith(UPPER[kind]), name


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_P4_residual_dropout_drops_what_attention_and_mlp_add(kind, patched, tmp_path):
    """Only in training, by 0 or 1 / (1 - p); embeddings and attention weights have no dropout."""
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
        assert_close(after[kept], before[kept] / 0.75)


def test_P4_dropout_is_in_training_of_sft(start):
    runs = [start("resid_dropout", resid_dropout=p) for p in (0.0, 0.1, 0.1)]
    losses = [[line["loss"] for line in run.metrics if "loss" in line] for run in runs]
    assert losses[1] == losses[2] and losses[0][0] != losses[1][0]


# ------------------------------------------------------------------------- algorithms, by slow loops


def uneven_responses(decoder, contexts, ids, args, rng):
    """Random tokens, and the end after 1 to 5."""
    responses = torch.randint(20, 90, (len(contexts), args.task.response_length), generator=rng)
    return responses.scatter(1, torch.arange(len(contexts))[:, None] % 5, ids.truncate)


def inserted_responses(*inputs):
    """The same, but a tool wrote tokens 1 and 2, which are then no end."""
    return uneven_responses(*inputs) + INSERTED * (tiny.WORDS + 1)


def some_equal(responses):
    """Scores; those of the responses to the first of four queries are equal."""
    first = torch.arange(len(responses)) % 4 == 0
    return torch.where(first, 0.5, responses.sum(dim=1) % 7)


SLOW = dict(lr=2e-3, score=some_equal, kl_coef=0.3, kl_target=0.01, kl_horizon=50)
ENDS = torch.arange(16)[:, None] % 5
OWN = torch.arange(5) <= ENDS  # [16, R] tokens that the policy wrote
INSERTED = torch.tensor([False, True, True, False, False])
OWN_BESIDE_TOOL = ~INSERTED & (OWN | INSERTED[ENDS])  # an inserted end ends nothing
BOUNDS = dict.fromkeys([*ALGORITHMS, "rloo", "vine"], (0.8, 1.2))  # of the ratio
BOUNDS |= dict(dapo=(0.9, 1.2), gspo=(0.9, 1.05), cispo=(0.0, 1.1))
OF_RESPONSES = ("rloo", "grpo", "gspo")  # means over responses of their means, not over tokens
GROUPS = {  # scores and KL penalties of a query's four responses → advantages
    "rloo": lambda s, p: (s - p - (s - p).mean()) * 4 / 3,  # minus the mean of the others
    "grpo": lambda s, p: standardize(s),
    "dr_grpo": lambda s, p: s - p - (s - p).mean(),
    "dapo": lambda s, p: standardize(s - p),
    "cispo": lambda s, p: standardize(s) - p + p.mean(),
    "gspo": lambda s, p: standardize(s) - p + p.mean(),
}


def standardize(x):
    return (x - x.mean()) / (x.std() + 1e-4)


def slow_advantages(name, rollout, kl, kl_coef):
    """The advantages of own tokens from their `kl` to the reference: [n] for each response."""
    if name == "distill":
        return [-x for x in kl]
    if name == "reinforce_plus_plus":
        pairs = zip(rollout.scores, kl, strict=True)
        returns = [[s - kl_coef * x[t:].sum() for t in range(len(x))] for s, x in pairs]
        tokens = torch.tensor(sum(returns, []))
        return [(torch.tensor(x) - tokens.mean()) / tokens.std(correction=0) for x in returns]
    advantages, penalties = torch.zeros(16), kl_coef * torch.stack([x.sum() for x in kl])
    for i in range(4):  # the responses to a query
        advantages[i::4] = GROUPS[name](rollout.scores[i::4], penalties[i::4])
    return [x.expand(len(y)) for x, y in zip(advantages, kl, strict=True)]


def slow_losses(name, new, old, ref, advantages, kl_coef, args):
    """Ratios and losses of a response's own tokens, from log-probabilities: [n] each."""
    log_ratio = new - old
    if name in ("rloo", "gspo"):  # one for the response: the product, or the geometric mean
        log_ratio = log_ratio.sum().expand(len(new)) / (len(new) if name == "gspo" else 1)
    ratio = log_ratio.exp()
    objective = torch.min(ratio * advantages, ratio.clamp(*BOUNDS[name]) * advantages)
    if name == "cispo":
        objective = ratio.clamp(max=BOUNDS[name][1]).detach() * advantages * new
    if name == "grpo":
        k3 = (ref - new).exp() - 1 - (ref - new)
        objective = objective - kl_coef * k3 * (ratio if args.correct_kl_gradient else 1)
    return ratio, -objective


def alone(model, rollout, own):
    """Log-probabilities and entropies of own tokens, text by text: [n] each."""
    found = []
    for context, response, is_own in zip(rollout.contexts, rollout.responses, own, strict=True):
        response = response % (tiny.WORDS + 1)  # tools.diff marks inserted ids
        outputs = tiny.run_alone(model, context, response)
        found.append([x[is_own[response != tiny.WORDS]] for x in outputs])
    return found


def assert_updates(name, run, own=OWN, advantages_of=slow_advantages):
    """Assert that a run has the steps and metrics of a slow loop over its responses."""
    ref, steps, clipped = load_policy(run.args.ref_model), iter(run.steps), 0
    for rollout, epochs, line in zip(run.rollouts, run.epochs, run.metrics, strict=False):
        kl_coef, scores = line["objective/kl_coef"], rollout.scores.view(4, 4)  # [K, P]
        alike = (scores == scores[0]).all(dim=0).repeat(4)  # [16]
        with torch.no_grad():
            refs = [logprobs for logprobs, _ in alone(ref, rollout, own)]
        olds = [x[mask] for x, mask in zip(rollout.logprobs, own, strict=True)]
        kl = [x - y for x, y in zip(olds, refs, strict=True)]
        advantages = advantages_of(name, rollout, kl, kl_coef)
        mean_ratio = mean_entropy = 0.0
        for rows in sum(epochs, []):
            step, loss = next(steps), 0.0
            run.model.load_state_dict(step.before, strict=False)
            learned = rows[~alike[rows]] if name == "dapo" else rows
            news, entropies = zip(*alone(run.model, rollout.select(rows), own[rows]), strict=True)
            mean_entropy += sum(x.sum().item() for x in entropies) / own[rows].sum() / 4  # of steps
            for i, new in zip(rows, news, strict=True):
                if i not in learned:
                    continue
                inputs = new, olds[i], refs[i], advantages[i], kl_coef, run.args
                ratio, losses = slow_losses(name, *inputs)
                size = len(ratio) * len(rows) if name in OF_RESPONSES else own[learned].sum()
                loss += losses.sum() / (5 * len(rows) if name == "dr_grpo" else size)
                mean_ratio += ratio.sum().item() / size / 4
                clipped += (ratio != ratio.clamp(*BOUNDS[name])).sum()
            assert_step(step, run.model, loss)
        assert line["ppo/val/ratio"] == pytest.approx(float(mean_ratio), rel=1e-4)
        assert line["ppo/policy/entropy_avg"] == pytest.approx(float(mean_entropy), rel=1e-4)
        assert line["ppo/policy/approxkl_avg"] > 0
        assert line["objective/response_length"] == own.sum() / 16
        if name in GROUPS:
            assert line["objective/frac_reward_zero_std"] == alike.sum() / 16
    assert clipped > 10 and run.metrics[0]["objective/kl_coef"] != kl_coef
    assert run.optimizer.param_groups[0]["t"] == len(run.steps)  # one optimizer for all updates


WITH_TOOLS = ["tools", *(f"tools+{name}" for name in ALGORITHMS)]


@pytest.mark.parametrize("names", [*ALGORITHMS, "grpo, correct", *WITH_TOOLS])
def test_gradients_of_updates_are_those_of_a_slow_loop(names, patched, start):
    """What a tool wrote is in no loss, KL, entropy or length. Only dapo leaves equal scores out."""
    patches, tools = names.removesuffix(", correct").split("+"), names in WITH_TOOLS
    name = "rloo" if names == "tools" else patches[-1]
    low, high = BOUNDS[name]
    flags = dict(rloo_k=4, cliprange=1 - low, cliprange_high=high - 1)
    flags |= dict(correct_kl_gradient="correct" in names)
    flags |= dict(kl_estimator="k3") if name == "distill" else {}  # of metrics, not of rewards
    flags = {key: x for key, x in flags.items() if hasattr(patched(*patches).Args, key)}
    flags |= dict(responses=inserted_responses if tools else uneven_responses)
    run = start(*patches, **SLOW | EOS | flags)
    assert_updates(name, run, OWN_BESIDE_TOOL if tools else OWN)


@pytest.mark.parametrize("name", GROUPS)
def test_a_batch_of_equal_scores_changes_nothing(name, start):
    """Exactly: the mean of 0.9 0.9 0.9 is not 0.9 in fp32, and is divided by 0 + 1e-4."""
    flags = dict(rloo_k=3, batch_size=12, kl_coef=0.0)
    run = start(name, score=lambda responses: torch.full([len(responses)], 0.9), **flags)
    assert not any(grad.any() for step in run.steps for grad in step.grads.values())
    assert [line["objective/frac_reward_zero_std"] for line in run.metrics[:2]] == [1, 1]


def test_X14_rloo_whitens_advantages_over_the_batch(patched):
    rewards = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))  # [K, P]
    plain = rewards - (rewards.sum(dim=0) - rewards) / 3
    args = tiny.make_args(script=patched("whiten_advantages"), rloo_k=4, whiten_advantages=True)
    found = patched("whiten_advantages").compute_advantages(rewards.flatten(), args).view(4, 2)
    assert_close(found, (plain - plain.mean()) / plain.std(correction=0))


# ---------------------------------------------------------------------------- labels, by slow loops


def assert_label_steps(run, loss_of):
    """Assert that gradients and losses of two steps are the means of `loss_of(row)`, a label's."""
    order = np.random.default_rng([1, 0, 1]).permutation(8).reshape(2, 4)
    for step, rows, line in zip(run.steps, order, run.metrics, strict=False):
        run.model.load_state_dict(step.before, strict=False)
        loss = sum(map(loss_of, rows)) / 4
        assert_step(step, run.model, loss, atol=1e-5)
        assert line["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert len(run.steps) == 2


@pytest.mark.parametrize("k", [2, 4])
def test_dpo_gradients_and_metrics_are_those_of_a_slow_loop(k, start, task):
    """Of two responses, the loss is -log sigmoid of beta times the difference of log-ratios."""
    every, seen = labels.load_labels(task, *load_tokenizer(task, 5)), []
    few = labels.Labels(every.queries, [x[:k] for x in every.responses], every.best % k)
    prefix = load_tokenizer(replace(task, query_prefix="Story: "), 5)[1].prefix
    names = dict(load_labels=lambda *inputs: few)
    run = start("dpo", names=names, beta=0.3, query_prefix="Story: ")
    ref = load_policy(task.base_model)

    def loss_of(row):
        rewards, context = [], torch.tensor([*prefix, *few.queries[row]])
        for response in map(torch.tensor, few.responses[row]):
            ours, theirs = (tiny.run_alone(x, context, response)[0].sum() for x in (run.model, ref))
            rewards.append(0.3 * (ours - theirs.detach()))
        best, ties = rewards[few.best[row]], rewards.count(max(rewards))
        margin = sum(best - x for x in rewards).item() / (k - 1)
        seen.append((margin, (best >= max(rewards)) / ties))  # at first all rewards are 0: 1/k
        return torch.log(sum(torch.exp(x - best) for x in rewards))

    assert_label_steps(run, loss_of)
    found = [[line["margin"], line["accuracy"]] for line in run.metrics[:2]]
    expected = np.reshape(seen, (2, 4, 2)).mean(axis=1)
    assert prefix and np.array(found) == pytest.approx(expected, abs=1e-5)


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
    few = labels.load_labels(task, *load_tokenizer(task, 5))
    run = start("ranking", label_dataset=str(path))

    def loss_of(i):
        rewards = [run.model(torch.tensor([[*few.queries[i], *x]])) for x in few.responses[i]]
        pairs = [(a, b) for a, b in product(range(4), repeat=2) if ranks[i][a] < ranks[i][b]]
        losses = [torch.log(1 + torch.exp(rewards[b] - rewards[a])) for a, b in pairs]
        return sum(losses) / max(len(losses), 1)

    assert_label_steps(run, loss_of)


def test_R4_each_pair_is_there_once_and_those_of_a_prompt_side_by_side(patched, start, tmp_path):
    rows = [{"prompt": f"Q{i % 3}", "chosen": f" a{i}", "rejected": " no"} for i in range(8)]
    path, seen, own = tmp_path / "pairs.jsonl", [], patched("prompt_batches").candidate_tokens
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spy = lambda labels, rows, *rest: seen.extend(rows) or own(labels, rows, *rest)  # noqa: E731
    start("prompt_batches", label_dataset=str(path), names=dict(candidate_tokens=spy))
    trained = [int(row) for row in seen[:8]]  # the rest is held out
    prompts = [row % 3 for row in trained]
    assert sorted(trained) == list(range(8))
    assert sum(a != b for a, b in pairwise(prompts)) == 2  # three runs of equal ones


# -------------------------------------------------------------------------------------- experiments


OFF = ("ema", "reference_on_cpu", "sampling", "trlx_kl", "stale", "whiten_advantages")
OFF = dict.fromkeys(OFF, {}) | {
    "value_warmup": dict(value_warmup_updates=0),
    "samples_per_query": dict(samples_per_query=1),
    "tools": dict(tool_fn="json:dumps", tool_calls=0),
    "dynamic_sampling": dict(max_resamples=0),
}


@pytest.mark.parametrize("name", OFF)
def test_a_patch_that_is_off_or_only_logs_or_saves_trains_as_its_script(name, start):
    run, plain = start(name, **OFF[name]), start(BASES[name])
    assert_close(run.saved["model"], plain.saved["model"], atol=0, rtol=0)
    for line, expected in zip(run.metrics, plain.metrics, strict=True):
        assert expected.keys() <= line.keys() and len(expected) > 8
        assert all(line[key] == x for key, x in expected.items() if not key.startswith("time/"))


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_tools_sampling_continues_after_what_the_tool_inserts(calls, patched, monkeypatch):
    """The answer depends on the response so far, and is cut at R tokens."""
    script, lm, task = patched("tools"), tiny.make_lm(), tiny.make_task(response_length=12)
    contexts, uniform = tiny.make_contexts([3, 6, 8, 1] * 4, 8), tiny.uniform(12, 16)
    decoder, tokenizer = Decoder(lm, 12), tiny.Tokenizer()
    caller = tiny.sample(decoder, contexts, uniform).flatten().mode().values.item()
    encode = lambda _, texts, own: ([[int(x) for x in texts[0].split()]], [], 0)  # noqa: E731
    monkeypatch.setattr(script, "encode_after", encode)
    tool = lambda contexts, responses: [f"{len(x.split())} 7" for x in responses]  # noqa: E731
    monkeypatch.setattr(script, "load_tool", lambda args: (tool, tokenizer, caller))
    args = tiny.make_args(task, script, tool_fn="mine.py:tool", tool_calls=calls)
    found = script.sample(decoder, contexts, uniform, tiny.IDS, args)
    for row, context in enumerate(contexts):
        tokens, expected, waiting, left = context[context != tiny.PAD].tolist(), [], [], calls
        for t in range(12):
            if waiting:
                tokens.append(waiting.pop(0))
                expected.append(tokens[-1] + tiny.PAD + 1)
                continue
            logits = lm(torch.tensor([tokens])).logits[:, -1] / task.temperature
            tokens.append(utils.sample_token(logits, uniform[t, row : row + 1]).item())
            expected.append(tokens[-1])
            if tokens[-1] == caller and left:
                expected[-1] -= tiny.PAD + 1
                waiting, left = [t + 1, 7], left - 1
        assert found[row].tolist() == expected
    assert (found > tiny.PAD).any() == (calls > 0)


def test_tools_an_answer_is_its_text_also_where_a_tokenizer_adds_a_space(patched, here):
    script, tokenizer = patched("tools"), formats.llama2_tokenizer()
    tiny.make_lm(vocab=len(tokenizer)).save_pretrained(here / "model")
    tokenizer.save_pretrained(here / "model")
    Path("tool.py").write_text("def tool(*texts): return ['42']")
    task = tiny.make_task(base_model=str(here / "model"), truncate_token="</s>", eos_task=True)
    args, ids = tiny.make_args(task, script, tool_fn="tool.py:tool"), load_tokenizer(task, 5)[1]
    responses = torch.full((1, 5), ids.pad)
    responses[0, :2] = torch.tensor(tokenizer.convert_tokens_to_ids(["7", "?"]))
    script.insert_answers(responses, responses, 1, ids, args)
    assert utils.decode(tokenizer, responses % (ids.pad + 1), ids.pad) == ["7?42"]


@pytest.mark.parametrize("kind", ["small", pytest.param("smollm2", marks=pytest.mark.slow)])
def test_tools_a_message_becomes_the_users_turn(kind, patched, here):
    """The token that ends the policy's turn calls the tool, and does not end the response."""
    script, end = patched("tools"), test_tokens.END
    tokenizer = getattr(test_tokens, f"{kind}_tokenizer")()
    tiny.make_lm(vocab=len(tokenizer)).save_pretrained(here / "model")
    tokenizer.save_pretrained(here / "model")
    Path("user.py").write_text("def ask(*texts): return [dict(role='user', content='Why?')]")
    model = str(here / "model")  # `load_tool` is cached
    task = tiny.make_task(base_model=model, truncate_token=end, truncate_after=0, eos_task=True)
    args = tiny.make_args(task, script, tool_fn="user.py:ask", tool_token=end)
    ids = load_tokenizer(task, 5)[1]
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


@pytest.mark.parametrize("max_weight", [None, 1.2])
def test_stale_samples_from_an_older_policy_and_weights_responses(max_weight, start):
    """Of two updates ago, first from the initial policy; in an evaluation, from today's."""
    flags = dict(total_episodes=64, sampler_lag=2, max_weight=max_weight)
    run, weights = start("stale", **SLOW | flags), []
    before, model = [step.before for step in run.steps[::4]], load_policy(run.args.task.base_model)
    _, ids = load_tokenizer(run.args.task, 5)

    def advantages_of(name, rollout, kl, kl_coef):
        update, logprobs = len(weights), []
        for i in (update, max(update - 2, 0)):
            model.load_state_dict(before[i], strict=False)
            logprobs.append(model(rollout.contexts, rollout.responses)[0].detach())
        rng = utils.generator(1, update, torch.device("cpu"))
        inputs = Decoder(model.lm, 5), rollout.contexts, ids, run.args, rng
        assert torch.equal(rollout.responses, rloo.sample_in_batches(*inputs))
        assert_close([rollout.logprobs, rollout.sampler_logprobs], logprobs)
        log_ratios = (logprobs[0] - logprobs[1]).sum(dim=1)
        kl_of_sampler = torch.stack([x.sum() for x in kl]) - log_ratios
        assert_close(rollout.kl.sum(dim=1), kl_of_sampler, atol=1e-4, rtol=1e-4)
        weights.append(log_ratios.exp().clamp(max=1.2) if max_weight else torch.ones(16))
        pairs = zip(weights[-1], slow_advantages(name, rollout, kl, kl_coef), strict=True)
        return [weight * x for weight, x in pairs]

    assert_updates("rloo", run, torch.ones(16, 5).bool(), advantages_of)
    for line, expected in zip(run.metrics, weights, strict=False):
        assert line["ppo/val/weight"] == pytest.approx(expected.mean().item(), rel=1e-4)
        assert line["ppo/val/weight_truncated"] == (expected == 1.2).sum() / 16
    assert max_weight is None or 0 < (weights[-1] == 1.2).sum() < 16
    assert all(torch.equal(x.sampler_logprobs, x.logprobs) for x in run.evaluations)


def test_vine_advantages_are_what_parts_add_to_mean_scores_of_continuations(start):
    """Of two continuations one ends at once, one never; a score is a number of tokens."""

    def responses(decoder, contexts, ids, args, rng, length=0):
        if not length:
            return uneven_responses(decoder, contexts, ids, args, rng)
        assert not (contexts[:, -1] == ids.pad).any()
        half = torch.full((len(contexts) // 2, length), 40)
        return torch.cat([torch.full_like(half, ids.truncate), half])

    def advantages_of(name, rollout, kl, kl_coef):
        equal = rollout._replace(scores=torch.zeros(16))
        penalties, found = slow_advantages("rloo", equal, kl, kl_coef), []
        for i in range(16):
            length = i % 5 + 1
            others = [j % 5 + 1 for j in range(i % 4, 16, 4) if j != i]
            values = [length if length <= t else (t + 1 - 2) / 2 for t in (2, 4)] + [length]
            parts = np.diff([sum(others) / 3, *values]).repeat(2)  # of two tokens each
            found.append(penalties[i] + torch.tensor(parts[:length]).float())
        return found

    flags = SLOW | EOS | dict(vine_every=2, vine_samples=2, missing_eos_penalty=-2.0)
    flags |= dict(score=lambda x: (x != tiny.WORDS).sum(dim=1).float(), responses=responses)
    run = start("vine", **flags)
    assert_updates("vine", run, OWN, advantages_of)


@pytest.mark.parametrize("alike", [False, True])
def test_online_dpo_raises_the_best_response_and_lowers_the_worst(alike, start):
    """With log-probabilities of each response alone. Equal scores: no gradient."""
    flags = dict(lr=0.0, num_minibatches=1, kl_coef=0.3, kl_target=None)
    flags |= dict(score=lambda responses: (1 - alike) * responses.sum(dim=1).float())
    run, loss = start("online_dpo", **flags), 0
    rollout = run.rollouts[0]
    texts = (alone(x, rollout, rollout.mask) for x in (run.model, load_policy(run.args.ref_model)))
    log_ratios = [(ours - theirs).sum() for (ours, _), (theirs, _) in zip(*texts, strict=True)]
    for query in range(4):  # the first of several that are the best, or the worst
        rows = range(query, 16, 4)
        best, worst = (choose(rows, key=lambda i: rollout.scores[i]) for choose in (max, min))
        loss -= torch.sigmoid(0.3 * (log_ratios[best] - log_ratios[worst])).log() / 4
    assert alike == (max(x.abs().max() for x in run.steps[0].grads.values()) < 1e-6)
    assert_step(run.steps[0], run.model, loss, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("limit", [0, 1, 20])
def test_dynamic_sampling_replaces_groups_with_equal_scores_until_the_limit(limit, start):
    score, scored = lambda responses: (responses.sum(dim=1) % 4 == 0).float(), []
    names = dict(load_reward=lambda *_: lambda *x: scored.append(x[:2]) or score(x[1]))
    flags = dict(max_resamples=limit, eval_queries=3, num_minibatches=1)
    run = start("dynamic_sampling", names=names, **flags)
    batches = iter([torch.cat(x, dim=1) for x in scored if len(x[0]) != 3])  # no evaluations
    for rollout, line in zip(run.rollouts, run.metrics, strict=False):
        missing, kept, sizes = range(4), {}, []
        while missing and len(sizes) <= limit:
            batch, n = next(batches), len(missing)
            sizes.append(n)
            kept |= {query: batch[i::n] for i, query in enumerate(missing)}
            missing = [i for i in missing if len(score(kept[i][:, 8:]).unique()) == 1]
        found = torch.cat([rollout.queries, rollout.responses], dim=1)
        assert all(torch.equal(found[i::4], kept[i]) for i in kept)
        assert line["objective/sampled_batches"] == sum(sizes) / 4
        dropped = sum(sizes[1:]) + len(missing)
        assert line["objective/frac_reward_zero_std"] == pytest.approx(dropped / sum(sizes))
    assert not [*batches]


def test_curriculum_draws_queries_by_1_minus_the_mean_score_of_their_last_responses(patched, start):
    """Weights are at least 0.3, and frequencies are those of weights."""
    own, draws = patched("curriculum").query_rows, []
    spy = lambda weights, *x: draws.append((weights, own(weights, *x))) or draws[-1][1]  # noqa: E731
    flags = dict(total_episodes=256, min_weight=0.3, score=lambda x: x[:, 0] % 3 - 0.5)
    run = start("curriculum", names=dict(query_rows=spy), **flags)
    success, again = np.zeros(len(draws[0][0])), 0
    for rollout, (weights, rows) in zip(run.rollouts, draws, strict=True):
        assert weights == pytest.approx(np.maximum(1 - success, 0.3))
        again += success[rows].astype(bool).sum()
        for i, row in enumerate(rows):
            success[row] = min(max(rollout.scores[i::4].mean().item(), 0), 1)
    assert again > 4 and len(np.unique(success)) > 3
    found = np.bincount([own(np.array([0.3, 0.5, 1.2]), 1, 1, i).item() for i in range(2000)])
    assert found / 2000 == pytest.approx([0.15, 0.25, 0.6], abs=0.05)


# ------------------------------------------------------------------------------------------ recipes

PUBLISHED = {  # by openrlhf, 59 updates of warm-up: 3% of all
    "instructgpt": """total_episodes=256000 batch_size=512 num_minibatches=8 num_ppo_epochs=1
        kl_coef=0.02 lr=5e-6 critic_lr=5e-6 anneal_lr=False warmup_updates=10 adam_beta1=0.9
        adam_beta2=0.95 weight_decay=0.0 ptx_coef=27.8 ema_decay=0.992 temperature=1.0""",
    "llama2": """total_episodes=204800 batch_size=512 num_minibatches=8 num_ppo_epochs=1
        kl_coef=0.01 lr=1e-6 critic_lr=1e-6 anneal_lr=False adam_beta1=0.9 adam_beta2=0.95
        adam_eps=1e-5 weight_decay=0.1 max_grad_norm=1.0 vf_coef=1.0""",
    "qwen": """num_ppo_epochs=4 samples_per_query=2 kl_coef=0.04 cliprange_value=0.15 lr=1e-6
        critic_lr=5e-6 value_warmup_updates=50 top_p=0.9 min_response_length=1""",
    "chinese_llama": """total_episodes=14000 batch_size=14 num_minibatches=1 num_ppo_epochs=1
        lr=5e-7 critic_lr=1.5e-6 anneal_lr=True decay='inverse_sqrt' warmup_updates=100
        adam_beta1=0.9 adam_beta2=0.95 adam_eps=1e-6 weight_decay=0.0 max_grad_norm=1.0
        vf_coef=1.0 kl_coef=0.1 cliprange_value=0.2 clip_score=None temperature=0.8 top_p=0.9
        whiten_rewards=False whiten_advantages=False""",
    "deepspeed_chat": """total_episodes=30528 batch_size=32 num_minibatches=1 num_ppo_epochs=1
        kl_coef=0.1 lr=9.65e-6 critic_lr=5e-6 anneal_lr=True decay='cosine' min_lr_ratio=0.0
        warmup_updates=100 adam_beta1=0.9 adam_beta2=0.95 adam_eps=1e-8 weight_decay=0.0
        max_grad_norm=1.0 vf_coef=1.0 clip_score=5.0 cliprange_value=0.2 ema_decay=0.992
        temperature=1.0 top_p=1.0 min_response_length=3 whiten_rewards=False
        whiten_advantages=False""",
    "openrlhf": """batch_size=512 num_minibatches=4 num_ppo_epochs=1 kl_coef=0.01 lr=1e-6
        critic_lr=9e-6 anneal_lr=True decay='cosine' min_lr_ratio=0.1 warmup_updates=59
        adam_beta1=0.9 adam_beta2=0.95 adam_eps=1e-8 weight_decay=0.0 max_grad_norm=1.0
        vf_coef=1.0 clip_score=10.0 cliprange_value=0.2 temperature=1.0 kl_estimator='k1'
        whiten_rewards=False whiten_advantages=True""",
    "trlx": """total_episodes=12800 batch_size=128 num_minibatches=4 num_ppo_epochs=4
        kl_coef=0.001 vf_coef=1.0 lr=3e-5 anneal_lr=False adam_beta1=0.9 adam_beta2=0.95
        adam_eps=1e-8 weight_decay=1e-6 clip_score=10.0 cliprange_value=0.2 unfrozen_layers=2
        temperature=1.0 kl_estimator='k1' whiten_rewards=False whiten_advantages=True""",
}


def run_recipe(folder, name):
    """Run a recipe, in a folder with diffs/, that only prints its command."""
    command = ["bash", folder / "diffs" / "recipes" / f"{name}.sh", "--seed", "7"]
    env = os.environ | {"LAUNCH": "echo"}
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_the_published_values_and_works_for_every_task(name, tmp_path):
    shutil.copy(ROOT / "ppo.py", tmp_path)
    shutil.copytree(ROOT / "diffs", tmp_path / "diffs")
    file, *flags = run_recipe(tmp_path, name).stdout.split()
    assert file == f"{name}.py" and flags[-2:] == ["--seed", "7"]
    script = tiny.load_script(tmp_path / file)
    published = {key: ast.literal_eval(x) for key, x in re.findall(r"(\w+)=(\S+)", PUBLISHED[name])}
    published |= dict(kl_target=None, cliprange=0.2, gamma=1.0, lam=0.95)
    for task in tasks.TASKS:
        more = ["--task", task, "--reward_fn", "math:sqrt"]
        args = cli.parse_args(script.Args, script.PRESETS, [*flags, *more])
        script.check(args, 1)
        preset = cli.parse_args(ppo.Args, ppo.PRESETS, ["--task", task])
        # What is not published is as in ppo.py.
        expected = dict(whiten_rewards=preset.whiten_rewards) | published
        found = vars(args.task) | vars(args)
        found["critic_lr"] = pytest.approx(args.lr * getattr(args, "critic_lr_ratio", 1), rel=1e-3)
        assert expected == {key: found[key] for key in expected}
    text = RECIPES[name].replace("\n#    ", "")
    command = re.search(rf"^# Synthetic: diffs/recipes/{name}\.sh --task (.*)$", text, re.M)[1]
    args = cli.parse_args(script.Args, script.PRESETS, [*flags, "--task", *command.split()])
    assert args.total_episodes == 4096


def test_a_recipe_keeps_the_users_changes_and_never_runs_half_patched(tmp_path):
    shutil.copytree(ROOT / "diffs", tmp_path / "diffs")
    (tmp_path / "llama2.py").write_text("mine")
    assert run_recipe(tmp_path, "llama2").stdout.startswith("llama2.py")
    assert (tmp_path / "llama2.py").read_text() == "mine"
    changed = (ROOT / "ppo.py").read_text().replace("@torch.no_grad()\ndef sample(", "def sample(")
    (tmp_path / "ppo.py").write_text(changed)  # the third patch of qwen.sh does not apply to it
    for _ in range(2):
        assert run_recipe(tmp_path, "qwen").returncode != 0


if __name__ == "__main__":
    if sys.argv[1:] != ["--fix"]:
        sys.exit(__doc__)
    for name in DIFFS:
        fix(name)
