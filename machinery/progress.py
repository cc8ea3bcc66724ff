"""What a run shows: its progress, tables of samples, warnings, learning curves."""

import json
import math
import time
from collections import Counter
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

CLIPFRAC, LIMIT = "ppo/policy/clipfrac_avg", 0.4  # warn once above; it is healthy up to 0.3
UPDATES = 5  # warn after so many in a row with a value of this table
STUCK = {  # metric → its value if nothing can be learned, and the likely cause
    "objective/frac_reward_zero_std": (1, "all responses to a query have the same score"),
    "objective/scores_std": (0, "all responses have the same score"),
    "objective/ended": (0, "no response has the --truncate_token, so none gets its own score"),
}


class Progress:
    """A line a minute and every 5% of the run: the metrics `shown`, and the time left."""

    def __init__(self, total: int, shown: list[str]):
        self.total, self.start, self.has_warned = total, 0, False
        self.titles = {name: name.removeprefix("objective/") for name in shown}
        self.stuck = Counter[str]()  # metric of STUCK → updates in a row
        self.began = self.printed = time.monotonic()
        self.has_header = False  # just above

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of an update."""
        self.warn(metrics)
        now = time.monotonic()
        due = step % max(self.total // 20, 1) == 0 or step + 1 == self.total
        if due or now - self.printed > 60:
            left = (now - self.began) / max(step - self.start, 1) * (self.total - step - 1)
            values = [f"{metrics[x]:.3g}" if x in metrics else "" for x in self.titles]
            self.row(f"{step + 1}/{self.total}", *values, str(timedelta(seconds=int(left))))
            self.printed = now
        if step == self.start:  # it also loads, compiles and evaluates
            self.began = now

    def row(self, step: str, *cells: str) -> None:
        """Print a line of the table, below its header."""
        titles = [*self.titles.values(), "left"]
        if not self.has_header:
            self.has_header = True
            self.row("step", *titles)
        parts = zip(cells, titles, strict=True)
        text = "".join(f"{cell:>{max(len(title), 8) + 2}}" for cell, title in parts)
        print(f"{step:>11}{text}", flush=True)

    def warn(self, metrics: dict[str, float]) -> None:
        """Warn once of an unhealthy metric, or if there is nothing to learn from."""
        if metrics.get(CLIPFRAC, 0) > LIMIT and not self.has_warned:
            self.has_warned = True
            advice = "if it stays there, lower --lr, --num_ppo_epochs or --num_minibatches"
            print(f"{CLIPFRAC} is {metrics[CLIPFRAC]:.2g} (healthy: up to 0.3); {advice}")
        for name, (value, cause) in STUCK.items():
            is_stuck = math.isclose(metrics.get(name, -1), value, abs_tol=1e-6)
            self.stuck[name] = self.stuck[name] + 1 if is_stuck else 0
            if self.stuck[name] == UPDATES:
                print(f"nothing to learn from: {name} was {value} for {UPDATES} updates; {cause}")

    def table(self, rows: list[dict[str, Any]], title: str) -> None:
        """Print rows of texts and numbers."""
        self.has_header = False
        table = Table(*rows[0], title=title, show_lines=True)
        for row in rows:
            values = (f"{x:.2f}" if isinstance(x, float) else escape(str(x)) for x in row.values())
            table.add_row(*values)
        Console().print(table)


def plot_run(folder: Path, names: list[str]) -> None:
    """Draw `curves.png`: a panel per metric over episodes or steps, what is held out as points."""
    from matplotlib.figure import Figure  # slow to import

    text = (folder / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    if missing := [name for name in names if not any(name in line for line in lines)]:
        print(f"never logged: {', '.join(missing)}")
    names = [name for name in names if name not in missing]
    x = "ppo/episode" if "ppo/episode" in lines[0] else "step"
    after = [*accumulate((line.get(x, 0) for line in lines), max)]  # each line's update
    figure = Figure(figsize=(7, 2 * len(names)), layout="constrained")
    figure.suptitle(folder.name)
    for i, name in enumerate(names):
        axis = figure.add_subplot(len(names), 1, i + 1, title=name)
        axis.grid(alpha=0.3)
        xs, ys = pick(lines, name, after)
        axis.plot(xs, ys, "C0" if len(ys) > 1 else "oC0", alpha=0.5, label="each")
        if (n := len(ys) // 20) > 4:  # many noisy steps
            means = np.convolve(ys, [1 / n] * n, "valid")
            axis.plot(xs[n - 1 :], means, "C0", label=f"mean of {n}")
        for heldout in {name.replace("objective/", "eval/"), f"heldout/{name}"} - {name}:
            if points := pick(lines, heldout, [0, *after]):
                axis.plot(*points, "oC1", label="held out")
                print(f"{heldout}: {points[1][0]:.3g} → {points[1][-1]:.3g}")
        axis.legend(fontsize=8)
    figure.supxlabel(x.removeprefix("ppo/"))
    figure.savefig(folder / "curves.png")


def pick(lines: list[dict], name: str, xs: list[float]) -> list[tuple]:
    """The curve of a metric: xs and ys; [] if it was never logged."""
    points = [(x, line[name]) for x, line in zip(xs, lines, strict=False) if name in line]
    return [*zip(*points, strict=True)]
