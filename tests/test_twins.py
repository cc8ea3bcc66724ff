"""Functions and classes of one name in two scripts have the same text, so each can be read alone."""

import ast

import pytest
from test_readme import ROOT

SOURCES = {name: (ROOT / f"{name}.py").read_text() for name in ("ppo", "rloo", "train_reward")}
DIFFER = {  # and why; functions inside these are twins of their own
    "Args": "each script has its own flags",
    "Rollout": "rewards and values of tokens in ppo, rewards of responses in rloo",
    "compute_logprobs": "ppo also computes values",
    "make_rollout": "ppo keeps values, rloo sums the KL penalty over a response",
    "epoch_order": "rloo keeps all responses to a query together",
    "compute_advantages": "GAE in ppo (P6), leave-one-out in rloo (L3)",
    "rollout_metrics": "which metrics there are",
    "check": "which sizes have to divide",
    "main": "the algorithm",
}


def definitions(source):
    """Name → text, with decorators and comments, of functions and classes."""
    lines, found = source.splitlines(), {}

    def add(prefix, nodes):
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
                found[prefix + node.name] = "\n".join(lines[first - 1 : node.end_lineno])
                if node.name in DIFFER:
                    add(f"{node.name}.", node.body)

    add("", ast.parse(source).body)
    return found


def compare(sources):
    """Names in at least two sources, and whether their texts are the same."""
    texts = {}
    for source in sources.values():
        for name, text in definitions(source).items():
            texts.setdefault(name, []).append(text)
    return {name: len(set(found)) == 1 for name, found in texts.items() if len(found) > 1}


@pytest.mark.parametrize("name", compare(SOURCES) | DIFFER)
def test_what_has_one_name_has_one_text_unless_it_differs_by_design(name):
    """An entry of `DIFFER` that no longer differs is a mistake, too."""
    assert compare(SOURCES)[name] == (name not in DIFFER)
