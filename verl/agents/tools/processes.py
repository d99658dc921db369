"""Runs blocking tools in worker processes, which are killed when a call exceeds its timeout."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

from verl.agents.errors import ToolError, ToolFailureError, classify_error
from verl.agents.tools.results import ToolResult, to_result, truncate_text
from verl.agents.user_code import SETTING
from verl.custom_functions import FILE_MODULE, load_file
from verl.errors import RewardError
from verl.rewards.pool.process_pool import ProcessPool
from verl.types import FailureKind

_PROCESSES = 4  # per episode worker
_TIMEOUT_S = 300.0  # every call has a timeout of its own
_MAX_CHARACTERS = 1 << 20  # of a result: far more than a model reads, and within the limit of the pool's messages

Location = tuple[str, str] | bytes
ToolReply = ToolResult | ToolError | ToolFailureError


class ToolRequest(NamedTuple):
    """One call of a tool function: where the function is found, and its arguments."""

    name: str
    location: Location
    arguments: dict[str, Any]


async def call_in_process(function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float) -> ToolResult:
    """Return the result of a function in another process, which is replaced if the function hangs or ends it.

    Waiting for a free process does not count as time of the call. A call is never made twice.
    """
    request = ToolRequest(getattr(function, "__name__", "tool"), _locate(function), dict(arguments))
    try:
        reply = await asyncio.wrap_future(open_pool().submit(request, timeout_s))
    except RewardError as error:
        raise ToolFailureError(str(error)) from None
    if isinstance(reply, ToolResult):
        return reply
    raise reply


@cache
def open_pool() -> ProcessPool[ToolRequest, ToolReply]:
    """Return the processes of this worker, which end with the worker."""
    pool = ProcessPool(ToolJob(), _PROCESSES, _TIMEOUT_S)
    pool.open()
    return pool


class ToolJob:
    """Tool functions, as a job of a process pool."""

    label = "tools"
    batch_size = None
    is_repeatable = False  # a call may have had its effect before the process was killed

    def load(self) -> ToolService:
        return ToolService()

    def fail(self, kind: FailureKind, cause: str, request: ToolRequest) -> ToolReply:
        reason, newline, details = cause.partition("\n")
        hint = f" ({SETTING})" if kind == "timeout" else ""
        return ToolFailureError(f"{request.name}: {reason}{hint}{newline}{details}")

    def encode(self, result: ToolReply) -> dict[str, Any]:
        if isinstance(result, ToolResult):
            return {"text": truncate_text(result.text, _MAX_CHARACTERS, "middle"), "reward": result.reward}
        key = "mistake" if isinstance(result, ToolError) else "failure"
        return {key: truncate_text(str(result), _MAX_CHARACTERS, "middle")}

    def decode(self, message: dict[str, Any]) -> ToolReply:
        if "mistake" in message:
            return ToolError(message["mistake"])
        if "failure" in message:
            return ToolFailureError(message["failure"])
        return ToolResult(message["text"], message["reward"])


class ToolService:
    """Calls tool functions in a worker process. A module is imported at the first call of one of its functions."""

    is_async = is_batched = False

    def __init__(self) -> None:
        self.warn: Callable[[str], None] = print
        self._modules: dict[str, Any] = {}

    def call(self, requests: Sequence[ToolRequest]) -> Any:
        [request] = requests
        return self._find(request.location)(**request.arguments)

    def to_results(self, returned: Any, requests: Sequence[ToolRequest]) -> list[ToolReply]:
        return [to_result(returned)]

    def to_failures(self, error: BaseException, requests: Sequence[ToolRequest]) -> list[ToolReply]:
        if isinstance(error, SystemExit):
            return [ToolError(f"sys.exit({error.code!r})")]
        return [classify_error(error)]

    def _find(self, location: Location) -> Callable[..., Any]:
        if isinstance(location, bytes):
            function: Callable[..., Any] = cloudpickle.loads(location)
            return function
        path, name = location
        if path not in self._modules:
            self._modules[path] = load_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
        return inspect.unwrap(getattr(self._modules[path], name))


def _locate(function: Callable[..., Any]) -> Location:
    """Return where another process finds a function: file or module, and name; or the function itself, pickled."""
    module = sys.modules.get(function.__module__)
    found = getattr(module, function.__name__, None)
    is_importable = function.__module__ not in ("__main__", "__mp_main__")
    if module is None or not is_importable or inspect.unwrap(found or len) is not function:
        payload: bytes = cloudpickle.dumps(function)
        return payload
    is_file = module.__name__.startswith(FILE_MODULE)
    return str(module.__file__) if is_file else module.__name__, function.__name__
