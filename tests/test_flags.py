"""Every flag of the scripts does something, and options of later systems are off by default."""

import functools
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import tiny
import torch
from conftest import SCRIPTS, read_metrics, without_times
from tiny import make_args
from torch.testing import assert_close
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

import ppo
import train_reward

UPDATES = dict(
    seed=2,
    lr=2e-3,
    adam_eps=1e-3,
    total_episodes=8,
    eval_every=1,
    num_ppo_epochs=1,
    num_minibatches=1,
    anneal_lr=False,
    max_grad_norm=0.1,
    cliprange=0.01,
    clip_score=0.5,
    kl_coef=0.3,
    kl_target=None,
    kl_horizon=100,
)
CHANGES = {  # another value than in `results`
    "ppo": dict(
        UPDATES,
        gamma=0.9,
        lam=0.5,
        cliprange_value=0.01,
        vf_coef=1.0,
        whiten_rewards=False,
        whiten_advantages=False,
    ),
    "rloo": UPDATES,
    "train_reward": dict(
        seed=2,
        lr=2e-3,
        adam_eps=1e-3,
        num_labels=8,
        num_heldout=2,
        batch_size=6,
        normalize_samples=9,
        rollout_batch_size=6,
    ),
    "sft": dict(
        seed=2,
        lr=2e-3,
        num_epochs=2,
        eval_every=1,
        num_heldout=3,
        batch_size=3,
        block_size=12,
        warmup=0.5,
        weight_decay=1.0,
        max_grad_norm=0.1,
    ),
}
ELSEWHERE = """task batch_size micro_batch_tokens rollout_batch_size rloo_k eval_queries policy_model
    tf32 ref_model gradient_checkpointing reward_model run_name output_dir keep_every
    save_every resume track"""  # tested in the files of what they do
OFF = dict(
    clip_score=None,
    max_grad_norm=None,
    anneal_lr=True,
    whiten_advantages=True,
    gradient_checkpointing=False,
    resume=None,
    keep_every=None,
    save_every=None,
    track=False,
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_has_a_test(name):
    flags = {field.name for field in fields(SCRIPTS[name].Args)}
    changed = CHANGES[name].keys()
    assert changed <= flags <= changed | set(ELSEWHERE.split())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(script, flags) → metrics of a run on tiny models, without times; runs are kept."""
    task = tiny.write_task(tmp_path_factory.mktemp("flags") / "task")

    @functools.cache
    def results(name, **flags):
        of_rl = name in ("ppo", "rloo")
        if of_rl:
            flags.setdefault("total_episodes", 16)
        if name == "train_reward":
            flags.setdefault("num_heldout", 4)
        run = tiny.FakeRun()
        run.main = False  # no pictures
        args = make_args(None if of_rl else task, SCRIPTS[name], **flags)
        tiny.start(SCRIPTS[name], args, files=not of_rl, Run=run)
        return without_times(run.metrics)

    return results


@pytest.mark.parametrize(("name", "flag"), [(x, flag) for x in CHANGES for flag in CHANGES[x]])
def test_a_flag_changes_the_run(name, flag, results):
    assert results(name, **{flag: CHANGES[name][flag]}) != results(name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_options_are_off_by_default_for_every_task(name):
    defaults = vars(SCRIPTS[name].Args(task=tiny.make_task()))
    on = [flag for flag in OFF if flag in defaults and defaults[flag] != OFF[flag]]
    assert on == (["max_grad_norm"] if name == "sft" else [])  # part of its recipe
    for preset in SCRIPTS[name].PRESETS.values():
        assert OFF.keys().isdisjoint(preset)


@pytest.mark.parametrize(
    ("clip", "expected"),
    [(2.0, [-2.0, 0.5, 2.0, 2.0, -2.0]), (None, [-9.0, 0.5, 2.5, 1e4, -7.0])],
)
def test_X2_scores_are_clipped_and_the_penalty_with_them(clip, expected):
    reward = tiny.fake_reward(lambda *texts: torch.tensor([-9.0, 0.5, 2.5, 1e4, 0.0]))
    responses = torch.full((5, 5), tiny.EOS)
    responses[4] = tiny.EOS + 1  # no truncate token
    args = make_args(unfinished_score=-7.0, clip_score=clip)
    scores, *_ = ppo.score_responses(reward, responses, responses, {}, tiny.IDS, args)
    assert scores.tolist() == expected


@tiny.both
def test_X8_gradients_longer_than_max_grad_norm_are_scaled_down_to_it(script):
    def gradient(bound):
        args = make_args(script=script, max_grad_norm=bound, total_episodes=8)
        run = tiny.start(script, args, AdamTF=tiny.Recorder)
        return torch.cat([x.flatten() for x in run.optimizer.gradients[0]])

    free = gradient(None)
    norm = free.norm().item()
    assert_close(gradient(norm / 7), free / 7, rtol=1e-4, atol=1e-7)
    assert torch.equal(gradient(norm * 2), free)


@tiny.both
def test_X8_G5_without_anneal_lr_the_learning_rate_is_constant(script):
    run = tiny.start(script, make_args(script=script, anneal_lr=False))
    assert [group["lr"] for group in run.optimizer.param_groups] == [1e-3]


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
    assert '"gpt2"' in Path("reward_model/config.json").read_text()


def test_X14_ppo_without_whitened_advantages():
    """Advantages are returns minus values then, whatever was done to the rewards."""
    args = make_args(whiten_advantages=False)
    rollout = tiny.make_rollout(tiny.make_policy(), args)
    advantages, returns = ppo.compute_advantages(rollout, args)
    assert_close(advantages, returns - rollout.values)
    whitened, same = ppo.compute_advantages(rollout, replace(args, whiten_advantages=True))
    assert torch.equal(same, returns) and not torch.allclose(whitened, advantages, atol=0.1)


@pytest.mark.parametrize("name", SCRIPTS)
def test_gradient_checkpointing_recomputes_every_block_and_changes_nothing(name, runs, monkeypatch):
    monkeypatch.chdir(runs.folder)
    forward = GPT2MLP.forward
    recomputed = []  # in a backward pass, or not

    def spy(self, *args):
        if torch.is_grad_enabled():
            recomputed.append(torch._C._current_graph_task_id() != -1)
        return forward(self, *args)

    monkeypatch.setattr(GPT2MLP, "forward", spy)
    new = f"{name}_checkpointed"
    files = dict(run_name=new, output_dir=new)
    SCRIPTS[name].main(replace(runs.args[name], gradient_checkpointing=True, **files))
    found = without_times(read_metrics(new))
    expected = without_times(runs.metrics[name])
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert recomputed.count(True) == recomputed.count(False) > 0
