"""Data sources: local files, folders, and datasets on the Hugging Face hub."""

from pathlib import Path
from typing import Any

import datasets
import huggingface_hub

from machinery import cli, hub
from machinery.cli import InputError

READERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
READER_OPTIONS: dict[str, dict[str, Any]] = {  # a byte-order mark is not text, and "NA" is
    ".txt": dict(encoding="utf-8-sig"),
    ".csv": dict(keep_default_na=False),
}


def load_rows(source: str, flag: str) -> datasets.Dataset:
    """Load a data source (see `Task`). Raises `InputError` if it is missing or unreadable."""
    datasets.disable_progress_bars()
    name, split = source, "train"
    if not Path(source).exists() and "@" in source:
        name, _, split = source.rpartition("@")
    folder, _, configuration = name.partition(":")
    try:
        if Path(name).is_file():
            rows = load_file(name, split, flag)
        elif Path(folder).is_dir():
            rows = load_folder(folder, configuration or None, split, flag)
        else:
            rows = load_from_hub(name, split, flag)
    except InputError:
        raise
    except Exception as error:  # anything that readers raise for broken files
        if cli.is_disk_error(error.__cause__ or error):  # of the cache
            raise error.__cause__ or error from None
        reason = hub.first_line(error.__cause__ or error)
        raise InputError(f"{flag} {source} is empty or cannot be read: {reason}") from error
    if not len(rows):
        raise InputError(f"{flag} {source} has no rows")
    return rows


def load_file(name: str, split: str, flag: str) -> datasets.Dataset:
    """Load a local file; its only split is `train`."""
    suffix = Path(name).suffix
    if suffix not in READERS:
        raise InputError(f"{flag} {name}: the file name has to end in {' '.join(READERS)}")
    if split != "train":
        raise InputError(f"{flag} {name}@{split}: a file has only the split train")
    options = READER_OPTIONS.get(suffix, {})
    return datasets.load_dataset(READERS[suffix], data_files=name, split="train", **options)


def load_folder(name: str, configuration: str | None, split: str, flag: str) -> datasets.Dataset:
    """Load a folder of data files, or one written by `save_to_disk`."""
    folder = Path(name)
    if Path.cwd().is_relative_to(folder.resolve()):
        raise InputError(
            f"{flag} {name} is the current folder or one above it; pass the data's own"
        )
    if (folder / "state.json").is_file():
        if split != "train":
            raise InputError(f"{flag} {name}@{split}: this folder has only the split train")
        return datasets.load_from_disk(name)
    if (folder / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(name)
        if split not in splits:
            raise InputError(f"{flag} {name} has no split {split}; it has {', '.join(splits)}")
        return splits[split]
    return datasets.load_dataset(name, configuration, split=split)


def load_from_hub(name: str, split: str, flag: str) -> datasets.Dataset:
    """Load `name`, `name:configuration` or `name:file` from the hub or its cache."""
    name, _, part = name.partition(":")
    is_file = Path(part).suffix in READERS
    if hub.looks_local(name) or (Path(name).suffix in READERS and not part):
        raise InputError(hub.missing(name, flag))
    hub.go_offline_if_unreachable()
    try:
        if is_file:
            return datasets.load_dataset(name, data_files=part, split=split)
        return datasets.load_dataset(name, part or None, split=split)
    except OSError as error:
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            raise
        folder = name.split("/")[-1]
        local = f"{folder}/{part}" if is_file else f"{folder}:{part}" if part else folder
        download = f"hf download {name} {part if is_file else ''}".strip()
        raise InputError(
            f"dataset {name} is not in the cache and the hub cannot be reached. Where it can, run\n"
            f"  {download} --repo-type dataset --local-dir {folder}\n"
            f"and pass {flag} {local}"
        ) from error
