"""benchmarks/plain_ppo.py, written apart from ppo.py, makes the same update of it; and what speed.py computes by hand."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

import ppo
from benchmarks import plain_ppo

EPOCHS = [np.random.default_rng(epoch).permutation(8) for epoch in range(4)]
WAYS = [(), *((idea,) for idea in plain_ppo.IDEAS), tuple(plain_ppo.IDEAS)]


def settings(**changes):
    """One minibatch of 8 in micro-batches of 3, four epochs; steps of up to 4e-3 in all, 400 times the tolerance."""
    return replace(tiny.make_args(micro_batch_size=3, num_minibatches=1, num_ppo_epochs=4, lr=1e-3), **changes)


def plain_of(policy, ideas, args):
    """The same models as `tiny.make_models(policy)`, in the plain way."""
    reward = plain_ppo.reward_from(tiny.make_reward())
    plain = plain_ppo.PlainPPO(copy.deepcopy(policy.lm), tiny.make_lm(seed=3), reward, args, tiny.PAD, ideas)
    plain.policy.head.load_state_dict(policy.value_head.state_dict())
    return plain


@pytest.mark.parametrize("ideas", WAYS, ids=lambda ideas: "+".join(ideas) or "plain")
def test_plain_ppo_and_ppo_make_the_same_weights_of_the_same_responses(ideas, accelerator):
    args, policy = settings(), tiny.make_policy()
    plain = plain_of(policy, ideas, args)
    before = copy.deepcopy(plain.policy.state_dict())
    queries, responses = tiny.make_contexts(tiny.LENGTHS, 8), tiny.make_responses(8, 5)
    rollout, score = ppo.make_rollout(tiny.make_models(policy), queries, responses, EPOCHS[0], 0.15, args)
    assert 0 < score.ended.sum() < 8  # some scores are the reward model's, some the penalty
    optimizer = ppo.AdamTF(policy.parameters(), lr=args.lr)
    tiny.update(ppo, policy, optimizer, rollout, EPOCHS, args, accelerator)
    plain.train(plain.rollout(queries, responses, 0.15, truncate=tiny.EOS), EPOCHS)

    ours, theirs = policy.state_dict(), plain.policy.state_dict()
    for name, weight in theirs.items():
        mine = ours[name.replace("head.", "value_head.") if name.startswith("head.") else name]
        torch.testing.assert_close(weight, mine, atol=1e-5, rtol=0)
    moved = max((weight - before[name]).abs().max().item() for name, weight in theirs.items())
    assert moved > 1e-3


def test_plain_ppo_refuses_an_idea_that_there_is_not():
    with pytest.raises(ValueError, match="tirm"):
        plain_of(tiny.make_policy(), ("tirm",), settings())


def test_plain_samples_have_the_response_length_also_where_the_model_knows_an_end():
    plain = plain_of(tiny.make_policy(), (), settings())
    assert plain.policy.lm.generation_config.eos_token_id == 0
    responses = plain.sample(tiny.make_contexts([3] * 200, 8), seed=1)
    assert responses.shape == (200, 5)
    assert (responses[:, :-1] == 0).any()  # ends were drawn, and sampling went on behind them
