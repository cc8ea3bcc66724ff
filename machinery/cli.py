"""The command line: a task's defaults, flags, errors as one sentence."""

import argparse
import asyncio
import glob
import inspect
import json
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from pydantic import Field, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass

from data.tasks import TASKS, Task

ROOT = Path(__file__).parents[1]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # torch's, also on other processes
RunName = Annotated[str, Field(pattern=r"^[^./][^/]*(/[^./][^/]*)*$")]  # inside of runs/
UnitFloat = Annotated[float, Field(ge=0, le=1)]  # a number in [0, 1]
OURS = {  # TRL's names of flags → ours
    "learning_rate": "lr",
    "beta": "kl_coef",
    "epsilon": "cliprange",
    "num_generations": "rloo_k",
    "num_train_epochs": "num_epochs",
    "per_device_train_batch_size": "batch_size",
    "max_completion_length": "response_length",
    "max_prompt_length": "query_length",
    "model_name_or_path": "base_model",
    "dataset_name": "query_dataset",
    "missing_eos_penalty": "unfinished_score",
}
CHECKPOINTS = "[0-9]" * 8 + ".safetensors"  # their names, by the updates that are done
# Flags that a resumed run may change:
FREE = {"save_every", "keep_every", "resume", "run_name", "output_dir", "track"}
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # characters that terminals obey
rescues: list[Callable[[], str]] = []  # call it if a reward function fails; it says what is saved
saved = ["nothing is saved yet"]  # what Ctrl-C prints


@dataclass(frozen=True, kw_only=True, config={"allow_inf_nan": False})
class RunArgs:
    """What all scripts share: memory, speed, files."""

    # Memory and speed
    micro_batch_tokens: PositiveInt = 32_768 if torch.cuda.is_available() else 4096
    """tokens per forward pass, without padding; changes results only by rounding"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    tf32: bool = True
    """use TF32 for fp32 matrix products under accelerate's --mixed_precision bf16"""

    # Files
    run_name: RunName | None = None
    """name of the folder in runs/; default: task, script, seed and time"""
    output_dir: str | None = None
    """folder for the weights; default: in the run; models/<task>/<script> links to it"""
    save_every: PositiveInt | None = None
    """updates between checkpoints (a tenth of the run); SIGTERM, SIGUSR1, SIGHUP end with one"""
    resume: str | None = None
    """runs/<name>, a checkpoint, or `latest`; `auto`: --run_name, if it has begun"""
    track: bool = False
    """also log to Weights & Biases"""


class InputError(ValueError):
    """Bad input. The message names the value and what would be right."""


@contextmanager
def about(what: str) -> Iterator[None]:
    """Name the flag, file or row that an error inside is about: `what: its message`."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{what}: {error}") from error.__cause__
    except (Exception, SystemExit) as error:  # a user's function may call sys.exit
        words = " ".join(str(error).split())  # in one line
        raise InputError(f"{what}: {type(error).__name__}: {words}") from error


def parse_args(cls: Any, presets: dict[str, dict[str, Any]], argv: list[str] | None = None) -> Any:
    """Parse the command line into the dataclass `cls`: the defaults are those of `--task NAME` in
    `TASKS`, then the script's own `presets[NAME]`; with `--resume`, the flags of that run.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--resume")
    parser.add_argument("--run_name", "--run-name")
    given, others = parser.parse_known_args(argv)
    own = cls.__dataclass_fields__
    of_task = Task.__dataclass_fields__
    known = {*own, *of_task}
    for word in others:
        name = word.partition("=")[0].lstrip("-").replace("-", "_")
        if name not in known and OURS.get(name) in known:
            raise InputError(f"--{name} is --{OURS[name]} here: docs/from_trl.md")

    task = TASKS[given.task or next(iter(TASKS))]
    values = presets.get(task.task, {})
    resume = given.resume
    if resume == "auto":
        if given.run_name is None:
            raise InputError("--resume auto needs the --run_name to continue or begin")
        folder = Path("runs", given.run_name)
        if any(folder.glob(f"checkpoints/{CHECKPOINTS}")):
            resume = str(folder)
    if resume and resume != "auto":
        checkpoint = find_checkpoint(resume, Path(inspect.getfile(cls)).name, given.task)
        values = read_args(checkpoint.parents[1])
        resume = str(checkpoint)
    task = replace(task, **{name: x for name, x in values.items() if name in of_task})
    defaults = {}
    for name, field in own.items():
        if name in values:
            defaults[name] = values[name]
        elif isinstance(field.default, str):
            defaults[name] = field.default.replace("<task>", task.task)
    defaults["task"] = task

    # --help begins with the task, and ends with what people change least: memory and files.
    ordered = sorted(own, key=lambda name: name in RunArgs.__dataclass_fields__)
    cls.__dataclass_fields__ = {name: own[name] for name in ordered}
    cls.__annotations__["task"] = tyro.conf.Suppress[tyro.conf.Fixed[Task]]
    flat = tyro.conf.arg(name="")  # fields are flags of this name, in one list
    parts = [
        ("task", Annotated[Task, flat], task),
        ("script", Annotated[cls, flat], cls(**defaults)),
    ]
    about_tasks = textwrap.wrap(f"--task selects the defaults: {', '.join(TASKS)}.")
    flags = [word for word in argv if word not in ("-h", "--help")]
    description = "\n\n".join([cls.__doc__, *about_tasks])
    options: Any = dict(use_underscores=True, description=description)
    try:
        found = tyro.cli(make_dataclass("Flags", parts), args=flags, **options)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"--{first['loc'][0]} {first['input']}: {first['msg']}") from None
    if flags != argv:  # help with the values of the other flags, such as a recipe's
        tyro.cli(type(found), default=found, args=["--help"], **options)
    return replace(found.script, task=found.task, resume=resume)


def find_checkpoint(name: str, script: str, task: str | None) -> Path:
    """A checkpoint file, or the newest of a run; `latest`: of this script's and task's runs."""
    source = "runs" if name == "latest" else name
    pattern = f"{glob.escape(source)}/**/checkpoints/{CHECKPOINTS}"
    found = []
    for file in (source, *glob.glob(pattern, recursive=True)):  # follows links
        path = Path(file)
        folder = path.parent.parent
        if not path.match(CHECKPOINTS) or not (folder / script).is_file():
            continue
        if task in (None, read_args(folder)["task"]):
            begun = (folder / "args.json").stat().st_mtime_ns
            found.append((begun, path.name, path))
    if not found:
        raise InputError(f"--resume {name} has no checkpoint of {script} on task {task or '*'}")
    return max(found)[2]


def read_args(folder: Path) -> dict[str, Any]:
    """What is in `args.json`, with the paths of this project's files on this machine."""
    values = json.loads((folder / "args.json").read_text())
    for name, value in values.items():
        path = str(value).partition(":")[0]  # without :function
        if "/" in path and not os.path.exists(path) and (ROOT / path).exists():
            values[name] = str(ROOT / value)
    return values


def run(main: Callable, cls: type, presets: dict[str, dict[str, Any]] | None = None) -> None:
    """Call `main(args)`; bad input ends with its cause, one sentence and exit code 2."""
    out: Any = sys.stdout
    out.reconfigure(errors="replace")  # not all encodings have all characters, as stderr does
    try:
        main(tyro.cli(cls, use_underscores=True) if presets is None else parse_args(cls, presets))
    except InputError as error:
        if error.__cause__:
            print_cause(error.__cause__)
        sentence = f"{Path(sys.argv[0]).name}: error: {error}"
        print(escape(sentence), file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends at once
        if presets is not None:
            say(f"\n{saved[-1]}")
        sys.exit(130)


def escape(text: str) -> str:
    """Show control characters as escapes: a text from data must not change the terminal."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def print_cause(error: BaseException) -> None:
    """Print a traceback from the first line that is not ours: a user's file, or a library."""
    frames = error.__traceback__
    ours = (str(Path(__file__).parent), str(Path(asyncio.__file__).parent), "<frozen")
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename.startswith(ours):
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames))


def is_main() -> bool:
    """Whether this is the main process, or the only one so far."""
    return not dist.is_initialized() or dist.get_rank() == 0


def say(message: str) -> None:
    """Print on the main process only."""
    if is_main():
        print(escape(message), flush=True)


say_once = cache(say)


def check_divisible(name: str, value: int, unit: int, reason: str) -> None:
    """Raise `InputError` if `unit` does not divide `value`; name the next that works."""
    if value % unit:
        smaller = value // unit * unit
        use = f"{smaller} or {smaller + unit}" if smaller else unit
        raise InputError(f"{name}={value} is not divisible by {reason} = {unit}; use {use}")
