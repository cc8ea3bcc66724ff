"""diffs/: each applies to today's script, and what comes out runs and does what its header says."""

import importlib.util
import math
import re
import shutil
import statistics
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from accelerate.state import AcceleratorState
from conftest import read_metrics
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import packing
import ppo
import tasks
import utils

ROOT = Path(utils.__file__).parent
NAMES = ("grpo", "dr_grpo", "reinforce", "separate_critic", "length_penalty", "lora")
NAMES += ("ptx", "ema", "dense_rewards", "reference_on_cpu")
K = 4


def text(name):
    return (ROOT / "diffs" / f"{name}.diff").read_text()


def header(name):
    """What stands above the patch: the words behind each of its labels."""
    parts = re.split(r"^(\w+): +", text(name).split("\n--- ")[0] + "\n", flags=re.M)
    return {key: " ".join(value.split()) for key, value in zip(parts[1::2], parts[2::2], strict=True)}


def added(name):
    return [line[1:] for line in text(name).split("\n--- ")[1].splitlines()[2:] if line.startswith("+")]


def source(name):
    return re.search(r"^--- (\w+\.py)", text(name), flags=re.M)[1]


def test_every_diff_is_tested_and_stands_in_the_readme_with_its_number_of_lines():
    assert {path.stem for path in (ROOT / "diffs").glob("*.diff")} == set(NAMES)
    rows = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.diff\) \| `(\w+\.py)` .*\| (\d+) \|", readme(), flags=re.M)
    assert {row[0]: row[1:] for row in rows} == {n: (n, source(n), str(len(added(n)))) for n in NAMES}


def readme():
    return (ROOT / "diffs" / "README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_header_says_source_command_and_what_to_expect(name, script_of):
    assert list(header(name)) == [name, "Source", "Command", "Expect"]
    assert re.search(r"arXiv \d{4}\.\d{5}", header(name)["Source"])
    command = f"patch -o mine.py {source(name)} diffs/{name}.diff && python mine.py --task synthetic"
    assert header(name)["Command"].startswith(command)
    flags = header(name)["Command"].split("mine.py")[-1].replace("\\", "").split()
    script = script_of(name)
    assert tasks.parse_args(script.Args, script.PRESETS, flags).task.task == "synthetic"


@pytest.mark.parametrize("name", NAMES)
def test_a_diff_adds_at_most_25_lines_of_at_most_120_characters(name):
    assert 0 < len(added(name)) <= 25
    assert max(map(len, added(name))) <= 120


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_script_is_left_dead(name, script_of):
    script = script_of(name)
    code = Path(script.__file__).read_text()
    for word in re.findall(r"^(?:def|class) (\w+)|^([A-Z]+) = ", code, flags=re.M):
        word = word[0] or word[1]
        assert len(re.findall(rf"\b{word}\b", code)) > 1, word
    used = code + "".join((ROOT / name).read_text() for name in ("utils.py", "records.py", "packing.py"))
    assert not [f.name for f in fields(script.Args) if f"args.{f.name}" not in used]


@pytest.fixture(scope="session")
def script_of(tmp_path_factory):
    """name → the patched script as a module; `patch` has to find every line as it is, if need be elsewhere."""
    folder, modules = tmp_path_factory.mktemp("patched"), {}

    def script_of(name):
        if name == "ppo":
            return ppo
        if name not in modules:
            path = folder / f"mine_{name.replace('/', '_')}.py"
            command = ["patch", "--fuzz=0", "-o", path, ROOT / source(name), ROOT / "diffs" / f"{name}.diff"]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            spec = importlib.util.spec_from_file_location(path.stem, path)
            modules[name] = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(modules[name])
        return modules[name]

    assert shutil.which("patch"), "install `patch`: diffs are applied with it"
    return script_of


def write_reward(task, folder):
    """A random reward model with the task's tokenizer."""
    tiny.make_reward(pad_id=tiny.WORDS).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(task.base_model) / name, folder)


def two_updates(script, folder, precision="no", **flags):
    """`main` of a patched script over two updates of tiny models: its metrics and what was seen of it."""
    seen = SimpleNamespace(rollouts=[], scores=[], steps=[], lrs=[], after=[], loaded=[], weights=folder / "model")
    make_rollout, train_step, load_lm = script.make_rollout, script.train_step, utils.load_lm

    def spy_rollout(models, *args):
        seen.models = models
        rollout, score = make_rollout(models, *args)
        seen.rollouts.append(rollout)
        seen.scores.append(score)
        seen.steps.append([])
        return rollout, score

    def spy_step(policy, optimizer, *args):
        seen.policy, seen.optimizer = policy, optimizer
        seen.lrs.append([group["lr"] for group in optimizer.param_groups])
        seen.steps[-1].append(train_step(policy, optimizer, *args))
        seen.after.append({name: x.detach().clone() for name, x in policy.lm.named_parameters()})
        return seen.steps[-1][-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(script, "make_rollout", spy_rollout)
        patch.setattr(script, "train_step", spy_step)
        patch.setattr(utils, "load_lm", lambda *args: (seen.loaded.append(args), load_lm(*args))[1])
        patch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        AcceleratorState._reset_state(True)
        seen.task = tiny.write_task(folder / "task", truncate_token=None)
        write_reward(seen.task, folder / "reward")
        sizes = dict(num_minibatches=2, num_ppo_epochs=2, micro_batch_tokens=36, rollout_batch_size=5)
        names = dict(reward_model="reward", output_dir="model", run_name="run", eval_queries=4, eval_every=1)
        flags = dict(total_episodes=2 * 4 * K, batch_size=4 * K, lr=1e-2) | sizes | names | flags
        seen.args = script.Args(task=seen.task, **flags)
        try:
            script.main(seen.args)
        finally:
            AcceleratorState._reset_state(True)
        seen.metrics = read_metrics("run")
    return seen


@pytest.fixture(scope="session")
def run_of(script_of, tmp_path_factory):
    """name and flags → `two_updates`, run once."""
    runs = {}

    def run_of(name, **flags):
        key = (name, *flags.items())
        if key not in runs:
            runs[key] = two_updates(script_of(name), tmp_path_factory.mktemp(Path(name).name), **flags)
        return runs[key]

    return run_of


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_L6_a_patched_script_runs_and_its_first_ratio_is_exactly_1(name, precision, run_of):
    run = run_of(name, precision=precision)
    assert [line["ppo/episode"] for line in run.metrics[:2]] == [4 * K, 8 * K]
    for update in run.steps:
        assert len(update) == 4
        total, count, low, high = update[0]["val/ratio"].tolist()
        assert total == count and -low == high == 1 and update[0]["policy/clipfrac_avg"][0] == 0
        assert update[-1]["val/ratio"][3] > 1  # the policy has moved
    AutoModelForCausalLM.from_pretrained(run.weights)


# ------------------------------------------------------------------------------------------------- grpo and dr_grpo


def groups(rollout):
    """The rows of each prompt: `K` completions of it."""
    rows = {}
    for i, context in enumerate(rollout.contexts.tolist()):
        rows.setdefault(tuple(context), []).append(i)
    assert all(len(group) % K == 0 for group in rows.values())
    return rows.values()


def test_grpo_an_advantage_is_the_score_less_its_groups_mean_in_standard_deviations(run_of):
    for rollout in run_of("grpo").rollouts:
        assert rollout.scores.std() > 0.01
        for group in groups(rollout):
            scores = [rollout.scores[i].item() for i in group]
            for i, score in zip(group, scores, strict=True):
                expected = (score - statistics.mean(scores)) / (statistics.stdev(scores) + 1e-4)
                assert rollout.advantages[i].item() == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_grpo_worked_example_and_equal_rewards(script_of):
    rewards = torch.tensor([1.0, 0.1, 2.0, 0.1, 3.0, 0.1])  # two prompts, three completions: 1 2 3 and three times 0.1
    advantages = script_of("grpo").group_advantages(rewards, 3)
    torch.testing.assert_close(advantages[0::2], torch.tensor([-1.0, 0.0, 1.0]), atol=2e-4, rtol=0)
    assert (advantages[1::2] == 0).all()


def test_grpo_has_no_adaptive_kl_coefficient(script_of, run_of):
    script = script_of("grpo")
    assert not {"kl_target", "kl_horizon"} & {f.name for f in fields(script.Args)}
    assert not hasattr(script, "next_kl_coef") and "rewards" not in script.Rollout._fields
    assert run_of("grpo").metrics[1]["ppo/loss/kl_avg"] > 0


class Table(torch.nn.Module):
    """A policy whose log-probabilities are its weights; the context of episode i is the one token i."""

    def __init__(self, logprobs):
        super().__init__()
        self.weights = torch.nn.Parameter(logprobs.clone())

    def forward(self, contexts, responses):
        logprobs = self.weights[contexts[:, 0]]
        return logprobs, torch.zeros_like(logprobs)


LENGTHS = (3, 1, 2, 3)  # of four completions of at most three tokens
ADVANTAGES = (1.5, -0.5, 2.0, -1.0)


TOKEN_ADVANTAGES = ((1.5, -0.5, 2.0), (-1.0, 0.0, 0.0), (0.3, -2.0, 0.0), (1.0, -1.5, 0.7))


def gradient(script, args, advantages=ADVANTAGES):
    """What `train_step` gives the log-probabilities of four completions; and new, old and the reference's ones."""
    new, old, ref = -torch.rand(3, 4, 3, generator=torch.Generator().manual_seed(3)) * 2
    mask = torch.arange(3) < torch.tensor(LENGTHS)[:, None]
    old, ref = old.masked_fill(~mask, 0), ref.masked_fill(~mask, 0)
    values = dict(
        sizes=np.stack([np.ones(4, dtype=int), np.arange(4)], axis=1),
        contexts=torch.arange(4)[:, None],
        responses=torch.zeros(4, 3).long(),
    )
    values |= dict(mask=mask, logprobs=old, ref_logprobs=ref, scores=torch.zeros(4), rewards=torch.zeros(4))
    values |= dict(advantages=torch.tensor(advantages))
    rollout = script.Rollout(*(values[name] for name in script.Rollout._fields[:-1]))
    policy, grads = Table(new), []
    accelerator = SimpleNamespace(backward=lambda x: x.backward(), no_sync=lambda _: nullcontext(), num_processes=1)
    keep = SimpleNamespace(step=lambda: grads.append(policy.weights.grad.clone()), zero_grad=lambda: None)
    script.train_step(policy, keep, rollout, args, accelerator)
    return grads[0], new, old, ref


def slow_gradient(new, old, ref, kl_coef, weight, advantages=tuple((x,) * 3 for x in ADVANTAGES)):
    """Token by token: minus the clipped objective and the k3 term, each times its completion's `weight`."""
    x = new.double().requires_grad_()
    loss = 0.0
    for i, length in enumerate(LENGTHS):
        for t, advantage in enumerate(advantages[i][:length]):
            ratio = torch.exp(x[i, t] - old[i, t])
            objective = min(ratio * advantage, min(max(ratio, torch.tensor(0.8)), torch.tensor(1.2)) * advantage)
            r = torch.exp(ref[i, t] - x[i, t])
            loss = loss - weight(length) * (objective - kl_coef * ((r - 1) - torch.log(r)))
    loss.backward()
    return x.grad.float()


@pytest.mark.parametrize("micro_batch_tokens", [4, 1])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_grpo_loss_is_per_token_with_k3_averaged_over_each_completion_then_over_completions(
    script_of, kl_coef, micro_batch_tokens
):
    args = script_of("grpo").Args(task=tiny.make_task(), kl_coef=kl_coef, micro_batch_tokens=micro_batch_tokens)
    got, new, old, ref = gradient(script_of("grpo"), args)
    torch.testing.assert_close(got, slow_gradient(new, old, ref, kl_coef, lambda length: 1 / length / 4))


@pytest.mark.parametrize("micro_batch_tokens", [4, 1])
def test_dr_grpo_divides_sums_over_tokens_by_a_constant(script_of, micro_batch_tokens):
    task = tiny.make_task(response_length=3)
    args = script_of("dr_grpo").Args(task=task, micro_batch_tokens=micro_batch_tokens)
    got, new, old, ref = gradient(script_of("dr_grpo"), args)
    torch.testing.assert_close(got, slow_gradient(new, old, ref, 0.0, lambda length: 1 / 3 / 4))


def test_dr_grpo_an_advantage_is_the_penalised_score_less_its_groups_mean(run_of):
    run = run_of("dr_grpo")
    for rollout, line in zip(run.rollouts, run.metrics[:2], strict=True):
        for group in groups(rollout):
            rewards = []
            for i in group:
                kl = sum((rollout.logprobs[i] - rollout.ref_logprobs[i]).tolist())
                rewards.append(rollout.scores[i].item() - line["objective/kl_coef"] * kl)
            for i, reward in zip(group, rewards, strict=True):
                expected = reward - statistics.mean(rewards)
                assert rollout.advantages[i].item() == pytest.approx(expected, rel=1e-3, abs=1e-4)


# --------------------------------------------------------------------------------------------------------- reinforce


def test_reinforce_an_advantage_is_the_return_from_its_token_on_whitened(run_of):
    run = run_of("reinforce")
    for rollout, line in zip(run.rollouts, run.metrics, strict=True):
        returns = []
        for row, score in zip((rollout.logprobs - rollout.ref_logprobs).tolist(), rollout.scores.tolist(), strict=True):
            returns += [score - line["objective/kl_coef"] * sum(row[t:]) for t in range(len(row))]
        mean, deviation = statistics.mean(returns), statistics.pstdev(returns)
        assert deviation > 0.01
        expected = [(x - mean) / deviation for x in returns]
        assert rollout.advantages.flatten().tolist() == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_reinforce_the_score_sits_on_the_last_token_and_nothing_behind_it(script_of):
    script = script_of("reinforce")
    task = tiny.make_task(truncate_after=0, eos_task=True)
    args = script.Args(task=task, num_minibatches=1, rloo_k=2, whiten_advantages=False)
    responses = torch.tensor([[9, 5, 9, 9, 9], [9, 9, 9, 9, 5]])  # 5 is the end
    policy = script.Policy(tiny.make_lm(), tiny.PAD, 0.7)
    reward = torch.tensor([1.0, 2.0])
    models = tiny.make_models(policy, lambda queries, cut: reward, policy, script)  # no KL
    rollout, _ = script.make_rollout(models, tiny.make_contexts([3, 8], 8), responses, np.arange(2), 0.15, args)
    expected = torch.tensor([[1.0, 1, 0, 0, 0], [2, 2, 2, 2, 2]])
    torch.testing.assert_close(rollout.advantages, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("micro_batch_tokens", [4, 1])
def test_reinforce_loss_is_the_mean_over_tokens_each_with_its_own_advantage(script_of, micro_batch_tokens):
    args = script_of("reinforce").Args(task=tiny.make_task(), micro_batch_tokens=micro_batch_tokens)
    got, new, old, ref = gradient(script_of("reinforce"), args, TOKEN_ADVANTAGES)
    expected = slow_gradient(new, old, ref, 0.0, lambda length: 1 / sum(LENGTHS), TOKEN_ADVANTAGES)
    torch.testing.assert_close(got, expected)


# --------------------------------------------------------------------------------------------------- separate_critic


def critic_and_policy(script, critic_from, folder):
    task = tiny.write_task(folder / "task")
    write_reward(task, folder / "reward")
    args = script.Args(task=task, critic_from=str(folder / "reward") if critic_from == "reward" else None)
    lm = utils.load_lm(task.base_model)
    return script.PolicyAndValue(lm, script.load_critic(args, tiny.WORDS), tiny.WORDS, 0.7).eval()


@pytest.fixture
def batch():
    """Left-padded contexts and responses of the synthetic task's vocabulary."""
    return tiny.make_contexts([3, 6], 6, vocab=tiny.WORDS), torch.tensor([[4, 9, 2], [7, 1, 30]])


@pytest.mark.parametrize("critic_from", ["reward", "policy"])
def test_X1_separate_critic_neither_loss_reaches_the_others_weights(script_of, tmp_path, batch, critic_from):
    policy = critic_and_policy(script_of("separate_critic"), critic_from, tmp_path)
    if critic_from == "policy":
        torch.nn.init.normal_(policy.value_head.head.weight)  # a head of zeros passes nothing on
    for name, wanted in (("values", "value_head"), ("logprobs", "lm")):
        policy.zero_grad()
        logprobs, _, values = policy(*batch)
        ((values if name == "values" else logprobs) ** 2).sum().backward()
        reached = {key.split(".")[0] for key, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
        assert reached == {wanted}


def test_X1_separate_critic_starts_as_the_reward_model(script_of, tmp_path, batch):
    policy = critic_and_policy(script_of("separate_critic"), "reward", tmp_path)
    reward, tokens = tiny.make_reward(pad_id=tiny.WORDS), torch.cat(batch, dim=1)
    values = policy(*batch)[2]
    for t in range(3):  # a value is the reward of the text up to there
        torch.testing.assert_close(values[:, t], reward(tokens[:, : 6 + t]), rtol=1e-4, atol=1e-4)


def test_X1_separate_critic_reads_no_pads_where_its_vocabulary_is_another_size(script_of, tmp_path, batch):
    """Pythia's differ by size; the tokenizer is the same."""
    task = tiny.write_task(tmp_path / "task")
    tiny.make_reward(pad_id=tiny.WORDS + 8).save_pretrained(tmp_path / "reward")
    script = script_of("separate_critic")
    critic = script.load_critic(script.Args(task=task, critic_from=str(tmp_path / "reward")), tiny.WORDS)
    policy = script.PolicyAndValue(utils.load_lm(task.base_model), critic, tiny.WORDS, 0.7).eval()
    values, alone = policy(*batch)[2], policy(batch[0][:1, 3:], batch[1][:1])[2]
    torch.testing.assert_close(values[:1], alone, rtol=1e-4, atol=1e-4)


def test_X1_separate_critic_starts_as_the_policys_trunk_under_a_head_of_zeros(script_of, tmp_path, batch):
    policy = critic_and_policy(script_of("separate_critic"), "policy", tmp_path)
    assert (policy(*batch)[2] == 0).all()
    trunk = policy.lm.base_model.state_dict()
    assert all(torch.equal(x, trunk[name]) for name, x in policy.value_head.backbone.state_dict().items())
    assert not {p.data_ptr() for p in policy.lm.parameters()} & {p.data_ptr() for p in policy.value_head.parameters()}


@pytest.mark.parametrize(("critic_lr", "expected"), [(3e-3, 3e-3), (None, 1e-2)])
def test_X1_separate_critic_has_a_learning_rate_of_its_own(run_of, critic_lr, expected):
    run = run_of("separate_critic", critic_lr=critic_lr)
    assert run.lrs == [pytest.approx(lrs) for lrs in 4 * [[1e-2, expected]] + 4 * [[5e-3, expected / 2]]]
    held = [{p.data_ptr() for p in group["params"]} for group in run.optimizer.param_groups]
    assert held == [{p.data_ptr() for p in m.parameters()} for m in (run.policy.lm, run.policy.value_head)]


# ---------------------------------------------------------------------------------------------------- length_penalty


def test_length_penalty_takes_the_coefficient_off_the_score_for_each_token_of_the_cut(script_of):
    script = script_of("length_penalty")
    task = tiny.make_task(truncate_after=0, missing_eos_penalty=-3.0)
    args = script.Args(task=task, num_minibatches=1, length_penalty=0.25)
    responses = torch.tensor([[9, 5, 9, 9, 9], [5, 5, 5, 5, 5], [9, 9, 9, 9, 5], [9, 9, 9, 9, 9]])  # 5 is the end
    policy, ref = script.PolicyAndValue(tiny.make_lm(), tiny.PAD, 0.7), script.Policy(tiny.make_lm(), tiny.PAD, 0.7)
    reward = torch.tensor([1.0, 2.0, 3.0, 4.0])
    models = script.Models(policy, ref, lambda queries, cut: reward, utils.Ids(tiny.PAD, 5, [], []))
    contexts = tiny.make_contexts([3, 8, 1, 5], 8)
    rollout, _ = script.make_rollout(models, contexts, responses, np.arange(4), 0.15, args)
    expected = torch.tensor([1 - 2 * 0.25, 2 - 1 * 0.25, 3 - 5 * 0.25, -3 - 5 * 0.25])
    torch.testing.assert_close(rollout.scores, expected)
    torch.testing.assert_close(rollout.rewards.sum(dim=1), expected, atol=1e-4, rtol=0)  # no KL: the same model


def test_length_penalty_of_0_takes_nothing_off(run_of):
    free, line = run_of("length_penalty", length_penalty=0.0), run_of("length_penalty").metrics[0]
    assert line["objective/cut_length"] == free.task.response_length
    assert line["eval/scores"] == free.metrics[0]["eval/scores"]  # the reward model's
    difference = free.metrics[0]["objective/scores"] - line["objective/scores"]
    assert difference == pytest.approx(0.1 * free.task.response_length, abs=1e-4)  # 0.1 is the default


# -------------------------------------------------------------------------------------------------------------- lora


def test_lora_trains_the_adapter_and_the_value_head_only(run_of):
    run = run_of("lora")
    held = {p.data_ptr() for group in run.optimizer.param_groups for p in group["params"]}
    assert len(held) == 2 * 2 * 4 + 2  # A and B of four layers in two blocks; the value head's weight and bias
    assert held >= {p.data_ptr() for p in run.policy.value_head.parameters()}


def test_lora_the_policy_with_its_adapter_off_is_the_base_model_and_the_only_copy_of_it(run_of):
    run = run_of("lora")
    assert len(run.loaded) == 1 and "ref" not in run.models._fields
    first, second = run.rollouts
    assert torch.equal(first.logprobs, first.ref_logprobs)
    assert run.metrics[0]["objective/kl"] == run.metrics[0]["eval/kl"] == 0 != run.metrics[1]["eval/kl"]
    assert not torch.equal(second.logprobs, second.ref_logprobs)
    base = utils.load_lm(run.task.base_model)
    tokens = torch.cat([second.contexts, second.responses], dim=1)
    logits = base(**packing.model_inputs(tokens, tiny.WORDS)).logits[:, -second.responses.shape[1] - 1 : -1]
    logprobs = (logits / run.task.temperature).log_softmax(dim=-1).gather(-1, second.responses[..., None])[..., 0]
    torch.testing.assert_close(second.ref_logprobs, logprobs, rtol=1e-4, atol=1e-4)


def test_lora_the_saved_folder_is_a_merged_model(run_of):
    run = run_of("lora", lora_rank=2)
    folder = run.weights
    assert not list(folder.glob("adapter*"))
    before, after = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (run.task.base_model, folder))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert changed == {f"transformer.h.{i}.{layer}.weight" for i in range(2) for layer in layers}
    for name in changed:
        assert torch.linalg.matrix_rank((after[name] - before[name]).double(), rtol=1e-4) <= 2


# --------------------------------------------------------------------------------------------------------------- ptx


def test_X4_ptx_a_step_follows_the_gradient_of_the_texts_mean_loss(script_of, accelerator):
    """Of every token that has one in front of it, at the policy's temperature; the coefficient is a factor."""
    script = script_of("ptx")
    policy = tiny.make_policy(script=script, temperature=0.7)
    texts, optimizer = tiny.make_contexts([8, 3, 1, 5], 8), tiny.Gradients(policy)
    args = script.Args(task=tiny.make_task(), ptx_coef=0.5)
    sums = script.ptx_step(policy, optimizer, texts, tiny.PAD, args, accelerator)
    losses = []
    for row in texts:
        row = row[row != tiny.PAD]
        logprobs = (policy.lm(row[None]).logits[0] / 0.7).log_softmax(dim=-1)
        losses += [-logprobs[t, row[t + 1]] for t in range(len(row) - 1)]
    assert len(losses) == 7 + 2 + 0 + 4
    (sum(losses) / 13 * 0.5).backward()
    for name, x in policy.lm.named_parameters():
        torch.testing.assert_close(optimizer.steps[0][f"lm.{name}"], x.grad, atol=1e-5, rtol=1e-3)
    assert "value_head.weight" not in optimizer.steps[0]  # Adam leaves it alone, its momentum too
    assert sums["loss/ptx"][1] == 13
    assert sums["loss/ptx"][0].item() == pytest.approx(sum(losses).item(), rel=1e-5)


def test_X4_ptx_every_step_of_ppo_is_followed_by_one_on_other_texts_and_the_loss_falls(run_of):
    run = run_of("ptx", num_ppo_epochs=8)
    lm, value_head = run.optimizer.param_groups
    assert (lm["t"], value_head["t"]) == (2 * 2 * 8 * 2, 2 * 2 * 8)
    assert run.optimizer.state[value_head["params"][0]]["step"] == 2 * 2 * 8
    first, second = (line["ppo/loss/ptx"] for line in run.metrics)
    assert second < first - 0.1


# --------------------------------------------------------------------------------------------------------------- ema


def test_X5_ema_is_the_moving_average_of_the_weights_behind_every_step_and_saved_beside_the_policy(run_of):
    run = run_of("ema", ema_decay=0.9)
    average = {name: x.double() for name, x in utils.load_lm(run.task.base_model).named_parameters()}
    assert len(run.after) == 8
    for weights in run.after:
        average = {name: 0.9 * x + 0.1 * weights[name].double() for name, x in average.items()}
    saved = load_file(run.weights / "ema.safetensors")
    assert saved.keys() == average.keys()
    for name, x in saved.items():
        torch.testing.assert_close(x, average[name].float(), atol=1e-6, rtol=0)
    assert any(not torch.equal(x, run.after[-1][name]) for name, x in saved.items())


def test_X5_ema_does_not_learn_and_changes_nothing_of_ppo(run_of):
    run, plain = run_of("ema"), run_of("ppo")
    held = {p.data_ptr() for group in run.optimizer.param_groups for p in group["params"]}
    assert not held & {p.data_ptr() for p in run.policy.ema.parameters()}
    assert without_times(run.metrics) == without_times(plain.metrics)


def without_times(lines):
    return [{key: x for key, x in line.items() if not key.startswith("time/")} for line in lines]


# ----------------------------------------------------------------------------------------------------- dense_rewards


def test_X14_dense_rewards_a_token_gets_what_it_adds_to_the_reward_and_the_sum_stays(run_of):
    run = run_of("dense_rewards")
    model = tiny.make_reward(pad_id=tiny.WORDS)
    rollout, line = run.rollouts[0], run.metrics[0]  # the policy is the reference: no KL
    for i, (context, response) in enumerate(zip(rollout.contexts, rollout.responses, strict=True)):
        query = context[context != tiny.WORDS]
        with torch.no_grad():
            rewards = [model(torch.cat([query, response[:t]])[None]).item() for t in range(len(response) + 1)]
        expected = [after - before for before, after in zip(rewards, rewards[1:], strict=False)]
        expected[-1] += rewards[0]
        assert rollout.rewards[i].tolist() == pytest.approx(expected, abs=2e-4)
    for rollout, line in zip(run.rollouts, run.metrics, strict=True):
        kl = (rollout.logprobs - rollout.ref_logprobs).sum(dim=1)
        expected = rollout.scores - line["objective/kl_coef"] * kl
        torch.testing.assert_close(rollout.rewards.sum(dim=1), expected, atol=1e-4, rtol=1e-4)


def test_dense_rewards_nothing_behind_the_cut_and_the_penalty_at_the_end(script_of):
    """The reward of a text is the sum of its ids; 5 is the end of two of three responses."""
    script = script_of("dense_rewards")
    args = script.Args(task=tiny.make_task(truncate_after=0, missing_eos_penalty=-3.0), num_minibatches=1)
    responses = torch.tensor([[2, 5, 9, 9, 9], [2, 3, 4, 1, 5], [2, 3, 4, 1, 1]])
    policy = tiny.make_policy(script=script)
    total = lambda x: x.masked_fill(x == tiny.PAD, 0).sum(dim=1).float()  # noqa: E731
    models = tiny.make_models(policy, lambda queries, cut: total(queries) + total(cut), policy, script)
    queries = torch.full((3, 8), tiny.PAD).index_fill(1, torch.tensor([7]), 10)
    rollout, _ = script.make_rollout(models, queries, responses, np.arange(3), 0.0, args)
    expected = [[2, 5, 0, 0, 10], [2, 3, 4, 1, 15], [2, 3, 4, 1, 1 - 3 - 11]]
    assert rollout.rewards.tolist() == expected


# -------------------------------------------------------------------------------------------------- reference_on_cpu


def test_reference_on_cpu_visits_the_device_for_as_long_as_it_scores(script_of, tmp_path, monkeypatch):
    script, visits = script_of("reference_on_cpu"), []

    class Model:
        def to(self, device):
            visits.append(str(device))
            return self

    with script.visiting(Model(), torch.device("cuda:3")) as model:
        assert isinstance(model, Model) and visits == ["cuda:3"]
    assert visits == ["cuda:3", "cpu"]

    seen = SimpleNamespace(inside=False, hooked=set(), forwards=0)
    visiting = script.visiting

    def count(*args):
        assert seen.inside, "the reference was asked while it was away"
        seen.forwards += 1

    @contextmanager
    def spy(model, device):
        if id(model) not in seen.hooked:
            model.register_forward_pre_hook(count)
            seen.hooked.add(id(model))
        with visiting(model, device):
            seen.inside = True
            yield
            seen.inside = False

    monkeypatch.setattr(script, "visiting", spy)
    run = two_updates(script, tmp_path)
    assert seen.hooked == {id(run.models.ref)} and seen.forwards > 4
    assert not any(p.requires_grad for p in run.models.ref.parameters()) and not run.models.ref.training


def test_reference_on_cpu_changes_no_number(run_of):
    assert without_times(run_of("reference_on_cpu").metrics) == without_times(run_of("ppo").metrics)


# ----------------------------------------------------------------------------------------------------------- recipes

FIXED = dict(kl_target=None, cliprange=0.2, gamma=1.0, lam=0.95)
RECIPES = {  # the published values, by hand; for a task without a preset of ours, such as descriptiveness
    "instructgpt": dict(
        **(FIXED | dict(total_episodes=256_000, batch_size=512, num_minibatches=8, num_ppo_epochs=1, kl_coef=0.02)),
        **dict(lr=5e-6, lr_schedule="constant", warmup_updates=10, ptx_coef=27.8, ema_decay=0.992, temperature=1.0),
        **dict(critic_lr=5e-6, adam_beta2=0.95),
    ),
    "llama2": dict(
        **(FIXED | dict(batch_size=512, num_minibatches=8, num_ppo_epochs=1, kl_coef=0.01, lr=1e-6)),
        **dict(
            lr_schedule="constant", adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-5, weight_decay=0.1, max_grad_norm=1.0
        ),
    ),
    "qwen": dict(
        **(FIXED | dict(samples_per_prompt=2, kl_coef=0.04, cliprange_value=0.15, value_warmup_updates=50)),
        **dict(lr=1e-6, critic_lr=5e-6, top_p=0.9),
    ),
    "chinese_llama": FIXED | dict(lr=5e-7, critic_lr=1.65e-6, kl_coef=0.1),
    "deepspeed_chat": dict(
        **(
            FIXED
            | dict(batch_size=32, num_minibatches=1, num_ppo_epochs=1, kl_coef=0.1, clip_score=5.0, adam_beta2=0.95)
        ),
        **dict(lr=9.65e-6, critic_lr=5e-6, lr_schedule="cosine", warmup_updates=100, whiten_rewards=False),
        **dict(
            max_grad_norm=1.0,
            whiten_advantages=False,
            ptx_coef=27.8,
            ema_decay=0.992,
            min_response_length=2,
            cliprange_value=0.2,
        ),
    ),
    "openrlhf": dict(
        **(FIXED | dict(batch_size=512, num_minibatches=4, num_ppo_epochs=1, kl_coef=0.01, adam_beta2=0.95)),
        **dict(lr=1e-6, critic_lr=9e-6, lr_schedule="cosine", max_grad_norm=1.0, whiten_rewards=False),
        **dict(whiten_advantages=True, weight_decay=0.0, temperature=1.0, cliprange_value=0.2, adam_eps=1e-8),
    ),
    "trlx": dict(
        **(
            FIXED
            | dict(batch_size=128, num_minibatches=4, num_ppo_epochs=4, kl_coef=0.001, clip_score=10.0, vf_coef=1.0)
        ),
        **dict(lr=3e-5, lr_schedule="constant", adam_beta2=0.95, adam_eps=1e-8, weight_decay=1e-6, unfrozen_layers=2),
        **dict(whiten_rewards=False, whiten_advantages=True, cliprange_value=0.2, kl_estimator="k1", temperature=1.0),
    ),
}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def recipe_header(name):
    return header(f"recipes/{name}")


def test_every_recipe_is_tested():
    assert {path.stem for path in (ROOT / "diffs" / "recipes").glob("*.diff")} == set(RECIPES)


@every_recipe
def test_a_recipe_says_its_sources_its_command_and_what_cannot_be_here(name, script_of):
    parts, script = recipe_header(name), script_of(f"recipes/{name}")
    assert list(parts) == [name, "Source", "Command", "Differs"]
    assert parts["Command"].startswith(
        f"patch -o mine.py ppo.py diffs/recipes/{name}.diff && python mine.py --task synthetic"
    )
    flags = parts["Command"].split("mine.py")[-1].replace("\\", "").split()
    tasks.parse_args(script.Args, script.PRESETS, flags)
    assert f"`{name}`" in readme()
    assert max(map(len, added(f"recipes/{name}"))) <= 120


@every_recipe
def test_a_recipe_has_the_published_values_and_passes_its_checks_on_every_task(name, script_of):
    script = script_of(f"recipes/{name}")
    args = tasks.parse_args(script.Args, script.PRESETS, ["--task", "descriptiveness"])
    found = {key: getattr(args, key, getattr(args.task, key, None)) for key in RECIPES[name]}
    assert found == RECIPES[name]
    if name == "openrlhf":  # 3% of the updates
        assert args.warmup_updates == math.ceil(0.03 * math.ceil(args.total_episodes / args.batch_size))
    for task in tasks.TASKS:
        theirs, ours = (tasks.parse_args(x.Args, x.PRESETS, ["--task", task]) for x in (script, ppo))
        script.check(theirs, 1)
        as_published = RECIPES[name].get("whiten_rewards", ours.whiten_rewards)  # what is not said is as in ppo.py
        assert theirs.whiten_rewards == as_published


@every_recipe
def test_nothing_of_a_recipe_is_left_dead(name, script_of):
    test_nothing_of_the_script_is_left_dead(f"recipes/{name}", script_of)


def recipe_run(name, run_of, script_of):
    """Two updates at the recipe's own values, its critic from the reward model; sizes for tiny models."""
    own = {f.name: f.default for f in fields(script_of(f"recipes/{name}").Args)}
    flags = {key: own[key] for key in ("num_minibatches", "num_ppo_epochs")} | dict(value_warmup_updates=1)
    flags |= dict(critic_from="reward") if "critic_from" in own else {}
    return run_of(f"recipes/{name}", **flags)


@every_recipe
def test_L6_a_recipe_runs_and_its_first_ratio_is_exactly_1(name, run_of, script_of):
    run = recipe_run(name, run_of, script_of)
    for update in run.steps:
        total, count, low, high = update[0]["val/ratio"].tolist()
        assert total == count and -low == high == 1
    steps = run.args.num_minibatches * run.args.num_ppo_epochs
    assert [len(update) for update in run.steps] == [steps, steps]
    assert {group["betas"] for group in run.optimizer.param_groups} == {(0.9, RECIPES[name].get("adam_beta2", 0.999))}
    AutoModelForCausalLM.from_pretrained(run.weights)


@every_recipe
def test_a_recipes_critic_average_and_texts_are_there_where_they_are_published(name, run_of, script_of):
    run = recipe_run(name, run_of, script_of)
    critic = ("instructgpt", "qwen", "chinese_llama", "deepspeed_chat", "openrlhf")
    assert isinstance(run.policy.value_head, utils.RewardModel) == (name in critic)
    assert (run.weights / "ema.safetensors").is_file() == (name in ("instructgpt", "deepspeed_chat"))
    assert ("ppo/loss/ptx" in run.metrics[0]) == (name in ("instructgpt", "deepspeed_chat"))
    policy_lr, critic_lr = run.lrs[-1]
    assert policy_lr == run.metrics[1]["ppo/lr"] > 0
    wanted = RECIPES[name].get("critic_lr", run.args.lr) / run.args.lr  # both follow one schedule
    assert critic_lr / policy_lr == pytest.approx(wanted)


def test_trlx_lower_layers_and_embeddings_stay_the_references(script_of, run_of):
    run = run_of("recipes/trlx", unfrozen_layers=1)
    before, after = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (run.task.base_model, run.weights))
    changed = {name.split(".")[1] + name.split(".")[2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"h1", "ln_fweight", "ln_fbias"}


def test_trlx_logs_k3_and_penalises_k1(run_of):
    run = run_of("recipes/trlx", unfrozen_layers=1)
    rollout, line = run.rollouts[1], run.metrics[1]
    x = (rollout.logprobs - rollout.ref_logprobs).double()
    assert line["objective/kl"] == pytest.approx(((-x).exp() - 1 + x).sum(dim=1).mean().item(), rel=1e-4)
    penalty = rollout.rewards.sum(dim=1).double() - rollout.scores
    torch.testing.assert_close(penalty, -line["objective/kl_coef"] * x.sum(dim=1), atol=1e-5, rtol=1e-3)
