"""Every script × kind of model × precision × fixed length or EOS × one process or two. One update
each: finite numbers, a first ratio of exactly 1, weights that load. 36 runs in which every two
values meet, those on two processes with `-m slow`; all 256 with `-m exhaustive`."""

import json
import math
import os
import re
import sys
from itertools import combinations, product
from pathlib import Path

import pytest
import tiny
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import SCRIPTS, read_metrics
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

import train_reward
from data import tasks
from machinery import cli, distributed, models, rewards, sources, unpadding
from train_reward import RewardModel
from utils import TokenIds, truncate

KINDS = (*tiny.KINDS, "mistral_window", "qwen3_5_text")
PRECISIONS = ("no", "bf16")
FORMS = ("fixed", "eos")
ALL = list(product(SCRIPTS, KINDS, PRECISIONS, FORMS))


def covering_array():
    """Each script meets each kind once; the rest are sums of their bits: an orthogonal array."""
    rows = []
    for (s, script), (k, kind) in product(enumerate(SCRIPTS), enumerate(KINDS)):
        precision = PRECISIONS[(k ^ s) & 1]
        form = FORMS[(k ^ s) >> 1 & 1]
        processes = 1 + ((k >> 2 ^ s ^ s >> 1) & 1)
        rows.append((script, kind, precision, form, processes))
    return rows


FEW = {n: [row[:4] for row in covering_array() if row[4] == n] for n in (1, 2)}  # processes
SINGLE = FEW[1] + [pytest.param(*x, marks=pytest.mark.exhaustive) for x in ALL if x not in FEW[1]]
SOME = [pytest.param(2, marks=pytest.mark.slow), pytest.param("all", marks=pytest.mark.exhaustive)]


def one_update(folder: Path, script, kind, form, rank=0, **changes):
    """Arguments of one update of a random tiny model on local files; weights in `folder`/out."""
    files = folder / f"files{rank}"
    task = tiny.write_task(files, kind, truncate_token=None)
    if form == "eos":
        task = tiny.eos_task(task, files)
    lm = AutoModelForCausalLM.from_pretrained(task.base_model)
    with torch.no_grad():  # if no response ends, all have the same score
        lm.get_output_embeddings().weight[lm.config.eos_token_id] *= 4
    lm.save_pretrained(task.base_model)
    sizes = dict(batch_size=8, micro_batch_tokens=36)
    if script == "sft":
        sizes.update(num_heldout=2, block_size=10, num_queries=20, num_epochs=1)
    elif script == "train_reward":
        sizes.update(num_labels=8, normalize_samples=8, rollout_batch_size=8)
    else:
        number = KINDS.index(kind)
        other = KINDS[number - 1]  # a reward model need not be of the policy's kind
        sizes.update(
            total_episodes=32,
            batch_size=32,
            num_ppo_epochs=1,
            num_minibatches=1,
            rollout_batch_size=13,
            micro_batch_tokens=4096 if number % 2 else 108,  # one part, or several
            reward_model=tiny.write_reward(files / "reward", other),
        )
        if script == "rloo":
            sizes["rloo_k"] = 4
    sizes.update(changes)
    out = str(folder / "out")
    name = folder.name
    return tiny.make_args(task, SCRIPTS[script], run_name=name, output_dir=out, lr=1e-3, **sizes)


def check_update(folder: Path, script):
    lines = read_metrics(folder.name)
    for line in lines:
        assert all(map(math.isfinite, line.values()))
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
    assert len(rows) == 36
    columns = list(zip(*rows, strict=True))
    for first, second in combinations(columns, 2):
        assert set(zip(first, second, strict=True)) == set(product(first, second))


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
    timeout = 60 + 20 * len(runs)
    said = tiny.run_python(__file__, json.dumps(runs), processes=2, cwd=tmp_path, timeout=timeout)
    assert len(set(re.findall(r"apart after \d+", said))) == 2, said[-2000:]
    assert said.count("passed") == 2 * len(runs), said[-2000:]


@pytest.mark.parametrize("script", SCRIPTS.values())
def test_every_preset_passes_its_own_checks(script, here, monkeypatch):
    """On up to 8 processes."""
    monkeypatch.setattr(rewards, "find_model", lambda name: None)  # there is no reward model
    for name, task in tasks.TASKS.items():
        args = cli.parse_args(script.Args, script.PRESETS, ["--task", name])
        for processes in (1, 2, 4, 8):
            if script is train_reward and not task.label_dataset:
                tiny.refuses(lambda: script.check(args, processes), "no labels")
            else:
                script.check(args, processes)


def check_equal(ours: Path, theirs: Path):
    """Compare the weights in two folders, which differ by the order of sums (1e-7)."""
    one = load_file(ours / "out" / "model.safetensors")
    other = load_file(theirs / "out" / "model.safetensors")
    assert one.keys() == other.keys()
    for key in one:  # without positions, a key's bias has no effect: its gradient is rounding
        if not key.endswith(("c_attn.bias", "query_key_value.bias")):
            gap = (one[key] - other[key]).abs().max()
            assert gap <= 1e-6, f"{ours}: {key} is off by {gap:.0e}"


def sample_apart(rank):
    """Under FSDP2, sampling stops at different tokens: no process waits for the other's weights."""
    contexts = tiny.make_contexts([8, 3, 5, 8, 1] * 8, 8)[rank::2]
    if rank == 0:
        contexts = contexts[:2]
    uniform = tiny.uniform(50, 20)[:, : len(contexts)]

    def sample(policy):
        with pytest.MonkeyPatch.context() as patch:
            steps = tiny.end_soon(patch)
            found = tiny.sample(policy.lm, contexts, uniform, eos_task=True, truncate_after=0)
        cut, _ = truncate(found, TokenIds(tiny.PAD, [0], [], []))
        return cut, len(steps)

    policy = tiny.make_policy("llama")
    frozen = tiny.make_policy("llama")
    args = tiny.make_args()
    accelerator = distributed.start(args)
    with accelerator.autocast():
        expected, steps = sample(policy)
    policy, _ = distributed.prepare(accelerator, policy, torch.optim.SGD(policy.parameters()), args)
    for model in (policy, distributed.freeze(accelerator, frozen)):
        with distributed.inference(accelerator, model):
            found, again = sample(model)
        assert torch.equal(found, expected)
        assert steps == again
        with torch.no_grad():
            model(contexts[:2], found[:2])  # `freeze` has set up its root
    print(f"apart after {steps}", flush=True)


def two_processes(combinations):
    """What each process of a launch does: each combination with copies, then sharded."""
    rank = int(os.environ["RANK"])
    stop = distributed.stop
    distributed.stop = lambda accelerator: accelerator.wait_for_everyone()  # one group for all
    tiny.shard_on_a_cpu()
    os.environ.update(
        FSDP_VERSION="2",
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_CPU_RAM_EFFICIENT_LOADING="true",  # the launcher's default
    )
    trained = []
    frozen = []
    distributed.prepare = tiny.keep(distributed.prepare, trained)
    distributed.freeze = tiny.keep(distributed.freeze, frozen)
    runs = []  # written before there is a process group, in which only rank 0 saves models
    for i, (script, kind, precision, form) in enumerate(combinations):
        for way in ("copies", "fsdp2"):
            folder = Path(f"run{i}_{way}")
            checkpointing = way == "fsdp2" and i % 2 == 0
            args = one_update(
                folder, script, kind, form, rank, gradient_checkpointing=checkpointing
            )
            runs.append((script, precision, way, folder, args))
    for script, precision, way, folder, args in runs:
        os.environ["ACCELERATE_USE_FSDP"] = str(way == "fsdp2").lower()
        os.environ["ACCELERATE_MIXED_PRECISION"] = precision
        AcceleratorState._reset_state(True)
        SCRIPTS[script].main(args)
        policy, _ = trained.pop()
        for model in [policy, *frozen]:
            units = sum(isinstance(module, FSDPModule) for module in model.modules())
            assert (units >= 3) == (way == "fsdp2")  # two blocks and the root
        frozen.clear()
        sources.PINNED.clear()  # the names of the two processes differ
        check_update(folder, script)  # under FSDP2, all processes load a model together
        if rank == 0:
            print(folder, "passed", flush=True)
            if way == "fsdp2":
                check_equal(folder, Path(str(folder).replace("fsdp2", "copies")))
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    AcceleratorState._reset_state(True)
    sample_apart(rank)
    stop(Accelerator())


if __name__ == "__main__":
    two_processes(json.loads(sys.argv[1]))
