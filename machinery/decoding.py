"""A language model for sampling: the same call as `lm(...)`, with a static cache.

Shapes: `B` sequences, `P` distinct prompts, `C` context tokens.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig
from transformers.cache_utils import StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from machinery.cli import InputError


class KeyValueCache(StaticCache):
    """A static cache that also works under autocast.

    Rotary embeddings leave the keys in fp32 there, and a static cache has one dtype for keys and
    values. Attention casts the keys to the dtype of the values anyway.
    """

    layers: Any  # all of them are static layers, with keys and values

    def __init__(self, config: PretrainedConfig, length: int, first: int):
        super().__init__(config=config, max_cache_len=length)
        self.length = length  # tokens that fit in
        self.first = first  # columns of the contexts that are padding in every sequence

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values of one layer; return all of them so far."""
        return super().update(key_states.to(value_states.dtype), value_states, *args, **kwargs)


class Decoder:
    """Calls a language model token by token, for responses of `response_length` tokens.

    Equal prompts are computed once. With `compile`, the step of one token is compiled and, on GPUs,
    replayed as a CUDA graph; caches then have one of a few shapes and stay where they are.
    """

    def __init__(
        self, lm: "transformers.PreTrainedModel", response_length: int, compile: bool = False
    ):
        self.lm = lm
        self.response_length = response_length
        self.compile = compile
        self.step: Any = lm
        self.caches: dict[torch.Size, KeyValueCache] = {}
        if compile:
            if getattr(lm.config, "sliding_window", None):
                raise InputError("--compile would compile a sliding window again for every token")
            self.step = torch.compile(lm, mode="reduce-overhead", fullgraph=True, dynamic=False)
            torch._dynamo.config.recompile_limit = 64

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: KeyValueCache | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits [B, 1, V] after the contexts [B, C], or after one more token [B, 1]."""
        if past_key_values is None:
            return self.prefill(input_ids, attention_mask, position_ids)
        cache = past_key_values
        if self.compile:
            torch.compiler.cudagraph_mark_step_begin()
            input_ids, position_ids = input_ids.clone(), position_ids.clone()
        mask = attention_mask[:, cache.first :]
        mask = F.pad(mask, (0, cache.length - mask.shape[1]))
        return self.step(
            input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )

    def prefill(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor
    ) -> CausalLMOutputWithPast:
        """Compute each distinct prompt once, without the columns that are padding everywhere."""
        prompts = input_ids.masked_fill(~attention_mask.bool(), -1)
        prompts, copies = prompts.unique(dim=0, return_inverse=True)  # [P, C], [B]
        rows = torch.arange(len(copies), device=copies.device)
        rows = copies.new_empty(len(prompts)).scatter(0, copies, rows)  # one sequence per prompt
        first = int(attention_mask.any(dim=0).byte().argmax())
        length = input_ids.shape[1] - first + self.response_length
        if self.compile:
            length = math.ceil(length / 128) * 128
        cache = KeyValueCache(self.lm.config, length, first)
        output = self.lm(
            input_ids[rows, first:],
            attention_mask=F.pad(attention_mask[rows, first:], (0, length))[:, :length],
            position_ids=position_ids[rows, first:],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[copies], layer.values[copies]
        if self.compile:
            cache = self.move_to_kept(cache)
        return CausalLMOutputWithPast(logits=output.logits[copies], past_key_values=cache)

    def move_to_kept(self, cache: KeyValueCache) -> KeyValueCache:
        """The first cache of this shape, with the contents of this one: a CUDA graph reads that."""
        kept = self.caches.setdefault(cache.layers[0].keys.shape, cache)
        kept.first = cache.first
        for old, new in zip(kept.layers, cache.layers, strict=True):
            for name in ("keys", "values", "cumulative_length"):
                getattr(old, name).copy_(getattr(new, name))
                torch._dynamo.mark_static_address(getattr(old, name))
        return kept


@torch.no_grad()
def generate(lm: Any, contexts: Tensor, pad_id: int, length: int, temperature: float) -> Tensor:
    """Sample exactly `length` tokens after each context with the library's `generate`.

    [B, C] → [B, length]. From the full vocabulary, without a stop at EOS (G4). Slower than
    `Decoder`; for samples that are needed once.
    """
    mask = contexts != pad_id
    own_config = lm.generation_config
    lm.generation_config = GenerationConfig(  # a new one: arguments of None inherit from the model
        do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=length
    )
    lm.generation_config.pad_token_id = 0
    try:
        tokens = lm.generate(contexts.masked_fill(~mask, 0), attention_mask=mask.long())
    finally:
        lm.generation_config = own_config
    return tokens[:, contexts.shape[1] :]
