"""Several responses of a policy to each query, for somebody to label.

    python tools/sample.py models/synthetic/sft --out samples.jsonl

A line is a query with `--samples` responses, as texts to read and as the token ids that
train_reward.py reads (docs/data.md): `query`, `sample0`, ..., and `best`, which is null. Set it to
the index of the preferred response. Data set and lengths are those of the policy's run
(policies.py). The queries that it holds out for evaluations are left out.
benchmarks/iterate.sh has two rounds of sampling, labeling and training.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from pydantic import NonNegativeInt, PositiveInt

sys.path.insert(0, str(Path(__file__).parents[1]))
from machinery import cli  # noqa: E402
from tools.policies import PolicyArgs, policy_tasks, sample_tokens  # noqa: E402
from utils import decode  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Args(PolicyArgs):
    """Several responses of a policy to each query, for somebody to label."""

    model: tyro.conf.Positional[str]
    """folder or hub name of the policy"""
    out: Path
    """file to write, .jsonl"""
    queries: PositiveInt = 1024
    """number of queries"""
    first: NonNegativeInt | None = None
    """skip so many queries; default: those that its run held out, else 256"""
    samples: PositiveInt = 4
    """responses to each query"""


def main(args: Args) -> None:
    """Sample; write a line for each query."""
    if args.out.exists():
        raise cli.InputError(f"--out {args.out} exists; choose another name")
    (task,), held_out = policy_tasks([args.model], args)
    first = (held_out or 256) if args.first is None else args.first
    sizes = args.queries, args.seed, args.samples, first
    tokenizer, ids, *tokens, _ = sample_tokens(replace(task, reward_fn=None), *sizes)
    queries, responses = ([[t for t in x if t != ids.pad] for x in y.tolist()] for y in tokens)
    texts = [decode(tokenizer, x, ids.pad) for x in tokens]
    n = args.samples
    with args.out.open("w") as file:
        for i in range(0, len(queries), n):
            row = {"query_text": texts[0][i], "texts": texts[1][i : i + n], "best": None}
            row["query"] = queries[i]
            row |= {f"sample{k}": sample for k, sample in enumerate(responses[i : i + n])}
            file.write(json.dumps(row) + "\n")
    print(f"{args.out}: {n} responses to each of {len(queries) // n} queries")


if __name__ == "__main__":
    cli.run(main, Args)
