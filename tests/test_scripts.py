"""The scripts from end to end on tiny files: EOS tasks, checkpointing, evaluations, no drift."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from accelerate.state import AcceleratorState
from conftest import SCRIPTS, read_metrics, without_times
from safetensors.torch import load_file
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

import ppo
import sft
import train_reward
from machinery import unpadding
from machinery.models import load_lm


def small(script, task, name, **settings):
    """Arguments of a run; of ppo and rloo over three updates."""
    settings = dict(output_dir=f"{name}_model", run_name=name, lr=1e-3) | settings
    if script is sft:
        return sft.Args(task=task, num_heldout=4, **dict(batch_size=4) | settings)
    if script is train_reward:
        sizes = dict(num_labels=12, batch_size=4, normalize_samples=8, rollout_batch_size=8)
        return train_reward.Args(task=task, **sizes, **settings)
    settings = dict(reward_fn="two_processes:count_e", num_minibatches=1, eval_every=2) | settings
    return tiny.make_args(task, script, **settings)


def spy_on(script, name, monkeypatch):
    """A list of the arguments and the result of each call of a function of a script."""
    function, calls = getattr(script, name), []

    def spy(*args):
        calls.append((args, function(*args)))
        return calls[-1][1]

    monkeypatch.setattr(script, name, spy)
    return calls


@pytest.fixture
def eos_task(task, tmp_path, monkeypatch):
    """A tiny task in the columns of TL;DR; runs are written into its folder."""
    monkeypatch.chdir(tmp_path)
    return tiny.eos_task(task, tmp_path)


def test_X9_the_whole_pipeline_of_an_eos_task(eos_task, monkeypatch, capsys):
    """sft on completions, reward model on pairs, ppo and rloo: after its end a response is padding.

    No script computes padding, also where responses are longer than those of the labels.
    """
    unpadding.say_once.cache_clear()
    sft.main(small(sft, eos_task, "sft", num_epochs=60, batch_size=12, lr=1e-2))
    assert read_metrics("sft")[-1]["heldout/perplexity"] < 20  # it has learned to end, too
    task = replace(eos_task, base_model="sft_model")
    train_reward.main(small(train_reward, task, "reward"))
    for name in ("ppo", "rloo"):
        calls = spy_on(SCRIPTS[name], "Rollout", monkeypatch)
        from_model = dict(reward_fn=None, reward_model="reward_model", eval_queries=3)
        SCRIPTS[name].main(small(SCRIPTS[name], task, name, **from_model))
        rollouts = [rollout for _, rollout in calls if len(rollout.mask) == 8]
        metrics = read_metrics(name)
        for rollout, line in zip(rollouts, metrics, strict=True):
            rows = rollout.responses.tolist()
            ends = [row.index(0) if 0 in row else 12 for row in rows]  # 0 is <|endoftext|>
            lengths = np.minimum(np.array(ends) + 1, 12)
            assert rollout.mask.sum(dim=1).tolist() == lengths.tolist()
            assert line["objective/response_length"] == pytest.approx(lengths.mean())
            assert line["objective/ended"] == pytest.approx(np.mean(np.array(ends) < 12))
        assert metrics[0]["objective/ended"] > 0
    assert "padding is computed" not in capsys.readouterr().out


@pytest.mark.parametrize("name", SCRIPTS)
def test_gradient_checkpointing_recomputes_every_block_and_changes_nothing(name, runs, monkeypatch):
    monkeypatch.chdir(runs.folder)
    forward, calls = GPT2MLP.forward, {"forward": 0, "recomputed": 0}

    def count(self, *args):
        if torch.is_grad_enabled():
            in_backward = torch._C._current_graph_task_id() != -1
            calls["recomputed" if in_backward else "forward"] += 1
        return forward(self, *args)

    monkeypatch.setattr(GPT2MLP, "forward", count)
    files = dict(run_name=f"{name}_checkpointed", output_dir=f"{name}_checkpointed")
    SCRIPTS[name].main(replace(runs.args[name], gradient_checkpointing=True, **files))
    found, expected = map(without_times, (read_metrics(files["run_name"]), runs.metrics[name]))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert calls["recomputed"] == calls["forward"] > 0


@tiny.both
@pytest.mark.parametrize("updates", [2, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_with_a_learning_rate_of_0_nothing_drifts(
    script, updates, precision, task, tmp_path, monkeypatch
):
    """Evaluations have the same unseen queries and random numbers; 10 of 40 are held out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    AcceleratorState._reset_state(True)
    calls = spy_on(script, "Rollout", monkeypatch)
    sizes = dict(total_episodes=40 * updates, batch_size=40, micro_batch_tokens=240)
    sizes |= dict(eval_queries=10, eval_every=updates // 2, lr=0.0)
    task = replace(task, truncate_token=None)
    script.main(small(script, task, "run", **sizes))
    AcceleratorState._reset_state(True)
    batches = [rollout.queries for _, rollout in calls]
    heldout = [queries for queries in batches if len(queries) == 10]
    assert len(heldout) == 3 and all(torch.equal(x, heldout[0]) for x in heldout)
    seen = {tuple(row) for x in batches if len(x) == 40 for row in x.tolist()}
    assert len(seen) == (30 if script is ppo or updates > 2 else 20)
    assert not seen & {tuple(row) for row in heldout[0].tolist()}
    lines = [json.loads(x) for x in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    for line in lines[:updates]:
        assert line["objective/kl"] == 0  # policy and reference read the same batches
        assert line["ppo/policy/approxkl_avg"] < (1e-8 if precision == "no" else 1e-3)
    evaluations = [{k: x for k, x in line.items() if "eval/" in k} for line in lines]
    evaluations = [x for x in evaluations if x]
    coefs = [line.pop("eval/kl_coef") for line in evaluations]
    assert coefs[0] > coefs[1] > coefs[2]  # the KL is below its target
    assert evaluations[0] == evaluations[1] == evaluations[2] and "eval/scores" in evaluations[0]
    before, after = load_lm(task.base_model), load_file("run_model/model.safetensors")
    assert all(torch.equal(value, before.state_dict()[name]) for name, value in after.items())


@pytest.mark.parametrize("processes", [2, 7])
def test_held_out_sequences_count_once_and_every_process_has_as_many(
    processes, accelerator, monkeypatch
):
    """Five sequences. FSDP2 needs as many forward passes on every process."""
    tokens = torch.cat([tiny.make_contexts([6, 1, 3, 6, 2], 6), tiny.make_responses(5, 7)], dim=1)
    tokens[0, 8:], tokens[2, 10:] = tiny.PAD, tiny.PAD
    model = sft.LanguageModel(tiny.make_lm(), tiny.PAD)
    args = sft.Args(task=tiny.make_task(), micro_batch_tokens=26)
    alone = sft.heldout_loss(model, tokens, 6, args, accelerator)
    sums, sizes = [], []
    model.register_forward_pre_hook(lambda model, inputs: sizes.append(len(inputs[0])))
    monkeypatch.setattr(sft, "all_sum", lambda x: sums.append(x) or x + 1)
    for rank in range(processes):
        of_rank = dict(process_index=rank, num_processes=processes)
        sft.heldout_loss(model, tokens, 6, args, SimpleNamespace(**of_rank))
        assert sum(sizes) == (rank + 1) * -(-5 // processes)
    total, count = sum(sums[::2]).item(), sum(sums[1::2]).item()
    assert count == 2 + 7 + 4 + 7 + 7
    assert total / count == pytest.approx(alone, rel=1e-5)
