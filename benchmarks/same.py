"""Does a script compute the same on any number of processes? Try a copy of yours before a cluster:

    python benchmarks/same.py                       # ppo.py and rloo.py
    python benchmarks/same.py mine.py --only fsdp2

Runs it on tiny models on the CPU: again, in other micro-batches, on 1, 2 and 4 processes, sharded
by FSDP2, killed and resumed, in bf16. Every run has the same queries, random numbers and
minibatches: four shares, each drawn as one process would draw it (G6), on however many processes.
Prints for each run whether weights, optimizer, metrics and samples are equal bit for bit, equal
within rounding, or what differs first. Exit code 1 if one is not as it should be. Rounding may flip
a sampled token, after which weights are off by about the learning rate: try another SEED=2 then.
"""

import importlib.util
import json
import os
import random
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass, fields
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

from machinery import checkpoints  # noqa: E402
from machinery.runs import Run  # noqa: E402

SHARES = 4  # of a batch, on 1, 2 or 4 processes
ROUNDING = 1e-6  # of weights; 1000 times that, relative, for everything else
SIZES = dict(total_episodes=48, batch_size=16, num_minibatches=2, num_ppo_epochs=2, rloo_k=2)
SIZES |= dict(rollout_batch_size=5, eval_queries=3, eval_every=2, kl_horizon=20, lr=3e-4)
SIZES |= dict(micro_batch_tokens=36, save_every=1, seed=int(os.environ.get("SEED", 1)))
SIZES |= dict(keep_every=2)
OTHERS = {  # of train_reward.py and sft.py, by a field that only they have
    "num_labels": dict(num_labels=16, batch_size=4, normalize_samples=16, rollout_batch_size=16),
    "num_heldout": dict(num_heldout=4, batch_size=8, num_epochs=4, lr=1e-4),
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


# One optimizer step per update: all its probability ratios are first ones.
STEP = (("num_ppo_epochs", 1), ("num_minibatches", 1))
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
    """Whether scripts compute the same whatever they run on."""

    scripts: tyro.conf.Positional[tuple[Path, ...]] = (ROOT / "ppo.py", ROOT / "rloo.py")
    """files with `Args` and `main`, such as a changed copy of ppo.py"""
    only: tuple[str, ...] = ()
    """names of columns; empty: all"""


def load(path: Path) -> ModuleType:
    """A script as a module of its own."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings(module: ModuleType, folder: Path, way: Way, name: str) -> Any:
    """Arguments of three updates or more, of an EOS task where responses are of uneven length."""
    task = tiny.eos_task(tiny.make_task(base_model=str(folder / "task" / "model")), folder / "task")
    names = {field.name for field in fields(module.Args)}
    other = next((values for field, values in OTHERS.items() if field in names), {})
    values = SIZES | other | dict(way.flags) | dict(reward_model=str(folder / "reward"))
    values |= dict(resume=f"runs/{name}") if (Path("runs") / name).exists() else dict(run_name=name)
    return module.Args(task=task, **{key: value for key, value in values.items() if key in names})


def write_files(folder: Path) -> None:
    """A random model that ends some of its responses, its data, a random reward model."""
    task = tiny.write_task(folder / "task")
    lm = AutoModelForCausalLM.from_pretrained(task.base_model)
    with torch.no_grad():
        lm.get_output_embeddings().weight[lm.config.eos_token_id] *= 4
    lm.save_pretrained(task.base_model)
    tiny.write_reward(folder / "reward")


# ------------------------------------------------------------------------------ inside one process


def draw_by_share(module: ModuleType, args: Any, rank: int, processes: int) -> None:
    """Make queries, random numbers and minibatches of this process those of its shares."""
    each = SHARES // processes
    k = getattr(args, "rloo_k", getattr(args, "samples_per_query", 1))
    seeds = [args.seed + 100003 * share for share in range(rank * each, (rank + 1) * each)]
    names = ("query_rows", "generator", "sample_in_batches", "shuffle", "generate")
    original = {name: getattr(module, name, None) for name in names}
    current = [0]  # the update

    def place(share: int, rows: Any, total: int) -> Any:
        """Rows of a share, laid out [K, p], among the `total` rows of the process [K, each * p]."""
        p = total // each // k
        return rows // p * (each * p) + share * p + rows % p

    def query_rows(num_queries: int, size: int, step: int, seed: int) -> np.ndarray:
        parts = [original["query_rows"](num_queries, size // each, step, seed) for seed in seeds]
        return np.concatenate(parts)

    def generator(seed: int, step: int, device: Any) -> torch.Generator:
        current[0] = step
        return original["generator"](seed, step, device)

    def sample_in_batches(lm: Any, contexts: torch.Tensor, ids: Any, args: Any, rng: Any) -> Any:
        sample = original["sample_in_batches"]
        if len(contexts) == args.eval_queries:  # the same on every process
            return sample(lm, contexts, ids, args, rng)
        responses = contexts.new_empty(len(contexts), args.task.response_length)
        for share, seed in enumerate(seeds):
            rows = place(share, torch.arange(len(contexts) // each), len(contexts))
            rng = original["generator"](seed, current[0], contexts.device)
            responses[rows] = sample(lm, contexts[rows], ids, args, rng)
        return responses

    def shuffle(total: int, args: Any, seed: list[int], device: Any) -> list[list[torch.Tensor]]:
        shares = [original["shuffle"](total // each, args, [s, seed[1]], device) for s in seeds]
        epochs = []
        for share_epochs in zip(*shares, strict=True):
            minibatches = []
            for parts in zip(*share_epochs, strict=True):
                placed = [place(share, rows, total) for share, rows in enumerate(parts)]
                minibatches.append(torch.cat(placed))
            epochs.append(minibatches)
        return epochs

    def generate(decoder: Any, contexts: torch.Tensor, *settings: Any) -> torch.Tensor:
        """Sample each sequence alone, seeded by its context: wherever it is, it is the same."""
        responses = []
        for context in contexts:
            torch.manual_seed(int(context.sum()))
            responses.append(original["generate"](decoder, context[None], *settings))
        return torch.cat(responses)

    for function in (query_rows, generator, sample_in_batches, shuffle, generate):
        if original[function.__name__]:
            setattr(module, function.__name__, function)


def keep_checkpoints(stop_after: int | None) -> None:
    """Keep the checkpoints of all updates; kill this process after one of them."""
    checkpoints.KEPT = 10**6
    checkpoint = Run.checkpoint

    def then_stop(run: Run, step: int, *args: Any) -> None:
        checkpoint(run, step, *args)
        if step == stop_after:
            os.kill(os.getpid(), signal.SIGKILL)

    Run.checkpoint = then_stop


def work(
    rank: int, path: Path, folder: Path, way: Way, name: str, port: int, stop: int | None
) -> None:
    """One process of a run."""
    signal.alarm(120)  # a run that hangs is killed
    for seed in (random.seed, np.random.seed, torch.seed):  # what a script must not depend on
        seed()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os.chdir(folder)
    os.environ |= {"ACCELERATE_MIXED_PRECISION": way.precision}
    if way.processes > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ["WORLD_SIZE"] = str(way.processes)
    if way.fsdp2 and not (way.then_ddp and stop is None):
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        os.environ["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"
        tiny.shard_on_a_cpu()
    module = load(path)
    args = settings(module, folder, way, name)
    draw_by_share(module, args, rank, way.processes)
    keep_checkpoints(stop)
    module.main(args)


# ------------------------------------------------------------------------------ outside


def run(path: Path, folder: Path, way: Way, name: str) -> str:
    """Run a script from beginning to end; return what went wrong."""
    for stop in (2, None) if way.killed else (None,):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        inputs, error = (path, folder, way, name, port, stop), ""
        context = mp.start_processes(work, inputs, way.processes, join=False, start_method="fork")
        try:
            while not context.join(grace_period=10):  # one of them has ended
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as exception:
            error = str(exception)
        if stop and "SIGKILL" not in error:
            return error or "ended before it was to be killed"
        if error and not stop:
            return error.strip().splitlines()[-1]
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
        lines = [json.loads(line) for line in text.splitlines()]
        for line in lines:
            for key in list(line):
                if key.startswith("time/") or "clipfrac" in key:  # chance if the advantage is 0
                    del line[key]
        out[f"{name}, line"] = lines
    return out


def difference(ours: Path, theirs: Path) -> tuple[float, str]:
    """The largest difference, 0 only if everything is equal; and the first beyond rounding.

    Differences of weights are absolute, those of everything else are relative.
    """
    a, b, largest = written(ours), written(theirs), 0.0
    if not a["after update"]:
        return float("inf"), "the script never calls run.checkpoint"
    for kind in b:
        if len(a[kind]) != len(b[kind]):
            return float("inf"), f"{kind}s: {len(a[kind])} and {len(b[kind])}"
        for at, (x, y) in enumerate(zip(a[kind], b[kind], strict=True), start=1):
            if x.keys() != y.keys():
                return float("inf"), f"{kind} {at}: {sorted(x.keys() ^ y.keys())[0]} is in one only"
            for name in y:
                unit = 1.0
                if isinstance(y[name], str):
                    gap = 0.0 if x[name] == y[name] else float("inf")
                else:
                    mine, other = (torch.as_tensor(z).double() for z in (x[name], y[name]))
                    if name.startswith("optimizer/") or kind != "after update":
                        unit = 1000 * max(1e-2, other.abs().max().item())
                    gap = (mine - other).abs().max().item() / unit
                if not gap <= ROUNDING:
                    return gap, f"{kind} {at}: {name} is off by {gap * unit:.1g}"
                largest = max(largest, gap)
    return largest, ""


def first_ratio(folder: Path) -> str:
    """What is wrong if the ratios before the only optimizer step of an update are not all 1."""
    lines = written(folder)["metrics.jsonl, line"]
    name = "ppo/policy/approxkl_avg"  # 0 only if all log ratios are 0
    values = [line[name] for line in lines if name in line]
    if not values:
        return f"no metric {name}"
    return "" if not any(values) else f"{name} is {max(values)}"


def table(script: Path, only: tuple[str, ...] = ()) -> dict[str, tuple[bool, str]]:
    """Print a line per column; return whether each is as it should be, and what was found."""
    print(script.name, flush=True)
    found: dict[str, tuple[bool, str]] = {}
    with tempfile.TemporaryDirectory() as home:
        folder, done = Path(home), {}
        datasets.config.HF_DATASETS_CACHE = folder / "cache"
        write_files(folder)
        has_ratio = "num_minibatches" in script.read_text()
        for column, (way, other, to_the_bit) in COLUMNS.items():
            if only and column not in only or other is None and not has_ratio:
                continue
            for each in {other, way} - {None} - set(done):
                name = f"run{len(done)}"
                done[each] = name, run(script.resolve(), folder, each, name)
            (name, error), text = done[way], "exactly 1"
            if other is None:
                error = error or first_ratio(folder / "runs" / name)
            else:
                error = error or done[other][1]
                if not error:
                    gap, error = difference(*(folder / "runs" / x for x in (name, done[other][0])))
                    text = "equal to the bit" if gap == 0 else f"weights equal to {gap:.0e}"
                    if not error and gap and to_the_bit:
                        error = f"{text}, and has to be equal to the bit"
            found[column] = not error, error or text
            print(f"  {column:26} {'✗' if error else '✓'} {error or text}", flush=True)
    return found


def warm_up() -> None:
    """Import once what every run needs, and not in every fork."""
    for name in ("rich.progress", "rich.table", "torch.utils.tensorboard", "matplotlib.pyplot"):
        importlib.import_module(name)
    torch.set_num_threads(1)


def main(args: Args) -> None:
    """A table for each script."""
    warm_up()
    tables = [table(script, args.only) for script in args.scripts]
    sys.exit(not all(fine for lines in tables for fine, _ in lines.values()))


if __name__ == "__main__":
    main(tyro.cli(Args))
