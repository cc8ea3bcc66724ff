"""Command line of the scripts: flags with the defaults of a task, and errors as one sentence."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from data.tasks import TASKS, Task

ON_GPU = torch.cuda.is_available()  # some defaults are larger there
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # a seed of torch, also on other processes
UnitFloat = Annotated[float, Field(ge=0, le=1)]  # a number in [0, 1]


@dataclass(frozen=True, kw_only=True, config={"allow_inf_nan": False})
class RunArgs:
    """What all scripts share: memory, speed, files. `--help` lists these flags last."""

    # Memory and speed
    micro_batch_tokens: PositiveInt = 32_768 if ON_GPU else 4096
    """tokens per forward pass, without padding; changes results only by rounding"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    tf32: bool = True
    """use TF32 for fp32 matrix products under accelerate's --mixed_precision bf16"""
    cuda_graphs: bool = True
    """replay the decoding step as a CUDA graph; only on GPUs and without FSDP2"""

    # Files
    run_name: str | None = None
    """name of the folder in runs/; default: task, script, seed and time"""
    output_dir: str | None = None
    """folder for the weights; default: in the run; models/<task>/<script> links to it"""
    save_every: PositiveInt | None = None
    """updates between checkpoints; SIGTERM, SIGUSR1, SIGHUP save one and end the run"""
    resume: str | None = None
    """runs/<name>, a checkpoint file, or `latest`: continue it with the same flags"""
    track: bool = False
    """also log to Weights & Biases"""
    push_to_hub: str | None = None
    """upload the weights to this new private repository, owner/name"""


class InputError(ValueError):
    """Bad input. The message names the value and what would be right."""


@contextmanager
def about(what: str) -> Iterator[None]:
    """Name the flag, file or row that an error inside is about: `what: the error's own message`.

    It becomes an `InputError`, which keeps the first error as its cause.
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{what}: {error}") from error.__cause__
    except (Exception, SystemExit) as error:  # a user's function may call sys.exit
        raise InputError(f"{what}: {type(error).__name__}: {error}") from error


def parse_args(cls: Any, presets: dict[str, dict[str, Any]], argv: list[str] | None = None) -> Any:
    """Parse the command line into the dataclass `cls`.

    `--task NAME` selects the defaults: the task's entry in `TASKS`, then the script's own
    `presets[NAME]`. argparse reports an unknown task, tyro all other bad flags.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--task", choices=TASKS, default=next(iter(TASKS)))
    name = parser.parse_known_args(argv)[0].task
    task_fields = {field.name for field in fields(Task)}
    preset = presets.get(name, {})
    of_task = {key: value for key, value in preset.items() if key in task_fields}
    of_script = {key: value for key, value in preset.items() if key not in task_fields}
    default = cls(task=replace(TASKS[name], **of_task), **of_script)
    shared, found = RunArgs.__dataclass_fields__, cls.__dataclass_fields__.items()
    cls.__dataclass_fields__ = dict(sorted(found, key=lambda x: x[0] in shared))  # own flags first
    return tyro.cli(cls, default=default, args=argv, config=(tyro.conf.OmitArgPrefixes,))


def run(main: Callable, cls: type, presets: dict[str, dict[str, Any]] | None = None) -> None:
    """Call `main(args)`. On bad input, print the cause and one sentence; the exit code is 2."""
    streams: Any = sys.stdout, sys.stderr
    for stream in streams:
        stream.reconfigure(errors="replace")  # not all encodings have all characters
    try:
        main(tyro.cli(cls) if presets is None else parse_args(cls, presets))
    except InputError as error:
        if error.__cause__:
            traceback.print_exception(error.__cause__)
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def say(message: str) -> None:
    """Print on the main process only."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(message, flush=True)


def check_divisible(name: str, value: int, unit: int, reason: str) -> None:
    """Raise `InputError` if `unit` does not divide `value`; name the next value that works."""
    if value % unit:
        larger = (value // unit + 1) * unit
        raise InputError(f"{name}={value} is not divisible by {reason} = {unit}; use {larger}")
