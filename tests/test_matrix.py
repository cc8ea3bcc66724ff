"""Every script × model kind × precision × fixed length or EOS, from the command's own `main`, on one process; and every
script × model kind on two (bf16): finite, the first ratio exactly 1, the saved folder loads. And every script × task's
preset × number of processes passes its own checks.
"""

import importlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import tasks
import utils
from benchmarks.same import shard_on_a_cpu

SCRIPTS = ("ppo", "rloo", "train_reward", "sft")
FORMS = ("fixed", "eos")


def one_update(folder: Path, script: str, kind: str, form: str, rank: int = 0) -> Any:
    """Arguments of one update, or step, of a random tiny model of this kind on local files, into `folder`/out."""
    files = folder / f"files{rank}"
    task = tiny.write_task(files, kind)
    task = tiny.eos_task(task, files) if form == "eos" else replace(task, truncate_token=None)
    lm, tokenizer = (
        AutoModelForCausalLM.from_pretrained(task.base_model),
        AutoTokenizer.from_pretrained(task.base_model),
    )
    with torch.no_grad():  # a response without its end scores the penalty, as all others do: nothing to learn from
        lm.get_output_embeddings().weight[tokenizer.eos_token_id] *= 4
    lm.save_pretrained(task.base_model)
    common = dict(run_name=folder.name, output_dir=str(folder / "out"), lr=1e-3)
    if script == "sft":
        sizes = dict(num_heldout=2, batch_size=8, micro_batch_tokens=36, block_size=10)
        task = replace(task, num_queries=20)
    elif script == "train_reward":
        sizes = dict(num_labels=8, batch_size=8, micro_batch_tokens=96, normalize_samples=8, rollout_batch_size=8)
    else:
        reward = tiny.write_reward(files / "reward", kind)
        tokens = (108, 4096)[list(tiny.KINDS).index(kind) % 2]  # several micro-batches, or one whose forward is kept
        sizes = dict(total_episodes=32, batch_size=32, micro_batch_tokens=tokens, rollout_batch_size=13, eval_queries=4)
        sizes |= dict(num_ppo_epochs=1, reward_model=reward)
    return importlib.import_module(script).Args(task=task, **common, **sizes)


def check_update(folder: Path, script: str) -> None:
    """What one update has to leave behind."""
    lines = [json.loads(line) for line in Path("runs", folder.name, "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    if script == "train_reward":
        assert utils.RewardModel.from_pretrained(folder / "out").config.pad_id == tiny.WORDS
        return
    before = utils.load_lm(str(folder / "files0" / "model")).state_dict()
    after = AutoModelForCausalLM.from_pretrained(folder / "out").state_dict()
    assert before.keys() == after.keys() and any(not before[name].equal(after[name]) for name in before)
    if script in ("ppo", "rloo"):  # L6: of every token or completion, before the only step
        assert lines[0]["ppo/val/ratio_min"] == lines[0]["ppo/val/ratio_max"] == 1
        assert lines[0]["objective/ended"] > 0
        assert abs(lines[0]["objective/kl"]) < 0.05  # the reference is the policy, forwarded in other batches


def check_equal(ours: Path, theirs: Path, within: float) -> None:
    """Weights, their names and the configuration in two folders; sft.py's norm of all gradients adds in another order."""
    files = [path.name for path in (theirs / "out").glob("*.safetensors")]
    assert files and sorted(files) == sorted(path.name for path in (ours / "out").glob("*.safetensors"))
    for name in files:
        a, b = load_file(ours / "out" / name), load_file(theirs / "out" / name)
        assert a.keys() == b.keys()
        for key in b:
            gap = (a[key] - b[key]).abs()
            if within and key.endswith("c_attn.bias"):
                gap.view(3, -1)[1] = 0  # of GPT-2's keys: it changes nothing, and its gradient is rounding alone
            assert gap.max() <= within, key
    a, b = ((folder / "out" / "config.json").read_text().replace(folder.name, "") for folder in (ours, theirs))
    assert a == b


@pytest.fixture
def precision(request, monkeypatch):
    """fp32, or bf16 autocast as the launcher asks for it."""
    AcceleratorState._reset_state(True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", request.param)
    yield request.param
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", ["no", "bf16"], indirect=True)
@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_24_every_script_takes_an_update_of_every_kind_of_model(script, kind, precision, form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    importlib.import_module(script).main(one_update(folder, script, kind, form))
    check_update(folder, script)


def test_24_on_two_processes_in_bf16_by_ddp_and_by_fsdp2(tmp_path):
    """All kinds and scripts one after the other, in one launch; sharded ones, of which every second kind checkpoints its
    activations, are equal to the bit to those that do neither."""
    env = os.environ | {"ACCELERATE_MIXED_PRECISION": "bf16", "PYTHONPATH": f"{utils.ROOT}:{utils.ROOT / 'tests'}"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("passed") == 2 * len(SCRIPTS) * len(tiny.KINDS), done.stdout[-2000:]


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_25_every_preset_passes_its_own_checks(script, task, processes):
    module = importlib.import_module(script)
    module.check(tasks.parse_args(module.Args, module.PRESETS, ["--task", task]), processes)


def spy_on_shards(name: str) -> list[tuple[int, bool]]:
    """Of every model that `utils.prepare` or `utils.freeze` returns: how many units it is sharded in, and whether all
    of its parameters are."""
    function, seen = getattr(utils, name), []

    def spy(*args):
        made = function(*args)
        model = made[0] if isinstance(made, tuple) else made
        units = sum(isinstance(module, FSDPModule) for module in model.modules())
        seen.append((units, all(isinstance(p, DTensor) for p in model.parameters())))
        return made

    setattr(utils, name, spy)
    return seen


def two_processes() -> None:
    """This file under a launcher: every kind and script, the two forms in turn."""
    rank, stop = int(os.environ["RANK"]), utils.stop_accelerator
    utils.stop_accelerator = lambda accelerator: accelerator.wait_for_everyone()  # one process group for all
    shard_on_a_cpu()
    learning, frozen = spy_on_shards("prepare"), spy_on_shards("freeze")
    os.environ |= {"FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    pairs, ways = [(kind, script) for kind in tiny.KINDS for script in SCRIPTS], ("ddp", "fsdp2")
    runs = []  # before there is a process group, in which the library saves nothing on rank 1
    for i, (kind, script) in enumerate(pairs):
        folders = [Path(f"{kind}_{script}_{way}") for way in ways]
        args = [one_update(folder, script, kind, FORMS[(i + i // 4) % 2], rank) for folder in folders]
        runs.append((script, folders, [args[0], replace(args[1], gradient_checkpointing=i // 4 % 2 == 0)]))
    for script, folders, arguments in runs:
        for way, folder, args in zip(ways, folders, arguments, strict=True):
            os.environ["ACCELERATE_USE_FSDP"] = str(way == "fsdp2").lower()
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"  # the launcher's default
            AcceleratorState._reset_state(True)
            importlib.import_module(script).main(args)
            assert len(learning) == 1 and len(frozen) == (script in ("ppo", "rloo"))
            while learning or frozen:
                units, of_parameters = (learning or frozen).pop()
                assert (units >= 3, of_parameters) == (way == "fsdp2", way == "fsdp2")  # two blocks and the root
            if rank == 0:
                check_update(folder, script)
                print(folder, "passed", flush=True)
        if rank == 0:
            check_equal(*folders, within=1e-6 if script == "sft" else 0)
    stop(utils.Accelerator())


if __name__ == "__main__":
    two_processes()
