"""Tests, functions, fields, metrics and flags that a page mentions exist."""

import re
from pathlib import Path

import pytest
from test_readme import PAGES

ROOT = Path(__file__).parents[1]
FOLDERS = ("", "machinery", "data", "benchmarks", "diffs", "diffs/recipes", "configs")
FILES = [x for name in FOLDERS for x in (ROOT / name).glob("*") if x.is_file()]
CODE = [x.read_text() for x in FILES if x.suffix in (".py", ".sh", ".diff", ".yaml")]
WORDS = {word for text in [*CODE, *(x.name for x in FILES)] for word in re.findall(r"\w+", text)}
FLAGS = set(re.findall(r"^\+?    (\w+): ", "\n".join(CODE), flags=re.M))  # fields, also of patches
FLAGS |= {"help", "mixed_precision", "num_processes", "fuzz", "fix"}
TESTS = {
    name
    for path in ROOT.glob("tests/**/*.py")
    for name in [path.stem, *re.findall(r"^def (test_\w+)", path.read_text(), flags=re.M)]
}
OTHERS = {  # of other programs, or of an example
    "README.md": {"my_reward"},
    "docs/data.md": {"gym_task", "chain_sum"},
    "docs/ppo.md": {"completion_ids"},
    "docs/running.md": {"WANDB_ENTITY", "terminationGracePeriodSeconds", "torchrun"}
    | {"set_requires_gradient_sync"},
    "docs/speed.md": {"ChosenLogprobs", "Product", "gpu_count"},
    "docs/your-experiment.md": {"max_length"},
    "CONTRIBUTING.md": {"fix", "test_X15_"},
}


@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"CHANGELOG.md"}))
def test_what_a_page_mentions_exists(page):
    prose = re.sub(r"^ *```.*?^ *```", "", PAGES[page], flags=re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`", prose)
    tests = re.findall(r"\btest_\w+\b…?", " ".join(spans))
    found = {x for x in tests if x in TESTS or any(y.startswith(x.strip("…")) for y in TESTS)}
    assert set(tests) == found
    assert {x for span in spans for x in re.findall(r"--(?:no-)?(\w+)", span)} <= FLAGS
    names = set()
    if page != "docs/from_trl.md":  # which names what is not here
        names = {
            x.split("(")[0] for x in spans if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*(\(.*\))?", x)
        }
    parts = {x for name in names - TESTS for x in name.split(".")}
    assert parts <= WORDS | OTHERS.get(page, set())
