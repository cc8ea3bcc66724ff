"""benchmarks/reproduce.sh with tiny models and data, where `python` adds flags of small sizes, and the
commands of scale.sh."""

import importlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from test_curves import rows_of, write_chart

from benchmarks.mutations import copy_project
from machinery import cli

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


@pytest.mark.parametrize("script", ["ppo", "rloo"])
def test_the_runs_of_scale_are_those_of_sentiment_and_follow_one_another(script, tmp_path):
    """`python` notes its flags: each run reads what those before it write."""
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=lambda *_: ["results"])
    (tmp_path / "note.sh").write_text('python() { echo "$@" >> calls; }\n')
    (tmp_path / "ratings.tar.gz").touch()
    command = [tmp_path / "benchmarks/scale.sh", "ratings.tar.gz"]
    env = os.environ | {"BASH_ENV": str(tmp_path / "note.sh"), "SCRIPT": script}
    subprocess.run(command, cwd=tmp_path, env=env | {"FLAGS": "--seed 3"}, check=True)
    calls = [shlex.split(line) for line in (tmp_path / "calls").read_text().splitlines()]
    names = ["benchmarks/pretrained.py", "benchmarks/human.py", "sft.py", *["train_reward.py"] * 2]
    assert [name for name, *_ in calls] == [*names, f"{script}.py"]
    written = {"models/smollm2"}
    for name, *flags in calls[2:]:
        module = importlib.import_module(name.removesuffix(".py"))
        args = cli.parse_args(module.Args, module.PRESETS, flags)
        read = [
            args.task.base_model,
            *(getattr(args, x, None) for x in ("policy_model", "reward_model")),
        ]
        assert {x for x in read if x} <= written
        assert args.output_dir == f"runs/{args.run_name}/model"
        written.add(args.output_dir)
    defaults = cli.parse_args(module.Args, module.PRESETS, ["--task", "sentiment"])
    same = ("batch_size", "lr", "kl_coef", "num_ppo_epochs", "micro_batch_tokens")
    assert all(getattr(args, x) == getattr(defaults, x) for x in same)
    assert (args.seed, args.total_episodes) == (3, 500_000)
