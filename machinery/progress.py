"""What a run shows: its progress, tables of samples, warnings, learning curves."""

import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Limits = dict[str, tuple[float, float]]  # metric → largest healthy value, and where to warn

UPDATES = 5  # warn after so many in a row with a value of this table
STUCK = {  # metric → its value if nothing can be learned, and the likely cause
    "objective/frac_reward_zero_std": (1, "all responses to a query have the same score"),
    "objective/scores_std": (0, "all responses have the same score"),
    "objective/ended": (0, "no response has the --truncate_token, so none gets its own score"),
}


class Progress:
    """A line once a minute and at every 5% of the run: the metrics `shown`, and the time left."""

    def __init__(self, total: int, shown: list[str], limits: Limits):
        self.total, self.shown, self.limits = total, shown, dict(limits)
        self.stuck = Counter[str]()  # metric of STUCK → updates in a row
        self.start, self.began = 0, time.monotonic()
        self.printed = self.began

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of an update."""
        self.warn(metrics)
        now = time.monotonic()
        due = step % max(self.total // 20, 1) == 0 or step + 1 == self.total
        if due or now - self.printed > 60:
            shown = [name for name in self.shown if name in metrics]
            text = "  ".join(f"{x.removeprefix('objective/')} {metrics[x]:.3g}" for x in shown)
            left = (now - self.began) / (step + 1 - self.start) * (self.total - step - 1)
            print(f"{step + 1:>6}/{self.total}  {text}  left {left:.0f} s", flush=True)
            self.printed = now

    def warn(self, metrics: dict[str, float]) -> None:
        """Warn once if a metric is far from healthy, or if there is nothing to learn from."""
        for name, (healthy, far) in list(self.limits.items()):
            if metrics.get(name, 0) > far:
                del self.limits[name]
                advice = "if it stays there, lower --lr, --num_ppo_epochs or --num_minibatches"
                print(f"{name} is {metrics[name]:.2g} (healthy: up to {healthy}); {advice}")
        for name, (value, cause) in STUCK.items():
            is_stuck = math.isclose(metrics.get(name, -1), value, abs_tol=1e-6)
            self.stuck[name] = self.stuck[name] + 1 if is_stuck else 0
            if self.stuck[name] == UPDATES:
                print(f"nothing to learn from: {name} was {value} for {UPDATES} updates; {cause}")

    def table(self, rows: list[dict[str, Any]], title: str) -> None:
        """Print rows of texts and numbers."""
        table = Table(*rows[0], title=title, show_lines=True)
        for row in rows:
            values = (f"{x:.2f}" if isinstance(x, float) else escape(str(x)) for x in row.values())
            table.add_row(*values)
        Console().print(table)


def plot_run(folder: Path, names: list[str]) -> None:
    """Draw `curves.png` of a run: one panel for each metric, over the steps."""
    from matplotlib.figure import Figure  # takes half a second to import

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = [name for name in names if any(name in line for line in lines)]
    figure = Figure(figsize=(7, 2 * len(names)), layout="constrained")
    for i, name in enumerate(names):
        points = [(line["step"], line[name]) for line in lines if name in line]
        axis = figure.add_subplot(len(names), 1, i + 1, title=name)
        axis.plot(*zip(*points, strict=True))
    figure.savefig(folder / "curves.png")
