"""Functions that settings name: built-in ones, or the user's."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def load_function(name: str, known: Mapping[str, F], setting: str) -> F:
    """Return the function `name` of `known`, or import `package.module:function` or `file.py:function`.

    >>> load_function("math:sqrt", {}, "algorithm.adv_estimator")
    <built-in function sqrt>
    """
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
        module = _load_file(path) if path.endswith(".py") else importlib.import_module(path)
        function = getattr(module, attribute)
    except (ImportError, AttributeError, OSError) as error:
        raise ValueError(
            f"{setting}: {name!r} cannot be imported: {error}; it must be package.module:function, importable where "
            "the run starts (add its folder to PYTHONPATH)"
        ) from error
    if not callable(function):
        raise ValueError(f"{setting}: {name!r} is {type(function).__name__}, it must be a function")
    return function


def _load_file(path: str) -> ModuleType:
    file = Path(path).expanduser()
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
