"""What is measured on held-out queries and labels, against numbers that are worked out by hand."""

import math
from types import SimpleNamespace

import pytest
import tiny
import torch
from tiny import EOS, PAD

import ppo
import rloo
import train_reward


@pytest.mark.parametrize("script", [ppo, rloo])
@pytest.mark.parametrize("eos_task", [True, False])
def test_22_evaluation_counts_up_to_the_end_of_a_response_and_all_of_one_without_an_end(script, eos_task, monkeypatch):
    """Four responses of which two end; the policy is surer than the reference by 1 at the first token, 2 at the second, …"""
    responses = torch.tensor([[7, EOS, 7, 7, 7], [7, 7, 7, EOS, EOS], [7, 7, 7, 7, 7], [9, 9, 9, 9, 9]])
    task = tiny.make_task(eos_task=eos_task, truncate_after=0, missing_eos_penalty=-3.0)
    models = tiny.make_models("policy", reward=lambda queries, cut: (cut != PAD).sum(dim=1).float(), ref="reference")
    gaps = {"policy": torch.arange(1.0, 6).expand(4, 5) - 7, "reference": torch.full((4, 5), -7.0)}
    monkeypatch.setattr(script, "sample_all", lambda *args: responses)
    monkeypatch.setattr(script, "logprobs_of", lambda policy, *args: gaps[policy])
    tokenizer = SimpleNamespace(decode=lambda row, **how: " ".join(map(str, row.tolist())))
    monkeypatch.setattr(script.utils, "decode", lambda tokenizer, rows, pad_id: [tokenizer.decode(row) for row in rows])
    queries, args = tiny.make_contexts([8, 1, 3, 5], 8), tiny.make_args(task, script)
    metrics, samples = script.evaluate(models, "policy", queries, None, tokenizer, args)
    lengths, kl = ([2, 4, 5, 5], [3, 10, 15, 15]) if eos_task else ([5] * 4, [15] * 4)
    wanted = {"scores": (2 + 4 - 3 - 3) / 4, "kl": sum(kl) / 4, "response_length": sum(lengths) / 4, "ended": 0.5}
    assert metrics == {f"eval/{name}": value for name, value in wanted.items()}
    assert [sample["score"] for sample in samples] == [2, 4, -3, -3]
    assert samples[0]["response"] == f"7 {EOS} {PAD} {PAD} {PAD}"


def test_22_calibration_compares_stated_and_true_confidence_in_fifths_of_the_labels():
    """Ten labels of two candidates; the model gives its favourite these probabilities, and is right where it says so."""
    sure = {0.9: True, 0.6: False, 0.7: True, 0.8: True, 0.95: True, 0.55: False, 0.65: True, 0.75: True, 0.85: False}
    sure[0.52] = False
    rewards = torch.tensor([[math.log(p), math.log(1 - p)] for p in sure])
    best = torch.tensor([0 if right else 1 for right in sure.values()])
    tables = []
    run = SimpleNamespace(table=lambda rows, title: tables.append(rows), main=False)
    metrics = train_reward.report(run, rewards, best)
    wanted = [(0.535, 0), (0.625, 0.5), (0.725, 1), (0.825, 0.5), (0.925, 1)]
    assert [row["labels"] for row in tables[0]] == [2] * 5
    for row, (predicted, accuracy) in zip(tables[0], wanted, strict=True):
        assert (row["predicted"], row["accuracy"]) == pytest.approx((predicted, accuracy), abs=1e-6)
    chosen = [math.log(p if right else 1 - p) for p, right in sure.items()]
    others = [math.log(1 - p if right else p) for p, right in sure.items()]
    assert metrics == pytest.approx(
        {
            "heldout/accuracy": 0.6,
            "heldout/loss": -sum(chosen) / 10,
            "heldout/calibration_error": (0.535 + 0.125 + 0.275 + 0.325 + 0.075) / 5,
            "heldout/reward_chosen": sum(chosen) / 10,
            "heldout/reward_others": sum(others) / 10,
        },
        abs=1e-6,
    )


def test_P7_a_micro_batch_of_labels_holds_no_more_tokens_than_were_asked_for():
    """Labels of 4 candidates of 3 tokens; a label's stay together, so that it is one label at least."""
    tokens = torch.ones(6, 4, 3, dtype=torch.long)
    for size, labels in ((1, 1), (12, 1), (24, 2), (36, 3), (72, 6), (999, 6)):
        parts = train_reward.micro_batches(tokens, PAD, size)
        assert [len(rows) for rows in parts] == [labels] * (6 // labels)


def test_P7_the_spread_of_ratios_is_their_squared_distance_from_1():
    """Ratios 2, 1/2 and 1; of tokens in ppo.py, of completions in rloo.py."""
    logprobs, wanted = torch.tensor([2.0, 0.5, 1.0]).log(), [1.0, 0.25, 0.0]
    zeros, args = torch.zeros(1, 3), tiny.make_args()
    old = SimpleNamespace(logprobs=zeros, values=zeros)
    terms = ppo.loss_terms(logprobs[None], zeros, old, zeros, zeros, args)
    assert terms["val/ratio_spread"].flatten().tolist() == pytest.approx(wanted)
    old = SimpleNamespace(logprobs=zeros.T, advantages=zeros[0])
    terms = rloo.loss_terms(logprobs[:, None], old, tiny.make_args(script=rloo))
    assert terms["val/ratio_spread"].tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("labels", [12, 16])
def test_R4_a_run_may_use_every_label_that_there_is(labels, task, tmp_path, monkeypatch):
    """Of 16; it gets as far as the policy's samples."""

    class Reached(Exception):
        pass

    def reach(*args):
        raise Reached

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_reward, "policy_samples", reach)
    sizes = dict(num_labels=labels, batch_size=4, normalize_samples=4, rollout_batch_size=4)
    with pytest.raises(Reached):
        train_reward.main(train_reward.Args(task=task, **sizes))
