"""Where such code went wrong before: pitfalls 1 to 22, where test_details.py does not already show them.

3 and 5 are R1 there, 8 is P9 too, 12 is P4, 13 is G4, 15 is P5 too; 4 is in test_errors.py, 9 and 19 with two processes
in test_distributed.py. What stands in ppo.py and in rloo.py is tested in both.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from tiny import PAD, WORDS
from transformers import AutoModelForCausalLM

import ppo
import records
import rloo
import sft
import tasks
import train_reward
import utils

BOTH = pytest.mark.parametrize("script", [ppo, rloo])
EOS_TASK = tiny.make_task(eos_task=True, truncate_after=0)


def spy_ratios(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every ratio of every micro-batch from here on: [b, R] of tokens (ppo), [b] of completions (rloo)."""
    ratios, loss_terms = [], script.loss_terms

    def spy(*args):
        terms = loss_terms(*args)
        ratios.append(terms["val/ratio"].detach().clone())
        return terms

    monkeypatch.setattr(script, "loss_terms", spy)
    return ratios


def collect(script: ModuleType, policy, args, order: np.ndarray, accelerator):
    """A rollout of 16 rows of uneven length, as `main` makes it."""
    queries, responses = tiny.make_contexts(tiny.LENGTHS * 2, 8), tiny.make_responses(16, 5)
    with accelerator.autocast():
        models = tiny.make_models(policy, script=script)
        return script.make_rollout(models, queries, responses, order, 0.15, args)[0]


def permutations(epochs: int) -> list[np.ndarray]:
    return [np.random.default_rng(epoch).permutation(16) for epoch in range(epochs)]


@BOTH
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_01_without_learning_every_ratio_of_every_minibatch_is_1(script, kind, accelerator, monkeypatch):
    """lr 0, 3 epochs of 2 minibatches of 3 packed micro-batches. Within an epoch that is cut otherwise than the
    rollout was, sums are taken in another order: there 1 is 1 to the last digits of fp32."""
    args = tiny.make_args(script=script, num_ppo_epochs=3, batch_size=16, micro_batch_tokens=26)
    epochs, policy = permutations(3), tiny.make_policy(kind, script=script)
    rollout = collect(script, policy, args, epochs[0], accelerator)
    ratios = spy_ratios(script, monkeypatch)
    optimizer = script.AdamTF(policy.parameters(), lr=0.0)
    stats = script.means(tiny.update(script, policy, optimizer, rollout, epochs, args, accelerator))
    assert len(ratios) == 3 * 2 * 3 and sum(map(len, ratios)) == 3 * 16
    assert all(torch.equal(ratio, torch.ones_like(ratio)) for ratio in ratios[:6])
    assert all((ratio - 1).abs().max() < 1e-4 for ratio in ratios)
    assert not stats["policy/clipfrac_avg"].any() and stats["policy/approxkl_avg"].max() < 1e-8


@BOTH
def test_01_with_one_minibatch_without_learning_every_ratio_of_every_epoch_is_exactly_1(
    script, accelerator, monkeypatch
):
    """The batch shuffled anew is the same set of rows, so it makes the same micro-batches."""
    args = tiny.make_args(script=script, num_ppo_epochs=3, num_minibatches=1, batch_size=16, micro_batch_tokens=26)
    epochs, policy = permutations(3), tiny.make_policy(script=script)
    rollout = collect(script, policy, args, epochs[0], accelerator)
    ratios = spy_ratios(script, monkeypatch)
    optimizer = script.AdamTF(policy.parameters(), lr=0.0)
    tiny.update(script, policy, optimizer, rollout, epochs, args, accelerator)
    assert len(ratios) == 3 * 6 and all(torch.equal(ratio, torch.ones_like(ratio)) for ratio in ratios)


@BOTH
@pytest.mark.parametrize("precision", ["accelerator", "bf16_accelerator"])
def test_01_the_first_minibatchs_ratios_are_exactly_1_in_fp32_and_bf16(script, precision, request, monkeypatch):
    """L6: with the prepared policy, in eval mode before and in train mode after, as in `main`."""
    accelerator = request.getfixturevalue(precision)
    args = tiny.make_args(script=script, batch_size=16, micro_batch_tokens=26)
    plain = tiny.make_policy(script=script)
    policy, optimizer = accelerator.prepare(plain, script.AdamTF(plain.parameters(), lr=1e-2))
    epochs = permutations(2)
    rollout = collect(script, policy.eval(), args, epochs[0], accelerator)
    ratios = spy_ratios(script, monkeypatch)
    stats = script.means(tiny.update(script, policy.train(), optimizer, rollout, epochs, args, accelerator))
    assert all(torch.equal(ratio, torch.ones_like(ratio)) for ratio in ratios[:3])
    assert stats["policy/clipfrac_avg"][0] == 0 and stats["policy/approxkl_avg"][0] == 0
    assert max((ratio - 1).abs().max() for ratio in ratios[3:]) > 1e-2  # the optimizer has moved the policy


@BOTH
def test_01_old_log_probabilities_come_from_the_very_forwards_of_the_first_epoch(script, accelerator):
    """L6: the same rows, in the same order, micro-batch by micro-batch."""
    args = tiny.make_args(script=script, batch_size=16, micro_batch_tokens=26, num_ppo_epochs=1)
    policy, seen = tiny.make_policy(script=script), []
    forward = policy.forward

    def spy(contexts, responses):
        seen.append(torch.cat([contexts, responses], dim=1).tolist())
        return forward(contexts, responses)

    policy.forward = spy
    order = np.random.default_rng(0).permutation(16)
    rollout = collect(script, policy, args, order, accelerator)
    optimizer = script.AdamTF(policy.parameters(), lr=0.0)
    tiny.update(script, policy, optimizer, rollout, [order], args, accelerator)
    assert len(seen) == 12 and seen[:6] == seen[6:]


@BOTH
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("minibatches, again", [(1, 0), (2, 1)], ids=["all at once", "two minibatches"])
def test_01_where_one_micro_batch_is_all_its_forward_serves_the_first_step_too(
    script, precision, minibatches, again, accelerator, bf16_accelerator
):
    """The same weights, with one forward of the policy less; and none is kept where there is more than one."""
    accelerator = bf16_accelerator if precision == "bf16" else accelerator
    args = tiny.make_args(EOS_TASK, script, num_minibatches=minibatches, micro_batch_tokens=4096)
    epochs = [np.arange(8), np.arange(8)[::-1]]
    queries, responses = tiny.make_contexts(tiny.LENGTHS, 8), tiny.make_responses(8, 5)
    weights = []
    for reused in (True, False):
        plain, calls = tiny.make_policy(script=script), []
        plain.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        policy, optimizer = accelerator.prepare(plain, script.AdamTF(plain.parameters(), lr=1e-3))
        with accelerator.autocast():
            models = tiny.make_models(policy, script=script)
            rollout, _ = script.make_rollout(models, queries, responses, epochs[0], 0.15, args)
        assert (rollout.forward is None) == again and not rollout.logprobs.requires_grad
        rollout = rollout if reused else rollout._replace(forward=None)
        tiny.update(script, policy, optimizer, rollout, epochs, args, accelerator)
        assert len(calls) == minibatches * 3 - (reused and not again)
        weights.append(list(plain.parameters()))
    assert all(map(torch.equal, *weights))


@BOTH
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_02_padded_and_unpadded_rows_have_the_same_log_probabilities_values_and_rewards(kind, script):
    """With absolute positions (GPT-2) and rotary ones."""
    policy, reward = tiny.make_policy(kind, script=script), tiny.make_reward(kind)
    contexts, responses = tiny.make_contexts([3, 7, 1], 7), tiny.make_responses(3, 4)
    wide = torch.cat([torch.full((3, 5), PAD), contexts], dim=1)
    with torch.no_grad():
        together = [*policy(wide, responses), reward(torch.cat([wide, responses], dim=1))]
        for i, n in enumerate((3, 7, 1)):
            row = contexts[i : i + 1, 7 - n :], responses[i : i + 1]
            alone = [*policy(*row), reward(torch.cat(row, dim=1))]
            for ours, theirs in zip(together, alone, strict=True):
                torch.testing.assert_close(ours[i : i + 1], theirs, atol=5e-5, rtol=0)


def test_02_prefix_and_suffix_join_the_query_without_a_gap():
    ids = utils.Ids(pad=9, truncate=None, prefix=[1, 2], suffix=[3])
    queries = torch.tensor([[9, 9, 5, 6], [4, 4, 4, 4]])
    assert utils.add_affixes(queries, ids).tolist() == [[9, 9, 1, 2, 5, 6, 3], [1, 2, 4, 4, 4, 4, 3]]


@pytest.mark.parametrize("script", [ppo, rloo, sft])
def test_06_a_response_is_cut_behind_its_first_eos(script):
    """EOS first, in the middle, last and missing."""
    responses = torch.tensor([[5, 1, 1, 1], [1, 5, 1, 5], [1, 1, 1, 5], [1, 1, 1, 1]])
    cut, ended = script.truncate(responses, 5, 0, PAD)
    assert cut.tolist() == [[5, PAD, PAD, PAD], [1, 5, PAD, PAD], [1, 1, 1, 5], [1, 1, 1, 1]]
    assert ended.tolist() == [True, True, True, False]


def test_06_the_score_sits_on_the_right_index():
    """On the last real token: EOS first, in the middle, last and missing."""
    mask = torch.arange(4) <= torch.tensor([0, 1, 3, 3])[:, None]
    zeros = torch.zeros(4, 4)
    rewards = ppo.kl_penalised_rewards(zeros, zeros, torch.tensor([1.0, 2.0, 3.0, 4.0]), mask, 0.1)
    assert rewards.tolist() == [[1, 0, 0, 0], [0, 2, 0, 0], [0, 0, 0, 3], [0, 0, 0, 4]]


@BOTH
@pytest.mark.parametrize("eos_task", [False, True])
def test_06_only_the_responses_of_an_eos_task_are_cut_in_the_rollout(script, eos_task):
    """A task of fixed length learns from every token, also behind the token that its scoring cuts at."""
    args = tiny.make_args(tiny.make_task(eos_task=eos_task, truncate_after=0), script)
    responses = torch.tensor([[tiny.EOS, 1, 2, 3, 4], [1, 2, tiny.EOS, 3, tiny.EOS], [1, 2, 3, 4, 6]] * 4)
    queries, seen = tiny.make_contexts([8, 1, 3] * 4, 8), []
    models = tiny.make_models(
        tiny.make_policy(script=script), lambda q, r: seen.append(r) or torch.zeros(len(r)), script=script
    )
    rollout, score = script.make_rollout(models, queries, responses, np.arange(12), 0.15, args)
    cut = torch.tensor([[tiny.EOS] + [PAD] * 4, [1, 2, tiny.EOS, PAD, PAD], [1, 2, 3, 4, 6]] * 4)
    assert torch.equal(score.cut, cut) and torch.equal(seen[0], cut)
    assert torch.equal(rollout.responses, cut if eos_task else responses)
    assert rollout.mask.sum(dim=1).tolist() == ([1, 3, 5] if eos_task else [5, 5, 5]) * 4


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)])
def test_06_advantages_equal_a_brute_force_sum_over_each_rows_own_length(gamma, lam):
    rng, real = np.random.default_rng(0), [6, 1, 4]
    rewards, values = (torch.tensor(rng.normal(size=(3, 6))) for _ in range(2))
    mask = torch.arange(6) < torch.tensor(real)[:, None]
    ours = ppo.advantages_and_returns(rewards.masked_fill(~mask, 0), values.masked_fill(~mask, 0), gamma, lam)
    for i, n in enumerate(real):
        for t in range(n):
            total = 0.0
            for k in range(t, n):
                following = values[i, k + 1] if k + 1 < n else 0.0
                total += (gamma * lam) ** (k - t) * (rewards[i, k] + gamma * following - values[i, k])
            assert ours[0][i, t].item() == pytest.approx(float(total), abs=1e-12)
            assert ours[1][i, t].item() == pytest.approx(float(total + values[i, t]), abs=1e-12)
        assert not ours[0][i, n:].any() and not ours[1][i, n:].any()


def poison(huge: float, *policies) -> None:
    """From here on the forwards of policies, such as the reference, give `huge` wherever a response has a pad."""
    for policy in policies:

        def poisoned(contexts, responses, forward=policy.forward):
            return tuple(x + torch.where(responses == PAD, huge, 0.0) for x in forward(contexts, responses))

        policy.forward = poisoned


@BOTH
@pytest.mark.parametrize("huge", [float("nan"), float("inf"), 1e30])
def test_07_nan_and_huge_numbers_that_the_forwards_give_at_masked_positions_change_nothing(huge, script, accelerator):
    """Behind the end of a response: neither rollout, nor statistics, nor gradients, nor metrics."""
    args = tiny.make_args(EOS_TASK, script, num_minibatches=1)
    queries, responses = tiny.make_contexts(tiny.LENGTHS, 8), tiny.make_responses(8, 5)
    results = []
    for poisoned in (False, True):
        policy, ref = tiny.make_policy(script=script), tiny.make_policy(seed=3, script=script)
        if poisoned:
            poison(huge, policy, ref)
        models = tiny.make_models(policy, ref=ref, script=script)
        rollout, score = script.make_rollout(models, queries, responses, np.arange(8), 0.15, args)
        assert (~rollout.mask).any(dim=1).sum() >= 3
        sums, gradients = tiny.step_gradients(script, policy, tiny.add_noise(rollout), args, accelerator)
        metrics = tiny.summarise(script, rollout, score, [sums], 0.15, args)
        results.append(
            {f"rollout {name}": torch.as_tensor(x) for name, x in rollout._asdict().items() if name != "forward"}
        )
        results[-1] |= sums | {name: torch.as_tensor(x) for name, x in metrics.items()} | gradients
    for name, value in results[0].items():
        assert value.isfinite().all() and torch.equal(value, results[1][name]), name


def test_07_every_number_of_ppos_rollout_is_0_behind_the_end_of_a_response():
    """So that nothing downstream has to mask: sums over whole rows are sums over real tokens."""
    policy, ref = tiny.make_policy(), tiny.make_policy(seed=3)
    poison(float("nan"), policy, ref)
    models, args = tiny.make_models(policy, ref=ref), tiny.make_args(EOS_TASK)
    queries, responses = tiny.make_contexts(tiny.LENGTHS, 8), tiny.make_responses(8, 5)
    rollout, _ = ppo.make_rollout(models, queries, responses, np.arange(8), 0.15, args)
    for name in ("logprobs", "values", "ref_logprobs", "rewards"):
        x = getattr(rollout, name)
        assert not x[~rollout.mask].any() and x[rollout.mask].all(), name
    for x in ppo.estimate(rollout, args):
        assert not x[~rollout.mask].any()


@BOTH
@pytest.mark.parametrize("huge", [float("nan"), 1e30])
def test_07_a_policy_that_gives_nan_or_huge_numbers_at_masked_positions_changes_nothing(huge, script, accelerator):
    """What the forward gives behind the end of a response reaches neither loss nor gradient: in one micro-batch with
    rows that have none."""
    args = tiny.make_args(EOS_TASK, script, num_minibatches=1, micro_batch_tokens=96)
    policy = tiny.make_policy(script=script)
    rollout = tiny.make_rollout(policy, args, script=script)
    clean = tiny.step_gradients(script, policy, rollout, args, accelerator)
    poison(huge, policy)
    for ours, theirs in zip(tiny.step_gradients(script, policy, rollout, args, accelerator), clean, strict=True):
        for name, value in theirs.items():
            assert value.isfinite().all() and torch.equal(ours[name], value), name


@BOTH
def test_07_a_step_mutates_none_of_its_inputs(script, accelerator):
    args, policy = tiny.make_args(EOS_TASK, script), tiny.make_policy(script=script)
    rollout = tiny.make_rollout(policy, args, script=script)
    before = [x.clone() if isinstance(x, torch.Tensor) else x.copy() for x in rollout[:-1]]
    epochs = [np.arange(8), np.arange(8)[::-1].copy()]
    optimizer = script.AdamTF(policy.parameters(), lr=1e-3)
    tiny.update(script, policy, optimizer, rollout, epochs, args, accelerator)
    for x, y in zip(rollout[:-1], before, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("huge", [float("nan"), float("inf"), 1e9])
def test_08_whitening_masks_mean_and_variance(huge):
    """Population: 1, 3, 5, 7 have mean 4 and variance 5."""
    x = torch.tensor([[1.0, 3.0, huge], [5.0, 7.0, -huge]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    root = math.sqrt(5)
    expected = torch.tensor([[-3 / root, -1 / root, 0], [1 / root, 3 / root, 0]])
    torch.testing.assert_close(ppo.whiten(x, mask), expected)
    torch.testing.assert_close(ppo.whiten(x, mask, shift_mean=False), (expected + 4).masked_fill(~mask, 0))
    assert ppo.whiten(torch.full((2, 3), 7.0), mask)[mask].abs().max() == 0  # equal numbers do not blow up
    for script in (ppo, rloo, train_reward):
        assert [value.item() for value in script.moments(x, mask)] == [4, 5]


def one_by_one(script: ModuleType, policy, rollout, args) -> dict[str, torch.Tensor]:
    """The gradient of a minibatch by a naive loop over rows without any padding, loss written out."""
    losses, count = [], 0
    if script is ppo:
        advantages, returns = ppo.estimate(rollout, args)
    for i, length in enumerate(rollout.sizes[:, 0]):
        n = int(rollout.mask[i].sum())
        out = policy(rollout.contexts[i : i + 1, n - length :], rollout.responses[i : i + 1, :n])
        old = rollout.logprobs[i]
        if script is rloo:
            ratio, advantage = (out[0].sum() - old.sum()).exp(), rollout.advantages[i]
            losses.append(-torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)))
            count += 1
            continue
        for t in range(n):
            ratio, advantage, value = (out[0][0, t] - old[t]).exp(), advantages[i, t], out[2][0, t]
            losses.append(-torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)))
            near = value.clamp(rollout.values[i, t] - 0.2, rollout.values[i, t] + 0.2)
            error = torch.maximum((value - returns[i, t]) ** 2, (near - returns[i, t]) ** 2)
            losses.append(0.1 * 0.5 * error)
            count += 1
    (torch.stack(losses).sum() / count).backward()
    return tiny.gradients(policy)


@BOTH
@pytest.mark.parametrize("task", [tiny.make_task(), EOS_TASK], ids=["fixed", "eos"])
def test_09_the_gradient_is_that_of_a_naive_loop_whatever_the_micro_batches(task, script, accelerator):
    """Rows of uneven length, also of responses: a mean of means would differ. Also counts too high or too low."""
    policy = tiny.make_policy(script=script)
    rollout = tiny.make_rollout(policy, tiny.make_args(task, script), script=script)
    assert rollout.mask.all() != task.eos_task
    expected = one_by_one(script, policy, rollout, tiny.make_args(task, script))
    all_sums = []
    for size in (1, 3, 8):
        args = tiny.make_args(task, script, micro_batch_tokens=size)
        sums, gradients = tiny.step_gradients(script, policy, rollout, args, accelerator)
        all_sums.append(sums)
        assert max(value.abs().max() for value in gradients.values()) > 1e-2
        for name, value in expected.items():
            torch.testing.assert_close(gradients[name], value, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    for sums in all_sums[1:]:
        for name, value in all_sums[0].items():
            torch.testing.assert_close(sums[name], value, atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_09_reward_training_follows_the_gradient_of_the_mean_over_labels_whatever_the_micro_batches(accelerator):
    model = tiny.make_reward()
    candidates = torch.stack([tiny.make_responses(6, 4, seed=k) for k in range(4)], dim=1)
    candidates[1, 0, 2:] = PAD
    labels = train_reward.Labels(tiny.make_contexts([8, 1, 3, 5, 2, 8], 8), candidates, torch.arange(6) % 4)
    losses = []
    for query, responses, best in zip(labels.query, candidates, labels.best, strict=True):
        rows = [torch.cat([query, response]) for response in responses]
        rewards = torch.cat([model(row[row != PAD][None]) for row in rows])
        losses.append(rewards.logsumexp(0) - rewards[best])
    mean = torch.stack(losses).mean()
    mean.backward()
    expected = tiny.gradients(model)
    for size in (4, 8, 64):
        args, optimizer = train_reward.Args(task=tiny.make_task(), micro_batch_tokens=size), tiny.Gradients(model)
        stats = train_reward.train_step(model, optimizer, labels, PAD, args, accelerator)
        assert float(stats["loss"]) == pytest.approx(mean.item(), rel=1e-5)
        for name, value in expected.items():
            torch.testing.assert_close(optimizer.steps[0][name], value, atol=2e-5, rtol=1e-4)


def test_09_sft_follows_the_gradient_of_the_mean_over_tokens_whatever_the_micro_batches(accelerator):
    """Clipped far above its norm: clipping hides a factor. Real tokens of responses only, rows one by one."""
    lm = tiny.make_lm()
    rows = torch.cat([tiny.make_contexts([6, 1, 3, 6], 6), tiny.make_responses(4, 5)], dim=1)
    rows[0, 8:], rows[2, 10:] = PAD, PAD
    losses = []
    for row, prompt in zip(rows, (6, 1, 3, 6), strict=True):
        real = row[row != PAD][None]
        losses += F.cross_entropy(lm(real).logits[0, prompt - 1 : -1], real[0, prompt:], reduction="none")
    assert len(losses) == 2 + 5 + 4 + 5
    mean = torch.stack(losses).mean()
    mean.backward()
    expected = tiny.gradients(lm)
    for size in (1, 3, 4):
        args = sft.Args(task=tiny.make_task(), micro_batch_tokens=size, max_grad_norm=1e6)
        optimizer = tiny.Gradients(lm)
        loss = sft.train_step(lm, optimizer, rows, 6, PAD, args, accelerator)
        assert float(loss) == pytest.approx(mean.item(), rel=1e-5)
        for name, value in expected.items():
            torch.testing.assert_close(optimizer.steps[0][name], value, atol=2e-5, rtol=1e-4)


def test_09_sft_scales_gradients_down_to_the_norm_that_was_asked_for(accelerator):
    lm, args = tiny.make_lm(), sft.Args(task=tiny.make_task(), max_grad_norm=0.1)
    optimizer = tiny.Gradients(lm)
    sft.train_step(lm, optimizer, tiny.make_contexts([6, 6], 6), 1, PAD, args, accelerator)
    norm = torch.stack([value.norm() for value in optimizer.steps[0].values()]).norm()
    assert norm.item() == pytest.approx(0.1, rel=1e-4)


@BOTH
def test_10_the_number_of_optimizer_steps_is_exact(script, accelerator):
    """3 epochs of 2 minibatches of several micro-batches are 6 steps, and the weights move 6 times."""
    args = tiny.make_args(script=script, num_ppo_epochs=3, micro_batch_tokens=12)
    policy = tiny.make_policy(script=script)
    rollout = tiny.make_rollout(policy, args, script=script)
    prepared, optimizer = accelerator.prepare(policy, script.AdamTF(policy.parameters(), lr=1e-3))
    seen, adam_step, watched = [], optimizer.optimizer.step, policy.lm.get_output_embeddings().weight

    def spy(closure=None):
        before = watched.detach().clone()
        adam_step(closure)
        seen.append(torch.equal(before, watched))

    optimizer.optimizer.step = spy
    steps = tiny.update(script, prepared, optimizer, rollout, [np.arange(8)] * 3, args, accelerator)
    assert seen == [False] * 6 and optimizer.param_groups[0]["t"] == 6
    assert {tuple(values.shape) for values in script.means(steps).values()} == {(6,)}
    assert all(p.grad is None or not p.grad.any() for p in policy.parameters())  # nothing is left for the next update


def test_10_every_script_takes_exactly_its_steps(runs):
    """ppo and rloo: ⌈20/8⌉ updates · 2 epochs · 2 minibatches; train_reward: 12 labels in batches of 4."""
    assert runs.of["ppo"].steps == runs.of["rloo"].steps == [12] and runs.reward_steps == [3]
    rows, first = sft.load_rows(runs.sft, utils.AutoTokenizer.from_pretrained(runs.sft.task.base_model), WORDS)
    assert first == 1 and rows[:].shape[1] == 10
    assert len(runs.metrics["sft"]) == (len(rows) - 6) // 2


def test_10_11_sft_steps_and_rates_are_those_of_a_linear_warm_up_and_decay(runs):
    """Of so few steps 5 % is the first only: it has the whole rate; then come n − 1, n − 2, …, 1 parts of n − 1."""
    rates = [line["lr"] / 1e-3 for line in runs.metrics["sft"]]
    n = len(rates)
    assert 5 < n < 30 and rates == pytest.approx([1.0, *(k / (n - 1) for k in range(n - 1, 0, -1))])
    args = replace(runs.sft, warmup=0.4)
    assert [sft.lr_at(step, 5, args) / 1e-3 for step in range(5)] == pytest.approx([0.5, 1.0, 1.0, 2 / 3, 1 / 3])


def sums(count: int, **means: float) -> dict[str, torch.Tensor]:
    """What a `train_step` of ppo or rloo would return for these means over `count` tokens or completions."""
    names = ("loss/policy_avg", "loss/value_avg", "val/error", "returns/var", "val/ratio", "val/ratio_spread")
    means = dict.fromkeys(names, 0.0) | {name.replace("__", "/"): value for name, value in means.items()}
    return {name: torch.tensor([mean * count, count, -mean, mean]) for name, mean in means.items()}


def test_14_kl_is_positive_where_the_policy_is_surer_than_the_reference_and_lowers_the_reward():
    """Two responses with log π − log π_ref = 0.5 + 0.25 and −0.25 + 1; mean sum 0.75."""
    logprobs, ref = torch.tensor([[-1.0, -1.0], [-2.0, -1.0]]), torch.tensor([[-1.5, -1.25], [-1.75, -2.0]])
    scores, mask = torch.tensor([2.0, 4.0]), torch.ones(2, 2, dtype=torch.bool)
    rewards = ppo.kl_penalised_rewards(logprobs, ref, scores, mask, 0.2)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 1.95], [0.05, 3.8]]))
    rollout = ppo.Rollout(None, None, None, mask, logprobs, torch.zeros(2, 2), ref, scores, rewards)
    score, args = (
        ppo.Score(scores, torch.tensor([[3, 4], [3, PAD]]), torch.tensor([True, False])),
        tiny.make_args(vf_coef=0.25),
    )
    step = sums(4, val__error=0.5, returns__var=2.0, loss__value_avg=2.0, loss__policy_avg=1.0)
    metrics = {k: float(v) for k, v in ppo.summarise(rollout, score, [step], 0.2, PAD, args).items()}
    expected = {
        "objective/kl": 0.75,
        "objective/entropy": 2.5,
        "objective/scores": 3.0,
        "objective/scores_std": 1.0,
        "objective/score_total": 2.85,
        "objective/rlhf_reward": 2.85,
        "objective/kl_coef": 0.2,
        "objective/ended": 0.5,
        "objective/response_length": 2.0,
        "objective/cut_length": 1.5,
        "ppo/val/var_explained": 0.75,
        "ppo/loss/total": 1.5,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name


def test_14_rloos_kl_is_positive_where_the_policy_is_surer_than_the_reference_and_lowers_the_reward():
    """The same two responses as whole completions: log π − log π_ref = 0.75 twice."""
    logprobs, ref = torch.tensor([[-1.0, -1.0], [-3.0, 0.0]]), torch.tensor([[-1.5, -1.25], [-3.75, 0.0]])
    scores = torch.tensor([2.0, 4.0])
    rewards = rloo.kl_penalised_rewards(logprobs, ref, scores, 0.2)
    torch.testing.assert_close(rewards, torch.tensor([1.85, 3.85]))
    mask, advantages = torch.tensor([[True, True], [True, False]]), torch.tensor([-2.0, 2.0])
    rollout = rloo.Rollout(None, None, None, mask, logprobs, ref, scores, rewards, advantages)
    score = rloo.Score(scores, torch.tensor([[3, 4], [3, PAD]]), torch.tensor([True, False]))
    steps = [sums(4, val__ratio=1.5)]
    metrics = {k: float(v) for k, v in rloo.summarise(rollout, score, steps, PAD, tiny.make_args(script=rloo)).items()}
    expected = {
        "objective/kl": 0.75,
        "objective/entropy": 2.5,
        "objective/scores": 3.0,
        "objective/scores_std": 1.0,
        "objective/rlhf_reward": 2.85,
        "objective/ended": 0.5,
        "objective/response_length": 1.5,
        "objective/cut_length": 1.5,
        "objective/advantage_std": 2.0,
        "ppo/val/ratio": 1.5,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_14_the_kl_that_is_logged_is_the_kl_that_is_trained_on(name, runs):
    """β · logged KL is exactly what the rewards of the rollout that was trained on lack to the scores."""
    lines = runs.metrics[name]
    for line, rollout in zip(lines, runs.of[name].rollouts, strict=True):
        total = rollout.rewards.view(len(rollout.scores), -1).sum(dim=1)
        taken = (rollout.scores - total).mean().item()
        assert line["objective/kl_coef"] * line["objective/kl"] == pytest.approx(taken, abs=1e-5)
        logged = "objective/score_total" if name == "ppo" else "objective/rlhf_reward"
        assert line[logged] == pytest.approx(total.mean().item(), abs=1e-5)
    assert abs(lines[-1]["objective/kl"]) > 1e-2
    assert lines[0]["objective/kl"] == pytest.approx(0, abs=1e-5)  # it starts as the reference


@BOTH
def test_14_too_much_kl_raises_beta_and_too_little_lowers_it(script):
    """P11: at 512 episodes and a horizon of 10 000 β moves by at most 0.2 · 0.0512 = 1.024 % an update."""
    args = script.Args(task=tiny.make_task(), batch_size=512, kl_target=6.0, kl_horizon=10_000)
    factors = {12.0: 1.01024, 6.6: 1.00512, 6.0: 1.0, 5.4: 0.99488, 0.0: 0.98976, -3.0: 0.98976}
    for kl, factor in factors.items():
        assert script.next_kl_coef(0.15, kl, args) == pytest.approx(0.15 * factor, rel=1e-9), kl
        assert script.next_kl_coef(0.15, kl, replace(args, kl_target=None)) == 0.15


@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_14_the_next_updates_beta_follows_from_the_kl_that_is_logged(name, runs):
    """8 episodes an update, target 6, horizon 10 000; a KL near 0 lowers β by 0.2 · 8 / 10 000 each time."""
    lines = runs.metrics[name]
    assert max(line["objective/kl"] for line in lines) < 4.8
    betas = [line["objective/kl_coef"] for line in lines]
    assert betas == pytest.approx([0.15, 0.15 * (1 - 1.6e-4), 0.15 * (1 - 1.6e-4) ** 2], rel=1e-6)


@BOTH
def test_15_the_penalty_looks_at_the_completion_only_and_honours_another_token_and_another_penalty(script):
    """The queries are full of both stop tokens; the score is replaced, not added to."""
    queries = torch.full((3, 4), 5)
    queries[:, 2:] = 6
    responses = torch.tensor([[1, 6, 1], [1, 5, 1], [1, 1, 1]])
    reward = lambda q, r: torch.tensor([10.0, 20.0, 30.0])  # noqa: E731
    scores = {}
    for token in (5, 6, None):
        task = tiny.make_task(truncate_after=0, missing_eos_penalty=-3.5)
        score = script.score_responses(reward, queries, responses, task, utils.Ids(PAD, token, [], []))
        scores[token] = score.scores.tolist()
    assert scores == {5: [-3.5, 20, -3.5], 6: [10, -3.5, -3.5], None: [10, 20, 30]}


def test_15_a_stop_text_becomes_its_one_token(task):
    tokenizer, _, pad_id = utils.load_tokenizer(task, task.response_length)
    for text, token in ((".", tokenizer.convert_tokens_to_ids(".")), ("<|endoftext|>", tokenizer.eos_token_id)):
        assert utils.task_ids(replace(task, truncate_token=text), tokenizer, pad_id).truncate == token
    with pytest.raises(utils.InputError, match="exactly one"):
        utils.task_ids(replace(task, truncate_token=". ."), tokenizer, pad_id)


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("make_policy", [ppo.PolicyAndValue, rloo.Policy])
def test_18_a_saved_policy_loads_as_a_language_model_with_the_same_logits_and_tied_weights(
    make_policy, kind, task, tmp_path, accelerator
):
    folder = str(tiny.write_model(tmp_path / "start", kind))
    policy = make_policy(utils.load_lm(folder), WORDS, 0.7)
    tied = policy.lm.config.tie_word_embeddings
    policy, optimizer = accelerator.prepare(policy, ppo.AdamTF(policy.parameters(), lr=1e-2))
    contexts, responses = tiny.make_contexts([2, 6], 6, vocab=WORDS), tiny.make_responses(2, 4)
    policy(contexts, responses)[0].sum().backward()
    optimizer.step()
    lm = accelerator.unwrap_model(policy).lm
    tokenizer = utils.load_tokenizer(task, task.response_length)[0]
    records.save_model(lm, tokenizer, tmp_path / "saved", {"model": lm.state_dict()})

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, lm.eval()(tokens).logits, atol=1e-5, rtol=0)
        start = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert not torch.allclose(loaded(tokens).logits, start(tokens).logits)
    for model in (lm, loaded):
        same = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
        assert same == tied
    assert loaded.get_input_embeddings().num_embeddings == WORDS  # no pad was added
    assert utils.AutoTokenizer.from_pretrained(tmp_path / "saved").encode(" and") == tokenizer.encode(" and")


def test_18_gelu_is_one_kernel_and_the_saved_configuration_keeps_its_name(tmp_path):
    """Of the language model and of the reward model; the same logits as the library's own model gives."""
    folder = tiny.write_model(tmp_path / "model")
    lm, reward = utils.load_lm(str(folder)), utils.RewardModel(utils.RewardConfig(tiny.config(), PAD))
    for model in (lm, reward):
        kinds = [type(module).__name__ for module in model.modules()]
        assert kinds.count("GELU") == 2 and "NewGELUActivation" not in kinds  # of two layers
        model.save_pretrained(tmp_path / "saved")
        config = json.loads((tmp_path / "saved" / "config.json").read_text())
        assert config.get("backbone", config)["activation_function"] == "gelu_new"
    tokens = torch.arange(1, 30)[None]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits
        torch.testing.assert_close(lm.eval()(tokens).logits, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_18_main_saves_the_policy_that_it_trained(name, runs, monkeypatch):
    monkeypatch.chdir(runs.folder)
    start, trained = (AutoModelForCausalLM.from_pretrained(folder) for folder in ("sft", name))
    assert trained.lm_head.weight.data_ptr() == trained.transformer.wte.weight.data_ptr()
    moved = [not torch.equal(a, b) for a, b in zip(start.parameters(), trained.parameters(), strict=True)]
    assert all(moved)
    assert not list(runs.folder.glob("*.tmp*")) and not list(runs.folder.glob("*.old*"))


def save_as_run(script: ModuleType, args, seed: int, accelerator):
    """The weights of a random model as `main` of `script` saves them."""
    tokenizer = utils.load_tokenizer(args.task, args.task.response_length)[0]
    run = records.Run(args, script.SCRIPT, 1, [], accelerator)
    run.save(lm := tiny.make_lm(seed=seed), tokenizer)
    run.progress.stop()
    return lm


def test_18_the_link_to_a_tasks_weights_leads_to_the_last_run_and_the_one_before_stays(
    task, tmp_path, accelerator, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    link, lms = Path("models", task.task, "ppo"), {}
    for seed in (1, 2):
        args = tiny.make_args(task, run_name=f"run{seed}")
        lms[seed] = save_as_run(ppo, args, seed, accelerator)
        assert link.is_symlink() and link.resolve() == (tmp_path / f"runs/run{seed}/model")
        loaded = AutoModelForCausalLM.from_pretrained(link)
        assert torch.equal(loaded.transformer.wte.weight, lms[seed].transformer.wte.weight)
    before = AutoModelForCausalLM.from_pretrained("runs/run1/model")
    assert torch.equal(before.transformer.wte.weight, lms[1].transformer.wte.weight)
    assert [path.name for path in link.parent.iterdir()] == ["ppo"]  # nothing half-made is left beside it


def test_18_weights_in_an_output_dir_touch_no_link(task, tmp_path, accelerator, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "deep" / "er" / "saved"
    lm = save_as_run(rloo, tiny.make_args(task, rloo, output_dir=str(folder), run_name="r"), 1, accelerator)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.transformer.wte.weight, lm.transformer.wte.weight)
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]
    assert not Path("models").exists() and not Path("runs/r/model").exists()


def test_18_saving_over_what_somebody_wrote_meanwhile_fails_and_leaves_it(task, tmp_path, accelerator, monkeypatch):
    """The folder was empty when the run began."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "mine.txt").write_text("notes")
    with pytest.raises(tasks.RunError, match="holds other files"):
        save_as_run(ppo, tiny.make_args(task, output_dir=str(folder), run_name="r"), 1, accelerator)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    assert (folder / "mine.txt").read_text() == "notes"


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_18_a_reward_model_round_trips_with_one_from_pretrained(kind, tmp_path):
    model = tiny.make_reward(kind)
    model.save_pretrained(tmp_path / "r")
    loaded = utils.RewardModel.from_pretrained(tmp_path / "r")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    tokens = utils.pad_rows([[3, 4], [5, 6, 7, 8]], 6, PAD)
    torch.testing.assert_close(loaded.eval()(tokens), model(tokens), atol=1e-6, rtol=1e-6)
    assert (loaded.gain.item(), loaded.bias.item(), loaded.config.pad_id) == (1.5, -0.5, PAD)
    assert (tmp_path / "r" / "model.safetensors").is_file()
    again = utils.RewardModel.from_folder(str(tmp_path / "r"), "")
    assert not again.training and {p.dtype for p in again.parameters()} == {torch.float32}


def test_19_metrics_are_means_over_all_minibatches_of_the_update():
    """The update's mean of what its three steps have, and each step's its own mean whatever its number of tokens."""
    zeros, mask = torch.zeros(2, 1), torch.ones(2, 1).bool()
    rollout = ppo.Rollout(None, None, None, mask, zeros, zeros, zeros, torch.zeros(2), zeros)
    steps = [sums(n, loss__policy_avg=x, val__ratio=2 * x) for n, x in ((4, 1.0), (2, 2.0), (8, 6.0))]
    score = ppo.Score(rollout.scores, torch.zeros(2, 1), mask[:, 0])
    metrics = ppo.summarise(rollout, score, steps, 0.1, PAD, tiny.make_args())
    assert metrics["ppo/loss/total"].item() == metrics["ppo/loss/policy_avg"].item() == 3.0
    assert metrics["ppo/val/ratio"].item() == 6.0
    flat = torch.zeros(2)
    rollout = rloo.Rollout(None, None, None, mask, zeros, zeros, flat, flat, flat)
    metrics = rloo.summarise(
        rollout, rloo.Score(flat, torch.zeros(2, 1), mask[:, 0]), steps, PAD, tiny.make_args(script=rloo)
    )
    assert (metrics["ppo/loss/policy_avg"].item(), metrics["ppo/val/ratio"].item()) == (3.0, 6.0)


def test_19_variances_are_those_of_each_minibatchs_real_tokens(accelerator):
    """Population variances, exact to a few digits also where the mean is a hundred times the deviation."""
    args, policy = tiny.make_args(EOS_TASK, micro_batch_tokens=36, whiten_rewards=False), tiny.make_policy()
    rollout = tiny.make_rollout(policy, args)
    rollout = rollout._replace(values=(100 + rollout.values).masked_fill(~rollout.mask, 0))
    returns = ppo.estimate(rollout, args)[1]
    stats = ppo.means([tiny.step_gradients(ppo, policy, rollout, args, accelerator)[0]])
    for name, x in (("returns", returns), ("val", rollout.values)):
        real = x[rollout.mask].double().numpy()
        assert stats[f"{name}/mean"].item() == pytest.approx(real.mean(), rel=1e-5)
        assert stats[f"{name}/var"].item() == pytest.approx(real.var(), rel=1e-3)


@BOTH
def test_20_under_bf16_log_softmax_and_statistics_are_fp32_and_so_are_the_weights(
    script, bf16_accelerator, monkeypatch
):
    args, plain = tiny.make_args(script=script), tiny.make_policy(script=script)
    policy, optimizer = bf16_accelerator.prepare(plain, script.AdamTF(plain.parameters(), lr=1e-3))
    seen, token_logprobs = [], script.token_logprobs

    def spy(logits, tokens, temperature):
        out = token_logprobs(logits, tokens, temperature)
        seen.append((logits.detach(), *(x.detach() for x in out)))
        return out

    monkeypatch.setattr(script, "token_logprobs", spy)
    epochs = [np.arange(8)]
    queries, responses = tiny.make_contexts(tiny.LENGTHS, 8), tiny.make_responses(8, 5)
    with bf16_accelerator.autocast():
        models = tiny.make_models(policy, script=script)
        rollout, _ = script.make_rollout(models, queries, responses, epochs[0], 0.15, args)
    steps = tiny.update(script, policy, optimizer, rollout, epochs, args, bf16_accelerator)
    assert {logits.dtype for logits, *_ in seen} == {torch.bfloat16}  # autocast is on, in both passes
    for _, logprobs, entropies in seen:
        assert logprobs.dtype == entropies.dtype == torch.float32
    logits, logprobs, entropies = seen[-1]
    expected = (logits.double() / 0.7).softmax(-1)
    torch.testing.assert_close(entropies.double(), -(expected * expected.log()).sum(-1), atol=1e-5, rtol=0)
    nearest = (logprobs[..., None] - expected.log()).abs().amin(dim=-1)  # rounded to bf16 it would be 1e-2 off
    assert nearest.max() < 1e-5
    for tensor in (*rollout[4:-1], *(pair for step in steps for pair in step.values()), *plain.parameters()):
        assert tensor.dtype == torch.float32
    assert all(s.dtype == torch.float32 for state in optimizer.state.values() for s in state.values())


def test_20_checkpoints_in_half_precision_are_trained_in_fp32(tmp_path):
    tiny.make_lm().bfloat16().save_pretrained(tmp_path)
    assert {p.dtype for p in utils.load_lm(str(tmp_path)).parameters()} == {torch.float32}
    assert {p.dtype for p in train_reward.new_reward_model(str(tmp_path), PAD).parameters()} == {torch.float32}
    (tmp_path / "model.safetensors").unlink()  # from scratch
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {p.dtype for p in utils.load_lm(str(tmp_path)).parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_21_steps_and_episodes_are_counted_exactly(name, runs):
    assert [line["step"] for line in runs.metrics[name]] == [0, 1, 2]
    assert [line["ppo/episode"] for line in runs.metrics[name]] == [8, 16, 24]
    assert sum(len(rollout.responses) for rollout in runs.of[name].rollouts) == 24
    assert [line["step"] for line in runs.metrics["train_reward"]] == [0, 1, 2, 3]  # the last one is the evaluation


def test_21_no_query_comes_twice_before_all_have_come(runs):
    """24 episodes of 40 queries: all different."""
    queries = {tuple(row) for rollout in runs.rollouts for row in rollout.contexts.tolist()}
    assert len(queries) == 24


def test_21_rloo_asks_each_prompt_as_often_as_it_has_completions_and_then_never_again(runs):
    """24 episodes: 6 of the 40 prompts, each four times in one update."""
    seen = [tuple(row) for rollout in runs.of["rloo"].rollouts for row in rollout.contexts.tolist()]
    assert len(set(seen)) == 6
    for rollout in runs.of["rloo"].rollouts:
        rows = [tuple(row) for row in rollout.contexts.tolist()]
        assert sorted(rows.count(row) for row in set(rows)) == [4, 4]


def test_22_sfts_held_out_evaluation_runs_and_is_logged(runs, monkeypatch, accelerator):
    """Every 3 steps and at the last one; the number is the perplexity of the blocks that were held out."""
    lines = runs.metrics["sft"]
    last = len(lines) - 1
    assert [line["step"] for line in lines if "heldout/perplexity" in line] == sorted({*range(2, last + 1, 3), last})
    monkeypatch.chdir(runs.folder)
    lm, tokenizer = utils.load_lm("sft").eval(), utils.AutoTokenizer.from_pretrained("sft")
    losses = []
    for row in sft.load_rows(runs.sft, tokenizer, WORDS)[0][:6].tolist():
        for t in range(1, 10):
            with torch.no_grad():
                losses.append(-lm(torch.tensor([row[:t]])).logits[0, -1].log_softmax(0)[row[t]].item())
    assert lines[-1]["heldout/loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert lines[-1]["heldout/perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)


def test_22_held_out_blocks_are_not_trained_on(runs, monkeypatch, tmp_path):
    """Other texts in the held-out blocks give the very same weights."""
    monkeypatch.chdir(tmp_path)
    load_rows, saved = sft.load_rows, []

    class Shifted(utils.TokenTable):
        """Other tokens in the first 6 rows."""

        def __getitem__(self, rows):
            chosen = np.arange(len(self))[rows]
            return (super().__getitem__(rows) + torch.from_numpy(chosen < 6)[:, None]) % WORDS

    for shift in (False, True):

        def spy(*args, shift=shift):
            table, first = load_rows(*args)
            return (Shifted(table.rows, table.length, table.pad_id) if shift else table), first

        monkeypatch.setattr(sft, "load_rows", spy)
        sft.main(replace(runs.sft, output_dir=f"sft{shift}", run_name=f"sft{shift}"))
        saved.append(utils.load_lm(f"sft{shift}").state_dict())
    for name, value in saved[0].items():
        assert torch.equal(value, saved[1][name]), name
    lines = [json.loads(Path(f"runs/sft{x}/metrics.jsonl").read_text().splitlines()[-1]) for x in (False, True)]
    assert lines[0]["heldout/loss"] != lines[1]["heldout/loss"]  # they were other texts


def test_22_the_reward_models_held_out_accuracy_is_logged(runs, monkeypatch):
    """Labels 12 to 15 are not trained on; of the saved model."""
    monkeypatch.chdir(runs.folder)
    task = runs.train_reward.task
    labels = train_reward.load_labels(task, None, WORDS)
    model, right = utils.RewardModel.from_folder("reward", ""), []
    for i in range(12, 16):
        rows = torch.cat([labels.query[i].expand(4, -1), labels.responses[i]], dim=1)
        with torch.no_grad():
            rewards = [model(row[row != WORDS][None]).item() for row in rows]
        right.append(rewards.index(max(rewards)) == labels.best[i].item())
    assert runs.metrics["train_reward"][-1]["heldout/accuracy"] == pytest.approx(sum(right) / 4)


@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_22_samples_are_written_before_during_and_after_training(name, runs):
    """Every 2 of 3 updates, and behind the last."""
    rows = [json.loads(line) for line in (runs.folder / f"runs/{name}/samples.jsonl").read_text().splitlines()]
    assert sorted({row["step"] for row in rows}) == [0, 2, 3]
    assert all(set(row) == {"step", "query", "response", "score"} for row in rows) and len(rows) == 12
