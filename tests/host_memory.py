"""What test_distributed.py measures: host memory of loading under FSDP2.

    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 tests/host_memory.py FOLDER

Every process loads a policy and its reference as ppo.py does, and writes FOLDER/memory<r>.json.
"""

import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import tiny

import ppo
from machinery import distributed, models


def memory() -> int:
    """Bytes of this process in main memory that no file backs."""
    return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024


def watch(peak: list[int]) -> None:
    while True:
        peak[0] = max(peak[0], memory())
        time.sleep(0.005)


def load(accelerator: Any, folder: Path) -> list[Any]:
    """A policy and its reference, in the order of ppo.py's `main`."""
    lm = models.load_lm(str(folder), length=8)
    policy = ppo.PolicyAndValue(lm, lm.config.vocab_size, 1.0)
    optimizer = ppo.AdamTF(policy.parameters(), lr=1e-3)
    policy, optimizer = distributed.prepare(accelerator, policy, optimizer)
    ref_lm = models.load_lm(str(folder), length=8)
    ref = ppo.PolicyAndValue(ref_lm, lm.config.vocab_size, 1.0)
    return [policy, distributed.freeze(accelerator, ref)]


def main(folder: Path) -> None:
    """Load small models, which imports everything; then large ones, and add up their weights."""
    accelerator = distributed.start(tiny.make_args())
    small = load(accelerator, folder / "small")
    before, peak = memory(), [0]
    threading.Thread(target=watch, args=[peak], daemon=True).start()
    both = load(accelerator, folder / "large")
    size = sum(p.numel() for p in both[0].parameters())
    highest = (peak[0] - before) / size
    weights = [[*map(distributed.full_tensor, x.lm.parameters())] for x in (*both, *small)]
    sums = [sum(x.double().sum().item() for x in tensors) for tensors in weights]
    result = dict(peak=highest, sums=sums)
    path = folder / f"memory{accelerator.process_index}.json"
    path.write_text(json.dumps(result))
    distributed.stop(accelerator)


if __name__ == "__main__":
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    os.environ["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"
    tiny.shard_on_a_cpu()
    main(Path(sys.argv[1]))
