"""How often is a reward model right that is 70% sure?

On the labels that its training holds out:

    python tools/calibration.py models/synthetic/train_reward

Labels are sorted by confidence, the largest softmax probability of a label's candidates, into five
groups. Prints a line of JSON for each, and draws the rewards of preferred and other responses. The
flags of its training are read from its run; others come after `--`, as those of train_reward.py.
"""

import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import transformers
import tyro
from matplotlib.figure import Figure
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import train_reward  # noqa: E402
from machinery import cli  # noqa: E402
from machinery.labels import load_labels  # noqa: E402
from machinery.tokens import end_tokens  # noqa: E402
from tools.policies import read_run  # noqa: E402
from utils import TokenIds  # noqa: E402


@dataclass(frozen=True)
class Args:
    """How often is a reward model right that is 70% sure?"""

    model: tyro.conf.Positional[str]
    """folder or hub name of the reward model"""
    task: str | None = None
    """task of its training; default: its run's"""
    label_dataset: str | None = None
    """other labels"""
    num_labels: int | None = None
    """labels that training used; held-out ones follow"""
    out: Path = Path("rewards.png")
    """picture to write"""


def calibration(rewards: Tensor, best: Tensor, bins: int = 5) -> list[dict[str, float]]:
    """Mean confidence and accuracy of N labels [N, K], [N], in groups of similar confidence."""
    confidence, _ = rewards.softmax(dim=1).max(dim=1)
    correct = train_reward.accuracies(rewards, best)
    rows = []
    for group in confidence.argsort().tensor_split(min(bins, len(best))):
        predicted, accuracy = confidence[group].mean().item(), correct[group].mean().item()
        rows.append({"labels": len(group), "predicted": predicted, "accuracy": accuracy})
    return rows


def main(args: Args, flags: tuple[str, ...] = ()) -> None:
    """Print the table and draw the picture."""
    model, run = args.model, read_run(args.model)
    task = args.task or run.get("task")
    if task is None:
        raise cli.InputError(f"{model} has no args.json of its run: pass --task")
    named = {"task": task, "label_dataset": args.label_dataset, "num_labels": args.num_labels}
    given = [f"--{name}={value}" for name, value in named.items() if value is not None]
    presets = {run["task"]: run} if run else train_reward.PRESETS
    training = cli.parse_args(train_reward.Args, presets, [*given, *flags])
    said = f"{model}: held-out labels of {training.task.label_dataset}, after the first"
    print(said, training.num_labels, file=sys.stderr)
    reward_model = train_reward.RewardModel.from_pretrained(model)
    pad_id = reward_model.config.pad_id
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    of_task = replace(training.task, base_model=model)  # labels may be in ids of another tokenizer
    config = reward_model.config.backbone
    ends = end_tokens(of_task, config, tokenizer)  # of pairs
    suffix = tokenizer.encode(of_task.query_suffix, add_special_tokens=False)
    labels = load_labels(of_task, tokenizer, TokenIds(pad_id, ends, [], suffix), config)
    rows = labels.held_out(training.num_labels)[: training.num_heldout]
    rewards, best = train_reward.predict(
        reward_model, labels, rows, pad_id, training, torch.device("cpu")
    )
    for row in calibration(rewards, best):
        print(json.dumps(row))
    is_best = train_reward.F.one_hot(best, rewards.shape[1]).bool()
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axis = figure.add_subplot()
    axis.hist([rewards[is_best].tolist(), rewards[~is_best].tolist()], bins=40, density=True)
    axis.legend(["preferred", "others"])
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    end = [*sys.argv, "--"].index("--")
    flags, sys.argv[end:] = sys.argv[end + 1 :], []
    cli.run(partial(main, flags=tuple(flags)), Args)
