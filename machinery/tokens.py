"""Tokenizers: the ids of a task, and of texts after other texts."""

import functools
from contextlib import suppress
from typing import Any

import numpy as np
import transformers

from data.tasks import Task
from machinery.cli import InputError, about, say
from machinery.sources import find_model
from utils import TokenIds

PROBE = "The 1st, 22nd & 333rd: it isn't  naïve…\n\n\tx"  # tokenizers split it differently


def load_config(name: str) -> transformers.PretrainedConfig:
    """The configuration of a model's text part."""
    return read_config(find_model(name)).get_text_config()


def read_config(folder: str) -> transformers.PretrainedConfig:
    """The configuration of a model, of which text may be a part."""
    config = read_files(transformers.AutoConfig, folder)
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None):
            raise InputError("is quantized; use the bf16 model")
    return config


def read_files(cls: Any, folder: str) -> Any:
    """`cls.from_pretrained(folder)`, for a configuration or tokenizer without code of its own."""
    try:
        return cls.from_pretrained(folder)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        use = "use a model that transformers has"
        raise InputError(f"has code of its own, which is not run; {use}") from None


def load_tokenizer(task: Task, new_tokens: int, flag: str = "--base_model") -> tuple[Any, TokenIds]:
    """The tokenizer of `task.base_model` and the token ids of the task; loads no weights."""
    name = task.base_model
    with about(f"{flag} {name}"):
        folder = find_model(name)
        config = load_config(name)
        tokenizer = read_files(transformers.AutoTokenizer, folder)
        # Without files, transformers invents one. Gemma 3's 1B has a token without an embedding.
        if not 8 <= len(tokenizer) <= config.vocab_size + 1:
            sizes = f"the tokenizer has {len(tokenizer)} tokens and the model {config.vocab_size}"
            raise InputError(f"{sizes}: add tokenizer.json, or resize the embeddings")
        generation: Any = config
        with suppress(OSError):  # no generation_config.json: the ends are in config.json
            generation = transformers.GenerationConfig.from_pretrained(folder)
    prefix = tokenizer.encode(task.query_prefix, add_special_tokens=False)
    prefix = with_bos(prefix, bos(tokenizer))
    (suffix,), _, _ = encode_after(["\n"], [task.query_suffix], tokenizer)  # no space is added
    length = len(prefix) + task.query_length + len(suffix) + new_tokens
    check_length(config, length, f"query_length={task.query_length} with affixes and response")
    special = special_tokens(tokenizer)
    ends = end_tokens(task, generation, tokenizer)
    hidden = [*ends, *bos(tokenizer), tokenizer.bos_token_id]
    ids = TokenIds(
        pad=max(config.vocab_size, len(tokenizer)),
        ends=ends,
        prefix=prefix,
        suffix=suffix,
        truncate_after=task.truncate_after,
        total_length=length,
        hidden=tuple(x for x in hidden if x in special),
    )
    return tokenizer, ids


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The ids that a tokenizer has for special tokens, such as its ends → their texts."""
    added = tokenizer.added_tokens_decoder
    return {token_id: str(token) for token_id, token in added.items() if token.special}


def end_tokens(task: Task, config: Any, tokenizer: Any) -> list[int]:
    """The truncate token. In EOS tasks, also the special tokens that are ends in `config`."""
    end = single_token(tokenizer, task.truncate_token, "--truncate_token")
    if end is None or not task.eos_task or task.one_end:
        return [] if end is None else [end]
    others: Any = getattr(config, "eos_token_id", None)  # one, several, or None
    special = special_tokens(tokenizer)
    return [end, *(int(x) for x in np.ravel(others) if x in special and x != end)]


def check_length(config: transformers.PretrainedConfig, needed: int, what: str) -> None:
    """Raise `InputError` if a model has too few positions."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and needed > longest:
        raise InputError(f"{what} needs {needed} tokens; {config.model_type} reads {longest}")


def single_token(tokenizer: Any, text: str | None, flag: str) -> int | None:
    """The id of a text that is one token. Raises `InputError` if it is not."""
    if text is None:
        return None
    (ids,), _, _ = encode_after(["\n"], [text], tokenizer)  # alone, Llama 2's begins with a space
    if len(ids) != 1:
        raise InputError(f"{flag} {text!r} has to be one token; for this tokenizer it is {ids}")
    return ids[0]


@functools.cache  # it looks at the whole vocabulary
def bos(tokenizer: Any) -> list[int]:
    """What the tokenizer begins texts with: BOS as in Llama, two tokens in GLM, or nothing.

    A text's tokens with these, [bos, a, b], and without, [a, b], show them.
    """
    for text in ("a", *tokenizer.get_vocab()):
        alone = tokenizer.encode(text, add_special_tokens=False)
        if alone and alone[0] not in tokenizer.all_special_ids:
            ids = tokenizer.encode(text)
            return ids[: ids.index(alone[0])]
    return []


def with_bos(ids: list[int], begin: list[int]) -> list[int]:
    """`ids` with `begin` before them, once. An empty list stays empty."""
    return ids if not ids or ids[: len(begin)] == begin else begin + ids


def encode_after(
    before: list[str], texts: list[str], tokenizer: Any, offsets: bool = False
) -> tuple[list[list[int]], list[list[tuple[int, int]]], int]:
    """Token ids of texts as they are in `before + text`, without those of `before`.

    SentencePiece would add a space to a text alone. Also returns each token's place in its text, if
    `offsets` are asked for, and how many texts are encoded alone nevertheless: those where one
    token would hold the end of `before` and the beginning of the text.
    """
    options: Any = dict(add_special_tokens=False, return_offsets_mapping=offsets)
    heads = tokenizer(before, add_special_tokens=False)["input_ids"]
    both = tokenizer(list(map(str.__add__, before, texts)), **options)
    found, places, alone = [], [], 0
    for i, head in enumerate(heads):
        start, first = len(before[i]), len(head)
        ids = both["input_ids"][i]
        spans = both["offset_mapping"][i] if offsets else []
        if ids[:first] != head:
            row = tokenizer(texts[i], **options)
            ids, spans = row["input_ids"], row.get("offset_mapping", [])
            start = first = 0
            alone += 1
        found.append(ids[first:])
        places.append([(a - start, b - start) for a, b in spans[first:]])
    return found, places, alone


def encode_answers(
    contexts: list[list[int]], answers: list[Any], tokenizer: Any, stop: str | None, ends: list[int]
) -> list[Any]:
    """Token ids of answers after the ends of their contexts, without whitespace after `stop`.

    Each ends with one of the tokens `ends`; the first one is added if it does not. None for null.
    """
    last = [ids[-16:] for ids in contexts]
    texts = []
    for answer in answers:
        text = answer or ""
        cut = text.rstrip()
        texts.append(cut if stop and cut.endswith(stop) else text)
    before = tokenizer.batch_decode(last, clean_up_tokenization_spaces=False)
    encoded, _, alone = encode_after(before, texts, tokenizer)
    if alone:
        say(f"{alone} of {len(encoded)} answers merge with their prompts' ends: tokenized alone")
    found: list[Any] = []
    for answer, ids in zip(answers, encoded, strict=True):
        if not ids or ids[-1] not in ends:
            ids += ends[:1]
        found.append(None if answer is None else ids)
    return found


def same_tokens(tokenizer: Any, other: Any) -> bool:
    """Whether `tokenizer` gives each token id of `other` the same text; it may have more ids."""
    vocabulary = other.get_vocab()
    if other.pad_token != other.eos_token:  # such as TRL's [PAD]
        vocabulary.pop(other.pad_token, None)
    same = vocabulary.items() <= tokenizer.get_vocab().items()
    encoded = [t.encode(PROBE, add_special_tokens=False) for t in (tokenizer, other)]
    return same and encoded[0] == encoded[1]
