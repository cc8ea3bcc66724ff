"""Run a transformer on padded sequences without computing the padding."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from machinery.cli import InputError, say_once

NAME = "unpadded"  # under which the library knows our attention function


def compute_hidden(
    backbone: Any,
    input_ids: Tensor,
    mask: Tensor,
    position_ids: Tensor,
    prompt_length: int = 0,
    **cache: Any,
) -> Tensor:
    """The last hidden states of a transformer, of real tokens only: [B, T] → [B, T, D].

    Equals `backbone(input_ids, attention_mask=mask, position_ids=position_ids).last_hidden_state`
    at real tokens; at padding, results are arbitrary. The transformer sees the real tokens as one
    flat sequence; its attention keeps the sequences of the batch apart.
    With `prompt_length=n`, the first n columns are computed once for neighbors that share them.
    `cache`: the transformer's argument for a `KeyValueCache` to fill; the mask may be as wide.
    """
    inputs = dict(attention_mask=mask, use_cache=bool(cache), **cache)
    mask = mask[:, : input_ids.shape[1]]
    computed, index = share_prompts(input_ids, mask, prompt_length)
    counts = torch.stack([computed.sum(dim=1), mask.sum(dim=1)])  # [2, B]: computed, seen
    bounds = pad(counts.cumsum(dim=1), (1, 0)).int()  # [2, B + 1]
    lengths, seen = counts.tolist()  # waits for the device; nothing else here does
    longest = getattr(backbone, "max_unpadded", None)  # None before `set_unpadding`
    if not longest or max(seen) > longest:
        if longest is not None:
            kind = backbone.config.model_type
            say_once(f"padding is computed for {kind}, in sequences above {longest} tokens")
        return backbone(input_ids, position_ids=position_ids, **inputs).last_hidden_state
    shared = causal = None
    if sum(seen) > sum(lengths):  # prompts are shared
        shared = select(index, mask, sum(seen))
        causal = mask.new_ones(1, 1, max(seen), max(seen)).tril()
    inputs["attention_mask"] = mask.new_ones(1, 1, 1, 1)  # 4D: the library passes it on
    inputs["plan"] = Plan(lengths, seen, (*bounds, max(lengths), max(seen)), shared, causal)
    flat_ids = select(input_ids, computed, sum(lengths))
    flat_positions = select(position_ids, computed, sum(lengths))
    for to_fill in cache.values():
        to_fill.index = index
    outputs = backbone(flat_ids[None], position_ids=flat_positions[None], **inputs)
    hidden = outputs.last_hidden_state.squeeze(0)  # `[0]` would copy in the backward pass
    return hidden.index_select(0, index.flatten()).view(*mask.shape, -1)


def share_prompts(input_ids: Tensor, mask: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Which tokens to compute, if neighbors with the same first n columns share these.

    [B, T] → whether a token is computed [B, T], and where each is in the flat sequence [B, T].
    """
    rows = torch.arange(len(mask), device=mask.device)
    prompts = input_ids.masked_fill(~mask, -1)[:, :n]
    differs = (prompts[1:] != prompts[:-1]).any(dim=1)  # from the one before it
    is_new = pad(differs, (1, 0), value=True)
    owners = (rows * is_new).cummax(dim=0).values  # [B]: the row that computes the prompt
    computed = mask.clone()
    computed[:, :n] &= (owners == rows)[:, None]
    index = computed.flatten().cumsum(dim=0) - 1
    index = index.clamp(min=0).view(mask.shape)
    index[:, :n] = index[owners, :n]
    return computed, index


class Plan(NamedTuple):
    """How attention keeps the sequences of a flat batch apart."""

    lengths: list[int]  # [B] tokens that each sequence has in the batch
    seen: list[int]  # [B] tokens that it sees: those of a shared prompt, too
    of_kernel: tuple  # inputs of `varlen_attn`
    shared: Tensor | None  # [S]: where the tokens are that are seen, if prompts are shared
    causal: Any  # [1, 1, longest, longest]: whether a token sees another, if prompts are shared


def select(x: Tensor, mask: Tensor, count: int) -> Tensor:
    """`x[mask]`, which has `count` elements, without waiting for the device."""
    return x.flatten()[mask.flatten().nonzero_static(size=count).squeeze(1)]


def set_unpadding(backbone: Any, longest: int) -> None:
    """Compute sequences of up to `longest` tokens without padding; 0: always compute padding.

    Callers check the results. With attention other than `sdpa`, as Falcon's, or an indexer, as in
    DeepSeek V3.2, which would choose among the tokens of all sequences, padding is computed.
    """
    from transformers import AttentionInterface  # slow to import
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    config = backbone.config
    fits = config._attn_implementation in ("sdpa", NAME) and backbone.is_backend_compatible()
    fits = fits and not hasattr(config, "index_topk")
    for name, value in config.to_dict().items():
        if name.endswith(("window", "window_size", "chunk_size")) and type(value) is int:
            fits = fits and not 0 < value < longest
    backbone.max_unpadded = longest if fits else 0
    if fits:
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls with padding
        backbone.set_attn_implementation(NAME if longest else "sdpa")


def attention(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Any,
    plan: Plan | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The library's `sdpa`; with a `plan`, that of each sequence of a flat batch.

    q, k, v [1, heads, U, features] → [1, U, heads, features].
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

    if plan is None:
        return sdpa(module, q, k, v, attention_mask, **rest)
    if attention_mask.numel() > 1:  # it is not the one that `compute_hidden` passed
        raise InputError("makes attention masks of its own")
    if plan.shared is not None:
        k = k.index_select(2, plan.shared)  # [1, heads, S, features]
        v = v.index_select(2, plan.shared)
    if can_use_varlen(k, v):
        from torch.nn.attention.varlen import varlen_attn

        heads = q.shape[1] // k.shape[1]  # that share keys; torch 2.11 does not know groups
        if heads > 1:
            k = k.repeat_interleave(heads, dim=1)
            v = v.repeat_interleave(heads, dim=1)
        # Autocast does not cast here; rotary embeddings leave queries and keys in fp32.
        flat: Any = [x.squeeze(0).transpose(0, 1).to(v.dtype) for x in (q, k, v)]
        scale = rest.get("scaling")
        output: Any = varlen_attn(*flat, *plan.of_kernel, window_size=(-1, 0), scale=scale)
        return output[None], None
    queries = q.split(plan.lengths, dim=2)
    keys = k.split(plan.seen, dim=2)
    values = v.split(plan.seen, dim=2)
    outputs = []
    for i, length in enumerate(plan.lengths):
        seen = plan.seen[i]
        mask = None  # with which `sdpa` is causal
        if seen > length:
            mask = plan.causal[:, :, seen - length : seen, :seen]
        if length > 0:
            output, _ = sdpa(module, queries[i], keys[i], values[i], mask, **rest)
            outputs.append(output)
    return torch.cat(outputs, dim=1), None


def can_use_varlen(key: Tensor, value: Tensor) -> bool:
    """Whether torch's `varlen_attn` takes these: one kernel for all sequences."""
    fits = key.shape == value.shape and value.shape[-1] in range(8, 257, 8)
    fits = fits and value.dtype == torch.bfloat16 and value.is_cuda
    fits = fits and torch.backends.cuda.is_flash_attention_available()
    return fits and torch.cuda.get_device_capability() >= (8, 0)
