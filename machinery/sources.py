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
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import huggingface_hub
import transformers

from machinery.cli import InputError, about, say

Rows = Any  # a datasets.Dataset, slow to import
LOCAL = (".", "/", "~", "models/", "data/", "runs/")  # beginnings of paths
THEIRS: dict[Path, Any] = defaultdict(dict)  # by folder: modules of names that ours have, too
FILES = (".jsonl", ".json", ".txt")  # what is read; data/convert.py writes it
transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # never ask whether to run remote code


def check_source(name: str) -> None:
    """Raise `InputError` for a missing path; go offline if the hub is down."""
    if Path(name).exists():
        if Path(name, "adapter_config.json").exists():  # also beside weights: it would be loaded
            raise InputError("is an adapter; save what PeftModel.merge_and_unload() returns")
        return
    if name.replace(os.sep, "/").startswith(LOCAL) or Path(name).suffix in FILES:
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
        if Path(source).exists():
            return read_file(Path(source))
        name, _, split = source.partition("@")
        name, _, part = name.partition(":")  # a configuration or a file
        check_source(name)
        if Path(part).suffix in FILES:
            return read_file(Path(huggingface_hub.hf_hub_download(name, part, repo_type="dataset")))
        return datasets.load_dataset(name, part or None, split=split or "train")


def read_file(path: Path) -> Rows:
    """The rows of a file as they are in it; a cache is found by their content."""
    import datasets

    if path.suffix not in FILES:
        raise InputError(
            "is no .jsonl, .json or .txt file: python data/convert.py SOURCE rows.jsonl"
        )
    digest = hashlib.sha256(Path(__file__).read_bytes() + path.suffix.encode())
    with open(path, "rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    # Values are stored as JSON: the library takes texts for dates or numbers. Its own decoder
    # changes 0.3, and large integers to texts.
    for module in (datasets.features.features, datasets.utils.json):
        setattr(module, "ujson_loads", json.loads)  # noqa: B010
    names = (name for row in read_rows(path) for name in row)
    features = datasets.Features(dict.fromkeys(names, datasets.Json()))

    def encode() -> Iterator[dict[str, str]]:
        for row in read_rows(path):
            texts = {name: json.dumps(row.get(name), ensure_ascii=False) for name in features}
            yield {name: x.encode("utf-8", "ignore").decode() for name, x in texts.items()}

    return datasets.Dataset.from_generator(encode, features, fingerprint=digest.hexdigest())


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """A list of objects, an object per line, or a text per line."""
    with open(path, encoding="utf-8-sig") as file:
        if path.suffix == ".txt":
            yield from ({"text": line.removesuffix("\n")} for line in file)
            return
        is_list = file.read(1) == "["
        file.seek(0)
        yield from json.load(file) if is_list else map(json.loads, filter(str.strip, file))


@functools.cache
def import_file(path: Path) -> Any:
    """Import a file as a module of its own name, with its folder on the path."""
    sys.path.append(str(path.parent))
    with guest(str(path)):
        name = path.stem
        while name in sys.modules:  # such as types.py
            name += "_"
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


@contextmanager
def guest(source: str) -> Iterator[None]:
    """Run a user's code of a module or file; then restore the working folder and `os`."""
    here, functions = os.getcwd(), vars(os).copy()
    is_file = source.endswith(".py")
    try:
        with beside(Path(source).resolve().parent) if is_file else nullcontext():
            yield
    finally:
        lost = [x for x in functions if functions[x] and not getattr(os, x, None)]
        vars(os).update({x: functions[x] for x in lost})
        os.chdir(here)
    if lost:  # by a guard for generated code
        raise InputError(f"sets os.{lost[0]} to None: let it run such code in another process")


@contextmanager
def beside(folder: Path) -> Iterator[None]:
    """Modules of this folder come before ours of the same name, such as its own utils.py."""
    names = {x.stem for x in folder.glob("*.py")} - sys.stdlib_module_names
    names |= {x.parent.name for x in folder.glob("*/__init__.py")}
    ours = {x: module for x, module in sys.modules.items() if x.partition(".")[0] in names}
    files = {x: Path(getattr(module, "__file__", None) or folder / x) for x, module in ours.items()}
    ours = {x: sys.modules.pop(x) for x in ours if folder not in files[x].resolve().parents}
    sys.modules.update(THEIRS[folder])
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        THEIRS[folder] = {x: sys.modules[x] for x in ours if x in sys.modules}
        sys.modules.update(ours)
