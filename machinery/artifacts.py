"""Files of a run besides its metrics: model folders, the link to the last one, tracker logs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import TensorBoardTracker, WandBTracker
from safetensors.torch import save_file
from torch import Tensor

from machinery.cli import about

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tyro", "numpy")


def replace_link(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to a folder, atomically; a copy if that is refused."""
    link.parent.mkdir(parents=True, exist_ok=True)
    part = link.with_name(f"{link.name}.part{os.getpid()}")
    try:
        part.symlink_to(os.path.relpath(target.resolve(), link.parent.resolve()))
        if os.name == "nt":
            link.unlink(missing_ok=True)  # Windows replaces no links to folders
        part.replace(link)
    except OSError:  # Windows without developer mode, some network drives
        shutil.copytree(target, link)


def describe_environment() -> dict[str, Any]:
    """Versions, and the commit, which ends with "-dirty" if tracked files have changed since."""
    command = "git describe --always --exclude=* --abbrev=40 --dirty"
    options: Any = dict(cwd=ROOT, shell=True, capture_output=True, text=True)
    commit = subprocess.run(command, check=False, **options).stdout  # "" if there is no git
    versions = {x: sys.modules[x].__version__ for x in PACKAGES if x in sys.modules}
    return {"commit": commit.strip() or None, "python": sys.version, "versions": versions}


def start_trackers(run: Any, config: dict[str, Any]) -> list[Any]:
    """The trackers: TensorBoard, cut back to the checkpoint, and Weights & Biases with --track."""
    step, folder = int(run.source.stem) if run.source else 0, run.folder
    trackers: list[Any] = [TensorBoardTracker("", folder, purge_step=step)]
    trackers[0].start()
    if run.args.track:
        project = os.environ.get("WANDB_PROJECT", "onefile-rlhf")
        with about("--track; WANDB_MODE=offline works without a network"):
            trackers.append(WandBTracker(project, config=config, name=folder.name, dir=folder))
            trackers[1].start()
    return trackers


def stop_at(model: Any, token: int | None) -> None:
    """Let `generate` of the saved model stop at `token`, where it was trained to, too."""
    ends = np.ravel(model.generation_config.eos_token_id).tolist()  # one, several, or [None]
    if token not in ends:
        model.generation_config.eos_token_id = [token, *(x for x in ends if x is not None)]


def save_model(
    model: Any,
    tokenizer: Any,
    folder: Path,
    weights: dict[str, Tensor],
    heads: dict[str, dict[str, Tensor]],
    replace: bool = False,
) -> None:
    """Write model, tokenizer and `<head>.safetensors` into a folder.

    Written under a temporary name and renamed, which fails if `folder` exists and is not empty.
    `replace`: delete it first; a resumed run may save its weights again.
    """
    part = folder.with_name(f".{folder.name}.part")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(part, ignore_errors=True)  # left by a run that was killed while writing
    model.save_pretrained(part, state_dict=weights)
    tokenizer.save_pretrained(part)
    for name, head in heads.items():
        save_file(head, part / f"{name}.safetensors")
    if replace:
        shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
