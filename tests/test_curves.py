"""benchmarks/curves.py: bands by hand, the three forms of a run, README's command on made-up exports."""

import csv
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import tyro
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch.utils.tensorboard import SummaryWriter

from benchmarks import curves
from machinery.cli import InputError

DOCS = (Path(__file__).parents[1] / "docs" / "your-experiment.md").read_text()


def write_run(folder: Path, lines: list[dict]) -> Path:
    """A run's folder of ours."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_chart(path: Path, x: str, columns: dict[str, dict[float, float]]) -> Path:
    """A chart as W&B exports it: every cell in quotes, `<run> - <metric>` and its range, blank where a run has no value."""
    header = [x] + [name + end for name in columns for end in ("", "__MIN", "__MAX")]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(header)
        for at in sorted({at for points in columns.values() for at in points}):
            cells = [points.get(at, "") for points in columns.values()]
            writer.writerow(
                [at] + [y if y == "" else y + d for y in cells for d in (0, -1000, 1000)]
            )
    return path


def write_events(folder: Path, metrics: dict[str, dict[int, float]]) -> Path:
    """TensorBoard events as PyTorch and TensorFlow 1 write them."""
    writer = SummaryWriter(folder)
    for name, points in metrics.items():
        for step, value in points.items():
            writer.add_scalar(name, value, step)
    writer.close()
    return folder


def arguments(*words: str) -> curves.Args:
    """As the command line gives them."""
    return tyro.cli(curves.Args, args=list(words))


def rows_of(path: Path) -> dict[tuple[str, str, str], list[float]]:
    """(label, run, metric) → first, mean of the last five, last."""
    with open(path, newline="") as file:
        return {
            (row[0], row[1], row[2]): [float(x) for x in row[4:]]
            for row in list(csv.reader(file))[1:]
        }


# ------------------------------------------------------------------------------------------------------------ numbers


def test_nine_seeds_have_a_mean_and_ten_an_interquartile_one():
    seeds = [5.0, 1.0, 3.0, 2.0, 4.0, 9.0, 6.0, 8.0, 700.0]
    assert curves.center(np.array(seeds)[:, None]) == pytest.approx([82.0])  # 738 / 9
    ten = np.array([*seeds, 7.0])[
        :, None
    ]  # two of ten go on either side: (3 + 4 + 5 + 6 + 7 + 8) / 6
    assert curves.center(ten) == pytest.approx([5.5])
    twelve = np.array([*seeds, 7.0, -800.0, 10.0])[:, None]  # three: −800, 1, 2 and 9, 10, 700
    assert curves.center(twelve) == pytest.approx([5.5])


def test_points_of_a_curve_are_each_their_own():
    values = np.arange(20.0).reshape(10, 2) * [1, -1]  # columns 0, 2 … 18 and −1, −3 … −19
    assert curves.center(values) == pytest.approx([9.0, -10.0])


def test_the_band_of_three_seeds_is_their_range_and_of_one_the_curve_itself():
    """All three draws are the smallest with probability 1/27 = 3.7%, which is more than 2.5%."""
    middle, low, high = curves.band(np.array([[1.0, 10.0], [2.0, 40.0], [6.0, -20.0]]))
    assert (middle.tolist(), low.tolist(), high.tolist()) == (
        [3.0, 10.0],
        [1.0, -20.0],
        [6.0, 40.0],
    )
    assert [x.tolist() for x in curves.band(np.array([[4.0, 5.0]]))] == [[4.0, 5.0]] * 3


def test_the_band_of_four_seeds_is_the_one_of_all_256_draws():
    """Counted by hand from the sums of four draws of 0, 0, 0 and 1: how often 1 is drawn is binomial(4, 1/4), whose
    upper 2.5% (12/256 = 4.7% for three, 1/256 for four) begin at three: the mean 3/4."""
    _, low, high = curves.band(np.array([[0.0], [0.0], [0.0], [1.0]]))
    assert (low.item(), high.item()) == (0.0, 0.75)


def test_the_band_of_many_seeds_is_the_normal_interval_of_their_centre():
    """Of the mean of 9 it is 1.96 σ / √9; the interquartile mean of a normal has 1.195 times the mean's variance."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(9, 400))
    _, low, high = curves.band(values)
    assert np.mean(high - low) == pytest.approx(
        2 * 1.96 * np.mean(values.std(axis=0)) / 3, rel=0.03
    )
    values = rng.normal(size=(400, 30))
    _, low, high = curves.band(values)
    assert np.mean(high - low) == pytest.approx(2 * 1.96 * np.sqrt(1.195 / 400), rel=0.05)


def test_whole_curves_are_drawn_never_points_of_different_seeds():
    """The band of a sum of two points is the sum of the bands, since a seed that is drawn is drawn at both."""
    values = np.random.default_rng(0).normal(size=(5, 1))
    _, low, high = curves.band(np.concatenate([values, -values], axis=1))
    assert low[0] == pytest.approx(-high[1]) and high[0] == pytest.approx(-low[1])


def test_curves_of_other_steps_meet_on_straight_lines_where_all_of_them_are():
    a, b = (
        np.array([[0.0, 10.0, 20.0], [0.0, 100.0, 0.0]]),
        np.array([[5.0, 15.0, 40.0], [1.0, 1.0, 1.0]]),
    )
    grid, values = curves.on_one_grid([a, b])
    assert grid.tolist() == [5.0, 10.0, 15.0, 20.0]
    assert values.tolist() == [[50.0, 100.0, 50.0, 0.0], [1.0, 1.0, 1.0, 1.0]]


# ------------------------------------------------------------------------------------------------------------ sources


def test_an_evaluation_stands_at_the_episodes_it_was_made_after():
    lines = [
        {"step": 0, "ppo/episode": 8, "loss": 5.0, "eval/scores": 1.0},
        {"step": 1, "ppo/episode": 16, "loss": 4.0},
    ]
    lines += [
        {"step": 2, "ppo/episode": 24, "loss": 3.0, "eval/scores": 2.0},
        {"step": 3, "eval/scores": 3.0},
    ]
    run = curves.Run("a", "a", lines)
    assert run.points("loss", "ppo/episode").tolist() == [[8, 16, 24], [5, 4, 3]]
    assert run.points("eval/scores", "ppo/episode").tolist() == [[0, 16, 24], [1, 2, 3]]
    assert run.points("eval/scores", "step").tolist() == [[0, 2, 3], [1, 2, 3]]


def test_a_chart_of_wandb_holds_its_runs_without_their_ranges(tmp_path):
    columns = {
        "sweep - lr 1 - objective/kl": {0: 0.5, 1: 0.75},
        "b - objective/kl": {1: 2.0, 2: float("nan")},
    }
    path = write_chart(tmp_path / "wandb_export_2023-08-25T22_43_23.724+02_00.csv", "Step", columns)
    assert path.read_text().startswith(
        '"Step","sweep - lr 1 - objective/kl","sweep - lr 1 - objective/kl__MIN",'
    )
    path.write_bytes(
        b"\xef\xbb\xbf" + path.read_bytes().replace(b"nan", b"NaN")
    )  # as a spreadsheet saves it again
    found = {"sweep - lr 1": [{"step": 0, "objective/kl": 0.5}, {"step": 1, "objective/kl": 0.75}]}
    assert curves.read(path) == found | {"b": [{"step": 1, "objective/kl": 2.0}]}
    path = write_chart(
        tmp_path / "one.csv", "ppo/episode", {"objective/kl": {512: 0.5}}
    )  # of one run, its own axis
    assert curves.read(path) == {"one": [{"ppo/episode": 512, "objective/kl": 0.5}]}


def test_scalars_of_any_writer_are_read_all_of_them(tmp_path):
    values = {step: step / 2 for step in range(3000)}  # TensorBoard's own default keeps 500
    write_events(tmp_path / "torch", {"objective/kl": values, "ppo/episode": {2: 1536.0}})
    (lines,) = curves.read(tmp_path / "torch").values()
    assert [(line["step"], line["objective/kl"]) for line in lines] == list(values.items())
    assert lines[2] == {"step": 2, "objective/kl": 1.0, "ppo/episode": 1536.0}
    (tmp_path / "tf2").mkdir()
    writer = EventFileWriter(str(tmp_path / "tf2"))  # TensorFlow 2 writes tensors
    writer.add_event(Event(step=7, summary=scalar_pb("objective/kl", 0.25)))
    writer.close()
    assert curves.read(tmp_path / "tf2") == {"tf2": [{"step": 7, "objective/kl": 0.25}]}


def test_runs_of_one_name_stay_two_and_a_pattern_is_all_that_it_matches(tmp_path):
    for i in (1, 2):
        write_run(
            tmp_path / f"seed{i}/ppo", [{"step": 0, "ppo/episode": 8, "objective/kl": float(i)}]
        )
    args = arguments(f"PPO={tmp_path}/seed*/ppo", "--out", str(tmp_path / "all.png"))
    curves.main(args)
    rows = rows_of(tmp_path / "all.csv")
    assert rows["PPO", "mean of 2", "objective/kl"] == [1.5] * 3
    assert rows["PPO", "2.5% of 2", "objective/kl"] == [1.0] * 3


def test_our_own_name_stays_where_a_run_has_both(tmp_path):
    lines = [
        {"step": 0, "elapsed/episodes": 8, "loss/value": 1.0},
        {"step": 1, "elapsed/episodes": 16, "loss/value": 2.0, "mine": 3.0},
    ]
    write_run(tmp_path / "a", lines)
    names = ("--names", "elapsed/episodes=ppo/episode", "loss/value=mine")
    (run,) = curves.load(arguments(str(tmp_path / "a"), "--out", "a.png", *names))
    assert (run.label, run.points("mine", "ppo/episode").tolist()) == ("a", [[8, 16], [1, 3]])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no nowhere"),
        (["table.csv"], "table.csv is not .*could not convert string to float: 'finished'"),
        (["empty.csv"], "empty.csv is not .*not enough values"),
        (["folder"], "folder is not .*KeyError"),
        (
            ["PPO=chart.csv"],
            "PPO .a. has no ppo/episode; .*--episodes_per_step PPO=512, or --x step",
        ),
        (
            ["chart.csv", "--x", "step", "--metrics", "objective/k"],
            "no run has objective/k; they have objective/kl, step",
        ),
        (["chart.csv", "--x", "step", "--names", "kl"], "--names kl: write it as a=b"),
        (["chart.csv", "--out", "all.text"], "--out all.text"),
        ([], "name the runs"),
    ],
)
def test_what_cannot_be_drawn_is_named(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("table.csv").write_text('"Name","State","kl"\n"run-a","finished","1"\n')
    Path("empty.csv").write_text("")
    Path("folder").mkdir()
    write_chart(Path("chart.csv"), "Step", {"a - objective/kl": {0: 0.5, 1: 0.75}})
    with pytest.raises(InputError, match=message):
        curves.main(arguments("--out", "all.png", *words))
    assert not Path("all.png").exists()


def test_a_missing_folder_of_out_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["curves.py", "--out", str(tmp_path / "missing" / "x.png")])
    with pytest.raises(SystemExit) as error:
        runpy.run_path(curves.__file__, run_name="__main__")
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("curves.py: error: --out ") and "missing/x.png" in line


def test_steps_become_episodes_where_a_source_knows_no_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_chart(Path("chart.csv"), "Step", {"a - objective/kl": {1: 0.5, 2: 0.75}})
    (run,) = curves.load(
        arguments("PPO=chart.csv", "--out", "a.png", "--episodes_per_step", "PPO=512")
    )
    assert run.points("objective/kl", "ppo/episode").tolist() == [[512, 1024], [0.5, 0.75]]


# ------------------------------------------------------------------------------------------------------------- README


def make_exports(folder: Path) -> None:
    """Three seeds of ours; OpenAI's run as its code logs it; ten of the 2023 reproduction as W&B exports them. Made up."""
    rng = np.random.default_rng(0)

    def rise(top: float) -> list[float]:
        return [float(top * (1 - np.exp(-i / 8)) + rng.normal(scale=0.1)) for i in range(1, 41)]

    for seed in (1, 2, 3):
        scores, kls = rise(2.0), rise(6.0)
        lines = [
            {"step": i, "ppo/episode": 512 * (i + 1), "objective/scores": s}
            for i, s in enumerate(scores)
        ]
        write_run(
            folder / f"runs/ppo_{seed}",
            [x | {"objective/kl": kl} for x, kl in zip(lines, kls, strict=True)],
        )
    metrics = {"objective/scores": rise(1.8), "objective/kl": rise(6.5)}
    metrics["elapsed/episodes"] = [512 * (i + 1) for i in range(40)]
    write_events(folder / "tb", {name: dict(enumerate(values)) for name, values in metrics.items()})
    columns = {}
    for seed in range(1, 11):
        for name, top in (("objective/scores", 1.9), ("objective/kl", 5.5)):
            columns[f"ppo__{seed} - {name}"] = {
                512 * (i + 1): y for i, y in enumerate(rise(top)[: 40 if seed > 1 else 30])
            }
    write_chart(folder / "wandb.csv", "ppo/episode", columns)


def test_the_documented_command_draws_published_curves_over_ours(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_exports(tmp_path)
    text = DOCS.replace("\\\n", " ")
    (command,) = re.findall(r"^python benchmarks/curves\.py (.*wandb\.csv.*)$", text, flags=re.M)
    seen = {}
    draw = curves.draw
    monkeypatch.setattr(
        curves, "draw", lambda runs, *rest: (seen.update(runs=runs), draw(runs, *rest))
    )
    curves.main(arguments(*shlex.split(command)))
    assert capsys.readouterr().out == "all.png all.csv\n"
    assert Path("all.png").read_bytes()[:4] == b"\x89PNG"
    assert [run.label for run in seen["runs"]] == ["PPO"] * 3 + ["OpenAI"] + ["2023"] * 10
    rows = rows_of(Path("all.csv"))
    assert {metric for _, _, metric in rows} == {"objective/scores", "objective/kl"}
    (openai,) = (run for run in seen["runs"] if run.label == "OpenAI")
    assert openai.points("objective/kl", "ppo/episode")[0].tolist() == list(
        range(512, 40 * 512 + 1, 512)
    )
    last = [
        json.loads(Path(f"runs/ppo_{i}/metrics.jsonl").read_text().splitlines()[-1])
        for i in (1, 2, 3)
    ]
    scores = sorted(line["objective/scores"] for line in last)
    for part, value in (("2.5%", scores[0]), ("mean", sum(scores) / 3), ("97.5%", scores[2])):
        assert rows["PPO", f"{part} of 3", "objective/scores"][2] == pytest.approx(value, abs=6e-5)
    ten = sorted(rows["2023", f"ppo__{i}", "objective/kl"][2] for i in range(1, 11))
    assert rows["2023", "interquartile mean of 10", "objective/kl"][2] == pytest.approx(
        sum(ten[2:8]) / 6, abs=6e-5
    )
    assert ("OpenAI", "tb", "objective/kl") in rows and (
        "OpenAI",
        "mean of 1",
        "objective/kl",
    ) not in rows


def test_the_picture_has_a_line_for_each_seed_and_a_band_for_each_label(tmp_path, monkeypatch):
    make_exports(tmp_path)
    figures = []
    panels = curves.make_panels
    monkeypatch.setattr(
        curves, "make_panels", lambda *args: figures.append(panels(*args)) or figures[-1]
    )
    command = [
        f"PPO={tmp_path}/runs/ppo_*",
        f"2023={tmp_path}/wandb.csv",
        "--out",
        str(tmp_path / "all.png"),
    ]
    curves.main(arguments(*command))
    ((_, axes),) = figures
    assert list(axes) == ["objective/scores", "objective/kl"]
    for axis in axes.values():
        assert (len(axis.lines), len(axis.collections), axis.get_xlabel()) == (
            3 + 1 + 10 + 1,
            2,
            "episodes",
        )
        middles = [line for line in axis.lines if line.get_linewidth() > 1]
        assert [line.get_color() for line in middles] == ["C0", "C1"]
        assert [line.get_xdata()[-1] for line in middles] == [
            40 * 512,
            30 * 512,
        ]  # as far as all seeds are
        ours = np.array([line.get_ydata() for line in axis.lines[:3]])
        path = axis.collections[0].get_paths()[0].vertices
        assert path[:, 1].max() == pytest.approx(ours.max()) and path[:, 1].min() == pytest.approx(
            ours.min()
        )
    assert [text.get_text() for text in axes["objective/scores"].get_legend().get_texts()] == [
        "PPO",
        "2023",
    ]
