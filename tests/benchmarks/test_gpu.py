"""benchmarks/gpu.py with tiny models on a CPU: every row comes, and a bad row says why. memory.py: by hand."""

import csv
import json
import sys
from copy import deepcopy
from functools import partial

import pytest
import tiny
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

import ppo
from benchmarks import gpu, gpu_checks
from machinery import decoding, unpadding
from tools import memory

QUICK = [
    "attention, ours",
    "sentiment: models",
    "sentiment: ppo, profile",
    "sentiment: unpadding",
]


def test_rows_run_without_a_gpu_and_are_written_and_printed(tmp_path, monkeypatch, capfd):
    """Also the shares of an H200's peak, which a CPU reports here under that name."""
    plan = gpu.plan
    monkeypatch.setattr(gpu, "device_name", lambda: {"result": "NVIDIA H200"})
    monkeypatch.setattr(gpu, "plan", lambda *args: (x for x in plan(*args) if x[0] in QUICK))
    gpu.main(gpu.Args(small=True, out=tmp_path / "gpu"))
    printed = capfd.readouterr()
    found = json.loads(printed.out.splitlines()[-1])["rows"]
    rows = list(csv.DictReader((tmp_path / "gpu.csv").read_text().splitlines()))
    assert [row["what"] for row in rows] == [row["what"] for row in found] == QUICK
    assert all(row["result"].startswith(("ok", "no GPU")) for row in found), printed.err
    for row in found:
        if "first" in row:
            assert row["seconds"] == pytest.approx(row["sample"] + row["score"] + row["optimize"])
            assert row["episodes/s"] == pytest.approx(8 / row["seconds"])
            assert 0 < row["MFU optimize"] < 1 and 0 < row["of bandwidth"] < 1
    assert (tmp_path / "gpu_profile.txt").read_text().startswith("0 calls")


@tiny.both
def test_L6_noise_in_every_forward_pass_is_seen_in_the_first_ratio(script, monkeypatch, tmp_path):
    compute_logits = script.compute_logits

    def noisy(lm, hidden):
        logits = compute_logits(lm, hidden)
        return logits + 1e-3 * torch.randn(logits.shape)

    monkeypatch.setattr(script, "compute_logits", noisy)
    inputs = gpu_checks.tiny_runs, tmp_path, "no", script.__name__
    found = gpu.alone(100, tmp_path / "log", *inputs)["result"]
    assert found.startswith(f"not ok: first log ratios {{'{script.__name__}': [0.00")


def test_at_most_three_copies_of_the_logits_are_alive():
    """Logits and their quotient; log-probabilities and p log p; backward two gradients as well."""
    elements = 7 * 24 * 50257
    sizes = {elements * width for width in (1, 2, 4, 8)}  # in bytes, of any dtype

    class Logits(memory.Tracker):
        """Counts tensors that are as large as logits [N, V]."""

        def add(self, storage):
            if storage.nbytes() in sizes:
                super().add(storage)

    tracker, copies = Logits(), []
    with FakeTensorMode(allow_non_fake_inputs=True), tracker, torch.autocast("cpu", torch.bfloat16):
        contexts = torch.ones(7, 16, dtype=torch.long)
        responses = torch.ones(7, 24, dtype=torch.long)
        policy = ppo.PolicyAndValue(memory.random_lm(memory.gpt2(32, 2, 2)), 50257, 0.7).train()
        logprobs, _, _ = policy(contexts, responses)
        copies.append(tracker.restart())
        logprobs.sum().backward()
        copies.append(tracker.restart())
        del logprobs
        with torch.no_grad():
            policy(contexts, responses)
        copies.append(tracker.restart())
    assert [size / (4 * elements) for size in copies] == [2, 3, 2]


@pytest.mark.slow
def test_L6_a_compiled_policy_starts_at_ratios_of_1_and_needs_no_graph_for_a_new_batch(monkeypatch):
    """In bf16, with an attention that a graph can hold. The reference has graphs of its own."""
    for owner, name in (
        (unpadding.compute_hidden, "__call__"),
        (decoding.DecodingBatch, "next_logits"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored afterwards
    monkeypatch.setitem(sys.modules, "ppo", ppo)
    script = gpu_checks.load_patched("compile")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    fused = torch.compile(script.Compiled.__mro__[1].forward, dynamic=True)
    monkeypatch.setattr(script, "COMPILED", True)
    monkeypatch.setattr(script.Compiled, "fused", fused)
    monkeypatch.setattr(unpadding, "can_use_varlen", lambda *_: True)
    monkeypatch.setattr(varlen, "varlen_attn", lambda q, k, v, *_, **__: q + k * v)
    plain = tiny.make_policy()
    policy = script.PolicyAndValue(deepcopy(plain.lm), tiny.PAD, 0.7)
    ref = script.PolicyAndValue(deepcopy(plain.lm), tiny.PAD, 0.7).requires_grad_(False)
    graphs = []
    for n in (6, 9, 13):
        batch = tiny.make_contexts([2, 3, 4] * n, 8)[:n], tiny.make_responses(n, 5)
        with torch.autocast("cpu", torch.bfloat16):
            expected, new = plain(*batch)[0], policy(*batch)[0]
            with torch.no_grad():
                old, reference = policy(*batch)[0], ref(*batch)[0]
        for logprobs in (new, old, reference):
            assert torch.equal(logprobs, expected)
            assert logprobs.requires_grad == (logprobs is new)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[2] > 0
    policy.unshard = None  # as an FSDPModule
    tiny.refuses(lambda: policy(*batch), "configs/ddp.yaml")


def test_memory_between_updates_is_of_weights_and_moments(monkeypatch, capsys, bf16_accelerator):
    """20 bytes per parameter: weights, two moments, reference and reward model (partly in bf16)."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # restored afterwards
    monkeypatch.setitem(memory.SHAPES, "tiny", memory.gpt2(512, 4, 2))
    linear = 4 * (12 * 512**2 + 9 * 512)
    parameters = 512 * (50257 + 1024) + linear + 4 * 4 * 512 + 2 * 512
    flags = "--batch_size 8 --num_minibatches 1"
    memory.main(memory.Args(("ppo",), ("tiny",), ("sentiment",), flags))
    row = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    live, *phases = map(float, row[3:-1])
    assert live == pytest.approx((20 * parameters - 4 * linear) / 2**30, abs=0.006)
    assert all(size > live for size in phases)
