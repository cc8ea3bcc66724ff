"""Which of two policies writes better answers to held-out queries, with a paired bootstrap interval.

    python benchmarks/winrate.py models/synthetic/ppo models/synthetic/sft --task synthetic
    python benchmarks/winrate.py models/tldr/rloo data --task tldr --judge my_judge.py:score

A and B are folders or hub names of models, or `data`: the data set's own responses (`response_column`). Both answer the
same queries with the same random numbers. The judge is a function of (queries, responses) → floats, the higher the better;
without one it is the task's own true score (`gold_fn`). Equal scores count half.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
import ppo  # noqa: E402
import tasks  # noqa: E402
import utils  # noqa: E402


@dataclass(frozen=True)
class Args:
    """Which of two policies writes better answers."""

    a: tyro.conf.Positional[str]
    """folder or hub name of a model, or `data`"""
    b: tyro.conf.Positional[str]
    """what it is compared with"""
    task: str = "synthetic"
    """where queries, lengths and temperature are from"""
    judge: str | None = None
    """`module:function` or `path.py:function` of (queries, responses) → floats; None: the task's gold_fn"""
    queries: int = 256
    """held-out queries: those that a run with as many --eval_queries does not train on"""
    batch_size: int = 64
    """sequences per forward"""
    seed: int = 1
    """of the samples and of the bootstrap"""


def answers(model: str, other: str, args: Args) -> tuple[list[str], list[str]]:
    """Queries and responses of a policy, or the data's own to the queries that `other` reads, as texts."""
    task = replace(tasks.TASKS[args.task], base_model=other if model == "data" else model)
    tokenizer, _, pad_id = utils.load_tokenizer(task, task.response_length)
    if model == "data":
        rows = utils.shuffled_texts(task, args.queries)
        queries = utils.tokenise_queries(rows[task.query_column][:], task, tokenizer)
        rows = rows.select([i for i, query in enumerate(queries) if query][: args.queries])
        return rows[task.query_column][:], rows[task.response_column][:]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = utils.task_ids(task, tokenizer, pad_id)
    queries = utils.load_queries(task, tokenizer, pad_id, args.queries)[: args.queries].to(device)
    lm = utils.load_lm(model).to(device).eval()
    gen = utils.generator(args.seed, 0, device)
    responses = ppo.sample_all(lm, utils.add_affixes(queries, ids), task, ids, gen, args.batch_size)
    cut = ppo.truncate(responses, ids.truncate, task.truncate_after, pad_id)[0]
    return utils.decode(tokenizer, queries, pad_id), utils.decode(tokenizer, cut, pad_id)


def win_rate(a: np.ndarray, b: np.ndarray, seed: int, draws: int = 10_000) -> tuple[float, float, float]:
    """Share of queries where a's score [N] is above b's, equal ones half; its 95% interval over resampled queries."""
    wins = (a > b) + 0.5 * (a == b)
    rows = np.random.default_rng(seed).integers(len(wins), size=(draws, len(wins)))
    low, high = np.quantile(wins[rows].mean(axis=1), [0.025, 0.975])
    return float(wins.mean()), float(low), float(high)


def main(args: Args) -> None:
    """Answer, judge, count; a line for people and one of JSON."""
    spec = args.judge or tasks.TASKS[args.task].gold_fn
    if spec is None:
        raise utils.InputError(f"the task {args.task} knows no true score; pass --judge path.py:function")
    if "data" in (args.a, args.b) and tasks.TASKS[args.task].response_column is None:
        raise utils.InputError(f"the task {args.task} has no responses of its own (response_column)")
    judge, pairs = utils.load_function(spec), ((args.a, args.b), (args.b, args.a))
    scores = [np.array(judge(*answers(model, other, args)), dtype=float) for model, other in pairs]
    rate, low, high = win_rate(*scores, args.seed)
    print(f"{args.a} beats {args.b} on {rate:.1%} of {len(scores[0])} held-out queries (95%: {low:.1%} … {high:.1%})")
    means = {"mean_a": scores[0].mean(), "mean_b": scores[1].mean()}
    print(json.dumps({"win_rate": rate, "low": low, "high": high, "queries": len(scores[0])} | means))


if __name__ == "__main__":
    tasks.cli(main, lambda: tyro.cli(Args))
