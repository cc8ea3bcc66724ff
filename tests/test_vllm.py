"""diffs/vllm.diff with a stand-in for vLLM, which answers as a real server did (vllm_server.py)."""

import json
import sys
from dataclasses import replace
from inspect import getsource
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
import test_diffs
import tiny
import torch
from transformers import AutoModelForCausalLM
from vllm_server import ENDED, FAILURES, FIXED, INFO, fail, serve

from utils import TokenIds

patched = test_diffs.patched


@pytest.fixture(scope="session")
def script(patched):
    return patched("vllm")


def settings(script, url, name="run", **changes):
    """Three updates of 4 queries with 2 responses each (PPO: 8 with one); 3 evaluations of 4."""
    base = "rloo" if hasattr(script.Args, "rloo_k") else "ppo"
    changes.setdefault("total_episodes", 24)
    values = conftest.settings(base, run_name=name, **changes)
    return script.Args(**vars(values), vllm_url=url)


@pytest.mark.parametrize(("exchange", "ends"), [(FIXED, False), (ENDED, True)])
def test_what_the_real_server_said_is_what_is_sampled(exchange, ends, script):
    """It sampled the end token, which ends a response only in EOS tasks."""
    url, asked = serve(lambda body, answer: (200, exchange["answer"]))
    task = tiny.make_task(response_length=6, eos_task=ends, truncate_after=0)
    args = tiny.make_args(task, script, rloo_k=2, vllm_url=url)
    ids = TokenIds(tiny.WORDS, [0], [], [])
    contexts = torch.tensor([[tiny.WORDS, 17, 30, 22]]).repeat(2, 1)
    responses, logprobs = script.sample_in_batches(contexts, torch.rand(6, 2), ids, args)
    assert asked[0]["temperature"] == 0.7
    free = dict.fromkeys(("seed", "cache_salt", "temperature"))
    assert {**asked[0], **free} == {**exchange["body"], **free}
    for i, choice in enumerate(exchange["answer"]["choices"]):
        tokens = choice["token_ids"]
        n = len(tokens)
        assert (tokens.index(0) == n - 1) == ends
        assert responses[i, :n].tolist() == tokens
        assert (responses[i, n:] == tiny.WORDS).all()
        assert logprobs[i, :n].tolist() == pytest.approx(choice["logprobs"]["token_logprobs"])


@pytest.mark.parametrize(("name", "eos"), [("vllm", False), ("vllm", True), ("vllm_ppo", True)])
def test_L6_the_server_has_the_weights_of_each_update_and_samples_k_times(name, eos, patched, home):
    """The head is tied. The same flags and another server give the same run."""
    script = patched(name)
    form = {}
    if eos:
        form = dict(truncate_token="<|endoftext|>", truncate_after=0, eos_task=True)
        lm = AutoModelForCausalLM.from_pretrained("task/model")
        lm.lm_head.weight.data[lm.config.eos_token_id] *= 10  # some responses end
        lm.save_pretrained("task/model")
    url, asked = serve()
    script.main(settings(script, url, **form))
    lines = conftest.read_metrics("run")
    assert len(lines) == 3
    assert lines[-1]["objective/kl"] > 0
    for line in lines:
        assert line["objective/sampling_gap"] < 1e-5
        assert line["ppo/val/weight_cut"] == 0
    shortest = min(line["objective/response_length"] for line in lines)
    assert (shortest < 5) == eos
    sampled = [x for x in asked if "seed" in x]
    of_update = [1] * 8 if name == "vllm_ppo" else [2] * 4
    of_evaluation = [1] * 4
    expected = of_evaluation + 2 * of_update + of_evaluation + of_update + of_evaluation
    assert [x["n"] for x in sampled] == expected
    assert len({x["seed"] for x in sampled}) == 3 * len(of_update) + 4
    url, _ = serve()
    script.main(settings(script, url, "again", **form))
    assert conftest.without_times(lines) == conftest.without_times(conftest.read_metrics("again"))


def test_both_patches_have_the_same_functions(patched):
    names = ("ask", "sample_in_batches", "importance_weights")
    for_rloo = patched("vllm")
    for_ppo = patched("vllm_ppo")
    for name in names:
        assert getsource(getattr(for_rloo, name)) == getsource(getattr(for_ppo, name))


def test_policy_gradients_of_ppo_are_weighted_by_token(patched):
    """Weights are at most 1.5; neither the value loss nor its gradient has any."""
    script = patched("vllm_ppo")
    logprobs = torch.zeros(2, 2, requires_grad=True)
    zeros = torch.zeros(2, 2)
    old = SimpleNamespace(
        logprobs=zeros,
        values=zeros,
        log_weights=torch.tensor([[0.2, 0.9], [-1.0, 0.0]]),
        mask=torch.tensor([[True, True], [True, False]]),
    )
    args = tiny.make_args(script=script, max_weight=1.5)
    advantages = torch.tensor([[1.0, -2.0], [3.0, 0.0]])
    count = torch.tensor(3.0)
    pg_loss, vf_loss, _ = script.ppo_losses(logprobs, zeros, old, advantages, zeros, count, args)
    pg_loss.backward()
    expected = torch.tensor([[-1.2214, 2 * 1.5], [-3 * 0.36788, 0.0]]) / 3
    torch.testing.assert_close(logprobs.grad, expected, atol=1e-4, rtol=0)
    assert vf_loss == 0


def test_gradients_are_weighted_as_in_stale(script, patched):
    """By the same lines, whose oracle is in test_diffs.py."""
    stale = patched("stale")
    assert getsource(script.importance_weights) == getsource(stale.importance_weights)
    loss = getsource(script.rloo_loss)
    renamed = loss.replace("old.log_weights", "old.logprobs - old.sampler_logprobs")
    assert renamed == getsource(stale.rloo_loss)


@pytest.mark.parametrize("other", [False, True])
def test_a_server_with_an_old_head_ends_the_run(other, script, home):
    """With the right head at first, or that of another model."""
    lm = tiny.make_lm(seed=3, vocab=tiny.WORDS) if other else None
    url, asked = serve(stale=True, lm=lm)
    tiny.refuses(lambda: script.main(settings(script, url)), url, "objective/sampling_gap is")
    reloads = sum("method" in x for x in asked)
    assert (reloads > 2) == (not other)


def test_a_server_with_raw_log_probabilities_ends_the_run(script, home):
    raw = json.loads(json.dumps(INFO["answer"]).replace("processed", "raw"))
    url, asked = serve(lambda *x: (200, raw))
    tiny.refuses(lambda: script.main(settings(script, url)), url, "--logprobs-mode")
    assert asked == [{}]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_server_that_fails_in_the_second_update_ends_the_run_which_resumes(
    failure, script, home, monkeypatch
):
    reloads = []

    def change(body, answer):
        if "method" in body:
            reloads.append(body)
        if len(reloads) > 2 and ("method" in body) == (failure == "no folder"):
            return fail(failure, answer)  # the first one was for the evaluation

    url, _ = serve(change)
    args = settings(script, url, total_episodes=16, eval_every=50, save_every=1)
    runs = []
    monkeypatch.setattr(script, "Run", tiny.keep(script.Run, runs))
    tiny.refuses(lambda: script.main(args), f"--vllm_url {url}")
    runs[0].close()
    url, _ = serve()
    (saved,) = Path("runs/run/checkpoints").iterdir()
    script.main(replace(args, run_name=None, resume=str(saved), vllm_url=url))
    assert [line["step"] for line in conftest.read_metrics("run")] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("fsdp2", ["false", "true"])
def test_two_processes_hand_over_the_weights_once(fsdp2, script, home):
    url, asked = serve()
    env = dict(
        ACCELERATE_USE_FSDP=fsdp2,
        FSDP_VERSION="2",
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
    )
    tiny.run_python(__file__, script.__file__, url, processes=2, env=env)
    for line in conftest.read_metrics("run"):
        assert line["objective/sampling_gap"] < 1e-5
    assert sum("method" in x for x in asked) == 6  # for 3 updates and 3 evaluations
    assert len({x["seed"] for x in asked if x.get("n") == 2}) == 12


if __name__ == "__main__":
    tiny.shard_on_a_cpu()
    mine = tiny.load_script(Path(sys.argv[1]))
    mine.main(settings(mine, sys.argv[2]))
