"""Run a transformer on padded sequences without computing the padding.

`Unpadded(backbone)` has the signature and the results of the transformer itself. The transformer
sees the real tokens of a batch as one flat sequence; its attention keeps the sequences apart.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from machinery.cli import say

NAME = "unpadded"  # of our attention function in the library
say_once = cache(say)


class Unpadded:
    """A transformer called as `run(input_ids, mask, position_ids)` → hidden states [B, T, D].

    Results at real tokens equal the plain call's; those at padding are arbitrary.
    `prompt_length=n`: neighboring sequences whose first n columns are equal compute them once.
    Padding is computed in batches that are wider than `set_unpadding` allows.
    """

    def __init__(self, backbone: Any):
        self.backbone = backbone

    def __call__(
        self, input_ids: Tensor, mask: Tensor, position_ids: Tensor, prompt_length: int = 0
    ) -> Tensor:
        longest, n = getattr(self.backbone, "max_unpadded", 0), prompt_length
        inputs: dict[str, Any] = dict(use_cache=False)
        if input_ids.shape[1] > longest:
            if longest:
                say_once(f"padding is computed: batches have more than {longest} columns")
            inputs |= dict(attention_mask=mask, position_ids=position_ids)
            return self.backbone(input_ids, **inputs).last_hidden_state
        computed, owners = mask.clone(), torch.arange(len(mask), device=mask.device)
        if n:  # the first sequence that has a prompt computes it
            rows, prompts = owners.clone(), input_ids.masked_fill(~mask, -1)[:, :n]
            owners[1:].masked_fill_((prompts[1:] == prompts[:-1]).all(dim=1), 0)
            owners = owners.cummax(dim=0).values  # [B]
            computed[:, :n] &= (owners == rows)[:, None]
        counts = torch.stack([computed.sum(dim=1), mask.sum(dim=1)])  # [2, B]
        bounds = nn.functional.pad(counts.cumsum(dim=1), (1, 0)).int()  # [2, B + 1]
        lengths, seen = counts.tolist()  # waits for the device
        where = computed.flatten().nonzero_static(size=sum(lengths)).squeeze(1)  # [U]
        inputs["attention_mask"] = mask.new_ones(1, 1, 1, 1)  # 4D: the library makes none
        inputs["unpadding"] = lengths, seen, bounds  # passed on to `attention`
        flat_ids, flat_positions = (x.flatten()[where][None] for x in (input_ids, position_ids))
        flat = self.backbone(flat_ids, position_ids=flat_positions, **inputs).last_hidden_state[0]
        hidden = flat.new_zeros(mask.numel(), flat.shape[1]).index_copy_(0, where, flat)
        hidden = hidden.view(*mask.shape, -1)
        if n:
            hidden = torch.cat([hidden[:, :n].index_select(0, owners), hidden[:, n:]], dim=1)
        return hidden


def set_unpadding(backbone: Any, longest: int) -> None:
    """Let batches of up to `longest` columns be computed without padding; 0: none.

    The caller has to check the results, and calls this again with 0 if they are wrong. Attention
    other than the library's `sdpa`, as Falcon's, computes padding in any case.
    """
    from transformers import AttentionInterface  # takes two seconds to import
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    config, ends = backbone.config, ("window", "window_size", "chunk_size")
    found = [x for name, x in config.to_dict().items() if name.endswith(ends)]
    windows = [x for x in found if type(x) is int and x]  # 0: no window
    fits = config._attn_implementation in ("sdpa", NAME) and backbone.is_backend_compatible()
    if not fits or min(windows, default=longest) < longest:
        longest = 0
    backbone.max_unpadded = longest
    if fits:
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls with padding
        backbone.set_attn_implementation(NAME if longest else "sdpa")
    if not longest:
        say_once(f"padding is computed: {config.model_type} needs it")


def attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, unpadding: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """The library's `sdpa`; of each sequence by itself if the batch is flat.

    [1, heads, U, features] each → [1, U, heads, features]. `unpadding`: how many tokens each
    sequence has, how many it sees, and where both begin.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

    if unpadding is None:
        return sdpa(module, q, k, v, mask, **options)
    lengths, seen, bounds = unpadding
    queries, keys, values = q.split(lengths, dim=2), see(k, lengths, seen), see(v, lengths, seen)
    if can_use_varlen(v):
        from torch.nn.attention.varlen import varlen_attn

        # Autocast does not cast here, and rotary embeddings leave queries and keys in fp32.
        flat = (torch.cat(x, dim=2)[0].transpose(0, 1) for x in (queries, keys, values))
        inputs: Any = *(x.to(v.dtype) for x in flat), *bounds, max(lengths), max(seen)
        causal: Any = dict(window_size=(-1, 0), scale=options.get("scaling"), enable_gqa=True)
        output: Any = varlen_attn(*inputs, **causal)
        return output[None], None
    outputs = []
    for q, k, v in zip(queries, keys, values, strict=True):
        size, n = q.shape[2], k.shape[2] - q.shape[2]  # n: the prompt's
        mask = q.new_ones(1, 1, size, n + size, dtype=torch.bool).tril(n) if n else None
        if size:
            outputs.append(sdpa(module, q, k, v, mask, **options)[0])
    return torch.cat(outputs, dim=1), None


def see(x: Tensor, lengths: list[int], seen: list[int]) -> list[Tensor]:
    """Keys or values [1, heads, U, features] of what each sequence sees.

    One that sees n more tokens than it has sees the first n of its prompt: of the last sequence
    before it that sees only its own.
    """
    found = []
    for own, total in zip(x.split(lengths, dim=2), seen, strict=True):
        n = total - own.shape[2]
        if n == 0:
            prompt = own
        found.append(torch.cat([prompt[:, :, :n], own], dim=2) if n else own)
    return found


def can_use_varlen(value: Tensor) -> bool:
    """Whether torch's flash attention for flat batches takes these values: one kernel for all."""
    fits = value.dtype == torch.bfloat16 and value.shape[-1] in range(8, 257, 8)
    return fits and value.is_cuda and torch.cuda.get_device_capability() >= (8, 0)
