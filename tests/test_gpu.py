"""benchmarks/gpu.py with tiny models on a CPU: every row comes, and a bad row says why."""

import csv
import json
import os
import time
from pathlib import Path

import pytest
import torch

import ppo
from benchmarks import gpu, speed

ALL = [what for what, *_ in gpu.plan(True, Path("unused"))]
QUICK = ["tiny scripts, fp32", "one layer: models", "one layer: ppo, fp32"]


@pytest.mark.parametrize("names", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)])
def test_every_row_is_ok_and_is_written_and_printed(names, tmp_path, monkeypatch, capfd):
    """Without compiling, which takes half a minute; all else is what a GPU does."""
    plan = gpu.plan
    monkeypatch.setattr(gpu, "plan", lambda *args: (x for x in plan(*args) if x[0] in names))
    with torch.compiler.set_stance("force_eager"):
        gpu.main(gpu.Args(small=True, out=tmp_path / "gpu"))
    printed = capfd.readouterr()
    found = json.loads(printed.out.splitlines()[-1])["rows"]
    rows = list(csv.DictReader((tmp_path / "gpu.csv").read_text().splitlines()))
    assert [row["what"] for row in rows] == [row["what"] for row in found] == names
    assert all(row["result"].startswith("ok") for row in found), printed.err
    for row in (row for row in found if "ppo," in row["what"] or "critic" in row["what"]):
        phases = sum(row[phase] for phase in ("sample", "score", "optimize"))
        assert row["seconds"] == pytest.approx(phases)
        assert row["episodes/s"] == pytest.approx(8 / row["seconds"])


def fail() -> None:
    raise SystemExit("this is why")


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (fail, "SystemExit: this is why"),
        (lambda: time.sleep(60), "stopped after 1 s"),
        (lambda: os._exit(1), "the process died"),
    ],
    ids=["raises", "hangs", "dies"],
)
def test_a_row_that_fails_says_why_and_ends(function, found, tmp_path):
    begin = time.monotonic()
    assert gpu.alone(1, tmp_path / "log", function)["result"] == found
    assert time.monotonic() - begin < 30


@pytest.mark.slow
def test_golden_numbers_that_are_off_are_a_row_that_is_not_ok(tmp_path, monkeypatch):
    whiten = ppo.whiten
    monkeypatch.setattr(ppo, "whiten", lambda *x, **flags: 1.001 * whiten(*x, **flags))
    result = gpu.alone(100, tmp_path / "log", gpu.golden)["result"]
    assert result == "golden tests end with exit code 1"


@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_L6_noise_in_every_forward_pass_is_seen_in_the_first_ratio(name, monkeypatch, tmp_path):
    """The tiny scripts have several micro-batches."""
    script = gpu.importlib.import_module(name)
    compute_logits = script.compute_logits

    def noisy(lm: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(lm, hidden)
        return logits + 1e-3 * torch.randn(logits.shape)

    monkeypatch.setattr(script, "compute_logits", noisy)
    found = gpu.alone(100, tmp_path / "log", gpu.tiny_run, name, "fp32", tmp_path / name)
    assert found.startswith("first log ratio up to 0.00")


def test_the_bytes_that_are_read_are_those_of_weights_keys_and_values():
    """GPT-2: 12 layers of 12 * 768², 50,257 words of 768, keys and values of 768 in 12 layers.

    512 sequences in two batches: prompts of at most 17 tokens, and of at most 64.
    """
    weights, head = 84_934_656, 38_597_376
    for kind in ("ppo", "rloo"):
        cache = 2 * 12 * 768 * (256 * (17 + 24) + 256 * (64 + 24))
        assert gpu.bytes_read(gpu.GPT2, kind, "fp32") == 24 * 4 * (2 * (weights + head) + cache)
        half = 24 * (2 * (2 * weights + 4 * head) + 2 * cache)
        assert gpu.bytes_read(gpu.GPT2, kind, "bf16 tf32") == half


def test_a_prompts_operations_count_once_where_it_is_read_once():
    work = speed.Work(dict(n_layer=2, n_embd=16, vocab_size=100), 8, (), response_length=3)
    prompts = speed.query_lengths(2)
    lengths = [length + 3 for length in prompts] * 4

    def trunk(n: int) -> int:
        return 2 * (24 * 16**2 * n + 2 * 16 * n * (n + 1))

    each = speed.operations(work, "rloo", 1)["sample"]
    assert each == sum(map(trunk, lengths)) + 2 * 16 * 100 * 3 * 8
    once = speed.operations(work, "rloo", 1, once=True)["sample"]
    assert once == each - 3 * sum(map(trunk, prompts))
    assert speed.operations(work, "ppo", 1, once=True) == speed.operations(work, "ppo", 1)
