"""The folder of a run: arguments, metrics, samples, checkpoints, weights, progress."""

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import torch
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker, WandBTracker
from accelerate.utils import broadcast_object_list
from safetensors.torch import save_file
from torch import Tensor, nn

from data.tasks import TASKS
from machinery import checkpoints, cli, distributed
from machinery.cli import ROOT, InputError, about, say
from machinery.progress import Progress, plot_run
from machinery.rewards import check_reward
from machinery.tokens import end_tokens
from utils import TokenIds, all_max, decode

SIGNALS = [getattr(signal, x) for x in ("SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, x)]
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tyro", "numpy")
GIT = "git --git-dir=.git --work-tree=. describe --always --exclude=* --abbrev=40 --dirty"


def check_run(args: Any, processes: int) -> None:
    """Raise `InputError` if the run would overwrite something, resume another, or has no reward."""
    link = Path("models", args.task.task, Path(inspect.getfile(type(args))).stem)
    folder = Path("runs", args.run_name or "")
    if args.resume is None and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        raise InputError("torchrun restarted the run: to continue, --run_name NAME --resume auto")
    if args.resume is None and args.run_name and os.path.lexists(folder):
        raise InputError(f"--run_name {args.run_name} exists in runs/; choose another name")
    if args.output_dir and os.path.lexists(args.output_dir):
        raise InputError(f"--output_dir {args.output_dir} exists; choose another name")
    if not args.output_dir and link.exists() and not link.is_symlink():
        raise InputError(f"{link} is a folder, not a link to the weights of a run; move it away")
    if args.resume == "auto" and cli.is_main() and folder.exists():
        lock(folder).release()
        aside = folder.with_name(f"{folder.name}-{datetime.now():%Y%m%d-%H%M%S-%f}")
        folder.rename(aside)
        say(f"{folder} has no checkpoint: it is {aside} now")
    elif args.resume and args.resume != "auto":
        folder = Path(args.resume).parents[1]
        if cli.is_main():
            lock(folder).release()  # before anything is loaded
        for name, function in vars(args.task).items():
            if name.endswith("_fn") and function:
                say(f"{folder} runs the code of --{name} {function}")
        checkpoints.check_same_run(args, processes)
    if hasattr(args, "reward_model"):
        check_reward(args)


def lock(folder: Path) -> filelock.BaseFileLock:
    """The lock of a run's folder. Raises `InputError` if another process has it."""
    lock = filelock.FileLock(folder / ".lock")  # some disks keep it after a kill
    with about(f"another process is writing {folder}, or left its .lock there"):
        lock.acquire(timeout=0)
    return lock


def forget_signals() -> None:
    """From now on, signals end the process: after a run, or in a fork, such as a pool's worker."""
    for number in SIGNALS:
        if getattr(signal.getsignal(number), "__func__", None) is Run.note_signal:
            signal.signal(number, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):  # blocks them meanwhile, else an early one would be lost
    block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, SIGNALS)
    unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, SIGNALS)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=forget_signals)
    os.register_at_fork(after_in_child=unblock)


class Run:
    """The folder `runs/<name>/`, which the main process writes: docs/running.md.

    Of `total` updates. The metrics `shown` are in the progress line and in curves.png.
    """

    def __init__(self, args: Any, total: int, shown: list[str], accelerator: Accelerator):
        self.args = args
        self.total = total
        self.script = Path(inspect.getfile(type(args)))  # runs and models are named after it
        self.link = Path("models", args.task.task, self.script.stem)
        self.progress = Progress(total, shown)
        self.accelerator = accelerator
        self.main = accelerator.is_main_process
        self.source = None if args.resume in (None, "auto") else Path(args.resume)
        self.save_every = args.save_every or max(total // 10, 10)
        self.signals: list[int] = []  # received so far
        self.in_terminal = sys.stdout.isatty()
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP: leave it so
                signal.signal(number, self.note_signal)
        self.folder = Path()  # see `open`
        if self.main:
            self.open()
        (self.folder,) = broadcast_object_list([self.folder])

    def note_signal(self, number: int, frame: Any) -> None:
        """Remember a signal; after this update, the run saves a checkpoint and ends."""
        self.signals.append(number)
        if signal.Signals(number).name == "SIGHUP" and self.in_terminal:  # printing would fail
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115

    def open(self) -> None:
        """On the main process: create the folder or continue in it; start trackers."""
        step = 0
        if self.source:
            self.folder = self.source.parents[1]
            step = int(self.source.stem)
        else:
            self.create()
        self.lock = lock(self.folder)
        folder = self.folder.absolute()
        tensorboard: Any = TensorBoardTracker("", folder, purge_step=step)
        tensorboard.start()
        self.accelerator.trackers = [tensorboard]
        if self.args.track:
            record = json.loads((folder / "args.json").read_text())
            project = os.environ.get("WANDB_PROJECT", "onefile-rlhf")
            options: Any = dict(config=record, name=folder.name, dir=folder, resume="allow")
            with about("--track; WANDB_MODE=offline works without a network"):
                wandb: Any = WandBTracker(project, id=record["wandb_id"], **options)
                wandb.start()
            self.accelerator.trackers.append(wandb)

    def create(self) -> None:
        """Create the folder with the source, the arguments and what they named."""
        task = self.args.task
        now = f"{datetime.now():%Y%m%d-%H%M%S-%f}"
        name = self.args.run_name or f"{task.task}__{self.script.stem}__{self.args.seed}__{now}"
        self.folder = Path("runs", name)
        with about(f"--run_name {name}"):  # another run may just have made it
            self.folder.mkdir(parents=True)
        reward_file = Path(str(task.reward_fn).rpartition(":")[0])
        if reward_file.is_file():
            shutil.copy(reward_file, self.folder)
        shutil.copy(self.script, self.folder)  # the last, if names are equal
        # Of our own work tree; "-dirty" if tracked files have changed since; no output without git.
        git = subprocess.run(GIT, cwd=ROOT, shell=True, capture_output=True, text=True, check=False)
        record = checkpoints.describe(self.args, self.accelerator.num_processes)
        record.update(
            command=sys.argv,
            commit=git.stdout.strip() or None,
            device=self.accelerator.device.type,
            python=sys.version,
            versions={name: sys.modules[name].__version__ for name in PACKAGES},
            wandb_id=os.urandom(4).hex(),
        )
        (self.folder / "args.json").write_text(json.dumps(record, indent=1))

    def restore(self, model: nn.Module, optimizer: Any, state: Any = None) -> tuple[int, Any]:
        """Return the number of updates that are done, and the state that `checkpoint` was given.

        With `--resume`, weights and optimizer become those of the checkpoint, and metrics and
        samples are cut back to it. Without, the result is 0 and `state`.
        """
        tensors: dict[str, Tensor] = {}
        own = checkpoints.take_tensors({"state": state}, tensors)
        text = json.dumps(own)  # what it cannot write fails now
        optimizer.register_step_pre_hook(lambda *_: cli.rescues.clear())
        if self.source is None:
            return 0, checkpoints.parse(text, tensors)["state"]
        saved = checkpoints.load_checkpoint(self.source, model, optimizer)
        step = saved["step"]
        self.note_saved(step)
        if self.main:
            self.cut_back(self.source, step)
            self.progress.start = step
            say(f"resuming {self.folder} after {step} of {self.total}")
        return step, saved["state"]

    def cut_back(self, source: Path, step: int) -> None:
        """Cut the run's files to what they were at a checkpoint, after `step` updates."""
        for path in (self.folder / "metrics.jsonl", self.folder / "samples.jsonl"):
            if not path.exists():
                continue
            size = 0
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n") or json.loads(line)["step"] >= step:
                    break  # the process was killed while it wrote this line, or wrote it later
                size += len(line)
            os.truncate(path, size)
        for path in source.parent.glob(cli.CHECKPOINTS):
            if path.name > source.name:
                path.unlink()

    def checkpoint(self, step: int, model: nn.Module, optimizer: Any, state: Any = None) -> None:
        """Write a checkpoint after `step` updates, if one is due or a signal asks for one.

        `state`: what else a resumed run needs, such as the KL coefficient, as JSON and tensors.
        After a signal, end the run with exit code 143. The last update needs no checkpoint.
        """
        count = torch.tensor(len(self.signals), device=self.accelerator.device)
        asked = all_max(count).item()  # one process's signal ends all
        write = partial(self.write, step, model, optimizer, state)
        cli.rescues[:] = [write]  # until the next optimizer step
        if step == self.total or not (asked or step % self.save_every == 0):
            return
        saved = write()
        if asked:
            distributed.stop(self.accelerator)  # before `close`, so that no signal ends it
            self.close()
            if self.main:
                print(saved, flush=True)
            sys.exit(143)

    def write(self, step: int, *what: Any) -> str:
        """On all processes: write a checkpoint, and return how to resume from it."""
        checkpoints.save_checkpoint(self.folder / "checkpoints", step, *what)
        self.accelerator.wait_for_everyone()
        return self.note_saved(step)

    def note_saved(self, step: int) -> str:
        """Return what is saved and how to resume from it, which Ctrl-C prints, too."""
        cli.saved[0] = f"{step} of {self.total} updates are saved: --resume {self.folder}"
        return cli.saved[0]

    def keep_weights(self, update: int, model: Any, tokenizer: Any) -> None:
        """Save weights as keep_<update>/ every `keep_every` updates; on all processes."""
        if self.args.keep_every and update % self.args.keep_every == 0:
            self.save(model, tokenizer, name=f"keep_{update}")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of one update."""
        if self.main:
            self.append("metrics.jsonl", [{"step": step, **metrics}])
            self.accelerator.log(metrics, step=step)
            if step < self.total:  # otherwise an evaluation after the last update
                self.progress.update(step, metrics)

    def append(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Add lines to a file of the run."""
        with open(self.folder / name, "a") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")

    def log_samples(
        self, step: int, columns: dict[str, Tensor], tokenizer: Any, ids: TokenIds
    ) -> None:
        """Write and print four rows of columns: tokens [B, T], as texts, or numbers [B]."""
        if not self.main:
            return
        values = []
        for x in columns.values():
            values.append(x[:4].tolist() if x.dim() == 1 else decode(tokenizer, x[:4], ids))
        cells = list(zip(*values, strict=True))
        rows = [dict(zip(columns, row, strict=True)) for row in cells]
        self.append("samples.jsonl", [{"step": step, **row} for row in rows])
        self.progress.table(rows, f"samples after {step} updates")
        if self.args.track:
            tracker = self.accelerator.get_tracker("wandb")
            tracker.log_table("samples", list(columns), cells, step=step)

    def save(self, model: Any, tokenizer: Any, name: str = "model", **heads: nn.Module) -> None:
        """Save weights as a folder of this name in the run.

        `model` goes to `--output_dir`, if given; otherwise `models/<task>/<script>` links to it.
        """
        states = {key: checkpoints.full_state(head)[0] for key, head in heads.items()}
        state, _ = checkpoints.full_state(model)
        out = self.args.output_dir if name == "model" else None
        folder = Path(out or self.folder / name)
        if self.main:
            task = self.args.task
            config = getattr(model, "generation_config", None)  # a reward model has none
            if config and task.eos_task:  # `generate` stops where it was trained to, too
                config.eos_token_id = end_tokens(task, config, tokenizer)
            save_model(model, tokenizer, folder, state, states, replace=not out)
            shutil.copy(self.folder / "args.json", folder)  # for tools
            if folder == self.folder / "model":
                replace_link(self.link, folder)
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """From now on, signals end the process, and others may write the folder."""
        forget_signals()
        cli.rescues.clear()
        if self.main:
            self.lock.release()

    def finish(self, *messages: str, then: str = "", flag: str = "") -> None:
        """Stop the processes, draw the curves, print where everything is and the next command,
        which starts the script `then`, whose `flag` names the weights.
        """
        self.close()
        distributed.stop(self.accelerator)
        if not self.main:
            return
        plot_run(self.folder, self.progress.shown)
        task = self.args.task
        weights = self.args.output_dir or self.folder / "model"
        print(*messages, f"weights: {weights}", f"curves: {self.folder}/curves.png", sep="\n")
        if then and not self.args.output_dir:
            presets = getattr(sys.modules[type(self.args).__module__], "PRESETS", {})
            defaults = vars(TASKS[task.task]) | presets.get(task.task, {})
            if vars(task).items() <= defaults.items():  # else it needs flags
                print(f"next: python {then}.py --task {task.task} --{flag} {self.link}")


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


def replace_link(link: Path, target: Path) -> None:
    """Make `link` a relative link to a folder; a copy if that is refused."""
    link.parent.mkdir(parents=True, exist_ok=True)
    part = link.with_name(f".{link.name}.{os.getpid()}")  # another run may end now, too
    try:
        part.symlink_to(os.path.relpath(target.resolve(), link.parent.resolve()))
        part.replace(link)
    except OSError:  # Windows without developer mode, some network drives
        shutil.copytree(target, link)
