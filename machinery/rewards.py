"""Where scores come from: a reward model, a user's Python function, or both.

Shapes: `B` sequences, `Q` query tokens, `R` response tokens, `T` tokens.
"""

import inspect
import re
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
from machinery.cli import InputError, about, say_once
from machinery.distributed import freeze
from machinery.sources import check_source, load_function
from machinery.tokens import bos, check_length, drop_answer, one_end, render, same_tokens, translate
from machinery.unpadding import set_unpadding
from utils import TokenIds, decode, micro_batches, pad_left

ANSWER = re.compile("response|completion|solution|output")  # in no name of a query


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
        own_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        length = args.task.query_length + args.task.response_length
        if same_tokens(own_tokenizer, tokenizer):
            check_length(model.config.backbone, length, "query and response")
        if models.reads_weights():
            check_reward_model(model, length)
        models.follow_first(model.backbone)
    model = freeze(accelerator, model)
    read = reward_input(model, own_tokenizer, tokenizer, ids.pad, args.task.query_prefix)

    def score(queries: Tensor, responses: Tensor, columns: dict | None = None) -> Tensor:
        tokens = read(queries, responses, (columns or {}).get(args.task.query_column))
        scores = score_in_parts(model, tokens, args.micro_batch_tokens, queries.shape[1])
        if of_texts is None:
            return scores
        return of_texts(queries, responses, (columns or {}) | {"scores": scores.tolist()})

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
    """Load train_reward.py's model, or a classifier with one label as TRL trains it, as a `cls`."""
    with about(f"--reward_model {name}"):
        check_source(name)
        if RewardConfig.get_config_dict(name)[0].get("model_type") == RewardConfig.model_type:
            with no_init_weights():
                model = cls(RewardConfig.from_pretrained(name))
            if models.reads_weights():
                model.load_state_dict(load_file(str(cached_file(name, "model.safetensors"))))
            return model.eval()
        config = models.disable_dropout(transformers.AutoConfig.from_pretrained(name))
        kind = transformers.AutoModelForSequenceClassification
        if not any("SequenceClassification" in x for x in config.architectures or ()):
            raise InputError(f"is {config.architectures}, not a reward model")
        classifier = models.load_weights(kind, name, config)
        if config.num_labels != 1:
            raise InputError(f"has {config.num_labels} labels; a reward model has one")
        if not hasattr(classifier, "score"):  # BERT's kind: later tokens matter
            raise InputError(f"{config.model_type} is no decoder; call it in a --reward_fn")
        models.choose_kernels(classifier)
        skip_id = -1 if config.pad_token_id is None else config.pad_token_id
        model = cls(RewardConfig(config, config.vocab_size, skip_id), classifier.base_model)
        model.head.weight = classifier.score.weight  # it has no bias
        model.config.is_classifier = True
        return model.eval()


class RewardConfig(transformers.PretrainedConfig):
    """Configuration of a reward model: its backbone's, and its pad id."""

    model_type = "scalar_reward"
    is_classifier = False  # of the library; train_reward.py may start from one's transformer

    def __init__(self, backbone: Any = None, pad_id: int = 0, skip_id: int = -1, **kwargs: Any):
        if isinstance(backbone, dict):
            backbone = transformers.AutoConfig.for_model(**backbone)
        self.backbone = backbone
        self.pad_id = pad_id
        self.skip_id = skip_id  # a classifier's pad token (often its EOS): not read there
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


def reward_input(
    model: Any, tokenizer: Any, policy_tokenizer: Any, pad_id: int, query_prefix: str = ""
) -> Callable[..., Tensor]:
    """Return `read(queries [B, Q], responses [B, R], prompts)` → [B, T], a reward model's input.

    The policy's token ids if the tokenizers agree, and otherwise the same texts, encoded by the
    reward model's `tokenizer` (X13). If `prompts` are B lists of messages, another chat template
    than the policy's writes them, and that of a classifier always, as in TRL. With a prefix,
    which has BOS, only a classifier's texts begin with it. A long text loses its beginning.
    """
    pad = model.config.pad_id
    longest = getattr(model.config.backbone, "max_position_embeddings", None) or 0  # 0: no limit
    same = same_tokens(tokenizer, policy_tokenizer)
    template = tokenizer.chat_template
    classifier = model.config.is_classifier
    own_template = template and (classifier or template != policy_tokenizer.chat_template)
    begin = bos(tokenizer) if classifier or not query_prefix else []

    def read(queries: Tensor, responses: Tensor, prompts: list | None = None) -> Tensor:
        tokens = torch.cat([queries, responses], dim=1)  # with the space between them
        if own_template and prompts and isinstance(prompts[0], list):
            prompts, answers = as_messages(prompts, decode(policy_tokenizer, responses, pad_id))
            texts = [render(x + y, tokenizer) for x, y in zip(prompts, answers, strict=True)]
            if not classifier:  # train_reward.py learns no newline after the end token
                texts = [one_end(text, tokenizer) for text in texts]
            sequences = tokenizer(texts, add_special_tokens=False)["input_ids"]
        elif same and not (classifier and begin and query_prefix):
            unknown = (tokens == pad_id) | (tokens >= pad)  # padding, or no text
            return tokens.masked_fill(unknown, pad)
        else:
            rows = [[token for token in row if token != pad_id] for row in tokens.tolist()]
            rows = translate(rows, policy_tokenizer, tokenizer)
            sequences = [begin + row for row in rows]
        sequences = [row[-longest:] for row in sequences]
        return pad_left(sequences, max(map(len, sequences)), pad).to(queries.device)

    return read


def as_messages(prompts: list[list[dict]], answers: list[str]) -> tuple[list, list]:
    """Conversations and new answers → the messages of prompts, and those of answers, as in TRL."""
    messages = [[{"role": "assistant", "content": answer}] for answer in answers]
    return [drop_answer(prompt) for prompt in prompts], messages


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
        as_one = reads_both(function)

    def score(queries: Tensor, responses: Tensor, columns: dict | None = None) -> Tensor:
        parts = [queries, responses] + [torch.cat([queries, responses], dim=1)] * as_one
        texts = [decode(tokenizer, tokens, pad_id, special=as_one) for tokens in parts]
        # A query's responses are neighbors, as TRL's functions expect.
        first = {query: i for i, query in reversed([*enumerate(texts[0])])}
        order = torch.tensor([first[query] for query in texts[0]]).argsort(stable=True)
        texts = [[x[i] for i in order] for x in texts]
        columns = {name: [x[i] for i in order] for name, x in (columns or {}).items()}
        with about(f"--{field} {name}"):
            scores = call_reward_function(function, texts, columns, task.query_column)
            return scores[order.argsort()].to(queries.device)

    return score


def call_reward_function(
    function: Callable, texts: list[list[str]], columns: dict[str, list], query_column: str = ""
) -> Tensor:
    """Call a function of texts with all that it names → finite numbers [B]."""
    returned = function(**arguments_of(function, texts, columns, query_column))
    scores = returned["rewards"] if isinstance(returned, dict) else returned  # OpenRLHF's
    if isinstance(scores, list | tuple) and 0 < sum(x is None for x in scores) < len(scores):
        say_once("reward function: None counts as 0, as in TRL")
        scores = [0.0 if x is None else x for x in scores]
    result = torch.as_tensor(scores, dtype=torch.float32)
    if result.shape != (len(texts[0]),) or not result.isfinite().all():
        raise InputError(f"returned {returned!r:.60}, not {len(texts[0])} finite numbers")
    return result


def reads_both(function: Callable) -> bool:
    """Whether `queries` are prompt and response in one text, with special tokens: OpenRLHF's."""
    names = inspect.signature(function).parameters.keys()
    return {"queries", "prompts"} <= names and not {"responses", "completions", "scores"} & names


def arguments_of(
    function: Callable, texts: list[list[str]], columns: dict[str, list], query_column: str
) -> dict[str, Any]:
    """What a reward function names: texts and columns (table in docs/ppo.md)."""
    names = "queries", "responses", "prompts", "completions"
    known: dict[str, list] = dict(zip(names, 2 * texts[:2], strict=True))
    if isinstance(columns.get(query_column, [""])[0], list):  # messages, as in TRL
        known["prompts"], known["completions"] = as_messages(columns[query_column], texts[1])
    for name in sorted(known.keys() & columns):
        say_once(f"reward functions do not get the column {name}: the name is that of the texts")
    signature, given = inspect.signature(function), columns | known
    parameters = signature.parameters
    takes_all = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
    needed = [x for x in parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    others = [x.name for x in needed if x.default is x.empty and x.name not in given]
    response = {"responses", "completions", "scores"} & parameters.keys()
    if reads_both(function):
        both = texts[2:] or [[query + response for query, response in zip(*texts, strict=True)]]
        given |= {"queries": both[0], "prompts": texts[0]}
    elif len(others) > 1 and not known.keys() & parameters and not ANSWER.search(others[0]):
        say_once(f"reward function: {others[0]} gets the queries, {others[1]} the responses")
        given |= dict(zip(others[:2], texts[:2], strict=True))
    elif not (response or others) and (needed or not takes_all):  # it would see columns alone
        raise InputError("no argument is named responses or completions")
    if not takes_all:
        given = {name: x for name, x in given.items() if name in parameters}
    with about(f"arguments can be {', '.join(columns | known)}"):
        signature.bind(**given)
    return given


def load_gold_reward(task: Task, tokenizer: Any, ids: TokenIds) -> Callable | None:
    """The true score: (queries, responses, columns) → [B]; None if unknown."""
    return text_scorer("gold_fn", task, tokenizer, ids.pad) if task.gold_fn else None
