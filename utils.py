"""What no experiment changes: arguments · data → query table · models · processes · checkpoints · runs.

Everything of an algorithm stands in the script that runs it; this file imports none of them.

Letters: `B` sequences, `Q` query tokens, `R` response tokens, `T` tokens in all, `V` vocabulary, `D` width. Masks are
True at real tokens. Tags such as `# G3` name the implementation detail in README's table.
"""

import filecmp
import hashlib
import inspect
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
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import filelock
import huggingface_hub
import numpy as np
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker, WandBTracker
from accelerate.utils import DistributedDataParallelKwargs
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import StaticCache

from tasks import InputError, Task, check_bounds, load_function

ROOT = Path(__file__).parent


# --------------------------------------------------------------------------------------------------------- arguments


def check_args(args: Any, script: Path, processes: int) -> None:
    """Everything about arguments that every script checks before anything is loaded. Errors: `InputError`."""
    check_bounds(args)
    task = args.task
    if task.end_text and task.keep_last_line:
        raise InputError("end_text and keep_last_line both say where a query ends; set one of them")
    if task.truncate_after >= task.response_length:
        raise InputError(
            f"truncate_after={task.truncate_after} has to be in 0 … response_length − 1 = {task.response_length - 1}"
        )
    for function in filter(None, (task.clean_fn, task.gold_fn, getattr(args, "reward_fn", None))):
        load_function(function)
    check_folders(args, script)
    if checkpoint := find_checkpoint(args, script):
        check_same(asdict(args) | {"processes": processes}, checkpoint.parents[1])


# ----------------------------------------------------------------------------------------------- data → query table


def pad_rows(rows: list[list[int]], length: int, pad_id: int) -> Tensor:
    """Token lists → [B, length], padded on the left (G2)."""
    return torch.tensor([[pad_id] * (length - len(row)) + list(row) for row in rows]).view(len(rows), length)


def left_align(tokens: Tensor, pad_id: int) -> Tensor:
    """Move every row's pads to its left, order kept; the last real token is then in column −1. [B, T] → [B, T]"""
    order = (tokens != pad_id).byte().argsort(dim=1, stable=True)
    return tokens.gather(1, order)


def ends_of(text: str, offsets: list[tuple[int, int]], end: str) -> list[bool]:
    """P3: behind which tokens [(begin, end) in `text`] a query may end: where `end` does and no word goes on, so that
    both GPT-2's "." (13) and its " ." (764) end a sentence and the point of "1.5" or "CNN.com" does not."""
    closed = (end.isspace() or not text[stop : stop + 1].strip() for _, stop in offsets)
    return [text.endswith(end, 0, stop) and ok for (_, stop), ok in zip(offsets, closed, strict=True)]


def cut_query(tokens: list[int], length: int, start: int | None, ends: list[bool] | None) -> list[int] | None:
    """P3: the query inside a passage, or None where the passage is skipped. `ends`: behind which tokens it may end."""
    first = 0
    if start is not None:
        if start not in tokens:
            return None
        first = (tokens.index(start) + 1) % len(tokens)  # [O]: a start token that is the passage's last cuts nothing
    tokens = tokens[first : first + length]
    if ends is None:
        return tokens
    stops = [i + 1 for i, end in enumerate(ends[first : first + length]) if end]
    return tokens[: stops[-1]] if stops else None


def keep_last_line(text: str, length: int, tokenizer: Any) -> list[int]:
    """A prompt within `length` tokens: cut before the last newline that fits, its last line (TL;DR:) kept."""
    head, _, last = text.rpartition("\n")
    ids = tokenizer.encode(text, add_special_tokens=False)
    while len(ids) > length and "\n" in head.rstrip():
        head = head.rstrip().rpartition("\n")[0]
        ids = tokenizer.encode(f"{head.rstrip()}\n\n{last}", add_special_tokens=False)
    return ids[:length]


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


def go_offline_if_unreachable() -> None:
    """Without a connection each hub call retries for some 23 s; find out once, quickly. Cached files still load."""
    try:
        urllib.request.urlopen(huggingface_hub.constants.ENDPOINT, timeout=2).close()
    except urllib.error.HTTPError:
        pass  # it answered
    except OSError:
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


def load_rows(source: str, flag: str, split: str = "train") -> datasets.Dataset:
    """A data source (see `Task`) → its rows. Errors: `InputError` where it is missing, empty or unreadable."""
    datasets.disable_progress_bars()
    name, _, part = (source, "", "") if Path(source).exists() else source.partition(":")
    if not Path(name).exists():
        if Path(name).suffix in BUILDERS and not part or name.startswith((".", "/", "~", "models/", "data/")):
            raise InputError(f"{flag}={source} does not exist")
        go_offline_if_unreachable()
    try:
        if Path(name).is_file():
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
    except (datasets.exceptions.DatasetsError, ValueError, StopIteration, RuntimeError) as error:  # also: a script
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


class TokenTable:
    """Rows of tokens in a memory-mapped file, shared by the machine's processes. `table[rows]` → [B, length], padded on
    the left (G2)."""

    def __init__(self, rows: datasets.Dataset, length: int, pad_id: int):
        self.rows, self.length, self.pad_id = rows, length, pad_id

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: np.ndarray | slice) -> Tensor:
        return pad_rows(self.rows[rows]["tokens"], self.length, self.pad_id)

    def hold_out(self, n: int, flag: str) -> tuple[Tensor, "TokenTable"]:
        """The first `n` rows [n, length], and a table of the others. Errors: `InputError` where there are no others."""
        if len(self) <= n:
            raise InputError(f"{flag}={n} leaves none of the {len(self)} rows to train on")
        return self[:n], TokenTable(self.rows.select(range(n, len(self))), self.length, self.pad_id)


def tokenise_rows(
    rows: datasets.Dataset, function: Callable, length: int, tokenizer: Any, pad_id: int, *key: Any
) -> TokenTable:
    """`function`, a batch of rows → token lists, over all rows: once, into the Arrow cache, where it is found again by
    the data, the tokenizer, `key` and the source code. Other processes wait at a file lock, not in a collective."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend else str(sorted(tokenizer.get_vocab().items()))
    code = Path(__file__).read_text() + Path(inspect.getsourcefile(function)).read_text()
    parts = (rows._fingerprint, words, str(length), str(pad_id), repr(key), code)
    fingerprint = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    Path(datasets.config.HF_DATASETS_CACHE).mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(Path(datasets.config.HF_DATASETS_CACHE) / f"{fingerprint}.lock"):
        table = rows.map(
            lambda batch: {"tokens": function(batch)},
            batched=True,
            batch_size=1000,  # ten times as many take a GB for articles
            remove_columns=rows.column_names,
            features=datasets.Features({"tokens": datasets.List(datasets.Value("int32"))}),
            new_fingerprint=fingerprint,
        )
    return TokenTable(table, length, pad_id)


def clean_texts(texts: list[str | None], task: Task) -> list[str]:
    """Texts of the query data set as the task wants them; "" for none."""
    clean = load_function(task.clean_fn) if task.clean_fn else str
    return [clean(text or "") for text in texts]


def cleaning(task: Task) -> str:
    """What a cache of cleaned texts depends on: the source of `clean_fn`."""
    return Path(inspect.getfile(load_function(task.clean_fn))).read_text() if task.clean_fn else ""


def tokenise_queries(texts: list[str | None], task: Task, tokenizer: Any) -> list[list[int] | None]:
    """P3: texts → queries as token lists; None where a text is blank or skipped."""
    texts, queries = clean_texts(texts, task), []
    start = token_id(tokenizer, task.start_text, "start_text")
    rows = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=task.end_text is not None)
    for i, (text, ids) in enumerate(zip(texts, rows["input_ids"], strict=True)):
        ends = ends_of(text, rows["offset_mapping"][i], task.end_text) if task.end_text else None
        if task.keep_last_line and len(ids) > task.query_length:
            ids = keep_last_line(text, task.query_length, tokenizer)
        queries.append((cut_query(ids, task.query_length, start, ends) or None) if text.strip() else None)
    return queries


FEW = 2**15  # rows that take a second or two: not worth a smaller table for a shorter run


def shuffled_texts(task: Task, needed: int) -> datasets.Dataset:
    """As many rows as a run of `needed` queries can use, in an order whose beginning is the same for every run."""
    texts = load_texts(task)
    return texts.select(np.random.default_rng(0).permutation(len(texts))[: max(needed, FEW)])


def load_queries(task: Task, tokenizer: Any, pad_id: int, needed: int) -> TokenTable:
    """G2: the table of queries [N, Q] of `shuffled_texts`. Errors: `InputError` if none is usable."""
    texts = shuffled_texts(task, needed)
    marks = {n: t for n, t in (("start_text", task.start_text), ("end_text", task.end_text)) if t}
    token_id(tokenizer, task.start_text, "start_text")

    def queries(batch: dict[str, list]) -> list[list[int]]:
        return [query for query in tokenise_queries(batch[task.query_column], task, tokenizer) if query]

    key = (task.query_column, task.keep_last_line, *marks.items(), cleaning(task))
    table = tokenise_rows(texts, queries, task.query_length, tokenizer, pad_id, *key)
    if not len(table):
        lack = " or lack " + " and ".join(f"{n}={t!r}" for n, t in marks.items()) if marks else ""
        raise InputError(f"--query_dataset={task.query_dataset} gives no query: all {len(texts)} rows are blank{lack}")
    return table


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


# ------------------------------------------------------------------------------------------------------------ models


@contextmanager
def from_hub_or_folder(name: str, flag: str, make: str | None = None, files: str = "") -> Iterator[None]:
    """Around what loads model `name`: goes offline quickly if the hub is out of reach. Errors: `InputError` with the
    command `make` that makes a missing folder, or with the one that fetches what is not in the cache."""
    if not Path(name).is_dir():
        if name.startswith((".", "/", "~", "models/", "data/", "runs/")):
            raise InputError(f"{flag}={name} does not exist" + f"; make it with `{make}`" * bool(make))
        go_offline_if_unreachable()
    try:
        yield
    except OSError as error:
        if Path(name).is_dir():
            raise
        folder = name.split("/")[-1]
        raise InputError(
            f"model {name} is neither a folder, nor in the cache, nor to be reached. On a connected machine:\n"
            f"  hf download {' '.join(filter(None, (name, files)))} --local-dir {folder}\nthen pass  {flag} {folder}"
        ) from error


def load_tokenizer(task: Task, extra_tokens: int, make: str | None = None) -> tuple[Any, PretrainedConfig, int]:
    """Tokenizer, model configuration and pad id (G2: one past the vocabulary) of `task.base_model`; loads no weights.
    `extra_tokens` are generated or read behind the query. Errors: `InputError` for a missing model, an
    architecture without position ids, a context that is too short. A tokenizer's own pad token is never used."""
    name = task.base_model
    with from_hub_or_folder(name, "--base_model", make):
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if cls is None or "position_ids" not in inspect.signature(cls.forward).parameters:  # G3 needs them
        why = "takes no position_ids, so left-padded rows would be scored wrongly"
        raise InputError(f"{name} ({config.model_type}) {why}; GPT-2, GPT-NeoX, Llama, Falcon and their like work")
    if not cls._can_compile_fullgraph:  # GPT-Neo: its local attention takes the cache's length for the text's
        why = "cannot be sampled from over a static cache"
        raise InputError(f"{name} ({config.model_type}) {why}; GPT-2, GPT-NeoX, Llama, Falcon and their like work")
    affixes = len(tokenizer.encode(task.query_prefix + task.query_suffix, add_special_tokens=False))
    check_length(config, task.query_length + affixes + extra_tokens, "query and response")
    return tokenizer, config, max(config.vocab_size, len(tokenizer))


def check_length(config: PretrainedConfig, needed: int, what: str) -> None:
    """Errors: `InputError` where a model's positions are fewer than the tokens that it is to read."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and needed > longest:
        raise InputError(f"{what} need {needed} tokens, but the model ({config.model_type}) reads at most {longest}")


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """P4: no dropout, also after `.train()`: every rate in the configuration becomes 0."""
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


class Float32Head(nn.Linear):
    """A head outside autocast: GPT-2's logits all stand around −70, where bf16 steps by 0.5."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D], of any dtype → logits [..., V] in fp32."""
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return nn.functional.linear(hidden.float(), self.weight.float(), bias)


class KeyValueCache(StaticCache):
    """A static cache takes its dtype from the keys, which rotary positions leave in fp32 under autocast, and cannot
    hold the bf16 values. Keys become what the values are, as attention makes them anyway; else nothing changes."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, T, D / heads] of one layer → all of them so far."""
        return super().update(key_states.to(value_states.dtype), value_states, *args, **kwargs)


def load_lm(name: str, config: PretrainedConfig | None = None) -> PreTrainedModel:
    """Causal language model in fp32 without dropout, its head outside autocast; random weights where the folder holds a
    configuration only. Errors: `InputError` for weights that have to be unpickled, or that are out of reach."""
    config = without_dropout(config or AutoConfig.from_pretrained(name))
    if Path(name).is_dir() and not any(Path(name).glob("*.safetensors*")):
        if others := [p.name for kind in ("*.bin", "*.pt", "*.h5", "*.msgpack") for p in Path(name).glob(kind)]:
            raise InputError(f"{name} holds {others[0]} but no safetensors; convert it with `save_pretrained` first")
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        with from_hub_or_folder(name, "--base_model"):
            lm = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=torch.float32, use_safetensors=True)
    lm.get_output_embeddings().__class__ = Float32Head  # the same module: names, tied weights and saved files stay
    return lm


def model_inputs(tokens: Tensor, pad_id: int) -> dict[str, Tensor]:
    """G3: [B, T] → the arguments that make padding invisible, wherever it is. A pad's id is never embedded."""
    mask = tokens != pad_id
    positions = mask.cumsum(dim=1) - mask.long()  # exclusive: a pad does not move what follows it
    return dict(input_ids=tokens.masked_fill(~mask, 0), attention_mask=mask.long(), position_ids=positions)


@torch.no_grad()
def check_policy(policy: nn.Module, queries: Tensor, temperature: float, accelerator: Accelerator) -> None:
    """Whether the policy's log-probabilities of a padded row [1, Q] are those of plain `lm(…)` without padding, as they are
    unless a model computes something of its own behind or besides its head. Errors: `InputError` where they are not."""
    plain = accelerator.unwrap_model(policy)
    row = queries[queries != plain.pad_id][None]
    with accelerator.autocast():
        ours = policy(queries, row)[0][0]
        logits = plain.lm(torch.cat([row, row], dim=1)).logits[0, row.shape[1] - 1 : -1].float() / temperature
    theirs = logits.log_softmax(dim=-1).gather(-1, row.T)[:, 0]
    gap, most = (ours - theirs).abs().max().item(), 0.01 if accelerator.mixed_precision == "no" else 0.5
    if not gap <= most:
        raise InputError(
            f"the policy's log-probabilities are up to {gap:.2g} nats off those of {plain.lm.config.model_type}'s own "
            "forward without padding; this architecture cannot be used, GPT-2, GPT-NeoX, Llama and their like can"
        )


def row_lengths(tokens: Tensor, pad_id: int) -> np.ndarray:
    """Real tokens of each row, on the host: they plan the micro-batches."""
    return (tokens != pad_id).sum(dim=1).cpu().numpy()


def micro_batches(lengths: np.ndarray, size: int) -> list[tuple[np.ndarray, int]]:
    """Rows of like length, `size` at a time: [(rows, length of the longest)]. Each is trimmed to its own longest row;
    only memory and speed depend on it (G3, P7)."""
    rows = np.argsort(lengths, kind="stable")
    return [(part, int(lengths[part].max())) for part in np.split(rows, range(size, len(rows), size))]


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep no activations inside the blocks, forward them again in the backward pass."""
    old = getattr(model, "gradient_checkpointing_enable", None)  # before transformers 5.2
    getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})


def count_parameters(config: PretrainedConfig) -> int:
    """Of a causal language model, or of a `RewardModel`, without its weights."""
    with torch.device("meta"):
        reward = isinstance(config, RewardConfig)
        return (RewardModel(config) if reward else AutoModelForCausalLM.from_config(config)).num_parameters()


def reward_config(args: Any) -> "RewardConfig | None":
    """Of the reward model that a run loads; None where `--reward_fn` replaces it, or where there is none to load."""
    function = load_function(args.reward_fn) if args.reward_fn else None
    folder = Path(args.reward_model or f"models/{args.task.task}/train_reward")
    replaced = function and not takes_scores(function)
    return None if replaced or not (folder / "config.json").is_file() else RewardConfig.from_pretrained(folder)


def check_memory(config: PretrainedConfig, each: int, what: str, device: torch.device, args: Any = None) -> None:
    """Before any weights: whether `what`, `each` bytes per parameter, fits into the device at all; with `args`, beside
    the reward model that a run with them loads. Errors: `InputError` with all sizes."""
    if device.type != "cuda":
        return
    sizes = [(count_parameters(config), each, what)]
    if args and (reward := reward_config(args)):
        sizes.append((count_parameters(reward), 4, "reward model"))
    needed = sum(parameters * each for parameters, each, _ in sizes) / 2**30
    there = torch.cuda.get_device_properties(device).total_memory / 2**30
    if needed > there:
        words = " and ".join(f"{n / 1e9:.2f}e9 parameters × {each} bytes ({name})" for n, each, name in sizes)
        raise InputError(
            f"{words} are {needed:.0f} GiB before any activation, and {device} has {there:.0f} GiB; use a smaller model"
        )


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

    def __init__(self, config: RewardConfig, backbone: nn.Module | None = None):
        super().__init__(config)
        self.backbone = backbone or AutoModel.from_config(without_dropout(config.backbone))
        self.head = Float32Head(config.backbone.hidden_size, 1)
        self.gain = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(()))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is getattr(self, "head", None):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features + 1))  # R2
            nn.init.zeros_(module.bias)

    @classmethod
    def from_folder(cls, name: str, make: str) -> "RewardModel":
        """A folder that train_reward.py wrote. Errors: `InputError` naming the command that makes it."""
        if not (Path(name) / "config.json").is_file():
            raise InputError(
                f"there is no reward model in {name}; make it with `{make}`, or pass --reward_model or --reward_fn"
            )
        return cls.from_pretrained(name, dtype=torch.float32).eval()

    def token_rewards(self, tokens: Tensor) -> Tensor:
        """[B, T] → [B, T, 1] at every token, before gain and bias."""
        inputs = model_inputs(tokens, self.config.pad_id)  # G3
        return self.head(self.backbone(**inputs, use_cache=False).last_hidden_state)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T], pads anywhere → rewards [B] in fp32."""
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        last = torch.where(tokens != self.config.pad_id, columns, 0).amax(dim=1)  # R1: the last real token
        hidden = self.backbone(**model_inputs(tokens, self.config.pad_id), use_cache=False).last_hidden_state
        reward = self.head(hidden[torch.arange(len(tokens), device=tokens.device), last]).squeeze(-1)
        return self.gain * reward + self.bias

    @torch.no_grad()
    def score(self, *parts: Tensor, size: int) -> Tensor:
        """Rewards [B] of what `parts` [B, …] are one behind the other, pads anywhere; `size` rows a forward."""
        tokens = left_align(torch.cat(parts, dim=1), self.config.pad_id)
        out = torch.empty(len(tokens), device=tokens.device)
        for rows, width in micro_batches(row_lengths(tokens, self.config.pad_id), size):
            out[rows] = self(tokens[rows, -width:])
        return out


PROBE = "The 1st, 22nd & 333rd: it isn't  naïve…\n\n\tx"


def reads_ids_of(tokenizer: Any, other: Any) -> bool:
    """Whether every id of `other` is the same text to `tokenizer`, which may have more (a pad of its own)."""
    same = other.get_vocab().items() <= tokenizer.get_vocab().items()
    return same and tokenizer.encode(PROBE, add_special_tokens=False) == other.encode(PROBE, add_special_tokens=False)


def retokenise(tokens: Tensor, source: Any, pad_id: int, target: Any) -> list[list[int]]:
    """[B, T] in ids of tokenizer `source` → B token lists of the same texts by `target`: no pads, an end of text stays
    one. Nothing is cut."""
    rows = [[token for token in row if token != pad_id] for row in tokens.tolist()]
    texts = source.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if end := source.eos_token:
        texts = [text.replace(end, target.eos_token or "") for text in texts]
    return target(texts, add_special_tokens=False)["input_ids"]


def reward_reader(model: RewardModel, theirs: Any, tokenizer: Any, pad_id: int) -> Callable[[Tensor, Tensor], Tensor]:
    """X13: queries [B, Q] and responses [B, R] of a policy → [B, T] as a reward model of tokenizer `theirs` reads them:
    the same ids, or the same texts where the tokenizers differ. A text that is too long loses its beginning."""
    pad, longest = model.config.pad_id, getattr(model.config.backbone, "max_position_embeddings", None) or 0

    def same_ids(queries: Tensor, responses: Tensor) -> Tensor:
        tokens = torch.cat([queries, responses], dim=1)
        return tokens.masked_fill((tokens == pad_id) | (tokens >= pad), pad)  # also ids that are no text to either

    def same_texts(queries: Tensor, responses: Tensor) -> Tensor:
        sides = (retokenise(side, tokenizer, pad_id, theirs) for side in (queries, responses))
        rows = [(query + response)[-longest:] for query, response in zip(*sides, strict=True)]
        return pad_rows(rows, max(map(len, rows)), pad).to(queries.device)

    return same_ids if reads_ids_of(theirs, tokenizer) else same_texts


def takes_scores(function: Callable | None) -> bool:
    """Whether a `--reward_fn` has a third argument, without a default: the reward model's scores."""
    wanted = inspect.signature(function).parameters.values() if function else ()
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in wanted) > 2


def text_scores(
    function: Callable, spec: str, tokenizer: Any, queries: Tensor, responses: Tensor, pad_id: int, *more: list[float]
) -> Tensor:
    """`--reward_fn` and the like: a Python function of (queries, responses) → B finite floats. Errors: `InputError`."""
    scores = function(decode(tokenizer, queries, pad_id), decode(tokenizer, responses, pad_id), *more)
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


# --------------------------------------------------------------------------------------------------------- processes


REFUSED = {  # what a launcher may set up that would silently change the mathematics: environment variable → why
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed takes an optimizer step inside every backward, so at each micro-batch",
    "ACCELERATE_USE_FSDP": "weights that are sharded cannot be sampled from yet",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM has models and optimizers of its own",
}


def start_accelerator(args: Any) -> Accelerator:
    """The accelerator of this process. Errors: `InputError` where the launcher's processes did not come up, or where it
    asks for what would silently change the mathematics."""
    for name, why in REFUSED.items():
        if os.environ.get(name, "false").lower() in ("true", "1"):
            raise InputError(f"{name}: {why}; use `accelerate launch --multi_gpu`")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    expected = int(os.environ.get("WORLD_SIZE", 1))
    # DDP makes its buckets anew behind a process's first step, but for this flag; where an element stands in one decides
    # the order in which three processes or more add it up, and a resumed run would differ in the last bits
    same_buckets = DistributedDataParallelKwargs(find_unused_parameters=expected > 2)
    accelerator = Accelerator(kwargs_handlers=[same_buckets])
    steps, precision = accelerator.gradient_accumulation_steps, accelerator.mixed_precision
    if steps != 1:
        raise InputError(
            f"gradient_accumulation_steps={steps} (ACCELERATE_GRADIENT_ACCUMULATION_STEPS or a configuration file) "
            "would scale the gradients; leave it at 1 and set --micro_batch_size, which only saves memory"
        )
    if precision not in ("no", "bf16"):
        raise InputError(
            f"mixed_precision={precision}: its loss scaler skips steps that Adam counts; use --mixed_precision bf16"
        )
    if "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ or accelerator.num_processes != expected:
        raise InputError(
            f"the launcher asked for several processes and this one sees {accelerator.num_processes}; on a CPU use "
            f"`ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes {max(expected, 2)}`"
        )
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    return accelerator


def stop_accelerator(accelerator: Accelerator) -> None:
    """Leave the process group in step: gloo aborts now and then when a process exits first."""
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def generator(seed: int, step: int, device: torch.device) -> torch.Generator:
    """The torch generator of one step of one process; nothing carries over from step to step."""
    state = np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0]
    where = "cpu" if device.type == "mps" else device  # MPS has no fp64 to draw with
    return torch.Generator(where).manual_seed(int(state >> np.uint64(1)))


def all_sum(x: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> Tensor:
    """Sum over all processes; `x` itself where there is one."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, op)
    return x


def all_max(x: Tensor) -> Tensor:
    """Largest over all processes."""
    return all_sum(x, dist.ReduceOp.MAX)


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


# ------------------------------------------------------------------------------------------------------- checkpoints


KEPT = 2  # checkpoints of a run: the newest, and the one before it
FREE = ("save_every", "save_minutes", "resume", "run_name", "output_dir", "track")  # change no byte of what is written


def by_flag(record: dict[str, Any]) -> dict[str, Any]:
    """What args.json holds, with the task's flags and the inputs' fingerprints beside the others."""
    return record | record["task"] | record.get("inputs", {})


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
    if not found or not (found[-1].parents[1] / script.name).is_file():
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
    found = {f"contents of {name}": sha256(path) for name, path in paths.items() if path.exists()}
    return found | {"contents of the data": sha256(*data)}


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, tied ones once."""
    weights = model.state_dict(keep_vars=True)
    first = {id(x): name for name, x in reversed(list(weights.items()))}
    return {name: weights[name] for name in first.values()}


def pack_state(model: nn.Module, optimizer: Any) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """`weight/<name>` and, for all that the optimizer keeps of it, `exp_avg/<name>` and so on, on the CPU; and the
    numbers of the optimizer's groups."""
    tensors = {}
    for name, weight in named_weights(model).items():
        for kind, x in ({"weight": weight} | optimizer.state.get(weight, {})).items():
            tensors[f"{kind}/{name}"] = x.detach().cpu().contiguous()
    return tensors, [{k: v for k, v in g.items() if isinstance(v, int | float)} for g in optimizer.param_groups]


@torch.no_grad()
def unpack_state(tensors: dict[str, Tensor], groups: list[dict[str, float]], model: nn.Module, optimizer: Any) -> None:
    """The inverse of `pack_state`, in place. Errors: `InputError` for weights of another model."""
    weights = named_weights(model)
    if other := weights.keys() ^ {name.partition("/")[2] for name in tensors}:
        raise InputError(f"the checkpoint is of another model, see {sorted(other)[0]}")
    for name, x in tensors.items():
        kind, _, name = name.partition("/")
        if kind == "weight":
            weights[name].copy_(x)
        else:
            optimizer.state[weights[name]][kind] = x.to(weights[name].device, copy=True)
    for group, numbers in zip(optimizer.param_groups, groups, strict=True):
        group.update(numbers)


def checksum(state: str, tensors: dict[str, Tensor]) -> str:
    """sha256 of everything in a checkpoint."""
    names = json.dumps([[name, str(x.dtype), list(x.shape)] for name, x in sorted(tensors.items())])
    return sha256(state, names, *(x for _, x in sorted(tensors.items())))


def write_checkpoint(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """One safetensors file, `state` as JSON in its header; whole or not there, whenever the process is killed. Only the
    newest `KEPT` stay."""
    path.parent.mkdir(exist_ok=True)
    beside, text = path.parent / "unfinished.tmp", json.dumps(state)
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
    """Nothing that is there is ever overwritten or removed. Errors: `InputError` for a folder that is in the way."""
    if args.run_name and (Path("runs") / args.run_name).exists() and not args.resume:
        raise InputError(f"run_name={args.run_name}: runs/{args.run_name} is there already; choose another name")
    out = Path(args.output_dir or "")
    if args.output_dir and out.exists() and not (out.is_dir() and not os.listdir(out)) and not args.resume:
        raise InputError(f"output_dir={args.output_dir} is no empty folder; choose another, or move what is there")
    link = latest(args, script)
    if link.exists() and not link.is_symlink() and not args.output_dir:
        raise InputError(f"{link} is a folder, but has to be free for a link to the run's weights; move it away")


def save_model(model: PreTrainedModel, tokenizer: Any, folder: Path, **heads: nn.Module) -> None:
    """A folder that `from_pretrained` loads, with the tokenizer, and each head as `<name>.safetensors`: written beside
    its final name and renamed."""
    beside = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    for name, head in heads.items():
        save_file({key: x.cpu().contiguous() for key, x in head.state_dict().items()}, beside / f"{name}.safetensors")
    try:
        beside.rename(folder)  # fails where somebody has put files meanwhile, and leaves both alone
    except OSError:
        there = [folder / path.name for path in beside.iterdir()]
        if not all(path.is_file() and filecmp.cmp(path, beside / path.name, shallow=False) for path in there):
            raise
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
        self.handlers = {n: signal.signal(n, lambda *x: asked.append(x)) for n in (signal.SIGTERM, signal.SIGUSR1)}
        if not self.main:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        record = asdict(args) | {"processes": accelerator.num_processes, "inputs": fingerprints(args, data)}
        record |= {"mixed_precision": accelerator.mixed_precision, "device": accelerator.device.type}
        if self.source:
            self.folder = self.source.parents[1]
            check_same(record, self.folder)
            self.note_changes()
        else:
            name = args.run_name or f"{args.task.task}__{script.stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
            self.folder = new_folder(Path("runs") / name)
            shutil.copy(script, self.folder / script.name)
            record |= {"command": sys.argv} | environment(self.folder)
            (self.folder / "args.json").write_text(json.dumps(record, indent=1))
        self.lock = filelock.FileLock(self.folder / ".lock")  # the system lets go of it when the process is killed
        try:
            self.lock.acquire(timeout=0)
        except filelock.Timeout:
            raise InputError(f"--resume: another process is still writing {self.folder}") from None
        accelerator.trackers = start_trackers(self.folder, record, args.track)
        self.console, shown = Console(), TextColumn("{task.fields[shown]}")
        columns = (TextColumn(script.stem), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), shown)
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.bar = self.progress.add_task(script.stem, total=total, shown="")
        self.progress.start()
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
        if self.main:
            tensors, groups = pack_state(self.accelerator.unwrap_model(model), optimizer)
            lengths = {name: length_of(self.folder / name) for name in ("metrics.jsonl", "samples.jsonl")}
            state = {"step": step, "rest": rest, "groups": groups, "lengths": lengths}
            write_checkpoint(self.folder / "checkpoints" / f"{step:08}.safetensors", tensors, state)
        if asked:
            self.close()
            if self.main:
                print(
                    f"stopped after update {step} of {self.total}; add  --resume {self.folder}  to the command to go on"
                )
            stop_accelerator(self.accelerator)
            sys.exit(143)

    def log(self, step: int, metrics: dict[str, float], shown: dict[str, str]) -> None:
        """Write one line of metrics; `shown` is metric name → its short name in the progress line. Errors:
        `FloatingPointError` on every process for a loss that is no number, before anything more is made of it."""
        for name, value in metrics.items():
            if "loss" in name and not math.isfinite(value):
                raise FloatingPointError(
                    f"{name}={value} at update {step}; a lower --lr, or fp32 instead of bf16, may help"
                )
        if not self.main:
            return
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        self.accelerator.log(metrics, step=step)
        if step >= self.total:  # results behind the last step
            return
        line = "  ".join(f"{short} {metrics[name]:.3g}" for name, short in shown.items() if name in metrics)
        self.progress.update(self.bar, completed=step + 1, shown=line)
        if not self.console.is_terminal and (step % max(self.total // 20, 1) == 0 or step + 1 == self.total):
            left = (time.perf_counter() - self.begin) / (step + 1 - self.start) * (self.total - step - 1)
            print(f"{step + 1:>6}/{self.total}  {line}  left {left:.0f} s", flush=True)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Append samples to samples.jsonl and show them as a table."""
        if not self.main:
            return
        with open(self.folder / "samples.jsonl", "a") as file:
            for row in rows:
                file.write(json.dumps({"step": step, **row}) + "\n")
        self.sampled = [self.sampled[0] if self.sampled else rows, rows]
        self.table(rows, f"samples of held-out text after {step} updates")
        for tracker in self.accelerator.trackers:
            if tracker.name == "wandb":
                data = [list(map(str, row.values())) for row in rows]
                tracker.log_table("samples", columns=list(rows[0]), data=data, step=step)

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

    def save(self, model: PreTrainedModel, tokenizer: Any, **heads: nn.Module) -> None:
        """The weights into the run's folder, `models/<task>/<script>` linked to them; or into `--output_dir` alone. A
        head's are `<name>.safetensors` there."""
        self.accelerator.wait_for_everyone()
        if self.main:
            self.weights = Path(self.args.output_dir or self.folder / "model")
            self.weights.parent.mkdir(parents=True, exist_ok=True)
            save_model(model, tokenizer, self.weights, **heads)
            if not self.args.output_dir:
                link = latest(self.args, self.script)
                link.parent.mkdir(parents=True, exist_ok=True)
                beside = link.with_name(f"{link.name}.tmp{os.getpid()}")
                beside.symlink_to(os.path.relpath(self.weights.resolve(), link.parent.resolve()))
                beside.replace(link)
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Signals mean again what they did, and others may write the folder."""
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
        plot_runs([(self.folder.name, self.folder)], self.panels, self.folder / "curves.png")
        link = "" if self.args.output_dir else f", linked as {latest(self.args, self.script)}"
        print(*done, f"weights: {self.weights}{link}", f"curves and metrics: {self.folder}/curves.png", sep="\n")


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


def start_trackers(folder: Path, config: dict[str, Any], track: bool) -> list[Any]:
    """TensorBoard's, and W&B's with `track`: offline where it cannot be reached or nobody is logged in, since a tracker
    never stops training."""
    trackers = [TensorBoardTracker("", folder)]
    if track:
        import wandb

        settings = dict(config=config, dir=str(folder), settings=wandb.Settings(init_timeout=30, silent=True))
        trackers.append(WandBTracker("onefile-rlhf", name=folder.name, **settings))
    for tracker in trackers:
        try:
            tracker.start()
        except wandb.Error as error:
            print(f"W&B goes offline ({type(error).__name__}); `wandb sync {folder}/wandb/offline-*` sends it later")
            tracker.init_kwargs["mode"] = "offline"
            tracker.start()
    return trackers


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
    for i, (label, folder) in enumerate(runs):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        shown = label if label not in [other for other, _ in runs[:i]] else None  # once in the legend
        for axis, name in zip(axes.flat, panels, strict=False):
            points = [(line["step"], line[name]) for line in lines if name in line]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            axis.plot(xs, ys, color=f"C{labels.index(label)}", label=shown, linewidth=1.2)
    for axis, name in zip(axes.flat, panels, strict=False):
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    if len(labels) > 1:
        axes.flat[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
