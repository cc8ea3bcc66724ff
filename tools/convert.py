"""Rows of other forms → what the scripts read: a JSON object per line, with texts.

    python tools/convert.py rows.parquet rows.jsonl --rename question=prompt
    python tools/convert.py trl-lib/ultrafeedback_binarized pairs.jsonl --chat MODEL \\
        --end "<|im_end|>"

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
from functools import partial
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
ROLES = dict(human="user", prompter="user", user="user", system="system")
ROLES.update(dict.fromkeys(("assistant", "gpt", "chatgpt", "ai", "bot", "model"), "assistant"))
SHAREGPT = {"from": "role", "value": "content"}  # its names
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
    path, split = Path(source), ""
    if not path.exists():
        name, _, split = source.partition("@")
        path = Path(name)
    split = split or "train"
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
        known: dict[Any, Any] = {}
        for name, x in message.items() if isinstance(message, dict) else ():
            if x is not None:
                known[SHAREGPT.get(name, name)] = x
        author = known.get("role")
        if author not in ROLES or not isinstance(known.get("content"), str):
            raise ValueError(f"no text of user, assistant or system: {message}")
        known["role"] = ROLES[author]
        found.append(known)
    return found


def split_messages(row: dict[str, Any]) -> tuple[list[dict], dict[str, list[dict]]]:
    """The messages of the prompt, and those of each answer."""
    answers = {}
    for name in ANSWERS:
        if row.get(name) is not None:
            answers[name] = read_messages(row[name], "assistant")
    prompt, common = row.get("prompt"), []
    messages = [] if prompt is None else read_messages(prompt, "user")
    if not isinstance(prompt, list) and {"chosen", "rejected"} <= answers.keys():
        both = zip(answers["chosen"][:-1], answers["rejected"][:-1], strict=False)
        common = [x for x, _ in takewhile(lambda x: x[0] == x[1], both)]
        if common and common[-1]["role"] == "assistant":
            common = common[:-1]
        asked = any(message["role"] == "user" for message in common)
        messages = common if asked else common + messages
    for start in (common, messages):  # answers may repeat them
        for name, answer in answers.items():
            if answer[: len(start)] == start:
                answers[name] = answer[len(start) :]
    if row.get("system") and isinstance(prompt, str):
        messages = read_messages(row["system"], "system") + messages
    if messages and messages[-1]["role"] == "assistant":
        *messages, last = messages
        if last["content"] and answers:
            raise ValueError(f"the prompt ends with an answer, beside others: {last}")
        if last["content"]:
            answers = {"completion": [last]}
    if not messages or not messages[-1]["content"].strip():
        missing = "no prompt, use --rename COLUMN=prompt" if prompt is None else "no text"
        raise ValueError(f"{missing}: {row!r:.200}")
    return messages, answers


def write_chat(row: dict[str, Any], tokenizer: Any, end: str) -> dict[str, Any]:
    """The row as the template writes its messages; an answer without content is empty."""
    messages, answers = split_messages(row)
    write = partial(tokenizer.apply_chat_template, tokenize=False)
    options: Any = row.get("chat_template_kwargs") or {}
    before = write(messages, add_generation_prompt=True, **options)
    texts: dict[str, Any] = dict(prompt=before, messages=messages)
    for name, answer in answers.items():
        content = answer[-1]["content"].strip() if answer else ""
        texts[name] = ""
        if content:
            text = write([*messages, *answer], **options)
            after = text.removeprefix(before)
            if after == text or content not in after:
                raise ValueError(f"the template changes the prompt, or the answer: {text!r}")
            if not end or end not in after:
                raise ValueError(f"--end {end!r} does not end the answer: {after!r}")
            texts[name] = after[: after.rfind(end) + len(end)]
    return {**row, **texts}


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
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return dict(row, prompt=prompt, chosen=chosen, rejected=rejected)


def write_ids(row: dict[str, Any], tokenizer: Any, end: str) -> dict[str, Any]:
    """The row of labels with texts in place of token ids, without their padding."""
    if row.get("query") is None:
        raise ValueError(f"no query: {row!r:.200}")
    texts = dict(row)
    for name, value in row.items():
        if re.fullmatch(r"query|sample\d+", name) and value is not None:
            ids = labels.without_padding(value, len(tokenizer))
            text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            texts[name] = text.replace(tokenizer.eos_token, end or tokenizer.eos_token)
    return texts


def rename_columns(row: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The row with new names of columns; one whose new name is empty is left out."""
    for old, new in names.items():
        if old not in row:
            raise cli.InputError(f"--rename {old}={new}: there are {[*row]}")
    kept = []
    for old, value in row.items():
        if new := names.get(old, old):
            kept.append((new, value))
    return sources.make_object(kept)


def describe(out: Path, filled: Counter, rows: int) -> None:
    """Print what a file has become, and who can read it."""
    print(f"{out}: {rows} rows; values in {', '.join(f'{x} {n}' for x, n in filled.items())}")
    for script, columns in READERS.items():
        missing = [name for name in columns if not filled[name]]
        found = f"no {', '.join(missing)}" if missing else "can read it"
        print(f"{script}: {found}")


def main(args: Args) -> None:
    """Write a line for each row."""
    name = args.chat or args.ids
    with cli.about(f"--chat or --ids {name}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name) if name else None
    special = tokens.special_tokens(tokenizer).values() if args.chat else ()
    names = {}
    for rename in args.rename:
        old, equals, new = rename.partition("=")
        if not equals:
            raise cli.InputError(f"--rename {rename}: write OLD=NEW")
        names[old] = new
    if args.out.exists():
        raise cli.InputError(f"{args.out} exists")
    write = write_texts
    if tokenizer:
        form = write_ids if args.ids else write_chat
        write = partial(form, tokenizer=tokenizer, end=args.end)
    skipped: dict[str, list[str]] = defaultdict(list)  # reason → what is said of each row
    filled: Counter = Counter()  # column → values that are neither null nor blank
    total, written, with_special = 0, 0, []
    part = Path(f"{args.out}.part")
    dump = partial(json.dumps, ensure_ascii=False, default=str)
    with cli.about(args.source), open(part, "w", encoding="utf-8", errors="ignore") as file:
        for number, given in enumerate(read(args.source)):
            total += 1
            row = rename_columns(given, names)
            try:
                text = dump(row)
                if any(word in text for word in args.drop):
                    raise ValueError(f"--drop: {text:.200}")
                if any(token in text for token in special):
                    with_special.append(number)
                row = write(row)
                file.write(dump(row) + "\n")
                if not written:
                    print(dump(row, indent=1))
                written += 1
                filled.update(x for x, y in row.items() if y is not None and str(y).strip())
            except (ValueError, TypeError) as error:
                skipped[str(error).partition(":")[0]].append(f"row {number}: {error}")
    for found in skipped.values():
        print(f"skipped {len(found)} of {total} rows, such as {found[0]}")
    if with_special:
        use = f"such as row {with_special[0]}; --drop TEXT leaves out rows with one"
        print(f"{len(with_special)} rows had special tokens that no template wrote, {use}")
    if not written:
        part.unlink()
        raise cli.InputError(f"{args.source}: no row was written")
    part.rename(args.out)
    describe(args.out, filled, written)


if __name__ == "__main__":
    cli.run(main, Args)
