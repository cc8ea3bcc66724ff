"""What stands in two scripts under one name has the same text: mending a mistake in one file and not in another fails."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ("ppo", "rloo", "train_reward", "sft")
SOURCES = {name: (ROOT / f"{name}.py").read_text() for name in SCRIPTS}

DIFFER = {  # by design, and why; methods of these classes are twins of their own
    "Args": "each script has its own flags",
    "PRESETS": "and defaults by task",
    "Rollout": "of tokens in ppo, of completions in rloo",
    "Models": "names its own policy",
    "make_rollout": "ppo keeps values, rloo sums log-probabilities and takes the baseline",
    "kl_penalised_rewards": "of tokens (P8), of completions (L2)",
    "loss_terms": "PPO's (P10), RLOO's (L4)",
    "train_step": "what a step learns from",
    "summarise": "what there is to watch",
    "micro_batches": "a label's candidates in train_reward, trimmed rows in sft",
    "check": "which sizes have to divide",
    "PANELS": "which curves are drawn",
    "main": "the algorithm",
}


def definitions(source: str) -> dict[str, str]:
    """Top-level functions, classes and constants of a source, and the methods of classes in `DIFFER`: name → text, from
    the first decorator to the last line, comments included."""
    lines, found = source.splitlines(), {}

    def add(name: str, node: ast.stmt) -> None:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        found[name] = "\n".join(lines[first - 1 : node.end_lineno])

    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            add(node.name, node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            add(ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target), node)
        if isinstance(node, ast.ClassDef) and node.name in DIFFER:
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    add(f"{node.name}.{method.name}", method)
    return found


def compare(sources: dict[str, str]) -> tuple[set[str], set[str]]:
    """Names that stand in two sources at least: those of one text, and those whose texts differ."""
    texts: dict[str, list[str]] = {}
    for source in sources.values():
        for name, text in definitions(source).items():
            texts.setdefault(name, []).append(text)
    shared = {name: len(set(found)) for name, found in texts.items() if len(found) > 1}
    return {name for name, kinds in shared.items() if kinds == 1}, {name for name, kinds in shared.items() if kinds > 1}


TWINS, OTHERS = compare(SOURCES)


def test_what_has_one_name_in_two_scripts_has_one_text_but_for_what_differs_by_design():
    assert sorted(OTHERS - set(DIFFER)) == []


def test_nothing_is_said_to_differ_that_is_the_same_or_stands_in_one_script_only():
    assert sorted(set(DIFFER) - OTHERS) == []


@pytest.mark.parametrize("name", ["AdamTF", "draw", "sample", "sample_all", "moments", "truncate", "anneal"])
def test_the_comparison_really_sees_the_twins(name):
    assert name in TWINS
    assert sum(f"def {name}(" in source or f"class {name}(" in source for source in SOURCES.values()) > 2


@pytest.mark.parametrize(
    ("script", "name", "old", "new"),
    [
        ("rloo", "anneal", "step", "steps"),
        ("ppo", "moments", "x: Tensor", "y: Tensor"),
        ("rloo", "Score", "  # [B]", "  # [K]"),  # comments too
        ("train_reward", "sample", "@torch.no_grad()\n", ""),  # and decorators
        ("sft", "truncate", " >= ", " > "),
        ("rloo", "SMALL", "lr=", "lr=1"),
    ],
)
def test_a_drift_by_hand_is_found(script, name, old, new):
    text = definitions(SOURCES[script])[name]
    assert old in text and SOURCES[script].count(text) == 1
    _, others = compare(SOURCES | {script: SOURCES[script].replace(text, text.replace(old, new, 1))})
    assert others - set(DIFFER) == {name}


def test_a_name_that_no_longer_differs_is_found():
    mine, other = (definitions(SOURCES[name])["kl_penalised_rewards"] for name in ("ppo", "rloo"))
    _, others = compare(SOURCES | {"rloo": SOURCES["rloo"].replace(other, mine)})
    assert set(DIFFER) - others == {"kl_penalised_rewards"}


def test_methods_of_a_class_that_differs_are_twins_too():
    source = "class Rollout:\n    x: int = {}\n\n    def take(self):\n        return {}\n"
    same, others = compare({"ppo": source.format(1, 1), "rloo": source.format(2, 1)})
    assert (same, others) == ({"Rollout.take"}, {"Rollout"})
    same, others = compare({"ppo": source.format(1, 1), "rloo": source.format(2, 3)})
    assert (same, others) == (set(), {"Rollout", "Rollout.take"})
