"""docs/course/: all cells of the notebook run in order; the students' version, and its grading."""

import importlib
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tiny
from test_readme import ROOT

COURSE = ROOT / "docs/course"
sys.path.insert(0, str(COURSE))
import grade  # noqa: E402
import student  # noqa: E402

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


def solutions() -> SimpleNamespace:
    names = [f"def {name}(" for name in grade.TESTS]
    exec("\n".join(x for x in CODE if x.startswith(tuple(names))), space := {**vars(grade)})
    return SimpleNamespace(**{name: space[name] for name in grade.TESTS})


def clip_the_ratio_only(logprobs, old_logprobs, advantages, mask, cliprange):
    ratio = (logprobs - old_logprobs).exp().clamp(1 - cliprange, 1 + cliprange)
    return (-advantages * ratio)[mask].mean()


def test_the_solutions_get_all_points_and_usual_mistakes_lose_some():
    import starter

    right = solutions()
    assert grade.grade(right) == 18 and grade.grade(starter) == 0
    wrong = {  # forget the padding, one value too many, one side, a sign, the response itself
        "whiten": lambda x, mask, shift_mean=True: (x - x.mean() * shift_mean) / x.std(),
        "gae": lambda r, v, gamma, lam: right.gae(r, v.roll(-1, 1), gamma, lam),
        "clipped_loss": clip_the_ratio_only,
        "estimate_kl": lambda x, y, name: right.estimate_kl(y, x, name),
        "leave_one_out": lambda rewards: rewards - rewards.mean(dim=0),
    }
    for name, mistake in wrong.items():
        assert grade.grade(SimpleNamespace(**vars(right) | {name: mistake})) < 18, name
    assert wrong.keys() == grade.TESTS.keys()


def test_the_students_version_has_all_exercises_no_solution_and_no_name_that_one_defined(tmp_path):
    """Every exercise has points and minutes; they add up to 100 points."""
    student.main(tmp_path / "mine")
    assert {x.name for x in (tmp_path / "mine").iterdir()} >= {"starter.py", "grade.py"}
    cells = json.loads((tmp_path / "mine/course.ipynb").read_text())["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells)
    exercises = re.findall(r"^\*\*(\d\.\d)\*\* \((\d) points, \d\d minutes\)", text, re.M)
    assert [x for x, _ in exercises] == sorted(re.findall(r"^\*\*(\d\.\d)\*\*", text, re.M))
    assert len(exercises) == 24 and sum(int(points) for _, points in exercises) == 100
    assert "Solution" not in text
    source = "\n\n".join("".join(x["source"]) for x in cells if x["cell_type"] == "code")
    command = ["ruff", "check", "--isolated", "--select", "F821", "-"]
    done = subprocess.run(command, input=source, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_the_lessons_call_functions_that_are_there():
    scripts = {name: importlib.import_module(name) for name in ("ppo", "rloo", "train_reward")}
    calls = {*re.findall(rf"\b({'|'.join(scripts)})\.(\w+)\b(?<!\.py)", "\n".join(CODE))}
    assert len(calls) > 10
    assert [call for call in calls if not hasattr(scripts[call[0]], call[1])] == []


@pytest.mark.exhaustive
def test_every_cell_runs_in_a_new_folder(tmp_path):
    (tmp_path / "course.py").write_text("\n\n".join(CODE))
    env = dict(COURSE_QUICK="1", MPLBACKEND="Agg", HF_DATASETS_CACHE=str(tmp_path / "cache"))
    tiny.run_python("course.py", cwd=tmp_path, env=env, timeout=None)
