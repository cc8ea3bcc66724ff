"""Rewards of tasks whose answers can be checked: 1 if the answer is right, otherwise 0."""

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

NUMBER = r"((?:(?<!\w)-\$?|\$-?)?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?)"  # 8-3 has no -3
MARKED = re.compile(rf"####\s*(?:\*\*\s*)?\+?{NUMBER}", re.A)  # ** begins and ends bold
AFTER = re.compile(r"\*\*(?!\s*\d)|/(?=[a-z])|(?<=[a-z])[²³]|\b(?:in|for|per|of|at) [$\d,.]+")
OPERATORS = "+*/=^×÷"
WHOLE = re.compile(r"[+-]?\d{1,99}(/0*[1-9]\d{0,99}|(\.\d*)?(e[+-]?\d{1,2})?)", re.A)
FORMS = {  # of the answer alone → the same for `Fraction`
    re.compile(r"\\boxed\{(.*)\}"): r"\1",
    re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}"): r"\1/\2",
    re.compile(r"(?<=\d)[ ,](?=\d{3}(?!\d))"): "",
    re.compile("−"): "-",
}


def read_text(answer: Any) -> str | None:
    """The text of an answer: 8110 of 8110.0, of ["8110"], of "8110 "; None if there is none."""
    if isinstance(answer, list) and len(answer) == 1:
        (answer,) = answer
    if answer is None or answer != answer:  # nan, pandas' gap
        return None
    return re.sub(r"^(-?\d+)\.0$", r"\1", str(answer).strip()) or None


def exact_match(queries: list[str], responses: list[str], answer: list[Any]) -> list[float]:
    """1.0 for each response whose text after the last `=` is the answer (`arithmetic`)."""
    finals = [response.rpartition("=")[2] for response in responses]
    return [float(x == read_text(y)) for x, y in zip(finals, answer, strict=True)]


def final_number(text: str) -> Fraction | None:
    r"""The number after the last `####`, without `$` and commas; None if there is none.

    None also if its line goes on with another number or an operator, as `18 or 19` does. Bold,
    units (`m²`, `miles/hour`) and numbers after a preposition (`eggs in 7 days`) may follow.
    Alone in its line it may be `1/2`, `\frac{1}{2}`, `\boxed{18}`, `1e3`, `−5` or `1 000`.
    """
    text = text[text.rfind("####") :]
    line = text.removeprefix("####").strip().partition("\n")[0]
    for form, same in FORMS.items():
        line = form.sub(same, line.lstrip(" $").rstrip(" $."))
    if text.startswith("####") and WHOLE.fullmatch(line):
        return Fraction(line)
    found = MARKED.match(text)
    if not found:
        return None
    rest = AFTER.sub("", text[found.end() :].partition("\n")[0])
    if any(character.isnumeric() or character in OPERATORS for character in rest):
        return None
    return to_number(found[1])


def to_number(text: str) -> Fraction:
    """`-$1,600.5` → -1600.5."""
    return Fraction(Decimal(re.sub(r"[$,]", "", text)))  # of any length


def read_number(answer: Any) -> Fraction | None:
    """The number of a worked answer after `####`, or of one that is the number itself."""
    text = read_text(answer) or ""
    return final_number(text if "####" in text else f"#### {text}")


def gsm8k(queries: list[str], responses: list[str], answer: list[Any]) -> list[float]:
    """1.0 for each response whose number after `####` is that of the `answer`."""
    given, right = map(final_number, responses), map(read_number, answer)
    return [float(x is not None and x == y) for x, y in zip(given, right, strict=True)]


# A run counts the answers of which these are None:
exact_match.read_answer = read_text  # type: ignore[attr-defined]
gsm8k.read_answer = read_number  # type: ignore[attr-defined]
