"""What test_distributed.py runs on one process and, by torchrun, on two: the same batch, sharded.
Every process writes FOLDER/rank<r>.pt; with ACCELERATE_USE_FSDP, only the host memory of loading.
"""

import os
import re
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tiny
import torch
from conftest import without_times
from tiny import Recorder, keep, make_args, make_contexts, make_task

import ppo
import rloo
import sft
import train_reward
import utils
from machinery import distributed, models, rewards
from machinery.labels import Labels
from machinery.tokens import load_tokenizer

HALVES = [[6, 3, 0, 5], [1, 7, 4, 2]]  # rows of the two minibatches of 8 episodes
GROUPS = [[0, 3, 6, 5], [2, 1, 4, 7]]  # the same of [P, K] = [2, 4]: four responses to each query
QUERIES = make_contexts(tiny.LENGTHS, 8)
TASK = dict(base_model="task/model", query_dataset="task/stories.txt", truncate_token=None)
RUNS = {"ppo": (ppo, 3), "rloo": (rloo, 3), "ppo_split": (ppo, 12), "rloo_split": (rloo, 12)}
RESPONSES = tiny.make_responses(8, 5)


def run_update(script, rank, processes):
    """One update of an EOS task, 2 epochs of 2 minibatches, with responses of uneven lengths."""
    more = {}
    if script is ppo:
        halves = [half[rank::processes] for half in HALVES]
        rows = halves[0] + halves[1]
        queries = QUERIES[rows]
    else:  # each process has whole groups of responses [P / processes, K]
        rows = np.arange(8).reshape(processes, -1)[rank].tolist()
        halves = [[row for row in half if row in rows] for half in GROUPS]
        queries = QUERIES[2:4][rank::processes]
        more["rloo_k"] = 4
    first, second = (torch.tensor([rows.index(row) for row in half]) for half in halves)
    task = make_task(eos_task=True, truncate_after=0)
    args = make_args(task, script, total_episodes=8, micro_batch_tokens=12, **more)
    heldout = make_contexts([4, 2, 6], 8)  # the same on every process
    orders = torch.stack([torch.cat([first, second]), torch.cat([second, first])])
    return tiny.start(
        script,
        args,
        responses=[RESPONSES[rows]],
        epochs=[orders],
        load_queries=lambda *args: tiny.Table([queries], heldout),
        AdamTF=Recorder,
    )


def train_rewards(rank, processes):
    """train_reward.py on 12 labels in batches of 6, normalized on 8 samples."""
    rng = np.random.default_rng(1)

    def texts(n):
        return [rng.integers(1, tiny.VOCAB, size) for size in rng.integers(1, 6, n)]

    queries = texts(12)
    responses = [texts(4) for _ in range(12)]
    labels = Labels(queries, responses, np.arange(12) % 4)
    samples = torch.cat([QUERIES, RESPONSES], dim=1)[rank::processes]
    model = tiny.make_reward()
    sizes = dict(num_labels=12, batch_size=6, num_heldout=0, micro_batch_tokens=48, lr=1e-3)
    args = train_reward.Args(task=make_task(), **sizes)
    patches = dict(sample_policy=lambda *args: [samples, samples], AdamTF=Recorder)
    return tiny.start(train_reward, args, model, labels=labels, **patches)


def fine_tune():
    """sft.py on 8 uneven sequences in batches of 4, and 3 others to measure on."""
    contexts = make_contexts([6, 1, 3, 6, 2, 5, 6, 4, 1, 2, 6], 6)
    tokens = torch.cat([contexts, tiny.make_responses(11, 5)], dim=1)
    tokens[::3, 8:] = tiny.PAD
    sizes = dict(num_heldout=3, batch_size=4, micro_batch_tokens=12, max_grad_norm=1e6)
    args = sft.Args(task=make_task(), **sizes)  # clipping would hide a factor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", Recorder)
        return tiny.start(sft, args, tiny.make_lm(), tokens=tokens)


def results(rank, processes):
    """Gradients and metrics of an update or two steps of each script, which move nothing."""
    runs = dict(ppo=run_update(ppo, rank, processes), rloo=run_update(rloo, rank, processes))
    runs.update(train_reward=train_rewards(rank, processes), sft=fine_tune())
    found = {}
    for name, run in runs.items():
        found[name] = (run.optimizer.gradients, without_times(run.metrics))
    return found


def count_e(queries, responses):
    return [response.count("e") / 4 for response in responses]


def count_e_of_rows(queries, responses, text):
    """The same, of stories that are the queries' own: `text` is a column of stories.txt."""
    assert all(map(str.startswith, text, queries))
    return count_e(queries, responses)


def run_script(name):
    """What ppo.py or rloo.py samples, evaluates, hands to its reward function and saves here."""
    script, heldout = RUNS[name]
    flags = dict(run_name=name, output_dir=name, reward_fn="two_processes:count_e_of_rows")
    flags.update(total_episodes=16, eval_queries=heldout)
    rollouts, prepared = [], []
    spy = Mock(wraps=rewards.call_reward_function)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "Rollout", keep(script.Rollout, rollouts))
        patch.setattr(distributed, "prepare", keep(distributed.prepare, prepared))
        patch.setattr(distributed, "stop", lambda accelerator: None)
        patch.setattr(rewards, "call_reward_function", spy)
        script.main(make_args(make_task(**TASK), script, **flags))
    samples = [(x.contexts, x.responses) for x in rollouts[1:-1]]  # not those of evaluations
    handed = []
    for call in spy.call_args_list:
        texts = call.args[1]
        handed.append(list(zip(texts["queries"], texts["responses"], strict=True)))
    return dict(weights=prepared[0][0].lm.state_dict(), samples=samples, handed=handed)


def run_scripts(accelerator):
    """The same of all `RUNS`, and what train_reward.py samples, in this folder."""
    seen = {name: run_script(name) for name in RUNS}
    task = make_task(**TASK)
    args = train_reward.Args(task=task, normalize_samples=8, rollout_batch_size=8)
    tokenizer, ids = load_tokenizer(args.task, args.task.response_length)
    samples = train_reward.sample_policy(args, tokenizer, ids, accelerator)
    sizes = [task.query_length, task.response_length]
    seen["train_reward"] = {"samples": [x.split(sizes, dim=1) for x in samples]}
    return seen


def average(accelerator):
    """GPT-2 with a new head: copies at the start, then gradients that not every process has."""
    rank = accelerator.process_index
    torch.manual_seed(rank)  # a head that no seed initializes
    model = torch.nn.ModuleDict({"lm": tiny.make_lm(), "head": torch.nn.Linear(32, 1)})
    head = model["head"]
    head.register_buffer("own", torch.full([1], float(rank)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    model, _ = distributed.prepare(accelerator, model, sgd, make_args())
    copy = {name: x.clone() for name, x in model.state_dict().items()}
    embedding = model["lm"].base_model.wte.weight
    embedding.grad = torch.full_like(embedding, 1.0 + rank)  # on both: 1, 2
    if rank == 1:
        head.weight.grad = torch.full_like(head.weight, 3.0)  # on one: 0, 3
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "broadcast", "all_gather_object"):
            function = getattr(torch.distributed, name)
            patch.setattr(torch.distributed, name, keep(function, calls))
        utils.average_gradients(model)
    means = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"copy": copy, "means": means, "calls": len(calls)}


def average_metrics(device, rank):
    """In another order on each process; then one that only the second process has."""
    metrics = {"a": 1.0, "b": 5.0}
    if rank == 1:
        metrics = {"b": 4.0, "a": 2.0}
    means = utils.mean_over_processes(metrics, device)
    if rank == 1:
        metrics["reward/own"] = 0.0
    with pytest.raises(ValueError) as error:
        utils.mean_over_processes(metrics, device)
    return means, str(error.value)


def memory():
    """Bytes of this process in main memory that no file backs."""
    return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024


def watch(peak):
    while True:
        peak[0] = max(peak[0], memory())
        time.sleep(0.005)


def load(accelerator, folder):
    """A policy and its reference, in the order of ppo.py's `main`."""
    lm = models.load_lm(folder, length=8)
    policy = ppo.PolicyAndValue(lm, lm.config.vocab_size, 1.0)
    adam = ppo.AdamTF(policy.parameters(), lr=1e-3)
    policy, _ = distributed.prepare(accelerator, policy, adam, make_args())
    ref = ppo.PolicyAndValue(models.load_lm(folder, length=8), lm.config.vocab_size, 1.0)
    return [policy, distributed.freeze(accelerator, ref)]


def load_models(accelerator):
    """Small models, which import everything; then large ones. Their weights are added up."""
    small = load(accelerator, "small")
    before = memory()
    peak = [0]
    threading.Thread(target=watch, args=[peak], daemon=True).start()
    both = load(accelerator, "large")
    highest = (peak[0] - before) / sum(p.numel() for p in both[0].parameters())
    sums = []
    for model in (*both, *small):
        weights = map(distributed.full_tensor, model.lm.parameters())
        sums.append(sum(x.double().sum().item() for x in weights))
    return dict(peak=highest, sums=sums)


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    tiny.shard_on_a_cpu()
    accelerator = distributed.start(make_args())
    rank, processes = accelerator.process_index, accelerator.num_processes
    assert processes == 2
    if accelerator.is_fsdp2:
        result = load_models(accelerator)
    else:
        result = results(rank, processes)
        result["scripts"] = run_scripts(accelerator)
        result["average"] = average(accelerator)
        result["metrics"] = average_metrics(accelerator.device, rank)
    torch.save(result, f"rank{rank}.pt")
    distributed.stop(accelerator)
