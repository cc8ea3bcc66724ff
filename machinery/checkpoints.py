"""Exact resume: weights, optimizer and progress of a run in one safetensors file.

Nothing is pickled: numbers are JSON in the header of the file. DDP, FSDP2 and single-process runs
read each other's checkpoints.
"""

import hashlib
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from machinery.cli import InputError, about
from machinery.rewards import reward_model_of

KEPT = 2  # newest checkpoints of a run. FREE: flags that a resumed run may change
FREE = ("save_every", "keep_every", "resume", "run_name", "output_dir", "track", "push_to_hub")


def names_of(model: nn.Module) -> set[str]:
    """The names of all weights and buffers that are saved, tied ones once."""
    saved = model.state_dict().keys()  # without rotary angles and the like
    return saved & {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}


def full_state(model: nn.Module, *optimizers: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All weights on the CPU, tied ones once, and the optimizer's state by names of weights.

    Both are empty on all processes but the first. All processes have to call this.
    """
    from torch.distributed.checkpoint import state_dict as dcp  # takes a second to import

    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any = dcp.get_state_dict(model, optimizers, options=options)
    names = names_of(model)
    return {name: x.contiguous() for name, x in state[0].items() if name in names}, state[1]


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict
) -> None:
    """Write `folder/<step>.safetensors` and delete all but the newest two.

    The file is complete or absent, whenever the process is killed. All processes have to call
    this; only the first one, which has the tensors, writes.
    """
    weights, optimizer_state = full_state(model, optimizer)
    if not weights:
        return
    tensors = {f"model/{name}": x for name, x in weights.items()}
    for name, moments in optimizer_state["state"].items():
        for key, x in moments.items():
            tensors[f"optimizer/{key}/{name}"] = x
    header = json.dumps({"step": step, "groups": optimizer_state["param_groups"], **state})
    folder.mkdir(exist_ok=True)
    path = folder / f"{step:08}.safetensors"
    part = path.with_suffix(".part")
    save_file(tensors, part, {"state": header})
    part.replace(path)
    for old in sorted(folder.glob("*.safetensors"))[:-KEPT]:
        old.unlink()


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Restore weights and optimizer in place; return the rest of the state.

    Raises `InputError` for a damaged file, or one of another model.
    """
    from torch.distributed.checkpoint import state_dict as dcp

    weights: dict[str, Any] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    with about(f"{path} is damaged; --resume the one before it"), safe_open(path, "pt") as file:
        state = json.loads(file.metadata()["state"])
        for key in file.keys():  # noqa: SIM118
            _, *moment, name = key.split("/")
            if moment:
                moments.setdefault(name, {})[moment[0]] = file.get_tensor(key)
            else:
                weights[name] = file.get_tensor(key)
    if wrong := sorted(names_of(model) ^ weights.keys()):
        raise InputError(f"{path} is of another model: only one of them has {wrong[0]}")
    # Not strict: tied weights occur once in the file.
    options = dcp.StateDictOptions(full_state_dict=True, strict=False)
    saved: Any = {"state": moments, "param_groups": state.pop("groups")}
    both: Any = dict(model_state_dict=weights, optim_state_dict=saved)
    dcp.set_state_dict(model, optimizer, **both, options=options)
    for name, p in model.named_parameters():
        if name not in moments:  # had no gradient yet; set_state_dict made zeros for it
            optimizer.state.pop(p, None)
    return state


def find_checkpoint(args: Any, script: Path) -> Path | None:
    """The checkpoint to resume from: a file, or the newest one in a run's folder.

    `latest` is the newest run of this script and task that has one. Raises `InputError`.
    """
    if args.resume is None:
        return None
    source = Path("runs" if args.resume == "latest" else args.resume)
    files = [source] if source.is_file() else source.rglob("checkpoints/*.safetensors")
    found = []
    for path in files:
        record = path.parent.parent / "args.json"
        complete = record.is_file() and record.with_name(script.name).is_file()
        if complete and json.loads(record.read_text())["task"]["task"] == args.task.task:
            found.append((record.stat().st_mtime_ns, path.name, path))
    if not found:
        wanted = f"checkpoint of {script.name} on task {args.task.task}"
        raise InputError(f"--resume {args.resume} has no {wanted}; --save_every writes them")
    return max(found)[2]


def fixed_values(args: Any, processes: int) -> dict[str, Any]:
    """The flags that a resumed run may not change, with the files and folders that they name.

    A model is recorded as its folder, with links resolved, and a data file with its digest.
    """
    values = asdict(args) | asdict(args.task) | {"processes": processes}
    values["mixed_precision"] = AcceleratorState().mixed_precision
    if "reward_model" in values:
        values["reward_model"] = reward_model_of(args)
    free = FREE if "num_labels" in values else (*FREE, "label_dataset")  # other scripts read none
    for name in free:
        values.pop(name, None)
    for name, value in values.items():
        path = re.split("[:@]", value)[0] if isinstance(value, str) else ""  # without @split
        if os.path.isfile(path):  # not Path's, which raises for long texts
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            values[name] = f"{value} (sha256 {digest[:8]})"
        elif os.path.isdir(path):
            values[name] = os.path.relpath(Path(path).resolve()) + value[len(path) :]
    return json.loads(json.dumps(values, default=str))


def check_same_run(args: Any, processes: int, run: Path) -> None:
    """Raise `InputError` if flags, or what they name, would change the numbers of a run."""
    old = json.loads((run / "args.json").read_text())["fixed"]
    new = fixed_values(args, processes)
    changed = [f"{k}={v} instead of {old.get(k)}" for k, v in new.items() if v != old.get(k)]
    if changed:
        raise InputError(f"--resume {run} would change its numbers: {', '.join(changed)}")
