"""Run a transformer on padded sequences without computing the padding.

`Unpadded(backbone)` has the signature and the results of the transformer itself. The transformer
sees the real tokens of a batch as one flat sequence; its attention keeps the sequences apart.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from machinery.cli import say

NAME = "unpadded"  # of our attention function in the library
VARLEN = ("cuda", torch.bfloat16), ("cuda", torch.float16)  # where `varlen_attn` is tried
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


class Layout(NamedTuple):
    """Where the sequences of a flat batch are, end to end, and which tokens they see.

    A sequence that shares n > 0 tokens sees, before its own, the first n of the last sequence
    that shares none: its prompt.
    """

    lengths: list[int]
    shared: list[int]
    keys: Tensor  # [K], the tokens that sequences see, of one after the other
    bounds: Tensor  # [2, B + 1], where sequences begin among the queries and among the keys


def run_unpadded(
    backbone: Any, input_ids: Tensor, mask: Tensor, position_ids: Tensor, prompt_length: int = 0
) -> Tensor:
    """Hidden states [B, T, D], computed from the U real tokens as one sequence [1, U]."""
    real, n = mask.bool(), prompt_length
    rows, columns = (torch.arange(size, device=mask.device) for size in real.shape)
    owners = rows.clone()  # [B], the sequence that computes the prompt: the first that has it
    if n:
        prompts = input_ids.masked_fill(~real, -1)[:, :n]
        owners[1:].masked_fill_((prompts[1:] == prompts[:-1]).all(dim=1), 0)
        owners = owners.cummax(dim=0).values
    repeated = real & (columns < n) & (owners != rows)[:, None]
    computed = real & ~repeated
    counts = torch.stack([computed.sum(dim=1), repeated.sum(dim=1)])  # [2, B]
    lengths, shared = counts.tolist()  # waits for the device
    where = computed.flatten().nonzero_static(size=sum(lengths)).squeeze(1)  # [U]
    places = (computed.flatten().cumsum(dim=0) - 1).view(real.shape)  # [B, T], in the flat batch
    places = torch.cat([places[owners, :n], places[:, n:]], dim=1)
    seen = real.flatten().nonzero_static(size=sum(lengths) + sum(shared)).squeeze(1)
    bounds = nn.functional.pad(counts.cumsum(dim=0).cumsum(dim=1), (1, 0)).int()
    layout = Layout(lengths, shared, places.flatten()[seen], bounds)
    inputs: dict[str, Any] = dict(unpadding=layout, use_cache=False)
    inputs["attention_mask"] = real.new_ones(1, 1, 1, 1)  # 4D: the library makes none
    flat_ids, flat_positions = (x.flatten()[where][None] for x in (input_ids, position_ids))
    flat = backbone(flat_ids, position_ids=flat_positions, **inputs).last_hidden_state[0]
    hidden = flat.new_zeros(real.numel(), flat.shape[1]).index_copy_(0, where, flat)
    hidden = hidden.view(*real.shape, -1)
    if any(shared):
        hidden = torch.cat([hidden[:, :n].index_select(0, owners), hidden[:, n:]], dim=1)
    return hidden


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    unpadding: Layout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The library's `sdpa`; of one sequence after the other if the batch is flat.

    [1, heads, U, features] each → [1, U, heads, features].
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if unpadding is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    if can_use_varlen(module, unpadding, query, key, value, **options):
        return varlen_attention(unpadding, query, key, value, **options), None
    outputs = []
    qkv = (x.split(unpadding.lengths, dim=2) for x in (query, key, value))
    for q, k, v, n in zip(*qkv, unpadding.shared, strict=True):
        if n == 0:
            prompt_k, prompt_v, mask = k, v, None
        else:
            k = torch.cat([prompt_k[:, :, :n], k], dim=2)
            v = torch.cat([prompt_v[:, :, :n], v], dim=2)
            mask = q.new_ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool).tril(n)
        if q.shape[2]:
            outputs.append(sdpa_attention_forward(module, q, k, v, mask, **options)[0])
    return torch.cat(outputs, dim=1), None


def varlen_attention(
    layout: Layout, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    """The same as one kernel for all sequences of a flat batch: on a GPU, in half precision."""
    from torch.nn.attention.varlen import varlen_attn

    # Autocast does not cast here, and rotary embeddings leave queries and keys in fp32.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    if any(layout.shared):
        k, v = k.index_select(0, layout.keys), v.index_select(0, layout.keys)
    seen = [length + n for length, n in zip(layout.lengths, layout.shared, strict=True)]
    sizes: Any = *layout.bounds, max(layout.lengths), max(seen)
    causal: Any = dict(window_size=(-1, 0), scale=options.get("scaling"), enable_gqa=True)
    output: Any = varlen_attn(q, k, v, *sizes, **causal)
    return output[None]


@torch.no_grad()
def can_use_varlen(
    module: Any, layout: Layout, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> bool:
    """Whether `varlen_attn` gives this layer what SDPA gives. Tried with its first batch."""
    if (value.device.type, value.dtype) not in VARLEN:
        return False
    if not hasattr(module, "can_use_varlen"):
        module.can_use_varlen = False  # so that `attention` calls SDPA
        try:
            expected, _ = attention(module, query, key, value, None, layout, **options)
            found = varlen_attention(layout, query, key, value, **options)
            gap = (found - expected).norm() / expected.norm()
            if not gap < 0.02:
                raise ValueError(f"differs by {gap:.2g}")
            module.can_use_varlen = True
        except Exception as error:
            say_once(f"attention is one SDPA call per sequence: varlen_attn: {error}")
    return module.can_use_varlen


def find_max_length(backbone: Any) -> float:
    """The longest sequences for which `run_unpadded` equals `run_plain`; 0 if it never does.

    Attention other than the library's `sdpa` (Falcon's, Gemma 2's) and layers without attention
    need the padding. Windows have to be as wide as the sequences. Tried once, with fp32 weights.
    """
    from transformers import AttentionInterface  # takes two seconds to import
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    if hasattr(backbone, "max_unpadded"):
        return backbone.max_unpadded
    config = backbone.config
    ends = "window", "window_size", "chunk_size"
    found = [x for name, x in config.to_dict().items() if name.endswith(ends)]
    windows = [x for x in found if type(x) is int and x]  # 0: no window
    backbone.max_unpadded = min(windows, default=math.inf)
    if config._attn_implementation == "sdpa" and backbone.is_backend_compatible():
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls with padding
        backbone.set_attn_implementation(NAME)
        if is_equal(backbone):
            return backbone.max_unpadded
        backbone.set_attn_implementation("sdpa")
    say_once(f"padding is computed: {config.model_type} gives other results without it")
    backbone.max_unpadded = 0
    return 0


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
