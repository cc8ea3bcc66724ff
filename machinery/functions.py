"""Python functions that users name on the command line, as in `--reward_fn my_reward.py:score`."""

import functools
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any


@functools.cache
def load_function(name: str) -> Callable:
    """Import `module:function` or `path.py:function`, once."""
    source, _, attribute = name.rpartition(":")
    if source.endswith(".py"):
        return getattr(import_file(source), attribute)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return pkgutil.resolve_name(name)


def import_file(path: str) -> Any:
    """Import a Python file under its path as the module name."""
    spec: Any = importlib.util.spec_from_file_location(path, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


def names_taken(function: Callable, names: Iterable[str]) -> list[str]:
    """Those of `names` that a function of (queries, responses) takes as further arguments."""
    signature, taken = inspect.signature(function), []
    for name in names:
        with suppress(TypeError):
            signature.bind_partial(None, None, **{name: None})
            taken.append(name)
    return taken
