"""What runs inside the sandboxes of the code scorer: beside the answer (`serve`), and beside the tests (`judge`).

Sent as text, so it imports the standard library alone. The answer never meets a test: it is asked for values, and what
leaves its sandbox is text that is read as plain values. The tests run in a second sandbox, in which every name of the
answer is a `Remote` that asks for those values. An answer that patches, exits or overrides equality does so alone.
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

_MOST_ITEMS = 10_000
_NUMBERS_AND_TEXT: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
)
_USUAL = "import bisect, collections, functools, heapq, itertools, math, re, string\nfrom collections import *\n"
_USUAL += "from typing import *\n"  # answers in the form of a function often take these for granted


def encode(value: Any, refer: Callable[[Any], str | int]) -> Any:
    """A plain value as JSON that keeps tuples, sets, bytes and keys; any other by the mark that `refer` gives it."""
    if value is None or isinstance(value, bool):
        return value
    for kind, read in _NUMBERS_AND_TEXT:
        if isinstance(value, kind):
            return read(value)  # of a subclass, the value and none of its ways
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
        return {"iterator": [encode(item, refer) for item in itertools.islice(value, _MOST_ITEMS)]}
    return {"object": refer(value)}


def decode(told: Any, remote: Callable[[str | int], Any] | None = None) -> Any:
    """The value that `encode` told. Whoever wrote `told`, plain values are all that can come of it."""
    if not isinstance(told, dict):
        return told
    ((kind, content),) = told.items()
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {decode(key, remote): decode(item, remote) for key, item in content}
    if kind == "object" and remote is not None:
        return remote(content)
    items = [decode(item, remote) for item in content]
    make: dict[str, Callable[[list[Any]], Any]] = {
        "list": list,
        "tuple": tuple,
        "set": set,
        "frozenset": frozenset,
        "iterator": iter,
    }
    return make[kind](items)


def request(target: str | int, attribute: str | None, args: tuple[Any, ...] | None, kwargs: dict[str, Any]) -> str:
    """One line that asks for an attribute of a name or an object, or, with `args`, for the value of a call."""
    told = {} if args is None else {"args": encode(list(args), _mark), "kwargs": encode(kwargs, _mark)}
    return json.dumps({"target": target, "attribute": attribute, **told})


def _mark(value: Any) -> str | int:
    """What the answer itself gave may be handed back to it."""
    if not isinstance(value, Remote):
        raise TypeError(f"a {type(value).__name__} is no plain value")
    return value._target


def serve() -> None:
    """Loads the answer, then reads requests and writes a line for each. What the answer prints goes nowhere."""
    requests, replies = _channel(0, "r"), _channel(1, "w")
    module = ModuleType("answer")
    sys.modules["answer"] = module
    answer = vars(module)
    exec(_USUAL, answer)
    with open("answer.py") as file:
        exec(compile(file.read(), "answer.py", "exec"), answer)
    objects: list[Any] = []

    def refer(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    for line in requests:
        try:
            replies.write(json.dumps({"value": encode(_do(json.loads(line), answer, objects), refer)}) + "\n")
        except Exception as error:  # noqa: BLE001 - of the answer's: told to whoever asked
            replies.write(json.dumps({"error": type(error).__name__, "message": str(error)[:500]}) + "\n")
        replies.flush()


def _do(asked: dict[str, Any], answer: dict[str, Any], objects: list[Any]) -> Any:
    def find(target: str | int) -> Any:
        if isinstance(target, int):
            return objects[target]
        if target in answer or "Solution" not in answer:
            return answer[target]
        return getattr(answer["Solution"](), target)  # a method, as on sites where an answer is a class

    found = find(asked["target"])
    if asked["attribute"] is not None:
        found = getattr(found, asked["attribute"])
    return found(*decode(asked["args"], find), **decode(asked["kwargs"], find)) if "args" in asked else found


class RemoteError(Exception):
    """The answer raised something that is no plain exception of Python's."""


class _GoneError(BaseException):
    """The answer's process has ended: no `except Exception` of a test mistakes that for an answer."""


class _CannotAskError(BaseException):
    """The test hands the answer something that is no plain value."""


class Remote:
    """A name or an object of the answer: can be called, has attributes, and is equal to nothing, not even unequal."""

    def __init__(self, ask: Callable[..., Any], target: str | int) -> None:
        self._ask, self._target = ask, target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask(self._target, None, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask(self._target, name, None, {})

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("the answer gave an object where the test compares a value")

    __eq__ = __ne__ = __bool__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def judge() -> None:
    """Runs the tests of `tests.json` and writes `pass`, `fail` or `cannot ask` for each, as far as it comes."""
    replies, requests, verdicts = _channel(0, "r"), _channel(1, "w"), _channel(2, "w")

    def ask(target: str | int, attribute: str | None, args: tuple[Any, ...] | None, kwargs: dict[str, Any]) -> Any:
        try:
            line = request(target, attribute, args, kwargs)
        except TypeError as error:
            raise _CannotAskError(str(error)) from None
        try:
            requests.write(line + "\n")
            requests.flush()
            reply = json.loads(replies.readline())
        except (OSError, ValueError):
            raise _GoneError from None
        if "error" in reply:
            raise _as_raised(reply["error"], reply["message"])
        return decode(reply["value"], lambda number: Remote(ask, number))

    with open("tests.json") as file:
        told = json.load(file)
    for test in told["tests"]:
        space = {"__name__": "tests", **{name: Remote(ask, name) for name in told["names"]}}
        try:
            exec(compile(told["setup"] + "\n" + test, "tests.py", "exec"), space)
            verdict = "pass"
        except _GoneError:
            return
        except _CannotAskError as error:
            verdict = f"cannot ask: {error}"
        except BaseException as error:  # noqa: BLE001 - a failed assertion, or what a wrong value led to
            verdict = f"fail: {type(error).__name__}"
        verdicts.write(verdict + "\n")
        verdicts.flush()


def _as_raised(name: str, message: str) -> Exception:
    """The exception to raise for one of the answer's. StopIteration would end a test's loop as if it had passed."""
    kind = getattr(builtins, str(name), None)
    if (
        isinstance(kind, type)
        and issubclass(kind, Exception)
        and not issubclass(kind, StopIteration | StopAsyncIteration)
    ):
        try:
            return kind(message)
        except TypeError:
            pass
    return RemoteError(f"{name}: {message}")


def _channel(fd: int, mode: str) -> IO[str]:
    """The descriptor as a channel of its own; its number then leads nowhere, so that nothing printed gets in."""
    channel = os.fdopen(os.dup(fd), mode)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, fd)
    os.close(nowhere)
    return channel
