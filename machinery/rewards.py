"""Where scores come from: a reward model, a user's Python function, or both.

Shapes: `B` sequences, `Q` query tokens, `R` response tokens, `T` tokens.
"""

import asyncio
import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_model
from torch import Tensor
from transformers.initialization import no_init_weights

from data.tasks import Task
from machinery import models
from machinery.cli import InputError, about, rescues, say
from machinery.distributed import freeze
from machinery.sources import Rows, find_model, load_function
from machinery.tokens import bos, check_length, same_tokens
from machinery.unpadding import set_unpadding
from utils import TokenIds, all_max, decode, global_mean_and_var, micro_batches, pad_left

OTHERS = "let a --reward_fn call it, as tools/classifier.py does"
TEXTS = ("queries", "responses", "prompts", "completions", "scores")  # no columns
TOTALS = {"score", "scores", "reward", "rewards", "total", "kl"}  # no parts of a score
# Lines to paste that call other systems' functions, and one to complete:
OPENRLHF = (
    "def wrapped(queries, responses, labels): return {}("
    "[q + r for q, r in zip(queries, responses)], queries, labels)"
)
VERL = (
    "def wrapped(responses, data_source, ground_truth): return ["
    "{}(*row) for row in zip(data_source, responses, ground_truth)]"
)
OTHER = "def wrapped(queries, responses): return {}(…)  # and columns, by their names"
event_loop = functools.cache(asyncio.Runner)  # one, since clients belong to theirs


def load_reward(
    args: Any, cls: Callable, tokenizer: Any, ids: TokenIds, accelerator: Accelerator
) -> "Reward":
    """Scores of the reward model, or of `--reward_fn`, which may take them.

    `cls`: the model's class in train_reward.py; machinery imports no script.
    """
    reward = Reward("reward_fn", args.task, tokenizer, ids.pad)
    if args.task.gold_fn:
        reward.gold = Reward("gold_fn", args.task, tokenizer, ids.pad)
    if not needs_model(reward.function):
        return reward
    name = args.reward_model
    model = load_reward_model(cls, name)
    with about(f"--reward_model {name}"):
        own = transformers.AutoTokenizer.from_pretrained(find_model(name))
        if not same_tokens(own, tokenizer):
            raise InputError(f"its tokens differ from those of the policy: {OTHERS}")
        begin = [] if args.task.query_prefix else bos(tokenizer)  # of queries
        if model.config.begin not in (None, begin):  # None: from train_reward.py
            raise InputError(f"its texts begin with other tokens than queries, {begin}: {OTHERS}")
        if own.chat_template and tokenizer.chat_template not in (None, own.chat_template):
            say(f"--reward_model {name} reads texts in the policy's chat template, not its own")
        length = args.task.query_length + args.task.response_length
        check_length(model.config.backbone, length, "query and response")
        if models.reads_weights():
            check_reward_model(model, length)  # also chooses how to unpad
        models.match_first_process(model.backbone)
    reward.model, reward.max_tokens = freeze(accelerator, model), args.micro_batch_tokens
    return reward


def load_reward_model(cls: Callable, name: str) -> Any:
    """Load train_reward.py's model as a `cls`."""
    with about(f"--reward_model {name}"):
        folder = find_model(name)  # from the hub only small files; the weights below
        config = RewardConfig.get_config_dict(folder)[0]
        if config.get("model_type") != RewardConfig.model_type:
            raise InputError(f"is {config.get('architectures')}, not of train_reward.py: {OTHERS}")
        with no_init_weights():
            model = cls(RewardConfig.from_pretrained(folder))
        if models.reads_weights():
            folder = find_model(name, weights=True)
            load_model(model, Path(folder, "model.safetensors"))
        return model.eval()


class RewardConfig(transformers.PretrainedConfig):
    """Configuration of a reward model: its backbone's, its pad id, and BOS if it was converted."""

    model_type = "scalar_reward"

    def __init__(self, backbone: Any = None, pad_id: int = 0, begin: Any = None, **kwargs: Any):
        if isinstance(backbone, dict):
            backbone = transformers.AutoConfig.for_model(**backbone)
        self.backbone, self.pad_id, self.begin = backbone, pad_id, begin
        super().__init__(**kwargs)


@torch.no_grad()
def check_reward_model(model: Any, length: int) -> None:
    """Choose how to unpad. Raise `InputError` if a score depends on the texts beside it."""
    config, pad = model.config.backbone, model.config.pad_id
    length = max(3, length)
    texts = [[i % pad for i in range(n)] for n in (length, length, 3)]
    alone = torch.cat([model(torch.tensor([text])) for text in texts])
    for longest in (length, 0):  # a model that needs its padding keeps it
        set_unpadding(model.backbone, longest)
        gap = (model(pad_left(texts, length, pad), prompt_length=length // 2) - alone).abs().max()
        if gap < 0.01:
            return
    raise InputError(f"{config.model_type}: scores depend on the texts beside them, by {gap:.2g}")


class Reward:
    """Scores of responses: (queries [B, Q], responses [B, R], columns) → [B].

    They come from a model, from a task's function of texts, or from a function of model scores.
    """

    model: Any = None  # `load_reward` sets these
    max_tokens = 0
    gold: "Reward | None" = None  # the task's true score, for `metrics`

    def __init__(self, field: str, task: Task, tokenizer: Any, pad_id: int):
        self.tokenizer, self.pad_id, self.name = tokenizer, pad_id, getattr(task, field)
        self.flag, self.function = f"--{field} {self.name}", load_scorer(field, task)
        self.parts: dict[str, Tensor] = {}  # of the last scores [B], if the function names them

    def __call__(self, queries: Tensor, responses: Tensor, columns: dict | None = None) -> Tensor:
        scores: Any = None
        tokens = torch.cat([queries, responses], dim=1)
        if self.model:
            pad_id = self.model.config.pad_id  # ids outside its vocabulary count as padding (X13)
            inputs = tokens.masked_fill((tokens == self.pad_id) | (tokens >= pad_id), pad_id)
            scores = score_in_parts(self.model, inputs, self.max_tokens, queries.shape[1])
        if self.function is None:
            return scores
        # Alone, a response would lose the space that SentencePiece strips off a text's beginning.
        texts, both = (decode(self.tokenizer, x, self.pad_id) for x in (queries, tokens))
        answers = [x[len(y) :] for x, y in zip(both, texts, strict=True)]
        given: dict[str, Any] = dict(queries=texts, responses=answers)
        given |= {} if scores is None else dict(scores=scores.tolist())
        here, parts, error = os.getcwd(), {}, None
        try:
            with about(self.flag):
                parts = call_reward_function(self.function, given, columns or {})
                if self.parts and parts.keys() != self.parts.keys():
                    raise InputError(f"returned {[*parts]}, and before {[*self.parts]}")
        except InputError as caught:
            error = caught
        os.chdir(here)
        if all_max(torch.tensor(float(error is not None), device=tokens.device)):
            error = error or InputError(f"{self.flag} failed on another process")
            raise InputError("; ".join([f"{error}", *(x() for x in rescues)])) from error.__cause__
        parts = {name: x.to(tokens.device) for name, x in parts.items()}
        self.parts = {name: x for name, x in parts.items() if name}
        return torch.stack([*parts.values()]).sum(dim=0)

    def metrics(self, queries: Tensor, responses: Tensor, columns: dict) -> dict[str, Tensor]:
        """Of the last scores, which were of these: each part's mean and standard deviation, if the
        function returns several; the mean of the true scores, if the task has a `gold_fn`.
        """
        found: dict[str, Tensor] = {}
        for name, x in self.parts.items():
            mean, var = global_mean_and_var(x)
            found |= {f"reward/{name}": mean, f"reward/{name}_std": var.sqrt()}
        if self.gold:
            found["objective/gold_score"] = self.gold(queries, responses, columns).mean()
        return found


@torch.no_grad()
def score_in_parts(model: Any, tokens: Tensor, max_tokens: int, prompt_length: int = 0) -> Tensor:
    """Rewards [B] of sequences [B, T], about `max_tokens` tokens at a time.

    The first `prompt_length` columns are computed once for neighbors that share them.
    """
    parts = micro_batches((tokens != model.config.pad_id).sum(dim=1), max_tokens)
    return torch.cat([model(tokens[part], prompt_length) for part in parts])


def call_reward_function(function: Callable, texts: dict, columns: dict) -> dict[str, Tensor]:
    """Scores of texts: name → finite numbers [B] if the function returns a dict, else "" → [B]."""
    texts = texts | dict(prompts=texts["queries"], completions=texts["responses"])  # TRL's names
    parameters = inspect.signature(function).parameters
    names = {*parameters}
    if any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
        theirs, ours = {"prompts", "completions"}, {"queries", "responses"}
        names |= columns.keys() | (theirs if "completions" in names else ours)
    given = {name: x for name, x in (columns | texts).items() if name in names}
    if both := sorted(given.keys() & texts.keys() & columns.keys()):
        raise InputError(f"{both[0]} is also a column of the data set: rename the column")
    returned: Any = function(**given)
    if inspect.isawaitable(returned):
        limit = getattr(function, "timeout", 600)  # seconds
        with about(f"awaited for at most {limit} s"):
            returned = event_loop().run(asyncio.wait_for(returned, limit))
    parts = returned if isinstance(returned, dict) and returned else {"": returned}
    if taken := sorted(TOTALS & parts.keys()):
        raise InputError(f"returned {[*parts]}: return {taken[0]!r} alone, or parts to sum")
    size, found = len(texts["queries"]), {}
    for name, x in sorted(parts.items()):  # in one order on all processes
        found[name] = torch.as_tensor(x, dtype=torch.float32)
        if found[name].shape != (size,) or not found[name].isfinite().all():
            raise InputError(f"returned {name and f'{name}='}{x!r:.60}, not {size} finite numbers")
    return found


def load_scorer(field: str, task: Task) -> Any:
    """A task's function of texts, or None. `InputError` if its names mean other texts."""
    if (name := getattr(task, field)) is None:
        return None
    with about(f"--{field} {name}"):
        function = load_function(name)
        parameters = inspect.signature(function).parameters
        named = [name for name, x in parameters.items() if x.kind is not x.VAR_KEYWORD]
        both = {"queries", "prompts"} <= {*named}  # OpenRLHF's `queries` hold the responses, too
        if both or named and not {"responses", "completions", "scores"} & {*named}:
            line = OPENRLHF if both else VERL if "solution_str" in named else OTHER
            line = line.format(name.rpartition(":")[2])
            raise InputError(f"needs other texts; call it from a function like this: {line}")
    return function


def check_columns(rows: Rows, task: Task) -> None:
    """Raise `InputError` if a function needs a column that there is not, or can read no answer."""
    known = {*TEXTS, *rows.column_names}
    for field in (x for x in ("reward_fn", "gold_fn") if getattr(task, x)):
        function, flag = load_scorer(field, task), f"--{field} {getattr(task, field)}"
        for x in inspect.signature(function).parameters.values():
            needed = x.default is x.empty and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
            if needed and x.name not in known:
                raise InputError(f"{flag} needs {x.name}; there are {sorted(known)}")
        read: Any = getattr(function, "read_answer", None)
        answers = rows.select_columns("answer")[:]["answer"] if read else []
        unread = [answer for answer in answers if read(answer) is None]
        if unread:
            found = f"{flag} cannot read {len(unread)} of {len(answers)} answers"
            say(f"{found}, such as {unread[0]!r:.60}")
            if len(unread) == len(answers):
                raise InputError(found)


def needs_model(function: Callable | None) -> bool:
    """Whether scores come from the reward model, or from a function that takes its scores."""
    return function is None or "scores" in inspect.signature(function).parameters


def check_reward(args: Any) -> None:
    """Raise `InputError` for functions of other forms, or if there is no reward model."""
    load_scorer("gold_fn", args.task)
    if needs_model(load_scorer("reward_fn", args.task)):
        with about(f"--reward_model {args.reward_model}"):
            find_model(args.reward_model)
