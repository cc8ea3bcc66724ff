"""Sampling token by token with a static cache, which grows by blocks of columns.

Shapes: `B` sequences, `b` of them still in the batch, `P` distinct prompts, `C` context tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import compare_versions
from torch import Tensor
from tqdm import tqdm
from transformers.cache_utils import StaticCache

from machinery.cli import is_main
from machinery.unpadding import compute_hidden

# A model's argument for the cache, which counts its columns itself:
CACHE = "cache" if compare_versions("transformers", ">=", "5.24") else "past_key_values"
BLOCK = 64  # columns by which the cache grows; kernels prefer multiples of it
MIN_ROWS = 16  # with fewer, fp32 products round differently: tokens depend on others


@torch.no_grad()
def generate(lm: Any, contexts: Tensor, pad_id: int, length: int, temperature: float) -> Tensor:
    """Sample exactly `length` tokens after each context: [B, C] → [B, length] (G4).

    With torch's global generator, without a stop at EOS, unlike `sample` of ppo.py and rloo.py.
    """
    batch = DecodingBatch(lm, contexts, contexts != pad_id, length)
    responses = contexts.new_empty(len(contexts), length)
    for t in tqdm(range(length), "sampling", disable=not is_main()):
        probs = (batch.next_logits() / temperature).softmax(dim=-1)  # [B, V]
        tokens = torch.multinomial(probs, num_samples=1)[:, 0]
        responses[:, t] = tokens
        batch.append(tokens)
    return responses


class DecodingBatch:
    """Sequences that grow by up to `max_new_tokens` tokens: `next_logits`, then `append`, in turn.

    It begins with contexts [B, C], padded anywhere; `mask` is True at real tokens.
    """

    cache: "KeyValueCache"  # from the first `next_logits` on

    def __init__(self, lm: Any, contexts: Tensor, mask: Tensor, max_new_tokens: int):
        self.lm = lm
        self.rows = torch.arange(len(contexts), device=contexts.device)  # [b]: still in the batch
        self.tokens = contexts.masked_fill(~mask, 0)  # [b, C], then [b, 1]: not yet computed
        self.mask = mask  # [b, C], then [b, columns of the cache]
        self.length = 0  # columns of the cache that are in use
        self.max_columns = mask.shape[1] + max_new_tokens

    @torch.no_grad()
    def next_logits(self) -> Tensor:
        """Logits [b, V] of the next token in fp32."""
        if self.length == 0:
            return self.prefill()
        if self.length == self.mask.shape[1]:
            self.grow()
        position_ids = self.mask.sum(dim=1, keepdim=True)  # the real tokens before
        self.mask[:, self.length] = True
        self.length += 1
        mask = self.mask
        if self.has_states:
            mask = mask[:, : self.length]  # linear-attention layers read the last columns
        inputs = dict(attention_mask=mask, position_ids=position_ids, use_cache=True)
        logits = self.lm(self.tokens, **inputs, **self.cache_argument).logits
        return logits[:, -1].float()

    def prefill(self) -> Tensor:
        """Compute each distinct prompt once; from then on, the mask has the cache's columns."""
        from machinery.models import compute_logits  # which imports this module

        first = int(self.mask.any(dim=0).byte().argmax())  # without columns of padding alone
        mask = self.mask[:, first:]
        tokens = self.tokens[:, first:].masked_fill(~mask, -1)
        prompts, prompt_of = tokens.unique(dim=0, return_inverse=True)  # [P, C], [b]
        real = prompts >= 0
        position_ids = real.cumsum(dim=1) - real.long()
        self.length = mask.shape[1]
        columns = self.columns()
        self.cache = KeyValueCache(config=self.lm.config, max_cache_len=columns)
        unused = columns - self.length
        self.mask = F.pad(mask, (0, unused))
        self.has_states = any(hasattr(layer, "conv_states") for layer in self.cache.layers)
        if not self.has_states:
            real = F.pad(real, (0, unused))
        # `compute_hidden` sets the cache's index, by which the cache moves keys to [P, C].
        self.cache_argument: Any = {CACHE: self.cache}
        inputs = prompts.clamp(min=0), real, position_ids
        hidden = compute_hidden(self.lm.base_model, *inputs, **self.cache_argument)
        self.cache.index = None
        self.cache.reorder_cache(prompt_of)  # P prompts → b sequences
        last = hidden[:, -1]  # [P, D]
        return compute_logits(self.lm, last)[prompt_of].float()

    def append(self, tokens: Tensor) -> None:
        """Add one token [b] to each sequence."""
        self.tokens = tokens[:, None]

    def drop(self, ended: Tensor) -> None:
        """Remove the sequences that have ended [b]; waits for the GPU.

        At least `MIN_ROWS` sequences stay, ended ones if necessary, or none if all have ended.
        """
        number = int((~ended).sum())
        if number > 0:
            number = max(number, MIN_ROWS)
        if number >= len(ended):
            return
        running_first: Any = ended.byte().argsort(stable=True)
        order = running_first[:number]
        self.rows = self.rows[order]
        self.tokens, self.mask = self.tokens[order], self.mask[order]
        self.cache.reorder_cache(order)

    def grow(self) -> None:
        """Make room for one more token, and for the rest of its block."""
        columns = self.columns()
        larger = KeyValueCache(config=self.lm.config, max_cache_len=columns)
        for layer, like in zip(self.cache.layers, larger.layers, strict=True):
            if not hasattr(layer, "max_cache_len"):
                continue  # a linear-attention layer
            more = like.max_cache_len - layer.max_cache_len  # 0 if its window is full
            for name in ("keys", "values", "indexer_keys"):
                states = getattr(layer, name, None)
                if states is not None:
                    setattr(layer, name, F.pad(states, (0, 0, 0, more)))
            layer.max_cache_len = like.max_cache_len
        self.mask = F.pad(self.mask, (0, columns - self.length))

    def columns(self) -> int:
        """Columns with room for one more token: whole blocks, but at most `max_columns`."""
        blocks = self.length // BLOCK + 1
        return min(blocks * BLOCK, self.max_columns)


class KeyValueCache(StaticCache):
    """A static cache for autocast, under which keys with rotary angles are fp32."""

    layers: Any  # a hybrid's linear layers have no keys and values
    # [B, T]: where tokens are in the flat batch of `compute_hidden`, if any
    index: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Add a layer's keys and values; return all of them, or those of a flat batch."""
        new = key_states.to(value_states.dtype), value_states  # attention casts the keys anyway
        if self.index is None:
            return super().update(*new, *args, **kwargs)
        keys, values = (x.squeeze(0)[:, self.index].transpose(0, 1) for x in new)
        super().update(keys, values, *args, **kwargs)  # [B, groups, T, features]
        return new
