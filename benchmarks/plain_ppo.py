"""PPO written down as the 2023 reproduction has it: what ppo.py is measured and tested against.

The library's `generate`, padded batches, logits at all positions of policy, reference and reward
model, the entropy by a second softmax, TensorFlow's Adam as a loop over the parameters. It shares
no line with ppo.py, and one update on the same responses gives the same weights
(tests/benchmarks/test_speed.py).

Shapes: B sequences, Q query tokens, R response tokens, T = Q + R, V vocabulary size. Queries are
padded on the left, and responses that end on the right.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig


class LMWithScalar(nn.Module):
    """A language model with a scalar at every token: the policy with values, or a reward model."""

    def __init__(self, lm: nn.Module, head: nn.Linear | None = None):
        super().__init__()
        self.lm = lm
        self.head = head or nn.Linear(lm.config.hidden_size, 1)
        if head is None:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor, pad_id: int) -> tuple[Tensor, Tensor]:
        """[B, T], padding anywhere → logits [B, T, V] and scalars [B, T]."""
        mask = tokens != pad_id
        inputs = dict(input_ids=tokens.masked_fill(~mask, 0), attention_mask=mask, use_cache=False)
        inputs["position_ids"] = mask.cumsum(dim=1) - mask.long()
        out = self.lm(**inputs, output_hidden_states=True)
        return out.logits, self.head(out.hidden_states[-1]).squeeze(-1)


def reward_from(model: Any) -> LMWithScalar:
    """A reward model with an unused language model's head; its gain and bias are in the scalar."""
    lm = AutoModelForCausalLM.from_config(model.config.backbone).eval()
    lm.base_model.load_state_dict(model.backbone.state_dict())
    head = nn.Linear(model.head.in_features, 1)
    with torch.no_grad():
        head.weight.copy_(model.gain * model.head.weight)
        head.bias.copy_(model.gain * model.head.bias + model.bias)
    return LMWithScalar(lm, head).requires_grad_(False)


class AdamLoop(torch.optim.Optimizer):
    """TensorFlow's Adam, one parameter at a time."""

    def __init__(self, params: Any, lr: float, eps: float):
        super().__init__(params, dict(lr=lr, eps=eps))

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        beta1, beta2 = 0.9, 0.999
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state |= dict(t=0, m=torch.zeros_like(param), v=torch.zeros_like(param))
                state["t"] += 1
                state["m"].mul_(beta1).add_(param.grad, alpha=1 - beta1)
                state["v"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                lr = group["lr"] * (1 - beta2 ** state["t"]) ** 0.5 / (1 - beta1 ** state["t"])
                param.addcdiv_(state["m"], state["v"].sqrt().add_(group["eps"]), value=-lr)


class Episodes(NamedTuple):
    """What an update learns from: [B, R] each."""

    tokens: Tensor  # [B, T]
    mask: Tensor  # real tokens of responses
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


def left_aligned(tokens: Tensor, pad_id: int) -> Tensor:
    """Move the padding of each sequence to its left."""
    return torch.stack([torch.cat([x[x == pad_id], x[x != pad_id]]) for x in tokens])


def whitened(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale real tokens to unit variance over the batch; 0 elsewhere."""
    mean, var = x[mask].mean(), x[mask].var(unbiased=False)
    y = (x - mean) / torch.sqrt(var + 1e-8)
    return (y if shift_mean else y + mean) * mask


class PlainPPO:
    """PPO with one minibatch per epoch; `args` are those of ppo.py."""

    def __init__(self, lm: Any, ref: Any, reward: Any, args: Any, pad_id: int, micro: int):
        self.policy, self.reward = LMWithScalar(lm), reward
        self.ref = LMWithScalar(ref).requires_grad_(False)
        self.args, self.task, self.pad_id, self.micro = args, args.task, pad_id, micro
        self.optimizer = AdamLoop(self.policy.parameters(), lr=args.lr, eps=args.adam_eps)

    def parts(self, tokens: Tensor, rows: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and their tokens, `micro` sequences at a time."""
        for part in np.split(rows, range(self.micro, len(rows), self.micro)):
            yield torch.as_tensor(part), tokens[part]

    def forward(self, model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T] → logits / temperature [B, R, V] and scalars [B, R] that predict the response."""
        length = self.task.response_length
        logits, scalars = model(tokens, self.pad_id)
        return logits[:, -length - 1 : -1] / self.task.temperature, scalars[:, -length - 1 : -1]

    def token_logprobs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities of the response tokens [B, R]."""
        logprobs = F.log_softmax(logits, dim=-1)
        tokens = tokens[:, -self.task.response_length :, None]
        real = tokens != self.pad_id
        return logprobs.gather(2, tokens * real).masked_fill(~real, 0).squeeze(2)

    @torch.no_grad()
    def sample(self, queries: Tensor, seed: int, end: int | None = None) -> Tensor:
        """[B, Q] → responses [B, R]; after `end` comes anything."""
        lm, task = self.policy.lm, self.task
        torch.manual_seed(seed)
        mask = queries != self.pad_id
        config = GenerationConfig(do_sample=True, temperature=task.temperature, top_k=0, top_p=1.0)
        config.max_new_tokens, config.pad_token_id = task.response_length, 0
        lm.generation_config.eos_token_id = None  # exactly R tokens
        config.eos_token_id = end
        inputs = dict(inputs=queries.masked_fill(~mask, 0), attention_mask=mask.long())
        responses = lm.generate(**inputs, generation_config=config)[:, queries.shape[1] :]
        return F.pad(responses, (0, task.response_length - responses.shape[1]))

    @torch.no_grad()
    def scores(
        self, queries: Tensor, responses: Tensor, truncate: int | None
    ) -> tuple[Tensor, Tensor]:
        """Rewards [B] of responses up to their `truncate` token, a penalty if there is none; and
        the responses that were read [B, R]."""
        cut, ended = responses.clone(), torch.ones(len(responses), dtype=torch.bool)
        if truncate is not None:
            for i, row in enumerate(responses.tolist()):
                ended[i] = truncate in row[self.task.truncate_after :]
                if ended[i]:
                    cut[i, row.index(truncate, self.task.truncate_after) + 1 :] = self.pad_id
        tokens = left_aligned(torch.cat([queries, cut], dim=1), self.pad_id)
        scores = torch.empty(len(queries))
        for rows, part in self.parts(tokens, np.arange(len(tokens))):
            scores[rows] = self.reward(part, self.pad_id)[1][:, -1]
        scores[~ended] = self.task.unfinished_score
        return scores, cut

    @torch.no_grad()
    def rollout(
        self, queries: Tensor, responses: Tensor, kl_coef: float, truncate: int | None = None
    ) -> Episodes:
        """Old log-probabilities and values, KL-penalized rewards and advantages [B, R]."""
        args = self.args
        scores, cut = self.scores(queries, responses, truncate)
        responses = cut if self.task.eos_task else responses
        tokens, mask = torch.cat([queries, responses], dim=1), responses != self.pad_id
        logprobs, ref_logprobs, values = (torch.empty(responses.shape) for _ in range(3))
        for rows, part in self.parts(tokens, np.arange(len(tokens))):
            logits, values[rows] = self.forward(self.policy, part)
            logprobs[rows] = self.token_logprobs(logits, part)
            ref_logprobs[rows] = self.token_logprobs(self.forward(self.ref, part)[0], part)
        values = values * mask
        rewards = -kl_coef * (logprobs - ref_logprobs)
        rewards[range(len(rewards)), mask.sum(dim=1) - 1] += scores
        if args.whiten_rewards:
            rewards = whitened(rewards, mask, shift_mean=False)
        advantages, last = torch.zeros_like(rewards), torch.zeros(len(rewards))
        for t in range(rewards.shape[1] - 1, -1, -1):
            following = values[:, t + 1] if t + 1 < rewards.shape[1] else 0
            delta = rewards[:, t] + args.gamma * following - values[:, t]
            last = delta + args.gamma * args.lam * last
            advantages[:, t] = last
        numbers = logprobs, values, whitened(advantages, mask), advantages + values
        return Episodes(tokens, mask, *numbers)

    def train(self, old: Episodes, epochs: list[np.ndarray]) -> dict[str, float]:
        """One optimizer step per epoch over its permutation of the episodes; return statistics."""
        args, all_stats, num_tokens = self.args, [], old.mask.sum()
        for order in epochs:
            for rows, tokens in self.parts(old.tokens, order):

                def mean(x: Tensor, mask: Tensor = old.mask[rows]) -> Tensor:
                    return (x * mask).sum() / num_tokens  # this part of it

                logits, values = self.forward(self.policy, tokens)
                log_ratio = self.token_logprobs(logits, tokens) - old.logprobs[rows]
                ratio, advantages = log_ratio.exp(), old.advantages[rows]
                pg_losses = -advantages * ratio
                clipped = ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
                pg_losses_clipped = -advantages * clipped
                pg_loss = mean(torch.max(pg_losses, pg_losses_clipped))
                before, limit = old.values[rows], args.cliprange_value
                returns = old.returns[rows]
                vf_losses = (values - returns) ** 2
                vf_losses_clipped = (values.clamp(before - limit, before + limit) - returns) ** 2
                vf_loss = 0.5 * mean(torch.max(vf_losses, vf_losses_clipped))
                loss = pg_loss + args.vf_coef * vf_loss
                loss.backward()
                with torch.no_grad():
                    probs = logits.softmax(dim=-1)
                    entropy = logits.logsumexp(dim=-1) - (probs * logits).sum(dim=-1)
                    stats = dict(
                        policy_loss=pg_loss,
                        value_loss=vf_loss,
                        entropy=mean(entropy),
                        approxkl=0.5 * mean(log_ratio**2),
                        ratio=mean(ratio),
                        clipfrac=mean(pg_losses_clipped > pg_losses),
                        value_clipfrac=mean(vf_losses_clipped > vf_losses),
                    )
                    all_stats.append(torch.stack(list(stats.values())))
            self.optimizer.step()
            self.optimizer.zero_grad()
        means = (torch.stack(all_stats).sum(dim=0) / len(epochs)).tolist()
        return dict(zip(stats, means, strict=True))
