"""Rows of other forms → what the scripts read: a JSON object per line, with texts.

    python tools/convert.py rows.parquet rows.jsonl --rename question=prompt
    python tools/convert.py trl-lib/ultrafeedback_binarized pairs.jsonl --chat MODEL --end "<|im_end|>"

SOURCE is a file, a folder (of files, or of `save_to_disk`) or a name on the hub, perhaps with
`:configuration` or `:file`, and `@split`. With --chat, the template of the tokenizer MODEL writes
`prompt` with the generation prompt, and what it adds for `completion`, `chosen` and `rejected`,
through its last --end. A text is then one message, after that of a column `system`, if any.

Chosen and rejected may begin with the prompt, as messages or as dialogues of hh-rlhf. An answer
that ends a prompt is its completion. `messages` keeps those of the prompt, for reward functions.
With --ids, `query` and `sample0`, `sample1`, … are token ids, as in OpenAI's files of labels.
Prints the first row as it will be read, counts the rows that do not fit, and says which scripts can
read the others. Values that JSON does not have, such as dates, become texts.
"""

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from os.path import commonprefix
from pathlib import Path
from typing import Any

import datasets
import transformers
import tyro

sys.path.append(str(Path(__file__).parents[1]))
from machinery import cli, labels, sources, tokens  # noqa: E402

ANSWERS = ("completion", "chosen", "rejected")
READERS = {
    "ppo.py, rloo.py": ("prompt",),
    "sft.py": ("prompt", "completion"),
    "train_reward.py, pairs": ("prompt", "chosen", "rejected"),
    "train_reward.py, best of several": ("query", "sample0", "sample1", "best"),
}
ROLES = dict(human="user", prompter="user", user="user", system="system", assistant="assistant")
ROLES |= dict.fromkeys(("gpt", "chatgpt", "ai", "bot", "model"), "assistant")
TURN = re.compile(r"\n\n(Human|Assistant):")  # in dialogues of hh-rlhf


@dataclass
class Args:
    """Rows of other forms → what the scripts read: a JSON object per line, with texts."""

    source: tyro.conf.Positional[str]
    out: tyro.conf.Positional[Path]
    chat: str | None = None
    """tokenizer with the chat template: folder or hub name"""
    end: str = ""
    """text that ends a message in this template; the --truncate_token of the runs"""
    rename: tuple[str, ...] = ()
    """OLD=NEW ...: new names of columns; OLD= drops one"""
    ids: str | None = None
    """tokenizer of labels that are token ids: folder or hub name"""
    drop: tuple[str, ...] = ()
    """TEXT ...: leave out rows with one of these texts, such as special tokens"""


def read(source: str) -> Iterator[dict[str, Any]]:
    """The rows of a source; of a folder, those of one split."""
    path, split = Path(source), "train"
    if not path.exists() and "@" in source:
        path, split = Path(source.partition("@")[0]), source.partition("@")[2]
    if not path.is_dir():
        yield from sources.load_rows(source, "SOURCE")
    elif any((path / x).is_file() for x in ("state.json", "dataset_dict.json")):
        saved: Any = datasets.load_from_disk(path)
        yield from saved[split] if isinstance(saved, dict) else saved
    else:
        files = datasets.load_dataset_builder(str(path)).config.data_files or {}
        print(f"{path} has the splits {', '.join(map(str, files))}; {split} is read")
        for file in files[split]:
            yield from sources.load_rows(file, "SOURCE")


def read_messages(value: Any, role: str) -> list[dict[str, Any]]:
    """Messages as templates read them. A text is one, of `role`, or a dialogue of hh-rlhf."""
    if isinstance(value, str) and not re.match(sources.MESSAGES, value):
        parts = TURN.split(value)[1:] if TURN.match(value) else [role, value]
        turns = zip(parts[::2], parts[1::2], strict=True)
        value = [{"role": x.lower(), "content": y.strip()} for x, y in turns]
    if not isinstance(value, list):
        hint = "; of JSON in a text: see docs/data.md" if isinstance(value, str) else ""
        raise ValueError(f"neither a text nor a list of messages: {value!r:.60}{hint}")
    found = []
    for message in value:
        given = message.items() if isinstance(message, dict) else ()
        known = {x: y for x, y in given if y is not None}
        role, content = known.pop("from", None), known.pop("value", None)  # ShareGPT's names
        known = {"role": role, "content": content} | known
        if known["role"] not in ROLES or not isinstance(known["content"], str):
            raise ValueError(f"no text of user, assistant or system: {message}")
        found.append(known | {"role": ROLES[known["role"]]})
    return found


def split_messages(row: dict[str, Any]) -> tuple[list[dict], dict[str, list[dict]]]:
    """The messages of the prompt, and those of each answer."""
    answers = {x: read_messages(row[x], "assistant") for x in ANSWERS if row.get(x) is not None}
    prompt, common = row.get("prompt"), []
    messages = [] if prompt is None else read_messages(prompt, "user")
    if not isinstance(prompt, list) and {"chosen", "rejected"} <= answers.keys():
        both = zip(answers["chosen"][:-1], answers["rejected"][:-1], strict=False)
        common = [x for x, _ in takewhile(lambda x: x[0] == x[1], both)]
        common = common[:-1] if common and common[-1]["role"] == "assistant" else common
        asked = any(message["role"] == "user" for message in common)
        messages = common if asked else common + messages
    for start in (common, messages):  # answers may repeat them
        answers = {x: y[len(start) * (y[: len(start)] == start) :] for x, y in answers.items()}
    if row.get("system") and isinstance(prompt, str):
        messages = read_messages(row["system"], "system") + messages
    if messages and messages[-1]["role"] == "assistant":
        *messages, last = messages
        if last["content"] and answers:
            raise ValueError(f"the prompt ends with an answer, beside others: {last}")
        answers = {"completion": [last]} if last["content"] else answers
    if not messages or not messages[-1]["content"].strip():
        missing = "no prompt, use --rename COLUMN=prompt" if prompt is None else "no text"
        raise ValueError(f"{missing}: {row!r:.200}")
    return messages, answers


def write_chat(row: dict[str, Any], tokenizer: Any, end: str) -> dict[str, Any]:
    """The row with what the template writes for its messages; an answer without content is empty."""
    messages, answers = split_messages(row)
    options: Any = dict(tokenize=False) | (row.get("chat_template_kwargs") or {})
    before = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    texts = {"prompt": before} | dict.fromkeys(answers, "")
    for name, answer in answers.items():
        if answer and (content := answer[-1]["content"].strip()):
            text = tokenizer.apply_chat_template([*messages, *answer], **options)
            after = text.removeprefix(before)
            if not text.startswith(before) or content not in after:
                raise ValueError(f"the template changes the prompt, or the answer: {text!r}")
            if not end or end not in after:
                raise ValueError(f"--end {end!r} does not end the answer: {after!r}")
            texts[name] = after[: after.rfind(end) + len(end)]
    return row | texts | {"messages": messages}


def write_texts(row: dict[str, Any]) -> dict[str, Any]:
    """The row as it is if it has texts, without a prompt that chosen and rejected repeat."""
    for name in ("prompt", *ANSWERS):
        text = row.get(name) or ""
        if not isinstance(text, str) or re.match(sources.MESSAGES, text):
            raise ValueError(f"{name} is no text; --chat MODEL writes messages: {text!r:.60}")
    prompt, chosen, rejected = map(row.get, ("prompt", "chosen", "rejected"))
    if chosen is None or rejected is None:
        return row
    if prompt is None:
        prompt = "".join(commonprefix([chosen, rejected]).rpartition("\n\nAssistant:")[:2])
    if not prompt:
        raise ValueError(f"no prompt, use --rename COLUMN=prompt: {row!r:.200}")
    if chosen.startswith(prompt) and rejected.startswith(prompt):
        chosen, rejected = (text.removeprefix(prompt) for text in (chosen, rejected))
    return row | dict(prompt=prompt, chosen=chosen, rejected=rejected)


def write_ids(row: dict[str, Any], tokenizer: Any, end: str) -> dict[str, Any]:
    """The row of labels with texts in place of token ids, without their padding."""
    texts = {}
    for name, value in row.items():
        if re.fullmatch(r"query|sample\d+", name) and value is not None:
            ids = labels.without_padding(value, len(tokenizer))
            text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            texts[name] = text.replace(tokenizer.eos_token, end or tokenizer.eos_token)
    if "query" not in texts:
        raise ValueError(f"no query: {row!r:.200}")
    return row | texts


def rename_columns(row: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The row with new names of columns; one whose new name is empty is left out."""
    for old in names:
        if old not in row:
            raise cli.InputError(f"--rename {old}={names[old]}: there are {[*row]}")
    kept = [(names.get(old, old), value) for old, value in row.items() if names.get(old, old)]
    sources.check_names([name for name, _ in kept])
    return dict(kept)


def describe(out: Path, filled: Counter, rows: int) -> None:
    """Print what a file has become, and who can read it."""
    print(f"{out}: {rows} rows; values in {', '.join(f'{x} {n}' for x, n in filled.items())}")
    for script, columns in READERS.items():
        missing = [name for name in columns if not filled[name]]
        print(f"{script}: " + (f"no {', '.join(missing)}" if missing else "can read it"))


def main(args: Args) -> None:
    """Write a line for each row."""
    name = args.chat or args.ids
    with cli.about(f"--chat or --ids {name}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name) if name else None
    special = tokens.special_tokens(tokenizer).values() if args.chat else []
    for rename in args.rename:
        if rename.count("=") != 1:
            raise cli.InputError(f"--rename {rename}: write OLD=NEW")
    names = dict(rename.split("=") for rename in args.rename)
    if args.out.exists():
        raise cli.InputError(f"{args.out} exists")
    skipped: dict[str, list[str]] = defaultdict(list)  # reason → what is said of each row
    filled: Counter = Counter()  # column → values that are neither null nor blank
    part, total, written, with_special = Path(f"{args.out}.part"), 0, 0, []
    with cli.about(args.source), open(part, "w", encoding="utf-8", errors="ignore") as file:
        for total, given in enumerate(read(args.source), start=1):
            row = rename_columns(given, names)
            try:
                text = json.dumps(row, ensure_ascii=False, default=str)
                if any(word in text for word in args.drop):
                    raise ValueError(f"--drop: {text:.200}")
                if any(token in text for token in special):
                    with_special.append(total - 1)
                if args.ids:
                    row = write_ids(row, tokenizer, args.end)
                elif tokenizer:
                    row = write_chat(row, tokenizer, args.end)
                else:
                    row = write_texts(row)
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
                if not written:
                    print(json.dumps(row, ensure_ascii=False, default=str, indent=1))
                written += 1
                filled.update(x for x, y in row.items() if y is not None and str(y).strip())
            except (ValueError, TypeError) as error:
                skipped[str(error).partition(":")[0]].append(f"row {total - 1}: {error}")
    for found in skipped.values():
        print(f"skipped {len(found)} of {total} rows, such as {found[0]}")
    if with_special:
        where = f"such as row {with_special[0]}; --drop TEXT leaves out rows with one"
        print(
            f"{len(with_special)} rows had special tokens before the template wrote its own, {where}"
        )
    if not written:
        part.unlink()
        raise cli.InputError(f"{args.source}: no row was written")
    part.rename(args.out)
    describe(args.out, filled, written)


if __name__ == "__main__":
    cli.run(main, Args)
