"""Tools of the tests, in a file as a user writes one."""

import asyncio
import contextlib
import os
import signal
import time

import verl
from verl.agents.errors import ToolError

CALLS: list[str] = []


@verl.tool
async def lookup(key: str, count: int = 1, *, row: dict) -> str:
    """Return the value of a key.

    Args:
        key: The name of the value.
        count: How often to repeat it.

    Returns:
        The value.
    """
    CALLS.append(key)
    values = row["extra_info"]["values"]
    if key not in values:
        raise ToolError(f"there is no key {key!r}")
    return values[key] * count


@verl.tool
async def never() -> str:
    """Go on when it is canceled the first time."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(3600)
    await asyncio.sleep(3600)
    return ""


@verl.tool
async def unreachable() -> str:
    """Fail as a server that is down."""
    CALLS.append("unreachable")
    raise ConnectionRefusedError("port 1")


@verl.tool
def add(a: int, b: int) -> dict:
    """Add in a process."""
    return {"sum": a + b, "process": os.getpid()}


@verl.tool
def hang() -> str:
    """Block a process."""
    time.sleep(3600)
    return ""


@verl.tool
def crash() -> str:
    """End a process."""
    os._exit(3)


@verl.tool
def divide(a: int, b: int) -> tuple[str, float]:
    """Divide, for a reward."""
    return str(a / b), 0.5


@verl.tool
async def leave() -> str:
    """Exit."""
    raise SystemExit(3)


@verl.tool
def kill_own_process(file: str) -> str:
    """Have an effect, then die as from the kernel's OOM killer."""
    with open(file, "a") as log:
        log.write("called\n")
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


@verl.tool
def write_much(count: int) -> str:
    """Return long text."""
    return "é" * count
