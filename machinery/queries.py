"""Texts → a table of queries.

Shapes: `B` sequences, `Q` query tokens. Tags such as (P3) are explained in docs/details.md.
"""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np
from torch import Tensor

from data.tasks import DATA, Task
from machinery.cli import InputError, about, say
from machinery.functions import load_function
from machinery.sources import load_rows
from machinery.tokens import FOR_TEXTS, check_chat, drop_answer, single_token, tokenize_prompt
from utils import TokenIds, pad_left

if TYPE_CHECKING:
    import datasets

CLEAN = DATA / "clean.py"
IN_KEY = ["query_column", "query_length", "response_column", "response_length", "eos_task"]
SMALL_TABLE = 2**15  # tokenize at least this many rows: it takes a second or two


def load_texts(task: Task, *columns: str, tokenizer: Any = None) -> "datasets.Dataset":
    """The rows of `query_dataset`, at most `num_queries`, which have to have these columns.

    They hold texts or, with a `tokenizer`, lists of messages for its chat template.
    """
    rows = load_rows(task.query_dataset, "--query_dataset")
    with about(f"--query_dataset {task.query_dataset}"):
        rows.select_columns(list(columns))  # names those that there are, if one is missing
        if tokenizer and any(holds_messages(rows, name) for name in columns):
            check_chat(task, tokenizer)
        elif tokenizer and tokenizer.chat_template and not task.query_prefix + task.query_suffix:
            others = [name for name in rows.column_names if holds_messages(rows, name)]
            hint = f"pass --query_column {others[0]}" if others else "see Chat in docs/data.md"
            say(f"warning: texts of --query_column {task.query_column} get no template; {hint}")
    if len(rows) > task.num_queries:
        chosen = np.random.default_rng(0).choice(len(rows), task.num_queries, replace=False)
        rows = rows.select(np.sort(chosen))
    return rows


def holds_messages(rows: "datasets.Dataset", column: str) -> bool:
    """Whether a column holds lists of messages. `Json` is the type of messages that differ."""
    import datasets

    feature = rows.features[column]
    is_list = isinstance(feature, (datasets.List, datasets.LargeList))
    return is_list and not isinstance(feature.feature, datasets.Value)


@dataclass
class TokenTable:
    """Token sequences in a memory-mapped file that the processes of a machine share.

    `table[rows]` → [B, length], padded on the left (G2). `extra` are the data set's own columns.
    """

    rows: "datasets.Dataset"
    length: int
    pad_id: int
    extra: "datasets.Dataset | None" = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: np.ndarray | slice) -> Tensor:
        return pad_left(self.rows[rows]["tokens"], self.length, self.pad_id)

    def columns(self, rows: np.ndarray | slice = slice(None)) -> dict[str, list]:
        """The values of the data set's columns in these rows: name → a list of B values."""
        return self.extra[rows] if self.extra is not None else {}

    def select(self, rows: list[int] | np.ndarray) -> "TokenTable":
        """A table of these rows."""
        extra = self.extra.select(rows) if self.extra is not None else None
        return TokenTable(self.rows.select(rows), self.length, self.pad_id, extra)

    def hold_out(self, n: int, needed: int = 1) -> tuple["TokenTable", "TokenTable"]:
        """A table of the first `n` sequences, and one without them and their duplicates.

        Raises `InputError` if the second has fewer than `needed`.
        """
        held_out = {tuple(tokens) for tokens in self.rows[:n]["tokens"]}
        sequences = (tokens for batch in self.rows.iter(1000) for tokens in batch["tokens"])
        rest = [i for i, tokens in enumerate(sequences) if tuple(tokens) not in held_out]
        if len(rest) < needed:
            left = f"leaves {len(rest)}; training needs {needed}"
            raise InputError(f"--query_dataset: holding out {n} of {len(self)} sequences {left}")
        return self.select(list(range(n))), self.select(rest)


def tokenize_rows(
    rows: "datasets.Dataset",
    function: Callable,
    length: int,
    task: Task,
    tokenizer: Any,
    ids: TokenIds,
) -> TokenTable:
    """Map `function` (batch of rows → token lists) over all rows, once: the result is cached.

    The cache key is the data, the tokenizer with its chat template, what the task says about texts,
    and the source code. A file lock, not a collective, makes other processes wait, since this may
    take minutes. Nothing is cached if a user's own function, which may call anything, cleans texts.
    """
    import datasets

    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend else str(sorted(tokenizer.get_vocab().items()))
    template = f"{tokenizer.chat_template} {tokenizer.special_tokens_map}"
    settings = [function.__name__, length, ids, *(getattr(task, x) for x in (*FOR_TEXTS, *IN_KEY))]
    files = __file__, inspect.getfile(tokenize_prompt), inspect.getfile(function), CLEAN
    code = "".join(Path(file).read_text("utf-8") for file in files)
    key = rows._fingerprint, vocabulary, template, repr(settings), code
    fingerprint = hashlib.sha256("\0".join(key).encode()).hexdigest()[:32]
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    where: dict[str, Any] = dict(cache_file_name=str(cache / f"{fingerprint}.arrow"))
    lock: Any = filelock.FileLock(cache / f"{fingerprint}.lock")
    if task.clean_fn and Path(task.clean_fn.rpartition(":")[0]) != CLEAN:
        where, lock = dict(keep_in_memory=True, load_from_cache_file=False), nullcontext()
    with about(f"--query_dataset {task.query_dataset}"), lock:
        table = rows.map(
            lambda batch: {"tokens": function(batch)},
            batched=True,
            remove_columns=rows.column_names,
            features=datasets.Features({"tokens": datasets.List(datasets.Value("int32"))}),
            new_fingerprint=fingerprint,
            **where,
        )
    return TokenTable(table, length, ids.pad)


def clean_texts(texts: Sequence[str | None], task: Task) -> list[str]:
    """Apply `clean_fn`; a missing text becomes an empty one."""
    if not task.clean_fn:
        return [text or "" for text in texts]
    with about(f"--clean_fn {task.clean_fn}"):
        clean = load_function(task.clean_fn)
        return [clean(text or "") for text in texts]


def ends_word(text: str, offsets: list[tuple[int, int]], end: str) -> list[bool]:
    """For each token (begin, stop): whether the text up to it ends with `end` and a word (P3).

    Both of GPT-2's periods, "." and " .", end a sentence; those in "1.5" or "CNN.com" do not.
    """
    found = []
    for _, stop in offsets:
        closes_word = end.isspace() or not text[stop : stop + 1].strip()
        found.append(closes_word and text.endswith(end, 0, stop))
    return found


def cut_query(
    tokens: list[int], length: int, start: int | None, ends: list[bool] | None
) -> list[int]:
    """The query inside a passage, empty if there is none (P3).

    It begins after the first `start` token, has at most `length` tokens, and ends with the last of
    those for which `ends` is True.
    """
    first = 0
    if start is not None:
        if start not in tokens:
            return []
        first = (tokens.index(start) + 1) % len(tokens)  # OpenAI: a final start token cuts nothing
    tokens = tokens[first : first + length]
    if ends is None:
        return tokens
    stops = [i + 1 for i, end in enumerate(ends[first : first + length]) if end]
    return tokens[: stops[-1]] if stops else []


def keep_last_line(text: str, length: int, tokenizer: Any) -> list[int]:
    """Tokens of a prompt, at most `length`: drop lines before the last one, such as TL;DR:."""
    head, _, last = text.rpartition("\n")
    ids = tokenizer.encode(text, add_special_tokens=False)
    while len(ids) > length and "\n" in head.rstrip():
        head = head.rstrip().rpartition("\n")[0]
        ids = tokenizer.encode(f"{head.rstrip()}\n\n{last}", add_special_tokens=False)
    return ids[:length]


def tokenize_queries(texts: Sequence[Any], task: Task, tokenizer: Any) -> list[list[int]]:
    """Texts or lists of messages → queries as token lists, empty for those that are skipped (P3).

    Blank ones are, and messages whose last turn is too long. The query of a conversation that ends
    with an answer is what precedes it.
    """
    if any(isinstance(text, list) for text in texts):
        prompts = [drop_answer(messages or []) for messages in texts]
        return [tokenize_prompt(prompt, task.query_length, tokenizer) for prompt in prompts]
    cleaned = clean_texts(texts, task)
    start = single_token(tokenizer, task.start_text, "--start_text")
    wants_offsets = task.end_text is not None
    encoded = tokenizer(cleaned, add_special_tokens=False, return_offsets_mapping=wants_offsets)
    queries = []
    for i, (text, ids) in enumerate(zip(cleaned, encoded["input_ids"], strict=True)):
        ends = None
        if task.end_text is not None:
            ends = ends_word(text, encoded["offset_mapping"][i], task.end_text)
        if task.keep_last_line and len(ids) > task.query_length:
            ids = keep_last_line(text, task.query_length, tokenizer)
        queries.append(cut_query(ids, task.query_length, start, ends) if text.strip() else [])
    return queries


def load_queries(task: Task, tokenizer: Any, ids: TokenIds, max_queries: int) -> TokenTable:
    """The table of queries [N, Q] (G2), of a random sample of texts if there are many.

    `max_queries` are as many as the run can use. The table keeps all columns of the data set.
    """
    import pyarrow.compute

    if task.keep_last_line and task.end_text is not None:
        raise InputError("end_text does not work with keep_last_line; pass --no-keep_last_line")
    texts = load_texts(task, task.query_column, tokenizer=tokenizer)
    order = np.random.default_rng(0).permutation(len(texts))
    texts = texts.select(order[: max(max_queries, SMALL_TABLE)])

    def queries(batch: dict[str, list]) -> list[list[int]]:
        return tokenize_queries(batch[task.query_column], task, tokenizer)

    table = tokenize_rows(texts, queries, task.query_length, task, tokenizer, ids)
    table.extra = texts  # a row for each query, also for those that are skipped
    lengths = pyarrow.compute.list_value_length(table.rows.data.column("tokens"))
    table = table.select(np.flatnonzero(lengths))
    say_skipped(len(texts) - len(table), len(texts), task)
    return table


def say_skipped(skipped: int, rows: int, task: Task) -> None:
    """Print how many rows gave no sequence."""
    if skipped:
        say(f"--query_dataset {task.query_dataset}: skipped {skipped} of {rows} rows")
