"""docs/: the table of details holds code and tests, texts name flags and metrics that exist."""

import ast
import importlib
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from test_readme import PAGES, SCRIPTS

from benchmarks import mutations
from data.tasks import TASKS, Task

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| ([GRPALX]\d+) \| [^|]+ \| ([^|]+) \| ", flags=re.M)
DETAILS = {detail: where for detail, where in ROW.findall(PAGES["docs/details.md"])}
TESTS = "".join(path.read_text() for path in sorted(ROOT.glob("tests/test_*.py")))
NAMES = re.findall(r"^def (test_\w+)\(", TESTS, flags=re.M)
CODE = [*ROOT.glob("*.py"), *ROOT.glob("machinery/*.py"), ROOT / "data/tasks.py"]
PATCHES = list(ROOT.glob("diffs/*.diff"))


def defines(file: Path, name: str) -> bool:
    """Whether a file has this function, class or `Class.method`; every file has ""."""
    node = ast.parse(file.read_text())
    for part in name.split(".") if name else []:
        node = next((x for x in node.body if getattr(x, "name", "") == part), ast.Module([], []))
    return name == "" or not isinstance(node, ast.Module)


def files_of(where: str) -> list[Path]:
    """The files that a cell names: `file.name`, a patch, or `name` (both) or of some scripts."""
    scripts = re.findall(r"\b(ppo|rloo|train_reward)\b", re.sub("`.*?`", "", where))
    scripts = scripts or (["ppo", "rloo"] if "both" in where else ["ppo", "rloo", "train_reward"])
    found = []
    for name in re.findall(r"`([^`]+)`", where):
        files = [file for file in CODE if f"{name}.".startswith(f"{module(file)}.")]
        name = name.removeprefix(module(files[0])).strip(".") if files else name
        if name.endswith(".diff"):
            files, name = [ROOT / name], ""
        files = files or [ROOT / f"{script}.py" for script in scripts]
        assert all(file.suffix == ".diff" or defines(file, name) for file in files), name
        found += files
    return found


def module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def test_the_table_holds_every_detail():
    counts = dict(G=6, R=4, P=11, A=1, L=6, X=15)
    assert set(DETAILS) == {f"{kind}{i + 1}" for kind, n in counts.items() for i in range(n)}


@pytest.mark.parametrize("detail", DETAILS)
def test_a_detail_has_its_tag_in_the_files_that_the_table_names_and_a_test(detail):
    files = files_of(DETAILS[detail])
    assert files
    for file in files:
        assert re.search(rf"\W{detail}\W", file.read_text()), file
    assert any(f"_{detail}_" in name for name in NAMES)


def test_tags_and_names_of_tests_are_ids_of_the_table():
    tags = re.findall(r"\(([GRPALX]\d+)\b", "".join(x.read_text() for x in [*CODE, *PATCHES]))
    named = [tag for name in NAMES for tag in re.findall(r"(?<=_)[GRPALX]\d+(?=_)", name)]
    assert len(tags) > 100 and set(tags) | set(named) <= set(DETAILS)


def test_every_detail_has_a_mutation_whose_text_is_in_its_file_once():
    assert {detail for detail, *_ in mutations.DETAILS} == set(DETAILS)
    for detail, file, right, wrong in mutations.DETAILS:
        assert (ROOT / file).read_text().count(right) == 1 and right != wrong, detail


def test_the_readme_is_short():
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 150
    assert max(len(line) for line in lines if not line.startswith("|")) <= 100


@cache
def flags() -> set[str]:
    """The flags of all scripts and patches, and some of launchers."""
    names = [*SCRIPTS, *(f"benchmarks.{path.stem}" for path in ROOT.glob("benchmarks/*.py"))]
    classes = [getattr(importlib.import_module(name), "Args", Task) for name in names]
    found = {field.name for cls in [Task, *classes] for field in fields(cls)}
    added = re.findall(r"^\+    (\w+): ", "".join(x.read_text() for x in PATCHES), flags=re.M)
    return found | set(added) | {"help", "mixed_precision", "num_processes", "fuzz", "fix"}


@pytest.mark.parametrize("page", PAGES)
def test_flags_that_a_text_names_exist(page):
    prose = re.sub(r"^ *```.*?^ *```", "", PAGES[page], flags=re.M | re.S)
    assert set(re.findall(r"`[^`]*?--(?:no-)?(\w+)", prose)) <= flags()


def test_every_metric_is_explained(runs):
    pages = {"rloo": ["rloo", "ppo"]}
    for name, lines in runs.metrics.items():
        text = "".join(PAGES[f"docs/{page}.md"] for page in pages.get(name, [name]))
        metrics = {key for line in lines for key in line if not key.startswith(("eval/", "step"))}
        assert metrics
        for metric in metrics:
            assert f"`{metric}`" in text, (name, metric)


def test_every_symptom_has_a_picture_and_every_picture_a_symptom():
    sections = PAGES["docs/debugging.md"].split("\n## ")[1:]
    pictures = [re.findall(r"!\[[^]]+\]\((img/\S+)\)", section) for section in sections]
    there = {f"img/{path.name}" for path in ROOT.glob("docs/img/debugging_*.png")}
    assert len(sections) == len(there) and {path for (path,) in pictures} == there


def test_the_progress_line_shows_what_is_maximized():
    progress = importlib.import_module("ppo").PROGRESS
    assert progress == importlib.import_module("rloo").PROGRESS
    assert "objective/rlhf_reward" in progress


def test_presets_are_of_tasks_that_there_are_and_say_something():
    for name in SCRIPTS:
        for task, preset in importlib.import_module(name).PRESETS.items():
            assert task in TASKS and preset, (name, task)


@pytest.mark.parametrize(
    "path",
    [*(ROOT / f"{name}.py" for name in sorted(SCRIPTS)), ROOT / "data/tasks.py"],
    ids=lambda path: path.name,
)
def test_every_flag_has_one_line_of_help(path):
    body = path.read_text().split("class Task:" if path.name == "tasks.py" else "class Args:")[1]
    body = body.split("\n\n\n")[0]
    flags = re.findall(r"^    \w+: .*\n(.*)", body, re.M)
    assert len(flags) > 10
    for text in flags[path.name != "tasks.py" :]:  # the first field of Args is the task
        assert re.fullmatch(r'    """.{5,80}"""', text), text
