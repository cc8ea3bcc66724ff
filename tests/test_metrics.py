"""What is measured on held-out queries and labels, against numbers that are worked out by hand."""

import math

import numpy as np
import pytest
import tiny
import torch
from tiny import EOS, PAD

import sft
import train_reward
from machinery.labels import Labels


@tiny.both
@pytest.mark.parametrize("eos_task", [True, False])
def test_an_evaluation_counts_a_response_to_its_end_or_all_of_it(script, eos_task, accelerator):
    """Of three. The policy is surer by 1 at the first token, 2 at the second, …; the score is the
    number of tokens."""
    task = tiny.make_task(eos_task=eos_task, truncate_after=0, missing_eos_penalty=-3.0)
    held_out = torch.tensor([[7, EOS, 7, 7, 7], [7, 7, 7, 7, 7], [9, 9, 9, 9, 9]])
    training = tiny.make_responses(8, 5)
    policy, ref = tiny.make_policy(script=script), tiny.make_policy(seed=3, script=script)
    forward, samples = policy.forward, []
    gaps = torch.arange(1.0, 6)

    def surer(contexts, responses):
        logprobs, *others = forward(contexts, responses)
        given = ref(contexts, responses)[0].detach()
        return (logprobs * 0 + (given + gaps) * (responses != PAD), *others)

    class Run(tiny.FakeRun):
        def log_samples(self, step, texts, score, kl, total):
            samples.append((step, *texts, score, kl, total))

    policy.forward = surer
    sampled = lambda lm, contexts, *args: held_out if len(contexts) == 3 else training  # noqa: E731
    reward = lambda queries, responses: (responses != PAD).sum(dim=1).float()  # noqa: E731
    args = tiny.make_args(task, script, total_episodes=8, lr=0.0, kl_coef=0.5, kl_target=None)
    patches = dict(ref=ref, reward=reward, sample_in_batches=sampled, Run=Run())
    run = tiny.start(script, args, policy, **patches)

    kl, lengths = ([3, 15, 15], [2, 5, 5]) if eos_task else ([15] * 3, [5] * 3)
    expected = {
        "eval/scores": (2 - 3 - 3) / 3,
        "eval/scores_std": 5 * math.sqrt(2) / 3,
        "eval/kl": sum(kl) / 3,
        "eval/kl_coef": 0.5,
        "eval/rlhf_reward": (2 - 3 - 3) / 3 - 0.5 * sum(kl) / 3,
        "eval/response_length": sum(lengths) / 3,
        "eval/cut_length": 4.0,
        "eval/ended": 1 / 3,
    }
    first, last = run.metrics
    assert {k: v for k, v in first.items() if k.startswith("eval/")} == last
    assert {name: last[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    for step, (update, _, responses, *numbers) in enumerate(samples):  # before and after
        total = [score - 0.5 * x for score, x in zip([2, -3, -3], kl, strict=True)]
        for x, values in zip(numbers, ([2, -3, -3], kl, total), strict=True):
            assert x.tolist() == pytest.approx(values, abs=1e-4)
        assert update == step
        assert responses == [f"7 {EOS}", "7 7 7 7 7", "9 9 9 9 9"]


def test_heldout_labels_are_predicted_in_batches_and_averaged():
    """Five labels with two candidates, at logits whose probabilities are known."""
    sure = {0.9: True, 0.6: False, 0.7: True, 0.8: True, 0.55: False}
    logits = torch.tensor([[math.log(p), math.log(1 - p)] for p in sure])
    best = [0 if right else 1 for right in sure.values()]
    tokens = [[np.array([3 + 2 * i]), np.array([4 + 2 * i])] for i in range(5)]
    queries = [np.array([1, 2])] * 4 + [np.array([i]) for i in range(1, 6)]
    labels = Labels(queries, tokens[:4] + tokens, np.array(best[:4] + best))
    rewards = lambda model, x, *rest: logits.flatten()[x[:, -1] - 3]  # noqa: E731
    patches = dict(score_in_parts=rewards, normalize=lambda *a: (0.0, 1.0))
    args = train_reward.Args(task=tiny.make_task(), num_labels=4, batch_size=2)
    run = tiny.start(train_reward, args, tiny.make_reward(), labels=labels, **patches)
    chosen = [math.log(p if right else 1 - p) for p, right in sure.items()]
    others = [math.log(1 - p if right else p) for p, right in sure.items()]
    expected = {
        "heldout/accuracy": 0.6,
        "heldout/loss": -sum(chosen) / 5,
        "heldout/reward_chosen": sum(chosen) / 5,
        "heldout/reward_others": sum(others) / 5,
    }
    found = {name: run.metrics[-1][name] for name in expected}
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("column", ["completion", None])
def test_continuations_are_compared_with_the_tokens_that_follow_their_contexts(column):
    """Contexts of 4 tokens where the data has responses, and of a quarter of a block elsewhere."""
    tokens = torch.arange(10, 34).view(2, 12)
    task = tiny.make_task(response_length=3, response_column=column)
    inputs = tiny.make_lm(), tokens, 4, tiny.Tokenizer(), tiny.IDS
    rows = sft.sample_continuations(*inputs, sft.Args(task=task, block_size=8))
    texts = [" ".join(map(str, range(n, n + 12))).split() for n in (10, 22)]
    n = 4 if column else 2
    assert [row["text"].split() for row in rows] == [text[:n] for text in texts]
    assert [row["reference"].split() for row in rows] == [text[n : n + 3] for text in texts]
    assert all(len(row["continuation"].split()) == 3 for row in rows)
