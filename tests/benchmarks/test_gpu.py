"""benchmarks/gpu.py with tiny models on a CPU: every row comes, and a bad row says why. memory.py: by hand."""

import csv
import json
import os
import sys
import time
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

import ppo
import rloo
from benchmarks import gpu, gpu_checks, gpu_count, gpu_trials, memory, speed
from machinery import unpadding
from machinery.decoding import DecodingBatch

ROWS = list(gpu.plan(True, Path("unused"), Path("unused")))
MORE = list(gpu.plan_more(True, Path("unused"), Path("unused")))
ALL = [what for what, *_ in ROWS]
QUICK = ["attention, ours", "sentiment: models", "sentiment: ppo, profile", "sentiment: tokens"]
QUICK += ["sentiment: unpadding"]


@pytest.mark.parametrize("names", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)])
def test_every_row_runs_without_a_gpu_is_written_and_printed(names, tmp_path, monkeypatch, capfd):
    """Also the shares of an H200's peak, which a CPU reports here under that name."""
    plan = gpu.plan
    monkeypatch.setattr(gpu, "device_name", lambda: {"result": "NVIDIA H200"})
    monkeypatch.setattr(gpu, "plan", lambda *args: (x for x in plan(*args) if x[0] in names))
    gpu.main(gpu.Args(small=True, out=tmp_path / "gpu"))
    printed = capfd.readouterr()
    found = json.loads(printed.out.splitlines()[-1])["rows"]
    rows = list(csv.DictReader((tmp_path / "gpu.csv").read_text().splitlines()))
    assert [row["what"] for row in rows] == [row["what"] for row in found] == names
    assert all(row["result"].startswith(("ok", "no GPU")) for row in found), printed.err
    for row in (row for row in found if "first" in row):
        phases = sum(row[phase] for phase in ("sample", "score", "optimize"))
        if row["what"] not in ("sentiment: ppo", "sentiment: rloo"):  # medians of several updates
            assert row["seconds"] == pytest.approx(phases)
        assert row["episodes/s"] == pytest.approx(8 / row["seconds"])
        assert 0 < row["MFU optimize"] < 1 and 0 < row["of bandwidth"] < 1
    assert (tmp_path / "gpu_profile.txt").read_text().startswith("0 calls")


@pytest.mark.slow
def test_every_other_row_runs_without_a_gpu(tmp_path):
    gpu.main(gpu.Args(more=True, out=tmp_path / "more"))
    rows = list(csv.DictReader((tmp_path / "more.csv").read_text().splitlines()))
    assert [row["what"] for row in rows] == [what for what, *_ in MORE]
    assert all(row["result"].startswith(("ok", "no GPU")) for row in rows)
    assert (tmp_path / "more_tldr_profile.txt").exists()


@pytest.mark.parametrize("rows", ["value|GPT-2", pytest.param("", marks=pytest.mark.slow)])
def test_trials_write_each_way_and_its_difference_from_the_first(rows, tmp_path):
    """In fp32 ways agree to 1e-6, in bf16 to a hundredth."""
    gpu_trials.main(gpu_trials.Args(rows=rows, out=tmp_path / "trials.csv"))
    found = list(csv.DictReader((tmp_path / "trials.csv").read_text().splitlines()))
    assert {row["result"] for row in found} == {"ok"}
    gaps = {(x["what"], x["way"]): float(x["difference"]) for x in found if x["difference"]}
    assert 0 < gaps["value head", "matrix-vector product"] < 1e-6
    assert 0 < gaps["attention of one token, GPT-2", "products"] < 1e-2
    assert sum(seconds for _, seconds, *_ in gpu_trials.plan(True, tmp_path)) <= 7 * 60


@pytest.mark.parametrize("rows", [ROWS, MORE], ids=["plan", "more"])
def test_the_parts_have_ten_minutes_together(rows):
    assert sum(minutes for _, minutes, *_ in rows) <= 10


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("raise SystemExit('this is why')", "SystemExit: this is why"),
        ("time.sleep(60)", "stopped after 1 s"),
        ("os._exit(1)", "the process died"),
    ],
)
def test_a_row_that_fails_says_why_and_ends(code, found, tmp_path):
    begin, call = time.monotonic(), (exec, code, {"time": time, "os": os})
    assert gpu.alone(1, tmp_path / "log", *call)["result"] == found
    assert time.monotonic() - begin < 30


def test_wrong_attention_in_bf16_is_a_row_that_is_not_ok(monkeypatch, tmp_path):
    """A GPU computes it in bf16 only, which no check at the start of a run does."""
    attention, gpt2 = unpadding.attention, (gpu.SMALL, tmp_path / "gpt2")

    def wrong(module, q, k, v, *rest, **options):
        k = 1.2 * k if v.dtype == torch.bfloat16 else k
        return attention(module, q, k, v, *rest, **options)

    gpu.make(*gpt2)
    monkeypatch.setattr(unpadding, "attention", wrong)
    assert gpu.gpu_checks.unpadding(*gpt2)["result"].startswith("not ok: errors")


@pytest.mark.parametrize("script", [ppo, rloo])
def test_L6_noise_in_every_forward_pass_is_seen_in_the_first_ratio(script, monkeypatch, tmp_path):
    compute_logits = script.compute_logits

    def noisy(lm: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(lm, hidden)
        return logits + 1e-3 * torch.randn(logits.shape)

    monkeypatch.setattr(script, "compute_logits", noisy)
    inputs = gpu_checks.tiny_runs, tmp_path, "no", script.__name__
    found = gpu.alone(100, tmp_path / "log", *inputs)["result"]
    assert found.startswith(f"not ok: first log ratios {{'{script.__name__}': [0.00")


def test_every_update_has_other_queries_of_the_given_lengths():
    table = gpu.make_queries(gpu.SMALL, 1)
    assert len(table) == 16_000
    lengths = sorted(map(len, table.rows["tokens"]))
    assert lengths == sorted(speed.query_lengths(16_000))
    first, second = ((table[slice(i, i + 8)] != 101).sum(dim=1).tolist() for i in (0, 8))
    assert first != second


def test_a_profile_has_kernels_busy_share_waits_and_gaps_by_phase(tmp_path):
    """Two kernels of 2 and 6 µs and a copy of 1 µs in 12 µs; the host waits once. Marks of no
    length begin each phase: the gaps of 1 and 2 µs are in the second and in the last."""
    kernels = [("kernel", "spin_kernel", 0, 0), ("kernel", "gemm", 0, 2)]
    kernels += [("kernel", "spin_kernel", 2, 0), ("kernel", "gemm", 3, 6)]
    kernels += [("kernel", "spin_kernel", 9, 0), ("gpu_memcpy", "Memcpy", 11, 1)]
    calls = [(name, 0, 9) for name in ("cudaLaunchKernel", "cudaStreamSynchronize")]
    events = [*kernels, *(("cuda_runtime", *call) for call in calls), ("cpu_op", "aten::mm", 0, 99)]
    trace = [dict(zip(("cat", "name", "ts", "dur"), x, strict=True)) for x in events]
    found = gpu.summarize([{"name": "process_name"}, *trace], tmp_path / "profile.txt")
    assert found == {"kernels": 6, "waits": 1, "busy": 9 / 12}
    top, table = (tmp_path / "profile.txt").read_text().split("\n\n")
    lines = [line.split() for line in top.splitlines()[2:4]]
    assert lines == [["88.9%", "2", "gemm"], ["11.1%", "1", "Memcpy"]]
    cells = {line[:28].strip(): line[28:].split() for line in table.splitlines()[1:]}
    assert cells["products, bf16"] == ["0.00", "0.01", "0.00"]
    assert cells["number of kernels"] == ["1.00"] * 3
    assert [gpu.by_phase([])[0].split()[1:], len(cells)] == [list(speed.PHASES), 4]


def test_the_bytes_that_are_read_are_those_of_weights_keys_and_values():
    """Of GPT-2, for 512 sequences in two batches, with prompts of up to 17 and 64 tokens, or in one."""
    weights, head = 12 * 12 * 768**2, 50_257 * 768  # in bf16, in fp32
    for group in (1, 4):
        cache = 2 * 12 * 768 * (256 * (17 + 24) + 256 * (64 + 24))
        two = 24 * (2 * (2 * weights + 4 * head) + 2 * cache)
        assert gpu.bytes_read(gpu.GPT2, group, 256) == two
        cache = 2 * 12 * 768 * 512 * (64 + 24)
        assert gpu.bytes_read(gpu.GPT2, group, 512) == 24 * (2 * weights + 4 * head + 2 * cache)


def test_at_most_three_copies_of_the_logits_are_alive():
    """Logits and their quotient; log-probabilities, p and p log p; backward two gradients as well."""
    elements = 7 * 24 * 50257

    class Logits(memory.Tracker):
        """Counts tensors that are as large as logits [N, V], of any dtype."""

        def add(self, storage: torch.UntypedStorage) -> None:
            if storage.nbytes() in {elements * size for size in (1, 2, 4, 8)}:
                super().add(storage)

    tracker, copies = Logits(), []
    with FakeTensorMode(allow_non_fake_inputs=True), tracker:
        contexts, responses = (torch.ones(7, n, dtype=torch.long) for n in (16, 24))
        lm = memory.random_lm(memory.gpt2(32, 2, 2))
        policy = ppo.PolicyAndValue(lm, 50257, 0.7).train()
        with torch.autocast("cpu", torch.bfloat16):
            logprobs, _, _ = policy(contexts, responses)
        copies.append(tracker.restart())
        logprobs.sum().backward()
        copies.append(tracker.restart())
        del logprobs
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            policy(contexts, responses)
        copies.append(tracker.restart())
    assert [size / (4 * elements) for size in copies] == [3, 3, 2]


@pytest.mark.parametrize("script", ["ppo", "rloo"])
def test_memory_between_updates_is_of_weights_and_moments(
    script, monkeypatch, capsys, bf16_accelerator
):
    """20 bytes per parameter: weights, two moments, reference, reward model; their linear layers
    are in bf16. The rest is small."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # restored afterwards
    monkeypatch.setitem(memory.SHAPES, "tiny", memory.gpt2(512, 4, 2))
    linear = 4 * (12 * 512**2 + 9 * 512)
    parameters = 512 * (50257 + 1024) + linear + 4 * 4 * 512 + 2 * 512
    flags = "--batch_size 8 --num_minibatches 1"
    memory.main(memory.Args((script,), ("tiny",), ("sentiment",), flags))
    row = capsys.readouterr().out.splitlines()[-1]
    name, task, of, *sizes, card = row.strip("| ").split(" | ")
    assert (name, task, of, card) == ("tiny", "sentiment", script, "24")
    live, *phases = map(float, sizes)
    assert live == pytest.approx((20 * parameters - 4 * linear) / 2**30, abs=0.006)
    assert all(size > live for size in phases)


def test_a_cast_also_frees_frozen_weights_that_the_optimizer_has():
    with FakeTensorMode(), memory.Tracker() as tracker:
        layer = torch.nn.Linear(16, 8, bias=False)
        weights = [*layer.parameters()]
        memory.cast(layer, torch.bfloat16)
        assert weights[0].dtype is torch.bfloat16 and tracker.now == 2 * 16 * 8


def test_a_prompts_operations_count_once_where_it_is_read_once():
    """Of four responses to each. 24 d² operations a token, 4 d for each of its keys, in two layers."""
    work = speed.Work(dict(n_layer=2, n_embd=16, vocab_size=100), 8, (), response_length=3)
    of_prompts = sum(2 * (24 * 16**2 * n + 2 * 16 * n * (n + 1)) for n in speed.query_lengths(2))
    each = speed.operations(work, "rloo", 1)["sample"]
    assert speed.operations(work, "rloo", 1, once=True)["sample"] == each - 3 * of_prompts
    assert speed.operations(work, "ppo", 1, once=True) == speed.operations(work, "ppo", 1)


def test_a_product_and_a_cast_are_counted_once_and_views_not_at_all():
    """[4, 8] in fp32, cast to bf16, times [8, 16]: 2 * 4 * 8 * 16 operations."""
    with gpu_count.Tally() as tally:
        weight = torch.ones(16, 8, dtype=torch.bfloat16)
        tally.rows.clear()
        product = torch.ones(8, 4).t().bfloat16() @ weight.t()
        assert product.shape == (4, 16) and product.dtype == torch.bfloat16
        torch.arange(9).view(3, 3)[1:].clone()  # integers have numbers, and count as well
    expected = {
        "small": (2, 4 * 32 + 8 * 9, 0),  # ones, arange
        "casts and copies": (2, 6 * 32 + 2 * 8 * 6, 0),
        "products, bf16": (1, 2 * (32 + 128 + 64), 1024),
    }
    names = ("kernels", "bytes", "operations")
    for kind, numbers in expected.items():
        assert tuple(tally.rows["load", kind, name] for name in names) == numbers, kind
    assert {kind for _, kind, _ in tally.rows} == expected.keys()


def test_the_kernels_of_an_update_are_counted(monkeypatch):
    """Of one layer, 8 queries of 64 tokens, responses of 4, four epochs: by hand."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # restored afterwards
    work = replace(gpu.SMALL, response_length=4, shortest=64)
    rows = gpu_count.count_update(work, "ppo", [])
    blocks = 2 * 12 * 32**2 * 8 * (64 + 4)  # operations of a forward pass
    head = 2 * 32 * 104 * 8 * 4  # 101 tokens, aligned
    expected = {
        ("sample", "attention of one token", "kernels"): 2
        * 3,  # products; recorded once, then replayed
        ("sample", "casts of weights", "kernels"): 4 * 2,  # once
        ("score", "products, bf16", "operations"): 3 * blocks,
        ("score", "products, fp32", "operations"): 2 * head,
        ("optimize", "attention", "kernels"): 4 * 2,
        ("optimize", "matrix-vector", "kernels"): 0,  # the value head is a sum
        ("optimize", "products, bf16", "operations"): 4 * 3 * blocks,
        ("optimize", "products, fp32", "operations"): 4 * 3 * head,
    }
    assert {key: rows[key] for key in expected} == expected


@pytest.mark.slow
def test_L6_a_compiled_policy_starts_at_ratios_of_1_and_needs_no_graph_for_a_new_batch(monkeypatch):
    """In bf16, with an attention that a graph can hold. The reference has graphs of its own."""
    for owner, name in ((unpadding.Unpadded, "__call__"), (DecodingBatch, "next_logits")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored afterwards
    monkeypatch.setitem(sys.modules, "ppo", ppo)
    script, plain, graphs = gpu_checks.load_patched("compile"), tiny.make_policy(), []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    fused = torch.compile(script.Compiled.__mro__[1].forward, dynamic=True)
    monkeypatch.setattr(script, "COMPILED", True)
    monkeypatch.setattr(script.Compiled, "fused", fused)
    monkeypatch.setattr(unpadding, "can_use_varlen", lambda *_: True)
    monkeypatch.setattr(varlen, "varlen_attn", lambda q, k, v, *_, **__: q + k * v)
    policy, ref = (script.PolicyAndValue(deepcopy(plain.lm), tiny.PAD, 0.7) for _ in range(2))
    ref.requires_grad_(False)
    for n in (6, 9, 13):
        contexts = tiny.make_contexts([2 + i % 3 for i in range(n)], 8)
        batch = contexts, tiny.make_responses(n, 5)
        with torch.autocast("cpu", torch.bfloat16):
            expected, new = plain(*batch)[0], policy(*batch)[0]
            with torch.no_grad():
                old, reference = policy(*batch)[0], ref(*batch)[0]
        assert torch.equal(old, new) and torch.equal(reference, new) and torch.equal(new, expected)
        assert not old.requires_grad and not reference.requires_grad and new.requires_grad
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[2] > 0
    policy.unshard = None  # as an FSDPModule
    tiny.refuses(lambda: policy(*batch), "configs/ddp.yaml")
