"""benchmarks/plain_ppo.py, written apart from ppo.py, makes the same update of it; speed.py measures what it says."""

import copy
import csv
import sys
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

import ppo
from benchmarks import plain_ppo, speed

EPOCHS = [np.random.default_rng(epoch).permutation(8) for epoch in range(4)]
WAYS = [(), *((idea,) for idea in plain_ppo.IDEAS), tuple(plain_ppo.IDEAS)]


def settings(**changes):
    """One minibatch of 8 in micro-batches of 3, four epochs; steps of up to 4e-3 in all, 400 times the tolerance."""
    return replace(tiny.make_args(micro_batch_tokens=36, num_minibatches=1, num_ppo_epochs=4, lr=1e-3), **changes)


def plain_of(policy, ideas, args):
    """The same models as `tiny.make_models(policy)`, in the plain way."""
    reward = plain_ppo.reward_from(tiny.make_reward())
    plain = plain_ppo.PlainPPO(copy.deepcopy(policy.lm), tiny.make_lm(seed=3), reward, args, tiny.PAD, 3, ideas)
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


def test_query_lengths_are_those_of_the_workloads():
    lengths = np.array(speed.query_lengths(2000))
    assert np.quantile(lengths, [0.05, 0.5, 0.95]).tolist() == [7, 17, 40] and lengths.max() == 64
    assert len(speed.query_lengths(16)) == 16 and max(speed.query_lengths(16)) == 64


def test_operations_are_those_counted_by_hand():
    """A layer of width 2 over one row of 64 + 1 tokens: 12 · 2² weights, twice that in operations a token (6240 in all);
    scores and their sums over 1 + 2 + … + 65 = 2145 keys, 8 operations each (17160); a word of 3 predicted, 12."""
    work = speed.Work(dict(n_layer=1, n_embd=2, vocab_size=3), 1, (), response_length=1)
    trunk, head = 6240 + 17160, 12
    assert speed.operations(work, "ppo", 1) == {
        "sample": trunk + head,
        "score": 2 * trunk + head,
        "optimise": 3 * (trunk + head),
    }
    assert speed.operations(work, "ppo", 4)["optimise"] == 12 * (trunk + head)
    assert speed.operations(work, "separate_critic", 4)["optimise"] == 12 * (2 * trunk + head)


def test_the_waterfall_adds_every_idea_that_there_is():
    assert speed.IDEAS == tuple(plain_ppo.IDEAS)
    assert [row.ideas for row in speed.waterfall()][:-1] == [speed.IDEAS[:n] for n in range(len(speed.IDEAS) + 1)]


def test_a_race_of_real_processes_gives_every_phase_and_keeps_the_rows_of_other_workloads(tmp_path):
    """ppo.py from its own command line, and the plain way; TRL's need virtual environments and a connection."""
    sizes = dict(n_layer=1, n_embd=32, n_head=2, vocab_size=101, n_positions=96)
    field = [speed.Contestant("ppo", "ppo", 1), speed.Contestant("plain", "plain", 1, rival="ppo")]
    table = speed.race(speed.Work(sizes, 8, (4,)), field, updates=2, rounds=1)
    for name, row in table.items():
        assert row["cpu"] > 0 and all(row[phase] > 0 for phase in speed.PHASES), name
        assert 0.1 < row["peak GB"] < 3 and 0 < row["bound"] < 1
        assert row["episodes/s"] == 8 / row["wall"]
    assert table["plain"]["ratio"] == pytest.approx(table["plain"]["cpu"] / table["ppo"]["cpu"])
    assert (table["ppo"]["micro"], table["plain"]["micro"]) == ("default", 4)

    for workload in ("first", "second", "first"):
        rows = speed.write(tmp_path / "speed.csv", workload, table)
    assert [row["workload"] for row in rows] == ["second", "second", "first", "first"]
    speed.draw_race(rows, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 1000


def test_the_folder_to_write_into_is_there_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "race", lambda *args: sys.exit(str((tmp_path / "new").is_dir())))
    with pytest.raises(SystemExit, match="True"):
        speed.main(speed.Args(out=tmp_path / "new" / "speed"))


def test_scaling_is_measured_written_and_drawn_also_over_two_processes(tmp_path, monkeypatch, capsys):
    small = speed.Work(dict(n_layer=1, n_embd=32, n_head=2, vocab_size=101, n_positions=96), 8, (4,))
    monkeypatch.setattr(speed, "scaled", lambda: {"processes": {"1": (small, 1), "2": (small, 2)}})
    speed.scale(speed.Args(updates=1), tmp_path / "scale")
    rows = list(csv.DictReader((tmp_path / "scale.csv").read_text().splitlines()))
    assert [row["value"] for row in rows] == ["1", "2"]
    for row in rows:
        assert float(row["episodes/s"]) == pytest.approx(8 / float(row["wall"]), rel=1e-3)
    share = float(rows[1]["episodes/s"]) / float(rows[0]["episodes/s"]) / 2
    said = capsys.readouterr().out.splitlines()[-1]
    assert float(said.split(": ")[1].split("%")[0]) == pytest.approx(100 * share, abs=1)
    assert (tmp_path / "scale.png").stat().st_size > 1000


def test_a_peer_that_fails_ends_the_race_with_what_it_said(tmp_path):
    with pytest.raises(SystemExit, match="nobody failed:\n(.|\n)*KeyError"):
        speed.run(tmp_path, speed.WORKS["tiny"], speed.Contestant("nobody", "nobody"), 1)
