"""Exact resume: weights, optimizer and progress of a run in one safetensors file.

Nothing is pickled: numbers are JSON in the header of the file. DDP, FSDP2 and single-process runs
read each other's checkpoints.
"""

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from machinery.cli import InputError

KEPT = 2  # checkpoints of a run: the newest and the one before it
FULL: dict[str, Any] = dict(full_state_dict=True, cpu_offload=True)


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights on the CPU, tied ones once; empty on all processes but the first.

    All processes have to call this.
    """
    from torch.distributed.checkpoint import state_dict as dcp  # takes a second to import

    options = dcp.StateDictOptions(**FULL)
    state: dict[str, Any] = dcp.get_model_state_dict(model, options=options)
    names = {name for name, _ in model.named_parameters()} | {n for n, _ in model.named_buffers()}
    return {name: x.contiguous() for name, x in state.items() if name in names}


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict
) -> None:
    """Write `folder/<step>.safetensors` and delete all but the newest two.

    The file is complete or absent, whenever the process is killed. All processes have to call
    this; only the first one, which has the tensors, writes.
    """
    from torch.distributed.checkpoint import state_dict as dcp

    tensors = {f"model/{name}": x for name, x in full_weights(model).items()}
    options = dcp.StateDictOptions(**FULL)
    optimizer_state: Any = dcp.get_optimizer_state_dict(model, optimizer, options=options)
    if not tensors:
        return
    for name, moments in optimizer_state["state"].items():
        for key, x in moments.items():
            tensors[f"optimizer/{key}/{name}"] = x
    groups = optimizer_state["param_groups"]
    header = json.dumps({"step": step, "groups": groups, "tensors": sorted(tensors), **state})
    folder.mkdir(exist_ok=True)
    path = folder / f"{step:08}.safetensors"
    write_atomically(path, lambda part: save_file(tensors, part, {"state": header}))
    for old in sorted(folder.glob("*.safetensors"))[:-KEPT]:
        old.unlink()


def write_atomically(path: Path, write: Any) -> None:
    """Call `write(part)` for a file beside `path`, then rename it."""
    part = path.with_name(f"{path.name}.part")
    write(part)
    sync(part)
    os.replace(part, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Restore weights and optimizer in place; return the rest of the state.

    Raises `InputError` for a damaged file, or one of another model.
    """
    from torch.distributed.checkpoint import state_dict as dcp

    try:
        with safe_open(path, "pt") as file:
            state = json.loads(file.metadata()["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if lost := sorted(set(state.pop("tensors")) - tensors.keys()):
            raise KeyError(f"no {lost[0]}")
    except (SafetensorError, OSError, KeyError, TypeError) as error:
        others = [other for other in sorted(path.parent.glob("*.safetensors")) if other < path]
        hint = f"the one before it: --resume {others[-1]}" if others else "there is no other"
        raise InputError(f"{path} is damaged ({error}); {hint}") from error
    weights: dict[str, Any] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for key, x in tensors.items():
        kind, _, rest = key.partition("/")
        if kind == "model":
            weights[rest] = x
        else:
            moment, _, name = rest.partition("/")
            moments.setdefault(name, {})[moment] = x
    names = {name for name, _ in model.named_parameters()} | {n for n, _ in model.named_buffers()}
    if wrong := sorted(names ^ weights.keys()):
        raise InputError(f"{path} is a checkpoint of another model, see {wrong[0]}")
    groups = state.pop("groups")
    for group in groups:
        group |= {key: tuple(value) for key, value in group.items() if key == "betas"}
    # Not strict: tied weights are there once.
    options = dcp.StateDictOptions(full_state_dict=True, strict=False)
    dcp.set_model_state_dict(model, weights, options=options)
    optimizer_state = {"state": moments, "param_groups": groups}
    dcp.set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    for name, p in model.named_parameters():
        if name not in moments:  # had no gradient yet; the line above gave it a step and zeros
            optimizer.state.pop(p, None)
    return state


def find_checkpoint(args: Any, script: Path) -> Path | None:
    """The checkpoint to resume from: a file, or the newest one in a run's folder.

    `latest` is the newest run of this script and task that has one. Raises `InputError`.
    """
    if args.resume is None:
        return None
    folder = Path(args.resume)
    if args.resume == "latest":
        folder = latest_run(args.task.task, script)
    found = [folder] if folder.is_file() else sorted(folder.glob("checkpoints/*.safetensors"))
    if not found or not (found[-1].absolute().parents[1] / script.name).is_file():
        raise InputError(
            f"--resume {args.resume} has no checkpoint of {script.name} on task {args.task.task}; "
            "runs write them with --save_every, and when they receive SIGTERM"
        )
    return found[-1]


def latest_run(task: str, script: Path) -> Path:
    """The folder of the newest run of this script and task that has a checkpoint."""
    started = {}
    for run in {path.parents[1] for path in Path("runs").rglob("checkpoints/*.safetensors")}:
        record = run / "args.json"
        if not (run / script.name).is_file() or not record.is_file():
            continue
        with suppress(ValueError, KeyError, TypeError):  # damaged
            if json.loads(record.read_text())["task"]["task"] == task:
                started[run] = record.stat().st_mtime_ns
    return max(started, key=lambda run: started[run], default=Path("runs"))


def meanings(args: Any) -> dict[str, str]:
    """What the names of local models and data mean now, by flag: see `meaning`."""
    task = args.task
    names = {"base_model": task.base_model, "query_dataset": task.query_dataset}
    names |= {flag: getattr(args, flag, None) for flag in ("policy_model", "ref_model")}
    if hasattr(args, "num_labels"):
        names["label_dataset"] = task.label_dataset
    if hasattr(args, "reward_model"):
        names["reward_model"] = args.reward_model
        if not args.reward_model and not task.reward_fn:
            names["reward_model"] = f"models/{task.task}/train_reward"
    found = {flag: meaning(name) for flag, name in names.items() if name}
    return {flag: text for flag, text in found.items() if text}


def meaning(name: str) -> str | None:
    """The folder of a model, behind links, or the digest of data; None for a name on the hub."""
    path = next((p for p in map(Path, (name, *re.split("[:@]", name)[:1])) if p.exists()), None)
    if path is None:
        return None
    if (path / "config.json").is_file():
        return os.path.relpath(path.resolve())
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            with open(file, "rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return f"{name} (sha256 {digest.hexdigest()[:8]})"


def check_same_run(args: Any, processes: int, run: Path) -> None:
    """Raise `InputError` if flags, or what they name, would change the numbers of a run."""
    precision = AcceleratorState().mixed_precision
    new = asdict(args) | {"processes": processes, "mixed_precision": precision}
    old = json.loads((run / "args.json").read_text())
    meant = old.get("meanings", {})
    now = {flag: text for flag, text in meanings(args).items() if flag in meant}
    new = json.loads(json.dumps(new, default=str))  # as they were written
    new, old = new | new["task"] | now, old | old["task"] | meant
    free = ["save_every", "keep_every", "resume", "run_name", "output_dir", "track", "push_to_hub"]
    changed = [
        f"{name}={value} instead of {old.get(name)}"
        for name, value in new.items()
        if name not in free and value != old.get(name)
    ]
    if changed:
        raise InputError(
            f"--resume {run} with {', '.join(changed)} would change its numbers; "
            "repeat the run's own command and add --resume"
        )
