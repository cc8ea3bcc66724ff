"""What RLOO saves: PPO with a critic of its own, PPO with one trunk and two heads, and RLOO, by memory and seconds.

    python benchmarks/what_rloo_saves.py      # what_rloo_saves.csv, and a table on the terminal

"Putting RL back in RLHF" (2024) reports 50–70% less memory and 2–3 times the speed, against a PPO with four models, as
`diffs/separate_critic.diff` makes one. Memory, GiB, is computed (benchmarks/memory.py) at the sizes of `sentiment`, in bf16; live
is what there is between two updates, the others are the largest in a phase. Seconds are CPU seconds of an update on one thread
in fp32, real models of random weights: `--episodes` of the synthetic task, 4 epochs of one minibatch, the median behind the
first update. All three have a reward model of the policy's shape.
"""

import copy
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import tyro
from accelerate.state import AcceleratorState
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
import packing  # noqa: E402
import records  # noqa: E402
import tasks  # noqa: E402
import utils  # noqa: E402
from benchmarks import memory, sweep  # noqa: E402

WAYS = ("separate_critic", "ppo", "rloo")
FLAGS = "--base_model policy --reward_model reward --run_name run --output_dir trained --lr 1e-5 --num_minibatches 1"
FLAGS += " --num_ppo_epochs 4 --truncate_token None --gold_fn None --eval_every 1000 --eval_queries 1"


@dataclass(frozen=True)
class Args:
    """PPO with a critic of its own, PPO and RLOO, by memory and seconds."""

    out: Path = Path(__file__).with_suffix(".csv")
    """CSV to write, or to go on with"""
    shapes: tuple[str, ...] = ("GPT-2 124M", "Pythia 410M")
    """of benchmarks/memory.py"""
    episodes: int = 16
    """of an update that takes time"""
    updates: int = 3
    """updates that take time, behind one that warms up"""
    only: str | None = None
    """one job as JSON, in this process"""


def computed(shape: str, way: str, script: ModuleType) -> dict[str, float]:
    """GiB that are alive between two updates, and the largest of each phase."""
    memory.SCRIPTS[way] = script
    if way == "separate_critic":
        kind = script.PolicyAndValue

        def with_critic(lm: Any, pad_id: int, temperature: float) -> Any:
            critic = utils.RewardModel(utils.RewardConfig(copy.deepcopy(lm.config), pad_id))
            return kind(lm, critic, pad_id, temperature)

        script.PolicyAndValue = with_critic
    replaced = dict.fromkeys(("distinct", "keeps_rows_apart", "row_lengths", "row_sizes", "shared_prompts"))
    with patch.multiple(packing, **replaced), patch.multiple(utils, check_gradients=None):  # `compute` replaces them
        found = memory.compute(shape, way, memory.settings(way, "sentiment"), "bf16")
    return {name: found[name] / memory.GIB for name in ("live", "sample", "score", "optimise")}


def timed(shape: str, script: ModuleType, flags: str, updates: int) -> float:
    """CPU seconds of an update, the median behind the first."""
    tokenizer, config = AutoTokenizer.from_pretrained(tasks.SYNTHETIC / "model"), memory.SHAPES[shape]
    config.save_pretrained("policy")  # without weights: random ones, the same for all three
    utils.RewardModel(utils.RewardConfig(copy.deepcopy(config), config.vocab_size)).save_pretrained("reward")
    for name in ("policy", "reward"):
        tokenizer.save_pretrained(name)
    marks, log = [], records.Run.log

    def mark(*args: Any) -> None:
        marks.append(time.process_time())
        log(*args)

    with patch.object(records.Run, "log", mark):
        script.main(sweep.settings(script, f"{FLAGS} {flags}"))
    return statistics.median(after - before for before, after in zip(marks[:updates], marks[1:], strict=False))


def measure(job: sweep.Job) -> list[dict[str, float]]:
    """The row of one shape and way."""
    script = sweep.load_script(job["way"])
    sizes = f"--batch_size {job['episodes']} --total_episodes {job['episodes'] * (job['updates'] + 1)}"
    seconds = timed(job["shape"], script, sizes, job["updates"])
    AcceleratorState._reset_state(True)  # another precision
    return [computed(job["shape"], job["way"], script) | {"seconds": seconds}]


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: each way, and what RLOO saves of it."""
    names = ("live", "sample", "score", "optimise", "seconds")
    lines = [f"| shape | way | {' | '.join(names)} | RLOO saves, live | peak | times as fast |", "|" + "---|" * 10]
    for row in rows:
        rloo = next(other for other in rows if (other["shape"], other["way"]) == (row["shape"], "rloo"))
        (ours, seconds), (theirs, their_seconds) = (
            ([float(x[name]) for name in names[:-1]], float(x["seconds"])) for x in (rloo, row)
        )
        saved = (1 - ours[0] / theirs[0], 1 - max(ours) / max(theirs))
        cells = [f"{x:.2f}" for x in (*theirs, their_seconds)] + [f"{x:.0%}" for x in saved]
        lines.append(f"| {row['shape']} | {row['way']} | {' | '.join(cells)} | {their_seconds / seconds:.2f} |")
    return "\n".join(lines)


def jobs(args: Args) -> list[sweep.Job]:
    """Every shape and way."""
    sizes = dict(episodes=args.episodes, updates=args.updates)
    return [dict(shape=shape, way=way) | sizes for shape in args.shapes for way in WAYS]


if __name__ == "__main__":
    sweep.main(__file__, tyro.cli(Args), measure, jobs, table)
