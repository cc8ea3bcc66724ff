"""What half precision does to log-probabilities: the first ratio of an update, and the error of log π.

    python sft.py --task synthetic && python benchmarks/bf16_ratio.py

Before any step π_new / π_old should be 1 for every completion (L6). Old log-probabilities from the sampling loop (KV cache, a
token at a time) against old ones from the training forward; and log π of completions against fp32. Under bf16 and fp16
autocast, with the vocabulary head in fp32 (ours) or under autocast too, and with all logits moved to −70, where GPT-2's really
stand and bf16 steps by 0.5. Prints a table, writes it as CSV, draws the first ratio.
"""

import copy
import csv
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import packing
import records  # noqa: E402
import rloo  # noqa: E402
import utils  # noqa: E402
from tasks import TASKS  # noqa: E402

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Args:
    """What half precision does to log-probabilities."""

    out: Path = Path(__file__).with_suffix(".png")
    """picture to write; a CSV beside it"""
    model: str = "models/synthetic/sft"
    """policy, a GPT-2"""
    completions: int = 256
    """completions to look at"""
    batch_size: int = 64
    """sequences per forward"""


def replay(lm: nn.Module, contexts: Tensor, responses: Tensor, temperature: float, pad_id: int) -> Tensor:
    """Log-probabilities [B, R] as the sampling loop sees them: one token a step over a KV cache."""
    inputs = packing.model_inputs(torch.cat([contexts, responses], dim=1), pad_id)
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
        out.append(rloo.token_logprobs(step.logits[:, -1:], responses[:, t : t + 1], temperature)[0])
    return torch.cat(out, dim=1)


def move_logits(lm: nn.Module, tokens: Tensor, pad_id: int, offset: float) -> nn.Module:
    """A GPT-2 whose logits all stand at about `offset` more, with the same probabilities: a direction u that all hidden
    states share is added to the tied embedding, and taken from the positions, so that the input stays what it was."""
    lm = copy.deepcopy(lm)
    hidden = lm.base_model(**packing.model_inputs(tokens, pad_id), use_cache=False).last_hidden_state[tokens != pad_id]
    u = torch.linalg.lstsq(hidden.double(), torch.full((len(hidden), 1), offset).double()).solution[:, 0].float()
    lm.transformer.wte.weight.add_(u)
    lm.transformer.wpe.weight.sub_(u)
    return lm


@torch.no_grad()
def main(args: Args) -> None:
    """Measure, print, draw."""
    task = TASKS["synthetic"]
    tokenizer, _, pad_id = utils.load_tokenizer(replace(task, base_model=args.model), task.response_length)
    queries = utils.load_queries(task, tokenizer, pad_id, args.completions)[: args.completions]
    plain, gen = utils.load_lm(args.model).eval(), utils.generator(1, 0, queries.device)
    responses = rloo.sample_all(plain, queries, task, utils.Ids(pad_id, None, [], []), gen, args.batch_size)
    parts = packing.by_length(packing.row_lengths(queries, pad_id), args.batch_size)
    parts = [(queries[rows, -width:], responses[rows]) for rows, width in parts]
    rows, shown = [], {}
    for offset in (0.0, -70.0):
        lm = move_logits(plain, torch.cat([queries, responses], dim=1), pad_id, offset) if offset else plain
        exact = torch.cat([rloo.Policy(lm, pad_id, task.temperature)(*part)[0] for part in parts])
        for precision, dtype in PRECISIONS.items():
            for head in ("fp32", precision) if dtype else ("fp32",):
                model = copy.deepcopy(lm)
                if head != "fp32":
                    model.get_output_embeddings().__class__ = nn.Linear
                policy = rloo.Policy(model, pad_id, task.temperature)
                with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                    new = torch.cat([policy(*part)[0] for part in parts])
                    again = torch.cat([policy(*part)[0] for part in parts])
                    loop = torch.cat([replay(model, *part, task.temperature, pad_id) for part in parts])
                ratios = [(new - old).sum(dim=1).exp().numpy() for old in (loop, again)]
                shown[f"{precision}, logits at {int(offset)}, head {head}"] = ratios[0]
                error = (new - exact).sum(dim=1).std().item()
                outside = np.mean(np.abs(ratios[0] - 1) > 0.2)
                rows.append((precision, head, int(offset), ratios[0].std(), outside, ratios[1].std(), error))
    names = (
        "precision",
        "head",
        "offset",
        "ratio std, sampling loop",
        "outside 1 ± 0.2",
        "ratio std, forward",
        "log π std",
    )
    with open(args.out.with_suffix(".csv"), "w", newline="") as file:
        csv.writer(file).writerows([names, *([*row[:3], *(f"{x:.5f}" for x in row[3:])] for row in rows)])
    print(args.out.with_suffix(".csv").read_text())
    plt = records.pyplot()
    figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for name, values in shown.items():
        if name.startswith("bf16"):
            outside = int(((values < 0.5) | (values > 1.5)).sum())
            label = f"{name}: σ {values.std():.3f}, {outside} of {len(values)} further off"
            axis.hist(values, bins=60, range=(0.5, 1.5), alpha=0.5, label=label)
    title = "first ratio of an update in bf16, old log π from the sampling loop (from the forward it is 1)"
    axis.set(title=title, xlabel="π_new / π_old", yscale="log", ylabel="completions")
    axis.title.set_size(9)
    axis.legend(fontsize=8)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Args))
