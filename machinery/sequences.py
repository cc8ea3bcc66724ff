"""Sequences that sft.py learns: blocks of texts, or prompts with reference responses.

Shapes: `T` tokens per sequence.
"""

from typing import Any

from data.tasks import Task
from machinery import queries
from machinery.cli import InputError, about, say
from machinery.queries import TokenTable, cleaning_key, load_texts, tokenize_rows
from machinery.tokens import drop_answer, render_answer
from utils import TokenIds


def make_blocks(
    texts: list[list[int]], continued: list[list[int]], rest: list[int], block_size: int
) -> list[list[int]]:
    """Join tokenized texts into blocks of `block_size` tokens.

    A block begins with a text and continues with the next ones, tokenized after a space
    (`continued`); the end of its last text is dropped. `rest` keeps a block that is not full yet
    for the next call.
    """
    blocks = []
    for text, continuation in zip(texts, continued, strict=True):
        rest += continuation if rest else text
        if len(rest) >= block_size:
            blocks.append(rest[:block_size])
            rest.clear()
    return blocks


def load_blocks(task: Task, block_size: int, tokenizer: Any, ids: TokenIds) -> TokenTable:
    """Blocks of consecutive texts [num_blocks, T]."""
    rest: list[int] = []

    def to_blocks(batch: dict[str, list]) -> list[list[int]]:
        texts = [text.strip() for text in queries.clean_texts(batch[task.query_column], task)]
        texts = [text for text in texts if text]
        if not texts:
            return []
        starts = tokenizer(texts, add_special_tokens=False)["input_ids"]
        spaced = [" " + text for text in texts]
        continued = tokenizer(spaced, add_special_tokens=False)["input_ids"]
        return make_blocks(starts, continued, rest, block_size)

    rows = load_texts(task, task.query_column)
    settings = cleaning_key(task), task.query_column
    with about(f"--query_dataset {task.query_dataset}"):
        return tokenize_rows(rows, to_blocks, block_size, tokenizer, ids.pad, *settings)


def load_responses(task: Task, tokenizer: Any, ids: TokenIds) -> TokenTable:
    """Contexts, padded on the left, and their reference responses, padded on the right [num, T].

    Both columns may be one of conversations, whose last messages are the responses.
    """
    end = [ids.truncate] if task.eos_task else []
    column = task.response_column
    assert column is not None

    def to_sequences(batch: dict[str, list]) -> list[list[int]]:
        prompts = queries.tokenize_queries(batch[task.query_column], task, tokenizer)
        texts = []
        for query, text in zip(batch[task.query_column], batch[column], strict=True):
            if isinstance(text, list):
                text = render_answer(drop_answer(query or []), text, tokenizer)
            texts.append(text or "")
        responses = tokenizer(texts, add_special_tokens=False)["input_ids"]
        sequences = []
        for query, response in zip(prompts, responses, strict=True):
            if query and response:
                if response[-1:] != end:  # some datasets already have it
                    response = response + end
                response = response[: task.response_length]
                padding = [ids.pad] * (task.response_length - len(response))
                sequences.append(ids.prefix + query + ids.suffix + response + padding)
        return sequences

    rows = load_texts(task, task.query_column, column, tokenizer=tokenizer)
    if column == task.query_column and not queries.holds_messages(rows, column):
        raise InputError(
            f"--response_column {column} is the query column and holds texts; make messages of "
            "dialogues (docs/data.md), or pass --response_column None to learn whole texts"
        )
    if getattr(rows.features.get("label"), "dtype", "") == "bool" and not all(rows["label"]):
        say(f"warning: rows of {task.query_dataset} whose label is false are learned, too")
    length = len(ids.prefix) + task.query_length + len(ids.suffix) + task.response_length
    cut = task.keep_last_line, task.start_text, task.end_text, task.response_length
    settings = cleaning_key(task), task.query_column, column, *cut, ids, end
    with about(f"--query_dataset {task.query_dataset}"):
        table = tokenize_rows(rows, to_sequences, length, tokenizer, ids.pad, *settings)
    queries.say_skipped(len(rows) - len(table), len(rows), task)
    return table
