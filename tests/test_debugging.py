"""docs/debugging.md and benchmarks/debugging.py: sections, pictures, broken runs, the CSV."""

import importlib
import math
import re
import shlex
from pathlib import Path

import pytest

import ppo
import rloo
from benchmarks import ablations, debugging, sweep
from machinery.cli import parse_args

PAGE = (sweep.ROOT / "docs" / "debugging.md").read_text()
ROWS = sweep.read_rows(Path(debugging.__file__).with_suffix(".csv"))


def test_every_section_has_its_own_picture_and_the_script_draws_all_of_them(tmp_path):
    sections = PAGE.split("\n## ")[1:]
    pictures = [re.findall(r"!\[[^]]+\]\(img/debugging_(\w+)\.png\)", text) for text in sections]
    assert pictures == [[symptom] for symptom in debugging.PICTURES]
    debugging.draw(ROWS, tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (sweep.ROOT / "docs" / "img").glob("debugging_*")}
    assert drawn == {f"debugging_{symptom}.png" for symptom in debugging.PICTURES}


def test_pictures_show_every_run_beside_a_healthy_one_and_the_csv_has_their_curves():
    shown = [name for _, *names in debugging.PICTURES.values() for name in names]
    assert set(shown) == set(debugging.RUNS) == {row["run"] for row in ROWS}
    for metrics, healthy, *broken in debugging.PICTURES.values():
        assert healthy.startswith("healthy") and broken
        for name in (healthy, *broken):
            rows = [row for row in ROWS if row["run"] == name]
            assert len(rows) in (16, 32) and all(row["commit"] and row["date"] for row in rows)
            assert all(math.isfinite(float(row[x])) for row in rows for x in metrics), name


@pytest.mark.parametrize("name", debugging.RUNS)
def test_a_run_is_broken_by_flags_that_parse_or_by_a_text_that_is_in_its_file_once(name, tmp_path):
    script, off = debugging.RUNS[name]
    module = importlib.import_module(script)
    parse_args(module.Args, module.PRESETS, ["--task", "synthetic", *shlex.split(off.flags)])
    if off.file:
        text = (sweep.ROOT / off.file).read_text()
        assert text.count(off.right) == 1
        (tmp_path / off.file).write_text(text)
        ablations.remove_detail(off, tmp_path)
        changed = (tmp_path / off.file).read_text()
        assert changed != text
        compile(changed, off.file, "exec")


def test_no_synthetic_response_satisfies_the_rule():
    texts = (sweep.ROOT / "data" / "synthetic" / "stories.txt").read_text()
    assert debugging.never(["", ""], ["In 1999.", texts]) == [1, 0]


def test_the_progress_line_and_curves_show_what_is_maximized():
    assert ppo.PROGRESS == rloo.PROGRESS and debugging.TOTAL in ppo.PROGRESS
