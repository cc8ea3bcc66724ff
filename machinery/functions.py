"""Python functions that users name on the command line, as in `--reward_fn my_reward.py:score`."""

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from machinery.cli import InputError, RunError


@functools.cache
def load_function(name: str) -> Callable:
    """Import `module:function` or `path.py:function`. Raises `InputError` if that fails."""
    source, _, attribute = name.rpartition(":")
    if not source:
        raise InputError(f"{name!r} has no colon; write module:function or path.py:function")
    try:
        module = import_file(source) if source.endswith(".py") else import_module(source)
    except FileNotFoundError as error:
        raise InputError(f"{name!r}: there is no file {error.filename}") from error
    except (Exception, SystemExit) as error:  # anything that the user's code raises
        if isinstance(error, ModuleNotFoundError) and error.name != source:
            raise InputError(f"{name!r} needs the package {error.name}; install it") from error
        traceback.print_exception(error)
        raise InputError(f"{name!r} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise InputError(f"{name!r}: {source} has no function {attribute}")
    return function


def signature_of(function: Callable) -> inspect.Signature:
    """The signature of a reward function; (queries, responses) for builtins that have none."""
    try:
        return inspect.signature(function)
    except ValueError:
        return inspect.signature(lambda queries, responses: None)


def names_taken(function: Callable, names: Iterable[str]) -> list[str]:
    """Those of `names` that a function of (queries, responses) takes as further arguments."""
    signature, taken = signature_of(function), []
    for name in names:
        with suppress(TypeError):
            signature.bind_partial(None, None, **{name: None})
            taken.append(name)
    return taken


def import_module(name: str) -> Any:
    """Import a module from the current folder or the environment."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def import_file(path: str) -> Any:
    """Import a Python file under its path as the module name."""
    spec: Any = importlib.util.spec_from_file_location(path, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


def call_function(function: Callable, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a user's function. If it fails, print its traceback and raise `RunError`."""
    try:
        return function(*args, **kwargs)
    except (Exception, SystemExit) as error:  # anything that the user's code raises
        traceback.print_exception(error)
        raise RunError(f"{name} raised {type(error).__name__}: {error}") from error
