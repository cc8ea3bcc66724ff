"""Does a script compute the same on any number of processes?

Try a copy of yours before a cluster:

    python tools/same.py                       # ppo.py and rloo.py
    python tools/same.py mine.py --only fsdp2
    python tools/same.py mine.py -- --kl_coef 0.2 --reward_fn mine.py:score

Runs it on tiny models on the CPU: again, in other micro-batches, on 1, 2 and 4 processes, sharded
by FSDP2, killed and resumed, in bf16. Every run has the same queries, random numbers and
minibatches: four shares of the batch, on however many processes. The numbers with which `sample`
draws a response are those of its context. Random numbers of your own differ between processes (G6).
Prints for each run whether weights, optimizer, metrics and samples are equal bit for bit, equal
within rounding, or what differs first. Exit code 1 if one is not as it should be. As rounding may
flip a sampled token, what differs with one seed has to be equal with the next. SEED=2 for others.

After `--` stand flags of the script. It runs in a folder of its own: paths that exist are made
absolute there. `reward` is its reward model, `task/model` its policy, `task/r.jsonl` its data.
"""

import importlib
import inspect
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import traceback
import zlib
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import datasets  # noqa: E402
import numpy as np  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import tyro  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from machinery import checkpoints, cli, queries  # noqa: E402
from machinery.runs import Run  # noqa: E402

Table = dict[str, tuple[bool, str]]
SHARES = 4  # of a batch, on 1, 2 or 4 processes
ROUNDING = 3e-6  # of trained weights, 1% of the learning rate; 1e-3, relative, of all else
OWN_ROWS = "own_rows"  # a file: the script read rows of its table that are not of `query_rows`
SIZES = dict(total_episodes=48, batch_size=16, num_minibatches=2, num_ppo_epochs=2, rloo_k=2)
SIZES |= dict(rollout_batch_size=5, eval_queries=3, eval_every=2, keep_every=2, kl_horizon=20)
SIZES |= dict(micro_batch_tokens=36, save_every=1, seed=int(os.environ.get("SEED", 1)), lr=3e-4)
OTHERS = {  # of train_reward.py and sft.py, by a field that only they have
    "num_labels": dict(num_labels=16, batch_size=4, normalize_samples=16, rollout_batch_size=16),
    "num_heldout": dict(num_heldout=5, batch_size=8, num_epochs=4, lr=1e-4),
}


@dataclass(frozen=True)
class Way:
    """How a script is run."""

    processes: int = 1
    fsdp2: bool = False
    precision: str = "no"
    killed: bool = False  # after the second update, and then resumed
    then_ddp: bool = False  # resumed without FSDP2
    flags: tuple[tuple[str, Any], ...] = ()
    once_more: bool = False


STEP = (("num_ppo_epochs", 1), ("num_minibatches", 1))  # all probability ratios are first ones
COLUMNS = {  # name: a way, the way that it has to be equal to, and whether bit for bit
    "again": (Way(once_more=True), Way(), True),
    "one-sequence micro-batches": (Way(flags=(("micro_batch_tokens", 1),)), Way(), False),
    "one micro-batch": (Way(flags=(("micro_batch_tokens", 4096),)), Way(), False),
    "2 processes": (Way(2), Way(), False),
    "4 processes": (Way(4), Way(), False),
    "resumed": (Way(killed=True), Way(), True),
    "2 processes, resumed": (Way(2, killed=True), Way(2), True),
    "fsdp2": (Way(2, fsdp2=True), Way(2), False),
    "fsdp2, 4 processes": (Way(4, fsdp2=True), Way(4), False),
    "fsdp2, resumed": (Way(2, fsdp2=True, killed=True), Way(2, fsdp2=True), True),
    "fsdp2, resumed without": (Way(2, fsdp2=True, killed=True, then_ddp=True), Way(2), False),
    "bf16, first ratio": (Way(2, precision="bf16", flags=STEP), None, True),
    "bf16, fsdp2, first ratio": (Way(2, fsdp2=True, precision="bf16", flags=STEP), None, True),
}


@dataclass(frozen=True)
class Args:
    """Does a script compute the same on any number of processes?"""

    scripts: tyro.conf.Positional[tuple[Path, ...]] = (ROOT / "ppo.py", ROOT / "rloo.py")
    """files with `Args` and `main`, such as a changed copy of ppo.py"""
    only: tuple[str, ...] = ()
    """names of columns; empty: all"""


def load(path: Path) -> ModuleType:
    """A script as a module of its own, which may import what is beside it."""
    sys.path += [str(path.parent), os.getcwd()]
    return tiny.load_script(path)


def settings(module: ModuleType, folder: Path, flags: tuple[str, ...]) -> Any:
    """Arguments of three updates or more, of an EOS task where responses are of uneven length."""
    task = tiny.eos_task(tiny.make_task(base_model=str(folder / "task" / "model")), folder / "task")
    names = {field.name for field in fields(module.Args)}
    other = next((values for field, values in OTHERS.items() if field in names), {})
    values = SIZES | other | dict(reward_model=str(folder / "reward"))
    args = module.Args(task=task, **{key: value for key, value in values.items() if key in names})
    flags = tuple(map(absolute, flags))
    return tyro.cli(tyro.conf.OmitArgPrefixes[module.Args], default=args, args=flags)


def absolute(word: str) -> str:
    """A word of the command line, with an absolute path if one begins it, as in `mine.py:score`."""
    flag, path, rest = re.fullmatch(r"(--\w+=)?([^:@]*)(.*)", word, re.S).groups("")
    there = Path(path).name and Path(path).exists()  # "." has no name: it is a token
    return flag + (str(Path(path).absolute()) if there else path) + rest


def write_files(folder: Path) -> None:
    """A random model that ends some of its responses, its data, a random reward model."""
    task = tiny.write_task(folder / "task")
    lm = AutoModelForCausalLM.from_pretrained(task.base_model)
    with torch.no_grad():
        lm.get_output_embeddings().weight[lm.config.eos_token_id] *= 4
    lm.save_pretrained(task.base_model)
    tiny.write_reward(folder / "reward")


def draw_by_share(module: ModuleType, args: Any, rank: int, processes: int) -> None:
    """Make queries, random numbers and minibatches of this process those of its shares."""
    each = SHARES // processes
    shares = range(rank * each, (rank + 1) * each)
    seeds = [args.seed + 100003 * share for share in shares]
    original = dict(vars(module))
    step = 0  # of the update
    seen: Counter[bytes] = Counter()  # contexts that were sampled from in the update
    drawn, read = set(), queries.TokenTable.__getitem__

    def query_rows(table: int | np.ndarray, size: int, seed: int, step: int) -> np.ndarray:
        """Rows of each share, by their number or their weights; no two shares have one."""
        rows: list[int] = []
        for share, seed in zip(shares, seeds, strict=True):
            of_share = table // SHARES if np.ndim(table) == 0 else table[share::SHARES]
            chosen = original["query_rows"](of_share, size // each, seed, step)
            rows += list(SHARES * chosen + share)
        drawn.update(rows)
        return np.array(rows)

    def read_rows(table: queries.TokenTable, rows: np.ndarray | slice) -> torch.Tensor:
        if "sample" in original and not isinstance(rows, slice) and not drawn.issuperset(rows):
            Path(OWN_ROWS).touch()
        return read(table, rows)

    def random_numbers(seed: int, number: int, *inputs: Any) -> torch.Tensor:
        nonlocal step
        step = number
        seen.clear()
        return original["random_numbers"](seed, step, *inputs)

    def sample(*values: Any, **named: Any) -> Any:
        """With the random numbers of each context, others each time that it is there."""
        call = inspect.signature(original["sample"]).bind(*values, **named)
        contexts, uniform, ids = (call.arguments[x] for x in ("contexts", "uniform", "ids"))
        for i, context in enumerate(contexts):
            key = context[context != ids.pad].numpy().tobytes()
            seen[key] += 1
            rng = np.random.default_rng([zlib.crc32(key), seen[key], step, args.seed])
            uniform[:, i] = torch.from_numpy(rng.random(len(uniform)))
        return original["sample"](*call.args, **call.kwargs)

    rngs: list[np.random.Generator] = []  # of the shares, in this update

    def epoch_order(epoch: int, total: int, rng: Any, *k: int) -> np.ndarray:
        """The order of an epoch whose minibatches have a part of each share's, one after the other."""
        if epoch == 0:
            rngs[:] = [np.random.default_rng([seed, step, 2]) for seed in seeds]
        size = total // each
        orders = [original["epoch_order"](epoch, size, rng, *k) for rng in rngs]
        parts = zip(*(np.split(order, args.num_minibatches) for order in orders), strict=True)
        return np.concatenate([i * size + x for part in parts for i, x in enumerate(part)])

    def generate(decoder: Any, contexts: torch.Tensor, *settings: Any) -> torch.Tensor:
        """Sample each sequence alone, seeded by its context: wherever it is, it is the same."""
        responses = []
        for context in contexts:
            torch.manual_seed(int(context.sum()))
            responses.append(original["generate"](decoder, context[None], *settings))
        return torch.cat(responses)

    queries.TokenTable.__getitem__ = read_rows
    for function in (query_rows, random_numbers, sample, epoch_order, generate):
        if function.__name__ in original:
            setattr(module, function.__name__, function)


def keep_checkpoints(stop_after: int | None) -> None:
    """Keep the checkpoints of all updates; kill this process after one of them."""
    checkpoints.KEPT = 1000  # more than a run has; the check of disk space counts them
    checkpoint = Run.checkpoint

    def then_stop(run: Run, step: int, *args: Any, **named: Any) -> None:
        checkpoint(run, step, *args, **named)
        if step == stop_after:
            os.kill(os.getpid(), signal.SIGKILL)

    Run.checkpoint = then_stop


def work(
    rank: int, module: ModuleType, args: Any, folder: Path, way: Way, port: int, stop: int | None
) -> None:
    """One process of a run. Its error is one line, and names the line of the script."""
    signal.alarm(300)  # a run that hangs is killed
    torch.set_num_threads(1)  # torch makes a new pool in a fork; in two threads at once, it aborts
    for seed in (random.seed, np.random.seed, torch.seed):  # what a script must not depend on
        seed()
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.chdir(folder)
    os.environ |= {"ACCELERATE_MIXED_PRECISION": way.precision}
    if way.processes > 1:
        numbers = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=way.processes, MASTER_PORT=port)
        os.environ |= {name: str(x) for name, x in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    if way.fsdp2 and not (way.then_ddp and stop is None):
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        os.environ["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"
        tiny.shard_on_a_cpu()
    draw_by_share(module, args, rank, way.processes)
    keep_checkpoints(stop)
    try:
        module.main(args)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        text = text if len(text) < 200 else f"{text[:99]}…{text[-99:]}"
        calls = traceback.extract_tb(error.__traceback__)
        for call in [x for x in calls if x.filename == module.__file__][-1:]:
            text = f"{Path(call.filename).name}:{call.lineno}, `{call.line}`: {text}"
        raise RuntimeError(text) from None


def run(module: ModuleType, args: Any, folder: Path, way: Way, name: str) -> str:
    """Run a script from beginning to end; return what went wrong in one line."""
    names = {field.name for field in fields(args)}
    args = replace(args, **{key: value for key, value in way.flags if key in names})
    for stop in (2, None) if way.killed else (None,):
        found = sorted((folder / "runs" / name).glob("checkpoints/*.safetensors"))
        args = replace(args, **({"resume": str(found[-1])} if found else {"run_name": name}))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        inputs, error = (module, args, folder, way, port, stop), ""
        context = mp.start_processes(work, inputs, way.processes, join=False, start_method="fork")
        try:
            while not context.join(grace_period=10):  # one of them has ended
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as exception:
            error = str(exception).strip().splitlines()[-1].removeprefix("RuntimeError: ")
        if "SIGKILL" not in error if stop else error:
            return error or "ended before it was to be killed"
    return ""


def written(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Checkpoints of all updates, kept and final weights, and all lines of metrics and samples."""
    paths = sorted(folder.glob("checkpoints/*.safetensors"))
    paths += sorted(folder.glob("[!.]*/model.safetensors"))  # best, keep_2, model
    out = {"after update": [load_file(path) for path in paths]}
    for state in out["after update"]:
        for name, x in state.items():
            if name.endswith("c_attn.bias") and x.ndim:
                x.view(3, -1)[1] = 0  # GPT-2's key bias has no effect; its gradient is rounding
    for name in ("metrics.jsonl", "samples.jsonl"):
        text = (folder / name).read_text() if (folder / name).exists() else ""
        lines = [json.loads(line, parse_constant=str) for line in text.splitlines()]  # NaN: "NaN"
        # Rounding decides what is clipped if the advantage is 0, and which scores are equal.
        skip = re.compile("time/|.*clipfrac|.*zero_std").match
        out[f"{name}, line"] = [{k: x for k, x in line.items() if not skip(k)} for line in lines]
    return out


def relative_gap(mine: Any, other: Any, is_weight: bool) -> tuple[float, float]:
    """The largest difference of two values, in units of rounding; and this unit.

    Relative to a tensor's largest number; for weights, which have moments, only if it is above 1.
    """
    if not isinstance(other, int | float | torch.Tensor):
        return 0.0 if mine == other else float("inf"), 1.0
    mine, other = torch.as_tensor(mine).double(), torch.as_tensor(other).double()
    size = other.nan_to_num(0, 0, 0).abs().max().item()
    unit = max(1.0, size) if is_weight else 1e-3 / ROUNDING * max(1e-2, size)
    if mine.shape != other.shape:
        return float("inf"), unit
    gaps = (mine - other).masked_fill(mine == other, 0)  # 0 also for two infinities
    return gaps.abs().max().item() / unit, unit


def difference(ours: Path, theirs: Path) -> tuple[float, str]:
    """The largest difference, 0 only if everything is equal; and the first beyond rounding."""
    a, b, largest = written(ours), written(theirs), 0.0
    if not a["after update"]:
        return float("inf"), "the script never calls run.checkpoint"
    for kind in b:
        if len(a[kind]) != len(b[kind]):
            return float("inf"), f"{kind}s: {len(a[kind])} and {len(b[kind])}"
        for at, (x, y) in enumerate(zip(a[kind], b[kind], strict=True), start=1):
            if x.keys() != y.keys():
                return float("inf"), f"{kind} {at}: {sorted(x.keys() ^ y.keys())[0]} is in one only"
            trained = {f"model/{k.split('/')[2]}" for k in y if k.startswith("optimizer/")}
            for name in y:
                is_weight = kind == "after update" and name in (trained or y)
                gap, unit = relative_gap(x[name], y[name], is_weight)
                if not gap <= ROUNDING:
                    return gap, f"{kind} {at}: {name} is off by {gap * unit:.1g}"
                largest = max(largest, gap)
    return largest, ""


def constant(folder: Path) -> tuple[list[str], int]:
    """The tensors of the model that the second update does not change; the number of all."""
    first, second, *_ = [*written(folder)["after update"], {}, {}]
    names = [name for name in first if name.startswith("model/") and first[name].ndim]
    return [x for x in names if x in second and first[x].equal(second[x])], len(names)


def first_ratio(folder: Path) -> tuple[str, str]:
    """What was found, and what is wrong if ratios before the only step of an update are not 1."""
    name = "ppo/policy/approxkl_avg"  # 0 only if all log ratios are 0
    values = [line[name] for line in written(folder)["metrics.jsonl, line"] if name in line]
    if not values:
        return f"does not apply: no metric {name}", ""
    return "exactly 1", f"{name} is {max(values)}" if any(values) else ""


def table(script: Path, only: tuple[str, ...] = (), flags: tuple[str, ...] = ()) -> Table:
    """Print a line per column; return whether each is as it should be, and what was found."""
    print(script.name, end=" ", flush=True)
    found: Table = {}
    with tempfile.TemporaryDirectory() as home:
        folder, done = Path(home), {}
        datasets.config.HF_DATASETS_CACHE = folder / "cache"
        write_files(folder)
        module = load(script.absolute())
        args = settings(module, folder, flags)
        names = "eos_task", "query_length", "response_length"
        sizes = ", ".join(f"{name}={getattr(args.task, name)}" for name in names)
        print(f"on random models: {sizes}", flush=True)

        def compare(way: Way, other: Way | None, to_the_bit: bool, seed: int) -> tuple[str, str]:
            """What was found, and what is wrong."""
            for each in (way, other) if other else (way,):
                if (each, seed) not in done:
                    name = f"run{len(done)}"
                    error = run(module, replace(args, seed=seed), folder, each, name)
                    done[each, seed] = folder / "runs" / name, error
                if done[each, seed][1]:
                    return "", done[each, seed][1]
            if other is None:
                return first_ratio(done[way, seed][0])
            gap, error = difference(done[way, seed][0], done[other, seed][0])
            if (folder / OWN_ROWS).exists() and way.processes != other.processes:
                return "not compared: it draws rows other than by `query_rows`", ""
            text = "equal to the bit" if gap == 0 else f"weights equal to {gap:.0e}"
            if gap and to_the_bit:
                error = error or f"{text}, and has to be equal to the bit"
            return text, error

        for column, (way, other, to_the_bit) in COLUMNS.items():
            if only and column not in only or not (other or hasattr(args, "num_minibatches")):
                continue
            text, error = compare(way, other, to_the_bit, args.seed)
            if " is off by " in error and not to_the_bit:
                text, error = compare(way, other, to_the_bit, args.seed + 1)
                text += " (with the next seed)"
            found[column] = not error, error or text
            sign = "✗" if error else "–" if "not compared" in text else "✓"
            print(f"  {column:26} {sign} {error or text}", flush=True)
        for path in [path for path, error in done.values() if not error][:1]:
            names, number = constant(path)
            if names:
                text = f"changes {number - len(names)} of {number} tensors, not {names[0]}"
                print(f"  second update {text}. Does it wait for more? -- --total_episodes 96")
                found |= {"second update": (False, text)} if len(names) == number else {}
    return found


def warm_up() -> None:
    """Import once what every run needs, and not in every fork."""
    for name in ("rich.progress", "rich.table", "torch.utils.tensorboard", "matplotlib.figure"):
        importlib.import_module(name)
    torch.set_num_threads(1)


def main(args: Args, flags: tuple[str, ...]) -> None:
    """A table for each script."""
    if unknown := {*args.only} - {*COLUMNS}:
        raise cli.InputError(f"--only has no {unknown}; choose of {', '.join(COLUMNS)}")
    warm_up()
    tables = [table(script, args.only, flags) for script in args.scripts]
    sys.exit(not all(fine for lines in tables for fine, _ in lines.values()))


if __name__ == "__main__":
    end = [*sys.argv, "--"].index("--")
    flags, sys.argv[end:] = sys.argv[end + 1 :], []
    cli.run(partial(main, flags=tuple(flags)), Args)
