"""Random rewards, a control: nothing can be learned from them.

python rloo.py --task arithmetic --reward_fn benchmarks/coin_flip.py:score
"""

import random

COIN = random.Random(1)


def score(queries: list[str], responses: list[str]) -> list[float]:
    """0.0 or 1.0 at random, whatever the response."""
    return [float(COIN.getrandbits(1)) for _ in responses]
