"""Human preferences (docs/data.md) → token sequences. Shapes: `B` labels, `K` candidates each."""

import math
from collections import defaultdict
from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.tasks import Task
from machinery import tokens
from machinery.cli import InputError, about, say
from machinery.queries import count_texts, say_counts, tokenize_queries
from machinery.sources import Rows, convert_command, find_model, load_rows
from utils import TokenIds, pad_left

FLAG = "--label_dataset"
PAIR = ["prompt", "chosen", "rejected"]
OPENAI_PAD = 50259  # pads OpenAI's files; GPT-2's last id is 50256


@dataclass(frozen=True)
class Labels:
    """Comparisons: a query, K responses, and which of them a human preferred."""

    queries: list[np.ndarray]  # N token sequences, padded per batch
    responses: list[list[np.ndarray]]  # N × K token sequences
    best: np.ndarray  # [N] index of the preferred response

    def __len__(self) -> int:
        return len(self.best)

    def batch(self, rows: np.ndarray, pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, Q], padded on the left; responses [B, K, R], on the right; best [B]."""
        queries: list[list[int]] = []
        flat: list[Tensor] = []
        for row in rows:
            queries.append(self.queries[row].tolist())
            flat += map(torch.tensor, self.responses[row])
        responses = pad_sequence(flat, batch_first=True, padding_value=pad_id).long()
        responses = responses.unflatten(0, (len(rows), -1))
        best = torch.tensor(self.best[rows])
        return pad_left(queries, max(map(len, queries)), pad_id), responses, best

    def longest(self) -> int:
        """Tokens of the longest query with one of its responses."""
        return max(map(length, self.queries, self.responses))

    def held_out(self, num_train: int) -> np.ndarray:
        """The rows after the first `num_train` with other queries than those."""
        if len(self) < num_train:
            raise InputError(f"num_labels={num_train}, but --label_dataset has only {len(self)}")
        texts = [query.tobytes() for query in self.queries]
        seen = set(texts[:num_train])
        found = [i for i, text in enumerate(texts) if text not in seen]
        left = len(texts) - num_train
        if left and not found:
            say(f"no accuracy: the queries of the other {left} labels are all trained on")
        return np.array(found, dtype=int)


def length(query: Sized, responses: Sequence[Sized]) -> int:
    """Tokens of a query with the longest of its responses."""
    return len(query) + max(map(len, responses))


def load_labels(task: Task, tokenizer: Any, ids: TokenIds, config: Any = None) -> Labels:
    """Load `label_dataset` as token ids of `tokenizer` (R4).

    Skipped and counted: rows with null; without tokens in the query or a response; with equal
    responses; too long for the model. An empty answer of a pair is its end alone.
    """
    source = str(task.label_dataset)
    rows = load_rows(source, FLAG)
    names = rows.column_names
    with about(f"{FLAG} {source}"):
        if {*PAIR} <= {*names}:
            found = read_texts(rows, PAIR, task, tokenizer, ids)
            best = [0] * len(rows)
        elif {"query", "best"} <= {*names}:
            columns = ["query", "sample0", "sample1"]
            while (name := f"sample{len(columns) - 1}") in names:
                columns.append(name)
            kind = getattr(rows.features["query"], "dtype", None)
            read = read_texts if kind in ("string", "large_string") else read_ids
            found = read(rows.select_columns(columns), columns, task, tokenizer, ids)
            best = rows["best"][:]
        else:
            use = convert_command(source, " --rename COLUMN=prompt")
            raise InputError(f"{names} are no labels (docs/data.md); perhaps use {use}")
        return select_labels(found, best, config)


def select_labels(found: list[list[Any]], best: list[Any], config: Any) -> Labels:
    """The labels that can be trained on; the others are counted. `found`: query, responses."""
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    labels = Labels([], [], np.array([], dtype=int))
    kept = []
    skipped = defaultdict(list)
    for i, (query, *responses) in enumerate(found):
        if best[i] is None or None in (query, *responses):
            skipped["null"].append(i)
        elif isinstance(best[i], bool) or best[i] not in range(len(responses)):
            last = len(responses) - 1
            raise InputError(f"row {i}: best is {best[i]!r}, not an index from 0 to {last}")
        elif not query or not all(responses):
            skipped["without tokens"].append(i)
        elif responses.count(responses[0]) == len(responses):
            skipped["with equal responses"].append(i)
        elif length(query, responses) > longest:
            skipped[f"with more tokens than the model reads ({longest})"].append(i)
        else:
            kept.append(best[i])
            labels.queries.append(np.array(query, np.int32))
            labels.responses.append([np.array(ids, np.int32) for ids in responses])
    if skipped:
        reasons = "; ".join(f"{len(x)} {why}, such as row {x[0]}" for why, x in skipped.items())
        say(f"{FLAG}: skipped {len(found) - len(kept)} of {len(found)} rows: {reasons}")
    return replace(labels, best=np.array(kept, dtype=int))


def read_ids(
    rows: Rows, columns: list[str], task: Task, tokenizer: Any, ids: TokenIds
) -> list[list[Any]]:
    """OpenAI's format: ids of `label_tokenizer`, which have to be the policy's; None for null."""
    vocab_size = ids.pad
    if task.label_tokenizer not in (None, task.base_model):
        with about(f"--label_tokenizer {task.label_tokenizer}"):
            own = transformers.AutoTokenizer.from_pretrained(find_model(task.label_tokenizer))
            if not tokens.same_tokens(tokenizer, own):
                use = convert_command(str(task.label_dataset), f" --ids {task.label_tokenizer}")
                raise InputError(f"its ids mean other texts to --base_model; use {use}")
        vocab_size = len(own)
    found = []
    for i, row in enumerate(rows):
        with about(f"row {i}"):
            found.append([without_padding(row[name], vocab_size) for name in columns])
    return found


def without_padding(value: Any, vocab_size: int) -> list[int] | None:
    """A list of ids without padding; None for null. Raises `InputError` for what is no id."""
    if value is None:
        return None
    pad = max(OPENAI_PAD, vocab_size)  # larger vocabularies have a pad of their own
    ids: list[Any] = [x for x in value if x != pad] if isinstance(value, list) else [None]
    if not all(type(x) in (int, float) and 0 <= x < vocab_size and x % 1 == 0 for x in ids):
        raise InputError(f"{value!r:.60} has to be a list of ids from 0 to {vocab_size - 1}")
    return [*map(int, ids)]


def read_texts(
    rows: Rows, columns: list[str], task: Task, tokenizer: Any, ids: TokenIds
) -> list[list[Any]]:
    """Queries with their responses as token ids; None for null.

    Prompts of pairs are cleaned and cut as queries are, and answers get their end (R4). Texts of
    `query` and `sample0`, `sample1`, … were read and written by a policy: they stay as they are.
    """
    texts = rows.select_columns(columns)[:]
    odd = count_texts(texts, range(len(rows)), columns, str(task.label_dataset), tokenizer)
    say_counts(odd, f"{FLAG}, {len(rows)} rows", columns[0], tokenizer)
    prompts, *answers = texts.values()
    stop, ends = task.truncate_token, ids.ends
    if columns == PAIR:
        check_repeated(prompts, *answers)
    else:
        stop, ends = None, []
        task = replace(task, start_text=None, end_text=None, clean_fn=None, keep_last_line=False)
        task = replace(task, eos_task=False, query_length=2**31)
    queries = tokenize_queries(prompts, task, tokenizer)
    if long := sum(len(query) > task.query_length for query in queries):
        say(f"--query_length {task.query_length}: cut {long} of {len(queries)} prompts")
    queries = [query[: task.query_length] for query in queries]
    contexts = [ids.prefix + query + ids.suffix for query in queries]
    columns_of_ids: list[list[Any]] = [queries]
    for texts in answers:
        columns_of_ids.append(tokens.encode_answers(contexts, texts, tokenizer, stop, ends))
    return list(map(list, zip(*columns_of_ids, strict=True)))


def check_repeated(prompts: list, chosen: list, rejected: list) -> None:
    """Raise `InputError` if all answers begin with their prompt, which would be read twice."""
    repeated = []
    for prompt, *pair in zip(prompts, chosen, rejected, strict=True):
        if prompt and prompt.strip() and all(pair):
            repeated.append(all(text.startswith(prompt) for text in pair))
    if repeated and all(repeated):
        raise InputError("chosen and rejected repeat the prompt; tools/convert.py removes it")
