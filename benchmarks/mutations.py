"""Put one mistake at a time into a copy of the project and show which test notices it.

    python benchmarks/mutations.py                     # one for each implementation detail
    python benchmarks/mutations.py --only P9 A1

A mistake meets the tests with the detail's id in their name, and the golden tests; a mistake in a
patch meets the tests of patches. Tests that compare texts are left out. Exit code 1 if a mistake
was not noticed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).parents[1]
ENVIRONMENT = dict(OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true", TOKENIZERS_PARALLELISM="false")
# fmt: off
DETAILS = (  # detail, file, right, wrong; the test that notices has the detail's id in its name
    ("G1", "ppo.py", "self.value_head(hidden)", "self.value_head(hidden.roll(1, 0))"),
    ("G2", "machinery/tokens.py", "pad=max(config.vocab_size, len(tokenizer))", "pad=0"),
    ("G3", "ppo.py", "mask.cumsum(dim=1) - mask.long()  #", "mask.cumsum(dim=1) * 0 + 1  #"),
    ("G4", "utils.py", "probs = logits.float()", "probs = logits.topk(5).values.float()"),
    ("G5", "ppo.py", "(1 - update / num_updates)", "(1 - (update + 1) / num_updates)"),
    ("G6", "ppo.py", " + 100003 * accelerator.process_index", ""),
    ("R1", "train_reward.py", "pad_id)).amax(dim=1)", "pad_id)).amax().expand(len(tokens))"),
    ("R2", "train_reward.py", "std=1 / math.sqrt(self.head.in_features + 1)", "std=0.02"),
    ("R3", "train_reward.py", "math.sqrt(head_var.item())", "head_var.item()"),
    ("R4", "train_reward.py", "best[part], reduction", "0 * best[part], reduction"),
    ("P1", "ppo.py", "compute_logits(self.lm, hidden) / self.temperature)", "compute_logits(self.lm, hidden))"),
    ("P2", "ppo.py", "zeros_(self.value_head.weight)", "ones_(self.value_head.weight)"),
    ("P3", "machinery/queries.py", "+ 1) % len(ids)", "+ 1)"),
    ("P4", "machinery/models.py", 'if ("drop" in key or', 'if ("no drop" in key or'),
    ("P5", "utils.py", "positions >= ids.truncate_after", "positions > ids.truncate_after"),
    ("P6", "ppo.py", "delta + gamma * lam * last_gae", "delta + gamma * last_gae"),
    ("P7", "rloo.py", "order.reshape(-1, k)", "order"),
    ("P8", "ppo.py", "rewards = -kl_coef * kl", "rewards = kl_coef * kl"),
    ("P9", "utils.py", "(x - mean) ** 2, mask)) / count", "(x - mean) ** 2, mask)) / (count - 1)"),
    ("P10", "ppo.py", "share_of_mean(torch.max(vf_losses, vf_losses_clipped))", "share_of_mean(vf_losses)"),
    ("P11", "ppo.py", "-0.2), 0.2)", "-0.2), 1.0)"),
    ("A1", "utils.py", 'group["eps_hat"] / math.sqrt', 'group["eps_hat"] * math.sqrt'),
    ("L1", "rloo.py", "- old.logprobs).sum(dim=1)", "- old.logprobs).mean(dim=1)"),
    ("L2", "rloo.py", "scores - kl_coef * kl.sum(dim=1)", "scores + kl_coef * kl.sum(dim=1)"),
    ("L3", "rloo.py", "/ (args.rloo_k - 1)).flatten()", "/ args.rloo_k).flatten()"),
    ("L4", "rloo.py", "share_of_mean(torch.max(pg_losses, pg_losses_clipped))", "share_of_mean(pg_losses_clipped)"),
    ("L5", "rloo.py", "self.pad_id = pad_id",
     "self.value_head, self.pad_id = nn.Linear(1, 1), pad_id"),
    ("L6", "ppo.py", "minibatch_lengths, args.micro_batch_tokens)", "minibatch_lengths, 1)"),
    ("X1", "diffs/separate_critic.diff", "lr * args.critic_lr_ratio", "lr"),
    ("X2", "ppo.py", "scores.clamp(-args.clip_score, ", "scores.clamp(-10 * args.clip_score, "),
    ("X3", "diffs/kl_estimator.diff", "torch.expm1(log_r) - log_r", "torch.expm1(-log_r) + log_r"),
    ("X4", "diffs/ptx.diff", "return -logprobs[", "return logprobs["),
    ("X5", "diffs/ema.diff", "weight.detach(), 1 - args.ema_decay", "weight.detach(), 1"),
    ("X6", "diffs/value_warmup.diff", "if update < args.value_warmup_updates", "if update < 0"),
    ("X7", "diffs/sampling.diff", "- probs > top_p", "> top_p"),
    ("X8", "ppo.py", "if args.max_grad_norm is not None:", "if False:"),
    ("X9", "ppo.py", "mask.cumsum(dim=1).argmax(dim=1, keepdim=True)", "mask[:, :1].long() - 1"),
    ("X10", "rloo.py", "responses[rows] = sample(", "responses[: len(rows)] = sample("),
    ("X11", "utils.py", "dist.all_reduce(x, op)\n", "pass\n"),
    ("X12", "diffs/early_stop.diff", "> args.max_approxkl", "> 100 * args.max_approxkl"),
    ("X13", "machinery/rewards.py", "| (tokens >= pad_id)", ""),
    ("X14", "ppo.py", "if args.whiten_advantages:", "if True:"),
    ("X15", "diffs/ranking.diff", "[:, :, None] < ranks", "[:, :, None] != ranks"),
)
# fmt: on
LEFT_OUT = ("test_twins.py", "test_readme.py", "test_docs.py", "test_diffs.py", "test_same.py")


@dataclass(frozen=True)
class Args:
    """Which tests notice which mistakes."""

    only: tuple[str, ...] = ()
    """details; default: all"""
    workers: int = 2
    """mistakes at a time, each in its own copy"""


def copy_project(source: Path, folder: Path) -> Path:
    """Copy a checkout without its runs and pictures."""
    names = (".git", ".venv", "*cache*", "runs", "models", "wandb", "*.png", "*.egg-info")
    return Path(shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*names)))


def tests_of(detail: str, file: str) -> list[str]:
    """The words for pytest, the longest files first."""
    if file.endswith(".diff"):
        return ["-k", f"{detail}_", "tests/test_diffs.py"]
    paths = sorted((ROOT / "tests").glob("test_*.py"), key=lambda path: -path.stat().st_size)
    names = [f"tests/{path.name}" for path in paths if path.name not in LEFT_OUT]
    return ["-k", f"{detail}_ or golden", *names]


def run_pytest(copy: Path, words: list[str]) -> str:
    """The first test that fails in a copy of the project; nothing if all pass.

    Raises `RuntimeError` if they cannot be collected.
    """
    options = ["-x", "-m", "not hub and not exhaustive", "-p", "no:cacheprovider"]
    options.append(f"--basetemp={copy}-tmp")
    command = [sys.executable, "-m", "pytest", *options, *words]
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    if done.returncode in (0, 5):  # 5: there are no tests
        return ""
    if done.returncode != 1:
        raise RuntimeError(f"no test ran: {done.stdout[-1000:]}")
    return failed[0].split(" - ")[0]


def attempt(mistake: tuple[str, str, str, str]) -> bool:
    """Print which test notices a mistake; return whether one does."""
    detail, file, right, wrong = mistake
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_project(ROOT, Path(folder, "project"))
        text, test = (copy / file).read_text(), ""
        if text.count(right) == 1:
            (copy / file).write_text(text.replace(right, wrong))
            test = run_pytest(copy, tests_of(detail, file))
    print(f"{detail:4} {file}: {wrong!r}  ⇒  {test or 'NOT NOTICED'}", flush=True)
    return bool(test)


def main(args: Args) -> None:
    """A line for each mistake."""
    mistakes = [mistake for mistake in DETAILS if not args.only or mistake[0] in args.only]
    with ThreadPoolExecutor(args.workers) as pool:
        noticed = list(pool.map(attempt, mistakes))
    print(f"{sum(noticed)} of {len(mistakes)} noticed")
    sys.exit(not all(noticed))


if __name__ == "__main__":
    main(tyro.cli(Args))
