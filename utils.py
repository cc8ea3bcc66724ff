"""What no experiment changes: data → query table · models · processes. What a run leaves is in
`records.py`, how a model reads its rows in `packing.py`.

Everything of an algorithm stands in the script that runs it; this file imports none of them.

Letters: `B` sequences, `Q` query tokens, `R` response tokens, `T` tokens in all, `V` vocabulary, `D` width. Masks are
True at real tokens. Tags such as `# G3` name the implementation detail in README's table.
"""

import hashlib
import inspect
import math
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import filelock
import huggingface_hub
import numpy as np
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, gather_object
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.activations import NewGELUActivation

import packing
from tasks import InputError, RunError, Task, call_function, load_function

ROOT = Path(__file__).parent
transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # a model that brings code: refuse it, ask nobody


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
    """The id of a text that is a single token. Errors: `InputError` where it is not. Some tokenizers, such as Llama
    2's, put a space before what they encode; the "." of "dog." is another token: the vocabulary's comes first."""
    if text is None:
        return None
    known = tokenizer.get_vocab().get(text)
    ids = tokenizer.encode(text, add_special_tokens=False) if known is None else [known]
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
AS_WRITTEN = {".txt": dict(encoding="utf-8-sig"), ".csv": dict(keep_default_na=False)}  # a BOM is no text, "NA" is one


def load_rows(source: str, flag: str, split: str = "train") -> datasets.Dataset:
    """A data source (see `Task`) → its rows. Errors: `InputError` where it is missing, empty or unreadable."""
    datasets.disable_progress_bars()
    name, _, part = (source, "", "") if Path(source).exists() else source.partition(":")
    if Path.cwd().is_relative_to(Path(name).resolve()):  # all files below would be read, or just looked for
        raise InputError(f"{flag}={source} is the folder that the run is in, or one above it; name the data's own")
    if not Path(name).exists():
        if Path(name).suffix in BUILDERS and not part or name.startswith((".", "/", "~", "models/", "data/")):
            raise InputError(f"{flag}={source} does not exist")
        go_offline_if_unreachable()
    try:
        if Path(name).is_file():
            if Path(name).suffix not in BUILDERS:
                raise InputError(f"{flag}={source}: the file has to end in one of {' '.join(BUILDERS)}")
            with open(name, "rb") as file:
                if "json" in Path(name).suffix and re.match(rb"(\xef\xbb\xbf)?[\s\[]*null", file.read(99)):
                    raise InputError(f"{flag}={source} begins with null, which is no row")  # the library dies of it
            how = AS_WRITTEN.get(Path(name).suffix, {})
            return datasets.load_dataset(BUILDERS[Path(name).suffix], data_files=name, split="train", **how)
        what = {"data_files": part} if Path(part).suffix in BUILDERS else {"name": part or None}
        return datasets.load_dataset(name, **what, split=split)
    except InputError:
        raise
    except OSError as error:
        if Path(name).exists():
            raise InputError(f"{flag}={source} cannot be read: {error}") from error
        file = part if Path(part).suffix in BUILDERS else ""
        folder = name.split("/")[-1]
        raise InputError(
            f"{source} is neither in the cache nor to be reached ({type(error).__name__}). On a connected machine:\n"
            f"  hf download {' '.join(filter(None, (name, file)))} --repo-type dataset --local-dir {folder}\n"
            f"then pass  {flag} {folder}{'/' + file if file else ':' + part if part else ''}"
        ) from error
    except Exception as error:  # whatever its libraries raise for a file that is something else, or for a script
        raise InputError(f"{flag}={source} is empty or cannot be read: {error.__cause__ or error}") from error


def load_texts(task: Task) -> datasets.Dataset:
    """The rows of `query_dataset`, at most `num_queries`. Errors: `InputError` for a missing column."""
    rows = load_rows(task.query_dataset, "--query_dataset")
    for name in filter(None, (task.query_column, task.response_column)):
        if name not in rows.column_names:
            raise InputError(
                f"column {name!r} is not in --query_dataset={task.query_dataset}; it has {rows.column_names}"
            )
        kind = rows.features[name]
        if getattr(kind, "dtype", None) not in ("string", "large_string", "null"):
            raise InputError(
                f"column {name!r} of --query_dataset={task.query_dataset} holds {kind}, and not only texts"
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
        """The first `n` rows [n, length], and a table of those that are not among them. Errors: `InputError` where
        there are none."""
        heldout = {tuple(tokens) for tokens in self.rows[:n]["tokens"]}
        rows = (tuple(tokens) for batch in self.rows.iter(1000) for tokens in batch["tokens"])
        kept = [i for i, tokens in enumerate(rows) if tokens not in heldout]
        if not kept:
            raise InputError(f"{flag}={n} leaves none of the {len(self)} rows to train on")
        return self[:n], TokenTable(self.rows.select(kept), self.length, self.pad_id)


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
    if not task.clean_fn:
        return [text or "" for text in texts]
    clean, cleaned = load_function(task.clean_fn), []
    for text in texts:
        try:
            cleaned.append(clean(text or ""))
        except Exception as error:  # whatever it raises
            raise InputError(f"clean_fn={task.clean_fn} raises {error!r} for the text {text!r:.60}") from error
        if not isinstance(cleaned[-1], str):
            raise InputError(f"clean_fn={task.clean_fn} returns {cleaned[-1]!r:.60}; it has to return a text")
    return cleaned


def cleaning(task: Task) -> str:
    """What a cache of cleaned texts depends on: `clean_fn`'s name and its file's source."""
    if not task.clean_fn:
        return ""
    try:
        return f"{task.clean_fn}\0{Path(inspect.getfile(load_function(task.clean_fn))).read_text()}"
    except TypeError:  # a builtin has none
        return task.clean_fn


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
    if Path(name).is_file():
        raise InputError(f"{flag}={name} is a file; name the folder of a model")
    if not Path(name).is_dir():
        if name.startswith((".", "/", "~", "models/", "data/", "runs/")):
            raise InputError(f"{flag}={name} does not exist" + f"; make it with `{make}`" * bool(make))
        go_offline_if_unreachable()
    try:
        yield
    except ValueError as error:  # an unknown architecture, or one that brings its own code
        raise InputError(f"{flag}={name} cannot be loaded: {str(error).partition(chr(10))[0]}") from error
    except OSError as error:
        if Path(name).is_dir():
            raise InputError(f"{flag}={name} cannot be loaded: {str(error).partition(chr(10))[0]}") from error
        folder = name.split("/")[-1]
        raise InputError(
            f"model {name} is neither a folder, nor in the cache, nor to be reached. On a connected machine:\n"
            f"  hf download {' '.join(filter(None, (name, files)))} --local-dir {folder}\nthen pass  {flag} {folder}"
        ) from error


def load_tokenizer(
    task: Task, extra_tokens: int, make: str | None = None, flag: str = "--base_model"
) -> tuple[Any, PretrainedConfig, int]:
    """Tokenizer, model configuration and pad id (G2: one past the vocabulary) of `task.base_model`; loads no weights.
    `extra_tokens` are generated or read behind the query. Errors: `InputError` for a missing model, an
    architecture without position ids, a context that is too short. A tokenizer's own pad token is never used."""
    name = task.base_model
    with from_hub_or_folder(name, flag, make):
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
    check_length(config, task.query_length + affixes + extra_tokens, "query_length and what is behind it")
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
            logits = packing.Product.apply(hidden.float().reshape(-1, self.in_features), self.weight.float())
            logits = logits.view(*hidden.shape[:-1], -1)
            return logits if self.bias is None else logits + self.bias.float()


def load_lm(name: str, config: PretrainedConfig | None = None) -> PreTrainedModel:
    """Causal language model in fp32 without dropout, its head outside autocast; random weights where the folder holds a
    configuration only. Errors: `InputError` for weights that have to be unpickled, that are out of reach, or that are
    another kind of model's."""
    config = without_dropout(config or AutoConfig.from_pretrained(name))
    if Path(name).is_dir() and not any(Path(name).glob("*.safetensors*")):
        if others := [p.name for kind in ("*.bin", "*.pt", "*.h5", "*.msgpack") for p in Path(name).glob(kind)]:
            raise InputError(f"{name} holds {others[0]} but no safetensors; convert it with `save_pretrained` first")
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        with from_hub_or_folder(name, "--base_model"):
            load = dict(dtype=torch.float32, use_safetensors=True, output_loading_info=True)
            lm, found = AutoModelForCausalLM.from_pretrained(name, config=config, **load)
        if missing := sorted(found["missing_keys"]):  # else they would be random
            raise InputError(
                f"--base_model={name} ({config.architectures}) is no language model: {missing[0]} is missing"
            )
    lm.get_output_embeddings().__class__ = Float32Head  # the same module: names, tied weights and saved files stay
    return fuse_gelu(lm)


def fuse_gelu(model: PreTrainedModel) -> PreTrainedModel:
    """GPT-2's `gelu_new` as the one kernel that torch has of it; the configuration, which is saved, keeps the name."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))
    return model


@torch.no_grad()
def check_policy(policy: nn.Module, queries: Tensor, temperature: float, accelerator: Accelerator) -> None:
    """Whether the policy's log-probabilities behind half of a query [1, Q], with the whole of it beside it, are those
    of plain `lm(…)` alone: not if a model computes something of its own behind its head. Errors: `InputError` then."""
    plain = accelerator.unwrap_model(policy)
    row = queries[queries != plain.pad_id]
    row = row[: (getattr(plain.lm.config, "max_position_embeddings", None) or 2 * len(row)) // 2]
    half = row[len(row) // 2 :]  # the one that is looked at; beside it a longer one
    contexts = pad_rows([row.tolist(), half.tolist()], len(row), plain.pad_id).to(row.device)
    with inference(accelerator, policy):
        ours = policy(contexts, row.expand(2, -1))[0][1]
        logits = plain.lm(torch.cat([half, row])[None]).logits[0, len(half) - 1 : -1].float() / temperature
    theirs = logits.log_softmax(dim=-1).gather(-1, row[:, None])[:, 0]
    exact = accelerator.mixed_precision == "no" and torch.get_float32_matmul_precision() == "highest"
    gap, most = (ours - theirs).abs().max().item(), 0.01 if exact else 0.5
    if not gap <= most:
        raise InputError(
            f"the policy's log-probabilities are up to {gap:.2g} nats off those of {plain.lm.config.model_type}'s own "
            "forward without padding; this architecture cannot be used, GPT-2, GPT-NeoX, Llama and their like can"
        )


def micro_batches(sizes: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Rows of about `tokens` tokens in all, long and short ones mixed, those of a prompt together (`sizes` [B, 2], see
    `packing.row_sizes`); only memory and speed depend on it (G3, P7). As many micro-batches on every process: under
    FSDP2 they forward in step, and all of them have to ask."""
    lengths, which = sizes[:, 0], np.unique(sizes[:, 1], return_inverse=True)[1]
    longest = np.zeros(which.max() + 1, dtype=int)
    np.maximum.at(longest, which, lengths)
    counts = [math.ceil(lengths.sum() / tokens), -len(longest)]
    if dist.is_initialized():
        counts = all_max(torch.tensor(counts, device=PartialState().device)).tolist()
    count = min(counts[0], -counts[1])
    rank = np.argsort(np.argsort(longest, kind="stable"), kind="stable")[which]
    return [np.flatnonzero(rank % count == i) for i in range(count)]


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
    return None if replaced or not (folder / "config.json").is_file() else RewardConfig.from_folder(folder)


def check_memory(config: PretrainedConfig, each: int, what: str, device: torch.device, args: Any = None) -> None:
    """Before any weights: whether `what`, `each` bytes per parameter, fits into the device at all; with `args`, beside
    the reward model that a run with them loads. Errors: `InputError` with all sizes."""
    if device.type != "cuda":
        return
    sizes = [(count_parameters(config), each, what)]
    if args and (reward := reward_config(args)):
        sizes.append((count_parameters(reward), 4, "reward model"))
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1"):
        each = min(each, each / int(os.environ.get("WORLD_SIZE", 1)) + 4)  # its share, and all weights while sampling
        sizes[0] = sizes[0][0], each, what
    needed = sum(parameters * each for parameters, each, _ in sizes) / 2**30
    there = torch.cuda.get_device_properties(device).total_memory / 2**30
    if needed > there:
        words = " and ".join(f"{n / 1e9:.2f}e9 parameters × {each:g} bytes ({name})" for n, each, name in sizes)
        raise InputError(
            f"{words} are {needed:.0f} GiB before any activation, and {device} has {there:.0f} GiB; use a smaller model"
        )


class RewardConfig(PretrainedConfig):
    """Configuration of `RewardModel`: the backbone's, the pad id that it was trained with, and an id that never carries
    the reward: a classifier's own pad, often the end of text."""

    model_type = "scalar_reward"
    sub_configs = {"backbone": AutoConfig}

    def __init__(self, backbone: PretrainedConfig | dict | None = None, pad_id: int = 0, unread_id: int = -1, **kwargs):
        self.backbone = AutoConfig.for_model(**backbone) if isinstance(backbone, dict) else backbone
        self.pad_id, self.unread_id = pad_id, unread_id
        super().__init__(**kwargs)

    @classmethod
    def from_folder(cls, name: Path | str) -> "RewardConfig":
        """What train_reward.py wrote; or one around a classifier's, and then without `architectures`."""
        if cls.get_config_dict(name)[0].get("model_type") == cls.model_type:
            return cls.from_pretrained(name)
        config = without_dropout(AutoConfig.from_pretrained(name))
        return cls(config, config.vocab_size, -1 if config.pad_token_id is None else config.pad_token_id)


class RewardModel(PreTrainedModel):
    """G1, R3: a scalar on every token, `gain · r + bias` at the last real one. `save_pretrained`/`from_pretrained`."""

    config_class = RewardConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True

    def __init__(self, config: RewardConfig, backbone: nn.Module | None = None):
        super().__init__(config)
        self.backbone = fuse_gelu(backbone or AutoModel.from_config(without_dropout(config.backbone)))
        self.head = Float32Head(config.backbone.hidden_size, 1)
        self.gain = nn.Parameter(torch.ones(1))  # [1], since FSDP2 shards no scalar
        self.bias = nn.Parameter(torch.zeros(1))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is getattr(self, "head", None):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features + 1))  # R2
            nn.init.zeros_(module.bias)

    @classmethod
    def from_folder(cls, name: str, make: str) -> "RewardModel":
        """A folder that train_reward.py wrote; or a sequence classifier of one label as TRL trains it, whose head
        `score` has no bias: gain stays 1, bias 0. Errors: `InputError` naming the command that makes one."""
        if not (Path(name) / "config.json").is_file() or not any(Path(name).glob("*.safetensors*")):
            raise InputError(
                f"there is no reward model in {name}; make it with `{make}`, or pass --reward_model or --reward_fn"
            )
        config, load = RewardConfig.from_folder(name), dict(dtype=torch.float32, use_safetensors=True)
        if config.architectures:
            return cls.from_pretrained(name, **load).eval()
        kind, load = transformers.AutoModelForSequenceClassification, load | dict(output_loading_info=True)
        classifier, found = kind.from_pretrained(name, config=config.backbone, **load)
        if found["missing_keys"] or classifier.num_labels != 1 or not hasattr(classifier, "score"):
            raise InputError(
                f"--reward_model={name} is neither a reward model nor a classifier of one label with a head `score`"
            )
        model = cls(config, classifier.base_model)
        model.head.weight = classifier.score.weight
        return model.eval()

    def token_rewards(self, tokens: Tensor) -> Tensor:
        """[B, T] → [B, T, 1] at every token, before gain and bias."""
        columns = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.head(packing.hidden_states(self.backbone, tokens, columns, self.config.pad_id))

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T], pads anywhere → rewards [B] in fp32."""
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        real = (tokens != self.config.pad_id) & (tokens != self.config.unread_id)
        last = torch.where(real, columns, 0).amax(dim=1)  # R1: the last real token
        hidden = packing.hidden_states(self.backbone, tokens, last[:, None], self.config.pad_id)  # [B, 1, D]
        return self.gain * self.head(hidden).flatten() + self.bias

    @torch.no_grad()
    def score(self, *parts: Tensor, size: int) -> Tensor:
        """Rewards [B] of what `parts` [B, …] are one behind the other, pads anywhere; `size` tokens a forward."""
        tokens = torch.cat(parts, dim=1)
        out = torch.empty(len(tokens), device=tokens.device)
        for rows in micro_batches(packing.row_sizes(tokens, self.config.pad_id), size):
            out[rows] = self(tokens[rows])
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
    try:
        wanted = inspect.signature(function).parameters.values() if function else ()
    except ValueError:  # some builtins have none
        return False
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in wanted) > 2


def text_scores(
    function: Callable, spec: str, tokenizer: Any, queries: Tensor, responses: Tensor, pad_id: int, *more: list[float]
) -> Tensor:
    """`--reward_fn` and the like: a Python function of (queries, responses) → B finite floats. Errors: `InputError`."""
    texts, n = [decode(tokenizer, tokens, pad_id) for tokens in (queries, responses)], len(queries)
    scores = call_function(function, spec, *texts, *more)
    wanted = f"it has to return one finite float for each of the {n} responses"
    try:
        tensor = torch.as_tensor(scores, dtype=torch.float32, device=queries.device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"{spec} returned {type(scores).__name__} {str(scores)[:60]}; {wanted}") from error
    if tensor.shape != (n,):
        raise InputError(f"{spec} returned shape {list(tensor.shape)}; {wanted}")
    if bad := (~tensor.isfinite()).nonzero().flatten().tolist():
        first = " to ".join(repr(side[bad[0]][:60]) for side in texts[::-1])
        raise InputError(f"{spec} returned {tensor[bad[0]]} for {len(bad)} responses, such as {first}; {wanted}")
    return tensor


def load_reward(args: Any, tokenizer: Any, pad_id: int, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """The reward as a function of (queries [B, Q], responses [B, R]) → [B]: the reward model's, or `--reward_fn`'s; one
    that takes a third argument gets the reward model's scores there. Errors: `InputError` where there is none."""
    function = load_function(args.reward_fn) if args.reward_fn else None
    composes = takes_scores(function)
    if function and not composes:
        return lambda queries, cut: text_scores(function, args.reward_fn, tokenizer, queries, cut, pad_id)
    folder = args.reward_model or f"models/{args.task.task}/train_reward"
    model = RewardModel.from_folder(folder, f"python train_reward.py --task {args.task.task}").to(device)
    read = reward_reader(model, AutoTokenizer.from_pretrained(folder), tokenizer, pad_id)  # X13

    def reward(queries: Tensor, cut: Tensor) -> Tensor:
        scores = model.score(read(queries, cut), size=args.micro_batch_tokens)
        if not composes:
            return scores
        return text_scores(function, args.reward_fn, tokenizer, queries, cut, pad_id, scores.tolist())

    return reward


# --------------------------------------------------------------------------------------------------------- processes


REFUSED = {  # what a launcher may set up that would silently change the mathematics: environment variable → why
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed takes an optimizer step inside every backward, so at each micro-batch",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM has models and optimizers of its own",
    "FSDP_OFFLOAD_PARAMS": "weights on the host are not sampled from",
    "FSDP_ACTIVATION_CHECKPOINTING": "the scripts have --gradient_checkpointing, for every kind of run",
}


def start_accelerator(args: Any) -> Accelerator:
    """The accelerator of this process. Errors: `InputError` where the launcher's processes did not come up, or where it
    asks for what would silently change the mathematics."""
    for name, why in REFUSED.items():
        if os.environ.get(name, "false").lower() in ("true", "1"):
            raise InputError(f"{name}: {why}; use `accelerate launch --config_file configs/ddp.yaml`, or fsdp2.yaml")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    expected = int(os.environ.get("WORLD_SIZE", 1))
    # DDP makes its buckets anew behind a process's first step, but for this flag; where an element stands in one
    # decides the order in which three processes or more add it up, and a resumed run would differ in the last bits
    same_buckets = DistributedDataParallelKwargs(find_unused_parameters=expected > 2)
    patience = InitProcessGroupKwargs(timeout=timedelta(days=1))  # of the others, where one's reward function is slow
    accelerator = Accelerator(kwargs_handlers=[same_buckets, patience])
    steps, precision = accelerator.gradient_accumulation_steps, accelerator.mixed_precision
    if steps != 1:
        raise InputError(
            f"gradient_accumulation_steps={steps} (ACCELERATE_GRADIENT_ACCUMULATION_STEPS or a configuration file) "
            "would scale the gradients; leave it at 1 and set --micro_batch_tokens, which only saves memory"
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
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1"):
        if not accelerator.is_fsdp2:
            got = "FSDP 1" if accelerator.distributed_type == "FSDP" else accelerator.distributed_type.value
            raise InputError(
                f"FSDP was asked for and {got} came up, as it does on a CPU or without --fsdp_version 2; "
                "use `accelerate launch --config_file configs/fsdp2.yaml` on GPUs"
            )
        plugin = accelerator.state.fsdp_plugin
        if not plugin.reshard_after_forward:
            raise InputError(
                "fsdp_reshard_after_forward: false is not kept, weights are always sharded; set it to true"
            )
        if getattr(args, "compile", False):
            raise InputError("--compile replays steps with weights where they were, and FSDP2 moves them; leave it off")
        plugin.mixed_precision_policy = MixedPrecisionPolicy()  # fp32 weights under autocast, just as under DDP
        plugin.cpu_ram_efficient_loading = False  # it leaves every model empty on all processes but one
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    return accelerator


def blocks(model: nn.Module) -> Any:
    """What FSDP2 shards apart: names of the classes of a language model's or a policy's blocks."""
    return getattr(model, "lm", model)._no_split_modules


def prepare(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """`accelerator.prepare` for DDP, and for FSDP2, which shards block by block and has to know what a block is."""
    if accelerator.is_fsdp2:
        model._no_split_modules = blocks(model)
        model.forward = accelerator.autocast()(model.forward)  # DDP's wrapper does so itself
    model, optimizer = accelerator.prepare(model, optimizer)
    if accelerator.is_fsdp2:
        model.set_reshard_after_forward(True)  # of the root too: between two forwards weights are always in shards
    return model, optimizer


def freeze(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """A model that never learns, on this process's device; under FSDP2 sharded as the one that learns is."""
    model = model.eval().requires_grad_(False)
    model._no_split_modules = blocks(model)
    return fsdp2_prepare_model(accelerator, model) if accelerator.is_fsdp2 else model.to(accelerator.device)


@contextmanager
def inference(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Evaluation mode, in the run's precision. Under FSDP2 every process holds all weights meanwhile: the language
    model in a policy can be called by itself, token by token; `model` has to have been called once before."""
    model.eval()
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in shards:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    with accelerator.autocast():
        yield
    for module in shards:
        module.set_reshard_after_forward(True, recurse=False)
        module.reshard()


def whole(x: Tensor) -> Tensor:
    """What FSDP2 has shared out over the processes, which all have to ask for it; any other tensor as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


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


def gradient_norm(model: nn.Module) -> Tensor:
    """Euclidean norm of the gradient, the same on every process."""
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def check_gradients(norm: Tensor, task: Task, tokens: Iterable[Tensor], **numbers: Any) -> None:
    """Before an optimizer step. Errors: `RunError` on every process where the gradient's norm is not finite, with the
    rows `tokens` [B, …] of all processes behind it: those of the first of `numbers` [B, …] that is not finite there."""
    norm = whole(norm)
    if norm.isfinite():  # the processes' gradients are the same
        return
    tokenizer, why = AutoTokenizer.from_pretrained(task.base_model), "every number that it was made of is finite"
    for name, x in numbers.items():
        bad = ~x.isfinite().reshape(len(x), -1).all(dim=1) if isinstance(x, Tensor) else []
        rows = [row for row, is_bad in zip(tokens, bad, strict=False) if is_bad]
        if texts := gather_object([decode(tokenizer, row[row < len(tokenizer)][None], -1)[0][:60] for row in rows]):
            why = f"{name} is not finite either for {len(texts)} rows, such as {', '.join(map(repr, texts[:3]))}"
            break
    raise RunError(f"the norm of the gradient is {norm}: {why}; the step was not taken; a lower --lr may help")


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
