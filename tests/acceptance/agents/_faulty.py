"""Tools, environments and agents of show-agent-faults: each fails in its own way."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
from collections import Counter
from typing import Any

import verl
from verl.agents.builtin_agents import Step

LONG_S = 3600.0
arrivals: Counter[str] = Counter()
LATE: list[str] = []  # what was answered to an agent after its episode, or with a wrong key
ENDED = threading.Event()  # the episode of agent_calls_after_the_end


# ---- tools


@verl.tool
async def hangs() -> str:
    """Hang."""
    arrivals["hangs"] += 1
    await asyncio.sleep(LONG_S)
    return ""


@verl.tool
async def ignores_cancel() -> str:
    """Ignore the first attempt to stop it."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(LONG_S)
    await asyncio.sleep(0.2)
    return "late"


@verl.tool
async def raises() -> str:
    """Raise."""
    raise ValueError("wrong value")


@verl.tool
async def refuses_connection() -> str:
    """Be unreachable."""
    arrivals["refuses_connection"] += 1
    raise ConnectionRefusedError("port 1")


@verl.tool
async def times_out() -> str:
    """Time out."""
    raise TimeoutError("of its own")


@verl.tool
async def breaks_pipe() -> str:
    """Lose the connection."""
    raise BrokenPipeError("gone")


@verl.tool
async def writes_much() -> str:
    """Return 50 MB."""
    return "x" * 50_000_000


@verl.tool
async def returns_nothing() -> None:
    """Return nothing."""


@verl.tool
async def returns_an_object() -> Any:
    """Return what JSON does not know."""
    return {"lock": threading.Lock(), "set": {1, 2}}


@verl.tool
async def returns_surrogates() -> str:
    """Return text that cannot be encoded."""
    return "\ud800"


@verl.tool
async def raises_without_text() -> str:
    """Raise an empty error."""
    raise KeyError


@verl.tool
async def recurses() -> str:
    """Recurse without end."""

    def again() -> str:
        return again()

    return again()


@verl.tool
async def exits_in_a_coroutine() -> str:
    """Exit."""
    raise SystemExit(3)


@verl.tool
async def raises_a_group() -> str:
    """Raise a group."""
    raise ExceptionGroup("both", [ValueError("one"), OSError("other")])


@verl.tool
def sleeps() -> str:
    """Block."""
    time.sleep(LONG_S)
    return ""


@verl.tool
def spins() -> str:
    """Use the processor without end."""
    while True:
        pass


@verl.tool
def ends_its_process() -> str:
    """End the process."""
    os._exit(1)


@verl.tool
def kills_itself() -> str:
    """Kill the process."""
    os.kill(os.getpid(), 9)
    return ""


@verl.tool
def exits() -> str:
    """Exit."""
    raise SystemExit(3)


@verl.tool
def raises_unpicklable() -> str:
    """Raise what cannot be sent."""

    class Unpicklable(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("no")

    raise Unpicklable("hidden")


@verl.tool
def returns_unpicklable() -> Any:
    """Return what cannot be sent."""
    return threading.Lock()


@verl.tool
async def typed(count: int) -> str:
    """Take a number."""
    return str(count)


# ---- environments


class Environment:
    """One that works, with a hook for each way to fail."""

    def reset(self, row: dict[str, Any]) -> str:
        return "Go."

    async def step(self, reply: Any) -> Any:
        return Step(reward=1.0, done=True)


class RaisesInReset(Environment):
    def reset(self, row: dict[str, Any]) -> str:
        raise RuntimeError("no seats")


class HangsInReset(Environment):
    def reset(self, row: dict[str, Any]) -> str:
        time.sleep(LONG_S)
        return ""


class HangsInStep(Environment):
    async def step(self, reply: Any) -> Any:
        await asyncio.sleep(LONG_S)


class ReturnsNonsense(Environment):
    async def step(self, reply: Any) -> Any:
        return 42


class ReturnsNan(Environment):
    async def step(self, reply: Any) -> Any:
        return Step(reward=math.nan, done=True)


class RaisesInClose(Environment):
    def close(self) -> None:
        raise RuntimeError("cannot close")


class HangsInClose(Environment):
    async def close(self) -> None:
        await asyncio.sleep(LONG_S)


class Exits(Environment):
    async def step(self, reply: Any) -> Any:
        raise SystemExit(3)


class NeverEnds(Environment):
    async def step(self, reply: Any) -> Any:
        return "On.", 0.0, False


# ---- agents


async def agent_hangs(task: Any, model: Any) -> float:
    await model.chat(task.messages)
    await asyncio.sleep(LONG_S)
    return 1.0


async def agent_hangs_at_once(task: Any, model: Any) -> float:
    await asyncio.sleep(LONG_S)
    return 1.0


async def agent_talks_forever(task: Any, model: Any) -> float:
    messages = list(task.messages)
    while True:
        reply = await model.chat(messages)
        messages += [reply.message, {"role": "user", "content": "On."}]


async def agent_raises(task: Any, model: Any) -> float:
    await model.chat(task.messages)
    raise KeyError("missing")


async def agent_exits(task: Any, model: Any) -> float:
    await model.chat(task.messages)
    raise SystemExit(3)


async def agent_returns_text(task: Any, model: Any) -> Any:
    await model.chat(task.messages)
    return "good"


async def agent_returns_nan(task: Any, model: Any) -> float:
    await model.chat(task.messages)
    return math.nan


async def agent_says_nothing(task: Any, model: Any) -> float:
    return 1.0


async def agent_calls_after_the_end(task: Any, model: Any) -> float:
    async def late() -> None:
        await asyncio.to_thread(ENDED.wait)
        try:
            await model.chat(task.messages)
            LATE.append("answered")
        except Exception as error:  # noqa: BLE001
            LATE.append(type(error).__name__)

    agent_calls_after_the_end.task = asyncio.ensure_future(late())  # type: ignore[attr-defined]
    await model.chat(task.messages)
    return 1.0


async def agent_swallows_limits(task: Any, model: Any) -> float:
    for _ in range(100):
        with contextlib.suppress(Exception):
            await model.chat(task.messages)
    return 1.0


def agent_blocks(task: Any, base_url: str, api_key: str) -> float:
    time.sleep(LONG_S)
    return 1.0


async def agent_uses_a_wrong_key(task: Any, base_url: str, api_key: str) -> float:
    import httpx

    async with httpx.AsyncClient() as client:
        body = {"model": "policy", "messages": task.messages}
        answer = await client.post(f"{base_url}/chat/completions", json=body, headers={"Authorization": "Bearer no"})
    LATE.append(str(answer.status_code))
    return 1.0
