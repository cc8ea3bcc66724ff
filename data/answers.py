"""Rewards of tasks whose answers can be checked: 1 if the final number is right, otherwise 0."""

import re
from decimal import Decimal

NUMBER = re.compile(r"####\s*((?:-\$?|\$-?)?[\d,]*\.?\d+)")


def exact_match(queries: list[str], responses: list[str], answer: list[str]) -> list[float]:
    """1.0 for each response whose text after the last `=` is the answer (`arithmetic`)."""
    finals = [response.rpartition("=")[2] for response in responses]
    return [float(final == right) for final, right in zip(finals, answer, strict=True)]


def final_number(text: str) -> Decimal | None:
    """The number after the last `####`, without `$` and commas; None if there is none."""
    found = NUMBER.match(text[text.rfind("####") :])
    return Decimal(re.sub(r"[$,]", "", found[1])) if found else None


def gsm8k(queries: list[str], responses: list[str], answer: list[str]) -> list[float]:
    """1.0 for each response whose number after `####` is that of the worked `answer`."""
    right = [final_number(text) for text in answer]
    given = [final_number(text) for text in responses]
    return [float(x is not None and x == y) for x, y in zip(given, right, strict=True)]
