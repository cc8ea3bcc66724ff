"""A policy as its run left it: task, data, lengths, ends, held-out queries. For the other tools.

They read `args.json` beside the weights, print what they found to stderr, and let flags change it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import PositiveInt
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import ppo  # noqa: E402
from data.tasks import TASKS, Task  # noqa: E402
from machinery.cli import InputError, read_args  # noqa: E402
from machinery.models import load_lm  # noqa: E402
from machinery.queries import TokenTable, load_queries  # noqa: E402
from machinery.tokens import load_tokenizer  # noqa: E402
from utils import add_affixes, decode, random_numbers, truncate  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class PolicyArgs:
    """What is as in the policy's run if no flag changes it."""

    task: str | None = None
    """task with queries and rewards; lengths and ends, too, if the model has no run"""
    query_dataset: str | None = None
    """other queries, such as trl-lib/tldr@validation"""
    query_column: str | None = None
    """their column with texts"""
    response_column: str | None = None
    """their column with responses"""
    query_length: int | None = None
    """tokens of a query"""
    response_length: int | None = None
    """tokens of a response"""
    truncate_token: str | None = None
    """end of a response"""
    temperature: float | None = None
    """of sampling"""
    queries: PositiveInt | None = None
    """number of queries; default: all that the run held out, else 256"""
    seed: int = 1
    """random seed"""


FLAGS = {x.name for x in fields(PolicyArgs)} & {x.name for x in fields(Task)} - {"task"}
# Two policies may differ in these, and read the same data:
OWN = {"truncate_token", "truncate_after", "eos_task", "one_end"}
OWN |= {"response_length", "temperature", "query_length", "query_prefix", "query_suffix"}
OWN |= {"keep_last_line"}
# Which rows are held out depends on these:
DATA = ["query_dataset", "query_column", "query_length", "keep_last_line", "start_text"]
DATA += ["end_text", "clean_fn", "num_queries"]


def read_run(model: str) -> dict[str, Any]:
    """The flags of the run that trained a model; {} if they are not beside the weights."""
    folder = Path(model).resolve()
    for place in (folder, folder.parent):
        if (place / "args.json").is_file():
            return read_args(place)
    return {}


def policy_tasks(models: Sequence[str], args: Any) -> tuple[list[Task], int | None]:
    """The task of each policy, all with the same data, and how many queries their runs held out.

    The data are those of the first run of PPO or RLOO, or of the first run. None: not known.
    """
    runs = [read_run(model) for model in models]
    source = next((run for run in runs if "eval_queries" in run), next(filter(None, runs), {}))
    name = args.task or source.get("task")
    if name is None:
        raise InputError(f"{models[0]} has no args.json of its run: pass --task")
    if name not in TASKS:
        raise InputError(f"--task {name} is unknown; choose {', '.join(TASKS)}")
    names = {x.name for x in fields(Task)} if name == source.get("task") else set()
    given = {x: getattr(args, x) for x in FLAGS if getattr(args, x) is not None}
    tasks, held_out = [], []
    for model, run in zip(models, runs, strict=True):
        known = {x: source[x] for x in names & source.keys()}
        known |= {x: run[x] for x in OWN & run.keys()} | given | {"base_model": model}
        task = replace(TASKS[name], **known)
        said = f"{model}: {task.query_length} + {task.response_length} tokens"
        said += f" to {task.truncate_token!r}, temperature {task.temperature:g}"
        print(said, file=sys.stderr)
        if run.get("query_dataset") == task.query_dataset and "eval_queries" in run:
            same = all(run.get(x) == getattr(task, x) for x in DATA)
            held_out.append(run["eval_queries"] if same else 0)
        tasks.append(task)
    number = min(held_out, default=None)
    said = f"queries: {task.query_dataset}, column {task.query_column}"
    print(said + (f"; held out: {number}" if number is not None else ""), file=sys.stderr)
    return tasks, number


def name_queries(number: int, held_out: int | None) -> str:
    """`number` queries in words: how many of them no policy was trained on."""
    if held_out and held_out >= number:
        return f"{number} held-out queries"
    return f"{number} queries" + (f", {held_out} of them held out" if held_out is not None else "")


class Policy:
    """A policy, ready to sample: `task.base_model` with its tokenizer and token ids."""

    def __init__(self, task: Task):
        self.task = task
        self.tokenizer, self.ids = load_tokenizer(task, task.response_length)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.lm: Any = None  # `sample` loads the weights, after the data have been read

    def sample(self, queries: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Queries [B, Q] → responses [B, R], cut after their ends, and whether they have ended."""
        task, ids = self.task, self.ids
        if self.lm is None:
            lm: Any = load_lm(task.base_model, length=ids.total_length)
            self.lm = lm.to(self.device).eval()
        settings = ppo.Args(task=task, rollout_batch_size=64)
        shape = task.response_length, len(queries)
        uniform = random_numbers(seed, 0, self.device, *shape)
        contexts = add_affixes(queries.to(self.device), ids)
        responses = ppo.sample_in_batches(self.lm, contexts, uniform, ids, settings)
        return truncate(responses, ids)

    def decode(self, tokens: Tensor) -> list[str]:
        """[B, T] → B texts as reward functions read them."""
        return decode(self.tokenizer, tokens, self.ids)


def load_table(policy: Policy, first: int) -> TokenTable:
    """The queries of the policy's task; there is one at row `first`."""
    table = load_queries(replace(policy.task, gold_fn=None), policy.tokenizer, policy.ids)
    if len(table) <= first:
        raise InputError(f"--first {first} skips all {len(table)} queries")
    return table


def sample_tokens(
    task: Task, number: int, seed: int = 1, samples: int = 1
) -> tuple[Policy, Tensor, Tensor, dict[str, list]]:
    """The policy `task.base_model`, queries [B, Q], responses [B, R], columns of the data set.

    The first `number` queries, the `samples` responses to each side by side.
    """
    policy = Policy(task)
    table = load_table(policy, first=0)
    rows = np.repeat(np.arange(min(number, len(table))), samples)
    queries = table[rows].to(policy.device)
    responses, _ = policy.sample(queries, seed)
    return policy, queries, responses, table.columns(rows)


def sample_responses(
    task: Task, number: int, seed: int = 1, samples: int = 1
) -> tuple[list[str], list[str], dict[str, list]]:
    """Queries and responses of the policy `task.base_model`, columns of the data set."""
    task = replace(task, reward_fn=None)  # its file may be elsewhere
    policy, queries, responses, columns = sample_tokens(task, number, seed, samples)
    return policy.decode(queries), policy.decode(responses), columns
