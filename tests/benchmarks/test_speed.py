"""benchmarks/plain_ppo.py makes the same update as ppo.py."""

import copy

import numpy as np
import pytest
import tiny
import torch

import ppo
from benchmarks import plain_ppo


@pytest.mark.parametrize("eos_task", [False, True])
def test_plain_ppo_and_ppo_get_the_same_weights_from_the_same_responses(eos_task):
    """Four steps move weights by up to 4e-3, 400 times the tolerance."""
    task = tiny.make_task(eos_task=eos_task)
    args = tiny.make_args(task, total_episodes=8, num_minibatches=1, num_ppo_epochs=4)
    policy = tiny.make_policy()
    reward = plain_ppo.reward_from(tiny.make_reward())
    models = copy.deepcopy(policy.lm), tiny.make_lm(seed=3), reward
    plain = plain_ppo.PlainPPO(*models, args, tiny.PAD, micro=3)
    plain.policy.head.load_state_dict(policy.value_head.state_dict())
    before = copy.deepcopy(plain.policy.state_dict())
    queries, responses = tiny.make_contexts(tiny.LENGTHS, 8), tiny.make_responses(8, 5)
    orders = [np.random.default_rng(epoch).permutation(8) for epoch in range(4)]
    epochs = [[torch.from_numpy(order)] for order in orders]
    inputs = dict(queries=[queries], responses=[responses], epochs=[epochs])
    run = tiny.start(ppo, args, policy, **inputs)
    assert 0 < run.metrics[0]["objective/ended"] < 1  # some scores are the penalty
    plain.train(plain.rollout(queries, responses, args.kl_coef, truncate=tiny.EOS), orders)

    ours, theirs = policy.state_dict(), plain.policy.state_dict()
    for name, weight in theirs.items():
        mine = ours[name.replace("head.", "value_head.") if name.startswith("head.") else name]
        torch.testing.assert_close(weight, mine, atol=1e-5, rtol=0)
    assert max((theirs[name] - before[name]).abs().max() for name in theirs) > 1e-3
