"""From a name in the settings to the function that it is: one of ours, or the user's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

__all__ = ["load_function"]

F = TypeVar("F", bound=Callable[..., Any])


def load_function(name: str, known: Mapping[str, F], setting: str) -> F:
    """The function of that name among `known`, or what `package.module:function` names.

    >>> load_function("math:sqrt", {}, "algorithm.adv_estimator")
    <built-in function sqrt>
    """
    if name in known:
        return known[name]
    if ":" not in name:
        raise ValueError(f"{setting}: {name!r} is not one of {', '.join(known)}, nor package.module:function")
    return _own(name, setting)  # type: ignore[return-value]


@cache
def _own(name: str, setting: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{setting}: {name!r} cannot be imported: {error}; it must be package.module:function, importable where "
            "the run starts (put its folder on PYTHONPATH)"
        ) from error
    if not callable(found):
        raise ValueError(f"{setting}: {name!r} is {type(found).__name__}, it must be a function")
    return found
