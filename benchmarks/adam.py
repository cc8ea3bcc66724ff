"""What TensorFlow's Adam (A1) changes: how far the first epochs of PPO move the policy, against PyTorch's Adam with the same ε.

    python sft.py --task synthetic && python train_reward.py --task synthetic && python benchmarks/adam.py

Two models: `models/synthetic/sft`, and one of five times as many parameters that sft.py trains here first. `ppo.main` runs the
first updates of each with `ppo.AdamTF` and with `torch.optim.Adam`, ε 1e-5 in both, and nothing else different: one minibatch,
four epochs, a constant learning rate, as in "The N Implementation Details of RLHF with PPO" (2023). After every epoch, which is
one optimizer step, log π_new − log π_old of all tokens of the batch: the first update's samples are the same for both. Prints
the first update as a table, writes all rows as CSV, and draws them beside the two effective ε.
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
import records  # noqa: E402
import sft  # noqa: E402
import tasks  # noqa: E402

BETA2, EPS = 0.999, 1e-5
ADAMS = {  # what `ppo.AdamTF` is replaced with
    "TensorFlow": ppo.AdamTF,
    "PyTorch": lambda params, lr, **settings: torch.optim.Adam(params, lr=lr, fused=True, **settings),
}
ROW = ("parameters", "adam", "seed", "update", "epoch")
STATISTICS = ("logratio_mean", "logratio_var", "logratio_min", "logratio_max")
STATISTICS += ("ratio_mean", "ratio_var", "ratio_min", "ratio_max", "approxkl", "clipfrac", "kl")


@dataclass(frozen=True)
class Args:
    """How far the first epochs of PPO move the policy, by Adam."""

    out: Path = Path(__file__).with_suffix(".png")
    """picture to write; a CSV beside it"""
    model: Path = Path("models/synthetic/sft")
    """the smaller policy"""
    reward_model: Path = Path("models/synthetic/train_reward")
    """reward model of both"""
    width: int = 256
    """of the larger policy"""
    layers: int = 6
    """of the larger policy"""
    updates: int = 2
    """updates of each run"""
    batch_size: int = 64
    """episodes per update"""
    lr: float = 1e-4
    """learning rate, constant"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """a run each, for both models and both optimizers"""


def train_larger(args: Args, folder: Path) -> Path:
    """sft.py over 10,000 stories on a model of `width` and `layers` from scratch → its folder."""
    start, end = folder / "start", folder / "larger"
    config = GPT2Config.from_pretrained(args.model, n_embd=args.width, n_layer=args.layers, n_head=args.width // 64)
    config.save_pretrained(start)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.model / name, start / name)
    task = replace(tasks.TASKS["synthetic"], base_model=str(start), num_queries=10_000)
    sft.main(sft.Args(task=task, batch_size=16, lr=1e-3, block_size=96, output_dir=str(end), run_name="larger"))
    return end


def after_step(policy: ppo.PolicyAndValue, batch: ppo.Rollout, targets: tuple, args: ppo.Args) -> dict[str, float]:
    """How far the policy is from the one that sampled `batch`, over all tokens; `kl` is that one's from the reference."""
    logprobs = ppo.logprobs_of(policy, batch.contexts, batch.responses, batch.sizes, args.micro_batch_tokens)
    terms = ppo.loss_terms(logprobs, batch.values, batch, *targets, args)
    found = {"logratio": logprobs - batch.logprobs, "ratio": terms["val/ratio"]}
    row = {f"{n}_{f}": getattr(x, f)().item() for n, x in found.items() for f in ("mean", "min", "max")}
    row |= {f"{name}_var": x.var(unbiased=False).item() for name, x in found.items()}
    row |= {name: terms[f"policy/{name}_avg"].mean().item() for name in ("approxkl", "clipfrac")}
    return row | {"kl": (batch.logprobs - batch.ref_logprobs).sum(dim=1).mean().item()}


def measure(model: Path, adam: str, seed: int, args: Args) -> list[dict[str, Any]]:
    """The first updates of a PPO run → a row for each epoch."""
    task = replace(tasks.TASKS["synthetic"], base_model=str(model))
    settings = ppo.Args(
        task=task,
        seed=seed,
        total_episodes=args.updates * args.batch_size,
        batch_size=args.batch_size,
        micro_batch_tokens=1024,
        lr=args.lr,
        adam_eps=EPS,
        reward_model=str(args.reward_model),
        output_dir=f"ppo-{model.name}-{adam}-{seed}",
        eval_every=args.updates,
        eval_queries=16,
    )
    rows, train_step = [], ppo.train_step

    def watched(policy: ppo.PolicyAndValue, optimizer: Any, batch: ppo.Rollout, targets: tuple, *rest: Any) -> dict:
        sums = train_step(policy, optimizer, batch, targets, *rest)
        update, epoch = divmod(len(rows), settings.num_ppo_epochs)
        size = sum(p.numel() for p in policy.parameters())
        names = dict(zip(ROW, (size, adam, seed, update + 1, epoch + 1), strict=True))
        rows.append(names | after_step(policy, batch, targets, settings))
        return sums

    replaced = dict(AdamTF=ADAMS[adam], train_step=watched, anneal=lambda lr, *_: lr)
    with patch.multiple(ppo, **replaced):
        ppo.main(settings)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The first update's epochs, mean over the seeds (of extremes: the extreme)."""
    pick = {"min": np.min, "max": np.max}
    names = "parameters", "Adam", "epoch", *STATISTICS
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    first = [row for row in rows if row["update"] == 1]
    for size, adam, epoch in dict.fromkeys((r["parameters"], r["adam"], r["epoch"]) for r in first):
        same = [r for r in first if (r["parameters"], r["adam"], r["epoch"]) == (size, adam, epoch)]
        values = [pick.get(name[-3:], np.mean)([row[name] for row in same]) for name in STATISTICS]
        lines.append(f"| {size / 1e6:.1f}M | {adam} | {epoch} | " + " | ".join(f"{x:.3g}" for x in values) + " |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Both effective ε over the steps; and for each model how far every epoch moves it, a line for each seed."""
    plt = records.pyplot()
    sizes = list(dict.fromkeys(row["parameters"] for row in rows))
    figure, axes = plt.subplots(1, 1 + len(sizes), figsize=(4.4 * (1 + len(sizes)), 3.6), layout="constrained")
    t = np.arange(1, 5001)
    axes[0].plot(t, np.full(len(t), EPS), "C0", label="TensorFlow: ε̂")
    axes[0].plot(t, EPS * np.sqrt(1 - BETA2**t), "C1", label="PyTorch: ε·√(1 − β₂ᵗ)")
    axes[0].set(title="what is added to √v", xlabel="optimizer step t", xscale="log", yscale="log", ylim=(2e-7, 2e-5))
    epochs = max(row["epoch"] for row in rows)
    for axis, size in zip(axes[1:], sizes, strict=True):
        axis.sharey(axes[1])
        for color, adam in enumerate(ADAMS):
            runs = [r for r in rows if (r["parameters"], r["adam"]) == (size, adam)]
            for i, (seed, update) in enumerate(dict.fromkeys((r["seed"], r["update"]) for r in runs)):
                ys = [r["approxkl"] for r in runs if (r["seed"], r["update"]) == (seed, update)]
                xs = np.arange(1, epochs + 1) + epochs * (update - 1)
                axis.plot(xs, ys, f"C{color}.-", label=None if i else adam, linewidth=1)
        title = f"½ (log π_new − log π_old)², {size / 1e6:.1f}M parameters"
        axis.set(title=title, yscale="log", xlabel=f"optimizer step = epoch, {epochs} an update")
    for axis in axes:
        axis.title.set_size(10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(args: Args) -> None:
    """Measure, print, draw."""
    args = replace(args, **{name: getattr(args, name).resolve() for name in ("out", "model", "reward_model")})
    rows, here = [], Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the runs' folders stay here
        try:
            for model in (args.model, train_larger(args, Path(folder))):
                for seed in args.seeds:
                    for adam in ADAMS:
                        rows += measure(model, adam, seed, args)
        finally:
            os.chdir(here)
    with open(args.out.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*ROW, *STATISTICS))
        writer.writerows([*(row[n] for n in ROW), *(f"{row[n]:.6g}" for n in STATISTICS)] for row in rows)
    print(table(rows))
    draw(rows, args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
