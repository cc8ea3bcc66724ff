"""What the later systems change, each by a flag that is off by default.

Expected values come from closed forms, from arithmetic by hand, or from a slow loop over unpadded rows.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from accelerate.state import AcceleratorState
from conftest import read_metrics
from tiny import EOS

import ppo
import rloo
import sft
import tasks
import train_reward
import utils

both = pytest.mark.parametrize("script", [ppo, rloo], ids=["ppo", "rloo"])
every = pytest.mark.parametrize("script", [ppo, rloo, train_reward, sft], ids=lambda script: script.__name__)
optimised = pytest.mark.parametrize("script", [ppo, rloo, train_reward], ids=lambda script: script.__name__)


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    """script and flags → three updates of its `main` on tiny files, in 2 epochs of 2 minibatches: metrics, rollouts and,
    for each update, what its steps left: learning rates, weights, norm of the gradient that Adam was given."""
    monkeypatch.chdir(tmp_path)
    task = tiny.write_task(tmp_path / "task")
    reward = tiny.write_reward(tmp_path / "reward")

    def run_of(script, task_flags=(), **flags):
        seen = SimpleNamespace(rollouts=[], steps=[], optimizer=None)
        make_rollout, train_step, step = script.make_rollout, script.train_step, script.AdamTF.step

        def spy_rollout(*args):
            rollout, score = make_rollout(*args)
            seen.rollouts.append(rollout)
            seen.steps.append([])
            return rollout, score

        def spy_train_step(policy, optimizer, *rest):
            made, seen.optimizer = train_step(policy, optimizer, *rest), optimizer
            weights = {name: x.detach().clone() for name, x in policy.named_parameters()}
            lrs = [group["lr"] for group in optimizer.param_groups]
            seen.steps[-1].append(SimpleNamespace(lrs=lrs, weights=weights, norm=seen.norm))
            return made

        def spy_step(self, closure=None):
            squares = (x.grad.square().sum() for group in self.param_groups for x in group["params"])
            seen.norm = math.sqrt(sum(squares))
            return step(self, closure)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(script, "make_rollout", spy_rollout)
            patch.setattr(script, "train_step", spy_train_step)
            patch.setattr(script.AdamTF, "step", spy_step)
            seen.name = f"run{len(list(tmp_path.glob('runs/*')))}"
            names = dict(run_name=seen.name, output_dir=f"{seen.name}_out", reward_model=reward)
            seen.task = replace(task, **dict(truncate_token=None) | dict(task_flags))
            script.main(tiny.make_args(seen.task, script, **names | flags))
        seen.metrics = read_metrics(seen.name)
        return seen

    return run_of


def moved(before, after):
    """The names of the weights that are no longer the same."""
    return {name for name, x in before.items() if not torch.equal(x, after[name])}


# ------------------------------------------------------------------------------------------------------ X2, X3: reward


@both
def test_X2_a_score_is_clipped_before_it_becomes_a_reward(script):
    policy = tiny.make_policy(script=script)
    scores = torch.tensor([-9.0, 0.5, 2.5, 1e4])
    models = tiny.make_models(policy, lambda queries, cut: scores, policy, script, truncate=None)  # no KL

    def rollout(**flags):
        args = tiny.make_args(script=script, num_minibatches=1, **flags)
        responses = tiny.make_responses(4, 5)
        return script.make_rollout(models, tiny.make_contexts([3] * 4, 8), responses, np.arange(4), 0.15, args)

    for flags, expected in (({"clip_score": 2.0}, [-2.0, 0.5, 2.0, 2.0]), ({}, scores.tolist())):
        made, score = rollout(**flags)
        assert made.scores.tolist() == score.scores.tolist() == expected
        rewards = made.rewards.sum(dim=1) if script is ppo else made.rewards
        torch.testing.assert_close(rewards, torch.tensor(expected), atol=1e-4, rtol=0)


def test_X2_the_penalty_is_clipped_too():
    policy = tiny.make_policy()
    models = tiny.make_models(policy, lambda queries, cut: torch.zeros(4))
    args = tiny.make_args(tiny.make_task(missing_eos_penalty=-7.0), num_minibatches=1, clip_score=5.0)
    responses = torch.full((4, 5), EOS + 1)  # no truncate token
    rollout, _ = ppo.make_rollout(models, tiny.make_contexts([3] * 4, 8), responses, np.arange(4), 0.15, args)
    assert rollout.scores.tolist() == [-5.0] * 4


def estimates(script, estimator, mu, points=2_000_000):
    """Mean and variance of an estimator of KL(N(0, 1)‖N(μ, 1)) = μ²/2, over the quantiles of N(0, 1) instead of draws."""
    x = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(points, dtype=torch.float64) + 0.5) / points)
    log_ratio = ((x - mu) ** 2 - x**2) / 2  # log of one density over the other
    terms = script.kl_terms(log_ratio, estimator)
    return terms.mean().item(), terms.var().item()


@both
@pytest.mark.parametrize("mu", [0.1, 1.0])
def test_X3_mean_and_variance_of_each_estimator_are_the_closed_form_of_two_gaussians(script, mu):
    """log π/π_ref is N(μ²/2, μ²) under π; k3 with the other sign would have the mean exp(μ²) − 1 − μ²/2."""
    kl, square = mu**2 / 2, mu**2
    closed = {
        "k1": (kl, square),
        "k2": (kl + square**2 / 8, square**2 / 2 + square**3 / 4),
        "k3": (kl, math.exp(square) - 1 - square),
    }
    for estimator, expected in closed.items():
        assert estimates(script, estimator, mu) == pytest.approx(expected, rel=2e-3)


@both
def test_X3_is_the_penalty_of_a_token(script):
    """Two tokens with log π − log π_ref = 1 and −2: k2 is 0.5 + 2, k3 is e⁻¹ − 1 + 1 and e² − 1 − 2."""
    logprobs, ref, mask = torch.tensor([[-1.0, -4.0]]), torch.tensor([[-2.0, -2.0]]), torch.ones(1, 2).bool()
    for estimator, terms in {"k1": (1, -2), "k2": (0.5, 2), "k3": (0.36788, 4.38906)}.items():
        inputs = (logprobs, ref, torch.tensor([3.0]), *([mask] if script is ppo else []), 0.1, estimator)
        rewards = script.kl_penalised_rewards(*inputs)
        by_hand = [[-0.1 * terms[0], 3 - 0.1 * terms[1]]] if script is ppo else [3 - 0.1 * sum(terms)]
        torch.testing.assert_close(rewards, torch.tensor(by_hand), atol=1e-5, rtol=0)


@both
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_X3_is_what_is_penalised_logged_and_steers_beta(script, estimator, run_of):
    """The first update's KL is 0; the later ones' are of these tokens, by a slow loop, and 14: one and the same."""
    run = run_of(script, kl_estimator=estimator, lr=3e-2)
    for rollout, line in zip(run.rollouts, run.metrics, strict=True):
        sums = []
        for x in (rollout.logprobs - rollout.ref_logprobs).tolist():
            sums.append(sum(0.5 * y**2 if estimator == "k2" else math.exp(-y) - 1 + y for y in x))
        assert line["objective/kl"] == pytest.approx(sum(sums) / 8, rel=1e-4, abs=1e-6)
        rewards = rollout.rewards.sum(dim=1) if script is ppo else rollout.rewards
        by_hand = [
            score - line["objective/kl_coef"] * x for score, x in zip(rollout.scores.tolist(), sums, strict=True)
        ]
        assert rewards.tolist() == pytest.approx(by_hand, rel=1e-4, abs=1e-4)
    assert run.metrics[2]["objective/kl"] > 0.01
    assert all(line["eval/kl"] >= 0 for line in run.metrics if "eval/kl" in line)


# ----------------------------------------------------------------------------------------------------- X7: sampling


@every
@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-9, [2]), (0.49, [2]), (0.51, [2, 0]), (0.79, [2, 0]), (0.81, [2, 0, 3]), (1.0, [2, 0, 3, 1])],
)
def test_X7_top_p_draws_from_the_fewest_likeliest_tokens_that_have_it_in_their_own_proportions(script, top_p, kept):
    probabilities = torch.tensor([0.3, 0.05, 0.5, 0.15])
    uniform = ((torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000)[:, None]  # every share comes out exactly
    tokens = script.draw(probabilities.log().expand(len(uniform), -1), uniform, top_p)
    counts = torch.bincount(tokens[:, 0], minlength=4) / len(uniform)
    expected = torch.zeros(4).index_copy(0, torch.tensor(kept), probabilities[kept])
    torch.testing.assert_close(counts, expected / expected.sum(), atol=2e-4, rtol=0)


@every
def test_X7_every_row_has_its_own_nucleus_and_equals_of_the_last_token_stay_in(script):
    logits = torch.tensor([[0.0, 9.0, 0.0], [1.0, 1.0, -9.0]])
    for u in (0.0, 0.3, 0.7, 1 - 2**-53):
        tokens = script.draw(logits, torch.full((2, 1), u, dtype=torch.float64), 0.4)[:, 0].tolist()
        assert tokens == [1, int(u > 0.5)]


@every
def test_X7_sample_and_sample_all_follow_the_tasks_top_p(script):
    """So small that only the likeliest token is left, they are greedy at any temperature."""
    lm, contexts = tiny.make_lm(), tiny.make_contexts([3, 8, 5], 8)
    greedy = script.sample(lm, contexts, tiny.uniform(5, 3), *tiny.sampling(1e-6))
    task, ids = tiny.sampling(3.0, top_p=1e-6)
    assert torch.equal(script.sample(lm, contexts, tiny.uniform(5, 3), task, ids), greedy)
    assert torch.equal(script.sample_all(lm, contexts, task, ids, utils.generator(1, 0, contexts.device), 2), greedy)


@every
@pytest.mark.parametrize("least", [1, 2, 4])
def test_X7_no_response_ends_before_its_least_length_and_many_end_there(script, least):
    lm, contexts = tiny.make_lm(), tiny.make_contexts([3], 3).expand(300, -1)
    task, ids = tiny.sampling(50.0, min_response_length=least)
    with torch.no_grad():  # at this temperature all other tokens are about as likely as each other
        lm.transformer.ln_f.bias.copy_(lm.lm_head.weight[EOS] * 900)
    responses = script.sample(lm, contexts, tiny.uniform(5, 300), task, ids)
    shares = (responses == EOS).float().mean(dim=0)
    assert (shares[: least - 1] == 0).all() and (shares[least - 1 :] > 0.3).all()


@both
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_X7_log_probabilities_stay_those_of_the_full_policy_and_the_first_ratio_is_exactly_1(
    script, precision, run_of, monkeypatch
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    AcceleratorState._reset_state(True)
    ending = dict(top_p=0.5, min_response_length=3, truncate_token="<|endoftext|>", truncate_after=0, eos_task=True)
    run = run_of(script, ending, total_episodes=8, num_minibatches=1, num_ppo_epochs=1)
    AcceleratorState._reset_state(True)
    (line,), (rollout,) = run.metrics, run.rollouts
    assert line["ppo/val/ratio_min"] == line["ppo/val/ratio_max"] == 1 and line["ppo/policy/clipfrac_avg"] == 0
    assert (rollout.mask.sum(dim=1) >= 3).all()
    lm = utils.load_lm(run.task.base_model)
    for context, response, mask, ours in zip(
        rollout.contexts, rollout.responses, rollout.mask, rollout.logprobs, strict=True
    ):
        row = torch.cat([context[context != tiny.WORDS], response[mask]])
        with torch.no_grad():
            logits = lm(row[None]).logits[0, -mask.sum() - 1 : -1].float() / run.task.temperature
        full = logits.log_softmax(dim=-1).gather(-1, response[mask][:, None])[:, 0]
        torch.testing.assert_close(ours[mask], full, atol=1e-4 if precision == "no" else 0.5, rtol=0)
        ranks = (logits > logits.gather(-1, response[mask][:, None])).sum(dim=-1)
        assert precision == "bf16" or ranks.max() < 0.5 * tiny.WORDS  # nothing unlikely was drawn


# -------------------------------------------------------------------------------------- X6, X8, X12: optimisation


def test_X6_at_first_the_value_head_learns_alone(run_of):
    run = run_of(ppo, value_warmup_updates=1)
    start = {f"lm.{name}": x for name, x in utils.load_lm(run.task.base_model).named_parameters()}
    first, second = run.steps[0][-1], run.steps[1][-1]
    assert [step.lrs for step in run.steps[0]] == [[0, 1e-3]] * 4
    assert moved(start, first.weights) == set()
    assert first.weights["value_head.weight"].any() and first.weights["value_head.bias"].any()
    assert run.steps[1][0].lrs[0] == run.steps[1][0].lrs[1] > 0
    assert len(moved(first.weights, second.weights)) > len(start) / 2


@optimised
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [2, 4, 4, 3, 2, 1]),
        ("constant", [2, 4, 4, 4, 4, 4]),
        ("cosine", [2, 4, 4, 3.41421, 2, 0.58579]),  # 2 + √2 and 2 − √2
    ],
)
def test_X8_the_learning_rate_warms_up_and_follows_its_schedule(script, schedule, expected):
    assert [script.anneal(4.0, step, 6, schedule, 2) for step in range(6)] == pytest.approx(expected, abs=1e-5)


def test_X8_instructgpts_warm_up_begins_at_a_tenth_and_a_warm_up_may_outlast_the_run():
    rates = [ppo.anneal(5e-6, step, 500, "constant", 10) for step in range(12)]
    assert rates == pytest.approx([5e-7 * min(step, 10) for step in range(1, 13)])
    assert [ppo.anneal(1.0, step, 2, "linear", 4) for step in range(2)] == [0.25, 0.5]


@optimised
def test_X8_weight_decay_is_adamws(script):
    """Beside the step that Adam takes without it, lr · decay of the weight goes; also where there is no gradient."""
    start, grads, weights = [2.0, -3.0, 5.0], [0.3, -0.1, 0.0], []
    for decay in (0.0, 0.1):
        weight = torch.nn.Parameter(torch.tensor(start))
        weight.grad = torch.tensor(grads)
        script.AdamTF([weight], lr=0.01, weight_decay=decay).step()
        weights.append(weight.tolist())
    gone = [a - b for a, b in zip(*weights, strict=True)]
    assert gone == pytest.approx([0.01 * 0.1 * x for x in start], rel=1e-3)
    assert weights[0][2] == 5


@both
def test_X8_gradients_longer_than_the_bound_are_scaled_down_to_it(script, accelerator):
    policy = tiny.make_policy(script=script)

    def gradient(**flags):
        args = tiny.make_args(script=script, num_minibatches=1, **flags)
        batch = tiny.make_rollout(policy, args, script=script)
        grads = tiny.step_gradients(script, policy, batch, args, accelerator)[1]
        return torch.cat([x.flatten() for x in grads.values()])

    free = gradient()
    norm = math.sqrt(sum(x**2 for x in free.tolist()))
    for bound in (norm / 7, norm / 2):
        torch.testing.assert_close(gradient(max_grad_norm=bound), free * (bound / norm), rtol=1e-4, atol=1e-7)
    assert torch.equal(gradient(max_grad_norm=norm * 2), free)


@both
def test_X8_the_flags_reach_adam_and_every_group_of_it(script, run_of):
    adam = dict(adam_beta1=0.8, adam_beta2=0.95, weight_decay=0.25, adam_eps=1e-3)
    run = run_of(script, lr_schedule="cosine", warmup_updates=1, max_grad_norm=1e-3, **adam)
    for group in run.optimizer.param_groups:
        assert (group["betas"], group["weight_decay"], group["eps_hat"]) == ((0.8, 0.95), 0.25, 1e-3)
    lrs = [1e-3, 1e-3, 5e-4]  # all of it, done = 0, done = ½
    assert [line["ppo/lr"] for line in run.metrics] == pytest.approx(lrs)
    for update, lr in zip(run.steps, lrs, strict=True):
        for step in update:
            assert step.lrs == pytest.approx([lr] * (2 if script is ppo else 1))
            assert step.norm == pytest.approx(1e-3, rel=1e-2)


@both
def test_X8_without_flags_nothing_is_clipped_or_decays(script, run_of):
    run = run_of(script)
    assert all(group["weight_decay"] == 0 for group in run.optimizer.param_groups)
    assert max(step.norm for update in run.steps for step in update) > 0.1
    assert [step.lrs[0] for update in run.steps for step in update] == pytest.approx(
        [1e-3] * 4 + [1e-3 * 2 / 3] * 4 + [1e-3 / 3] * 4
    )


@both
@pytest.mark.parametrize(("max_kl", "epochs"), [(None, 3), (1e-9, 1), (1e6, 3)])
def test_X12_an_epoch_that_passes_the_bound_is_its_updates_last(script, max_kl, epochs, run_of):
    run = run_of(script, max_kl=max_kl, num_ppo_epochs=3)
    assert [len(update) for update in run.steps] == [2 * epochs] * 3
    assert all(line["ppo/policy/approxkl_avg"] > 0 for line in run.metrics)


@both
def test_X12_the_bound_is_on_the_epochs_mean(script, run_of):
    """Between what two epochs of the first update have; the second epoch is further from the samples than the first."""
    free = run_of(script, num_ppo_epochs=1, total_episodes=8).metrics[0]["ppo/policy/approxkl_avg"]
    both_epochs = run_of(script, num_ppo_epochs=2, total_episodes=8).metrics[0]["ppo/policy/approxkl_avg"]
    second = 2 * both_epochs - free
    assert second > 2 * free
    run = run_of(script, num_ppo_epochs=4, total_episodes=8, max_kl=0.25 * free + 0.75 * second)
    assert [len(update) for update in run.steps] == [4]
    assert run.metrics[0]["ppo/policy/approxkl_avg"] == pytest.approx(both_epochs, rel=1e-4)


# --------------------------------------------------------------------------------------------- X14 and the prompts


def test_X14_advantages_stay_as_they_are_without_whitening():
    policy = tiny.make_policy()
    args = tiny.make_args(num_minibatches=1, whiten_rewards=False, whiten_advantages=False)
    batch = tiny.make_rollout(policy, args)
    advantages, returns = ppo.estimate(batch, args)
    rewards, values = batch.rewards.tolist(), batch.values.tolist()
    for i, row in enumerate(rewards):
        following = 0.0
        for t in reversed(range(5)):
            following = row[t] + (values[i][t + 1] if t < 4 else 0) - values[i][t] + 0.95 * following
            assert advantages[i, t].item() == pytest.approx(following, abs=1e-4)
            assert returns[i, t].item() == pytest.approx(following + values[i][t], abs=1e-4)


def test_X14_rloo_whitens_its_advantages_over_the_batch(run_of):
    for rollout in run_of(rloo, whiten_advantages=True).rollouts:
        rewards = rollout.rewards.reshape(4, 2).tolist()  # [K, P]
        plain = [x - (sum(r[p] for r in rewards) - x) / 3 for row in rewards for p, x in enumerate(row)]
        mean = sum(plain) / 8
        deviation = math.sqrt(sum((x - mean) ** 2 for x in plain) / 8)
        assert deviation > 0.05
        assert rollout.advantages.tolist() == pytest.approx([(x - mean) / deviation for x in plain], abs=1e-3)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_several_samples_of_a_prompt(k, run_of):
    run = run_of(ppo, samples_per_prompt=k)
    for rollout in run.rollouts:
        rows = [tuple(row) for row in rollout.contexts.tolist()]
        assert {rows.count(row) for row in rows} == {k}
        assert len({tuple(row) for row in rollout.responses.tolist()}) == 8


@pytest.mark.parametrize("processes", [1, 2])
def test_samples_of_a_prompt_have_to_divide_the_batch_on_every_process(processes):
    ppo.check(tiny.make_args(batch_size=24, num_minibatches=2, samples_per_prompt=3), processes)
    with pytest.raises(
        tasks.InputError, match=f"batch_size=20 does not divide over {processes} processes × 2 .* 3 per"
    ):
        ppo.check(tiny.make_args(batch_size=20, num_minibatches=2, samples_per_prompt=3), processes)
