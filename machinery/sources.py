"""Where models, data and functions come from: files, folders, the hub."""

import functools
import hashlib
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import transformers

from machinery.cli import InputError, about, say

Rows = Any  # a datasets.Dataset, slow to import
LOCAL = (".", "/", "~", "models/", "data/", "runs/")  # beginnings of paths
READERS: dict[str, tuple[str, dict[str, Any]]] = {  # no byte-order mark; "NA", "007" are texts
    ".txt": ("text", dict(encoding="utf-8-sig")),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".csv": ("csv", dict(keep_default_na=False, converters=dict.fromkeys(range(1000), str))),
}
transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # never ask whether to run remote code


def check_source(name: str) -> None:
    """Raise `InputError` for a missing path; go offline if the hub is down."""
    if Path(name).exists():
        if Path(name, "adapter_config.json").exists():  # also beside weights: it would be loaded
            raise InputError("is an adapter; save what PeftModel.merge_and_unload() returns")
        return
    if name.replace(os.sep, "/").startswith(LOCAL) or Path(name).suffix in READERS:
        made = re.fullmatch(r"models/(\w+)/(sft|train_reward|ppo|rloo)", name)
        hint = f"; create it with `python {made[2]}.py --task {made[1]}`" if made else ""
        raise InputError(f"does not exist in {Path.cwd()}{hint}")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    try:
        urllib.request.urlopen(huggingface_hub.constants.ENDPOINT, timeout=2).close()
    except urllib.error.HTTPError:
        pass  # it answered
    except OSError:  # the libraries would retry for 23 s
        import datasets  # slow to import

        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        say("the hub does not answer; offline from here on")


def load_rows(source: str, flag: str) -> Rows:
    """Load a data source (see `Task`) that a flag names."""
    import datasets

    datasets.disable_progress_bars()
    with about(f"{flag} {source}"):
        name, split, part = source, "train", ""
        if not Path(source).exists() and "@" in source:
            name, _, split = source.rpartition("@")
        if not Path(name).exists():  # C:\data is one name
            name, _, part = name.partition(":")  # a configuration or, of the hub, a file
        check_source(name)
        if Path(part).suffix in READERS:
            name = huggingface_hub.hf_hub_download(name, part, repo_type="dataset")
        if not Path(name).exists():
            return datasets.load_dataset(name, part or None, split=split)
        splits = find_splits(Path(name).absolute(), part)
        if split not in splits:
            raise InputError(f"has no split {split}; it has {', '.join(splits)}")
        found = splits[split]
        return read_files(found) if isinstance(found, list) else found.with_format(None)


def find_splits(path: Path, configuration: str) -> dict[str, Any]:
    """The files, or the rows from `save_to_disk`, of each split of a file or folder."""
    import datasets
    from datasets import data_files

    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        saved: Any = datasets.load_from_disk(str(path))  # beside its files are caches of `map`
        return saved if isinstance(saved, dict) else {"train": saved}
    splits = {"train": [str(path)]}
    if path.is_dir():
        builder = datasets.load_dataset_builder(str(path), configuration or None)
        found = builder.config.data_files or {}
        splits = {str(split): sorted({*files}) for split, files in found.items()}
    read = sum(splits.values(), [])
    for file in read:
        if Path(file).suffix not in READERS:  # the library would guess types
            raise InputError(f"{Path(file).name} is not a file of {', '.join(READERS)}")
    if path.is_file():
        return splits
    files = data_files.DataFilesList.from_patterns(["**"], str(path), [*READERS])
    if others := sorted({*files} - {*read}):
        names = ", ".join(os.path.relpath(file, path) for file in others)
        if data_files.get_data_patterns(str(path)) == data_files.DEFAULT_PATTERNS_ALL:
            raise InputError(f"has files of several kinds; choose one file, or move {names:.300}")
        say(f"{path} has splits ({', '.join(splits)}); not read, since in none: {names:.300}")
    return splits


def read_files(files: list[str]) -> Rows:
    """The rows of files of one kind. Texts stay texts; caches are found by content."""
    import datasets

    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in files:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    kind, options = READERS[Path(files[0]).suffix]
    if kind != "json":
        options = options | dict(data_files=files, description=digest.hexdigest())
        rows = datasets.load_dataset(kind, split="train", **options)
        if kind == "csv" and "__index_level_0__" in rows.column_names:
            raise InputError("the first row has more fields than the header: quote its commas")
        return rows
    # Values are stored as JSON: the library takes texts for dates or numbers. Its own decoder
    # changes 0.3, and large integers to texts.
    for module in (datasets.features.features, datasets.utils.json):
        setattr(module, "ujson_loads", json.loads)  # noqa: B010
    names = (name for row in read_json(files) for name in row)
    features = datasets.Features(dict.fromkeys(names, datasets.Json()))

    def encode() -> Iterator[dict[str, str]]:
        for row in read_json(files):
            texts = {name: json.dumps(row.get(name), ensure_ascii=False) for name in features}
            yield {name: x.encode("utf-8", "ignore").decode() for name, x in texts.items()}

    return datasets.Dataset.from_generator(encode, features, fingerprint=digest.hexdigest())


def read_json(files: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of files that hold a list, or an object per line."""
    for path in files:
        with open(path, encoding="utf-8-sig") as file:
            is_list = file.read(1) == "["
            file.seek(0)
            yield from json.load(file) if is_list else map(json.loads, filter(str.strip, file))


@functools.cache
def import_file(path: Path) -> Any:
    """Import a file as a module of its own name, with its folder on the path."""
    name = path.stem
    while name in sys.modules:  # such as a second judge.py
        name += "_"
    sys.path.append(str(path.parent))
    spec: Any = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_function(name: str) -> Callable:
    """The function `module:function` or `path.py:function`; files are imported once."""
    source, _, attribute = name.rpartition(":")
    if not source.endswith(".py"):
        return pkgutil.resolve_name(name)
    module = import_file(Path(source).resolve())
    if not hasattr(module, attribute):
        found = ", ".join(name for name, _ in inspect.getmembers(module, inspect.isfunction))
        raise InputError(f"has no {attribute!r}; its functions: {found}")
    return getattr(module, attribute)
