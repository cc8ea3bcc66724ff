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
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

import packing
import records
import utils
from tasks import SYNTHETIC, Bounds, Count, NonNegative, Positive, Share, Shown, Task, Whole, cli, parse_args
from utils import InputError, TokenTable


@dataclass(frozen=True)
class Args:
    """Supervised fine-tuning."""

    task: Task
    seed: Whole = 1  # of the order of the blocks and of the weights, where they start from scratch
    num_epochs: Count = 1  # passes over the texts
    batch_size: Count = 32  # rows per optimizer step, over all processes
    micro_batch_tokens: Count = 4096  # per forward on one process: memory only
    block_size: Annotated[int, Bounds(4, 2**20)] = 128
    """tokens per row of packed texts; with reference responses it is query_length + response_length"""
    lr: Positive = 5e-5  # highest learning rate: warmed up linearly, then falling linearly to 0
    warmup: Share = 0.05  # share of the steps that warm up
    weight_decay: NonNegative = 0.01  # AdamW's
    max_grad_norm: Positive = 1.0  # gradients are scaled down to this norm
    num_heldout: Count = 256  # rows kept out of training, for perplexity and ROUGE-L
    gradient_checkpointing: bool = False  # less memory for activations, one more forward
    tf32: bool = False  # fp32 matrix products in TensorFloat-32 on NVIDIA GPUs: faster, 10 bits of mantissa
    output_dir: str | None = None
    """new folder for the trained model; None: the run's, and models/<task>/sft becomes a link to it"""
    run_name: str | None = None  # new folder in runs/; None: task, script, seed and time
    shown: Shown = Shown()
    save_every: Count | None = None  # steps between checkpoints that `--resume` goes on from; None: see save_minutes
    save_minutes: Positive | None = None
    """minutes between two checkpoints; with neither only SIGTERM, SIGUSR1 and SIGHUP make one, and stop the run"""
    resume: str | None = None
    """runs/<name> to go on with, by the same command; `latest`: the newest of this task and script with a checkpoint"""
    eval_every: Count = 200  # steps between two measurements on held-out text


PRESETS: dict[str, dict[str, Any]] = {  # what differs from the defaults above, by task
    "synthetic": dict(base_model=str(SYNTHETIC / "model"), num_epochs=3, batch_size=16, lr=3e-3, block_size=96),
    "cnndm": dict(block_size=512, batch_size=16),
    "tldr": dict(base_model="EleutherAI/pythia-1b-deduped", lr=3e-6, batch_size=128),
    "synthetic_eos": dict(base_model=str(SYNTHETIC / "model"), num_epochs=5, lr=3e-3),
    "tldr_2019": dict(block_size=512, batch_size=16),
}
SCRIPT = Path(__file__)  # run and weight folders are named after this file: a copy has its own


def pack(texts: list[list[int]], continued: list[list[int]], left: list[int], block_size: int) -> list[list[int]]:
    """Texts → blocks [N, T]: a block starts with `texts[i]` and goes on with `continued[i + 1]` … (the same behind
    a space) until it is full; the rest of its last text is dropped. `left`, a block that is not full yet, goes on from
    call to call."""
    blocks = []
    for text, behind in zip(texts, continued, strict=True):
        left += behind if left else text
        if len(left) >= block_size:
            blocks.append(left[:block_size])
            left.clear()
    return blocks


def load_blocks(args: Args, tokenizer: Any, pad_id: int) -> TokenTable:
    """Consecutive texts in blocks [N, T]."""
    task, left = args.task, []

    def blocks(batch: dict[str, list]) -> list[list[int]]:
        texts = utils.clean_texts(batch[task.query_column], task)
        texts = [text.strip() for text in texts if text.strip()]
        if not texts:
            return []
        starts = tokenizer(texts, add_special_tokens=False)["input_ids"]
        continued = tokenizer([" " + text for text in texts], add_special_tokens=False)["input_ids"]
        return pack(starts, continued, left, args.block_size)

    key = task.query_column, utils.cleaning(task)
    return utils.tokenise_rows(utils.load_texts(task), blocks, args.block_size, tokenizer, pad_id, *key)


def load_responses(args: Args, tokenizer: Any, pad_id: int) -> TokenTable:
    """Prompts, with the texts around them that a policy sees, padded on the left, and their reference responses, padded
    on the right: [N, C + R]."""
    task = args.task
    prefix, suffix = (tokenizer.encode(x, add_special_tokens=False) for x in (task.query_prefix, task.query_suffix))
    end = [utils.token_id(tokenizer, task.truncate_token, "--truncate_token")] if task.eos_task else []

    def pairs(batch: dict[str, list]) -> list[list[int]]:
        queries = utils.tokenise_queries(batch[task.query_column], task, tokenizer)
        texts = [text or "" for text in batch[task.response_column]]
        rows = []
        for query, response in zip(queries, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
            if query and response:
                ending = end if response[-1:] != end else []  # some data sets have it already
                learned = (response + ending)[: task.response_length]
                pads = [pad_id] * (task.response_length - len(learned))
                rows.append(prefix + query + suffix + learned + pads)
        return rows

    data, length = utils.load_texts(task), len(prefix) + task.query_length + len(suffix) + task.response_length
    columns = task.query_column, task.response_column, task.keep_last_line, task.start_text, task.end_text
    key = task.response_length, prefix, suffix, end, *columns, utils.cleaning(task)
    return utils.tokenise_rows(data, pairs, length, tokenizer, pad_id, *key)


def load_rows(args: Args, tokenizer: Any, pad_id: int) -> tuple[TokenTable, int]:
    """What to learn from: rows [N, T], and the first column that is learned. Errors: `InputError` where the rows do not
    fill one batch beside the held-out ones."""
    task = args.task
    rows = (load_responses if task.response_column else load_blocks)(args, tokenizer, pad_id)
    first = rows.length - task.response_length if task.response_column else 1
    if len(rows) < args.num_heldout + args.batch_size:
        raise InputError(
            f"--query_dataset={task.query_dataset} makes {len(rows)} rows of {rows.length} tokens; "
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
    logits = lm(**packing.model_inputs(rows, pad_id), use_cache=False, logits_to_keep=targets.shape[1] + 1).logits[
        :, :-1
    ]
    mask = targets != pad_id
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.masked_fill(~mask, 0).flatten(), reduction="none")
    return losses.view_as(targets).masked_fill(~mask, 0), mask


def micro_batches(rows: Tensor, first: int, pad_id: int, tokens: int) -> list[Tensor]:
    """[B, T] → rows of like length, trimmed on the left; at most `tokens` a forward, untrimmed."""
    lengths, size = packing.row_lengths(rows[:, :first], pad_id), tokens // rows.shape[1] or 1
    return [rows[part][:, first - width :] for part, width in packing.by_length(lengths, size)]


def train_step(
    lm: nn.Module, optimizer: Any, rows: Tensor, first: int, pad_id: int, args: Args, accelerator: Accelerator
) -> Tensor:
    """One optimizer step on this process's rows [B, T]; the mean loss per token over all processes' rows."""
    count = utils.all_sum((rows[:, first:] != pad_id).sum())  # tokens of all processes
    share, losses = count / accelerator.num_processes, []  # DDP averages the processes' gradients
    parts = micro_batches(rows, first, pad_id, args.micro_batch_tokens)
    for i, part in enumerate(parts):
        with accelerator.no_sync(lm) if i + 1 < len(parts) else nullcontext():
            loss = token_losses(lm, part, part.shape[1] - rows.shape[1] + first, pad_id)[0]
            accelerator.backward(loss.sum() / share)
        losses.append(loss.detach().sum(dim=1))
    norm = accelerator.clip_grad_norm_(lm.parameters(), args.max_grad_norm)
    utils.check_gradients(norm, args.task, [row for part in parts for row in part], loss=torch.cat(losses))
    optimizer.step()
    optimizer.zero_grad()
    return utils.all_sum(sum(x.sum() for x in losses)) / count


@torch.no_grad()
def heldout_loss(lm: nn.Module, rows: Tensor, first: int, pad_id: int, args: Args, accelerator: Accelerator) -> float:
    """Mean loss in nats per token over the held-out rows [N, T], shared out over the processes; as many on each, since
    under FSDP2 they forward in step, and nothing to learn in those that are there twice."""
    lm.eval()
    rank, processes = accelerator.process_index, accelerator.num_processes
    mine = torch.arange(rank, math.ceil(len(rows) / processes) * processes, processes)
    rows, twice = rows[mine % len(rows)], mine >= len(rows)
    rows[twice, first:] = pad_id
    sums = torch.zeros(2, device=rows.device)
    for part in micro_batches(rows, first, pad_id, args.micro_batch_tokens):
        losses, mask = token_losses(lm, part, part.shape[1] - rows.shape[1] + first, pad_id)
        sums += torch.stack([losses.sum(), mask.sum()])
    total, count = utils.all_sum(sums).tolist()
    return total / count


def draw(logits: Tensor, uniform: Tensor, top_p: float = 1.0) -> Tensor:
    """One token a row from softmax(logits) by inverting its CDF. logits [B, V], uniform [B, 1] in [0, 1) → [B, 1].
    In fp64, and below the CDF's very top: a token of probability 0 is never drawn, not even at u = 0 or by rounding."""
    probs = logits.to(uniform.device).double().softmax(dim=-1)
    if top_p < 1:  # X7: only the likeliest tokens, the fewest that together have this probability
        falling = probs.sort(dim=-1, descending=True).values
        least = falling.where(falling.cumsum(dim=-1) - falling < top_p, 1).amin(dim=-1, keepdim=True)
        probs = probs.masked_fill(probs < least, 0)
    cdf = probs.cumsum(dim=-1)
    total = cdf[:, -1:]
    point = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, point, right=True).to(logits.device)


@torch.no_grad()
def sample(lm: PreTrainedModel, contexts: Tensor, uniform: Tensor, task: Task, ids: utils.Ids) -> Tensor:
    """G4: exactly R tokens for each left-padded context [B, C], drawn with `uniform` [R, B, 1] → [B, R]: full
    vocabulary unless the task says otherwise (X7), no stop at EOS, no `generation_config` of the checkpoint. Prefill
    once, then a token a step over a static cache."""
    start, response_length = contexts.shape[1], len(uniform)
    inputs = packing.model_inputs(F.pad(contexts, (0, response_length), value=0), ids.pad)  # 0: a token to come
    mask, positions = inputs["attention_mask"], inputs["position_ids"]  # G3
    mask[:, start:] = 0  # filled in, never grown: static shapes, and alibi is built from it
    cache = packing.empty_cache(lm, len(contexts), start + response_length)
    responses = torch.empty(len(contexts), response_length, dtype=torch.long, device=contexts.device)
    tokens, begin = inputs["input_ids"][:, :start], 0
    every = dict(attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
    for t in range(response_length):
        end = start + t
        logits = lm(tokens, position_ids=positions[:, begin:end], **every).logits[:, -1]
        logits = logits.float() / task.temperature  # P1
        if t + 1 < task.min_response_length:
            logits[:, ids.truncate] = -math.inf  # X7: no end yet
        tokens, begin = draw(logits, uniform[t], task.top_p), end
        responses[:, t], mask[:, end] = tokens[:, 0], 1
    return responses


def sample_all(lm: nn.Module, contexts: Tensor, task: Task, ids: utils.Ids, gen: torch.Generator, size: int) -> Tensor:
    """`sample` for any number of rows: `size` at a time, by length, trimmed; each with its own random numbers (X10).
    [B, C] → [B, R]"""
    shape = task.response_length, len(contexts), 1
    uniform = torch.rand(shape, generator=gen, device=gen.device, dtype=torch.float64)
    responses = torch.empty(shape[1], shape[0], dtype=torch.long, device=contexts.device)
    for rows, width in packing.by_length(packing.row_lengths(contexts, ids.pad), size):
        responses[rows] = sample(lm, contexts[rows, -width:], uniform[:, rows], task, ids)
    return responses


def truncate(responses: Tensor, token: int | None, after: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """P5: cut each response behind its first `token` at or after position `after`, pads behind it.
    [B, R] → the cut responses [B, R], and whether the token was there [B]; always True if `token` is None."""
    if token is None:
        return responses, torch.ones_like(responses[:, 0]).bool()
    positions = torch.arange(responses.shape[1], device=responses.device)
    hits = (responses == token) & (positions >= after)
    ended = hits.any(dim=1)
    last = torch.where(ended, hits.byte().argmax(dim=1), responses.shape[1] - 1)
    return responses.masked_fill(positions > last[:, None], pad_id), ended


def continuations(
    lm: nn.Module, rows: Tensor, first: int, tokenizer: Any, pad_id: int, args: Args
) -> list[dict[str, str]]:
    """What the model writes behind the prompts of rows [B, T], or behind the first quarter of packed blocks."""
    task, ids = args.task, utils.task_ids(args.task, tokenizer, pad_id)
    prompts = rows[:, :first] if task.response_column else rows[:, : args.block_size // 4]
    size, gen = args.micro_batch_tokens // rows.shape[1] or 1, utils.generator(args.seed, 0, rows.device)
    lm.eval()
    tokens = sample_all(lm, prompts, task, ids, gen, size)
    if task.eos_task:
        tokens = truncate(tokens, ids.truncate, task.truncate_after, pad_id)[0]
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
    records.check_args(args, SCRIPT, processes)
    records.check_divides("batch_size", args.batch_size, processes, f"{processes} processes")
    if args.num_heldout < processes:
        raise InputError(f"num_heldout={args.num_heldout} is less than one block for each of {processes} processes")


PANELS = ["loss", "heldout/loss", "heldout/perplexity", "lr"]


def main(args: Args) -> None:
    """The run: pack → train → measure."""
    accelerator = utils.start_accelerator(args)
    check(args, accelerator.num_processes)
    rank, processes, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    behind = (
        args.task.response_length if args.task.response_column else max(0, args.block_size - args.task.query_length)
    )
    make = f"python sft.py --task {args.task.task} --base_model gpt2"
    tokenizer, config, pad_id = utils.load_tokenizer(args.task, behind, make)
    if not args.task.response_column:
        longest = args.block_size // 4 + args.task.response_length
        utils.check_length(config, longest, "a quarter of block_size and response_length")
    utils.check_memory(config, 16, "weights, gradients and AdamW's two moments", device)
    rows, first = load_rows(args, tokenizer, pad_id)  # [N, T]
    heldout, rows = rows.hold_out(args.num_heldout, "num_heldout")
    heldout = heldout.to(device)

    torch.manual_seed(args.seed)
    lm = utils.load_lm(args.task.base_model)
    if args.gradient_checkpointing:
        utils.checkpoint_activations(lm)
    optimizer = torch.optim.AdamW(
        lm.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    lm, optimizer = utils.prepare(accelerator, lm, optimizer)
    plain = accelerator.unwrap_model(lm)

    steps_per_epoch = len(rows) // args.batch_size
    steps = args.num_epochs * steps_per_epoch
    run = records.Run(args, SCRIPT, steps, PANELS, accelerator, heldout, rows)
    start, _ = run.restore(lm, optimizer)
    clock = utils.Clock(device)
    for step in range(start, steps):
        lm.train()
        epoch, at = divmod(step, steps_per_epoch)
        order = np.random.default_rng([args.seed, epoch]).permutation(len(rows))  # the same on every process
        mine = order[at * args.batch_size : (at + 1) * args.batch_size][rank::processes]
        with clock("optimise"):
            lr = lr_at(step, steps, args)
            for group in optimizer.param_groups:  # no prepared scheduler, which would step once a process
                group["lr"] = lr
            loss = train_step(lm, optimizer, rows[mine].to(device), first, pad_id, args, accelerator).item()
        metrics = {"loss": loss, "lr": lr, "epoch": step / steps_per_epoch} | clock.pop()
        if (step + 1) % args.eval_every == 0 or step + 1 == steps:
            metrics["heldout/loss"] = heldout_loss(lm, heldout, first, pad_id, args, accelerator)
            metrics["heldout/perplexity"] = math.exp(metrics["heldout/loss"])
        run.log(step, metrics, {"loss": "loss", "heldout/perplexity": "perplexity"})
        run.checkpoint(step + 1, lm, optimizer)

    run.save(plain, tokenizer)
    done = [f"held-out perplexity: {metrics['heldout/perplexity']:.3f}"]
    with utils.inference(accelerator, lm):
        samples = continuations(plain, heldout[:64], first, tokenizer, pad_id, args)
    if accelerator.is_main_process:
        run.samples(steps, samples[:4])
        done += [f"held-out ROUGE-L: {rouge_l(samples):.3f}"] if args.task.response_column else []
    run.finish(*done)
    utils.stop_accelerator(accelerator)


if __name__ == "__main__":
    cli(main, lambda: parse_args(Args, PRESETS))
