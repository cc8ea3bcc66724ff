"""Which of two policies writes better responses to the same queries?

    python tools/winrate.py models/synthetic/ppo models/synthetic/sft
    python tools/winrate.py models/tldr/rloo data --judge my_judge.py:score

A and B are folders or hub names of models, or `data`: the dataset's own responses
(`response_column`). The data set and the queries that were held out are those of A's run, or of B's
if A has none (policies.py). Both respond with the same random numbers, each with the end token,
lengths and temperature of the run that trained it. The judge reads queries as policies
do, cut to `query_length`, and responses without end tokens. It is a function of (queries,
responses) that returns numbers, higher for better responses; by default it is the task's true score
(`gold_fn`). Or it is one of (queries, a, b) that returns the probability that a is better: it is
asked in both orders, and the two are averaged. Ties count half. The interval is a paired bootstrap
over queries.
"""

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from data.tasks import Task  # noqa: E402
from machinery import cli  # noqa: E402
from machinery.queries import load_queries  # noqa: E402
from machinery.rewards import call_reward_function, total  # noqa: E402
from machinery.sources import load_function, load_rows  # noqa: E402
from machinery.tokens import load_tokenizer  # noqa: E402
from tools import policies  # noqa: E402
from utils import decode  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Args(policies.PolicyArgs):
    """Which of two policies writes better responses to the same queries?"""

    a: tyro.conf.Positional[str]
    """folder or hub name of a model, or `data`"""
    b: tyro.conf.Positional[str]
    """the model or data to compare it with"""
    judge: str | None = None
    """module:function or path.py:function, see above; default: the task's gold_fn"""


def read_responses(task: Task, number: int) -> tuple[list[str], list[str], dict[str, list]]:
    """The same queries, for the tokenizer of `task.base_model`, with the dataset's responses."""
    tokenizer, ids = load_tokenizer(task, task.response_length)
    column = str(task.response_column)
    load_rows(task.query_dataset, "--query_dataset", response_column=column)  # has it
    table = load_queries(replace(task, reward_fn=None, gold_fn=None), tokenizer, ids)
    rows = slice(number)
    columns, responses = table.columns(rows), []
    for response in columns[column]:
        if not response:
            raise cli.InputError(f"a row of {column} has no response: leave it out")
        end = task.truncate_token if task.eos_task else None  # `decode` shows none
        responses.append(response.partition(end)[0] if end else response)
    return decode(tokenizer, table[rows], ids), responses, columns


def win_rate(a: np.ndarray, b: np.ndarray, seed: int) -> tuple[float, float, float]:
    """The share of queries where a's score [N] is above b's, with its 95% interval."""
    return mean_and_interval((a > b) + 0.5 * (a == b), seed)


def mean_and_interval(
    wins: np.ndarray, seed: int, draws: int = 10_000
) -> tuple[float, float, float]:
    """The mean of N queries with its 95% interval."""
    rows = np.random.default_rng(seed).integers(len(wins), size=(draws, len(wins)))
    low, high = np.quantile(wins[rows].mean(axis=1), [0.025, 0.975])
    return float(wins.mean()), float(low), float(high)


def ask_in_both_orders(
    judge: Callable, name: str, queries: list[str], a: list[str], b: list[str]
) -> tuple[np.ndarray, float]:
    """The probability that a is better [N], and how often both orders have the same preference."""
    orders = []
    for first, second in ((a, b), (b, a)):
        ask = partial(lambda x, y, responses: judge(queries, x, y), first, second)
        with cli.about(f"--judge {name}"):
            texts = dict(queries=queries, responses=first)
            found = total(call_reward_function(ask, texts, {})).double().numpy()
            if ((found < 0) | (found > 1)).any():
                raise cli.InputError(f"returned {found}; probabilities are between 0 and 1")
        orders.append(found)
    forward, backward = orders[0], 1 - orders[1]
    agree = np.sign(forward - 0.5) == np.sign(backward - 0.5)
    return (forward + backward) / 2, float(agree.mean())


def main(args: Args) -> None:
    """Sample, judge and count; print a sentence and a line of JSON."""
    models = [model for model in (args.a, args.b) if model != "data"]
    tasks, held_out = policies.policy_tasks(models or ["data"], args)
    task, number = tasks[0], args.queries or held_out or 256
    judge_name = args.judge or task.gold_fn
    if judge_name is None:
        raise cli.InputError(f"task {task.task} has no true score; pass --judge path.py:function")
    if len(models) < 2 and task.response_column is None:
        raise cli.InputError(f"task {task.task} has no responses of its own: --response_column")
    with cli.about(f"--judge {judge_name}"):
        judge = load_function(judge_name)
    in_pairs = list(inspect.signature(judge).parameters)[1:3] == ["a", "b"]
    scores, responses, asked = [], [], []
    for model in (args.a, args.b):
        if model == "data":
            *texts, columns = read_responses(task, number)
        else:
            own = tasks[models.index(model)]
            *texts, columns = policies.sample_responses(own, number, args.seed)
        responses.append(texts[1])
        asked.append(columns[task.query_column])
        if not in_pairs:
            with cli.about(f"--judge {judge_name}"):
                given = dict(queries=texts[0], responses=texts[1])
                parts = call_reward_function(judge, given, columns)
                scores.append(total(parts).double().numpy())
    if asked[0] != asked[1]:
        raise cli.InputError("A and B skip different queries: some are too long for one tokenizer")
    queries = len(texts[0])
    if in_pairs:
        wins, agreement = ask_in_both_orders(judge, judge_name, texts[0], *responses)
        rate, low, high = mean_and_interval(wins, args.seed)
        print(f"both orders of the judge agree on {agreement:.1%} of the queries")
        more = {"agreement": agreement}
    else:
        rate, low, high = win_rate(scores[0], scores[1], args.seed)
        more = {"mean_a": float(scores[0].mean()), "mean_b": float(scores[1].mean())}
    asked_of = policies.name_queries(queries, held_out)
    interval = f"(95%: {low:.1%} to {high:.1%})"
    print(f"{args.a} beats {args.b} on {rate:.1%} of {asked_of} {interval}")
    found = {"win_rate": rate, "low": low, "high": high, "queries": queries, "held_out": held_out}
    print(json.dumps(found | more))


if __name__ == "__main__":
    cli.run(main, Args)
