"""Put one mistake at a time into a copy of the project and show which test notices it.

    python benchmarks/mutations.py                     # one for each implementation detail
    python benchmarks/mutations.py --random 200        # random operators, comparisons, constants
    python benchmarks/mutations.py --only P9 A1        # or numbers of random ones

A random mistake meets the test files that execute its line, the quickest first; which those are is
found by running each test file once under coverage. A mistake in a patch meets the tests of
patches. Tests that compare texts are left out. Exit code 1 if a mistake was not noticed.
"""

import ast
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import coverage
import tyro

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.sweep import ENVIRONMENT, copy_project  # noqa: E402

SCRIPTS = ["ppo.py", "rloo.py", "train_reward.py", "sft.py", "utils.py"]
SCRIPTS += sorted(f"machinery/{path.name}" for path in (ROOT / "machinery").glob("*.py"))
# fmt: off
DETAILS = (  # detail, file, right, wrong; the test that notices has the detail's id in its name
    ("G1", "ppo.py", "self.value_head(hidden)", "self.value_head(hidden.roll(1, 0))"),
    ("G2", "machinery/models.py", "TokenIds(config.vocab_size, truncate", "TokenIds(0, truncate"),
    ("G3", "ppo.py", "mask.cumsum(dim=1) - mask.long()  #", "mask.cumsum(dim=1) * 0 + 1  #"),
    ("G4", "utils.py", "probs = logits.to(", "probs = logits.topk(5).values.to("),
    ("G5", "ppo.py", "(1 - update / num_updates)", "(1 - (update + 1) / num_updates)"),
    ("G6", "ppo.py", " + 100003 * accelerator.process_index", ""),
    ("R1", "train_reward.py", "0).amax(dim=1)", "0).amax().expand(len(tokens))"),
    ("R2", "train_reward.py", "std=1 / math.sqrt(self.head.in_features + 1)", "std=0.02"),
    ("R3", "train_reward.py", "gain = 1 / var.sqrt().item()", "gain = 1 / var.item()"),
    ("R4", "train_reward.py", "best[part], reduction", "0 * best[part], reduction"),
    ("P1", "ppo.py", " / self.temperature).log", ").log"),
    ("P2", "ppo.py", "zeros_(self.value_head.weight)", "ones_(self.value_head.weight)"),
    ("P3", "machinery/data.py", "+ 1) % len(tokens)", "+ 1)"),
    ("P4", "machinery/models.py", 'if ("drop" in key or', 'if ("no drop" in key or'),
    ("P5", "utils.py", "(positions >= after)", "(positions > after)"),
    ("P6", "ppo.py", "delta + gamma * lam * last_gae", "delta + gamma * last_gae"),
    ("P7", "rloo.py", "(num_episodes), args.num_minibatches)", "(num_episodes), 1)"),
    ("P8", "ppo.py", "(-kl_coef * kl)", "(kl_coef * kl)"),
    ("P9", "utils.py", "(x - mean) ** 2, mask)) / count", "(x - mean) ** 2, mask)) / (count - 1)"),
    ("P10", "ppo.py", "mean(torch.max(vf_losses, vf_losses_clipped))", "mean(vf_losses)"),
    ("P11", "rloo.py", "-0.2), 0.2)", "-0.2), 1.0)"),
    ("A1", "ppo.py", 'group["eps_hat"] / math.sqrt', 'group["eps_hat"] * math.sqrt'),
    ("L1", "rloo.py", "- old_logprobs).sum(dim=1)", "- old_logprobs).mean(dim=1)"),
    ("L2", "rloo.py", "scores - kl_coef * kl.sum(dim=1)", "scores + kl_coef * kl.sum(dim=1)"),
    ("L3", "rloo.py", "/ (k - 1)).flatten()", "/ k).flatten()"),
    ("L4", "rloo.py", "mean(torch.max(pg_losses, pg_losses_clipped))", "mean(pg_losses_clipped)"),
    ("L5", "rloo.py", "self.pad_id = pad_id",
     "self.value_head, self.pad_id = nn.Linear(1, 1), pad_id"),
    ("L6", "ppo.py", "args.micro_batch_tokens):\n            index", "1):\n            index"),
    ("X1", "diffs/separate_critic.diff", "*= args.critic_lr_ratio", "*= 1"),
    ("X2", "ppo.py", "scores.clamp(-args.clip_score, ", "scores.clamp(-10 * args.clip_score, "),
    ("X3", "ppo.py", "log_r.exp() - 1 - log_r", "(-log_r).exp() - 1 + log_r"),
    ("X4", "diffs/ptx.diff", "return -logprobs.sum()", "return logprobs.sum()"),
    ("X5", "diffs/ema.diff", "weight.detach(), 1 - args.ema_decay", "weight.detach(), 1"),
    ("X6", "diffs/value_warmup.diff", "if update < args.value_warmup_updates", "if update < 0"),
    ("X7", "diffs/sampling.diff", "- probs > top_p", "> top_p"),
    ("X8", "ppo.py", "if args.max_grad_norm is not None:", "if False:"),
    ("X9", "ppo.py", "last = mask.sum(dim=1, keepdim=True) - 1", "last = mask[:, :1].long() - 1"),
    ("X10", "rloo.py", "responses[rows] = sample(lm", "responses[: len(rows)] = sample(lm"),
    ("X11", "utils.py", "dist.all_reduce(x)\n", "pass\n"),
    ("X12", "diffs/early_stop.diff", "> args.max_approxkl", "> 100 * args.max_approxkl"),
    ("X13", "machinery/rewards.py", "read_ids if same_tokens", "read_ids if True or same_tokens"),
    ("X14", "ppo.py", "if args.whiten_advantages:", "if True:"),
)
# fmt: on
# A mistake here shows in a picture, the layout of a table, or how often a line is printed:
SHOWN = ("make_panels", "plot_run", "plot_histogram", "pyplot", "print_table", "write_card")
LEFT_OUT = ("test_twins.py", "test_readme.py", "test_docs.py", "test_diffs.py", "test_same.py")
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
OPERATORS |= {ast.Mod: ast.FloorDiv, ast.FloorDiv: ast.Mod, ast.BitAnd: ast.BitOr}
OPERATORS |= {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq}
OPERATORS |= {ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot}
OPERATORS |= {ast.IsNot: ast.Is}
COVERAGE = """[run]
parallel = true
patch = subprocess, fork, _exit
source = {copy}
data_file = {data}/data
"""


@dataclass(frozen=True)
class Args:
    """Which tests notice which mistakes."""

    random: int = 0
    """number of random mistakes; 0: one for each implementation detail"""
    seed: int = 1
    """seed of the random places"""
    only: tuple[str, ...] = ()
    """details, or numbers of random mistakes; default: all"""
    workers: int = 2
    """mistakes at a time, each in its own copy"""
    minutes: float = 20
    """time limit of each mistake; reaching it counts as noticed"""


class Mistake(NamedTuple):
    """What is changed, the file's new text, and the tests that meet it."""

    name: str
    what: str
    file: str
    text: str
    tests: list[str]


# ----------------------------------------------------------------------------------------- mistakes


def places(node: ast.AST, statement: ast.stmt | None = None) -> Iterator[tuple[ast.AST, ast.stmt]]:
    """What can be changed inside functions, each with the statement that it is in."""
    if getattr(node, "name", "") in SHOWN or isinstance(node, ast.Raise | ast.JoinedStr):
        return
    if statement is not None:
        operator = getattr(node, "op", None) or getattr(node, "ops", [None])[0]
        number = isinstance(node, ast.Constant) and isinstance(node.value, int | float)
        if type(operator) in OPERATORS or isinstance(operator, ast.Not | ast.Invert) or number:
            yield node, statement
    children = node.body if isinstance(node, ast.FunctionDef) else ast.iter_child_nodes(node)
    inside = statement is not None or isinstance(node, ast.FunctionDef)
    for child in children:
        is_statement = inside and isinstance(child, ast.stmt)
        yield from places(child, child if is_statement else statement)


def change(node: ast.AST) -> str:
    """Change an operator or a constant in place; return the old and the new text."""
    old = ast.unparse(node)
    if isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.UnaryOp):
        node.operand = ast.UnaryOp(node.op, node.operand)
    elif isinstance(node, ast.Compare):
        node.ops[0] = OPERATORS[type(node.ops[0])]()
    else:
        node.op = OPERATORS[type(node.op)]()
    return f"{old} → {ast.unparse(node)}"


def random_mistakes(args: Args) -> list[Mistake]:
    """Mistakes at different places of all scripts."""
    lines, seconds = load_map(args.workers)
    trees = {file: ast.parse((ROOT / file).read_text()) for file in SCRIPTS}
    found = [(file, i) for file, tree in trees.items() for i, _ in enumerate(places(tree))]
    mistakes = []
    for number, (file, i) in enumerate(random.Random(args.seed).sample(found, args.random)):
        tree = ast.parse((ROOT / file).read_text())
        node, statement = list(places(tree))[i]
        executed = {f"{file}:{x}" for x in range(statement.lineno, node.end_lineno + 1)}
        tests = [test for test in seconds if executed & set(lines[test])]
        what = f"{file}:{node.lineno} {change(node)}"
        tests.sort(key=lambda test: seconds[test])
        mistakes.append(Mistake(str(number), what, file, ast.unparse(tree), tests))
    return mistakes


def detail_mistakes() -> list[Mistake]:
    """The mistakes of the table. A text that is not in its file just once is reported, too."""
    mistakes = []
    for detail, file, right, wrong in DETAILS:
        text = (ROOT / file).read_text()
        what = (
            f"{file}: {wrong!r}" if text.count(right) == 1 else f"{right!r} is not once in {file}"
        )
        words = ["-k", f"{detail}_ or golden", *test_files()]
        if file.endswith(".diff"):
            words = ["-k", f"{detail}_", "tests/test_diffs.py"]
        mistakes.append(Mistake(detail, what, file, text.replace(right, wrong), words))
    return mistakes


# -------------------------------------------------------------------------------------------- tests


def test_files() -> list[str]:
    """The test files that a mistake may meet, the longest first."""
    paths = sorted((ROOT / "tests").glob("test_*.py"), key=lambda path: -path.stat().st_size)
    return [f"tests/{path.name}" for path in paths if path.name not in LEFT_OUT]


def run_pytest(copy: Path, words: list[str], limit: float, launch: tuple[str, ...] = ()) -> str:
    """The first test that fails in a copy of the project; nothing if all pass."""
    options = ["-x", "-m", "not hub", "-p", "no:cacheprovider", f"--basetemp={copy}-tmp"]
    command = [sys.executable, "-m", *launch, "pytest", *options, *words]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen(
        command, cwd=copy, env=os.environ | ENVIRONMENT, start_new_session=True, **streams
    )
    try:
        out, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes of its tests
        process.communicate()
        return "the time limit"
    failed = [line for line in out.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if process.returncode in (0, 5):  # 5: there are no tests
        return ""
    return failed[0].split(" - ")[0] if failed else f"no test ran: {out[-300:]}"


def load_map(workers: int) -> tuple[dict[str, list[str]], dict[str, float]]:
    """For each test file the lines that it executes, such as ppo.py:12, and its seconds.

    Kept among the temporary files until a script or a test changes.
    """
    sources = [*(ROOT / file for file in SCRIPTS), *sorted((ROOT / "tests").glob("*.py"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    kept = Path(tempfile.gettempdir()) / f"mutations-{digest}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:

        def record(file: str) -> tuple[list[str], float]:
            data, began = Path(folder, Path(file).stem), time.monotonic()
            copy = copy_project(ROOT, data / "project")
            (data / "rc").write_text(COVERAGE.format(copy=copy, data=data))
            launch = ("coverage", "run", f"--rcfile={data / 'rc'}", "-m")
            failed = run_pytest(copy, [file], 3600, launch)
            if failed:
                raise RuntimeError(f"without any mistake: {failed}")
            return executed_lines(data, copy), time.monotonic() - began

        found = dict(zip(test_files(), pool.map(record, test_files()), strict=True))
    lines = {file: executed for file, (executed, _) in found.items()}
    seconds = {file: took for file, (_, took) in found.items()}
    kept.write_text(json.dumps([lines, seconds]))
    return lines, seconds


def executed_lines(folder: Path, copy: Path) -> list[str]:
    """From the coverage data of one test file and its processes."""
    lines = set()
    for path in folder.glob("data.*"):
        data = coverage.CoverageData(str(path))
        data.read()
        for script in SCRIPTS:
            lines |= {f"{script}:{x}" for x in data.lines(str(copy / script)) or ()}
    return sorted(lines)


def main(args: Args) -> None:
    """A line for each mistake."""
    mistakes = random_mistakes(args) if args.random else detail_mistakes()
    mistakes = [x for x in mistakes if not args.only or x.name in args.only]
    missed = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.workers) as pool:

        def attempt(mistake: Mistake) -> None:
            copy = copy_project(ROOT, Path(folder, mistake.name))
            changed = mistake.text != (copy / mistake.file).read_text()
            (copy / mistake.file).write_text(mistake.text)
            test = ""
            if changed and mistake.tests:
                test = run_pytest(copy, mistake.tests, 60 * args.minutes)
            if not test:
                missed.append(mistake.name)
            print(f"{mistake.name:4} {mistake.what}  ⇒  {test or 'NOT NOTICED'}", flush=True)

        list(pool.map(attempt, mistakes))
    print(f"{len(mistakes) - len(missed)} of {len(mistakes)} noticed; not: {sorted(missed)}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main(tyro.cli(Args))
