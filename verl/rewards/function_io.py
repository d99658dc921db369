"""Reward functions given as Python objects: sending them to other processes, and calling them by parameter name."""

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

Scorer = Callable[..., Any]

PARAMETERS = ("prompt", "response", "ground_truth", "data_source", "extra_info")
"""The names of parameters that a function may take, in any order."""

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def pack_function(function: Scorer) -> bytes:
    """Pickle a function by value, with all it refers to: it need not be importable where it is loaded."""
    import cloudpickle

    module = sys.modules.get(getattr(function, "__module__", None) or "")
    by_value = module is not None and module.__name__ != "__main__" and not _is_installed(module)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    except Exception as error:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise RewardError(
            f"{name}: cannot be sent to the reward workers: {error}. It may refer only to plain data and importable "
            "objects; open files, models and locks inside the function"
        ) from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def unpack_function(function: bytes | Scorer) -> Scorer:
    """Invert `pack_function`; return a function that was not packed as it is."""
    return pickle.loads(function) if isinstance(function, bytes) else function


def adapt_by_name(scorer: Scorer, where: str, kwargs: Collection[str] = ()) -> Scorer | None:
    """Wrap a function of `prompt`, `response` and more (`PARAMETERS`) to take the arguments of `compute_score`.

    Returns None if it does not take `response`, or requires a parameter that is neither known nor in `kwargs`.

    >>> adapt_by_name(lambda prompt, response: len(response), "mine")("", "abc", None, {"raw_prompt": "Say abc"})
    3
    """
    try:
        parameters = inspect.signature(scorer).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return None
    required = [name for name, one in parameters.items() if one.default is one.empty and one.kind not in _VARIADIC]
    if "response" not in parameters or any(name not in (*PARAMETERS, *kwargs) for name in required):
        return None
    wanted = [name for name in PARAMETERS if name in parameters]

    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **more: Any) -> Any:
        values = {
            "response": solution_str,
            "ground_truth": ground_truth,
            "data_source": data_source,
            "extra_info": extra_info,
        }
        if "prompt" in wanted:
            values["prompt"] = _prompt_text(extra_info, where)
        return scorer(**{name: values[name] for name in wanted}, **more)

    async def score_async(*args: Any, **kwargs: Any) -> Any:
        return await score(*args, **kwargs)

    return score_async if inspect.iscoroutinefunction(scorer) else score


def _prompt_text(extra_info: Mapping[str, Any] | None, where: str) -> str:
    """Return the prompt as text; of a conversation, its last message."""
    raw = (extra_info or {}).get("raw_prompt")
    if raw is None:
        raise RewardError(f"{where}: takes `prompt`, but the row has no prompt (extra_info['raw_prompt'])")
    return raw if isinstance(raw, str) else str(raw[-1]["content"])


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    installed = [Path(path).resolve() for path in set(sysconfig.get_paths().values())]
    return file is None or any(Path(file).resolve().is_relative_to(path) for path in installed)
