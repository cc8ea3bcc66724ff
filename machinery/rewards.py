"""Where scores come from: a reward model, a user's Python function, or both.

Shapes: `B` sequences, `Q` query tokens, `R` response tokens, `T` tokens.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor
from transformers.initialization import no_init_weights
from transformers.utils import cached_file

from data.tasks import Task
from machinery import models
from machinery.cli import InputError, about
from machinery.distributed import freeze
from machinery.sources import check_source, load_function
from machinery.tokens import check_length, same_tokens
from machinery.unpadding import set_unpadding
from utils import TokenIds, decode, micro_batches, pad_left

OTHERS = "let a --reward_fn call it, as data/classifier.py does"


def load_reward(
    args: Any, cls: Callable, tokenizer: Any, ids: TokenIds, accelerator: Accelerator
) -> Callable[..., Tensor]:
    """Return a function of (queries [B, Q], responses [B, R], columns) → scores [B].

    It is the reward model's (of class `cls`), or `--reward_fn`'s, which may take its `scores`.
    """
    name, folder = args.task.reward_fn, check_reward(args)
    of_texts: Any = text_scorer("reward_fn", args.task, tokenizer, ids.pad) if name else None
    if folder is None:
        return of_texts
    model = load_reward_model(cls, folder)
    with about(f"--reward_model {folder}"):
        if not same_tokens(transformers.AutoTokenizer.from_pretrained(folder), tokenizer):
            raise InputError(f"its tokens differ from those of the policy: {OTHERS}")
        length = args.task.query_length + args.task.response_length
        check_length(model.config.backbone, length, "query and response")
        if models.reads_weights():
            check_reward_model(model, length)
        models.follow_first(model.backbone)
    model = freeze(accelerator, model)

    def score(queries: Tensor, responses: Tensor, columns: dict | None = None) -> Tensor:
        tokens = reward_input(model, queries, responses, ids.pad)
        scores = score_in_parts(model, tokens, args.micro_batch_tokens, queries.shape[1])
        if of_texts is None:
            return scores
        return of_texts(queries, responses, columns, scores)

    return score


def check_reward(args: Any) -> str | None:
    """The reward model, which exists; None for a `--reward_fn` without `scores`."""
    name = args.task.reward_fn
    with about(f"--reward_fn {name}"):
        if name and "scores" not in inspect.signature(load_function(name)).parameters:
            return None
    with about(f"--reward_model {args.reward_model}"):
        check_source(args.reward_model)
    return args.reward_model


def load_reward_model(cls: Callable, name: str) -> Any:
    """Load train_reward.py's model as a `cls`."""
    with about(f"--reward_model {name}"):
        check_source(name)
        config = RewardConfig.get_config_dict(name)[0]
        if config.get("model_type") != RewardConfig.model_type:
            raise InputError(f"is {config.get('architectures')}, not of train_reward.py: {OTHERS}")
        with no_init_weights():
            model = cls(RewardConfig.from_pretrained(name))
        if models.reads_weights():
            model.load_state_dict(load_file(str(cached_file(name, "model.safetensors"))))
        return model.eval()


class RewardConfig(transformers.PretrainedConfig):
    """Configuration of a reward model: its backbone's, and its pad id."""

    model_type = "scalar_reward"

    def __init__(self, backbone: Any = None, pad_id: int = 0, **kwargs: Any):
        if isinstance(backbone, dict):
            backbone = transformers.AutoConfig.for_model(**backbone)
        self.backbone = backbone
        self.pad_id = pad_id
        super().__init__(**kwargs)


@torch.no_grad()
def check_reward_model(model: Any, length: int) -> None:
    """Choose how to unpad. Raise `InputError` if a score depends on the texts beside it."""
    config, pad = model.config.backbone, model.config.pad_id
    length = max(3, min(length, getattr(config, "max_position_embeddings", None) or length))
    texts = [[i % pad for i in range(n)] for n in (length, length, 3)]
    alone = torch.cat([model(torch.tensor([text])) for text in texts])
    for longest in (length, 0):  # a model that needs its padding keeps it
        set_unpadding(model.backbone, longest)
        gap = (model(pad_left(texts, length, pad), prompt_length=length // 2) - alone).abs().max()
        if gap < 0.01:
            return
    raise InputError(f"{config.model_type}: scores depend on the texts beside them, by {gap:.2g}")


def reward_input(model: Any, queries: Tensor, responses: Tensor, pad_id: int) -> Tensor:
    """Queries [B, Q] and responses [B, R] of a policy of its tokens → a model's input (X13)."""
    tokens = torch.cat([queries, responses], dim=1)
    unknown = (tokens == pad_id) | (tokens >= model.config.pad_id)  # padding, or no text
    return tokens.masked_fill(unknown, model.config.pad_id)


@torch.no_grad()
def score_in_parts(model: Any, tokens: Tensor, max_tokens: int, prompt_length: int = 0) -> Tensor:
    """Rewards [B] of sequences [B, T], about `max_tokens` tokens at a time.

    The first `prompt_length` columns are computed once for sequences that share them.
    """
    order, pad_id = torch.arange(len(tokens), device=tokens.device), model.config.pad_id
    if prompt_length:  # equal prompts side by side
        copies = tokens[:, :prompt_length].unique(dim=0, return_inverse=True)[1]
        order = copies.argsort(stable=True)
    tokens = tokens[order]
    parts = micro_batches((tokens != pad_id).sum(dim=1), max_tokens)
    return torch.cat([model(tokens[part], prompt_length) for part in parts])[order.argsort()]


def text_scorer(field: str, task: Task, tokenizer: Any, pad_id: int) -> Callable[..., Tensor]:
    """Let a task's function of texts take tokens: (queries, responses, columns) → [B]."""
    name = getattr(task, field)
    with about(f"--{field} {name}"):
        function = load_function(name)
        check_names(function)

    def score(
        queries: Tensor, responses: Tensor, columns: dict | None = None, scores: Any = None
    ) -> Tensor:
        texts = decode(tokenizer, queries, pad_id)
        # Alone, a response would lose the space that SentencePiece strips off a text's beginning.
        both = decode(tokenizer, torch.cat([queries, responses], dim=1), pad_id)
        given = dict(
            queries=texts, responses=[x[len(y) :] for x, y in zip(both, texts, strict=True)]
        )
        given |= {} if scores is None else {"scores": scores.tolist()}
        # A query's responses are neighbors, as TRL's functions expect.
        first = {query: i for i, query in reversed([*enumerate(texts)])}
        order = torch.tensor([first[query] for query in texts]).argsort(stable=True)
        lists = (
            {key: [x[i] for i in order] for key, x in y.items()} for y in (given, columns or {})
        )
        with about(f"--{field} {name}"):
            return call_reward_function(function, *lists)[order.argsort()].to(queries.device)

    return score


def check_names(function: Callable) -> None:
    """Raise `InputError` for a reward function of another form, whose names mean other texts."""
    parameters = inspect.signature(function).parameters
    if not {"responses", "scores"} & parameters.keys():
        theirs = ", ".join(
            f"{name}=…" for name, x in parameters.items() if x.kind is not x.VAR_KEYWORD
        )
        raise InputError(
            "no parameter is named responses; wrap it (docs/ppo.md): def score(queries, responses, "
            f"**columns): return {getattr(function, '__name__', 'function')}({theirs})"
        )


def call_reward_function(function: Callable, texts: dict[str, list], columns: dict) -> Tensor:
    """Call a function with what it names of `texts` and `columns` → finite numbers [B]."""
    signature, given = inspect.signature(function), columns | texts
    if not any(x.kind is x.VAR_KEYWORD for x in signature.parameters.values()):
        given = {name: x for name, x in given.items() if name in signature.parameters}
    if both := sorted(given.keys() & texts.keys() & columns.keys()):
        raise InputError(f"{both[0]} is also a column of the data set: rename the column")
    with about(f"parameters can be {', '.join(columns | texts)}"):
        signature.bind(**given)
    scores = torch.as_tensor(returned := function(**given), dtype=torch.float32)
    if scores.shape != (len(texts["queries"]),) or not scores.isfinite().all():
        raise InputError(f"returned {returned!r:.60}, not {len(texts['queries'])} finite numbers")
    return scores


def load_gold_reward(task: Task, tokenizer: Any, ids: TokenIds) -> Callable | None:
    """The true score: (queries, responses, columns) → [B]; None if unknown."""
    return text_scorer("gold_fn", task, tokenizer, ids.pad) if task.gold_fn else None
