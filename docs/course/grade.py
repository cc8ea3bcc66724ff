"""Count the points of starter.py, one for each test that passes.

python grade.py            # or another file
"""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

LOG = torch.tensor([[1.5, 0.5, 1.5, 0.5]]).log()  # ratios of four tokens
LEARNED, OLD = LOG.clone().requires_grad_(), torch.zeros(1, 4)
SIGNS = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
ALL = torch.ones(1, 4, dtype=torch.bool)
P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])  # policy and reference
MASK = torch.tensor([[True, True, False], [True, False, False]])
X = torch.tensor([[1.0, 3.0, 99.0], [8.0, 99.0, 99.0]])  # mean 4, variance 26 / 3
REWARDS, VALUES = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[0.5, 1.0, 0.0]])
GROUPS = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 2.0]])  # K = 4, P = 2


class Mistake(Exception):
    """What to change, in a sentence."""


def tensor(result: Any) -> Tensor:
    """the result"""
    if not isinstance(result, Tensor):
        raise Mistake(f"return a tensor, not {type(result).__name__}")
    return result.detach()


def pair(result: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise Mistake("return two tensors, advantages and returns")
    return tensor(result[0]), tensor(result[1])


def select(result: Any, mask: Tensor) -> Tensor:
    shape = list(tensor(result).shape)
    if shape != list(mask.shape):
        raise Mistake(f"return the shape {list(mask.shape)} of x, not {shape}")
    return tensor(result)[mask]


def real(result: Any) -> Tensor:
    """where mask is True"""
    return select(result, MASK)


def padding(result: Any) -> Tensor:
    """where mask is False"""
    return select(result, ~MASK)


def mean(result: Any) -> Tensor:
    """the mean where mask is True"""
    return real(result).mean()


def advantages(result: Any) -> Tensor:
    """the advantages"""
    return pair(result)[0]


def returns(result: Any) -> Tensor:
    """the returns"""
    return pair(result)[1]


def gradient(result: Any) -> Tensor:
    """the gradient with respect to logprobs"""
    tensor(result)
    if not result.requires_grad:
        raise Mistake("compute the loss from logprobs: it has no gradient")
    return torch.autograd.grad(result, LEARNED)[0]


def first(result: Any) -> Tensor:
    """the first query"""
    return tensor(result)[:, 0]


def second(result: Any) -> Tensor:
    """the second query"""
    return tensor(result)[:, 1]


@dataclass
class Test:
    """A point: what a function returns for these arguments, or a part of it."""

    about: str
    given: tuple[Any, ...]
    expected: Any
    part: Callable[[Any], Tensor] = tensor


TESTS = {
    "whiten": [
        Test("mean 0, variance 1", (X, MASK), (X[MASK] - 4) / (26 / 3) ** 0.5, real),
        Test("padding is 0", (X, MASK, False), [0.0, 0.0, 0.0], padding),
        Test("the mean stays", (X, MASK, False), 4.0, mean),
        Test("equal numbers", (torch.ones(2, 3), MASK), torch.zeros(2, 3)),
    ],
    "gae": [
        Test("lam 0", (REWARDS, VALUES, 1.0, 0.0), [[1.5, -1.0, 2.0]], advantages),
        Test("lam 1", (REWARDS, VALUES, 1.0, 1.0), [[2.5, 1.0, 2.0]], advantages),
        Test("gamma and lam", (REWARDS, VALUES, 0.5, 0.5), [[0.875, -0.5, 2.0]], advantages),
        Test("returns", (REWARDS, VALUES, 1.0, 1.0), [[3.0, 2.0, 2.0]], returns),
    ],
    "clipped_loss": [
        Test("a ratio of 1", (OLD, OLD, SIGNS + 1, ALL, 0.2), -1.0),
        Test("clipped on one side", (LOG, OLD, SIGNS, ALL, 0.2), 0.15),
        Test("padding", (LOG, OLD, SIGNS, ALL & (SIGNS > 0), 0.2), -0.85),
        Test("gradient", (LEARNED, OLD, SIGNS, ALL, 0.2), [[0, -0.125, 0.375, 0]], gradient),
    ],
    "estimate_kl": [
        Test("k1", (P.log(), Q.log(), "k1"), [0.916291, 0.0, -0.916291]),
        Test("k2", (P.log(), Q.log(), "k2"), [0.419794, 0.0, 0.419794]),
        Test("k3", (P.log(), Q.log(), "k3"), [0.316291, 0.0, 0.583709]),
    ],
    "leave_one_out": [
        Test("two right of four", (GROUPS,), [2 / 3, -2 / 3, -2 / 3, 2 / 3], first),
        Test("queries are apart", (GROUPS,), [-2 / 3, -2 / 3, -2 / 3, 2.0], second),
        Test("two responses", (GROUPS[:2, :1],), [[1.0], [-1.0]]),
    ],
}


def show(x: Any) -> str:
    """Numbers with four digits."""
    if isinstance(x, Tensor):
        x = x.tolist()
    if isinstance(x, list):
        return "[" + ", ".join(show(part) for part in x) + "]"
    return f"{x:.4g}" if isinstance(x, float) else repr(x)


def mistake_in(function: Callable[..., Any], test: Test) -> str:
    """What is wrong, or an empty text."""
    arguments = [x.clone() if isinstance(x, Tensor) else x for x in test.given]
    try:
        found = test.part(function(*arguments))
    except NotImplementedError:
        return "not written yet"
    except Mistake as mistake:
        return str(mistake)
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        return f"{type(error).__name__} in line {line}: {error}"
    expected = torch.as_tensor(test.expected, dtype=torch.float32)
    if found.shape == expected.shape and torch.allclose(found, expected, 1e-4, 1e-4):
        return ""
    names = inspect.signature(function).parameters
    given = [f"{name} = {show(x)}" for name, x in zip(names, test.given, strict=False)]
    lines = [f"wrong, {test.part.__doc__}", "  given:    " + ", ".join(given)]
    lines.append("  found:    " + show(found))
    lines.append("  expected: " + show(expected))
    return "\n".join(lines)


def grade(module: ModuleType) -> int:
    """Print what fails, and the points of each function; return their sum."""
    total = 0
    for name, tests in TESTS.items():
        points = 0
        for test in tests:
            function = getattr(module, name, None)
            mistake = mistake_in(function, test) if function else "there is no such function"
            if mistake:
                print(f"{name}, {test.about}: {mistake}")
            else:
                points += 1
        print(f"{name}: {points} of {len(tests)} points")
        total += points
    print(f"{total} of {sum(map(len, TESTS.values()))} points")
    return total


if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else "starter.py"
    if not Path(path).is_file():
        sys.exit(f"{path} is not a file: python grade.py starter.py")
    spec: Any = importlib.util.spec_from_file_location("starter", path)
    spec.loader.exec_module(starter := importlib.util.module_from_spec(spec))
    grade(starter)
