"""What half precision does to log-probabilities: the first ratio of an update, and errors.

    python sft.py --task synthetic && python benchmarks/bf16_ratio.py

Before the first step pi_new / pi_old should be 1 for each response (L6). Old log-probabilities come
from the sampling loop (a token at a time, with a cache) or from the training forward pass; new ones
from the latter. Under bf16 and fp16 autocast, with the language model's head in fp32 (ours) or
under autocast, too, and with all logits moved to -70, where GPT-2's really are and bf16 has steps
of 0.5. Writes bf16_ratio.csv and a picture of the first ratio.
"""

import copy
import csv
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import rloo  # noqa: E402
from benchmarks import curves  # noqa: E402
from data.tasks import TASKS  # noqa: E402
from machinery.data import load_queries  # noqa: E402
from machinery.decoding import Decoder  # noqa: E402
from machinery.models import load_lm, load_tokenizer  # noqa: E402
from machinery.packing import run_plain  # noqa: E402
from machinery.plots import pyplot  # noqa: E402
from utils import generator  # noqa: E402

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
COLUMNS = ("precision", "head", "offset", "ratio std, sampling loop", "outside 1 ± 0.2")
COLUMNS += ("ratio std, forward", "log π std")


@dataclass(frozen=True)
class Args:
    """What half precision does to log-probabilities."""

    out: Path = Path(__file__).with_suffix(".png")
    """picture to write; the CSV is beside it"""
    model: str = "models/synthetic/sft"
    """a GPT-2"""
    responses: int = 256
    """number of responses"""


class AutocastLinear(nn.Linear):
    """A head whose logits are computed under autocast, and then cast to fp32."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


def sampling_loop(lm: nn.Module, contexts: Tensor, responses: Tensor, policy: Any) -> Tensor:
    """Log-probabilities [B, R] of given responses, from the calls that `rloo.sample` makes."""
    length, found = responses.shape[1], []
    decoder, cache = Decoder(lm, length), None
    mask = contexts != policy.pad_id
    position_ids = mask.cumsum(dim=1) - mask.long()
    tokens = contexts.masked_fill(~mask, 0)
    for t in range(length):
        output = decoder(tokens, mask, position_ids, past_key_values=cache)
        cache, tokens = output.past_key_values, responses[:, t : t + 1]
        logps = (output.logits[:, -1].float() / policy.temperature).log_softmax(dim=-1)
        found.append(logps.gather(1, tokens))
        mask = nn.functional.pad(mask, (0, 1), value=True)
        position_ids = position_ids[:, -1:] + 1
    return torch.cat(found, dim=1)


def move_logits(lm: nn.Module, contexts: Tensor, pad_id: int, offset: float) -> nn.Module:
    """A GPT-2 with the same probabilities whose logits are all moved by about `offset`.

    A direction that all hidden states have in common is added to the tied embedding, and subtracted
    from the position embedding, so that the input stays the same.
    """
    lm = copy.deepcopy(lm)
    mask = contexts != pad_id
    inputs = contexts.masked_fill(~mask, 0), mask, mask.cumsum(dim=1) - mask.long()
    hidden = run_plain(lm.base_model, *inputs)[mask].double()
    target = torch.full((len(hidden), 1), offset, dtype=torch.float64)
    direction = torch.linalg.lstsq(hidden, target).solution[:, 0].float()
    lm.transformer.wte.weight.add_(direction)
    lm.transformer.wpe.weight.sub_(direction)
    return lm


@torch.no_grad()
def main(args: Args) -> None:
    """Measure, write, print, draw."""
    task = replace(TASKS["synthetic"], base_model=args.model)
    tokenizer, ids = load_tokenizer(task, task.response_length)
    table = load_queries(task, tokenizer, ids, max_queries=args.responses)
    contexts, settings = table[: args.responses], rloo.Args(task=task)
    original = load_lm(args.model).eval()
    rng = generator(1, 0, contexts.device)
    decoder = Decoder(original, task.response_length)
    responses = rloo.sample_in_batches(decoder, contexts, ids, settings, rng)
    rows, ratios = [COLUMNS], {}
    for offset in (0, -70):
        lm = move_logits(original, contexts, ids.pad, offset)
        exact, _ = rloo.Policy(lm, ids.pad, task.temperature)(contexts, responses)
        for precision, dtype in PRECISIONS.items():
            for head in ("fp32", precision) if dtype else ("fp32",):
                model = copy.deepcopy(lm)
                if head != "fp32":
                    model.get_output_embeddings().__class__ = AutocastLinear
                policy = rloo.Policy(model, ids.pad, task.temperature)
                with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                    new, again = (policy(contexts, responses)[0] for _ in range(2))
                    old = sampling_loop(model, contexts, responses, policy)
                loop, forward = ((new - x).sum(dim=1).exp().numpy() for x in (old, again))
                error = (new - exact).sum(dim=1).std().item()
                outside = np.mean(np.abs(loop - 1) > 0.2)
                values = loop.std(), outside, forward.std(), error
                rows.append((precision, head, offset, *(f"{x:.5f}" for x in values)))
                ratios[f"{precision}, logits at {offset}, head {head}"] = loop
    with open(args.out.with_suffix(".csv"), "w", newline="") as file:
        names, values = zip(*curves.provenance().items(), strict=True)
        csv.writer(file).writerows([rows[0] + names, *(row + values for row in rows[1:])])
    print(args.out.with_suffix(".csv").read_text())
    figure, axis = pyplot().subplots(figsize=(7, 3.8), layout="constrained")
    for name, values in ratios.items():
        if name.startswith("bf16"):
            outside = int(((values < 0.5) | (values > 1.5)).sum())
            label = f"{name}: std {values.std():.3f}, {outside} of {len(values)} not shown"
            axis.hist(values, bins=60, range=(0.5, 1.5), alpha=0.5, label=label)
    axis.set(title="first ratio of an update in bf16, old log-probabilities from the sampling loop")
    axis.set(xlabel="π_new / π_old", yscale="log", ylabel="responses")
    axis.title.set_size(9)
    axis.legend(fontsize=8)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Args))
