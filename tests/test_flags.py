"""Every flag of the scripts does something, and options of later systems are off by default."""

import functools
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from conftest import SCRIPTS, without_times
from tiny import EOS, IDS, PAD
from torch.testing import assert_close

import ppo
import rloo
import train_reward
from machinery import models, queries
from machinery.progress import Progress
from machinery.queries import load_queries, load_texts
from machinery.tokens import load_tokenizer

both = pytest.mark.parametrize("script", [ppo, rloo], ids=["ppo", "rloo"])

# ---------------------------------------------------------------------------------------- all flags

OPTIMIZER = dict(seed=2, lr=2e-3, adam_eps=1e-3)
UPDATES = OPTIMIZER | dict(total_episodes=16, eval_every=1, num_ppo_epochs=1, num_minibatches=1)
UPDATES |= dict(anneal_lr=False, max_grad_norm=0.1, cliprange=0.01, clip_score=0.5)
UPDATES |= dict(kl_coef=0.3, kl_target=None, kl_horizon=100, kl_estimator="k3")
CHANGES = {  # another value than in `results`
    "ppo": UPDATES
    | dict(gamma=0.9, lam=0.5, cliprange_value=0.01, vf_coef=1.0)
    | dict(whiten_rewards=False, whiten_advantages=False),
    "rloo": UPDATES | dict(whiten_advantages=True),
    "train_reward": OPTIMIZER
    | dict(num_labels=8, num_heldout=2, batch_size=6, normalize_samples=9, rollout_batch_size=6),
    "sft": dict(seed=2, num_epochs=2, eval_every=1, num_heldout=3, batch_size=3, block_size=12)
    | dict(lr=2e-3, warmup=0.5, weight_decay=1.0, max_grad_norm=0.1),
}
BY_FILE = {  # where the other flags are tested
    "test_queries.py": "task",
    "test_details.py": "batch_size micro_batch_tokens rollout_batch_size",
    "test_rloo.py": "rloo_k",
    "test_flags.py": "eval_queries policy_model cuda_graphs ref_model",
    "test_launch.py": "tf32",
    "test_scripts.py": "gradient_checkpointing reward_model",
    "test_runs.py": "run_name output_dir keep_every",
    "test_resume.py": "save_every resume",
    "test_artifacts.py": "track push_to_hub",
}


def test_every_flag_has_a_test(request):
    others = {flag for flags in BY_FILE.values() for flag in flags.split()}
    for name, script in SCRIPTS.items():
        flags = {field.name for field in fields(script.Args)}
        assert CHANGES[name].keys() <= flags <= CHANGES[name].keys() | others
    for file, names in BY_FILE.items():
        text = (request.path.parent / file).read_text()
        assert [flag for flag in names.split() if flag not in text] == []


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(script, flags) → metrics of a run on tiny models, without times; runs are kept."""
    task = tiny.write_task(tmp_path_factory.mktemp("flags") / "task")
    small = dict(num_labels=12, batch_size=4, normalize_samples=5, rollout_batch_size=4)
    sizes = {
        "train_reward": small | dict(num_heldout=4),
        "sft": dict(num_heldout=6, batch_size=2, block_size=10, eval_every=3),
    }

    @functools.cache
    def results(name, **flags):
        script = SCRIPTS[name]
        if name in ("ppo", "rloo"):
            metrics = tiny.run_episodes(script, tiny.small_args(script, **flags)).metrics
        else:
            run = tiny.FakeRun()
            run.main = False  # no pictures
            args = script.Args(task=task, **dict(lr=1e-3) | sizes[name] | flags)
            metrics = tiny.run_main(script, args, {"Run": run}).metrics
        return without_times(metrics)

    return results


@pytest.mark.parametrize(
    ("name", "flag"), [(name, flag) for name, flags in CHANGES.items() for flag in flags]
)
def test_a_flag_changes_the_run(name, flag, results):
    assert results(name, **{flag: CHANGES[name][flag]}) != results(name)


def test_the_same_flags_give_the_same_run(results):
    """What the test above stands on."""
    for name in SCRIPTS:
        assert results(name) == results(name, seed=1)  # the default; not kept as the same call


OFF = dict(kl_estimator="k1", clip_score=None, max_grad_norm=None, anneal_lr=True)
OFF |= dict(gradient_checkpointing=False, keep_every=None)
OFF |= dict(save_every=None, resume=None, track=False, push_to_hub=None)


@pytest.mark.parametrize("name", SCRIPTS)
def test_options_are_off_by_default_for_every_task(name):
    script = SCRIPTS[name]
    defaults = script.Args(task=tiny.make_task())
    off = {flag: value for flag, value in OFF.items() if hasattr(defaults, flag)}
    if name == "sft":
        del off["max_grad_norm"]  # there, it is part of the recipe
    off |= {"ppo": {"whiten_advantages": True}, "rloo": {"whiten_advantages": False}}.get(name, {})
    assert {flag: getattr(defaults, flag) for flag in off} == off
    for task, preset in script.PRESETS.items():
        assert not off.keys() & preset.keys(), task


# ------------------------------------------------------------------------------------------ X2, X3


def test_X2_scores_are_clipped_and_the_penalty_with_them():
    reward = lambda queries, responses, columns: torch.tensor([-9.0, 0.5, 2.5, 1e4, 0.0])  # noqa: E731
    responses = torch.full((5, 5), EOS)
    responses[4] = EOS + 1  # no truncate token
    task = tiny.make_task(missing_eos_penalty=-7.0)
    for clip, expected in ((2.0, [-2.0, 0.5, 2.0, 2.0, -2.0]), (None, [-9.0, 0.5, 2.5, 1e4, -7.0])):
        args = tiny.make_args(task, clip_score=clip)
        scores, _, _ = ppo.score_responses(reward, responses, responses, {}, IDS, args)
        assert scores.tolist() == expected


@pytest.mark.parametrize("mu", [0.1, 1.0])
def test_X3_mean_and_variance_of_each_estimator_are_the_closed_form_of_two_gaussians(mu):
    """KL(N(0, 1) || N(mu, 1)) is mu^2 / 2; under pi, log pi / pi_ref is N(mu^2 / 2, mu^2).

    Over the quantiles of N(0, 1) instead of samples.
    """
    x = (torch.arange(2_000_000, dtype=torch.float64) + 0.5) / 2_000_000
    x = torch.distributions.Normal(0.0, 1.0).icdf(x)
    kl, square = mu**2 / 2, mu**2
    for estimator, expected in {
        "k1": (kl, square),
        "k2": (kl + square**2 / 8, square**2 / 2 + square**3 / 4),
        "k3": (kl, math.exp(square) - 1 - square),
    }.items():
        terms = ppo.estimate_kl(-(x**2) / 2, -((x - mu) ** 2) / 2, estimator)
        assert (terms.mean().item(), terms.var().item()) == pytest.approx(expected, rel=2e-3)


@both
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_X3_the_estimate_is_penalized_and_logged(script, estimator):
    """By a slow loop over the tokens."""
    policy, ref = (tiny.make_policy(seed=seed, script=script) for seed in (0, 3))
    args = tiny.make_args(script=script, kl_estimator=estimator)
    rollout = tiny.make_rollout(policy, args, script, ref=ref)
    metrics = script.rollout_metrics(rollout, {}, 0.15, PAD, None)
    sums = []
    for given in zip(rollout.contexts, rollout.responses, strict=True):
        log_ratio = tiny.run_alone(policy, *given)[0] - tiny.run_alone(ref, *given)[0]
        terms = (0.5 * x**2 if estimator == "k2" else math.exp(-x) - 1 + x for x in log_ratio)
        sums.append(sum(terms).item())
    rewards = rollout.rewards.sum(dim=1) if script is ppo else rollout.rewards
    expected = [score - 0.15 * x for score, x in zip(rollout.scores.tolist(), sums, strict=True)]
    assert rewards.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert metrics["objective/kl"].item() == pytest.approx(sum(sums) / 8, rel=1e-4)


# --------------------------------------------------------------------------------- X8, X13, X14, G5


@both
def test_X8_gradients_longer_than_max_grad_norm_are_scaled_down_to_it(script):
    def gradient(bound):
        sizes = dict(total_episodes=8, num_ppo_epochs=1, num_minibatches=1)
        args = tiny.small_args(script, max_grad_norm=bound, **sizes)
        run = tiny.run_episodes(script, args, AdamTF=tiny.Recorder)
        return torch.cat([x.flatten() for x in run.optimizer.optimizer.gradients[0]])

    free = gradient(None)
    norm = math.sqrt(sum(x**2 for x in free.tolist()))
    for bound in (norm / 7, norm / 2):
        assert_close(gradient(bound), free * (bound / norm), rtol=1e-4, atol=1e-7)
    assert torch.equal(gradient(norm * 2), free)


@both
def test_X8_G5_without_anneal_lr_the_learning_rate_is_constant(script):
    lrs = []

    class Spy(tiny.Recorder):
        def step(self, closure=None):
            lrs.extend(group["lr"] for group in self.param_groups)
            super().step(closure)

    for anneal_lr in (True, False):
        tiny.run_episodes(script, tiny.small_args(script, anneal_lr=anneal_lr), AdamTF=Spy)
    falling = [1e-3] * 4 + [1e-3 * 2 / 3] * 4 + [1e-3 / 3] * 4  # 3 updates of 4 steps
    assert lrs == pytest.approx(falling + [1e-3] * 12)


@pytest.mark.parametrize("script", [ppo, rloo], ids=["ppo", "rloo"])
def test_the_kl_is_to_ref_model_and_the_policy_starts_at_base_model(script, tmp_path, monkeypatch):
    """By a slow loop over the first update's texts, each alone."""
    monkeypatch.chdir(tmp_path)
    task = tiny.write_task(Path("task"))
    names = {"policy": task.base_model, "ref": str(tiny.write_model(Path("ref"), seed=5))}
    Path("reward.py").write_text("def score(queries, responses): return [0.0 for _ in queries]")
    rollouts: list = []
    make = script.Rollout
    monkeypatch.setattr(script, "Rollout", lambda *x: rollouts.append(make(*x)) or rollouts[-1])
    flags = dict(reward_fn="reward.py:score", ref_model=names["ref"], eval_every=99)
    script.main(tiny.small_args(script, task, **flags, total_episodes=8))
    lms = {name: models.load_lm(path) for name, path in names.items()}
    first = next(x for x in rollouts if len(x.mask) == 8)
    for context, response, kl in zip(first.contexts, first.responses, first.kl, strict=True):
        tokens = torch.cat([context[context != tiny.WORDS], response])[None]
        logps = {
            name: (lm(tokens).logits[0, -len(response) - 1 : -1] / task.temperature).log_softmax(-1)
            for name, lm in lms.items()
        }
        taken = {name: x.gather(1, response[:, None])[:, 0] for name, x in logps.items()}
        torch.testing.assert_close(kl, taken["policy"] - taken["ref"], atol=1e-4, rtol=1e-4)
    assert first.kl.abs().max() > 0.01


def test_X13_R3_policy_model_samples_and_base_model_becomes_the_reward_model(
    start, tmp_path, monkeypatch
):
    other, loaded = str(tiny.write_model(tmp_path / "other", "llama")), []
    monkeypatch.setattr(train_reward, "load_lm", tiny.keep(train_reward.load_lm, loaded))
    start("train_reward", policy_model=other, output_dir="reward_model")
    assert [lm.config.model_type for lm in loaded] == ["llama", "gpt2"]
    config = (tmp_path / "reward_model" / "config.json").read_text()
    assert '"gpt2"' in config and '"llama"' not in config


def test_X14_ppo_without_whitened_advantages():
    """Advantages are returns minus values then, whatever was done to the rewards."""
    args = tiny.make_args(whiten_advantages=False)
    rollout = tiny.make_rollout(tiny.make_policy(), args)
    advantages, returns = ppo.compute_advantages(rollout, args)
    assert_close(advantages, returns - rollout.values)
    whitened, same = ppo.compute_advantages(rollout, replace(args, whiten_advantages=True))
    assert torch.equal(same, returns) and not torch.allclose(whitened, advantages, atol=0.1)


def test_X14_rloo_whitens_advantages_over_the_batch():
    rewards = torch.randn(8, generator=torch.Generator().manual_seed(0))
    r = rewards.double().numpy().reshape(4, 2)  # [K, P]
    plain = np.array([r[i] - (r.sum(axis=0) - r[i]) / 3 for i in range(4)]).ravel()
    args = tiny.make_args(script=rloo, rloo_k=4)
    assert rloo.compute_advantages(rewards, args).tolist() == pytest.approx(plain, abs=1e-5)
    whitened = rloo.compute_advantages(rewards, replace(args, whiten_advantages=True))
    expected = (plain - plain.mean()) / math.sqrt(plain.var() + 1e-8)
    assert whitened.tolist() == pytest.approx(expected, abs=1e-5)


# ---------------------------------------------------------------------------------- speed and sizes


@both
@pytest.mark.parametrize("graphs", [False, True])
def test_cuda_graphs_and_response_length_reach_the_decoder(script, graphs):
    asked = []
    args = tiny.small_args(script, cuda_graphs=graphs, total_episodes=8)
    spy = lambda lm, response_length, graphs: asked.append((response_length, graphs))  # noqa: E731
    tiny.run_episodes(script, args, Decoder=spy)
    assert asked == [(args.task.response_length, graphs)]


@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_eval_queries_and_batch_size_are_the_episodes_of_evaluations_and_updates(name, runs):
    """4 and 8; evaluations before updates 0 and 2 and at the end."""
    assert [len(rollout.scores) for rollout in runs.rollouts[name]] == [4, 8, 8, 4, 8, 4]


def test_total_episodes_bounds_the_queries_that_are_tokenized(task, monkeypatch):
    """A random sample, and always the same: NumPy's generator 0 permutes six to 3, 2, 5, ..."""
    texts = load_texts(task, "text").select(range(6))
    monkeypatch.setattr(queries, "load_texts", lambda *args, **kwargs: texts)
    monkeypatch.setattr(queries, "SMALL_TABLE", 2)
    tokenizer, ids = load_tokenizer(task, 5)
    table = load_queries(task, tokenizer, ids, max_queries=3)
    expected = tokenizer([texts[i]["text"] for i in (3, 2, 5)])["input_ids"]
    assert table.rows["tokens"] == [row[: task.query_length] for row in expected]


def test_the_time_left_of_a_resumed_run_counts_its_own_updates(monkeypatch, capsys):
    """10 seconds for updates 4 and 5 of 10: 5 seconds each, and 4 are left."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = Progress(10, ["x"], {})
    progress.start = 4
    now[0] = 110.0
    progress.update(5, {"x": 1.0})
    assert "left 20 s" in capsys.readouterr().out
