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
        self.shown = shown
        self.start = 0
        self.unhealthy = Counter[str]()  # metric of WARNINGS → updates in a row
        self.began = self.printed = time.monotonic()

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of an update."""
        self.warn(metrics)
        now = time.monotonic()
        done = step + 1
        is_due = step % max(self.total // 20, 1) == 0 or done == self.total
        if is_due or now - self.printed > 60:
            self.printed = now
            words = [f"{done:>6}/{self.total}"]
            for name in self.shown:
                if name in metrics:
                    words.append(f"{name.removeprefix('objective/')} {metrics[name]:<8.3g}")
            seconds = (now - self.began) / max(step - self.start, 1) * (self.total - done)
            print(*words, f"left {timedelta(seconds=int(seconds))}", sep="  ", flush=True)
        if step == self.start:  # it also loads, compiles and evaluates
            self.began = now

    def warn(self, metrics: dict[str, float]) -> None:
        """Warn once of each unhealthy metric."""
        for name, (low, high, limit, cause) in WARNINGS.items():
            if self.unhealthy[name] == limit:  # was said
                continue
            is_unhealthy = low <= metrics.get(name, -1) <= high
            self.unhealthy[name] += 1
            if not is_unhealthy:
                self.unhealthy[name] = 0
            if self.unhealthy[name] == limit:
                print(f"unhealthy: {name} is {metrics[name]:.2g}; {cause}")

    def table(self, rows: list[dict[str, Any]], title: str) -> None:
        """Print rows of texts and numbers."""
        table = Table(*rows[0], title=title, show_lines=True)
        for row in rows:
            cells = []
            for value in row.values():
                if isinstance(value, float):
                    value = f"{value:.2f}"
                cells.append(rich.markup.escape(escape(str(value))))
            table.add_row(*cells)
        Console().print(table)


def plot_run(folder: Path, names: list[str]) -> None:
    """Draw `curves.png`: a panel per metric over finished episodes or steps, as tools/curves.py has
    them; what is held out as points. Print the first and last held-out value.
    """
    import pandas  # slow to import
    from matplotlib.figure import Figure

    lines = pandas.read_json(folder / "metrics.jsonl", lines=True).set_index("step")
    size, step, unit = 1, "step", "step"
    if "ppo/episode" in lines:
        size, step, unit = lines["ppo/episode"][0], "update", "episode"
    updates = lines[names[0]].count()  # later lines are of evaluations
    panels = [name for name in names if name in lines and not name.startswith("heldout/")]
    figure = Figure(figsize=(7, 2 * len(panels)), layout="constrained")
    figure.suptitle(folder.name)
    figure.supxlabel(unit)
    for i, name in enumerate(panels):
        axis = figure.add_subplot(len(panels), 1, i + 1, title=name)
        axis.grid(alpha=0.3)
        values = lines[name].dropna()
        x = (values.index + 1) * size
        axis.plot(x, values, "C0", alpha=0.5, label=f"each {step}")
        n = len(values) // 20
        if n > 4:  # many noisy steps
            axis.plot(x, values.rolling(n).mean(), "C0", label=f"mean of {n}")
        # An evaluation is made before the update of its line, what is held out after it.
        plain = name.removeprefix("objective/")
        for heldout, more in ((f"eval/{plain}", 0), (f"heldout/{plain}", 1)):
            if heldout in lines:
                points = lines[heldout].dropna()
                places = [min(at + more, updates) * size for at in points.index]
                axis.plot(places, points, ".C1", label="held out")
                ends = points.iloc[[0, -1]].unique()
                print(f"{heldout}:", " → ".join(f"{value:.3g}" for value in ends))
        axis.legend(fontsize=8)
    figure.savefig(folder / "curves.png")
