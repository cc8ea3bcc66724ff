"""benchmarks/reproduce.sh with tiny models and data, where `python` adds flags of small sizes, and the
commands of scale.sh."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from test_curves import rows_of, write_chart

from benchmarks.mutations import copy_project

ROOT = Path(__file__).parents[2]
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
    folder = copy_project(ROOT, tmp_path / "copy")
    tiny.write_task(folder / "task")
    (tmp_path / "tiny.sh").write_text(TINY.replace("PYTHON", sys.executable))
    env = os.environ | {"BASH_ENV": str(tmp_path / "tiny.sh"), "HF_HUB_OFFLINE": "1"}
    env |= {"SEEDS": "7", "GPUS": "2"}

    def run() -> tuple[str, list[str]]:
        """The script's output, and its calls of Python with their GPU."""
        (folder / "calls").unlink(missing_ok=True)
        options = dict(cwd=folder, env=env, text=True, capture_output=True)
        done = subprocess.run("benchmarks/reproduce.sh", **options)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout, sorted((folder / "calls").read_text().splitlines())

    stopped = folder / "runs/reproduce_sentiment_ppo_7"
    stopped.mkdir(parents=True)  # killed before its first checkpoint: moved away
    drawn = [" benchmarks/curves.py"] * 2
    output, calls = run()
    assert calls == drawn + [f"{gpu} {name}.py" for gpu in "01" for name in ("ppo", "train_reward")]
    assert len(list(folder.glob("runs/stopped_reproduce_sentiment_ppo_7_*"))) == 1
    for path in ("sentiment/openai", "sentiment/2023", "descriptiveness/openai"):
        assert output.count(f"published/{path}*.csv is missing") == 1
    reward = "--reward_model runs/reproduce_sentiment_train_reward_7/model"
    printed = [line for line in output.splitlines() if line.startswith("+ ") and reward in line]
    assert len(printed) == 1 and "ppo.py --task sentiment --seed 7" in printed[0]
    whole = (stopped / "metrics.jsonl").read_text().splitlines()

    (stopped / "curves.png").unlink()  # killed after its first checkpoint
    (stopped / "model").rename(tmp_path / "model")
    charts = folder / "published/sentiment"
    charts.mkdir(parents=True)
    for name, metric in (("openai_1", "ppo/objective/score"), ("2023", "objective/scores")):
        write_chart(charts / f"{name}.csv", "Step", {f"a - {metric}": {0: 0.5, 1: 0.75}})
    output, calls = run()
    assert calls == [*drawn, "0 ppo.py"] and "resuming runs/reproduce_sentiment_ppo_7" in output
    assert len((stopped / "metrics.jsonl").read_text().splitlines()) == len(whole)
    rows = rows_of(folder / "benchmarks/results/reproduce_sentiment.csv")
    assert {label for label, *_ in rows} == {"PPO", "OpenAI", "2023"}
    assert rows["OpenAI", "a", "objective/scores"] == [0.5, 0.625, 0.75]
    rows = rows_of(folder / "benchmarks/results/reproduce_descriptiveness.csv")
    assert {label for label, *_ in rows} == {"PPO"} and output.count("is missing") == 2
