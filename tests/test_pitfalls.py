"""Where such code went wrong before: pitfalls 1 to 22, where test_details.py does not already show them.

3 and 5 are R1 there, 8 is P9 too, 12 is P4, 13 is G4, 15 is P5 too; 4 is in test_errors.py, 9 and 19 with two processes
in test_distributed.py.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from tiny import PAD, WORDS
from transformers import AutoModelForCausalLM

import ppo
import sft
import utils


def spy_ratios(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every ratio [b, R] of every micro-batch from here on."""
    ratios, loss_terms = [], ppo.loss_terms

    def spy(*args):
        terms = loss_terms(*args)
        ratios.append(terms["val/ratio"].detach().clone())
        return terms

    monkeypatch.setattr(ppo, "loss_terms", spy)
    return ratios


def collect(policy, args: ppo.Args, order: np.ndarray, accelerator) -> ppo.Rollout:
    """A rollout of 16 rows of uneven length, as ppo.main makes it."""
    queries, responses = tiny.make_contexts(tiny.LENGTHS * 2, 8), tiny.make_responses(16, 5)
    with accelerator.autocast():
        return ppo.evaluate(tiny.make_models(policy), queries, responses, order, 0.15, args)[0]


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_01_without_learning_every_ratio_of_every_minibatch_is_1(kind, accelerator, monkeypatch):
    """lr 0, 3 epochs of 2 minibatches of 3 trimmed micro-batches. Within an epoch that is cut otherwise than the
    rollout was, sums are taken in another order: there 1 is 1 to the last digits of fp32."""
    args = tiny.make_args(num_ppo_epochs=3, batch_size=16, micro_batch_size=3)
    epochs = [np.random.default_rng(epoch).permutation(16) for epoch in range(3)]
    policy = tiny.make_policy(kind)
    rollout = collect(policy, args, epochs[0], accelerator)
    ratios = spy_ratios(monkeypatch)
    stats = ppo.optimise(policy, utils.AdamTF(policy.parameters(), lr=0.0), rollout, epochs, args, accelerator)
    assert len(ratios) == 3 * 2 * 3 and sum(map(len, ratios)) == 3 * 16
    assert all(torch.equal(ratio, torch.ones_like(ratio)) for ratio in ratios[:6])
    assert all((ratio - 1).abs().max() < 1e-4 for ratio in ratios)
    assert not stats["policy/clipfrac_avg"].any() and stats["policy/approxkl_avg"].max() < 1e-8


def test_01_with_one_minibatch_without_learning_every_ratio_of_every_epoch_is_exactly_1(accelerator, monkeypatch):
    """The batch shuffled anew is the same set of rows, so it makes the same micro-batches."""
    args = tiny.make_args(num_ppo_epochs=3, num_minibatches=1, batch_size=16, micro_batch_size=3)
    epochs = [np.random.default_rng(epoch).permutation(16) for epoch in range(3)]
    policy = tiny.make_policy()
    rollout = collect(policy, args, epochs[0], accelerator)
    ratios = spy_ratios(monkeypatch)
    ppo.optimise(policy, utils.AdamTF(policy.parameters(), lr=0.0), rollout, epochs, args, accelerator)
    assert len(ratios) == 3 * 6 and all(torch.equal(ratio, torch.ones_like(ratio)) for ratio in ratios)


@pytest.mark.parametrize("precision", ["accelerator", "bf16_accelerator"])
def test_01_the_first_minibatchs_ratios_are_exactly_1_in_fp32_and_bf16(precision, request, monkeypatch):
    """L6: with the prepared policy, in eval mode before and in train mode after, as in ppo.main."""
    accelerator = request.getfixturevalue(precision)
    args = tiny.make_args(batch_size=16, micro_batch_size=3)
    plain = tiny.make_policy()
    policy, optimizer = accelerator.prepare(plain, utils.AdamTF(plain.parameters(), lr=1e-2))
    epochs = [np.random.default_rng(epoch).permutation(16) for epoch in range(2)]
    rollout = collect(policy.eval(), args, epochs[0], accelerator)
    ratios = spy_ratios(monkeypatch)
    stats = ppo.optimise(policy.train(), optimizer, rollout, epochs, args, accelerator)
    assert all(torch.equal(ratio, torch.ones_like(ratio)) for ratio in ratios[:3])
    assert stats["policy/clipfrac_avg"][0] == 0 and stats["policy/approxkl_avg"][0] == 0
    assert max((ratio - 1).abs().max() for ratio in ratios[3:]) > 1e-2  # the optimizer has moved the policy


def test_01_old_log_probabilities_come_from_the_very_forwards_of_the_first_epoch(accelerator):
    """L6: the same rows, in the same order, trimmed to the same width, micro-batch by micro-batch."""
    args, policy, seen = tiny.make_args(batch_size=16, micro_batch_size=3, num_ppo_epochs=1), tiny.make_policy(), []
    forward = policy.forward

    def spy(contexts, responses):
        seen.append(torch.cat([contexts, responses], dim=1).tolist())
        return forward(contexts, responses)

    policy.forward = spy
    order = np.random.default_rng(0).permutation(16)
    rollout = collect(policy, args, order, accelerator)
    ppo.optimise(policy, utils.AdamTF(policy.parameters(), lr=0.0), rollout, [order], args, accelerator)
    assert len(seen) == 12 and seen[:6] == seen[6:]


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_02_padded_and_unpadded_rows_have_the_same_log_probabilities_values_and_rewards(kind):
    """With absolute positions (GPT-2) and rotary ones."""
    policy, reward = tiny.make_policy(kind), tiny.make_reward(kind)
    contexts, responses = tiny.make_contexts([3, 7, 1], 7), tiny.make_responses(3, 4)
    wide = torch.cat([torch.full((3, 5), PAD), contexts], dim=1)
    with torch.no_grad():
        together = [*policy(wide, responses), reward(torch.cat([wide, responses], dim=1))]
        for i, n in enumerate((3, 7, 1)):
            row = contexts[i : i + 1, 7 - n :], responses[i : i + 1]
            alone = [*policy(*row), reward(torch.cat(row, dim=1))]
            for ours, theirs in zip(together, alone, strict=True):
                torch.testing.assert_close(ours[i : i + 1], theirs, atol=5e-5, rtol=0)


def test_02_prefix_and_suffix_join_the_query_without_a_gap():
    ids = utils.Ids(pad=9, truncate=None, prefix=[1, 2], suffix=[3])
    queries = torch.tensor([[9, 9, 5, 6], [4, 4, 4, 4]])
    assert utils.add_affixes(queries, ids).tolist() == [[9, 9, 1, 2, 5, 6, 3], [1, 2, 4, 4, 4, 4, 3]]


def test_06_the_score_sits_on_the_right_index():
    """EOS first, in the middle, last and missing."""
    responses = torch.tensor([[5, 1, 1, 1], [1, 5, 1, 5], [1, 1, 1, 5], [1, 1, 1, 1]])
    cut, last, ended = utils.truncate(responses, 5, 0, PAD)
    assert last.tolist() == [0, 1, 3, 3] and ended.tolist() == [True, True, True, False]
    zeros = torch.zeros(4, 4)
    rewards = ppo.kl_penalised_rewards(zeros, zeros, torch.tensor([1.0, 2.0, 3.0, 4.0]), cut != PAD, 0.1)
    assert rewards.tolist() == [[1, 0, 0, 0], [0, 2, 0, 0], [0, 0, 0, 3], [0, 0, 0, 4]]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)])
def test_06_advantages_equal_a_brute_force_sum_over_each_rows_own_length(gamma, lam):
    rng, real = np.random.default_rng(0), [6, 1, 4]
    rewards, values = (torch.tensor(rng.normal(size=(3, 6))) for _ in range(2))
    mask = torch.arange(6) < torch.tensor(real)[:, None]
    ours = ppo.advantages_and_returns(rewards.masked_fill(~mask, 0), values.masked_fill(~mask, 0), gamma, lam)
    for i, n in enumerate(real):
        for t in range(n):
            total = 0.0
            for k in range(t, n):
                following = values[i, k + 1] if k + 1 < n else 0.0
                total += (gamma * lam) ** (k - t) * (rewards[i, k] + gamma * following - values[i, k])
            assert ours[0][i, t].item() == pytest.approx(float(total), abs=1e-12)
            assert ours[1][i, t].item() == pytest.approx(float(total + values[i, t]), abs=1e-12)
        assert not ours[0][i, n:].any() and not ours[1][i, n:].any()


@pytest.mark.parametrize("huge", [float("nan"), float("inf"), 1e30])
def test_07_nan_and_huge_numbers_at_masked_positions_change_nothing(huge, accelerator):
    args = tiny.make_args(tiny.make_task(eos_task=True, truncate_after=0), num_minibatches=1)
    policy = tiny.make_policy()
    rollout = tiny.make_rollout(policy, args)
    outside = ~rollout.mask
    assert outside.any(dim=1).sum() >= 3
    assert not rollout.rewards[outside].any()
    poison = {
        name: getattr(rollout, name).masked_fill(outside, huge)
        for name in ("logprobs", "values", "ref_logprobs", "rewards")
    }
    score = utils.Score(rollout.scores, rollout.responses, rollout.mask.sum(dim=1) - 1, rollout.scores > 0)
    results = []
    for batch in (rollout, rollout._replace(**poison)):
        before = [x.clone() if isinstance(x, torch.Tensor) else x.copy() for x in batch]
        stats = ppo.minibatch_gradient(policy, batch, args, accelerator)
        for x, y in zip(batch, before, strict=True):  # inputs are never mutated
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        batch = batch._replace(rewards=rollout.rewards)  # summarise sums whole rows: rewards behind an end are 0 (X9)
        metrics = ppo.summarise(batch, score, {name: x[None] for name, x in stats.items()}, 0.15)
        results.append({name: torch.as_tensor(x) for name, x in metrics.items()} | tiny.gradients(policy))
    for name, value in results[0].items():
        assert value.isfinite().all() and torch.equal(value, results[1][name]), name


@pytest.mark.parametrize("huge", [float("nan"), 1e30])
def test_07_a_policy_that_gives_nan_or_huge_numbers_at_masked_positions_changes_nothing(huge, accelerator, monkeypatch):
    """What the forward gives behind the end of a response reaches neither loss nor gradient."""
    args = tiny.make_args(tiny.make_task(eos_task=True, truncate_after=0), num_minibatches=1, micro_batch_size=8)
    policy = tiny.make_policy()
    rollout = tiny.make_rollout(policy, args)
    clean = ppo.minibatch_gradient(policy, rollout, args, accelerator), tiny.gradients(policy)
    forward = policy.forward

    def poisoned(contexts, responses):
        outside = responses == PAD
        return tuple(x + torch.where(outside, huge, 0.0) for x in forward(contexts, responses))

    policy.forward = poisoned
    for ours, theirs in zip(
        (ppo.minibatch_gradient(policy, rollout, args, accelerator), tiny.gradients(policy)), clean, strict=True
    ):
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name


def test_08_whitening_masks_mean_and_variance():
    """Population: 1, 3, 5, 7 have mean 4 and variance 5."""
    x = torch.tensor([[1.0, 3.0, 1e9], [5.0, 7.0, -1e9]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    root = math.sqrt(5)
    expected = torch.tensor([[-3 / root, -1 / root], [1 / root, 3 / root]])
    torch.testing.assert_close(utils.whiten(x, mask)[:, :2], expected)
    torch.testing.assert_close(utils.whiten(x, mask, shift_mean=False)[:, :2], expected + 4)
    assert utils.whiten(torch.full((2, 3), 7.0), mask)[mask].abs().max() == 0  # equal numbers do not blow up


def test_10_the_number_of_optimizer_steps_is_exact(accelerator):
    """3 epochs of 2 minibatches of several micro-batches are 6 steps, and the weights move 6 times."""
    args, policy = tiny.make_args(num_ppo_epochs=3, micro_batch_size=1), tiny.make_policy()
    rollout = tiny.make_rollout(policy, args)
    prepared, optimizer = accelerator.prepare(policy, utils.AdamTF(policy.parameters(), lr=1e-3))
    seen, step = [], optimizer.optimizer.step

    def spy(closure=None):
        before = policy.value_head.weight.detach().clone()
        step(closure)
        seen.append(torch.equal(before, policy.value_head.weight))

    optimizer.optimizer.step = spy
    stats = ppo.optimise(prepared, optimizer, rollout, [np.arange(8)] * 3, args, accelerator)
    assert seen == [False] * 6 and optimizer.param_groups[0]["t"] == 6
    assert {tuple(values.shape) for values in stats.values()} == {(6,)}
    assert all(p.grad is None or not p.grad.any() for p in policy.parameters())  # nothing is left for the next update


def test_10_every_script_takes_exactly_its_steps(runs):
    """ppo: ⌈20/8⌉ updates · 2 epochs · 2 minibatches; train_reward: 12 labels in batches of 4."""
    assert runs.ppo_steps == [12] and runs.reward_steps == [3]
    rows, first = sft.load_rows(runs.sft, utils.AutoTokenizer.from_pretrained(runs.sft.task.base_model), WORDS)
    assert first == 1 and rows.shape[1] == 10
    assert len(runs.metrics["sft"]) == (len(rows) - 6) // 2


def test_10_11_sft_steps_and_rates_are_those_of_a_linear_warm_up_and_decay(runs):
    """Of so few steps 5 % is the first only: it has the whole rate; then come n − 1, n − 2, …, 1 parts of n − 1."""
    rates = [line["lr"] / 1e-3 for line in runs.metrics["sft"]]
    n = len(rates)
    assert 5 < n < 30 and rates == pytest.approx([1.0, *(k / (n - 1) for k in range(n - 1, 0, -1))])
    args = replace(runs.sft, warmup=0.4)
    assert [sft.lr_at(step, 5, args) / 1e-3 for step in range(5)] == pytest.approx([0.5, 1.0, 1.0, 2 / 3, 1 / 3])


def test_14_kl_is_positive_where_the_policy_is_surer_than_the_reference_and_lowers_the_reward():
    """Two responses with log π − log π_ref = 0.5 + 0.25 and −0.25 + 1; mean sum 0.75."""
    logprobs, ref = torch.tensor([[-1.0, -1.0], [-2.0, -1.0]]), torch.tensor([[-1.5, -1.25], [-1.75, -2.0]])
    scores, mask = torch.tensor([2.0, 4.0]), torch.ones(2, 2, dtype=torch.bool)
    rewards = ppo.kl_penalised_rewards(logprobs, ref, scores, mask, 0.2)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 1.95], [0.05, 3.8]]))
    rollout = ppo.Rollout(None, None, None, mask, logprobs, torch.zeros(2, 2), ref, scores, rewards)
    score = utils.Score(scores, None, None, torch.tensor([True, False]))
    stats = {"val/error": torch.tensor([0.5]), "returns/var": torch.tensor([2.0])}
    metrics = {k: float(v) for k, v in ppo.summarise(rollout, score, stats, 0.2).items()}
    expected = {
        "objective/kl": 0.75,
        "objective/entropy": 2.5,
        "objective/scores": 3.0,
        "objective/score_total": 2.85,
        "objective/rlhf_reward": 2.85,
        "objective/kl_coef": 0.2,
        "objective/ended": 0.5,
        "objective/response_length": 2.0,
        "ppo/val/var_explained": 0.75,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name


def test_14_the_kl_that_is_logged_is_the_kl_that_is_trained_on(runs):
    """β · logged KL is exactly what the rewards of the rollout that was trained on lack to the scores."""
    for line, rollout in zip(runs.metrics["ppo"], runs.rollouts, strict=True):
        taken = (rollout.scores - rollout.rewards.sum(dim=1)).mean().item()
        assert line["objective/kl_coef"] * line["objective/kl"] == pytest.approx(taken, abs=1e-5)
        assert line["objective/score_total"] == pytest.approx(rollout.rewards.sum(dim=1).mean().item(), abs=1e-5)
    assert abs(runs.metrics["ppo"][-1]["objective/kl"]) > 1e-2
    assert runs.metrics["ppo"][0]["objective/kl"] == pytest.approx(0, abs=1e-5)  # it starts as the reference


def test_15_the_penalty_looks_at_the_completion_only_and_honours_another_token_and_another_penalty():
    """The queries are full of both stop tokens; the score is replaced, not added to."""
    queries = torch.full((3, 4), 5)
    queries[:, 2:] = 6
    responses = torch.tensor([[1, 6, 1], [1, 5, 1], [1, 1, 1]])
    reward = lambda q, r: torch.tensor([10.0, 20.0, 30.0])  # noqa: E731
    scores = {}
    for token in (5, 6, None):
        task = tiny.make_task(truncate_after=0, missing_eos_penalty=-3.5)
        score = utils.score_responses(reward, queries, responses, task, utils.Ids(PAD, token, [], []))
        scores[token] = score.scores.tolist()
    assert scores == {5: [-3.5, 20, -3.5], 6: [10, -3.5, -3.5], None: [10, 20, 30]}


def test_15_a_stop_text_becomes_its_one_token(task):
    tokenizer, _, pad_id = utils.load_tokenizer(task, task.response_length)
    for text, token in ((".", tokenizer.convert_tokens_to_ids(".")), ("<|endoftext|>", tokenizer.eos_token_id)):
        assert utils.task_ids(replace(task, truncate_token=text), tokenizer, pad_id).truncate == token
    with pytest.raises(utils.InputError, match="exactly one"):
        utils.task_ids(replace(task, truncate_token=". ."), tokenizer, pad_id)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_18_a_saved_policy_loads_as_a_language_model_with_the_same_logits_and_tied_weights(
    kind, task, tmp_path, accelerator
):
    folder = str(tiny.write_model(tmp_path / "start", kind))
    policy = ppo.PolicyAndValue(utils.load_lm(folder), WORDS, 0.7)
    tied = policy.lm.config.tie_word_embeddings
    policy, optimizer = accelerator.prepare(policy, utils.AdamTF(policy.parameters(), lr=1e-2))
    contexts, responses = tiny.make_contexts([2, 6], 6, vocab=WORDS), tiny.make_responses(2, 4)
    policy(contexts, responses)[0].sum().backward()
    optimizer.step()
    lm = accelerator.unwrap_model(policy).lm
    tokenizer = utils.load_tokenizer(task, task.response_length)[0]
    utils.save_model(lm, tokenizer, str(tmp_path / "saved"), accelerator)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, lm.eval()(tokens).logits, atol=1e-6, rtol=1e-6)
        start = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert not torch.allclose(loaded(tokens).logits, start(tokens).logits)
    for model in (lm, loaded):
        same = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
        assert same == tied
    assert loaded.get_input_embeddings().num_embeddings == WORDS  # no pad was added
    assert utils.AutoTokenizer.from_pretrained(tmp_path / "saved").encode(" and") == tokenizer.encode(" and")


def test_18_ppo_main_saves_the_policy_that_it_trained(runs, monkeypatch):
    monkeypatch.chdir(runs.folder)
    start, trained = (AutoModelForCausalLM.from_pretrained(name) for name in ("sft", "ppo"))
    assert trained.lm_head.weight.data_ptr() == trained.transformer.wte.weight.data_ptr()
    moved = [not torch.equal(a, b) for a, b in zip(start.parameters(), trained.parameters(), strict=True)]
    assert all(moved)
    assert not list(runs.folder.glob("*.tmp*")) and not list(runs.folder.glob("*.old*"))


def test_18_saving_over_an_older_model_replaces_it(task, tmp_path, accelerator):
    tokenizer = utils.load_tokenizer(task, task.response_length)[0]
    folder = tmp_path / "deep" / "er" / "saved"
    for seed in (1, 2):
        utils.save_model(lm := tiny.make_lm(seed=seed), tokenizer, str(folder), accelerator)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.transformer.wte.weight, lm.transformer.wte.weight)
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_18_a_reward_model_round_trips_with_one_from_pretrained(kind, tmp_path):
    model = tiny.make_reward(kind)
    model.save_pretrained(tmp_path / "r")
    loaded = utils.RewardModel.from_pretrained(tmp_path / "r")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    tokens = utils.pad_rows([[3, 4], [5, 6, 7, 8]], 6, PAD)
    torch.testing.assert_close(loaded.eval()(tokens), model(tokens), atol=1e-6, rtol=1e-6)
    assert (loaded.gain.item(), loaded.bias.item(), loaded.config.pad_id) == (1.5, -0.5, PAD)
    assert (tmp_path / "r" / "model.safetensors").is_file()
    again = utils.load_reward_model(str(tmp_path / "r"), "")
    assert not again.training and {p.dtype for p in again.parameters()} == {torch.float32}


def test_19_metrics_are_means_over_all_minibatches_of_the_update():
    rollout = ppo.Rollout(
        None,
        None,
        None,
        torch.ones(2, 1).bool(),
        *(torch.zeros(2, 1) for _ in range(3)),
        torch.zeros(2),
        torch.zeros(2, 1),
    )
    stats = {name: torch.tensor([1.0, 2.0, 6.0]) for name in ("loss/total", "val/error", "returns/var")}
    score = utils.Score(rollout.scores, None, None, rollout.mask[:, 0])
    assert ppo.summarise(rollout, score, stats, 0.1)["ppo/loss/total"].item() == 3.0


def test_20_under_bf16_log_softmax_and_statistics_are_fp32_and_so_are_the_weights(bf16_accelerator, monkeypatch):
    args, plain = tiny.make_args(), tiny.make_policy()
    policy, optimizer = bf16_accelerator.prepare(plain, utils.AdamTF(plain.parameters(), lr=1e-3))
    seen, token_logprobs = [], utils.token_logprobs

    def spy(logits, tokens, temperature):
        out = token_logprobs(logits, tokens, temperature)
        seen.append((logits.detach(), *(x.detach() for x in out)))
        return out

    monkeypatch.setattr(utils, "token_logprobs", spy)
    epochs = [np.arange(8)]
    queries, responses = tiny.make_contexts(tiny.LENGTHS, 8), tiny.make_responses(8, 5)
    with bf16_accelerator.autocast():
        rollout, _ = ppo.evaluate(tiny.make_models(policy), queries, responses, epochs[0], 0.15, args)
    stats = ppo.optimise(policy, optimizer, rollout, epochs, args, bf16_accelerator)
    assert {logits.dtype for logits, *_ in seen} == {torch.bfloat16}  # autocast is on, in both passes
    for _, logprobs, entropies in seen:
        assert logprobs.dtype == entropies.dtype == torch.float32
    logits, logprobs, entropies = seen[-1]
    expected = (logits.double() / 0.7).softmax(-1)
    torch.testing.assert_close(entropies.double(), -(expected * expected.log()).sum(-1), atol=1e-5, rtol=0)
    nearest = (logprobs[..., None] - expected.log()).abs().amin(dim=-1)  # rounded to bf16 it would be 1e-2 off
    assert nearest.max() < 1e-5
    for tensor in (*rollout[4:], *stats.values(), *plain.parameters()):
        assert tensor.dtype == torch.float32
    assert all(s.dtype == torch.float32 for state in optimizer.state.values() for s in state.values())


def test_20_checkpoints_in_half_precision_are_trained_in_fp32(tmp_path):
    tiny.make_lm().bfloat16().save_pretrained(tmp_path)
    assert {p.dtype for p in utils.load_lm(str(tmp_path)).parameters()} == {torch.float32}
    assert {p.dtype for p in utils.RewardModel.from_lm(str(tmp_path), PAD).parameters()} == {torch.float32}
    (tmp_path / "model.safetensors").unlink()  # from scratch
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {p.dtype for p in utils.load_lm(str(tmp_path)).parameters()} == {torch.float32}


def test_21_steps_and_episodes_are_counted_exactly(runs):
    assert [line["step"] for line in runs.metrics["ppo"]] == [0, 1, 2]
    assert [line["ppo/episode"] for line in runs.metrics["ppo"]] == [8, 16, 24]
    assert sum(len(rollout.responses) for rollout in runs.rollouts) == 24
    assert [line["step"] for line in runs.metrics["train_reward"]] == [0, 1, 2, 3]  # the last one is the evaluation


def test_21_no_query_comes_twice_before_all_have_come(runs):
    """24 episodes of 40 queries: all different."""
    queries = {tuple(row) for rollout in runs.rollouts for row in rollout.contexts.tolist()}
    assert len(queries) == 24


def test_22_sfts_held_out_evaluation_runs_and_is_logged(runs, monkeypatch, accelerator):
    """Every 3 steps and at the last one; the number is the perplexity of the blocks that were held out."""
    lines = runs.metrics["sft"]
    last = len(lines) - 1
    assert [line["step"] for line in lines if "heldout/perplexity" in line] == sorted({*range(2, last + 1, 3), last})
    monkeypatch.chdir(runs.folder)
    lm, tokenizer = utils.load_lm("sft").eval(), utils.AutoTokenizer.from_pretrained("sft")
    losses = []
    for row in sft.load_rows(runs.sft, tokenizer, WORDS)[0][:6].tolist():
        for t in range(1, 10):
            with torch.no_grad():
                losses.append(-lm(torch.tensor([row[:t]])).logits[0, -1].log_softmax(0)[row[t]].item())
    assert lines[-1]["heldout/loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert lines[-1]["heldout/perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)


def test_22_held_out_blocks_are_not_trained_on(runs, monkeypatch, tmp_path):
    """Other texts in the held-out blocks give the very same weights."""
    monkeypatch.chdir(tmp_path)
    load_rows, saved = sft.load_rows, []
    for shift in (0, 1):

        def spy(*args, shift=shift):
            rows, first = load_rows(*args)
            rows[:6] = (rows[:6] + shift) % WORDS
            return rows, first

        monkeypatch.setattr(sft, "load_rows", spy)
        sft.main(replace(runs.sft, output_dir=f"sft{shift}"))
        saved.append(utils.load_lm(f"sft{shift}").state_dict())
    for name, value in saved[0].items():
        assert torch.equal(value, saved[1][name]), name


def test_22_the_reward_models_held_out_accuracy_is_logged(runs, monkeypatch):
    """Labels 12 to 15 are not trained on; of the saved model."""
    monkeypatch.chdir(runs.folder)
    task = runs.train_reward.task
    labels = utils.load_labels(task, None, WORDS)
    model, right = utils.load_reward_model("reward", ""), []
    for i in range(12, 16):
        rows = torch.cat([labels.query[i].expand(4, -1), labels.responses[i]], dim=1)
        with torch.no_grad():
            rewards = [model(row[row != WORDS][None]).item() for row in rows]
        right.append(rewards.index(max(rewards)) == labels.best[i].item())
    assert runs.metrics["train_reward"][-1]["heldout/accuracy"] == pytest.approx(sum(right) / 4)


def test_22_samples_are_written_before_during_and_after_training(runs):
    """Every 2 of 3 updates, and behind the last."""
    rows = [json.loads(line) for line in (runs.folder / "runs/ppo/samples.jsonl").read_text().splitlines()]
    assert sorted({row["step"] for row in rows}) == [0, 2, 3]
    assert all(set(row) == {"step", "query", "response", "score"} for row in rows) and len(rows) == 12
