"""Supervised fine-tuning: next-token prediction on a task's texts, from a pretrained model or from scratch.

    python sft.py --task synthetic                      # data/synthetic/model holds a configuration only: from scratch
    accelerate launch sft.py --task sentiment --num_epochs 1
    accelerate launch sft.py --task tldr

A task with reference responses (`response_column`) learns them behind their prompts; else consecutive texts are packed
into blocks that start with the start of a text, as the queries of ppo.py do.

Letters: `B` rows per step, `T` tokens per row, `N` rows in all. Only columns `first` … `T − 1` of a row are learned:
all but the first of a packed block, the response of a prompt. Masks are True at real tokens.
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
    """rows per optimizer step, over all processes"""
    micro_batch_size: int = 32
    """rows per forward on one process: memory only"""
    block_size: int = 128
    """tokens per row of packed texts; with reference responses it is query_length + response_length"""
    lr: float = 5e-5
    """highest learning rate: warmed up linearly, then falling linearly to 0"""
    warmup: float = 0.05
    """share of the steps that warm up"""
    weight_decay: float = 0.01
    """AdamW's"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this norm"""
    num_heldout: int = 256
    """rows kept out of training, for perplexity and ROUGE-L"""
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
    "synthetic": dict(base_model=str(utils.SYNTHETIC / "model"), num_epochs=3, batch_size=16, lr=3e-3, block_size=96),
    "sentiment": dict(),
    "descriptiveness": dict(),
    "cnndm": dict(block_size=512, batch_size=16, micro_batch_size=4),
    "tldr": dict(base_model="EleutherAI/pythia-1b-deduped", lr=3e-6, batch_size=128, micro_batch_size=8),
    "synthetic_eos": dict(base_model=str(utils.SYNTHETIC / "model"), num_epochs=5, batch_size=32, lr=3e-3),
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


def load_rows(args: Args, tokenizer: Any, pad_id: int) -> tuple[Tensor, int]:
    """What to learn from: rows [N, T], and the first column that is learned. Errors: `InputError` where the rows do not
    fill one batch beside the held-out ones."""
    task, data = args.task, utils.load_texts(args.task)
    texts = [text or "" for text in data[task.query_column]]
    if task.response_column:
        end = [utils.token_id(tokenizer, task.truncate_token, "--truncate_token")] if task.eos_task else []
        responses = tokenizer([text or "" for text in data[task.response_column]], add_special_tokens=False)[
            "input_ids"
        ]
        pairs = zip(utils.tokenise_queries(texts, task, tokenizer), responses, strict=True)
        pairs = [(query, (response + end)[: task.response_length]) for query, response in pairs if query and response]
        queries, responses = zip(*pairs, strict=True) if pairs else ([], [])
        padded = torch.tensor([row + [pad_id] * (task.response_length - len(row)) for row in responses]).view(
            -1, task.response_length
        )
        rows, first = (
            torch.cat([utils.pad_rows(queries, task.query_length, pad_id), padded.long()], dim=1),
            task.query_length,
        )
    else:
        texts = [text.strip() for text in texts if text.strip()]
        if not texts:
            raise InputError(f"--query_dataset={task.query_dataset} gives no text: all {len(data)} rows are blank")
        starts = tokenizer(texts, add_special_tokens=False)["input_ids"]
        continued = tokenizer([" " + text for text in texts], add_special_tokens=False)["input_ids"]
        rows, first = pack(starts, continued, args.block_size), 1
    if len(rows) < args.num_heldout + args.batch_size:
        raise InputError(
            f"--query_dataset={task.query_dataset} makes {len(rows)} rows of {rows.shape[1]} tokens; "
            f"num_heldout={args.num_heldout} and one batch of {args.batch_size} need "
            f"{args.num_heldout + args.batch_size}"
        )
    return rows, first


def lr_at(step: int, steps: int, args: Args) -> float:
    """Linear warm-up to `lr`, then linear to 0."""
    warmup = max(1, round(args.warmup * steps))
    return args.lr * min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1), 1.0)


def token_losses(lm: nn.Module, rows: Tensor, first: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """[B, T] → cross-entropy in nats and mask of the learned columns, [B, T − first] each; 0 at pads."""
    targets = rows[:, first:]
    logits = lm(**utils.model_inputs(rows, pad_id), use_cache=False, logits_to_keep=targets.shape[1] + 1).logits[:, :-1]
    mask = targets != pad_id
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.masked_fill(~mask, 0).flatten(), reduction="none")
    return losses.view_as(targets).masked_fill(~mask, 0), mask


def micro_batches(rows: Tensor, first: int, pad_id: int, size: int) -> list[Tensor]:
    """[B, T] → rows of like length, trimmed on the left."""
    lengths = utils.row_lengths(rows[:, :first], pad_id)
    return [rows[part][:, first - width :] for part, width in utils.micro_batches(lengths, size)]


def train_step(
    lm: nn.Module, optimizer: Any, rows: Tensor, first: int, pad_id: int, args: Args, accelerator: Accelerator
) -> Tensor:
    """One optimizer step on this process's rows [B, T]; the mean loss per token over all processes' rows."""
    count, total = utils.all_sum((rows[:, first:] != pad_id).sum()), 0.0
    parts = micro_batches(rows, first, pad_id, args.micro_batch_size)
    for i, part in enumerate(parts):
        with accelerator.no_sync(lm) if i + 1 < len(parts) else nullcontext():
            loss = token_losses(lm, part, part.shape[1] - rows.shape[1] + first, pad_id)[0].sum() / count
            accelerator.backward(loss * accelerator.num_processes)  # DDP averages over processes
        total += loss.detach()
    accelerator.clip_grad_norm_(lm.parameters(), args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return utils.all_sum(total)


@torch.no_grad()
def heldout_loss(lm: nn.Module, rows: Tensor, first: int, pad_id: int, args: Args, accelerator: Accelerator) -> float:
    """Mean loss in nats per token over the held-out rows [N, T], shared out over the processes."""
    lm.eval()
    rows = rows.to(accelerator.device)[accelerator.process_index :: accelerator.num_processes]
    sums = torch.zeros(2, device=rows.device)
    for part in micro_batches(rows, first, pad_id, args.micro_batch_size):
        losses, mask = token_losses(lm, part, part.shape[1] - rows.shape[1] + first, pad_id)
        sums += torch.stack([losses.sum(), mask.sum()])
    total, count = utils.all_sum(sums).tolist()
    return total / count


def continuations(
    lm: nn.Module, rows: Tensor, first: int, tokenizer: Any, pad_id: int, args: Args
) -> list[dict[str, str]]:
    """What the model writes behind the prompts of rows [B, T], or behind the first quarter of packed blocks."""
    task, ids = args.task, utils.task_ids(args.task, tokenizer, pad_id)
    prompts = rows[:, :first] if task.response_column else rows[:, : args.block_size // 4]
    lm.eval()
    tokens = utils.sample_all(
        lm, prompts, task, pad_id, utils.generator(args.seed, 0, rows.device), args.micro_batch_size
    )
    if task.eos_task:
        tokens = utils.truncate(tokens, ids.truncate, task.truncate_after, pad_id)[0]
    texts = {"text": prompts, "continuation": tokens} | ({"reference": rows[:, first:]} if task.response_column else {})
    columns = (utils.decode(tokenizer, x, pad_id) for x in texts.values())
    return [dict(zip(texts, values, strict=True)) for values in zip(*columns, strict=True)]


def rouge_l(samples: list[dict[str, str]]) -> float:
    """Mean ROUGE-L (F1, 0 … 1) of the continuations against their references."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return sum(scorer.score(row["reference"], row["continuation"])["rougeL"].fmeasure for row in samples) / len(samples)


def check(args: Args, processes: int) -> None:
    """Errors: `InputError` for values that cannot work, before anything is loaded."""
    utils.check_task(args.task)
    utils.check_positive(
        args, ("num_epochs", "batch_size", "micro_batch_size", "block_size", "lr", "num_heldout", "eval_every")
    )
    utils.check_divides("batch_size", args.batch_size, processes, f"{processes} processes")
    if args.num_heldout < processes:
        raise InputError(f"num_heldout={args.num_heldout} is less than one block for each of {processes} processes")


PANELS = ["loss", "heldout/loss", "heldout/perplexity", "lr"]


def main(args: Args) -> None:
    """The run: pack → train → measure."""
    accelerator = utils.start_accelerator()
    check(args, accelerator.num_processes)
    rank, processes, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    behind = (
        args.task.response_length if args.task.response_column else max(0, args.block_size - args.task.query_length)
    )
    tokenizer, _, pad_id = utils.load_tokenizer(args.task, behind)
    rows, first = load_rows(args, tokenizer, pad_id)
    heldout, rows = rows[: args.num_heldout], rows[args.num_heldout :]

    torch.manual_seed(args.seed)
    lm = utils.load_lm(args.task.base_model)
    if args.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(
        lm.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    lm, optimizer = accelerator.prepare(lm, optimizer)
    plain = accelerator.unwrap_model(lm)

    steps_per_epoch = len(rows) // args.batch_size
    steps = args.num_epochs * steps_per_epoch
    run = utils.Run(args, "sft", steps, PANELS, accelerator)
    clock = utils.Clock(device)
    for step in range(steps):
        lm.train()
        epoch, at = divmod(step, steps_per_epoch)
        order = np.random.default_rng([args.seed, epoch]).permutation(len(rows))  # the same on every process
        mine = order[at * args.batch_size : (at + 1) * args.batch_size][rank::processes]
        with clock("optimise"):
            utils.set_lr(optimizer, lr := lr_at(step, steps, args))
            loss = train_step(lm, optimizer, rows[mine].to(device), first, pad_id, args, accelerator).item()
        metrics = {"loss": loss, "lr": lr, "epoch": step / steps_per_epoch} | clock.pop()
        if (step + 1) % args.eval_every == 0 or step + 1 == steps:
            metrics["heldout/loss"] = heldout_loss(lm, heldout, first, pad_id, args, accelerator)
            metrics["heldout/perplexity"] = math.exp(metrics["heldout/loss"])
        utils.check_finite(metrics, "loss", step)
        run.log(step, metrics, {"loss": "loss", "heldout/perplexity": "perplexity"})

    folder = args.output_dir or f"models/{args.task.task}/sft"
    utils.save_model(plain, tokenizer, folder, accelerator)
    done = [f"model: {folder}", f"held-out perplexity: {metrics['heldout/perplexity']:.3f}"]
    if accelerator.is_main_process:
        samples = continuations(plain, heldout[:64].to(device), first, tokenizer, pad_id, args)
        run.samples(steps, samples[:4], "samples behind held-out text")
        done += [f"held-out ROUGE-L: {rouge_l(samples):.3f}"] if args.task.response_column else []
    run.finish(*done)
    utils.stop_accelerator(accelerator)


if __name__ == "__main__":
    utils.cli(main, lambda: utils.parse_args(Args, PRESETS))
