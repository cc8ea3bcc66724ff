"""What does a policy write? Answers in the terminal, or many in a file for somebody to label.

    python tools/sample.py models/synthetic/ppo --prompt "Anna went home because"
    python tools/sample.py models/synthetic/sft --out samples.jsonl

`--prompt` may be repeated; without it and without `--out` the tool asks for prompts. A chat model
gets a prompt through its template. Scores are those of the run's reward.

With `--out`, a line is a query with `--samples` responses, as texts to read and as the token ids
that train_reward.py reads (docs/data.md): `query`, `sample0`, ..., and `best`, which is null. Set
it to the index of the preferred response. Data set and lengths are those of the policy's run. The
queries that it holds out for evaluations are left out. Responses that have not ended are sampled
again (P5). benchmarks/iterate.sh has two rounds of sampling, labeling and training.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from accelerate import Accelerator
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import ppo  # noqa: E402
from data.tasks import Task  # noqa: E402
from machinery import cli  # noqa: E402
from machinery.queries import tokenize_queries  # noqa: E402
from tools.policies import Policy, PolicyArgs, load_table, policy_tasks, read_run  # noqa: E402
from train_reward import load_reward  # noqa: E402
from utils import pad_left  # noqa: E402

MAX_ATTEMPTS = 8  # to sample responses that end


@dataclass(frozen=True, kw_only=True)
class Args(PolicyArgs):
    """What does a policy write? Answers in the terminal, or many in a file for somebody to label."""

    model: tyro.conf.Positional[str]
    """folder or hub name of the policy"""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """answer this; may be repeated"""
    template: bool = True
    """write prompts in the tokenizer's chat template, if it has one"""
    out: Path | None = None
    """file to write, .jsonl: responses to queries of the data set"""
    queries: PositiveInt = 1024
    """number of queries"""
    first: NonNegativeInt | None = None
    """skip so many queries; default: those that its run held out, else 256"""
    samples: PositiveInt = 4
    """responses to each query"""


def load_scorer(policy: Policy) -> Callable | None:
    """The reward of the policy's run; None if it had none, or not here."""
    run = read_run(policy.task.base_model)
    if "reward_model" not in run:
        print("no scores: its run had no reward", file=sys.stderr)
        return None
    args = ppo.Args(task=policy.task, reward_model=run["reward_model"])
    try:
        return load_reward(args, policy.tokenizer, policy.ids, Accelerator())
    except cli.InputError as error:
        print(f"no scores: {error}", file=sys.stderr)
        return None


def answer(prompt: str, policy: Policy, reward: Callable | None, args: Args) -> None:
    """Print several answers to a prompt, the best first."""
    task, tokenizer = policy.task, policy.tokenizer
    text = prompt
    if args.template and tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    (query,) = tokenize_queries([text], task, tokenizer)
    if not 0 < len(query) <= task.query_length:
        raise cli.InputError(
            f"{prompt!r} has {len(query)} tokens; --query_length {task.query_length}"
        )
    queries = pad_left([query] * args.samples, task.query_length, policy.ids.pad)
    queries = queries.to(policy.device)
    responses, ended = policy.sample(queries, args.seed)
    print(f"\n{prompt}")
    order, scores = range(args.samples), None
    if reward is not None:
        scores, _ = reward(queries, responses, {})
        order = scores.argsort(descending=True).tolist()
    for i, text in enumerate(policy.decode(responses[order])):
        score = "" if scores is None else f"{scores[order[i]]:6.2f} "
        print(f"{score} {text}" + ("" if ended[order[i]] else " … (no end)"))


def converse(task: Task, args: Args) -> None:
    """Answer `--prompt`, or what is typed until an empty line."""
    policy = Policy(replace(task, gold_fn=None, clean_fn=None))
    reward = load_scorer(policy)
    for prompt in args.prompt:
        answer(prompt, policy, reward, args)
    while not args.prompt and (prompt := input("\nprompt (empty to end): ")):
        answer(prompt, policy, reward, args)


def write(task: Task, first: int, out: Path, args: Args) -> None:
    """Write a line for each query with `--samples` responses that have ended (P5)."""
    policy = Policy(replace(task, reward_fn=None))
    table = load_table(policy, first)
    rows = range(first, min(first + args.queries, len(table)))
    found: dict[int, list[list[int]]] = {row: [] for row in rows}
    missing, dropped = list(rows), 0
    for attempt in range(MAX_ATTEMPTS):
        repeated = np.repeat(missing, args.samples)
        responses, ended = policy.sample(table[repeated], args.seed + attempt)
        dropped += int((~ended).sum())
        for i in ended.nonzero()[:, 0].tolist():
            tokens = responses[i][responses[i] != policy.ids.pad]
            found[int(repeated[i])].append(tokens.tolist())
        missing = [row for row in rows if len(found[row]) < args.samples]
        if not missing:
            break
    with out.open("w") as file:
        for row in rows:
            if row not in missing:
                file.write(line(policy, table[row : row + 1], found[row][: args.samples]))
    print(f"{out}: {args.samples} responses to each of {len(rows) - len(missing)} queries")
    if dropped:
        print(f"dropped {dropped} responses that have not ended, and so {len(missing)} queries")


def line(policy: Policy, query: Tensor, responses: list[list[int]]) -> str:
    """A line of the file: a query [1, Q] and responses to it, without a label."""
    row: dict[str, Any] = {"query_text": policy.decode(query)[0]}
    row["texts"] = [policy.decode(torch.tensor([response]))[0] for response in responses]
    row["best"] = None
    row["query"] = query[query != policy.ids.pad].tolist()
    for k, response in enumerate(responses):
        row[f"sample{k}"] = response
    return json.dumps(row) + "\n"


def main(args: Args) -> None:
    """Answer in the terminal, or write a file."""
    if args.out is None and not args.prompt and not sys.stdin.isatty():
        raise cli.InputError("pass --prompt TEXT, or --out FILE.jsonl")
    if args.out is not None and args.out.exists():
        raise cli.InputError(f"--out {args.out} exists; choose another name")
    (task,), held_out = policy_tasks([args.model], args)
    if args.out is None:
        converse(task, args)
    else:
        write(task, (held_out or 256) if args.first is None else args.first, args.out, args)


if __name__ == "__main__":
    cli.run(main, Args)
