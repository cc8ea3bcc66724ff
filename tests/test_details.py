"""One property for each implementation detail: G general, R reward model, P policy, A optimizer, X later systems.

Expected values come from the sources' worked examples, from arithmetic by hand, or from a slow loop over unpadded rows.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
import transformers
from tiny import EOS, KINDS, PAD, WORDS

import packing
import ppo
import rloo
import sft
import train_reward
import utils

HAND = dict(atol=1e-4, rtol=0)  # for expected values that are written with four decimals
SAME = dict(atol=2e-5, rtol=0)  # for the same number by another way through the network


def every_script_with(name: str) -> pytest.MarkDecorator:
    """The test runs for each script that has `name`: twins are the same code, and each of them counts."""
    scripts = [script for script in (ppo, rloo, train_reward, sft) if hasattr(script, name)]
    return pytest.mark.parametrize("script", scripts, ids=lambda script: script.__name__)


both = pytest.mark.parametrize("script", [ppo, rloo], ids=["ppo", "rloo"])


def rows_of(tokens: torch.Tensor, pad_id: int = PAD) -> list[list[int]]:
    """The real tokens of each row."""
    return [[t for t in row if t != pad_id] for row in tokens.tolist()]


def naive_hidden(backbone: torch.nn.Module, row: list[int]) -> torch.Tensor:
    """Hidden states [T, D] of one row that has no padding and no mask."""
    with torch.no_grad():
        return backbone(torch.tensor([row])).last_hidden_state[0]


# ----------------------------------------------------------------------------------------------------------- general


def test_G1_values_and_rewards_read_query_and_response_one_output_per_token():
    policy, reward = tiny.make_policy(), tiny.make_reward()
    contexts, responses = tiny.make_contexts([4, 4], 4), tiny.make_responses(2, 3)
    values = policy(contexts, responses)[2]
    assert values.shape == (2, 3)
    tokens = torch.cat([contexts, responses], dim=1)
    assert reward.token_rewards(tokens).shape == (2, 7, 1)
    for i, row in enumerate(tokens.tolist()):
        for t in range(3):  # the value where token t is predicted has read the query and the tokens before t
            hidden = naive_hidden(policy.lm.base_model, row[: 4 + t])[-1]
            torch.testing.assert_close(values[i, t], policy.value_head(hidden)[0], **SAME)
        expected = reward.head(naive_hidden(reward.backbone, row))
        torch.testing.assert_close(reward.token_rewards(tokens)[i], expected, **SAME)


def test_G2_pad_is_one_past_the_vocabulary_and_the_embedding_is_not_resized(task):
    tokenizer, config, pad_id = utils.load_tokenizer(task, task.response_length)
    assert pad_id == config.vocab_size == WORDS >= len(tokenizer)
    assert pad_id != tokenizer.eos_token_id
    assert utils.load_lm(task.base_model).get_input_embeddings().num_embeddings == WORDS


def test_G2_a_longer_query_is_cut_and_a_shorter_one_padded_on_the_left():
    assert utils.cut_query([4, 5, 6, 7], 3, None, None) == [4, 5, 6]
    assert utils.pad_rows([[4, 5, 6], [7]], 3, 9).tolist() == [[4, 5, 6], [9, 9, 7]]


def test_G2_worked_example_of_query_padding():
    """[B] pads these to length 5 with 50257, one past GPT-2's vocabulary, but on the right (no matter: G3)."""
    padded = utils.pad_rows([[23073, 11, 339, 561], [7091, 1807, 546, 340]], 5, 50257)
    assert padded.tolist() == [[50257, 23073, 11, 339, 561], [50257, 7091, 1807, 546, 340]]


PADDED = [
    [PAD, PAD, 23, 11, 39, 56],
    [PAD, 23, PAD, 11, 39, 56],
    [23, 11, PAD, PAD, 39, 56],
    [23, 11, 39, 56, PAD, PAD],
    [PAD, PAD, PAD, PAD, PAD, 17],
]


@pytest.mark.parametrize("kind", KINDS)
def test_G3_padding_anywhere_never_changes_the_logits_of_real_tokens(kind):
    lm, tokens = tiny.make_lm(kind), torch.tensor(PADDED)
    with torch.no_grad():
        logits = lm(**packing.model_inputs(tokens, PAD), use_cache=False).logits
        for i, row in enumerate(rows_of(tokens)):
            torch.testing.assert_close(logits[i][tokens[i] != PAD], lm(torch.tensor([row])).logits[0], **SAME)


@every_script_with("sample")
@pytest.mark.parametrize("kind", KINDS)
def test_G3_greedy_sampling_from_padded_rows_equals_re_forwarding_each_row_alone(kind, script):
    lm, contexts = tiny.make_lm(kind), tiny.make_contexts([1, 6, 3], 6)
    responses = script.sample(lm, contexts, tiny.uniform(6, 3), *tiny.sampling(1e-6))
    for row, response in zip(rows_of(contexts), responses.tolist(), strict=True):
        for _ in range(6):
            with torch.no_grad():
                row.append(lm(torch.tensor([row])).logits[0, -1].argmax().item())
        assert response == row[-6:]


def test_G3_positions_are_the_exclusive_count_of_real_tokens_and_a_pad_is_never_embedded():
    inputs = packing.model_inputs(torch.tensor([[9, 9, 4, 9, 5, 6]]), 9)
    assert inputs["attention_mask"].tolist() == [[0, 0, 1, 0, 1, 1]]
    positions = inputs["position_ids"][0]
    assert positions[[2, 4, 5]].tolist() == [0, 1, 2]
    assert inputs["input_ids"].max() < 9 and inputs["input_ids"][0, [2, 4, 5]].tolist() == [4, 5, 6]


def test_G3_worked_example_of_position_ids():
    """[B]: query [23073, 50259, 50259] and response [11, 339, 561], 50259 being the pad, have positions 0 1 1 1 2 3.
    Pads on the left, as ours are, get other positions that nobody sees; 23073, 11, 339, 561 have 0 1 2 3 both ways."""
    inputs = packing.model_inputs(torch.tensor([[23073, 50259, 50259, 11, 339, 561]]), 50259)
    assert inputs["position_ids"].tolist() == [[0, 1, 1, 1, 2, 3]]
    assert inputs["attention_mask"].tolist() == [[1, 0, 0, 1, 1, 1]]
    inputs = packing.model_inputs(torch.tensor([[50257, 50257, 23073, 11, 339, 561]]), 50257)
    assert inputs["position_ids"].tolist() == [[0, 0, 0, 1, 2, 3]]
    assert inputs["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1]]


@every_script_with("sample")
def test_G4_a_response_has_its_exact_length_and_never_a_pad_whatever_generation_config_says(script):
    """Also pitfall 13: top_k, eos, minimum and maximum length of the checkpoint change nothing."""
    lm, contexts = tiny.make_lm(vocab=7), tiny.make_contexts([3, 1], 3, vocab=7).repeat(200, 1)
    expected = script.sample(lm, contexts, tiny.uniform(9, 400), *tiny.sampling(1.5, 7))
    assert expected.shape == (400, 9)
    assert sorted(expected.unique().tolist()) == [0, 1, 2, 3, 4, 5, 6]  # the whole vocabulary, EOS 0 too, and no pad
    assert (expected[expected[:, 3] == 0][:, 4:] != 0).any()  # it goes on behind an EOS
    settings = dict(
        top_k=1,
        top_p=0.1,
        temperature=0.01,
        eos_token_id=[0, 1, 2],
        pad_token_id=0,
        min_length=50,
        max_length=4,
        max_new_tokens=2,
        repetition_penalty=9.0,
        do_sample=False,
        suppress_tokens=[3],
    )
    for name, value in settings.items():
        setattr(lm.generation_config, name, value)
    ours = script.sample(lm, contexts, tiny.uniform(9, 400), *tiny.sampling(1.5, 7))
    assert torch.equal(ours, expected)


CHI2_9 = 27.88  # 99.9 % of chi-square with 9 degrees of freedom


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Against the expected counts."""
    counts, expected = torch.bincount(tokens, minlength=len(probabilities)), probabilities * len(tokens)
    return ((counts - expected) ** 2 / expected).sum().item()


@every_script_with("draw")
def test_G4_draw_follows_softmax(script):
    logits = torch.linspace(-2, 2, 10)
    uniform = torch.rand(40_000, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    tokens = script.draw(logits.expand(len(uniform), -1), uniform)
    assert tokens.shape == (40_000, 1)
    weights = [math.exp(x) for x in logits.tolist()]
    assert chi_square(tokens[:, 0], torch.tensor([w / sum(weights) for w in weights])) < CHI2_9


@every_script_with("draw")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_G4_draw_never_takes_a_token_of_probability_zero(dtype, script):
    never = float("-inf")
    logits = torch.tensor([never, never, 0.0, never, 0.0, 1e-3, never, never], dtype=dtype).expand(5, -1)
    half = 1 / (2 + math.exp(logits[0, 5].item()))  # the border between the first two possible tokens
    uniform = torch.tensor([0.0, 5e-324, half, 1 - 2**-53, 1 - 2**-24], dtype=torch.float64)[:, None]
    assert script.draw(logits, uniform)[[0, 1, 3, 4], 0].tolist() == [2, 2, 5, 5]
    assert script.draw(logits, uniform)[2, 0] in (2, 4)  # on the border, never the 3 between them


@every_script_with("draw")
def test_G4_draw_gives_each_of_gpt2s_50257_tokens_its_own_share(script):
    """Of V equally likely tokens, u = (k + ½)/V is the k-th."""
    tokens = torch.linspace(0, 50256, 40).long()
    uniform = ((tokens.double() + 0.5) / 50257)[:, None]
    assert torch.equal(script.draw(torch.full((40, 50257), -3.3), uniform)[:, 0], tokens)


@every_script_with("sample")
def test_G4_P1_sampled_tokens_follow_softmax_of_logits_over_temperature(script):
    lm = tiny.make_lm(vocab=10)
    contexts = torch.tensor([[10, 10, 3, 8]]).expand(20_000, -1)
    with torch.no_grad():
        logits = lm(torch.tensor([[3, 8]])).logits[0, -1]
    tokens = script.sample(lm, contexts, tiny.uniform(1, 20_000), *tiny.sampling(2.0, 10))[:, 0]
    assert chi_square(tokens, (logits / 2).softmax(0)) < CHI2_9
    assert chi_square(tokens, logits.softmax(0)) > 10 * CHI2_9  # temperature 1 would be told apart


@every_script_with("sample_all")
def test_G4_rows_draw_alike_whatever_the_batch_they_are_sampled_in_is_trimmed_to(script):
    """G3: `sample_all` sorts and trims; greedy, every row is as if sampled alone."""
    lm, task = tiny.make_lm(), tiny.make_task(temperature=1e-6)
    contexts = tiny.make_contexts([2, 8, 5, 1, 8], 8)
    gen = utils.generator(1, 0, contexts.device)
    together = script.sample_all(lm, contexts, task, tiny.IDS, gen, size=2)
    alone = [script.sample(lm, contexts[i : i + 1], tiny.uniform(5, 1), task, tiny.IDS) for i in range(5)]
    assert torch.equal(together, torch.cat(alone))


@every_script_with("sample_all")
def test_X10_the_rollout_batch_size_never_changes_what_is_sampled(script):
    """A row's random numbers are its own, whatever its chunk and its place in it."""
    lm, task, contexts = tiny.make_lm(), tiny.make_task(), tiny.make_contexts([2, 8, 5, 1, 8, 3], 8)
    sampled = [
        script.sample_all(lm, contexts, task, tiny.IDS, utils.generator(1, 0, contexts.device), size)
        for size in (1, 4, 6)
    ]
    assert torch.equal(sampled[0], sampled[2]) and torch.equal(sampled[1], sampled[2])
    assert len({tuple(row) for row in sampled[0].tolist()}) == 6


@both
def test_G5_policy_learning_rate_falls_linearly_over_a_number_of_updates_rounded_up(script, runs):
    """20 episodes in batches of 8 are ⌈2.5⌉ = 3 updates; lr 1e-3."""
    rates = [line["ppo/lr"] for line in runs.metrics[script.__name__]]
    assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    assert runs.of[script.__name__].optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 3)


@every_script_with("anneal")
def test_G5_anneal_falls_linearly_to_0(script):
    assert [script.anneal(6.0, step, 3) for step in range(4)] == pytest.approx([6.0, 4.0, 2.0, 0.0])


def test_G5_reward_learning_rate_falls_linearly_over_the_labels_one_epoch(runs):
    """12 labels in batches of 4; lr 1e-3."""
    rates = [line["lr"] for line in runs.metrics["train_reward"] if "lr" in line]
    assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])


class Stop(Exception):
    """A run has come as far as the test wants it to."""


@pytest.mark.parametrize("script", [ppo, rloo, train_reward], ids=lambda script: script.__name__)
def test_G6_every_process_has_its_own_seed_and_so_its_own_queries_and_samples(script, task, tmp_path, monkeypatch):
    """`main` up to the first samples, as process 0, 2 and 0 again."""
    monkeypatch.chdir(tmp_path)
    real, seeds, queries, samples = utils.start_accelerator, [], [], []
    rows_of_step, generator, sample_all = utils.rows_of_step, utils.generator, script.sample_all

    def spy_rows(n, size, step, seed):
        seeds.append(seed)
        return rows_of_step(n, size, step, seed)

    def spy_generator(seed, step, device):
        seeds.append(seed)
        return generator(seed, step, device)

    def spy_sample_all(lm, contexts, *rest):
        queries.append(contexts.tolist())
        samples.append(sample_all(lm, contexts, *rest).tolist())
        raise Stop

    class Process:
        """The accelerator as process `rank` sees it; not the main one, which writes a table first."""

        def __init__(self, accelerator, rank):
            self.accelerator, self.process_index, self.is_main_process = accelerator, rank, False

        def __getattr__(self, name):
            return getattr(self.accelerator, name)

    monkeypatch.setattr(utils, "rows_of_step", spy_rows)
    monkeypatch.setattr(utils, "generator", spy_generator)
    monkeypatch.setattr(script, "sample_all", spy_sample_all)
    if script is not train_reward:  # the held-out evaluation comes first; its random numbers are everybody's
        monkeypatch.setattr(script, "evaluate", lambda *a: ({}, []))
    task = replace(task, truncate_token=None)
    if script is train_reward:
        args = train_reward.Args(task=task, num_labels=12, batch_size=4, normalize_samples=8, rollout_batch_size=8)
    else:
        args = tiny.make_args(task, script, reward_fn="test_scripts:count_e", output_dir="model")
    for rank in (0, 2, 0):
        monkeypatch.setattr(utils, "start_accelerator", lambda *a, rank=rank: Process(real(*a), rank))
        with pytest.raises(Stop):
            script.main(args)
    assert seeds == [1, 1, 200_007, 200_007, 1, 1]
    assert queries[0] == queries[2] != queries[1] and samples[0] == samples[2] != samples[1]


# ------------------------------------------------------------------------------------------------------ reward model


@pytest.mark.parametrize("kind", KINDS)
def test_R1_a_reward_is_of_the_last_real_token_and_knows_neither_padding_nor_the_other_rows(kind):
    model = tiny.make_reward(kind)
    rows = [[3, 4, 5], [7], [8, 9, 10, 11, 12], [7, 7]]
    hidden = [naive_hidden(model.backbone, row)[-1] for row in rows]
    expected = torch.stack([1.5 * model.head(h)[0] - 0.5 for h in hidden])  # gain 1.5 and bias −0.5 of tiny.make_reward
    left, right = utils.pad_rows(rows, 9, PAD), torch.tensor([row + [PAD] * (5 - len(row)) for row in rows])
    middle = torch.tensor([[3, PAD, 4, 5, PAD]])
    with torch.no_grad():
        for tokens in (left, right):
            torch.testing.assert_close(model(tokens), expected, **SAME)
            torch.testing.assert_close(model(tokens[1:2]), expected[1:2], **SAME)
        torch.testing.assert_close(model(middle), expected[:1], **SAME)
        for size in (1, 3):
            torch.testing.assert_close(model.score(left[:, :6], left[:, 6:], size=size), expected, **SAME)
            torch.testing.assert_close(model.score(right[:, :2], right[:, 2:], size=size), expected, **SAME)


def test_R2_the_reward_head_starts_at_one_over_the_root_of_the_width_plus_one():
    """1/√(3 + 1) = 0.5 at width 3, where the + 1 shows; 40,000 such heads at once."""
    model = tiny.make_reward()
    model.head = torch.nn.Linear(3, 40_000)
    torch.manual_seed(0)
    model._init_weights(model.head)
    assert model.head.weight.std().item() == pytest.approx(0.5, rel=0.01)
    assert abs(model.head.weight.mean().item()) < 0.01 and not model.head.bias.any()
    config = tiny.GPT2Config(vocab_size=5, n_embd=1024, n_layer=1, n_head=1, n_inner=1, n_positions=4)
    head = utils.RewardModel(utils.RewardConfig(config, 5)).head
    assert head.weight.std().item() == pytest.approx(0.031235, rel=0.08) and head.bias.item() == 0  # 1/√1025


def test_R2_a_new_reward_model_has_the_language_models_backbone_and_a_fresh_head(model_folder):
    lm, model = utils.load_lm(str(model_folder)), train_reward.new_reward_model(str(model_folder), WORDS)
    expected = lm.base_model.state_dict()
    assert expected.keys() == model.backbone.state_dict().keys()
    for name, value in model.backbone.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert model.head.weight.std().item() == pytest.approx(1 / math.sqrt(33), rel=0.4)  # 32 numbers
    assert (model.head.bias.item(), model.gain.item(), model.bias.item()) == (0, 1, 0)


def test_R3_gain_and_bias_are_reset_and_then_set_to_mean_0_and_population_std_1():
    model = tiny.make_reward()
    queries, responses = tiny.make_contexts(tiny.LENGTHS, 8), tiny.make_responses(8, 5)
    tokens = torch.cat([queries, responses], dim=1)
    raw = np.array([model.head(naive_hidden(model.backbone, row)[-1]).item() for row in rows_of(tokens)])
    mean, std = train_reward.normalise(model, queries, responses, size=3)
    assert mean.item() == pytest.approx(raw.mean(), abs=1e-5)
    assert std.item() == pytest.approx(math.sqrt(((raw - raw.mean()) ** 2).sum() / 8), abs=1e-5)
    assert model.gain.item() == pytest.approx(1 / std.item(), rel=1e-5)
    assert model.bias.item() == pytest.approx(-mean.item() / std.item(), abs=1e-5)
    after = model.score(queries, responses, size=8).numpy()
    assert after.mean() == pytest.approx(0, abs=1e-5) and after.std() == pytest.approx(1, abs=1e-5)


def test_R3_normalisation_reads_untruncated_samples_of_the_pretrained_policy(runs, monkeypatch, accelerator):
    """5 samples in batches of 4 are ⌈5/4⌉ · 4 = 8, twice, and different ones."""
    monkeypatch.chdir(runs.folder)
    loaded, load_lm = [], utils.load_lm
    monkeypatch.setattr(utils, "load_lm", lambda name: loaded.append(name) or load_lm(name))
    task = replace(runs.train_reward.task, truncate_token=".", truncate_after=0)
    args = replace(runs.train_reward, task=task)
    tokenizer, _, pad_id = utils.load_tokenizer(task, task.response_length)
    before, after = train_reward.policy_samples(args, tokenizer, pad_id, accelerator)
    assert loaded == ["sft"]
    for queries, responses in (before, after):
        assert queries.shape == (8, task.query_length) and responses.shape == (8, task.response_length)
        assert (responses != pad_id).all()
    assert not torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])


def test_R3_X9_normalisation_reads_samples_of_an_eos_task_through_their_end(runs, monkeypatch, accelerator):
    """As they are scored later; what the policy writes behind it is no text."""
    monkeypatch.chdir(runs.folder)
    sets, end = [], utils.token_id((tokenizer := utils.load_tokenizer(runs.train_reward.task, 5)[0]), ".", "")
    for eos_task in (False, True):  # the second time a token that was sampled the first time is the end
        text = tokenizer.convert_ids_to_tokens(end)
        task = replace(runs.train_reward.task, truncate_token=text, truncate_after=0, eos_task=eos_task)
        args = replace(runs.train_reward, task=task)
        pad_id = utils.load_tokenizer(task, task.response_length)[2]
        sets.append(train_reward.policy_samples(args, tokenizer, pad_id, accelerator))
        end = sets[0][0][1][0, 1].item()
    for (queries, whole), (same, cut) in zip(*sets, strict=True):
        assert torch.equal(queries, same)
        for row, expected in zip(cut.tolist(), whole.tolist(), strict=True):
            length = expected.index(end) + 1 if end in expected else len(expected)
            assert row == expected[:length] + [pad_id] * (len(row) - length)
    assert any((cut == pad_id).any() for _, cut in sets[1])


def make_labels(candidates: int, rows: int = 6) -> train_reward.Labels:
    """Random comparisons; queries padded on the left, responses on the right."""
    lengths = [8, 1, 3, 5, 2, 8][:rows]
    responses = torch.stack([tiny.make_responses(rows, 4, seed=k) for k in range(candidates)], dim=1)
    responses[1, 0, 2:], responses[3, 1, 1:] = PAD, PAD
    return train_reward.Labels(tiny.make_contexts(lengths, 8), responses, torch.arange(rows) % candidates)


def naive_rewards(model: utils.RewardModel, labels: train_reward.Labels) -> list[list[float]]:
    """Reward of every candidate, one unpadded row at a time."""
    gain, bias = model.gain.item(), model.bias.item()

    def reward(query: torch.Tensor, response: torch.Tensor) -> float:
        row = rows_of(torch.cat([query, response])[None])[0]
        return gain * model.head(naive_hidden(model.backbone, row)[-1]).item() + bias

    return [
        [reward(query, r) for r in responses] for query, responses in zip(labels.query, labels.responses, strict=True)
    ]


@pytest.mark.parametrize("micro_batch_tokens", [1, 100, 4096])
def test_R4_best_of_four_is_softmax_cross_entropy_over_the_four_rewards(micro_batch_tokens, accelerator):
    model, labels = tiny.make_reward(), make_labels(4)
    rewards = naive_rewards(model, labels)
    losses = [
        -math.log(math.exp(r[b]) / sum(map(math.exp, r))) for r, b in zip(rewards, labels.best.tolist(), strict=True)
    ]
    right = [max(range(4), key=r.__getitem__) == b for r, b in zip(rewards, labels.best.tolist(), strict=True)]
    args = train_reward.Args(task=tiny.make_task(), micro_batch_tokens=micro_batch_tokens)
    torch.testing.assert_close(train_reward.predict(model, labels, PAD, args), torch.tensor(rewards), **SAME)
    optimizer = train_reward.AdamTF(model.parameters(), lr=0.0)
    stats = train_reward.train_step(model, optimizer, labels, PAD, args, accelerator)
    assert stats["loss"].item() == pytest.approx(sum(losses) / 6, abs=1e-5)
    assert stats["accuracy"].item() == pytest.approx(sum(right) / 6)


def test_R4_two_candidates_are_minus_log_sigmoid_of_the_difference(accelerator):
    model, labels = tiny.make_reward(), make_labels(2)
    margins = [r[b] - r[1 - b] for r, b in zip(naive_rewards(model, labels), labels.best.tolist(), strict=True)]
    args = train_reward.Args(task=tiny.make_task())
    optimizer = train_reward.AdamTF(model.parameters(), lr=0.0)
    stats = train_reward.train_step(model, optimizer, labels, PAD, args, accelerator)
    assert stats["loss"].item() == pytest.approx(sum(math.log(1 + math.exp(-m)) for m in margins) / 6, abs=1e-5)


def test_R4_P7_reward_training_steps_are_the_same_for_all_micro_batch_sizes(accelerator):
    """R3 too: gain and bias train with the rest."""
    trained = []
    for size in (1, 100, 4096):
        model = tiny.make_reward()
        optimizer = train_reward.AdamTF(model.parameters(), lr=1e-3)
        args = train_reward.Args(task=tiny.make_task(), micro_batch_tokens=size)
        train_reward.train_step(model, optimizer, make_labels(4), PAD, args, accelerator)
        trained.append(dict(model.named_parameters()))
    tokens = train_reward.candidate_tokens(make_labels(4))
    parts = train_reward.micro_batches(tokens, PAD, math.ceil((tokens != PAD).sum().item() / 3))
    assert [len(rows) for rows in parts] == [2, 2, 2]  # a third of the tokens each
    start = dict(tiny.make_reward().named_parameters())
    assert not torch.equal(trained[0]["gain"], start["gain"])
    assert not torch.equal(trained[0]["head.weight"], start["head.weight"])
    for other in trained[1:]:
        for name, value in trained[0].items():
            torch.testing.assert_close(other[name], value, atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


# ------------------------------------------------------------------------------------------------------------ policy


@both
def test_P1_log_probabilities_and_entropies_divide_the_logits_by_the_temperature(script):
    """logits [0, ln 3] at temperature ½ are probabilities 1/10 and 9/10."""
    logits = torch.tensor([[[0.0, math.log(3)], [0.0, math.log(3)]]])
    logprobs, entropies = script.token_logprobs(logits, torch.tensor([[0, 1]]), 0.5)
    torch.testing.assert_close(logprobs, torch.tensor([[-2.3026, -0.1054]]), **HAND)
    torch.testing.assert_close(entropies, torch.tensor([[0.3251, 0.3251]]), **HAND)


def test_a_heads_gradient_is_linears_and_takes_the_tied_embeddings_in_place():
    lm, tokens, grads = tiny.make_lm(), torch.randint(61, (2, 8)), []
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    head.__class__ = utils.Float32Head
    assert embedding.weight is head.weight
    for product in (head, lambda x: torch.nn.functional.linear(x, head.weight)):
        with torch.profiler.profile(record_shapes=True) as profile:
            grads.append(torch.autograd.grad(product(embedding(tokens)).square().sum(), [head.weight])[0])
        sums = [x.name for x in profile.events() if "aten::add" in x.name and x.input_shapes[0] == [*head.weight.shape]]
        assert sums == ["aten::add_" if product is head else "aten::add"]
    torch.testing.assert_close(*grads)


def test_P1_the_gradient_of_log_probabilities_is_the_slope_of_their_differences():
    logits, tokens = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True), torch.randint(5, (2, 3))
    first = lambda x: packing.ChosenLogprobs.apply(x, tokens, 0.7)[0]  # noqa: E731
    assert torch.autograd.gradcheck(first, (logits,), atol=1e-8)
    assert not packing.ChosenLogprobs.apply(logits, tokens, 0.7)[1].requires_grad


@both
@pytest.mark.parametrize("kind", KINDS)
def test_P1_policy_and_reference_use_the_temperature_at_exactly_the_response_tokens(kind, script):
    policy = tiny.make_policy(kind, temperature=0.5, script=script)
    contexts, responses = tiny.make_contexts([2, 6, 4], 6), tiny.make_responses(3, 4)
    expected, entropies = torch.zeros(3, 4), torch.zeros(3, 4)
    for i, row in enumerate(rows_of(contexts)):
        for t, token in enumerate(responses[i].tolist()):
            with torch.no_grad():
                p = (policy.lm(torch.tensor([row])).logits[0, -1] / 0.5).softmax(0)
            expected[i, t], entropies[i, t] = p[token].log(), -(p * p.log()).sum()
            row.append(token)
    ours = policy(contexts, responses)
    torch.testing.assert_close(ours[0], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours[1], entropies, atol=1e-4, rtol=0)
    for size in (1, 15, 30):  # tokens of a forward; the rows have 6, 10 and 8
        ref = script.logprobs_of(policy, contexts, responses, np.array([[6, 0], [10, 1], [8, 2]]), size)
        torch.testing.assert_close(ref, expected, atol=1e-4, rtol=0)


@pytest.mark.hub
def test_P1_gpt2_gives_the_log_probabilities_of_the_blog():
    """[B]: query [23073] and response [11, 339, 561]."""
    lm = utils.load_lm("gpt2").eval()
    policy = rloo.Policy(lm, 50257, 1.0)
    ours = rloo.logprobs_of(policy, torch.tensor([[23073]]), torch.tensor([[11, 339, 561]]), np.array([[4, 0]]), 1)
    torch.testing.assert_close(ours, torch.tensor([[-3.3213, -4.9980, -3.8690]]), atol=1e-3, rtol=0)


def test_P2_the_value_head_starts_at_zero():
    policy = ppo.PolicyAndValue(tiny.make_lm(), PAD, 0.7)
    assert not policy.value_head.weight.any() and not policy.value_head.bias.any()
    values = policy(tiny.make_contexts([2, 4], 4), tiny.make_responses(2, 3))[2]
    assert torch.equal(values, torch.zeros(2, 3))


def test_P3_a_query_starts_after_the_first_start_and_ends_with_the_last_end_inside_the_length():
    def cut(tokens, length, start, end):
        return utils.cut_query(tokens, length, start, end and [token == end for token in tokens])

    start, end = 13, 99
    assert cut([1, 13, 2, 3, 13, 4], 8, start, None) == [2, 3, 13, 4]
    assert cut([1, 2], 8, start, None) is None
    assert cut([1, 2, 13], 8, start, None) == [1, 2, 13]  # the passage's last token: no cut
    assert cut([1, 99, 2, 99, 3, 99], 5, None, end) == [1, 99, 2, 99]
    assert cut([1, 2, 3, 99], 3, None, end) is None
    assert cut([7, 13, 1, 99, 2], 8, start, end) == [1, 99]


@pytest.mark.parametrize("kind", KINDS)
def test_P4_no_dropout_even_after_train(kind, tmp_path):
    """Pitfall 12: policies, reference, value and reward model of a checkpoint that asks for dropout 0.5."""
    folder = str(tiny.write_model(tmp_path / "m", kind, dropout=0.5))
    reward = train_reward.new_reward_model(folder, WORDS)
    reward.config.backbone = tiny.config(kind, vocab=WORDS, dropout=0.5)
    reward.save_pretrained(tmp_path / "r")
    contexts, responses = tiny.make_contexts([2, 6], 6, vocab=WORDS), tiny.make_responses(2, 4)
    tokens = torch.cat([contexts, responses], dim=1)
    policy = ppo.PolicyAndValue(utils.load_lm(folder), WORDS, 0.7)
    torch.nn.init.normal_(policy.value_head.weight)
    plain = rloo.Policy(utils.load_lm(folder), WORDS, 0.7)
    passes = {
        "policy": (policy, lambda: torch.cat(policy(contexts, responses))),
        "rloo's policy": (plain, lambda: torch.cat(plain(contexts, responses))),
        "reference": (policy.lm, lambda: ppo.logprobs_of(policy, contexts, responses, np.array([[6, 0], [10, 1]]), 12)),
        "reward": (reward, lambda: reward(tokens)),
        "loaded reward": (
            loaded := utils.RewardModel.from_folder(str(tmp_path / "r"), ""),
            lambda: loaded(tokens),
        ),
    }
    for name, (model, forward) in passes.items():
        assert torch.equal(model.train() and forward(), model.eval() and forward()), name
        rates = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
        assert not any(rates), name


def test_P4_dropout_of_this_checkpoint_would_have_shown(tmp_path):
    """What the test above stands on: as it is saved, the checkpoint is noisy after `.train()`."""
    folder = tiny.write_model(tmp_path / "m", dropout=0.5)
    lm = tiny.AutoModelForCausalLM.from_pretrained(folder).train()
    tokens = torch.arange(1, 9)[None]
    assert not torch.equal(lm(tokens).logits, lm(tokens).logits)


@every_script_with("truncate")
def test_P5_a_response_is_cut_after_the_first_truncate_token_at_or_after_its_position(script):
    responses = torch.tensor([[7, 1, 7, 2, 7, 3], [1, 2, 3, 4, 5, 7], [7, 7, 1, 2, 3, 4], [1, 2, 7, 7, 1, 2]])
    cut, ended = script.truncate(responses, 7, 2, 99)
    assert cut.tolist() == [[7, 1, 7, 99, 99, 99], [1, 2, 3, 4, 5, 7], [7, 7, 1, 2, 3, 4], [1, 2, 7, 99, 99, 99]]
    assert ended.tolist() == [True, True, False, True]
    cut, ended = script.truncate(responses, None, 2, 99)  # a task without such a token cuts nothing
    assert torch.equal(cut, responses) and ended.tolist() == [True] * 4


def test_P5_only_scoring_sees_the_cut_and_the_score_is_at_the_last_position():
    seen, args = [], tiny.make_args(tiny.make_task(truncate_after=1))
    policy, queries = tiny.make_policy(), tiny.make_contexts([3, 2], 8)
    responses = torch.tensor([[1, 5, 9, 9, 9], [1, 2, 3, 4, 6]])
    models = tiny.make_models(policy, lambda q, r: seen.append(r) or torch.tensor([7.0, 8.0]))
    args = replace(args, num_minibatches=1)
    rollout, score = ppo.make_rollout(models, queries, responses, np.arange(2), 0.0, args)
    assert seen[0].tolist() == [[1, 5, PAD, PAD, PAD], [1, 2, 3, 4, 6]]
    assert score.scores.tolist() == [7, -1]  # the second has no 5: −1 in place of the reward model's 8
    assert torch.equal(rollout.responses, responses) and rollout.mask.all()
    assert rollout.rewards.tolist() == [[0, 0, 0, 0, 7], [0, 0, 0, 0, -1]]  # β is 0
    assert (rollout.logprobs < 0).all() and (rollout.ref_logprobs < 0).all()  # behind the cut too


def test_P5_L2_a_completion_is_scored_cut_and_learned_whole():
    seen, args = [], tiny.make_args(tiny.make_task(truncate_after=1), rloo, num_minibatches=1, rloo_k=2)
    policy, queries = tiny.make_policy(script=rloo), tiny.make_contexts([3, 2], 8)
    responses = torch.tensor([[1, 5, 9, 9, 9], [1, 2, 3, 4, 6]])
    models = tiny.make_models(policy, lambda q, r: seen.append(r) or torch.tensor([7.0, 8.0]), script=rloo)
    rollout, score = rloo.make_rollout(models, queries, responses, np.arange(2), 0.0, args)
    assert seen[0].tolist() == [[1, 5, PAD, PAD, PAD], [1, 2, 3, 4, 6]]
    assert score.scores.tolist() == rollout.rewards.tolist() == [7, -1]  # β is 0
    assert torch.equal(rollout.responses, responses) and rollout.mask.all()
    torch.testing.assert_close(rollout.logprobs, policy(queries, responses)[0], **SAME)  # behind the cut too


def test_P6_gamma_is_1_and_lambda_095_and_advantages_are_the_sum_of_discounted_errors():
    args = ppo.Args(task=tiny.make_task())
    assert (args.gamma, args.lam) == (1.0, 0.95)
    # r = [1, 0, 2], v = [0.5, 1, 0.25]: δ = 1 + 1 − 0.5, 0 + 0.25 − 1, 2 − 0.25 = 1.5, −0.75, 1.75
    rewards, values = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[0.5, 1.0, 0.25]])
    advantages, returns = ppo.advantages_and_returns(rewards, values, 1.0, 0.95)
    expected = torch.tensor([[1.5 - 0.95 * 0.75 + 0.9025 * 1.75, -0.75 + 0.95 * 1.75, 1.75]])
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + values)


@both
def test_P7_batch_8_in_minibatches_of_4_in_micro_batches_of_2_visits_every_row_once_an_epoch(script, accelerator):
    """The blog's example. The first token of each context tells the rows apart."""
    args = tiny.make_args(None, script, num_minibatches=2, micro_batch_tokens=24, num_ppo_epochs=3)
    policy = tiny.make_policy(script=script)
    rollout = tiny.make_rollout(policy, args, script=script)
    contexts = rollout.contexts.clone()
    contexts[:, -1] = torch.arange(20, 28)
    rollout.sizes[:, 1] = np.arange(8)  # no two prompts are the same
    visited, forward = [], policy.forward

    def spy(contexts, responses):
        visited.append((contexts[:, -1] - 20).tolist())
        return forward(contexts, responses)

    policy.forward = spy
    optimizer = script.AdamTF(policy.parameters(), lr=1e-3)
    epochs = [np.array([3, 1, 7, 0, 2, 4, 6, 5]), np.array([5, 4, 3, 2, 1, 0, 7, 6]), np.arange(8)]
    steps = tiny.update(script, policy, optimizer, rollout._replace(contexts=contexts), epochs, args, accelerator)
    assert [len(rows) for rows in visited] == [2] * 12
    for epoch, order in enumerate(epochs):
        halves = visited[4 * epoch : 4 * epoch + 2], visited[4 * epoch + 2 : 4 * epoch + 4]
        assert [sorted(sum(half, [])) for half in halves] == [sorted(order[:4].tolist()), sorted(order[4:].tolist())]
    assert len(steps) == optimizer.param_groups[0]["t"] == 6  # optimizer steps


def test_P7_micro_batches_hold_long_and_short_rows_of_so_many_tokens_in_all():
    sizes = np.stack([[5, 1, 4, 2, 3], np.arange(5)], axis=1)  # 15 in all; sorted: 1, 3, 4, 2, 0
    for tokens, expected in ((15, [[0, 1, 2, 3, 4]]), (8, [[0, 1, 4], [2, 3]]), (1, [[1], [3], [4], [2], [0]])):
        assert [rows.tolist() for rows in utils.micro_batches(sizes, tokens)] == expected
    sizes[:, 1] = [7, 2, 2, 7, 9]  # three prompts, whose longest rows have 5, 4 and 3 tokens
    for tokens, expected in ((8, [[0, 3, 4], [1, 2]]), (1, [[4], [1, 2], [0, 3]])):
        assert [rows.tolist() for rows in utils.micro_batches(sizes, tokens)] == expected


def test_G4_rows_of_like_length_are_sampled_together_each_part_as_wide_as_its_longest():
    parts = packing.by_length(np.array([5, 1, 4, 2, 3]), 2)
    assert [(rows.tolist(), width) for rows, width in parts] == [([1, 3], 2), ([4, 2], 4), ([0], 5)]
    assert [len(rows) for rows, _ in packing.by_length(np.ones(4, dtype=int), 3)] == [3, 1]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", (*KINDS, "gemma2"))
def test_G4_the_decoder_samples_token_by_token_what_the_model_does(kind, compiled, monkeypatch):
    """Prompts that are read once for the rows that have them; caches that are used again; whole graphs without a break,
    here without the code that is generated from them, which needs a compiler."""
    read, graphs, compile = [], [], torch.compile
    backend = lambda graph, inputs: graphs.append(graph) or graph.forward  # noqa: E731
    monkeypatch.setattr(torch, "compile", lambda lm, mode, **how: compile(lm, backend=backend, **how))
    lm, (task, ids) = tiny.make_lm(kind, positions=256), tiny.sampling(0.7)
    decoder = packing.Decoder(lm, compiled)
    packing.keeps_rows_apart(lm.base_model)  # measured before
    contexts, uniform = tiny.make_contexts([8, 3, 5, 8, 1], 8).repeat(3, 1), tiny.uniform(12, 15)
    expected = ppo.sample(lm, contexts, uniform, task, ids)
    if not compiled:
        count = lambda module, args: read.append((args[0].count_nonzero().item(), args[0].numel()))  # noqa: E731
        lm.get_input_embeddings().register_forward_pre_hook(count)
    for _ in range(2):
        read.clear()
        assert torch.equal(ppo.sample(decoder, contexts, uniform, task, ids), expected)
        prompts = (3 * 25, 15 * 8) if "falcon" in kind else (25, 4 * 8)  # in lines of 8: 8, 8, 5 + 3, 1
        assert compiled or read[0] == prompts and len(read) == 12
    wider = torch.nn.functional.pad(contexts, (3, 0), value=tiny.PAD)
    assert torch.equal(ppo.sample(decoder, wider, uniform, task, ids), expected)
    assert len(graphs) == compiled  # one, whatever the width of the prompts
    inputs = packing.model_inputs
    count_pads = lambda *args: inputs(*args) | {"position_ids": torch.arange(20).expand(15, -1)}  # noqa: E731
    with monkeypatch.context() as patch:  # positions are those that it is given
        patch.setattr(packing, "model_inputs", count_pads)
        others = ppo.sample(lm, contexts, uniform, task, ids)
        assert torch.equal(ppo.sample(decoder, contexts, uniform, task, ids), others)
    assert torch.equal(others, expected) == (kind != "gpt2")  # the others' are relative
    some = ppo.sample(decoder, contexts[1:3, 3:], uniform[:, 1:3], task, ids)  # another shape, no prompt twice
    assert torch.equal(some, expected[1:3]) and set(decoder.caches) == ({(15, 128), (2, 128)} if compiled else set())


@pytest.mark.parametrize("line", [1, 11, 16, 128])
@pytest.mark.parametrize("kind", (*KINDS, "gemma2"))
def test_G3_packed_rows_are_read_as_if_alone(kind, line, monkeypatch):
    """Whatever the lines: hidden states, their gradient, and logits; pads anywhere, and no token of one row in another."""
    monkeypatch.setattr(packing, "LINE", line)
    lm = tiny.make_lm(kind)
    rows = [[3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5], [6, 6]]
    tokens = torch.full((5, 12), PAD)
    for i, row in enumerate(rows):  # some pads in front, some inside, some behind
        tokens[i, i : i + 1], tokens[i, 12 - len(row) - i % 2 + 1 : 12 - i % 2] = row[0], torch.tensor(row[1:])
    tokens[2] = torch.tensor([PAD, PAD, *rows[2], PAD])
    columns = torch.arange(12).expand(5, -1)
    hidden = packing.hidden_states(lm.base_model, tokens, columns, PAD)
    assert hidden.isfinite().all() and hidden.shape == (5, 12, 32)
    grads = torch.autograd.grad(
        packing.vocabulary_logits(lm, hidden)[tokens != PAD].square().sum(), list(lm.parameters())
    )
    alone = [lm(torch.tensor([row])).logits[0] for row in rows]
    torch.testing.assert_close(
        packing.vocabulary_logits(lm, hidden)[tokens != PAD], torch.cat(alone), atol=2e-4, rtol=0
    )
    expected = torch.autograd.grad(torch.cat(alone).square().sum(), list(lm.parameters()))
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4 * theirs.abs().max().item() + 1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("line", [1, 30])
@pytest.mark.parametrize("kind", (*KINDS, "gemma2"))
def test_G3_a_prompt_that_rows_share_is_read_once_and_every_row_as_if_alone(kind, line, dtype, monkeypatch):
    """Also its gradient; responses of uneven length, and one that is the beginning of another."""
    monkeypatch.setattr(packing, "LINE", line)
    lm, read = tiny.make_lm(kind), []
    prompts = [[3, 4, 5], [7], [3, 4, 5], [9, 8, 7, 6], [7], [3, 4, 5]]
    own = [[1, 2, 3], [4, 4], [1, 2], [5, 6, 7, 8], [9], [6]]
    tokens = torch.tensor(
        [[PAD] * (5 - len(p)) + p + r + [PAD] * (4 - len(r)) for p, r in zip(prompts, own, strict=True)]
    )
    columns, real = torch.arange(4, 9).expand(6, -1), tokens[:, 4:] != PAD
    packing.keeps_rows_apart(lm.base_model)  # measured before
    lm.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: read.append(args[0].count_nonzero().item())
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        hidden = packing.hidden_states(lm.base_model, tokens, columns, PAD, prompt=5)
        ours = packing.vocabulary_logits(lm, hidden)[real].float()
    assert read == [sum(map(len, prompts if "falcon" in kind else [prompts[0], prompts[1], prompts[3]])) + 13]
    alone = [lm(torch.tensor([p + r])).logits[0, len(p) - 1 :] for p, r in zip(prompts, own, strict=True)]
    if dtype == torch.bfloat16:
        assert (ours - torch.cat(alone)).square().mean().sqrt() < 0.03 * torch.cat(alone).std()
        return
    torch.testing.assert_close(ours, torch.cat(alone), atol=2e-4, rtol=0)
    weights = list(lm.parameters())
    grads, expected = (torch.autograd.grad(x.square().sum(), weights) for x in (ours, torch.cat(alone)))
    for mine, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4 * theirs.abs().max().item() + 1e-4, rtol=0)


@pytest.mark.parametrize("kind", (*KINDS, "gemma2"))
def test_G3_the_last_mlp_reads_only_tokens_whose_state_is_wanted(kind):
    """Also where FSDP2 has given the block's class another name; all of them where activations are computed again."""
    base, read = tiny.make_lm(kind).base_model, []
    tokens, columns = tiny.make_contexts([8, 3, 5, 8, 1], 8), torch.tensor([[6, 7]]).expand(5, -1)  # the last row: 1, 1
    packing.keeps_rows_apart(base)  # measured before
    block = [x for x in base.modules() if type(x).__name__ in base._no_split_modules][-1]
    [*block.mlp.children()][0].register_forward_pre_hook(lambda _, args: read.append(args[0][..., 0].numel()))
    everything = 40 if "falcon" in kind else 4 * 8  # in lines of 8: 8, 8, 5 + 3, 1
    packing.hidden_states(base, tokens, columns, PAD)
    block.__class__ = type(f"FSDP{type(block).__name__}", (type(block),), {})
    packing.hidden_states(base, tokens, columns, PAD)
    utils.checkpoint_activations(base)
    packing.hidden_states(base.train(), tokens, columns, PAD)
    assert read == [everything if "falcon" in kind else 9] * 2 + [everything]
    assert "forward" not in vars(block.mlp)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "one MLP in all layers", "cohere", "granite"])
def test_G3_other_models_are_read_as_if_alone_too(kind):
    """Experts, experts that tell more than a tensor, an MLP that is not the last block's alone, and logits that are scaled."""
    sizes = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    sizes |= dict(intermediate_size=48, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    experts = dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8)
    more = {
        "mixtral": experts,
        "gpt_oss": experts,
        "cohere": dict(logit_scale=0.2),
        "granite": dict(logits_scaling=3.0),
    }
    name = kind if kind in more else "llama"
    config = transformers.AutoConfig.for_model(name, **sizes, **more.get(kind, {}))
    torch.manual_seed(0)
    lm = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if name == "llama":
        lm.model.layers[0].mlp = lm.model.layers[1].mlp
        torch.nn.init.normal_(lm.model.layers[0].mlp.down_proj.weight)  # else as small as what is no difference
    rows = [[3, 4, 5], [7, 8], [9, 8, 7, 6, 5, 4, 3, 2, 1]]
    tokens = torch.tensor([[PAD] * (9 - len(row)) + row for row in rows])
    hidden = packing.hidden_states(lm.base_model, tokens, torch.tensor([[7, 8]]).expand(3, -1), PAD)
    alone = torch.stack([lm(torch.tensor([row])).logits[0, -2:] for row in rows])
    torch.testing.assert_close(packing.vocabulary_logits(lm, hidden), alone, atol=1e-5, rtol=0)
    assert packing.keeps_rows_apart(lm.base_model) == (kind in ("mixtral", "cohere", "granite"))


def test_G3_lines_are_filled_with_the_longest_row_and_those_that_leave_least_of_them_empty():
    begins, count = packing.fill_lines([6, 5, 3, 2, 2, 2], 10)  # 6 + 2 + 2 | 5 + 2 + 3; first fit makes three lines
    assert (begins.tolist(), count) == ([0, 10, 17, 8, 6, 15], 2)


@pytest.mark.parametrize("seed", range(5))
def test_G3_no_two_tokens_share_a_place_and_no_row_two_lines(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 90, rng.integers(1, 100))
    begins, count, width = packing.lay_out(tuple(lengths.tolist()), 128)
    places = np.concatenate([np.arange(begin, begin + n) for begin, n in zip(begins, lengths, strict=True)])
    assert len(set(places)) == lengths.sum() and places.max() < count * width
    assert (begins // width == (begins + lengths - 1) // width).all()


@pytest.mark.parametrize(
    "lengths, features, expected",
    [
        ([56, 40, 40], 768, ([0, 96, 56], 1, 136)),  # 136 · (3072 + 136) < 3 · 56 · (3072 + 56), < 2 · 80 · (3072 + 80)
        ([56, 40, 40], 16, ([0, 56, 112], 3, 56)),  # 3 · 56 · (64 + 56) < 2 · 80 · (64 + 80) < 136 · (64 + 136)
        ([3, 61], 768, ([61, 0], 1, 64)),  # a multiple of 8
        ([300, 290], 768, ([0, 304], 2, 304)),  # no line takes both: 2 · 304 at most
    ],
)
def test_G3_lines_are_as_long_as_costs_least(lengths, features, expected):
    begins, count, width = packing.lay_out(tuple(lengths), features)
    assert (begins.tolist(), count, width) == expected


def test_G3_only_falcon_of_the_kinds_here_does_not_keep_packed_rows_apart():
    apart = {kind: packing.keeps_rows_apart(tiny.make_lm(kind).base_model) for kind in (*KINDS, "gemma2")}
    assert apart == {kind: "falcon" not in kind for kind in apart}


@both
def test_P7_every_epoch_is_a_fresh_permutation_of_the_batch(script, runs):
    orders = [order.tolist() for epochs in runs.of[script.__name__].epochs for order in epochs]
    assert len(orders) == 3 * 2  # updates × epochs
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len(set(map(tuple, orders))) == 6


@both
@pytest.mark.parametrize("eos_task", [False, True])
def test_P7_the_micro_batch_size_never_changes_the_gradient(eos_task, script, accelerator):
    task = tiny.make_task(eos_task=eos_task, truncate_after=0)
    policy = tiny.make_policy(script=script)
    rollout = tiny.make_rollout(policy, tiny.make_args(task, script), script=script)
    results = {}
    for size in (1, 3, 8):
        args = tiny.make_args(task, script, micro_batch_tokens=size)
        sums, gradients = tiny.step_gradients(script, policy, rollout, args, accelerator)
        results[size] = script.means([sums]), gradients
    assert results[8][1]["lm.transformer.wte.weight" if script is rloo else "value_head.weight"].abs().max() > 1e-2
    for size in (1, 3):
        for ours, whole in zip(results[size], results[8], strict=True):
            for name, value in whole.items():
                torch.testing.assert_close(ours[name], value, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@both
def test_P7_statistics_are_means_over_real_tokens_whatever_the_micro_batches(script):
    """1, 2 | 3, 6 (the last two in another micro-batch, what is masked beside them): sum 12 of 4 numbers."""
    parts = [([[1.0, 2.0], [float("nan"), 9.0]], [[1, 1], [0, 0]]), ([[3.0, 6.0], [1e30, 9.0]], [[1, 1], [0, 0]])]
    sums = {}
    for numbers, mask in parts:
        sums = script.add_up(sums, {"x": torch.tensor(numbers)}, torch.tensor(mask).bool())
    assert sums["x"].tolist() == [12, 4, -1, 6]  # and minus the least, and the largest
    other = script.add_up({}, {"x": torch.tensor([5.0])}, torch.tensor([True]))
    twice = torch.tensor([2.0, 1, 1, 1])  # a sum twice as large of as many numbers
    steps = [{"x": x["x"], "val/ratio": x["x"], "val/ratio_spread": x["x"] * twice} for x in (sums, other)]
    stats = script.means(steps)
    assert stats["x"].tolist() == [3, 5]
    assert stats["val/ratio_var"].tolist() == [6 - (3 - 1) ** 2, 10 - (5 - 1) ** 2]  # E[(r − 1)²] − (E[r] − 1)²
    assert stats["val/ratio_min"].tolist() == [1, 5] and stats["val/ratio_max"].tolist() == [6, 5]


def test_P8_reward_is_minus_beta_times_the_log_ratio_plus_the_score_on_the_last_token():
    logprobs, ref = (
        torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, 0.0]]),
        torch.tensor([[-2.0, -1.0, -3.5], [-3.0, -1.5, 0.0]]),
    )
    mask = torch.tensor([[True, True, True], [True, True, False]])
    rewards = ppo.kl_penalised_rewards(logprobs, ref, torch.tensor([10.0, 20.0]), mask, 0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 0.1, 9.95], [-0.2, 19.95, 0.0]]))


def test_P8_worked_example_of_a_response_that_has_moved_away():
    """[B]: log π_ref [−3.3213, −4.9980, −3.8690], KL per token [−0.3315, −0.0426, 0.6351], score 0.4 → [β·−0.3315,
    β·−0.0426, β·0.6351 + 0.4]. There the penalty is added; [O] subtracts it, and so do we: our −0.15 is that 0.15."""
    ref, mask = torch.tensor([[-3.3213, -4.9980, -3.8690]]), torch.ones(1, 3).bool()
    logprobs = torch.tensor([[-3.6528, -5.0406, -3.2339]])
    torch.testing.assert_close(logprobs - ref, torch.tensor([[-0.3315, -0.0426, 0.6351]]), **HAND)
    score = torch.tensor([0.4])
    printed = ppo.kl_penalised_rewards(logprobs, ref, score, mask, -0.15)
    torch.testing.assert_close(printed, torch.tensor([[-0.0497, -0.0064, 0.0953 + 0.4]]), **HAND)
    ours = ppo.kl_penalised_rewards(logprobs, ref, score, mask, 0.15)
    torch.testing.assert_close(ours, torch.tensor([[0.0497, 0.0064, 0.4 - 0.0953]]), **HAND)
    before = ppo.kl_penalised_rewards(ref, ref, score, mask, 0.15)  # [B]: before the first step the KL is [0, 0, 0]
    torch.testing.assert_close(before, torch.tensor([[0.0, 0.0, 0.4]]))


def test_P8_L2_worked_example_of_tokens_and_the_whole_completion():
    """[R]: log π [−12.3, −8.3, −2.3], reference [−11.3, −8.4, −2.0], score 1, the KL added with weight 1: token rewards
    [−1, 0.1, 0.7], together the completion's −0.2."""
    logprobs, ref = torch.tensor([[-12.3, -8.3, -2.3]]), torch.tensor([[-11.3, -8.4, -2.0]])
    mask, score = torch.ones(1, 3).bool(), torch.tensor([1.0])
    tokens = ppo.kl_penalised_rewards(logprobs, ref, score, mask, -1.0)
    torch.testing.assert_close(tokens, torch.tensor([[-1.0, 0.1, 0.7]]), **HAND)
    whole = rloo.kl_penalised_rewards(logprobs, ref, score, -1.0)
    torch.testing.assert_close(whole, torch.tensor([-0.2]), **HAND)


def test_P9_whitening_without_moving_the_mean_is_the_blogs_example():
    x = torch.tensor([[1.2, 1.3, 1.4], [1.5, 1.6, 1.7], [1.8, 1.9, 2.0]])
    everything = torch.ones(3, 3, dtype=torch.bool)
    kept = torch.tensor([[0.0508, 0.4381, 0.8254], [1.2127, 1.6000, 1.9873], [2.3746, 2.7619, 3.1492]])
    torch.testing.assert_close(ppo.whiten(x, everything, shift_mean=False), kept, **HAND)
    torch.testing.assert_close(ppo.whiten(x, everything), kept - 1.6, **HAND)


def test_P9_the_variance_has_its_epsilon_inside_the_root():
    """Two numbers 0 and 2e-4 have variance 1e-8: divided by √(2e-8), not by √1e-8."""
    x = torch.tensor([[0.0, 2e-4]])
    torch.testing.assert_close(ppo.whiten(x, torch.ones(1, 2).bool()), torch.tensor([[-0.7071, 0.7071]]), **HAND)


def test_P9_each_minibatch_is_whitened_alone_and_returns_are_built_from_whitened_rewards():
    """That `main` does this for each minibatch: test_scripts.py."""
    args = tiny.make_args()
    rollout = tiny.make_rollout(tiny.make_policy(), args)
    minibatches = ppo.minibatches(np.array([6, 2, 0, 5, 1, 3, 4, 7]), args)
    assert [rows.tolist() for rows in minibatches] == [[0, 2, 5, 6], [1, 3, 4, 7]]
    for rows in minibatches:
        advantages, returns = ppo.estimate(ppo.Rollout(*(x[rows] for x in rollout[:-1])), args)
        r, v = rollout.rewards[rows].double().numpy(), rollout.values[rows].double().numpy()
        r = (r - r.mean()) / math.sqrt(r.var() + 1e-8) + r.mean()
        a = naive_advantages(r, v, 1.0, 0.95)
        np.testing.assert_allclose(returns.numpy(), a + v, atol=1e-4)
        np.testing.assert_allclose(advantages.numpy(), (a - a.mean()) / math.sqrt(a.var() + 1e-8), atol=1e-4)


def test_P9_without_whiten_rewards_the_rewards_stay_and_the_advantages_are_whitened():
    args = tiny.make_args(whiten_rewards=False)
    rollout = tiny.make_rollout(tiny.make_policy(), args)
    advantages, returns = ppo.estimate(rollout, args)
    r, v = rollout.rewards.double().numpy(), rollout.values.double().numpy()
    a = naive_advantages(r, v, 1.0, 0.95)
    np.testing.assert_allclose(returns.numpy(), a + v, atol=1e-4)
    np.testing.assert_allclose(advantages.numpy(), (a - a.mean()) / math.sqrt(a.var() + 1e-8), atol=1e-4)


def naive_advantages(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """A_t = Σ_l (γλ)^l δ_{t+l}, every sum written out; the value behind the end is 0."""
    rows, length = rewards.shape
    following = np.concatenate([values[:, 1:], np.zeros((rows, 1))], axis=1)
    delta = rewards + gamma * following - values
    return np.array(
        [
            [sum((gamma * lam) ** (k - t) * delta[i, k] for k in range(t, length)) for t in range(length)]
            for i in range(rows)
        ]
    )


def make_old(values: list[float], logprobs: list[float] | None = None) -> ppo.Rollout:
    """A rollout of one row with nothing in it but old values and log-probabilities."""
    values = torch.tensor([values])
    logprobs = torch.zeros_like(values) if logprobs is None else torch.tensor([logprobs])
    return ppo.Rollout(None, None, None, values == values, logprobs, values, None, None, None)


def test_P10_the_value_loss_is_half_the_larger_of_the_errors_with_and_without_clipping():
    """v_old 0 and return 1. v = 0.5 clips to 0.2: max(0.25, 0.64)/2. v = 0.1 stays: 0.81/2. v = −0.5 clips to −0.2:
    max(2.25, 1.44)/2. v = 1.2 clips to 0.2: max(0.04, 0.64)/2."""
    values = torch.tensor([[0.5, 0.1, -0.5, 1.2]])
    old, ones = make_old([0.0] * 4), torch.ones(1, 4)
    terms = ppo.loss_terms(old.logprobs, values, old, ones, ones, ppo.Args(task=tiny.make_task()))
    torch.testing.assert_close(terms["loss/value_avg"], torch.tensor([[0.32, 0.405, 1.125, 0.32]]))
    assert terms["val/clipfrac"].tolist() == [[1, 0, 0, 1]]


def test_P10_the_value_loss_weighs_a_tenth(accelerator):
    """In the gradient, which is linear in the weight, and in the total that is logged."""
    assert ppo.Args(task=tiny.make_task()).vf_coef == 0.1
    policy, gradients = tiny.make_policy(), {}
    rollout = tiny.make_rollout(policy, tiny.make_args())
    for weight in (0.0, 0.1, 1.0):
        args = tiny.make_args(vf_coef=weight)
        sums, gradients[weight] = tiny.step_gradients(ppo, policy, rollout, args, accelerator)
        score = ppo.Score(rollout.scores, rollout.responses, rollout.mask[:, 0])
        metrics = ppo.summarise(rollout, score, [sums], 0.15, PAD, args)
        policy_loss, value_loss = metrics["ppo/loss/policy_avg"].item(), metrics["ppo/loss/value_avg"].item()
        assert value_loss > 0.1
        assert metrics["ppo/loss/total"].item() == pytest.approx(policy_loss + weight * value_loss, rel=1e-5)
    assert not gradients[0.0]["value_head.weight"].any() and gradients[1.0]["value_head.weight"].abs().max() > 0.1
    for name, tenth in gradients[0.1].items():
        expected = 0.9 * gradients[0.0][name] + 0.1 * gradients[1.0][name]
        torch.testing.assert_close(tenth, expected, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_P10_the_policy_loss_is_the_larger_of_the_terms_with_and_without_clipping():
    """Ratios 1.5 and 0.5 with advantages 2 and −2: −min(3, 2.4), −min(1, 1.6), −min(−3, −2.4), −min(−1, −1.6)."""
    logprobs = torch.tensor([[1.5, 0.5, 1.5, 0.5]]).log()
    old, advantages = make_old([0.0] * 4), torch.tensor([[2.0, 2.0, -2.0, -2.0]])
    terms = ppo.loss_terms(logprobs, old.values, old, advantages, old.values, ppo.Args(task=tiny.make_task()))
    torch.testing.assert_close(terms["loss/policy_avg"], torch.tensor([[-2.4, -1.0, 3.0, 1.6]]))
    assert terms["policy/clipfrac_avg"].tolist() == [[1, 0, 0, 1]]
    torch.testing.assert_close(terms["policy/approxkl_avg"], torch.tensor([[0.0822, 0.2402, 0.0822, 0.2402]]), **HAND)


@both
def test_P11_beta_moves_by_the_clipped_relative_error_times_batch_over_horizon(script):
    args = script.Args(task=tiny.make_task(), batch_size=512, kl_target=6.0, kl_horizon=10_000)
    assert script.next_kl_coef(0.15, 6.6, args) == pytest.approx(0.150768)  # 0.15 · (1 + 0.1 · 0.0512)
    assert script.next_kl_coef(0.15, 60.0, args) == pytest.approx(0.151536)  # saturated at +0.2
    assert script.next_kl_coef(0.15, 0.0, args) == pytest.approx(0.148464)  # saturated at −0.2
    assert script.next_kl_coef(0.15, -60.0, args) == pytest.approx(0.148464)
    assert script.next_kl_coef(0.15, 6.0, args) == 0.15
    assert script.next_kl_coef(0.15, 60.0, replace(args, kl_target=None)) == 0.15


@both
def test_P11_beta_moves_once_an_update_after_training_from_the_logged_kl(script, runs):
    """Batch 8, horizon 10000; the KL is far below its target 6, so every update has the factor 1 − 0.2 · 0.0008."""
    lines = runs.metrics[script.__name__]
    assert all(line["objective/kl"] < 4.8 for line in lines)
    assert [line["objective/kl_coef"] for line in lines] == pytest.approx([0.15, 0.15 * 0.99984, 0.15 * 0.99984**2])


@every_script_with("AdamTF")
def test_A1_adam_adds_epsilon_without_the_bias_correction(script):
    """TensorFlow's formula, slowly; for the first step of a gradient of 1e-4 it moves 0.24 lr, PyTorch's 0.91 lr. Without
    a gradient there is no step, and none is counted."""
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = script.AdamTF([weight], lr=0.01, eps=1e-5)
    w, m, v, t = 1.0, 0.0, 0.0, 0
    for grad in (None, 1e-4, -3e-4, None, 2e-3, 0.0, 5.0):
        weight.grad = None if grad is None else torch.tensor([grad], dtype=torch.float64)
        optimizer.step()
        if grad is None:
            assert weight.item() == pytest.approx(w, abs=1e-12)
            continue
        t += 1
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        w -= 0.01 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (math.sqrt(v) + 1e-5)
        assert weight.item() == pytest.approx(w, abs=1e-12)
        if t == 1:
            assert 1 - weight.item() == pytest.approx(0.2403 * 0.01, rel=1e-3)


@both
def test_A1_adams_state_is_kept_across_updates(script, runs):
    """3 updates of 2 epochs of 2 minibatches with one optimizer."""
    run = runs.of[script.__name__]
    assert run.steps == [12]
    assert run.optimizer.param_groups[0]["t"] == 12


# ------------------------------------------------------------------------------------------------------- EOS and X11

ENDS = [0, 2, 4, None, 3, 1, 4, None]  # position of the first EOS in each response


def eos_responses() -> torch.Tensor:
    """[8, 5] with the first EOS at ENDS and random tokens, EOS among them, behind it."""
    responses = torch.randint(6, 60, (8, 5), generator=torch.Generator().manual_seed(2))
    for i, end in enumerate(ENDS):
        if end is not None:
            responses[i, end] = EOS
    responses[0, 3] = EOS
    return responses


def eos_args(script=ppo):
    """One minibatch, micro-batches that do not divide it."""
    task = tiny.make_task(eos_task=True, truncate_after=0)
    return tiny.make_args(task, script, num_minibatches=1, micro_batch_tokens=36)


def eos_rollout(policy: torch.nn.Module, responses: torch.Tensor, script=ppo):
    """Scored by the number of the row."""
    models = tiny.make_models(policy, lambda q, r: torch.arange(1.0, 9.0), script=script)
    queries = tiny.make_contexts(tiny.LENGTHS, 8)
    return script.make_rollout(models, queries, responses, np.arange(8), 0.15, eos_args(script))


REAL = [5 if end is None else end + 1 for end in ENDS]  # tokens through the end


def test_X9_the_mask_ends_with_eos_the_score_sits_there_and_a_missing_eos_costs_the_penalty():
    rollout, score = eos_rollout(tiny.make_policy(), eos_responses())
    assert rollout.mask.tolist() == [[t < n for t in range(5)] for n in REAL]
    assert score.scores.tolist() == [1, 2, 3, -1, 5, 6, 7, -1]
    assert score.ended.tolist() == [end is not None for end in ENDS]
    penalty = -0.15 * (rollout.logprobs - rollout.ref_logprobs)
    for i, n in enumerate(REAL):
        torch.testing.assert_close(rollout.rewards[i, n - 1], score.scores[i] + penalty[i, n - 1])
        torch.testing.assert_close(rollout.rewards[i, : n - 1], penalty[i, : n - 1])


def test_X9_behind_the_end_every_number_of_a_rollout_is_0():
    rollout, _ = eos_rollout(tiny.make_policy(), eos_responses())
    for name in ("logprobs", "values", "ref_logprobs", "rewards"):
        numbers = getattr(rollout, name)
        assert not numbers[~rollout.mask].any() and numbers[rollout.mask].all(), name
    assert (rollout.responses[~rollout.mask] == PAD).all()
    advantages, returns = ppo.estimate(rollout, eos_args())
    assert not advantages[~rollout.mask].any() and not returns[~rollout.mask].any()


def test_X9_L1_a_completion_ends_with_eos_and_its_numbers_are_those_of_its_own_tokens():
    policy = tiny.make_policy(script=rloo)
    rollout, score = eos_rollout(policy, eos_responses(), rloo)
    assert rollout.mask.tolist() == [[t < n for t in range(5)] for n in REAL]
    assert score.scores.tolist() == [1, 2, 3, -1, 5, 6, 7, -1]
    for i, n in enumerate(REAL):
        context, response = rollout.contexts[i : i + 1], rollout.responses[i : i + 1, :n]
        own = policy(context, response)[0].sum()
        ref = tiny.make_policy(seed=3, script=rloo)(context, response)[0].sum()
        torch.testing.assert_close(rollout.logprobs[i].sum(), own, **SAME)
        torch.testing.assert_close(rollout.ref_logprobs[i].sum(), ref, **SAME)
        torch.testing.assert_close(rollout.rewards[i], score.scores[i] - 0.15 * (own - ref), **SAME)


@both
def test_X9_what_stands_behind_the_end_changes_nothing(script, accelerator):
    policy, responses = tiny.make_policy(script=script), eos_responses()
    others = responses.clone()
    for i, end in enumerate(ENDS):
        if end is not None:
            others[i, end + 1 :] = torch.randint(1, 60, (4 - end,), generator=torch.Generator().manual_seed(i))
    assert not torch.equal(responses, others)
    results = []
    for tokens in (responses, others):
        rollout, score = eos_rollout(policy, tokens, script)
        sums, gradients = tiny.step_gradients(script, policy, rollout, eos_args(script), accelerator)
        metrics = tiny.summarise(script, rollout, score, [sums], 0.15, eos_args(script))
        results.append({k: torch.as_tensor(v) for k, v in metrics.items()} | gradients)
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_X9_loss_and_metrics_are_those_of_ragged_rows_in_a_slow_loop(accelerator):
    policy = tiny.make_policy()
    rollout, score = eos_rollout(policy, eos_responses())
    moved = tiny.make_policy(seed=1)  # other weights, so that ratios and values differ from the old ones
    moved.lm.load_state_dict(
        {
            k: v + 0.02 * torch.randn(v.shape, generator=torch.Generator().manual_seed(5))
            for k, v in policy.lm.state_dict().items()
        }
    )
    moved.lm.tie_weights()
    with torch.no_grad():
        new = [x.double().numpy() for x in moved(rollout.contexts, rollout.responses)]
    sums, _ = tiny.step_gradients(ppo, moved, rollout, eos_args(), accelerator)

    ragged = [(i, t) for i, n in enumerate(REAL) for t in range(n)]
    r, v, old = (x.double().numpy() for x in (rollout.rewards, rollout.values, rollout.logprobs))
    flat = np.array([r[i, t] for i, t in ragged])
    scale = 1 / math.sqrt(flat.var() + 1e-8)
    advantages = {}
    for i, n in enumerate(REAL):
        row = ((r[i, :n] - flat.mean()) * scale + flat.mean())[None]
        for t, a in enumerate(naive_advantages(row, v[i : i + 1, :n], 1.0, 0.95)[0]):
            advantages[i, t] = a
    a = np.array(list(advantages.values()))
    returns, policy_loss, value_loss, entropy = {}, 0.0, 0.0, 0.0
    for i, t in ragged:
        ratio, advantage = math.exp(new[0][i, t] - old[i, t]), (advantages[i, t] - a.mean()) / math.sqrt(a.var() + 1e-8)
        policy_loss += max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2)) / len(ragged)
        returns[i, t] = target = advantages[i, t] + v[i, t]
        clipped = min(max(new[2][i, t], v[i, t] - 0.2), v[i, t] + 0.2)
        value_loss += 0.5 * max((new[2][i, t] - target) ** 2, (clipped - target) ** 2) / len(ragged)
        entropy += new[1][i, t] / len(ragged)
    expected = {"loss/policy_avg": policy_loss, "loss/value_avg": value_loss, "policy/entropy_avg": entropy}
    assert abs(policy_loss) > 0.01
    for name, value in expected.items():
        assert ppo.means([sums])[name].item() == pytest.approx(value, abs=1e-4), name

    metrics = ppo.summarise(rollout, score, [sums], 0.15, PAD, eos_args())
    returns, values = (np.array([x[key] for key in ragged]) for x in (returns, v))
    assert float(metrics["ppo/returns/mean"]) == pytest.approx(returns.mean(), abs=1e-4)
    assert float(metrics["ppo/returns/var"]) == pytest.approx(returns.var(), abs=1e-4)
    assert float(metrics["ppo/val/mean"]) == pytest.approx(values.mean(), abs=1e-4)
    assert float(metrics["ppo/val/var"]) == pytest.approx(values.var(), abs=1e-4)
    ref = rollout.ref_logprobs.double().numpy()
    kl = sum(old[i, t] - ref[i, t] for i, t in ragged) / 8
    assert float(metrics["objective/kl"]) == pytest.approx(kl, abs=1e-4)
    assert float(metrics["objective/entropy"]) == pytest.approx(-sum(old[i, t] for i, t in ragged) / 8, abs=1e-4)
    assert float(metrics["objective/response_length"]) == pytest.approx(sum(REAL) / 8)
    assert float(metrics["objective/ended"]) == pytest.approx(6 / 8)
    assert float(metrics["objective/rlhf_reward"]) == pytest.approx(22 / 8 - 0.15 * kl, abs=1e-4)


@every_script_with("moments")
def test_X11_moments_are_over_the_masked_numbers_of_all_rows(script):
    """Population mean and variance of 1, 2, 3, 6 are 3 and 3.5. Over two processes: test_distributed.py."""
    x = torch.tensor([[1.0, 2.0, 77.0], [3.0, 6.0, -1e30]])
    mean, variance = script.moments(x, torch.tensor([[True, True, False], [True, True, False]]))
    assert (mean.item(), variance.item()) == (3.0, 3.5)
