"""A language model for sampling: the same call as `lm(...)`, with a static cache.

Shapes: `B` sequences, `P` distinct prompts, `C` context tokens.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig
from transformers.cache_utils import StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from machinery.cli import RunError

BLOCK = 64  # columns of the cache; kernels also prefer lengths that are multiples of it
MIN_ROWS = 16  # with fewer sequences, fp32 products round differently


class KeyValueCache(StaticCache):
    """A static cache that grows by blocks of columns. It also works under autocast.

    Rotary embeddings leave the keys in fp32 there, and a static cache has one dtype for keys and
    values. Attention casts the keys to the dtype of the values anyway.
    """

    layers: Any  # all of them are static layers, with keys and values

    def __init__(self, config: PretrainedConfig, first: int, needed: int, longest: int):
        self.length = min(math.ceil(needed / BLOCK) * BLOCK, longest)  # tokens that fit in
        super().__init__(config=config, max_cache_len=self.length)
        self.config = config
        self.first = first  # columns of the contexts that are padding in every sequence
        self.longest = longest  # tokens that it may have to hold
        self.steps = 0  # since the shape of the cache changed
        self.replay: Callable[..., Tensor] | None = None  # the step as a CUDA graph

    def grow(self, needed: int) -> None:
        """Make room for `needed` tokens, and for the rest of the last block."""
        larger = KeyValueCache(self.config, self.first, needed, self.longest)
        for layer, like in zip(self.layers, larger.layers, strict=True):
            more = 0, 0, 0, like.max_cache_len - layer.max_cache_len  # 0 if its window is full
            layer.keys, layer.values = F.pad(layer.keys, more), F.pad(layer.values, more)
            layer.max_cache_len = like.max_cache_len
        self.length, self.steps, self.replay = larger.length, 0, None

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences with these indices; `grow` can use the memory of the others."""
        if len(indices) == len(self.layers[0].keys):
            return  # all of them: `unfinished` keeps their order
        slots = (indices != torch.arange(len(indices), device=indices.device)).nonzero()[:, 0]
        for layer in self.layers:
            for x in (layer.keys, layer.values):
                x[slots] = x[indices[slots]]  # the few that move
            layer.keys, layer.values = layer.keys[: len(indices)], layer.values[: len(indices)]
        self.steps, self.replay = 0, None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values of one layer; return all of them so far."""
        return super().update(key_states.to(value_states.dtype), value_states, *args, **kwargs)


class Decoder:
    """Calls a language model token by token, for responses of `response_length` tokens.

    Equal prompts are computed once. The cache has room for the tokens so far, and at most a block
    more. With `cuda_graphs`, on a GPU, the step of one token is recorded and then replayed, until
    the cache grows or sequences leave it. There is no graph under FSDP2 (weights move), with
    sliding windows (the CPU manages the cache), and for Falcon (indexes with Python lists).
    """

    def __init__(self, lm: Any, response_length: int, cuda_graphs: bool = False):
        self.lm = lm
        self.response_length = response_length
        sharded = any(hasattr(weight, "full_tensor") for weight in lm.parameters())
        host = getattr(lm.config, "sliding_window", None) or lm.config.model_type == "falcon"
        self.cuda_graphs = cuda_graphs and lm.device.type == "cuda" and not (sharded or host)
        if self.cuda_graphs:
            self.stream = torch.cuda.Stream()
            self.pool: Any = torch.cuda.MemPool()  # the graphs' memory, for one after the other

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: KeyValueCache | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits [B, 1, V] after the contexts [B, C], or after one more token [B, 1]."""
        cache = past_key_values
        if cache is None:
            return self.prefill(input_ids, attention_mask, position_ids)
        mask = attention_mask[:, cache.first :]
        if mask.shape[1] > cache.length:
            cache.grow(mask.shape[1])
        mask = F.pad(mask, (0, cache.length - mask.shape[1]))
        inputs = input_ids, mask, position_ids
        if self.cuda_graphs and cache.replay is None and cache.steps > 0:
            cache.replay = self.record(partial(self.step, cache), inputs)
        cache.steps += 1
        logits = cache.replay(*inputs) if cache.replay else self.step(cache, *inputs)
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def step(
        self, cache: KeyValueCache, input_ids: Tensor, mask: Tensor, position_ids: Tensor
    ) -> Tensor:
        """Logits [B, 1, V] after one more token [B, 1]; mask [B, cache.length]."""
        output = self.lm(
            input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits

    def record(self, function: Callable, inputs: tuple[Tensor, ...]) -> Callable:
        """A function that does what `function` does, for inputs of these shapes, as a CUDA graph.

        Its kernels read and write the same memory each time; the next call overwrites the result.
        """
        inputs = tuple(x.clone() for x in inputs)
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self.stream):
                graph.capture_begin(self.pool.id, capture_error_mode="thread_local")
                result = function(*inputs)
                graph.capture_end()
        except RuntimeError as error:
            raise RunError(f"pass --no-cuda_graphs: {error!s:.200}") from error
        torch.cuda.current_stream().wait_stream(self.stream)

        def replay(*new: Tensor) -> Tensor:
            for old, x in zip(inputs, new, strict=True):
                old.copy_(x)
            graph.replay()
            return result

        return replay

    def prefill(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor
    ) -> CausalLMOutputWithPast:
        """Compute each distinct prompt once, without the columns that are padding everywhere."""
        prompts = input_ids.masked_fill(~attention_mask.bool(), -1)
        prompts, copies = prompts.unique(dim=0, return_inverse=True)  # [P, C], [B]
        rows = torch.arange(len(copies), device=copies.device)
        rows = copies.new_empty(len(prompts)).scatter(0, copies, rows)  # one sequence per prompt
        first = int(attention_mask.any(dim=0).byte().argmax())
        held = input_ids.shape[1] - first
        cache = KeyValueCache(self.lm.config, first, held + 1, held + self.response_length)
        output = self.lm(
            input_ids[rows, first:],
            attention_mask=F.pad(attention_mask[rows, first:], (0, cache.length - held)),
            position_ids=position_ids[rows, first:],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[copies], layer.values[copies]
        return CausalLMOutputWithPast(logits=output.logits[copies], past_key_values=cache)


def unfinished(ended: Tensor) -> Tensor:
    """Indices of the unfinished sequences, none if all have ended: [B] → [N].

    The last ones move to the places of those that have ended, the others stay where they are. At
    least `MIN_ROWS` sequences stay, ended ones if necessary.
    """
    number = len((~ended).nonzero())  # waits for the GPU
    if number:
        number = max(number, MIN_ROWS)
    indices = torch.arange(len(ended), device=ended.device)
    movers = indices[number:][~ended[number:]]
    places = ended[:number].nonzero()[: len(movers), 0]
    return indices[:number].index_copy(0, places, movers)


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
