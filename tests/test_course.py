"""docs/course/: all cells of the notebook run in order, and so do its checks and solutions."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CELLS = json.loads((ROOT / "docs/course/course.ipynb").read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_the_notebook_is_without_outputs_and_defines_nothing_that_a_script_has():
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in CELLS)
    scripts = "".join(path.read_text() for path in ROOT.glob("*.py"))
    assert set(re.findall(r"^def (\w+)", "\n".join(CODE), flags=re.M)).isdisjoint(
        set(re.findall(r"^ *def (\w+)", scripts, flags=re.M))
    )


@pytest.mark.exhaustive
def test_every_cell_runs_in_a_new_folder(tmp_path):
    (tmp_path / "course.py").write_text("\n\n".join(CODE))
    env = os.environ | {"COURSE_QUICK": "1", "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    env["HF_DATASETS_CACHE"] = str(tmp_path / "cache")
    command = [sys.executable, "course.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
