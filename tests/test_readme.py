"""README says what the code does (pitfall 23)."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import tyro

import ppo
import rloo
import sft
import tasks
import train_reward

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SCRIPTS = {"ppo": ppo, "rloo": rloo, "sft": sft, "train_reward": train_reward}
CODE = {name: (ROOT / f"{name}.py").read_text() for name in (*SCRIPTS, "utils", "packing")}
ROWS = re.findall(r"^\| ([GRPALX]\d+) \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", README, flags=re.M)
DETAILS = [detail for detail, _, _ in ROWS]
TESTS = {path.name: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}


def script_commands(text: str) -> list[tuple[str, str]]:
    return re.findall(r"(?:python|launch|num_processes 2|bf16) (ppo|rloo|sft|train_reward)\.py([^\n`#&]*)", text)


TEXTS = {"README.md": README, "demo.sh": (ROOT / "demo.sh").read_text()} | {n: m.__doc__ for n, m in SCRIPTS.items()}


@pytest.mark.parametrize("source", TEXTS)
def test_23_commands_parse_as_printed(source):
    commands = script_commands(TEXTS[source])
    assert commands
    for script, flags in commands:
        argv = [word for word in shlex.split(flags) if word != "…" and word != "--help"]
        args = tasks.parse_args(SCRIPTS[script].Args, SCRIPTS[script].PRESETS, argv)
        assert argv == [] or args.task.task == argv[argv.index("--task") + 1]


BENCHMARKS = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
PRINTED = TEXTS | BENCHMARKS | {"LOG.md": (ROOT / "LOG.md").read_text()}


@pytest.mark.parametrize("source", [name for name, text in PRINTED.items() if "python benchmarks/" in text])
def test_23_commands_of_benchmarks_parse_as_printed(source):
    for name, flags in re.findall(r"python benchmarks/(\w+)\.py([^\n`#&:]*)", PRINTED[source]):
        assert name in BENCHMARKS
        if "tyro.cli" in BENCHMARKS[name]:
            tyro.cli(importlib.import_module(f"benchmarks.{name}").Args, args=shlex.split(flags))
        else:
            assert not flags.strip()


def test_23_the_two_commands_are_there_and_their_files_too():
    assert "pip install -e . && ./demo.sh" in README and "pip install -e '.[dev]' && pytest -n 2" in README
    assert (ROOT / "demo.sh").stat().st_mode & 0o111
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / picture).is_file(), picture


def definitions(source: str) -> dict[str, str]:
    """Functions, classes and methods (`Class.method`) of a source → their text."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = ast.get_source_segment(source, node)
        if isinstance(node, ast.ClassDef):
            methods = (method for method in node.body if isinstance(method, ast.FunctionDef))
            found |= {f"{node.name}.{method.name}": ast.get_source_segment(source, method) for method in methods}
    return found


def mentions(detail: str, text: str) -> bool:
    """The id stands in a text, alone, in the name of a test or inside a range such as P5–P11."""
    ranges = ((a, int(first), int(last)) for a, first, last in re.findall(r"\b([GRPALX])(\d+)–\1(\d+)\b", text))
    inside = any(a == detail[0] and first <= int(detail[1:]) <= last for a, first, last in ranges)
    return inside or re.search(rf"(?<![A-Za-z0-9]){detail}(?![A-Za-z0-9])", text) is not None


@pytest.mark.parametrize(("detail", "where"), [row[:2] for row in ROWS], ids=DETAILS)
def test_where_of_a_detail_names_code_that_carries_its_tag(detail, where):
    """`file.name` stands in that file; a bare `name` in two files or more, tagged in each; a patch adds the tag."""
    names = re.findall(r"`([^`]+)`", where)
    assert names and re.sub(r"`[^`]+`", "", where).strip(", ") == ""
    for name in names:
        if name.endswith(".diff"):
            added = [line for line in (ROOT / name).read_text().splitlines() if line.startswith("+")]
            assert mentions(detail, "\n".join(added))
            continue
        file, _, rest = name.partition(".")
        files = [file] if file in CODE else list(CODE)
        texts = {f: definitions(CODE[f]).get(rest if file in CODE else name) for f in files}
        texts = {f: text for f, text in texts.items() if text}
        assert len(texts) == 1 if file in CODE else len(texts) > 1, name
        assert all(mentions(detail, text) for text in texts.values()), name


@pytest.mark.parametrize(("detail", "test"), [(row[0], row[2]) for row in ROWS], ids=DETAILS)
def test_the_tests_of_a_detail_exist_and_carry_its_id(detail, test):
    for word in test.strip().split(", "):
        if word == "golden":
            assert mentions(detail, TESTS["test_golden.py"])
        elif word.endswith(".py`"):
            assert any(mentions(detail, name) for name in names_of_tests(TESTS[word.strip("`")]))
        else:
            prefix = re.fullmatch(r"`(test_\w+_)…`", word)[1]
            assert mentions(detail, prefix)
            assert any(name.startswith(prefix) for text in TESTS.values() for name in names_of_tests(text)), prefix


def names_of_tests(source: str) -> list[str]:
    """The test functions of a source."""
    return re.findall(r"^def (test_\w+)\(", source, flags=re.M)


def test_tests_are_named_after_details_that_there_are():
    """An id in the name of a test is one of the table's, or of the pitfalls, which are numbers alone."""
    for text in TESTS.values():
        for name in names_of_tests(text):
            assert set(re.findall(r"(?<=_)[GRPALX]\d+(?=_)", name)) <= set(DETAILS), name


def test_the_table_holds_every_general_reward_policy_and_rloo_detail():
    wanted = [f"G{i}" for i in range(1, 7)] + [f"R{i}" for i in range(1, 5)] + [f"P{i}" for i in range(1, 12)]
    wanted += ["A1"] + [f"L{i}" for i in range(1, 7)] + [f"X{i}" for i in range(1, 15)]
    assert set(wanted) == set(DETAILS)


def test_every_detail_has_a_mutation_whose_text_stands_in_its_file_once():
    mutations = importlib.import_module("benchmarks.mutations").DETAILS
    assert {detail for detail, *_ in mutations} == set(DETAILS)
    for detail, file, right, wrong in mutations:
        assert (ROOT / file).read_text().count(right) == 1 and right != wrong, detail


@pytest.mark.parametrize("script", SCRIPTS)
def test_presets_are_of_tasks_that_there_are_and_say_something(script):
    """A task without a preset has the defaults."""
    for name, preset in SCRIPTS[script].PRESETS.items():
        assert name in tasks.TASKS and preset, name


@pytest.mark.parametrize("script", ["ppo", "rloo"])
def test_every_metric_that_is_drawn_is_explained(script):
    for name in SCRIPTS[script].PANELS:
        assert f"`{name}`" in README, name


def test_the_map_of_how_a_script_reads_has_the_right_lines():
    """`[`name`](file.py#L12)`: the line where the function or class begins."""
    links = re.findall(r"\[`(\w+)`\]\((\w+\.py)#L(\d+)\)", README)
    assert len(links) > 20
    for name, file, line in links:
        begins = {n.name: n.lineno for n in ast.parse((ROOT / file).read_text()).body if hasattr(n, "name")}
        assert int(line) == begins[name], f"{name} begins in line {begins[name]} of {file}"
