"""Where models, data and functions come from: local files, folders, the Hugging Face hub."""

import functools
import os
import pkgutil
import re
import runpy
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import huggingface_hub
import transformers

from machinery.cli import InputError, about, say

if TYPE_CHECKING:
    import datasets  # takes a second to import

Rows: TypeAlias = "datasets.Dataset"
LOCAL = (".", "/", "~", "models/", "data/", "runs/")  # names that start like this are paths
READERS: dict[str, tuple[str, dict[str, Any]]] = {  # skip a byte-order mark; read "NA" as text
    ".txt": ("text", dict(encoding="utf-8-sig")),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".csv": ("csv", dict(keep_default_na=False)),
}
run_file = functools.cache(runpy.run_path)
transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # never ask whether to run remote code


def check_source(name: str) -> None:
    """Raise `InputError` for a missing path; for a hub name, go offline if the hub is down."""
    if Path(name).exists():
        if Path(name, "adapter_config.json").exists() and not Path(name, "config.json").exists():
            raise InputError("is an adapter; save what PeftModel.merge_and_unload() returns")
        return
    if name.replace(os.sep, "/").startswith(LOCAL) or Path(name).suffix in READERS:
        made = re.fullmatch(r"models/(\w+)/(\w+)", name)  # by another script
        hint = f"; create it with `python {made[2]}.py --task {made[1]}`" if made else ""
        raise InputError(f"does not exist in {Path.cwd()}{hint}")
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        go_offline_if_unreachable()


def go_offline_if_unreachable() -> None:
    """Switch to offline mode if the hub does not answer; the libraries would retry for 23 s."""
    try:
        urllib.request.urlopen(huggingface_hub.constants.ENDPOINT, timeout=2).close()
    except urllib.error.HTTPError:
        pass  # it answered
    except OSError:
        import datasets  # takes a second to import

        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        say("the hub does not answer; offline from here on")


def load_rows(source: str, flag: str) -> Rows:
    """Load a data source (see `Task`) that a flag names."""
    import datasets

    datasets.disable_progress_bars()
    with about(f"{flag} {source}"):
        name, split = source, "train"
        if not Path(source).exists() and "@" in source:
            name, _, split = source.rpartition("@")
        if Path(name).is_file():
            if Path(name).suffix not in READERS:
                raise InputError(f"is not a file of {', '.join(READERS)}")
            kind, options = READERS[Path(name).suffix]
            return datasets.load_dataset(kind, data_files=name, split=split, **options)
        part = ""
        if not Path(name).exists():  # C:\data is one name
            name, _, part = name.partition(":")  # a configuration or, of the hub, a file
        if (Path(name) / "state.json").is_file():  # from `Dataset.save_to_disk`
            return datasets.DatasetDict(train=datasets.load_from_disk(name))[split]
        check_source(name)
        files = {"data_files": part} if Path(part).suffix in READERS else {"name": part or None}
        return datasets.load_dataset(name, split=split, **files)


def load_function(name: str) -> Callable:
    """The function named `module:function` or `path.py:function`; a file is run once."""
    source, _, attribute = name.rpartition(":")
    if source.endswith(".py"):
        return run_file(source)[attribute]
    return pkgutil.resolve_name(name)
