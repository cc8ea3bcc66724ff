"""Put one mistake at a time into a copy of the project and show which test notices it.

    python benchmarks/mutations.py                      # a mistake for every implementation detail of README's table
    python benchmarks/mutations.py --random 200         # random ones: operators, comparisons, constants, not and ~
    python benchmarks/mutations.py --random 200 --only 17 41

A random mistake meets the tests that execute its statement, the quickest first. Which those are, also in processes that a test
starts, is found out by running every test once under coverage, and is kept among the temporary files until the code changes.
The tests of twins, README, patches and planted faults are left out: they notice that a text has changed, not that it is wrong.
A mistake in a patch meets the tests of patches.
Exit code 1 if a mistake was not noticed.
"""

import ast
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import pytest
import tyro

ROOT = Path(__file__).parents[1]
SCRIPTS = ("ppo.py", "rloo.py", "train_reward.py", "sft.py", "tasks.py", "records.py", "packing.py", "utils.py")
DETAILS = (  # detail, file, right, wrong; the test that notices has the detail's id in its name
    ("G1", "ppo.py", "self.value_head(hidden).squeeze(-1)", "self.value_head(hidden.roll(1, dims=1)).squeeze(-1)"),
    ("G2", "utils.py", "return tokenizer, config, max(config.vocab_size, len(tokenizer))", "return tokenizer, config, 0"),
    ("G3", "packing.py", "(real.cumsum(dim=1) - 1).clamp(min=0)", "torch.arange(real.shape[1]).expand(real.shape)"),
    ("G4", "rloo.py", "probs = logits.to(uniform.device).double()", "probs = logits.topk(5).values.double()"),
    ("G5", "ppo.py", '"linear": 1 - done', '"linear": 1 - done - 1 / steps'),
    ("G6", "ppo.py", "seed = args.seed + 100003 * accelerator.process_index", "seed = args.seed"),
    ("R1", "utils.py", "columns, 0).amax(dim=1)", "columns, 0).amax(dim=1).amax().expand(len(tokens))"),
    ("R2", "utils.py", "std=1 / math.sqrt(module.in_features + 1)", "std=0.02"),
    ("R3", "train_reward.py", "model.gain.fill_((1 / variance.sqrt())", "model.gain.fill_((1 / variance)"),
    ("R4", "train_reward.py", 'F.cross_entropy(rewards, labels.best[rows], reduction="sum")', "-rewards[:, 0].sum()"),
    ("P1", "packing.py", "(logits / temperature).log_softmax(", "logits.log_softmax("),
    ("P2", "ppo.py", "nn.init.zeros_(self.value_head.weight)", "nn.init.ones_(self.value_head.weight)"),
    ("P3", "utils.py", "(tokens.index(start) + 1) % len(tokens)", "tokens.index(start) + 1"),
    ("P4", "utils.py", 'if "drop" in key and isinstance(value, float):', "if False:"),
    ("P5", "ppo.py", "(positions >= after)", "(positions > after)"),
    ("P6", "ppo.py", "following = delta + gamma * lam * following", "following = delta + gamma * following"),
    ("P7", "rloo.py", "[np.sort(rows) for rows in np.split(order, args.num_minibatches)]", "[np.sort(order)]"),
    ("P8", "ppo.py", "rewards = -kl_coef * kl_terms(", "rewards = kl_coef * kl_terms("),
    ("P9", "ppo.py", ").masked_fill(~mask, 0).sum()) / count\n    return", ").masked_fill(~mask, 0).sum()) / (count - 1)\n    return"),
    ("P10", "ppo.py", "0.5 * torch.max(error, error_clipped)", "0.5 * error"),
    ("P11", "rloo.py", "-0.2), 0.2)", "-0.2), 1.0)"),
    ("A1", "ppo.py", 'group["eps"] = group["eps_hat"] / math.sqrt', 'group["eps"] = group["eps_hat"] * math.sqrt'),
    ("L1", "rloo.py", "log_ratio = (logprobs - old.logprobs).sum(dim=1)", "log_ratio = (logprobs - old.logprobs).mean(dim=1)"),
    ("L2", "rloo.py", "return scores - kl_coef * kl_terms(", "return scores + kl_coef * kl_terms("),
    ("L3", "rloo.py", "/ (k - 1)).flatten()", "/ k).flatten()"),
    ("L4", "rloo.py", '"loss/policy_avg": torch.max(policy, policy_clipped)', '"loss/policy_avg": policy_clipped'),
    ("L5", "rloo.py", "self.lm, self.pad_id, self.temperature = lm, pad_id, temperature", "self.lm, self.pad_id, self.temperature = lm, pad_id, temperature\n        self.value_head = nn.Linear(lm.config.hidden_size, 1)"),
    ("L6", "ppo.py", "return [np.sort(rows) for rows", "return [np.flip(np.sort(rows)) if rows[0] % 2 else np.sort(rows) for rows"),
    ("X1", "diffs/separate_critic.diff", "rates = args.critic_lr or args.lr,", "rates = args.lr,"),
    ("X2", "rloo.py", "score.scores.clamp(-limit, limit)", "score.scores.clamp(max=limit)"),
    ("X3", "ppo.py", "(-log_ratio).expm1() + log_ratio", "log_ratio.expm1() - log_ratio"),
    ("X4", "diffs/ptx.diff", "losses = -logprobs.masked_fill", "losses = logprobs.masked_fill"),
    ("X5", "diffs/ema.diff", "average([*ema.parameters()], [*lm.parameters()], None)", "average([*lm.parameters()], [*ema.parameters()], None)"),
    ("X6", "ppo.py", 'group["lr"] = lr * (i > 0 or update >= args.value_warmup_updates)', 'group["lr"] = lr'),
    ("X7", "rloo.py", "falling.cumsum(dim=-1) - falling < top_p", "falling.cumsum(dim=-1) < top_p"),
    ("X8", "ppo.py", "return lr * (step + 1) / warmup", "return lr * step / warmup"),
    ("X9", "ppo.py", "mask.sum(dim=1, keepdim=True) - 1", "torch.full_like(mask[:, :1], 0).long()"),
    ("X10", "rloo.py", "out[rows] = policy(contexts[rows], responses[rows])[0]", "out[: len(rows)] = policy(contexts[rows], responses[rows])[0]"),
    ("X11", "utils.py", "dist.all_reduce(x, op)", "pass"),
    ("X12", "rloo.py", "means(steps[-args.num_minibatches :])", "means(steps)"),
    ("X13", "utils.py", "return same_ids if reads_ids_of(theirs, tokenizer) else same_texts", "return same_ids"),
    ("X14", "ppo.py", "whiten(advantages, batch.mask) if args.whiten_advantages else advantages", "whiten(advantages, batch.mask)"),
)  # fmt: skip
# Where a change shows in a picture, in a table's layout, in a message's wording or in how often a line is printed:
SHOWN = {
    "panels",
    "plot_run",
    "pyplot",
    "draw_histogram",
    "table",
    "environment",
    "from_hub_or_folder",
    "start_trackers",
    "Clock",
}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.Mod: "//", ast.FloorDiv: "%", ast.BitAnd: "|"}
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in"}
COMPARISONS |= {ast.Is: "is not", ast.IsNot: "is", ast.NotIn: "in"}
LEFT_OUT = ("test_twins.py", "test_readme.py", "test_diffs.py", "test_same.py")
COVERAGE = """[run]
parallel = true
context = ${{TEST_CONTEXT-}}
patch = fork, _exit
include = {copy}/*.py
data_file = {scratch}/data
"""  # also of processes that a test starts: their context is what the test was doing then


@dataclass(frozen=True)
class Args:
    """Which tests notice which mistakes."""

    random: int = 0
    """mistakes at random places; 0: one for each implementation detail"""
    seed: int = 1
    """of the random places"""
    only: tuple[int, ...] = ()
    """numbers of the mistakes to try again; empty: all"""
    workers: int = 2
    """tests at a time, each with its own copy"""
    minutes: float = 2
    """a test that takes this and twenty times its usual time counts as noticing"""


class Place(NamedTuple):
    """What is changed to what, from where to where in a file's text, and the lines of the statement around it."""

    what: str
    begin: int
    end: int
    new: str
    lines: range


class Mistake(NamedTuple):
    """What was done to a file, its changed text, and the lines that tests have to execute; None: tests named `words`."""

    what: str
    file: str
    text: bytes
    lines: range | None = None
    words: tuple[str, ...] = ()


def candidates(file: str) -> list[Place]:
    """Every place of a file that can be changed."""
    source = (ROOT / file).read_text()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []

    def span(node: ast.AST) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def visit(node: ast.AST, inside: bool, lines: range) -> None:
        if getattr(node, "name", "") in SHOWN or isinstance(node, ast.Raise | ast.JoinedStr):
            return
        if isinstance(node, ast.AnnAssign | ast.Assign) and not inside:
            return  # flags' defaults, tasks and presets are settings
        inside = inside or isinstance(node, ast.FunctionDef)
        if isinstance(node, ast.stmt):
            lines = range(node.lineno, node.end_lineno + 1)
            if isinstance(node, ast.FunctionDef):  # a default or a decorator: whoever calls it
                lines = range(node.body[0].lineno, node.end_lineno + 1)
            elif hasattr(node, "body"):  # what stands between `if` and its colon
                lines = range(node.lineno, max(node.lineno + 1, node.body[0].lineno))
        text = {ast.BinOp: OPERATORS, ast.Compare: COMPARISONS}.get(type(node))
        if inside and text is not None:
            operator = node.op if isinstance(node, ast.BinOp) else node.ops[0]
            left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.left, node.comparators[0])
            if type(operator) in text:
                what = f"{file}:{node.lineno} {ast.unparse(node)}"
                found.append(Place(what, span(left)[1], span(right)[0], f" {text[type(operator)]} ", lines))
        if inside and isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
            what = f"{file}:{node.lineno} {ast.unparse(node)}"
            found.append(Place(what, span(node)[0], span(node.operand)[0], "", lines))
        if inside and isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            found.append(Place(f"{file}:{node.lineno} {node.value}", *span(node), repr(value), lines))
        for child in ast.iter_child_nodes(node):
            visit(child, inside, lines)

    visit(ast.parse(source), False, range(0))
    return found


def random_mistakes(count: int, seed: int) -> list[Mistake]:
    """At `count` different places of all files."""
    places = [(file, place) for file in SCRIPTS for place in candidates(file)]
    mistakes = []
    for file, (what, begin, end, new, lines) in random.Random(seed).sample(places, count):
        source = (ROOT / file).read_bytes()
        old = source[begin:end].decode()
        brackets = "(" * old.count("(") + ")" * old.count(")")  # around an operand, they stay
        text = f"{')' * old.count(')')}{new}{'(' * old.count('(')}" if brackets and new.strip() else new + brackets
        changed = source[:begin] + text.encode() + source[end:]
        mistakes.append(Mistake(f"{what}: {old.strip()!r} → {new.strip()!r}", file, changed, lines))
    return mistakes


class Recorder:
    """A plugin of pytest that writes which lines each test, and each fixture that tests share, executes, and its seconds."""

    def __init__(self, copy: Path, scratch: Path, file: str):
        (scratch / "coveragerc").write_text(COVERAGE.format(copy=copy, scratch=scratch))
        os.environ["COVERAGE_PROCESS_START"] = str(scratch / "coveragerc")  # coverage starts with every process then
        self.cov, self.out = coverage.Coverage(config_file=str(scratch / "coveragerc")), scratch / "seconds.json"
        self.seconds, self.file, self.name, self.since = defaultdict(float), file, "", time.time()
        self.cov.start()

    def switch(self, name: str) -> str:
        before, now = self.name, time.time()
        self.seconds[before] += now - self.since
        self.name, self.since, os.environ["TEST_CONTEXT"] = name, now, name
        self.cov.switch_context(name)
        self.cov.set_option("run:context", name)  # what a fork goes on with
        return before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.switch(item.nodeid)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        shared = fixturedef.scope != "function"
        before = self.switch(f"{self.file}::{fixturedef.argname}" if shared else self.name)
        try:
            return (yield)
        finally:
            self.switch(before)

    def pytest_sessionfinish(self) -> None:
        self.switch("")
        self.out.write_text(json.dumps(self.seconds))


def contexts_of(item: pytest.Item) -> set[str]:
    """A test and its fixtures, as `Recorder` names them."""
    return {item.nodeid, *(f"{item.nodeid.partition('::')[0]}::{name}" for name in item.fixturenames)}


class Chooser:
    """A plugin of pytest: only tests of these contexts, the quickest first, each until its deadline."""

    def __init__(self, scratch: Path, contexts: set[str], seconds: dict[str, float], minutes: float):
        self.now, self.contexts, self.seconds, self.minutes = scratch / "now.txt", contexts, seconds, minutes

    def cost(self, item: pytest.Item) -> float:
        return sum(self.seconds.get(name, 0) for name in contexts_of(item))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if self.contexts & {"", *contexts_of(item)}), key=self.cost)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.now.write_text(f"{time.time() + 60 * self.minutes + 20 * self.cost(item)} {item.nodeid}")


def make_copy(folder: Path) -> Path:
    """Of the project, without what runs leave."""
    kept = shutil.ignore_patterns(".git", "runs", "models", "wandb", "*.png", "*.egg-info")
    return Path(shutil.copytree(ROOT, folder, ignore=kept))


def run_pytest(copy: Path, scratch: Path, words: list[str], plugin: Callable[[], Any]) -> str | None:
    """The first test that fails in `copy`, in a process that has the libraries already; None if all pass."""
    log, now = scratch / "log.txt", scratch / "now.txt"
    now.write_text("inf")
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's `&` takes away
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        os.chdir(copy)
        sys.path[:0] = [str(copy), str(copy / "tests")]
        options = ["-p", "no:cacheprovider", "--basetemp", str(scratch / "tmp")]
        os._exit(pytest.main([*options, *words], [plugin()]))
    late, test = False, ""
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        time.sleep(0.2)
        deadline, _, test = now.read_text().partition(" ")
        if float(deadline or "inf") < time.time():
            os.kill(child, signal.SIGKILL)
            late = True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what its tests have started
    if late:
        return f"{test} ran into the time limit"
    if os.waitstatus_to_exitcode(ended[1]) in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    lines = log.read_text().splitlines()
    failed = [line.split(" - ")[0].split(" ", 1)[1] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"the tests did not run: {lines[-1] if lines else 'no output'}"


def test_files(copy: Path) -> list[str]:
    """From the project's root, the longest first."""
    paths = sorted((copy / "tests").glob("test_*.py"), key=lambda path: -path.stat().st_size)
    return [f"tests/{path.name}" for path in paths if path.name not in LEFT_OUT]


def load_map(folder: Path, workers: int) -> tuple[dict[str, list[str]], dict[str, float]]:
    """The tests, and the fixtures that tests share, that execute each line ("ppo.py:12"); the seconds that they take. Kept
    for each test file until it changes, or a script, or what all tests share."""
    lines, seconds, copy = defaultdict(list), {}, make_copy(folder / "map")
    helpers = [path for path in sorted((copy / "tests").glob("*.py")) if not path.name.startswith("test_")]
    common = b"".join(path.read_bytes() for path in [*(copy / file for file in SCRIPTS), *helpers])

    def record(file: str) -> None:
        digest = hashlib.sha256(common + (copy / file).read_bytes()).hexdigest()[:16]
        kept = Path(tempfile.gettempdir()) / f"mutations-{Path(file).stem}-{digest}.json"
        if not kept.exists():
            scratch, mine = folder / Path(file).stem, defaultdict(list)
            scratch.mkdir()
            if failed := run_pytest(copy, scratch, [file], partial(Recorder, copy, scratch, file)):
                sys.exit(f"without any mistake: {failed}")
            for path in scratch.glob("data.*"):
                data = coverage.CoverageData(str(path))
                data.read()
                for script in SCRIPTS:
                    for line, names in data.contexts_by_lineno(str(copy / script)).items():
                        mine[f"{script}:{line}"] += names
            unique = {line: sorted(set(names)) for line, names in mine.items()}
            kept.write_text(json.dumps([unique, json.loads((scratch / "seconds.json").read_text())]))
            shutil.rmtree(scratch)
        mine, times = json.loads(kept.read_text())
        seconds.update(times)
        for line, names in mine.items():
            lines[line] += names

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(record, test_files(copy)))
    return lines, seconds


def main(args: Args) -> None:
    """A line for each mistake."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
    import accelerate  # noqa: F401  loaded once, shared with every child
    import datasets  # noqa: F401
    import hypothesis  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import peft  # noqa: F401
    import torch
    import wandb  # noqa: F401

    torch.set_num_threads(1)
    if args.random:
        mistakes = random_mistakes(args.random, args.seed)
    else:
        mistakes = []
        for detail, file, right, wrong in DETAILS:
            source = (ROOT / file).read_text()
            if source.count(right) != 1:
                sys.exit(f"{detail}: {right!r} stands {source.count(right)} times in {file}")
            new = source.replace(right, wrong).encode()
            mistakes.append(
                Mistake(f"{detail} {file}: {wrong[:60]!r}", file, new, words=("-k", f"{detail}_ or golden"))
            )
    numbers = [i for i in range(len(mistakes)) if not args.only or i in args.only]
    unnoticed = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.workers) as pool:
        executed, seconds = load_map(Path(folder), args.workers) if args.random else ({}, {})

        def attempt(number: int) -> None:
            what, file, text, lines, words = mistakes[number]
            scratch = Path(folder) / str(number)
            copy = make_copy(scratch / "project")
            (copy / file).write_bytes(text)
            contexts = {name for line in lines for name in executed.get(f"{file}:{line}", [])} if lines else {""}
            quick, test = sorted(contexts, key=lambda name: seconds.get(name, 0))[:20], None
            for part in (set(quick), contexts):  # the test files of a few are read in no time
                files = [path for path in test_files(copy) if {"", path} & {name.partition("::")[0] for name in part}]
                files = ["tests/test_diffs.py"] if file.endswith(".diff") else files
                if files and not test:
                    chooser = partial(Chooser, scratch, part, seconds, args.minutes)
                    test = run_pytest(copy, scratch, ["-x", *words, *files], chooser)
            shutil.rmtree(scratch)
            unnoticed.extend([number] if test is None else [])
            print(f"{number:4} {what}  ⇒  {test or 'NOT NOTICED'}", flush=True)

        list(pool.map(attempt, numbers))
    print(f"{len(numbers) - len(unnoticed)} of {len(numbers)} noticed; not: {sorted(unnoticed)}")
    sys.exit(bool(unnoticed))


if __name__ == "__main__":
    main(tyro.cli(Args))
