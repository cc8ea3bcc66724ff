"""Run a transformer on padded sequences without computing the padding."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from machinery.cli import InputError, say_once

ONE_TOKEN = {"cuda"}  # where products are faster than SDPA's kernels for masks
NAME = "unpadded"  # under which the library knows our attention function


class Unpadded:
    """A transformer called as `run(input_ids, mask, position_ids)` → hidden states [B, T, D].

    It sees the real tokens of a batch as one flat sequence; its attention keeps sequences apart.
    Results at real tokens equal the plain call's; those at padding are arbitrary.
    With `prompt_length=n`, the first n columns are computed once for neighbors that share them.
    `cache`: the transformer's argument for a `KeyValueCache` to fill; the mask may be as wide.
    """

    def __init__(self, backbone: Any, **cache: Any):
        self.backbone, self.cache = backbone, cache

    def __call__(
        self, input_ids: Tensor, mask: Tensor, position_ids: Tensor, prompt_length: int = 0
    ) -> Tensor:
        inputs = dict(attention_mask=mask, use_cache=bool(self.cache), **self.cache)
        mask = mask[:, : input_ids.shape[1]]
        longest, n = getattr(self.backbone, "max_unpadded", None), prompt_length
        rows = torch.arange(len(mask), device=mask.device)
        prompts = input_ids.masked_fill(~mask, -1)[:, :n]
        is_new = pad((prompts[1:] != prompts[:-1]).any(dim=1), (1, 0), value=True)
        owners = (rows * is_new).cummax(dim=0).values  # [B]: the row that computes the prompt
        computed = mask.clone()
        computed[:, :n] &= (owners == rows)[:, None]
        index = computed.flatten().cumsum(dim=0).view(mask.shape).sub(1).clamp(min=0)
        index[:, :n] = index[owners, :n]  # [B, T]: where each token is in the flat sequence
        counts = torch.stack([computed.sum(dim=1), mask.sum(dim=1)])  # [2, B]: computed, seen
        bounds = pad(counts.cumsum(dim=1), (1, 0)).int()  # [2, B + 1]
        lengths, seen = counts.tolist()  # waits for the device; nothing else here does
        if not longest or max(seen) > longest:
            if longest is not None:  # else `set_unpadding` is still to come
                which = f"sequences above {longest} tokens" if longest else "all sequences"
                say_once(f"padding is computed for {self.backbone.config.model_type}, in {which}")
            return self.backbone(input_ids, position_ids=position_ids, **inputs).last_hidden_state
        inputs["attention_mask"] = mask.new_ones(1, 1, 1, 1)  # 4D: the library passes it on
        shared = select(index, mask, sum(seen)) if sum(seen) > sum(lengths) else None
        inputs["plan"] = lengths, seen, [], (*bounds, max(lengths), max(seen)), shared
        ids, positions = (select(x, computed, sum(lengths)) for x in (input_ids, position_ids))
        for cache in self.cache.values():
            cache.index = index
        outputs = self.backbone(ids[None], position_ids=positions[None], **inputs)
        hidden = outputs.last_hidden_state.squeeze(0)  # `[0]` would copy in the backward pass
        return hidden.index_select(0, index.flatten()).view(*mask.shape, -1)


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
    module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, plan: Any = None, **rest: Any
) -> tuple[Tensor, None]:
    """The library's `sdpa`; with a `plan`, that of each sequence of a flat batch.

    q, k, v [1, heads, U, features] → [1, U, heads, features]. `plan`: how many tokens each sequence
    has, how many it sees, their masks, which the first layer makes for all, inputs of `varlen_attn`,
    and the indices [S] of all tokens that are seen, if prompts are shared.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

    if plan is None:
        is_bool = attention_mask is None or attention_mask.dtype == torch.bool
        if q.device.type in ONE_TOKEN and q.shape[2] == 1 and is_bool and rest.get("scaling"):
            return attend_once(q, k, v, attention_mask, rest["scaling"]), None
        return sdpa(module, q, k, v, attention_mask, **rest)
    if attention_mask.numel() > 1:  # it is not the one that `Unpadded` passed
        raise InputError("makes attention masks of its own")
    lengths, seen, masks, of_kernel, index = plan
    if index is not None:  # prompts are shared
        k, v = (x.index_select(2, index) for x in (k, v))  # [1, heads, S, features]
    if can_use_varlen(k, v):
        from torch.nn.attention.varlen import varlen_attn

        if (heads := q.shape[1] // k.shape[1]) > 1:  # torch 2.11 does not know groups
            k, v = (x.repeat_interleave(heads, dim=1) for x in (k, v))
        # Autocast does not cast here; rotary embeddings leave queries and keys in fp32.
        flat: Any = (x.squeeze(0).transpose(0, 1).to(v.dtype) for x in (q, k, v))
        causal: Any = dict(window_size=(-1, 0), scale=rest.get("scaling"))
        output: Any = varlen_attn(*flat, *of_kernel, **causal)
        return output[None], None
    if not masks:
        for n, m in zip(lengths, seen, strict=True):  # the first m - n are a prompt's
            masks.append(None if n == m else q.new_ones(1, 1, n, m).bool().tril(m - n))
    parts = zip(q.split(lengths, 2), k.split(seen, 2), v.split(seen, 2), masks, strict=True)
    outputs = [sdpa(module, *part, **rest)[0] for part in parts if part[0].shape[2]]
    return torch.cat(outputs, dim=1), None


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
