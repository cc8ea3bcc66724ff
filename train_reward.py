"""Reward model from preference labels, as OpenAI's `lm-human-preferences` trains it (Ziegler et al. 2019), in one file.

    python train_reward.py --task synthetic
    accelerate launch train_reward.py --task sentiment

The language model's trunk with a scalar head reads query and response; of K candidate responses the one that a human
liked best gets the highest softmax probability. One epoch. Before and after, rewards are normalised on samples of the
policy.

Letters: `B` labels, `K` candidates per label, `Q` query tokens, `R` response tokens, `T = Q + R`, `S` samples.
"""

import json
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

import utils
from utils import InputError, Labels, RewardModel, Task


@dataclass(frozen=True)
class Args:
    """Reward model from preference labels."""

    task: Task
    seed: int = 1
    """of head, order of the labels and samples; process r samples with seed + 100003 r (G6)"""
    num_labels: int = 4992
    """labels to train on, the file's first; the rest measures accuracy"""
    batch_size: int = 32
    """labels per optimizer step, over all processes"""
    micro_batch_size: int = 128
    """sequences per forward on one process (K for each label): memory only"""
    lr: float = 5e-5
    """learning rate of the first step; falls linearly to 0 (G5)"""
    adam_eps: float = 1e-5
    """TensorFlow's ε̂ (A1)"""
    normalize_samples: int = 256
    """the policy's samples that gain and bias are set from, at least (R3)"""
    rollout_batch_size: int = 512
    """samples come in batches of this many, over all processes (R3)"""
    gradient_checkpointing: bool = False
    """less memory for activations, one more forward"""
    output_dir: str | None = None
    """folder of the reward model; None: models/<task>/train_reward"""
    run_name: str | None = None
    """folder in runs/; None: task, script, seed and time"""
    track: bool = False
    """log to Weights & Biases too"""


PRESETS: dict[str, dict[str, Any]] = {
    "synthetic": dict(lr=1e-3, batch_size=8),
    "sentiment": dict(),
    "descriptiveness": dict(),
    "cnndm": dict(num_labels=46_000, batch_size=16, lr=2.5e-5, rollout_batch_size=128, micro_batch_size=16),
    "tldr": dict(num_labels=92_832, batch_size=64, lr=3e-6, rollout_batch_size=256, micro_batch_size=16),
    "synthetic_eos": dict(num_labels=9984, batch_size=16, lr=1e-3),
    "tldr_2019": dict(num_labels=46_000, batch_size=16, lr=2.5e-5, rollout_batch_size=128, micro_batch_size=16),
}


def candidate_tokens(labels: Labels, pad_id: int) -> Tensor:
    """Each query with each of its candidates, pads on the left: [B, K, T]."""
    queries = labels.query[:, None].expand(-1, labels.responses.shape[1], -1)
    tokens = torch.cat([queries, labels.responses], dim=2)
    return utils.left_align(tokens.flatten(0, 1), pad_id).view(tokens.shape)


def candidate_rewards(model: nn.Module, tokens: Tensor, width: int) -> Tensor:
    """[B, K, T] whose longest row is `width` → rewards [B, K]."""
    return model(tokens[..., -width:].flatten(0, 1)).view(tokens.shape[:2])


def micro_batches(tokens: Tensor, pad_id: int, size: int) -> list[tuple[np.ndarray, int]]:
    """[B, K, T] → [(labels, longest row)] of at most `size` sequences; a label's candidates stay together."""
    lengths = utils.row_lengths(tokens.flatten(0, 1), pad_id).reshape(tokens.shape[:2]).max(axis=1)
    return utils.micro_batches(lengths, max(1, size // tokens.shape[1]))


def train_step(
    model: nn.Module, optimizer: Any, labels: Labels, pad_id: int, args: Args, accelerator: Accelerator
) -> dict[str, Tensor]:
    """R4: one optimizer step on this process's labels; loss and accuracy before it, over all processes."""
    model.train()
    tokens = candidate_tokens(labels, pad_id)
    parts = micro_batches(tokens, pad_id, args.micro_batch_size)
    count, loss_sum, correct = utils.all_sum(torch.tensor(float(len(tokens)), device=tokens.device)), 0.0, 0.0
    for i, (rows, width) in enumerate(parts):
        with accelerator.no_sync(model) if i + 1 < len(parts) else nullcontext():
            rewards = candidate_rewards(model, tokens[rows], width)  # [b, K]
            loss = F.cross_entropy(rewards, labels.best[rows], reduction="sum") / count
            accelerator.backward(loss * accelerator.num_processes)  # DDP averages over processes
        loss_sum += loss.detach()
        correct += (rewards.argmax(dim=1) == labels.best[rows]).sum() / count
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": utils.all_sum(loss_sum), "accuracy": utils.all_sum(correct)}


@torch.no_grad()
def normalise(model: RewardModel, queries: Tensor, responses: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """R3: set gain and bias so that these samples [S, Q], [S, R] of all processes have mean 0 and standard deviation 1;
    returns their mean and standard deviation without gain and bias."""
    model.eval()
    model.gain.fill_(1)
    model.bias.fill_(0)
    rewards = utils.reward_scores(model, queries, responses, size)
    mean, variance = utils.moments(rewards, torch.ones_like(rewards, dtype=torch.bool))
    model.gain.copy_(1 / variance.sqrt())
    model.bias.copy_(-model.gain * mean)
    return mean, variance.sqrt()


def policy_samples(args: Args, tokenizer: Any, pad_id: int, accelerator: Accelerator) -> list[tuple[Tensor, Tensor]]:
    """R3: samples of the pretrained policy to normalise on, before and after training: (queries [S, Q], untruncated
    responses [S, R]) twice. The policy is gone when this returns."""
    task, device = args.task, accelerator.device
    ids = utils.task_ids(task, tokenizer, pad_id)
    table = utils.load_queries(task, tokenizer, pad_id)
    lm = utils.load_lm(task.base_model).to(device).eval()
    seed = utils.process_seed(args.seed, accelerator.process_index)  # G6
    size = (
        math.ceil(args.normalize_samples / args.rollout_batch_size)
        * args.rollout_batch_size
        // accelerator.num_processes
    )
    sets = []
    for step in range(2):
        queries = table[utils.rows_of_step(len(table), size, step, seed)].to(device)
        with accelerator.autocast():
            contexts, gen = utils.add_affixes(queries, ids), utils.generator(seed, step, device)
            sets.append((queries, utils.sample_all(lm, contexts, task, pad_id, gen, args.micro_batch_size)))
    return sets


@torch.no_grad()
def predict(model: nn.Module, labels: Labels, pad_id: int, args: Args) -> Tensor:
    """Rewards [B, K] of the candidates of all labels."""
    model.eval()
    tokens = candidate_tokens(labels, pad_id)
    out = torch.empty(tokens.shape[:2], device=tokens.device)
    for rows, width in micro_batches(tokens, pad_id, args.micro_batch_size):
        out[rows] = candidate_rewards(model, tokens[rows], width).float()
    return out


def calibration(rewards: Tensor, best: Tensor, bins: int = 5) -> list[dict[str, float]]:
    """How often the top candidate [B, K] is the human's, beside the probability that the model gives it: the labels in
    `bins` groups of like probability, the least sure first."""
    top = rewards.softmax(dim=1).max(dim=1)
    right = (top.indices == best).float()
    order = top.values.argsort()
    groups = [
        (top.values[rows].mean().item(), right[rows].mean().item(), len(rows))
        for rows in order.tensor_split(bins)
        if len(rows)
    ]
    return [{"labels": n, "predicted": p, "accuracy": a} for p, a, n in groups]


def report(run: utils.Run, rewards: Tensor, best: Tensor) -> dict[str, float]:
    """Held-out accuracy, calibration table and picture of the rewards [B, K] of chosen and other candidates."""
    rows = calibration(rewards, best)
    run.table(rows, "calibration on held-out labels")
    chosen = torch.zeros_like(rewards, dtype=torch.bool).scatter(1, best[:, None], True)
    run.histogram(
        {"chosen": rewards[chosen].tolist(), "others": rewards[~chosen].tolist()}, "reward of held-out candidates"
    )
    error = sum(row["labels"] * abs(row["predicted"] - row["accuracy"]) for row in rows) / len(rewards)
    return {
        "heldout/accuracy": (rewards.argmax(dim=1) == best).float().mean().item(),
        "heldout/loss": F.cross_entropy(rewards, best).item(),
        "heldout/calibration_error": error,
        "heldout/reward_chosen": rewards[chosen].mean().item(),
        "heldout/reward_others": rewards[~chosen].mean().item(),
    }


def check(args: Args, processes: int) -> None:
    """Errors: `InputError` for values that cannot work, before anything is loaded."""
    utils.check_task(args.task)
    utils.check_positive(
        args, ("num_labels", "batch_size", "micro_batch_size", "lr", "normalize_samples", "rollout_batch_size")
    )
    for name, value, unit in (
        ("batch_size", args.batch_size, processes),
        ("rollout_batch_size", args.rollout_batch_size, processes),
        ("num_labels", args.num_labels, args.batch_size),
    ):
        if value % unit:
            raise InputError(f"{name}={value} does not divide by {unit}; use {max(value // unit, 1) * unit}")


PANELS = ["loss", "accuracy", "gain", "bias", "lr"]


def main(args: Args) -> None:
    """The run: normalise → one epoch → normalise → measure."""
    accelerator = utils.start_accelerator()
    check(args, accelerator.num_processes)
    task, device, rank, processes = args.task, accelerator.device, accelerator.process_index, accelerator.num_processes
    tokenizer, config, pad_id = utils.load_tokenizer(task, task.response_length, f"python sft.py --task {task.task}")
    labels = utils.load_labels(task, tokenizer, pad_id)
    utils.check_length(config, task.query_length + labels.responses.shape[2], f"--label_dataset={task.label_dataset}")
    if len(labels.best) < args.num_labels:
        raise InputError(
            f"--label_dataset={task.label_dataset} has {len(labels.best)} labels, num_labels={args.num_labels}; "
            f"use --num_labels {len(labels.best) // args.batch_size * args.batch_size}"
        )
    before, after = policy_samples(args, tokenizer, pad_id, accelerator)

    torch.manual_seed(args.seed)
    model = RewardModel.from_lm(task.base_model, pad_id)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model, optimizer = accelerator.prepare(model, utils.AdamTF(model.parameters(), lr=args.lr, eps=args.adam_eps))
    plain = accelerator.unwrap_model(model)
    with accelerator.autocast():
        normalise(plain, *before, args.micro_batch_size)

    run = utils.Run(args, "train_reward", args.num_labels // args.batch_size, PANELS, accelerator)
    clock = utils.Clock(device)
    order = np.random.default_rng([args.seed, 0]).permutation(args.num_labels)  # the same on every process
    for step, start in enumerate(range(0, args.num_labels, args.batch_size)):
        batch = labels.rows(order[start : start + args.batch_size][rank::processes]).to(device)
        with clock("optimise"):
            utils.set_lr(optimizer, lr := utils.anneal(args.lr, start, args.num_labels))  # G5
            stats = train_step(model, optimizer, batch, pad_id, args, accelerator)
        stats |= {"gain": plain.gain.detach(), "bias": plain.bias.detach()}
        metrics = utils.mean_over_processes(stats, device) | {"lr": lr} | clock.pop()
        utils.check_finite(metrics, "loss", step)
        run.log(step, metrics, {"loss": "loss", "accuracy": "accuracy"})

    with accelerator.autocast():
        mean, std = normalise(plain, *after, args.micro_batch_size)
    results = {"samples/mean_before_normalising": mean.item(), "samples/std_before_normalising": std.item()}
    if len(labels.best) > args.num_labels:
        heldout = labels.rows(np.arange(args.num_labels, len(labels.best))).to(device)
        with accelerator.autocast():
            results |= report(run, predict(plain, heldout, pad_id, args), heldout.best)
    folder = args.output_dir or f"models/{task.task}/train_reward"
    utils.save_model(plain, tokenizer, folder, accelerator)
    run.log(step + 1, results, {})
    run.finish(f"reward model: {folder}", json.dumps({name: round(value, 4) for name, value in results.items()}))
    utils.stop_accelerator(accelerator)


if __name__ == "__main__":
    utils.cli(main, lambda: utils.parse_args(Args, PRESETS))
