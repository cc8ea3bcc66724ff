"""Human preferences (docs/data.md) → token sequences. Shapes: `B` labels, `K` candidates each."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.tasks import Task
from machinery import tokens
from machinery.cli import InputError, about, say
from machinery.queries import tokenize_queries
from machinery.sources import Rows, check_texts, find_model, load_rows, rename_prompt
from utils import TokenIds, pad_left

Found = tuple[int, list[list[int]], int]  # a row, its query and responses, the preferred one
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
        queries = [self.queries[row].tolist() for row in rows]
        flat = [torch.from_numpy(ids).long() for row in rows for ids in self.responses[row]]
        responses = pad_sequence(flat, batch_first=True, padding_value=pad_id)
        responses = responses.unflatten(0, (len(rows), -1))
        best = torch.from_numpy(self.best[rows]).long()
        return pad_left(queries, max(map(len, queries)), pad_id), responses, best

    def longest(self) -> int:
        """Tokens of the longest query with one of its responses."""
        pairs = zip(self.queries, self.responses, strict=True)
        return max(len(query) + max(map(len, responses)) for query, responses in pairs)

    def held_out(self, num_train: int) -> np.ndarray:
        """The rows after the first `num_train` with other queries than those."""
        if len(self) < num_train:
            raise InputError(f"num_labels={num_train}, but --label_dataset has only {len(self)}")
        seen = {query.tobytes() for query in self.queries[:num_train]}
        rest = range(num_train, len(self))
        found = [i for i in rest if self.queries[i].tobytes() not in seen]
        if rest and not found:
            say(f"no accuracy: the queries of the other {len(rest)} labels are all trained on")
        return np.array(found, dtype=int)


def load_labels(task: Task, tokenizer: Any, ids: TokenIds, config: Any = None) -> Labels:
    """Load `label_dataset` as token ids of `tokenizer` (R4), without what is too long for a model."""
    source = str(task.label_dataset)
    rows = load_rows(source, "--label_dataset")
    with about(f"--label_dataset {source}"):
        if {*PAIR} <= {*rows.column_names}:
            for name in PAIR:
                check_texts(rows, name, source)
            found = read_pairs(rows, task, tokenizer, ids)
        elif "best" in rows.column_names:
            found = read_best_of_k(rows, task, tokenizer, ids.pad)
        else:
            use = f"python tools/convert.py {source} pairs.jsonl{rename_prompt(rows.column_names)}"
            raise InputError(f"{rows.column_names} are no labels (docs/data.md); perhaps use {use}")
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    lengths = [len(query) + max(map(len, answers)) for _, (query, *answers), _ in found]
    kept = [x for x, length in zip(found, lengths, strict=True) if length <= longest]
    if skipped := len(found) - len(kept):
        i = next(i for i, length in enumerate(lengths) if length > longest)
        such = f"row {found[i][0]} has {lengths[i]} tokens; the model reads {longest}"
        say(f"--label_dataset: {such}: skipped {skipped} of {len(rows)} such rows")
        if not kept:
            raise InputError(f"--label_dataset: {such}")
    arrays = [[np.array(ids, np.int32) for ids in sequences] for _, sequences, _ in kept]
    best = np.array([index for _, _, index in kept], dtype=int)
    return Labels([x[0] for x in arrays], [x[1:] for x in arrays], best)


def read_best_of_k(rows: Rows, task: Task, tokenizer: Any, vocab_size: int) -> list[Found]:
    """OpenAI's format: ids of `label_tokenizer`, which have to be the policy's."""
    if task.label_tokenizer not in (None, task.base_model):
        with about(f"--label_tokenizer {task.label_tokenizer}"):
            own = transformers.AutoTokenizer.from_pretrained(find_model(task.label_tokenizer))
            if not tokens.same_tokens(tokenizer, own):
                raise InputError("its ids mean other texts to --base_model: see docs/data.md")
        vocab_size = len(own)
    count = sum(name.startswith("sample") for name in rows.column_names)
    names = ["query", *(f"sample{k}" for k in range(max(count, 2)))]
    found = []
    for i, row in enumerate(rows):
        with about(f"row {i}"):
            sequences = [read_ids(row[name], vocab_size) for name in names]
            (best,) = read_ids([row["best"]], len(names) - 1)
        found.append((i, sequences, best))
    return found


def read_ids(value: Any, vocab_size: int) -> list[int]:
    """A list of ids without padding. Raises `InputError` for what is no id."""
    pad = max(OPENAI_PAD, vocab_size)  # larger vocabularies have a pad of their own
    ids = np.array(value)
    numbers = ids.ndim == 1 and ids.dtype.kind in "iuf"
    if not numbers or ((ids % 1 != 0) | (ids < 0) | ((ids >= vocab_size) & (ids != pad))).any():
        raise InputError(f"{value!r:.60} has to be a list of ids from 0 to {vocab_size - 1}")
    return ids[ids != pad].astype(int).tolist()


def read_pairs(rows: Rows, task: Task, tokenizer: Any, ids: TokenIds) -> list[Found]:
    """Pairs of texts as labels with two candidates, the chosen one first (R4), with their end.

    Skipped: prompts that are blank or, in EOS tasks, too long, and empty or equal answers.
    """
    columns = rows.select_columns(PAIR)[:]
    prompts, *texts = ([text or "" for text in column] for column in columns.values())
    full = [(x, y, z) for x, y, z in zip(prompts, *texts, strict=True) if x.strip()]
    if full and all(y.startswith(x) and z.startswith(x) for x, y, z in full):
        raise InputError(
            "chosen and rejected repeat the prompt; python tools/convert.py removes it"
        )
    queries = tokenize_queries(prompts, task, tokenizer)
    if long := sum(len(query) > task.query_length for query in queries):
        say(f"--query_length {task.query_length}: cut {long} of {len(queries)} prompts")
    queries = [query[: task.query_length] for query in queries]
    contexts = [ids.prefix + query + ids.suffix for query in queries]
    options = tokenizer, task.truncate_token, ids.ends
    sides = [tokens.encode_answers(contexts, side, *options) for side in texts]
    found = []
    for i, (query, *answers) in enumerate(zip(queries, *sides, strict=True)):
        if query and all(answers) and answers[0] != answers[1]:
            found.append((i, [query, *answers], 0))
    if skipped := len(queries) - len(found):
        say(f"skipped {skipped} of {len(queries)} pairs: blank, too long, or equal answers")
    return found
