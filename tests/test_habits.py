"""What contributors rely on: quick --help, one version, pins."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pins(file: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / file).read_text(), flags=re.M))


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


SLOW = {"datasets", "pyarrow", "pandas", "wandb", "matplotlib", "peft", "scipy"}
SLOW |= {f"transformers.{name}" for name in ("modeling_utils", "generation.utils")}
SLOW |= {"torch.distributed.checkpoint"}


HELP = """
import contextlib, runpy, sys
for script in ("ppo", "rloo", "train_reward", "sft"):
    sys.argv = [script, "--task", "synthetic", "--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_path(f"{script}.py", run_name="__main__")
print(*sys.modules)
"""


def test_help_imports_nothing_that_takes_seconds():
    """Names instead of seconds, which depend on what else the machine does."""
    options = dict(cwd=ROOT, check=True, capture_output=True, text=True)
    done = subprocess.run([sys.executable, "-c", HELP], **options)
    found = set(done.stdout.splitlines()[-1].split())
    assert done.stdout.count("--task") >= 4
    assert {"tyro", "machinery.cli"} <= found and not found & SLOW


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == citation["version"] == "0.2.0"


def test_a_lower_bound_is_the_oldest_version_that_was_tested():
    """And the exact versions of requirements.txt are inside the bounds."""
    oldest, exact = pins("requirements-oldest.txt"), pins("requirements.txt")
    for requirement in [*PROJECT["dependencies"], *EXTRAS["rouge"], *EXTRAS["clean"]]:
        name, low, high = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,<([\d.]+))?", requirement).groups()
        found, wanted = version(oldest[name]), version(low)
        assert found[: len(wanted)] == wanted and not any(found[len(wanted) :]), name
        assert found <= version(exact[name]) < version(high or "999"), name
    assert {*EXTRAS["rouge"], *EXTRAS["clean"], *EXTRAS["lora"]} <= {*EXTRAS["dev"]}
