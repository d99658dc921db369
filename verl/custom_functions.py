"""Functions that settings name: built-in ones, or the user's."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
FILE_MODULE = "verl_custom_"  # how the names of modules begin that were loaded from a file


def load_function(name: str, known: Mapping[str, F], setting: str) -> F:
    """Return the function `name` of `known`, or import `package.module:function` or `file.py:function`."""
    if name in known:
        return known[name]
    if ":" not in name:
        names = f"one of {', '.join(known)}, nor " if known else ""
        raise ValueError(f"{setting}: {name!r} is not {names}package.module:function")
    return _import_function(name, setting)  # type: ignore[return-value]


@cache
def _import_function(name: str, setting: str) -> Callable[..., Any]:
    path, _, attribute = name.rpartition(":")
    try:
        module = load_file(Path(path).expanduser()) if path.endswith(".py") else importlib.import_module(path)
        function = getattr(module, attribute)
    except (ImportError, AttributeError, OSError) as error:
        raise ValueError(
            f"{setting}: {name!r} cannot be imported: {error}; it must be package.module:function, importable where "
            "the run starts (add its folder to PYTHONPATH)"
        ) from error
    if not callable(function):
        raise ValueError(f"{setting}: {name!r} is {type(function).__name__}, it must be a function")
    return function


def load_file(file: Path) -> ModuleType:
    """Import a Python file under a unique name: one called `math.py` shadows nothing."""
    name = f"{FILE_MODULE}{hashlib.sha1(str(file.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes can be pickled
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
