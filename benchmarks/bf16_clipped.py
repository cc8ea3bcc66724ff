"""How much of a batch PPO and RLOO clip if old log-probabilities come from the sampling loop.

    python sft.py --task synthetic && python benchmarks/bf16_clipped.py --batch 128
    python benchmarks/bf16_clipped.py --model models/smollm2 --batch 24 --steps 2 --lr 1e-6

One update on `synthetic` with its true score as reward, one minibatch, and the sampler's
log-probabilities as old ones. Before each step: the shares of tokens (PPO's ratio) and completions
(RLOO's) outside 1 ± 0.2, with both kinds of old ones. The head is in fp32 (ours) or in bf16.
"""

import itertools
import os
import sys
from pathlib import Path

import torch
import tyro
from accelerate.state import AcceleratorState

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import tiny  # noqa: E402

import ppo  # noqa: E402
import rloo  # noqa: E402
from benchmarks import curves  # noqa: E402
from machinery import cli  # noqa: E402

PRECISIONS = (("no", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"))  # of autocast, of the head
COLUMNS = "model,lr,script,autocast,head,old,steps,tokens,completions,log_ratio_std,date,commit"


def update(script, args, head):
    """Old log-probabilities [B, R] of both kinds, and new ones before each step [steps, B, R]."""
    sampled, old, new, plain = [], {}, [], dict(vars(script))
    loss = "ppo_losses" if script is ppo else "rloo_loss"

    def load_lm(name):
        lm = plain["load_lm"](name)
        layer = lm.get_output_embeddings()
        if head == "bf16":
            layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight).float()
        return lm

    def sample_token(logits, uniform):
        tokens = plain["sample_token"](logits, uniform)
        sampled.append(logits.log_softmax(dim=-1).gather(1, tokens))
        return tokens

    def make_rollout(*inputs):
        rollout, logprobs = plain["make_rollout"](*inputs), torch.cat(sampled, dim=1)
        sampled.clear()
        order = (rollout.contexts != inputs[-2].pad).sum(dim=1).argsort(stable=True)  # as sampled
        logprobs = torch.empty_like(logprobs).index_copy(0, order, logprobs)
        if len(logprobs) == args.batch_size:  # not an evaluation
            old.update(sampler=logprobs, forward=rollout.logprobs)
        return rollout._replace(logprobs=logprobs)

    def compute_loss(logprobs, *inputs):
        new.append(logprobs.detach())
        return plain[loss](logprobs, *inputs)

    spies = dict(load_lm=load_lm, sample_token=sample_token, make_rollout=make_rollout)
    spies["shuffle"] = lambda n, *inputs: [[torch.arange(n)]] * args.num_ppo_epochs
    tiny.run_main(script, args, spies | {loss: compute_loss, "Run": tiny.FakeRun()})
    return old, torch.cat(new).view(-1, args.batch_size, args.task.response_length)


def main(model: str = "models/synthetic/sft", batch: int = 256, steps: int = 8, lr: float = 1e-5):
    flags = f"--task synthetic --base_model {model} --lr {lr} --num_ppo_epochs {steps + 1}"
    flags += f" --reward_fn {ROOT}/data/synthetic/judge.py:gold_score --num_minibatches 1"
    flags += f" --batch_size {batch} --total_episodes {batch} --eval_queries 1"
    with Path(__file__).with_suffix(".csv").open("a") as file:
        file.write(f"{COLUMNS}\n" * (file.tell() == 0))
        for script, (autocast, head) in itertools.product((ppo, rloo), PRECISIONS):
            os.environ["ACCELERATE_MIXED_PRECISION"] = autocast
            AcceleratorState._reset_state(True)
            args = cli.parse_args(script.Args, script.PRESETS, flags.split())
            old, new = update(script, args, head)
            for kind, step in itertools.product(old, range(steps + 1)):
                gaps, sums = new[step] - old[kind], (new[step] - old[kind]).sum(dim=1)
                shares = [((x.exp() - 1).abs() > 0.2).float().mean() for x in (gaps, sums)]
                row = [Path(model).name, lr, script.__name__, autocast, head, kind, step]
                row += [f"{x:.4f}" for x in (*shares, sums.std())]
                print(*row, *curves.provenance().values(), sep=",", file=file)


if __name__ == "__main__":
    tyro.cli(main)
