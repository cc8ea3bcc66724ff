"""Sequences that sft.py learns: blocks of texts, or prompts with reference responses.

Shapes: `T` tokens per sequence.
"""

from typing import Any

from data.tasks import Task
from machinery import queries
from machinery.cli import InputError, say
from machinery.queries import TokenTable, load_texts, tokenize_rows
from machinery.tokens import drop_answer, render_answer, with_end
from utils import TokenIds


def load_blocks(task: Task, block_size: int, tokenizer: Any, ids: TokenIds) -> TokenTable:
    """Texts joined into blocks [num_blocks, block_size].

    A block begins with a text and continues with the next ones, tokenized after a space; the end of
    its last text is dropped.
    """
    rest: list[int] = []  # a block that is not full yet; the next batch continues it

    def to_blocks(batch: dict[str, list]) -> list[list[int]]:
        texts = [text.strip() for text in queries.clean_texts(batch[task.query_column], task)]
        texts = [text for text in texts if text]
        if not texts:
            return []
        starts = tokenizer(texts, add_special_tokens=False)["input_ids"]
        spaced = [" " + text for text in texts]
        continued = tokenizer(spaced, add_special_tokens=False)["input_ids"]
        blocks = []
        for start, continuation in zip(starts, continued, strict=True):
            rest.extend(continuation if rest else start)
            if len(rest) >= block_size:
                blocks.append(rest[:block_size])
                rest.clear()
        return blocks

    rows = load_texts(task, task.query_column)
    return tokenize_rows(rows, to_blocks, block_size, task, tokenizer, ids)


def load_responses(task: Task, tokenizer: Any, ids: TokenIds) -> TokenTable:
    """Contexts, padded on the left, and their reference responses, padded on the right [num, T].

    Both columns may be one of conversations, whose last messages are the responses.
    """
    end = ids.truncate if task.eos_task else None
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
                response = with_end(response, end)[: task.response_length]
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
    table = tokenize_rows(rows, to_sequences, length, task, tokenizer, ids)
    queries.say_skipped(len(rows) - len(table), len(rows), task)
    return table
