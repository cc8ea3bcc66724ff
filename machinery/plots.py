"""Learning curves as pictures. Curves of several runs: benchmarks/curves.py."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any


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


def plot_histogram(groups: dict[str, list[float]], title: str, path: Path) -> None:
    """Draw the distributions of a few groups of numbers."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    options = dict(bins=40, density=True, histtype="stepfilled", alpha=0.5, label=list(groups))
    axis.hist(list(groups.values()), **options)
    axis.set(title=title, ylabel="density")
    axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
