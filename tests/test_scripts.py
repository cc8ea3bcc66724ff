"""The scripts from end to end on tiny files: EOS tasks, checkpointing, evaluations, no drift."""

import json
from dataclasses import replace
from pathlib import Path

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
    rollouts: list = []
    monkeypatch.setattr(script, "Rollout", tiny.keep(script.Rollout, rollouts))
    sizes = dict(total_episodes=40 * updates, batch_size=40, micro_batch_tokens=240)
    sizes |= dict(eval_queries=10, eval_every=updates // 2, lr=0.0)
    task = replace(task, truncate_token=None)
    script.main(small(script, task, "run", **sizes))
    AcceleratorState._reset_state(True)
    batches = [rollout.queries for rollout in rollouts]
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
