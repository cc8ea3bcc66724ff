"""README says what the code does (pitfall 23)."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import tyro

import ppo
import rloo
import sft
import train_reward
import utils

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SCRIPTS = {"ppo": ppo, "rloo": rloo, "sft": sft, "train_reward": train_reward}
CODE = {name: (ROOT / f"{name}.py").read_text() for name in (*SCRIPTS, "utils")}
DETAILS = re.findall(r"^\| ([GRPALX]\d+) \|", README, flags=re.M)


def script_commands(text: str) -> list[tuple[str, str]]:
    return re.findall(r"(?:python|launch|num_processes 2|bf16) (ppo|rloo|sft|train_reward)\.py([^\n`#&]*)", text)


TEXTS = {"README.md": README, "demo.sh": (ROOT / "demo.sh").read_text()} | {n: m.__doc__ for n, m in SCRIPTS.items()}


@pytest.mark.parametrize("source", TEXTS)
def test_23_commands_parse_as_printed(source):
    commands = script_commands(TEXTS[source])
    assert commands
    for script, flags in commands:
        argv = [word for word in shlex.split(flags) if word != "…" and word != "--help"]
        args = utils.parse_args(SCRIPTS[script].Args, SCRIPTS[script].PRESETS, argv)
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
    assert "pip install -e . && ./demo.sh" in README and "pip install -e '.[dev]' && pytest" in README
    assert (ROOT / "demo.sh").stat().st_mode & 0o111
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / picture).is_file(), picture


@pytest.mark.parametrize("detail", DETAILS)
def test_every_detail_of_the_table_is_tagged_in_the_code_and_tested(detail):
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py") if path.name != "test_readme.py")
    assert any(re.search(rf"\b{detail}\b", code) for code in CODE.values())
    assert re.search(rf"\b(test_)?{detail}(\b|_)", tests)


def test_the_table_holds_every_general_reward_policy_and_rloo_detail():
    wanted = [f"G{i}" for i in range(1, 7)] + [f"R{i}" for i in range(1, 5)] + [f"P{i}" for i in range(1, 12)]
    assert set(wanted + ["A1", "X9", "X10", "X11"] + [f"L{i}" for i in range(1, 7)]) <= set(DETAILS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_task_has_its_settings_in_every_script(script):
    assert set(SCRIPTS[script].PRESETS) == set(utils.TASKS)


@pytest.mark.parametrize("script", ["ppo", "rloo"])
def test_every_metric_that_is_drawn_is_explained(script):
    for name in SCRIPTS[script].PANELS:
        assert f"`{name}`" in README, name
