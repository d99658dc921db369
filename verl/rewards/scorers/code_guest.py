"""The programs inside the sandboxes of the code scorer: `serve` runs the solution, `judge` runs the tests.

Sent as source, so it imports only the standard library. The solution never sees a test: it gets requests for values,
and its replies are read as plain values. The tests run in a second sandbox, in which every name of the solution is a
`Remote` that sends those requests. So a solution that patches, exits or overrides equality affects only itself.
"""

from __future__ import annotations

import builtins
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import IO, Any

_MAX_ITEMS = 10_000
_SCALARS: Any = ((int, int.__int__), (float, float.__float__), (str, str.__str__))
_COMMON_IMPORTS = (
    "import bisect, collections, functools, heapq, itertools, math, re, string\nfrom collections import *\n"
)
_COMMON_IMPORTS += "from typing import *\n"  # solutions often rely on these


def encode(value: Any, refer: Callable[[Any], str | int]) -> Any:
    """Return a plain value as JSON that keeps tuples, sets, bytes and keys; other values as the id from `refer`."""
    if value is None or isinstance(value, bool):
        return value
    for kind, read in _SCALARS:
        if isinstance(value, kind):
            return read(value)  # also of a subclass, whose methods are not called
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, refer) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key, refer), encode(item, refer)] for key, item in value.items()]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), refer)
    if isinstance(value, Iterator | range):
        return {"iterator": [encode(item, refer) for item in itertools.islice(value, _MAX_ITEMS)]}
    return {"object": refer(value)}


def decode(encoded: Any, remote: Callable[[str | int], Any] | None = None) -> Any:
    """Return the value that `encode` wrote. Only plain values can result, even of hostile text."""
    if not isinstance(encoded, dict):
        return encoded
    ((kind, content),) = encoded.items()
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {decode(key, remote): decode(item, remote) for key, item in content}
    if kind == "object" and remote is not None:
        return remote(content)
    items = [decode(item, remote) for item in content]
    types: Any = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter}
    return types[kind](items)


def format_request(
    target: str | int, attribute: str | None, args: tuple[Any, ...] | None, kwargs: dict[str, Any]
) -> str:
    """Return one line that requests an attribute of a name or object or, with `args`, the result of a call."""
    call = {} if args is None else {"args": encode(list(args), _get_target), "kwargs": encode(kwargs, _get_target)}
    return json.dumps({"target": target, "attribute": attribute, **call})


def _get_target(value: Any) -> str | int:
    """Objects of the solution may be passed back to it."""
    if not isinstance(value, Remote):
        raise TypeError(f"a {type(value).__name__} is not a plain value")
    return value._target


def serve() -> None:
    """Load the solution, then write one line per request. What the solution prints is discarded."""
    requests, replies = _take_over(0, "r"), _take_over(1, "w")
    module = ModuleType("solution")
    sys.modules["solution"] = module
    solution = vars(module)
    exec(_COMMON_IMPORTS, solution)
    with open("solution.py") as file:
        exec(compile(file.read(), "solution.py", "exec"), solution)
    objects: list[Any] = []

    def refer(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    for line in requests:
        try:
            replies.write(json.dumps({"value": encode(_evaluate(json.loads(line), solution, objects), refer)}) + "\n")
        except Exception as error:  # noqa: BLE001 - raised by the solution: sent to the tests
            replies.write(json.dumps({"error": type(error).__name__, "message": str(error)[:500]}) + "\n")
        replies.flush()


def _evaluate(request: dict[str, Any], solution: dict[str, Any], objects: list[Any]) -> Any:
    def find(target: str | int) -> Any:
        if isinstance(target, int):
            return objects[target]
        if target in solution or "Solution" not in solution:
            return solution[target]
        return getattr(solution["Solution"](), target)  # a method, in the style of LeetCode

    value = find(request["target"])
    if request["attribute"] is not None:
        value = getattr(value, request["attribute"])
    return value(*decode(request["args"], find), **decode(request["kwargs"], find)) if "args" in request else value


class RemoteError(Exception):
    """An exception of the solution that is not a built-in one."""


class _SolutionExitedError(BaseException):
    """The process of the solution has ended. Not an Exception, so that no test catches it."""


class _InvalidTestError(BaseException):
    """The test passes a value to the solution that is not plain."""


class Remote:
    """A name or object of the solution: it can be called and has attributes, but cannot be compared."""

    def __init__(self, ask: Callable[..., Any], target: str | int) -> None:
        self._ask, self._target = ask, target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask(self._target, None, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask(self._target, name, None, {})

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("the solution returned an object where the test compares a value")

    __eq__ = __ne__ = __bool__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def judge() -> None:
    """Run the tests of `tests.json`, and write `pass`, `fail` or `invalid` for each until the solution exits."""
    replies, requests, verdicts = _take_over(0, "r"), _take_over(1, "w"), _take_over(2, "w")

    def ask(target: str | int, attribute: str | None, args: tuple[Any, ...] | None, kwargs: dict[str, Any]) -> Any:
        try:
            line = format_request(target, attribute, args, kwargs)
        except TypeError as error:
            raise _InvalidTestError(str(error)) from None
        try:
            requests.write(line + "\n")
            requests.flush()
            reply = json.loads(replies.readline())
        except (OSError, ValueError):
            raise _SolutionExitedError from None
        if "error" in reply:
            raise _make_exception(reply["error"], reply["message"])
        return decode(reply["value"], lambda index: Remote(ask, index))

    with open("tests.json") as file:
        task = json.load(file)
    for test in task["tests"]:
        namespace = {"__name__": "tests", **{name: Remote(ask, name) for name in task["names"]}}
        try:
            exec(compile(task["setup"] + "\n" + test, "tests.py", "exec"), namespace)
            verdict = "pass"
        except _SolutionExitedError:
            return
        except _InvalidTestError as error:
            verdict = f"invalid: {error}"
        except BaseException as error:  # noqa: BLE001 - a failed assertion, or the effect of a wrong value
            verdict = f"fail: {type(error).__name__}"
        verdicts.write(verdict + "\n")
        verdicts.flush()


def _make_exception(name: str, message: str) -> Exception:
    """Return the exception to raise for one of the solution. A StopIteration would end a loop of the test early."""
    kind: Any = getattr(builtins, str(name), None)
    is_exception = isinstance(kind, type) and issubclass(kind, Exception)
    if is_exception and not issubclass(kind, StopIteration | StopAsyncIteration):
        try:
            return kind(message)
        except TypeError:
            pass
    return RemoteError(f"{name}: {message}")


def _take_over(fd: int, mode: str) -> IO[str]:
    """Return the file of a descriptor, and redirect its number to /dev/null, so that prints do not reach the file."""
    channel = os.fdopen(os.dup(fd), mode)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, fd)
    os.close(null)
    return channel
