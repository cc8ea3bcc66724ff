"""How well `--reward_fn data/answers.py:gsm8k` agrees with people's judgments of solutions.

    python benchmarks/judgments.py example_model_solutions.jsonl

The file is of https://github.com/openai/grade-school-math (MIT): questions, the worked answer, and
the solutions of four models, each judged. Its answers stand after `A:`, as others after `####`.
Also prints strict and lenient accuracy, and the share of solutions in the right form.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from data.answers import gsm8k  # noqa: E402
from tools.pass_at_k import accuracies  # noqa: E402


def mark(text: str) -> str:
    """The last `A:` as `####`."""
    return "####".join(text.rsplit("A:", maxsplit=1))


def main(path: str) -> None:
    """Print how often the reward is the judgment, and the reward of the worked answers."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    answers = [mark(row["ground_truth"]) for row in rows]
    questions = [row["question"] for row in rows]
    models = [name for name in rows[0] if name not in ("question", "ground_truth")]
    judged = agree = 0
    for name in models:
        solutions = [mark(row[name]["solution"]) for row in rows]
        judgments = np.array([row[name]["is_correct"] for row in rows])
        rewards = np.array(gsm8k(questions, solutions, answers))
        same = int((rewards == judgments).sum())
        judged += len(rows)
        agree += same
        print(f"{name}: {same} of {len(rows)} agree, {judgments.sum()} are right")
        print(accuracies(gsm8k, questions, solutions, answers))
    print(f"all: {agree} of {judged} judgments agree")
    right = sum(gsm8k(questions, answers, answers))
    print(f"reward 1: {right:.0f} of {len(answers)} worked answers")


if __name__ == "__main__":
    main(sys.argv[1])
