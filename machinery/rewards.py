"""Where scores come from: a reward model, a user's Python function, or both.

Shapes: `B` sequences, `Q` query tokens, `R` response tokens, `T` tokens.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor

from data.tasks import Task
from machinery.cli import InputError, RunError
from machinery.functions import call_function, load_function, names_taken, signature_of
from machinery.hub import check_weights, loading_model, looks_local
from machinery.models import check_length, disable_dropout, store_as_cast, use_fused_gelu
from utils import TokenIds, decode, micro_batches, pad_left

PROBE = "The 1st, 22nd & 333rd: it isn't  naïve…\n\n\tx"  # a text that tokenizers split differently


class RewardConfig(transformers.PretrainedConfig):
    """Configuration of a reward model: its backbone's, and its pad id.

    The reward is never read at a token `skip_id`: a classifier's own pad, often EOS.
    """

    model_type = "scalar_reward"

    def __init__(
        self,
        backbone: transformers.PretrainedConfig | dict | None = None,
        pad_id: int = 0,
        skip_id: int = -1,
        **kwargs: Any,
    ):
        if isinstance(backbone, dict):
            backbone = transformers.AutoConfig.for_model(**backbone)
        self.backbone: Any = backbone
        self.pad_id = pad_id
        self.skip_id = skip_id
        super().__init__(**kwargs)


def load_reward_model(cls: Callable, folder: str, make: str = "train_reward.py") -> Any:
    """Load a reward model of class `cls` in fp32 and evaluation mode.

    The folder or hub name is what train_reward.py wrote, or a sequence classifier with one label as
    TRL trains it, whose head `score` has no bias. Raises `InputError` with the command that creates
    one.
    """
    from transformers.initialization import no_init_weights

    path = Path(folder)
    local = path.exists() or looks_local(folder)
    if local and not (path / "config.json").is_file():
        raise InputError(
            f"there is no reward model in {folder}; create it with `{make}`, "
            "or pass --reward_model or --reward_fn"
        )
    if local:
        check_weights(path, "--reward_model")
    options = dict(dtype=torch.float32, use_safetensors=True)
    with loading_model(folder, "--reward_model"):
        if RewardConfig.get_config_dict(folder)[0].get("model_type") == RewardConfig.model_type:
            with no_init_weights():
                model = cls(RewardConfig.from_pretrained(folder))
            if not local:
                path = Path(snapshot_download(folder, allow_patterns="*.safetensors"))
            files = [load_file(file) for file in sorted(path.glob("*.safetensors"))]
            model.load_state_dict({name: x for tensors in files for name, x in tensors.items()})
            return model.eval()
        config = disable_dropout(transformers.AutoConfig.from_pretrained(folder))
        classifier, info = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, config=config, output_loading_info=True, **options
        )
    if info["missing_keys"] or classifier.num_labels != 1 or not hasattr(classifier, "score"):
        raise InputError(
            f"--reward_model {folder} is not a reward model or classifier of one label"
        )
    use_fused_gelu(classifier)
    skip_id = -1 if config.pad_token_id is None else config.pad_token_id
    model = cls(RewardConfig(config, config.vocab_size, skip_id), classifier.base_model)
    model.head.weight = classifier.score.weight
    return model.eval()


def same_tokens(tokenizer: Any, other: Any) -> bool:
    """Whether every token id of `other` is the same text for `tokenizer`, which may have more.

    No text has the pad token of `other`, such as TRL's [PAD], unless it is also its EOS.
    """
    vocabulary = other.get_vocab()
    if other.pad_token != other.eos_token:
        vocabulary.pop(other.pad_token, None)
    same = vocabulary.items() <= tokenizer.get_vocab().items()
    encoded = [t.encode(PROBE, add_special_tokens=False) for t in (tokenizer, other)]
    return same and encoded[0] == encoded[1]


def translate(tokens: Tensor, source: Any, pad_id: int, target: Any) -> list[list[int]]:
    """Token ids [B, T] of tokenizer `source` → the same B texts as token lists of `target`.

    Padding is dropped; an end of text stays one. Nothing is cut.
    """
    sequences = [[token for token in row if token != pad_id] for row in tokens.tolist()]
    texts = source.batch_decode(
        sequences, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    if source.eos_token:
        texts = [text.replace(source.eos_token, target.eos_token or "") for text in texts]
    return target(texts, add_special_tokens=False)["input_ids"]


def reward_input(
    model: Any, tokenizer: Any, policy_tokenizer: Any, pad_id: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `read(queries [B, Q], responses [B, R])` → [B, T], the input of a reward model.

    The policy's token ids if the tokenizers agree, and otherwise the same texts, encoded by the
    reward model's `tokenizer` (X13). A text that is too long loses its beginning.
    """
    pad = model.config.pad_id
    longest = getattr(model.config.backbone, "max_position_embeddings", None) or 0

    def read_ids(queries: Tensor, responses: Tensor) -> Tensor:
        tokens = torch.cat([queries, responses], dim=1)
        unknown = (tokens == pad_id) | (tokens >= pad)  # padding, or ids that are not a text
        return tokens.masked_fill(unknown, pad)

    def read_texts(queries: Tensor, responses: Tensor) -> Tensor:
        tokens = torch.cat([queries, responses], dim=1)  # together: the space between them counts
        sequences = translate(tokens, policy_tokenizer, pad_id, tokenizer)
        sequences = [tokens[-longest:] for tokens in sequences]
        return pad_left(sequences, max(map(len, sequences)), pad).to(queries.device)

    return read_ids if same_tokens(tokenizer, policy_tokenizer) else read_texts


@torch.no_grad()
def score_in_parts(model: Any, tokens: Tensor, max_tokens: int, prompt_length: int = 0) -> Tensor:
    """Rewards [B] of sequences [B, T], about `max_tokens` tokens at a time.

    Sequences whose first `prompt_length` columns are equal compute these once.
    """
    order, pad_id = torch.arange(len(tokens), device=tokens.device), model.config.pad_id
    if prompt_length:  # equal prompts side by side, in order of first occurrence
        copies = tokens[:, :prompt_length].unique(dim=0, return_inverse=True)[1]
        order = order.scatter_reduce(0, copies, order, "amin", include_self=False)[copies]
        order = order.argsort(stable=True)
        model = partial(model, prompt_length=prompt_length)
    tokens = tokens[order]
    parts = micro_batches((tokens != pad_id).sum(dim=1), max_tokens)
    return torch.cat([model(tokens[part]) for part in parts])[order.argsort()]


def call_reward_function(
    function: Callable, name: str, texts: list[list[str]], columns: dict[str, list]
) -> Tensor:
    """Call a function of (queries, responses) → [B], with the columns that it names.

    Raises `RunError` unless it returns one finite number for each response.
    """
    queries, responses = texts
    for column, values in columns.items():
        if len(values) != len(queries):
            raise RunError(f"{len(values)} values of {column!r} for {len(queries)} responses")
    further = {column: columns[column] for column in names_taken(function, columns)}
    returned = call_function(function, name, queries, responses, **further)
    wanted = f"it has to return one finite number for each of {len(queries)} responses"
    try:
        result = torch.as_tensor(returned, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RunError(f"{name} returned {returned!r:.60}; {wanted}") from error
    if result.shape != (len(queries),):
        raise RunError(f"{name} returned shape {list(result.shape)}; {wanted}")
    for value, response in zip(result.tolist(), responses, strict=True):
        if not abs(value) < float("inf"):
            raise RunError(f"{name} returned {value} for {response!r:.60}; {wanted}")
    return result


def load_gold_reward(task: Task, tokenizer: Any, ids: TokenIds) -> Callable | None:
    """The true score as a function of (queries, responses) → [B]; None if it is unknown."""
    return text_scorer(task.gold_fn, tokenizer, ids.pad) if task.gold_fn else None


def text_scorer(name: str, tokenizer: Any, pad_id: int) -> Callable[..., Tensor]:
    """Return a user's function of texts as a function of (queries, responses) → [B]."""
    function = load_function(name)

    def score(queries: Tensor, responses: Tensor, columns: dict | None = None) -> Tensor:
        texts = [decode(tokenizer, tokens, pad_id) for tokens in (queries, responses)]
        return call_reward_function(function, name, texts, columns or {}).to(queries.device)

    return score


def with_columns(columns: dict[str, list], *rewards: Callable | None) -> list[Any]:
    """Reward functions, or None, of queries with these columns of the data set, row by row."""
    return [partial(x, columns=columns) if x and columns else x for x in rewards]


def load_reward(
    args: Any, cls: Callable, tokenizer: Any, ids: TokenIds, accelerator: Accelerator
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the reward as a function of (queries [B, Q], responses [B, R]) → scores [B].

    It is the reward model's (of class `cls`), or `--reward_fn`'s; a reward function with a
    parameter `scores` gets the reward model's. `with_columns` adds columns of the data set.
    """
    of_texts = text_scorer(args.reward_fn, tokenizer, ids.pad) if args.reward_fn else None
    if of_texts and "scores" not in signature_of(load_function(args.reward_fn)).parameters:
        return of_texts
    folder = args.reward_model or f"models/{args.task.task}/train_reward"
    model = load_reward_model(cls, folder, f"python train_reward.py --task {args.task.task}")
    model = model.to(accelerator.device).requires_grad_(False)
    if accelerator.mixed_precision == "bf16":
        model(torch.zeros(1, 2, dtype=torch.long, device=accelerator.device))  # checked in fp32
        store_as_cast(model)
    with loading_model(folder, "--reward_model"):
        own_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if same_tokens(own_tokenizer, tokenizer):
        length = args.task.query_length + args.task.response_length
        check_length(model.config.backbone, length, f"--reward_model {folder}: query and response")
    read = reward_input(model, own_tokenizer, tokenizer, ids.pad)

    def score(queries: Tensor, responses: Tensor, columns: dict | None = None) -> Tensor:
        with accelerator.autocast():
            inputs = read(queries, responses), args.micro_batch_tokens, queries.shape[1]
            scores = score_in_parts(model, *inputs)
        if of_texts is None:
            return scores
        return of_texts(queries, responses, (columns or {}) | {"scores": scores.tolist()})

    return score
