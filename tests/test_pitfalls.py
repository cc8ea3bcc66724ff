"""Where such code went wrong before (pitfalls 1 to 22), where no other file shows it.
1 is L6 in test_matrix.py; 2, 3, 5, 6, 8, 12 to 15 are G3, R1, P6, X11, P4, G4, X9 and P5 in
test_details.py; 9 of ppo and rloo is X9 there; 4 is G2; 11, and 19 on two processes:
test_distributed.py; 16 is L3 in test_rloo.py; 17 is in test_resume.py; 19 is in test_golden.py for
ppo, in test_diffs.py for rloo. Below are 7, 9, 10, 18, 20, 22 and, after them, 33."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import rloo
import sft
import train_reward
import utils
from machinery import checkpoints, distributed, models, queries, runs
from machinery.labels import Labels
from machinery.tokens import load_tokenizer


@tiny.both
def test_nan_at_masked_positions_changes_nothing(script, accelerator):
    """Neither rollout, nor gradients, nor metrics, where some responses of a micro-batch have ended."""
    sizes = dict(total_episodes=8, num_ppo_epochs=1, micro_batch_tokens=4096)
    args = tiny.make_args(script=script, eos_task=True, truncate_after=0, **sizes)
    compute_hidden = script.compute_hidden
    results = []
    for padding in (0.0, math.nan):

        def fill_padding(backbone, input_ids, mask, *rest, padding=padding, **options):
            hidden = compute_hidden(backbone, input_ids, mask, *rest, **options)
            return hidden.masked_fill(~mask[..., None], padding)

        rollouts: list = []
        spies = dict(compute_hidden=fill_padding, AdamTF=tiny.Recorder)
        spies["Rollout"] = tiny.noisy_rollout(script, rollouts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_reward, "compute_hidden", fill_padding)
            run = tiny.start(script, args, tiny.make_policy(script=script), **spies)
        assert 0 < rollouts[1].mask.float().mean() < 1
        found = [*rollouts[1]]
        for gradients in run.optimizer.gradients:
            found += gradients
        for name, x in run.metrics[0].items():
            if "time" not in name:
                found.append(torch.tensor(x))
        results.append(found)
    for clean, other in zip(*results, strict=True):
        assert clean.isfinite().all() and torch.equal(clean, other)


@pytest.mark.parametrize(("k", "micro_batch_tokens"), [(2, 40), (3, 1), (3, 40), (3, 4096)])
def test_R4_reward_training_follows_the_mean_over_labels(k, micro_batch_tokens, accelerator):
    """Of 6 labels with k candidates each, all of uneven length. Queries are computed once."""
    rng = np.random.default_rng(0)
    model = tiny.make_reward()
    queries = [rng.integers(1, tiny.PAD, n) for n in (8, 1, 3, 5, 2, 8)]
    responses = []
    for _ in queries:
        lengths = rng.integers(1, 6, k)
        responses.append([rng.integers(1, tiny.PAD, n) for n in lengths])
    labels = Labels(queries, responses, np.arange(6) % k)
    sizes = dict(num_labels=6, batch_size=6, num_heldout=0, micro_batch_tokens=micro_batch_tokens)
    args = train_reward.Args(task=tiny.make_task(), **sizes)
    seen: list = []
    model.backbone.wte.register_forward_pre_hook(lambda _, x: seen.extend(x[0].flatten()))
    spies = dict(AdamTF=tiny.Recorder, normalize=lambda *a: (0.0, 1.0))
    run = tiny.start(train_reward, args, model, labels=labels, **spies)
    computed = len(seen)
    num_tokens = 0
    losses = []
    right = 0
    for query, candidates, best in zip(queries, responses, labels.best, strict=True):
        rewards = []
        for response in candidates:
            rewards.append(model(torch.tensor([[*query, *response]])))
            num_tokens += len(response)
        num_tokens += len(query)
        logits = torch.cat(rewards)
        losses.append(logits.logsumexp(dim=0) - logits[best])
        right += int(logits.argmax()) == best
    loss = torch.stack(losses).mean()
    assert computed == num_tokens
    assert run.metrics[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert run.metrics[0]["accuracy"] == pytest.approx(right / 6)
    tiny.assert_gradients(run, model, loss)


def test_of_n_equal_rewards_each_is_the_largest_in_1_of_n_cases():
    rewards = torch.tensor([[1.0, 1, 0], [2, 2, 2], [0, 1, 0], [3, 0, 1], [0, 1, 1]])
    found = train_reward.accuracies(rewards, torch.tensor([0, 2, 1, 1, 0]))
    assert found.tolist() == pytest.approx([1 / 2, 1 / 3, 1, 0, 0])


@pytest.mark.parametrize("micro_batch_tokens", [20, 4096])
def test_sft_follows_the_mean_over_tokens(micro_batch_tokens, accelerator, monkeypatch):
    """Of the real tokens of responses. Clipping far above the norm hides no factor; it clips."""
    monkeypatch.setattr(torch.optim, "AdamW", tiny.Recorder)
    lm = tiny.make_lm()
    prompts = [6, 6, 1, 3, 6]
    rows = torch.cat([tiny.make_contexts(prompts, 6), tiny.make_responses(5, 5)], dim=1)
    rows[1, 8:] = tiny.PAD
    rows[3, 10:] = tiny.PAD
    sizes = dict(batch_size=4, num_heldout=1, micro_batch_tokens=micro_batch_tokens)
    args = sft.Args(task=tiny.make_task(), max_grad_norm=1e6, **sizes)
    run = tiny.start(sft, args, lm, tokens=rows)
    losses = []
    for i in range(1, 5):  # the first is held out
        real = rows[i][rows[i] != tiny.PAD]
        logprobs = lm(real[None]).logits[0].log_softmax(dim=1)
        for t in range(prompts[i], len(real)):
            losses.append(-logprobs[t - 1, real[t]])
    assert len(losses) == 2 + 5 + 4 + 5
    loss = torch.stack(losses).mean()
    assert run.metrics[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    tiny.assert_gradients(run, lm, loss)
    clipped = tiny.start(sft, replace(args, max_grad_norm=0.1), tiny.make_lm(), tokens=rows)
    norm = torch.nn.utils.get_total_norm(clipped.optimizer.gradients[0])
    assert norm.item() == pytest.approx(0.1, rel=1e-4)


def test_sft_steps_and_rates_are_those_of_a_linear_warm_up_and_decay(runs, monkeypatch):
    """5% of so few steps are one: it has the peak rate, and then n - 1, n - 2, …, 1 parts of n - 1."""
    monkeypatch.chdir(runs.folder)
    lines = runs.metrics["sft"]
    n = len(lines)
    assert 5 < n == len(sft_blocks(runs)[1]) // 2 < 30
    assert lines[0]["lr"] == pytest.approx(1e-3)
    for step in range(1, n):
        assert lines[step]["lr"] == pytest.approx(1e-3 * (n - step) / (n - 1))
        assert lines[step]["epoch"] == step / n
    args = sft.Args(task=tiny.make_task(), lr=1.0, warmup=0.4)
    found = [sft.learning_rate(step, 5, args) for step in range(5)]
    assert found == pytest.approx([0.5, 1.0, 1.0, 2 / 3, 1 / 3])


def sft_blocks(runs) -> tuple[torch.Tensor, queries.TokenTable]:
    """Held-out blocks and the others of the run of sft.py."""
    args = runs.args["sft"]
    tokenizer, ids = load_tokenizer(args.task, args.task.response_length)
    return queries.load_blocks(args.task, 10, tokenizer, ids).hold_out(6)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_saved_policy_loads_as_a_language_model_with_the_same_logits(kind, tmp_path, accelerator):
    """Tied weights stay tied, and no pad was added to the embedding."""
    folder = str(tiny.write_model(tmp_path / "start", kind))
    saved = tmp_path / "saved"
    policy = rloo.Policy(models.load_lm(folder), tiny.WORDS, 0.7)
    policy, optimizer = accelerator.prepare(policy, rloo.AdamTF(policy.parameters(), lr=1e-2))
    contexts = tiny.make_contexts([2, 6], 6, vocab=tiny.WORDS)
    policy(contexts, tiny.make_responses(2, 4))[0].sum().backward()
    optimizer.step()
    lm = policy.lm.eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    runs.save_model(lm, tokenizer, saved, checkpoints.full_state(lm)[0], {})
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    start = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        logits = loaded(tokens).logits
        torch.testing.assert_close(logits, lm(tokens).logits, atol=1e-5, rtol=0)
        assert not torch.allclose(logits, start(tokens).logits)
    embedding = loaded.get_input_embeddings().weight
    is_tied = embedding is loaded.get_output_embeddings().weight
    assert is_tied == lm.config.tie_word_embeddings
    assert len(embedding) == tiny.WORDS


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_reward_model_round_trips(kind, tmp_path):
    model = tiny.make_reward(kind)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded = train_reward.RewardModel.from_pretrained(str(tmp_path))
    assert not loaded.training and {p.dtype for p in loaded.parameters()} == {torch.float32}
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), atol=0, rtol=0)
    tokens = utils.pad_left([[3, 4], [5, 6, 7, 8]], 6, tiny.PAD)
    torch.testing.assert_close(loaded(tokens), model(tokens), atol=1e-6, rtol=1e-6)
    assert loaded.config.pad_id == tiny.PAD


def test_sampling_leaves_a_model_in_the_mode_that_it_was_in(accelerator):
    for training in (True, False):  # a policy, a frozen model
        model = tiny.make_policy().train(training)
        with distributed.inference(accelerator, model):
            assert not model.training
        assert model.training == training


@tiny.both
def test_under_bf16_probabilities_statistics_and_weights_are_fp32(script, bf16_accelerator):
    """In the rollout and in training the same: autocast in the transformer, not behind it."""
    seen = []
    rollouts = []

    def spy_logits(lm, hidden):
        logits = models.compute_logits(lm, hidden)
        assert torch.is_autocast_enabled("cpu") and logits.dtype == torch.float32
        seen.append(logits.detach())
        return logits

    policy = tiny.make_policy(script=script)
    patches = dict(compute_logits=spy_logits, Rollout=tiny.noisy_rollout(script, rollouts))
    args = tiny.make_args(script=script, total_episodes=8)
    run = tiny.start(script, args, policy, **patches)
    numbers = [x for x in rollouts[1] if x.is_floating_point()]
    numbers += policy.parameters()
    for state in run.optimizer.state.values():
        numbers += state.values()
    assert {x.dtype for x in numbers} == {torch.float32}
    contexts = tiny.make_contexts([8, 3], 8)
    responses = tiny.make_responses(2, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "compute_logits", spy_logits)
        logprobs, entropies, *_ = policy(contexts, responses)
    exact = (seen[-1].double() / 0.7).log_softmax(dim=-1)
    chosen = exact.gather(1, responses.view(-1, 1)).view(2, 5)
    torch.testing.assert_close(logprobs.double(), chosen, atol=1e-5, rtol=0)
    entropy = -(exact.exp() * exact).sum(dim=1).view(2, 5)
    torch.testing.assert_close(entropies.double(), entropy, atol=1e-5, rtol=0)


def test_checkpoints_in_half_precision_are_trained_in_fp32(tmp_path):
    folder = str(tmp_path)
    tiny.make_lm().bfloat16().save_pretrained(folder)
    made = [models.load_lm(folder), train_reward.new_reward_model(folder, tiny.PAD)]
    (tmp_path / "model.safetensors").unlink()
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    made.append(models.load_lm(folder, allow_random=True))
    assert {p.dtype for model in made for p in model.parameters()} == {torch.float32}


def test_sfts_held_out_evaluation_runs_and_is_logged(runs, monkeypatch):
    """Every 3 steps and at the last one: the loss of the blocks that were held out."""
    lines = runs.metrics["sft"]
    logged = [line["step"] for line in lines if "heldout/perplexity" in line]
    assert logged == sorted({*range(2, len(lines), 3), len(lines) - 1})
    monkeypatch.chdir(runs.folder)
    blocks = sft_blocks(runs)[0][:]
    with torch.no_grad():
        logits = models.load_lm("sft")(blocks).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten()).item()
    assert lines[-1]["heldout/loss"] == pytest.approx(loss, rel=1e-5)
    assert lines[-1]["heldout/perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


@tiny.both
@pytest.mark.parametrize("updates", [2, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_with_an_lr_of_0_nothing_drifts(script, updates, precision, task, here, monkeypatch):
    """Evaluations have the same unseen queries and random numbers; 10 of 40 are held out."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    rollouts: list = []
    monkeypatch.setattr(script, "Rollout", tiny.keep(script.Rollout, rollouts))
    sizes = dict(total_episodes=40 * updates, batch_size=40, micro_batch_tokens=240)
    sizes |= dict(eval_queries=10, eval_every=updates // 2, num_minibatches=1, lr=0.0)
    files = dict(run_name="run", output_dir="out", reward_fn="two_processes:count_e")
    script.main(tiny.make_args(task, script, truncate_token=None, **sizes, **files))

    heldout = []
    seen = set()
    for rollout in rollouts:
        queries = {tuple(row) for row in rollout.queries.tolist()}
        if len(rollout.queries) == 10:
            heldout.append(rollout.queries.tolist())
        else:
            seen |= queries
    assert len(heldout) == 3 and heldout[0] == heldout[1] == heldout[2]
    assert len(seen) == 30 and not seen & set(map(tuple, heldout[0]))

    lines = [json.loads(x) for x in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    for line in lines[:updates]:
        assert line["objective/kl"] == 0  # policy and reference read the same batches
        assert line["ppo/policy/approxkl_avg"] < (1e-8 if precision == "no" else 1e-3)
    evaluations = []
    coefs = []
    for line in lines:
        if "eval/scores" in line:
            coefs.append(line.pop("eval/kl_coef"))
            evaluations.append({k: x for k, x in line.items() if "eval/" in k})
    assert coefs[0] > coefs[1] > coefs[2]  # the KL is below its target
    assert evaluations[0] == evaluations[1] == evaluations[2]
    before = models.load_lm(task.base_model).state_dict()
    after = load_file("out/model.safetensors")
    for name, value in after.items():
        assert torch.equal(value, before[name])


@tiny.both
@pytest.mark.parametrize("eos_task", [True, False])
def test_an_evaluation_counts_a_response_to_its_end_or_all_of_it(script, eos_task, accelerator):
    """The policy is surer by 1 at the first token, 2 at the second, …; a score counts tokens."""
    task = tiny.make_task(eos_task=eos_task, truncate_after=0, unfinished_score=-3.0)
    held_out = torch.tensor([[7, tiny.EOS, 7, 7, 7], [7, 7, 7, 7, 7], [9, 9, 9, 9, 9]])
    training = tiny.make_responses(8, 5)
    policy = tiny.make_policy(script=script)
    ref = tiny.make_policy(seed=3, script=script)
    forward = policy.forward
    samples = []
    run = tiny.FakeRun()

    def surer(contexts, responses):
        logprobs, *others = forward(contexts, responses)
        given = ref(contexts, responses)[0].detach()
        gaps = torch.arange(1.0, 6) * (responses != tiny.PAD)
        return (logprobs * 0 + given + gaps, *others)

    def sampled(lm, contexts, *rest):
        return held_out if len(contexts) == 3 else training

    def reward(queries, responses):
        return (responses != tiny.PAD).sum(dim=1).float()

    policy.forward = surer
    run.log_samples = lambda step, columns, *_: samples.append(columns)
    args = tiny.make_args(task, script, total_episodes=8, lr=0.0, kl_coef=0.5, kl_target=None)
    tiny.start(script, args, policy, ref=ref, reward=reward, sample_in_batches=sampled, Run=run)
    kl = [15, 15, 15]
    lengths = [5, 5, 5]
    if eos_task:
        kl = [3, 15, 15]
        lengths = [2, 5, 5]
    expected = {
        "eval/scores": (2 - 3 - 3) / 3,
        "eval/scores_std": 5 * math.sqrt(2) / 3,
        "eval/kl": sum(kl) / 3,
        "eval/rlhf_reward": (2 - 3 - 3) / 3 - 0.5 * sum(kl) / 3,
        "eval/kl_coef": 0.5,
        "eval/response_length": sum(lengths) / 3,
        "eval/cut_length": 4.0,
        "eval/ended": 1 / 3,
    }
    first, last = run.metrics
    assert {k: v for k, v in first.items() if k.startswith("eval/")} == last
    assert {name: last[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    assert len(samples) == 2  # before and after
    for columns in samples:
        assert columns["score"].tolist() == [2, -3, -3]
        assert columns["kl"].tolist() == pytest.approx(kl, abs=1e-4)
        total = [2 - 0.5 * kl[0], -3 - 0.5 * 15, -3 - 0.5 * 15]
        assert columns["total"].tolist() == pytest.approx(total, abs=1e-4)
        responses = utils.decode(tiny.Tokenizer(), columns["response"], tiny.IDS)
        assert responses == [f"7 {tiny.EOS}", "7 7 7 7 7", "9 9 9 9 9"]


def test_heldout_labels_are_predicted_in_batches_and_averaged():
    """Five labels with two candidates: right with 0.9, 0.7 and 0.8, wrong with 0.6 and 0.55."""
    first = torch.tensor([0.9, 0.6, 0.7, 0.8, 0.55])  # probabilities of the first candidate
    logits = torch.stack([first, 1 - first], dim=1).log()
    best = [0, 1, 0, 0, 1]
    tokens = [[np.array([3 + 2 * i]), np.array([4 + 2 * i])] for i in range(5)]
    queries = [np.array([1, 2])] * 4 + [np.array([i]) for i in range(1, 6)]
    labels = Labels(queries, tokens[:4] + tokens, np.array(best[:4] + best))
    model = tiny.make_reward()
    model.score = lambda x, *rest: logits.flatten()[x[:, -1] - 3]
    args = train_reward.Args(task=tiny.make_task(), num_labels=4, batch_size=2)
    run = tiny.start(train_reward, args, model, labels=labels, normalize=lambda *a: (0.0, 1.0))
    chosen = np.log([0.9, 0.4, 0.7, 0.8, 0.45]).mean()
    others = np.log([0.1, 0.6, 0.3, 0.2, 0.55]).mean()
    found = run.metrics[-1]
    assert found["heldout/accuracy"] == pytest.approx(0.6)
    assert found["heldout/loss"] == pytest.approx(-chosen, abs=1e-5)
    assert found["heldout/reward_chosen"] == pytest.approx(chosen, abs=1e-5)
    assert found["heldout/reward_others"] == pytest.approx(others, abs=1e-5)


@pytest.mark.parametrize("column", ["completion", None])
def test_continuations_are_compared_with_the_tokens_that_follow_their_contexts(column):
    """Contexts of 4 tokens where the data has responses, and of a quarter of a block elsewhere."""
    tokens = torch.arange(10, 34).view(2, 12)
    task = tiny.make_task(response_length=3, response_column=column)
    args = sft.Args(task=task, block_size=8)
    found = sft.sample_continuations(tiny.make_lm(), tokens, 4, tiny.IDS, args)
    n = 4 if column else 2
    assert torch.equal(found["text"], tokens[:, :n])
    assert torch.equal(found["reference"], tokens[:, n : n + 3])
    assert found["continuation"].shape == (2, 3)
