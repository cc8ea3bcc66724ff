"""Human preferences → token sequences of queries and candidate responses.

Two formats: OpenAI's files of token ids (`query`, `sample0`, ..., `best`), and pairs of texts or
messages (`prompt`, `chosen`, `rejected`). Shapes: `B` labels, `K` candidates per label.
"""

import re
from dataclasses import dataclass
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor

from data.tasks import Task
from machinery import tokens
from machinery.cli import InputError, about, say
from machinery.queries import tokenize_queries
from machinery.sources import check_source, load_rows
from utils import TokenIds, pad_left, pad_right

if TYPE_CHECKING:
    import datasets

OPENAI_PAD = 50259  # pads OpenAI's files: two past GPT-2's vocabulary
ASSISTANT = "\n\nAssistant:"  # begins an answer in Anthropic's hh-rlhf


@dataclass(frozen=True)
class Labels:
    """Comparisons: a query, K responses, and which of them a human preferred.

    Sequences have their own lengths and are padded per batch: one long answer costs no memory.
    """

    queries: list[np.ndarray]  # N token sequences
    responses: list[list[np.ndarray]]  # N × K token sequences
    best: np.ndarray  # [N] index of the preferred response

    def __len__(self) -> int:
        return len(self.best)

    def batch(self, rows: np.ndarray, pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, Q], padded on the left; responses [B, K, R], on the right; best [B]."""
        queries = [self.queries[row].tolist() for row in rows]
        responses = [ids.tolist() for row in rows for ids in self.responses[row]]
        padded = pad_right(responses, pad_id)
        padded = padded.view(len(rows), -1, padded.shape[1])
        best = torch.as_tensor(self.best[rows]).long()
        return pad_left(queries, max(map(len, queries)), pad_id), padded, best

    def longest(self) -> int:
        """Tokens of the longest query with one of its responses."""
        pairs = zip(self.queries, self.responses, strict=True)
        return max(len(query) + max(map(len, responses)) for query, responses in pairs)

    def held_out(self, num_train: int) -> np.ndarray:
        """The rows after the first `num_train` whose query is none of theirs."""
        seen = {query.tobytes() for query in self.queries[:num_train]}
        rest = range(num_train, len(self))
        return np.array([i for i in rest if self.queries[i].tobytes() not in seen], dtype=int)


def load_labels(task: Task, tokenizer: Any, ids: TokenIds) -> Labels:
    """Load `label_dataset` as token ids of `tokenizer` (R4)."""
    rows = load_rows(str(task.label_dataset), "--label_dataset")
    with about(f"--label_dataset {task.label_dataset}"):
        if {"chosen", "rejected"} <= set(rows.column_names):
            return load_pairs(rows, task, tokenizer, ids)
        if "best" not in rows.column_names:
            raise InputError(
                f"{rows.column_names} have neither chosen and rejected nor best; docs/data.md makes "
                "pairs of rows with a label (KTO)"
            )
        name = task.label_tokenizer
        if name in (None, task.base_model):
            return load_best_of_k(rows, ids.pad)
        with about(f"--label_tokenizer {name}"):
            check_source(name)
            source = transformers.AutoTokenizer.from_pretrained(name)
        labels = load_best_of_k(rows, len(source))
        same = tokens.same_tokens(tokenizer, source)
        return labels if same else translate_labels(labels, source, tokenizer)


# ---------------------------------------------------------------------------------- OpenAI's files


def load_best_of_k(rows: "datasets.Dataset", vocabulary: int) -> Labels:
    """OpenAI's format: lists of ids below `vocabulary`, padded with `OPENAI_PAD`."""
    samples = [name for name in rows.column_names if re.fullmatch(r"sample\d+", name)]
    names = [f"sample{k}" for k in range(max(len(samples), 2))]
    pad = max(OPENAI_PAD, vocabulary)
    labels = Labels([], [], np.zeros(len(rows), dtype=int))
    for i, row in enumerate(rows):
        with about(f"row {i}"):
            labels.queries.append(read_ids(row["query"], vocabulary, pad))
            labels.responses.append([read_ids(row[name], vocabulary, pad) for name in names])
            labels.best[i] = read_ids([row["best"]], len(names)).item()
    return labels


def read_ids(value: Any, vocabulary: int, pad: int | None = None) -> np.ndarray:
    """A list of ids without padding. Raises `InputError` for fractions and ids out of range."""
    ids = np.asarray(value, dtype=np.float64)
    wrong = (ids != np.floor(ids)) | (ids < 0) | ((ids >= vocabulary) & (ids != pad))
    if ids.ndim != 1 or wrong.any():
        raise InputError(f"{value!r:.60} is not a list of ids below {vocabulary}")
    return ids[ids != pad].astype(np.int32)


def translate_labels(labels: Labels, source: Any, tokenizer: Any) -> Labels:
    """The same texts in ids of another tokenizer; nothing is cut."""

    def convert(sequences: list[np.ndarray]) -> list[np.ndarray]:
        padded = pad_right([ids.tolist() for ids in sequences], -1)
        return to_arrays(tokens.translate(padded, source, -1, tokenizer))

    flat = convert([ids for candidates in labels.responses for ids in candidates])
    k = len(labels.responses[0])
    responses = [flat[i : i + k] for i in range(0, len(flat), k)]
    return Labels(convert(labels.queries), responses, labels.best)


def to_arrays(sequences: list[list[int]]) -> list[np.ndarray]:
    """Token lists as arrays, which take a tenth of the memory."""
    return [np.array(ids, dtype=np.int32) for ids in sequences]


# ------------------------------------------------------------------------------------------- pairs


def load_pairs(rows: "datasets.Dataset", task: Task, tokenizer: Any, ids: TokenIds) -> Labels:
    """Pairs as labels with two candidates, the chosen one first (R4).

    Each response ends with the truncate token. Prompts that are too long lose the end, dialogues
    their beginning, and messages their first turns. Rows that are blank or whose last turn is too
    long are skipped.
    """
    names = [name for name in ("prompt", "chosen", "rejected") if name in rows.column_names]
    pairs = []
    for i, row in enumerate(rows.select_columns(names)):
        with about(f"row {i}"):
            pairs.append(split_pair(row, tokenizer))
    if any(isinstance(prompt, list) for prompt, _, _ in pairs):
        tokens.check_chat(task, tokenizer)
    prompts = [
        tokens.render(x, tokenizer, prompt=True) if isinstance(x, list) else x for x, _, _ in pairs
    ]
    queries = tokenize_queries(prompts, task, tokenizer)
    full = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    sides = [tokenizer([pair[i] for pair in pairs], add_special_tokens=False) for i in (1, 2)]
    labels = Labels([], [], np.zeros(0, dtype=int))
    cut = 0
    for i, query in enumerate(queries):
        too_long = len(full[i]) > task.query_length
        if isinstance(prompt := pairs[i][0], list):
            query = tokens.tokenize_prompt(prompt, task.query_length, tokenizer)
        elif too_long and "prompt" not in names:
            query = full[i][-task.query_length :]
        pair = [tokens.with_end(side["input_ids"][i], ids.truncate) for side in sides]
        if query and all(pair):
            labels.queries.append(np.array(query, dtype=np.int32))
            labels.responses.append(to_arrays(pair))
            cut += too_long
    if skipped := len(pairs) - len(labels.queries):
        say(f"skipped {skipped} of {len(pairs)} pairs: blank or too long")
    if cut:
        say(f"cut {cut} of {len(pairs)} prompts to query_length={task.query_length}")
    return Labels(labels.queries, labels.responses, np.zeros(len(labels.queries), dtype=int))


def split_pair(row: Any, tokenizer: Any) -> tuple[str | list[dict], str, str]:
    """Prompt, chosen and rejected as texts; the prompt of messages as messages.

    Dialogues without a prompt part at their last common `\n\nAssistant:`, or else at a space.
    """
    prompt, chosen, rejected = (row.get(name) for name in ("prompt", "chosen", "rejected"))
    if isinstance(chosen, list) and isinstance(rejected, list):
        return split_messages(prompt, chosen, rejected, tokenizer)
    if not all(isinstance(text, str) for text in (chosen, rejected, row.get("prompt", ""))):
        raise InputError(f"prompt, chosen and rejected have to be texts, not {row!r:.60}")
    if "prompt" in row:
        return prompt, chosen, rejected
    common = commonprefix([chosen, rejected])
    turn = common.rfind(ASSISTANT)
    end = turn + len(ASSISTANT) if turn >= 0 else len(re.sub(r"\s*\S*$", "", common))
    return chosen[:end], chosen[end:], rejected[end:]


def split_messages(
    prompt: str | list | None, chosen: list, rejected: list, tokenizer: Any
) -> tuple[str | list[dict], str, str]:
    """The prompt's messages, and the texts of both answers by the chat template.

    The prompt is a list, or a text or nothing if the two lists begin with its messages.
    """
    if not isinstance(prompt, list):
        same = [a == b for a, b in zip(chosen[:-1], rejected[:-1], strict=False)]
        shared = chosen[: (same + [False]).index(False)]
        prompt = shared or ([{"role": "user", "content": prompt}] if prompt else [])
    good, bad = (tokens.render_answer(prompt, side, tokenizer) for side in (chosen, rejected))
    return prompt or "", good, bad
