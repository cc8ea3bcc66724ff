"""What a run shows: its progress, tables of samples, warnings, learning curves."""

import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import rich.markup
from rich.console import Console
from rich.table import Table

from machinery.cli import escape

# Metric → smallest and largest unhealthy value, how many updates in a row are warned of, and why:
WARNINGS = {
    "ppo/policy/clipfrac_avg": (0.4, 1, 1, "if it stays, lower --lr or --num_ppo_epochs"),
    "objective/frac_reward_zero_std": (1, 1, 5, "all responses to a query have the same score"),
    "objective/scores_std": (0, 1e-6, 5, "all responses have the same score"),
    "objective/ended": (0, 0, 5, "no response has the --truncate_token: none has its own score"),
}


class Progress:
    """A line a minute and every 5% of the run: the metrics `shown`, and the time left."""

    def __init__(self, total: int, shown: list[str]):
        self.total = total
        self.start = 0
        self.titles = {name: name.removeprefix("objective/") for name in shown}
        self.unhealthy = Counter[str]()  # metric of WARNINGS → updates in a row
        self.began = self.printed = time.monotonic()
        self.has_header = False  # just above

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of an update."""
        self.warn(metrics)
        now = time.monotonic()
        is_due = step % max(self.total // 20, 1) == 0 or step + 1 == self.total
        if is_due or now - self.printed > 60:
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
        text = f"{step:>11}"
        for cell, title in zip(cells, titles, strict=True):
            width = max(len(title), 8) + 2
            text += f"{cell:>{width}}"
        print(text, flush=True)

    def warn(self, metrics: dict[str, float]) -> None:
        """Warn once of each unhealthy metric."""
        for name, (low, high, limit, cause) in WARNINGS.items():
            count = self.unhealthy[name]
            if count == limit:  # was said
                continue
            is_unhealthy = low <= metrics.get(name, -1) <= high
            self.unhealthy[name] = count + 1 if is_unhealthy else 0
            if self.unhealthy[name] == limit:
                print(f"unhealthy: {name} is {metrics[name]:.2g}; {cause}")

    def table(self, rows: list[dict[str, Any]], title: str) -> None:
        """Print rows of texts and numbers."""
        self.has_header = False
        table = Table(*rows[0], title=title, show_lines=True)
        for row in rows:
            cells = []
            for value in row.values():
                text = f"{value:.2f}" if isinstance(value, float) else escape(str(value))
                cells.append(rich.markup.escape(text))
            table.add_row(*cells)
        Console().print(table)


def plot_run(folder: Path, names: list[str]) -> None:
    """Draw `curves.png`: a panel per metric over finished episodes or steps, as tools/curves.py has
    them; what is held out as points. Print the first and last held-out value.
    """
    import pandas  # slow to import
    from matplotlib.figure import Figure

    lines = pandas.read_json(folder / "metrics.jsonl", lines=True)
    size = lines.get("ppo/episode", [1])[0]  # episodes of an update
    updates = lines[names[0]].count()  # later lines are of evaluations
    before = lines["step"] * size
    after = (lines["step"] + 1).clip(upper=updates) * size
    heldout = {name: name.replace("objective/", "eval/") for name in names}
    for name in names:
        if f"heldout/{name}" in lines:
            heldout[name] = f"heldout/{name}"
    # A panel for each metric that was logged and is not a point in another panel:
    names = [name for name in names if name in lines]
    names = [name for name in names if name.removeprefix("heldout/") not in {*names} - {name}]
    figure = Figure(figsize=(7, 2 * len(names)), layout="constrained")
    figure.suptitle(folder.name)
    for i, name in enumerate(names):
        axis = figure.add_subplot(len(names), 1, i + 1, title=name)
        axis.grid(alpha=0.3)
        values = lines[name].dropna()
        style = "C0" if len(values) > 1 else "oC0"
        each = "each update" if "ppo/episode" in lines else "each step"
        axis.plot(after[values.index], values, style, alpha=0.5, label=each)
        n = len(values) // 20
        if n > 4:  # many noisy steps
            axis.plot(after[values.index], values.rolling(n).mean(), "C0", label=f"mean of {n}")
        other = heldout[name]
        if other != name and other in lines:
            points = lines[other].dropna()
            at = before if other.startswith("eval/") else after  # the update of its line
            axis.plot(at[points.index], points, "oC1", label="held out")
            first, last = f"{points.iloc[0]:.3g}", f"{points.iloc[-1]:.3g}"
            print(f"{other}: {first} → {last}" if len(points) > 1 else f"{other}: {last}")
        axis.legend(fontsize=8)
    figure.supxlabel("episode" if "ppo/episode" in lines else "step")
    figure.savefig(folder / "curves.png")
