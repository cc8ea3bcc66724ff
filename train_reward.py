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
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

import utils
from utils import Count, InputError, NonNegative, Positive, RewardModel, Seed, Task


@dataclass(frozen=True)
class Args:
    """Reward model from preference labels."""

    task: Task
    seed: Seed = 1
    """of head, order of the labels and samples; process r samples with seed + 100003 r (G6)"""
    num_labels: Count = 4992
    """labels to train on, the file's first; the rest measures accuracy"""
    batch_size: Count = 32
    """labels per optimizer step, over all processes"""
    micro_batch_size: Count = 128
    """sequences per forward on one process (K for each label): memory only"""
    lr: NonNegative = 5e-5
    """learning rate of the first step; falls linearly to 0 (G5)"""
    adam_eps: Positive = 1e-5
    """TensorFlow's ε̂ (A1)"""
    normalize_samples: Count = 256
    """the policy's samples that gain and bias are set from, at least (R3)"""
    rollout_batch_size: Count = 512
    """samples come in batches of this many, over all processes (R3)"""
    gradient_checkpointing: bool = False
    """less memory for activations, one more forward"""
    tf32: bool = False
    """fp32 matrix products in TensorFloat-32 on NVIDIA GPUs: faster, 10 bits of mantissa"""
    output_dir: str | None = None
    """new folder for the reward model; None: the run's, and models/<task>/train_reward becomes a link to it"""
    run_name: str | None = None
    """new folder in runs/; None: task, script, seed and time"""
    track: bool = False
    """log to Weights & Biases too"""


PRESETS: dict[str, dict[str, Any]] = {  # what differs from the defaults above, by task
    "synthetic": dict(lr=1e-3, batch_size=8),
    "cnndm": dict(num_labels=46_000, batch_size=16, lr=2.5e-5, rollout_batch_size=128, micro_batch_size=16),
    "tldr": dict(num_labels=92_832, batch_size=64, lr=3e-6, rollout_batch_size=256, micro_batch_size=16),
    "synthetic_eos": dict(num_labels=9984, batch_size=16, lr=1e-3),
    "tldr_2019": dict(num_labels=46_000, batch_size=16, lr=2.5e-5, rollout_batch_size=128, micro_batch_size=16),
}
SCRIPT = Path(__file__)  # runs and weights are called after the file: a copy has its own


# ------------------------------------------------------------------------------------------------------------- labels


LABEL_PAD = 50259  # OpenAI's files are padded with this id, two past GPT-2's vocabulary


@dataclass(frozen=True)
class Labels:
    """Comparisons: K candidate responses to a query and which one a human liked best."""

    query: Tensor  # [N, Q] left-padded
    responses: Tensor  # [N, K, R] right-padded
    best: Tensor  # [N] index of the preferred candidate

    def rows(self, rows: np.ndarray) -> "Labels":
        """A selection."""
        return Labels(self.query[rows], self.responses[rows], self.best[rows])

    def to(self, device: torch.device) -> "Labels":
        """A copy on `device`."""
        return Labels(self.query.to(device), self.responses.to(device), self.best.to(device))


def load_pairs(rows: datasets.Dataset, task: Task, tokenizer: Any, pad_id: int) -> Labels:
    """R4: pairs of texts (`prompt`, `chosen`, `rejected`), the chosen one first; each ends with the truncate token."""
    end = utils.token_id(tokenizer, task.truncate_token, "--truncate_token")
    queries = utils.tokenise_queries(rows["prompt"], task, tokenizer)
    sides = [
        tokenizer([text or "" for text in rows[name]], add_special_tokens=False)["input_ids"]
        for name in ("chosen", "rejected")
    ]
    for i, row in enumerate(zip(queries, *sides, strict=True)):
        if not all(row):
            raise InputError(f"--label_dataset={task.label_dataset} row {i}: prompt, chosen or rejected is blank")
    sides = [[ids + [end] * (end is not None) for ids in side] for side in sides]
    length = max(len(ids) for side in sides for ids in side)
    right = [torch.tensor([ids + [pad_id] * (length - len(ids)) for ids in side]) for side in sides]
    return Labels(
        utils.pad_rows(queries, task.query_length, pad_id), torch.stack(right, dim=1), torch.zeros(len(queries)).long()
    )


def id_column(rows: datasets.Dataset, name: str, length: int, pad_id: int, where: str) -> Tensor:
    """A column of token ids [N, length], the file's pad made ours, read through Arrow. Errors: `InputError` with the row
    for what is no list of ids, has another length, or is beyond the vocabulary."""
    column = rows.with_format("arrow")[:][name].combine_chunks()
    if not pa.types.is_list(column.type) and not pa.types.is_large_list(column.type):
        raise InputError(f"{where} row 0: {name}={str(column[0])[:60]} is not a list of token ids")
    sizes, values = pc.fill_null(pc.list_value_length(column), -1).to_numpy(), column.flatten()
    numbers = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
    ids = values.to_numpy(zero_copy_only=False) if numbers and len(values) else np.full(len(values), np.nan)
    starts = np.concatenate([[0], np.cumsum(np.maximum(sizes, 0))])
    broken = np.flatnonzero(ids != np.floor(ids))  # NaN, a null or a fraction
    if len(broken) or (sizes < 0).any():
        first = [int(np.searchsorted(starts, broken[0], side="right")) - 1] if len(broken) else []
        i = min([*first, *np.flatnonzero(sizes < 0)[:1]])
        raise InputError(f"{where} row {i}: {name}={str(rows[int(i)][name])[:60]} is not a list of token ids")
    for i in np.flatnonzero(sizes != length)[:1]:
        raise InputError(f"{where} row {i}: {name} has {sizes[i]} ids, not {length}")
    ids = ids.astype(np.int64).reshape(len(rows), length)
    ids = np.where(ids == LABEL_PAD, pad_id, ids) if LABEL_PAD > pad_id else ids
    for i, j in np.argwhere((ids < 0) | (ids > pad_id))[:1]:
        raise InputError(
            f"{where} row {i}: {name} holds id {ids[i, j]}; ids are 0 … {pad_id - 1}, padding is {LABEL_PAD}"
        )
    return torch.from_numpy(ids)


def load_labels(task: Task, tokenizer: Any, pad_id: int) -> Labels:
    """R4: best-of-K labels in OpenAI's format (`query`, `sample0` …, `best`; token ids), or pairs of texts. Errors:
    `InputError` with row and value for missing keys, wrong lengths, `best` out of range, ids beyond the vocabulary."""
    rows, where = utils.load_rows(task.label_dataset, "--label_dataset"), f"--label_dataset={task.label_dataset}"
    if {"prompt", "chosen", "rejected"} <= set(rows.column_names) and len(rows):
        return load_pairs(rows, task, tokenizer, pad_id)
    samples = sorted(name for name in rows.column_names if name.startswith("sample") and name[6:].isdigit())
    missing = [name for name in ("query", "best") if name not in rows.column_names]
    missing += ["sample0, sample1"] * (len(samples) < 2)
    if missing or len(rows) == 0:
        raise InputError(
            f"{where} has no {', '.join(missing) or 'rows'}; needed are query, sample0 … sampleK, best, "
            "or prompt, chosen, rejected"
        )
    query = id_column(rows, "query", task.query_length, pad_id, where)
    responses = torch.stack([id_column(rows, name, task.response_length, pad_id, where) for name in samples], dim=1)
    for i, best in enumerate(rows["best"]):
        if not isinstance(best, int | float) or best not in range(len(samples)):
            raise InputError(f"{where} row {i}: best={best!r} is not in 0 … {len(samples) - 1}")
    return Labels(utils.left_align(query, pad_id), responses, torch.tensor(rows["best"][:]).long())


# ---------------------------------------------------------------------------------------------- samples to normalise on


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """One token a row from softmax(logits) by inverting its CDF. logits [B, V], uniform [B, 1] in [0, 1) → [B, 1].

    In fp64, and below the CDF's very top: a token of probability 0 is never drawn, not even at u = 0 or by rounding."""
    cdf = logits.to(uniform.device).double().softmax(dim=-1).cumsum(dim=-1)
    total = cdf[:, -1:]
    point = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, point, right=True).to(logits.device)


@torch.no_grad()
def sample(
    lm: PreTrainedModel, contexts: Tensor, response_length: int, temperature: float, pad_id: int, gen: torch.Generator
) -> Tensor:
    """G4: exactly `response_length` tokens for each left-padded context [B, C] → [B, R]: the full vocabulary, no stop
    at EOS, nothing of the checkpoint's `generation_config`. Prefill once, then a token a step over a static KV cache."""
    batch, start = contexts.shape
    inputs = utils.model_inputs(F.pad(contexts, (0, response_length), value=0), pad_id)  # 0 stands for a token to come
    mask, positions = inputs["attention_mask"], inputs["position_ids"]  # G3
    mask[:, start:] = 0  # filled in, never grown: static shapes, and alibi is built from it
    cache = utils.KeyValueCache(config=lm.config, max_cache_len=start + response_length)
    uniform = torch.rand(response_length, batch, 1, generator=gen, device=gen.device, dtype=torch.float64)
    responses = torch.empty(batch, response_length, dtype=torch.long, device=contexts.device)
    tokens, begin = inputs["input_ids"][:, :start], 0
    for t in range(response_length):
        end = start + t
        logits = lm(
            tokens,
            attention_mask=mask,
            position_ids=positions[:, begin:end],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        tokens, begin = draw(logits.float() / temperature, uniform[t]), end  # P1
        responses[:, t], mask[:, end] = tokens[:, 0], 1
    return responses


def sample_all(
    lm: PreTrainedModel, contexts: Tensor, task: Task, pad_id: int, gen: torch.Generator, size: int
) -> Tensor:
    """`sample` for any number of rows: `size` at a time, by length, trimmed. [B, C] → [B, R]"""
    responses = torch.empty(len(contexts), task.response_length, dtype=torch.long, device=contexts.device)
    for rows, width in utils.micro_batches(utils.row_lengths(contexts, pad_id), size):
        responses[rows] = sample(lm, contexts[rows, -width:], task.response_length, task.temperature, pad_id, gen)
    return responses


def moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance of x[mask] over all processes (X11), whatever stands outside the mask."""
    count = utils.all_sum(mask.sum())
    mean = utils.all_sum(x.masked_fill(~mask, 0).sum()) / count
    variance = utils.all_sum(((x - mean) ** 2).masked_fill(~mask, 0).sum()) / count
    return mean, variance


@torch.no_grad()
def normalise(model: RewardModel, queries: Tensor, responses: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """R3: set gain and bias so that these samples [S, Q], [S, R] of all processes have mean 0 and standard deviation 1;
    returns their mean and standard deviation without gain and bias."""
    model.eval()
    model.gain.fill_(1)
    model.bias.fill_(0)
    rewards = model.score(queries, responses, size)
    mean, variance = moments(rewards, torch.ones_like(rewards, dtype=torch.bool))
    model.gain.copy_(1 / variance.sqrt())
    model.bias.copy_(-model.gain * mean)
    return mean, variance.sqrt()


def policy_samples(args: Args, tokenizer: Any, pad_id: int, accelerator: Accelerator) -> list[tuple[Tensor, Tensor]]:
    """R3: samples of the pretrained policy to normalise on, before and after training: (queries [S, Q], untruncated
    responses [S, R]) twice. The policy is gone when this returns."""
    task, device = args.task, accelerator.device
    ids = utils.task_ids(task, tokenizer, pad_id)
    size = math.ceil(args.normalize_samples / args.rollout_batch_size) * args.rollout_batch_size
    table = utils.load_queries(task, tokenizer, pad_id, 2 * size)
    lm = utils.load_lm(task.base_model).to(device).eval()
    seed = args.seed + 100003 * accelerator.process_index  # G6
    size //= accelerator.num_processes
    sets = []
    for step in range(2):
        queries = table[utils.rows_of_step(len(table), size, step, seed)].to(device)
        with accelerator.autocast():
            contexts, gen = utils.add_affixes(queries, ids), utils.generator(seed, step, device)
            sets.append((queries, sample_all(lm, contexts, task, pad_id, gen, args.micro_batch_size)))
    return sets


# ----------------------------------------------------------------------------------------------------------- training


class AdamTF(torch.optim.Adam):
    """A1: TensorFlow's Adam. There ε is added to √v without its bias correction (ε̂ in Kingma & Ba); PyTorch's formula
    with ε_t = ε̂ / √(1 − β₂ᵗ) is the same, so the library's fused kernel does the work."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-5):
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)
        for group in self.param_groups:
            group["eps_hat"], group["t"] = eps, 0  # in the group, so that state_dict() keeps them

    def step(self, closure: Callable | None = None) -> Any:
        """One step; sets ε_t first."""
        for group in self.param_groups:
            group["t"] += 1
            group["eps"] = group["eps_hat"] / math.sqrt(1 - group["betas"][1] ** group["t"])
        return super().step(closure)


def anneal(lr: float, step: int, steps: int) -> float:
    """G5: linear from `lr` at step 0 to 0 at step `steps`."""
    return lr * (1 - step / steps)


def set_lr(optimizer: Any, lr: float) -> None:
    """One learning rate for all groups; never a prepared scheduler, which would step once a process."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def new_reward_model(name: str, pad_id: int) -> RewardModel:
    """A language model's backbone with a fresh head (R2)."""
    lm = utils.load_lm(name)
    model = RewardModel(utils.RewardConfig(lm.config, pad_id))
    model.backbone.load_state_dict(lm.base_model.state_dict())
    return model


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
    """R4: one optimizer step on this process's labels, as many as every process has; their loss and accuracy before."""
    model.train()
    tokens = candidate_tokens(labels, pad_id)
    parts = micro_batches(tokens, pad_id, args.micro_batch_size)
    loss_sum, correct = 0.0, 0.0
    for i, (rows, width) in enumerate(parts):
        with accelerator.no_sync(model) if i + 1 < len(parts) else nullcontext():
            rewards = candidate_rewards(model, tokens[rows], width)  # [b, K]
            loss = F.cross_entropy(rewards, labels.best[rows], reduction="sum") / len(tokens)
            accelerator.backward(loss)  # every process has as many labels, and DDP averages the processes' gradients
        loss_sum += loss.detach()
        correct += (rewards.argmax(dim=1) == labels.best[rows]).sum() / len(tokens)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss_sum, "accuracy": correct}


# -------------------------------------------------------------------------------------------------------- measurement


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


def draw_histogram(groups: dict[str, list[float]], title: str, path: Path) -> None:
    """The distributions of a few groups of numbers as a picture."""
    plt = utils.pyplot()
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axis.hist(list(groups.values()), bins=40, density=True, histtype="stepfilled", alpha=0.5, label=list(groups))
    axis.set(title=title, ylabel="density")
    axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def report(run: utils.Run, rewards: Tensor, best: Tensor) -> dict[str, float]:
    """Held-out accuracy, calibration table and picture of the rewards [B, K] of chosen and other candidates."""
    rows = calibration(rewards, best)
    run.table(rows, "calibration on held-out labels")
    chosen = torch.zeros_like(rewards, dtype=torch.bool).scatter(1, best[:, None], True)
    if run.main:
        groups = {"chosen": rewards[chosen].tolist(), "others": rewards[~chosen].tolist()}
        draw_histogram(groups, "reward of held-out candidates", run.folder / "histogram.png")
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
    utils.check_args(args, SCRIPT)
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
    accelerator = utils.start_accelerator(args)
    check(args, accelerator.num_processes)
    task, device, rank, processes = args.task, accelerator.device, accelerator.process_index, accelerator.num_processes
    tokenizer, config, pad_id = utils.load_tokenizer(task, task.response_length, f"python sft.py --task {task.task}")
    labels = load_labels(task, tokenizer, pad_id)
    utils.check_length(config, task.query_length + labels.responses.shape[2], f"--label_dataset={task.label_dataset}")
    if len(labels.best) < args.num_labels:
        raise InputError(
            f"--label_dataset={task.label_dataset} has {len(labels.best)} labels, num_labels={args.num_labels}; "
            f"use --num_labels {len(labels.best) // args.batch_size * args.batch_size}"
        )
    before, after = policy_samples(args, tokenizer, pad_id, accelerator)

    torch.manual_seed(args.seed)
    model = new_reward_model(task.base_model, pad_id)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model, optimizer = accelerator.prepare(model, AdamTF(model.parameters(), lr=args.lr, eps=args.adam_eps))
    plain = accelerator.unwrap_model(model)
    with accelerator.autocast():
        normalise(plain, *before, args.micro_batch_size)

    run = utils.Run(args, SCRIPT, args.num_labels // args.batch_size, PANELS, accelerator)
    clock = utils.Clock(device)
    order = np.random.default_rng([args.seed, 0]).permutation(args.num_labels)  # the same on every process
    for step, start in enumerate(range(0, args.num_labels, args.batch_size)):
        batch = labels.rows(order[start : start + args.batch_size][rank::processes]).to(device)
        with clock("optimise"):
            set_lr(optimizer, lr := anneal(args.lr, start, args.num_labels))  # G5
            stats = train_step(model, optimizer, batch, pad_id, args, accelerator)
        stats |= {"gain": plain.gain.detach(), "bias": plain.bias.detach()}
        metrics = utils.mean_over_processes(stats, device) | {"lr": lr} | clock.pop()
        run.log(step, metrics, {"loss": "loss", "accuracy": "accuracy"})

    with accelerator.autocast():
        mean, std = normalise(plain, *after, args.micro_batch_size)
    results = {"samples/mean_before_normalising": mean.item(), "samples/std_before_normalising": std.item()}
    if len(labels.best) > args.num_labels:
        heldout = labels.rows(np.arange(args.num_labels, len(labels.best))).to(device)
        with accelerator.autocast():
            results |= report(run, predict(plain, heldout, pad_id, args), heldout.best)
    run.save(plain, tokenizer)
    run.log(step + 1, results, {})
    run.finish(json.dumps({name: round(value, 4) for name, value in results.items()}))
    utils.stop_accelerator(accelerator)


if __name__ == "__main__":
    utils.cli(main, lambda: utils.parse_args(Args, PRESETS))
