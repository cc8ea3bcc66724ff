"""What test_distributed.py runs on one process and on two: the same global batch, shared out over the processes.

    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 tests/two_processes.py FOLDER

Every process writes FOLDER/rank<r>.pt.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from accelerate import Accelerator

import ppo
import sft
import train_reward
import utils

ORDER = np.array([6, 3, 0, 5, 1, 7, 4, 2])  # of the 8 episodes: the first four are one minibatch, the rest the other


def ppo_step(accelerator: Accelerator) -> dict[str, Any]:
    """One PPO update: 2 epochs of 2 minibatches of an EOS task, queries and responses of uneven lengths."""
    rank, processes = accelerator.process_index, accelerator.num_processes
    rows = np.concatenate([half[rank::processes] for half in np.split(ORDER, 2)])  # the same global minibatches
    n = len(rows)
    epochs = [np.arange(n), np.roll(np.arange(n), n // 2)]
    args = tiny.make_args(tiny.make_task(eos_task=True, truncate_after=0), micro_batch_size=1)
    plain = tiny.make_policy()
    policy, optimizer = accelerator.prepare(plain, utils.AdamTF(plain.parameters(), lr=1e-3))
    queries, responses = tiny.make_contexts(tiny.LENGTHS, 8)[rows], tiny.make_responses(8, 5)[rows]
    rollout, score = ppo.evaluate(tiny.make_models(policy), queries, responses, epochs[0], 0.15, args)
    noise = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(4))[:, rows]
    rollout = rollout._replace(
        logprobs=rollout.logprobs + 0.2 * noise[0],
        values=rollout.values + 0.3 * noise[1],
        rewards=(rollout.rewards + noise[2]).masked_fill(~rollout.mask, 0),
    )
    gradient = ppo.minibatch_gradient(policy, ppo.Rollout(*(x[: n // 2] for x in rollout)), args, accelerator)
    gradients = tiny.gradients(plain)
    stats = ppo.optimise(policy, optimizer, rollout, epochs, args, accelerator)
    metrics = utils.mean_over_processes(ppo.summarise(rollout, score, stats, 0.15), accelerator.device)
    return {
        "rows": rows,
        "gradients": gradients,
        "loss": utils.all_sum(gradient["loss/total"]),
        "stats": stats,
        "metrics": metrics,
        "weights": plain.state_dict(),
        "t": optimizer.param_groups[0]["t"],
        "whitened": utils.whiten(rollout.rewards, rollout.mask),
        "mask": rollout.mask,
    }


def reward_steps(accelerator: Accelerator) -> dict[str, Any]:
    """Normalise, two steps on 6 labels each, normalise again."""
    rank, processes = accelerator.process_index, accelerator.num_processes
    args = train_reward.Args(task=tiny.make_task(), micro_batch_size=4)
    plain = tiny.make_reward()
    model, optimizer = accelerator.prepare(plain, utils.AdamTF(plain.parameters(), lr=1e-3))
    queries, responses = tiny.make_contexts(tiny.LENGTHS, 8), tiny.make_responses(8, 5)
    mine = slice(rank, None, processes)
    before = train_reward.normalise(plain, queries[mine], responses[mine], size=3)
    stats = []
    for seed in range(2):
        candidates = torch.stack([tiny.make_responses(6, 4, seed=10 * seed + k) for k in range(4)], dim=1)
        candidates[1, 0, 2:] = tiny.PAD
        labels = utils.Labels(tiny.make_contexts([8, 1, 3, 5, 2, 8], 8, seed=seed), candidates, torch.arange(6) % 4)
        stats.append(
            train_reward.train_step(model, optimizer, labels.rows(np.arange(6)[mine]), tiny.PAD, args, accelerator)
        )
    after = train_reward.normalise(plain, queries[mine], responses[mine], size=3)
    return {
        "before": before,
        "after": after,
        "weights": plain.state_dict(),
        "stats": [{name: value.detach() for name, value in step.items()} for step in stats],
    }


def sft_step(accelerator: Accelerator) -> dict[str, Any]:
    """A step on 4 rows of uneven prompts and responses, and the loss on the same rows after it."""
    args = sft.Args(task=tiny.make_task(), micro_batch_size=1, max_grad_norm=0.1)
    plain = tiny.make_lm()
    lm, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    rows = torch.cat([tiny.make_contexts([6, 1, 3, 6], 6), tiny.make_responses(4, 5)], dim=1)
    rows[0, 8:], rows[2, 10:] = tiny.PAD, tiny.PAD
    mine = rows[accelerator.process_index :: accelerator.num_processes]
    loss = sft.train_step(lm, optimizer, mine, 6, tiny.PAD, args, accelerator)
    return {
        "loss": loss,
        "weights": plain.state_dict(),
        "heldout": sft.heldout_loss(plain, rows, 6, tiny.PAD, args, accelerator),
    }


def scripts(folder: Path) -> dict[str, Any]:
    """train_reward.py and ppo.py from end to end on the task of `folder`; what ppo sampled and saved."""
    os.chdir(folder)
    task = tiny.make_task(
        base_model="task/model", query_dataset="task/stories.txt", label_dataset="task/labels.json", truncate_token=None
    )
    stop, utils.stop_accelerator = utils.stop_accelerator, lambda accelerator: accelerator.wait_for_everyone()
    train_reward.main(
        train_reward.Args(
            task=task,
            num_labels=12,
            batch_size=4,
            lr=1e-3,
            normalize_samples=4,
            run_name="reward",
            rollout_batch_size=4,
            output_dir="reward",
        )
    )
    utils.stop_accelerator = stop
    seen, optimise, save_model = {"contexts": [], "responses": []}, ppo.optimise, utils.save_model

    def spy_optimise(policy, optimizer, rollout, *rest):
        seen["contexts"].append(rollout.contexts)
        seen["responses"].append(rollout.responses)
        return optimise(policy, optimizer, rollout, *rest)

    def spy_save(model, *rest):
        seen["weights"] = {name: value.clone() for name, value in model.state_dict().items()}
        save_model(model, *rest)

    ppo.optimise, utils.save_model = spy_optimise, spy_save
    ppo.main(tiny.make_args(task, total_episodes=20, reward_model="reward", output_dir="ppo", run_name="ppo"))
    return seen


def work(accelerator: Accelerator) -> dict[str, Any]:
    """All steps."""
    return {"ppo": ppo_step(accelerator), "reward": reward_steps(accelerator), "sft": sft_step(accelerator)}


if __name__ == "__main__":
    folder = Path(sys.argv[1]).absolute()
    accelerator = utils.start_accelerator()
    rank = accelerator.process_index
    result = work(accelerator) | {"processes": accelerator.num_processes}
    result["scripts"] = scripts(folder)
    torch.save(result, folder / f"rank{rank}.pt")
