"""The dark side of bf16: the first ratio of an update, π_new / π_old before any step, should be 1 for every completion (L6).

    python sft.py --task synthetic && python benchmarks/bf16_ratio.py

Old log-probabilities from the sampling loop (KV cache, a token at a time) against old ones from the training forward, both
under bf16 autocast. Prints the ratio's standard deviation and the share of completions outside 1 ± 0.2; draws both.
"""

import csv
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import rloo  # noqa: E402
import utils  # noqa: E402


@dataclass(frozen=True)
class Args:
    """The first ratio of an update under bf16, with old log-probabilities from two places."""

    out: Path = Path(__file__).with_suffix(".png")
    """picture to write; a CSV beside it"""
    model: str = "models/synthetic/sft"
    """policy"""
    completions: int = 512
    """completions to look at"""
    micro_batch_size: int = 64
    """sequences per forward"""


def replay(lm: torch.nn.Module, contexts: Tensor, responses: Tensor, temperature: float, pad_id: int) -> Tensor:
    """Log-probabilities [B, R] as the sampling loop sees them: one token a step over a KV cache."""
    inputs = utils.model_inputs(torch.cat([contexts, responses], dim=1), pad_id)
    cache, out, start = None, [], contexts.shape[1]
    for t in range(responses.shape[1]):
        begin, end = (start + t - 1 if cache is not None else 0), start + t
        step = lm(
            inputs["input_ids"][:, begin:end],
            attention_mask=inputs["attention_mask"][:, :end],
            position_ids=inputs["position_ids"][:, begin:end],
            past_key_values=cache,
            use_cache=True,
        )
        cache = step.past_key_values
        out.append(utils.token_logprobs(step.logits[:, -1:], responses[:, t : t + 1], temperature)[0])
    return torch.cat(out, dim=1)


@torch.no_grad()
def main(args: Args) -> None:
    """Measure, print, draw."""
    task = utils.TASKS["synthetic"]
    tokenizer, _, pad_id = utils.load_tokenizer(replace(task, base_model=args.model), task.response_length)
    policy = rloo.Policy(utils.load_lm(args.model).eval(), pad_id, task.temperature)
    queries = utils.load_queries(task, tokenizer, pad_id)[: args.completions]
    with torch.autocast("cpu", torch.bfloat16):
        responses = utils.sample_all(
            policy.lm, queries, task, pad_id, utils.generator(1, 0, queries.device), args.micro_batch_size
        )
        ratios = {"sampling loop": [], "training forward": []}
        for rows, width in utils.micro_batches(utils.row_lengths(queries, pad_id), args.micro_batch_size):
            contexts, answer = queries[rows, -width:], responses[rows]
            new = policy(contexts, answer)[0].sum(dim=1)
            ratios["sampling loop"] += (
                (new - replay(policy.lm, contexts, answer, task.temperature, pad_id).sum(dim=1)).exp().tolist()
            )
            ratios["training forward"] += (new - policy(contexts, answer)[0].sum(dim=1)).exp().tolist()
    plt = utils.pyplot()
    figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
    with open(args.out.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("old log-probabilities from", "std of the ratio", "share outside 1 ± 0.2"))
        for name, values in ratios.items():
            row = (name, f"{np.std(values):.4f}", f"{np.mean(np.abs(np.array(values) - 1) > 0.2):.4f}")
            writer.writerow(row)
            print(*row, sep="  ")
            axis.hist(values, bins=60, range=(0.5, 1.5), alpha=0.6, label=f"{name}: std {row[1]}")
    axis.set(
        title="first ratio of an update, bf16, completions of 24 tokens",
        xlabel="π_new / π_old",
        yscale="log",
        ylabel="completions",
    )
    axis.legend()
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Args))
