"""Rows of other forms → what the scripts read: a JSON object per line, every text written out.

    python data/convert.py rows.csv rows.jsonl
    python data/convert.py trl-lib/ultrafeedback_binarized pairs.jsonl --chat MODEL --end "<|im_end|>"

SOURCE is a file (.csv .parquet .json .jsonl), a folder of `save_to_disk`, or a name on the hub, as
`datasets.load_dataset` reads it; values of CSV files are texts. With --chat, the template of the
tokenizer MODEL writes lists of messages as texts: `prompt` with the generation prompt, and what it
adds for each of `completion`, `chosen` and `rejected`, through its last --end. The first row is
printed: the scripts will read exactly that.

A prompt may be missing where chosen and rejected repeat it and then differ in their last message.
Of a prompt whose last message is the assistant's, that is the completion. The messages of a prompt
are kept as `messages`, for reward functions; other columns stay as they are.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import transformers
import tyro

ANSWERS = "completion", "chosen", "rejected"


@dataclass
class Args:
    """Convert rows."""

    source: tyro.conf.Positional[str]
    out: tyro.conf.Positional[Path]
    chat: str | None = None
    """tokenizer with the chat template: folder or hub name"""
    end: str = ""
    """text that ends a message in this template; the --truncate_token of the runs"""
    column: str = "prompt"
    """column with the messages of the prompt, or of whole conversations"""
    configuration: str | None = None
    split: str = "train"


def read(args: Args) -> Iterator[dict[str, Any]]:
    """The rows of the source."""
    path = Path(args.source)
    if path.suffix == ".csv":
        with open(path, encoding="utf-8-sig", newline="") as file:
            for row in csv.DictReader(file, strict=True):
                if None in row or None in row.values():
                    raise ValueError(f"{row} does not have the fields of the header")
                yield row
    elif path.suffix in (".json", ".jsonl"):  # `datasets` takes texts for dates
        text = path.read_text(encoding="utf-8-sig")
        yield from json.loads(text) if text[0] == "[" else map(json.loads, text.splitlines())
    elif path.suffix == ".parquet":
        yield from datasets.Dataset.from_parquet(str(path))
    elif path.is_dir():
        rows: Any = datasets.load_from_disk(str(path))
        yield from rows[args.split] if isinstance(rows, dict) else rows
    else:
        yield from datasets.load_dataset(args.source, args.configuration, split=args.split)


def split_messages(row: dict[str, Any], column: str) -> tuple[list[dict], dict[str, list[dict]]]:
    """The messages of the prompt, and those of each answer."""
    answers = {name: row[name] for name in ANSWERS if isinstance(row.get(name), list)}
    prompt = row.get(column)
    if not isinstance(prompt, list) and len(answers) > 1:
        prompt, other = (answers[name][:-1] for name in ("chosen", "rejected"))
        if not prompt or prompt != other:
            raise ValueError("chosen and rejected differ before their last messages")
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{column} is no list of messages")
    answers = {x: y[len(prompt) :] if y[: len(prompt)] == prompt else y for x, y in answers.items()}
    if not answers and prompt[-1].get("role") == "assistant":
        return prompt[:-1], {"completion": prompt[-1:]}
    return prompt, answers


def write_texts(row: dict[str, Any], tokenizer: Any, args: Args) -> dict[str, Any]:
    """The row with texts for its messages; an answer without content is empty."""
    prompt, answers = split_messages(row, args.column)
    for message in [*prompt, *sum(answers.values(), [])]:
        if message.get("role") not in ("system", "user", "assistant"):
            raise ValueError(f"a role is system, user or assistant, unlike {message}")
        if not isinstance(message["content"], str):
            raise ValueError(f"the content is no text: {message}")
    before = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    texts = {"prompt": before}
    for name, answer in answers.items():
        content = answer[-1]["content"].strip() if answer else ""
        text = tokenizer.apply_chat_template([*prompt, *answer], tokenize=False)
        after = text.removeprefix(before)
        after = after[: after.rfind(args.end) + len(args.end)]
        if not (args.end and text.startswith(before) and content in after):
            raise ValueError(f"{text!r} is not {before!r}, {content!r} and --end {args.end!r}")
        texts[name] = after if content else ""
    rest = {x: y for x, y in row.items() if x not in (args.column, *texts)}
    return rest | texts | {"messages": prompt}


def main(args: Args) -> None:
    """Write a line for each row."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.chat) if args.chat else None
    with open(args.out, "x", encoding="utf-8") as file:
        for i, row in enumerate(read(args)):
            try:
                row = write_texts(row, tokenizer, args) if tokenizer else row
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            except (ValueError, TypeError) as error:
                raise SystemExit(f"{args.source}: row {i}: {error}") from error
            if i == 0:
                print(json.dumps(row, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Args))
