"""What one PPO or RLOO update costs on the GPT-2 124M shape, as a ratio to a plain forward and backward.

    python benchmarks/update_cost.py                  # a table; each row in a process of its own, one torch thread
    python benchmarks/update_cost.py --only update

Random weights; 16 episodes, queries padded to 64 with a median of 17 real tokens, responses of 24, 4 epochs, fp32. The unit
is a forward and backward of the language model over 16 × 88 tokens with all logits. Rows: `plain` that unit, `ppo` and
`rloo` a whole update (sample, score with reference and reward model, optimise). Memory: peak of the process, and in it the
weights of all models, the gradients, Adam's state, the libraries before any model; the rest are activations.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
ROWS = ("plain", "ppo", "rloo")


@dataclass(frozen=True)
class Args:
    """What one update costs, as a ratio to a plain forward and backward."""

    only: str | None = None
    """one row, measured in this process; None: all rows, each in a process of its own"""
    repeats: int = 3
    """processes per row, rows in turn; the median is shown"""
    micro_batch_size: int = 4
    """sequences per training forward"""


def query_lengths(n: int) -> list[int]:
    """Lengths of n queries: median 17, none above 64, like sentences of a novel (5% at 7, 95% at 40)."""
    return [7, 9, 10, 12, 13, 14, 15, 17, 17, 19, 21, 24, 27, 31, 40, 64][:n]


def resident_gb() -> float:
    """Largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def size_gb(tensors: Any) -> float:
    """Memory of tensors; one that is shared counts once."""
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values()) / 2**30


def measure(row: str, args: Args) -> dict[str, float]:
    """CPU seconds of one unit or update in a fresh process, and its memory in GB."""
    import numpy as np
    import torch
    from accelerate import Accelerator
    from transformers import GPT2Config, GPT2LMHeadModel

    import ppo
    import rloo
    import tasks
    import utils

    torch.set_num_threads(1)
    torch.manual_seed(0)
    libraries, weights, state = resident_gb(), [], []
    accelerator, pad_id = Accelerator(cpu=True), GPT2Config().vocab_size
    lm = GPT2LMHeadModel(utils.without_dropout(GPT2Config()))
    tokens = torch.randint(0, pad_id, (16, 88))
    if row == "plain":
        begin = time.process_time()
        logits = lm(tokens).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    else:
        script, batch = {"ppo": (ppo, ppo.PolicyAndValue), "rloo": (rloo, rloo.Policy)}[row]
        task = replace(tasks.TASKS["sentiment"], truncate_token=".")
        settings = script.Args(
            task=task, batch_size=16, micro_batch_size=args.micro_batch_size, rollout_batch_size=args.micro_batch_size
        )
        policy = batch(lm, pad_id, task.temperature)
        ref = GPT2LMHeadModel(utils.without_dropout(GPT2Config())).eval().requires_grad_(False)
        reward = utils.RewardModel(utils.RewardConfig(ref.config, pad_id)).eval().requires_grad_(False)
        ids = utils.Ids(pad_id, 13, [], [])
        models = script.Models(policy, ref, lambda q, r: reward.score(q, r, size=16), ids)
        optimizer = script.AdamTF(policy.parameters(), lr=1e-5)
        queries = utils.pad_rows([tokens[i, :n].tolist() for i, n in enumerate(query_lengths(16))], 64, pad_id)
        epochs = [np.random.default_rng(e).permutation(16) for e in range(settings.num_ppo_epochs)]
        begin = time.process_time()
        responses = script.sample_all(lm, queries, task, pad_id, utils.generator(0, 0, queries.device), 16)
        rollout, _ = script.make_rollout(models, queries, responses, epochs[0], settings.kl_coef, settings)
        for order in epochs:
            for rows in script.minibatches(order, settings):
                part = rollout.take(rows)
                targets = (ppo.estimate(part, settings),) if row == "ppo" else ()
                script.train_step(policy, optimizer, part, *targets, settings, accelerator)
        weights = [*ref.parameters(), *reward.parameters()]
        state = [x for values in optimizer.state.values() for x in values.values()]
    seconds = time.process_time() - begin
    trained = list((lm if row == "plain" else policy).parameters())
    peak = resident_gb()
    parts = {"weights": size_gb([*trained, *weights]), "gradients": size_gb(trained), "Adam": size_gb(state)}
    parts["libraries"] = libraries
    return {"CPU s": seconds, "peak GB": peak} | parts | {"activations": peak - sum(parts.values())}


def main(args: Args) -> None:
    """Measure and print."""
    if args.only:
        print(json.dumps(measure(args.only, args)))
        return
    results = {row: [] for row in ROWS}
    for _ in range(args.repeats):
        for row in ROWS:
            command = [sys.executable, __file__, "--only", row, "--micro-batch-size", str(args.micro_batch_size)]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results[row].append(json.loads(out.splitlines()[-1]))
    columns = list(results["plain"][0])
    print(f"{'row':8}{'ratio':>8}" + "".join(f"{name:>13}" for name in columns))
    for row in ROWS:
        ratio = statistics.median(
            r["CPU s"] / plain["CPU s"] for r, plain in zip(results[row], results["plain"], strict=True)
        )
        values = (statistics.median(r[name] for r in results[row]) for name in columns)
        print(f"{row:8}{ratio:8.2f}" + "".join(f"{value:13.2f}" for value in values))


if __name__ == "__main__":
    main(tyro.cli(Args))
