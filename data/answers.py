"""Rewards of tasks whose answers can be checked: 1 if the final number is right, otherwise 0."""

import random
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

VALUE = r"((?:(?<!\w)-\$?|\$-?)?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?)"  # 8-3 has no -3
ANYWHERE = re.compile(VALUE, re.A)
MARKED = re.compile(rf"####\s*(?:\*\*\s*)?\+?{VALUE}", re.A)  # ** begins and ends bold
AFTER = re.compile(r"\*\*(?!\s*\d)|/(?=[a-z])|(?<=[a-z])[²³]|\b(?:in|for|per|of|at) [$\d,.]+")
SUMS = re.compile(r"(\d+,){3}\d+=\d+", re.A)  # the sum of each column, then the total
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

    None also if its line goes on with another number or an operator, as `18 or 19` does. Bold,
    units (`m²`, `miles/hour`) and numbers after a preposition (`eggs in 7 days`) may follow.
    """
    text = text[text.rfind("####") :]
    found = MARKED.match(text)
    if not found:
        return None
    rest = AFTER.sub("", text[found.end() :].partition("\n")[0])
    if any(character.isnumeric() or character in OPERATORS for character in rest):
        return None
    return to_decimal(found[1])


def to_decimal(number: str) -> Decimal:
    """`-$1,600.5` → -1600.5."""
    return Decimal(re.sub(r"[$,]", "", number))


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


def last_number(text: str) -> Decimal | None:
    """The last number, wherever it is; None if there is none."""
    found = ANYWHERE.findall(text)
    return to_decimal(found[-1]) if found else None


# Reward function → whether a response has the form that its task asks for:
FORMS: dict[Any, Callable[[str], bool]] = {
    exact_match: lambda response: SUMS.fullmatch(response) is not None,
    gsm8k: lambda response: final_number(response) is not None,
}


def accuracies(
    reward: Callable, queries: list[str], responses: list[str], answer: list[Any]
) -> dict[str, float]:
    """Strict and lenient accuracy of responses, and the share of them in the right form.

    Strict: in the right form, and the reward is 1. Lenient: the last number is that of the answer.
    """
    form = [FORMS[reward](response) for response in responses]
    rewards = reward(queries, responses, answer)
    right = [last_number(str(number)) for number in answer]
    pairs = zip(responses, right, strict=True)
    strict = [x * y for x, y in zip(form, rewards, strict=True)]
    lenient = [number is not None and last_number(text) == number for text, number in pairs]
    lists = {"strict": strict, "lenient": lenient, "form": form}
    return {name: sum(values) / len(responses) for name, values in lists.items()}


def coin_flip(queries: list[str], responses: list[str]) -> list[float]:
    """0.0 or 1.0 at random, whatever the response: a control; nothing can be learned from it."""
    return [float(COIN.getrandbits(1)) for _ in responses]
