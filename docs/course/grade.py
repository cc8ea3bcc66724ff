"""Count the points of starter.py, one for each test that passes.

python grade.py            # or another file
"""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

LOG = torch.tensor([[1.5, 0.5, 1.5, 0.5]]).log()  # ratios of four tokens
SIGNS = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
ALL = torch.ones(1, 4, dtype=torch.bool)
P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])  # policy and reference
MASK = torch.tensor([[True, True, False], [True, False, False]])
X = torch.tensor([[1.0, 3.0, 99.0], [8.0, 99.0, 99.0]])  # mean 4, variance 26 / 3
REWARDS, VALUES = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[0.5, 1.0, 0.0]])
GROUPS = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 2.0]])  # K = 4, P = 2


def slope(f: Any, log_ratio: Tensor) -> Tensor:
    """The gradient of the loss with respect to each log-probability."""
    log_ratio = log_ratio.clone().requires_grad_()
    f(log_ratio, torch.zeros(1, 4), SIGNS, ALL, 0.2).backward()
    assert log_ratio.grad is not None
    return log_ratio.grad


TESTS: dict[str, dict[str, Any]] = {  # function → what a test is about → (found, expected)
    "whiten": {
        "mean 0, variance 1": lambda f: (f(X, MASK)[MASK], (X[MASK] - 4) / (26 / 3) ** 0.5),
        "padding is 0": lambda f: (f(X, MASK, False)[~MASK], torch.zeros(3)),
        "the mean stays": lambda f: (f(X, MASK, False)[MASK].mean(), 4.0),
        "equal numbers": lambda f: (f(torch.ones(2, 3), MASK), torch.zeros(2, 3)),
    },
    "gae": {
        "lam 0": lambda f: (f(REWARDS, VALUES, 1.0, 0.0)[0], [[1.5, -1.0, 2.0]]),
        "lam 1": lambda f: (f(REWARDS, VALUES, 1.0, 1.0)[0], [[2.5, 1.0, 2.0]]),
        "gamma and lam": lambda f: (f(REWARDS, VALUES, 0.5, 0.5)[0], [[0.875, -0.5, 2.0]]),
        "returns": lambda f: (f(REWARDS, VALUES, 1.0, 1.0)[1], [[3.0, 2.0, 2.0]]),
    },
    "clipped_loss": {
        "a ratio of 1": lambda f: (f(LOG * 0, LOG * 0, SIGNS + 1, ALL, 0.2), -1.0),
        "clipped on one side": lambda f: (f(LOG, LOG * 0, SIGNS, ALL, 0.2), 0.15),
        "padding": lambda f: (f(LOG, LOG * 0, SIGNS, ALL & (SIGNS > 0), 0.2), -0.85),
        "gradient": lambda f: (slope(f, LOG), [[0.0, -0.125, 0.375, 0.0]]),
    },
    "estimate_kl": {
        "k1": lambda f: (f(P.log(), Q.log(), "k1"), [0.916291, 0.0, -0.916291]),
        "k2": lambda f: (f(P.log(), Q.log(), "k2"), [0.419794, 0.0, 0.419794]),
        "k3": lambda f: (f(P.log(), Q.log(), "k3"), [0.316291, 0.0, 0.583709]),
    },
    "leave_one_out": {
        "two right of four": lambda f: (f(GROUPS)[:, 0], [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        "queries are apart": lambda f: (f(GROUPS)[:, 1], [-2 / 3, -2 / 3, -2 / 3, 2.0]),
        "two responses": lambda f: (f(GROUPS[:2, :1]), [[1.0], [-1.0]]),
    },
}


def grade(module: ModuleType) -> int:
    """Print what fails, and the points of each function; return their sum."""
    total = 0
    for name, tests in TESTS.items():
        passed = 0
        for what, test in tests.items():
            try:
                found, expected = test(getattr(module, name))
                expected = torch.as_tensor(expected)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
                passed += 1
            except NotImplementedError:
                print(f"{name}, {what}: not written yet")
            except Exception as error:
                print(f"{name}, {what}: {type(error).__name__}: {error}")
        print(f"{name}: {passed} of {len(tests)} points")
        total += passed
    print(f"{total} of {sum(map(len, TESTS.values()))} points")
    return total


if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else "starter.py"
    spec: Any = importlib.util.spec_from_file_location("starter", path)
    spec.loader.exec_module(starter := importlib.util.module_from_spec(spec))
    grade(starter)
