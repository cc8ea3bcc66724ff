"""Every script × kind of model × precision × fixed length or EOS × one process or two. One update
each: finite numbers, a first ratio of exactly 1, weights that load. 36 runs in which every two
values meet, those on two processes with `-m slow`; all 256 with `-m exhaustive`."""

import json
import math
import os
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import SCRIPTS, read_metrics
from safetensors.torch import load_file
from test_decoding import end_soon
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from data import tasks
from machinery import cli, distributed, models, rewards, sources, unpadding
from train_reward import RewardModel
from utils import TokenIds, truncate

KINDS = (*tiny.KINDS, "mistral_window", "qwen3_5_text")
PRECISIONS = ("no", "bf16")
FORMS = ("fixed", "eos")
ALL = list(product(SCRIPTS, KINDS, PRECISIONS, FORMS))


def covering_array() -> list[tuple]:
    """Each script meets each kind once; the rest are sums of their bits: an orthogonal array."""
    rows = []
    for (s, script), (k, kind) in product(enumerate(SCRIPTS), enumerate(KINDS)):
        p = (k ^ s) & 1
        f = (k ^ s) >> 1 & 1
        n = (k >> 2 ^ s ^ s >> 1) & 1
        rows.append((script, kind, PRECISIONS[p], FORMS[f], 1 + n))
    return rows


FEW = {n: [row[:4] for row in covering_array() if row[4] == n] for n in (1, 2)}  # processes
SINGLE = FEW[1] + [pytest.param(*x, marks=pytest.mark.exhaustive) for x in ALL if x not in FEW[1]]
SOME = [pytest.param(2, marks=pytest.mark.slow), pytest.param("all", marks=pytest.mark.exhaustive)]


def one_update(folder: Path, script: str, kind: str, form: str, rank: int = 0) -> Any:
    """Arguments of one update of a random tiny model on local files; weights in `folder`/out."""
    files = folder / f"files{rank}"
    task = tiny.write_task(files, kind)
    task = tiny.eos_task(task, files) if form == "eos" else replace(task, truncate_token=None)
    lm = AutoModelForCausalLM.from_pretrained(task.base_model)
    with torch.no_grad():  # if no response ends, all have the same score
        lm.get_output_embeddings().weight[lm.config.eos_token_id] *= 4
    lm.save_pretrained(task.base_model)
    other = KINDS[KINDS.index(kind) - 1]  # a reward model need not be of the policy's kind
    common = dict(run_name=folder.name, output_dir=str(folder / "out"), lr=1e-3)
    sizes: dict[str, Any] = dict(batch_size=8, micro_batch_tokens=36)
    if script == "sft":
        sizes |= dict(num_heldout=2, block_size=10, num_queries=20, num_epochs=1)
    elif script == "train_reward":
        sizes |= dict(num_labels=8, normalize_samples=8, rollout_batch_size=8)
    else:
        sizes |= dict(total_episodes=32, batch_size=32, num_ppo_epochs=1, num_minibatches=1)
        sizes |= dict(reward_model=tiny.write_reward(files / "reward", other))
        sizes |= dict(rollout_batch_size=13, rloo_k=4)
        sizes |= dict(micro_batch_tokens=(108, 4096)[KINDS.index(kind) % 2])  # parts, or one
    return tiny.make_args(task, SCRIPTS[script], **common, **sizes)


def check_update(folder: Path, script: str) -> None:
    lines = read_metrics(folder.name)
    assert all(math.isfinite(value) for line in lines for value in line.values())
    if script == "train_reward":
        assert RewardModel.from_pretrained(str(folder / "out")).config.pad_id == tiny.WORDS
        return
    before = models.load_lm(str(folder / "files0" / "model")).state_dict()
    after = AutoModelForCausalLM.from_pretrained(folder / "out").state_dict()
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)
    if script in ("ppo", "rloo"):
        assert lines[0]["objective/kl"] == 0  # the reference is the policy
        assert lines[0]["ppo/policy/approxkl_avg"] == lines[0]["ppo/val/ratio_var"] == 0  # (L6)
        assert lines[0]["objective/ended"] > 0


def test_every_two_values_meet_in_one_of_36_runs():
    rows = covering_array()
    values = (SCRIPTS, KINDS, PRECISIONS, FORMS, (1, 2))
    assert len(rows) == 36
    for i, j in combinations(range(5), 2):
        assert {(row[i], row[j]) for row in rows} == {*product(values[i], values[j])}


@pytest.mark.parametrize(("script", "kind", "precision", "form"), SINGLE)
def test_L6_scripts_update_every_model(script, kind, precision, form, here, monkeypatch, capsys):
    """In fp32, or in bf16 autocast, as the launcher asks for it; of plain models without padding."""
    unpadding.say_once.cache_clear()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    folder = here / "run"
    SCRIPTS[script].main(one_update(folder, script, kind, form))
    check_update(folder, script)
    said = "padding is computed" in capsys.readouterr().out
    assert not said or kind not in ("gpt_neox", "llama")


@pytest.mark.parametrize("which", SOME)
def test_copies_and_fsdp2_update_every_kind_of_model_alike_on_two_processes(which, tmp_path):
    """In one launch. Half of the sharded ones checkpoint their activations."""
    runs = ALL if which == "all" else FEW[2]
    options = dict(cwd=tmp_path, timeout=60 + 20 * len(runs))
    said = tiny.run_python(__file__, json.dumps(runs), processes=2, **options)
    assert len(set(re.findall(r"apart after \d+", said))) == 2, said[-2000:]
    assert said.count("passed") == 2 * len(runs), said[-2000:]


@pytest.mark.parametrize("script", SCRIPTS.values())
def test_every_preset_passes_its_own_checks(script, here, monkeypatch):
    """On up to 8 processes. A task without a preset has the defaults."""
    monkeypatch.setattr(rewards, "find_model", lambda name: None)  # there is no reward model
    for name, task in tasks.TASKS.items():
        args = cli.parse_args(script.Args, script.PRESETS, ["--task", name])
        if name not in script.PRESETS:
            named = {"reward_model": args.reward_model} if hasattr(args, "reward_model") else {}
            assert args == script.Args(task=task, **named)
        has_labels = task.label_dataset or script.__name__ != "train_reward"
        for processes in (1, 2, 4, 8):
            with nullcontext() if has_labels else pytest.raises(cli.InputError, match="no labels"):
                script.check(args, processes)


def check_equal(ours: Path, theirs: Path) -> None:
    """Compare the weights in two folders, which differ by the order of sums (1e-7)."""
    one, other = (load_file(folder / "out" / "model.safetensors") for folder in (ours, theirs))
    assert one.keys() == other.keys()
    for key in one:  # without positions, a key's bias has no effect: its gradient is rounding
        if not key.endswith(("c_attn.bias", "query_key_value.bias")):
            gap = (one[key] - other[key]).abs().max()
            assert gap <= 1e-6, f"{ours}: {key} is off by {gap:.0e}"


def sample_apart(rank: int) -> None:
    """Under FSDP2, sampling stops at different tokens: no process waits for the other's weights."""
    policy, second = (tiny.make_policy("llama") for _ in range(2))
    contexts = tiny.make_contexts([8, 3, 5, 8, 1] * 8, 8)[rank::2][: (2, 20)[rank]]

    def sample(policy: torch.nn.Module) -> tuple[torch.Tensor, int]:
        calls: list = []
        uniform = tiny.uniform(50, 20)[:, : len(contexts)]
        with pytest.MonkeyPatch.context() as patch:
            end_soon(patch, calls)
            found = tiny.sample(policy.lm, contexts, uniform, eos_task=True, truncate_after=0)
        return truncate(found, TokenIds(tiny.PAD, [0], [], []))[0], len(calls)

    args = tiny.make_args()
    accelerator = distributed.start(args)
    with accelerator.autocast():
        expected, steps = sample(policy)
    policy, _ = distributed.prepare(accelerator, policy, torch.optim.SGD(policy.parameters()), args)
    for model in (policy, distributed.freeze(accelerator, second)):
        with distributed.inference(accelerator, model):
            found, again = sample(model)
        assert torch.equal(found, expected) and steps == again
        with torch.no_grad():
            model(contexts[:2], found[:2])  # `freeze` has set up its root
    print(f"apart after {steps}", flush=True)


def two_processes(combinations: list[tuple]) -> None:
    """What each process of a launch does: each combination with copies, then sharded."""
    rank = int(os.environ["RANK"])
    stop = distributed.stop
    distributed.stop = lambda accelerator: accelerator.wait_for_everyone()  # one group for all
    tiny.shard_on_a_cpu()
    os.environ |= {"FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"  # the launcher's default
    seen: list[list[Any]] = [[], []]
    distributed.prepare = tiny.keep(distributed.prepare, seen[0])
    distributed.freeze = tiny.keep(distributed.freeze, seen[1])
    runs = []  # written before there is a process group, in which only rank 0 saves models
    for i, (script, kind, precision, form) in enumerate(combinations):
        folders = [Path(f"run{i}_{way}") for way in ("copies", "fsdp2")]
        copies, fsdp2 = (one_update(folder, script, kind, form, rank) for folder in folders)
        fsdp2 = replace(fsdp2, gradient_checkpointing=i % 2 == 0)
        runs.append((script, precision, folders, [copies, fsdp2]))
    for script, precision, folders, arguments in runs:
        for sharded, folder, args in zip((False, True), folders, arguments, strict=True):
            os.environ["ACCELERATE_USE_FSDP"] = str(sharded).lower()
            os.environ["ACCELERATE_MIXED_PRECISION"] = precision
            AcceleratorState._reset_state(True)
            SCRIPTS[script].main(args)
            for model in [seen[0].pop()[0], *seen[1]]:  # policy and reference
                units = sum(isinstance(module, FSDPModule) for module in model.modules())
                assert (units >= 3) == sharded  # two blocks and the root
            seen[1].clear()
            sources.PINNED.clear()  # the names of the two processes differ
            check_update(folder, script)  # under FSDP2, all processes load a model together
            if rank == 0:
                print(folder, "passed", flush=True)
        if rank == 0:
            check_equal(*folders)
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    AcceleratorState._reset_state(True)
    sample_apart(rank)
    stop(Accelerator())


if __name__ == "__main__":
    two_processes(json.loads(sys.argv[1]))
