"""What a run shows: its progress, tables of samples, warnings, learning curves."""

import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

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
        self.total, self.start = total, 0
        self.titles = {name: name.removeprefix("objective/") for name in shown}
        self.unhealthy = Counter[str]()  # metric of WARNINGS → updates in a row
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
        """Warn once of each unhealthy metric."""
        for name, (low, high, limit, cause) in WARNINGS.items():
            if (count := self.unhealthy[name]) < limit:  # not said yet
                self.unhealthy[name] = count + 1 if low <= metrics.get(name, -1) <= high else 0
                if self.unhealthy[name] == limit:
                    print(f"unhealthy: {name} is {metrics[name]:.2g}; {cause}")

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
    import pandas  # slow to import
    from matplotlib.figure import Figure

    lines = pandas.read_json(folder / "metrics.jsonl", lines=True)
    lines.index = lines["step"] * lines.get("ppo/episode", [1])[0]  # done before a line's update
    names = [name for name in names if name in lines]
    figure = Figure(figsize=(7, 2 * len(names)), layout="constrained")
    figure.suptitle(folder.name)
    for i, name in enumerate(names):
        axis = figure.add_subplot(len(names), 1, i + 1, title=name)
        axis.grid(alpha=0.3)
        values = lines[name].dropna()
        axis.plot(values, "C0" if len(values) > 1 else "oC0", alpha=0.5, label="each")
        if (n := len(values) // 20) > 4:  # many noisy steps
            axis.plot(values.rolling(n).mean(), "C0", label=f"mean of {n}")
        for heldout in {name.replace("objective/", "eval/"), f"heldout/{name}"} - {name}:
            if heldout in lines:
                points = lines[heldout].dropna()
                axis.plot(points, "oC1", label="held out")
                print(f"{heldout}: {points.iloc[0]:.3g} → {points.iloc[-1]:.3g}")
        axis.legend(fontsize=8)
    figure.supxlabel("episode" if "ppo/episode" in lines else "step")
    figure.savefig(folder / "curves.png")
