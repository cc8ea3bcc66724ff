"""Run a transformer on padded sequences without computing the padding.

`Packed(backbone)` has the signature and the results of the transformer itself. It moves the real
tokens of a batch into a few packed sequences, runs the transformer on those, and moves the hidden
states back. An attention mask keeps the sequences apart.

Shapes: `B` sequences of `T` tokens, `G` groups of them, `N` packed sequences of `W` tokens.
"""

import heapq
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Packed:
    """A transformer called as `run(input_ids, attention_mask, position_ids)` → hidden [B, T, D].

    Results at real tokens equal the plain call's; those at padding are arbitrary.
    `prompt_length=n`: neighboring sequences whose first n columns are equal compute them once.
    Models that cannot be packed are called as they are.
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
        if not hasattr(self.backbone, "packable"):  # not tried yet
            self.backbone.packable = is_packable(self.backbone)
        window = getattr(self.backbone.config, "sliding_window", None) or math.inf
        if (
            self.backbone.packable and input_ids.shape[1] <= window
        ):  # the mask knows no sliding window
            return run_packed(*inputs, prompt_length)
        return run_plain(*inputs)


def run_plain(
    backbone: Any, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor
) -> Tensor:
    """Hidden states [B, T, D] of the padded batch."""
    inputs = dict(attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
    return backbone(input_ids, **inputs).last_hidden_state


def run_packed(
    backbone: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    prompt_length: int = 0,
    width: int = 256,
) -> Tensor:
    """Hidden states [B, T, D], computed in packed sequences of about `width` tokens."""
    real = attention_mask.bool()
    groups, group_lengths, before = group_by_prompt(input_ids, real, prompt_length)
    starts, count, width = place(group_lengths, width, backbone.config.hidden_size)
    unused = count * width
    plan = torch.as_tensor(np.stack([groups, starts[groups], starts[groups] + before]))
    groups, prompt_start, own_start = plan.to(real.device, non_blocking=True)[:, :, None]

    in_prompt = torch.arange(real.shape[1], device=real.device) < prompt_length
    index = torch.where(in_prompt, prompt_start, own_start) + real.cumsum(dim=1) - 1  # [B, T]
    index = torch.where(real, index, unused).flatten()  # all padding goes to one extra slot

    def pack(x: Tensor) -> Tensor:
        """[B, T] → [N, W], zero at unused positions."""
        flat = x.new_zeros(unused + 1).scatter(0, index, x.flatten())
        return flat[:-1].view(count, width)

    owners = torch.arange(1, len(real) + 1, device=real.device)[:, None]
    owners = torch.where(in_prompt, 0, owners)  # a prompt belongs to all sequences of its group
    mask = packed_mask(pack((groups + 1).expand_as(real)), pack(owners))
    hidden = run_plain(backbone, pack(input_ids), mask, pack(position_ids))  # [N, W, D]
    hidden = hidden.flatten(0, 1).index_select(0, index.clamp(max=unused - 1))
    return hidden.view(*real.shape, -1)


def group_by_prompt(
    input_ids: Tensor, real: Tensor, prompt_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group neighbors with equal prompts; a group is its prompt, then the rest of each sequence.

    Returns the group of each sequence [B], the number of tokens of each group [G], and the number
    of tokens of earlier sequences of the same group [B].
    """
    prompts = input_ids.masked_fill(~real, -1)[:, :prompt_length]
    same = torch.zeros_like(real[:, 0])  # whether a sequence has the prompt of the one before it
    if prompt_length:
        same[1:] = (prompts[1:] == prompts[:-1]).all(dim=1)
    own_lengths = real[:, prompt_length:].sum(dim=1)
    prompt_lengths = real[:, :prompt_length].sum(dim=1)
    table = torch.stack([(~same).long(), prompt_lengths, own_lengths]).cpu().numpy()
    is_first, prompt_lengths, own_lengths = table
    groups = is_first.cumsum() - 1
    first = is_first.nonzero()[0]
    before = own_lengths.cumsum() - own_lengths
    group_lengths = prompt_lengths[first] + np.bincount(groups, own_lengths).astype(int)
    return groups, group_lengths, before - before[first][groups]


def place(lengths: np.ndarray, width: int, features: int) -> tuple[np.ndarray, int, int]:
    """Distribute groups of these lengths over packed sequences of equal width.

    The longest group goes first, always into the packed sequence with the fewest tokens. Of a few
    numbers of packed sequences the cheapest is used; attention makes wide ones expensive. Returns
    where each group starts when they are laid end to end [G], their number, and their width.
    """
    total, longest = int(lengths.sum()), int(lengths.max())
    fewest = math.ceil(total / max(width, 2 * longest))
    most = math.ceil(total / max(width // 2, longest))
    order = np.argsort(-lengths, kind="stable").tolist()
    best = math.inf
    for count in np.unique(np.linspace(fewest, most, 8).astype(int)).tolist():
        heap = [(0, i) for i in range(count)]
        where = {}
        for group in order:
            used, i = heap[0]
            where[group] = i, used
            heapq.heapreplace(heap, (used + int(lengths[group]), i))
        width = max(used for used, _ in heap)
        cost = count * width * (4 * features + width)
        if cost < best:
            best, plan = cost, (where, count, width)
    where, count, width = plan
    starts = [where[group][0] * width + where[group][1] for group in range(len(lengths))]
    return np.array(starts), count, width


def packed_mask(groups: Tensor, owners: Tensor) -> Tensor:
    """Additive attention mask [N, 1, W, W]: each token sees what precedes it in its own sequence.

    `groups` [N, W] are 0 at unused positions, `owners` [N, W] are 0 in prompts.
    """
    same_group = groups[:, :, None] == groups[:, None, :]
    visible = (owners[:, None, :] == 0) | (owners[:, :, None] == owners[:, None, :])
    sees = (same_group & visible).tril()
    kind, dtype = groups.device.type, torch.float32
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    zeros = torch.zeros(sees.shape, dtype=dtype, device=groups.device)
    return zeros.masked_fill(~sees, torch.finfo(dtype).min)[:, None]


@torch.no_grad()
def is_packable(backbone: Any) -> bool:
    """Whether packing changes nothing: tried on two packed sequences of two sequences each.

    Falcon with alibi, for one, refuses masks of four dimensions.
    """
    device = backbone.device
    lengths = torch.tensor([6, 5, 3, 4], device=device)  # 6 and 3, 5 and 4 are packed together
    input_ids = torch.arange(24, device=device).view(4, 6) % backbone.config.vocab_size
    mask = torch.arange(6, device=device) < lengths[:, None]
    position_ids = mask.cumsum(dim=1) - mask.long()
    training = backbone.training
    backbone.eval()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            plain = run_plain(backbone, input_ids, mask, position_ids)
            other = run_packed(backbone, input_ids, mask, position_ids, width=8)
        return torch.allclose(plain[mask].float(), other[mask].float(), rtol=1e-3, atol=5e-3)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    finally:
        torch.set_float32_matmul_precision(precision)
        backbone.train(training)
