"""How CPU seconds and memory grow with the batch, lengths, K, the model and the data.

    python benchmarks/growth.py                  # a table, and results/growth.csv
    python benchmarks/growth.py batch queries    # some of the rows

A run of one update and a longer one are compared, so that what starting costs cancels. The tokens
of an update are the prompts and responses of all episodes. Models and texts are random, prompts
have equal length and no response ends; otherwise `--task sentiment` with its defaults, such as four
epochs of `ppo.py`. Rows of `rloo_k` are of `rloo.py`. `queries` and `labels` are read and tokenized,
and trained on by nobody. One thread; seconds are of user and system.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import speed  # noqa: E402
from machinery import cli  # noqa: E402
from tools.curves import provenance  # noqa: E402

WORD_COUNT = 1000
MEASURED = 40_000  # tokens of the longer run, against the noise of starting: 2 to 8 updates more
MODELS = {1: (4, 128), 8: (6, 320), 40: (8, 640), 124: (12, 768)}  # million weights → layers, width
START = dict(batch=256, response=24, prompt=16, rloo_k=0, model=1)  # but for a row's own value
ROWS: dict[str, tuple[dict[str, int], tuple[int, ...]]] = {
    "batch": ({}, (64, 256, 1024, 4096)),
    "response": (dict(batch=64), (24, 96, 256, 1024)),
    "prompt": (dict(batch=64), (16, 64, 256, 1024)),
    "rloo_k": (dict(prompt=256), (2, 4, 8, 16)),
    "model": (dict(batch=16), tuple(MODELS)),
    "queries": ({}, (10_000, 100_000, 1_000_000)),
    "labels": ({}, (1_000, 10_000, 100_000)),
}


@dataclass(frozen=True)
class Args:
    """How CPU seconds and memory grow."""

    rows: tyro.conf.Positional[tuple[str, ...]] = tuple(ROWS)
    """some of batch, response, prompt, rloo_k, model, queries, labels"""
    out: Path = Path(__file__).parent / "results/growth.csv"
    """table to write; rows of other names stay in it"""


def measure(command: list[str], folder: Path) -> tuple[float, float, str]:
    """CPU seconds, peak memory in GB and output of a command."""
    cache = {"HF_DATASETS_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "1"}
    env = os.environ | cache | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    with open(folder / "output", "w+") as output:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        output.seek(0)
        text = output.read()
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{text[-3000:]}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9, text


def random_words(rng: np.random.Generator, rows: int, length: int) -> list[str]:
    """Texts of `length` tokens."""
    tokens = rng.integers(1, WORD_COUNT, (rows, length))
    return [" ".join(f"w{token}" for token in row) for row in tokens]


def write_model(folder: Path, size: int) -> None:
    """Random models of so many million weights, and their tokenizer."""
    layers, width = MODELS[size]
    vocabulary = 50257 if size == 124 else WORD_COUNT
    config = dict(n_layer=layers, n_embd=width, n_head=width // 32, vocab_size=vocabulary)
    work = speed.Work(config | dict(n_positions=2048), 1, (1,))
    speed.run(folder, work, speed.Contestant("make", "make"), 0)


def update(folder: Path, batch: int, response: int, prompt: int, rloo_k: int, model: int) -> dict:
    """CPU seconds, tokens and memory of an update."""
    write_model(folder, model)
    prompts = batch // max(rloo_k, 1)
    texts = random_words(np.random.default_rng(0), prompts + 1, prompt)
    (folder / "queries.txt").write_text("\n".join(texts))
    flags: dict[str, Any] = dict(base_model="policy", reward_model="reward")
    flags |= dict(query_dataset="queries.txt")
    flags |= dict(query_length=prompt, response_length=response, truncate_token=None)
    flags |= dict(batch_size=batch, eval_queries=1)
    if rloo_k:
        flags["rloo_k"] = rloo_k
    script = Path(__file__).parents[1] / ("rloo.py" if rloo_k else "ppo.py")
    seconds, tokens = [], batch * (prompt + response)
    more = min(max(2, MEASURED // tokens), 8)
    for updates in (1, 1 + more):
        words = [str(script), "--task", "sentiment"]
        flags |= dict(total_episodes=updates * batch, output_dir=f"out{updates}")
        for name, value in flags.items():
            words += [f"--{name}", str(value)]
        cpu, peak, _ = measure([sys.executable, *words], folder)
        seconds.append(cpu)
    cpu = (seconds[1] - seconds[0]) / more
    return {"cpu s": cpu, "tokens": tokens, "peak GB": peak}


def load(folder: Path, name: str, number: int) -> dict[str, float]:
    """CPU seconds and memory of reading texts of 16 tokens, or labels with two responses of 24."""
    write_model(folder, 1)
    rng = np.random.default_rng(0)
    columns = dict(prompt=16)
    if name == "labels":
        columns |= dict(chosen=24, rejected=24)
    texts = {column: random_words(rng, number, length) for column, length in columns.items()}
    with open(folder / "data.jsonl", "w") as file:
        for i in range(number):
            row = {column: values[i] for column, values in texts.items()}
            file.write(json.dumps(row) + "\n")
    _, peak, text = measure([sys.executable, __file__, "load", name, str(number)], folder)
    cpu = float(text.splitlines()[-1])  # without importing
    return {"cpu s": cpu, "tokens": number * sum(columns.values()), "peak GB": peak}


def load_here(name: str, number: int) -> None:
    """What `load` measures, in its folder."""
    import ppo
    from machinery import labels, queries, tokens

    data = "--query_dataset" if name == "queries" else "--label_dataset"
    words = ["--task", "sentiment", "--base_model", "policy", data, "data.jsonl"]
    words += ["--query_column", "prompt", "--truncate_token", "None"]
    task = cli.parse_args(ppo.Args, ppo.PRESETS, words).task
    tokenizer, ids = tokens.load_tokenizer(task, task.response_length)
    start = time.process_time()
    if name == "queries":
        found: Any = queries.load_queries(task, tokenizer, ids)
    else:
        found = labels.load_labels(task, tokenizer, ids)
    seconds = time.process_time() - start
    assert len(found) == number
    print(seconds)


def main(args: Args) -> None:
    """Measure row by row."""
    if unknown := [name for name in args.rows if name not in ROWS]:
        raise cli.InputError(f"{unknown[0]} is not one of {', '.join(ROWS)}")
    kept = []
    if args.out.exists():
        with open(args.out, newline="") as file:
            kept = [row for row in csv.DictReader(file) if row["row"] not in args.rows]
    found: list[dict[str, Any]] = []
    for name in args.rows:
        settings, values = ROWS[name]
        for value in values:
            with tempfile.TemporaryDirectory() as folder:
                if name in START:
                    row = update(Path(folder), **START | settings | {name: value})
                else:
                    row = load(Path(folder), name, value)
            row["µs/token"] = 1e6 * row["cpu s"] / row["tokens"]
            print(name, value, *(f"{key} {x:.4g}" for key, x in row.items()), flush=True)
            row = {key: f"{x:.4g}" for key, x in row.items()}
            found.append({"row": name, "value": value} | row | provenance())
            with open(args.out, "w", newline="") as file:  # after each row: this takes long
                writer = csv.DictWriter(file, found[0].keys())
                writer.writeheader()
                writer.writerows([*kept, *found])


if __name__ == "__main__":
    if sys.argv[1:2] == ["load"]:
        load_here(sys.argv[2], int(sys.argv[3]))
    else:
        cli.run(main, Args)
