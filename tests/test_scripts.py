"""The scripts from end to end on tiny files: checkpointing, evaluations, no drift."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from conftest import SCRIPTS, read_metrics, without_times
from safetensors.torch import load_file
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

import ppo
from machinery.models import load_lm


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
def test_with_an_lr_of_0_nothing_drifts(script, updates, precision, task, here, monkeypatch):
    """Evaluations have the same unseen queries and random numbers; 10 of 40 are held out."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    rollouts: list = []
    monkeypatch.setattr(script, "Rollout", tiny.keep(script.Rollout, rollouts))
    sizes = dict(total_episodes=40 * updates, batch_size=40, micro_batch_tokens=240)
    sizes |= dict(eval_queries=10, eval_every=updates // 2, num_minibatches=1, lr=0.0)
    files = dict(run_name="run", output_dir="out", reward_fn="two_processes:count_e")
    script.main(tiny.make_args(task, script, truncate_token=None, **sizes, **files))
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
    before, after = load_lm(task.base_model), load_file("out/model.safetensors")
    assert all(torch.equal(value, before.state_dict()[name]) for name, value in after.items())
