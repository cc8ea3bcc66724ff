"""What a run shows: its progress, tables of samples, warnings, learning curves.

Curves of several runs: benchmarks/curves.py.
"""

import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Limits = dict[str, tuple[float, float]]  # metric → largest healthy value, and where to warn


class Progress:
    """A line once a minute and at every 5% of the run: the metrics `shown`, and the time left."""

    def __init__(self, total: int, shown: list[str], limits: Limits):
        self.total, self.shown, self.limits = total, shown, dict(limits)
        self.console = Console()
        self.start, self.began = 0, time.monotonic()
        self.printed = self.began

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of an update."""
        self.warn(metrics)
        now = time.monotonic()
        due = step % max(self.total // 20, 1) == 0 or step + 1 == self.total
        if due or now - self.printed > 60:
            shown = [name for name in self.shown if name in metrics]
            text = "  ".join(f"{name.split('/')[-1]} {metrics[name]:.3g}" for name in shown)
            left = (now - self.began) / (step + 1 - self.start) * (self.total - step - 1)
            print(f"{step + 1:>6}/{self.total}  {text}  left {left:.0f} s", flush=True)
            self.printed = now

    def warn(self, metrics: dict[str, float]) -> None:
        """Print once for each metric that is far above its healthy range, and what to change."""
        for name in [name for name, (_, far) in self.limits.items() if metrics.get(name, 0) > far]:
            healthy, _ = self.limits.pop(name)
            change = "if it stays there, lower --lr or --num_ppo_epochs"
            print(f"{name} is {metrics[name]:.2g}, healthy is up to {healthy}; {change}")

    def table(self, rows: list[dict[str, Any]], title: str) -> None:
        """Print rows of texts and numbers."""
        if self.console.width < 60:
            print(title, *rows, sep="\n")
            return
        table = Table(*rows[0], title=title, show_lines=True)
        for row in rows:
            values = (f"{x:.2f}" if isinstance(x, float) else escape(str(x)) for x in row.values())
            table.add_row(*values)
        self.console.print(table)


def pyplot() -> Any:
    """matplotlib without a screen; imported only when something is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def make_panels(names: Iterable[str], x_label: str) -> tuple[Any, dict[str, Any]]:
    """A figure, and a panel for each name."""
    names = list(names)
    columns = 2 if len(names) == 4 else min(3, len(names))
    rows = math.ceil(len(names) / columns)
    size = 4.6 * columns, 3.1 * rows
    figure, axes = pyplot().subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes.flat, names, strict=False):
        axis.set_title(name, fontsize=10)
        axis.set_xlabel(x_label, fontsize=8)
        axis.locator_params(axis="x", nbins=6)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    return figure, dict(zip(names, axes.flat, strict=False))


def plot_run(folder: Path, names: list[str]) -> None:
    """Draw `curves.png` of a run: one panel for each metric."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figure, panels = make_panels([name for name in names if any(name in x for x in lines)], "step")
    for name, axis in panels.items():
        points = [(line["step"], line[name]) for line in lines if name in line]
        axis.plot([x for x, _ in points], [y for _, y in points], linewidth=1.2)
    figure.savefig(folder / "curves.png", dpi=110)
    pyplot().close(figure)
