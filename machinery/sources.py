"""Where models, data and functions come from: files, folders, the hub."""

import csv
import functools
import hashlib
import importlib.util
import json
import os
import pkgutil
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, TypeAlias

import datasets
import huggingface_hub
import numpy as np
import pyarrow.parquet
import torch
import torch.distributed as dist
import transformers
from accelerate.utils import broadcast_object_list

from machinery.cli import InputError, about, say

Rows: TypeAlias = datasets.Dataset
LOCAL = (".", "/", "~", "models/", "data/", "runs/")  # beginnings of paths
FILES = (".jsonl", ".json", ".txt", ".csv", ".parquet")  # values of CSV files are texts
PROMPTS = r"question|instruction|query|problem|context|history|trajectory|conv.*|messages"
MESSAGES = r"""^\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:"""  # a text that holds some
MEDIA = re.compile(r"\b(Audio|Image|Video|Pdf|Nifti|Mesh)\(")  # in features of `datasets`
SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")  # configuration and tokenizer
WEIGHTS = ("*.json", "model*.safetensors")  # not the copies that some models have beside them
COMMIT = re.compile(r"\b[0-9a-f]{40}\b")
SWITCHES: tuple = (  # global ones: how to read and set them
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)
links = functools.cache(tempfile.TemporaryDirectory)
PINNED: dict[str, str] = {}  # names that the run has loaded → their folder, or commit on the hub
transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # never ask whether to run remote code


def check_source(name: str, kind: str = "model") -> None:
    """Raise `InputError` for a missing path; go offline if the hub cannot be reached."""
    if name.replace(os.sep, "/").startswith(LOCAL) or Path(name).suffix in FILES:
        made = re.fullmatch(r"models/(\w+)/(sft|train_reward|ppo|rloo)", name)
        hint = f"; create it with `python {made[2]}.py --task {made[1]}`" if made else ""
        raise InputError(f"does not exist in {Path.cwd()}{hint}")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    try:
        huggingface_hub.HfApi().repo_info(name, repo_type=kind)
    except (huggingface_hub.errors.HfHubHTTPError, ValueError):
        pass  # it answered, or will not be asked; the library says more
    except Exception as error:  # of the network: further calls would retry for 23 s each
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        say(f"the hub does not answer ({error}); offline from here on")


def pin(name: str, found: str) -> str:
    """What a name is in the whole run, on all processes: what the first process found first."""
    if name not in PINNED:
        PINNED[name] = broadcast_object_list([found])[0] if dist.is_initialized() else found
    return PINNED[name]


def fetch(name: str, load: Callable[..., Any]) -> Any:
    """`load(revision=…)`, of one commit in the whole run, and after `--resume`."""
    for _ in range(2):  # the first process may have found another one
        found = load(revision=PINNED.get(name))
        path = found if isinstance(found, str) else found.cache_files[0]["filename"]
        commit = COMMIT.findall(path)[-1]
        if pin(name, commit) == commit:
            return found
    raise InputError(f"commit {PINNED[name]}, with which the run began, is not there; {commit} is")


def find_model(name: str, weights: bool = False) -> str:
    """The folder of a model: that behind a link, or one in the cache of the hub's client."""
    if Path(PINNED.get(name, name)).exists():
        folder = pin(name, os.path.realpath(name))
    else:
        check_source(name)
        files = WEIGHTS if weights else SMALL
        folder = fetch(name, partial(huggingface_hub.snapshot_download, name, allow_patterns=files))
    if Path(folder, "adapter_config.json").exists():  # also beside weights: it would be loaded
        raise InputError("is an adapter; save what PeftModel.merge_and_unload() returns")
    return folder


def load_rows(source: str, flag: str, limit: int | None = None, **columns: str) -> Rows:
    """Load a data source (see `Task`) that `flag` names. `columns`: flag → a column to hold texts.

    At most `limit` rows; without images, sound and video, which no function of texts reads.
    """
    with about(f"{flag} {source}"):  # added to error messages
        if Path(source).exists():
            rows = read_file(Path(source))
        else:
            name, _, split = source.partition("@")
            name, _, part = name.partition(":")  # a configuration or a file
            check_source(name, "dataset")
            load: Any = partial(datasets.load_dataset, name, part or None, split=split or "train")
            if Path(part).suffix in FILES and not split:
                load = partial(huggingface_hub.hf_hub_download, name, part, repo_type="dataset")
            found = fetch(source, load)
            rows = read_file(Path(found)) if isinstance(found, str) else found
        for option, name in columns.items():
            with about(f"--{option} {name}"):
                check_texts(rows, name, source)
    rows = rows.remove_columns([x for x, y in rows.features.items() if MEDIA.search(repr(y))])
    if limit and len(rows) > limit:
        say(f"{flag}: {limit} of {len(rows)} rows are used (--num_queries)")
        chosen = np.random.default_rng(0).choice(len(rows), limit, replace=False)
        rows = rows.select(np.sort(chosen))
    return rows


def read_file(path: Path) -> Rows:
    """The rows of a file. Its copy, which the processes of a machine share, is found by content.

    Columns of other values than texts are stored as JSON: the library takes texts for dates, and
    its own decoder changes 0.3 and large integers.
    """
    if path.suffix not in FILES:
        raise InputError(f"is no file of {FILES}; use python tools/convert.py {path} rows.jsonl")
    options: Any = dict(fingerprint=f"{digest(path)[:40]}{digest(Path(__file__))[:8]}{path.suffix}")
    if path.suffix == ".parquet":
        return datasets.Dataset(pyarrow.parquet.read_table(path), **options)
    texts: dict[str, bool] = {}  # column → whether it has only texts
    for row in read_rows(path):
        texts |= {x: texts.get(x, True) and isinstance(y, str | None) for x, y in row.items()}

    def encode() -> Iterator[dict[str, str | None]]:
        for row in read_rows(path):
            for name, x in texts.items():
                text = row.get(name) if x else json.dumps(row.get(name), ensure_ascii=False)
                row[name] = text and text.encode("utf-8", "ignore").decode()  # no lone surrogates
            yield row

    kinds = {name: datasets.Value("string" if x else "binary") for name, x in texts.items()}
    rows = datasets.Dataset.from_generator(encode, datasets.Features(kinds), **options)
    others = [name for name, x in texts.items() if not x]

    def decode(batch: dict[str, list]) -> dict[str, list]:
        return {x: list(map(json.loads, y)) if x in others else y for x, y in batch.items()}

    return rows.with_transform(decode) if others else rows


def digest(path: Path) -> str:
    """Of a file's content, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """A list of objects, an object per line, a text per line, or a table of texts."""
    with open(path, encoding="utf-8-sig", newline="" if path.suffix == ".csv" else None) as file:
        if path.suffix == ".txt":
            yield from ({"text": line.removesuffix("\n")} for line in file)
        elif path.suffix == ".csv":
            for row in csv.DictReader(file, strict=True):
                if None in row or None in row.values():
                    raise InputError(f"{row!r:.200} does not have the fields of the header")
                yield row
        else:
            is_list = file.read(1) == "["
            file.seek(0)
            yield from json.load(file) if is_list else map(json.loads, filter(str.strip, file))


def check_texts(rows: Rows, column: str, source: str) -> None:
    """Raise `InputError` for the first value of a column that is no text, or JSON of messages."""
    batches = rows.select_columns(column).iter(1000)  # an error lists the columns that there are
    for row, value in enumerate(value for batch in batches for value in batch[column]):
        if not isinstance(value, str | None) or re.match(MESSAGES, value or ""):
            use = f"not a text; use python tools/convert.py {source} rows.jsonl"
            raise InputError(f"{column} of row {row} is {value!r:.60}, {use}")


def rename_prompt(columns: Sequence[str]) -> str:
    """The flag of tools/convert.py that renames the column which looks like the prompt."""
    found = [name for name in columns if re.fullmatch(PROMPTS, name)]
    return f" --rename {found[0] if found else 'COLUMN'}=prompt"


@contextmanager
def users_code() -> Iterator[None]:
    """Restore the working directory and torch's global switches, which a user's code may set."""
    before = [get() for get, _ in SWITCHES]
    folder = os.getcwd()
    try:
        yield
    finally:
        os.chdir(folder)
        for (get, restore), value in zip(SWITCHES, before, strict=True):
            if get() != value:
                restore(value)


@functools.cache
def import_file(path: Path) -> Any:
    """Import a file as a module; those beside it come before ours of the same name (utils.py)."""
    folder, name, ours = str(path.parent), module_name(path), {}
    beside = {x.name for x in pkgutil.iter_modules([folder])} - sys.stdlib_module_names
    for key, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if key.partition(".")[0] in beside and file and path.parent not in Path(file).parents:
            ours[key] = sys.modules.pop(key)
    sys.path.insert(0, folder)
    try:
        spec: Any = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        with users_code():
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
        sys.path.append(folder)  # for what it imports later
        sys.modules.update(ours)
    return module


def module_name(path: Path) -> str:
    """The name of a file's module: its own, unless a library, ours or another file has it.

    Then that of a link to the file, by which spawned processes can import it.
    """
    name = path.stem
    spec = getattr(sys.modules.get(name), "__spec__", None) or PathFinder.find_spec(name)
    if name not in sys.stdlib_module_names and (spec is None or spec.origin == str(path)):
        return name
    name += f"_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    link = Path(links().name, f"{name}.py")
    if not link.exists():
        link.symlink_to(path)
        sys.path.append(str(link.parent))
    return name


def load_function(name: str) -> Callable:
    """The function `module:function` or `path.py:function`; files are imported once."""
    source, _, attribute = name.rpartition(":")
    if name.endswith(".py"):
        source, attribute = name, ""
    if source.endswith(".py"):
        path = Path(source).resolve()
        if not path.is_file():
            raise InputError(f"{source} does not exist in {Path.cwd()}")
        module = import_file(path)
    else:
        spec = None
        with suppress(ModuleNotFoundError, ValueError):  # of a package, of an empty name
            spec = importlib.util.find_spec(source)
        if not spec:
            raise InputError("is in no module; use module:function or path.py:function")
        module = importlib.import_module(source)
    found = getattr(module, attribute, None)
    if found is None:
        own = [
            x for x, y in vars(module).items() if getattr(y, "__module__", "") == module.__name__
        ]
        raise InputError(f"{source} has no function {attribute!r}; it has {own}")
    return found
