"""Supervised fine-tuning in one file: the policy that PPO and RLOO start from.

    python sft.py --task synthetic                    # from scratch: there is no pretrained model
    accelerate launch sft.py --task sentiment --num_epochs 1

If the task has reference responses (`response_column`), the loss covers only them. Otherwise texts
are joined into blocks of equal length. Each block begins with the start of a text, as ppo.py's
queries do, and the rest of its last text is dropped.

Shapes: B sequences per step, T tokens per sequence, N target tokens, V vocabulary size, D hidden
size. The loss covers columns `first` ... T - 1: all but the first of a block, or the response after
a prompt. Masks are True at real tokens. Tags such as (G3) are explained in docs/details.md.
"""

import math
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import transformers
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from data.tasks import ARITHMETIC, SYNTHETIC, Task
from machinery import cli, distributed
from machinery.cli import RunArgs, UnitFloat
from machinery.decoding import Decoder, generate
from machinery.models import compute_logits, load_lm
from machinery.queries import load_blocks, load_responses
from machinery.runs import Run, check_run
from machinery.tokens import check_length, load_config, load_tokenizer
from machinery.unpadding import Unpadded
from utils import Timer, TokenIds, all_sum, average_gradients, decode, micro_batches, permutation
from utils import truncate


@dataclass(frozen=True, kw_only=True)
class Args(RunArgs):
    """Supervised fine-tuning."""

    task: Task

    # Run
    seed: cli.Seed = 1
    """random seed of the data order, new weights and samples"""
    num_epochs: PositiveInt = 1
    """passes over the data"""
    eval_every: PositiveInt = 200
    """steps between evaluations on held-out sequences"""
    num_heldout: PositiveInt | None = None
    """sequences held out for perplexity (256, or a tenth if that is less)"""

    # Optimization
    batch_size: PositiveInt = 32
    """sequences per optimizer step, over all processes"""
    block_size: Annotated[int, Field(ge=4)] = 128
    """tokens per block, if the task has no reference responses"""
    lr: PositiveFloat = 5e-5
    """peak learning rate; linear warm-up, then linear decay to 0"""
    warmup: UnitFloat = 0.05
    """fraction of the steps used for warm-up"""
    weight_decay: NonNegativeFloat = 0.01
    """weight decay of AdamW"""
    max_grad_norm: PositiveFloat = 1.0
    """clip the norm of the gradient to this value"""


# ----------------------------------------------------- loss


class LanguageModel(nn.Module):
    """A language model whose forward pass returns the loss of each token."""

    def __init__(self, lm: "transformers.PreTrainedModel", pad_id: int):
        super().__init__()
        self.lm = lm
        self.backbone = Unpadded(lm.base_model)  # lm's transformer, without padding; no new weights
        self.pad_id = pad_id

    def forward(self, tokens: Tensor, first: int) -> Tensor:
        """Cross-entropy in nats from column `first` on: [B, T] → [B, T - first], 0 at padding."""
        mask = tokens != self.pad_id
        position_ids = mask.cumsum(dim=1) - mask.long()  # real tokens before each position (G3)
        hidden = self.backbone(tokens.masked_fill(~mask, 0), mask, position_ids)  # [B, T, D]
        where = mask[:, first:].nonzero(as_tuple=True)  # the N real tokens of these columns
        logits = compute_logits(self.lm, hidden[:, first - 1 : -1][where])  # [N, V]
        losses = F.cross_entropy(logits, tokens[:, first:][where], reduction="none")  # [N]
        return losses.new_zeros(mask[:, first:].shape).index_put(where, losses)


@torch.no_grad()
def heldout_loss(
    model: LanguageModel, tokens: Tensor, first: int, args: Args, accelerator: Any
) -> float:
    """Mean loss per token of held-out sequences [num, T], sharded across processes."""
    model.eval()
    rank, processes = accelerator.process_index, accelerator.num_processes
    mine = torch.arange(rank, math.ceil(len(tokens) / processes) * processes, processes)
    duplicate = mine >= len(tokens)  # FSDP2 needs equally many sequences on each process
    tokens = tokens[mine % len(tokens)]
    tokens[duplicate, first:] = model.pad_id  # not counted
    lengths = (tokens != model.pad_id).sum(dim=1)
    parts = [tokens[part] for part in micro_batches(lengths, args.micro_batch_tokens)]
    total = all_sum(sum(model(part, first).sum() for part in parts))
    count = all_sum((tokens[:, first:] != model.pad_id).sum())
    model.train()
    return (total / count).item()


def learning_rate(step: int, num_steps: int, args: Args) -> float:
    """Linear warm-up, then linear decay to 0."""
    warmup = max(1, round(args.warmup * num_steps))
    decay = (num_steps - step) / max(num_steps - warmup, 1)
    return args.lr * min((step + 1) / warmup, decay)


# -------------------------------------------------- samples


def sample_continuations(
    lm: Any, tokens: Tensor, first: int, tokenizer: Any, ids: TokenIds, args: Args
) -> list[dict[str, str]]:
    """Continue the prompts of sequences [B, T]; without responses, the first quarter of blocks."""
    task = args.task
    n = first if task.response_column else args.block_size // 4
    contexts, references = tokens[:, :n], tokens[:, n : n + task.response_length]
    torch.manual_seed(args.seed)
    decoder = Decoder(lm, task.response_length)
    responses = generate(decoder, contexts, ids.pad, task.temperature)
    if task.eos_task:
        responses, _ = truncate(responses, ids.ends, task.truncate_after, ids.pad)
    columns = {"text": contexts, "continuation": responses, "reference": references}
    texts = [decode(tokenizer, x, ids.pad) for x in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*texts, strict=True)]


# ------------------------------------------------------ run

SHOWN = ["loss", "heldout/loss", "heldout/perplexity", "lr"]  # in the progress line and curves.png


def check(args: Args, processes: int) -> None:
    """Raise `InputError` for invalid flags, before anything is loaded."""
    check_run(args, processes)
    cli.check_divisible("batch_size", args.batch_size, processes, "processes")


def main(args: Args) -> None:
    """Load the data, train, print continuations."""
    accelerator = distributed.start(args)
    check(args, accelerator.num_processes)
    task, device, processes = args.task, accelerator.device, accelerator.num_processes
    tokenizer, ids = load_tokenizer(task, task.response_length)
    if task.response_column:
        table = load_responses(task, tokenizer, ids)  # [num_sequences, T]
        first = table.length - task.response_length
    else:
        config = load_config(task.base_model)
        longest = max(args.block_size, args.block_size // 4 + task.response_length)
        check_length(config, longest, f"block_size={args.block_size}")
        table = load_blocks(task, args.block_size, tokenizer, ids)
        first = 1
    num_heldout = args.num_heldout or min(256, math.ceil(len(table) / 10))
    heldout_table, table = table.hold_out(num_heldout, needed=args.batch_size)
    heldout = heldout_table[:].to(device)

    torch.manual_seed(args.seed)
    lm = load_lm(task.base_model, allow_random=True, length=max(ids.length, table.length))
    model = LanguageModel(lm, ids.pad)
    settings: Any = dict(betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, **settings)
    model, optimizer = distributed.prepare(accelerator, model, optimizer, args)

    steps_per_epoch = len(table) // args.batch_size
    num_steps = args.num_epochs * steps_per_epoch
    unused = len(table) % args.batch_size
    sizes = f"{len(table)} sequences to learn, {num_heldout} held out, {num_steps} steps"
    cli.say(f"{sizes}; each epoch leaves out {unused}")
    timer = Timer(device)
    run = Run(args, num_steps, SHOWN, accelerator)
    start, _ = run.restore(model, optimizer)
    for step in range(start, num_steps):
        timer.start("optimize")
        for group in optimizer.param_groups:
            group["lr"] = lr = learning_rate(step, num_steps, args)
        epoch, i = divmod(step, steps_per_epoch)
        rows = permutation(len(table), args.seed, epoch)[i * args.batch_size :][: args.batch_size]
        tokens = table[rows[accelerator.process_index :: processes]].to(device)  # [B, T]
        mask = tokens != ids.pad
        num_tokens = all_sum(mask[:, first:].sum()) / processes  # tokens per process
        total = torch.zeros((), device=device)
        for part in micro_batches(mask.sum(dim=1), args.micro_batch_tokens):
            loss = model(tokens[part], first).sum() / num_tokens
            loss.backward()
            total += loss.detach()
        average_gradients(model)  # over processes
        nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

        metrics = {"loss": (all_sum(total) / processes).item(), "lr": lr}
        metrics |= {"epoch": step / steps_per_epoch} | timer.stop()
        if (step + 1) % args.eval_every == 0 or step + 1 == num_steps:
            metrics["heldout/loss"] = heldout_loss(model, heldout, first, args, accelerator)
            metrics["heldout/perplexity"] = math.exp(metrics["heldout/loss"])
        run.log(step, metrics)
        run.checkpoint(step + 1, model, optimizer)

    run.save(lm, tokenizer)
    with distributed.inference(accelerator, model):
        samples = sample_continuations(lm, heldout[:4], first, tokenizer, ids, args)
    run.log_table(num_steps, samples)
    perplexity = math.exp(heldout_loss(model, heldout, first, args, accelerator))
    then = "train_reward" if task.label_dataset else "ppo"
    run.finish(f"held-out perplexity: {perplexity:.3f}", then=then, flag="base_model")


# The defaults above are for sentiment, descriptiveness and gsm8k. Overrides for the other tasks:
FROM_SCRATCH: dict[str, Any] = dict(base_model=str(SYNTHETIC / "model"), lr=3e-3)
SOLUTIONS = dict(query_dataset=str(ARITHMETIC / "solutions.jsonl"), response_column="completion")
PRESETS: dict[str, dict[str, Any]] = {
    "synthetic": FROM_SCRATCH | dict(num_epochs=3, batch_size=16, block_size=96),
    "synthetic_eos": FROM_SCRATCH | dict(num_epochs=5),
    "arithmetic": FROM_SCRATCH | dict(num_epochs=5) | SOLUTIONS,
    "cnndm": dict(batch_size=16, block_size=512),
    "tldr_2019": dict(batch_size=16, block_size=512),
    "tldr": dict(base_model="EleutherAI/pythia-1b-deduped", batch_size=128, lr=3e-6),
}


if __name__ == "__main__":
    cli.run(main, Args, PRESETS)
