"""Where such code went wrong before (pitfalls 1 to 22), where no other file shows it.
1 is L6 in test_matrix.py; 2, 3, 5, 6, 8, 12 to 15 are G3, R1, P6, X11, P4, G4, X9 and P5 in
test_details.py; 9 of ppo and rloo is X9 there; 4 is G2; 11, and 19 on two processes:
test_distributed.py; 16 is L3 in test_rloo.py; 17 is in test_resume.py; 19 is in test_golden.py for
ppo, in test_diffs.py for rloo. Below are 7, 9, 10, 18, 20, 22 and, after them, 33."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from conftest import read_lines, without_times
from safetensors.torch import load_file
from tiny import (
    EOS,
    IDS,
    KINDS,
    PAD,
    WORDS,
    FakeRun,
    Recorder,
    assert_gradients,
    both,
    make_args,
    make_contexts,
    make_lm,
    make_policy,
    make_responses,
    make_reward,
    make_task,
    noisy_rollout,
    write_model,
)
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo
import rloo
import sft
import train_reward
import utils
from machinery import checkpoints, distributed, models, queries, runs
from machinery.labels import Labels
from machinery.tokens import load_tokenizer


@both
def test_nan_at_masked_positions_changes_nothing(script, accelerator, monkeypatch):
    """Neither rollout, nor gradients, nor metrics, where some responses of a micro-batch have ended."""
    sizes = dict(total_episodes=8, num_ppo_epochs=1, micro_batch_tokens=4096)
    args = make_args(script=script, eos_task=True, truncate_after=0, **sizes)
    compute_hidden = script.compute_hidden
    results = []
    for padding in (0.0, math.nan):

        def fill_padding(backbone, input_ids, mask, *rest, padding=padding, **options):
            hidden = compute_hidden(backbone, input_ids, mask, *rest, **options)
            return hidden.masked_fill(~mask[..., None], padding)

        monkeypatch.setattr(train_reward, "compute_hidden", fill_padding)
        rollouts = []
        rollout = noisy_rollout(script, rollouts)
        spies = dict(compute_hidden=fill_padding, AdamTF=Recorder, Rollout=rollout)
        run = tiny.start(script, args, make_policy(script=script), **spies)
        assert 0 < rollouts[1].mask.float().mean() < 1
        metrics = without_times(run.metrics)[0]
        results.append([*rollouts[1], *sum(run.optimizer.gradients, []), *metrics.values()])
    for clean, other in zip(*results, strict=True):
        assert torch.as_tensor(clean).isfinite().all()
        assert torch.equal(torch.as_tensor(clean), torch.as_tensor(other))


@pytest.mark.parametrize("k, micro_batch_tokens", [(2, 40), (3, 1), (3, 4096)])
def test_R4_reward_training_follows_the_mean_over_labels(k, micro_batch_tokens, accelerator):
    """Of 6 labels with k candidates each, all of uneven length. Queries are computed once."""
    rng = np.random.default_rng(0)
    queries = [rng.integers(1, PAD, n) for n in (8, 1, 3, 5, 2, 8)]
    responses = []
    for _ in queries:
        responses.append([rng.integers(1, PAD, n) for n in rng.integers(1, 6, k)])
    labels = Labels(queries, responses, np.arange(6) % k)
    args = make_args(
        script=train_reward,
        num_labels=6,
        batch_size=6,
        num_heldout=0,
        micro_batch_tokens=micro_batch_tokens,
    )
    model = make_reward()
    seen = []
    model.backbone.wte.register_forward_pre_hook(lambda _, x: seen.extend(x[0].flatten()))
    spies = dict(AdamTF=Recorder, normalize=lambda *a: (0.0, 1.0))
    run = tiny.start(train_reward, args, model, labels=labels, **spies)
    assert len(seen) == sum(map(len, [*queries, *sum(responses, [])]))
    losses = []
    right = 0
    for i, query in enumerate(queries):
        logits = torch.cat([model(torch.tensor([[*query, *x]])) for x in responses[i]])
        best = labels.best[i]
        losses.append(logits.logsumexp(dim=0) - logits[best])
        right += logits.argmax().item() == best
    loss = torch.stack(losses).mean()
    assert run.metrics[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert run.metrics[0]["accuracy"] == pytest.approx(right / 6)
    assert_gradients(run, model, loss)


def test_of_n_equal_rewards_each_is_the_largest_in_1_of_n_cases():
    rewards = torch.tensor([[1.0, 1, 0], [2, 2, 2], [0, 1, 0], [3, 0, 1], [0, 1, 1]])
    found = train_reward.accuracies(rewards, torch.tensor([0, 2, 1, 1, 0]))
    assert found.tolist() == pytest.approx([1 / 2, 1 / 3, 1, 0, 0])


@pytest.mark.parametrize("micro_batch_tokens", [20, 4096])
def test_sft_follows_the_mean_over_tokens(micro_batch_tokens, accelerator, monkeypatch):
    """Of the real tokens of responses. Clipping far above the norm hides no factor; it clips."""
    monkeypatch.setattr(torch.optim, "AdamW", Recorder)
    prompts = [6, 6, 1, 3, 6]
    rows = torch.cat([make_contexts(prompts, 6), make_responses(5, 5)], dim=1)
    rows[1, 8:] = PAD
    rows[3, 10:] = PAD
    sizes = dict(batch_size=4, num_heldout=1, micro_batch_tokens=micro_batch_tokens)
    args = make_args(script=sft, max_grad_norm=1e6, **sizes)
    lm = make_lm()
    run = tiny.start(sft, args, lm, tokens=rows)
    losses = []
    for row, prompt in list(zip(rows, prompts, strict=True))[1:]:  # the first is held out
        tokens = row[row != PAD]
        logits = lm(tokens[None]).logits[0, prompt - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[prompt:], reduction="none"))
    assert list(map(len, losses)) == [2, 5, 4, 5]
    loss = torch.cat(losses).mean()
    assert run.metrics[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_gradients(run, lm, loss)
    clipped = tiny.start(sft, replace(args, max_grad_norm=0.1), make_lm(), tokens=rows)
    norm = torch.nn.utils.get_total_norm(clipped.optimizer.gradients[0])
    assert norm.item() == pytest.approx(0.1, rel=1e-4)


def test_sft_steps_and_rates_are_those_of_a_linear_warm_up_and_decay(runs, monkeypatch):
    """5% of so few steps are one: it has the peak rate, and then n - 1, n - 2, …, 1 parts of n - 1."""
    monkeypatch.chdir(runs.folder)
    lines = runs.metrics["sft"]
    _, blocks = sft_blocks(runs)
    n = len(lines)
    assert 5 < n == len(blocks) // 2 < 30
    assert lines[0]["lr"] == pytest.approx(1e-3)
    for step in range(1, n):
        assert lines[step]["lr"] == pytest.approx(1e-3 * (n - step) / (n - 1))
        assert lines[step]["epoch"] == step / n
    args = sft.Args(task=make_task(), lr=1.0, warmup=0.4)
    found = [sft.learning_rate(step, 5, args) for step in range(5)]
    assert found == pytest.approx([0.5, 1.0, 1.0, 2 / 3, 1 / 3])


def sft_blocks(runs):
    """Held-out blocks and the others of the run of sft.py."""
    task = runs.args["sft"].task
    tokenizer, ids = load_tokenizer(task, 5)
    return queries.load_blocks(task, 10, tokenizer, ids).hold_out(6)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_policy_loads_as_a_language_model_with_the_same_logits(kind, tmp_path, accelerator):
    folder = str(write_model(tmp_path / "start", kind))
    lm = rloo.Policy(models.load_lm(folder), WORDS, 0.7).lm.eval()
    for p in lm.parameters():
        p += 0.01 * torch.randn_like(p)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    saved = tmp_path / "saved"
    runs.save_model(lm, tokenizer, saved, checkpoints.full_state(lm)[0], {})
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    tokens = torch.arange(1, 9)[None]
    assert_close(loaded(tokens).logits, lm(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_model_round_trips(kind, tmp_path):
    model = make_reward(kind)
    model.save_pretrained(tmp_path)
    loaded = train_reward.RewardModel.from_pretrained(str(tmp_path))
    assert not loaded.training
    tokens = utils.pad_left([[3, 4], [5, 6, 7, 8]], 6, PAD)
    assert_close(loaded(tokens), model(tokens), atol=1e-6, rtol=1e-6)


def test_sampling_leaves_a_model_in_the_mode_that_it_was_in(accelerator):
    for training in (True, False):  # a policy, a frozen model
        model = make_policy().train(training)
        with distributed.inference(accelerator, model):
            assert not model.training
        assert model.training == training


@both
def test_under_bf16_probabilities_statistics_and_weights_are_fp32(
    script, bf16_accelerator, monkeypatch
):
    """In the rollout and in training the same: autocast in the transformer, not behind it."""
    seen = []
    rollouts = []

    def spy_logits(lm, hidden):
        logits = models.compute_logits(lm, hidden)
        assert torch.is_autocast_enabled("cpu")
        assert logits.dtype == torch.float32
        seen.append(logits.detach())
        return logits

    monkeypatch.setattr(script, "compute_logits", spy_logits)
    policy = make_policy(script=script)
    args = make_args(script=script, total_episodes=8)
    run = tiny.start(script, args, policy, Rollout=noisy_rollout(script, rollouts))
    numbers = [x for x in rollouts[1] if x.is_floating_point()]
    numbers += policy.parameters()
    for state in run.optimizer.state.values():
        numbers += state.values()
    assert {x.dtype for x in numbers} == {torch.float32}
    responses = make_responses(2, 5)
    logprobs, entropies, *_ = policy(make_contexts([8, 3], 8), responses)
    exact = (seen[-1].double() / 0.7).log_softmax(dim=-1)
    chosen = exact.gather(1, responses.view(-1, 1)).view(2, 5)
    assert_close(logprobs.double(), chosen, atol=1e-5, rtol=0)
    entropy = -(exact.exp() * exact).sum(dim=1).view(2, 5)
    assert_close(entropies.double(), entropy, atol=1e-5, rtol=0)


def test_checkpoints_in_half_precision_are_trained_in_fp32(tmp_path):
    folder = str(tmp_path)
    make_lm().bfloat16().save_pretrained(folder)
    made = [models.load_lm(folder), train_reward.new_reward_model(folder, PAD)]
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
    heldout, _ = sft_blocks(runs)
    blocks = heldout[:]
    with torch.no_grad():
        loss = models.load_lm("sft")(blocks, labels=blocks).loss.item()
    assert lines[-1]["heldout/loss"] == pytest.approx(loss, rel=1e-5)
    assert lines[-1]["heldout/perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


SLOW = pytest.mark.slow
DRIFTS = [
    (ppo, "bf16", 2),
    (rloo, "no", 2),
    pytest.param(ppo, "no", 100, marks=SLOW),
    pytest.param(rloo, "bf16", 100, marks=SLOW),
]


@pytest.mark.parametrize("script, precision, updates", DRIFTS)
def test_with_an_lr_of_0_nothing_drifts(script, precision, updates, task, here, monkeypatch):
    """Evaluations have the same queries and random numbers; 10 of 40 are held out."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    args = make_args(
        task,
        script,
        truncate_token=None,
        total_episodes=40 * updates,
        batch_size=40,
        micro_batch_tokens=240,
        eval_queries=10,
        eval_every=updates // 2,
        num_minibatches=1,
        lr=0.0,
        run_name="run",
        output_dir="out",
        reward_fn="two_processes:count_e",
    )
    script.main(args)
    lines = read_lines("runs/run/metrics.jsonl")
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
    assert evaluations == [evaluations[0]] * 3
    before = models.load_lm(task.base_model).state_dict()
    for name, value in load_file("out/model.safetensors").items():
        assert torch.equal(value, before[name])


@both
@pytest.mark.parametrize("eos_task", [True, False])
def test_an_evaluation_counts_a_response_to_its_end_or_all_of_it(script, eos_task, accelerator):
    """The policy is surer by 1 at the first token, 2 at the second, …; a score counts tokens."""
    held_out = torch.tensor([[7, EOS, 7, 7, 7], [7, 7, 7, 7, 7], [9, 9, 9, 9, 9]])
    training = make_responses(8, 5)
    policy = make_policy(script=script)
    ref = make_policy(seed=3, script=script)
    forward = policy.forward

    def surer(contexts, responses):
        logprobs, *others = forward(contexts, responses)
        given = ref(contexts, responses)[0].detach()
        gaps = torch.arange(1.0, 6) * (responses != PAD)
        return (logprobs * 0 + given + gaps, *others)

    def sampled(lm, contexts, *rest):
        return held_out if len(contexts) == 3 else training

    def reward(queries, responses):
        return (responses != PAD).sum(dim=1).float()

    policy.forward = surer
    samples = []
    run = FakeRun()
    run.log_samples = lambda step, columns, *_: samples.append(columns)
    task = make_task(eos_task=eos_task, truncate_after=0, unfinished_score=-3.0)
    args = make_args(task, script, total_episodes=8, lr=0.0, kl_coef=0.5, kl_target=None)
    tiny.start(script, args, policy, ref, reward, sample_in_batches=sampled, Run=run)
    first_kl, first_length = (3, 2) if eos_task else (15, 5)
    kl = (first_kl + 15 + 15) / 3
    score = (2 - 3 - 3) / 3
    expected = {
        "eval/scores": score,
        "eval/scores_std": 5 * math.sqrt(2) / 3,
        "eval/kl": kl,
        "eval/rlhf_reward": score - 0.5 * kl,
        "eval/kl_coef": 0.5,
        "eval/response_length": (first_length + 5 + 5) / 3,
        "eval/cut_length": 4.0,
        "eval/ended": 1 / 3,
    }
    first, last = run.metrics
    assert last.items() <= first.items()
    assert {name: last[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    assert len(samples) == 2  # before and after
    cut = held_out.clone()
    cut[0, 2:] = PAD
    for columns in samples:
        kl = torch.tensor([first_kl, 15.0, 15.0])
        assert columns["score"].tolist() == [2, -3, -3]
        assert_close(columns["kl"], kl, atol=1e-4, rtol=0)
        assert_close(columns["total"], columns["score"] - 0.5 * columns["kl"])
        assert torch.equal(columns["response"], cut)


def test_heldout_labels_are_predicted_in_batches_and_averaged():
    """Five labels with two candidates: right with 0.9, 0.7 and 0.8, wrong with 0.6 and 0.55."""
    first = torch.tensor([0.9, 0.6, 0.7, 0.8, 0.55])  # probabilities of the first candidate
    best = np.array([0, 1, 0, 0, 1])
    tokens = [[np.array([3 + 2 * i]), np.array([4 + 2 * i])] for i in range(5)]
    queries = [np.array([i]) for i in range(9)]  # those of the first four labels are for training
    labels = Labels(queries, tokens[:4] + tokens, np.concatenate([best[:4], best]))
    logits = torch.stack([first, 1 - first], dim=1).log().flatten()
    model = make_reward()
    model.score = lambda x, *rest: logits[x[:, -1] - 3]
    args = make_args(script=train_reward, num_labels=4, num_heldout=5)
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
    task = make_task(response_length=3, response_column=column)
    args = sft.Args(task=task, block_size=8)
    found = sft.sample_continuations(make_lm(), tokens, 4, IDS, args)
    n = 4 if column else 2
    assert torch.equal(found["text"], tokens[:, :n])
    assert torch.equal(found["reference"], tokens[:, n : n + 3])
    assert found["continuation"].shape == (2, 3)
