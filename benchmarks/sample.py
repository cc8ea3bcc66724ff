"""Several responses of a policy to each query, for somebody to label.

    python benchmarks/sample.py models/synthetic/sft --task synthetic --out samples.jsonl

A line is a query with `--samples` responses, as texts to read and as the token ids that
train_reward.py reads (docs/data.md): `query`, `sample0`, ..., and `best`, which is null. Set it to
the index of the preferred response. The queries on which a run is evaluated are left out.
benchmarks/iterate.sh has two rounds of sampling, labeling and training.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.winrate import sample_tokens  # noqa: E402
from data.tasks import TASKS  # noqa: E402
from machinery import cli  # noqa: E402
from utils import decode  # noqa: E402


@dataclass(frozen=True)
class Args:
    """Several responses of a policy to each query, for somebody to label."""

    model: tyro.conf.Positional[str]
    """folder or hub name of the policy"""
    out: Path
    """file to write, .jsonl"""
    task: str = "synthetic"
    """task with the queries; lengths and temperature, too, if the model has no run"""
    query_dataset: str | None = None
    """other queries than the task's"""
    queries: int = 1024
    """number of queries"""
    first: int = 256
    """skip so many queries, such as those that --eval_queries holds out"""
    samples: int = 4
    """responses to each query"""
    seed: int = 1
    """random seed"""


def main(args: Args) -> None:
    """Sample; write a line for each query."""
    if args.task not in TASKS:
        raise cli.InputError(f"--task {args.task} is unknown; choose {', '.join(TASKS)}")
    if args.out.exists():
        raise cli.InputError(f"--out {args.out} exists; choose another name")
    task = replace(TASKS[args.task], base_model=args.model)
    task = replace(task, query_dataset=args.query_dataset or task.query_dataset)
    tokenizer, ids, *tokens, _ = sample_tokens(task, args, args.samples, args.first)
    queries, responses = ([[t for t in x if t != ids.pad] for x in y.tolist()] for y in tokens)
    texts = [decode(tokenizer, x, ids.pad) for x in tokens]
    number = len(queries) // args.samples
    with args.out.open("w") as file:
        for i in range(number):  # its responses are `number` rows apart
            row = {"query_text": texts[0][i], "texts": texts[1][i::number], "best": None}
            row["query"] = queries[i]
            row |= {f"sample{k}": sample for k, sample in enumerate(responses[i::number])}
            file.write(json.dumps(row) + "\n")
    print(f"{args.out}: {args.samples} responses to each of {number} queries")


if __name__ == "__main__":
    cli.run(main, Args)
