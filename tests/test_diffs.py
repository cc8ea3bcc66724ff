"""diffs/: each patch applies alone and in pairs and does what its header says.
`python tests/test_diffs.py --fix` updates patches whose context or line numbers have changed."""

import ast
import json
import math
import re
import shutil
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from test_details import naive_gae
from torch.testing import assert_close

import ppo
import rloo
import utils
from machinery import cli, labels, models
from machinery.tokens import load_tokenizer

ROOT = Path(__file__).parents[1]
README = (ROOT / "diffs" / "README.md").read_text()
DIFFS = {path.stem: path.read_text() for path in sorted((ROOT / "diffs").glob("*.diff"))}
BASES = {name: re.search(r"^--- (\w+)\.py", text, flags=re.M)[1] for name, text in DIFFS.items()}
EXPERIMENTS = ("tools", "stale", "vine", "vllm", "online_dpo", "dynamic_sampling", "curriculum")
EXPERIMENTS += ("raft",)
LIMITS = dict.fromkeys(EXPERIMENTS, 60) | {"vllm": 80, "dpo": 46}  # added lines; others 25
LIMITS |= {"curriculum": 25, "compile": 30, "raft": 25, "reinforce_plus_plus": 27}
OF_PPO = [name for name in DIFFS if BASES[name] == "ppo"]
OF_RLOO = [name for name in DIFFS if BASES[name] == "rloo" and name not in EXPERIMENTS]
ADD_ONS = ("lora_rloo", "entropy_rloo")  # to each algorithm; the algorithms are alternatives
ALGORITHMS = [x for x in OF_RLOO if x not in (*ADD_ONS, "whiten_advantages")]
EXCLUSIVE = [{"lora", "freeze_layers"}]  # what is trained; the next ones change the same lines
EXCLUSIVE += [{"kl_estimator", x} for x in ("schedule", "dense_rewards", "reference_on_cpu")]
EXCLUSIVE += [{"lora_rloo", "distill"}]  # the teacher
EXCLUSIVE += [{*x} for x in combinations(OF_RLOO, 2) if not {*x} & {*ADD_ONS}]
MEANINGLESS = [{"lora", "reference_on_cpu"}]  # no reference there
PAIRS = [x for x in combinations(OF_PPO, 2) if {*x} not in EXCLUSIVE + MEANINGLESS]
RECIPES = {path.stem: path.read_text() for path in (ROOT / "diffs" / "recipes").glob("*.sh")}
WITH_TOOLS = ["tools", *(f"tools+{name}" for name in ALGORITHMS)]
FLAGGED = ["grpo, correct", "reinforce_plus_plus, baseline"]
STACKS = [re.search("for name in (.*); do", x)[1].replace(" ", "+") for x in RECIPES.values()]
STACKS += ["grpo+lora_rloo+entropy_rloo", "lora_rloo+dapo", "grpo+curriculum"]
STACKS += ["separate_critic+value_warmup+schedule+adamw+early_stop+ptx"]
STACKS += ["samples_per_query+sampling+dense_rewards+reference_on_cpu+freeze_layers"]
SLOW = pytest.mark.slow
EOS = dict(truncate_token=".", truncate_after=0, eos_task=True)
DECAYS = [({}, [1, 0.75, 0.5, 0.25]), (dict(decay="cosine"), [1, 0.853553, 0.5, 0.146447])]
DECAYS += [(dict(decay="cosine", min_lr_ratio=0.2), [1, 0.882843, 0.6, 0.317157])]
DECAYS += [(dict(decay="inverse_sqrt"), [1, 0.816497, 0.707107, 0.632456])]
DECAYS += [(dict(anneal_lr=False), [1, 1, 1, 1])]
LORA = {"lora": ("value_head.",), "lora_train_reward": ("head.", "gain", "bias")}  # trained, too
LORA |= {"lora_rloo": (), "lora_sft": ()}
UPPER = {"gpt2": ("transformer.h.1.", "transformer.ln_f.")}  # not a head that is the embeddings
UPPER |= {"gpt_neox": ("gpt_neox.layers.1.", "gpt_neox.final_layer_norm.", "lm_head.")}


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
    options = dict(cwd=ROOT, capture_output=True, text=True)
    new = subprocess.run(["patch", "--output=-", "--reject-file=-", base, path], **options)
    if new.returncode:
        sys.exit(f"{path}: change what it says about the changed lines\n{new.stderr}")
    command = ["diff", "-u", f"--label={base}", f"--label={name}.py", base, "-"]
    lines = subprocess.run(command, input=new.stdout, **options).stdout
    path.write_text(DIFFS[name].split("--- ", 1)[0] + lines)


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    folder, modules = tmp_path_factory.mktemp("patched"), {("ppo",): ppo, ("rloo",): rloo}

    def patched(*names):
        if names not in modules:
            path = folder / f"mine_{'_'.join(names)}.py"
            shutil.copy(ROOT / f"{BASES[names[0]]}.py", path)
            assert apply(path, *names)
            modules[names] = tiny.load_script(path)
        return modules[names]

    return patched


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


def two_updates(script, task, precision="no", score=None, **flags):
    """Two updates of tiny models; the reference is another one. Keeps rollouts, epochs, steps, weights.
    Functions in `flags` are in place of the script's, `score(responses)` of the reward."""
    run, folder = tiny.FakeRun(), Path(task.base_model).parent
    run.rollouts, run.epochs, run.steps, run.saved = [], [], [], {}
    spies = {name: flags.pop(name) for name in [*flags] if callable(flags[name])}
    sizes = dict(batch_size=16 if hasattr(script, "Rollout") else 4, micro_batch_tokens=60, lr=1e-2)
    sizes |= dict(total_episodes=32, rollout_batch_size=5, rloo_k=4, num_epochs=1)
    sizes |= dict(num_labels=8, num_heldout=4, normalize_samples=8, block_size=10, eval_every=1)
    sizes |= dict(reward_model=str(folder), ref_model=str(folder / "reference"), eval_queries=4)
    sizes = {name: x for name, x in sizes.items() if hasattr(script.Args, name)}
    run.args = tiny.make_args(task, script, **sizes | flags)
    optimizer = getattr(script, "AdamTF", torch.optim.AdamW)
    own_step = optimizer.step

    def step(optimizer, closure=None):
        params = dict(run.model.named_parameters())
        seen = SimpleNamespace(lrs=[group["lr"] for group in optimizer.param_groups])
        seen.grads = {name: deepcopy(p.grad) for name, p in params.items()}
        seen.before = deepcopy(params)
        own_step(optimizer, closure)
        seen.after = deepcopy(params)
        run.steps.append(seen)

    def save(model, tokenizer, name="model", **heads):
        run.saved[name] = deepcopy(model.state_dict())
        type(model)(model.config).load_state_dict(run.saved[name])  # has the names of a plain one

    run.save = save
    run.finish = lambda *_, **__: setattr(run, "save", None)  # the processes have left their group
    if score:
        spies["load_reward"] = lambda *_: tiny.fake_reward(lambda _, responses: score(responses))
    if hasattr(script, "Rollout"):
        spies["Rollout"] = tiny.keep(script.Rollout, run.rollouts)
        spies["epoch_order"] = tiny.keep_epochs(script, run.args, run.epochs)
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
    """Names of patches and flags, also of the task → `two_updates`."""
    return lambda *names, **flags: two_updates(patched(*names), task, **flags)


def load_policy(folder):
    return rloo.Policy(models.load_lm(str(folder)), tiny.WORDS, 0.7).eval()


def assert_step(step, model, loss, atol=2e-5, rtol=2e-3):
    model.zero_grad()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert_close(step.grads, grads, atol=atol, rtol=rtol)


ONLINE = [*OF_PPO, *OF_RLOO, *(x for x in EXPERIMENTS if x not in ("online_dpo", "vllm", "raft"))]
RUNS = [(name, "no") for name in ONLINE]
RUNS += [pytest.param(name, "bf16", marks=SLOW) for name in ONLINE]
RUNS += [pytest.param(names, "no", marks=SLOW) for names in [*map("+".join, PAIRS), *STACKS]]


@pytest.mark.parametrize(("names", "precision"), RUNS)
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
    rollout = run.rollouts[0]
    for i, t in product(range(4), range(5)):  # a copy has a head of zeros
        tokens = torch.cat([rollout.contexts[i], rollout.responses[i, :t]])
        expected = reward(tokens[tokens != tiny.WORDS][None])[0] * own
        assert_close(rollout.values[i, t], expected, rtol=1e-4, atol=1e-4)
    critic, lm = run.model.value_head.backbone, run.model.lm.base_model
    assert lm.is_gradient_checkpointing and critic.is_gradient_checkpointing and critic is not lm
    if not own:
        assert_close(critic.state_dict(), lm.state_dict(), atol=0, rtol=0)


def test_X1_policy_and_critic_have_their_own_learning_rates_and_gradient_norms(start):
    """The norm of both together would shrink the smaller one, too."""
    runs = [start("separate_critic", critic_lr_ratio=0.3, max_grad_norm=x) for x in (None, 2.0)]
    expected = 4 * [1e-2, 3e-3] + 4 * [5e-3, 1.5e-3]
    assert [lr for step in runs[1].steps for lr in step.lrs] == pytest.approx(expected)
    plain, clipped = (run.steps[0].grads for run in runs)
    for part in ("lm.", "value_head."):
        names = [name for name in plain if name.startswith(part)]
        norm = math.hypot(*(plain[name].norm() for name in names))
        assert (norm > 2) == (part == "lm.")
        for name in names:
            assert_close(clipped[name], plain[name] * min(1, 2 / norm), rtol=1e-4, atol=1e-8)


def test_X4_each_step_adds_the_gradient_of_the_mean_loss_of_other_texts(patched, start, task):
    own, other, seen = patched("ptx").ptx_loss, Path(task.base_model).parent / "other.txt", []
    spy = lambda policy, texts, *x: seen.append(texts) or own(policy, texts, *x)  # noqa: E731
    flags = dict(lr=0.0, micro_batch_tokens=20)
    run = start("ptx", ptx_loss=spy, ptx_coef=0.5, ptx_dataset=str(other), **flags)
    assert len(seen) > len(run.steps) == 8  # micro-batches
    batches, losses = torch.cat(seen).split(8), []
    assert not torch.equal(batches[0], batches[1])
    for step, plain, texts in zip(run.steps, start("ppo", **flags).steps, batches, strict=True):
        rows = [row[row != tiny.WORDS] for row in texts]
        logits = torch.cat([run.model.lm(x[None]).logits[0, :-1] for x in rows])
        targets = torch.cat([x[1:] for x in rows])
        losses.append(torch.nn.functional.cross_entropy(logits, targets))
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
            norms = [x.norm() for x in step.grads.values() if x is not None]
            assert math.hypot(*norms) == pytest.approx(0.01, rel=1e-3)
    for name, p in run.model.named_parameters():  # Adam's count of steps with a gradient
        assert run.optimizer.state[p]["step"] == (4 if name.startswith("lm.") else 8)
    assert run.metrics[1]["objective/kl_coef"] == 0.5


@pytest.mark.parametrize(("top_p", "size"), [(0, 1), (0.6, 2), (0.8, 3), (1, 5)])
def test_X7_tokens_are_of_the_nucleus_and_no_response_ends_too_early(top_p, size, patched):
    """The nucleus is the fewest tokens with probability top_p. Token 1 ends a response."""
    script, probs = patched("sampling"), torch.tensor([0.15, 0.5, 0.05, 0.2, 0.1])
    batch = SimpleNamespace(rows=torch.arange(400), append=lambda tokens: None)
    batch.next_logits = lambda: (0.7 * probs.log()).repeat(400, 1)
    decoder, contexts = SimpleNamespace(start=lambda *x: batch), torch.zeros(400, 1).long()
    args = tiny.make_args(script=script, top_p=top_p, min_response_length=3)
    uniform = (torch.arange(400).double() + 0.5).expand(5, -1) / 400
    found = script.sample(decoder, contexts, uniform, utils.TokenIds(5, [1], [], []), args)
    for t, tokens in enumerate(found.T):
        likely_first = torch.tensor([1, 3, 0, 4, 2])
        nucleus = likely_first[t < 2 :][:size]
        expected = torch.zeros(5).index_copy(0, nucleus, probs[nucleus] / probs[nucleus].sum())
        assert_close(tokens.bincount(minlength=5) / 400, expected, atol=1 / 300, rtol=0)


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


def test_X14_a_token_gets_what_it_adds_to_the_score_and_the_last_one_gets_the_rest(start):
    """The score of a text is the sum of its ids, and 10."""
    flags = dict(truncate_token=".", sample_in_batches=uneven_responses, unfinished_score=-3.0)
    flags |= dict(score=lambda x: 10 + (x * (x != tiny.WORDS)).sum(dim=1).float(), kl_coef=0.5)
    rollout = start("dense_rewards", **flags).rollouts[0]
    expected = rollout.cut.masked_fill(rollout.cut == tiny.WORDS, 0).float()
    expected[:, -1] += rollout.scores - expected.sum(dim=1)
    assert_close(rollout.rewards + 0.5 * rollout.kl, expected)
    assert rollout.finished.any() and not rollout.finished.all()


def test_two_lambdas_returns_have_their_own_and_that_of_advantages_rises_with_the_length(patched):
    """Of 5, 4 and 2 tokens: 1 - 1 / (0.3 * length), but 0 instead of -2 / 3."""
    mask = torch.arange(5) < torch.tensor([[5], [4], [2]])
    r, v = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)) * mask
    flags = dict(whiten_rewards=False, whiten_advantages=False, lam_alpha=0.3, value_lam=0.9)
    args = tiny.make_args(script=patched("two_lambdas"), gamma=0.8, **flags)
    minibatch = SimpleNamespace(rewards=r, values=v, mask=mask)
    advantages, returns = patched("two_lambdas").compute_advantages(minibatch, args)
    for i, lam in enumerate((1 / 3, 1 / 6, 0.0)):
        expected, other = (naive_gae(r[i].numpy(), v[i].numpy(), 0.8, x) for x in (lam, 0.9))
        assert_close(advantages[i], torch.tensor(expected).float())
        assert_close(returns[i], torch.tensor(other).float() + v[i])


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_X3_the_estimate_is_penalized_and_logged(estimator, patched):
    script = patched("kl_estimator")
    policy, ref = (tiny.make_policy(seed=seed, script=script) for seed in (0, 3))
    args = tiny.make_args(script=script, kl_estimator=estimator)
    rollout = tiny.make_rollout(policy, args, script, ref=ref)
    metrics = script.rollout_metrics(rollout, {}, 0.15, tiny.IDS, tiny.fake_reward(None))
    sums = []
    for given in zip(rollout.contexts, rollout.responses, strict=True):
        log_ratio = tiny.run_alone(policy, *given)[0] - tiny.run_alone(ref, *given)[0]
        terms = (0.5 * x**2 if estimator == "k2" else torch.exp(-x) - 1 + x for x in log_ratio)
        sums.append(sum(terms).item())
    expected = [score - 0.15 * x for score, x in zip(rollout.scores.tolist(), sums, strict=True)]
    assert rollout.rewards.sum(dim=1).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert metrics["objective/kl"].item() == pytest.approx(sum(sums) / 8, rel=1e-4)


@pytest.mark.parametrize("name", LORA)
def test_lora_trains_adapters_and_saves_them_merged(name, start, task, tmp_path):
    """Into the model that a link, such as `models/<task>/sft`, pointed to at first."""
    loaded, of_lm, link = [], name != "lora_train_reward", tmp_path / "link"
    link.symlink_to(task.base_model)
    flags = dict(Timer=lambda device: link.unlink() or utils.Timer(device), lora_rank=2)
    flags |= dict(load_lm=tiny.keep(models.load_lm, loaded), base_model=str(link))
    run = start(name, **flags)
    policy, saved = load_policy(task.base_model), run.saved["model"]
    assert len(loaded) == (2 if of_lm else 3)  # not in evaluations
    for i, rollout in enumerate(run.rollouts):  # the reference is the initial policy
        ref, _ = policy(rollout.contexts, rollout.responses)
        assert_close(rollout.logprobs - rollout.kl, ref, rtol=1e-4, atol=1e-4)
        assert rollout.kl.any() == (i > 0)
    grads = run.steps[-1].grads
    trained = [x for x, grad in grads.items() if grad is not None]
    ranks = [min(grads[x].shape) for x in trained if "lora_" in x]
    assert ranks == [2] * 16  # A and B of 4 layers in each of 2 blocks
    others = [x for x in grads if x.startswith(LORA[name])]
    assert others == [x for x in trained if "lora_" not in x]
    model = run.model.lm.base_model if of_lm else run.model.backbone
    plain, prefix = policy.lm.base_model, "transformer." if of_lm else "backbone."
    inputs = torch.arange(1, 9)[None]
    before, found = (x(inputs).last_hidden_state for x in (plain, model))
    plain.load_state_dict({key: saved[prefix + key] for key in plain.state_dict()})
    assert_close(found, plain(inputs).last_hidden_state, rtol=1e-4, atol=1e-4)
    assert (found - before).abs().max() > 0.01
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


@pytest.mark.parametrize("kind", UPPER)
def test_freeze_layers_trains_what_is_after_the_lower_layers(kind, start, tmp_path):
    model = str(tiny.write_model(tmp_path / "model", kind))
    after = start("freeze_layers", unfrozen_layers=1, base_model=model).saved["model"]
    for name, before in models.load_lm(model).state_dict().items():
        assert torch.equal(after[name], before) != name.startswith(UPPER[kind]), name


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_P4_residual_dropout_drops_what_attention_and_mlp_add(kind, start, tmp_path):
    """Only in training, the same in each run; embeddings and attention have no dropout."""
    flags = dict(base_model=str(tiny.write_model(tmp_path / "m", kind, dropout=0.5)), lr=1e-20)
    flags |= dict(Timer=lambda device: torch.seed() and utils.Timer(device))  # as another process
    runs = [start("resid_dropout", resid_dropout=p, **flags) for p in (0.0, 0.25, 0.25)]
    without, first, again = ([line.get("loss") for line in run.metrics] for run in runs)
    assert first == again and first[0] != without[0]
    assert len({line["heldout/loss"] for run in runs for line in run.metrics[:1]}) == 1
    lm, seen = runs[1].model.lm, []
    assert not any("drop" in key and value for key, value in lm.config.to_dict().items())
    dropouts = [x for x in lm.modules() if isinstance(x, torch.nn.Dropout) and x.p]
    for module in dropouts:
        module.register_forward_hook(lambda module, *_: seen.append(module.p))
    lm(torch.arange(1, 33)[None])
    assert seen == [0.25] * len(dropouts) == [0.25] * 4  # two in each of two layers


# -------------------------------------------------------------- algorithms and labels, by slow loops


def uneven_responses(decoder, contexts, uniform, ids, args):
    """Random tokens, and the end after 1 to 5."""
    responses = (20 + 70 * uniform.T).long()
    return responses.scatter(1, torch.arange(len(contexts))[:, None] % 5, ids.ends[0])


def inserted_responses(*inputs):
    """The same, but a tool wrote tokens 1 and 2, which are then no end."""
    return uneven_responses(*inputs) + INSERTED * (tiny.WORDS + 1)


def some_equal(responses):
    """Scores; those of the responses to the first of four queries are equal."""
    first = torch.arange(len(responses)) < len(responses) / 4
    return torch.where(first, 0.5, responses.sum(dim=1) % 7)


EQUAL = dict(lr=2e-3, score=some_equal, kl_coef=0.3, kl_target=0.01, kl_horizon=50)
ENDS = torch.arange(16)[:, None] % 5
OWN = torch.arange(5) <= ENDS  # [16, R] tokens that the policy wrote
INSERTED = torch.tensor([False, True, True, False, False])
OWN_BESIDE_TOOL = ~INSERTED & (OWN | INSERTED[ENDS])  # an inserted end ends nothing
BOUNDS = dict.fromkeys([*OF_RLOO, "rloo", "vine", "stale"], (0.8, 1.2))  # of the ratio
BOUNDS |= dict(dapo=(0.9, 1.2), gspo=(0.9, 1.05), cispo=(0.0, 1.1))
WHITENED = "whiten_advantages"  # RLOO
OF_RESPONSES = ("rloo", WHITENED, "grpo", "gspo", "sapo", "stale")  # means over responses
GROUPS = {  # scores and KL penalties of a query's four responses → advantages
    "rloo": lambda s, p: (s - p - (s - p).mean()) * 4 / 3,  # minus the mean of the others
    "grpo": lambda s, p: standardize(s),
    "dr_grpo": lambda s, p: s - p - (s - p).mean(),
    "dapo": lambda s, p: standardize(s - p),
    "cispo": lambda s, p: standardize(s) - p + p.mean(),
}
GROUPS |= dict(sapo=GROUPS["dapo"], gspo=GROUPS["cispo"])
GROUPS |= {WHITENED: GROUPS["rloo"], "entropy_rloo": GROUPS["rloo"]}  # at first


def standardize(x):
    return (x - x.mean()) / (x.std() + 1e-4)


def slow_advantages(name, rollout, kl, kl_coef, args=None):
    """The advantages of own tokens from their `kl` to the reference: [n] for each response."""
    if name == "distill":
        return [-x for x in kl]
    if name == "reinforce_plus_plus":
        scores = rollout.scores.view(4, 4)
        scores = scores - scores.mean(dim=1, keepdim=True) if args.group_baseline else scores
        pairs = zip(scores.flatten(), kl, strict=True)
        returns = [[s - kl_coef * x[t:].sum() for t in range(len(x))] for s, x in pairs]
        tokens = torch.tensor(sum(returns, []))
        return [(torch.tensor(x) - tokens.mean()) / tokens.std(correction=0) for x in returns]
    advantages, penalties = torch.zeros(16), kl_coef * torch.stack([x.sum() for x in kl])
    for i in range(0, 16, 4):  # the responses to a query
        part = slice(i, i + 4)
        advantages[part] = GROUPS[name](rollout.scores[part], penalties[part])
    if name == WHITENED:
        advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
    return [x.expand(len(y)) for x, y in zip(advantages, kl, strict=True)]


def slow_losses(name, new, old, ref, advantages, kl_coef, args):
    """Ratios and losses of a response's own tokens, from log-probabilities: [n] each."""
    log_ratio = new - old
    if name in ("rloo", WHITENED, "stale"):
        log_ratio = log_ratio.sum().expand(len(new))
    if name == "gspo":  # the geometric mean
        log_ratio = log_ratio.mean().expand(len(new))
    ratio = log_ratio.exp()
    objective = torch.min(ratio * advantages, ratio.clamp(*BOUNDS[name]) * advantages)
    if name == "stale":  # each token has a weight, here in its advantage
        is_clipped = objective < ratio * advantages
        objective = len(new) * ratio.detach() * advantages * new * ~is_clipped
    if name == "sapo":
        tau = torch.where(advantages > 0, args.tau_pos, args.tau_neg)
        objective = 4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantages
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
        kl_coef, scores = line["objective/kl_coef"], rollout.scores.view(4, 4)  # [P, K]
        alike = (scores == scores[:, :1]).all(dim=1).repeat_interleave(4)  # [16]
        with torch.no_grad():
            refs = [logprobs for logprobs, _ in alone(ref, rollout, own)]
        olds = [x[mask] for x, mask in zip(rollout.logprobs, own, strict=True)]
        kl = [x - y for x, y in zip(olds, refs, strict=True)]
        advantages = advantages_of(name, rollout, kl, kl_coef, run.args)
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


@pytest.mark.parametrize("names", [*ALGORITHMS, WHITENED, *FLAGGED, *WITH_TOOLS])
def test_gradients_of_updates_are_those_of_a_slow_loop(names, patched, start):
    """What a tool wrote is in no loss, KL, entropy or length. Only dapo leaves equal scores out."""
    patches, tools = names.split(",")[0].split("+"), names in WITH_TOOLS
    name = "rloo" if names == "tools" else patches[-1]
    low, high = BOUNDS[name]
    flags = dict(rloo_k=4, cliprange=1 - low, cliprange_high=high - 1, whiten_advantages=True)
    flags |= dict(correct_kl_gradient="correct" in names, group_baseline="baseline" in names)
    flags |= dict(tau_pos=0.5, tau_neg=3.0)
    flags = {key: x for key, x in flags.items() if hasattr(patched(*patches).Args, key)}
    responses = inserted_responses if tools else uneven_responses
    run = start(*patches, sample_in_batches=responses, **EQUAL | EOS | flags)
    assert_updates(name, run, OWN_BESIDE_TOOL if tools else OWN)


@pytest.mark.parametrize("name", GROUPS)
def test_a_batch_of_equal_scores_changes_nothing(name, start):
    """Exactly: the mean of 0.9 0.9 0.9 is not 0.9 in fp32, and is divided by 0 + 1e-4."""
    flags = dict(rloo_k=3, batch_size=12, kl_coef=0.0)
    run = start(name, score=lambda responses: torch.full([len(responses)], 0.9), **flags)
    assert not any(grad.any() for step in run.steps for grad in step.grads.values())
    assert [line["objective/frac_reward_zero_std"] for line in run.metrics[:2]] == [1, 1]


def assert_label_steps(run, loss_of):
    """Assert that gradients and losses of two steps are the means of `loss_of(row)`, a label's."""
    order = np.random.default_rng([1, 0, 1]).permutation(8).reshape(2, 4)
    for step, rows, line in zip(run.steps, order, run.metrics[:2], strict=True):
        run.model.load_state_dict(step.before, strict=False)
        loss = sum(map(loss_of, rows)) / 4
        assert_step(step, run.model, loss, atol=1e-5)
        assert line["loss"] == pytest.approx(loss.item(), abs=1e-5)


def test_dpo_gradients_and_metrics_are_those_of_a_slow_loop(start, task):
    """Of three responses: minus the log of the softmax of beta times their log-ratios."""
    every, seen = labels.load_labels(task, *load_tokenizer(task, 5)), []
    few = labels.Labels(every.queries, [x[:3] for x in every.responses], every.best % 3)
    prefix = load_tokenizer(replace(task, query_prefix="Story: "), 5)[1].prefix
    run = start("dpo", load_labels=lambda *_: few, beta=0.3, query_prefix="Story: ")
    ref = load_policy(task.base_model)

    def loss_of(row):
        rewards, context = [], torch.tensor([*prefix, *few.queries[row]])
        for response in map(torch.tensor, few.responses[row]):
            ours, theirs = (tiny.run_alone(x, context, response)[0].sum() for x in (run.model, ref))
            rewards.append(0.3 * (ours - theirs.detach()))
        best, ties = rewards[few.best[row]], rewards.count(max(rewards))
        margin = sum(best - x for x in rewards).item() / 2
        seen.append((margin, (best >= max(rewards)) / ties))  # at first all rewards are 0: 1/3
        return torch.log(sum(torch.exp(x - best) for x in rewards))

    assert_label_steps(run, loss_of)
    found = [[line["margin"], line["accuracy"]] for line in run.metrics[:2]]
    expected = np.reshape(seen, (2, 4, 2)).mean(axis=1)
    assert prefix and np.array(found) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("last", [2, 4])
def test_X15_gradients_are_those_of_a_slow_loop_over_the_labels(last, start, task, tmp_path):
    """The mean over a prompt's comparisons; 0 if all are tied. Without `ranks`, all others rank 2."""
    rows, path = json.loads(Path(task.label_dataset).read_text()), tmp_path / "labels.json"
    ranks = [[min(1 + (k - row["best"]) % 4, last) for k in range(4)] for row in rows]
    if last == 4:
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
    path.write_text("\n".join(map(json.dumps, rows)))
    spy = lambda labels, rows, *rest: seen.extend(rows) or own(labels, rows, *rest)  # noqa: E731
    start("prompt_batches", label_dataset=str(path), candidate_tokens=spy)
    assert sorted(seen[:8]) == list(range(8))  # the rest is held out
    assert sum(a % 3 != b % 3 for a, b in pairwise(seen[:8])) == 2  # three runs of equal prompts


# -------------------------------------------------------------------------------------- experiments


OFF = dict.fromkeys(["ema", "reference_on_cpu", "sampling", "stale", *ADD_ONS[1:], WHITENED], {})
OFF |= dict(value_warmup=dict(value_warmup_updates=0), samples_per_query=dict(samples_per_query=1))
OFF |= dict(tools=dict(tool_fn="json:dumps", tool_calls=0), dynamic_sampling=dict(max_resamples=0))
CUTS = [("sequence", "truncate", 0.0, 1.2), ("sequence", "mask", 0.6, 1.7)]
CUTS += [("token", "mask", 0.8, 5), ("token", "truncate", 0.95, 1.05)]
CUTS += [("token", "truncate", 1.0, 1.0)]  # no weights
RAFT = [dict(), dict(select_best=False), dict(min_score=4.0), dict(min_score=99.0)]
ADAPTIVE = [(None, [3.0, 3.0]), (99.0, [3.005, 3.01]), (0.01, [0.0, 0.0])]  # too low; too high


@pytest.mark.parametrize("name", OFF)
def test_a_patch_that_is_off_or_only_logs_or_saves_trains_as_its_script(name, start):
    run, plain = start(name, **OFF[name]), start(BASES[name])
    assert_close(run.saved["model"], plain.saved["model"], atol=0, rtol=0)
    for line, expected in zip(run.metrics, plain.metrics, strict=True):
        assert expected.keys() <= line.keys() and len(expected) > 8
        assert all(line[key] == x for key, x in expected.items() if not key.startswith("time/"))


@pytest.mark.parametrize(("level", "cut", "low", "high"), CUTS)
def test_stale_samples_from_an_older_policy_and_weights_gradients(level, cut, low, high, start):
    """Of two updates ago, first from the initial policy; in an evaluation, from today's."""
    samplers, weights = [], []

    def sample(decoder, *inputs):
        samplers.append(deepcopy(decoder.lm.state_dict()))
        return rloo.sample_in_batches(decoder, *inputs)

    flags = dict(total_episodes=64, sampler_lag=2, sample_in_batches=sample)
    flags |= dict(weight_level=level, weight_cut=cut, min_weight=low, max_weight=high)
    run = start("stale", **EQUAL | flags)
    before, model = [step.before for step in run.steps[::4]], load_policy(run.args.task.base_model)

    def advantages_of(name, rollout, kl, kl_coef, args):
        update, logprobs = len(weights), []
        for i, sampler in zip((update, max(update - 2, 0)), samplers[2 * update :], strict=False):
            model.load_state_dict(before[i], strict=False)
            assert_close(model.lm.state_dict(), sampler, atol=0, rtol=0)
            logprobs.append(model(rollout.contexts, rollout.responses)[0].detach())
        assert_close([rollout.logprobs, rollout.sampler_logprobs], logprobs)
        log_ratios = logprobs[0] - logprobs[1]  # [16, R]
        gap = log_ratios.abs().mean()
        kl_of_sampler = torch.stack([x.sum() for x in kl]) - log_ratios.sum(dim=1)
        assert_close(rollout.kl.sum(dim=1), kl_of_sampler, atol=1e-4, rtol=1e-4)
        if level == "sequence":
            log_ratios = log_ratios.sum(dim=1, keepdim=True).repeat(1, 5)
        ratios, bounds = log_ratios.exp(), [low, high] if cut == "truncate" else [0.0, 0.0]
        new = [bounds[x > 1] if x < low or x > high else x for x in ratios.flatten()]
        weights.append(torch.tensor(new).view(16, 5))
        expected = [weights[-1].mean(), ((ratios < low) | (ratios > high)).float().mean(), gap]
        names = ("ppo/val/weight", "ppo/val/weight_cut", "objective/sampling_gap")
        found = [run.metrics[update][name] for name in names]
        assert found == pytest.approx([x.item() for x in expected], rel=1e-3)
        pairs = zip(weights[-1], slow_advantages("rloo", rollout, kl, kl_coef), strict=True)
        return [weight * x for weight, x in pairs]

    assert_updates("stale", run, torch.ones(16, 5).bool(), advantages_of)
    assert low == high or weights[-1].unique().numel() > 2


@pytest.mark.parametrize("names", ["entropy", "entropy_rloo", "entropy_rloo+dapo"])
@pytest.mark.parametrize(("target", "coefs"), ADAPTIVE)
def test_entropy_adds_the_gradient_of_the_mean_entropy_in_float64(names, target, coefs, start):
    flags = dict(lr=0.0, sample_in_batches=uneven_responses, micro_batch_tokens=20) | EOS
    base = "ppo" if names == "entropy" else names.partition("+")[2] or "rloo"
    run = start(*names.split("+"), entropy_coef=3.0, entropy_target=target, **flags)
    model, temperature = deepcopy(run.model.lm).double(), run.args.task.temperature
    steps = zip(run.steps, start(base, **flags).steps, strict=True)
    found = [line.get("ppo/policy/entropy_coef") for line in run.metrics]
    assert found == pytest.approx([*coefs, None])
    for rollout, epochs, coef in zip(run.rollouts, run.epochs, coefs, strict=True):
        entropies = []
        for context, response in zip(rollout.contexts, rollout.responses, strict=True):
            tokens = torch.cat([context, response])
            tokens, n = tokens[tokens != tiny.WORDS], (response != tiny.WORDS).sum()
            logits = model(tokens[None]).logits[0, -n - 1 : -1] / temperature
            probs = torch.exp(logits) / torch.exp(logits).sum(dim=1, keepdim=True)
            entropies.append(-(probs * probs.log()).sum(dim=1))
        for rows in sum(epochs, []):
            (step, plain), found = next(steps), torch.cat([entropies[i] for i in rows]).mean()
            grads = torch.autograd.grad(-coef * found, [*model.parameters()], retain_graph=True)
            for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
                bonus = step.grads[f"lm.{name}"] - plain.grads[f"lm.{name}"]
                assert_close(bonus.double(), grad, atol=2e-5, rtol=1e-3)
    change = run.model.state_dict()["entropy_coef_change"]
    assert change == pytest.approx({None: 0, 99.0: 0.01, 0.01: -0.01}[target])


@pytest.mark.parametrize("flags", RAFT)
def test_raft_raises_the_likelihood_of_the_best_response_to_each_query(flags, start):
    """Or of the first; the mean over tokens, and of none with a score below the minimum."""
    flags = EQUAL | EOS | dict(sample_in_batches=uneven_responses) | flags
    run, steps, low = start("raft", **flags), 0, flags.get("min_score", -99)
    for rollout, epochs, line in zip(run.rollouts, run.epochs, run.metrics, strict=False):
        losses = []
        for rows in sum(epochs, []):
            step, groups = run.steps[steps], rows.view(-1, 4).tolist()
            steps += 1
            rewards = rollout.scores - line["objective/kl_coef"] * rollout.kl.sum(dim=1)
            chosen = [max(x, key=lambda i: rewards[i]) for x in groups]
            chosen = [x[0] for x in groups] if "select_best" in flags else chosen
            chosen = [i for i in chosen if rollout.scores[i] >= low]
            run.model.load_state_dict(step.before, strict=False)
            texts = alone(run.model, rollout.select(chosen), OWN[chosen])
            loss = -torch.cat([torch.zeros(0, requires_grad=True), *(x for x, _ in texts)]).mean()
            losses.append(loss.item() if chosen else 0.0)
            if chosen:
                assert_step(step, run.model, loss)
            assert bool(chosen) == any(x.any() for x in step.grads.values())
        assert line["ppo/loss/policy_avg"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert steps == len(run.steps) == 8


def test_vine_advantages_are_what_parts_add_to_mean_scores_of_continuations(start):
    """Of two continuations one ends at once, one never; a score is a number of tokens."""

    def responses(decoder, contexts, uniform, ids, args):
        if len(uniform) == args.task.response_length:
            return uneven_responses(decoder, contexts, uniform, ids, args)
        assert not (contexts[:, -1] == ids.pad).any()
        tokens = torch.tensor([ids.ends[0], 40]).repeat(len(contexts) // 2)
        return tokens[:, None].expand(uniform.T.shape)

    def advantages_of(name, rollout, kl, kl_coef, args):
        equal = rollout._replace(scores=torch.zeros(16))
        penalties, found = slow_advantages("rloo", equal, kl, kl_coef), []
        for i in range(16):
            length = i % 5 + 1
            others = [j % 5 + 1 for j in range(i // 4 * 4, i // 4 * 4 + 4) if j != i]
            values = [length if length <= t else (t + 1 - 2) / 2 for t in (2, 4)] + [length]
            parts = np.diff([sum(others) / 3, *values]).repeat(2)  # of two tokens each
            found.append(penalties[i] + torch.tensor(parts[:length]).float())
        return found

    flags = EQUAL | EOS | dict(vine_every=2, vine_samples=2, unfinished_score=-2.0)
    flags |= dict(score=lambda x: (x != tiny.WORDS).sum(dim=1).float(), sample_in_batches=responses)
    assert_updates("vine", start("vine", **flags), OWN, advantages_of)


@pytest.mark.parametrize("alike", [False, True])
def test_online_dpo_raises_the_best_response_and_lowers_the_worst(alike, start):
    """With log-probabilities of each response alone. Equal scores: no gradient."""
    flags = dict(lr=0.0, num_minibatches=1, kl_coef=0.3, kl_target=None)
    flags |= dict(score=lambda responses: (1 - alike) * responses.sum(dim=1).float())
    run, loss = start("online_dpo", **flags), 0
    rollout = run.rollouts[0]
    texts = (alone(x, rollout, rollout.mask) for x in (run.model, load_policy(run.args.ref_model)))
    log_ratios = [(ours - theirs).sum() for (ours, _), (theirs, _) in zip(*texts, strict=True)]
    for query in range(0, 16, 4):  # the first of several that are the best, or the worst
        rows = range(query, query + 4)
        best, worst = (choose(rows, key=lambda i: rollout.scores[i]) for choose in (max, min))
        loss -= torch.sigmoid(0.3 * (log_ratios[best] - log_ratios[worst])).log() / 4
    assert alike == (max(x.abs().max() for x in run.steps[0].grads.values()) < 1e-6)
    assert_step(run.steps[0], run.model, loss, atol=1e-5, rtol=1e-3)


if __name__ == "__main__":
    if sys.argv[1:] != ["--fix"]:
        sys.exit(__doc__)
    for name in DIFFS:
        fix(name)
