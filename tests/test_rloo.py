"""RLOO (L1 to L6): worked examples of its authors' texts, slow loops, and the first ratio.

[R] is "Putting RL back in RLHF" (Hugging Face blog, 2024).
"""

from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from test_details import HAND, eos_run
from torch.testing import assert_close

import ppo
import rloo

ARGS = tiny.make_args(script=rloo)  # clips ratios to 1 ± 0.2


def loss_of(new: torch.Tensor) -> torch.Tensor:
    """Sum of losses with advantages of 1. Old log-probabilities are 0 if `new` is a leaf, else `new`."""
    old = SimpleNamespace(logprobs=torch.zeros_like(new) if new.is_leaf else new.detach())
    return rloo.rloo_loss(new, old, torch.ones(len(new)), 1, ARGS)[0]


def test_L3_three_queries_with_four_responses_as_in_the_announcement():
    rewards = torch.tensor([1.0, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10])  # [R]'s rlhf_reward, [K, P]
    found = rloo.compute_advantages(rewards, tiny.make_args(script=rloo, rloo_k=4)).view(4, 3)
    expected = [
        [-4.0] * 3,
        [2 - 14 / 3] * 3,
        [4 / 3] * 3,
        [16 / 3] * 3,
    ]  # of 1, 2, 5, 8 less others
    assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("k", [2, 3, 5])
def test_L3_equal_rewards_have_advantages_of_exactly_zero(k):
    rewards = torch.tensor([0.1, -1.7, 1 / 3]).repeat(k)
    assert (rloo.compute_advantages(rewards, tiny.make_args(script=rloo, rloo_k=k)) == 0).all()


@pytest.mark.parametrize("k", [2, 4])
def test_L3_the_responses_to_a_query_are_each_others_baseline(k):
    """In `main`, which learns each response with its own advantage."""
    rollouts, learned, rloo_loss = [], {}, rloo.rloo_loss

    def spy(logprobs, old, advantages, *rest):
        for row, advantage in zip(old.logprobs.tolist(), advantages.tolist(), strict=True):
            learned[tuple(row)] = advantage
        return rloo_loss(logprobs, old, advantages, *rest)

    args = tiny.small_args(rloo, rloo_k=k, batch_size=4 * k, total_episodes=4 * k)
    spies = dict(rloo_loss=spy, Rollout=tiny.noisy_rollout(rloo, rollouts))
    tiny.run_episodes(rloo, args, **spies)
    rollout = rollouts[1]  # the first is the evaluation's
    contexts, rewards = rollout.contexts.tolist(), rollout.rewards.tolist()
    for i, context in enumerate(contexts):
        alike = [rewards[j] for j, other in enumerate(contexts) if other == context]
        assert len(alike) == k
        expected = rewards[i] - (sum(alike) - rewards[i]) / (k - 1)
        assert learned[tuple(rollout.logprobs[i].tolist())] == pytest.approx(expected, abs=1e-5)


def test_L4_at_ratio_1_the_gradient_is_reinforces_as_in_the_announcement():
    """Both are [-0.1749, 0.5246, -0.1749, -0.1749] there, of what is maximized."""
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0]], requires_grad=True)
    loss_of(logits.log_softmax(dim=1)[:, 1:2]).backward()
    assert_close(-logits.grad, torch.tensor([[-0.1749, 0.5246, -0.1749, -0.1749]]), **HAND)


def test_L4_a_ratio_of_12_19_nulls_a_whole_response_as_in_the_announcement():
    """Its ratios under bf16 are 1.0625 and 12.1875, of nine tokens each."""
    ratios = torch.tensor([[1.0625], [12.1875]])
    new = (ratios.log() / 9).repeat(1, 9).requires_grad_()
    loss_of(new).backward()
    assert_close(new.grad, torch.tensor([[-1.0625] * 9, [0.0] * 9]), **HAND)


def test_L5_there_is_no_value_network():
    assert [name for name, _ in tiny.make_policy(script=rloo).named_children()] == ["lm"]


def test_X9_L1_L4_gradients_and_metrics_are_those_of_a_slow_loop_over_ragged_rows():
    """A policy that is away from the rollout's, one response without padding at a time."""
    run, rollout, policy = eos_run(rloo)
    rewards = rollout.rewards.double().numpy().reshape(2, 4)  # [K, P]
    advantages = (rewards - rewards[::-1]).ravel()  # k = 2
    losses, ratios, entropies, clipped = [], [], [], 0
    for i, a in enumerate(advantages.tolist()):
        logprobs, entropy, *_ = tiny.run_alone(policy, rollout.contexts[i], rollout.responses[i])
        ratio = (logprobs.sum() - rollout.logprobs[i].sum()).exp()
        losses.append(torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2)))
        clipped += ratio.item() > 1.2 if a > 0 else ratio.item() < 0.8
        ratios.append(ratio.item())
        entropies += entropy.tolist()
    assert len(entropies) == rollout.mask.sum() < 40 and 0 < clipped < 8
    assert rollout.logprobs.max() <= 0
    tiny.assert_gradients(run, policy, torch.stack(losses).mean())
    scores, kl = [1, 2, 3, -1, 5, 6, 7, -1], rollout.kl.sum(dim=1).mean().item()
    expected = {
        "ppo/loss/policy_avg": torch.stack(losses).mean().item(),
        "ppo/policy/approxkl_avg": np.mean(np.log(ratios) ** 2) / 2,
        "ppo/policy/clipfrac_avg": clipped / 8,
        "ppo/val/ratio": np.mean(ratios),
        "ppo/val/ratio_var": np.mean((np.array(ratios) - 1) ** 2),
        "ppo/policy/entropy_avg": np.mean(entropies),
        "objective/kl": kl,
        "objective/entropy": rollout.logprobs.abs().sum().item() / 8,  # all are below 0
        "objective/rlhf_reward": np.mean(scores) - 0.15 * kl,
        "objective/scores_std": np.std(scores),
        "objective/advantage_std": advantages.std(),
        "objective/response_length": len(entropies) / 8,
    }
    found = {name: run.metrics[0][name] for name in expected}
    assert found == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("eos_task", [False, True], ids=["fixed", "eos"])
@pytest.mark.parametrize("precision", ["accelerator", "bf16_accelerator"])
@tiny.both
def test_L6_the_first_minibatch_has_ratios_of_exactly_1(script, precision, eos_task, request):
    """In fp32 and bf16, with uneven sequences in uneven micro-batches; later ones have not."""
    request.getfixturevalue(precision)
    steps, rollouts = [[]], []
    name = "ppo_losses" if script is ppo else "rloo_loss"
    losses, step = getattr(script, name), script.AdamTF.step

    def spy_losses(logprobs, *args):
        old = args[1] if script is ppo else args[0]
        steps[-1].append((logprobs - old.logprobs).abs().max().item())
        return losses(logprobs, *args)

    def spy_step(self, closure=None):
        steps.append([])
        return step(self)

    spies = {name: spy_losses, "Rollout": tiny.keep(script.Rollout, rollouts)}
    spies["AdamTF"] = type("Spy", (script.AdamTF,), {"step": spy_step})
    task = tiny.make_task(eos_task=eos_task, truncate_after=0)
    args = tiny.small_args(script, task, total_episodes=8, micro_batch_tokens=18)
    ref, policy = tiny.make_policy(script=script), tiny.make_policy(script=script)
    tiny.run_episodes(script, args, policy, ref=ref, **spies)
    assert len(steps[0]) > 1 and set(steps[0]) == {0.0}
    assert max(steps[2]) > 0  # the second epoch's first
    given = rollouts[1].contexts[0], rollouts[1].responses[0]
    exact, *_ = tiny.run_alone(tiny.make_policy(script=script), *given)
    error = (rollouts[1].logprobs[0, : len(exact)] - exact).abs().max().item()
    assert (error > 1e-3) == (precision == "bf16_accelerator")  # that it really is bf16
