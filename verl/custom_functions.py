"""From a name in the settings to the function that it is: one of ours, or the user's own."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

__all__ = ["load_function"]

F = TypeVar("F", bound=Callable[..., Any])


def load_function(name: str, known: Mapping[str, F], setting: str) -> F:
    """The function of that name among `known`, or what `package.module:function` or `file.py:function` names.

    >>> load_function("math:sqrt", {}, "algorithm.adv_estimator")
    <built-in function sqrt>
    """
    if name in known:
        return known[name]
    if ":" not in name:
        ours = f"one of {', '.join(known)}, nor " if known else ""
        raise ValueError(f"{setting}: {name!r} is not {ours}package.module:function")
    return _own(name, setting)  # type: ignore[return-value]


@cache
def _own(name: str, setting: str) -> Callable[..., Any]:
    module, _, function = name.rpartition(":")
    try:
        found = getattr(_from_file(module) if module.endswith(".py") else importlib.import_module(module), function)
    except (ImportError, AttributeError, OSError) as error:
        raise ValueError(
            f"{setting}: {name!r} cannot be imported: {error}; it must be package.module:function, importable where "
            "the run starts (put its folder on PYTHONPATH)"
        ) from error
    if not callable(found):
        raise ValueError(f"{setting}: {name!r} is {type(found).__name__}, it must be a function")
    return found


def _from_file(path: str) -> ModuleType:
    file = Path(path).expanduser()
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
