"""Run a transformer on padded sequences without computing the padding."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from machinery.cli import InputError, say_once

ONE_TOKEN = {"cuda"}  # where products are faster than SDPA's kernels for masks
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
            which = f"sequences above {longest} tokens" if longest else "all sequences"
            say_once(f"padding is computed for {backbone.config.model_type}, in {which}")
        return backbone(input_ids, position_ids=position_ids, **inputs).last_hidden_state
    shared = None  # where the tokens are that each sequence sees, if prompts are shared
    if sum(seen) > sum(lengths):
        shared = select(index, mask, sum(seen))
    inputs["attention_mask"] = mask.new_ones(1, 1, 1, 1)  # 4D: the library passes it on
    inputs["plan"] = Plan(lengths, seen, [], (*bounds, max(lengths), max(seen)), shared)
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
    is_new = (prompts[1:] != prompts[:-1]).any(dim=1)
    is_new = pad(is_new, (1, 0), value=True)
    owners = (rows * is_new).cummax(dim=0).values  # [B]: the row that computes the prompt
    computed = mask.clone()
    computed[:, :n] &= (owners == rows)[:, None]
    index = computed.flatten().cumsum(dim=0).view(mask.shape) - 1
    index = index.clamp(min=0)
    index[:, :n] = index[owners, :n]
    return computed, index


class Plan(NamedTuple):
    """How attention keeps the sequences of a flat batch apart."""

    lengths: list[int]  # [B] tokens that each sequence has in the batch
    seen: list[int]  # [B] tokens that it sees: those of a shared prompt, too
    masks: list  # [B] which the first layer makes for all
    of_kernel: tuple  # inputs of `varlen_attn`
    shared: Tensor | None  # [S]: where the tokens are that are seen, if prompts are shared


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

    config, names = backbone.config, ("window", "window_size", "chunk_size")
    found = [x for name, x in config.to_dict().items() if name.endswith(names)]
    window = min([x for x in found if type(x) is int and x > 0], default=longest)
    fits = config._attn_implementation in ("sdpa", NAME) and backbone.is_backend_compatible()
    fits = fits and window >= longest and not hasattr(config, "index_topk")
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
        is_bool = attention_mask is None or attention_mask.dtype == torch.bool
        if q.device.type in ONE_TOKEN and q.shape[2] == 1 and is_bool and rest.get("scaling"):
            return attend_once(q, k, v, attention_mask, rest["scaling"]), None
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
    if not plan.masks:
        plan.masks.extend(causal_masks(q, plan.lengths, plan.seen))
    queries = q.split(plan.lengths, dim=2)
    keys = k.split(plan.seen, dim=2)
    values = v.split(plan.seen, dim=2)
    outputs = []
    for i, length in enumerate(plan.lengths):
        if length > 0:
            output, _ = sdpa(module, queries[i], keys[i], values[i], plan.masks[i], **rest)
            outputs.append(output)
    return torch.cat(outputs, dim=1), None


def causal_masks(q: Tensor, lengths: list[int], seen: list[int]) -> list[Tensor | None]:
    """A mask for each sequence; None, if it sees only its own tokens: `sdpa` is causal then."""
    masks: list[Tensor | None] = []
    for n, m in zip(lengths, seen, strict=True):  # the first m - n tokens are a prompt's
        mask = None
        if n != m:
            mask = q.new_ones(1, 1, n, m).bool().tril(m - n)
        masks.append(mask)
    return masks


def attend_once(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of one new token: [B, heads, 1, features] → [B, 1, heads, features].

    k, v [B, groups, columns, features]; mask [B, 1, 1, columns], True at real tokens.
    """
    queries = (q * scale).to(v.dtype).view(len(q), k.shape[1], -1, q.shape[-1])
    scores = queries @ k.to(v.dtype).transpose(2, 3)  # [B, groups, heads that share keys, columns]
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    output = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v
    return output.view(*q.shape[:3], -1).transpose(1, 2)


def can_use_varlen(key: Tensor, value: Tensor) -> bool:
    """Whether torch's `varlen_attn` takes these: one kernel for all sequences."""
    fits = key.shape == value.shape and value.shape[-1] in range(8, 257, 8)
    fits = fits and value.dtype == torch.bfloat16 and value.is_cuda
    fits = fits and torch.backends.cuda.is_flash_attention_available()
    return fits and torch.cuda.get_device_capability() >= (8, 0)
