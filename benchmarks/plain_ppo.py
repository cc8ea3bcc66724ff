"""PPO in its plainest form: read this first, then work with ppo.py.

    python sft.py --task synthetic && python train_reward.py --task synthetic
    python benchmarks/plain_ppo.py    # metrics.jsonl and the model in runs/plain_ppo_1

PPO as the 2023 reproduction of OpenAI's code has it, without what makes ppo.py fast and safe:
the library's `generate`, padded batches, logits at all positions, TensorFlow's Adam as a loop over
the parameters, one process, no checkpoints. It shares no line with ppo.py, and one update on the
same responses gives the same weights (tests/benchmarks/test_speed.py).

Shapes: B sequences, Q query tokens, R response tokens, T = Q + R, V vocabulary size. Queries are
padded on the left, and responses that end on the right. Masks are True at real tokens.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from data.synthetic.judge import gold_score  # noqa: E402
from data.tasks import TASKS, Task  # noqa: E402
from machinery.queries import load_queries  # noqa: E402
from machinery.tokens import load_tokenizer  # noqa: E402
from utils import decode  # noqa: E402


@dataclass(frozen=True)
class Args:
    """PPO in its plainest form. The defaults are those of `ppo.py --task synthetic`."""

    seed: int = 1
    total_episodes: int = 4096
    batch_size: int = 128
    num_ppo_epochs: int = 2
    num_minibatches: int = 2
    micro_batch: int = 64
    """sequences at a time; changes memory, not results"""
    lr: float = 5e-4
    adam_eps: float = 1e-5
    kl_coef: float = 0.08
    kl_target: float = 10.0
    kl_horizon: int = 1000
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    whiten_rewards: bool = True
    task: tyro.conf.Suppress[Task] = TASKS["synthetic"]


class LMWithScalar(nn.Module):
    """A language model with a scalar at every token: the policy with values, or a reward model."""

    def __init__(self, lm: Any, pad_id: int):
        super().__init__()
        self.lm, self.pad_id = lm, pad_id
        self.head = nn.Linear(lm.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)  # values start at 0
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T], padding anywhere → logits [B, T, V] and scalars [B, T]."""
        mask = tokens != self.pad_id
        position_ids = mask.cumsum(dim=1) - mask.long()  # padding does not shift positions
        out = self.lm(
            input_ids=tokens.masked_fill(~mask, 0),  # the pad id has no embedding
            attention_mask=mask,
            position_ids=position_ids,
            use_cache=False,
            output_hidden_states=True,
        )
        return out.logits, self.head(out.hidden_states[-1]).squeeze(-1)


def load_reward(folder: str, pad_id: int) -> LMWithScalar:
    """train_reward.py's model: its scalar is gain * r + bias. The LM's head is unused."""
    config = json.loads(Path(folder, "config.json").read_text())["backbone"]
    weights = load_file(f"{folder}/model.safetensors")
    gain, bias = weights.pop("gain"), weights.pop("bias")
    reward = LMWithScalar(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)), pad_id)
    with torch.no_grad():
        reward.head.weight.copy_(gain * weights.pop("head.weight"))
        reward.head.bias.copy_(gain * weights.pop("head.bias") + bias)
    reward.lm.base_model.load_state_dict(
        {name.removeprefix("backbone."): weight for name, weight in weights.items()}
    )
    return reward.eval().requires_grad_(False)


class AdamLoop(torch.optim.Optimizer):
    """TensorFlow's Adam, one parameter at a time."""

    def __init__(self, params: Any, lr: float, eps: float):
        super().__init__(params, {"lr": lr, "eps": eps, "t": 0})

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        beta1, beta2 = 0.9, 0.999
        for group in self.param_groups:
            group["t"] += 1
            lr = group["lr"] * (1 - beta2 ** group["t"]) ** 0.5 / (1 - beta1 ** group["t"])
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["m"] = torch.zeros_like(param)
                    state["v"] = torch.zeros_like(param)
                state["m"].mul_(beta1).add_(param.grad, alpha=1 - beta1)
                state["v"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                param.addcdiv_(state["m"], state["v"].sqrt().add_(group["eps"]), value=-lr)


class Episodes(NamedTuple):
    """What an update learns from."""

    tokens: Tensor  # [B, T]
    cut: Tensor  # [B, R] responses as they were scored; the others, too, are [B, R]
    mask: Tensor  # real tokens of responses
    logprobs: Tensor
    values: Tensor
    kl: Tensor
    rewards: Tensor
    scores: Tensor  # [B]


# ------------------------------------------- 1. sample


@torch.no_grad()
def sample(policy: LMWithScalar, queries: Tensor, end: int | None, args: Args) -> Tensor:
    """[B, Q] → responses [B, R] from the full vocabulary; tokens after `end` are arbitrary."""
    task = args.task
    mask = queries != policy.pad_id
    policy.lm.generation_config.eos_token_id = None  # else `generate` takes it where ours is None
    config = GenerationConfig(do_sample=True, temperature=task.temperature, top_k=0, top_p=1.0)
    config.max_new_tokens, config.pad_token_id = task.response_length, 0
    config.eos_token_id = end if task.eos_task else None
    out = policy.lm.generate(
        inputs=queries.masked_fill(~mask, 0), attention_mask=mask.long(), generation_config=config
    )
    responses = out[:, queries.shape[1] :]
    return F.pad(responses, (0, task.response_length - responses.shape[1]))


# -------------------------------------------- 2. score


@torch.no_grad()
def score(
    reward: LMWithScalar, queries: Tensor, responses: Tensor, end: int | None, args: Args
) -> tuple[Tensor, Tensor]:
    """Scores [B] of responses up to their first `end` (a fixed one if they have none), and the
    responses as the reward model reads them [B, R]."""
    cut = responses.clone()
    ended = torch.ones(len(responses), dtype=torch.bool)
    if end is not None:
        for i, row in enumerate(responses.tolist()):
            ended[i] = end in row[args.task.truncate_after :]
            if ended[i]:
                cut[i, row.index(end, args.task.truncate_after) + 1 :] = reward.pad_id
    scores = torch.empty(len(queries))
    for rows in torch.arange(len(queries)).split(args.micro_batch):
        tokens = torch.cat([queries[rows], cut[rows]], dim=1)
        # With the padding on the left, the last token is a real one.
        parts = [torch.cat([x[x == reward.pad_id], x[x != reward.pad_id]]) for x in tokens]
        scores[rows] = reward(torch.stack(parts))[1][:, -1]
    scores[~ended] = args.task.unfinished_score
    return scores, cut


# ----------------------- 3. log-probabilities, values, rewards


def forward(policy: LMWithScalar, tokens: Tensor, args: Args) -> tuple[Tensor, Tensor, Tensor]:
    """Of the response tokens: logits [B, R, V], log-probabilities and values [B, R]."""
    length = args.task.response_length
    logits, values = policy(tokens)
    logits = logits[:, -length - 1 : -1] / args.task.temperature  # they predict the next token
    responses = tokens[:, -length:]
    mask = responses != policy.pad_id
    targets = responses.masked_fill(~mask, 0)[:, :, None]
    logprobs = F.log_softmax(logits, dim=-1).gather(2, targets).squeeze(2)
    return logits, logprobs * mask, values[:, -length - 1 : -1] * mask


@torch.no_grad()
def rollout(
    policy: LMWithScalar,
    ref: LMWithScalar,
    reward: LMWithScalar,
    queries: Tensor,
    responses: Tensor,
    end: int | None,
    kl_coef: float,
    args: Args,
) -> Episodes:
    """Steps 2 and 3 for queries [B, Q] and sampled responses [B, R]."""
    scores, cut = score(reward, queries, responses, end, args)
    if args.task.eos_task:
        responses = cut  # do not train on what follows the end; in other tasks on all R tokens
    tokens, mask = torch.cat([queries, responses], dim=1), responses != policy.pad_id
    logprobs, ref_logprobs, values = (torch.empty(responses.shape) for _ in range(3))
    for rows in torch.arange(len(tokens)).split(args.micro_batch):
        _, logprobs[rows], values[rows] = forward(policy, tokens[rows], args)
        _, ref_logprobs[rows], _ = forward(ref, tokens[rows], args)
    kl = logprobs - ref_logprobs
    rewards = -kl_coef * kl
    rewards[range(len(rewards)), mask.sum(dim=1) - 1] += scores  # at the last token
    return Episodes(tokens, cut, mask, logprobs, values, kl, rewards, scores)


# --------------------------------------------- 4. learn


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale real tokens to unit variance, and to mean 0 if `shift_mean`; 0 elsewhere."""
    mean, var = x[mask].mean(), x[mask].var(unbiased=False)
    whitened = (x - mean) / torch.sqrt(var + 1e-8)
    return (whitened if shift_mean else whitened + mean) * mask


def compute_advantages(old: Episodes, args: Args) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: advantages and returns [B, R]."""
    rewards = old.rewards
    if args.whiten_rewards:
        rewards = whiten(rewards, old.mask, shift_mean=False)
    advantages = torch.zeros_like(rewards)
    last = next_value = torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + args.gamma * next_value - old.values[:, t]
        last = delta + args.gamma * args.lam * last
        next_value = old.values[:, t]
        advantages[:, t] = last
    return whiten(advantages, old.mask), advantages + old.values


def train(
    policy: LMWithScalar, optimizer: Any, old: Episodes, orders: list[np.ndarray], args: Args
) -> dict[str, float]:
    """An epoch for each order of the B episodes, an Adam step for each minibatch; statistics."""
    all_stats = []
    for order in orders:
        for minibatch_rows in torch.from_numpy(order).split(len(order) // args.num_minibatches):
            minibatch = Episodes(*[x[minibatch_rows] for x in old])
            advantages, returns = compute_advantages(minibatch, args)
            stats = torch.zeros(4)
            for rows in torch.arange(len(minibatch_rows)).split(args.micro_batch):
                mask, old_values = minibatch.mask[rows], minibatch.values[rows]
                share = mask / minibatch.mask.sum()  # sums over it add up to the minibatch's mean
                logits, logprobs, values = forward(policy, minibatch.tokens[rows], args)

                log_ratio = logprobs - minibatch.logprobs[rows]
                ratio = log_ratio.exp()
                pg_losses = -advantages[rows] * ratio
                clipped_ratio = ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
                pg_losses_clipped = -advantages[rows] * clipped_ratio
                pg_loss = (torch.max(pg_losses, pg_losses_clipped) * share).sum()

                change = (values - old_values).clamp(-args.cliprange_value, args.cliprange_value)
                vf_losses = (values - returns[rows]) ** 2
                vf_losses_clipped = (old_values + change - returns[rows]) ** 2
                vf_loss = 0.5 * (torch.max(vf_losses, vf_losses_clipped) * share).sum()

                loss = pg_loss + args.vf_coef * vf_loss
                loss.backward()
                with torch.no_grad():
                    probs = logits.softmax(dim=-1)
                    entropy = logits.logsumexp(dim=-1) - (probs * logits).sum(dim=-1)
                    approxkl = 0.5 * log_ratio**2
                    means = (entropy * share).sum(), (approxkl * share).sum()
                    stats += torch.stack([pg_loss, vf_loss, *means])
            optimizer.step()
            optimizer.zero_grad()
            all_stats.append(stats)
    names = "ppo/loss/policy_avg", "ppo/loss/value_avg"
    names += "ppo/policy/entropy_avg", "ppo/policy/approxkl_avg"
    return dict(zip(names, torch.stack(all_stats).mean(dim=0).tolist(), strict=True))


# ------------------------------------------------- main


def main(args: Args) -> None:
    """Train a policy on the synthetic task."""
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    folder = Path(f"runs/plain_ppo_{args.seed}")
    folder.mkdir(parents=True)
    tokenizer, ids = load_tokenizer(args.task, args.task.response_length)  # ids: see utils.py
    table = load_queries(args.task, tokenizer, ids)  # table[rows] → [B, Q]; no affixes here
    (end,) = ids.ends
    num_heldout = 256  # ppo.py evaluates on the first rows

    base = AutoModelForCausalLM.from_pretrained
    policy = LMWithScalar(base(args.task.base_model), ids.pad).eval()  # without dropout
    ref = LMWithScalar(base(args.task.base_model), ids.pad).eval().requires_grad_(False)
    reward = load_reward("models/synthetic/train_reward", ids.pad)
    optimizer = AdamLoop(policy.parameters(), lr=args.lr, eps=args.adam_eps)

    kl_coef = args.kl_coef
    num_updates = args.total_episodes // args.batch_size
    for update in range(num_updates):
        optimizer.param_groups[0]["lr"] = args.lr * (1 - update / num_updates)
        queries = table[rng.integers(num_heldout, len(table), args.batch_size)]
        responses = sample(policy, queries, end, args)
        episodes = rollout(policy, ref, reward, queries, responses, end, kl_coef, args)
        orders = [rng.permutation(args.batch_size) for _ in range(args.num_ppo_epochs)]
        stats = train(policy, optimizer, episodes, orders, args)

        kl = episodes.kl.sum(dim=1).mean().item()
        texts = [decode(tokenizer, x, ids) for x in (queries, episodes.cut)]
        stats["ppo/episode"] = (update + 1) * args.batch_size
        stats["objective/scores"] = episodes.scores.mean().item()
        stats["objective/gold_score"] = float(np.mean(gold_score(*texts)))
        stats["objective/kl"], stats["objective/kl_coef"] = kl, kl_coef
        with (folder / "metrics.jsonl").open("a") as file:
            print(json.dumps(stats), file=file)
        print(
            f"update {update + 1} of {num_updates}: score {stats['objective/scores']:.2f}",
            flush=True,
        )

        # 5. Adapt kl_coef to the measured KL.
        error = min(max(kl / args.kl_target - 1, -0.2), 0.2)
        kl_coef *= 1 + error * args.batch_size / args.kl_horizon
    policy.lm.save_pretrained(folder / "model")


if __name__ == "__main__":
    main(tyro.cli(Args))
