r"""Plot the learning curves of several runs: a picture, and a CSV with first and last values.

    python tools/curves.py PPO=runs/demo_ppo RLOO=runs/demo_rloo --out runs/demo.png
    python tools/curves.py "PPO=runs/ppo_*" OpenAI=tb 2023=wandb.csv \
        --names elapsed/episodes=ppo/episode --out all.png

A run is a folder of ours (`metrics.jsonl`), a folder of TensorBoard events, or each run in a chart
that W&B exported as CSV. Runs with the same label are seeds: a thin line each, and their mean (the
interquartile mean from ten seeds on) with the 95% interval of a bootstrap over the seeds.
"""

import csv
import glob
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from machinery import cli  # noqa: E402
from machinery.cli import InputError  # noqa: E402

PANELS = (
    "objective/scores",
    "objective/gold_score",
    "objective/kl",
    "objective/kl_coef",
    "objective/rlhf_reward",
    "objective/entropy",
)
X = "ppo/episode"  # metric of the x axis
Lines = list[dict[str, float]]  # as in metrics.jsonl: the metrics of one step each


@dataclass(frozen=True)
class Args:
    """Plot the learning curves of several runs: a picture, and a CSV with first and last values."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """`label=path` or path each; * matches many; without a label, the name of the run"""
    out: Path
    """picture to write"""
    metrics: tuple[str, ...] = ()
    """a panel each; default: score, true score, KL, kl_coef, rlhf_reward, entropy"""
    names: tuple[str, ...] = ()
    """`theirs=ours`: rename metrics; a run's own metric of that name takes precedence"""
    episodes_per_step: tuple[str, ...] = ()
    """`label=512` if a source logs only steps"""


def provenance() -> dict[str, str]:
    """Today and the commit of the code, for the last columns of a CSV."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit}


# ------------------------------------------------------------------------------------------ sources


def read_csv(path: Path) -> dict[str, Lines]:
    """W&B's export of a chart → lines by run.

    Columns: the x axis (`Step`, or a metric), then `<run> - <metric>` for each run and metric, with
    the range inside a bin in `…__MIN` and `…__MAX`; blank where a run has no value.
    """
    with open(path, newline="", encoding="utf-8-sig") as file:
        header, *rows = csv.reader(file)
    x, *columns = header
    runs: dict[str, Lines] = {}
    for row in rows:
        found: dict[str, dict[str, float]] = {}
        for column, value in zip(columns, row[1:], strict=True):
            run, _, metric = column.rpartition(" - ")
            if value not in ("", "NaN") and not column.endswith(("__MIN", "__MAX")):
                found.setdefault(run or path.stem, {})[metric] = float(value)
        for run, values in found.items():
            line = {"step" if x == "Step" else x: float(row[0])} | values
            runs.setdefault(run, []).append(line)
    return runs


def read_events(folder: Path) -> Lines:
    """All scalars of a folder of TensorBoard events, from any writer."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder), tensor_size_guidance={"scalars": 0})  # 0: keep all
    events.Reload()
    lines: dict[int, dict[str, float]] = {}
    for name in events.PluginTagToContent("scalars"):
        for event in events.Tensors(name):
            line = lines.setdefault(event.step, {"step": event.step})
            line[name] = make_ndarray(event.tensor_proto).item()
    return [lines[step] for step in sorted(lines)]


def read(path: Path) -> dict[str, Lines]:
    """A source of any of the three kinds → lines by run. Raises `InputError` for others."""
    if (path / "metrics.jsonl").is_file():
        text = (path / "metrics.jsonl").read_text()
        return {path.name: [json.loads(line) for line in text.splitlines()]}
    try:
        runs = read_csv(path) if path.is_file() else {path.name: read_events(path)}
        if not any(runs.values()):
            raise ValueError("there is no number in it")
    except (ValueError, KeyError, csv.Error) as error:
        kinds = "a folder with metrics.jsonl or TensorBoard events, or W&B's CSV of a chart"
        raise InputError(f"{path} is not {kinds} ({type(error).__name__}: {error})") from error
    return runs


@dataclass(frozen=True)
class Run:
    """The metrics of one run under our names."""

    label: str
    name: str
    lines: Lines

    def points(self, metric: str) -> np.ndarray:
        """The curve [2, N]: episodes, ascending, and the metric.

        An evaluation is made before its line's update, so it has the episodes of the line before,
        and so has a line without any, such as the evaluation after the last update.
        """
        found = []
        before = here = 0.0
        for line in self.lines:
            before, here = here, line.get(X, here)
            if metric in line:
                at = before if metric.startswith("eval/") else here
                found.append((at, line[metric]))
        return np.array(sorted(found, key=lambda point: point[0])).reshape(-1, 2).T


def parse_pairs(words: tuple[str, ...], flag: str) -> dict[str, str]:
    """`a=b` … → {a: b, …}. Raises `InputError` for other words."""
    for word in words:
        if "=" not in word:
            raise InputError(f"{flag} {word}: write it as a=b")
    return dict(word.split("=", 1) for word in words)


def load(args: Args) -> list[Run]:
    """All runs. Raises `InputError` for a missing path or a run without the x axis."""
    runs = []
    names = parse_pairs(args.names, "--names")
    per_step = parse_pairs(args.episodes_per_step, "--episodes_per_step")
    for spec in args.runs:
        label, _, pattern = spec.rpartition("=")
        paths = sorted(glob.glob(pattern))
        if not paths:
            raise InputError(f"there is no {pattern}")
        for name, lines in itertools.chain(*(read(Path(path)).items() for path in paths)):
            own = label or name
            for line in lines:
                for theirs, ours in names.items():
                    if theirs in line:
                        line.setdefault(ours, line[theirs])
                if own in per_step:
                    line[X] = line["step"] * float(per_step[own])
            if not any(X in line for line in lines):
                raise InputError(
                    f"{own} ({name}) has no {X}; name its metric with --names theirs={X}, "
                    f"or pass --episodes_per_step {own}=512"
                )
            runs.append(Run(own, name, lines))
    return runs


# --------------------------------------------------------------------------------------- statistics


def center(values: np.ndarray) -> np.ndarray:
    """[seeds, N] → [N]: the mean, or from ten seeds on the interquartile mean."""
    cut = len(values) // 4 if len(values) >= 10 else 0
    return np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0)


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[seeds, N] → center and its 95% interval, [N] each: a bootstrap over whole curves."""
    rng, n = np.random.default_rng(1), len(values)
    samples = [center(values[rng.integers(n, size=n)]) for _ in range(2000)]
    low, high = np.quantile(samples, [0.025, 0.975], axis=0)
    return center(values), low, high


def on_one_grid(curves: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Curves [2, N] each → the x values that all of them cover [M], and interpolated [seeds, M]."""
    grid = np.unique(np.concatenate([xs for xs, _ in curves]))
    first, last = max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves)
    grid = grid[(grid >= first) & (grid <= last)]
    return grid, np.array([np.interp(grid, *curve) for curve in curves])


# ------------------------------------------------------------------------------------------- output


def by_label(runs: list[Run], metric: str) -> dict[str, list[tuple[str, np.ndarray]]]:
    """Name and curve of each run that has the metric, by label."""
    found: dict[str, list[tuple[str, np.ndarray]]] = {run.label: [] for run in runs}
    for run in runs:
        points = run.points(metric)
        if points.size:
            found[run.label].append((run.name, points))
    return found


def make_panels(names: Iterable[str], x_label: str) -> tuple[Any, dict[str, Any]]:
    """A figure, and a panel for each name."""
    from matplotlib.figure import Figure  # takes half a second to import

    names = list(names)
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.1 * rows), layout="constrained")
    panels = {name: figure.add_subplot(rows, columns, i + 1) for i, name in enumerate(names)}
    for name, axis in panels.items():
        axis.set_title(name, fontsize=10)
        axis.set_xlabel(x_label, fontsize=8)
        axis.grid(alpha=0.3)
        axis.locator_params(axis="x", nbins=6)
    return figure, panels


def draw(runs: list[Run], metrics: tuple[str, ...], path: Path, x_label: str) -> None:
    """A panel for each metric, a color for each label."""
    figure, axes = make_panels(metrics, x_label)
    legend = {}
    for metric, axis in axes.items():
        for i, (label, curves) in enumerate(by_label(runs, metric).items()):
            if not curves:
                continue
            for _, (xs, ys) in curves:
                axis.plot(xs, ys, color=f"C{i}", linewidth=0.5, alpha=0.5)
            grid, values = on_one_grid([curve for _, curve in curves])
            middle, low, high = band(values)
            axis.fill_between(grid, low, high, color=f"C{i}", alpha=0.2, linewidth=0)
            (legend[label],) = axis.plot(grid, middle, color=f"C{i}", linewidth=1.4)
    place: dict[str, Any] = dict(loc="outside lower center", ncols=5, fontsize=8)
    figure.legend(legend.values(), legend, **place)
    figure.savefig(path, dpi=110)


def write_csv(runs: list[Run], metrics: tuple[str, ...], path: Path) -> None:
    """A row for each run and metric, then center and interval of the runs of a label."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("label", "run", "metric", "values", "first", "last five", "last"))
        for metric in metrics:
            for label, curves in by_label(runs, metric).items():
                rows: list[tuple[str, Any, Any]] = []  # name, number of values, first to last
                for name, (_, ys) in curves:
                    rows.append((name, len(ys), (ys[0], ys[-5:].mean(), ys[-1])))
                if len(rows) > 1:
                    middle = "interquartile mean" if len(rows) >= 10 else "mean"
                    together = band(np.array([values for _, _, values in rows]))
                    for part, values in zip((middle, "2.5%", "97.5%"), together, strict=True):
                        rows.append((f"{part} of {len(curves)}", "", values))
                for name, count, numbers in rows:
                    cells = [f"{number:.4f}" for number in numbers]
                    writer.writerow((label, name, metric, count, *cells))


def main(args: Args) -> None:
    """Read the runs, write picture and CSV."""
    if not args.out.parent.is_dir() or args.out.suffix not in (".png", ".pdf", ".svg"):
        raise InputError(f"--out {args.out} is not a .png, .pdf or .svg in an existing folder")
    if not args.runs:
        raise InputError("name the runs to draw, such as PPO=runs/demo_ppo")
    runs = load(args)
    known = {name for run in runs for line in run.lines for name in line}
    metrics = args.metrics or tuple(name for name in PANELS if name in known)
    unknown = [name for name in metrics or PANELS if name not in known]
    if unknown:
        raise InputError(f"no run has {', '.join(unknown)}; they have {', '.join(sorted(known))}")
    x = dict(name.split("=")[::-1] for name in args.names).get(X, "episodes")
    draw(runs, metrics, args.out, x.rpartition("/")[2])
    write_csv(runs, metrics, args.out.with_suffix(".csv"))
    print(args.out, args.out.with_suffix(".csv"))


if __name__ == "__main__":
    cli.run(main, Args)
