"""What a run shows: lines, tables of samples, warnings, curves."""

import errno
import io
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import tiny
from conftest import SCRIPTS, read_metrics, settings
from matplotlib.figure import Figure
from test_resume import at_call, checkpoint_files, exit_code, read_state
from test_runs import two_steps

from machinery import cli, distributed, progress

pytestmark = pytest.mark.usefixtures("accelerator")


def test_a_line_is_printed_at_least_once_a_minute(monkeypatch, capsys):
    """And 20 times in a run, with the last update."""
    now = [0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def printed(total, seconds):
        shown = progress.Progress(total, ["objective/a", "b/a"])
        for step in range(total):
            now[0] += seconds
            shown.update(step, {"objective/a": 0.5, "b/a": 1.0, "other": 2.0})
        line = r"^ *(\d+)/\d+ +a 0.5 +b/a 1 +left \d:\d\d:\d\d$"
        return [int(step) for step in re.findall(line, capsys.readouterr().out, re.M)]

    assert printed(100, 1) == [*range(1, 100, 5), 100]
    assert printed(300, 25)[:6] == [1, 4, 7, 10, 13, 16]  # 75 seconds; every 15 updates are 5%


class Terminal(io.TextIOWrapper):
    """A terminal that its user closes: every write fails from then on."""

    gone, isatty = False, lambda self: True

    def write(self, text):
        if self.gone:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("eval_every", [1, 100])
def test_samples_are_a_table_a_closed_terminal_leaves_a_checkpoint(eval_every, home, monkeypatch):
    """It prints neither the progress nor the samples after its last update."""
    terminal = Terminal(io.BytesIO(), "utf-8")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)

    def close(function, *args):
        terminal.gone = True
        os.kill(os.getpid(), signal.SIGHUP)
        return function(*args)

    at_call(monkeypatch, distributed, "check_gradients", 9, close)
    assert exit_code("ppo", settings("ppo", run_name="closed", eval_every=eval_every)) == 143
    steps = len(read_metrics("closed"))
    assert [read_state(path)[1]["step"] for path in checkpoint_files("closed")] == [steps]
    assert 1 < steps < 6
    terminal.seek(0)
    text = terminal.read()
    assert all(words in text for words in ("━", "1/6", "Clara found the sea."))


def test_a_much_too_high_lr_is_said_once(home, capsys):
    SCRIPTS["ppo"].main(two_steps("ppo", lr=1e-4))
    assert "healthy" not in capsys.readouterr().out
    flags = dict(total_episodes=40, eval_every=100, num_ppo_epochs=4, run_name="broken")
    SCRIPTS["ppo"].main(two_steps("ppo", **flags, lr=0.03))
    (text,) = [line for line in capsys.readouterr().out.splitlines() if "healthy" in line]
    assert "ppo/policy/clipfrac_avg is 0." in text and "--lr" in text


@pytest.mark.parametrize("name", list(progress.WARNINGS)[1:])
def test_five_updates_without_anything_to_learn_from_are_said_once(name, capsys):
    shown = progress.Progress(100, [])
    bad = {name: progress.WARNINGS[name][0]}
    for metrics in (bad, bad, bad, bad, {name: 0.5}, bad, bad, bad, bad):
        shown.warn(metrics)
    assert capsys.readouterr().out == ""
    for metrics in (bad, bad, {name: 0.5}, *[bad] * 9):
        shown.warn(metrics)
    assert capsys.readouterr().out.count(name) == 1


def test_equal_scores_are_said_in_a_run(home, capsys):
    Path("same.py").write_text("def score(queries, responses): return [0.1 for _ in queries]")
    SCRIPTS["rloo"].main(settings("rloo", reward_fn="same.py:score", kl_coef=0.0))
    out = capsys.readouterr().out
    assert out.count("unhealthy") == 2
    assert "frac_reward_zero_std is 1;" in out and "scores_std is " in out


def draw(folder, lines, names, monkeypatch):
    """The panels of curves.png of these metrics."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure", tiny.keep(Figure, figures))
    progress.plot_run(folder, names)
    return figures[0].axes


def test_curves_are_over_finished_episodes_with_evaluations_as_points(
    tmp_path, monkeypatch, capsys
):
    """As in tools/curves.py. What was never logged has no panel."""
    lines = [
        {"step": 0, "eval/a": 1.0, "objective/a": 2.0, "ppo/episode": 8},
        {"step": 1, "objective/a": 3.0, "ppo/episode": 16},
        {"step": 2, "eval/a": 4.0},
    ]
    (axis,) = draw(tmp_path, lines, ["objective/a", "objective/gold_score"], monkeypatch)
    curves = [line.get_xydata().tolist() for line in axis.lines]
    assert curves == [[[8, 2], [16, 3]], [[0, 1], [16, 4]]]
    assert capsys.readouterr().out == "eval/a: 1 → 4\n" and (tmp_path / "curves.png").is_file()
    legend = [text.get_text() for text in axis.get_legend().get_texts()]
    assert legend == ["each update", "held out"]


def test_one_held_out_value_is_one_number_at_the_last_step(tmp_path, monkeypatch, capsys):
    """Points are drawn once: beside their curve. Many noisy steps have a smoothed one."""
    lines = [{"step": i, "accuracy": i % 2} for i in range(100)]
    lines += [{"step": 100, "heldout/accuracy": 0.75}]
    (axis,) = draw(tmp_path, lines, ["accuracy", "heldout/accuracy"], monkeypatch)
    _, smooth, dot = (line.get_xydata().tolist() for line in axis.lines)
    assert dot == [[100, 0.75]] and smooth[-1][0] == 100
    assert [y for _, y in smooth[4:]] == pytest.approx([0.4, 0.6] * 48)
    assert capsys.readouterr().out == "heldout/accuracy: 0.75\n"


def test_control_characters_of_texts_are_shown_escaped(capsys):
    """A text that sets the terminal's title or clears it; tabs and new lines stay."""
    progress.Progress(1, []).table([{"query": "a\x1b]0;owned\x07b\tc"}], "samples")
    assert r"a\x1b]0;owned\x07b" in capsys.readouterr().out
    assert cli.escape("\x1b[2J\x9b\x7f\t\n") == "\\x1b[2J\\x9b\\x7f\t\n"
