"""Every flag of the scripts does something, and options of later systems are off by default."""

import functools
import json
from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny
import torch
from conftest import SCRIPTS, read_metrics, without_times
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

import ppo
import train_reward
from machinery import decoding

OPTIMIZER = dict(seed=2, lr=2e-3, adam_eps=1e-3)
UPDATES = OPTIMIZER | dict(total_episodes=16, eval_every=1, num_ppo_epochs=1, num_minibatches=1)
UPDATES |= dict(anneal_lr=False, max_grad_norm=0.1, cliprange=0.01, clip_score=0.5)
UPDATES |= dict(kl_coef=0.3, kl_target=None, kl_horizon=100)
CHANGES = {  # another value than in `results`
    "ppo": UPDATES
    | dict(gamma=0.9, lam=0.5, cliprange_value=0.01, vf_coef=1.0)
    | dict(whiten_rewards=False, whiten_advantages=False),
    "rloo": UPDATES,
    "train_reward": OPTIMIZER
    | dict(num_labels=8, num_heldout=2, batch_size=6, normalize_samples=9, rollout_batch_size=6),
    "sft": dict(seed=2, num_epochs=2, eval_every=1, num_heldout=3, batch_size=3, block_size=12)
    | dict(lr=2e-3, warmup=0.5, weight_decay=1.0, max_grad_norm=0.1),
}
ELSEWHERE = """task batch_size micro_batch_tokens rollout_batch_size rloo_k eval_queries policy_model
    tf32 ref_model gradient_checkpointing reward_model run_name output_dir keep_every
    save_every resume track"""  # tested in the files of what they do
OFF = dict(clip_score=None, max_grad_norm=None, anneal_lr=True, resume=None)
OFF |= dict(gradient_checkpointing=False, keep_every=None, save_every=None, track=False)
OFF |= dict(whiten_advantages=True)


def test_every_flag_has_a_test():
    for name, script in SCRIPTS.items():
        flags = {field.name for field in fields(script.Args)}
        assert CHANGES[name].keys() <= flags <= CHANGES[name].keys() | {*ELSEWHERE.split()}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(script, flags) → metrics of a run on tiny models, without times; runs are kept."""
    task = tiny.write_task(tmp_path_factory.mktemp("flags") / "task")

    @functools.cache
    def results(name, **flags):
        run = tiny.FakeRun()
        of_rl = name in ("ppo", "rloo")
        run.main = False  # no pictures
        heldout = dict(num_heldout=4) if name == "train_reward" else {}
        args = tiny.make_args(None if of_rl else task, SCRIPTS[name], **heldout | flags)
        return without_times(tiny.start(SCRIPTS[name], args, files=not of_rl, Run=run).metrics)

    return results


@pytest.mark.parametrize(("name", "flag"), [(x, flag) for x in CHANGES for flag in CHANGES[x]])
def test_a_flag_changes_the_run(name, flag, results):
    assert results(name, **{flag: CHANGES[name][flag]}) != results(name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_options_are_off_by_default_for_every_task(name):
    defaults = vars(SCRIPTS[name].Args(task=tiny.make_task()))
    on = {flag for flag, value in defaults.items() if OFF.get(flag, value) != value}
    assert on == ({"max_grad_norm"} if name == "sft" else set())  # part of its recipe
    assert not any(OFF.keys() & preset.keys() for preset in SCRIPTS[name].PRESETS.values())


def test_X2_scores_are_clipped_and_the_penalty_with_them():
    reward = tiny.fake_reward(lambda *texts: torch.tensor([-9.0, 0.5, 2.5, 1e4, 0.0]))
    responses = torch.full((5, 5), tiny.EOS)
    responses[4] = tiny.EOS + 1  # no truncate token
    task = tiny.make_task(unfinished_score=-7.0)
    for clip, expected in ((2.0, [-2.0, 0.5, 2.0, 2.0, -2.0]), (None, [-9.0, 0.5, 2.5, 1e4, -7.0])):
        args = tiny.make_args(task, clip_score=clip)
        scores, *_ = ppo.score_responses(reward, responses, responses, {}, tiny.IDS, args)
        assert scores.tolist() == expected


@tiny.both
def test_X8_gradients_longer_than_max_grad_norm_are_scaled_down_to_it(script):
    def gradient(bound):
        sizes = dict(total_episodes=8, num_ppo_epochs=1, num_minibatches=1)
        args = tiny.make_args(script=script, max_grad_norm=bound, **sizes)
        run = tiny.start(script, args, AdamTF=tiny.Recorder)
        return torch.cat([x.flatten() for x in run.optimizer.gradients[0]])

    free = gradient(None)
    norm = sum(x**2 for x in free.tolist()) ** 0.5
    for bound in (norm / 7, norm / 2):
        torch.testing.assert_close(gradient(bound), free * (bound / norm), rtol=1e-4, atol=1e-7)
    assert torch.equal(gradient(norm * 2), free)


@tiny.both
def test_X8_G5_without_anneal_lr_the_learning_rate_is_constant(script):
    run = tiny.start(script, tiny.make_args(script=script, anneal_lr=False))
    assert [group["lr"] for group in run.optimizer.param_groups] == [1e-3]
    assert [line["ppo/lr"] for line in run.metrics[:3]] == [1e-3] * 3


@pytest.mark.parametrize("script", ["ppo", "rloo"])
def test_a_reference_with_another_tokenizer_is_refused(script, start):
    tiny.write_model(Path("ref"), seed=5)
    tokenizer = json.loads(Path("ref/tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]  # the KL would still be a number
    words["Ġcat"], words["Ġdog"] = words["Ġdog"], words["Ġcat"]
    Path("ref/tokenizer.json").write_text(json.dumps(tokenizer))
    tiny.refuses(lambda: start(script, ref_model="ref"), "--ref_model ref: ")


def test_X13_R3_policy_model_samples_base_model_becomes_the_reward_model(start, monkeypatch):
    other = str(tiny.write_model(Path("other"), "llama"))
    loaded = []
    monkeypatch.setattr(train_reward, "load_lm", tiny.keep(train_reward.load_lm, loaded))
    start("train_reward", policy_model=other, output_dir="reward_model")
    assert [lm.config.model_type for lm in loaded] == ["llama", "gpt2"]
    config = Path("reward_model/config.json").read_text()
    assert '"gpt2"' in config and '"llama"' not in config


def test_X14_ppo_without_whitened_advantages():
    """Advantages are returns minus values then, whatever was done to the rewards."""
    args = tiny.make_args(whiten_advantages=False)
    rollout = tiny.make_rollout(tiny.make_policy(), args)
    advantages, returns = ppo.compute_advantages(rollout, args)
    torch.testing.assert_close(advantages, returns - rollout.values)
    whitened, same = ppo.compute_advantages(rollout, replace(args, whiten_advantages=True))
    assert torch.equal(same, returns) and not torch.allclose(whitened, advantages, atol=0.1)


@tiny.both
def test_the_response_length_reaches_the_decoder(script):
    args = tiny.make_args(script=script, total_episodes=8)
    lm = tiny.make_lm()
    contexts = tiny.make_contexts([3, 2], 8)
    uniform = tiny.uniform(args.task.response_length, 2)
    batch = Mock(wraps=decoding.DecodingBatch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "DecodingBatch", batch)
        script.sample(lm, contexts, uniform, tiny.IDS, args)
    assert batch.call_args.kwargs == {"max_new_tokens": args.task.response_length}


@pytest.mark.parametrize("name", SCRIPTS)
def test_gradient_checkpointing_recomputes_every_block_and_changes_nothing(name, runs, monkeypatch):
    monkeypatch.chdir(runs.folder)
    forward = GPT2MLP.forward
    calls = {"forward": 0, "recomputed": 0}

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
