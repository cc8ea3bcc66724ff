"""Your functions of the course. `python grade.py` tests them and counts your points."""

from torch import Tensor


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Lesson 1: scale the numbers where mask is True to variance 1 and mean 0; 0 where it is False.

    [B, T], [B, T] → [B, T]. Without `shift_mean`, keep the mean. The variance is that of all
    these numbers, divided by their count N (not N - 1). Add 1e-8 to it, for numbers that are equal.
    """
    raise NotImplementedError


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Lesson 2: advantages and returns by generalized advantage estimation: [B, T] → [B, T] each.

    The value after the last token is 0.
    """
    raise NotImplementedError


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cliprange: float
) -> Tensor:
    """Lesson 2: PPO's policy loss, the mean over the tokens where mask is True: [B, T] → scalar."""
    raise NotImplementedError


def estimate_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Lesson 3: the estimate "k1", "k2" or "k3" of KL(pi || pi_ref) at each sampled token."""
    raise NotImplementedError


def leave_one_out(rewards: Tensor) -> Tensor:
    """Lesson 4: RLOO's advantages of K responses to each of P queries: [K, P] → [K, P]."""
    raise NotImplementedError
