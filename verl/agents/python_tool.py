"""A Python interpreter as a tool: programs of the model run in the sandbox, each in a fresh one.

Import it in the file of `multi_turn.function_tool_path`, next to your own tools, or pass it to a trainer. Programs run
where and how `reward.sandbox.*` says. A machine runs at most `max_programs` at once, of all workers and runs of a user.
Waiting does not count as time of the call or the episode.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from verl.agents.clock import stop_clocks
from verl.agents.errors import ToolError, ToolFailureError
from verl.agents.tools.function_tools import tool
from verl.config.schema.reward import SandboxConfig
from verl.errors import RewardError
from verl.private_files import get_user_folder, open_private_file
from verl.rewards.sandbox import sandbox, sandbox_fusion
from verl.rewards.scorers.code import check_requirements

_MAX_OUTPUT = 64 << 10  # bytes; a result is truncated to much less
_PROBE = "print(6 * 7)"


@tool
async def python(code: str) -> str:
    """Run a Python program and return what it prints. Nothing is kept between programs.

    Args:
        code: The program. It must print its results.
    """
    from verl.agents import python_tool  # this module, also where the function was pickled by value

    return await python_tool.get_interpreter().run(code)


class Interpreter:
    """Runs programs as the settings say, a few at a time. Raises a `RewardError` if this machine cannot."""

    def __init__(self, settings: SandboxConfig) -> None:
        limits = sandbox.read_limits(settings)
        check_requirements(sandbox_url=settings.url, require=settings.require)
        run = functools.partial(sandbox_fusion.run, url=settings.url) if settings.url else sandbox.run
        limits = replace(limits, output_bytes=min(limits.output_bytes, _MAX_OUTPUT))
        self._run = functools.partial(run, limits=limits)
        self._slots = settings.max_programs or 2 * len(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(self._slots, thread_name_prefix="python-tool")
        if (probe := self._run(_PROBE)).stdout != "42\n":
            raise RewardError(f"sandbox: a program that prints 42 ended with {probe.status}: {probe.stderr[-300:]}")

    async def run(self, code: str) -> str:
        """Return what a program prints; raise `ToolError` for its mistakes, `ToolFailureError` if it could not run."""
        started = Future[None]()
        running = asyncio.wrap_future(self._threads.submit(self._wait_and_run, code, started))
        try:
            with stop_clocks():
                await asyncio.wrap_future(started)
            result = await running
        except (RewardError, OSError) as error:
            raise ToolFailureError(f"the sandbox failed: {error}") from error
        finally:  # a program that still waits does not start
            running.cancel()
            started.cancel()
        if result.status == "ok":
            return result.stdout or "(no output)"
        reason = result.stderr.strip() if result.status == "error" else f"the program was ended: {result.status}"
        raise ToolError("\n".join(filter(None, [result.stdout.strip(), reason])))

    def _wait_and_run(self, code: str, started: Future[None]) -> sandbox.ProgramResult:
        try:
            slot = take_slot(self._slots)
        except OSError as error:
            started.set_exception(error)
            raise
        try:
            if not started.set_running_or_notify_cancel():
                raise asyncio.CancelledError
            started.set_result(None)
            return self._run(code)
        finally:
            os.close(slot)


def take_slot(count: int) -> int:
    """Lock one of the machine's slots and return its open file, which releases the slot when it is closed.

    If none is free, wait for one of them, whichever that is: a program ends within seconds.
    """
    first = time.monotonic_ns() % count
    for attempt in range(count + 1):
        file = open_private_file(get_user_folder() / f"python-tool-{(first + attempt) % count}")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if attempt < count else 0))
            break
        except BlockingIOError:
            os.close(file)
    return file


_interpreters: list[Interpreter] = []


def get_interpreter() -> Interpreter:
    """Return the interpreter of this process, with default settings unless it was started with others."""
    return _interpreters[-1] if _interpreters else start_interpreter(SandboxConfig())


def start_interpreter(settings: SandboxConfig) -> Interpreter:
    """Use these settings in this process from now on; raise a `RewardError` if they do not work on this machine."""
    _interpreters[:] = [Interpreter(settings)]
    return _interpreters[-1]
