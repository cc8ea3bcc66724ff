"""Rewards of tasks whose answers can be checked: 1 if the final number is right, otherwise 0."""

import random
import re
from decimal import Decimal
from typing import Any

NUMBER = re.compile(r"####\s*((?:-\$?|\$-?)?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?)", re.A)
OPERATORS = "+*/=^×÷"
COIN = random.Random(1)


def exact_match(queries: list[str], responses: list[str], answer: list[Any]) -> list[float]:
    """1.0 for each response whose text after the last `=` is the answer (`arithmetic`)."""
    finals = [response.rpartition("=")[2] for response in responses]
    answers = ["" if right is None else str(right) for right in answer]
    if not any(answers):
        raise ValueError("no row of the column 'answer' has an answer")
    return [float(x == y != "") for x, y in zip(finals, answers, strict=True)]


def final_number(text: str) -> Decimal | None:
    """The number after the last `####`, without `$` and commas; None if there is none.

    None also if its line goes on with another number or an operator, as `18 or 19` does.
    """
    text = text[text.rfind("####") :]
    found = NUMBER.match(text)
    if not found:
        return None
    rest = text[found.end() :].partition("\n")[0]
    if any(character.isnumeric() or character in OPERATORS for character in rest):
        return None
    return Decimal(re.sub(r"[$,]", "", found[1]))


def gsm8k(queries: list[str], responses: list[str], answer: list[Any]) -> list[float]:
    """1.0 for each response whose number after `####` is that of the worked `answer`.

    An answer without `####` is the number itself.
    """
    answers = [text if "####" in (text := str(right)) else f"#### {text}" for right in answer]
    numbers = [final_number(text) for text in answers]
    if all(number is None for number in numbers):
        raise ValueError(f"no row of the column 'answer' has a number, see {answer[0]!r:.60}")
    given = [final_number(text) for text in responses]
    return [float(x is not None and x == y) for x, y in zip(given, numbers, strict=True)]


def coin_flip(queries: list[str], responses: list[str]) -> list[float]:
    """0.0 or 1.0 at random, whatever the response: a control; nothing can be learned from it."""
    return [float(COIN.getrandbits(1)) for _ in responses]
