"""The command line: a task's defaults, flags, errors as one sentence."""

import argparse
import functools
import glob
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from data.tasks import TASKS, Task

Seed = Annotated[int, Field(ge=0, lt=2**63)]  # torch's, also on other processes
UnitFloat = Annotated[float, Field(ge=0, le=1)]  # a number in [0, 1]
# TRL's names of flags:
THEIRS = dict(learning_rate="lr", beta="kl_coef", epsilon="cliprange", num_generations="rloo_k")
THEIRS |= dict(num_train_epochs="num_epochs", per_device_train_batch_size="batch_size")
THEIRS |= dict(max_completion_length="response_length", max_prompt_length="query_length")
THEIRS |= dict(model_name_or_path="base_model", dataset_name="query_dataset")
THEIRS |= dict(missing_eos_penalty="unfinished_score")
CHECKPOINTS = "[0-9]" * 8 + ".safetensors"  # their names, by the updates that are done
# Flags that a resumed run may change:
FREE = {"save_every", "keep_every", "resume", "run_name", "output_dir", "track"}
rescues: list[Callable[[], str]] = []  # call it if a reward function fails; it says what is saved


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
    run_name: str | None = None
    """name of the folder in runs/; default: task, script, seed and time"""
    output_dir: str | None = None
    """folder for the weights; default: in the run; models/<task>/<script> links to it"""
    save_every: PositiveInt | None = None
    """updates between checkpoints (a tenth of the run); SIGTERM, SIGUSR1, SIGHUP save one and end"""
    resume: str | None = None
    """runs/<name>, a checkpoint file, or `latest`: continue that run with its flags"""
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
    given, words = parser.parse_known_args(argv)
    names = {x.name for x in (*fields(cls), *fields(Task))}
    for name in (word.partition("=")[0].lstrip("-").replace("-", "_") for word in words):
        if name not in names and THEIRS.get(name) in names:
            raise InputError(f"--{name} is --{THEIRS[name]} here: docs/from_trl.md")
    task = TASKS[given.task or next(iter(TASKS))]
    values, found = presets.get(task.task, {}), {}
    if given.resume:
        checkpoint = find_checkpoint(given.resume, Path(inspect.getfile(cls)).name, given.task)
        values, found = read_record(checkpoint), {"resume": str(checkpoint)}
    task = replace(task, **{x.name: values[x.name] for x in fields(Task) if x.name in values})
    texts = {x.name: x.default for x in fields(cls) if isinstance(x.default, str)}
    own = {name: text.replace("<task>", task.task) for name, text in texts.items()}
    own |= {x.name: values[x.name] for x in fields(cls) if x.name in values and x.name != "task"}
    options: Any = dict(config=(tyro.conf.OmitArgPrefixes,), use_underscores=True)
    flags = [x for x in argv if x not in ("-h", "--help")]
    args = tyro.cli(cls, default=cls(task=task, **own), args=flags, **options)
    if flags != argv:  # help with the values of the other flags, such as a recipe's
        tyro.cli(cls, default=args, args=["--help"], **options)
    return replace(args, **found)


def find_checkpoint(name: str, script: str, task: str | None) -> Path:
    """A checkpoint file, or the newest of a run; `latest`: of this script's and task's runs."""
    source = Path("runs" if name == "latest" else name)
    pattern = f"{glob.escape(str(source))}/**/checkpoints/{CHECKPOINTS}"  # follows links
    files = [source] if source.is_file() else map(Path, glob.glob(pattern, recursive=True))
    found = []
    for path in files:
        folder = path.parents[1]
        ours = path.match(CHECKPOINTS) and (folder / script).is_file()
        if ours and task in (None, read_record(path)["task"]):
            found.append(((folder / "args.json").stat().st_mtime_ns, path.name, path))
    if not found:
        raise InputError(f"--resume {name} has no checkpoint of {script} on task {task or '*'}")
    return max(found)[2]


def read_record(checkpoint: Path) -> dict[str, Any]:
    """The flags of a checkpoint's run, and what else is in `args.json`."""
    return json.loads((checkpoint.parents[1] / "args.json").read_text())


def run(main: Callable, cls: type, presets: dict[str, dict[str, Any]] | None = None) -> None:
    """Call `main(args)`; bad input ends with its cause, one sentence and exit code 2."""
    out: Any = sys.stdout
    out.reconfigure(errors="replace")  # not all encodings have all characters, as stderr does
    try:
        main(tyro.cli(cls) if presets is None else parse_args(cls, presets))
    except InputError as error:
        if error.__cause__:
            traceback.print_exception(error.__cause__)
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def say(message: str) -> None:
    """Print on the main process only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


say_once = functools.cache(say)


def check_divisible(name: str, value: int, unit: int, reason: str) -> None:
    """Raise `InputError` if `unit` does not divide `value`; name the next that works."""
    if value % unit:
        smaller = value // unit * unit
        use = f"{smaller} or {smaller + unit}" if smaller else unit
        raise InputError(f"{name}={value} is not divisible by {reason} = {unit}; use {use}")
