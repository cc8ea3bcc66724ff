"""Which folder may import which: no circles, and nobody imports the benchmarks."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ("ppo", "rloo", "train_reward", "sft")
MAY_IMPORT = {
    "data": {"data"},
    "utils": set(),
    "machinery": {"data", "machinery", "utils"},
    "scripts": {"data", "machinery", "utils", "scripts"},
    "tools": {"data", "machinery", "utils", "scripts", "tools", "tests"},
    "benchmarks": {"data", "machinery", "utils", "scripts", "tools", "tests", "benchmarks"},
}


def part(name):
    """The part of the house that a module belongs to; None if it is a library's."""
    first = name.split(".")[0]
    if first in SCRIPTS:
        return "scripts"
    if first in ("tiny", "formats", "hub"):
        return "tests"
    return first if first in MAY_IMPORT else None


def imports(path):
    """The parts that a file imports, at its top or inside of functions."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {part(name) for name in names} - {None}


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_a_folder_imports_only_what_is_below_it(name):
    paths = list((ROOT / name).glob("**/*.py"))
    if name == "utils":
        paths = [ROOT / "utils.py"]
    if name == "scripts":
        paths = [ROOT / f"{script}.py" for script in SCRIPTS]
    assert paths
    for path in paths:
        assert imports(path) <= MAY_IMPORT[name], path


@pytest.mark.parametrize("path", sorted(ROOT.glob("tools/*.py")), ids=lambda path: path.stem)
def test_the_help_of_a_tool_begins_as_its_file(path):
    """With one sentence, which says what the tool is for."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            first, *_ = str(ast.get_docstring(tree)).splitlines()
            assert ast.get_docstring(node) == first
