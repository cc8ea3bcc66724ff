"""The scripts from end to end on tiny files: RLOO, the pipeline of a task that ends at EOS, gradient checkpointing, and
what `main` hands from phase to phase."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from accelerate.state import AcceleratorState
from conftest import read_metrics
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

import ppo
import rloo
import sft
import tasks
import train_reward
import utils

REWARD = "test_scripts:count_e"


def count_e(queries, responses):
    """A reward that needs no model."""
    return [response.count("e") / 4 for response in responses]


def small(script, task, name, **settings):
    """Arguments of a run of ppo or rloo over 3 updates."""
    sizes = dict(
        total_episodes=24,
        batch_size=8,
        num_ppo_epochs=2,
        micro_batch_tokens=36,
        rollout_batch_size=5,
        lr=1e-3,
        eval_queries=4,
    )
    settings = sizes | dict(reward_fn=REWARD, output_dir=f"{name}_model", run_name=name, eval_every=2) | settings
    return script.Args(task=task, **settings)


def spy_on(script, name, monkeypatch):
    """A list to which every call of the script's function `name` appends its arguments and what it returned."""
    function, calls = getattr(script, name), []

    def spy(*args):
        calls.append((args, function(*args)))
        return calls[-1][1]

    monkeypatch.setattr(script, name, spy)
    return calls


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
    """The tiny task in the columns of TL;DR."""
    return tiny.eos_task(task, tmp_path)


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
        name, rollouts = script.__name__, spy_on(script, "make_rollout", monkeypatch)
        script.main(small(script, task, name, reward_fn=None, reward_model="reward", **extra))
        rollouts = [rollout for _, (rollout, _) in rollouts]
        for rollout, line in zip(rollouts, read_metrics(name), strict=True):
            ended = [row.index(0) if 0 in row else 12 for row in rollout.responses.tolist()]  # 0 is <|endoftext|>
            lengths = np.minimum(np.array(ended) + 1, 12)
            assert rollout.mask.sum(dim=1).tolist() == lengths.tolist()
            assert line["objective/response_length"] == pytest.approx(lengths.mean())
            assert line["objective/kl_per_token"] == pytest.approx(line["objective/kl"] / lengths.mean(), abs=1e-6)
            assert line["objective/sqrt_kl"] == pytest.approx(max(line["objective/kl"], 0) ** 0.5, abs=1e-6)
            assert line["objective/ended"] == pytest.approx(np.mean(np.array(ended) < 12))
        assert read_metrics(name)[0]["objective/ended"] > 0


@pytest.mark.parametrize("script", [sft, train_reward, ppo, rloo])
def test_gradient_checkpointing_runs_every_block_once_more_and_changes_nothing(script, task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task, forward, calls, logs = replace(task, truncate_token=None), GPT2MLP.forward, [], []
    monkeypatch.setattr(GPT2MLP, "forward", lambda self, *a, **k: (calls.append(1), forward(self, *a, **k))[1])
    for on in (False, True):
        calls.clear()
        name = f"run{on}"
        flags = dict(gradient_checkpointing=on, output_dir=f"{name}_model", run_name=name)
        if script is sft:
            args = sft.Args(task=task, num_heldout=6, batch_size=2, block_size=10, lr=1e-3, **flags)
        elif script is train_reward:
            args = train_reward.Args(task=task, num_labels=12, batch_size=4, lr=1e-3, normalize_samples=8, **flags)
        else:
            args = small(script, task, name, gradient_checkpointing=on)
        script.main(args)
        lines = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_metrics(name)]
        logs.append((len(calls), lines))
    (plain_calls, plain), (calls_with, with_it) = logs
    assert calls_with > plain_calls  # recomputed in the backward pass
    for a, b in zip(plain, with_it, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("script", [ppo, rloo], ids=["ppo", "rloo"])
def test_P7_P9_main_takes_a_step_on_every_minibatch_of_every_epoch_with_numbers_of_its_own(
    script, task, tmp_path, monkeypatch
):
    """3 updates × 2 epochs × 2 minibatches of 4; ppo whitens and estimates each minibatch alone."""
    monkeypatch.chdir(tmp_path)
    rollouts, steps = (spy_on(script, name, monkeypatch) for name in ("make_rollout", "train_step"))
    estimates = spy_on(script, "estimate", monkeypatch) if script is ppo else []
    script.main(small(script, replace(task, truncate_token=None), "run", num_minibatches=2))
    assert len(rollouts) == 3 and len(steps) == 12 and len(estimates) == 12 * (script is ppo)
    for i, (step, _) in enumerate(steps):
        rollout, batch = rollouts[i // 4][1][0], step[2]
        rows = rows_in(rollout, batch)
        assert len(rows) == 4
        if i % 2:  # the second minibatch of an epoch
            assert sorted(rows + rows_in(rollout, steps[i - 1][0][2])) == list(range(8))
        if script is ppo:
            (of, _), targets = estimates[i]
            assert of is batch and step[3] is targets


def rows_in(rollout, batch):
    """Which rows of the rollout a minibatch holds, by context and response."""
    rows = torch.cat([rollout.contexts, rollout.responses], dim=1).tolist()
    return [rows.index(row) for row in torch.cat([batch.contexts, batch.responses], dim=1).tolist()]


@pytest.mark.parametrize("script", [ppo, rloo], ids=["ppo", "rloo"])
def test_P11_L6_main_makes_each_rollout_with_the_next_beta_and_the_order_of_its_first_epoch(
    script, task, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rollouts, cuts = (spy_on(script, name, monkeypatch) for name in ("make_rollout", "minibatches"))
    script.main(small(script, replace(task, truncate_token=None), "run", kl_target=6.0, kl_horizon=100))
    lines = read_metrics("run")
    betas = [args[4] for args, _ in rollouts]
    assert betas == pytest.approx([line["objective/kl_coef"] for line in lines]) and len(set(betas)) == 3
    for update in range(3):
        order = rollouts[update][0][3]
        inside, first, second = (args[0] for args, _ in cuts[3 * update : 3 * update + 3])
        assert inside is order and first is order and not np.array_equal(second, order)


@pytest.mark.parametrize("script", [ppo, rloo], ids=["ppo", "rloo"])
def test_the_evaluation_is_of_queries_that_training_never_sees_with_the_same_random_numbers(
    script, task, tmp_path, monkeypatch
):
    """With a learning rate of 0 every evaluation gives the same numbers; 40 queries, of which 10 are held out."""
    monkeypatch.chdir(tmp_path)
    evaluations, rollouts = (spy_on(script, name, monkeypatch) for name in ("evaluate", "make_rollout"))
    sizes = dict(total_episodes=80, batch_size=40, micro_batch_tokens=240, rollout_batch_size=20, eval_queries=10)
    script.main(small(script, replace(task, truncate_token=None), "run", lr=0.0, eval_every=1, **sizes))
    heldout = evaluations[0][0][2]
    assert len(evaluations) == 3 and len(heldout) == 10
    assert all(torch.equal(args[2], heldout) for args, _ in evaluations)
    metrics = [found for _, (found, _) in evaluations]
    assert metrics[0] == metrics[1] == metrics[2] and metrics[0]["eval/kl"] == 0
    seen = {tuple(row) for (_, queries, *_), _ in rollouts for row in queries.tolist()}
    assert len(seen) == (30 if script is ppo else 20) and not seen & {tuple(row) for row in heldout.tolist()}
    lines = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert [line["eval/scores"] for line in lines] == [metrics[0]["eval/scores"]] * 3


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("script", [ppo, rloo], ids=["ppo", "rloo"])
def test_33_with_a_learning_rate_of_0_nothing_drifts_over_a_hundred_updates(
    script, precision, task, tmp_path, monkeypatch
):
    """The policy stays the reference; the same held-out queries give the same numbers, to the bit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    AcceleratorState._reset_state(True)
    script.main(small(script, replace(task, truncate_token=None), "run", lr=0.0, total_episodes=800, eval_every=50))
    AcceleratorState._reset_state(True)
    lines = read_metrics("run")
    assert len(lines) == 100
    rounding = 1e-4 if precision == "no" else 0.05
    for name in ("ppo/val/ratio_min", "ppo/val/ratio_max"):
        assert all(abs(line[name] - 1) < rounding for line in lines)
    assert all(abs(line["objective/kl"]) < rounding for line in lines)
    assert {k: v for k, v in lines[0].items() if "eval/" in k} == {k: v for k, v in lines[50].items() if "eval/" in k}
    assert "eval/scores" in lines[50]
    before = utils.load_lm(task.base_model).state_dict()
    after = load_file("run_model/model.safetensors")
    assert all(torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize("script", [sft, train_reward, ppo, rloo])
def test_a_tokenizer_whose_pad_is_its_eos_changes_nothing(script, eos_task, tmp_path, monkeypatch):
    """Pitfall 4: our pad is an id of our own."""
    monkeypatch.chdir(tmp_path)
    config, logs = tmp_path / "task" / "model" / "tokenizer_config.json", []
    for name in ("plain", "same"):
        if name == "same":
            config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token": "<|endoftext|>"}))
            tokenizer = utils.AutoTokenizer.from_pretrained(eos_task.base_model)
            assert tokenizer.pad_token_id == tokenizer.eos_token_id
        flags = dict(output_dir=f"{name}_model", run_name=name)
        if script is sft:
            args = sft.Args(task=eos_task, num_heldout=4, batch_size=4, lr=1e-3, **flags)
        elif script is train_reward:
            args = train_reward.Args(task=eos_task, num_labels=12, batch_size=4, lr=1e-3, normalize_samples=8, **flags)
        else:
            args = small(script, eos_task, name)
        script.main(args)
        lines = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_metrics(name)]
        logs.append((lines, load_file(f"{name}_model/model.safetensors")))
    assert logs[0][0] == logs[1][0]
    assert all(torch.equal(value, logs[1][1][name]) for name, value in logs[0][1].items())


def test_a_task_without_a_preset_runs_with_the_defaults():
    """PRESETS hold what differs; descriptiveness differs nowhere."""
    for script in (ppo, rloo, sft, train_reward):
        assert "descriptiveness" not in script.PRESETS and set(script.PRESETS) <= set(tasks.TASKS)
        args = tasks.parse_args(script.Args, script.PRESETS, ["--task", "descriptiveness"])
        assert args == script.Args(task=tasks.TASKS["descriptiveness"])


@pytest.mark.parametrize("processes", [2, 3, 4, 7])
def test_heldout_rows_make_as_many_forwards_on_every_process_and_count_once(processes, accelerator, monkeypatch):
    """Five rows of uneven length, in forwards of one row or of two."""
    rows, lm = torch.cat([tiny.make_contexts([6, 1, 3, 6, 2], 6), tiny.make_responses(5, 7)], dim=1), tiny.make_lm()
    rows[0, 8:], rows[2, 10:] = tiny.PAD, tiny.PAD
    for tokens in (13, 26):
        args, forwards, sums = sft.Args(task=tiny.make_task(), micro_batch_tokens=tokens), [], []
        alone = sft.heldout_loss(lm, rows, 6, tiny.PAD, args, accelerator)
        with monkeypatch.context() as patch:
            patch.setattr(utils, "all_sum", lambda x, sums=sums: sums.append(x) or x + 1)
            counted, losses = forwards.append, sft.token_losses
            patch.setattr(sft, "token_losses", lambda *x: counted(len(sums)) or losses(*x))
            for rank in range(processes):
                process = SimpleNamespace(process_index=rank, num_processes=processes)
                sft.heldout_loss(lm, rows, 6, tiny.PAD, args, process)
        assert len({forwards.count(rank) for rank in range(processes)}) == 1
        total, count = sum(sums).tolist()
        assert count == 2 + 7 + 4 + 7 + 7 and total / count == pytest.approx(alone, rel=1e-5)
