"""Reward model from human preferences in one file, following OpenAI's lm-human-preferences.

Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593.

    python train_reward.py --task synthetic     # after sft.py --task synthetic
    accelerate launch train_reward.py --task sentiment

A language model with a scalar head scores a response to a query. It is trained for one epoch with
softmax cross-entropy over the K responses to a query; the target is the one that a human preferred.
Before and after training, gain and bias are set so that rewards of policy samples have mean 0 and
standard deviation 1.

Shapes: B labels (b in a micro-batch, N held out), K responses per label, Q and R tokens of query
and response, T = Q + R, S samples. Masks are True at real tokens. Tags (R1): docs/details.md.
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from safetensors.torch import save_file
from torch import Tensor, nn

from data.tasks import Task
from machinery import cli, distributed
from machinery.cli import RunArgs
from machinery.decoding import Decoder, generate
from machinery.labels import Labels, load_labels
from machinery.models import ScalarHead, load_lm, new_backbone
from machinery.queries import load_queries
from machinery.rewards import RewardConfig, score_in_parts
from machinery.runs import Run, check_run
from machinery.tokens import load_config, load_tokenizer
from machinery.unpadding import Unpadded
from utils import AdamTF, Timer, TokenIds, add_affixes, average_gradients, global_mean_and_var
from utils import mean_over_processes, micro_batches, permutation, query_rows, truncate


@dataclass(frozen=True, kw_only=True)
class Args(RunArgs):
    """Reward model from human preferences."""

    task: Task

    # Run
    seed: cli.Seed = 1
    """random seed; process r samples with seed + 100003 * r"""
    num_labels: PositiveInt = 4992
    """train on the first N labels of the dataset"""
    num_heldout: NonNegativeInt = 1024
    """maximum number of held-out labels to evaluate on"""

    # Optimization
    batch_size: PositiveInt = 32
    """labels per optimizer step, over all processes"""
    lr: NonNegativeFloat = 5e-5
    """learning rate of the first step; decays linearly to 0"""
    adam_eps: PositiveFloat = 1e-5
    """epsilon of TensorFlow's Adam, added before the bias correction"""

    # Normalization
    policy_model: str | None = None
    """folder or hub name of the policy to sample from; default: base_model"""
    normalize_samples: Annotated[int, Field(ge=2)] = 256
    """number of policy samples for normalization, rounded up to whole batches"""
    rollout_batch_size: PositiveInt = 512
    """samples per batch, over all processes (in ppo.py and rloo.py, per process)"""


# ---------------------------------------------------- model


class RewardModel(nn.Module):
    """A transformer with a scalar head: `gain * r + bias` at the last real token (R1)."""

    def __init__(self, config: RewardConfig, backbone: Any = None):
        super().__init__()
        self.config = config
        self.backbone = new_backbone(config.backbone) if backbone is None else backbone
        self.run_backbone = Unpadded(self.backbone)  # calls it without padding; no new weights
        self.head = ScalarHead(config.backbone)
        nn.init.normal_(self.head.weight, std=1 / math.sqrt(self.head.in_features + 1))  # (R2)
        nn.init.zeros_(self.head.bias)
        self.gain = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(1))

    def token_rewards(self, tokens: Tensor, prompt_length: int = 0) -> Tensor:
        """A reward at every token of sequences [B, T] with padding anywhere: [B, T] (G1).

        The first `prompt_length` columns are computed once for neighbors that share them.
        """
        mask = tokens != self.config.pad_id
        position_ids = mask.cumsum(dim=1) - mask.long()  # real tokens before each position (G3)
        hidden = self.run_backbone(tokens.masked_fill(~mask, 0), mask, position_ids, prompt_length)
        return self.gain * self.head(hidden).squeeze(-1) + self.bias  # (R3)

    def forward(self, tokens: Tensor, prompt_length: int = 0) -> Tensor:
        """The reward at the last token that is not padding: [B, T] → [B] (R1)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        last = torch.where(tokens == self.config.pad_id, 0, positions).amax(dim=1)
        return self.token_rewards(tokens, prompt_length).gather(1, last[:, None]).squeeze(1)

    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write config.json and model.safetensors."""
        self.config.save_pretrained(folder)
        save_file(state_dict or self.state_dict(), folder / "model.safetensors", {"format": "pt"})


def new_reward_model(name: str, pad_id: int, length: int = 0) -> RewardModel:
    """The transformer of a language model and a new head (R2), for texts of `length` tokens."""
    lm = load_lm(name, length=length)
    return RewardModel(RewardConfig(lm.config, pad_id), lm.base_model)


# -------------------------------------------- normalization


def sample_policy(
    args: Args, tokenizer: Any, ids: TokenIds, accelerator: Any
) -> list[tuple[Tensor, Tensor]]:
    """Sample the policy twice, to normalize before and after training (R3).

    Returns two pairs of queries [S, Q] and responses [S, R], in EOS tasks with padding after EOS.
    """
    device, processes, task = accelerator.device, accelerator.num_processes, args.task
    flag = "--policy_model" if args.policy_model else "--base_model"
    name = args.policy_model or task.base_model
    batch_size = args.rollout_batch_size // processes
    local_samples = math.ceil(args.normalize_samples / args.rollout_batch_size) * batch_size
    table = load_queries(task, tokenizer, ids)
    lm = distributed.freeze(accelerator, load_lm(name, flag, ids.length, tokenizer))
    decoder = Decoder(lm, task.response_length)
    seed = args.seed + 100003 * accelerator.process_index  # (G6)
    torch.manual_seed(seed)
    cli.say(f"sampling 2 * {local_samples * processes} responses of {name} to normalize")
    samples = []
    for step in range(2):
        queries = table[query_rows(len(table), local_samples, seed, step)].to(device)
        batches = add_affixes(queries, ids).split(batch_size)
        with distributed.inference(accelerator, lm):
            parts = [generate(decoder, x, ids.pad, task.temperature) for x in batches]
        responses = torch.cat(parts)
        if task.eos_task:  # other tasks normalize on all R tokens (X9)
            responses, _ = truncate(responses, ids.ends, task.truncate_after, ids.pad)
        samples.append((queries, responses))  # the reward model reads no affixes
    return samples


@torch.no_grad()
def normalize(model: RewardModel, tokens: Tensor, max_tokens: int) -> tuple[float, float]:
    """Set gain and bias so that samples [S, T] have rewards with mean 0 and variance 1 (R3).

    Over all processes. Returns the mean and standard deviation of the head's output.
    """
    model.gain.fill_(1)
    model.bias.fill_(0)
    rewards = score_in_parts(model, tokens, max_tokens)
    mean, var = (x.item() for x in global_mean_and_var(rewards))
    std = math.sqrt(var)
    if not std > 1e-6 * abs(mean):  # rewards differ only by rounding, or are NaN
        raise cli.InputError("samples of the policy have the same reward, or NaN; use more samples")
    model.gain.fill_(1 / std)
    model.bias.fill_(-mean / std)
    return mean, std


# --------------------------------------------------- labels


def candidate_tokens(
    labels: Labels, rows: np.ndarray, pad_id: int, device: Any
) -> tuple[Tensor, Tensor, int]:
    """Each query with each of its responses [B, K, Q + R], the preferred ones [B], and Q."""
    queries, responses, best = labels.batch(rows, pad_id)
    queries = queries[:, None].expand(-1, responses.shape[1], -1)
    tokens = torch.cat([queries, responses], dim=2)
    return tokens.to(device), best.to(device), queries.shape[2]


@torch.no_grad()
def predict(
    model: RewardModel, labels: Labels, rows: np.ndarray, pad_id: int, args: Args, device: Any
) -> tuple[Tensor, Tensor]:
    """Rewards [N, K] of labels, and the index of each preferred response [N]."""
    rewards, best = [], []
    for part in np.split(rows, range(args.batch_size, len(rows), args.batch_size)):
        tokens, part_best, q = candidate_tokens(labels, part, pad_id, device)
        scores = score_in_parts(model, tokens.flatten(0, 1), args.micro_batch_tokens, q)
        rewards.append(scores.view(tokens.shape[:2]))
        best.append(part_best)
    return torch.cat(rewards), torch.cat(best)


def accuracies(rewards: Tensor, best: Tensor) -> Tensor:
    """1 if the preferred response has the largest of K rewards [B, K], else 0; 1/n if n have it."""
    largest = rewards == rewards.amax(dim=1, keepdim=True)
    return largest.gather(1, best[:, None]).squeeze(1) / largest.sum(dim=1)


# ------------------------------------------------------ run

SHOWN = ["loss", "accuracy", "gain", "bias", "lr"]  # in the progress line and curves.png


def check(args: Args, processes: int) -> None:
    """Raise `InputError` for invalid flags, before anything is loaded."""
    check_run(args, processes)
    if args.task.label_dataset is None:
        raise cli.InputError(f"--task {args.task.task} has no labels; pass --label_dataset")
    cli.check_divisible("batch_size", args.batch_size, processes, "processes")
    cli.check_divisible("rollout_batch_size", args.rollout_batch_size, processes, "processes")
    cli.check_divisible("num_labels", args.num_labels, args.batch_size, "batch_size")


def main(args: Args) -> None:
    """Normalize, train for one epoch, normalize, evaluate."""
    accelerator = distributed.start(args)
    check(args, accelerator.num_processes)
    task, device, processes = args.task, accelerator.device, accelerator.num_processes
    tokenizer, ids = load_tokenizer(task, task.response_length)
    config = load_config(task.base_model)
    labels = load_labels(task, tokenizer, ids, config)
    heldout = labels.held_out(args.num_labels)[: args.num_heldout]
    samples = sample_policy(args, tokenizer, ids, accelerator)

    torch.manual_seed(args.seed)
    model = new_reward_model(task.base_model, ids.pad, max(labels.longest(), ids.length))
    optimizer = AdamTF(model.parameters(), lr=args.lr, eps=args.adam_eps)
    model, optimizer = distributed.prepare(accelerator, model, optimizer, args)
    before, after = (torch.cat(x, dim=1).clamp(max=ids.pad) for x in samples)  # [S, T] each (X13)
    normalize(model, before, args.micro_batch_tokens)

    num_steps = args.num_labels // args.batch_size
    cli.say(f"{args.num_labels}/{len(labels)} labels, {len(heldout)} held out, {num_steps} steps")
    timer = Timer(device)
    run = Run(args, num_steps, SHOWN, accelerator)
    start, _ = run.restore(model, optimizer)
    order = permutation(args.num_labels, args.seed, epoch=0)
    local_batch_size = args.batch_size // processes
    for step in range(start, num_steps):
        timer.start("optimize")
        for group in optimizer.param_groups:
            group["lr"] = lr = args.lr * (1 - step / num_steps)  # (G5)
        rows = order[step * args.batch_size : (step + 1) * args.batch_size]
        rows = rows[accelerator.process_index :: processes]
        tokens, best, prompt_length = candidate_tokens(labels, rows, ids.pad, device)
        lengths = (tokens != ids.pad).sum(dim=(1, 2))  # [B], all K responses with their query
        stats = dict(loss=torch.zeros((), device=device), accuracy=torch.zeros((), device=device))
        for part in micro_batches(lengths, args.micro_batch_tokens):
            rewards = model(tokens[part].flatten(0, 1), prompt_length).view(-1, tokens.shape[1])
            losses = F.cross_entropy(rewards, best[part], reduction="none")  # (R4)
            loss = losses.sum() / local_batch_size
            loss.backward()
            stats["loss"] += loss.detach()
            stats["accuracy"] += accuracies(rewards, best[part]).sum() / local_batch_size
        average_gradients(model)  # over processes
        optimizer.step()
        optimizer.zero_grad()

        stats |= {x: distributed.full_tensor(getattr(model, x)) for x in ("gain", "bias")}
        metrics = mean_over_processes(stats, device) | {"lr": lr} | timer.stop()
        run.log(step, metrics)
        run.checkpoint(step + 1, model, optimizer)

    mean, std = normalize(model, after, args.micro_batch_tokens)
    run.save(model, tokenizer)
    results = {"samples/head_mean": mean, "samples/head_std": std}
    if len(heldout):
        rewards, best = predict(model, labels, heldout, ids.pad, args, device)
        is_best = F.one_hot(best, rewards.shape[1]).bool()
        results["heldout/accuracy"] = accuracies(rewards, best).mean().item()
        results["heldout/loss"] = F.cross_entropy(rewards, best).item()
        results["heldout/reward_chosen"] = rewards[is_best].mean().item()
        results["heldout/reward_others"] = rewards[~is_best].mean().item()
    run.log(num_steps, results)
    text = json.dumps({name: round(value, 4) for name, value in results.items()})
    run.finish(text, then="ppo", flag="reward_model")


# The defaults above are for sentiment and descriptiveness. Overrides for the other tasks:
PRESETS: dict[str, dict[str, Any]] = {
    "synthetic": dict(batch_size=8, lr=1e-3),
    "synthetic_eos": dict(num_labels=9984, batch_size=16, lr=1e-3),
    "cnndm": dict(num_labels=46_000, batch_size=16, lr=2.5e-5, rollout_batch_size=128),
    "tldr_2019": dict(num_labels=46_000, batch_size=16, lr=2.5e-5, rollout_batch_size=128),
    "tldr": dict(num_labels=92_800, batch_size=64, lr=3e-6, rollout_batch_size=256),
}


if __name__ == "__main__":
    cli.run(main, Args, PRESETS)
