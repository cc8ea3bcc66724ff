"""RLOO (L1–L6): worked examples of its authors' texts, slow loops, and the exactness of the first ratio."""

import inspect
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import ppo
import rloo
import tasks
import utils
from benchmarks.bf16_ratio import replay

PAD = 50


def tiny_lm() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=PAD, n_positions=32, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3)
    return GPT2LMHeadModel(utils.without_dropout(config))


def args_for(script, **changes):
    task = replace(tasks.BOOKS, query_length=8, response_length=6, truncate_after=2)
    settings = dict(
        batch_size=16, num_minibatches=2, num_ppo_epochs=2, micro_batch_tokens=36, rollout_batch_size=5, lr=1e-3
    )
    return script.Args(task=replace(task, **changes), **settings)


both = pytest.mark.parametrize("script", [ppo, rloo], ids=["ppo", "rloo"])


def make_policy(script) -> torch.nn.Module:
    """Of the same language model, whatever the script."""
    return (rloo.Policy if script is rloo else ppo.PolicyAndValue)(tiny_lm(), PAD, 0.7)


def update(script, autocast: bool = False, **task):
    """One update of a tiny policy on rows of uneven length: the rollout, the means of each step, and the policy."""
    accelerator, args, policy = Accelerator(cpu=True), args_for(script, **task), make_policy(script)
    rng, copies = np.random.default_rng(0), args.rloo_k if script is rloo else 1
    rows = [rng.integers(0, PAD, n).tolist() for n in rng.integers(2, 9, 16 // copies)]
    queries = utils.pad_rows(rows * copies, 8, PAD)
    models = script.Models(
        policy, make_policy(script), lambda q, r: (r == 7).sum(dim=1).float(), utils.Ids(PAD, 49, [], [])
    )
    epochs, optimizer = [rng.permutation(16) for _ in range(2)], script.AdamTF(policy.parameters(), lr=1e-3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        responses = script.sample_all(
            policy.lm, queries, args.task, models.ids, utils.generator(1, 0, queries.device), 5
        )
        rollout, _ = script.make_rollout(models, queries, responses, epochs[0], 0.1, args)
        steps = tiny.update(script, policy, optimizer, rollout, epochs, args, accelerator)
    return rollout, script.means(steps), policy


# ----------------------------------------------------------------------------------------------------------------- L3


def test_L3_worked_example_three_prompts_four_completions():
    rewards = torch.tensor([1.0, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10])  # laid out [k, P]
    advantages = rloo.leave_one_out_advantages(rewards, k=4).view(4, 3)
    torch.testing.assert_close(advantages[0, 0].item(), 1 - (2 + 5 + 8) / 3)
    torch.testing.assert_close(advantages[1, 0].item(), 2 - (1 + 5 + 8) / 3)
    torch.testing.assert_close(advantages[2, 1].item(), 6 - (3 + 2 + 9) / 3)
    torch.testing.assert_close(advantages[3, 2].item(), 10 - (3 + 4 + 7) / 3)


@pytest.mark.parametrize("k", [2, 3, 4, 7])
def test_L3_leave_one_out_equals_the_slow_loop(k):
    rewards = torch.randn(k, 5, generator=torch.Generator().manual_seed(k))
    slow = torch.empty(k, 5)
    for j in range(k):
        for p in range(5):
            others = [rewards[i, p].item() for i in range(k) if i != j]
            slow[j, p] = rewards[j, p].item() - sum(others) / len(others)
    torch.testing.assert_close(rloo.leave_one_out_advantages(rewards.flatten(), k).view(k, 5), slow)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_L3_identical_rewards_have_advantages_of_exactly_zero(k):
    rewards = torch.tensor([0.1, -1.7, 1 / 3]).repeat(k)
    assert (rloo.leave_one_out_advantages(rewards, k) == 0).all()


def test_L3_the_completions_of_a_prompt_are_each_others_baseline():
    rollout, _, _ = update(rloo)
    for i in range(16):
        same = [j for j in range(16) if torch.equal(rollout.contexts[i], rollout.contexts[j])]
        assert len(same) == 4
        others = sum(rollout.rewards[j].item() for j in same if j != i) / 3
        assert rollout.advantages[i].item() == pytest.approx(rollout.rewards[i].item() - others, abs=1e-5)


@pytest.mark.parametrize("k", [1, 0])
def test_L3_one_completion_has_no_baseline_and_is_refused(k):
    with pytest.raises(utils.InputError, match=f"rloo_k={k}"):
        rloo.check(replace(args_for(rloo), rloo_k=k), processes=1)


def test_L3_batches_hold_whole_groups_on_every_process():
    args = replace(args_for(rloo), batch_size=24, rloo_k=4, num_minibatches=3)
    with pytest.raises(utils.InputError, match="use 48"):
        rloo.check(args, processes=4)
    rloo.check(args, processes=2)


# ------------------------------------------------------------------------------------------------------------- L1, L2


def test_L1_L2_token_versus_sequence_example():
    """Log-probabilities −12.3, −8.3, −2.3, reference −11.3, −8.4, −2.0, score 1 → −0.2, with the KL added as there."""
    logprob, ref = torch.tensor([[-12.3, -8.3, -2.3, 0.0]]), torch.tensor([[-11.3, -8.4, -2.0, 0.0]])
    reward = rloo.kl_penalised_rewards(logprob, ref, torch.tensor([1.0]), kl_coef=-1.0)
    torch.testing.assert_close(reward, torch.tensor([-0.2]), atol=1e-5, rtol=0)


def test_L2_a_completion_surer_than_the_references_is_penalised():
    reward = rloo.kl_penalised_rewards(torch.tensor([[-3.0]]), torch.tensor([[-5.0]]), torch.tensor([1.0]), kl_coef=0.1)
    torch.testing.assert_close(reward, torch.tensor([0.8]))


# ----------------------------------------------------------------------------------------------------------------- L4


def rollout_of(logprobs: torch.Tensor, advantages: torch.Tensor) -> rloo.Rollout:
    empty = torch.zeros(len(logprobs))
    return rloo.Rollout(np.zeros(len(logprobs)), empty, empty, empty, logprobs, empty, empty, empty, advantages)


def test_L4_the_gradient_at_ratio_1_is_reinforces():
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0]], requires_grad=True)
    logprob = logits.log_softmax(dim=-1)[:, 1:2]
    loss = rloo.loss_terms(logprob, rollout_of(logprob.detach(), torch.ones(1)), args_for(rloo))["loss/policy_avg"]
    (-loss.sum()).backward()  # the example maximises
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.1749, 0.5246, -0.1749, -0.1749]]), atol=1e-4, rtol=0)


def test_L4_the_ratio_of_the_whole_completion_is_clipped():
    old, new = torch.zeros(4, 2), torch.log(torch.tensor([[1.5, 1.0], [0.55, 2.0], [0.5, 1.0], [1.5, 1.0]]))
    terms = rloo.loss_terms(new, rollout_of(old, torch.tensor([2.0, 2.0, -1.0, -1.0])), args_for(rloo))
    torch.testing.assert_close(terms["loss/policy_avg"], torch.tensor([-2.4, -2.2, 0.8, 1.5]))  # the larger loss
    assert terms["policy/clipfrac_avg"].tolist() == [1, 0, 1, 0]


def test_L5_there_is_no_value_network():
    _, _, policy = update(rloo)
    assert {name.split(".")[0] for name, _ in policy.named_parameters()} == {"lm"}


@both
def test_X10_the_rollout_batch_size_never_changes_what_is_scored(script):
    args = args_for(script)
    rows = [list(range(1, n)) for n in (3, 9, 5, 4, 7, 9, 2, 6, 8, 3, 5, 9, 4, 4, 2, 7)]
    queries = utils.pad_rows(rows, 8, PAD)
    policy = make_policy(script)
    responses = torch.randint(0, PAD, (16, 6), generator=torch.Generator().manual_seed(0))
    reward = utils.RewardModel(utils.RewardConfig(tiny_lm().config, PAD)).eval()
    rollouts = []
    for size in (30, 4096):
        score = lambda q, r, size=size: reward.score(q, r, size=size)  # noqa: E731
        models = script.Models(policy, make_policy(script), score, utils.Ids(PAD, 49, [], []))
        sized = replace(args, micro_batch_tokens=size)
        rollouts.append(script.make_rollout(models, queries, responses, np.arange(16), 0.1, sized)[0])
    for name in ("ref_logprobs", "scores", "rewards"):
        torch.testing.assert_close(getattr(rollouts[0], name), getattr(rollouts[1], name), atol=1e-5, rtol=0)


@both
def test_X10_the_reward_model_reads_micro_batch_tokens_at_a_time(script, tmp_path):
    args = replace(args_for(script), reward_model=tiny.write_reward(tmp_path, pad_id=PAD), micro_batch_tokens=70)
    reward, sizes = utils.load_reward(args, AutoTokenizer.from_pretrained(tmp_path), PAD, torch.device("cpu")), []
    forward = utils.RewardModel.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils.RewardModel, "forward", lambda self, x: sizes.append(len(x)) or forward(self, x))
        reward(torch.randint(0, PAD, (16, 8)), torch.randint(0, PAD, (16, 6)))
    assert sizes == [4, 4, 4, 4]  # 16 rows of 14 tokens: as few parts as hold 224 tokens, equally full


@both
def test_X10_every_field_of_the_rollout_states_its_shape(script):
    source = inspect.getsource(script.Rollout)
    for name in script.Rollout._fields:
        assert re.search(rf"^    {name}: [^#]+  # \[B(, [CR2])?\] ?", source, flags=re.M), name


@pytest.mark.parametrize("huge", [float("nan"), 1e30])
def test_X9_what_the_forward_gives_behind_the_end_of_a_completion_changes_nothing(huge, monkeypatch):
    """Through the whole update: rollout, statistics and the weights after four steps."""
    eos = {"eos_task": True, "truncate_after": 0}
    rollout, stats, policy = update(rloo, **eos)
    assert not rollout.mask.all()
    forward = rloo.Policy.forward

    def poisoned(self, contexts, responses):
        return tuple(x + torch.where(responses == PAD, huge, 0.0) for x in forward(self, contexts, responses))

    monkeypatch.setattr(rloo.Policy, "forward", poisoned)
    rollout_too, stats_too, policy_too = update(rloo, **eos)
    assert torch.equal(rollout.advantages, rollout_too.advantages)
    assert all(torch.equal(stats[name], stats_too[name]) and stats[name].isfinite().all() for name in stats)
    assert all(map(torch.equal, policy.parameters(), policy_too.parameters()))


def test_X9_L1_L4_loss_and_metrics_are_those_of_ragged_rows_in_a_slow_loop(accelerator):
    """A policy that has moved away from the rollout's, one unpadded completion at a time."""
    eos = {"eos_task": True, "truncate_after": 0}
    rollout, _, policy = update(rloo, **eos)
    args, losses, ratios, kls, entropies = args_for(rloo, **eos), [], [], [], []
    for i in range(16):
        context = rollout.contexts[i][rollout.contexts[i] != PAD].tolist()
        response = rollout.responses[i][: rollout.mask[i].sum()].tolist()
        with torch.no_grad():
            logits = policy.lm(torch.tensor([context + response])).logits[0, len(context) - 1 : -1].double() / 0.7
        logprobs = logits.log_softmax(dim=1)
        whole = sum(logprobs[t, token].item() for t, token in enumerate(response))
        ratio, advantage = math.exp(whole - rollout.logprobs[i].sum().item()), rollout.advantages[i].item()
        losses.append(max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2)))
        ratios.append(ratio)
        kls.append((rollout.logprobs[i] - rollout.ref_logprobs[i]).sum().item())
        entropies += [-(row.exp() * row).sum().item() for row in logprobs]
    assert len(entropies) == rollout.mask.sum() < 16 * 6 and max(ratios) > 1.2
    sums, _ = tiny.step_gradients(rloo, policy, rollout, args, accelerator)
    score = rloo.Score(rollout.scores, rollout.responses, rollout.mask[:, -1])
    metrics = {name: float(value) for name, value in rloo.summarise(rollout, score, [sums], PAD, args).items()}
    assert metrics["ppo/loss/policy_avg"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert metrics["ppo/val/ratio"] == pytest.approx(np.mean(ratios), rel=1e-4)
    assert metrics["ppo/policy/entropy_avg"] == pytest.approx(np.mean(entropies), abs=1e-4)
    assert metrics["objective/kl"] == pytest.approx(np.mean(kls), abs=1e-4)
    rewards = rollout.scores.double().numpy() - 0.1 * np.array(kls)
    assert metrics["objective/rlhf_reward"] == pytest.approx(rewards.mean(), abs=1e-4)
    assert metrics["objective/scores_std"] == pytest.approx(rollout.scores.double().numpy().std(), abs=1e-4)
    assert metrics["objective/advantage_std"] == pytest.approx(rollout.advantages.double().numpy().std(), abs=1e-4)
    assert metrics["objective/response_length"] == pytest.approx(len(entropies) / 16)


# ----------------------------------------------------------------------------------------------------------------- L6


@pytest.mark.parametrize("task", [{}, {"eos_task": True, "truncate_after": 0}], ids=["fixed", "eos"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@both
def test_L6_the_first_minibatch_has_ratio_1_and_nothing_clipped(script, autocast, task):
    _, stats, _ = update(script, autocast, **task)
    ratio, clipped, moved = (
        stats[name].tolist() for name in ("val/ratio", "policy/clipfrac_avg", "policy/approxkl_avg")
    )
    assert abs(ratio[0] - 1) < 1e-6 and clipped[0] == 0 and moved[0] == 0  # the mean's own rounding, then exact zeros
    assert moved[-1] > 0


# [R], "The Dark Side": bf16 log-probabilities of two sequences from generation and from the training forward
GENERATION = [
    [-0.1426, -0.1904, -3.5938, -3.4688, -0.0618, -2.3906, -2.0781, -0.4375, -0.1562, 0.0],
    [-0.1426, -0.1904, -5.2812, -0.1641, -8.5625, -4.2812, -1.0078, -0.8398, -1.5781, -2.5781],
]
FORWARD = [
    [-0.1445, -0.1670, -3.5938, -3.5156, -0.0554, -2.2969, -1.9688, -0.5273, -0.1953],
    [-0.1445, -0.1670, -5.2812, -0.1533, -8.5625, -4.3125, -1.0000, -0.7852, -1.6641],
]


def test_L6_worked_example_of_sequence_ratios_under_bf16():
    """[R] prints the ratios [1.0625, 12.1875] before any step: of bf16 sums, and with a tenth token (−2.5781) that only
    generation counts. Of the tokens that both have, summed in fp32 as here, they are 1.0568 and 0.9776, not clipped."""
    printed = [torch.tensor(x, dtype=torch.bfloat16).sum(dim=1) for x in (FORWARD, GENERATION)]
    assert (printed[0] - printed[1]).exp().tolist() == [1.0625, 12.1875]
    assert (printed[0] - printed[1]).tolist() == [0.0625, 2.5] and math.exp(2.5) == pytest.approx(12.1825, abs=1e-4)
    new, old = torch.tensor(FORWARD), torch.tensor(GENERATION)[:, :9]
    terms = rloo.loss_terms(new, rollout_of(old, torch.ones(2)), args_for(rloo))
    torch.testing.assert_close(terms["val/ratio"], torch.tensor([1.0568, 0.9776]), atol=2e-4, rtol=0)
    assert terms["policy/clipfrac_avg"].tolist() == [0, 0]


def test_L6_worked_example_a_ratio_of_12_nulls_the_gradient_of_the_whole_completion():
    """[R]: "the gradient for the entire second sequence is nulled". e^2.5 is 12.1825, which bf16 rounds to 12.1875."""
    old, advantages = torch.zeros(2, 1), torch.ones(2)
    new = torch.tensor([[0.0625], [2.5]], requires_grad=True)
    terms = rloo.loss_terms(new, rollout_of(old, advantages), args_for(rloo))
    terms["loss/policy_avg"].sum().backward()
    torch.testing.assert_close(new.grad, torch.tensor([[-1.0645], [0.0]]), atol=1e-4, rtol=0)
    assert terms["policy/clipfrac_avg"].tolist() == [0, 1]
    torch.testing.assert_close(terms["val/ratio"].detach(), torch.tensor([1.0645, 12.1825]), atol=1e-4, rtol=0)
    assert terms["val/ratio"].bfloat16().tolist() == [1.0625, 12.1875]


def test_L6_sampling_time_logprobs_would_move_ratios_in_bf16():
    """The dark side of bf16: what the rule avoids. Equal in fp32, off by percents in bf16, before any step."""
    policy, spread = rloo.Policy(lm := tiny_lm(), PAD, 0.7), {}
    rows = torch.randint(0, PAD, (32, 20), generator=torch.Generator().manual_seed(3))
    contexts, responses = rows[:, :8], rows[:, 8:]
    for autocast in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            trained = rloo.logprobs_of(
                policy, contexts, responses, np.stack([np.full(32, 20), np.arange(32)], axis=1), size=4096
            )
            ratio = (trained - replay(lm, contexts, responses, 0.7, PAD)).sum(dim=1).exp()
        spread[autocast] = ratio.std().item()
    assert spread[False] < 1e-4
    assert spread[True] > 100 * spread[False] and spread[True] > 1e-3
