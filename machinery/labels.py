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
from machinery import chat
from machinery.cli import InputError, say
from machinery.data import tokenize_queries
from machinery.hub import loading_model
from machinery.rewards import same_tokens, translate
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
        lengths = (
            len(query) + max(map(len, responses))
            for query, responses in zip(self.queries, self.responses, strict=True)
        )
        return max(lengths)

    def held_out(self, num_train: int) -> np.ndarray:
        """The rows after the first `num_train` whose query is none of theirs."""
        seen = {query.tobytes() for query in self.queries[:num_train]}
        rest = range(num_train, len(self))
        return np.array([i for i in rest if self.queries[i].tobytes() not in seen], dtype=int)


def load_labels(task: Task, tokenizer: Any, ids: TokenIds) -> Labels:
    """Load `label_dataset` as token ids of `tokenizer` (R4). Raises `InputError` with the row."""
    from machinery.sources import load_rows  # datasets takes a second to import

    if task.label_dataset is None:
        raise InputError(
            f"task {task.task} needs no reward model, and has no labels; pass --label_dataset"
        )
    rows = load_rows(task.label_dataset, "--label_dataset")
    if {"chosen", "rejected"} <= set(rows.column_names):
        return load_pairs(rows, task, tokenizer, ids)
    source = load_label_tokenizer(task)
    vocabulary = ids.pad if source is None else len(source)
    labels = load_best_of_k(rows, vocabulary, f"--label_dataset {task.label_dataset}")
    if source is None or same_tokens(tokenizer, source):
        return labels
    return translate_labels(labels, source, tokenizer)


# ---------------------------------------------------------------------------------- OpenAI's files


def load_label_tokenizer(task: Task) -> Any | None:
    """The tokenizer that made the ids of the labels; None if it is the model's own."""
    name = task.label_tokenizer
    if name is None or name == task.base_model:
        return None
    files = "config.json tokenizer.json tokenizer_config.json"
    try:
        with loading_model(name, "--label_tokenizer", files=files):
            return transformers.AutoTokenizer.from_pretrained(name)
    except InputError as error:
        raise InputError(
            f"--label_dataset {task.label_dataset} holds ids of {name}'s tokenizer. {error}\n"
            f"If they are the model's own ids, pass --label_tokenizer {task.base_model}"
        ) from error


def load_best_of_k(rows: "datasets.Dataset", vocabulary: int, where: str) -> Labels:
    """OpenAI's format: lists of ids below `vocabulary`, padded with `OPENAI_PAD`."""
    samples = [name for name in rows.column_names if re.fullmatch(r"sample\d+", name)]
    names = [f"sample{k}" for k in range(max(len(samples), 2))]
    missing = [name for name in ("query", "best", *names) if name not in rows.column_names]
    if missing:
        raise InputError(
            f"{where} has no {', '.join(missing)}; it needs query, sample0, sample1, "
            "..., best, or prompt, chosen, rejected"
        )
    queries, responses, best = [], [], []
    for i, row in enumerate(rows):
        query, *candidates = (
            read_ids(row[name], vocabulary, f"{where} row {i}: {name}")
            for name in ("query", *names)
        )
        if not len(query):
            raise InputError(f"{where} row {i}: query has only padding")
        if type(row["best"]) not in (int, float) or row["best"] not in range(len(names)):
            raise InputError(
                f"{where} row {i}: best={row['best']!r} is not in 0...{len(names) - 1}"
            )
        queries.append(query)
        responses.append(candidates)
        best.append(int(row["best"]))
    return Labels(queries, responses, np.array(best))


def read_ids(value: Any, vocabulary: int, where: str) -> np.ndarray:
    """A list of token ids without its padding. Raises `InputError` for anything else."""
    pad = max(OPENAI_PAD, vocabulary)
    try:
        ids = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        ids = np.empty((0, 0))
    if isinstance(value, str) or ids.ndim != 1 or (ids != np.floor(ids)).any():
        raise InputError(f"{where}={value!r:.60} is not a list of token ids")
    wrong = (ids < 0) | ((ids >= vocabulary) & (ids != pad))
    if wrong.any():
        found = ids[wrong][0]
        raise InputError(f"{where} has id {found:g}; ids are below {vocabulary}, padding is {pad}")
    return ids[ids != pad].astype(np.int32)


def translate_labels(labels: Labels, source: Any, tokenizer: Any) -> Labels:
    """The same texts in ids of another tokenizer; nothing is cut."""

    def convert(sequences: list[np.ndarray]) -> list[np.ndarray]:
        padded = pad_right([ids.tolist() for ids in sequences], -1)
        return to_arrays(translate(padded, source, -1, tokenizer))

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
    long are skipped. Raises `InputError` with the row.
    """
    where = f"--label_dataset {task.label_dataset}"
    names = [name for name in ("prompt", "chosen", "rejected") if name in rows.column_names]
    texts = []
    dialogues = []
    for i, row in enumerate(rows.select_columns(names)):
        try:
            texts.append(split_pair(row, tokenizer))
        except InputError as error:
            raise InputError(f"{where} row {i}: {error}") from error
        dialogues.append("prompt" not in row)
    messages = [prompt if isinstance(prompt, list) else None for prompt, _, _ in texts]
    if any(messages):
        chat.check_chat(task, tokenizer, where)
    prompts = [
        chat.render(x, tokenizer, prompt=True) if isinstance(x, list) else x for x, *_ in texts
    ]
    queries = tokenize_queries(prompts, task, tokenizer)
    full = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    sides = [tokenizer([text[i] for text in texts], add_special_tokens=False) for i in (1, 2)]
    labels = Labels([], [], np.zeros(0, dtype=int))
    cut = 0
    for i, query in enumerate(queries):
        too_long = len(full[i]) > task.query_length
        if prompt := messages[i]:
            query = chat.tokenize_prompt(prompt, task.query_length, tokenizer)
        elif too_long and dialogues[i]:
            query = full[i][-task.query_length :]
        pair = [with_end(side["input_ids"][i], ids.truncate) for side in sides]
        if query and all(pair):
            labels.queries.append(np.array(query, dtype=np.int32))
            labels.responses.append(to_arrays(pair))
            cut += too_long
    skipped = len(queries) - len(labels.queries)
    if skipped == len(queries):
        raise InputError(f"{where} has no usable rows: all {skipped} are blank or too long")
    if skipped:
        say(f"{where}: skipped {skipped} of {len(queries)} rows: blank or too long")
    if cut:
        say(f"{where}: cut {cut} of {len(queries)} prompts to query_length={task.query_length}")
    return Labels(labels.queries, labels.responses, np.zeros(len(labels.queries), dtype=int))


def with_end(ids: list[int], end: int | None) -> list[int]:
    """A response with its end token, which some datasets already have."""
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def split_pair(row: Any, tokenizer: Any) -> tuple[str | list[dict], str, str]:
    """Prompt, chosen and rejected as texts; the prompt of messages as messages.

    Raises `InputError` for other forms.
    """
    prompt, chosen, rejected = (row.get(name) for name in ("prompt", "chosen", "rejected"))
    lists = isinstance(chosen, list) and isinstance(rejected, list)
    if not lists and not (isinstance(chosen, str) and isinstance(rejected, str)):
        raise InputError("chosen and rejected have to be two texts or two lists of messages")
    is_prompt = isinstance(prompt, str) or (lists and isinstance(prompt, list))
    if "prompt" in row and not is_prompt:
        raise InputError(f"prompt={prompt!r:.60} has to be a text or a list of messages")
    if lists:
        return split_messages(prompt, chosen, rejected, tokenizer)
    if "prompt" in row:
        return prompt, chosen, rejected
    return split_texts(chosen, rejected)


def split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split two dialogues at their last common `\n\nAssistant:`, or else at a common space."""
    common = commonprefix([chosen, rejected])
    turn = common.rfind(ASSISTANT)
    end = turn + len(ASSISTANT) if turn >= 0 else len(re.sub(r"\s*\S*$", "", common))
    return chosen[:end], chosen[end:], rejected[end:]


def split_messages(
    prompt: str | list | None, chosen: list, rejected: list, tokenizer: Any
) -> tuple[list[dict], str, str]:
    """The prompt's messages, and the texts of both answers by the chat template.

    The prompt is a list, or a text or nothing if the two lists begin with its messages.
    """
    chat.check_messages([*chosen, *rejected])
    if not isinstance(prompt, list):
        same = [a == b for a, b in zip(chosen[:-1], rejected[:-1], strict=False)]
        shared = chosen[: (same + [False]).index(False)]
        prompt = shared or ([{"role": "user", "content": prompt}] if prompt else [])
    if not prompt:
        raise InputError("chosen and rejected have no message in common that could be the prompt")
    good, bad = (chat.render_answer(prompt, side, tokenizer) for side in (chosen, rejected))
    return prompt, good, bad
