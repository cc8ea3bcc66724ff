"""Supervised fine-tuning in one file: the policy that PPO and RLOO start from.

    python sft.py --task synthetic            # from random weights; other tasks fine-tune a model
    accelerate launch sft.py --task sentiment

If the task has reference responses (`response_column`), the loss covers only them. In EOS tasks
(`eos_task`) this includes the end token, which is appended to each. Otherwise texts are joined by
spaces into blocks of equal length. Each block begins with the start of a text, as ppo.py's queries
do; the end of its last text is dropped if it does not fit.

Shapes: B sequences, T tokens per sequence, N target tokens, V vocabulary size, D hidden size. The
loss covers columns `first` to T - 1: all but the first of a block, or those of the responses.
Prompts are padded on the left, responses on the right. Masks are True at real tokens. Tags such as
(P4) are rows of docs/details.md.
"""

import machinery  # noqa: F401  # before torch: sets how torch's idle CPU threads wait

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
from machinery.decoding import generate
from machinery.models import compute_logits, load_lm
from machinery.queries import load_blocks, load_responses
from machinery.runs import Run, check_run
from machinery.tokens import check_length, load_config, load_tokenizer
from machinery.unpadding import compute_hidden
from utils import Timer, TokenIds, all_sum, average_gradients, count_micro_batches, micro_batches
from utils import permutation, truncate


@dataclass(frozen=True, kw_only=True)
class Args(cli.RunArgs):
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
    """sequences held out for perplexity (default: 256, or a tenth of them if that is less)"""

    # Optimization
    batch_size: PositiveInt = 32
    """sequences per optimizer step, over all processes"""
    block_size: Annotated[int, Field(ge=4)] = 128
    """tokens per block, if the task has no reference responses"""
    lr: PositiveFloat = 5e-5
    """peak learning rate; linear warm-up, then linear decay to 0"""
    warmup: cli.UnitFloat = 0.05
    """fraction of the steps used for warm-up"""
    weight_decay: NonNegativeFloat = 0.01
    """weight decay of AdamW"""
    max_grad_norm: PositiveFloat = 1.0
    """clip the norm of the gradient to this value"""


# ----------------------------------------------------- loss


class LanguageModel(nn.Module):
    """A language model whose forward pass returns the loss of each token.

    Weights are fp32. Under --mixed_precision bf16 the transformer computes in bf16 by autocast
    (`distributed.prepare`); its head and the loss remain in fp32.
    """

    def __init__(self, lm: "transformers.PreTrainedModel", pad_id: int):
        super().__init__()
        self.lm = lm
        self.pad_id = pad_id  # outside the vocabulary

    def forward(self, tokens: Tensor, first: int) -> Tensor:
        """Cross-entropy in nats from column `first` on: [B, T] → [B, T - first], 0 at padding."""
        mask = tokens != self.pad_id
        position_ids = mask.cumsum(dim=1) - mask.long()  # number of real tokens before each
        # At real tokens, equals lm.base_model(input_ids, mask, position_ids).last_hidden_state:
        input_ids = tokens.masked_fill(~mask, 0)  # the pad id has no embedding
        hidden = compute_hidden(self.lm.base_model, input_ids, mask, position_ids)  # [B, T, D]
        hidden = hidden[:, first - 1 : -1]  # [B, T - first, D]: position t predicts token t + 1

        # The rest is computed at the N real tokens only.
        targets = tokens[:, first:]  # [B, T - first]
        real = (targets != self.pad_id).nonzero(as_tuple=True)
        logits = compute_logits(self.lm, hidden[real])  # [N, V]
        losses = F.cross_entropy(logits, targets[real], reduction="none")  # [N]
        return torch.zeros(targets.shape, device=tokens.device).index_put(real, losses)


@torch.no_grad()
def heldout_loss(
    model: LanguageModel, tokens: Tensor, first: int, args: Args, accelerator: Any
) -> float:
    """Mean loss per token of held-out sequences [num, T], sharded across processes."""
    model.eval()
    # This process's rows. Rows past the end wrap around to the first ones, so that all processes
    # have the same number of rows, as `count_micro_batches` needs.
    rank, processes = accelerator.process_index, accelerator.num_processes
    rows = torch.arange(rank, math.ceil(len(tokens) / processes) * processes, processes)
    is_duplicate = rows >= len(tokens)
    tokens = tokens[rows % len(tokens)]
    tokens[is_duplicate, first:] = model.pad_id  # not counted
    lengths = (tokens != model.pad_id).sum(dim=1)
    total = torch.zeros((), device=tokens.device)
    for part in micro_batches(lengths, count_micro_batches(lengths, args.micro_batch_tokens)):
        total += model(tokens[part], first).sum()
    num_tokens = (tokens[:, first:] != model.pad_id).sum()
    model.train()
    return (all_sum(total) / all_sum(num_tokens)).item()


def learning_rate(step: int, num_steps: int, args: Args) -> float:
    """Linear warm-up, then linear decay to 0."""
    warmup = max(1, round(args.warmup * num_steps))
    decay = (num_steps - step) / max(num_steps - warmup, 1)
    return args.lr * min((step + 1) / warmup, decay)


# -------------------------------------------------- samples


def sample_continuations(
    lm: Any, tokens: Tensor, first: int, ids: TokenIds, args: Args
) -> dict[str, Tensor]:
    """Sample a continuation of each prompt, or of the first quarter of each block.

    `tokens` [B, T] → texts, continuations and references of B rows each, as token ids.
    """
    task = args.task
    n = first if task.response_column else args.block_size // 4
    contexts = tokens[:, :n]
    torch.manual_seed(args.seed)
    responses = generate(lm, contexts, ids.pad, task.response_length, task.temperature)
    if task.eos_task:  # elsewhere, texts continue after a truncate token
        responses, _ = truncate(responses, ids)
    return {
        "text": contexts,
        "continuation": responses,
        "reference": tokens[:, n : n + task.response_length],
    }


# ----------------------------------------------------- main


def check(args: Args, processes: int) -> None:
    """Raise `InputError` for invalid flags, before anything is loaded."""
    check_run(args, processes)
    cli.check_divisible("batch_size", args.batch_size, processes, "processes")


def load_table(args: Args, tokenizer: Any, ids: TokenIds) -> tuple[Any, int]:
    """All sequences [num, T], and the first column that the loss covers."""
    task = args.task
    if task.response_column:  # prefix, query, suffix, response, its end; cut if it is too long
        table = load_responses(task, tokenizer, ids)
        return table, table.length - task.response_length
    # `load_tokenizer` has only checked that the model can read query and response.
    longest = max(args.block_size, args.block_size // 4 + task.response_length)
    check_length(load_config(task.base_model), longest, f"block_size={args.block_size}")
    return load_blocks(task, args.block_size, tokenizer, ids), 1


def main(args: Args) -> None:
    """Load the data, train, save the model, log sample continuations."""
    accelerator = distributed.start(args)
    device, processes = accelerator.device, accelerator.num_processes
    check(args, processes)
    # Task fields used in this file (see data/tasks.py): base_model, query_dataset, response_length,
    # temperature, eos_task, response_column and label_dataset.
    task = args.task
    tokenizer, ids = load_tokenizer(task, task.response_length)
    table, first = load_table(args, tokenizer, ids)
    num_heldout = args.num_heldout or min(256, math.ceil(len(table) / 10))
    # The table is shuffled, in the same order for each seed. Its first rows are held out, and their
    # duplicates left out. `needed`: rows to train on.
    heldout_table, table = table.hold_out(num_heldout, needed=args.batch_size)
    heldout = heldout_table[:].to(device)

    torch.manual_seed(args.seed)
    longest = max(ids.total_length, table.length)  # tokens that ppo.py and this script read
    # Without dropout (P4). A folder without weights gets random ones.
    lm = load_lm(task.base_model, allow_random=True, length=longest)
    model = LanguageModel(lm, ids.pad)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=args.lr,
        betas=(0.9, 0.95),
        weight_decay=args.weight_decay,
        fused=True,
    )
    # Not wrapped in DDP: `lm` is still the module that is trained.
    model, optimizer = distributed.prepare(accelerator, model, optimizer, args)

    steps_per_epoch = len(table) // args.batch_size
    num_steps = args.num_epochs * steps_per_epoch
    unused = len(table) % args.batch_size
    sizes = f"{len(table)} training sequences, {num_heldout} held out, {num_steps} steps"
    cli.say(f"{sizes}; {unused} are skipped per epoch")
    timer = Timer(device)
    shown = ["loss", "heldout/loss", "heldout/perplexity", "lr"]
    run = Run(args, num_steps, shown, accelerator)  # `shown` in the terminal and in curves.png
    start, _ = run.restore(model, optimizer)  # start = 0 if not resumed
    for step in range(start, num_steps):
        timer.start("optimize")
        lr = learning_rate(step, num_steps, args)
        for group in optimizer.param_groups:
            group["lr"] = lr
        epoch, batch = divmod(step, steps_per_epoch)
        order = permutation(len(table), args.seed, epoch)
        rows = order[batch * args.batch_size : (batch + 1) * args.batch_size]
        tokens = table[rows[accelerator.process_index :: processes]].to(device)  # [B, T]
        mask = tokens != ids.pad
        # Averaged over processes, since `average_gradients` averages, too:
        num_tokens = all_sum(mask[:, first:].sum()) / processes
        total = torch.zeros((), device=device)
        lengths = mask.sum(dim=1)
        for part in micro_batches(lengths, count_micro_batches(lengths, args.micro_batch_tokens)):
            loss = model(tokens[part], first).sum() / num_tokens
            loss.backward()
            total += loss.detach()
        average_gradients(model)  # over processes; nothing to do under FSDP2
        nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

        metrics = {
            "loss": (all_sum(total) / processes).item(),
            "lr": lr,
            "epoch": step / steps_per_epoch,
            **timer.stop(),
        }
        if (step + 1) % args.eval_every == 0 or step + 1 == num_steps:
            metrics["heldout/loss"] = heldout_loss(model, heldout, first, args, accelerator)
            metrics["heldout/perplexity"] = math.exp(metrics["heldout/loss"])
        run.log(step, metrics)
        run.checkpoint(step + 1, model, optimizer)  # not after the last step

    run.save(lm, tokenizer)
    with distributed.inference(accelerator, model):  # autocast; FSDP2 gathers weights
        samples = sample_continuations(lm, heldout[:4], first, ids, args)
    run.log_samples(num_steps, samples, tokenizer, ids)
    # Prints the next command: `then`.py with this --base_model.
    then = "train_reward" if task.label_dataset else "ppo"
    run.finish(
        f"held-out perplexity: {metrics['heldout/perplexity']:.3f}", then=then, flag="base_model"
    )


# The defaults above are for sentiment, descriptiveness and gsm8k. Overrides for the other tasks,
# also of fields of `task`: where its base_model is what this script writes, the one to start from.
BLOCKS = dict(batch_size=16, block_size=512)
PRESETS: dict[str, dict[str, Any]] = {
    "synthetic": dict(
        base_model=str(SYNTHETIC / "model"), lr=3e-3, num_epochs=3, batch_size=16, block_size=96
    ),
    "synthetic_eos": dict(base_model=str(SYNTHETIC / "model"), lr=3e-3, num_epochs=5),
    "arithmetic": dict(
        base_model=str(SYNTHETIC / "model"),
        query_dataset=str(ARITHMETIC / "solutions.jsonl"),
        response_column="completion",
        lr=3e-3,
        num_epochs=5,
    ),
    "cnndm": BLOCKS,
    "tldr_2019": BLOCKS,
    "tldr": dict(base_model="EleutherAI/pythia-1b-deduped", batch_size=128, lr=3e-6),
}


if __name__ == "__main__":
    cli.run(main, Args, PRESETS)
