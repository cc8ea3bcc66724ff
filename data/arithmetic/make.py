"""Write the arithmetic task: sums of two numbers, and worked solutions that often forget a carry.

    python data/arithmetic/make.py [--out DIR]

Every run writes the same bytes.
"""

import argparse
import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent
SEED = 1
SOLUTIONS, PROBLEMS = 12_000, 8_000
DIGITS = 4
FORGET = 0.6  # the share of carries that a solution forgets


def solve(a: int, b: int, rng: random.Random, forget: float = FORGET) -> str:
    """The sums of the columns from the right, each with the carry before it, then the total.

    >>> solve(4758, 2467, random.Random(1), forget=0)
    '15,12,12,07=7225'
    >>> solve(4758, 2467, random.Random(1), forget=1)
    '15,11,11,06=6115'
    """
    columns, carry = [], 0
    for place in range(DIGITS):
        column = a // 10**place % 10 + b // 10**place % 10 + carry
        columns.append(column)
        carry = int(column >= 10 and rng.random() >= forget)
    digits = [str(column % 10) for column in columns[:-1]]
    total = str(columns[-1]) + "".join(reversed(digits))  # the leftmost sum is written as it is
    return ",".join(f"{column:02}" for column in columns) + "=" + total


def make_problems(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """`count` different pairs of numbers."""
    problems: dict[tuple[int, int], None] = {}  # keeps its order
    while len(problems) < count:
        a, b = (rng.randrange(10 ** (DIGITS - 1), 10**DIGITS) for _ in range(2))
        problems[a, b] = None
    return list(problems)


def main() -> None:
    """Write solutions for sft.py and other problems with their answers for PPO and RLOO."""
    parser = argparse.ArgumentParser(description="Write the arithmetic task.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder")
    out = parser.parse_args().out
    rng = random.Random(SEED)
    problems = make_problems(rng, SOLUTIONS + PROBLEMS)
    solved = [
        {"prompt": f"{a}+{b}=", "completion": solve(a, b, rng)} for a, b in problems[:SOLUTIONS]
    ]
    asked = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in problems[SOLUTIONS:]]
    for name, rows in (("solutions", solved), ("problems", asked)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
