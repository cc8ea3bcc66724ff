"""Which of two policies writes better responses to held-out queries?

    python benchmarks/winrate.py models/synthetic/ppo models/synthetic/sft --task synthetic
    python benchmarks/winrate.py models/tldr/rloo data --task tldr --judge my_judge.py:score

A and B are folders or hub names of models, or `data`: the dataset's own responses
(`response_column`). Both respond to the same queries with the same random numbers, each with the
end token, lengths and temperature of the run that trained it. The judge reads queries as policies
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
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import ppo  # noqa: E402
from data.tasks import TASKS, Task  # noqa: E402
from machinery import cli  # noqa: E402
from machinery.decoding import Decoder  # noqa: E402
from machinery.models import load_lm  # noqa: E402
from machinery.queries import load_queries, load_texts  # noqa: E402
from machinery.rewards import call_reward_function  # noqa: E402
from machinery.sources import load_function  # noqa: E402
from machinery.tokens import load_tokenizer  # noqa: E402
from utils import TokenIds, add_affixes, decode, generator, truncate  # noqa: E402


@dataclass(frozen=True)
class Args:
    """Which of two policies writes better responses?"""

    a: tyro.conf.Positional[str]
    """folder or hub name of a model, or `data`"""
    b: tyro.conf.Positional[str]
    """the model or data to compare it with"""
    task: str = "synthetic"
    """task with the queries; lengths and temperature, too, if the model has no run"""
    judge: str | None = None
    """module:function or path.py:function, see above; None: the task's gold_fn"""
    query_dataset: str | None = None
    """other queries than the task's, such as trl-lib/tldr@validation"""
    queries: int = 256
    """queries to compare on; of the task's own data, those that a run holds out"""
    seed: int = 1
    """random seed of samples and bootstrap"""


OF_RUN = ("truncate_token", "truncate_after", "eos_task", "response_length", "temperature")
OF_RUN += ("query_length", "query_prefix", "query_suffix", "keep_last_line")


def as_trained(task: Task) -> Task:
    """The task with the lengths, ends and affixes of the run that trained `base_model`."""
    record = Path(task.base_model).resolve().parent / "args.json"
    values = json.loads(record.read_text()) if record.is_file() else {}
    changed = {x: values[x] for x in OF_RUN if x in values and values[x] != getattr(task, x)}
    if changed:
        print(f"{task.base_model} was trained with {changed}")
    return replace(task, **changed)


def sample_tokens(
    task: Task, args: Any, samples: int = 1, first: int = 0
) -> tuple[Any, TokenIds, Tensor, Tensor, dict[str, list]]:
    """Tokenizer, ids, queries [B, Q], responses [B, R] of `task.base_model`, columns of the data.

    All queries from row `first` on, then again, `samples` times. Of `args`, it reads `queries` and
    `seed`.
    """
    task = as_trained(task)
    tokenizer, ids = load_tokenizer(task, task.response_length)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = load_queries(task, tokenizer, ids, first + args.queries)
    if len(table) <= first:
        raise cli.InputError(f"--first {first} skips all {len(table)} queries")
    rows = np.tile(np.arange(first, min(first + args.queries, len(table))), samples)
    queries, columns = table[rows].to(device), table.columns(rows)
    lm = load_lm(task.base_model).to(device).eval()
    decoder = Decoder(lm, task.response_length)
    settings = ppo.Args(task=task, rollout_batch_size=64)
    rng = generator(args.seed, 0, device)
    contexts = add_affixes(queries, ids)
    responses = ppo.sample_in_batches(decoder, contexts, ids, settings, rng)
    responses, _ = truncate(responses, ids.truncate, task.truncate_after, ids.pad)
    return tokenizer, ids, queries, responses, columns


def sample_responses(
    task: Task, args: Any, samples: int = 1
) -> tuple[list[str], list[str], dict[str, list]]:
    """Held-out queries, responses of the policy `task.base_model`, columns of the data set."""
    tokenizer, ids, *tokens, columns = sample_tokens(task, args, samples)
    queries, responses = (decode(tokenizer, x, ids.pad) for x in tokens)
    return queries, responses, columns


def read_responses(task: Task, args: Args) -> tuple[list[str], list[str], dict[str, list]]:
    """The same queries, for the tokenizer of `task.base_model`, with the dataset's responses."""
    task = as_trained(task)
    tokenizer, ids = load_tokenizer(task, task.response_length)
    load_texts(task, task.query_column, task.response_column)  # if one is missing, it lists them
    table, rows = load_queries(task, tokenizer, ids, args.queries), slice(args.queries)
    columns, responses = table.columns(rows), []
    for response in columns[task.response_column]:
        if not response:
            raise cli.InputError(f"a row of {task.response_column} has no response: leave it out")
        end = task.truncate_token if task.eos_task else None  # `decode` shows none
        responses.append(response.partition(end)[0] if end else response)
    return decode(tokenizer, table[rows], ids.pad), responses, columns


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
            found = call_reward_function(ask, texts, {}).double().numpy()
            if ((found < 0) | (found > 1)).any():
                raise cli.InputError(f"returned {found}; probabilities are between 0 and 1")
        orders.append(found)
    forward, backward = orders[0], 1 - orders[1]
    agree = np.sign(forward - 0.5) == np.sign(backward - 0.5)
    return (forward + backward) / 2, float(agree.mean())


def main(args: Args) -> None:
    """Sample, judge and count; print a sentence and a line of JSON."""
    if args.task not in TASKS:
        raise cli.InputError(f"--task {args.task} is unknown; choose {', '.join(TASKS)}")
    task = TASKS[args.task]
    task = replace(task, query_dataset=args.query_dataset or task.query_dataset)
    judge_name = args.judge or task.gold_fn
    if judge_name is None:
        raise cli.InputError(f"task {args.task} has no true score; pass --judge path.py:function")
    if "data" in (args.a, args.b) and task.response_column is None:
        raise cli.InputError(f"task {args.task} has no responses of its own (response_column)")
    with cli.about(f"--judge {judge_name}"):
        judge = load_function(judge_name)
    in_pairs = list(inspect.signature(judge).parameters)[1:3] == ["a", "b"]
    scores, responses, asked = [], [], []
    for model, other in ((args.a, args.b), (args.b, args.a)):
        if model == "data":
            *texts, columns = read_responses(replace(task, base_model=other), args)
        else:
            *texts, columns = sample_responses(replace(task, base_model=model), args)
        responses.append(texts[1])
        asked.append(columns[task.query_column])
        if not in_pairs:
            with cli.about(f"--judge {judge_name}"):
                given = dict(queries=texts[0], responses=texts[1])
                scores.append(call_reward_function(judge, given, columns).numpy())
    if asked[0] != asked[1]:
        raise cli.InputError("A and B skip different queries: some are too long for one tokenizer")
    queries = len(texts[0])
    if in_pairs:
        wins, agreement = ask_in_both_orders(judge, judge_name, texts[0], *responses)
        rate, low, high = mean_and_interval(wins, args.seed)
        print(f"both orders of the judge agree on {agreement:.1%} of the queries")
        more = {"agreement": agreement}
    else:
        rate, low, high = win_rate(*scores, args.seed)
        more = {"mean_a": float(scores[0].mean()), "mean_b": float(scores[1].mean())}
    interval = f"(95%: {low:.1%} to {high:.1%})"
    print(f"{args.a} beats {args.b} on {rate:.1%} of {queries} held-out queries {interval}")
    print(json.dumps({"win_rate": rate, "low": low, "high": high, "queries": queries} | more))


if __name__ == "__main__":
    cli.run(main, Args)
