"""The scripts from end to end on tiny files: RLOO, the pipeline of a task that ends at EOS, gradient checkpointing."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import read_metrics
from transformers import AutoModelForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

import ppo
import rloo
import sft
import train_reward
import utils

REWARD = "test_scripts:count_e"


def count_e(queries, responses):
    """A reward that needs no model."""
    return [response.count("e") / 4 for response in responses]


def small(script, task, name, **settings):
    """Arguments of a run of ppo or rloo over 3 updates."""
    sizes = dict(total_episodes=24, batch_size=8, num_ppo_epochs=2, micro_batch_size=3, rollout_batch_size=5, lr=1e-3)
    settings = sizes | dict(reward_fn=REWARD, output_dir=f"{name}_model", run_name=name, sample_every=2) | settings
    return script.Args(task=task, **settings)


def test_rloo_runs_from_the_command_to_a_policy_that_loads(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = replace(task, truncate_token=None)
    rloo.main(small(rloo, task, "rloo", rloo_k=2))
    metrics = read_metrics("rloo")
    assert [line["ppo/episode"] for line in metrics] == [8, 16, 24]
    assert metrics[0]["objective/kl"] == pytest.approx(0, abs=1e-4) and metrics[2]["objective/kl"] != 0
    before = utils.load_lm(task.base_model).state_dict()
    after = AutoModelForCausalLM.from_pretrained("rloo_model").state_dict()
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "runs/rloo/curves.png").stat().st_size > 0


@pytest.fixture
def eos_task(task, tmp_path):
    """The tiny task in the columns of TL;DR: prompts with completions, and pairs; a completion ends at <|endoftext|>."""
    names, things = ("Anna", "Ben", "Clara", "Tom"), ("cat", "old red house", "sea", "bus to the village")
    rows = [
        {"prompt": f"{name} went home.", "completion": f" {name} saw the {thing}."}
        for name in names
        for thing in things
    ]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " It was cold."} for row in rows]
    for name, content in (("rows", rows), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)) + "\n")
    return replace(
        task,
        query_dataset=str(tmp_path / "rows.jsonl"),
        query_column="prompt",
        response_column="completion",
        label_dataset=str(tmp_path / "pairs.jsonl"),
        query_length=8,
        response_length=12,
        truncate_token="<|endoftext|>",
        truncate_after=0,
        eos_task=True,
    )


def test_X9_the_whole_pipeline_of_a_task_that_ends_at_eos(eos_task, tmp_path, monkeypatch):
    """sft on the responses → pairs → both algorithms; every response behind its end is padding to them."""
    monkeypatch.chdir(tmp_path)
    sft.main(
        sft.Args(task=eos_task, num_epochs=60, batch_size=12, lr=1e-2, num_heldout=4, output_dir="sft", run_name="sft")
    )
    assert read_metrics("sft")[-1]["heldout/perplexity"] < 20  # of 1000 tokens: it has learned to end too
    task = replace(eos_task, base_model="sft")
    train_reward.main(
        train_reward.Args(
            task=task, num_labels=12, batch_size=4, lr=1e-3, normalize_samples=8, output_dir="reward", run_name="reward"
        )
    )
    for script, extra in ((ppo, {}), (rloo, dict(rloo_k=2))):
        name, rollouts, optimise = script.__name__, [], script.optimise
        monkeypatch.setattr(script, "optimise", lambda *a, f=optimise, r=rollouts: (r.append(a[2]), f(*a))[1])
        script.main(small(script, task, name, reward_fn=None, reward_model="reward", **extra))
        for rollout, line in zip(rollouts, read_metrics(name), strict=True):
            ended = [row.index(0) if 0 in row else 12 for row in rollout.responses.tolist()]  # 0 is <|endoftext|>
            lengths = np.minimum(np.array(ended) + 1, 12)
            assert rollout.mask.sum(dim=1).tolist() == lengths.tolist()
            assert line["objective/response_length"] == pytest.approx(lengths.mean())
            assert line["objective/ended"] == pytest.approx(np.mean(np.array(ended) < 12))
        assert read_metrics(name)[0]["objective/ended"] > 0


@pytest.mark.parametrize("script", [sft, train_reward, ppo, rloo])
def test_gradient_checkpointing_runs_every_block_once_more_and_changes_nothing(script, task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task, forward, calls, logs = replace(task, truncate_token=None), GPT2MLP.forward, [], []
    monkeypatch.setattr(GPT2MLP, "forward", lambda self, *a, **k: (calls.append(1), forward(self, *a, **k))[1])
    for on in (False, True):
        calls.clear()
        flags = dict(gradient_checkpointing=on, output_dir="model", run_name="run")
        if script is sft:
            args = sft.Args(task=task, num_heldout=6, batch_size=2, block_size=10, lr=1e-3, **flags)
        elif script is train_reward:
            args = train_reward.Args(task=task, num_labels=12, batch_size=4, lr=1e-3, normalize_samples=8, **flags)
        else:
            args = small(script, task, "run", **{"output_dir": "model", "gradient_checkpointing": on})
        script.main(args)
        lines = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_metrics("run")]
        logs.append((len(calls), lines))
    (plain_calls, plain), (calls_with, with_it) = logs
    assert calls_with > plain_calls  # recomputed in the backward pass
    for a, b in zip(plain, with_it, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
