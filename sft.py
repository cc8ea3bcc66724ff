"""Supervised fine-tuning: next-token prediction on a task's texts, from a pretrained model or from scratch.

    python sft.py --task synthetic                      # data/synthetic/model holds a configuration only: from scratch
    accelerate launch sft.py --task sentiment --num_epochs 1

Consecutive texts are packed into blocks that start with the start of a text, as the queries of ppo.py do.

Letters: `B` blocks per step, `T` tokens per block, `N` blocks in all.
"""

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
from utils import InputError, Task


@dataclass(frozen=True)
class Args:
    """Supervised fine-tuning."""

    task: Task
    seed: int = 1
    """of the order of the blocks and of the weights, where they start from scratch"""
    num_epochs: int = 1
    """passes over the texts"""
    batch_size: int = 32
    """blocks per optimizer step, over all processes"""
    micro_batch_size: int = 32
    """blocks per forward on one process: memory only"""
    block_size: int = 128
    """tokens per block"""
    lr: float = 5e-5
    """highest learning rate: warmed up linearly, then falling linearly to 0"""
    warmup: float = 0.05
    """share of the steps that warm up"""
    weight_decay: float = 0.01
    """AdamW's"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this norm"""
    num_heldout: int = 256
    """blocks kept out of training, for the perplexity"""
    gradient_checkpointing: bool = False
    """less memory for activations, one more forward"""
    output_dir: str | None = None
    """folder of the trained model; None: models/<task>/sft"""
    run_name: str | None = None
    """folder in runs/; None: task, script, seed and time"""
    track: bool = False
    """log to Weights & Biases too"""
    eval_every: int = 200
    """steps between two measurements on held-out text"""


PRESETS: dict[str, dict[str, Any]] = {
    "synthetic": dict(base_model=str(utils.SYNTHETIC / "model"), num_epochs=4, batch_size=16, lr=3e-3, block_size=96),
    "sentiment": dict(),
    "descriptiveness": dict(),
    "cnndm": dict(block_size=512, batch_size=16, micro_batch_size=4),
    "tldr_2019": dict(block_size=512, batch_size=16, micro_batch_size=4),
}


def pack(rows: list[list[int]], continued: list[list[int]], block_size: int) -> Tensor:
    """Texts → blocks [N, T]: a block starts with `rows[i]` and goes on with `continued[i + 1]` … (the same texts behind
    a space) until it is full; what is left of the last one is dropped, a block that stays short too."""
    blocks, block = [], []
    for row, behind in zip(rows, continued, strict=True):
        block = block + behind if block else list(row)
        if len(block) >= block_size:
            blocks.append(block[:block_size])
            block = []
    return torch.tensor(blocks).view(-1, block_size)


def load_blocks(args: Args, tokenizer: Any) -> Tensor:
    """The task's texts as blocks [N, T]. Errors: `InputError` where they do not fill one batch beside the held-out."""
    texts = [text.strip() for text in utils.load_texts(args.task) if text and text.strip()]
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    continued = tokenizer([" " + text for text in texts], add_special_tokens=False)["input_ids"]
    blocks = pack(rows, continued, args.block_size)
    if len(blocks) < args.num_heldout + args.batch_size:
        raise InputError(
            f"--query_dataset={args.task.query_dataset} fills {len(blocks)} blocks of {args.block_size} tokens; "
            f"num_heldout={args.num_heldout} and one batch of {args.batch_size} need {args.num_heldout + args.batch_size}"
        )
    return blocks


def lr_at(step: int, steps: int, args: Args) -> float:
    """Linear warm-up to `lr`, then linear to 0."""
    warmup = max(1, round(args.warmup * steps))
    return args.lr * min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1), 1.0)


def token_losses(lm: nn.Module, tokens: Tensor, pad_id: int) -> Tensor:
    """[B, T] → cross-entropy [B, T − 1] of every token but the first, in nats."""
    logits = lm(**utils.model_inputs(tokens, pad_id), use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


def train_step(lm: nn.Module, optimizer: Any, tokens: Tensor, pad_id: int, args: Args, accelerator: Accelerator) -> Tensor:
    """One optimizer step on this process's blocks [B, T]; the mean loss over all processes' blocks."""
    count, total = utils.all_sum(torch.tensor(float(tokens[:, 1:].numel()), device=tokens.device)), 0.0
    parts = tokens.split(args.micro_batch_size)
    for i, part in enumerate(parts):
        with accelerator.no_sync(lm) if i + 1 < len(parts) else nullcontext():
            loss = token_losses(lm, part, pad_id).sum() / count
            accelerator.backward(loss * accelerator.num_processes)
        total += loss.detach()
    accelerator.clip_grad_norm_(lm.parameters(), args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return utils.all_sum(total)


@torch.no_grad()
def heldout_loss(lm: nn.Module, blocks: Tensor, pad_id: int, args: Args, accelerator: Accelerator) -> float:
    """Mean loss in nats per token over the held-out blocks [N, T], shared out over the processes."""
    lm.eval()
    parts = blocks.to(accelerator.device)[accelerator.process_index :: accelerator.num_processes].split(args.micro_batch_size)
    losses = torch.cat([token_losses(lm, part, pad_id).mean(dim=1) for part in parts])
    return (utils.all_sum(losses.sum()) / len(blocks)).item()


def sample_table(lm: nn.Module, blocks: Tensor, tokenizer: Any, pad_id: int, args: Args) -> list[dict[str, Any]]:
    """What the model writes behind the beginnings of a few blocks [B, T]."""
    starts = blocks[:, : args.block_size // 4]
    lm.eval()
    tokens = utils.sample(lm, starts, args.task.response_length, args.task.temperature, pad_id, utils.generator(args.seed, 0, blocks.device))
    texts = (utils.decode(tokenizer, x, pad_id) for x in (starts, tokens))
    return [{"text": text, "continuation": continuation} for text, continuation in zip(*texts, strict=True)]


def check(args: Args, processes: int) -> None:
    """Errors: `InputError` for values that cannot work, before anything is loaded."""
    utils.check_task(args.task)
    utils.check_positive(args, ("num_epochs", "batch_size", "micro_batch_size", "block_size", "lr", "num_heldout", "eval_every"))
    if args.batch_size % processes:
        raise InputError(f"batch_size={args.batch_size} does not divide over {processes} processes; use {math.ceil(args.batch_size / processes) * processes}")
    if args.num_heldout < processes:
        raise InputError(f"num_heldout={args.num_heldout} is less than one block for each of {processes} processes")


PANELS = ["loss", "heldout/loss", "heldout/perplexity", "lr"]


def main(args: Args) -> None:
    """The run: pack → train → measure."""
    accelerator = utils.start_accelerator()
    check(args, accelerator.num_processes)
    rank, processes, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    tokenizer, _, pad_id = utils.load_tokenizer(args.task, max(0, args.block_size - args.task.query_length))
    blocks = load_blocks(args, tokenizer)
    heldout, blocks = blocks[: args.num_heldout], blocks[args.num_heldout :]

    torch.manual_seed(args.seed)
    lm = utils.load_lm(args.task.base_model)
    if args.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(lm.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    lm, optimizer = accelerator.prepare(lm, optimizer)
    plain = accelerator.unwrap_model(lm)

    steps_per_epoch = len(blocks) // args.batch_size
    steps = args.num_epochs * steps_per_epoch
    run = utils.Run(args, "sft", steps, PANELS, accelerator)
    clock = utils.Clock(device)
    for step in range(steps):
        lm.train()
        epoch, at = divmod(step, steps_per_epoch)
        order = np.random.default_rng([args.seed, epoch]).permutation(len(blocks))  # the same on every process
        rows = order[at * args.batch_size : (at + 1) * args.batch_size][rank::processes]
        with clock("optimise"):
            utils.set_lr(optimizer, lr := lr_at(step, steps, args))
            loss = train_step(lm, optimizer, blocks[rows].to(device), pad_id, args, accelerator).item()
        metrics = {"loss": loss, "lr": lr, "epoch": step / steps_per_epoch} | clock.pop()
        if (step + 1) % args.eval_every == 0 or step + 1 == steps:
            metrics["heldout/loss"] = heldout_loss(lm, heldout, pad_id, args, accelerator)
            metrics["heldout/perplexity"] = math.exp(metrics["heldout/loss"])
        utils.check_finite(metrics, "loss", step)
        run.log(step, metrics, {"loss": "loss", "heldout/perplexity": "perplexity"})

    folder = args.output_dir or f"models/{args.task.task}/sft"
    utils.save_model(plain, tokenizer, folder, accelerator)
    if accelerator.is_main_process:
        run.samples(steps, sample_table(plain, heldout[:4].to(device), tokenizer, pad_id, args), "samples behind held-out text")
    run.finish(f"model: {folder}", f"held-out perplexity: {metrics['heldout/perplexity']:.3f}")
    utils.stop_accelerator(accelerator)


if __name__ == "__main__":
    utils.cli(main, lambda: utils.parse_args(Args, PRESETS))
