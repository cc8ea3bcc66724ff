"""Files of a run besides its metrics: model folders, tracker logs."""

import filecmp
import json
import os
import platform
import shutil
import subprocess
import time
from contextlib import suppress
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import torch
from accelerate.tracking import TensorBoardTracker, WandBTracker
from safetensors.torch import save_file
from torch import Tensor

from machinery.cli import about

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tyro", "numpy")


def models_link(args: Any, script: Path) -> Path:
    """`models/<task>/<script>`: a link to the weights of the last run that finished."""
    return Path("models") / args.task.task / script.stem


def create_run_folder(args: Any, script: Path) -> Path:
    """Create a new folder in runs/. If the default name is taken, append a number."""
    if args.run_name:
        folder = Path("runs") / args.run_name
        folder.mkdir(parents=True)
        return folder
    when = time.strftime("%Y%m%d-%H%M%S")
    name = f"{args.task.task}__{script.stem}__{args.seed}__{when}"
    for i in count(1):
        folder = Path("runs") / (name if i == 1 else f"{name}-{i}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def describe_environment(folder: Path) -> dict[str, Any]:
    """Commit and versions; uncommitted changes of tracked files are written to `changes.diff`."""

    def git(*arguments: str) -> bytes:
        if not shutil.which("git"):
            return b""
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, check=False).stdout

    if changes := git("diff", "HEAD"):
        (folder / "changes.diff").write_bytes(changes)
    return {
        "commit": git("rev-parse", "HEAD").decode().strip() or None,
        "changes": bool(changes),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES}
        | {"torch": torch.__version__},  # with +cu130 or +cpu, which the wheel's metadata may lack
    }


def start_trackers(folder: Path, config: dict[str, Any], track: bool) -> list[Any]:
    """TensorBoard's tracker, and W&B's if `track`."""
    trackers: list[Any] = [TensorBoardTracker("", folder)]
    if track:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "onefile-rlhf")
        settings = wandb.Settings(init_timeout=30, finish_timeout=60, silent=True)
        where = dict(name=folder.name, dir=str(folder.absolute()))
        trackers.append(WandBTracker(project, config=config, settings=settings, **where))
    for tracker in trackers:
        with about("--track; WANDB_MODE=offline works without a network"):
            tracker.start()
    return trackers


def save_model(
    model: Any,
    tokenizer: Any,
    folder: Path,
    weights: dict[str, Tensor],
    heads: dict[str, dict[str, Tensor]],
) -> None:
    """Write model, tokenizer and `<head>.safetensors` into a folder.

    Written to a temporary folder and renamed. An existing folder is never overwritten; one with the
    same files, of a run that was killed after this and resumed, is kept.
    """
    part = folder.with_name(f".{folder.name}.part")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed while it wrote this
    model.save_pretrained(part, state_dict=weights)
    tokenizer.save_pretrained(part)
    for name, head in heads.items():
        save_file(head, part / f"{name}.safetensors")
    names = os.listdir(part)
    same, _, _ = filecmp.cmpfiles(part, folder, names, shallow=False)
    if len(same) == len(names):
        shutil.rmtree(part)
    else:
        part.rename(folder)  # fails if the folder has other files


def data_of(weights: Path) -> list[str]:
    """The data that the run of these weights read."""
    run = json.loads((weights.parent / "args.json").read_text())
    return [run["meanings"].get(x, run["task"][x]) for x in ("query_dataset", "label_dataset")]


def replace_link(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target`, atomically; say if its data was another."""
    with suppress(OSError, ValueError, KeyError):  # there was no link, or not to a run
        if data_of(link.resolve()) != data_of(target):
            print(f"{link} no longer points to {link.resolve().parent.name}, a run of other data")
    link.parent.mkdir(parents=True, exist_ok=True)
    part = link.with_name(f"{link.name}.part{os.getpid()}")
    part.symlink_to(os.path.relpath(target.resolve(), link.parent.resolve()))
    part.replace(link)
