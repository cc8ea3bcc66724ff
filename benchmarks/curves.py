"""Lay the curves of any runs over each other: a picture, and beside it a CSV with where each curve starts and ends.

    python benchmarks/curves.py PPO=runs/demo_ppo RLOO=runs/demo_rloo --out runs/demo.png
    python benchmarks/curves.py "PPO=runs/ppo_*" OpenAI=tb 2023=wandb.csv --names elapsed/episodes=ppo/episode --out all.png

A run is a folder of ours (`metrics.jsonl`), a folder of TensorBoard events, or each run of a chart that W&B exported as CSV.
Runs of one label are its seeds: a thin line each, and their mean (from ten on the interquartile mean: of the middle half) in
a band, the 95% interval of a bootstrap over the seeds. With three seeds or fewer that is their range.
"""

import csv
import glob
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
import records  # noqa: E402
import tasks  # noqa: E402
from tasks import InputError  # noqa: E402

PANELS = ("objective/scores", "objective/gold_score", "objective/kl", "objective/kl_coef")
PANELS += ("ppo/loss/value_avg", "objective/entropy")
Lines = list[dict[str, float]]  # as in metrics.jsonl: what was measured at one step


@dataclass(frozen=True)
class Args:
    """Lay the curves of any runs over each other."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """`label=path` or path each, * for many: a run's folder, one of TensorBoard events, or W&B's CSV, which may hold
    several runs; without a label each run is called by its own name"""
    out: Path
    """picture to write"""
    metrics: tuple[str, ...] = ()
    """a panel each; empty: score, true score, KL, β, value loss and entropy, as far as a run has them"""
    names: tuple[str, ...] = ()
    """`theirs=ours` for metrics of other names; what a run already has by our name stays"""
    x: str = "ppo/episode"
    """metric along the x axis, or `step`"""
    episodes_per_step: tuple[str, ...] = ()
    """`label=512` where a source knows its steps only"""


# ------------------------------------------------------------------------------------------------------------ sources


def read_csv(path: Path) -> dict[str, Lines]:
    """W&B's export of a chart → run → lines. Its columns: the x axis (`Step`, or a metric), then for each run and metric
    `<run> - <metric>` and the range inside a bin, `…__MIN` and `…__MAX`; blank where a run has no value."""
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
            runs.setdefault(run, []).append({"step" if x == "Step" else x: float(row[0])} | values)
    return runs


def read_events(folder: Path) -> Lines:
    """The scalars of a folder of TensorBoard events, as any of its writers made them."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder), tensor_size_guidance={"scalars": 0})  # 0: keep all
    events.Reload()
    lines: dict[int, dict[str, float]] = {}
    for name in events.PluginTagToContent("scalars"):
        for event in events.Tensors(name):
            lines.setdefault(event.step, {"step": event.step})[name] = make_ndarray(event.tensor_proto).item()
    return [lines[step] for step in sorted(lines)]


def read(path: Path) -> dict[str, Lines]:
    """Any of the three → run → lines. Errors: `InputError` for what is none of them."""
    if (path / "metrics.jsonl").is_file():
        return {path.name: [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]}
    try:
        runs = read_csv(path) if path.is_file() else {path.name: read_events(path)}
        if not any(runs.values()):
            raise ValueError("there is no number in it")
    except (ValueError, KeyError, csv.Error) as error:
        kinds = "a folder with metrics.jsonl, one of TensorBoard's events, or W&B's CSV of a chart"
        raise InputError(f"{path} is not {kinds} ({type(error).__name__}: {error})") from error
    return runs


@dataclass(frozen=True)
class Run:
    """A run as it is drawn."""

    label: str
    name: str
    lines: Lines

    def points(self, metric: str, x: str) -> np.ndarray:
        """[2, N]: x, rising, and the metric. A line without x, such as the evaluation behind the last update, stands where
        the one before it does; and so does every evaluation, which is made before its line's update."""
        found, before, here = [], 0.0, 0.0
        for line in self.lines:
            before, here = here, line.get(x, here)
            if metric in line:
                found.append((before if metric.startswith("eval/") and x != "step" else here, line[metric]))
        return np.array(sorted(found, key=lambda point: point[0])).reshape(-1, 2).T


def pairs(words: tuple[str, ...], flag: str) -> dict[str, str]:
    """`a=b` … → {a: b, …}. Errors: `InputError` for a word that is none."""
    if wrong := [word for word in words if "=" not in word]:
        raise InputError(f"{flag} {wrong[0]}: write it as a=b")
    return dict(word.split("=", 1) for word in words)


def load(args: Args) -> list[Run]:
    """All runs, by our names. Errors: `InputError` for a path that is not there, or a run without an x axis."""
    runs = []
    names, per_step = pairs(args.names, "--names"), pairs(args.episodes_per_step, "--episodes_per_step")
    for spec in args.runs:
        label, _, pattern = spec.rpartition("=")
        paths = sorted(glob.glob(pattern))
        if not paths:
            raise InputError(f"there is no {pattern}")
        for name, lines in (run for path in paths for run in read(Path(path)).items()):
            own = label or name
            for theirs, ours in names.items():
                lines = [{ours: line[theirs]} | line if theirs in line else line for line in lines]
            if own in per_step:
                lines = [line | {args.x: line["step"] * float(per_step[own])} for line in lines]
            if not any(args.x in line for line in lines):
                raise InputError(
                    f"{own} ({name}) has no {args.x}; say which metric of it that is with --names theirs={args.x}, how many "
                    f"episodes a step is with --episodes_per_step {own}=512, or --x step"
                )
            runs.append(Run(own, name, lines))
    return runs


# ------------------------------------------------------------------------------------------------------------ numbers


def centre(values: np.ndarray) -> np.ndarray:
    """[seeds, N] → [N]: the mean; of ten seeds or more the interquartile mean, without a quarter of them on either side."""
    cut = len(values) // 4 if len(values) >= 10 else 0
    return np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0)


def band(values: np.ndarray, draws: int = 2000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[seeds, N] → centre and its 95% interval, [N] each: a bootstrap over the seeds, whole curves at a time."""
    rng, n = np.random.default_rng(1), len(values)
    drawn = [centre(values[rng.integers(n, size=n)]) for _ in range(draws)]
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    return centre(values), low, high


def on_one_grid(curves: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Curves [2, N] each → the x that all of them reach [M], and their values there [seeds, M], on straight lines between
    their own points."""
    grid = np.unique(np.concatenate([xs for xs, _ in curves]))
    grid = grid[(grid >= max(xs[0] for xs, _ in curves)) & (grid <= min(xs[-1] for xs, _ in curves))]
    return grid, np.array([np.interp(grid, *curve) for curve in curves])


# ------------------------------------------------------------------------------------------------------------- output


def by_label(runs: list[Run], metric: str, x: str) -> dict[str, list[tuple[str, np.ndarray]]]:
    """label → (name, curve) of each of its runs that has the metric."""
    found: dict[str, list[tuple[str, np.ndarray]]] = {run.label: [] for run in runs}
    for run in runs:
        if (points := run.points(metric, x)).size:
            found[run.label].append((run.name, points))
    return found


def draw(runs: list[Run], metrics: tuple[str, ...], x: str, path: Path) -> None:
    """A panel for each metric; a colour for each label."""
    figure, axes = records.panels(metrics, "episodes" if x == "ppo/episode" else x)
    shown = {}
    for metric, axis in axes.items():
        for i, (label, curves) in enumerate(by_label(runs, metric, x).items()):
            if not curves:
                continue
            for _, (xs, ys) in curves:
                axis.plot(xs, ys, color=f"C{i}", linewidth=0.5, alpha=0.5)
            grid, values = on_one_grid([curve for _, curve in curves])
            middle, low, high = band(values)
            axis.fill_between(grid, low, high, color=f"C{i}", alpha=0.2, linewidth=0)
            (shown[label],) = axis.plot(grid, middle, color=f"C{i}", linewidth=1.4)
    axes[metrics[0]].legend(shown.values(), shown, fontsize=8)
    figure.savefig(path, dpi=110)


def write_csv(runs: list[Run], metrics: tuple[str, ...], x: str, path: Path) -> None:
    """A row for each run and metric: the first value, the mean of the last five, and the last; then the same of a label's
    runs together, with the band's ends."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("label", "run", "metric", "values", "first", "last five", "last"))
        for metric in metrics:
            for label, curves in by_label(runs, metric, x).items():
                rows = [(name, len(ys), (ys[0], ys[-5:].mean(), ys[-1])) for name, (_, ys) in curves]
                if len(rows) > 1:
                    middle = "interquartile mean" if len(rows) >= 10 else "mean"
                    together = band(np.array([shown for _, _, shown in rows]))
                    parts = zip((middle, "2.5%", "97.5%"), together, strict=True)
                    rows += [(f"{part} of {len(curves)}", "", shown) for part, shown in parts]
                for name, count, shown in rows:
                    writer.writerow((label, name, metric, count, *(f"{value:.4f}" for value in shown)))


def main(args: Args) -> None:
    """Read, draw, count."""
    runs = load(args)
    there = {name for run in runs for line in run.lines for name in line}
    metrics = args.metrics or tuple(name for name in PANELS if name in there)
    if unknown := [name for name in metrics or PANELS if name not in there]:
        raise InputError(f"no run has {', '.join(unknown)}; they have {', '.join(sorted(there))}")
    draw(runs, metrics, args.x, args.out)
    write_csv(runs, metrics, args.x, args.out.with_suffix(".csv"))
    print(args.out, args.out.with_suffix(".csv"))


if __name__ == "__main__":
    tasks.cli(main, lambda: tyro.cli(Args))
