"""benchmarks/gpu.py in little, on a CPU: every row of its table comes, and a bad row says so."""

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu

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
    assert len(planned) == 3 + 4 * 3 + 1 + 1 + 8
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


def test_the_bytes_of_a_token_are_those_of_the_weights():
    """GPT-2: 12 layers of 12 · 768², and 50,257 words of 768."""
    assert gpu.weight_bytes(gpu.GPT2, "fp32") == 4 * 84_934_656 + 4 * 38_597_376
    assert gpu.weight_bytes(gpu.GPT2, "bf16 tf32") == 2 * 84_934_656 + 4 * 38_597_376
