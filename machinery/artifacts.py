"""What a run writes besides metrics: model folders, a link, trackers' logs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from accelerate.tracking import TensorBoardTracker, WandBTracker
from safetensors.torch import save_file

from machinery.cli import about

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tyro", "numpy")


def replace_link(link: Path, target: Path) -> None:
    """Make `link` a relative link to a folder; a copy if that is refused."""
    link.parent.mkdir(parents=True, exist_ok=True)
    part = link.with_name(f".{link.name}.{os.getpid()}")  # another run may end now, too
    try:
        part.symlink_to(os.path.relpath(target.resolve(), link.parent.resolve()))
        part.replace(link)
    except OSError:  # Windows without developer mode, some network drives
        shutil.copytree(target, link)


def describe_environment() -> dict[str, Any]:
    """Versions, and the commit; "-dirty" if tracked files have changed since."""
    command = "git describe --always --exclude=* --abbrev=40 --dirty"
    options: Any = dict(cwd=ROOT, shell=True, capture_output=True, text=True)
    commit = subprocess.run(command, check=False, **options).stdout  # "" if there is no git
    versions = {x: sys.modules[x].__version__ for x in PACKAGES if x in sys.modules}
    return {"commit": commit.strip() or None, "python": sys.version, "versions": versions}


def start_trackers(run: Any, config: dict[str, Any]) -> list[Any]:
    """TensorBoard, cut back to the checkpoint, and Weights & Biases with --track."""
    step, folder = int(run.source.stem) if run.source else 0, run.folder.absolute()
    trackers: list[Any] = [TensorBoardTracker("", folder, purge_step=step)]
    trackers[0].start()
    if run.args.track:
        project = os.environ.get("WANDB_PROJECT", "onefile-rlhf")
        with about("--track; WANDB_MODE=offline works without a network"):
            options: Any = dict(config=config, name=folder.name, dir=folder, resume="allow")
            trackers.append(WandBTracker(project, id=config["wandb_id"], **options))
            trackers[1].start()
    return trackers


def save_model(
    model: Any, tokenizer: Any, folder: Path, weights: dict, heads: dict, replace: bool = False
) -> None:
    """Write a folder of model, tokenizer and `<head>.safetensors`, or nothing."""
    part = folder.with_name(f".{folder.name}.part")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(part, ignore_errors=True)  # left by a run that was killed
    model.save_pretrained(part, state_dict=weights)
    tokenizer.save_pretrained(part)
    for name, head in heads.items():
        save_file(head, part / f"{name}.safetensors")
    for path in part.glob("*.safetensors"):  # else only their owner could read them
        shutil.copymode(part / "config.json", path)
    if replace:  # a resumed run may save its weights again
        shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)  # fails if it exists and is not empty
