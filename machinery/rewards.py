"""Where scores come from: a reward model, a user's Python function, or both.

Shapes: `B` sequences, `Q` query tokens, `R` response tokens, `T` tokens.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import transformers
from torch import Tensor

from data.tasks import Task
from machinery import models
from machinery.cli import InputError, about, rescues, say
from machinery.sources import Rows, find_model, load_function, users_code
from machinery.tokens import bos, check_length, same_tokens
from machinery.unpadding import set_unpadding
from utils import TokenIds, all_max, decode, pad_left

USE_OTHERS = "let a --reward_fn call it, as tools/classifier.py does"
GIVEN = ("queries", "responses", "prompts", "completions", "scores", "step")  # no columns
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


def check_reward_model(model: Any, args: Any, tokenizer: Any) -> None:
    """Raise `InputError` if the reward model would read other tokens or longer texts than it can.

    Chooses how to unpad.
    """
    own = transformers.AutoTokenizer.from_pretrained(find_model(args.reward_model))
    if not same_tokens(own, tokenizer):
        raise InputError(f"its tokens differ from those of the policy: {USE_OTHERS}")
    begin = [] if args.task.query_prefix else bos(tokenizer)  # of queries
    if model.config.begin not in (None, begin):  # None: from train_reward.py
        raise InputError(f"its texts begin with other tokens than queries, {begin}: {USE_OTHERS}")
    if own.chat_template and tokenizer.chat_template not in (None, own.chat_template):
        say(f"--reward_model {args.reward_model} reads the policy's chat template, not its own")
    length = args.task.query_length + args.task.response_length
    check_length(model.config.backbone, length, "query and response")
    if models.reads_weights():
        choose_unpadding(model, max(3, length))
    models.match_first_process(model.backbone)


@torch.no_grad()
def choose_unpadding(model: Any, length: int) -> None:
    """Unpad if scores stay the same. `InputError` if they depend on the texts beside them."""
    config, pad = model.config.backbone, model.config.pad_id
    texts = [[i % pad for i in range(n)] for n in (length, length, 3)]
    alone = torch.cat([model(torch.tensor([text])) for text in texts])
    together = pad_left(texts, length, pad)
    for longest in (length, 0):  # a model that needs its padding keeps it
        set_unpadding(model.backbone, longest)
        gap = (model(together, prompt_length=length // 2) - alone).abs().max()
        if gap < 0.01:
            return
    raise InputError(f"{config.model_type}: scores depend on the texts beside them, by {gap:.2g}")


class Reward:
    """Scores of responses: (queries [B, Q], responses [B, R], columns) → scores [B], components.

    Scores come from a model, from the task's reward function, or from both: a function with the
    parameter `scores` gets the model's. One with `step` gets the number of the update. Components
    are numbers to log, metric → [B]: the parts of the scores, if the function returns several,
    and the true score, if the task has a `gold_fn`.
    """

    def __init__(self, task: Task, tokenizer: Any, ids: TokenIds, max_tokens: int = 0):
        self.tokenizer, self.ids, self.max_tokens = tokenizer, ids, max_tokens
        self.flag, self.gold_flag = f"--reward_fn {task.reward_fn}", f"--gold_fn {task.gold_fn}"
        self.function = load_scorer("reward_fn", task)
        self.gold_function = load_scorer("gold_fn", task)
        self.needs_model = needs_model(self.function)
        self.model: Any = None  # `load_reward` sets it
        self.step: int | None = None  # the update's number, which scripts set
        self.names: dict[str, list[str]] = {}  # flag → names of the parts, the same in all calls

    def __call__(
        self, queries: Tensor, responses: Tensor, columns: dict | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        columns = columns or {}
        tokens = torch.cat([queries, responses], dim=1)
        scores: Any = None
        components: dict[str, Tensor] = {}
        if self.model:
            scores = self.score_by_model(tokens, queries.shape[1])
        if self.function is None and self.gold_function is None:
            return scores, components
        texts = self.decode(queries, tokens)
        if self.step is not None:
            texts["step"] = self.step
        if scores is not None:
            texts["scores"] = scores.tolist()
        if self.function:
            parts = self.call(self.flag, self.function, texts, columns, tokens.device)
            scores = total(parts)
            for name, part in parts.items():
                if name:
                    components[f"reward/{name}"] = part
        if self.gold_function:
            parts = self.call(self.gold_flag, self.gold_function, texts, columns, tokens.device)
            components["objective/gold_score"] = total(parts)
        return scores, components

    def score_by_model(self, tokens: Tensor, query_length: int) -> Tensor:
        """Scores of the reward model: queries and responses [B, Q + R] → [B]."""
        pad_id = self.model.config.pad_id  # ids outside its vocabulary count as padding (X13)
        is_padding = (tokens == self.ids.pad) | (tokens >= pad_id)
        return self.model.score(
            tokens.masked_fill(is_padding, pad_id), self.max_tokens, query_length
        )

    def decode(self, queries: Tensor, tokens: Tensor) -> dict[str, Any]:
        """The texts of queries [B, Q], and of the responses after them in tokens [B, Q + R]."""
        # Alone, a response would lose the space that SentencePiece strips off a text's beginning.
        before = decode(self.tokenizer, queries, self.ids)
        after = decode(self.tokenizer, tokens, self.ids)
        for i, query in enumerate(before):
            after[i] = after[i][len(query) :]
        return {"queries": before, "responses": after}

    def call(
        self, flag: str, function: Callable, texts: dict, columns: dict, device: Any
    ) -> dict[str, Tensor]:
        """Parts of the scores by a user's function. An error on one process ends all of them."""
        parts, error = {}, None
        try:
            with about(flag):
                parts = call_reward_function(function, texts, columns)
                names = self.names.setdefault(flag, [*parts])
                if names != [*parts]:
                    raise InputError(f"returned {[*parts]}, and before {names}")
        except InputError as caught:
            error = caught
        if all_max(torch.tensor(float(error is not None), device=device)):
            error = error or InputError(f"{flag} failed on another process")
            raise InputError("; ".join([f"{error}", *(x() for x in rescues)])) from error.__cause__
        return {name: part.to(device) for name, part in parts.items()}


def call_reward_function(function: Callable, texts: dict, columns: dict) -> dict[str, Tensor]:
    """Finite scores of texts: name → [B] if the function returns a dict, else "" → [B]."""
    texts = dict(texts, prompts=texts["queries"], completions=texts["responses"])  # TRL's names
    names, takes_all = read_signature(function)
    if takes_all and "completions" in names:
        names.update(columns, prompts=False)
    elif takes_all:
        names.update(columns, queries=False, responses=False)
    given = {}
    for name in names.keys() & (columns.keys() | texts.keys()):
        if name in columns and name in texts:
            raise InputError(f"{name} is also a column of the data set: rename the column")
        given[name] = columns[name] if name in columns else texts[name]
    with users_code():
        returned: Any = function(**given)
        if inspect.isawaitable(returned):
            limit = getattr(function, "timeout", 600)  # seconds
            with about(f"awaited for at most {limit} s"):
                returned = event_loop().run(asyncio.wait_for(returned, limit))
    parts = returned if isinstance(returned, dict) and returned else {"": returned}
    size, found = len(texts["queries"]), {}
    for name in sorted(parts):  # in one order on all processes
        if name in TOTALS:
            raise InputError(f"returned {[*parts]}: return {name!r} alone, or parts to sum")
        scores = torch.empty(0)
        with suppress(TypeError, ValueError, RuntimeError):
            scores = torch.as_tensor(parts[name], dtype=torch.float32)
        if scores.shape != (size,) or not scores.isfinite().all():
            raise InputError(f"returned {name} {parts[name]!r:.60}, not {size} finite numbers")
        found[name] = scores
    return found


def total(parts: dict[str, Tensor]) -> Tensor:
    """The sum of the parts of a score [B]."""
    return torch.stack([*parts.values()]).sum(dim=0)


def read_signature(function: Callable) -> tuple[dict[str, bool], bool]:
    """A function's parameters → whether each is needed; and whether it takes all others, too."""
    names, takes_all = {}, False
    for name, x in inspect.signature(function).parameters.items():
        if x.kind is x.VAR_KEYWORD:
            takes_all = True
        elif x.kind is not x.VAR_POSITIONAL:
            names[name] = x.default is x.empty
    return names, takes_all


def load_scorer(field: str, task: Task) -> Any:
    """A task's function of texts, or None. `InputError` if its names mean other texts."""
    if (name := getattr(task, field)) is None:
        return None
    with about(f"--{field} {name}"):
        function = load_function(name)
        names, _ = read_signature(function)
        line = None
        if {"queries", "prompts"} <= names.keys():
            line = OPENRLHF  # whose `queries` hold the responses, too
        elif "solution_str" in names:
            line = VERL
        elif names and not {"responses", "completions", "scores"} & names.keys():
            line = OTHER
        if line:
            line = line.format(name.rpartition(":")[2])
            raise InputError(f"needs other texts; call it from a function like this: {line}")
    return function


def check_columns(rows: Rows, task: Task) -> None:
    """Raise `InputError` if a function needs a column that there is not, or can read no answer."""
    known = {*GIVEN, *rows.column_names}
    for field in ("reward_fn", "gold_fn"):
        function = load_scorer(field, task)
        if function is None:
            continue
        flag = f"--{field} {getattr(task, field)}"
        for name, is_needed in read_signature(function)[0].items():
            if is_needed and name not in known:
                raise InputError(f"{flag} needs {name}; there are {sorted(known)}")
        read = getattr(function, "read_answer", None)
        if read is None:
            continue
        answers = rows.select_columns("answer")[:]["answer"]
        unread = [answer for answer in answers if read(answer) is None]
        if unread:
            found = f"{flag} cannot read {len(unread)} of {len(answers)} answers"
            say(f"{found}, such as {unread[0]!r:.60}")
            if len(unread) == len(answers):
                raise InputError(found)


def needs_model(function: Callable | None) -> bool:
    """Whether scores come from the reward model, or from a function that takes its scores."""
    return function is None or "scores" in read_signature(function)[0]


def check_reward(args: Any) -> None:
    """Raise `InputError` for functions of other forms, or if there is no reward model."""
    load_scorer("gold_fn", args.task)
    if needs_model(load_scorer("reward_fn", args.task)):
        with about(f"--reward_model {args.reward_model}"):
            find_model(args.reward_model)
