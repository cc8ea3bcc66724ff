"""What a run leaves and goes on from: checks before it starts, folder, metrics, samples, checkpoints, weights, card.

Machinery like `utils.py`, which it builds on; no algorithm, and no experiment changes it.
"""

import atexit
import filecmp
import hashlib
import html
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import filelock
import huggingface_hub
import torch
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker, WandBTracker
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from tasks import WHERE, InputError, RunError, Shown, check_bounds, check_writable, load_function, writing
from utils import ROOT, TokenTable, all_max, stop_accelerator, takes_scores, whole

# --------------------------------------------------------------------------------------------------------- arguments


def check_args(args: Any, script: Path, processes: int) -> None:
    """Everything about arguments that every script checks before anything is loaded. Errors: `InputError`."""
    check_bounds(args)
    task = args.task
    if task.end_text and task.keep_last_line:
        raise InputError("end_text and keep_last_line both say where a query ends; set one of them")
    if task.eos_task and task.truncate_token is None:
        raise InputError("eos_task needs truncate_token, the token that ends a response")
    if task.truncate_after >= task.response_length:
        raise InputError(
            f"truncate_after={task.truncate_after} has to be in 0 … response_length − 1 = {task.response_length - 1}"
        )
    if task.min_response_length > (most := task.response_length if task.truncate_token else 1):
        why = "response_length" if task.truncate_token else "there is no truncate_token"
        raise InputError(f"min_response_length={task.min_response_length} has to be at most {most}: {why}")
    if getattr(args, "kl_target", None) and args.batch_size >= 5 * args.kl_horizon:
        why = f"more than a fifth of batch_size={args.batch_size}, or β could turn negative (P11)"
        raise InputError(f"kl_horizon={args.kl_horizon} has to be {why}")
    functions = {"clean_fn": task.clean_fn, "gold_fn": task.gold_fn, "reward_fn": getattr(args, "reward_fn", None)}
    for name, function in functions.items():
        try:
            load_function(function) if function else None
        except InputError as error:
            raise InputError(f"{name}={error}") from error
    for name, other in (("wandb_project", "track"), ("wandb_entity", "track"), ("push_public", "push_to_hub")):
        if getattr(args.shown, name) and not getattr(args.shown, other):
            raise InputError(f"--{name} changes nothing without --{other}")
    if args.shown.push_to_hub and not huggingface_hub.get_token():
        raise InputError(f"--push_to_hub {args.shown.push_to_hub} needs a token that may write; run `hf auth login`")
    check_folders(args, script)
    if checkpoint := find_checkpoint(args, script):
        check_same(asdict(args) | {"processes": processes}, checkpoint.parents[1])


def check_divides(name: str, value: int, unit: int, what: str) -> None:
    """Errors: `InputError` for a size that cannot be shared out evenly, with the next one that can."""
    if value % unit:
        raise InputError(f"{name}={value} does not divide over {what}; use {math.ceil(value / unit) * unit}")


# ------------------------------------------------------------------------------------------------------- checkpoints


KEPT = 2  # checkpoints of a run: the newest, and the one before it
FREE = ("save_every", "save_minutes", "resume", "run_name", "output_dir", "shown")  # change no byte of what is written


def by_flag(record: dict[str, Any]) -> dict[str, Any]:
    """What args.json holds, with the task's flags and the inputs' fingerprints beside the others."""
    return record | record["task"] | record.get("inputs", {}) | {"inputs": None}


def find_checkpoint(args: Any, script: Path) -> Path | None:
    """The checkpoint that `--resume` means: a file, or the newest one of a run's folder; `latest` is the run of this
    script and task that began last, of those that have one. Errors: `InputError` where there is none."""
    if args.resume is None:
        return None
    folder, began = Path(args.resume), {}
    if args.resume == "latest":
        for run in {path.parents[1] for path in Path("runs").rglob("checkpoints/*.safetensors")}:
            record = run / "args.json"
            if (run / script.name).is_file() and json.loads(record.read_text())["task"]["task"] == args.task.task:
                began[run] = record.stat().st_mtime_ns
        folder = max(began, key=began.get, default=Path("runs"))
    found = [folder] if folder.is_file() else sorted(folder.glob("checkpoints/*.safetensors"))
    of_run = [found[-1].parent.parent / name for name in (script.name, "args.json")] if found else []
    if not found or not all(path.is_file() for path in of_run):
        raise InputError(
            f"--resume {args.resume}: {folder} holds no checkpoint of {script.name} on task {args.task.task}; "
            "runs write them with --save_every or --save_minutes, and at SIGTERM"
        )
    return found[-1]


def check_same(record: dict[str, Any], run: Path) -> None:
    """A resumed run is the run it was. Errors: `InputError` that lists what would change the numbers in its files."""
    new, old = by_flag(record), by_flag(json.loads((run / "args.json").read_text()))
    names = [name for name in new if name in old and name not in FREE and new[name] != old[name]]
    if new["run_name"] and (Path("runs") / new["run_name"]).resolve() != run.resolve():
        names.append("run_name")
    if names:
        longer = {"total_episodes", "num_epochs", "num_labels"} & set(names)
        raise InputError(
            f"--resume goes on with {run}, and these would change its numbers: "
            + ", ".join(f"{name}={new[name]} (it has {old[name]})" for name in names)
            + "; repeat its own command and add --resume"
            + "; lr falls over the whole run, so a longer one differs from its first update on" * bool(longer)
        )


def sha256(*things: Path | TokenTable | Tensor | str) -> str:
    """Of all that is in them: a file or a model's folder, a table, a tensor, a text."""
    sha = hashlib.sha256()
    for thing in things:
        if isinstance(thing, str):
            sha.update(thing.encode())
        elif isinstance(thing, Tensor):
            sha.update(thing.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        elif isinstance(thing, TokenTable):
            for batch in thing.rows.with_format("arrow").iter(2**14):
                rows = batch["tokens"].combine_chunks()
                sha.update(rows.value_lengths().to_numpy())
                sha.update(rows.flatten().to_numpy())
        else:
            files = sorted(thing.glob("*.safetensors")) + sorted(thing.glob("*.json")) if thing.is_dir() else [thing]
            for path in files:
                with open(path, "rb") as file:
                    sha.update(hashlib.file_digest(file, "sha256").digest())
    return sha.hexdigest()


def fingerprints(args: Any, data: tuple[TokenTable | Tensor, ...]) -> dict[str, str]:
    """What a run reads besides its flags: local models, functions in files, tokens; name → sha256 of the contents."""
    names = {name: getattr(args, name, None) or "" for name in ("policy_model", "reward_model", "reward_fn")}
    names |= {"base_model": args.task.base_model, "gold_fn": args.task.gold_fn or ""}
    reads_reward = hasattr(args, "reward_model") and (not args.reward_fn or takes_scores(load_function(args.reward_fn)))
    if reads_reward and not args.reward_model:
        names["reward_model"] = f"models/{args.task.task}/train_reward"
    paths = {name: Path(re.sub(r"(?<=\.py):.*", "", value)) for name, value in names.items() if value}
    found = {f"contents of {name} {path}": sha256(path)[:16] for name, path in paths.items() if path.exists()}
    sources = args.task.query_dataset + f" and {args.task.label_dataset}" * hasattr(args, "num_labels")
    return found | {f"contents of the data of {sources}": sha256(*data)[:16]}


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, tied ones once."""
    weights = model.state_dict(keep_vars=True)
    first = {id(x): name for name, x in reversed(list(weights.items()))}
    return {name: weights[name] for name in first.values()}


def on_host(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """All of them whole and on the CPU; none unless this process is to `keep` them. All processes have to call it."""
    pairs = ((name, whole(x.detach())) for name, x in tensors.items())
    return {name: x.cpu().contiguous() for name, x in pairs if keep}


def pack_state(model: nn.Module, optimizer: Any, keep: bool) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """`weight/<name>` and, for all that the optimizer keeps of it, `exp_avg/<name>` and so on, see `on_host`; and the
    numbers of the optimizer's groups."""
    tensors = {}
    for name, weight in named_weights(model).items():
        for kind, x in ({"weight": weight} | optimizer.state.get(weight, {})).items():
            tensors[f"{kind}/{name}"] = x
    return on_host(tensors, keep), [
        {k: v for k, v in g.items() if isinstance(v, int | float)} for g in optimizer.param_groups
    ]


def shared_out(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `whole` where `like` is sharded: this process's part of `x`, which all of them have."""
    if not isinstance(like, DTensor):
        return x.to(like.device)
    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def unpack_state(tensors: dict[str, Tensor], groups: list[dict[str, float]], model: nn.Module, optimizer: Any) -> None:
    """The inverse of `pack_state`, in place. Errors: `InputError` for weights of another model."""
    weights = named_weights(model)
    if other := weights.keys() ^ {name.partition("/")[2] for name in tensors}:
        raise InputError(f"the checkpoint is of another model, see {sorted(other)[0]}")
    for name, x in tensors.items():
        kind, _, name = name.partition("/")
        weight = weights[name]
        x = shared_out(x, weight) if x.shape == weight.shape else x.to(weight.device)
        if kind == "weight":
            weight.copy_(x)
        else:
            optimizer.state[weight][kind] = x.clone()
    for group, numbers in zip(optimizer.param_groups, groups, strict=True):
        group.update(numbers)


def checksum(state: str, tensors: dict[str, Tensor]) -> str:
    """sha256 of everything in a checkpoint."""
    names = json.dumps([[name, str(x.dtype), list(x.shape)] for name, x in sorted(tensors.items())])
    return sha256(state, names, *(x for _, x in sorted(tensors.items())))


def write_checkpoint(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """One safetensors file, `state` as JSON in its header; whole or not there, whenever the process is killed. Only the
    newest `KEPT` stay."""
    beside, text = path.parent / "unfinished.tmp", json.dumps(state)
    with writing(path, beside):
        path.parent.mkdir(exist_ok=True)
        save_file(tensors, beside, {"state": text, "sha256": checksum(text, tensors)})
        sync(beside)
        os.replace(beside, path)
        sync(path.parent)
    for old in sorted(path.parent.glob("*.safetensors"))[:-KEPT]:
        old.unlink()


def sync(path: Path) -> None:
    """What was written to a file, or the names in a folder, survives a power cut."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and state of a checkpoint. Errors: `InputError` for one that is not as it was written, with the one to
    take instead."""
    try:
        with safe_open(path, "pt") as file:
            names, header = file.keys(), file.metadata()
            tensors = {name: file.get_tensor(name) for name in names}
        broken = checksum(header["state"], tensors) != header["sha256"]
    except (SafetensorError, OSError, KeyError, TypeError) as error:
        broken = f"{type(error).__name__}: {error}"
    if broken:
        before = [str(other) for other in sorted(path.parent.glob("*.safetensors")) if other.name < path.name]
        raise InputError(
            f"{path} is damaged ({'its checksum is wrong' if broken is True else broken}); "
            + (f"the one before it: --resume {before[-1]}" if before else "there is none before it")
        )
    return tensors, json.loads(header["state"]) | {"sha256": header["sha256"]}


# -------------------------------------------------------------------------------------------------------------- runs


def latest(args: Any, script: Path) -> Path:
    """`models/<task>/<script>`: a link to the weights of the last run that finished; a copy of a script has its own."""
    return Path("models") / args.task.task / script.stem


def check_folders(args: Any, script: Path) -> None:
    """Nothing that is there is overwritten. Errors: `InputError` for a folder in the way, or that cannot be made."""
    runs, out = Path("runs").resolve(), Path(args.output_dir or "")
    folder = (runs / (args.run_name or "new")).resolve()
    if runs not in folder.parents:
        raise InputError(f"run_name={args.run_name} is no folder in runs/; choose a name without ..")
    if args.run_name and folder.exists() and not args.resume:
        raise InputError(f"run_name={args.run_name}: runs/{args.run_name} is there already; choose another name")
    if args.output_dir and out.resolve() in (folder, *folder.parents):
        raise InputError(f"output_dir={args.output_dir} is where the run itself is written; choose another folder")
    if args.output_dir and out.exists() and not (out.is_dir() and not os.listdir(out)) and not args.resume:
        raise InputError(f"output_dir={args.output_dir} is no empty folder; choose another, or move what is there")
    link = latest(args, script)
    if int(os.environ.get("RANK", 0)) == 0:  # the main process writes
        check_writable(Path("runs") / (args.run_name or ""), "run in another folder")
        check_writable(out if args.output_dir else link.parent, "choose an --output_dir that can be written")
    if link.exists() and not link.is_symlink() and not args.output_dir:
        raise InputError(f"{link} is a folder, but has to be free for a link to the run's weights; move it away")


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows behind a file's lines, all or none."""
    with writing(path), open(path, "a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def save_model(model: PreTrainedModel, tokenizer: Any, folder: Path, weights: dict[str, dict[str, Tensor]]) -> None:
    """A folder that `from_pretrained` loads, with the tokenizer; `weights` are the `model`'s own, and those of each
    head for `<name>.safetensors`. Written beside its final name and renamed."""
    beside = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
    with writing(folder, beside):
        model.save_pretrained(beside, state_dict=weights.pop("model"))
        tokenizer.save_pretrained(beside)
        for name, head in weights.items():
            save_file(head, beside / f"{name}.safetensors")
    try:
        beside.rename(folder)  # fails where somebody has put files meanwhile, and leaves both alone
    except OSError:
        there = [folder / path.name for path in beside.iterdir()]
        if not all(path.is_file() and filecmp.cmp(path, beside / path.name, shallow=False) for path in there):
            raise RunError(f"{folder} holds other files than this run made, which are in {beside}") from None
        shutil.rmtree(beside)  # a run that was killed behind the rename, and resumed, has written the very same


class Run:
    """A run's folder `runs/<name>/`, written by the main process: args.json, the script's source, metrics.jsonl (a line
    an update), samples.jsonl, TensorBoard events, curves.png, checkpoints, the weights; a progress line; with `track`
    W&B too. Two runs never share a folder. `data`: the tokens that it learns from, to know them again."""

    def __init__(
        self,
        args: Any,
        script: Path,
        total: int,
        panels: list[str],
        accelerator: Accelerator,
        *data: TokenTable | Tensor,
    ):
        self.args, self.script, self.total, self.panels = args, script, total, panels
        self.accelerator, self.main = accelerator, accelerator.is_main_process
        self.sampled: list[list[dict[str, Any]]] = []  # the first and the latest
        self.source, self.start, self.saved = find_checkpoint(args, script), 0, time.monotonic()
        asked = self.asked = []  # signals so far; a handler that held the run would hold its lock behind an error too
        numbers = signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP  # the last: its terminal is closed, without nohup
        heeded = [n for n in numbers if signal.getsignal(n) != signal.SIG_IGN]
        self.handlers = {n: signal.signal(n, lambda *x: asked.append(x)) for n in heeded}
        if not self.main:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        record = asdict(args) | {"processes": accelerator.num_processes, "inputs": fingerprints(args, data)}
        record |= {"mixed_precision": accelerator.mixed_precision, "device": accelerator.device.type}
        if args.shown.push_to_hub:
            make_repository(args.shown.push_to_hub, args.shown.push_public)
        if self.source:
            self.folder = self.source.parents[1]
            check_same(record, self.folder)
            self.note_changes()
        else:
            name = args.run_name or f"{args.task.task}__{script.stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
            self.folder = new_folder(Path("runs") / name)
            with writing(self.folder / "args.json", self.folder):
                shutil.copy(script, self.folder / script.name)
                record |= {"command": sys.argv} | environment(self.folder)
                (self.folder / "args.json").write_text(json.dumps(record, indent=1))
        self.lock = filelock.FileLock(self.folder / ".lock")  # the system lets go of it when the process is killed
        try:
            self.lock.acquire(timeout=0)
        except filelock.Timeout:
            raise InputError(f"--resume: another process is still writing {self.folder}") from None
        accelerator.trackers = start_trackers(self.folder, record, args.shown)
        self.console, shown = Console(), TextColumn("{task.fields[shown]}")
        columns = (TextColumn(script.stem), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), shown)
        self.live = self.console.is_terminal and self.console.width >= 60  # else lines, which may break
        self.progress = Progress(*columns, console=self.console, disable=not self.live)
        self.bar = self.progress.add_task(script.stem, total=total, shown="")
        self.progress.start()
        atexit.register(self.progress.stop)  # behind an error too: it has hidden the terminal's cursor
        self.begin = time.perf_counter()

    def note_changes(self) -> None:
        """Say what code is another one since the run began: the same flags then need not make the same numbers."""
        versions = json.loads((self.folder / "args.json").read_text())["versions"]
        names = [name for name, old in versions.items() if version(name) != old]
        names += [self.script.name] * ((self.folder / self.script.name).read_bytes() != self.script.read_bytes())
        if names:
            print(f"changed since {self.folder} began, so its numbers may too: {', '.join(names)}", flush=True)

    def restore(self, model: nn.Module, optimizer: Any, rest: Any = None) -> tuple[int, Any]:
        """What was done already: updates, and `rest` as it was then. Without `--resume` that is 0 and `rest` as given;
        with it weights and optimizer are what the checkpoint holds, and metrics and samples are cut back to it. Errors:
        `InputError` for a checkpoint that is damaged, or not the same to all processes."""
        self.say_where(0)
        if self.source is None:
            return 0, rest
        tensors, state = read_checkpoint(self.source)
        mark = torch.tensor(int(state["sha256"][:12], 16), device=self.accelerator.device)
        if all_max(mark) + all_max(-mark) != 0:
            raise InputError(f"--resume {self.args.resume} is {self.source} here and something else to another process")
        unpack_state(tensors, state["groups"], self.accelerator.unwrap_model(model), optimizer)
        self.start = state["step"]
        if self.main:
            self.cut_back(state["lengths"])
        self.say_where(self.start)
        return self.start, state["rest"]

    def cut_back(self, lengths: dict[str, int]) -> None:
        """The run's files to what they were at the checkpoint. Errors: `InputError` where one is shorter."""
        for name, length in lengths.items():
            if length_of(self.folder / name) < length:
                raise InputError(f"{self.folder / name} was changed: it had {length} bytes at {self.source}")
        for later in self.source.parent.glob("*.safetensors"):
            if later.name > self.source.name:
                later.unlink()  # first: where a kill comes between, the newest one still has its lines
        for name in (name for name in lengths if (self.folder / name).exists()):
            os.truncate(self.folder / name, lengths[name])
        for unfinished in self.folder.glob("model.tmp*"):
            shutil.rmtree(unfinished)
        if lengths["samples.jsonl"]:
            rows = [json.loads(line) for line in (self.folder / "samples.jsonl").read_text().splitlines()]
            steps = [row.pop("step") for row in rows]
            tables = ([row for row, s in zip(rows, steps, strict=True) if s == step] for step in (steps[0], steps[-1]))
            self.sampled = list(tables)
        self.progress.update(self.bar, completed=self.start)
        print(f"{self.folder} goes on after {self.start} of {self.total}", flush=True)

    def checkpoint(self, step: int, model: nn.Module, optimizer: Any, rest: Any = None) -> None:
        """After `step` updates: where one is due or asked for by a signal, write a checkpoint of weights, optimizer and
        `rest`, which is anything that JSON holds exactly; behind a signal's, leave with exit code 143. The last update
        needs none."""
        every, minutes = self.args.save_every, self.args.save_minutes
        due = bool(every and step % every == 0 or minutes and time.monotonic() - self.saved >= 60 * minutes)
        due, asked = all_max(torch.tensor([due, bool(self.asked)], device=self.accelerator.device).int()).tolist()
        if step == self.total or not (due or asked):
            return
        self.saved = time.monotonic()
        tensors, groups = pack_state(self.accelerator.unwrap_model(model), optimizer, self.main)
        if self.main:
            lengths = {name: length_of(self.folder / name) for name in ("metrics.jsonl", "samples.jsonl")}
            state = {"step": step, "rest": rest, "groups": groups, "lengths": lengths}
            write_checkpoint(self.folder / "checkpoints" / f"{step:08}.safetensors", tensors, state)
            self.say_where(step)
        if asked:
            self.close()
            if self.main:
                print(
                    f"stopped after update {step} of {self.total}; add  --resume {self.folder}  to the command to go on"
                )
            stop_accelerator(self.accelerator)
            sys.exit(143)

    def say_where(self, done: int) -> None:
        """For the words of an error that ends the run: which update it is in, and how to go on."""
        WHERE[:] = [f"in update {done + 1} of {self.total}" if done < self.total else "behind the last update"]
        if self.main and (there := sorted(self.folder.glob("checkpoints/*.safetensors"))):
            WHERE.append(f"add  --resume {self.folder}  to the command to go on after update {int(there[-1].stem)}")
        elif self.main:
            WHERE.append("no checkpoint to go on from: --save_every and --save_minutes write them")

    def log(self, step: int, metrics: dict[str, float], shown: dict[str, str]) -> None:
        """Write one line of metrics; `shown` is metric name → its short name in the progress line. Errors:
        `RunError` on every process for a loss that is no number, before anything more is made of it."""
        for name, value in metrics.items():
            if "loss" in name and not math.isfinite(value):
                raise RunError(f"{name} is {value}; a lower --lr, or fp32 instead of bf16, may help")
        self.say_where(step + 1)
        if not self.main:
            return
        append(self.folder / "metrics.jsonl", [{"step": step, **metrics}])
        self.accelerator.log(metrics, step=step)
        if step >= self.total:  # results behind the last step
            return
        line = "  ".join(f"{short} {metrics[name]:.3g}" for name, short in shown.items() if name in metrics)
        self.progress.update(self.bar, completed=step + 1, shown=line)
        if not self.live and (step % max(self.total // 20, 1) == 0 or step + 1 == self.total):
            left = (time.perf_counter() - self.begin) / (step + 1 - self.start) * (self.total - step - 1)
            print(f"{step + 1:>6}/{self.total}  {line}  left {left:.0f} s", flush=True)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Append samples to samples.jsonl and show them as a table."""
        if not self.main:
            return
        append(self.folder / "samples.jsonl", [{"step": step, **row} for row in rows])
        self.sampled = [self.sampled[0] if self.sampled else rows, rows]
        self.table(rows, f"samples of held-out text after {step} updates")
        if self.args.shown.track:  # not as W&B's own table, for which its client waits until the server is back
            import wandb

            lines = [rows[0], *(row.values() for row in rows)]
            cells = "<tr>".join("".join(f"<td>{html.escape(str(cell))}" for cell in line) for line in lines)
            self.accelerator.trackers[-1].log({"samples": wandb.Html(f"<table><tr>{cells}</table>")}, step=step)

    def compare_samples(self) -> None:
        """The responses of the first and of the last samples to the same queries, side by side."""
        pairs = zip(*self.sampled, strict=True)
        self.table(
            [first | {"trained": last["response"], "trained score": last["score"]} for first, last in pairs],
            "before and after",
        )

    def table(self, rows: list[dict[str, Any]], title: str) -> None:
        """Show rows of texts and numbers."""
        if not self.main or not rows:
            return
        from rich.markup import escape
        from rich.table import Table

        if self.console.width < 60:
            return print(title, *rows, sep="\n")
        table = Table(*rows[0], title=title, show_lines=True)
        for row in rows:
            table.add_row(*(f"{v:.2f}" if isinstance(v, float) else escape(str(v)) for v in row.values()))
        self.console.print(table)

    def save(self, model: PreTrainedModel, tokenizer: Any, **heads: nn.Module) -> None:
        """The weights into the run's folder, `models/<task>/<script>` linked to them; or into `--output_dir` alone."""
        weights = {n: on_host(named_weights(m), self.main) for n, m in ({"model": model} | heads).items()}
        if self.main:
            self.weights = Path(self.args.output_dir or self.folder / "model")
            self.weights.parent.mkdir(parents=True, exist_ok=True)
            save_model(model, tokenizer, self.weights, weights)
            if not self.args.output_dir:
                link = latest(self.args, self.script)
                link.parent.mkdir(parents=True, exist_ok=True)
                beside = link.with_name(f"{link.name}.tmp{os.getpid()}")
                beside.symlink_to(os.path.relpath(self.weights.resolve(), link.parent.resolve()))
                beside.replace(link)
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Signals mean again what they did, and others may write the folder."""
        WHERE.clear()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.main:
            self.progress.stop()
            self.lock.release()

    def finish(self, *done: str) -> None:
        """Draw the curves, close everything, say where things are."""
        self.close()
        if not self.main:
            return
        with writing(curves := self.folder / "curves.png", curves):
            plot_run(self.folder, self.panels)
        with writing(self.weights / "README.md", self.weights / "README.md"):
            write_card(self.args, self.folder, self.script.stem, self.weights)
        if self.args.shown.push_to_hub:
            done = (*done, push(self.args.shown.push_to_hub, self.weights))
        link = "" if self.args.output_dir else f", linked as {latest(self.args, self.script)}"
        print(*done, f"weights: {self.weights}{link}", f"curves and metrics: {curves}", sep="\n")


def length_of(path: Path) -> int:
    """Bytes of a file, all of them on the disk; 0 where there is none."""
    if path.exists():
        sync(path)
    return path.stat().st_size if path.exists() else 0


def new_folder(path: Path) -> Path:
    """A folder that was not there: `path`, or `path-2` and so on where another run was faster."""
    for i in range(1, 10_000):
        folder = path if i == 1 else path.with_name(f"{path.name}-{i}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise InputError(f"{path} and all of its numbered names are taken")


def environment(folder: Path) -> dict[str, Any]:
    """What a run depends on besides its arguments: commit, versions; what is not committed goes into changes.diff."""

    def git(*words: str) -> str:
        if not shutil.which("git"):
            return ""
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout

    if changes := git("diff", "HEAD"):
        (folder / "changes.diff").write_text(changes)
    packages = ("torch", "transformers", "accelerate", "datasets", "tyro", "numpy")
    return {
        "commit": git("rev-parse", "HEAD").strip() or None,
        "changes": bool(changes),
        "python": platform.python_version(),
        "versions": {p: version(p) for p in packages},
    }


class Tracker:
    """One of accelerate's whose errors are said once and then passed over: no tracker ever stops training."""

    def __init__(self, tracker: Any):
        self.tracker, self.name, self.failed = tracker, tracker.name, False

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*args, **kwargs) -> None:
            try:
                getattr(self.tracker, name)(*args, **kwargs)
            except Exception as error:  # whatever its library raises
                if not self.failed:
                    print(f"{self.name} lacks something ({type(error).__name__}: {error}); metrics.jsonl has it all")
                self.failed = True

        return call


def start_trackers(folder: Path, config: dict[str, Any], shown: Shown) -> list[Any]:
    """TensorBoard's, and W&B's with `--track`: offline where it cannot be reached or nobody is logged in."""
    trackers = [TensorBoardTracker("", folder)]
    trackers[0].start()
    if shown.track:
        import wandb

        patience = wandb.Settings(init_timeout=30, finish_timeout=60, silent=True)  # else it tries for hours
        where = dict(name=folder.name, dir=str(folder.absolute()), entity=shown.wandb_entity)
        trackers.append(WandBTracker(shown.wandb_project or "onefile-rlhf", config=config, settings=patience, **where))
        try:
            trackers[1].start()
        except wandb.Error as error:
            print(f"W&B goes offline ({type(error).__name__}); `wandb sync {folder}/wandb/offline-*` sends it later")
            trackers[1].init_kwargs["mode"] = "offline"
            trackers[1].start()
    return [Tracker(tracker) for tracker in trackers]


def make_repository(name: str, public: bool) -> None:
    """On the hub, private unless `public`. Errors: `InputError` where that fails, or where it is there and public."""
    try:
        huggingface_hub.create_repo(name, private=not public, exist_ok=True)
        if not public and not huggingface_hub.model_info(name).private:
            raise ValueError("it is there already and public; add --push_public if it shall be")
    except (HTTPError, OSError, ValueError) as error:
        raise InputError(f"--push_to_hub {name}: {error}") from error


def push(name: str, weights: Path) -> str:
    """Upload the folder of the weights; says where it is or, where that failed, how to do it later."""
    try:
        return f"on the hub: {huggingface_hub.upload_folder(repo_id=name, folder_path=weights)}"
    except Exception as error:  # whatever its transports raise: the weights are there
        return f"not on the hub ({type(error).__name__}: {error}); `hf upload {name} {weights}` sends it later"


def write_card(args: Any, run: Path, script: str, weights: Path) -> None:
    """README.md beside the weights: task, scores, curves, arguments, versions; no command, no environment."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = ({name: x for line in part for name, x in line.items()} for part in (lines[::-1], lines))
    names = [name for name in first if not name.startswith(("step", "time/", "ppo/"))]
    rows = "".join(f"| `{name}` | {first[name]:.4g} | {last[name]:.4g} |\n" for name in sorted(names))
    record, base = json.loads((run / "args.json").read_text()), args.task.base_model
    setting = {k: v for k, v in asdict(args).items() if k not in FREE}
    setting |= {k: record[k] for k in ("processes", "mixed_precision", "device", "python", "versions")}
    shutil.copy(run / "curves.png", weights)
    data = huggingface_hub.ModelCardData(tags=["rlhf", script], base_model=None if Path(base).exists() else base)
    card = f"---\n{data.to_yaml()}\n---\n\n# {script} on {args.task.task}\n\nFrom `{base}`, with onefile-rlhf.\n\n"
    card += f"| metric | first | last |\n|---|---|---|\n{rows}\n![Learning curves](curves.png)\n\n"
    card += f"```json\n{json.dumps(setting, indent=1)}\n```\n"
    home = f"{Path.home()}/".replace("//", "")  # "" where it is the root
    card = card.replace(f"{ROOT}/", "")
    (weights / "README.md").write_text(card.replace(home, "~/") if home else card)


def pyplot() -> Any:
    """matplotlib without a screen; imported only where a picture is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def panels(names: Iterable[str], x: str) -> tuple[Any, dict[str, Any]]:
    """A figure, and a panel for each name."""
    names = list(names)
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    size = 4.6 * columns, 3.1 * rows
    figure, axes = pyplot().subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis, name in zip(axes.flat, names, strict=False):
        axis.set_title(name, fontsize=10)
        axis.set_xlabel(x, fontsize=8)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    return figure, dict(zip(names, axes.flat, strict=False))


def plot_run(folder: Path, names: list[str]) -> None:
    """curves.png of a run: a panel for each of these metrics. Several runs: benchmarks/curves.py."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figure, axes = panels(names, "step")
    for name, axis in axes.items():
        points = [(line["step"], line[name]) for line in lines if name in line]
        axis.plot([x for x, _ in points], [y for _, y in points], linewidth=1.2)
    figure.savefig(folder / "curves.png", dpi=110)
    pyplot().close(figure)
