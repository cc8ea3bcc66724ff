"""How often is a reward model right that is 70% sure? On the labels that its training holds out.

    python tools/calibration.py models/synthetic/train_reward

Labels are sorted by confidence, the largest softmax probability of a label's candidates, into five
groups. Prints a line of JSON for each, and draws the rewards of preferred and other responses. The
flags of its training are read from its run; others come after `--`, as those of train_reward.py.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

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


def calibration(rewards: Tensor, best: Tensor, bins: int = 5) -> list[dict[str, float]]:
    """Mean confidence and accuracy of N labels [N, K], [N], in groups of similar confidence."""
    confidence, _ = rewards.softmax(dim=1).max(dim=1)
    correct = train_reward.accuracies(rewards, best)
    rows = []
    for group in confidence.argsort().tensor_split(min(bins, len(best))):
        predicted, accuracy = confidence[group].mean().item(), correct[group].mean().item()
        rows.append({"labels": len(group), "predicted": predicted, "accuracy": accuracy})
    return rows


def main(
    model: tyro.conf.Positional[str],
    task: str | None = None,
    out: str = "rewards.png",
    label_dataset: str | None = None,
    num_labels: int | None = None,
    flags: tyro.conf.Suppress[tuple[str, ...]] = (),
):
    """Print the table and draw the picture `out`, of a reward model's folder or hub name."""
    run = read_run(model)
    task = task or run.get("task")
    if task is None:
        raise cli.InputError(f"{model} has no args.json of its run: pass --task")
    named = {"task": task, "label_dataset": label_dataset, "num_labels": num_labels}
    given = [f"--{name}={value}" for name, value in named.items() if value is not None]
    presets = {run["task"]: run} if run else train_reward.PRESETS
    args = cli.parse_args(train_reward.Args, presets, [*given, *flags])
    said = f"{model}: held-out labels of {args.task.label_dataset}, after the first"
    print(said, args.num_labels, file=sys.stderr)
    reward_model = train_reward.RewardModel.from_pretrained(model)
    pad_id = reward_model.config.pad_id
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    of_task = replace(args.task, base_model=model)  # labels may be in ids of another tokenizer
    config = reward_model.config.backbone
    ends = end_tokens(of_task, config, tokenizer)  # of pairs
    suffix = tokenizer.encode(of_task.query_suffix, add_special_tokens=False)
    labels = load_labels(of_task, tokenizer, TokenIds(pad_id, ends, [], suffix), config)
    rows = labels.held_out(args.num_labels)[: args.num_heldout]
    rewards, best = train_reward.predict(reward_model, labels, rows, pad_id, args, "cpu")
    for row in calibration(rewards, best):
        print(json.dumps(row))
    is_best = train_reward.F.one_hot(best, rewards.shape[1]).bool()
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axis = figure.add_subplot()
    axis.hist([rewards[is_best].tolist(), rewards[~is_best].tolist()], bins=40, density=True)
    axis.legend(["preferred", "others"])
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    end = [*sys.argv, "--"].index("--")
    tyro.cli(partial(main, flags=tuple(sys.argv[end + 1 :])), args=sys.argv[1:end])
