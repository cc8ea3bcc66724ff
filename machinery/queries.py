"""Texts → tables of token sequences: queries, and what sft.py learns.

Shapes: `B` sequences of `T` tokens, `Q` query tokens. Tags such as (P3): docs/details.md.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import filelock
import numpy as np
from pyarrow import compute
from torch import Tensor

from data.tasks import DATA, Task
from machinery import tokens
from machinery.cli import InputError, about, say
from machinery.rewards import check_columns
from machinery.sources import MESSAGES, Rows, convert_command, load_function, load_rows
from utils import TokenIds, pad_left

FLAG = "--query_dataset"
CLEAN = DATA / "clean.py"
# A dialogue of hh-rlhf with its last answer:
ANSWERED = re.compile(r"\n\nHuman:.*\n\nAssistant:(?!.*\n\nHuman:)\s*\S", re.DOTALL)


def load_queries(task: Task, tokenizer: Any, ids: TokenIds) -> "TokenTable":
    """The table of queries [N, Q] (G2), shuffled, with all columns of the data set."""
    column, length = task.query_column, task.query_length
    rows = load_rows(task.query_dataset, FLAG, task.num_queries, query_column=column)
    order = np.random.default_rng(0).permutation(len(rows))
    check_columns(rows, task)

    def queries(batch: dict[str, list]) -> list[list[int]]:
        return tokenize_queries(batch[column], task, tokenizer)

    flag = "--query_length"
    return tokenize_rows(rows, queries, [column], length, task, tokenizer, ids.pad, flag, order)


def count_texts(
    batch: dict[str, list], numbers: Sequence, columns: list[str], source: str, tokenizer: Any
) -> Counter[str]:
    """How many texts are null or blank, or hold special tokens, perhaps not meant as such.

    The first column has prompts, others answers, whose end may be such a token. Raises `InputError`
    for what is no text, and for JSON of messages. `numbers`: of the rows in the source.
    """
    names = tokens.special_tokens(tokenizer).values()
    special = re.compile("|".join(map(re.escape, names)) or "$^")
    found = Counter[str]()
    for column in columns:
        for number, text in zip(numbers, batch[column], strict=True):
            if text is None:
                found[f"{column} null"] += 1
                continue
            if not isinstance(text, str) or re.match(MESSAGES, text):
                use = f"not a text; use {convert_command(source)}"
                raise InputError(f"{column} of row {number} is {text!r:.60}, {use}")
            text = text.rstrip()
            token = special.search(text)
            if not text:
                found[f"{column} blank"] += 1
            elif token and (column == columns[0] or token.end() < len(text)):
                found[f"{column} with {token[0]!r}"] += 1
    return found


def say_counts(found: Counter[str], rows: str, prompt: str, tokenizer: Any) -> None:
    """Say what `count_texts` has found in these rows."""
    words = [f"{number} {what}" for what, number in found.items()]
    if tokenizer.chat_template and not any(what.startswith(f"{prompt} with") for what in found):
        words.append(f"no {prompt} with special tokens of the chat template")
    if words:
        say(f"{rows}: {', '.join(words)} (docs/data.md)")


def tokenize_queries(texts: Sequence[Any], task: Task, tokenizer: Any) -> list[list[int]]:
    """Texts → queries; empty for blank texts and, in EOS tasks, for those too long (P3)."""
    texts = clean_texts(texts, task)
    for text in filter(ANSWERED.match, texts):
        use = convert_command(task.query_dataset)
        raise InputError(f"the answer is in a query: {text[-60:]!r}; use {use}")
    begin = [] if task.query_prefix else tokens.bos(tokenizer)  # with a prefix, BOS is in that
    length = task.query_length - len(begin)
    if task.keep_last_line:
        texts = [drop_lines(text, length, tokenizer) for text in texts]
    start = tokens.single_token(tokenizer, task.start_text, "--start_text")
    end = task.end_text
    backend = getattr(tokenizer, "backend_tokenizer", None)
    offsets: list[Any] = []
    if backend and end is None and not task.query_prefix:  # the same ids, faster
        encoded = backend.encode_batch_fast(texts, add_special_tokens=False)
        found = [text.ids for text in encoded]
    else:
        before = [task.query_prefix] * len(texts)
        found, offsets, _ = tokens.encode_after(before, texts, tokenizer, offsets=end is not None)
    queries: list[list[int]] = []
    for i, text in enumerate(texts):
        query = found[i] if text.strip() else []
        if end is not None:
            query = cut_query(query, length, start, ends_word(text, offsets[i], end))
        elif start is not None:
            query = cut_query(query, len(query), start, None)  # `tokenize_rows` cuts, and counts
        query = tokens.with_bos(query, begin)
        if task.eos_task and len(query) > task.query_length:
            query = []
        queries.append(query)
    return queries


def clean_texts(texts: Sequence[Any], task: Task) -> list[str]:
    """Apply `clean_fn`; a missing text becomes an empty one."""
    texts = [text or "" for text in texts]
    if task.clean_fn:
        with about(f"--clean_fn {task.clean_fn}"):
            texts = [*map(load_function(task.clean_fn), texts)]
    return texts


def drop_lines(text: str, length: int, tokenizer: Any) -> str:
    """Shorten a long prompt before its last line, such as TL;DR:, as OpenAI does.

    Its last lines go. The first one, or that of a Reddit post, loses its last characters.
    """
    encode = partial(tokenizer.encode, add_special_tokens=False)
    head = text.rstrip().rpartition("\n")[0].removesuffix("\n")
    rest = text[len(head) :]
    while head and (excess := len(encode(head + rest)) - length) > 0:
        before, _, line = head.rpartition("\n")
        if not before or line.startswith("POST:"):
            before = head[:-excess]
        head = before
    return head + rest


def ends_word(text: str, offsets: list[tuple[int, int]], end: str) -> list[bool]:
    """For each token: whether the text through it ends with `end`, at the end of a word (P3).

    Both of GPT-2's periods, "." and " .", end a sentence; those in "1.5" or "CNN.com" do not.
    """
    found = []
    for _, stop in offsets:
        is_last = end.isspace() or not text[stop : stop + 1].strip()
        found.append(is_last and text.endswith(end, 0, stop))
    return found


def cut_query(ids: list[int], length: int, start: int | None, ends: list[bool] | None) -> list[int]:
    """The query inside a passage, empty if there is none (P3).

    It begins after the first `start` token, has at most `length` tokens, and ends with the last of
    those for which `ends` is True.
    """
    first = 0
    if start is not None:
        if start not in ids:
            return []
        first = (ids.index(start) + 1) % len(ids)  # OpenAI: a final start token cuts nothing
    last = min(first + length, len(ids))
    while ends is not None and last > first and not ends[last - 1]:
        last -= 1
    return ids[first:last]


def tokenize_rows(
    rows: Rows,
    function: Callable,
    columns: list[str],
    length: int,
    task: Task,
    tokenizer: Any,
    pad_id: int,
    flag: str,
    order: Any = slice(None),
) -> "TokenTable":
    """Map `function` (batch of rows → token lists) over rows; drop those without tokens.

    It reads the texts of `columns`. One process of a machine computes and caches it; the others
    sleep meanwhile. It is computed again if a user's own function cleans texts. `flag` limits the
    length. The result has the rows in `order`.
    """
    number = datasets.Value("int32")
    features = datasets.Features(tokens=[number], cut=number, hash=datasets.Value("int64"))
    odd = Counter[str]()

    def encode(batch: dict[str, list], numbers: Any) -> dict[str, list]:
        if rows._indices:  # of the source's rows, some were chosen
            numbers = rows._indices["indices"].take(numbers).to_pylist()
        odd.update(count_texts(batch, numbers, columns, task.query_dataset, tokenizer))
        found: dict[str, list] = {name: [] for name in features}
        for ids in function(batch):
            found["tokens"].append(ids[:length])
            found["cut"].append(max(len(ids) - length, 0))
            found["hash"].append(hash(tuple(ids[:length])))
        return found

    code = [Path(file).read_text("utf-8") for file in (__file__, tokens.__file__, CLEAN)]
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    key: Any = [rows._fingerprint, function.__name__, length, task, pad_id]
    key += [backend, tokenizer.special_tokens_map, code]
    fingerprint = datasets.fingerprint.Hasher.hash(key)
    path = Path(datasets.config.HF_DATASETS_CACHE, f"{fingerprint}.arrow")
    path.parent.mkdir(parents=True, exist_ok=True)
    cached = task.clean_fn is None or Path(task.clean_fn.rpartition(":")[0]) == CLEAN
    lock = filelock.FileLock(f"{path}.lock", poll_interval=0.5)
    with about(f"{FLAG} {task.query_dataset}"), lock:
        table = rows.select_columns(columns).map(
            encode,
            with_indices=True,
            batched=True,
            remove_columns=columns,
            features=features,
            cache_file_name=str(path),
            load_from_cache_file=cached,
            new_fingerprint=fingerprint,
        )
        table.reset_format()  # no `decode` of `read_files`
        counts = path.with_suffix(".json")
        if odd:
            counts.write_text(json.dumps(odd))
        elif counts.exists():
            odd.update(json.loads(counts.read_text()))
    say_counts(odd, f"{FLAG}, {len(rows)} rows", columns[0], tokenizer)
    lengths = np.asarray(compute.list_value_length(table.data.column("tokens")))
    order = np.arange(len(table))[order]
    kept = order[lengths[order] > 0]
    cut = np.asarray(table.data.column("cut"))
    if skipped := len(table) - len(kept):
        say(f"{FLAG} {task.query_dataset}: skipped {skipped} of {len(table)} rows: no tokens")
    if not len(kept):
        raise InputError(f"{FLAG} {task.query_dataset}: no row gives tokens")
    if cut.any():
        say(f"{flag}: left out {cut.sum()} tokens, ends of {(cut > 0).sum()} of {len(kept)} texts")
    source = rows if len(rows) == len(table) else table  # blocks of `load_blocks` have no columns
    hashes = np.asarray(table.data.column("hash"))
    return TokenTable(table, source, hashes, length, pad_id).select(kept)


@dataclass
class TokenTable:
    """Token sequences in a memory-mapped file that the processes of a machine share.

    `table[rows]` → [B, length], padded on the left (G2). `source`: the data set's rows, with all
    columns. `hashes`: of the sequences, to find duplicates.
    """

    sequences: Rows
    source: Rows
    hashes: np.ndarray
    length: int
    pad_id: int

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, rows: np.ndarray | slice) -> Tensor:
        return pad_left(self.sequences[rows]["tokens"], self.length, self.pad_id)

    def columns(self, rows: np.ndarray | slice = slice(None)) -> dict[str, list]:
        """The data set's columns in these rows: name → a list of B values."""
        return self.source[rows]

    def select(self, rows: np.ndarray) -> "TokenTable":
        """A table of these rows."""
        sequences, source = self.sequences.select(rows), self.source.select(rows)
        return replace(self, sequences=sequences, source=source, hashes=self.hashes[rows])

    def hold_out(self, n: int, needed: int = 1) -> tuple["TokenTable", "TokenTable"]:
        """Tables of the first `n` sequences, and without them and their duplicates."""
        rest = np.flatnonzero(~np.isin(self.hashes, self.hashes[:n]))
        if len(rest) < needed:
            left = f"of {len(self)} sequences leaves {len(rest)}; training needs {needed}"
            raise InputError(f"--eval_queries (of sft.py: --num_heldout): holding out {n} {left}")
        return self.select(np.arange(n)), self.select(rest)


def load_blocks(task: Task, block_size: int, tokenizer: Any, ids: TokenIds) -> "TokenTable":
    """Texts joined into blocks [num_blocks, block_size], shuffled.

    A block begins with a text and continues with the next ones, tokenized after a space; the end of
    its last text is dropped.
    """
    block: list[int] = []  # not full yet; the next batch continues it

    def to_blocks(batch: dict[str, list]) -> list[list[int]]:
        texts = [text.strip() for text in clean_texts(batch[task.query_column], task)]
        alone = tokenizer(texts, add_special_tokens=False)["input_ids"]
        spaced = [" " + text for text in texts]
        after, _, _ = tokens.encode_after(["."] * len(texts), spaced, tokenizer)
        begin, blocks = tokens.bos(tokenizer), []
        for i, text in enumerate(texts):
            if text and block:
                block.extend(after[i])
            elif text:
                block.extend(tokens.with_bos(alone[i], begin))
            if len(block) >= block_size:
                blocks.append(block.copy())
                block.clear()
        return blocks

    rows = load_rows(task.query_dataset, FLAG, task.num_queries, query_column=task.query_column)
    flag = f"blocks of {block_size} tokens (--block_size)"
    columns = [task.query_column]
    table = tokenize_rows(rows, to_blocks, columns, block_size, task, tokenizer, ids.pad, flag)
    return table.select(np.random.default_rng(0).permutation(len(table)))


def load_responses(task: Task, tokenizer: Any, ids: TokenIds) -> "TokenTable":
    """Contexts, padded on the left, and reference responses, on the right [num, T], shuffled.

    Rows without a response (null) are skipped. In EOS tasks an empty one is an end alone.
    """
    ends = ids.ends if task.eos_task else []
    column: Any = task.response_column
    width = len(ids.prefix) + task.query_length + len(ids.suffix)
    length = width + task.response_length

    def to_sequences(batch: dict[str, list]) -> list[list[int]]:
        prompts = tokenize_queries(batch[task.query_column], task, tokenizer)
        contexts = [ids.prefix + query[: task.query_length] + ids.suffix for query in prompts]
        answers = batch[column]
        responses = tokens.encode_answers(contexts, answers, tokenizer, task.truncate_token, ends)
        sequences = []
        for i, query in enumerate(prompts):
            sequence: list[int] = []
            if query and responses[i]:
                sequence = [ids.pad] * (width - len(contexts[i])) + contexts[i] + responses[i]
                sequence += [ids.pad] * (length - len(sequence))
                sequence += [ids.pad] * (len(query) - task.query_length)  # counted as cut
            sequences.append(sequence)
        return sequences

    if column == task.query_column:
        raise InputError(f"--response_column {column} holds the queries: see docs/data.md")
    columns = dict(query_column=task.query_column, response_column=column)
    rows = load_rows(task.query_dataset, FLAG, task.num_queries, **columns)
    names = [*columns.values()]
    flag = f"--query_length {task.query_length} or --response_length {task.response_length}"
    table = tokenize_rows(rows, to_sequences, names, length, task, tokenizer, ids.pad, flag)
    return table.select(np.random.default_rng(0).permutation(len(table)))
