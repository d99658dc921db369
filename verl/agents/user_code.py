"""Calls coroutines and blocking methods of the user so that none of them can stall the episodes of a worker.

Coroutines run on the worker's event loop. Methods of objects with state run in this process, each call in a thread of
its own, which is abandoned at its timeout. Tool functions that block run in processes (`tools/processes.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from verl.agents.errors import ToolFailureError

T = TypeVar("T")
_log = logging.getLogger(__name__)
SETTING = "actor_rollout_ref.rollout.multi_turn.tool_deadline_s"


async def run_with_timeout(work: Awaitable[T], timeout_s: float, name: str) -> T:
    """Return the result, or raise `ToolFailureError` after the timeout, even if the work ignores its cancellation."""
    task = asyncio.ensure_future(survive_exit(work))
    try:
        done, _ = await asyncio.wait([task], timeout=timeout_s)
    finally:
        task.cancel()  # no effect once it is done
    if not done:
        raise ToolFailureError(f"{name} did not return within {timeout_s:g} s ({SETTING})")
    return task.result()


async def survive_exit(work: Awaitable[T]) -> T:
    """Return the result. Convert SystemExit to RuntimeError: an event loop would re-raise it and end the worker."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r})") from error


async def close_quietly(method: Callable[..., Any], *args: Any, timeout_s: float, **kwargs: Any) -> None:
    """Call a method that releases something. Log its failure, which does not change the result of the episode."""
    name = getattr(method, "__qualname__", "close")
    try:
        await run_with_timeout(call_method(method, *args, **kwargs), timeout_s, name)
    except Exception as error:  # noqa: BLE001 - the user's code
        _log.warning("%s failed: %s: %s", name, type(error).__name__, error)


async def call_method(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method, which may be a coroutine function, return an awaitable, or block."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    result = await run_in_thread(lambda: method(*args, **kwargs))
    return await result if inspect.isawaitable(result) else result


def run_in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Call a function in a new thread. Unlike threads of an executor, a thread that never ends delays no other call."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # cancelling the call does not end the thread

    def run() -> None:
        try:
            result.set_result(function())
        except SystemExit as error:
            result.set_exception(RuntimeError(f"sys.exit({error.code!r})"))
        except StopIteration as error:  # asyncio's futures do not accept it
            result.set_exception(RuntimeError(repr(error)))
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name="agent-call").start()
    return asyncio.wrap_future(result)
