"""Put one mistake at a time into a copy of the project and show which test notices it.

    python benchmarks/mutations.py                      # a mistake for every implementation detail of README's table
    python benchmarks/mutations.py --random 200         # random ones: operators, comparisons, constants, not and ~
    python benchmarks/mutations.py --random 200 --only 17 41

The tests of twins and of README are left out: they notice that a text has changed, not that it is wrong. Exit code 1 if a
mistake was not noticed.
"""

import ast
import os
import random
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).parents[1]
SCRIPTS = ("ppo.py", "rloo.py", "train_reward.py", "sft.py", "tasks.py", "records.py", "utils.py")
DETAILS = (  # detail, file, right, wrong; the test that notices has the detail's id in its name
    ("G1", "ppo.py", "self.value_head(hidden).squeeze(-1)", "self.value_head(hidden.roll(1, dims=1)).squeeze(-1)"),
    ("G2", "utils.py", "return tokenizer, config, max(config.vocab_size, len(tokenizer))", "return tokenizer, config, 0"),
    ("G3", "utils.py", "(real.cumsum(dim=1) - 1).clamp(min=0)", "torch.arange(real.shape[1]).expand(real.shape)"),
    ("G4", "rloo.py", "probs = logits.to(uniform.device).double()", "probs = logits.topk(5).values.double()"),
    ("G5", "ppo.py", '"linear": 1 - done', '"linear": 1 - done - 1 / steps'),
    ("G6", "ppo.py", "seed = args.seed + 100003 * accelerator.process_index", "seed = args.seed"),
    ("R1", "utils.py", "columns, 0).amax(dim=1)", "columns, 0).amax(dim=1).amax().expand(len(tokens))"),
    ("R2", "utils.py", "std=1 / math.sqrt(module.in_features + 1)", "std=0.02"),
    ("R3", "train_reward.py", "model.gain.fill_((1 / variance.sqrt())", "model.gain.fill_((1 / variance)"),
    ("R4", "train_reward.py", 'F.cross_entropy(rewards, labels.best[rows], reduction="sum")', "-rewards[:, 0].sum()"),
    ("P1", "ppo.py", "F.log_softmax(logits.float() / temperature", "F.log_softmax(logits.float()"),
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
    ("X2", "rloo.py", "score.scores.clamp(-limit, limit)", "score.scores.clamp(max=limit)"),
    ("X3", "ppo.py", "(-log_ratio).expm1() + log_ratio", "log_ratio.expm1() - log_ratio"),
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
FIRST = {  # the tests that know most about a file run first
    "ppo.py": ("golden", "details", "pitfalls", "rloo"),
    "rloo.py": ("rloo", "details", "pitfalls", "distributed"),
    "train_reward.py": ("golden", "data", "details", "errors"),
    "sft.py": ("data", "pitfalls", "scripts", "details"),
    "tasks.py": ("errors", "readme", "runs", "matrix"),
    "records.py": ("runs", "resume", "errors"),
    "utils.py": ("golden", "details", "data", "errors", "runs"),
}
LEFT_OUT = ("test_twins.py", "test_readme.py", "test_diffs.py")


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
    minutes: float = 15
    """a mistake whose tests take longer than this counts as noticed; the whole suite takes about 5 on an idle core"""


def candidates(file: str) -> list[tuple[str, int, int, str]]:
    """Every place of a file that can be changed: what is changed to what, from where to where in its text."""
    source = (ROOT / file).read_text()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []

    def span(node: ast.AST) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def visit(node: ast.AST, inside: bool) -> None:
        if getattr(node, "name", "") in SHOWN or isinstance(node, ast.Raise | ast.JoinedStr):
            return
        if isinstance(node, ast.AnnAssign | ast.Assign) and not inside:
            return  # flags' defaults, tasks and presets are settings
        inside = inside or isinstance(node, ast.FunctionDef)
        text = {ast.BinOp: OPERATORS, ast.Compare: COMPARISONS}.get(type(node))
        if inside and text is not None:
            operator = node.op if isinstance(node, ast.BinOp) else node.ops[0]
            left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.left, node.comparators[0])
            if type(operator) in text:
                found.append(
                    (
                        f"{file}:{node.lineno} {ast.unparse(node)}",
                        span(left)[1],
                        span(right)[0],
                        f" {text[type(operator)]} ",
                    )
                )
        if inside and isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
            found.append((f"{file}:{node.lineno} {ast.unparse(node)}", span(node)[0], span(node.operand)[0], ""))
        if inside and isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            found.append((f"{file}:{node.lineno} {node.value}", *span(node), repr(value)))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), False)
    return found


def random_mistakes(count: int, seed: int) -> list[tuple[str, str, bytes]]:
    """`count` different places of all files: what was done, the file, its changed text."""
    places = [(file, place) for file in SCRIPTS for place in candidates(file)]
    mistakes = []
    for file, (what, begin, end, new) in random.Random(seed).sample(places, count):
        source = (ROOT / file).read_bytes()
        old = source[begin:end].decode()
        brackets = "(" * old.count("(") + ")" * old.count(")")  # around an operand, they stay
        text = f"{')' * old.count(')')}{new}{'(' * old.count('(')}" if brackets and new.strip() else new + brackets
        mistakes.append(
            (f"{what}: {old.strip()!r} → {new.strip()!r}", file, source[:begin] + text.encode() + source[end:])
        )
    return mistakes


def run_tests(copy: Path, file: str, words: list[str], minutes: float) -> str | None:
    """The first test that fails in `copy`, in a process that has the libraries already; None if all pass."""
    files = sorted(path.name for path in (copy / "tests").glob("test_*.py") if path.name not in LEFT_OUT)
    first = [f"test_{name}.py" for name in FIRST[file] if f"test_{name}.py" in files]
    order = [f"tests/{name}" for name in dict.fromkeys(first + files)]
    log = copy / "log.txt"
    child = os.fork()
    if child == 0:
        import pytest

        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        os.chdir(copy)
        sys.path[:0] = [str(copy), str(copy / "tests")]
        options = ["-q", "-x", "-p", "no:cacheprovider", "--basetemp", str(copy / "tmp"), *words]
        os._exit(pytest.main([*options, *order]))
    begin = time.time()
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        time.sleep(0.2)
        if time.time() - begin > 60 * minutes:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return "ran into the time limit"
    if ended[1] == 0:
        return None
    lines = log.read_text().splitlines()
    failed = [line.split(" - ")[0].split(" ", 1)[1] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"the tests did not run: {lines[-1] if lines else 'no output'}"


def main(args: Args) -> None:
    """A line for each mistake."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
    import accelerate  # noqa: F401  loaded once, shared with every child
    import datasets  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    if args.random:
        mistakes = [(*mistake, []) for mistake in random_mistakes(args.random, args.seed)]
    else:
        mistakes = []
        for detail, file, right, wrong in DETAILS:
            source = (ROOT / file).read_text()
            if source.count(right) != 1:
                sys.exit(f"{detail}: {right!r} stands {source.count(right)} times in {file}")
            new = source.replace(right, wrong).encode()
            mistakes.append((f"{detail} {file}: {wrong[:60]!r}", file, new, ["-k", f"{detail}_ or golden"]))
    numbers = [i for i in range(len(mistakes)) if not args.only or i in args.only]
    unnoticed = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.workers) as pool:

        def attempt(number: int) -> None:
            what, file, text, words = mistakes[number]
            copy = Path(folder) / str(number)
            kept = shutil.ignore_patterns(".git", "runs", "models", "__pycache__", "wandb", "*.png", "*.egg-info")
            shutil.copytree(ROOT, copy, ignore=kept)
            (copy / file).write_bytes(text)
            test = run_tests(copy, file, words, args.minutes)
            shutil.rmtree(copy)
            unnoticed.extend([number] if test is None else [])
            print(f"{number:4} {what}  ⇒  {test or 'NOT NOTICED'}", flush=True)

        list(pool.map(attempt, numbers))
    print(f"{len(numbers) - len(unnoticed)} of {len(numbers)} noticed; not: {sorted(unnoticed)}")
    sys.exit(bool(unnoticed))


if __name__ == "__main__":
    main(tyro.cli(Args))
