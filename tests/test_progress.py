"""What a run shows: lines, tables of samples, warnings, curves.

This file is also a program whose runs lose their terminal: it imports everything once and forks
each of them.
"""

import importlib
import json
import os
import pty
import re
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tiny
from accelerate import Accelerator
from conftest import SCRIPTS, read_metrics, settings
from matplotlib.figure import Figure
from test_resume import checkpoint_files, exit_code, read_state, wait
from test_runs import small, two_steps

import ppo
from machinery import progress, runs
from machinery.artifacts import ROOT

pytestmark = pytest.mark.usefixtures("accelerator")


def test_a_line_is_printed_at_least_once_a_minute(home, monkeypatch, capsys):
    """And 20 times in a run, with the last update; the metrics are in the file at once."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def printed(total: int, seconds: float) -> list[int]:
        args = small("ppo", run_name=None)
        run = runs.Run(args, ppo.SCRIPT, total, ["objective/a", "b/a"], Accelerator(cpu=True))
        for step in range(total):
            now[0] += seconds
            run.log(step, {"objective/a": 0.5, "b/a": 1.0, "other": 2.0})
            assert len((run.folder / "metrics.jsonl").read_text().splitlines()) == step + 1
        run.close()
        lines = [
            line for line in capsys.readouterr().out.splitlines() if "  a 0.5  b/a 1  left" in line
        ]
        return [int(line.split("/")[0]) for line in lines]

    assert printed(100, 1) == [*range(1, 100, 5), 100]
    slow = printed(300, 25)
    assert max(b - a for a, b in zip(slow, slow[1:], strict=False)) * 25 <= 60 + 25
    assert 300 in slow and len(slow) < 150


def in_terminal(name: str, **flags: Any) -> dict[str, Any]:
    """The exit code of a run in a terminal of its own, and what it printed there.

    `closed` ones lose theirs as soon as an update is done.
    """
    pid, master = pty.fork()  # the child has no other terminal
    if not pid:
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.environ["TERM"] = "xterm-256color"
        code = 99
        try:
            flags = dict(eval_every=100 if name == "closed" else 2) | flags
            args = settings("ppo", run_name=name, reward_fn="slow.py:score", **flags)
            code = exit_code("ppo", args)
        except BaseException:
            Path(f"{name}.log").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    printed = b""
    with suppress(OSError):  # the other side is gone
        while not ("closed" in name and Path("runs", name, "metrics.jsonl").exists()):
            if not (part := os.read(master, 2**16)):
                break
            printed += part
    os.close(master)
    return {"code": wait(pid, 60), "printed": printed.decode()}


TERMINALS = {"wide": {}, "closed": {}, "closed_evaluating": dict(eval_every=1)}


@pytest.mark.slow
def test_progress_is_readable_in_terminals_and_a_closed_one_leaves_a_checkpoint(home):
    """The last update and the samples are there, as a table.

    After a terminal is closed, neither progress nor samples can be printed any more.
    """
    lines = ["import time", "def score(queries, responses):", "    time.sleep(0.1)"]
    Path("slow.py").write_text("\n".join([*lines, "    return [len(r) / 9 for r in responses]"]))
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    options = dict(env=env, capture_output=True, text=True, timeout=200)
    done = subprocess.run([sys.executable, __file__], **options, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(Path("terminals.json").read_text())
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", found["wide"]["printed"])  # colors
    lines = text.replace("\r", "\n").splitlines()
    assert found["wide"]["code"] == 0 and "━" in text, text
    assert any("6/6" in line and "score" in line for line in lines), text
    assert sum("Clara found the sea." in line for line in lines) >= 2  # of both evaluations
    for name in ("closed", "closed_evaluating"):
        updates = len(Path(f"runs/{name}/metrics.jsonl").read_text().splitlines())
        kept = [read_state(path)[1]["step"] for path in checkpoint_files(name)]
        assert kept == [updates] and updates < 6
        assert found[name]["code"] == 143


@pytest.mark.parametrize("script", ["ppo", "rloo"])
def test_a_much_too_high_lr_is_said_once_for_each_metric_and_a_healthy_one_is_not(
    script, home, capsys
):
    SCRIPTS[script].main(two_steps(script, lr=1e-4))
    assert "healthy" not in capsys.readouterr().out
    flags = dict(total_episodes=40, eval_every=100, num_ppo_epochs=4, run_name="broken")
    SCRIPTS[script].main(two_steps(script, **flags, lr=0.03))
    warnings = [line for line in capsys.readouterr().out.splitlines() if "healthy" in line]
    for name in ("ppo/policy/approxkl_avg", "ppo/policy/clipfrac_avg"):
        (text,) = [line for line in warnings if line.startswith(f"{name} is ")]
        far = SCRIPTS[script].LIMITS[name][1]
        value = next(line[name] for line in read_metrics("broken") if line[name] > far)
        assert f"{value:.2g}" in text and "--lr" in text and "--num_ppo_epochs" in text
    assert len(warnings) == 2


@pytest.mark.parametrize("name", progress.STUCK)
def test_five_updates_without_anything_to_learn_from_are_said_once(name, capsys):
    shown, value = progress.Progress(100, [], {}), progress.STUCK[name][0]
    for x, lines in ((value, 0), (0.5, 0), (value, 0), (value, 1)):
        for _ in range(4):
            shown.warn({name: x})
        assert capsys.readouterr().out.count(name) == lines


def test_equal_scores_and_a_gradient_of_0_are_said_in_a_run(home, capsys):
    Path("same.py").write_text(
        "def score(queries, responses):\n    return [0.1 for _ in queries]\n"
    )
    SCRIPTS["rloo"].main(settings("rloo", reward_fn="same.py:score", kl_coef=0.0))
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if "nothing to learn from" in line]
    assert "frac_reward_zero_std is 1 " in found[0] and "scores_std is 0 " in found[1]
    assert len(found) == 2
    assert sum("gradient was 0 " in line for line in lines) == 1


def test_curves_have_no_empty_panels(tmp_path, monkeypatch):
    """A task without a true score logs no `objective/gold_score`."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    figures: list = []
    monkeypatch.setattr("matplotlib.figure.Figure", tiny.keep(Figure, figures))
    progress.plot_run(tmp_path, ["loss", "objective/gold_score"])
    assert [axis.get_title() for axis in figures[0].axes] == ["loss"]
    assert (tmp_path / "curves.png").is_file()


if __name__ == "__main__":
    importlib.import_module("matplotlib.figure")  # once
    found = {name: in_terminal(name, **flags) for name, flags in TERMINALS.items()}
    Path("terminals.json").write_text(json.dumps(found))
