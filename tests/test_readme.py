"""README and docs/: links, commands, flags and code are right.
`python tests/test_readme.py --fix` updates where links lead, and how many lines a script has."""

import ast
import importlib
import inspect
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.mutations import copy_project  # noqa: E402
from machinery.cli import parse_args  # noqa: E402

README = ROOT / "README.md"
PAGES = {"diffs/README.md": (ROOT / "diffs/README.md").read_text()}
for path in [README, *ROOT.glob("C*.md"), *ROOT.glob("docs/*.md")]:
    PAGES[str(path.relative_to(ROOT))] = path.read_text()
SCRIPTS = {"ppo", "rloo", "train_reward", "sft"}
LINK = re.compile(r"\[`([\w.]+)`\]\((\w+\.py)#L(\d+)\)")
LENGTH = re.compile(r"(?m)^\| `([\w/]+\.py)` \| (\d+) \|")


def right_line(link):
    """The link with the line where its function, class or `Class.method` begins."""
    name, file, _ = link.groups()
    node = ast.parse((ROOT / file).read_text())
    for part in name.split("."):  # a function, or one inside a function or class
        (node,) = (child for child in node.body if getattr(child, "name", "") == part)
    return f"[`{name}`]({file}#L{node.lineno})"


def right_length(row):
    return f"| `{row[1]}` | {len((ROOT / row[1]).read_text().splitlines())} |"


def blocks(page, language):
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", PAGES[page], flags=re.M | re.S)


def code_of(page, words):
    """The first block of Python on a page that has these words."""
    return next(block for block in blocks(page, "python") if words in block)


def commands(lines):
    """One command a line, without comments."""
    found = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        command = re.sub(r"(^|\s)#.*", "", line)
        if command:
            found.append(command)
    return found


PRINTED = {page: commands(blocks(page, "bash")) for page in PAGES}
PRINTED["demo.sh"] = commands([(ROOT / "demo.sh").read_text()])
for path in [*ROOT.glob("*.py"), *ROOT.glob("tools/*.py"), *ROOT.glob("benchmarks/*.py")]:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    found = commands(re.findall(r"^    (.*)$", text, flags=re.M))  # indented in docstrings
    if found:
        PRINTED[path.name] = found


def test_links_into_a_script_point_to_the_line_of_what_they_name():
    readme = PAGES["README.md"]
    assert len(LINK.findall(readme)) > 12
    assert LINK.sub(right_line, readme) == readme, "run me with --fix"
    assert not re.search(r"\.py#L\d", LINK.sub("", "".join(PAGES.values())))


def test_the_readme_says_how_long_the_scripts_are():
    readme = PAGES["README.md"]
    rows = dict(LENGTH.findall(readme))
    assert rows.keys() == {"ppo.py", "rloo.py", "benchmarks/plain_ppo.py"}
    assert LENGTH.sub(right_length, readme) == readme, "run me with --fix"
    assert int(rows["benchmarks/plain_ppo.py"]) < 350  # can be read in five minutes
    assert len(readme.splitlines()) <= 150


def test_the_readme_shows_the_loop_of_ppo():
    excerpt = code_of("README.md", "compute_advantages")
    lines = [line.strip() for line in excerpt.splitlines()]
    source = (ROOT / "ppo.py").read_text()
    assert len(lines) > 10 and [line for line in lines if line not in source] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve_and_python_compiles(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", PAGES[page]):
        file = (ROOT / page).parent / target
        assert target.startswith("http") or file.exists(), target
    for block in blocks(page, "python"):
        compile(block, page, "exec")


FILE = re.compile(r"(?<![\w/])(?:benchmarks|configs|data|diffs|tools)/[\w/]+\.\w+")


@pytest.mark.parametrize("source", PRINTED)
def test_commands_parse_as_printed(source):
    """Flags and values; of copies such as mine.py and of launchers only that files exist."""
    for command in PRINTED[source]:
        for path in FILE.findall(command):
            assert (ROOT / path).is_file() or path == "diffs/mine.diff", path
        for part in re.split(r"&&|;", command):
            found = re.search(r"^(?! *(?:cp|diff|patch) ).*?([\w/]+)\.py( [^|>]*)?$", part)
            name = found[1].replace("/", ".") if found else ""
            if name not in SCRIPTS and not name.startswith(("benchmarks.", "tools.")):
                continue
            script = importlib.import_module(name)
            argv = shlex.split((found[2] or "").replace("$seed", "1").replace("--help", ""))
            if "--resume" in argv:  # its flags are those of a run
                continue
            if name in SCRIPTS:
                parse_args(script.Args, script.PRESETS, argv)
            elif hasattr(script, "Args"):
                tyro.cli(script.Args, args=argv)


# What test_local_commands_run_as_printed leaves out: it needs more, or another test runs it.
ELSEWHERE = [
    r"# .*(needs|GPU|hub)|--task (sentiment|tldr|gsm8k)|^end=",
    r"^ *(pip|jupyter|pytest|pre-commit|ruff|python -m venv|python3 -m pip|git (worktree|clone))",
    r"(equal|human|recipes|synthetic|vllm|worked_examples)\.sh|vllm serve|smollm2",
    r"(mutations|overoptimize|pretrained)\.py",
    r"demo\.sh|^python (sft|train_reward)\.py --task synthetic(_eos)?\s*(#|$)",  # `project`
    r"judgments\.py|--task arithmetic",  # test_answers.py
    r"curves\.py .*(wandb|TRL=)",  # test_curves.py
    r"(same|gpu|growth|memory|render|speed)\.py",  # tests of these names, tools, the course
    r"^(mkdir|code|model|flags)\b|\$code",  # test_tokens.py
    r"^-    start, kl_coef = run.restore",  # test_resume.py
]
TINY = """set -e
tiny() {
case "$1" in
sft.py) echo --num_queries 400 --num_heldout 8 --num_epochs 1 ;;
train_reward.py) echo --num_labels 16 --num_heldout 8 --normalize_samples 8 ;;
ppo.py | rloo.py | mine.py) echo --total_episodes 96 --batch_size 8 --eval_queries 4 ;;
tools/winrate.py) echo --queries 4 ;;
tools/sample.py) echo --queries 24 --samples 2 ;;
benchmarks/plain_ppo.py) echo --total_episodes 16 --batch_size 8 ;;
esac
}
python() { PYTHON "$@" $(tiny "$1"); }
accelerate() { command accelerate "$@" $(tiny ppo.py); }
diff() { command diff "$@" || [ $? = 1 ]; }
"""


def local_commands(page):
    """The commands of a page that need nothing, in its order; a loop runs once."""
    text = "".join(blocks(page, "bash")).replace("in 1 2 3", "in 1").replace("\\\n", " ")
    found = ""
    for line in text.splitlines():  # each with its comment
        if commands([line]) and not re.search("|".join(ELSEWHERE), line):
            found += f"{line}\n"
    return found


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project with models, and how to run commands with tiny sizes."""
    folder = copy_project(ROOT, tmp_path_factory.mktemp("base") / "project")
    tiny = folder.parent / "tiny.sh"
    tiny.write_text(TINY.replace("PYTHON", sys.executable))
    env = os.environ | {"BASH_ENV": str(tiny), "HF_HUB_OFFLINE": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"

    def run(command, cwd=folder):
        done = subprocess.run(["bash", "-c", command], cwd=cwd, env=env, capture_output=True)
        assert done.returncode == 0, (command, done.stdout[-500:], done.stderr[-3000:].decode())

    run("./demo.sh && for x in sft train_reward; do python $x.py --task synthetic_eos; done")
    assert len(list(folder.glob("runs/demo_*.png"))) == 1
    return folder, run


LOCAL = []
for page in PAGES:
    if local_commands(page):
        mark = pytest.mark.slow if page == "README.md" else pytest.mark.exhaustive
        LOCAL.append(pytest.param(page, marks=mark))


@pytest.mark.parametrize("page", LOCAL)
def test_local_commands_run_as_printed(page, project, tmp_path):
    """In a copy of the project, where `python` adds flags of tiny sizes."""
    base, run = project
    folder = shutil.copytree(base, tmp_path / "project", symlinks=True)
    if page == "README.md":
        (folder / "my_reward.py").write_text(code_of(page, "def score("))
    run(local_commands(page), folder)
    if page == "README.md":
        assert (folder / "models/synthetic/mine/model.safetensors").is_file()
        steps = [json.loads(line)["step"] for line in (folder / "runs/first/metrics.jsonl").open()]
        assert steps == list(range(13))


def test_reward_functions_of_the_docs_score_each_response():
    queries, responses = ["Anna went home.", "Ben did not."], ["She was happy.", "He was sad."]
    count = 0
    for page in PAGES:
        for block in blocks(page, "python"):
            if "def score(" not in block:
                continue
            exec(block, space := {})
            score = space["score"]
            given = [queries, responses, [1.0, -1.0]][: len(inspect.signature(score).parameters)]
            first, second = score(*given)
            assert math.isfinite(first + second)
            count += 1
    assert count >= 2


if __name__ == "__main__":
    if sys.argv[1:] != ["--fix"]:
        sys.exit(__doc__)
    README.write_text(LENGTH.sub(right_length, LINK.sub(right_line, README.read_text())))
