"""Exact resume: weights, optimizer and progress in one safetensors file; nothing is pickled."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from machinery.cli import CHECKPOINTS, FREE, ROOT, InputError, about, read_args
from machinery.sources import COMMIT, PINNED, digest

KEPT = 2  # newest checkpoints of a run
# What only some scripts read, and a flag that they have. The others do not compare it.
READ_WITH = dict(label_dataset="num_labels", reward_fn="reward_model", gold_fn="reward_model")


def names_of(model: nn.Module) -> set[str]:
    """The names of all weights and buffers that are saved, tied ones once."""
    saved = model.state_dict().keys()  # without rotary angles and the like
    named: list[Any] = [*model.named_parameters(), *model.named_buffers()]
    return {name for name, _ in named if name in saved}


def full_state(model: nn.Module, *optimizers: Any) -> tuple[dict, dict]:
    """All weights on the CPU, tied ones once; the optimizer's state by their names.

    All processes have to call this; both are empty on all but the first.
    """
    from torch.distributed.checkpoint import state_dict as dcp  # slow to import

    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: Any
    weights, optimizer_state = dcp.get_state_dict(model, optimizers, options=options)
    names = names_of(model)
    weights = {name: x.contiguous() for name, x in weights.items() if name in names}
    return weights, optimizer_state


def take_tensors(x: Any, tensors: dict[str, Tensor], place: str = "") -> Any:
    """`x` for JSON: tensors in nested dicts and lists move into `tensors`, named by their place."""
    if isinstance(x, Tensor):
        name = place.removeprefix("/")
        is_own_state = name.startswith("state")  # may share memory, which no file can
        tensors[name] = x.detach().to("cpu", copy=is_own_state).contiguous()
        return {"tensor": name, "device": x.device.type}
    if isinstance(x, dict):
        return {key: take_tensors(y, tensors, f"{place}/{key}") for key, y in x.items()}
    if isinstance(x, list | tuple):
        return [take_tensors(y, tensors, f"{place}/{i}") for i, y in enumerate(x)]
    return x


def parse(text: str, tensors: dict[str, Tensor]) -> Any:
    """What `take_tensors` was given. Tuples are lists, keys such as "0" numbers (Adam's)."""

    def restore(x: dict[str, Any]) -> Any:
        if "tensor" in x:
            return tensors[x["tensor"]].to(x["device"])
        return {int(key) if key.isdigit() else key: value for key, value in x.items()}

    return json.loads(text, object_hook=restore)


def save_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: Any, state: Any) -> None:
    """Write `folder/<step>.safetensors` and delete all but the newest two.

    The file is complete or absent, whenever the process is killed. All processes have to call
    this, and the first one writes.
    """
    weights, optimizer_state = full_state(model, optimizer)
    if not weights:
        return
    tensors: dict[str, Tensor] = {}
    parts = {"step": step, "model": weights, "optimizer": optimizer_state, "state": state}
    header = json.dumps(take_tensors(parts, tensors))
    folder.mkdir(exist_ok=True)
    part = folder / "new.part"
    save_file(tensors, part, {"state": header})
    shutil.copymode(folder.parent / "args.json", part)  # safetensors lets only the owner read it
    part.replace(folder / f"{step:08}.safetensors")
    for old in sorted(folder.glob(CHECKPOINTS))[:-KEPT]:
        old.unlink()


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Restore weights and optimizer in place; return the rest: `step` and `state`."""
    from torch.distributed.checkpoint import state_dict as dcp

    with about(f"{path} is damaged; --resume the one before it"), safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        saved = parse(file.metadata()["state"], tensors)
        weights, optimizer_state = saved.pop("model"), saved.pop("optimizer")
    if wrong := sorted(names_of(model) ^ weights.keys()):
        raise InputError(f"{path} is of another model: only one of them has {wrong[0]}")
    dcp.set_state_dict(
        model,
        optimizer,
        model_state_dict=weights,
        optim_state_dict=optimizer_state,
        # Not strict: tied weights occur once in the file.
        options=dcp.StateDictOptions(full_state_dict=True, strict=False),
    )
    for name, p in model.named_parameters():
        if name not in optimizer_state["state"]:  # no gradient; set_state_dict made zeros
            optimizer.state.pop(p, None)
    return saved


def describe(args: Any, processes: int) -> dict[str, Any]:
    """The flags, the folders, commits and digests of what they name, the launch.

    Paths inside of the project are relative to it: `read_args` finds them in another copy.
    """
    values = {**asdict(args), **asdict(args.task), "processes": processes}
    values["mixed_precision"] = AcceleratorState().mixed_precision
    inside = f"{ROOT}{os.sep}"
    for name, value in list(values.items()):
        if not isinstance(value, str):
            continue
        path = value
        if not os.path.exists(path):  # not Path's, which raises for long texts
            path = value.rpartition(":")[0]  # without :function
        if os.path.isfile(path):
            values[f"sha256 of {name}"] = digest(Path(path))[:8]
        elif os.path.isdir(path) and name.endswith(("_model", "_tokenizer")):
            value = PINNED.get(path, os.path.realpath(path))
            for file in Path(value).glob("*.[js]*"):  # .json, .jinja, .safetensors
                values[f"sha256 of {name}/{file.name}"] = digest(file)[:8]
            if not value.startswith(inside):
                value = os.path.relpath(value)
        values[name] = value.removeprefix(inside)
    for name, found in PINNED.items():
        if COMMIT.fullmatch(found):
            values[f"commit of {name}"] = found
    return json.loads(json.dumps(values, default=str))


def check_same_run(args: Any, processes: int) -> None:
    """Raise `InputError` if flags, or what they name, would change a run's numbers."""
    run = Path(args.resume).parents[1]
    record = read_args(run)
    given = {**vars(args), **vars(args.task)}
    for name, found in record.items():
        if name.startswith("commit of "):
            PINNED[name.removeprefix("commit of ")] = found
    free = FREE.union(name for name, flag in READ_WITH.items() if flag not in given)
    changed = []
    for name, value in describe(args, processes).items():
        old = record.get(name, value)
        if old not in (value, given.get(name)) and name.split()[-1] not in free:
            changed.append(f"{name}={value} instead of {old}")
    if changed:
        words = f"--resume {args.resume} would change its numbers: {', '.join(changed)}"
        raise InputError(f"{words}. For more episodes, start a new run: docs/using.md")
