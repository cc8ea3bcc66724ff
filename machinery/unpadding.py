"""Run a transformer on padded sequences without computing the padding.

`Unpadded(backbone)` has the signature and the results of the transformer itself. The transformer
sees the real tokens of a batch as one flat sequence; its attention keeps the sequences apart.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from machinery.cli import say

NAME = "unpadded"  # of our attention function in the library
MAX_PARTS = 8  # more of them leave less padding in attention, and take more kernels
say_once = cache(say)


class Unpadded:
    """A transformer called as `run(input_ids, attention_mask, position_ids)` → hidden [B, T, D].

    Results at real tokens equal the plain call's; those at padding are arbitrary.
    `prompt_length=n`: neighboring sequences whose first n columns are equal compute them once.
    Models that need the padding are called as they are, and the run says so.
    """

    def __init__(self, backbone: Any):
        self.backbone = backbone

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        prompt_length: int = 0,
    ) -> Tensor:
        inputs = self.backbone, input_ids, attention_mask, position_ids
        longest = find_max_length(self.backbone)
        if input_ids.shape[1] <= longest:
            return run_unpadded(*inputs, prompt_length)
        if longest:
            say_once(f"padding is computed: some attention reaches only {longest} tokens")
        return run_plain(*inputs)


def run_plain(backbone: Any, input_ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
    """Hidden states [B, T, D] of the padded batch."""
    inputs = dict(attention_mask=mask, position_ids=position_ids, use_cache=False)
    return backbone(input_ids, **inputs).last_hidden_state


def run_unpadded(
    backbone: Any, input_ids: Tensor, mask: Tensor, position_ids: Tensor, prompt_length: int = 0
) -> Tensor:
    """Hidden states [B, T, D], computed from the U real tokens as one sequence [1, U]."""
    real, n, device = mask.bool(), prompt_length, mask.device
    first = torch.ones_like(real[:, 0])  # whether the prompt differs from the one before
    if n:
        prompts = input_ids.masked_fill(~real, -1)[:, :n]
        first[1:] = (prompts[1:] != prompts[:-1]).any(dim=1)
    table = torch.stack([first.long(), real[:, :n].sum(dim=1), real[:, n:].sum(dim=1)])
    is_first, of_prompts, own = table.cpu().numpy()  # waits for the device
    num_prompts, lengths = 0, of_prompts + own
    if not is_first.all():  # G prompts become sequences of their own, before all others
        num_prompts, lengths = is_first.sum(), np.concatenate([of_prompts[is_first > 0], own])
        rows = first.nonzero_static(size=num_prompts).squeeze(1)
        in_prompt = torch.arange(real.shape[1], device=device) < n
        real = torch.cat([real[rows] & in_prompt, real & ~in_prompt])  # [G + B, T]
        input_ids, position_ids = (torch.cat([x[rows], x]) for x in (input_ids, position_ids))
    starts, parts = make_parts(lengths, is_first.cumsum() - 1, num_prompts, device)
    where = real.flatten().nonzero_static(size=lengths.sum()).squeeze(1)  # [U]
    slots = (starts[:, None] + real.cumsum(dim=1) - 1).flatten()[where]
    inputs = dict(attention_mask=real.new_ones(1, 1, 1, 1), use_cache=False)  # no mask is made
    flat_ids, flat_positions = (x.flatten()[where][None] for x in (input_ids, position_ids))
    output = backbone(flat_ids, position_ids=flat_positions, unpadding=(slots, parts), **inputs)
    flat = output.last_hidden_state[0]
    hidden = flat.new_zeros(real.numel(), flat.shape[1]).index_copy_(0, where, flat)
    hidden = hidden.view(*real.shape, -1)
    if num_prompts:
        prompts = hidden[:, :n].index_select(0, first.cumsum(dim=0) - 1)
        hidden = torch.cat([prompts, hidden[num_prompts:, n:]], dim=1)
    return hidden


class Part(NamedTuple):
    """Sequences of similar length, which attention pads at the right and computes together."""

    rows: int
    width: int
    prompts: Tensor | None = None  # [rows], the prompt that each of them follows
    mask: Tensor | None = None  # [rows, 1, width, P + width] if they follow prompts


def make_parts(
    lengths: np.ndarray, groups: np.ndarray, num_prompts: int, device: torch.device
) -> tuple[Tensor, list[Part]]:
    """Where each sequence starts when the padded parts are laid end to end, and the parts.

    `lengths` [G + B] are those of G prompts, which form the first part, then of B sequences.
    `groups` [B] are the prompts that these follow.
    """
    order = num_prompts + lengths[num_prompts:].argsort(kind="stable")
    splits = np.array_split(order, min(MAX_PARTS, len(order)))
    starts, end = np.zeros_like(lengths), 0
    parts: list[Part] = []
    for rows in [np.arange(num_prompts), *splits] if num_prompts else splits:
        width = max(1, lengths[rows].max())
        starts[rows] = end + width * np.arange(len(rows))
        end += width * len(rows)
        part = Part(len(rows), width)
        if num_prompts and parts:
            of_rows = groups[rows - num_prompts]
            table = torch.as_tensor(np.stack([of_rows, lengths[of_rows]]))
            prompts, prompt_lengths = table.to(device, non_blocking=True)
            columns = torch.arange(parts[0].width + width, device=device)
            sees_own = columns - columns[:width, None] <= parts[0].width
            sees_own &= columns >= parts[0].width
            mask = (columns < prompt_lengths[:, None, None]) | sees_own
            part = Part(len(rows), width, prompts, mask[:, None])
        parts.append(part)
    return torch.as_tensor(starts).to(device, non_blocking=True), parts


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    unpadding: tuple[Tensor, list[Part]] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The library's `sdpa`; of one part after the other if the tokens are without padding."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if unpadding is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    slots, parts = unpadding
    sizes = [part.rows * part.width for part in parts]

    def pad(x: Tensor) -> tuple[Tensor, ...]:
        """[1, heads, U, features] → of each part [rows * width, heads, features]."""
        x = x[0].transpose(0, 1)
        return x.new_zeros(sum(sizes), *x.shape[1:]).index_copy_(0, slots, x).split(sizes)

    outputs = []
    for part, *qkv in zip(parts, pad(query), pad(key), pad(value), strict=True):
        q, k, v = (x.unflatten(0, (part.rows, part.width)).transpose(1, 2) for x in qkv)
        if part.prompts is None:
            prompt_k, prompt_v = k, v
        else:
            k = torch.cat([prompt_k.index_select(0, part.prompts), k], dim=2)
            v = torch.cat([prompt_v.index_select(0, part.prompts), v], dim=2)
        output, _ = sdpa_attention_forward(module, q, k, v, part.mask, **options)
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs).index_select(0, slots)[None], None


@cache
def register_attention() -> None:
    """Give the library our attention function, and `sdpa`'s masks for calls with padding."""
    from transformers import AttentionInterface  # takes two seconds to import
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def find_max_length(backbone: Any) -> float:
    """The longest sequences for which `run_unpadded` equals `run_plain`; 0 if it never does.

    Attention other than the library's `sdpa` (Falcon's, Gemma 2's) and layers without attention
    need the padding. Windows have to be as wide as the sequences. Tried once, with fp32 weights.
    """
    if hasattr(backbone, "max_unpadded"):
        return backbone.max_unpadded
    config, reason = backbone.config, "its attention is not the library's sdpa"
    if config._attn_implementation == "sdpa" and backbone.is_backend_compatible():
        register_attention()
        backbone.set_attn_implementation(NAME)
        if not is_equal(backbone):
            backbone.set_attn_implementation("sdpa")
            reason = "without it the hidden states would differ"
    if config._attn_implementation != NAME:
        say_once(f"padding is computed: {config.model_type}: {reason}")
        backbone.max_unpadded = 0
        return 0
    ends = "window", "window_size", "chunk_size"
    found = [x for name, x in config.to_dict().items() if name.endswith(ends)]
    windows = [x for x in found if type(x) is int and x]  # 0: no window
    backbone.max_unpadded = min(windows, default=math.inf)
    return backbone.max_unpadded


@torch.no_grad()
def is_equal(backbone: Any) -> bool:
    """Whether four sequences with two prompts have the same hidden states without padding."""
    input_ids = torch.arange(32, device=backbone.device).view(4, 8) % backbone.config.vocab_size
    input_ids[1::2, :4] = input_ids[::2, :4]
    mask = torch.ones_like(input_ids, dtype=torch.bool)
    mask[0, 6:] = mask[1, 5] = mask[2:, 0] = mask[3, 7] = False
    inputs = backbone, input_ids, mask, mask.cumsum(dim=1) - mask.long()
    training = backbone.training
    backbone.eval()
    with torch.autocast(backbone.device.type, enabled=False):
        plain = run_plain(*inputs)[mask].float()
        others = [run_unpadded(*inputs, n)[mask].float() for n in (0, 4)]
    backbone.train(training)
    return all((x - plain).norm() < 0.01 * plain.norm() for x in others)
