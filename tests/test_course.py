"""docs/course/: all cells of the notebook run in order, and so do its checks and solutions."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COURSE = ROOT / "docs/course"
CELLS = json.loads((COURSE / "course.ipynb").read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_the_page_has_all_cells_in_order_solutions_folded_and_its_pictures():
    page, at = (COURSE / "lessons.md").read_text(), 0
    for cell in CELLS:
        source = "".join(cell["source"])
        if "jp-MarkdownHeadingCollapsed" in cell["metadata"]:
            source = f"<summary>{source.strip('# ')}</summary>"
        at = page.index(source, at) + len(source)
    solutions = re.findall(r"<summary>Solution (\d\.\d)", page)
    assert solutions == sorted(set(re.findall(r"^\*\*(\d\.\d)\*\*", page, flags=re.M)))
    pictures = [COURSE / path for path in re.findall(r"^!\[.*\]\((.*)\)$", page, flags=re.M)]
    assert {x.resolve() for x in pictures} == {*(ROOT / "docs/img/course").resolve().iterdir()}


@pytest.mark.exhaustive
def test_every_cell_runs_in_a_new_folder(tmp_path):
    (tmp_path / "course.py").write_text("\n\n".join(CODE))
    env = os.environ | {"COURSE_QUICK": "1", "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    env["HF_DATASETS_CACHE"] = str(tmp_path / "cache")
    command = [sys.executable, "course.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
