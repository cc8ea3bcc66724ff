"""The Hugging Face hub: fail fast without a connection, and upload the weights of a run."""

import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import transformers
from huggingface_hub.errors import HTTPError

from machinery.cli import InputError

LOCAL = (".", "/", "~", "models/", "data/", "runs/")  # names that start like this are paths
transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # never ask whether to run remote code


def looks_local(name: str) -> bool:
    """Whether a name is meant as a path rather than as a name on the hub."""
    return name.startswith(LOCAL)


def missing(name: str, flag: str) -> str:
    """The sentence for a path that does not exist."""
    relative = "" if Path(name).is_absolute() else f" in {Path.cwd()}"
    return f"{flag} {name} does not exist{relative}"


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights as safetensors; one shard without its index is not enough."""
    return any((folder / f"model.safetensors{end}").is_file() for end in ("", ".index.json"))


def check_weights(folder: Path, flag: str) -> None:
    """Raise `InputError` for a folder without weights as safetensors."""
    if not has_weights(folder):
        raise InputError(
            f"{flag} {folder} has no model.safetensors and no model.safetensors.index.json; "
            "convert its weights as docs/tldr.md does"
        )


def go_offline_if_unreachable() -> None:
    """Switch to offline mode if the hub does not answer; the libraries would retry for 23 s."""
    try:
        urllib.request.urlopen(huggingface_hub.constants.ENDPOINT, timeout=2).close()
    except urllib.error.HTTPError:
        pass  # it answered
    except OSError:
        import datasets  # takes a second to import

        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


@contextmanager
def loading_model(name: str, flag: str, files: str = "") -> Iterator[None]:
    """Turn the errors of `from_pretrained(name)` into one sentence each.

    `files` are those to download; "" for all.
    """
    path = Path(name)
    if path.is_file():
        raise InputError(f"{flag} {name} is a file; pass the folder of a model")
    if not path.is_dir():
        if looks_local(name):
            made = re.fullmatch(r"models/(\w+)/(\w+)", name)  # by another script
            hint = f"; create it with `python {made[2]}.py --task {made[1]}`" if made else ""
            raise InputError(missing(name, flag) + hint)
        go_offline_if_unreachable()
    try:
        yield
    except OSError as error:
        if path.is_dir():
            raise InputError(f"{flag} {name} cannot be loaded: {first_line(error)}") from error
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            reason = first_line(error)
            raise InputError(f"{flag} {name} cannot be loaded from the hub: {reason}") from error
        folder = name.split("/")[-1]
        raise InputError(
            f"model {name} is not in the cache and the hub cannot be reached. Where it can, run\n"
            f"  hf download {' '.join(filter(None, (name, files)))} --local-dir {folder}\n"
            f"and pass {flag} {folder}"
        ) from error
    except (ValueError, KeyError, AttributeError, RuntimeError) as error:  # unknown architectures
        raise InputError(f"{flag} {name} cannot be loaded: {first_line(error)}") from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise InputError(f"{flag} {name} cannot be loaded: {broken_file(path)}{error}") from error


def broken_file(folder: Path) -> str:
    """The name of the first safetensors file in a folder that cannot be opened."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            safe_open(path, "pt").__enter__()
        except SafetensorError:
            pointer = path.read_bytes()[:20].startswith(b"version https://git")
            hint = " is a git-lfs pointer; run `git lfs pull`: " if pointer else " is damaged: "
            return f"{path.name}{hint}"
    return ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0]


def check_token(name: str) -> None:
    """Raise `InputError` without a token for uploads."""
    if not huggingface_hub.get_token():
        raise InputError(f"--push_to_hub {name} needs a token; run `hf auth login`")


def create_repository(name: str) -> None:
    """Create a private repository before training. Raises `InputError` if that fails."""
    try:
        huggingface_hub.create_repo(name, private=True, exist_ok=True)
        if not huggingface_hub.model_info(name).private:
            raise ValueError("the repository exists and is public; choose another name")
    except (HTTPError, OSError, ValueError) as error:
        raise InputError(f"--push_to_hub {name}: {error}") from error


def upload(name: str, folder: Path) -> str:
    """Upload a folder. Returns where it is, or the command that uploads it later."""
    try:
        return f"on the hub: {huggingface_hub.upload_folder(repo_id=name, folder_path=folder)}"
    except Exception as error:  # of any kind: the weights are safe on disk
        return f"upload failed ({error}); upload it later with `hf upload {name} {folder}`"
