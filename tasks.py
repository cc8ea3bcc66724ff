"""What a run reads and writes: tasks, bounds of the flags, command line. Your own task is one more entry of `TASKS`."""

import functools
import importlib.util
import math
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_origin, get_type_hints

import tyro
from safetensors import SafetensorError

DATA = Path(__file__).parent / "data"
SYNTHETIC = DATA / "synthetic"


class InputError(ValueError):
    """Bad input: names the value and what would be right; `cli` prints it without a traceback."""


class RunError(RuntimeError):
    """A run cannot go on, and its flags are not to blame; `cli` prints it without a traceback."""


class Bounds(NamedTuple):
    """The values that a flag may have; stands beside its type and is checked by `check_bounds`."""

    least: float = -math.inf
    most: float = math.inf


Whole = Annotated[int, Bounds(0, 2**63 - 1)]
Count = Annotated[int, Bounds(1, 2**31 - 1)]
Size = Annotated[int, Bounds(1, 2**20)]  # of what is held in memory at once
Positive = Annotated[float, Bounds(1e-30, 10**6)]  # far from where fp32 makes 0 of it, or of two of them infinity
NonNegative = Annotated[float, Bounds(0, 10**6)]
Share = Annotated[float, Bounds(0, 1)]
Beta = Annotated[float, Bounds(0, 0.999999)]  # of Adam, which divides by 1 − β
Affix = Annotated[str, Bounds()]  # any text; one without bounds is a name, which is not empty


@dataclass(frozen=True)
class Task:
    """What is read and what is written, the same for every script. A data source is a local file (.txt .json .jsonl
    .parquet .csv), a local folder, a hub name, or `hub name:file` / `hub name:configuration`."""

    task: str
    """name of the task; picks the defaults of the flags here"""
    base_model: str
    """model the run starts from: hub name or folder"""
    query_dataset: str
    """data source of the texts that queries are cut from"""
    query_column: str
    """column of `query_dataset` that holds the text"""
    label_dataset: str
    """data source of the preference labels"""
    query_length: Count
    """tokens; a longer query is cut, a shorter one padded on the left (G2)"""
    response_length: Count
    """tokens that are sampled for every response (G4); of an EOS task those through its end count (X9)"""
    temperature: Annotated[float, Bounds(1e-4, 10**4)]
    """sampling temperature; logits are divided by it everywhere (P1)"""
    truncate_token: str | None
    """text of one token; for scoring a response is cut after its first one at or after `truncate_after` (P5)"""
    truncate_after: Annotated[int, Bounds(0, 2**31 - 1)]
    """tokens; see `truncate_token`"""
    missing_eos_penalty: Annotated[float, Bounds(-(10**6), 10**6)] = -1.0
    """score of a response without `truncate_token` there, in place of the reward model's (P5)"""
    top_p: Annotated[float, Bounds(1e-30, 1)] = 1.0
    """samples are drawn from the likeliest tokens, the fewest that together have this probability; log-probabilities
    stay those of the full vocabulary (X7)"""
    min_response_length: Count = 1
    """tokens; `truncate_token` is not drawn before the response has this many with it (X7)"""
    query_prefix: Affix = ""
    """text in front of each query; read by policy and reference, not by the reward model"""
    query_suffix: Affix = ""
    """text behind each query; read by policy and reference, not by the reward model"""
    start_text: str | None = None
    """one token; a query starts after the first of it, texts without it are skipped (P3)"""
    end_text: str | None = None
    """a query ends with the last of it inside the length that ends a word, texts without it are skipped (P3)"""
    num_queries: Count = 2**20
    """rows of `query_dataset` that are used at most; a larger data set is sampled without replacement"""
    eos_task: bool = False
    """the response ends at its first `truncate_token`: all behind it is masked out, not just in scoring (X9)"""
    response_column: str | None = None
    """column of `query_dataset` with reference responses; sft.py then learns these, else it learns the texts"""
    keep_last_line: bool = False
    """a query that is too long loses lines in front of its last one, such as TL;DR:, instead of its end"""
    clean_fn: str | None = None
    """`module:function` or `path.py:function` of a text → text, before it is tokenised"""
    label_tokenizer: str | None = None
    """hub name or folder of the tokenizer that made the labels' ids; None: `base_model`'s own"""
    gold_fn: str | None = None
    """`module:function` or `path.py:function` of (queries, responses) → floats: the true score, only logged"""


@dataclass(frozen=True)
class Shown:
    """Where a run is shown besides its own folder, the same for every script; changes no number of it."""

    track: bool = False
    """log to Weights & Biases too"""
    wandb_project: str | None = None
    """project there; None: onefile-rlhf"""
    wandb_entity: str | None = None
    """team or user there; None: your own"""
    push_to_hub: str | None = None
    """the hub's repository, owner/name, that the weights go to at the end; made before training, private"""
    push_public: bool = False
    """everybody may read that repository"""


BOOKS = Task(
    task="sentiment",
    base_model="gpt2",
    query_dataset="SamuelYang/bookcorpus",
    query_column="text",
    label_dataset="vwxyzjn/lm-human-preferences:sentiment/offline_5k.json",
    query_length=64,
    response_length=24,
    temperature=0.7,
    truncate_token=".",
    truncate_after=16,
    label_tokenizer="gpt2",
)
SUMMARIES = replace(
    BOOKS, query_length=500, response_length=75, truncate_token="\n", truncate_after=55, query_suffix="\n\nTL;DR:"
)
ENDING = dict(truncate_token="<|endoftext|>", truncate_after=0, eos_task=True)
STORIES = replace(BOOKS, label_tokenizer=None, gold_fn=f"{SYNTHETIC / 'judge.py'}:gold_score")

TASKS = {
    task.task: task
    for task in (
        replace(
            STORIES,
            task="synthetic",
            base_model="models/synthetic/sft",
            query_dataset=str(SYNTHETIC / "stories.txt"),
            label_dataset=str(SYNTHETIC / "labels.json"),
        ),
        BOOKS,
        replace(
            BOOKS,
            task="descriptiveness",
            label_dataset="vwxyzjn/lm-human-preferences:descriptiveness/offline_5k.json",
        ),
        replace(
            SUMMARIES,
            task="cnndm",
            query_dataset="abisee/cnn_dailymail:3.0.0",
            query_column="article",
            label_dataset="vwxyzjn/lm-human-preferences:cnndm/online_45k.json",
            temperature=0.5,
            query_prefix="Article:\n\n",
            end_text=".",
            clean_fn=f"{DATA / 'clean.py'}:clean_article",
        ),
        replace(
            SUMMARIES,
            task="tldr_2019",
            query_dataset="dim/tldr_17_50k",
            query_column="content",
            label_dataset="vwxyzjn/lm-human-preferences:tldr/online_45k.json",
            clean_fn=f"{DATA / 'clean.py'}:clean_post",
        ),
        replace(
            BOOKS,
            task="tldr",
            base_model="models/tldr/sft",
            query_dataset="trl-lib/tldr",
            query_column="prompt",
            response_column="completion",
            label_dataset="trl-lib/tldr-preference",
            query_length=512,
            response_length=53,
            keep_last_line=True,
            label_tokenizer=None,
            **ENDING,
        ),
        replace(
            STORIES,
            task="synthetic_eos",
            base_model="models/synthetic_eos/sft",
            query_dataset=str(SYNTHETIC / "stories_eos.jsonl"),
            query_column="prompt",
            response_column="completion",
            label_dataset=str(SYNTHETIC / "pairs_eos.jsonl"),
            query_length=32,
            response_length=40,
            **ENDING,
        ),
    )
}


# ------------------------------------------------------------------------------------------------------------- flags


def check_bounds(args: Any) -> None:
    """Errors: `InputError` for a number that is not finite or outside the bounds beside its field, and for a text that
    can be no name; `None` is inside."""
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        value, parts = getattr(args, name), getattr(hint, "__args__", ())
        bounds = [b for part in (hint, *parts) for b in getattr(part, "__metadata__", ()) if isinstance(b, Bounds)]
        if is_dataclass(value):
            check_bounds(value)
        elif get_origin(hint) is Literal:
            if value not in parts:
                raise InputError(f"{name}={value!r:.60} has to be one of {', '.join(parts)}")
        elif isinstance(value, str):
            check_text(name, value, is_name=not bounds)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            least, most = bounds[0] if bounds else Bounds()
            if not (-math.inf < value < math.inf and least <= value <= most):
                words = (("at least", least), ("at most", most))
                wanted = " and ".join(f"{word} {limit}" for word, limit in words if math.isfinite(limit))
                raise InputError(f"{name}={value} has to be {wanted or 'a finite number'}")


def check_text(name: str, text: str, is_name: bool) -> None:
    """Errors: `InputError` for a text that UTF-8 cannot hold or, of a file, a column or a token, no name can be."""
    try:
        text.encode()
        if is_name:
            os.stat(f"{text}.tmp{os.getpid()}")  # the longest name that is made of it
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except (OSError, ValueError) as error:  # half a surrogate pair, a NUL, longer than the system allows
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{name}={text[:40]!r}{' …' * (len(text) > 40)} cannot be used: {why}") from error
    if is_name and not text:
        raise InputError(f"{name}={text!r} is empty; leave --{name} out for its default")


def parse_args(cls: type, presets: dict[str, dict[str, Any]], argv: list[str] | None = None) -> Any:
    """Command line → frozen `cls`. `--task NAME` picks the defaults: those of `TASKS` and, over them, the script's
    `presets[NAME]` if it has any; so `--task NAME --help` shows them. Errors: `InputError` for an unknown task."""
    argv = sys.argv[1:] if argv is None else argv
    name = next(iter(TASKS))
    for flag, value in zip(argv, [*argv, ""][1:], strict=True):
        if flag.startswith("--task="):
            flag, value = flag.split("=", 1)
        if flag == "--task":
            name = value
    if name not in TASKS:
        raise InputError(f"task={name!r} is unknown; choose one of {', '.join(TASKS)}, or add it to TASKS in tasks.py")
    preset, task_names = presets.get(name, {}), {f.name for f in fields(Task)}
    task = replace(TASKS[name], **{k: v for k, v in preset.items() if k in task_names})
    default = cls(task=task, **{k: v for k, v in preset.items() if k not in task_names})
    return tyro.cli(tyro.conf.OmitArgPrefixes[cls], default=default, args=argv)


def check_writable(folder: Path, flag: str) -> None:
    """Errors: `InputError` where nothing can be written into a folder, or into the one that it is to be made in."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()  # to ask for permissions is not enough: root has them all
    except OSError as error:
        why = "is no folder" if there.is_file() else f"cannot be written ({error.strerror})"
        raise InputError(f"{there} {why}, but {folder} has to be made there; {flag}") from error


@contextmanager
def writing(path: Path, beside: Path | None = None) -> Iterator[None]:
    """Around what writes `path`, perhaps as `beside` first. Errors: `RunError` on a full disk; nothing half is left."""
    length = path.stat().st_size if path.is_file() else 0
    try:
        yield
    except (OSError, SafetensorError) as error:
        if path.is_file():
            os.truncate(path, length)  # the lines that it had
        if beside:
            shutil.rmtree(beside) if beside.is_dir() else beside.unlink(missing_ok=True)
        raise RunError(f"{path} could not be written ({error}); make room on its disk") from error


class Lasting:
    """A terminal or a pipe that may go away, as with `| head` or a closed window, without taking the run along."""

    def __init__(self, file: Any):
        self.file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def lose(self) -> None:
        """From now on everything goes nowhere, also what is in the buffer."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    def write(self, text: str) -> int:
        """As a file does."""
        try:
            return self.file.write(text)
        except OSError:
            self.lose()
            return len(text)

    def flush(self) -> None:
        """As a file does."""
        try:
            self.file.flush()
        except OSError:
            self.lose()


WHERE: list[str] = []  # for the words of whatever ends it: where this process's run is, and how to go on with it


def cli(main: Callable, parse: Callable) -> None:
    """Run a script: bad input is one line and exit code 2, what ends a run one line and 1, Ctrl-C one line and 130;
    anything else is a bug and shows its traceback. A terminal that goes away ends nothing."""
    WHERE.clear()
    script, rank = Path(sys.argv[0]).name, int(os.environ.get("RANK", 0))
    with redirect_stdout(Lasting(sys.stdout)), redirect_stderr(Lasting(sys.stderr)):
        try:
            main(parse())
        except (InputError, RunError) as error:
            time.sleep(2 * (rank > 0))  # where all processes fail alike, the launcher ends these first: one message
            where = f" (process {rank})" * (rank > 0)
            print("; ".join([f"{script}: error{where}: {error}", *WHERE]), file=sys.stderr, flush=True)
            sys.exit(2 if isinstance(error, InputError) else 1)
        except KeyboardInterrupt:
            print("; ".join([f"\n{script}: stopped by Ctrl-C", *WHERE]), file=sys.stderr)
            sys.exit(130)
        except Exception as error:
            error.add_note("; ".join(WHERE))
            raise


@functools.cache
def load_function(spec: str) -> Callable:
    """`module:function` or `path.py:function` → the function, such as one of (queries, responses) → floats."""
    source, _, name = spec.rpartition(":")
    if not source:
        raise InputError(f"{spec!r} names no function; write module:function or path.py:function")
    if source.endswith(".py") and not Path(source).is_file():
        raise InputError(f"{spec!r}: there is no file {source}")
    try:
        if source.endswith(".py"):
            module_spec = importlib.util.spec_from_file_location(source, source)  # under a name that no module has
            module = sys.modules[source] = importlib.util.module_from_spec(module_spec)  # where dataclasses look it up
            module_spec.loader.exec_module(module)
        else:
            sys.path.insert(0, os.getcwd())
            module = importlib.import_module(source)
    except ModuleNotFoundError as error:
        raise InputError(f"{spec!r}: there is no module {error.name}") from error
    except Exception as error:  # whatever its code raises
        frames = traceback.extract_tb(error.__traceback__)
        at = ([frame for frame in frames if frame.filename == source] or frames)[-1]  # its own line, if it has one
        raise InputError(f"{spec!r} cannot be imported: {error!r} at {at.filename}:{at.lineno}") from error
    if not callable(getattr(module, name, None)):
        raise InputError(f"{spec!r}: {source} has no function {name}")
    return getattr(module, name)


def call_function(function: Callable, spec: str, *columns: list) -> Any:
    """What a function of `load_function` returns. Errors: `RunError` for what it raises, with the line."""
    slow = f"{spec} has been at {len(columns[0])} responses for a minute; SIGTERM waits for it, Ctrl-C does not"
    timer = threading.Timer(60, print, [slow], {"flush": True})
    timer.daemon = True
    timer.start()
    try:
        return function(*columns)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]  # the function's own, and what it calls
        at = [f" at {frame.filename}:{frame.lineno}" for frame in frames if frame.filename == frames[0].filename]
        raise RunError(f"{spec} raised {type(error).__name__}: {error}{at[-1] if at else ''}") from error
    finally:
        timer.cancel()
