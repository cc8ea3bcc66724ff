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
from machinery import chat
from machinery.cli import InputError, say
from machinery.functions import load_function, wanted_columns
from utils import TokenIds, pad_left

if TYPE_CHECKING:
    import datasets

CLEAN = DATA / "clean.py"
SMALL_TABLE = 2**15  # tokenize at least this many rows: it takes a second or two


def load_texts(task: Task, *columns: str, tokenizer: Any = None) -> "datasets.Dataset":
    """The rows of `query_dataset`, at most `num_queries`. Raises `InputError` for other columns.

    Columns hold texts or, with a `tokenizer`, lists of messages for its chat template.
    """
    from machinery.sources import load_rows  # datasets takes a second to import

    rows = load_rows(task.query_dataset, "--query_dataset")
    for name in columns:
        if name not in rows.column_names:
            raise InputError(
                f"--query_dataset {task.query_dataset} has no column {name!r}; "
                f"it has {', '.join(rows.column_names)}"
            )
        where = f"--query_dataset {task.query_dataset}: column {name!r}"
        kind = getattr(rows.features[name], "dtype", None)
        if tokenizer and holds_messages(rows, name):
            chat.check_chat(task, tokenizer, where)
        elif kind not in ("string", "large_string", "null"):
            hint = "" if tokenizer else "; to learn the answers in messages, pass --response_column"
            raise InputError(f"{where} has to hold texts, not {rows.features[name]}{hint}")
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

    `table[rows]` → [B, length], padded on the left (G2). `extra` are other columns of these rows.
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
        """The values of the columns that reward functions name: column → a list of B values."""
        return self.extra[rows] if self.extra is not None else {}

    def select(self, rows: list[int] | np.ndarray) -> "TokenTable":
        """A table of these rows."""
        extra = self.extra.select(rows) if self.extra is not None else None
        return TokenTable(self.rows.select(rows), self.length, self.pad_id, extra)

    def nonempty(self) -> np.ndarray:
        """The rows that have tokens."""
        import pyarrow.compute

        return np.flatnonzero(pyarrow.compute.list_value_length(self.rows.data.column("tokens")))

    def hold_out(self, n: int, needed: int = 1) -> tuple["TokenTable", "TokenTable"]:
        """A table of the first `n` sequences, and one without them and their duplicates.

        Raises `InputError` if the second has fewer than `needed`.
        """
        held_out = {tuple(tokens) for tokens in self.rows[:n]["tokens"]}
        sequences = (tokens for batch in self.rows.iter(1000) for tokens in batch["tokens"])
        rest = [i for i, tokens in enumerate(sequences) if tuple(tokens) not in held_out]
        if len(rest) < needed:
            left = f"leaves {len(rest)}; training needs {needed}"
            raise InputError(f"holding out {n} of {len(self)} sequences {left}")
        return self.select(list(range(n))), self.select(rest)


def tokenize_rows(
    rows: "datasets.Dataset",
    function: Callable,
    length: int,
    tokenizer: Any,
    pad_id: int,
    cleaning: str | None,
    *settings: Any,
) -> TokenTable:
    """Map `function` (batch of rows → token lists) over all rows, once: the result is cached.

    The cache key is the data, the tokenizer with its chat template, `settings` and the source code.
    A file lock, not a collective, makes other processes wait, since this may take minutes. If
    `cleaning` is None, nothing is cached: each process maps all rows, in memory.
    """
    import datasets

    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend else str(sorted(tokenizer.get_vocab().items()))
    template = f"{tokenizer.chat_template} {tokenizer.special_tokens_map}"
    files = __file__, chat.__file__, inspect.getfile(function)
    code = "".join(Path(file).read_text() for file in files)
    settings = length, pad_id, cleaning, *settings
    key = rows._fingerprint, vocabulary, template, repr(settings), code
    fingerprint = hashlib.sha256("\0".join(key).encode()).hexdigest()[:32]
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    where: dict[str, Any] = dict(cache_file_name=str(cache / f"{fingerprint}.arrow"))
    lock: Any = filelock.FileLock(cache / f"{fingerprint}.lock")
    if cleaning is None:
        where, lock = dict(keep_in_memory=True, load_from_cache_file=False), nullcontext()
    with lock:
        table = rows.map(
            lambda batch: {"tokens": function(batch)},
            batched=True,
            remove_columns=rows.column_names,
            features=datasets.Features({"tokens": datasets.List(datasets.Value("int32"))}),
            new_fingerprint=fingerprint,
            **where,
        )
    return TokenTable(table, length, pad_id)


def clean_texts(texts: Sequence[str | None], task: Task) -> list[str]:
    """Apply `clean_fn`; a missing text becomes an empty one."""
    if not task.clean_fn:
        return [text or "" for text in texts]
    clean = load_function(task.clean_fn)
    cleaned = []
    for text in texts:
        try:
            result = clean(text or "")
        except Exception as error:  # anything that the user's code raises
            raise InputError(f"{task.clean_fn} raised {error!r} for {text!r:.60}") from error
        if not isinstance(result, str):
            raise InputError(f"{task.clean_fn} returned {result!r:.60}, which is not a text")
        cleaned.append(result)
    return cleaned


def cleaning_key(task: Task) -> str | None:
    """What a cache of cleaned texts depends on: the source of data/clean.py.

    None if a user's own function cleans them, which may call anything.
    """
    if not task.clean_fn:
        return ""
    source, _, name = task.clean_fn.rpartition(":")
    return name + CLEAN.read_text() if Path(source) == CLEAN else None


def single_token(tokenizer: Any, text: str | None, flag: str) -> int | None:
    """The id of a text that is one token. Raises `InputError` if it is not.

    The vocabulary comes first: tokenizers such as Llama 2's add a space before what they encode.
    """
    if text is None:
        return None
    known = tokenizer.get_vocab().get(text)
    ids = tokenizer.encode(text, add_special_tokens=False) if known is None else [known]
    if len(ids) != 1:
        raise InputError(f"{flag} {text!r} has to be one token; for this tokenizer it is {ids}")
    return ids[0]


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
) -> list[int] | None:
    """The query inside a passage, or None to skip the passage (P3).

    It begins after the first `start` token, has at most `length` tokens, and ends with the last of
    those for which `ends` is True.
    """
    first = 0
    if start is not None:
        if start not in tokens:
            return None
        first = (tokens.index(start) + 1) % len(tokens)  # OpenAI: a final start token cuts nothing
    tokens = tokens[first : first + length]
    if ends is None:
        return tokens
    stops = [i + 1 for i, end in enumerate(ends[first : first + length]) if end]
    return tokens[: stops[-1]] if stops else None


def keep_last_line(text: str, length: int, tokenizer: Any) -> list[int]:
    """Tokens of a prompt, at most `length`: drop lines before the last one, such as TL;DR:."""
    head, _, last = text.rpartition("\n")
    ids = tokenizer.encode(text, add_special_tokens=False)
    while len(ids) > length and "\n" in head.rstrip():
        head = head.rstrip().rpartition("\n")[0]
        ids = tokenizer.encode(f"{head.rstrip()}\n\n{last}", add_special_tokens=False)
    return ids[:length]


def tokenize_queries(texts: Sequence[Any], task: Task, tokenizer: Any) -> list[list[int] | None]:
    """Texts or lists of messages → queries as token lists; None for those that are skipped (P3).

    Blank ones are, and messages whose last turn is too long. The query of a conversation that ends
    with an answer is what precedes it.
    """
    if any(isinstance(text, list) for text in texts):
        prompts = [chat.drop_answer(messages or []) for messages in texts]
        return [chat.tokenize_prompt(prompt, task.query_length, tokenizer) for prompt in prompts]
    cleaned = clean_texts(texts, task)
    start = single_token(tokenizer, task.start_text, "--start_text")
    wants_offsets = task.end_text is not None
    encoded = tokenizer(cleaned, add_special_tokens=False, return_offsets_mapping=wants_offsets)
    queries: list[list[int] | None] = []
    for i, (text, ids) in enumerate(zip(cleaned, encoded["input_ids"], strict=True)):
        if not text.strip():
            queries.append(None)
            continue
        ends = None
        if task.end_text is not None:
            ends = ends_word(text, encoded["offset_mapping"][i], task.end_text)
        if task.keep_last_line and len(ids) > task.query_length:
            ids = keep_last_line(text, task.query_length, tokenizer)
        queries.append(cut_query(ids, task.query_length, start, ends) or None)
    return queries


def load_queries(
    task: Task,
    tokenizer: Any,
    ids: TokenIds,
    max_queries: int,
    reward_fn: str | None = None,
    gold_fn: str | None = None,
) -> TokenTable:
    """The table of queries [N, Q] (G2), of a random sample of texts if there are many.

    `max_queries` are as many as the run can use. The table keeps the columns that the reward
    functions name. Raises `InputError` if one is missing, or if no text gives a query.
    """
    if task.keep_last_line and task.end_text is not None:
        raise InputError("end_text does not work with keep_last_line; pass --no-keep_last_line")
    texts = load_texts(task, task.query_column, tokenizer=tokenizer)
    wanted = wanted_columns(reward_fn, gold_fn, task.query_dataset, texts.column_names)
    order = np.random.default_rng(0).permutation(len(texts))
    texts = texts.select(order[: max(max_queries, SMALL_TABLE)])
    single_token(tokenizer, task.start_text, "--start_text")

    def queries(batch: dict[str, list]) -> list[list[int]]:
        found = tokenize_queries(batch[task.query_column], task, tokenizer)
        return [ids or [] for ids in found]  # one for each row: columns stay beside their queries

    cut = task.keep_last_line, task.start_text, task.end_text
    settings = cleaning_key(task), task.query_column, *cut
    table = tokenize_rows(texts, queries, task.query_length, tokenizer, ids.pad, *settings)
    kept = table.nonempty()
    if not len(kept):
        raise InputError(
            f"--query_dataset {task.query_dataset} gives no query: all {len(texts)} texts are "
            f"blank, lack start_text={task.start_text!r} or end_text={task.end_text!r}, or are "
            f"messages whose last turn is longer than query_length={task.query_length}"
        )
    table.extra = texts.select_columns(wanted) if wanted else None
    table = table.select(kept)
    say_skipped(table, texts, task)
    return table


def say_skipped(table: TokenTable, rows: "datasets.Dataset", task: Task) -> None:
    """Print how many lists of messages gave no sequence."""
    if holds_messages(rows, task.query_column) and len(table) < len(rows):
        skipped = f"skipped {len(rows) - len(table)} of {len(rows)} rows: blank or too long"
        say(f"--query_dataset {task.query_dataset}: {skipped}")
