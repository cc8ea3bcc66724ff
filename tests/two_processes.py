"""What test_distributed.py runs on one process and on two: the same global batch, shared out over the processes.

    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 tests/two_processes.py FOLDER

Every process writes FOLDER/rank<r>.pt.
"""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tiny
import torch
from accelerate import Accelerator

import ppo
import records
import rloo
import sft
import train_reward
import utils

HALVES = {  # of the 8 episodes: the rows of the two global minibatches
    ppo: [[6, 3, 0, 5], [1, 7, 4, 2]],
    rloo: [[0, 3, 6, 5], [2, 1, 4, 7]],  # 4 completions of 2 prompts, laid out [K, P]: even rows are of the first one
}
EOS_TASK = tiny.make_task(eos_task=True, truncate_after=0)


def update(script: ModuleType, accelerator: Accelerator) -> dict[str, Any]:
    """One update of ppo or rloo: 2 epochs of 2 minibatches of an EOS task, queries and responses of uneven lengths."""
    rank, processes = accelerator.process_index, accelerator.num_processes
    halves = [[half[i] for i in range(4) if i % processes == rank] for half in HALVES[script]]
    rows = np.array(sum(halves, []))
    if script is rloo:  # each process has whole groups [K, P / processes]; its minibatches are cut by `order`
        rows = np.arange(8)[rank::processes]
    order = np.array([rows.tolist().index(row) for half in halves for row in half])
    epochs = [order, np.roll(order, len(order) // 2)]
    args = tiny.make_args(EOS_TASK, script, micro_batch_tokens=12)
    plain = tiny.make_policy(script=script)
    policy, optimizer = accelerator.prepare(plain, script.AdamTF(plain.parameters(), lr=1e-3))
    queries = tiny.make_contexts(tiny.LENGTHS, 8) if script is ppo else tiny.make_contexts([8, 3], 8).repeat(4, 1)
    queries, responses = queries[rows], tiny.make_responses(8, 5)[rows]
    models = tiny.make_models(policy, script=script)
    made, score = script.make_rollout(models, queries, responses, epochs[0], 0.15, args)
    rollout = tiny.add_noise(made, seed=4, rows=rows)
    first = rollout.take(np.sort(order[: len(order) // 2]))
    sums, gradients = tiny.step_gradients(script, policy, first, args, accelerator)
    steps = tiny.update(script, policy, optimizer, rollout, epochs, args, accelerator)
    metrics = tiny.summarise(script, rollout, score, steps, 0.15, args)
    return {
        "rows": rows,
        "made": dict(zip(made._fields[:-1], made[:-1], strict=True)),
        "gradients": gradients,
        "sums": sums,
        "loss": script.means([sums])["loss/policy_avg"],
        "stats": script.means(steps),
        "metrics": utils.mean_over_processes(metrics, accelerator.device),
        "weights": plain.state_dict(),
        "t": optimizer.param_groups[0]["t"],
        "moments": script.moments(rollout.scores, torch.ones_like(rollout.scores).bool()),
        "whitened": ppo.whiten(rollout.rewards, rollout.mask) if script is ppo else None,
        "mask": rollout.mask,
        "first_mask": first.mask,
    }


def reward_steps(accelerator: Accelerator) -> dict[str, Any]:
    """Normalise, the gradient of 6 labels, two steps on 6 labels each, normalise again."""
    rank, processes = accelerator.process_index, accelerator.num_processes
    args = train_reward.Args(task=tiny.make_task(), micro_batch_tokens=48)
    plain = tiny.make_reward()
    model, optimizer = accelerator.prepare(plain, train_reward.AdamTF(plain.parameters(), lr=1e-3))
    queries, responses = tiny.make_contexts(tiny.LENGTHS, 8), tiny.make_responses(8, 5)
    mine = slice(rank, None, processes)
    before = train_reward.normalise(plain, queries[mine], responses[mine], size=3)
    stats, recorder = [], tiny.Gradients(plain)
    for seed, kind in ((0, recorder), (0, optimizer), (1, optimizer)):
        candidates = torch.stack([tiny.make_responses(6, 4, seed=10 * seed + k) for k in range(4)], dim=1)
        candidates[1, 0, 2:] = tiny.PAD
        labels = train_reward.Labels(
            tiny.make_contexts([8, 1, 3, 5, 2, 8], 8, seed=seed), candidates, torch.arange(6) % 4
        )
        labels = labels.rows(np.arange(6)[mine])
        step = train_reward.train_step(model, kind, labels, tiny.PAD, args, accelerator)
        stats.append(utils.mean_over_processes(step, accelerator.device))
    after = train_reward.normalise(plain, queries[mine], responses[mine], size=3)
    return {
        "before": before,
        "after": after,
        "gradients": recorder.steps[0],
        "weights": plain.state_dict(),
        "stats": stats,
    }


def sft_step(accelerator: Accelerator) -> dict[str, Any]:
    """The gradient of 4 rows of uneven prompts and responses, a clipped step on them, and the loss on them after it."""
    free, clipped = (sft.Args(task=tiny.make_task(), micro_batch_tokens=12, max_grad_norm=norm) for norm in (1e6, 0.1))
    plain = tiny.make_lm()
    lm, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    recorder = tiny.Gradients(plain)
    rows = torch.cat([tiny.make_contexts([6, 1, 3, 6], 6), tiny.make_responses(4, 5)], dim=1)
    rows[0, 8:], rows[2, 10:] = tiny.PAD, tiny.PAD
    mine = rows[accelerator.process_index :: accelerator.num_processes]
    sft.train_step(lm, recorder, mine, 6, tiny.PAD, free, accelerator)
    loss = sft.train_step(lm, optimizer, mine, 6, tiny.PAD, clipped, accelerator)
    return {
        "loss": loss,
        "gradients": recorder.steps[0],
        "weights": plain.state_dict(),
        "heldout": sft.heldout_loss(plain, rows, 6, tiny.PAD, clipped, accelerator),
    }


def scripts(folder: Path) -> dict[str, Any]:
    """train_reward.py, ppo.py and rloo.py from end to end on the task of `folder`; what was sampled and saved."""
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
    seen: dict[str, Any] = {}
    save = records.Run.save

    def spy_save(run, model, tokenizer, **heads):
        seen[run.script.stem]["weights"] = {name: value.clone() for name, value in model.state_dict().items()}
        save(run, model, tokenizer, **heads)

    records.Run.save = spy_save
    for script, name in ((ppo, "ppo"), (rloo, "rloo")):
        seen[name] = {"contexts": [], "responses": []}
        if script is rloo:
            utils.stop_accelerator = stop  # the last one
        make_rollout = script.make_rollout

        def spy_rollout(*args, make_rollout=make_rollout, mine=seen[name]):
            rollout, score = make_rollout(*args)
            mine["contexts"].append(rollout.contexts)
            mine["responses"].append(rollout.responses)
            return rollout, score

        script.make_rollout = spy_rollout
        common = dict(total_episodes=20, reward_model="reward", output_dir=name, run_name=name)
        script.main(tiny.make_args(task, script, **common))
    return seen


def work(accelerator: Accelerator) -> dict[str, Any]:
    """All steps."""
    return {
        "ppo": update(ppo, accelerator),
        "rloo": update(rloo, accelerator),
        "reward": reward_steps(accelerator),
        "sft": sft_step(accelerator),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1]).absolute()
    accelerator = utils.start_accelerator(tiny.make_args())
    rank = accelerator.process_index
    result = work(accelerator) | {"processes": accelerator.num_processes}
    result["scripts"] = scripts(folder)
    torch.save(result, folder / f"rank{rank}.pt")
