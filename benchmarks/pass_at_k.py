"""How often is a response right, and one of k responses? pass@1 and pass@k of some policies.

    python benchmarks/pass_at_k.py models/arithmetic/sft models/arithmetic/rloo --task arithmetic

Every policy, a folder or hub name, samples responses to the same held-out queries. A response is
right if the task's reward function returns at least 1. pass@k is the unbiased estimator of Chen et
al. 2021, arXiv 2107.03374. For the rewards of data/answers.py also strict and lenient accuracy, and
the share of responses in the right form.
"""

import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.winrate import sample_tokens  # noqa: E402
from data.answers import FORMS, accuracies  # noqa: E402
from data.tasks import TASKS  # noqa: E402
from machinery import cli  # noqa: E402
from machinery.rewards import text_scorer  # noqa: E402
from machinery.sources import load_function  # noqa: E402
from utils import decode  # noqa: E402


@dataclass(frozen=True)
class Args:
    """pass@1 and pass@k of some policies."""

    models: tyro.conf.Positional[tuple[str, ...]]
    """folders or hub names"""
    task: str = "arithmetic"
    """task with the queries; lengths and temperature, too, if the model has no run"""
    reward_fn: str | None = None
    """module:function or path.py:function; None: the task's own"""
    query_dataset: str | None = None
    """other queries than the task's, such as openai/gsm8k:main@test"""
    queries: int = 256
    """queries; of the task's own data those that --eval_queries holds out"""
    samples: int = 16
    """responses to each query"""
    k: int = 8
    """at most `samples`"""
    seed: int = 1
    """random seed"""


def pass_at_k(right: np.ndarray, k: int) -> float:
    """The mean over queries of 1 - C(n - c, k) / C(n, k): [n, queries] → scalar.

    Of n samples, c are right; C(n - c, k) of the C(n, k) subsets of k have no right one.
    """
    n = len(right)
    wrong = n - right.sum(axis=0)
    return float(np.mean([1 - math.comb(w, k) / math.comb(n, k) for w in wrong.tolist()]))


def main(args: Args) -> None:
    """Sample, score and count; print a line of JSON for each policy."""
    if args.task not in TASKS:
        raise cli.InputError(f"--task {args.task} is unknown; choose {', '.join(TASKS)}")
    name = args.reward_fn or TASKS[args.task].reward_fn
    if name is None:
        raise cli.InputError(f"task {args.task} has no reward function; pass --reward_fn")
    if not 1 <= args.k <= args.samples:
        raise cli.InputError(f"--k {args.k} is not between 1 and samples={args.samples}")
    with cli.about(f"--reward_fn {name}"):
        reward = load_function(name)
    task = replace(TASKS[args.task], reward_fn=name)
    task = replace(task, query_dataset=args.query_dataset or task.query_dataset)
    for model in args.models:
        policy = replace(task, base_model=model)
        tokenizer, ids, *tokens, columns = sample_tokens(policy, args, args.samples)
        scores = text_scorer("reward_fn", task, tokenizer, ids.pad)(*tokens, columns)  # as in a run
        right = scores.view(args.samples, -1).cpu().numpy() >= 1  # [samples, queries]
        found = {f"pass@{k}": round(pass_at_k(right, k), 4) for k in sorted({1, args.k})}
        if reward in FORMS:
            texts = (decode(tokenizer, x, ids.pad) for x in tokens)
            more = accuracies(reward, *texts, columns["answer"])
            found |= {name: round(value, 4) for name, value in more.items()}
        print(json.dumps({"model": model, "queries": right.shape[1]} | found))


if __name__ == "__main__":
    cli.run(main, Args)
