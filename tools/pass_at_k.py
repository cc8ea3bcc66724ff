"""How often is a response right, and one of k responses? pass@1 and pass@k of some policies.

    python tools/pass_at_k.py models/arithmetic/sft models/arithmetic/rloo

Every policy, a folder or hub name, samples responses to the same queries: those that the first run
of PPO or RLOO held out (policies.py). A response is right if its reward function returns at least 1. pass@k is the unbiased estimator of Chen et
al. 2021, arXiv 2107.03374. For the rewards of data/answers.py also strict and lenient accuracy, and
the share of responses in the right form.
"""

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from pydantic import PositiveInt

sys.path.insert(0, str(Path(__file__).parents[1]))
from data.answers import NUMBER, exact_match, final_number, gsm8k, read_number, to_number  # noqa: E402
from machinery import cli  # noqa: E402
from machinery.rewards import Reward  # noqa: E402
from machinery.sources import load_function  # noqa: E402
from tools.policies import PolicyArgs, policy_tasks, sample_tokens  # noqa: E402

SUMS = re.compile(r"(\d+,){3}\d+=\d+", re.A)  # the sum of each column, then the total


@dataclass(frozen=True, kw_only=True)
class Args(PolicyArgs):
    """How often is a response right, and one of k responses? pass@1 and pass@k of some policies."""

    models: tyro.conf.Positional[tuple[str, ...]]
    """folders or hub names"""
    reward_fn: str | None = None
    """module:function or path.py:function; default: the run's"""
    samples: PositiveInt = 16
    """responses to each query"""
    k: PositiveInt = 8
    """at most `samples`"""


def pass_at_k(right: np.ndarray, k: int) -> float:
    """The mean over queries of 1 - C(n - c, k) / C(n, k): [n, queries] → scalar.

    Of n samples, c are right; C(n - c, k) of the C(n, k) subsets of k have no right one.
    """
    n = len(right)
    wrong = n - right.sum(axis=0)
    return float(np.mean([1 - math.comb(w, k) / math.comb(n, k) for w in wrong.tolist()]))


# Reward function → whether a response has the form that its task asks for:
FORMS: dict[Any, Callable[[str], bool]] = {
    exact_match: lambda response: SUMS.fullmatch(response) is not None,
    gsm8k: lambda response: final_number(response) is not None,
}


def last_number(text: str) -> Decimal | None:
    """The last number, wherever it is; None if there is none."""
    found = NUMBER.findall(text)
    return to_number(found[-1]) if found else None


def accuracies(
    reward: Callable, queries: list[str], responses: list[str], answer: list[Any]
) -> dict[str, float]:
    """Strict and lenient accuracy of responses, and the share of them in the right form.

    Strict: in the right form, and the reward is 1. Lenient: the last number is that of the answer.
    """
    form = [FORMS[reward](response) for response in responses]
    rewards = reward(queries, responses, answer)
    lenient = []
    for response, text in zip(responses, answer, strict=True):
        number = read_number(text)
        lenient.append(number is not None and last_number(response) == number)
    return {
        "strict": np.multiply(form, rewards).mean().item(),
        "lenient": np.mean(lenient).item(),
        "form": np.mean(form).item(),
    }


def main(args: Args) -> None:
    """Sample, score and count; print a line of JSON for each policy."""
    if args.k > args.samples:
        raise cli.InputError(f"--k {args.k} is above samples={args.samples}")
    tasks, held_out = policy_tasks(args.models, args)
    name = args.reward_fn or tasks[0].reward_fn
    if name is None:
        raise cli.InputError(f"task {tasks[0].task} has no reward function; pass --reward_fn")
    with cli.about(f"--reward_fn {name}"):
        reward = load_function(name)
    number = args.queries or held_out or 256
    for task in (replace(task, reward_fn=name, gold_fn=None) for task in tasks):
        sampled = sample_tokens(task, number, args.seed, args.samples)
        policy, queries, responses, columns = sampled
        score = Reward(task, policy.tokenizer, policy.ids)  # as in a run
        scores, _ = score(queries, responses, columns)
        right = scores.view(-1, args.samples).T.cpu().numpy() >= 1  # [samples, queries]
        found = {f"pass@{k}": round(pass_at_k(right, k), 4) for k in sorted({1, args.k})}
        if reward in FORMS:
            more = accuracies(
                reward, policy.decode(queries), policy.decode(responses), columns["answer"]
            )
            found |= {name: round(value, 4) for name, value in more.items()}
        about = {"model": task.base_model, "queries": right.shape[1], "held_out": held_out}
        print(json.dumps(about | found))


if __name__ == "__main__":
    cli.run(main, Args)
