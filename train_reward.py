"""Reward model from human preferences in one file, following OpenAI's lm-human-preferences.

Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593.

    python train_reward.py --task synthetic     # after sft.py --task synthetic
    accelerate launch train_reward.py --task sentiment

A language model with a scalar head scores a response to a query. It begins as the initial policy,
--base_model: what sft.py made, or pretrained GPT-2 for sentiment. It is trained for one epoch with
softmax cross-entropy over the K responses to a query; the target is the one that a human preferred.
Before and after training, gain and bias are set so that rewards of policy samples have mean 0 and
standard deviation 1.

Shapes: B labels or sequences (b in a micro-batch), N held-out labels, K responses per label, Q and
R tokens of query and response, T = Q + R, S samples. Masks are True at real tokens. Tags such as
(R1) are rows of docs/details.md.
"""

import machinery  # noqa: F401  # before torch: sets how torch's idle CPU threads wait

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from safetensors.torch import load_model, save_file
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from data.tasks import Task
from machinery import cli, distributed
from machinery.decoding import generate
from machinery.labels import Labels, load_labels
from machinery.models import ScalarHead, load_lm, new_backbone, reads_weights
from machinery.queries import load_queries
from machinery.rewards import USE_OTHERS, Reward, check_reward_model
from machinery.runs import Run, check_run
from machinery.sources import find_model
from machinery.tokens import load_config, load_tokenizer
from machinery.unpadding import compute_hidden
from utils import AdamTF, Timer, TokenIds, add_affixes, average_gradients
from utils import count_micro_batches, global_mean_and_var, mean_over_processes, micro_batches
from utils import permutation, query_rows, truncate


@dataclass(frozen=True, kw_only=True)
class Args(cli.RunArgs):
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


class RewardConfig(transformers.PretrainedConfig):
    """The transformer's configuration, the pad id, and the tokens that every text must begin with.

    `begin` is None, or BOS for a model written by tools/convert_reward.py. `check_reward_model`
    compares it with what the queries of a task begin with; it is never prepended.
    """

    model_type = "scalar_reward"

    def __init__(
        self,
        backbone: Any = None,
        pad_id: int = 0,  # transformers also makes configurations without arguments
        begin: list[int] | None = None,
        **kwargs: Any,
    ):
        if isinstance(backbone, dict):  # as read from config.json
            backbone = transformers.AutoConfig.for_model(**backbone)
        self.backbone = backbone
        self.pad_id = pad_id
        self.begin = begin
        super().__init__(**kwargs)


class RewardModel(nn.Module):
    """A transformer with a scalar head: `gain * head + bias` at the last real token (R1).

    Weights are fp32. Under --mixed_precision bf16 the transformer computes in bf16 by autocast
    (`distributed.prepare`); the head remains in fp32. `load_lm` turns dropout off (P4). Gain and
    bias are also trained.
    """

    def __init__(self, config: RewardConfig, backbone: Any = None):
        super().__init__()
        self.config = config
        self.backbone = new_backbone(config.backbone) if backbone is None else backbone
        self.head = ScalarHead(config.backbone)
        nn.init.normal_(self.head.weight, std=1 / math.sqrt(self.head.in_features + 1))  # (R2)
        nn.init.zeros_(self.head.bias)
        self.gain = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(1))

    def token_rewards(self, tokens: Tensor, prompt_length: int = 0) -> Tensor:
        """A reward at every token of sequences [B, T] with padding anywhere: [B, T].

        If adjacent rows have the same first `prompt_length` tokens, these are computed once.
        """
        mask = tokens != self.config.pad_id
        position_ids = mask.cumsum(dim=1) - mask.long()  # number of real tokens before each
        # At real tokens this equals backbone(input_ids, mask, position_ids).last_hidden_state:
        input_ids = tokens.masked_fill(~mask, 0)  # the pad id has no embedding
        hidden = compute_hidden(self.backbone, input_ids, mask, position_ids, prompt_length)
        rewards = self.head(hidden).squeeze(-1)  # [B, T]
        return self.gain * rewards + self.bias  # (R3)

    def forward(self, tokens: Tensor, prompt_length: int = 0) -> Tensor:
        """The reward at the last token that is not padding: [B, T] → [B]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        last = (positions * (tokens != self.config.pad_id)).amax(dim=1)
        rewards = self.token_rewards(tokens, prompt_length)
        return rewards.gather(1, last[:, None]).squeeze(1)

    @torch.no_grad()
    def score(self, tokens: Tensor, max_tokens: int, prompt_length: int = 0) -> Tensor:
        """Rewards of many sequences, about `max_tokens` tokens at a time: [B, T] → [B]."""
        lengths = (tokens != self.config.pad_id).sum(dim=1)
        count = count_micro_batches(lengths, max_tokens)  # the same on all processes
        rewards = []
        for part in micro_batches(lengths, count):  # slices, in order
            rewards.append(self(tokens[part], prompt_length))
        return torch.cat(rewards)

    @classmethod
    def from_pretrained(cls, name: str) -> "RewardModel":
        """Load what `save_pretrained` wrote, from a folder or the hub."""
        folder = find_model(name)
        found, _ = RewardConfig.get_config_dict(folder)
        if found.get("model_type") != RewardConfig.model_type:
            kind = found.get("architectures")
            raise cli.InputError(f"is {kind}, not a reward model of train_reward.py: {USE_OTHERS}")
        with no_init_weights():
            model = cls(RewardConfig.from_pretrained(folder))
        if reads_weights():  # under FSDP2, the first process; `place` sends weights to the others
            folder = find_model(name, weights=True)
            load_model(model, Path(folder, "model.safetensors"))
        return model.eval()

    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write config.json and model.safetensors. `state_dict`: weights without shards."""
        self.config.save_pretrained(folder)
        weights = state_dict or self.state_dict()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})


def new_reward_model(name: str, pad_id: int, length: int = 0) -> RewardModel:
    """A reward model with a language model's transformer and a new head.

    Raises `InputError` if its context window is shorter than `length` tokens.
    """
    lm = load_lm(name, length=length)
    return RewardModel(RewardConfig(lm.config, pad_id), lm.base_model)


def load_reward(
    args: Any,
    tokenizer: Any,
    ids: TokenIds,
    accelerator: Any,
) -> Reward:
    """The scorer of ppo.py and rloo.py: the reward model, or --reward_fn, which may call it."""
    reward = Reward(args.task, tokenizer, ids, args.micro_batch_tokens)  # loads task.reward_fn
    if reward.needs_model:
        with cli.about(f"--reward_model {args.reward_model}"):
            model = RewardModel.from_pretrained(args.reward_model)
            check_reward_model(model, args, tokenizer)
        reward.model = distributed.freeze(accelerator, model)
    return reward


# -------------------------------------------- normalization


def sample_policy(
    args: Args,
    tokenizer: Any,
    ids: TokenIds,
    accelerator: Any,
) -> list[Tensor]:
    """Sample the policy twice, to normalize before and after training (R3).

    Returns two tensors [S, T] of queries followed by responses, with S samples per process; in EOS
    tasks everything after EOS is padding.
    """
    task = args.task
    batch_size = args.rollout_batch_size // accelerator.num_processes
    num_batches = math.ceil(args.normalize_samples / args.rollout_batch_size)
    table = load_queries(task, tokenizer, ids)
    name = args.policy_model or task.base_model
    flag = "--policy_model" if args.policy_model else "--base_model"
    # Also checks that the policy can read context and response, and that its tokenizer matches.
    policy = load_lm(name, flag, length=ids.total_length, tokenizer=tokenizer)
    lm = distributed.freeze(accelerator, policy)
    seed = args.seed + 100003 * accelerator.process_index  # own queries and samples (G6)
    torch.manual_seed(seed)
    samples = []
    for step in range(2):
        rows = query_rows(len(table), num_batches * batch_size, seed, step)  # in shuffled order
        queries = table[rows].to(accelerator.device)
        parts = []
        for contexts in add_affixes(queries, ids).split(batch_size):
            # `generate` calls parts of the model: this turns on autocast, gathers FSDP2's weights.
            with distributed.inference(accelerator, lm):
                part = generate(lm, contexts, ids.pad, task.response_length, task.temperature)
            parts.append(part)
        responses = torch.cat(parts)
        if task.eos_task:  # in other tasks, samples and labels are read in full, as OpenAI does
            responses, _ = truncate(responses, ids)
        # Only the policy reads the task's prefix and suffix.
        tokens = torch.cat([queries, responses], dim=1)
        # A --policy_model may have a larger vocabulary. Ids beyond the reward model's become
        # padding: ids.pad is one past its vocabulary (X13).
        samples.append(tokens.clamp(max=ids.pad))
    return samples


@torch.no_grad()
def normalize(model: RewardModel, tokens: Tensor, max_tokens: int) -> tuple[float, float]:
    """Set gain and bias so that samples [S, T] have rewards with mean 0 and variance 1 (R3).

    Over all processes. Returns the mean and standard deviation of the head's output.
    """
    model.gain.fill_(1)
    model.bias.fill_(0)
    rewards = model.score(tokens, max_tokens)
    head_mean, head_var = global_mean_and_var(rewards)
    mean = head_mean.item()
    std = math.sqrt(head_var.item())
    if not std > 1e-6 * abs(mean):  # rewards differ only by rounding, or are NaN
        raise cli.InputError("all samples of the policy have the same reward, or it is NaN")
    model.gain.fill_(1 / std)
    model.bias.fill_(-mean / std)
    return mean, std


# --------------------------------------------------- labels


def candidate_tokens(
    labels: Labels,
    rows: np.ndarray,
    pad_id: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, int]:
    """Each query with each of its responses [B, K, Q + R], the preferred one's index [B], and Q."""
    queries, responses, best = labels.batch(rows, pad_id)
    prompt_length = queries.shape[1]
    queries = queries[:, None].expand(-1, responses.shape[1], -1)
    tokens = torch.cat([queries, responses], dim=2)
    return tokens.to(device), best.to(device), prompt_length


@torch.no_grad()
def predict(
    model: RewardModel,
    labels: Labels,
    rows: np.ndarray,
    pad_id: int,
    args: Args,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Rewards [N, K] of labels, and the index of each preferred response [N]."""
    rewards = []
    best = []
    # Every process computes all rows.
    for first in range(0, len(rows), args.batch_size):
        batch = rows[first : first + args.batch_size]
        tokens, batch_best, prompt_length = candidate_tokens(labels, batch, pad_id, device)
        sequences = tokens.flatten(0, 1)  # [B * K, T]
        scores = model.score(sequences, args.micro_batch_tokens, prompt_length)
        rewards.append(scores.view(tokens.shape[:2]))
        best.append(batch_best)
    return torch.cat(rewards), torch.cat(best)


def accuracies(rewards: Tensor, best: Tensor) -> Tensor:
    """[B, K] → [B]: 1 if the preferred response has the largest reward, 1/n if n tie, else 0."""
    is_largest = rewards == rewards.amax(dim=1, keepdim=True)
    correct = is_largest.gather(1, best[:, None]).squeeze(1)
    return correct / is_largest.sum(dim=1)


def heldout_metrics(rewards: Tensor, best: Tensor) -> dict[str, float]:
    """Metrics of rewards [N, K] and the indices of the preferred responses [N].

    Rewards were normalized again after training, so this loss is not comparable to the one before.
    """
    is_best = F.one_hot(best, rewards.shape[1]).bool()
    return {
        "heldout/accuracy": accuracies(rewards, best).mean().item(),
        "heldout/loss": F.cross_entropy(rewards, best).item(),
        "heldout/reward_chosen": rewards[is_best].mean().item(),
        "heldout/reward_others": rewards[~is_best].mean().item(),
    }


# ----------------------------------------------------- main


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
    device, processes = accelerator.device, accelerator.num_processes
    check(args, processes)
    # Task fields used in this file (see data/tasks.py): task (its name), base_model,
    # response_length, temperature, eos_task and label_dataset.
    task = args.task
    tokenizer, ids = load_tokenizer(task, task.response_length)
    config = load_config(task.base_model)  # labels that are too long for the model are skipped
    labels = load_labels(task, tokenizer, ids, config)
    # Rows whose queries are not among the first num_labels; fewer than num_labels are an error:
    heldout = labels.held_out(args.num_labels)[: args.num_heldout]
    before, after = sample_policy(args, tokenizer, ids, accelerator)

    torch.manual_seed(args.seed)  # the same new head on all processes
    longest = max(labels.longest(), ids.total_length)  # the length at which its results are checked
    model = new_reward_model(task.base_model, ids.pad, longest)
    optimizer = AdamTF(model.parameters(), lr=args.lr, eps=args.adam_eps)
    model, optimizer = distributed.prepare(accelerator, model, optimizer, args)  # without DDP

    local_batch_size = args.batch_size // processes
    num_steps = args.num_labels // args.batch_size
    cli.say(f"{args.num_labels}/{len(labels)} labels, {len(heldout)} held out, {num_steps} steps")
    timer = Timer(device)
    shown = ["loss", "accuracy", "gain", "bias", "lr"]  # in the terminal and in curves.png
    run = Run(args, num_steps, shown, accelerator)

    # 1. Normalize the rewards of the initial policy's samples.
    normalize(model, before, args.micro_batch_tokens)
    start, _ = run.restore(model, optimizer)  # start = 0 if not resumed, else also gain and bias

    # 2. Train for one epoch.
    order = permutation(args.num_labels, args.seed, epoch=0)
    for step in range(start, num_steps):
        timer.start("optimize")
        lr = args.lr * (1 - step / num_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        first = step * args.batch_size
        rows = order[first : first + args.batch_size]
        rows = rows[accelerator.process_index :: processes]
        tokens, best, prompt_length = candidate_tokens(labels, rows, ids.pad, device)  # [B, K, T]
        stats: dict[str, Any] = defaultdict(float)
        lengths = (tokens != ids.pad).sum(dim=(1, 2))  # [B], with the query K times
        count = count_micro_batches(lengths, args.micro_batch_tokens)
        for part in micro_batches(lengths, count):
            sequences = tokens[part].flatten(0, 1)  # [b * K, T]
            rewards = model(sequences, prompt_length).view(-1, tokens.shape[1])  # [b, K]
            losses = F.cross_entropy(rewards, best[part], reduction="none")  # [b] (R4)
            loss = losses.sum() / local_batch_size
            loss.backward()
            stats["loss"] += loss.detach()
            stats["accuracy"] += accuracies(rewards, best[part]).sum() / local_batch_size
        average_gradients(model)  # over processes; nothing to do under FSDP2
        optimizer.step()
        optimizer.zero_grad()

        stats["gain"] = distributed.full_tensor(model.gain)
        stats["bias"] = distributed.full_tensor(model.bias)
        metrics = mean_over_processes(stats, device)
        run.log(step, {**metrics, "lr": lr, **timer.stop()})
        run.checkpoint(step + 1, model, optimizer)

    # 3. Normalize again, save, and evaluate on held-out labels.
    mean, std = normalize(model, after, args.micro_batch_tokens)
    run.save(model, tokenizer)
    results = {"samples/head_mean": mean, "samples/head_std": std}
    if len(heldout):
        rewards, best = predict(model, labels, heldout, ids.pad, args, device)
        results.update(heldout_metrics(rewards, best))
    run.log(num_steps, results)
    rounded = {name: round(value, 4) for name, value in results.items()}
    # Prints the next command: ppo.py with this --reward_model.
    run.finish(json.dumps(rounded), then="ppo", flag="reward_model")


# The defaults above are for sentiment and descriptiveness. Overrides for the other tasks:
SUMMARIES_2019 = dict(
    num_labels=46_000,
    batch_size=16,
    lr=2.5e-5,
    rollout_batch_size=128,
)
PRESETS: dict[str, dict[str, Any]] = {
    "synthetic": dict(batch_size=8, lr=1e-3),
    "synthetic_eos": dict(num_labels=9984, batch_size=16, lr=1e-3),
    "cnndm": SUMMARIES_2019,
    "tldr_2019": SUMMARIES_2019,
    "tldr": dict(
        num_labels=92_800,
        batch_size=64,
        lr=3e-6,
        rollout_batch_size=256,
    ),
}


if __name__ == "__main__":
    cli.run(main, Args, PRESETS)
