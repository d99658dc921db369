"""Attacks of show-hostile-agents by code that blocks: tools, agents and environments."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from agent_config import agent_config
from scripted_model import ScriptedModel

import verl
from verl.agents import user_code
from verl.agents.agent_episode import AgentEpisode
from verl.agents.builtin_agents import EnvironmentAgent, Task
from verl.agents.chat_model import LONG, ChatModel
from verl.agents.errors import EpisodeLimitError, LoopBlockedError, ToolFailureError
from verl.agents.rendering import ChatRenderer
from verl.agents.transcript import Transcript
from verl.types import Prompt, SamplingParams

BLOCK_S, LIMIT_S = 30.0, 0.5
HELD_S = 10.0  # at most, for a call with a limit of 0.5 s, on a busy machine
SAMPLING = SamplingParams(max_tokens=400)
_RELEASE = threading.Event()


def block() -> None:
    _RELEASE.wait(BLOCK_S)


async def expect_timeout(call: Awaitable[Any]) -> None:
    """Check that a call fails at its limit. Then whatever blocks is released, and whatever spins must end."""
    _RELEASE.clear()
    start = time.monotonic()
    message = "the call returned"
    try:
        await call
    except LoopBlockedError:
        raise
    except ToolFailureError as error:
        message = str(error)
    finally:
        _RELEASE.set()
    assert "did not return within 0.5 s" in message, message
    assert time.monotonic() - start < HELD_S, f"{time.monotonic() - start:.1f} s at a limit of {LIMIT_S:g} s"


@verl.tool
async def sleeping() -> str:
    """Block."""
    block()
    return ""


@verl.tool
async def spinning() -> str:
    """Use the processor."""
    end = time.monotonic() + BLOCK_S
    while time.monotonic() < end:
        pass
    return ""


@verl.tool
async def sleeping_in_a_task() -> str:
    """Block in another task."""

    async def work() -> None:
        block()

    await asyncio.ensure_future(work())
    await asyncio.sleep(BLOCK_S)
    return ""


@verl.tool
async def sleeping_in_a_callback() -> str:
    """Block in a callback."""
    asyncio.get_running_loop().call_soon(block)
    await asyncio.sleep(BLOCK_S)
    return ""


@verl.tool
async def swallowing() -> str:
    """Ignore being cancelled."""
    while not _RELEASE.is_set():
        try:
            await asyncio.sleep(0.5)
        except asyncio.CancelledError:
            continue
    return ""


class Slow:
    """Text that takes long to write."""

    def __str__(self) -> str:
        block()
        return ""


@verl.tool
async def returning_what_blocks() -> Any:
    """Return an object that blocks when it is written as JSON."""
    return {"value": Slow()}


async def try_tool(tool: Any) -> None:
    try:
        await expect_timeout(tool.call({}, LIMIT_S))
    except LoopBlockedError:  # nobody knows which call blocks, so the episode is repeated
        await expect_timeout(tool.call({}, LIMIT_S))


async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.05)


async def exit_in_a_task() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    leaving = asyncio.ensure_future(leave())
    await asyncio.wait([leaving])


async def try_to_end_the_loop(function: Callable[[], Awaitable[None]]) -> None:
    async def work() -> str:
        await asyncio.sleep(0.3)
        return "done"

    async with user_code.UserCode(work) as code, user_code.UserCode(function) as hostile:
        working = asyncio.ensure_future(code.run(work))
        await user_code.run_with_timeout(hostile.run(function), HELD_S, "hostile")
        assert await user_code.run_with_timeout(working, HELD_S, "work") == "done"


async def blocking_agent(task: Task, model: ChatModel) -> float:
    await model.chat(task.messages)
    if task.row["extra_info"]["row"] == 0:
        block()
    await asyncio.sleep(0.05)
    return 1.0


async def blocking_agent_by_url(task: Task, base_url: str, api_key: str) -> float:
    import httpx

    async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {api_key}"}, verify=False) as client:
        await client.post(f"{base_url}/chat/completions", json={"messages": task.messages})
    if task.row["extra_info"]["row"] == 0:
        block()
    await asyncio.sleep(0.05)
    return 1.0


async def try_to_time_out_others(agent: Callable[..., Any]) -> None:
    """One of six agents blocks beyond its limit: the other five have to be scored."""
    _RELEASE.clear()
    model = ScriptedModel(lambda prompt: "yes")
    episode = AgentEpisode(agent_config(agent="test", deadline_s=10.0), model.tokenizer, agent=agent)
    try:
        transcripts = await asyncio.gather(*(episode(make_prompt(row), model.generate, SAMPLING) for row in range(6)))
    finally:
        _RELEASE.set()
        await episode.close()
    assert transcripts[0].is_truncated
    assert [each.score for each in transcripts[1:]] == [1.0] * 5, [each.failure for each in transcripts]


def make_prompt(row: int = 0) -> Prompt:
    return Prompt(row, [1], raw=[{"role": "user", "content": "Go."}], extra_info={"row": row})


class Environment:
    def reset(self, row: dict[str, Any]) -> Any:
        return "Go."

    async def step(self, reply: Any) -> Any:
        return "On.", 0.0, True


class BlocksWhenMade(Environment):
    def __init__(self) -> None:
        block()


class BlocksInReset(Environment):
    async def reset(self, row: dict[str, Any]) -> Any:
        block()


class BlocksInStep(Environment):
    def step(self, reply: Any) -> Any:
        block()


class YieldsForever(Environment):
    def reset(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        numbers = itertools.takewhile(lambda number: not _RELEASE.wait(0.001), itertools.count())
        return ({"role": "user", "content": str(number)} for number in numbers)


class BlocksInClose(Environment):
    async def close(self) -> None:
        block()


async def play(make: Callable[[], Any]) -> Transcript:
    model, config = ScriptedModel(lambda prompt: "yes"), agent_config(tool_deadline_s=LIMIT_S)
    episode = AgentEpisode(config, model.tokenizer)
    episode._agents["tool_agent"] = EnvironmentAgent(config.actor_rollout_ref.rollout.multi_turn, make)
    _RELEASE.clear()
    try:
        return await episode(make_prompt(), model.generate, SAMPLING)
    finally:
        _RELEASE.set()


async def try_environment(make: Callable[[], Any]) -> None:
    start = time.monotonic()
    transcript = await play(make)
    assert time.monotonic() - start < HELD_S, f"{time.monotonic() - start:.1f} s at a limit of {LIMIT_S:g} s"
    if make is BlocksInClose:
        assert transcript.failure is None, "closing is not a part of the episode"
    else:
        assert transcript.failure is not None


async def leak_threads() -> None:
    """Call a function that never returns 100 times: at most `MAX_ABANDONED` threads may remain."""
    _RELEASE.clear()
    before = threading.active_count()
    for _ in range(100):
        async with user_code.UserCode(block) as code:
            with contextlib.suppress(ToolFailureError):
                await user_code.run_with_timeout(code.run(block), 0.02, "block")
    count = threading.active_count() - before
    _RELEASE.set()
    assert count <= user_code.MAX_ABANDONED + 8, f"{count} threads"
    while user_code._abandoned:
        await asyncio.sleep(0.05)


def make_model(max_tokens: int) -> ChatModel:
    model = ScriptedModel(lambda prompt: "yes")
    renderer = ChatRenderer(model.tokenizer)
    return ChatModel(model.generate, renderer, SamplingParams(max_tokens=100), None, max_sequence_tokens=max_tokens)


async def send_a_message_of_100_megabytes() -> None:
    start, chat = time.monotonic(), make_model(4096)
    try:
        await chat.chat([{"role": "user", "content": "x" * 100_000_000}])
        raise AssertionError("was accepted")
    except EpisodeLimitError:
        assert time.monotonic() - start < HELD_S, "it was tokenized"


async def send_a_long_message() -> None:
    """A message that is just accepted is tokenized off the event loop, whose stall is measured."""
    await make_model(1 << 26).chat([{"role": "user", "content": "a b " * LONG}])


async def send_surrogates() -> None:
    reply = await make_model(4096).chat([{"role": "user", "content": "\ud800"}])
    assert reply.content == "yes"


ATTACKS: dict[str, Callable[[], Awaitable[None]]] = {
    **{
        f"an async tool, {tool.name}": partial(try_tool, tool)
        for tool in (
            sleeping,
            spinning,
            sleeping_in_a_task,
            sleeping_in_a_callback,
            swallowing,
            returning_what_blocks,
        )
    },
    "a tool stops the event loop of others": lambda: try_to_end_the_loop(stop_the_loop),
    "a tool exits in a task": lambda: try_to_end_the_loop(exit_in_a_task),
    "an agent blocks, to time out five others": lambda: try_to_time_out_others(blocking_agent),
    "an agent of an SDK blocks, to time out five others": lambda: try_to_time_out_others(blocking_agent_by_url),
    **{
        f"an environment, {make.__name__}": partial(try_environment, make)
        for make in (BlocksWhenMade, BlocksInReset, BlocksInStep, YieldsForever, BlocksInClose)
    },
    "calls that never return use up threads": leak_threads,
    "a message of 100 megabytes is tokenized": send_a_message_of_100_megabytes,
    "a long message stalls the event loop": send_a_long_message,
    "a message cannot be encoded": send_surrogates,
}
