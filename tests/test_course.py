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
import starter  # noqa: E402
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
    pictures = set(re.findall(r"^!\[.*\]\(\.\./img/course/(.*)\)$", page, flags=re.M))
    assert pictures == {path.name for path in (ROOT / "docs/img/course").iterdir()}


def solutions():
    """The functions that the notebook's solutions define."""
    space = dict(vars(grade))
    for cell in CODE:
        if cell.startswith("def ") and cell[4:].partition("(")[0] in grade.TESTS:
            exec(cell, space)
    return SimpleNamespace(**{name: space[name] for name in grade.TESTS})


def test_the_solutions_get_all_points_and_the_starter_none(capsys):
    assert grade.grade(solutions()) == 18 and grade.grade(starter) == 0
    assert capsys.readouterr().out.count("not written yet") == 18


def test_usual_mistakes_lose_points_and_the_grader_says_what_is_wrong(capsys):
    right = solutions()

    def forget_the_mask(x, mask, shift_mean=True):
        return (x - x.mean() * shift_mean) / x.std()

    def return_the_advantages_alone(rewards, values, gamma, lam):
        return right.gae(rewards, values, gamma, lam)[0]

    def clip_the_ratio_only(logprobs, old_logprobs, advantages, mask, cliprange):
        ratio = (logprobs - old_logprobs).exp().clamp(1 - cliprange, 1 + cliprange)
        return (-advantages * ratio)[mask].mean()

    def exchange_policy_and_reference(logprobs, ref_logprobs, estimator):
        return right.estimate_kl(ref_logprobs, logprobs, estimator)

    def count_the_response_itself(rewards):
        return rewards - rewards.mean(dim=0)

    def points(name, mistake):
        answers = SimpleNamespace(**vars(right))
        setattr(answers, name, mistake)
        return grade.grade(answers), capsys.readouterr().out

    assert points("whiten", forget_the_mask)[0] == 14
    lost, printed = points("gae", return_the_advantages_alone)
    assert lost == 14 and "gae, lam 1: return two tensors" in printed
    assert points("clipped_loss", clip_the_ratio_only)[0] == 15
    assert points("estimate_kl", exchange_policy_and_reference)[0] == 16
    lost, printed = points("leave_one_out", count_the_response_itself)
    assert lost == 15
    assert (
        "given:    rewards = [[1], [0]]\n  found:    [[0.5], [-0.5]]\n  expected: [[1], [-1]]"
        in printed
    )


def test_the_students_version_has_all_exercises_no_solution_and_no_name_that_one_defined(tmp_path):
    """Every exercise has points and minutes; they add up to 100 points."""
    student.main(tmp_path / "mine")
    assert (tmp_path / "mine/starter.py").is_file() and (tmp_path / "mine/grade.py").is_file()
    cells = json.loads((tmp_path / "mine/course.ipynb").read_text())["cells"]
    text, code = "", ""
    for cell in cells:
        source = "".join(cell["source"]) + "\n\n"
        text += source
        if cell["cell_type"] == "code":
            code += source
    exercises = re.findall(r"^\*\*(\d\.\d)\*\* \((\d) points, \d\d minutes\)", text, re.M)
    assert [number for number, _ in exercises] == re.findall(r"^\*\*(\d\.\d)\*\*", text, re.M)
    assert len(exercises) == 24 and sum(int(points) for _, points in exercises) == 100
    assert "Solution" not in text
    command = ["ruff", "check", "--isolated", "--select", "F821", "-"]
    done = subprocess.run(command, input=code, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_the_lessons_call_functions_that_are_there():
    code = "\n".join(CODE)
    for name in ("ppo", "rloo", "train_reward"):
        script = importlib.import_module(name)
        called = set(re.findall(rf"\b{name}\.(\w+)\b(?<!\.py)", code))
        assert called and [x for x in called if not hasattr(script, x)] == []
    imports = re.findall(
        r"^(?:from|import) (?:benchmarks|data|machinery|tools|utils)\b.*", code, re.M
    )
    assert len(imports) > 7
    exec("\n".join(imports), {})


@pytest.mark.exhaustive
def test_every_cell_runs_in_a_new_folder(tmp_path):
    (tmp_path / "course.py").write_text("\n\n".join(CODE))
    env = dict(COURSE_QUICK="1", MPLBACKEND="Agg", HF_DATASETS_CACHE=str(tmp_path / "cache"))
    tiny.run_python("course.py", cwd=tmp_path, env=env, timeout=None)
