"""tools/curves.py: bands by hand, three sources of runs in one picture; reproduce.sh, which draws
with it, with tiny models and data."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import tiny
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch.utils.tensorboard import SummaryWriter

from benchmarks import mutations
from tools import curves


def write_chart(path, x, columns):
    """A chart as W&B exports it: all cells quoted, `<run> - <metric>` and its range, or blank."""
    chart = pandas.DataFrame(columns).sort_index()
    for name in columns:
        chart[f"{name}__MIN"] = chart[name] - 1000
        chart[f"{name}__MAX"] = chart[name] + 1000
    chart.to_csv(path, index_label=x, quoting=csv.QUOTE_ALL)
    return path


def write_events(folder, metrics):
    with SummaryWriter(folder) as writer:
        for name, points in metrics.items():
            for step, value in points.items():
                writer.add_scalar(name, value, step)


def rows_of(path):
    """(label, run, metric) → first, mean of the last five, last."""
    table = pandas.read_csv(path).set_index(["label", "run", "metric"])
    numbers = table[["first", "last five", "last"]].to_numpy().tolist()
    return dict(zip(table.index, numbers, strict=True))


def test_from_ten_seeds_on_the_mean_is_interquartile_at_each_point():
    seeds = np.array([[5.0], [1.0], [3.0], [2.0], [4.0], [9.0], [6.0], [8.0], [700.0], [7.0]])
    assert curves.center(seeds[:9]) == pytest.approx([82.0])  # 738 / 9
    assert curves.center(seeds * [1, -1]) == pytest.approx([5.5, -5.5])  # 3 … 8


def test_the_band_of_few_seeds_is_that_of_all_draws_of_whole_curves():
    """Of 3 seeds, all draws are the smallest in 1/27 = 3.7% of cases: more than 2.5%. Of 4, one is
    drawn three times in 12/256 = 4.7%, four times in 1/256: the upper 2.5% begin at 3/4."""
    middle, low, high = curves.band(np.array([[1.0, 10.0], [2.0, 40.0], [6.0, -20.0]]))
    assert middle.tolist() == [3.0, 10.0]
    assert (low.tolist(), high.tolist()) == ([1.0, -20.0], [6.0, 40.0])
    assert [x.tolist() for x in curves.band(np.array([[4.0, 5.0]]))] == [[4.0, 5.0]] * 3
    _, low, high = curves.band(np.array([[0.0], [0.0], [0.0], [1.0]]))
    assert (low, high) == (0.0, 0.75)


def test_curves_of_other_steps_meet_on_straight_lines_where_all_of_them_are():
    a = np.array([[0.0, 10.0, 20.0], [0.0, 100.0, 0.0]])
    b = np.array([[5.0, 15.0, 40.0], [1.0, 1.0, 1.0]])
    grid, values = curves.on_one_grid([a, b])
    assert grid.tolist() == [5.0, 10.0, 15.0, 20.0]
    assert values.tolist() == [[50.0, 100.0, 50.0, 0.0], [1.0, 1.0, 1.0, 1.0]]


def test_an_evaluation_is_plotted_at_the_episodes_before_it():
    lines = [
        {"step": 0, "ppo/episode": 8, "loss": 5.0, "eval/scores": 1.0},
        {"step": 1, "ppo/episode": 16, "loss": 4.0},
        {"step": 2, "ppo/episode": 24, "loss": 3.0, "eval/scores": 2.0},
        {"step": 3, "eval/scores": 3.0},
    ]
    run = curves.Run("a", "a", lines)
    assert run.points("loss").tolist() == [[8, 16, 24], [5, 4, 3]]
    assert run.points("eval/scores").tolist() == [[0, 16, 24], [1, 2, 3]]


def test_a_chart_of_wandb_holds_its_runs_without_their_ranges(tmp_path):
    columns = {"sweep - lr 1 - kl": {0: 0.5, 1: 0.75}, "b - kl": {1: 2.0, 2: 9.0}}
    path = write_chart(tmp_path / "wandb_export.csv", "Step", columns)
    path.write_text(path.read_text().replace('"9.0"', '"NaN"'))
    first = [{"step": 0, "kl": 0.5}, {"step": 1, "kl": 0.75}]
    assert curves.read(path) == {"sweep - lr 1": first, "b": [{"step": 1, "kl": 2.0}]}
    path = write_chart(tmp_path / "one.csv", "ppo/episode", {"kl": {512: 0.5}})  # of one run
    assert curves.read(path) == {"one": [{"ppo/episode": 512, "kl": 0.5}]}


def test_scalars_of_any_writer_are_read_all_of_them(tmp_path):
    values = {step: step / 2 for step in range(3000)}  # TensorBoard's own default keeps 500
    write_events(tmp_path / "torch", {"objective/kl": values})
    (lines,) = curves.read(tmp_path / "torch").values()
    assert [(line["step"], line["objective/kl"]) for line in lines] == list(values.items())
    (tmp_path / "tf2").mkdir()
    writer = EventFileWriter(str(tmp_path / "tf2"))  # TensorFlow 2 writes tensors
    writer.add_event(Event(step=7, summary=scalar_pb("objective/kl", 0.25)))
    writer.close()
    assert curves.read(tmp_path / "tf2") == {"tf2": [{"step": 7, "objective/kl": 0.25}]}


def test_runs_of_one_name_stay_two_and_others_curves_are_drawn_over_them(tmp_path, capsys):
    """Two seeds of ours as a pattern, TensorBoard's events, ten seeds as W&B exports them."""
    for i in (1, 2):
        folder = tmp_path / f"seed{i}/ppo"
        folder.mkdir(parents=True)
        line = {"step": 0, "ppo/episode": 8, "objective/kl": float(i)}
        (folder / "metrics.jsonl").write_text(json.dumps(line))
    write_events(tmp_path / "tb", {"objective/kl": {0: 3.0}, "elapsed/episodes": {0: 8}})
    columns = {f"ppo__{i} - objective/kl": {8: float(i**2)} for i in range(10)}
    chart = write_chart(tmp_path / "wandb.csv", "ppo/episode", columns)
    sources = f"PPO={tmp_path}/seed*/ppo", f"OpenAI={tmp_path}/tb", f"2023={chart}"
    names = ("elapsed/episodes=ppo/episode",)
    curves.main(curves.Args(sources, out=tmp_path / "all.png", names=names))
    assert capsys.readouterr().out == f"{tmp_path}/all.png {tmp_path}/all.csv\n"
    rows = rows_of(tmp_path / "all.csv")
    assert rows["PPO", "mean of 2", "objective/kl"] == [1.5] * 3
    assert rows["PPO", "2.5% of 2", "objective/kl"] == [1.0] * 3
    assert rows["OpenAI", "tb", "objective/kl"] == [3.0] * 3
    middle = (4 + 9 + 16 + 25 + 36 + 49) / 6
    found = rows["2023", "interquartile mean of 10", "objective/kl"]
    assert found == pytest.approx([middle] * 3, abs=6e-5)


TINY = """python() {
echo "${CUDA_VISIBLE_DEVICES:-} $1" >> calls
files=(--base_model task/model --label_tokenizer task/model --query_dataset task/stories.txt)
files+=(--label_dataset task/labels.json --query_length 8 --response_length 5 --truncate_after 2)
case "$1" in
train_reward.py) set -- "$@" "${files[@]}" --num_labels 8 --batch_size 4 --normalize_samples 4 \\
    --rollout_batch_size 4 --num_heldout 4 ;;
ppo.py) set -- "$@" "${files[@]}" --total_episodes 16 --batch_size 8 --eval_queries 4 \\
    --save_every 1 ;;
esac
PYTHON "$@"
}
"""


@pytest.mark.slow
def test_reproduce_runs_resumes_and_draws_published_curves_where_they_are(tmp_path):
    folder = mutations.copy_project(Path(__file__).parents[2], tmp_path / "copy")
    tiny.write_task(folder / "task")
    (tmp_path / "tiny.sh").write_text(TINY.replace("PYTHON", sys.executable))
    env = os.environ | {"BASH_ENV": str(tmp_path / "tiny.sh"), "SEEDS": "7", "GPUS": "2"}
    env["HF_HUB_OFFLINE"] = "1"

    def run():
        (folder / "calls").unlink(missing_ok=True)
        command = ["benchmarks/reproduce.sh"]
        output = subprocess.check_output(command, cwd=folder, env=env, text=True)
        return output, sorted((folder / "calls").read_text().splitlines())

    killed = folder / "runs/reproduce_sentiment_ppo_7"
    killed.mkdir(parents=True)  # before its first checkpoint: moved away
    drawn = [" tools/curves.py"] * 2
    output, calls = run()
    assert calls == drawn + [f"{gpu} {name}.py" for gpu in "01" for name in ("ppo", "train_reward")]
    assert len(list(folder.glob("runs/stopped_reproduce_sentiment_ppo_7_*"))) == 1
    assert output.count("is missing") == 4
    (killed / "curves.png").unlink()  # after its first checkpoint
    (killed / "model").rename(tmp_path / "model")
    (folder / "published/sentiment").mkdir(parents=True)
    for name, metric in (("openai_1", "ppo/objective/score"), ("2023", "objective/scores")):
        path = folder / f"published/sentiment/{name}.csv"
        write_chart(path, "Step", {f"a - {metric}": {0: 0.5, 1: 0.75}})
    output, calls = run()
    assert calls == [*drawn, "0 ppo.py"] and "resuming runs/reproduce_sentiment_ppo_7" in output
    rows = rows_of(folder / "benchmarks/results/reproduce_sentiment.csv")
    assert {label for label, *_ in rows} == {"PPO", "OpenAI", "2023"}
    assert rows["OpenAI", "a", "objective/scores"] == [0.5, 0.625, 0.75]
