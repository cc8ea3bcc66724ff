"""How far the first epochs of PPO move the policy with TensorFlow's Adam (A1), and with PyTorch's.

    python sft.py --task synthetic && python train_reward.py --task synthetic
    python benchmarks/adam.py                                # adam.csv, adam.png, and a table

Two policies: models/synthetic/sft, and one of five times as many parameters that sft.py trains here
first. `ppo.main` runs with either Adam, both with eps 1e-5: four epochs of one minibatch at a
constant learning rate, as in The N Implementation Details of RLHF with PPO (2023). After each epoch,
which is one optimizer step: log pi_new - log pi_old of all response tokens of the batch.
"""

import csv
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import tyro
from transformers import GPT2Config

sys.path.insert(0, str(Path(__file__).parents[1]))
import ppo  # noqa: E402
import sft  # noqa: E402
from benchmarks import curves  # noqa: E402
from data.tasks import TASKS  # noqa: E402
from machinery.plots import pyplot  # noqa: E402

BETA2, EPS, EPOCHS = 0.999, 1e-5, 4
PYTORCH = type("PyTorchAdam", (ppo.AdamTF,), {"step": torch.optim.Adam.step})
ADAMS = {"TensorFlow": ppo.AdamTF, "PyTorch": PYTORCH}
ROW = ("parameters", "adam", "seed", "update", "epoch")
STATISTICS = [f"{x}_{f}" for x in ("logratio", "ratio") for f in ("mean", "var", "min", "max")]
STATISTICS += ["approxkl", "kl"]


@dataclass(frozen=True)
class Args:
    """How far the first epochs of PPO move the policy, by optimizer."""

    out: Path = Path(__file__).with_suffix(".png")
    """picture to write; the CSV is beside it"""
    model: Path = Path("models/synthetic/sft")
    """the smaller policy"""
    reward_model: Path = Path("models/synthetic/train_reward")
    """reward model of both"""
    width: int = 256
    """width of the larger policy"""
    layers: int = 6
    """layers of the larger policy"""
    stories: int = 10_000
    """texts that the larger policy learns"""
    updates: int = 2
    """updates of each run"""
    batch_size: int = 64
    """episodes per update"""
    lr: float = 1e-4
    """learning rate"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """one run each, for both policies and both optimizers"""


def train_larger(args: Args, folder: Path) -> Path:
    """Train the larger policy from scratch; return its folder."""
    shape = dict(n_embd=args.width, n_layer=args.layers, n_head=args.width // 64)
    GPT2Config.from_pretrained(args.model, **shape).save_pretrained(folder / "start")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.model / name, folder / "start" / name)
    task = replace(TASKS["synthetic"], base_model=str(folder / "start"), num_queries=args.stories)
    settings = dict(batch_size=16, lr=1e-3, block_size=96, output_dir=str(folder / "larger"))
    sft.main(sft.Args(task=task, run_name="larger", **settings))
    return folder / "larger"


@torch.no_grad()
def statistics(policy: ppo.PolicyAndValue, rollout: ppo.Rollout) -> dict[str, float]:
    """How far the policy is from the one that sampled; `kl`: that one from the reference."""
    logprobs, _, _ = policy(rollout.contexts, rollout.responses)
    log_ratio = logprobs - rollout.logprobs
    values = []
    for x in (log_ratio, log_ratio.exp()):
        values += [x.mean(), x.var(correction=0), x.min(), x.max()]
    values += [0.5 * (log_ratio**2).mean(), rollout.kl.sum(dim=1).mean()]
    return dict(zip(STATISTICS, map(float, values), strict=True))


def measure(model: Path, adam: str, seed: int, args: Args) -> list[dict[str, Any]]:
    """A row for each epoch of a run."""
    rows, seen = [], {}
    make_rollout = ppo.make_rollout

    def spy_rollout(policy: ppo.PolicyAndValue, *rest: Any) -> ppo.Rollout:
        rollout = make_rollout(policy, *rest)
        if len(rollout.queries) == args.batch_size:  # not an evaluation
            seen.update(policy=policy, rollout=rollout)
        return rollout

    class Adam(ADAMS[adam]):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            update, epoch = divmod(len(rows), EPOCHS)
            size = sum(p.numel() for p in seen["policy"].parameters())
            row = dict(zip(ROW, (size, adam, seed, update + 1, epoch + 1), strict=True))
            rows.append(row | statistics(**seen))

    task, name = replace(TASKS["synthetic"], base_model=str(model)), f"{model.name}-{adam}-{seed}"
    episodes = dict(total_episodes=args.updates * args.batch_size, batch_size=args.batch_size)
    settings = dict(seed=seed, num_ppo_epochs=EPOCHS, lr=args.lr, anneal_lr=False, adam_eps=EPS)
    files = dict(reward_model=str(args.reward_model), run_name=name, output_dir=f"ppo-{name}")
    with patch.multiple(ppo, AdamTF=Adam, make_rollout=spy_rollout):
        ppo.main(ppo.Args(task=task, eval_queries=16, **episodes, **settings, **files))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The epochs of the first update: means over the seeds, and the extremes."""
    names = "parameters", "Adam", "epoch", *STATISTICS
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    groups: dict[tuple, list] = {}
    for row in rows:
        if row["update"] == 1:
            key = f"{row['parameters'] / 1e6:.1f}M", row["adam"], str(row["epoch"])
            groups.setdefault(key, []).append([row[name] for name in STATISTICS])
    for key, values in groups.items():
        cells = []
        for name, column in zip(STATISTICS, zip(*values, strict=True), strict=True):
            reduce = {"_min": np.min, "_max": np.max}.get(name[-4:], np.mean)
            cells.append(f"{reduce(column):.3g}")
        lines.append(f"| {' | '.join([*key, *cells])} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Both effective eps by step, and for each policy approxkl after each epoch, by seed."""
    sizes = list(dict.fromkeys(row["parameters"] for row in rows))
    look = dict(figsize=(4.4 * (1 + len(sizes)), 3.6), layout="constrained")
    figure, axes = pyplot().subplots(1, 1 + len(sizes), **look)
    t = np.arange(1, 5001)
    axes[0].plot(t, np.full(len(t), EPS), "C0", label="TensorFlow: eps")
    axes[0].plot(t, EPS * np.sqrt(1 - BETA2**t), "C1", label="PyTorch: eps * sqrt(1 - beta2^t)")
    axes[0].set(title="added to sqrt(v)", xlabel="optimizer step t", xscale="log", yscale="log")
    for axis, parameters in zip(axes[1:], sizes, strict=True):
        curves: dict[tuple, list[tuple[int, float]]] = {}
        for row in rows:
            if row["parameters"] == parameters:
                step = EPOCHS * (row["update"] - 1) + row["epoch"]
                key = row["adam"], row["seed"], row["update"]
                curves.setdefault(key, []).append((step, row["approxkl"]))
        for (adam, seed, update), points in curves.items():
            label = adam if (seed, update) == (rows[0]["seed"], 1) else None
            look = dict(color=f"C{list(ADAMS).index(adam)}", marker=".", linewidth=1)
            axis.plot(*zip(*points, strict=True), label=label, **look)
        axis.set(title=f"approxkl, {parameters / 1e6:.1f}M parameters", yscale="log")
        axis.set(xlabel=f"optimizer step; {EPOCHS} per update")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(args: Args) -> None:
    """Measure, write, print, draw."""
    paths = {name: getattr(args, name).resolve() for name in ("out", "model", "reward_model")}
    args, rows, here = replace(args, **paths), [], Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # for the folders of the runs
        for model in (args.model, train_larger(args, Path(folder))):
            for seed in args.seeds:
                for adam in ADAMS:
                    rows += measure(model, adam, seed, args)
        os.chdir(here)
    with open(args.out.with_suffix(".csv"), "w", newline="") as file:
        about = curves.provenance()
        writer = csv.DictWriter(file, (*ROW, *STATISTICS, *about))
        writer.writeheader()
        writer.writerows(row | about for row in rows)
    print(table(rows))
    draw(rows, args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
