"""benchmarks/gpu.py in little, on a CPU: every row of its table comes, and a bad row says so."""

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, speed

SCRIPT = Path(gpu.__file__)


def test_every_row_of_the_small_table_is_ok_and_is_written_and_printed(tmp_path):
    """Decoding steps are not compiled here, which takes half a minute; all else is what a GPU would do."""
    command = [sys.executable, str(SCRIPT), "--small", "--out", str(tmp_path / "gpu")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TORCHDYNAMO_DISABLE": "1"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["rows"]
    rows = list(csv.DictReader((tmp_path / "gpu.csv").read_text().splitlines()))
    planned = [what for what, *_ in gpu.plan(True, tmp_path)]
    assert [row["what"] for row in rows] == [row["what"] for row in found] == planned
    assert len(planned) == 3 + 3 + 1 + 1 + 8
    assert all(row["result"].startswith("ok") for row in found), done.stderr
    for row in (row for row in found if "ppo," in row["what"] or "critic" in row["what"]):
        assert row["seconds"] == pytest.approx(sum(row[phase] for phase in ("sample", "score", "optimise")))
        assert row["episodes/s"] == pytest.approx(8 / row["seconds"])
    assert (tmp_path / "gpu.png").stat().st_size > 1000


def test_golden_numbers_that_are_off_are_told(monkeypatch, tmp_path):
    right = gpu.ppo.token_logprobs
    monkeypatch.setattr(gpu.ppo, "token_logprobs", lambda *inputs: [x * 1.0001 for x in right(*inputs)])
    result = gpu.alone(100, tmp_path / "log", gpu.golden, "fp32")["result"]
    assert result.startswith("too far off: ") and "tolerances (1 allowed)" in result


def fail() -> None:
    raise SystemExit("this is why")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (fail, "SystemExit: this is why"),
        (lambda: time.sleep(60), "stopped after 1 s"),
        (lambda: os._exit(1), "the process died"),
    ],
    ids=["raises", "hangs", "dies"],
)
def test_a_row_that_fails_says_why_and_ends(function, said, tmp_path):
    begin = time.monotonic()
    assert gpu.alone(1, tmp_path / "log", function)["result"] == said
    assert time.monotonic() - begin < 30


def test_a_first_ratio_that_is_not_exactly_1_is_not_ok():
    assert gpu.said_of([1.0, 1.0]) == "ok" == gpu.said_of([])
    assert gpu.said_of([1.0, 1.0 + 2**-20]) == "first ratio 1 … 1.00000095"


def test_the_bytes_that_are_read_are_those_of_weights_keys_and_values():
    """GPT-2: 12 layers of 12 · 768², 50,257 words of 768, keys and values of 768 in 12 layers; 512 rows in two parts, of
    which the shorter have 17 tokens or fewer and the others up to 64."""
    weights, head = 84_934_656, 38_597_376
    for kind in ("ppo", "rloo"):
        cells = 256 * (17 + 24) + 256 * (64 + 24)
        assert gpu.bytes_read(gpu.GPT2, kind, "fp32", False) == 24 * 4 * (2 * (weights + head) + 2 * 12 * 768 * cells)
    blocks = 2 * weights + 2 * 12 * 768 * 512 * 128
    assert gpu.bytes_read(gpu.GPT2, "ppo", "bf16 tf32", True) == 24 * (2 * blocks + 4 * 2 * head)


def test_a_prompts_operations_count_once_where_it_is_read_once():
    work = speed.Work(dict(n_layer=2, n_embd=16, vocab_size=100), 8, (), response_length=3)
    prompts = speed.query_lengths(2)
    rows = [p + 3 for p in prompts] * 4
    blocks = lambda n: 2 * (24 * 16**2 * n + 2 * 16 * n * (n + 1))  # noqa: E731
    head = 2 * 16 * 100 * 3 * 8
    each = speed.operations(work, "rloo", 1)["sample"]
    assert each == sum(map(blocks, rows)) + head
    assert speed.operations(work, "rloo", 1, once=True)["sample"] == each - 3 * sum(map(blocks, prompts))
    assert speed.operations(work, "ppo", 1, once=True) == speed.operations(work, "ppo", 1)


@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_noise_in_every_forward_is_seen_in_the_tiny_scripts_too(name, monkeypatch, tmp_path):
    """They have several micro-batches, so that a second forward has to make the same numbers (L6)."""

    def noisy(lm: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        logits = right(lm, hidden)
        return logits + 1e-3 * torch.randn(logits.shape)

    right = gpu.packing.vocabulary_logits
    monkeypatch.setattr(gpu.packing, "vocabulary_logits", noisy)
    found = gpu.alone(100, tmp_path / "log", gpu.tiny_update, name, "fp32", tmp_path / name)
    assert found.startswith("first ratio")
