"""Rewards of tasks whose answers can be checked: 1 if the answer is right, otherwise 0."""

import re
from decimal import Decimal
from typing import Any

NUMBER = re.compile(r"(?:(?<!\w)-\$?|\$-?)?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.?\d+)")  # 8-3: 8, 3


def exact_match(queries: list[str], responses: list[str], answer: list[Any]) -> list[float]:
    """1.0 for each response whose text after the last `=` is the answer (`arithmetic`)."""
    pairs = zip(responses, answer, strict=True)
    return [float(x.rpartition("=")[2] == read_text(y)) for x, y in pairs]


def read_text(answer: Any) -> str | None:
    """A text or a whole number as a text, without spaces around it; None for other values."""
    return str(answer).strip() or None if isinstance(answer, str | int) else None


def gsm8k(queries: list[str], responses: list[str], answer: list[Any]) -> list[float]:
    """1.0 for each response whose number after `####` is that of the `answer`."""
    given, right = map(final_number, responses), map(read_number, answer)
    return [float(x is not None and x == y) for x, y in zip(given, right, strict=True)]


def final_number(text: str) -> Decimal | None:
    """The number in the line after the last `####`; None if the line has none, or several."""
    line = text.rpartition("####")[2].strip().partition("\n")[0]
    found = NUMBER.findall(line.replace("−", "-"))
    return to_number(found[0]) if "####" in text and len(found) == 1 else None


def read_number(answer: Any) -> Decimal | None:
    """The number of a worked answer after `####`, or of one that is the number itself."""
    text = str(answer).rpartition("####")[2].strip()
    return to_number(text) if NUMBER.fullmatch(text) else None


def to_number(text: str) -> Decimal:
    """`-$1,600.5` → -1600.5."""
    return Decimal(re.sub(r"[$,]", "", text))  # of any length


# A run counts the answers of which these are None:
exact_match.read_answer = read_text  # type: ignore[attr-defined]
gsm8k.read_answer = read_number  # type: ignore[attr-defined]
