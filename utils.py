"""What more than one script needs and is not the algorithm:
tasks · tokens · data · models · sampling and scoring · statistics · optimizer · run.

Letters: `B` sequences, `Q` query tokens, `R` response tokens, `T` tokens in all, `V` vocabulary, `K` candidates,
`D` width. Masks are True at real tokens. Tags such as `# G3` name the implementation detail in README's table.
"""

import importlib.util
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import huggingface_hub
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
import tyro
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import StaticCache

ROOT = Path(__file__).parent
SYNTHETIC = ROOT / "data" / "synthetic"


class InputError(ValueError):
    """Bad input: names the value and what would be right; `cli` prints it without a traceback."""


# ------------------------------------------------------------------------------------------------------------- tasks


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
    query_length: int
    """tokens; a longer query is cut, a shorter one padded on the left (G2)"""
    response_length: int
    """tokens; every response has exactly this many (G4)"""
    temperature: float
    """sampling temperature; logits are divided by it everywhere (P1)"""
    truncate_token: str | None
    """text of one token; for scoring a response is cut after its first one at or after `truncate_after` (P5)"""
    truncate_after: int
    """tokens; see `truncate_token`"""
    missing_eos_penalty: float = -1.0
    """score of a response without `truncate_token` there, in place of the reward model's (P5)"""
    query_prefix: str = ""
    """text in front of each query; read by policy and reference, not by the reward model"""
    query_suffix: str = ""
    """text behind each query; read by policy and reference, not by the reward model"""
    start_text: str | None = None
    """one token; a query starts after the first of it, texts without it are skipped (P3)"""
    end_text: str | None = None
    """one token; a query ends with the last of it inside the length, texts without it are skipped (P3)"""
    num_queries: int = 2**20
    """rows of `query_dataset` that are tokenised; a larger data set is sampled without replacement"""
    eos_task: bool = False
    """the response ends at its first `truncate_token`: all behind it is masked out, not just in scoring (X9)"""
    response_column: str | None = None
    """column of `query_dataset` with reference responses; sft.py then learns these, else it learns the texts"""
    keep_last_line: bool = False
    """a query that is too long loses lines in front of its last one, such as TL;DR:, instead of its end"""
    gold_fn: str | None = None
    """`module:function` or `path.py:function` of (queries, responses) → floats: the true score, only logged"""


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
)

TASKS = {
    task.task: task
    for task in (
        replace(
            BOOKS,
            task="synthetic",
            base_model="models/synthetic/sft",
            query_dataset=str(SYNTHETIC / "stories.txt"),
            label_dataset=str(SYNTHETIC / "labels.json"),
            gold_fn=str(SYNTHETIC / "judge.py") + ":gold_score",
        ),
        BOOKS,
        replace(
            BOOKS,
            task="descriptiveness",
            label_dataset="vwxyzjn/lm-human-preferences:descriptiveness/offline_5k.json",
        ),
        replace(
            BOOKS,
            task="cnndm",
            query_dataset="abisee/cnn_dailymail:3.0.0",
            query_column="article",
            label_dataset="vwxyzjn/lm-human-preferences:cnndm/online_45k.json",
            query_length=500,
            response_length=75,
            temperature=0.5,
            truncate_token="\n",
            truncate_after=55,
            query_prefix="Article:\n\n",
            query_suffix="\n\nTL;DR:",
            end_text="\n",
        ),
        replace(
            BOOKS,
            task="tldr_2019",
            query_dataset="dim/tldr_17_50k",
            query_column="content",
            label_dataset="vwxyzjn/lm-human-preferences:tldr/online_45k.json",
            query_length=500,
            response_length=75,
            truncate_token="\n",
            truncate_after=55,
            query_suffix="\n\nTL;DR:",
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
            truncate_token="<|endoftext|>",
            truncate_after=0,
            eos_task=True,
            keep_last_line=True,
        ),
        replace(
            BOOKS,
            task="synthetic_eos",
            base_model="models/synthetic_eos/sft",
            query_dataset=str(SYNTHETIC / "stories_eos.jsonl"),
            query_column="prompt",
            response_column="completion",
            label_dataset=str(SYNTHETIC / "pairs_eos.jsonl"),
            query_length=32,
            response_length=40,
            truncate_token="<|endoftext|>",
            truncate_after=0,
            eos_task=True,
            gold_fn=str(SYNTHETIC / "judge.py") + ":gold_score",
        ),
    )
}


def parse_args(cls: type, presets: dict[str, dict[str, Any]], argv: list[str] | None = None) -> Any:
    """Command line → frozen `cls`. `--task NAME` picks the defaults: those of `TASKS` and, over them, the script's
    `presets[NAME]`; so `--task NAME --help` shows them resolved. Errors: `InputError` for an unknown task."""
    argv = sys.argv[1:] if argv is None else argv
    name = next(iter(presets))
    for flag, value in zip(argv, [*argv, ""][1:], strict=True):
        if flag.startswith("--task="):
            flag, value = flag.split("=", 1)
        if flag == "--task":
            name = value
    if name not in presets:
        raise InputError(f"task={name!r} is unknown; choose one of {', '.join(presets)}")
    preset = presets[name]
    task_names = {f.name for f in fields(Task)}
    task = replace(TASKS[name], **{k: v for k, v in preset.items() if k in task_names})
    default = cls(task=task, **{k: v for k, v in preset.items() if k not in task_names})
    return tyro.cli(tyro.conf.OmitArgPrefixes[cls], default=default, args=argv)


def cli(main: Callable, parse: Callable) -> None:
    """Run a script: bad input is one line and exit code 2, Ctrl-C one line and 130; anything else is a bug and shows
    its traceback."""
    try:
        main(parse())
    except InputError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"\n{Path(sys.argv[0]).name}: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)


def load_function(spec: str) -> Callable[[list[str], list[str]], list[float]]:
    """`module:function` or `path.py:function` → the function of (queries, responses) → floats."""
    source, _, name = spec.rpartition(":")
    if not source:
        raise InputError(f"{spec!r} names no function; write module:function or path.py:function")
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise InputError(f"{spec!r}: there is no file {source}")
        module_spec = importlib.util.spec_from_file_location(Path(source).stem, source)
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        try:
            module = importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise InputError(f"{spec!r}: there is no module {error.name}") from error
    if not callable(getattr(module, name, None)):
        raise InputError(f"{spec!r}: {source} has no function {name}")
    return getattr(module, name)


# ------------------------------------------------------------------------------------------------------------ tokens


def pad_rows(rows: list[list[int]], length: int, pad_id: int) -> Tensor:
    """Token lists → [B, length], padded on the left (G2)."""
    return torch.tensor([[pad_id] * (length - len(row)) + list(row) for row in rows]).view(len(rows), length)


def left_align(tokens: Tensor, pad_id: int) -> Tensor:
    """Move every row's pads to its left, order kept; the last real token is then in column −1. [B, T] → [B, T]"""
    order = (tokens != pad_id).byte().argsort(dim=1, stable=True)
    return tokens.gather(1, order)


def cut_query(tokens: list[int], length: int, start: int | None, end: int | None) -> list[int] | None:
    """P3: the query inside a passage, or None where the passage is skipped."""
    if start is not None:
        if start not in tokens:
            return None
        first = tokens.index(start) + 1
        tokens = tokens[first:] or tokens  # [O]: a start token that is the passage's last cuts nothing
    tokens = tokens[:length]
    if end is not None:
        if end not in tokens:
            return None
        tokens = tokens[: len(tokens) - tokens[::-1].index(end)]
    return tokens


def keep_last_line(text: str, length: int, tokenizer: Any) -> list[int]:
    """A prompt within `length` tokens: cut before the last newline that fits, its last line (TL;DR:) kept."""
    head, _, last = text.rpartition("\n")
    ids = tokenizer.encode(text, add_special_tokens=False)
    while len(ids) > length and "\n" in head.rstrip():
        head = head.rstrip().rpartition("\n")[0]
        ids = tokenizer.encode(f"{head.rstrip()}\n\n{last}", add_special_tokens=False)
    return ids[:length]


def truncate(responses: Tensor, token: int | None, after: int, pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """P5: cut each response behind its first `token` at or after position `after`.

    [B, R] → the cut responses [B, R], the index [B] of the last token kept, and whether the token was there [B]."""
    positions = torch.arange(responses.shape[1], device=responses.device)
    hits = (responses == token) & (positions >= after) if token is not None else torch.zeros_like(responses).bool()
    found = hits.any(dim=1)
    last = torch.where(found, hits.byte().argmax(dim=1), responses.shape[1] - 1)
    cut = responses.masked_fill(positions > last[:, None], pad_id)
    return cut, last, found if token is not None else torch.ones_like(found)


def token_id(tokenizer: Any, text: str | None, flag: str) -> int | None:
    """The id of a text that is a single token. Errors: `InputError` where it is not."""
    if text is None:
        return None
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise InputError(f"{flag}={text!r} is {len(ids)} tokens {ids} to this tokenizer; it has to be exactly one")
    return ids[0]


class Ids(NamedTuple):
    """A task's texts as ids of one tokenizer."""

    pad: int  # one past the vocabulary (G2)
    truncate: int | None
    prefix: list[int]
    suffix: list[int]


def task_ids(task: Task, tokenizer: Any, pad_id: int) -> Ids:
    """Errors: `InputError` where a text that has to be one token is not."""
    affixes = (tokenizer.encode(text, add_special_tokens=False) for text in (task.query_prefix, task.query_suffix))
    return Ids(pad_id, token_id(tokenizer, task.truncate_token, "--truncate_token"), *affixes)


def add_affixes(queries: Tensor, ids: Ids) -> Tensor:
    """Queries [B, Q] → contexts [B, C]: prefix, query, suffix, with all pads on the left."""
    prefix, suffix = (
        torch.tensor(x, device=queries.device).long().expand(len(queries), -1) for x in (ids.prefix, ids.suffix)
    )
    return left_align(torch.cat([prefix, queries, suffix], dim=1), ids.pad)


def decode(tokenizer: Any, tokens: Tensor, pad_id: int) -> list[str]:
    """[B, T] → B texts; pads and special tokens are left out."""
    rows = [[t for t in row if t != pad_id] for row in tokens.tolist()]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


# -------------------------------------------------------------------------------------------------------------- data


def go_offline_if_unreachable() -> None:
    """Without a connection each hub call retries for some 23 s; find out once, quickly. Cached files still load."""
    try:
        urllib.request.urlopen(huggingface_hub.constants.ENDPOINT, timeout=2).close()
    except urllib.error.HTTPError:
        pass  # it answered
    except OSError:
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


def is_local(source: str) -> bool:
    """Whether a source is a path. Errors: `InputError` for what can only be a path and does not exist."""
    if Path(source).exists():
        return True
    if Path(source).suffix in BUILDERS and ":" not in source or source.startswith((".", "/", "~", "models/", "data/")):
        raise InputError(f"{source} does not exist")
    return False


def load_rows(source: str, flag: str, split: str = "train") -> datasets.Dataset:
    """A data source (see `Task`) → its rows. Errors: `InputError` where it is missing, empty or unreadable."""
    datasets.disable_progress_bars()
    name, _, part = (source, "", "") if Path(source).exists() else source.partition(":")
    try:
        if not is_local(name):
            go_offline_if_unreachable()
        elif Path(name).is_file():
            if Path(name).suffix not in BUILDERS:
                raise InputError(f"{flag}={source}: the file has to end in one of {' '.join(BUILDERS)}")
            return datasets.load_dataset(BUILDERS[Path(name).suffix], data_files=name, split="train")
        what = {"data_files": part} if Path(part).suffix in BUILDERS else {"name": part or None}
        return datasets.load_dataset(name, **what, split=split)
    except InputError:
        raise
    except OSError as error:
        file = part if Path(part).suffix in BUILDERS else ""
        folder = name.split("/")[-1]
        raise InputError(
            f"{source} is neither in the cache nor to be reached ({type(error).__name__}). On a connected machine:\n"
            f"  hf download {' '.join(filter(None, (name, file)))} --repo-type dataset --local-dir {folder}\n"
            f"then pass  {flag} {folder}{'/' + file if file else ':' + part if part else ''}"
        ) from error
    except (
        datasets.exceptions.DatasetsError,
        ValueError,
        StopIteration,
    ) as error:  # no rows, not the format, no such configuration
        raise InputError(f"{flag}={source} is empty or cannot be read: {error.__cause__ or error}") from error


def load_texts(task: Task) -> datasets.Dataset:
    """The rows of `query_dataset`, at most `num_queries`. Errors: `InputError` for a missing column."""
    rows = load_rows(task.query_dataset, "--query_dataset")
    for name in filter(None, (task.query_column, task.response_column)):
        if name not in rows.column_names:
            raise InputError(
                f"column {name!r} is not in --query_dataset={task.query_dataset}; it has {rows.column_names}"
            )
    if len(rows) > task.num_queries:
        rows = rows.select(np.sort(np.random.default_rng(0).choice(len(rows), task.num_queries, replace=False)))
    return rows


def tokenise_queries(texts: list[str], task: Task, tokenizer: Any) -> list[list[int] | None]:
    """P3: texts → queries as token lists; None where a text is blank or skipped."""
    start, end = token_id(tokenizer, task.start_text, "start_text"), token_id(tokenizer, task.end_text, "end_text")
    queries = []
    for text, ids in zip(texts, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
        if task.keep_last_line and len(ids) > task.query_length:
            ids = keep_last_line(text, task.query_length, tokenizer)
        queries.append((cut_query(ids, task.query_length, start, end) or None) if text.strip() else None)
    return queries


def load_queries(task: Task, tokenizer: Any, pad_id: int) -> Tensor:
    """G2: the table of queries [N, Q], padded on the left; a text a row. Errors: `InputError` if none is usable."""
    texts, queries = load_texts(task)[task.query_column], []
    for i in range(0, len(texts), 10_000):
        batch = [text or "" for text in texts[i : i + 10_000]]
        queries += [query for query in tokenise_queries(batch, task, tokenizer) if query]
    if not queries:
        wanted = " and ".join(
            f"{n}={t!r}" for n, t in (("start_text", task.start_text), ("end_text", task.end_text)) if t
        )
        lack = f" or lack {wanted}" if wanted else ""
        raise InputError(f"--query_dataset={task.query_dataset} gives no query: all {len(texts)} rows are blank{lack}")
    return pad_rows(queries, task.query_length, pad_id)


LABEL_PAD = 50259  # OpenAI's files are padded with this id, two past GPT-2's vocabulary


@dataclass(frozen=True)
class Labels:
    """Comparisons: K candidate responses to a query and which one a human liked best."""

    query: Tensor  # [N, Q] left-padded
    responses: Tensor  # [N, K, R] right-padded
    best: Tensor  # [N] index of the preferred candidate

    def rows(self, rows: np.ndarray) -> "Labels":
        """A selection."""
        return Labels(self.query[rows], self.responses[rows], self.best[rows])

    def to(self, device: torch.device) -> "Labels":
        """A copy on `device`."""
        return Labels(self.query.to(device), self.responses.to(device), self.best.to(device))


def is_whole(x: Any) -> bool:
    """Whether a value of a label file is a whole number; one fraction in a column makes floats of all its ids."""
    return isinstance(x, int | float) and float(x).is_integer()


def load_pairs(rows: datasets.Dataset, task: Task, tokenizer: Any, pad_id: int) -> Labels:
    """R4: pairs of texts (`prompt`, `chosen`, `rejected`), the chosen one first; each ends with the truncate token."""
    end = token_id(tokenizer, task.truncate_token, "--truncate_token")
    queries = tokenise_queries([text or "" for text in rows["prompt"]], task, tokenizer)
    sides = [
        tokenizer([text or "" for text in rows[name]], add_special_tokens=False)["input_ids"]
        for name in ("chosen", "rejected")
    ]
    for i, row in enumerate(zip(queries, *sides, strict=True)):
        if not all(row):
            raise InputError(f"--label_dataset={task.label_dataset} row {i}: prompt, chosen or rejected is blank")
    sides = [[ids + [end] * (end is not None) for ids in side] for side in sides]
    length = max(len(ids) for side in sides for ids in side)
    right = [torch.tensor([ids + [pad_id] * (length - len(ids)) for ids in side]) for side in sides]
    return Labels(
        pad_rows(queries, task.query_length, pad_id), torch.stack(right, dim=1), torch.zeros(len(queries)).long()
    )


def load_labels(task: Task, tokenizer: Any, pad_id: int) -> Labels:
    """R4: best-of-K labels in OpenAI's format (`query`, `sample0` …, `best`; token ids), or pairs of texts. Errors:
    `InputError` with row and value for missing keys, wrong lengths, `best` out of range, ids beyond the vocabulary."""
    rows = load_rows(task.label_dataset, "--label_dataset")
    if {"prompt", "chosen", "rejected"} <= set(rows.column_names) and len(rows):
        return load_pairs(rows, task, tokenizer, pad_id)
    where = f"--label_dataset={task.label_dataset}"
    samples = sorted(name for name in rows.column_names if name.startswith("sample") and name[6:].isdigit())
    missing = [name for name in ("query", "best") if name not in rows.column_names] + ["sample0, sample1"] * (
        len(samples) < 2
    )
    if missing or len(rows) == 0:
        raise InputError(
            f"{where} has no {', '.join(missing) or 'rows'}; needed are query, sample0 … sampleK, best, "
            "or prompt, chosen, rejected"
        )
    columns = {}
    for name, length in [("query", task.query_length)] + [(name, task.response_length) for name in samples]:
        for i, row in enumerate(rows[name]):
            if not isinstance(row, list) or not all(map(is_whole, row)):
                raise InputError(f"{where} row {i}: {name}={str(row)[:60]} is not a list of token ids")
            if len(row) != length:
                raise InputError(f"{where} row {i}: {name} has {len(row)} ids, not {length}")
        ids = np.asarray(rows[name][:])
        ids = np.where(ids == LABEL_PAD, pad_id, ids) if LABEL_PAD > pad_id else ids
        bad = np.argwhere((ids < 0) | (ids > pad_id))
        if len(bad):
            i, j = bad[0]
            raise InputError(
                f"{where} row {i}: {name} holds id {ids[i, j]}; ids are 0 … {pad_id - 1}, padding is {LABEL_PAD}"
            )
        columns[name] = torch.from_numpy(ids).long()
    for i, best in enumerate(rows["best"]):
        if not is_whole(best) or not 0 <= best < len(samples):
            raise InputError(f"{where} row {i}: best={best!r} is not in 0 … {len(samples) - 1}")
    responses = torch.stack([columns[name] for name in samples], dim=1)
    return Labels(left_align(columns["query"], pad_id), responses, torch.tensor(rows["best"][:]).long())


def rows_of_step(n: int, size: int, step: int, seed: int) -> np.ndarray:
    """Which rows [size] of a table of `n` step `step` takes: a fresh permutation every epoch, a pure function of its
    arguments, so that a resumed run goes on with the same rows."""
    positions = np.arange(step * size, (step + 1) * size)
    epochs = positions // n
    return np.concatenate(
        [
            np.random.default_rng([seed, epoch]).permutation(n)[positions[epochs == epoch] % n]
            for epoch in np.unique(epochs)
        ]
    )


def process_seed(seed: int, rank: int) -> int:
    """G6: every process has a seed of its own."""
    return seed + rank * 100003


def generator(seed: int, step: int, device: torch.device) -> torch.Generator:
    """The torch generator of one step of one process; nothing carries over from step to step."""
    state = np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(state >> np.uint64(1)))


# ------------------------------------------------------------------------------------------------------------ models


def hub_or_folder(name: str, flag: str, make: str | None) -> None:
    """Go offline quickly if `name` is on an unreachable hub. Errors: `InputError` for a folder that does not exist,
    with the command `make` that makes it."""
    if Path(name).is_dir():
        return
    if name.startswith((".", "/", "~", "models/", "data/")):
        raise InputError(f"{flag}={name} does not exist" + f"; make it with `{make}`" * bool(make))
    go_offline_if_unreachable()


@contextmanager
def explain_missing(name: str, flag: str) -> Iterator[None]:
    """Turn the libraries' "not cached and no connection" into the next command."""
    try:
        yield
    except OSError as error:
        folder = name.split("/")[-1]
        raise InputError(
            f"model {name} is neither a folder, nor in the cache, nor to be reached. On a connected machine:\n"
            f"  hf download {name} --local-dir {folder}\nthen pass  {flag} {folder}"
        ) from error


def load_tokenizer(task: Task, extra_tokens: int, make: str | None = None) -> tuple[Any, PretrainedConfig, int]:
    """Tokenizer, model configuration and pad id (G2: one past the vocabulary) of `task.base_model`; loads no weights.
    `extra_tokens` are generated or read behind the query. Errors: `InputError` for a missing model, pad == eos, an
    architecture without position ids, a context that is too short."""
    name = task.base_model
    hub_or_folder(name, "--base_model", make)
    with explain_missing(name, "--base_model"):
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise InputError(
            f"the tokenizer of {name} has pad_token == eos_token == {tokenizer.eos_token!r}: padding could not be told "
            "from an end of text; take pad_token out of its tokenizer_config.json (padding is an id of our own)"
        )
    check_architecture(config, name)
    affixes = len(tokenizer.encode(task.query_prefix + task.query_suffix, add_special_tokens=False))
    check_length(config, task.query_length + affixes + extra_tokens, "query and response")
    return tokenizer, config, max(config.vocab_size, len(tokenizer))


def check_length(config: PretrainedConfig, needed: int, what: str) -> None:
    """Errors: `InputError` where a model's positions are fewer than the tokens that it is to read."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and needed > longest:
        raise InputError(f"{what} need {needed} tokens, but the model ({config.model_type}) reads at most {longest}")


def check_architecture(config: PretrainedConfig, name: str) -> None:
    """G3 needs `position_ids`. Errors: `InputError` for a decoder that takes none (BLOOM, MPT)."""
    import inspect

    cls = transformers.MODEL_MAPPING.get(type(config), None)
    if cls is None or "position_ids" not in inspect.signature(cls.forward).parameters:
        raise InputError(
            f"{name} ({config.model_type}) takes no position_ids, so left-padded rows would be scored wrongly; "
            "GPT-2, GPT-NeoX, Llama, Falcon and their like work"
        )


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """P4: no dropout, also after `.train()`: every rate in the configuration becomes 0."""
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def load_lm(name: str, config: PretrainedConfig | None = None) -> PreTrainedModel:
    """Causal language model in fp32 without dropout; with random weights where the folder holds a configuration only.
    Errors: `InputError` for weights in a format that unpickles code, or that are not in the cache and out of reach."""
    config = without_dropout(config or AutoConfig.from_pretrained(name))
    if Path(name).is_dir() and not any(Path(name).glob("*.safetensors*")):
        if others := [
            path.name for pattern in ("*.bin", "*.pt", "*.h5", "*.msgpack") for path in Path(name).glob(pattern)
        ]:
            raise InputError(f"{name} holds {others[0]} but no safetensors; convert it with `save_pretrained` first")
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with nullcontext() if Path(name).is_dir() else explain_missing(name, "--base_model"):
        return AutoModelForCausalLM.from_pretrained(name, config=config, dtype=torch.float32, use_safetensors=True)


def model_inputs(tokens: Tensor, pad_id: int) -> dict[str, Tensor]:
    """G3: [B, T] → the arguments that make padding invisible, wherever it is. A pad's id is never embedded."""
    mask = tokens != pad_id
    positions = mask.cumsum(dim=1) - mask.long()  # exclusive: a pad does not move what follows it
    return dict(input_ids=tokens.masked_fill(~mask, 0), attention_mask=mask.long(), position_ids=positions)


def hidden_states(backbone: nn.Module, tokens: Tensor, pad_id: int) -> Tensor:
    """Last hidden states [B, T, D]; no vocabulary head."""
    return backbone(**model_inputs(tokens, pad_id), use_cache=False).last_hidden_state


class RewardConfig(PretrainedConfig):
    """Configuration of `RewardModel`: the backbone's, and the pad id that it was trained with."""

    model_type = "scalar_reward"
    sub_configs = {"backbone": AutoConfig}

    def __init__(self, backbone: PretrainedConfig | dict | None = None, pad_id: int = 0, **kwargs):
        self.backbone = AutoConfig.for_model(**backbone) if isinstance(backbone, dict) else backbone
        self.pad_id = pad_id
        super().__init__(**kwargs)


class RewardModel(PreTrainedModel):
    """G1, R3: a scalar on every token, `gain · r + bias` at the last real one. `save_pretrained`/`from_pretrained`."""

    config_class = RewardConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True

    def __init__(self, config: RewardConfig):
        super().__init__(config)
        self.backbone = AutoModel.from_config(without_dropout(config.backbone))
        self.head = nn.Linear(config.backbone.hidden_size, 1)
        self.gain = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(()))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is getattr(self, "head", None):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features + 1))  # R2
            nn.init.zeros_(module.bias)

    @classmethod
    def from_lm(cls, name: str, pad_id: int) -> "RewardModel":
        """A language model's backbone with a fresh head."""
        lm = load_lm(name)
        model = cls(RewardConfig(lm.config, pad_id))
        model.backbone.load_state_dict(lm.base_model.state_dict())
        return model

    def token_rewards(self, tokens: Tensor) -> Tensor:
        """[B, T] → [B, T, 1] at every token, before gain and bias."""
        return self.head(hidden_states(self.backbone, tokens, self.config.pad_id))

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T], pads anywhere → rewards [B] in fp32."""
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        last = torch.where(tokens != self.config.pad_id, columns, 0).amax(dim=1)  # R1: the last real token
        hidden = hidden_states(self.backbone, tokens, self.config.pad_id)
        reward = self.head(hidden[torch.arange(len(tokens), device=tokens.device), last]).squeeze(-1)
        return self.gain * reward.float() + self.bias


def load_reward_model(name: str, make: str) -> RewardModel:
    """A folder that train_reward.py wrote. Errors: `InputError` naming the command that makes it."""
    if not (Path(name) / "config.json").is_file():
        raise InputError(
            f"there is no reward model in {name}; make it with `{make}`, or pass --reward_model or --reward_fn"
        )
    return RewardModel.from_pretrained(name, dtype=torch.float32).eval()


# ---------------------------------------------------------------------------------------------- sampling and scoring


def row_lengths(tokens: Tensor, pad_id: int) -> np.ndarray:
    """Real tokens of each row, on the host: they plan the micro-batches."""
    return (tokens != pad_id).sum(dim=1).cpu().numpy()


def micro_batches(lengths: np.ndarray, size: int) -> list[tuple[np.ndarray, int]]:
    """Rows of like length, `size` at a time: [(rows, length of the longest)]. Each is trimmed to its own longest row;
    only memory and speed depend on it (G3, P7)."""
    rows = np.argsort(lengths, kind="stable")
    return [(part, int(lengths[part].max())) for part in np.split(rows, range(size, len(rows), size))]


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """P1: logits [B, R, V], tokens [B, R] → log-probabilities [B, R] of the tokens and entropies [B, R] (no gradient).
    At a pad, which is no token of the vocabulary, the log-probability is an arbitrary finite number."""
    logprobs = F.log_softmax(logits.float() / temperature, dim=-1)  # fp32, also under autocast
    chosen = logprobs.gather(-1, tokens.clamp(max=logits.shape[-1] - 1)[..., None]).squeeze(-1)
    with torch.no_grad():
        entropies = -(logprobs.exp() * logprobs).sum(dim=-1)
    return chosen, entropies


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """One token a row from softmax(logits) by inverting its CDF. logits [B, V], uniform [B, 1] in [0, 1) → [B, 1].

    In fp64, and below the CDF's very top: a token of probability 0 is never drawn, not even at u = 0 or by rounding."""
    cdf = logits.double().softmax(dim=-1).cumsum(dim=-1)
    total = cdf[:, -1:]
    point = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, point, right=True)


@torch.no_grad()
def sample(
    lm: PreTrainedModel, contexts: Tensor, response_length: int, temperature: float, pad_id: int, gen: torch.Generator
) -> Tensor:
    """G4: exactly `response_length` tokens for each left-padded context [B, Q] → [B, R]: the full vocabulary, no stop
    at EOS, nothing of the checkpoint's `generation_config`. Prefill once, then a token a step over a static KV cache."""
    batch, start = contexts.shape
    inputs = model_inputs(F.pad(contexts, (0, response_length), value=0), pad_id)  # 0 stands for a token to come
    mask, positions = inputs["attention_mask"], inputs["position_ids"]
    cache = StaticCache(config=lm.config, max_cache_len=start + response_length)
    uniform = torch.rand(response_length, batch, 1, generator=gen, device=contexts.device, dtype=torch.float64)
    responses = torch.empty(batch, response_length, dtype=torch.long, device=contexts.device)
    tokens, begin = inputs["input_ids"][:, :start], 0
    for t in range(response_length):
        end = start + t
        logits = lm(
            tokens,
            attention_mask=mask[:, :end],
            position_ids=positions[:, begin:end],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        tokens, begin = draw(logits / temperature, uniform[t]), end
        responses[:, t] = tokens[:, 0]
    return responses


def sample_all(
    lm: PreTrainedModel, contexts: Tensor, task: Task, pad_id: int, gen: torch.Generator, size: int
) -> Tensor:
    """`sample` for any number of rows: `size` at a time, by length, trimmed. [B, C] → [B, R]"""
    responses = torch.empty(len(contexts), task.response_length, dtype=torch.long, device=contexts.device)
    for rows, width in micro_batches(row_lengths(contexts, pad_id), size):
        responses[rows] = sample(lm, contexts[rows, -width:], task.response_length, task.temperature, pad_id, gen)
    return responses


@torch.no_grad()
def lm_logprobs(
    lm: PreTrainedModel, contexts: Tensor, responses: Tensor, temperature: float, pad_id: int, size: int
) -> Tensor:
    """Log-probabilities [B, R] of the responses [B, R] behind left-padded contexts [B, C]; the vocabulary head sees
    the R response positions only."""
    out = torch.empty(responses.shape, device=responses.device)
    for rows, width in micro_batches(row_lengths(contexts, pad_id), size):
        inputs = model_inputs(torch.cat([contexts[rows, -width:], responses[rows]], dim=1), pad_id)
        logits = lm(**inputs, use_cache=False, logits_to_keep=responses.shape[1] + 1).logits[:, :-1]
        out[rows] = token_logprobs(logits, responses[rows], temperature)[0]
    return out


@torch.no_grad()
def reward_scores(model: RewardModel, queries: Tensor, responses: Tensor, size: int) -> Tensor:
    """Reward model on [queries [B, Q] | responses [B, R]], pads anywhere → [B]."""
    tokens = left_align(torch.cat([queries, responses], dim=1), model.config.pad_id)
    out = torch.empty(len(tokens), device=tokens.device)
    for rows, width in micro_batches(row_lengths(tokens, model.config.pad_id), size):
        out[rows] = model(tokens[rows, -width:])
    return out


def text_scores(
    function: Callable, spec: str, tokenizer: Any, queries: Tensor, responses: Tensor, pad_id: int
) -> Tensor:
    """`--reward_fn` and the like: a Python function of (queries, responses) → B finite floats. Errors: `InputError`."""
    scores = function(decode(tokenizer, queries, pad_id), decode(tokenizer, responses, pad_id))
    try:
        scores = torch.as_tensor(scores, dtype=torch.float32, device=queries.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{spec} returned {str(scores)[:60]}; it has to return one float for each of the {len(queries)} responses"
        ) from error
    if scores.shape != (len(queries),) or not scores.isfinite().all():
        raise InputError(
            f"{spec} returned shape {list(scores.shape)}, finite: {bool(scores.isfinite().all())}; "
            f"it has to return one finite float for each of the {len(queries)} responses"
        )
    return scores


class Score(NamedTuple):
    """What scoring makes of B responses."""

    scores: Tensor  # [B] reward, or the penalty
    cut: Tensor  # [B, R] what the reward model saw
    last: Tensor  # [B] index of the last token of `cut`
    ended: Tensor  # [B] whether the truncate token was there


def score_responses(reward: Callable, queries: Tensor, responses: Tensor, task: Task, ids: Ids) -> Score:
    """P5: cut [B, R], ask `reward`(queries, cut) → [B], and put the penalty where the truncate token is missing."""
    cut, last, ended = truncate(responses, ids.truncate, task.truncate_after, ids.pad)
    return Score(torch.where(ended, reward(queries, cut), task.missing_eos_penalty), cut, last, ended)


def load_reward(args: Any, tokenizer: Any, pad_id: int, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """`--reward_fn` or the reward model, as a function of (queries [B, Q], responses [B, R]) → [B]."""
    if args.reward_fn:
        function = load_function(args.reward_fn)
        return lambda queries, responses: text_scores(function, args.reward_fn, tokenizer, queries, responses, pad_id)
    folder = args.reward_model or f"models/{args.task.task}/train_reward"
    model = load_reward_model(folder, f"python train_reward.py --task {args.task.task}").to(device)
    if model.config.pad_id != pad_id:
        raise InputError(
            f"reward model {folder} was trained with a vocabulary of {model.config.pad_id} tokens, "
            f"the policy has {pad_id}"
        )
    return lambda queries, responses: reward_scores(model, queries, responses, args.rollout_batch_size)


# -------------------------------------------------------------------------------------------------------- statistics


def all_sum(x: Tensor) -> Tensor:
    """Sum over all processes; `x` itself where there is one."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        x = x.clone()
        dist.all_reduce(x)
    return x


def moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance of x[mask] over all processes (X11), whatever stands outside the mask."""
    count = all_sum(mask.sum())
    mean = all_sum(x.masked_fill(~mask, 0).sum()) / count
    variance = all_sum(((x - mean) ** 2).masked_fill(~mask, 0).sum()) / count
    return mean, variance


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """P9: unit variance over x[mask]; the mean goes to 0 unless it is kept. 0 outside the mask."""
    mean, variance = moments(x, mask)
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8)
    return (whitened if shift_mean else whitened + mean).masked_fill(~mask, 0)


def anneal(lr: float, step: int, steps: int) -> float:
    """G5: linear from `lr` at step 0 to 0 at step `steps`."""
    return lr * (1 - step / steps)


# --------------------------------------------------------------------------------------------------------- optimizer


class AdamTF(torch.optim.Adam):
    """A1: TensorFlow's Adam. There ε is added to √v without its bias correction (ε̂ in Kingma & Ba); PyTorch's formula
    with ε_t = ε̂ / √(1 − β₂ᵗ) is the same, so the library's fused kernel does the work."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-5, **kwargs):
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True, **kwargs)
        for group in self.param_groups:
            group["eps_hat"], group["t"] = eps, 0  # in the group, so that state_dict() keeps them

    def step(self, closure: Callable | None = None) -> Any:
        """One step; sets ε_t first."""
        for group in self.param_groups:
            group["t"] += 1
            group["eps"] = group["eps_hat"] / math.sqrt(1 - group["betas"][1] ** group["t"])
        return super().step(closure)


def set_lr(optimizer: Any, lr: float) -> None:
    """One learning rate for all groups; never a prepared scheduler, which would step once a process."""
    for group in optimizer.param_groups:
        group["lr"] = lr


# --------------------------------------------------------------------------------------------------------------- run


def check_positive(args: Any, names: Sequence[str]) -> None:
    """Errors: `InputError` for a value that is not above 0."""
    for name in names:
        if not getattr(args, name) > 0:
            raise InputError(f"{name}={getattr(args, name)} has to be positive")


def check_divides(name: str, value: int, unit: int, what: str) -> None:
    """Errors: `InputError` for a size that cannot be shared out evenly, with the next one that can."""
    if value % unit:
        raise InputError(f"{name}={value} does not divide over {what}; use {math.ceil(value / unit) * unit}")


def check_task(task: Task) -> None:
    """Errors: `InputError` for values of a task that cannot work, before anything is loaded."""
    check_positive(task, ("temperature", "query_length", "response_length", "num_queries"))
    if not 0 <= task.truncate_after < task.response_length:
        raise InputError(
            f"truncate_after={task.truncate_after} has to be in 0 … response_length − 1 = {task.response_length - 1}"
        )
    if task.gold_fn:
        load_function(task.gold_fn)


def check_finite(metrics: dict[str, float], name: str, step: int) -> None:
    """Stop at a loss that is no number, before anything more is made of it."""
    if not math.isfinite(metrics[name]):
        raise FloatingPointError(
            f"{name}={metrics[name]} at update {step}; a lower --lr, or fp32 instead of bf16, may help"
        )


def start_accelerator() -> Accelerator:
    """The accelerator of this process. Errors: `InputError` where the launcher's processes did not come up."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    accelerator = Accelerator()
    expected = int(os.environ.get("WORLD_SIZE", 1))
    if "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        raise InputError(
            "the launcher asked for several processes and started one; on a CPU use "
            "`ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2`"
        )
    if accelerator.num_processes != expected:
        raise InputError(
            f"{expected} processes were launched but this one sees {accelerator.num_processes}; on a CPU use "
            f"`ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes {expected}`"
        )
    return accelerator


def stop_accelerator(accelerator: Accelerator) -> None:
    """Leave the process group in step: gloo aborts now and then when a process exits first."""
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def save_model(model: PreTrainedModel, tokenizer: Any, folder: str, accelerator: Accelerator) -> None:
    """A folder that `from_pretrained` loads, with the tokenizer: written beside its final name and renamed."""
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        final, beside = Path(folder), Path(f"{folder}.tmp{os.getpid()}")
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        if final.exists():
            final.rename(old := Path(f"{folder}.old{os.getpid()}"))
            beside.rename(final)
            shutil.rmtree(old)
        else:
            beside.rename(final)
    accelerator.wait_for_everyone()


def mean_over_processes(metrics: dict[str, Tensor | float], device: torch.device) -> dict[str, float]:
    """Every metric's mean over all processes, in one crossing from the device (pitfall 19)."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    values = torch.stack([torch.as_tensor(v, dtype=torch.float32, device=device) for v in metrics.values()])
    return dict(zip(metrics, (all_sum(values) / world).tolist(), strict=True))


class Clock:
    """Seconds by phase: `with clock("sample"): …`; `time/sample` and so on in `pop()`."""

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # a few times an update; without it the next phase would pay for this one
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin

    def pop(self) -> dict[str, float]:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, {}
        return {f"time/{phase}": value for phase, value in seconds.items()}


class Run:
    """Artefacts of a run in `runs/<name>/`, written by the main process: args.json, metrics.jsonl (a line an update),
    samples.jsonl, TensorBoard events, curves.png; a progress line; with `track` W&B too."""

    def __init__(self, args: Any, script: str, total: int, panels: list[str], accelerator: Accelerator):
        self.main, self.total, self.panels, self.wandb = accelerator.is_main_process, total, panels, None
        self.sampled: list[list[dict[str, Any]]] = []  # the first and the latest
        name = args.run_name or f"{args.task.task}__{script}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        self.folder = Path("runs") / name
        if not self.main:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from torch.utils.tensorboard import SummaryWriter

        self.folder.mkdir(parents=True, exist_ok=True)
        for file in ("metrics.jsonl", "samples.jsonl"):
            (self.folder / file).unlink(missing_ok=True)  # a name given twice starts anew
        record = asdict(args) | {"command": sys.argv, "processes": accelerator.num_processes, **environment()}
        (self.folder / "args.json").write_text(json.dumps(record, indent=1))
        self.writer = SummaryWriter(str(self.folder))
        self.console = Console()
        columns = (
            TextColumn(script),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[shown]}"),
        )
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.bar = self.progress.add_task(script, total=total, shown="")
        self.progress.start()
        self.begin = time.perf_counter()
        if args.track:
            self.wandb = start_wandb(name, record, self.folder)

    def log(self, step: int, metrics: dict[str, float], shown: dict[str, str]) -> None:
        """Write one line of metrics; `shown` is metric name → its short name in the progress line."""
        if not self.main:
            return
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(metrics, step=step)
        line = "  ".join(f"{short} {metrics[name]:.3g}" for name, short in shown.items() if name in metrics)
        self.progress.update(self.bar, completed=step + 1, shown=line)
        if not self.console.is_terminal and (step % max(self.total // 20, 1) == 0 or step + 1 == self.total):
            left = (time.perf_counter() - self.begin) / (step + 1) * (self.total - step - 1)
            print(f"{step + 1:>6}/{self.total}  {line}  left {left:.0f} s", flush=True)

    def samples(self, step: int, rows: list[dict[str, Any]], title: str) -> None:
        """Append samples to samples.jsonl and show them as a table."""
        if not self.main:
            return
        with open(self.folder / "samples.jsonl", "a") as file:
            for row in rows:
                file.write(json.dumps({"step": step, **row}) + "\n")
        self.sampled = [self.sampled[0] if self.sampled else rows, rows]
        self.table(rows, title)
        if self.wandb:
            import wandb

            table = wandb.Table(columns=list(rows[0]), data=[list(map(str, row.values())) for row in rows])
            self.wandb.log({"samples": table}, step=step)

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

        table = Table(*rows[0], title=title, show_lines=True)
        for row in rows:
            table.add_row(*(f"{v:.2f}" if isinstance(v, float) else escape(str(v)) for v in row.values()))
        self.console.print(table)

    def histogram(self, groups: dict[str, list[float]], title: str) -> None:
        """Draw the distributions of a few groups of numbers into histogram.png."""
        if not self.main:
            return
        plt = pyplot()
        figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
        axis.hist(list(groups.values()), bins=40, density=True, histtype="stepfilled", alpha=0.5, label=list(groups))
        axis.set(title=title, ylabel="density")
        axis.legend()
        figure.savefig(self.folder / "histogram.png", dpi=110)
        plt.close(figure)

    def finish(self, *done: str) -> None:
        """Draw the curves, close everything, say where things are."""
        if not self.main:
            return
        self.progress.stop()
        self.writer.close()
        plot_runs([(self.folder.name, self.folder)], self.panels, self.folder / "curves.png")
        if self.wandb:
            self.wandb.finish()
        print(*done, f"curves and metrics: {self.folder}/curves.png, metrics.jsonl", sep="\n")


def environment() -> dict[str, Any]:
    """What a run depends on besides its arguments: commit and versions."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    packages = ("torch", "transformers", "accelerate", "datasets", "tyro", "numpy")
    return {
        "commit": git.stdout.strip() or None,
        "python": platform.python_version(),
        "versions": {p: version(p) for p in packages},
    }


def start_wandb(name: str, config: dict[str, Any], folder: Path) -> Any:
    """A W&B run; offline where it cannot be reached or nobody is logged in: a tracker never stops training."""
    import wandb

    settings = wandb.Settings(init_timeout=30, silent=True)
    try:
        return wandb.init(project="onefile-rlhf", name=name, config=config, dir=str(folder), settings=settings)
    except wandb.Error as error:
        print(f"W&B goes offline ({type(error).__name__}); `wandb sync {folder}/wandb/offline-*` sends it later")
        return wandb.init(
            project="onefile-rlhf", name=name, config=config, dir=str(folder), settings=settings, mode="offline"
        )


def pyplot() -> Any:
    """matplotlib without a screen; imported only where a picture is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def plot_runs(runs: list[tuple[str, Path]], panels: list[str], path: Path) -> None:
    """One picture, a panel for each metric, a line for each (label, folder); runs of one label share a colour."""
    plt = pyplot()
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.1 * rows), squeeze=False, layout="constrained")
    labels = list(dict.fromkeys(label for label, _ in runs))
    for label, folder in runs:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        first = next(i for i, run in enumerate(runs) if run[0] == label)
        for axis, name in zip(axes.flat, panels, strict=False):
            points = [(line["step"], line[name]) for line in lines if name in line]
            style = dict(
                color=f"C{labels.index(label)}", label=label if runs[first] == (label, folder) else None, linewidth=1.2
            )
            axis.plot([x for x, _ in points], [y for _, y in points], **style)
    for i, axis in enumerate(axes.flat):
        if i >= len(panels):
            axis.axis("off")
            continue
        axis.set_title(panels[i], fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.3)
    if len(labels) > 1:
        axes.flat[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
