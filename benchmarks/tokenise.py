"""What `utils.load_queries` costs: seconds and memory of a first start, of a later one, and of two processes at once.

    python benchmarks/tokenise.py                                       # a million sentences, 287,000 articles
    python benchmarks/tokenise.py --sentences 10000 --articles 1000 --processes 1

Made-up texts in Parquet files as the hub's data sets have, the tokenizer of data/synthetic; every process is fresh, and
all share one cache of Arrow files. `cold` begins with an empty cache, `warm` finds the table. Seconds are those of the
call; `reads` then takes 20 random batches of 512 queries. Memory in GB: `libraries` before the call, the `peak` with it
(this counts file pages that the processes share, and that the kernel takes back when it needs them), and the peak of
what is the process's `own`. Disk in GB: texts and cache.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
KINDS = {"sentences": ("sentiment", "text"), "articles": ("cnndm", "article")}  # → task, column
COLUMNS = ("seconds", "reads", "libraries", "peak", "own", "queries")


@dataclass(frozen=True)
class Args:
    """What the table of queries costs."""

    sentences: int = 1_000_000
    """texts of some 20 tokens, for queries of 64; 0 leaves them out"""
    articles: int = 287_000
    """texts of some 800 tokens, for queries of 500; 0 leaves them out"""
    processes: tuple[int, ...] = (1, 2)
    """processes that start at once"""
    folder: str | None = None
    """where texts and caches are written, and removed at the end; None: below the folder of temporary files"""
    child: str | None = None
    """kind and folder: measure in this process; what the other flags start"""


def texts(kind: str, n: int) -> Iterator[str]:
    """n different texts out of the synthetic task's stories."""
    stories = (ROOT / "data/synthetic/stories.txt").read_text().splitlines()
    size = 1 if kind == "sentences" else 35
    for i in range(n):
        at = i * 7 % (len(stories) - size)
        yield f"{i}: {' '.join(stories[at : at + size])}"


def write_texts(kind: str, n: int, path: Path) -> None:
    """A Parquet file of n texts, never all of them in memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, rows = pa.schema([(KINDS[kind][1], pa.string())]), texts(kind, n)
    with pq.ParquetWriter(path, schema) as file:
        for start in range(0, n, 1000):
            batch = [next(rows) for _ in range(min(1000, n - start))]
            file.write_table(pa.table([batch], schema=schema))


def own_gb() -> float:
    """Memory of this process that is not the page of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 2**20


def measure(kind: str, folder: Path) -> dict[str, float]:
    """One call of `load_queries` in this process."""
    from transformers import AutoTokenizer

    import tasks
    import utils

    name, column = KINDS[kind]
    task = replace(tasks.TASKS[name], query_dataset=str(folder / f"{kind}.parquet"), query_column=column, end_text=".")
    tokenizer = AutoTokenizer.from_pretrained(tasks.SYNTHETIC / "model")
    own, done = [own_gb()], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            own.append(own_gb())

    thread = threading.Thread(target=watch)
    thread.start()
    libraries = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    begin = time.perf_counter()
    table = utils.load_queries(task, tokenizer, len(tokenizer), 10**9)
    seconds = time.perf_counter() - begin
    for step in range(20):
        table[utils.rows_of_step(len(table), min(512, len(table)), step, 1)]
    reads = time.perf_counter() - begin - seconds
    done.set()
    thread.join()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return dict(zip(COLUMNS, (seconds, reads, libraries, peak, max(own), len(table)), strict=True))


def start(kind: str, folder: Path, processes: int) -> list[dict[str, float]]:
    """Fresh processes at once; what each has measured."""
    command = [sys.executable, __file__, "--child", f"{kind}:{folder}"]
    env = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache")}
    children = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]


def main(args: Args) -> None:
    """Measure and print."""
    if args.child:
        kind, _, folder = args.child.partition(":")
        print(json.dumps(measure(kind, Path(folder))))
        return
    folder = Path(tempfile.mkdtemp(prefix="tokenise", dir=args.folder))
    try:
        print(f"{'texts':>18} {'start':6}" + "".join(f"{name:>11}" for name in ("process", *COLUMNS, "disk")))
        for kind, n in (("sentences", args.sentences), ("articles", args.articles)):
            if n:
                write_texts(kind, n, folder / f"{kind}.parquet")
            for processes in args.processes if n else ():
                for name in ("cold", "warm"):
                    for i, result in enumerate(start(kind, folder, processes)):
                        disk = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 2**30
                        line = "".join(f"{value:11,.{0 if value > 1000 else 2}f}" for value in (*result.values(), disk))
                        print(f"{n:>8,} {kind:9} {name:6}{i + 1:>6} of {processes}{line}", flush=True)
                shutil.rmtree(folder / "cache")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(tyro.cli(Args))
