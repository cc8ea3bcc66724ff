"""benchmarks/plain_ppo.py makes the same update as ppo.py; speed.py measures what it says."""

import copy

import numpy as np
import pytest
import tiny
import torch

import ppo
from benchmarks import contestants, plain_ppo, speed
from machinery import cli

SHAPE = dict(n_layer=1, n_embd=32, n_head=2, vocab_size=101, n_positions=96)
SMALL = speed.Work(SHAPE, episodes=8, micro=(4,))


def plain_copy(model, head=None):
    """A language model and a scalar head in plain_ppo.py's class."""
    plain = plain_ppo.LMWithScalar(copy.deepcopy(model), tiny.PAD)
    if head is not None:
        plain.head.load_state_dict(head.state_dict())
    return plain.eval()


@pytest.mark.parametrize("eos_task", [False, True])
def test_plain_ppo_and_ppo_get_the_same_weights_from_the_same_responses(eos_task, tmp_path):
    """Four steps move weights by up to 4e-3, 400 times the tolerance."""
    args = tiny.make_args(eos_task=eos_task, total_episodes=8)
    policy = tiny.make_policy()
    plain = plain_copy(policy.lm, policy.value_head)
    before = copy.deepcopy(plain)
    ref = plain_copy(tiny.make_lm(seed=3))
    tiny.make_reward().save_pretrained(tmp_path)
    reward = plain_ppo.load_reward(str(tmp_path), tiny.PAD)
    queries = tiny.make_contexts(tiny.LENGTHS, 8)
    responses = tiny.make_responses(8, 5)
    orders = np.array([np.random.default_rng(epoch).permutation(8) for epoch in range(2)])
    inputs = dict(queries=[queries], responses=[responses], epochs=[torch.tensor(orders)])
    run = tiny.start(ppo, args, policy, **inputs)
    assert 0 < run.metrics[0]["objective/ended"] < 1  # some scores are the penalty

    plain_args = contestants.plain_args(args, micro_batch=3)
    optimizer = plain_ppo.AdamLoop(plain.parameters(), lr=args.lr, eps=args.adam_eps)
    models = plain, ref, reward
    episodes = plain_ppo.rollout(*models, queries, responses, tiny.EOS, args.kl_coef, plain_args)
    plain_ppo.train(plain, optimizer, episodes, orders, plain_args)
    ours = plain_copy(policy.lm, policy.value_head)
    torch.testing.assert_close(plain.state_dict(), ours.state_dict(), atol=1e-5, rtol=0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(plain.state_dict(), before.state_dict(), atol=1e-3, rtol=0)


def test_plain_samples_continue_after_the_models_eos():
    plain = plain_copy(tiny.make_lm())
    assert plain.lm.generation_config.eos_token_id == 0
    args = contestants.plain_args(tiny.make_args(), micro_batch=3)
    torch.manual_seed(1)
    responses = plain_ppo.sample(plain, tiny.make_contexts([3] * 200, 8), None, args)
    assert responses.shape == (200, 5) and (responses[:, :-1] == 0).any()


def test_the_settings_of_plain_ppo_are_those_of_ppo_on_the_synthetic_task():
    preset = cli.parse_args(ppo.Args, ppo.PRESETS, ["--task", "synthetic"])
    plain = plain_ppo.Args()
    assert contestants.plain_args(preset, plain.micro_batch) == plain


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
