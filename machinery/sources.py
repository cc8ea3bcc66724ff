"""Where models, data and functions come from: files, folders, the hub."""

import bz2
import csv
import errno
import functools
import gzip
import hashlib
import importlib.util
import inspect
import json
import lzma
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
import filelock
import huggingface_hub
import numpy as np
import pyarrow.parquet
import torch
import torch.distributed as dist
import transformers
from accelerate.utils import broadcast_object_list
from datasets.arrow_writer import ArrowWriter

from machinery.cli import InputError, about, say

Rows: TypeAlias = datasets.Dataset
LOCAL = (".", "/", "~", "models/", "data/", "runs/")  # beginnings of paths
FILES = (".jsonl", ".ndjson", ".json", ".txt", ".csv", ".tsv", ".parquet")
COMPRESSED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
GUESSING = ("csv", "json", "text")  # readers of `datasets` that take 007 for 7, NA for null
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP)
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
csv.field_size_limit(2**31 - 1)


def check_source(name: str, kind: str = "model") -> None:
    """Raise `InputError` for a missing path; go offline if the hub cannot be reached."""
    if name.replace(os.sep, "/").startswith(LOCAL) or form(name) in FILES:
        hint = ""
        if made := re.fullmatch(r"models/(\w+)/(sft|train_reward|ppo|rloo)", name):
            hint = f"; create it with `python {made[2]}.py --task {made[1]}`"
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
        try:
            found = load(revision=PINNED.get(name))
        except (OSError, ValueError) as error:  # of the hub's client: its pages say no more
            if getattr(error, "errno", None) in NO_LOCKS:
                raise
            raise InputError(f"{type(error).__name__}: {' '.join(str(error).split())}") from None
        commit = COMMIT.findall(getattr(found, "cache_dir", found))[-1]
        if pin(name, commit) == commit:
            return found
    raise InputError(f"commit {PINNED[name]}, with which the run began, is not there; {commit} is")


def find_model(name: str, weights: bool = False) -> str:
    """The folder of a model: what a link leads to, or a folder in the hub's cache."""
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
    """Load a data source (see `Task`) that `flag` names. `columns`: flag → column that it needs.

    At most `limit` rows; without images, sound and video, which no function of texts reads.
    """
    with about(f"{flag} {source}"):  # added to error messages
        rows = read_source(source)
        media = [name for name, kind in rows.features.items() if MEDIA.search(repr(kind))]
        if media:  # even without, it would take a second of 74 million rows
            rows = rows.remove_columns(media)
        if not len(rows):
            raise InputError("has no rows with values")
        if limit and len(rows) > limit:
            say(f"{flag}: {limit} of {len(rows)} rows are used (--num_queries)")
            chosen = np.random.default_rng(0).choice(len(rows), limit, replace=False)
            chosen.sort()
            rows = rows.select(chosen)
        for option, name in columns.items():
            if name not in rows.column_names:
                raise InputError(f"has no column --{option} {name}; it has {rows.column_names}")
    return rows


def read_source(source: str) -> Rows:
    """The rows of a file, or of a name on the hub, whose files of texts we read ourselves."""
    cache = datasets.config.HF_DATASETS_CACHE
    try:
        if Path(source).exists():
            return read_files([source])
        name, _, split = source.partition("@")
        name, _, part = name.partition(":")  # a configuration or a file
        check_source(name, "dataset")
        download = partial(huggingface_hub.hf_hub_download, name, repo_type="dataset")
        if form(part) in FILES and not split:
            return read_files([fetch(source, partial(download, part))])
        builder = fetch(source, partial(datasets.load_dataset_builder, name, part or None))
        split = split or "train"
        if builder.name not in GUESSING:
            builder.download_and_prepare()
            return builder.as_dataset(split, in_memory=False)
        splits = builder.config.data_files
        if split not in splits:
            raise InputError(f"has no split {split!r}; there are {[str(x) for x in splits]}")
        commit = PINNED[source]
        files = [file.partition(f"@{commit}/")[2] for file in splits[split]]
        return read_files([download(file, revision=commit) for file in files])
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        use = f"set HF_DATASETS_CACHE ({cache}) and HF_HOME to folders of another disk"
        raise InputError(f"the disk cannot lock files; {use}") from None


def read_files(paths: Sequence[str]) -> Rows:
    """The rows of files. Their copy, which the processes of a machine share, is found by content.

    Columns of other values than texts are stored as JSON: the library takes texts for dates, and
    its own decoder changes 0.3 and large integers.
    """
    for path in paths:
        if form(path) not in FILES:
            raise InputError(f"is no file of {FILES}; use {convert_command(path)}")
    content = [digest(Path(path)) + form(path) for path in (*paths, __file__)]
    key = hashlib.sha256(str(content).encode()).hexdigest()[:40]
    if form(paths[0]) == ".parquet":
        file = pyarrow.parquet.ParquetFile(paths[0])
        check_names(file.schema_arrow.names)
        return datasets.Dataset(file.read(), fingerprint=key)
    copy = Path(datasets.config.HF_DATASETS_CACHE, f"{key}.arrow")
    copy.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{copy}.lock", poll_interval=0.5):
        if not copy.exists():
            write_table(paths, copy)
    rows = Rows(datasets.table.MemoryMappedTable.from_file(str(copy)), fingerprint=key)
    if all(kind.dtype == "string" for kind in rows.features.values()):
        return rows

    def decode(batch: dict[str, list]) -> dict[str, list]:
        for name in batch:
            if rows.features[name].dtype == "binary":
                batch[name] = [*map(json.loads, batch[name])]
        return batch

    return rows.with_transform(decode)


def write_table(paths: Sequence[str], out: Path) -> None:
    """Write the rows of files as one Arrow file: columns of texts, and others as JSON."""
    kinds: dict[str, str] = {}
    for path in paths:
        for row in read_rows(path):
            for name, value in row.items():
                kinds.setdefault(name, "string")
                if not isinstance(value, str | None):
                    kinds[name] = "binary"
    if not kinds:
        raise InputError("has no rows with values")
    features = datasets.Features({name: datasets.Value(kind) for name, kind in kinds.items()})
    part = f"{out}.part"
    with ArrowWriter(path=part, features=features) as writer:
        for path in paths:
            for row in read_rows(path):
                for name, kind in kinds.items():
                    value = row.get(name)
                    if kind == "binary":
                        value = json.dumps(value, ensure_ascii=False)
                    if value is not None:
                        value = value.encode("utf-8", "ignore").decode()  # no lone surrogates
                    row[name] = value
                writer.write(row)
        writer.finalize()
    os.replace(part, out)


def digest(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def form(path: str) -> str:
    """The ending of a file's name that says its form, before that of a compressor."""
    name = Path(path)
    return Path(name.stem if name.suffix in COMPRESSED else name).suffix


def convert_command(source: str, flags: str = "") -> str:
    """The command that makes rows with texts of a source, in a file of another name."""
    name = re.split("[.:@]", Path(source).name)[0]
    return f"python tools/convert.py {source} {name}_texts.jsonl{flags}"


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """A list of objects, an object per line, a text per line, or a table of texts."""
    kind = form(path)
    is_table = kind in (".csv", ".tsv")
    open_file = COMPRESSED.get(Path(path).suffix, open)
    with open_file(path, "rt", encoding="utf-8-sig", newline="" if is_table else None) as file:
        if kind == ".txt":
            for line in file:
                yield {"text": line.removesuffix("\n")}
        elif is_table:
            reader = csv.DictReader(file, delimiter="\t" if kind == ".tsv" else ",", strict=True)
            check_names(reader.fieldnames or [])
            for row in reader:
                if None in row or None in row.values():
                    raise InputError(f"{row!r:.200} does not have the fields of the header")
                yield row
        else:
            for number, row in enumerate(read_json(file)):
                if not isinstance(row, dict):
                    raise InputError(f"row {number} is {row!r:.60}, no object with columns")
                yield row


def read_json(file: Any) -> Iterator[Any]:
    """The objects of a JSON list, or those of lines."""
    for number, line in enumerate(file):
        try:
            if line.lstrip().startswith("["):
                yield from json.loads(line + file.read(), object_pairs_hook=make_object)
            elif line.strip():
                yield json.loads(line, object_pairs_hook=make_object)
        except json.JSONDecodeError as error:
            place = f"line {number + error.lineno}, column {error.colno}"
            raise InputError(f"{place}: {error.msg}") from None


def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without a name twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        check_names([name for name, _ in pairs])
    return found


def check_names(names: Sequence[str]) -> None:
    """Raise `InputError` for a column that is there twice."""
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"has two columns {name!r}; rename one")


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

    Otherwise that of a link to the file, by which spawned processes can import it.
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
        names = [x for x, y in vars(module).items() if inspect.isfunction(y)]
        raise InputError(f"{source} has no function {attribute!r}; it has {names}")
    return found
