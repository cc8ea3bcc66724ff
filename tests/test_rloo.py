"""RLOO (L1 to L5): worked examples of its authors' texts, and a slow loop. [R] is "Putting RL back
in RLHF" (Hugging Face blog, 2024)."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_details import assert_near, eos_run
from tiny import assert_gradients, make_args, make_policy, run_alone
from torch.testing import assert_close

import rloo

ARGS = make_args(script=rloo)  # clips ratios to 1 ± 0.2


def loss_of(new):
    """Sum of losses with advantages of 1. Old log-probabilities are 0 if `new` is a leaf, else `new`."""
    old = torch.zeros_like(new) if new.is_leaf else new.detach()
    advantages = torch.ones(len(new))
    loss, _ = rloo.rloo_loss(new, SimpleNamespace(logprobs=old), advantages, 1, ARGS)
    return loss


def test_L3_three_queries_with_four_responses_as_in_the_announcement():
    rewards = torch.tensor([1.0, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10])  # [R]'s rlhf_reward, [K, P]
    rewards = rewards.view(4, 3).T.flatten()  # [P, K]
    found = rloo.compute_advantages(rewards, make_args(script=rloo, rloo_k=4))
    expected = torch.tensor([-4.0, 2 - 14 / 3, 4 / 3, 16 / 3])  # of 1, 2, 5, 8 less others
    assert_close(found, expected.repeat(3))


def test_L3_equal_rewards_have_advantages_of_exactly_0():
    """Also where the sum of three is rounded."""
    rewards = torch.tensor([0.1, 1 / 3, 1e6 + 0.3]).repeat_interleave(4)
    assert (rloo.compute_advantages(rewards, make_args(script=rloo, rloo_k=4)) == 0).all()


def test_L4_at_ratio_1_the_gradient_is_reinforces_as_in_the_announcement():
    """Both are [-0.1749, 0.5246, -0.1749, -0.1749] there, of what is maximized."""
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0]], requires_grad=True)
    loss_of(logits.log_softmax(dim=1)[:, 1:2]).backward()
    assert_near(-logits.grad, torch.tensor([[-0.1749, 0.5246, -0.1749, -0.1749]]))


def test_L4_a_ratio_of_12_19_nulls_a_whole_response_as_in_the_announcement():
    """Its ratios under bf16 are 1.0625 and 12.1875, of nine tokens each."""
    ratios = torch.tensor([[1.0625], [12.1875]])
    new = (ratios.log() / 9).repeat(1, 9).requires_grad_()
    loss_of(new).backward()
    assert_near(new.grad, torch.tensor([[-1.0625] * 9, [0.0] * 9]))


def test_L5_there_is_no_value_network():
    assert [name for name, _ in make_policy(script=rloo).named_children()] == ["lm"]


def test_X9_L1_L4_gradients_and_metrics_are_those_of_a_slow_loop_over_ragged_rows():
    """A policy that is away from the rollout's, one response without padding at a time."""
    run, rollout, policy = eos_run(rloo)
    rewards = rollout.rewards.tolist()
    advantages = []
    losses = []
    ratios = []
    entropies = []
    clipped = 0
    for i in range(8):
        advantage = rewards[i] - rewards[i ^ 1]  # k = 2: minus that of the other response
        logprobs, entropy = run_alone(policy, rollout.contexts[i], rollout.responses[i])
        ratio = (logprobs.sum() - rollout.logprobs[i].sum()).exp()
        loss = -advantage * ratio
        loss_clipped = -advantage * ratio.clamp(0.8, 1.2)
        advantages.append(advantage)
        losses.append(torch.max(loss, loss_clipped))
        clipped += (loss_clipped > loss).item()
        ratios.append(ratio.item())
        entropies += entropy.tolist()
    assert 0 < clipped < 8
    assert len(entropies) == rollout.mask.sum() < 40
    assert rollout.logprobs.max() <= 0
    loss = torch.stack(losses).mean()
    assert_gradients(run, policy, loss)
    ratios = np.array(ratios)
    scores = [1, 2, 3, -1, 5, 6, 7, -1]
    kl = rollout.kl.sum().item() / 8
    expected = {
        "ppo/loss/policy_avg": loss.item(),
        "ppo/policy/approxkl_avg": np.mean(np.log(ratios) ** 2) / 2,
        "ppo/policy/clipfrac_avg": clipped / 8,
        "ppo/val/ratio": ratios.mean(),
        "ppo/val/ratio_var": np.mean((ratios - 1) ** 2),
        "ppo/policy/entropy_avg": np.mean(entropies),
        "objective/kl": kl,
        "objective/entropy": -rollout.logprobs.sum().item() / 8,
        "objective/rlhf_reward": np.mean(scores) - 0.15 * kl,
        "objective/scores_std": np.std(scores),
        "objective/advantage_std": np.std(advantages),
        "objective/response_length": len(entropies) / 8,
    }
    found = {name: run.metrics[0][name] for name in expected}
    assert found == pytest.approx(expected, abs=2e-4)
