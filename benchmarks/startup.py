"""What reading the queries costs when a run starts: first and later starts, and eight at once.

    python benchmarks/startup.py                    # 74 million rows; needs 6 GB of disk
    python benchmarks/startup.py --code ../before   # with the code of another folder

The table has the form of `SamuelYang/bookcorpus` in the cache of `datasets`, memory-mapped: a
million random sentences, again and again, of the words of docs/, on which a tokenizer of GPT-2's
form was trained. As with `--task sentiment`, a million rows are used and tokenized. Seconds are from
the name of the data set to the tables of held-out and other queries; CPU seconds are of user and
system, of all processes together. One thread each.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import tyro

ROOT = Path(__file__).parents[1]
COMMIT = "0" * 40
MILLION = 1_000_000


@dataclass(frozen=True)
class Args:
    """What reading the queries costs when a run starts."""

    millions: int = 74
    """rows of the table"""
    code: Path = ROOT
    """folder of the code to measure"""
    processes: int = 8
    """processes of the last row, which start at once"""
    queries: int = 2**20
    """rows that are used"""


def sentences(number: int, words: list[str]) -> pyarrow.Array:
    """Sentences of 4 to 22 words, which are as frequent as in `words`."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 23, number)
    flat = rng.choice(words, lengths.sum())
    ends = lengths.cumsum()
    return pyarrow.array([" ".join(x) + " ." for x in np.split(flat, ends[:-1])])


def write_table(cache: Path, millions: int, words: list[str]) -> None:
    """A data set as `datasets` leaves it in its cache."""
    folder = cache / f"SamuelYang___bookcorpus/default/0.0.0/{COMMIT}"
    folder.mkdir(parents=True)
    table = pyarrow.table({"text": sentences(MILLION, words)})
    with pyarrow.ipc.new_stream(folder / "bookcorpus-train.arrow", table.schema) as writer:
        for _ in range(millions):
            writer.write_table(table, max_chunksize=1000)
    split = dict(name="train", num_bytes=table.nbytes * millions, dataset_name="bookcorpus")
    split["num_examples"] = millions * MILLION
    info: dict[str, Any] = dict(builder_name="parquet", dataset_name="bookcorpus")
    info |= dict(config_name="default", splits={"train": split}, version="0.0.0")
    info["features"] = {"text": {"dtype": "string", "_type": "Value"}}
    (folder / "dataset_info.json").write_text(json.dumps(info))


def start(folder: Path, code: Path, processes: int, queries: int) -> tuple[float, float, float]:
    """CPU seconds of all processes, wall seconds and peak GB of one."""
    env = os.environ | {"PYTHONPATH": str(code), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env |= {"HF_DATASETS_CACHE": str(folder / "cache"), "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "child", str(folder / "model"), str(queries)]
    options: Any = dict(cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
    children = [subprocess.Popen(command, **options) for _ in range(processes)]
    outputs = [child.communicate()[0] for child in children]
    numbers = np.array([json.loads(text.splitlines()[-1]) for text in outputs])
    return numbers[:, 0].sum(), numbers[:, 1].max(), numbers[:, 2].max()


def child(model: str, number: int) -> None:
    """Read the queries as `ppo.py --task sentiment` does; print seconds and memory."""
    import resource
    from dataclasses import replace

    from data.tasks import TASKS
    from machinery import queries, tokens

    task = replace(TASKS["sentiment"], base_model=model, num_queries=number)
    tokenizer, ids = tokens.load_tokenizer(task, task.response_length)
    wall, cpu = time.perf_counter(), time.process_time()
    queries.load_queries(task, tokenizer, ids).hold_out(256)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(json.dumps([time.process_time() - cpu, time.perf_counter() - wall, peak]))


def main(args: Args) -> None:
    """Write the table; measure starts."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import formats
    from transformers import GPT2Config

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prose = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
        tokenizer = formats.gpt2_tokenizer().train_new_from_iterator([prose], 8192)
        tokenizer.save_pretrained(folder / "model")
        GPT2Config().save_pretrained(folder / "model")
        write_table(folder / "cache", args.millions, re.findall("[A-Za-z]+", prose))
        code = args.code.absolute()
        for label, processes in (("first", 1), ("later", 1), ("first", args.processes)):
            if processes > 1:
                for path in (folder / "cache").glob("*.arrow"):
                    path.unlink()
            cpu, wall, peak = start(folder, code, processes, args.queries)
            print(
                f"{label} start, {processes} processes: {cpu:.1f} CPU s, {wall:.1f} s, {peak:.2f} GB"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], int(sys.argv[3]))
    else:
        main(tyro.cli(Args))
