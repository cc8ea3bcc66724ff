"""A test per implementation detail: G general, R reward model, P policy, A optimizer, X9 to X11.
L is in test_rloo.py, flags (X2, X8, X13, X14) are in test_flags.py, patches in test_diffs.py.
Functions that ppo.py and rloo.py share are tested once (test_twins.py)."""

import itertools
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import tiny
import torch
from tiny import (
    EOS,
    IDS,
    KINDS,
    PAD,
    WORDS,
    Recorder,
    assert_gradients,
    both,
    make_args,
    make_contexts,
    make_lm,
    make_policy,
    make_responses,
    make_reward,
    make_rollout,
    noisy_rollout,
    refuses,
    run_alone,
    write_model,
)
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from transformers import AutoTokenizer

import ppo
import rloo
import train_reward
import utils
from machinery import models
from machinery.queries import ends_word
from machinery.tokens import load_tokenizer
from train_reward import RewardConfig

# For expected values with four decimals, and for the same number by another way through the network
assert_near = partial(assert_close, atol=1e-4, rtol=0)
assert_same = partial(assert_close, atol=2e-5, rtol=0)
ENDS = [0, 2, 4, None, 3, 1, 4, None]  # of `eos_responses`: position of the first EOS in each
REAL = [5 if end is None else end + 1 for end in ENDS]  # tokens up to the end


def test_G2_pad_is_one_past_the_vocabulary_and_the_embedding_is_not_resized(task):
    tokenizer, ids = load_tokenizer(task, 5)
    assert ids.pad == WORDS >= len(tokenizer)
    lm = models.load_lm(task.base_model)
    assert lm.get_input_embeddings().num_embeddings == WORDS
    more = [f"<{i}>" for i in range(WORDS + 1 - len(tokenizer))]
    tokenizer.add_tokens(more)  # one without an embedding: scripts add a pad, Gemma 3's 1B has one
    tokenizer.save_pretrained(task.base_model)
    assert load_tokenizer(task, 5)[1].pad == WORDS + 1
    tokenizer.add_tokens("<another>")
    tokenizer.save_pretrained(task.base_model)
    refuses(lambda: load_tokenizer(task, 5), f"{WORDS + 2} tokens", "resize the embeddings")


def sample(lm, contexts, length, temperature):
    uniform = tiny.uniform(length, len(contexts))
    return tiny.sample(lm, contexts, uniform, lm.config.vocab_size, temperature)


def test_G4_a_response_has_its_exact_length_whatever_the_generation_config_says():
    """From the whole vocabulary, also after an EOS (0), and never a pad."""
    lm = make_lm(vocab=7)
    contexts = make_contexts([3, 1], 3, vocab=7).repeat(200, 1)
    found = sample(lm, contexts, 9, 1.5)
    assert found.shape == (400, 9)
    assert found.unique().tolist() == [0, 1, 2, 3, 4, 5, 6]
    after_eos = found[found[:, 3] == 0][:, 4:]
    assert after_eos.any()
    lm.generation_config.update(
        top_k=1,
        top_p=0.1,
        temperature=0.01,
        eos_token_id=[0, 1, 2],
        min_length=50,
        max_new_tokens=2,
        do_sample=False,
    )
    assert torch.equal(sample(lm, contexts, 9, 1.5), found)


def test_G4_P1_sampled_tokens_follow_softmax_of_logits_over_temperature():
    """Chi-square with 9 degrees of freedom is below 27.88 in 99.9% of all cases."""
    lm = make_lm(vocab=10)
    logits = lm(torch.tensor([[3, 8]])).logits[0, -1]
    contexts = torch.tensor([[10, 10, 3, 8]]).expand(20_000, -1)
    counts = torch.bincount(sample(lm, contexts, 1, 2.0)[:, 0], minlength=10)
    of_2 = 20_000 * (logits / 2).softmax(dim=0)
    of_1 = 20_000 * logits.softmax(dim=0)
    assert ((counts - of_2) ** 2 / of_2).sum() < 27.88
    assert ((counts - of_1) ** 2 / of_1).sum() > 278.8  # temperature 1 would show


def test_G4_a_token_of_probability_zero_is_never_sampled():
    never = float("-inf")
    logits = torch.tensor([[never, never, 0.0, never, 0.0, 1e-3, never, never]])
    border = 1 / (2 + math.exp(1e-3))  # between the first two possible tokens
    for uniform, possible in (
        (0.0, [2]),
        (border, [2, 4]),  # never the 3 between them
        (1 - 2**-53, [5]),  # the largest
    ):
        uniform = torch.tensor([uniform], dtype=torch.float64)
        assert utils.sample_token(logits, uniform).item() in possible


def test_G4_a_token_is_that_of_the_cdf_in_float64_and_does_not_depend_on_the_batch():
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(480, 5000, generator=generator)
    uniform = torch.rand(480, generator=generator, dtype=torch.float64)
    tokens = utils.sample_token(logits, uniform)
    cdf = logits.double().softmax(dim=-1).cumsum(dim=-1)
    expected = (cdf < uniform[:, None]).sum(dim=1)
    assert (tokens == expected).sum() >= 475
    for i in range(0, 480, 9):
        assert utils.sample_token(logits[i : i + 1], uniform[i : i + 1]) == tokens[i]


def test_G4_logits_that_are_nan_give_a_token():
    """So that the run ends with its own sentence, not with an index out of bounds on a GPU."""
    tokens = utils.sample_token(torch.full((2, 300), math.nan), torch.tensor([0.0, 0.5]).double())
    assert ((tokens >= 0) & (tokens < 300)).all()


@both
def test_X10_the_rollout_batch_size_never_changes_what_is_sampled(script):
    lm = make_lm()
    contexts = make_contexts([2, 8, 5, 1, 8, 3], 8)
    uniform = tiny.uniform(5, 6)

    def sampled(size):
        args = make_args(script=script, rollout_batch_size=size)
        return script.sample_in_batches(lm, contexts, uniform, IDS, args)

    expected = sampled(6)
    assert torch.equal(sampled(1), expected)
    assert torch.equal(sampled(4), expected)
    assert len(expected.unique(dim=0)) == 6


@pytest.mark.parametrize("name", ["ppo", "rloo", "train_reward"])
def test_G5_the_learning_rate_falls_linearly_over_a_number_of_updates_rounded_up(name, runs):
    """20 episodes in batches of 8 are 3 updates, as are 12 labels in batches of 4; lr 1e-3."""
    key = "lr" if name == "train_reward" else "ppo/lr"
    rates = [line[key] for line in runs.metrics[name] if key in line]
    assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])


@both
def test_G6_every_process_has_its_own_seed_for_queries_samples_and_minibatches(script, monkeypatch):
    """seed + 100003 * rank. Evaluations, before and after, take their parts of the same numbers."""
    rows = Mock(wraps=script.query_rows)
    numbers = Mock(wraps=script.random_numbers)
    orders = Mock(wraps=script.epoch_order)
    spies = dict(query_rows=rows, random_numbers=numbers, epoch_order=orders)
    args = make_args(script=script, total_episodes=8, num_ppo_epochs=1)
    monkeypatch.setattr("machinery.distributed.own_rows", lambda *_: slice(None))
    for rank in (0, 2):
        monkeypatch.setattr("accelerate.Accelerator.process_index", rank)
        tiny.start(script, args, **spies)
    assert [call.args[2] for call in rows.call_args_list] == [1, 200_007]
    seeds = [call.args[0] for call in numbers.call_args_list]
    assert seeds == [1, 1, 1, 1, 200_007, 1]
    seeds = [call.args[2].bit_generator.seed_seq.entropy for call in orders.call_args_list]
    assert seeds == [[1, 0, 2], [200_007, 0, 2]]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_G1_R1_a_reward_is_of_the_last_real_token_whatever_the_padding_and_the_batch(kind):
    """And there is one for each token, as there is a value (P1)."""
    model = make_reward(kind)
    rows = [[3, 4, 5], [7], [8, 9, 10, 11, 12], [7, 7]]
    of_tokens = []
    for row in rows:
        hidden = model.backbone(torch.tensor([row])).last_hidden_state[0]
        of_tokens.append(1.5 * model.head(hidden)[:, 0] - 0.5)  # by its gain and bias
    expected = torch.stack([rewards[-1] for rewards in of_tokens])
    at_left = utils.pad_left(rows, 9, PAD)
    at_right = pad_sequence([torch.tensor(x) for x in rows], batch_first=True, padding_value=PAD)
    for tokens in (at_left, at_right):
        assert_same(model.token_rewards(tokens)[tokens != PAD], torch.cat(of_tokens))
        assert_same(model(tokens), expected)
        assert_same(model(tokens[1:2]), expected[1:2])
        assert_same(model.score(tokens, 6), expected)
    assert_same(model(torch.tensor([[3, PAD, 4, 5, PAD]])), expected[:1])


def test_R2_the_reward_head_starts_at_one_over_the_root_of_the_width_plus_one():
    """1 / sqrt(3 + 1) at width 3, where the one shows; 2,000 such heads."""
    config = tiny.config()
    backbone = torch.nn.Identity()
    config.hidden_size = 3
    torch.manual_seed(0)
    heads = [train_reward.RewardModel(RewardConfig(config), backbone).head for _ in range(2000)]
    weights = torch.cat([head.weight for head in heads])
    assert weights.std().item() == pytest.approx(0.5, rel=0.05)
    assert abs(weights.mean()) < 0.02


def test_R2_a_new_reward_model_has_the_language_models_backbone_and_a_new_head(task):
    lm = models.load_lm(task.base_model).base_model
    model = train_reward.new_reward_model(task.base_model, WORDS)
    assert_close(model.backbone.state_dict(), lm.state_dict(), atol=0, rtol=0)
    assert model.head.weight.std().item() == pytest.approx(1 / math.sqrt(33), rel=0.4)  # 32 numbers
    assert model.head.bias.item() == 0
    assert model.gain.item() == 1
    assert model.bias.item() == 0


def test_R3_samples_of_one_reward_cannot_be_normalized():
    model = make_reward()
    torch.nn.init.zeros_(model.head.weight)
    responses = make_responses(8, 5)
    refuses(lambda: train_reward.normalize(model, responses, 36), "the same reward")


def test_R3_X9_the_policys_samples_end_in_eos_tasks_only(runs, accelerator, monkeypatch):
    """5 samples in batches of 4 are 8, twice, and different ones. EOS tasks end at EOS."""
    monkeypatch.chdir(runs.folder)
    args = runs.args["train_reward"]

    def samples(**changes):
        task = replace(args.task, truncate_after=0, query_length=16, **changes)
        tokenizer, ids = load_tokenizer(task, 5)
        return train_reward.sample_policy(replace(args, task=task), tokenizer, ids, accelerator)

    first, second = samples(truncate_token=".")
    queries, responses = first.split([16, 5], dim=1)
    assert first.shape == second.shape == (8, 21)
    assert (responses != WORDS).all()
    assert not torch.equal(queries, second[:, :16])
    assert not torch.equal(responses, second[:, 16:])
    end = responses[0, 1].item()  # a token that was sampled
    text = AutoTokenizer.from_pretrained("sft").decode(end)
    cut, _ = samples(truncate_token=text, eos_task=True)
    expected, _ = utils.truncate(responses, utils.TokenIds(WORDS, [end], [], []))
    assert (expected == WORDS).any()
    assert torch.equal(cut, torch.cat([queries, expected], dim=1))


@both
@pytest.mark.parametrize("kind", KINDS)
def test_G3_P1_log_probabilities_and_entropies_are_of_logits_over_temperature(kind, script):
    """As of each text alone. At exactly the response tokens, 0 at padding. Values, too (G1)."""
    policy = make_policy(kind, temperature=0.5, script=script).train()
    contexts = make_contexts([2, 6, 4], 6)
    responses = make_responses(3, 4)
    responses[1, 2:] = PAD
    ours = policy(contexts, responses)
    assert not ours[1].requires_grad
    for i, n in enumerate((4, 2, 4)):
        expected = run_alone(policy, contexts[i], responses[i])
        for mine, theirs in zip(ours, expected, strict=True):
            assert_near(mine[i, :n], theirs)
            assert not mine[i, n:].any()


@pytest.mark.hub
def test_P1_gpt2_gives_the_log_probabilities_of_the_blog():
    """[B]: query [23073] and response [11, 339, 561]."""
    policy = rloo.Policy(models.load_lm("gpt2").eval(), 50257, 1.0)
    logprobs, _ = policy(torch.tensor([[23073]]), torch.tensor([[11, 339, 561]]))
    assert_close(logprobs, torch.tensor([[-3.3213, -4.9980, -3.8690]]), atol=1e-3, rtol=0)


def test_P2_the_value_head_starts_at_zero():
    policy = ppo.PolicyAndValue(make_lm(), PAD, 0.7)
    assert not policy.value_head.weight.any() and not policy.value_head.bias.any()


def test_P3_an_end_closes_a_word_also_where_a_text_begins():
    found = ends_word(". a 1.5.", [(0, 1), (1, 3), (3, 6), (6, 7), (7, 8)], ".")
    assert found == [True, False, False, False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_P4_no_dropout_even_after_train(kind, tmp_path):
    """All models of a checkpoint that asks for dropout 0.5, which would show."""
    folder = str(write_model(tmp_path / "m", kind, dropout=0.5))
    reward = train_reward.new_reward_model(folder, WORDS)
    reward.config.backbone = tiny.config(kind, vocab=WORDS, dropout=0.5)
    reward.save_pretrained(tmp_path / "r")
    loaded = train_reward.RewardModel.from_pretrained(str(tmp_path / "r"))
    policy = ppo.PolicyAndValue(models.load_lm(folder), WORDS, 0.7)
    tokens = torch.arange(1, 9)[None]
    text = tokens[:, :3], tokens[:, 3:]
    for model, inputs in ((policy, text), (reward, [tokens]), (loaded, [tokens])):
        expected = model.eval()(*inputs)
        assert_close(model.train()(*inputs), expected, atol=0, rtol=0)


@both
def test_P7_every_epoch_but_the_first_is_a_fresh_permutation_of_the_batch(script, runs):
    """In rloo.py, a minibatch has all responses to a query, side by side."""
    orders = []
    for first, second in itertools.chain(*runs.epochs[script.__name__]):
        assert len(first) == len(second) == 4
        orders.append([*first.tolist(), *second.tolist()])
    unshuffled = list(range(8))
    assert orders[::2] == [unshuffled] * 3  # updates
    for order in orders:
        assert sorted(order) == unshuffled
    assert len(set(map(tuple, orders))) == 4
    if script is rloo:
        groups = torch.tensor(orders[1]).view(-1, 2) // 2  # rloo_k = 2
        assert (groups == groups[:, :1]).all()


def test_P7_micro_batches_have_about_as_many_tokens_as_asked_for():
    def split(lengths, num_tokens):
        lengths = torch.tensor(lengths)
        count = utils.count_micro_batches(lengths, num_tokens)
        return [lengths[part].tolist() for part in utils.micro_batches(lengths, count)]

    assert split([5, 1, 4, 2, 3], 8) == [[5, 1], [4, 2, 3]]  # 7.5 tokens each
    assert split([1, 1, 1, 97], 25) == [[1], [1], [1], [97]]
    assert split([5] * 6, 10) == [[5, 5], [5, 5], [5, 5]]


def test_P9_whitening_without_moving_the_mean_is_the_blogs_example():
    """And the epsilon is inside the root: 0 and 2e-4 are divided by sqrt(2e-8), not sqrt(1e-8)."""
    x = torch.tensor([[1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0]])
    kept = torch.tensor([[0.0508, 0.4381, 0.8254, 1.2127, 1.6000, 1.9873, 2.3746, 2.7619, 3.1492]])
    assert_near(ppo.whiten(x, x > 0, shift_mean=False), kept)
    assert_near(ppo.whiten(x, x > 0), kept - 1.6)
    x = torch.tensor([[0.0, 2e-4]])
    assert_near(ppo.whiten(x, x >= 0), torch.tensor([[-0.7071, 0.7071]]))


def naive_gae(rewards, values, gamma, lam):
    """A_t = sum of (gamma lambda)^l delta_{t+l}, written out; the value after the end is 0."""
    next_values = np.append(values[1:], 0)
    deltas = rewards + gamma * next_values - values
    advantages = np.zeros(len(rewards))
    for t in range(len(rewards)):
        for k in range(t, len(rewards)):
            advantages[t] += (gamma * lam) ** (k - t) * deltas[k]
    return advantages


@both
def test_P11_beta_moves_once_an_update_after_training_from_the_logged_kl(script, runs):
    """Batch 8, horizon 10000; the KL is far below its target: a factor of 1 - 0.2 * 0.0008."""
    lines = runs.metrics[script.__name__]
    assert all(line["objective/kl"] < 4.8 for line in lines)
    expected = [0.15, 0.15 * 0.99984, 0.15 * 0.99984**2]
    assert [line["objective/kl_coef"] for line in lines] == pytest.approx(expected)


@both
def test_X9_logits_are_computed_at_real_response_tokens_only(script):
    policy = make_policy(script=script)
    shapes = []
    policy.lm.lm_head.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    responses = torch.full((3, 40), PAD)
    responses[0, :4] = 7
    responses[1, :1] = 7
    responses[2, :2] = 7
    policy(make_contexts([8, 3, 5], 8), responses)
    assert shapes == [(7, 32)]


def eos_responses():
    """[8, 5]: random tokens, the first EOS at `ENDS`, and others after it."""
    generator = torch.Generator().manual_seed(5)
    responses = torch.randint(6, 60, (8, 5), generator=generator)
    tails = torch.randint(1, 60, (8, 5), generator=generator)
    for i, end in enumerate(ENDS):
        if end is not None:
            responses[i, end:] = tails[i, end:]
            responses[i, end] = EOS
    return responses


def eos_run(script):
    """`main` for one minibatch in uneven micro-batches; scores are 1, 2, 3, ...: rollout, run."""
    sizes = dict(total_episodes=8, num_ppo_epochs=1, num_minibatches=1, micro_batch_tokens=36)
    args = make_args(script=script, eos_task=True, truncate_after=0, **sizes)
    if script is ppo:
        args = replace(args, gamma=0.9, lam=0.8)
    policy = make_policy(script=script)
    rollouts = []
    run = tiny.start(
        script,
        args,
        policy,
        responses=[eos_responses()],
        reward=lambda queries, responses: torch.arange(1.0, 1 + len(queries)),
        AdamTF=Recorder,
        Rollout=noisy_rollout(script, rollouts),
    )
    return run, rollouts[1], policy  # the first rollout is the evaluation's


@both
def test_X9_L2_the_mask_ends_with_eos_the_score_sits_there_minus_beta_times_the_kl(script):
    """Of each token in ppo.py, summed in rloo.py. A missing EOS costs the penalty."""
    args = make_args(script=script, eos_task=True, truncate_after=0)
    policy = make_policy(script=script)
    ref = make_policy(seed=3, script=script)
    reward = lambda queries, responses: torch.arange(1.0, 9.0)  # noqa: E731
    inputs = dict(ref=ref, reward=reward, responses=eos_responses())
    rollout = make_rollout(policy, args, script, **inputs)
    assert rollout.scores.tolist() == [1, 2, 3, -1, 5, 6, 7, -1]
    assert rollout.finished.tolist() == [end is not None for end in ENDS]
    for i, n in enumerate(REAL):
        assert rollout.mask[i].tolist() == [True] * n + [False] * (5 - n)
        assert (rollout.responses[i, n:] == PAD).all()
        given = rollout.contexts[i], rollout.responses[i]
        kl = run_alone(policy, *given)[0] - run_alone(ref, *given)[0]
        expected = -0.15 * kl
        expected[-1] += rollout.scores[i]
        assert not rollout.logprobs[i, n:].any()
        assert not rollout.kl[i, n:].any()
        if script is rloo:
            assert_near(rollout.rewards[i], expected.sum())
        else:
            assert_near(rollout.rewards[i, :n], expected)
            assert not rollout.rewards[i, n:].any()
            assert not rollout.values[i, n:].any()


def test_X9_P6_P8_P10_gradients_and_metrics_are_those_of_a_slow_loop_over_ragged_rows():
    """By gamma 0.9, lambda 0.8, clipping at 0.2, vf_coef 0.1: a mean of means would differ."""
    run, rollout, policy = eos_run(ppo)
    num_tokens = sum(REAL)

    # Of all real tokens, one response after the other:
    def flat(x):
        return x[rollout.mask].double().numpy()

    rewards = flat(rollout.rewards)
    old_values = flat(rollout.values)
    old_logprobs = flat(rollout.logprobs)
    mean = rewards.mean()
    scaled = (rewards - mean) / math.sqrt(rewards.var() + 1e-8) + mean
    advantages = np.zeros(num_tokens)
    logprobs = []
    entropies = []
    values = []
    begin = 0
    for i, n in enumerate(REAL):
        part = slice(begin, begin + n)
        advantages[part] = naive_gae(scaled[part], old_values[part], 0.9, 0.8)
        begin += n
        of_tokens = run_alone(policy, rollout.contexts[i], rollout.responses[i])
        logprobs += of_tokens[0]
        entropies += of_tokens[1]
        values += of_tokens[2]
    returns = advantages + old_values
    advantages = (advantages - advantages.mean()) / math.sqrt(advantages.var() + 1e-8)

    pg = []
    vf = []
    ratios = []
    branches = set()
    pg_clipped = 0
    vf_clipped = 0
    for i, advantage in enumerate(advantages):
        ratio = torch.exp(logprobs[i] - old_logprobs[i])
        loss = -advantage * ratio
        clipped = -advantage * ratio.clamp(0.8, 1.2)
        pg.append(torch.max(loss, clipped))
        pg_clipped += (clipped > loss).item()
        branches.add((ratio.item() < 0.8, ratio.item() > 1.2, advantage > 0))
        value = values[i].clamp(old_values[i] - 0.2, old_values[i] + 0.2)
        error = (values[i] - returns[i]) ** 2
        clipped = (value - returns[i]) ** 2
        vf.append(0.5 * torch.max(error, clipped))
        vf_clipped += (clipped > error).item()
        ratios.append(ratio.item())
    assert len(branches) == 6
    assert 2 < vf_clipped < 20
    pg_loss = sum(pg) / num_tokens
    vf_loss = sum(vf) / num_tokens
    assert_gradients(run, policy, pg_loss + 0.1 * vf_loss)

    ratios = np.array(ratios)
    scores = [1, 2, 3, -1, 5, 6, 7, -1]
    kl = rollout.kl.sum().item() / 8
    expected = {
        "ppo/loss/policy_avg": pg_loss.item(),
        "ppo/loss/value_avg": vf_loss.item(),
        "ppo/policy/entropy_avg": (sum(entropies) / num_tokens).item(),
        "ppo/policy/approxkl_avg": np.mean(np.log(ratios) ** 2) / 2,
        "ppo/policy/clipfrac_avg": pg_clipped / num_tokens,
        "ppo/val/clipfrac": vf_clipped / num_tokens,
        "ppo/val/ratio": ratios.mean(),
        "ppo/val/ratio_var": np.mean((ratios - 1) ** 2),
        "ppo/returns/mean": returns.mean(),
        "ppo/returns/var": returns.var(),
        "ppo/val/mean": old_values.mean(),
        "ppo/val/var": old_values.var(),
        "objective/kl": kl,
        "objective/entropy": -old_logprobs.sum() / 8,
        "objective/ended": 6 / 8,
        "objective/scores": np.mean(scores),
        "objective/scores_std": np.std(scores),
        "objective/rlhf_reward": np.mean(scores) - 0.15 * kl,
        "objective/response_length": num_tokens / 8,
    }
    found = {name: run.metrics[0][name] for name in expected}
    assert found == pytest.approx(expected, abs=2e-4)


def test_P5_a_response_is_cut_after_the_first_of_several_ends():
    """Of 1 and 3, at or after position 2."""
    ids = utils.TokenIds(PAD, [1, 3], [], [], truncate_after=2)

    def cut(*response):
        tokens, ended = utils.truncate(torch.tensor([response]), ids)
        return tokens[0].tolist(), ended.item()

    assert cut(1, 3, 0, 3, 1, 5) == ([1, 3, 0, 3, PAD, PAD], True)
    assert cut(0, 0, 1, 2, 2, 2) == ([0, 0, 1, PAD, PAD, PAD], True)
    assert cut(3, 1, 0, 0, 0, 0) == ([3, 1, 0, 0, 0, 0], False)
    assert cut(5, 5, 5, 5, 5, 3) == ([5, 5, 5, 5, 5, 3], True)


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("log_ratio", [0.1, 3.0, 89.0, 120.0])
@both
def test_a_probability_ratio_of_any_size_has_a_finite_gradient(script, log_ratio, advantage):
    """exp(89) is inf in fp32, whose gradient is NaN where the clip gives 0, or at advantage 0."""
    zero = torch.zeros(1, 1)
    old = SimpleNamespace(logprobs=zero, values=zero, mask=zero == 0)
    logprobs = torch.full((1, 1), log_ratio, requires_grad=True)
    advantages = torch.full((1, 1), advantage)
    args = make_args(script=script)
    if script is ppo:
        loss, _, stats = ppo.ppo_losses(logprobs, zero, old, advantages, zero, torch.ones(()), args)
    else:
        loss, stats = rloo.rloo_loss(logprobs, old, advantages[0], 1, args)
    loss.backward()
    for x in (loss, *stats.values()):
        assert torch.as_tensor(x).isfinite().all()
    gradient = logprobs.grad.item()
    assert math.isfinite(gradient)
    if advantage == 0 or advantage > 0 and log_ratio > math.log(1.2):  # clipped
        assert gradient == 0
    elif log_ratio < 40:
        assert gradient == pytest.approx(-advantage * math.exp(log_ratio), rel=1e-5)
