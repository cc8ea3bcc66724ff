"""Operators, bytes, and copies of the logits, counted on a CPU: what a GPU would have to do.

    python benchmarks/gpu_count.py

Operators are those that start at least one kernel on a GPU: not views, not allocations. They depend
on the number of layers, not on sizes: the model has GPT-2's 12 layers and a width of 48, in bf16.
Bytes and logits are counted over fake tensors, which have a shape and no contents, without padding
and packing. Each operator reads its inputs and writes its results once.
"""

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]
import tiny  # noqa: E402

import ppo  # noqa: E402
from benchmarks import gpu, memory, speed  # noqa: E402
from machinery import decoding, distributed, models, packing  # noqa: E402

aten = torch.ops.aten
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"}
FREE |= {"_unsafe_view", "_reshape_alias", "lift_fresh", "_local_scalar_dense", "device"}
PARTLY = {"gather", "index", "index_copy_", "embedding", "new_zeros", "scatter_add"}  # of the first
ROW = "| {:34} | {:>8} |"


class Counter(TorchDispatchMode):
    """Counts operators that start kernels, and the bytes that they read and write."""

    number = moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator."""
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (func.is_view or name in FREE):
            self.number += 1
            read = args[1:] if name in PARTLY else args
            written = () if name == "index_copy_" else out
            tensors = (x for x in tree_leaves((read, kwargs, written)) if isinstance(x, Tensor))
            self.moved += sum(x.nbytes for x in tensors)
        return out

    def restart(self) -> tuple[int, float]:
        """Return the number and the GB so far, and start at 0."""
        found = self.number, self.moved / 1e9
        self.number = self.moved = 0
        return found


class Logits(memory.Tracker):
    """Counts tensors that are as large as logits [N, V], of any dtype; fake indices are whole."""

    def __init__(self, elements: int):
        super().__init__()
        self.sizes = {elements * size for size in (1, 2, 4, 8)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator."""
        if func is aten.nonzero.default:
            return args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.long)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that has the size of logits."""
        if storage.nbytes() in self.sizes:
            super().add(storage)


def make_lm(config: Any) -> Any:
    """A random model as `load_lm` makes it."""
    lm = AutoModelForCausalLM.from_config(models.disable_dropout(copy.deepcopy(config)))
    lm.get_output_embeddings().__class__ = models.Float32Linear
    models.use_fused_gelu(lm)
    return lm


def loss_of(policy: Any, contexts: Tensor, responses: Tensor) -> Tensor:
    """The loss of a micro-batch without advantages, whose statistics are computed too."""
    logprobs, _, values = policy(contexts, responses)
    zeros = torch.zeros_like(logprobs.detach())
    old = SimpleNamespace(logprobs=zeros, values=zeros, mask=zeros == 0)
    limits = SimpleNamespace(cliprange=0.2, cliprange_value=0.2)
    return sum(ppo.ppo_losses(logprobs, values, old, zeros, zeros, 1.0, limits)[:2])


def operators() -> dict[str, int]:
    """Operators of one micro-batch of 16 sequences, and of one token."""
    config = memory.gpt2(48, 12, 12)
    config.vocab_size, found, words = 101, {}, 101
    contexts = tiny.make_contexts(speed.query_lengths(16), 64, vocab=words)
    responses = torch.randint(words, (16, 24))
    policy = ppo.PolicyAndValue(make_lm(config), words, 0.7).train()
    ref = ppo.PolicyAndValue(make_lm(config), words, 0.7).eval().requires_grad_(False)
    optimizer = ppo.AdamTF(policy.parameters(), lr=1e-5)
    optimizer.register_step_pre_hook(distributed.check_gradients)
    losses, counter = ppo.ppo_losses, Counter()

    def spy(*args: Any) -> Any:
        found["training: forward"] = counter.restart()[0]
        result = losses(*args)
        found["training: losses and statistics"] = counter.restart()[0]
        return result

    ppo.ppo_losses = spy
    for _ in range(2):  # the first time, packing is tried and Adam's state is made
        with counter:
            counter.restart()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(policy, contexts, responses)
            loss.backward()
            found["training: backward"] = counter.restart()[0]
            optimizer.step()
            found["optimizer step"] = counter.restart()[0]
            optimizer.zero_grad()
            counter.restart()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                ref(contexts, responses)
            found["reference"] = counter.restart()[0]
    decoder, mask = decoding.Decoder(policy.lm, 24), contexts != words
    position_ids = mask.cumsum(dim=1) - mask.long()
    tokens, cache = contexts.masked_fill(~mask, 0), None
    with counter, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            output = decoder(tokens, mask, position_ids, cache)
            cache, found["decoding: model"] = output.past_key_values, counter.restart()[0]
            logits = output.logits[:, -1].float() / 0.7
            tokens = ppo.sample_token(logits, torch.full((16, 1), 0.5, dtype=torch.float64))
            found["decoding: choice of the token"] = counter.restart()[0]
            mask = torch.nn.functional.pad(mask, (0, 1), value=True)
            position_ids = position_ids[:, -1:] + 1
    return found


def sizes(shape: str, lengths: list[int], response_length: int) -> dict[str, float]:
    """Copies of the logits at the peak, and GB moved, of forward and backward passes and a token."""
    config = memory.SHAPES[shape]
    total, batch, words = sum(lengths), len(lengths), config.vocab_size
    elements = batch * response_length * words
    tracker, counter, found = Logits(elements), Counter(), {}

    def note(name: str) -> None:
        found[name] = tracker.restart() / 4 / elements, counter.restart()[1]

    ppo.Packed = lambda backbone: lambda *inputs: packing.run_plain(backbone, *inputs)
    with FakeTensorMode(allow_non_fake_inputs=True), tracker, counter:
        contexts = torch.ones(batch, total // batch - response_length, dtype=torch.long)
        responses = torch.ones(batch, response_length, dtype=torch.long)
        policy = ppo.PolicyAndValue(make_lm(config), words, 0.7).train()
        counter.restart()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(policy, contexts, responses)
        note("policy, forward")
        loss.backward()
        note("policy, backward")
        del loss
        policy.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            mask = torch.ones(batch, contexts.shape[1] + 2, dtype=torch.bool)
            decoder = memory.Decoder(policy.lm, response_length)
            cache = decoder(contexts, mask[:, :-2], contexts, None).past_key_values
            for end in (-1, mask.shape[1]):  # weights are cast before the second token
                counter.restart()
                output = decoder(contexts[:, :1], mask[:, :end], contexts[:, :1], cache)
            note("decoding: model")
            uniform = torch.ones(batch, 1, dtype=torch.float64)
            ppo.sample_token(output.logits[:, -1].float() / 0.7, uniform)
            note("decoding: choice of the token")
        policy.requires_grad_(False)
        tracker.restart()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            policy(contexts, responses)
        note("reference")
    print(f"\n{shape}: {batch} sequences, {total} tokens; logits of {4 * elements / 2**30:.3g} GiB")
    print(ROW.format("", "copies"), f"{'GB':>8} |")
    return found


def main() -> None:
    """Print operators, then copies of the logits and GB that are moved."""
    for name, number in operators().items():
        print(ROW.format(name, number))
    ppo.ppo_losses = PPO_LOSSES
    sentiment = [n + 24 for n in speed.query_lengths(512)]
    tldr = [n + 53 for n in speed.query_lengths(16_384 // (306 + 53), gpu.PYTHIA_1B)]
    for shape, lengths, length in (("GPT-2 124M", sentiment, 24), ("Pythia 1B", tldr, 53)):
        for name, (number, moved) in sizes(shape, lengths, length).items():
            print(ROW.format(name, f"{number:.0f}"), f"{moved:8.2f} |")


PPO_LOSSES = ppo.ppo_losses
if __name__ == "__main__":
    main()
