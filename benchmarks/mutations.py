"""Break one detail at a time in a copy of the project and show that its test fails.

python benchmarks/mutations.py
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MUTATIONS = (  # detail, file, right, wrong, test
    ("G3", "utils.py", "mask.cumsum(dim=1) - mask.long()", "torch.arange(mask.shape[1]).expand(mask.shape)", "G3"),
    ("G5", "utils.py", "return lr * (1 - step / steps)", "return lr * (1 - (step + 1) / steps)", "G5"),
    ("G6", "utils.py", "return seed + rank * 100003", "return seed", "G6"),
    ("R1", "utils.py", "columns, 0).amax(dim=1)", "columns, 0).amax(dim=1).amax().expand(len(tokens))", "R1"),
    ("R2", "utils.py", "std=1 / math.sqrt(module.in_features + 1)", "std=0.02", "R2"),
    ("R3", "train_reward.py", "model.gain.copy_(1 / variance.sqrt())", "model.gain.copy_(1 / variance)", "R3"),
    ("P1", "utils.py", "F.log_softmax(logits.float() / temperature", "F.log_softmax(logits.float()", "P1"),
    ("P2", "ppo.py", "nn.init.zeros_(self.value_head.weight)", "nn.init.ones_(self.value_head.weight)", "P2"),
    ("P3", "utils.py", "tokens = tokens[first:] or tokens", "tokens = tokens[first:]", "P3"),
    ("P5", "utils.py", "(positions >= after)", "(positions > after)", "P5"),
    ("P6", "ppo.py", "following = delta + gamma * lam * following", "following = delta + gamma * following", "P6"),
    ("P8", "ppo.py", "(-kl_coef * (logprobs - ref_logprobs))", "(kl_coef * (logprobs - ref_logprobs))", "P8"),
    (
        "P9",
        "utils.py",
        ").masked_fill(~mask, 0).sum()) / count\n    return",
        ").masked_fill(~mask, 0).sum()) / (count - 1)\n    return",
        "P9",
    ),
    ("P10", "ppo.py", "0.5 * torch.max(error, error_clipped)", "0.5 * error", "P10"),
    ("P11", "ppo.py", "-0.2), 0.2)", "-0.2), 1.0)", "P11"),
    (
        "A1",
        "utils.py",
        'group["eps"] = group["eps_hat"] / math.sqrt',
        'group["eps"] = group["eps_hat"] * math.sqrt',
        "A1",
    ),
    ("L3", "rloo.py", "/ (k - 1)).flatten()", "/ k).flatten()", "L3"),
    ("L6", "ppo.py", "return [np.sort(rows) for rows", "return [rows for rows", "every_ratio_of_every_epoch"),
    ("X9", "ppo.py", "mask.sum(dim=1, keepdim=True) - 1", "torch.full_like(mask[:, :1], 0).long()", "X9"),
    ("X11", "utils.py", "dist.all_reduce(x)", "pass", "X11"),
)


def main() -> None:
    """A line for each mutation; exit code 1 if a test did not notice."""
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "runs", "models", "__pycache__", "wandb"))
        for detail, file, right, wrong, test in MUTATIONS:
            source = (copy / file).read_text()
            if source.count(right) != 1:
                sys.exit(f"{detail}: {right!r} stands {source.count(right)} times in {file}")
            (copy / file).write_text(source.replace(right, wrong))
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", test, "-p", "no:cacheprovider"]
            result = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
            (copy / file).write_text(source)
            failed = [line.split(" - ")[0] for line in result.stdout.splitlines() if line.startswith("FAILED")]
            unnoticed += not failed
            print(f"{detail:4} {wrong[:60]!r:64} {failed[0] if failed else 'NOT NOTICED'}", flush=True)
    sys.exit(unnoticed > 0)


if __name__ == "__main__":
    main()
