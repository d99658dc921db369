"""Reward functions that are given as functions, not as files: how they travel, and what they may be called with."""

from __future__ import annotations

import inspect
import pickle
import sys
import sysconfig
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.errors import RewardError

__all__ = ["adapt_by_name", "pack_function", "unpack_function"]

Scorer = Callable[..., Any]

OFFERED = ("prompt", "response", "ground_truth", "data_source", "extra_info")
"""What a function may ask for by these names of its parameters."""

_KEPT = "prompts are kept only if asked for; set data.return_raw_input_ids=true"
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def pack_function(function: Scorer) -> bytes:
    """The function by value, with what it refers to: it need not be importable where it goes."""
    import cloudpickle

    module = sys.modules.get(getattr(function, "__module__", None) or "")
    by_value = module is not None and module.__name__ != "__main__" and not _is_installed(module)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    except Exception as error:
        raise RewardError(
            f"{_name(function)}: cannot be sent to the processes that score: {error}; what it refers to must be "
            "plain data or importable; open files, models and locks inside of it"
        ) from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def unpack_function(function: bytes | Scorer) -> Scorer:
    """The inverse of `pack_function`, in the process that scores; a function that never left is itself."""
    return pickle.loads(function) if isinstance(function, bytes) else function


def adapt_by_name(scorer: Scorer, where: str, kwargs: Collection[str] = (), *, prompts: bool = True) -> Scorer | None:
    """A function of `prompt`, `response` and more (`OFFERED`), as one of the four arguments of `compute_score`.

    None: it does not name its parameters so, but for those that are in `kwargs`, and is left to itself. `prompts` says
    whether they are kept for it.

    >>> called_by_name(lambda prompt, response: len(response), "mine")("", "abc", None, {"raw_prompt": "Say abc"})
    3
    """
    try:
        parameters = inspect.signature(scorer).parameters
    except (TypeError, ValueError):  # some builtins tell no signature
        return None
    asked = [name for name, one in parameters.items() if one.default is one.empty and one.kind not in _ANY]
    unknown = [name for name in asked if name not in (*OFFERED, *kwargs)]
    if "response" not in parameters or unknown:
        return None
    wanted = [name for name in OFFERED if name in parameters]
    if "prompt" in wanted and not prompts:
        raise RewardError(f"{where}: asks for `prompt`: {_KEPT}")

    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **more: Any) -> Any:
        told = {
            "response": solution_str,
            "ground_truth": ground_truth,
            "data_source": data_source,
            "extra_info": extra_info,
        }
        if "prompt" in wanted:
            told["prompt"] = _text(extra_info, where)
        return scorer(**{name: told[name] for name in wanted}, **more)

    async def score_async(*args: Any, **kwargs: Any) -> Any:
        return await score(*args, **kwargs)

    return score_async if inspect.iscoroutinefunction(scorer) else score


def _text(extra_info: Mapping[str, Any] | None, where: str) -> str:
    """The prompt as its author wrote it: text, or what the last message says."""
    raw = (extra_info or {}).get("raw_prompt")
    if raw is None:
        raise RewardError(f"{where}: asks for `prompt`, and this row has none: {_KEPT}")
    return raw if isinstance(raw, str) else str(raw[-1]["content"])


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    installed = [Path(path).resolve() for path in set(sysconfig.get_paths().values())]
    return file is None or any(Path(file).resolve().is_relative_to(path) for path in installed)


def _name(function: Scorer) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
