"""benchmarks/plain_ppo.py makes the same update as ppo.py; speed.py measures what it says."""

import copy

import numpy as np
import pytest
import tiny
import torch

import ppo
from benchmarks import plain_ppo, speed

SHAPE = dict(n_layer=1, n_embd=32, n_head=2, vocab_size=101, n_positions=96)
SMALL = speed.Work(SHAPE, episodes=8, micro=(4,))


def plain_copy(policy, args):
    """The models of `tiny.start`, in a PlainPPO."""
    reward = plain_ppo.reward_from(tiny.make_reward())
    models = copy.deepcopy(policy.lm), tiny.make_lm(seed=3), reward
    plain = plain_ppo.PlainPPO(*models, args, tiny.PAD, micro=3)
    plain.policy.head.load_state_dict(policy.value_head.state_dict())
    return plain


@pytest.mark.parametrize("eos_task", [False, True])
def test_plain_ppo_and_ppo_get_the_same_weights_from_the_same_responses(eos_task):
    """Four steps move weights by up to 4e-3, 400 times the tolerance."""
    task = tiny.make_task(eos_task=eos_task)
    args = tiny.make_args(task, total_episodes=8, num_minibatches=1, num_ppo_epochs=4)
    policy = tiny.make_policy()
    plain = plain_copy(policy, args)
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


def test_plain_samples_continue_after_the_models_eos():
    plain = plain_copy(tiny.make_policy(), tiny.make_args())
    assert plain.policy.lm.generation_config.eos_token_id == 0
    responses = plain.sample(tiny.make_contexts([3] * 200, 8), seed=1)
    assert responses.shape == (200, 5) and (responses[:, :-1] == 0).any()


@pytest.mark.slow
def test_a_race_measures_every_phase_and_keeps_rows_of_other_workloads(tmp_path):
    field = [speed.Contestant("ppo", "ppo", 1), speed.Contestant("plain", "plain", 1, rival="ppo")]
    table = speed.race(SMALL, field, updates=2, rounds=1)
    for name, row in table.items():
        assert row["cpu"] > 0 and all(row[phase] > 0 for phase in speed.PHASES), name
        assert 0.1 < row["peak GB"] < 3 and 0 < row["bound"] < 1
        assert row["episodes/s"] == 8 / row["wall"]
    assert table["plain"]["ratio"] == pytest.approx(table["plain"]["cpu"] / table["ppo"]["cpu"])
    assert (table["ppo"]["micro"], table["plain"]["micro"]) == ("default", 4)
    for workload in ("first", "second", "first"):
        rows = speed.write(tmp_path / "speed.csv", workload, table)
    assert [row["workload"] for row in rows] == ["second", "second", "first", "first"]
    speed.draw(rows, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 1000
