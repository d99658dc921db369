"""Runs tools and environments of the user so that none of them can stall the episodes of a worker.

Coroutines run on the worker's event loop. Other functions run in processes, which are killed at their deadline. Methods
of objects with a state stay in this process, each call in a thread of its own, which is left behind at its deadline.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
from pebble import ProcessExpired, ProcessPool

from verl.agents.errors import ToolError, ToolFailureError, classify_error
from verl.custom_functions import FILE_MODULE, load_file

T = TypeVar("T")
_log = logging.getLogger(__name__)
SETTING = "actor_rollout_ref.rollout.multi_turn.tool_deadline_s"
_PROCESSES = 4  # per worker
_PR_SET_PDEATHSIG = 1


async def with_deadline(work: Awaitable[T], deadline_s: float, name: str) -> T:
    """Return the result, or raise `ToolFailureError` at the deadline, even if the work ignores being canceled."""
    task = asyncio.ensure_future(survive_exit(work))
    try:
        done, _ = await asyncio.wait([task], timeout=deadline_s)
    finally:
        task.cancel()  # no effect once it is done
    if not done:
        raise ToolFailureError(f"{name} did not return within {deadline_s:g} s ({SETTING})")
    return task.result()


async def survive_exit(work: Awaitable[T]) -> T:
    """Return the result. Of a coroutine that calls `sys.exit`, an event loop would pass it on and end the worker."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r})") from error


async def close_quietly(method: Callable[..., Any], *args: Any, deadline_s: float, **kwargs: Any) -> None:
    """Call a method that ends something. What the episode has achieved does not depend on it."""
    name = getattr(method, "__qualname__", "close")
    try:
        await with_deadline(call_method(method, *args, **kwargs), deadline_s, name)
    except Exception as error:  # noqa: BLE001 - the user's code
        _log.warning("%s failed: %s: %s", name, type(error).__name__, error)


async def call_method(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method that may be a coroutine function, return an awaitable, or block."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    result = await run_in_thread(lambda: method(*args, **kwargs))
    return await result if inspect.isawaitable(result) else result


def run_in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Call a function in a new thread. Unlike those of an executor, one that never ends delays nothing else."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = function()
        except SystemExit as error:
            failure = RuntimeError(f"sys.exit({error.code!r})")
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            # A future does not accept StopIteration.
            failure = RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:  # the loop has been closed meanwhile
            return

    threading.Thread(target=run, daemon=True, name="agent-call").start()
    return future


async def call_in_process(function: Callable[..., Any], arguments: Mapping[str, Any], deadline_s: float) -> Any:
    """Return what a function returns in another process, which is replaced if the function hangs or ends it.

    The deadline does not count waiting for a free process.
    """
    future = _open_pool().schedule(_call, args=[_locate(function), dict(arguments)], timeout=deadline_s)
    name = getattr(function, "__name__", "tool")
    try:
        result, error = await asyncio.wrap_future(future)
    except TimeoutError:
        raise ToolFailureError(f"{name} did not return within {deadline_s:g} s ({SETTING})") from None
    except ProcessExpired as expired:
        raise ToolFailureError(f"{name} ended its process (exit code {expired.exitcode})") from None
    if error is not None:
        raise error
    return result


@cache
def _open_pool() -> ProcessPool:
    """Return the processes of this worker, which end with it."""
    context = multiprocessing.get_context("spawn")
    return ProcessPool(_PROCESSES, initializer=_end_with_parent, initargs=[os.getpid()], context=context)


def close_processes() -> None:
    """End the processes, if any were started; the next call starts new ones."""
    if _open_pool.cache_info().currsize:
        pool = _open_pool()
        _open_pool.cache_clear()
        pool.stop()
        pool.join()


def _locate(function: Callable[..., Any]) -> tuple[str, str] | bytes:
    """Return where another process finds a function: file or module, and name; or the function itself."""
    module = sys.modules.get(function.__module__)
    found = getattr(module, function.__name__, None)
    is_importable = function.__module__ not in ("__main__", "__mp_main__")
    if module is None or not is_importable or inspect.unwrap(found or len) is not function:
        payload: bytes = cloudpickle.dumps(function)
        return payload
    is_file = module.__name__.startswith(FILE_MODULE)
    return str(module.__file__) if is_file else module.__name__, function.__name__


def _call(location: tuple[str, str] | bytes, arguments: dict[str, Any]) -> tuple[Any, Exception | None]:
    """Call a function in a tool process; return its result, or its error as one that can always be pickled."""
    try:
        return _find(location)(**arguments), None
    except SystemExit as error:
        return None, ToolError(f"sys.exit({error.code!r})")
    except Exception as error:  # noqa: BLE001 - the user's code
        is_mistake = isinstance(found := classify_error(error), ToolError)
        return None, ToolError(str(found)) if is_mistake else ToolFailureError(str(found))


def _find(location: tuple[str, str] | bytes) -> Callable[..., Any]:
    if isinstance(location, bytes):
        function: Callable[..., Any] = cloudpickle.loads(location)
        return function
    path, name = location
    module = _loaded.get(path)
    if module is None:
        module = _loaded[path] = load_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    return inspect.unwrap(getattr(module, name))


_loaded: dict[str, Any] = {}


def _end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, whatever it is doing."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
