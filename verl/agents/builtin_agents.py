"""Built-in agents: one calls tools (`ToolAgent`), one plays against an environment (`EnvironmentAgent`).

An agent is a coroutine `agent(task, model)`, which calls the model any number of times. It returns the score of the
episode, or None to have the episode scored by the reward of the run.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verl.agents.chat_model import ChatModel, Reply
from verl.agents.errors import EpisodeLimitError, ToolError, ToolFailureError
from verl.agents.formats.tool_calls import Call, InvalidCall, ToolCall
from verl.agents.messages import Message
from verl.agents.tools.function_tools import Tool, call_tool
from verl.agents.tools.results import ToolResult, truncate_text
from verl.agents.tools.sources import ToolSource
from verl.agents.user_code import UserCode, call_method, close_quietly, run_with_timeout
from verl.config.schema.rollout import MultiTurnConfig

T = TypeVar("T")
UNREADABLE = "invalid00"  # the id of a call that cannot be parsed; some templates require 9 letters or digits


@dataclass(frozen=True, slots=True)
class Task:
    """A row of the data: its prompt as messages, and all of its columns.

    `row` has `data_source`, `ground_truth` and `extra_info`, which the model does not see.
    """

    messages: list[dict[str, Any]]
    row: Mapping[str, Any] = field(default_factory=dict)


Agent = Callable[[Task, ChatModel], Awaitable["float | None"]]


class ToolAgent:
    """Lets the model call tools until it replies without a call."""

    def __init__(self, settings: MultiTurnConfig, sources: Sequence[ToolSource]) -> None:
        self._settings, self._sources = settings, sources

    async def __call__(self, task: Task, model: ChatModel) -> float | None:
        async with AsyncExitStack() as stack:
            found = [
                tool for source in self._sources for tool in await stack.enter_async_context(source.open(task.row))
            ]
            await self._converse(task, model, select_tools(found, task.row))
        return None

    async def _converse(self, task: Task, model: ChatModel, tools: Sequence[Tool]) -> None:
        settings, invalid, answers = self._settings, 0, 0
        metrics = model.transcript.metrics
        metrics |= {"tools/calls": 0.0, "tools/invalid_calls": 0.0}
        messages = list(task.messages)
        while True:
            reply = await model.chat(messages, tools)
            model.transcript.messages = messages = [*messages, reply.message]
            if not reply.calls or reply.finish_reason == "length":
                return
            answers += 1
            if settings.max_user_turns is not None and answers > settings.max_user_turns:
                raise EpisodeLimitError(f"{settings.max_user_turns} turns of tools")
            results = await self._answer(reply, tools)
            mistakes = sum(isinstance(result, ToolError) for result in results)
            metrics["tools/calls"] += len(results)
            metrics["tools/invalid_calls"] += mistakes
            invalid += mistakes
            if invalid > settings.max_invalid_calls:
                raise EpisodeLimitError(f"{settings.max_invalid_calls} invalid calls")
            reply.turn.reward += check_reward(
                sum(result.reward for result in results if isinstance(result, ToolResult))
            )
            messages = [*messages, *self._to_messages(reply, results)]
            model.transcript.messages = messages

    async def _answer(self, reply: Reply, tools: Sequence[Tool]) -> list[ToolResult | ToolError]:
        """Run the calls of a reply. A call that cannot be parsed or exceeds the limit returns an error to the model."""
        limit, timeout_s = self._settings.max_parallel_calls, self._settings.tool_deadline_s
        by_name = {tool.schema["function"]["name"]: tool for tool in tools}

        async def run(index: int, call: Call) -> ToolResult | ToolError:
            if isinstance(call, InvalidCall):
                return ToolError(call.reason)
            if index >= limit:
                return ToolError(f"at most {limit} calls at a time are allowed")
            return await call_tool(by_name, call.name, call.arguments, timeout_s)

        return await asyncio.gather(*(run(index, call) for index, call in enumerate(reply.calls)))

    def _to_messages(self, reply: Reply, results: Sequence[ToolResult | ToolError]) -> list[dict[str, Any]]:
        ids = iter(call["id"] for call in reply.message.get("tool_calls", ()))
        limit, side = self._settings.max_tool_response_length, self._settings.tool_response_truncate_side
        messages = []
        for call, result in zip(reply.calls, results, strict=True):
            text = result.text if isinstance(result, ToolResult) else f"Error: {result}"
            message = {"role": "tool", "name": call.name or "unknown", "content": truncate_text(text, limit, side)}
            messages.append(message | {"tool_call_id": next(ids) if isinstance(call, ToolCall) else UNREADABLE})
        return messages


def select_tools(tools: Sequence[Tool], row: Mapping[str, Any]) -> list[Tool]:
    """Return the tools that a row names; all tools if the row names none."""
    wanted = get_wanted_tools(row.get("extra_info") or {})
    names = {tool.schema["function"]["name"]: tool for tool in tools}
    return list(tools) if wanted is None else [names[name] for name in wanted if name in names]


def find_tool_problem(schemas: Sequence[Mapping[str, Any]], extra_info: Mapping[str, Any]) -> str | None:
    """Return why a row cannot have the tools that it names; None if it can."""
    wanted = get_wanted_tools(extra_info)
    if wanted is None:
        return None
    names = [schema["function"]["name"] for schema in schemas]
    if isinstance(wanted, str) or not isinstance(wanted, Sequence):
        return f"the column tools is {str(wanted)[:80]!r}; it must be a list of names"
    if unknown := [name for name in wanted if name not in names]:
        return f"the column tools names {str(unknown[0])[:80]!r}; there are: {', '.join(names) or 'no tools'}"
    return None


def get_wanted_tools(extra_info: Mapping[str, Any]) -> Any:
    """Return the names of the tools that a row wants; None for all."""
    return extra_info.get("tool_selection") or extra_info.get("tools")


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one environment step: messages for the model, the reward of the turn, and whether the episode is over.

    The `metrics` of the last step become metrics of the episode.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class EnvironmentAgent:
    """Plays an episode against a new environment. The score is the sum of the rewards of all turns.

    `reset(row)` returns the first messages for the model, `step(reply)` a `Step` or a tuple of its fields. Both may be
    coroutines or block, as may `close`, which is optional.
    """

    def __init__(self, settings: MultiTurnConfig, make: Callable[[], Any]) -> None:
        self._settings, self._make = settings, make

    async def __call__(self, task: Task, model: ChatModel) -> float | None:
        model.transcript.score = 0.0  # added to the rewards of the turns, however the episode ends
        async with UserCode(self._make) as code:
            environment = await self._call(code, lambda value: value, self._make)
            try:
                row = {"prompt": task.messages, **task.row}
                messages = await self._call(code, to_messages, environment.reset, row)
                await self._play(code, environment, messages or list(task.messages), model)
            finally:
                if hasattr(environment, "close"):
                    await close_quietly(code, environment.close, timeout_s=self._settings.tool_deadline_s)
        return 0.0

    async def _play(self, code: UserCode, environment: Any, messages: list[dict[str, Any]], model: ChatModel) -> None:
        limit, steps = self._settings.max_user_turns, 0
        while True:
            reply = await model.chat(messages, ())
            step = await self._call(code, to_step, environment.step, reply)
            reply.turn.reward += check_reward(step.reward)
            model.transcript.metrics |= step.metrics
            messages = [*messages, reply.message, *map(dict, step.messages)]
            model.transcript.messages = messages
            steps += 1
            if step.done:
                return
            if reply.finish_reason == "length":
                raise EpisodeLimitError("tokens")
            if limit is not None and steps >= limit:
                raise EpisodeLimitError(f"{limit} turns of the environment")

    async def _call(self, code: UserCode, convert: Callable[[Any], T], method: Callable[..., Any], *args: Any) -> T:
        """Call a method of the environment, and convert its result where the method runs: both are the user's code.

        An exception is a failure, never a mistake of the model.
        """

        async def call() -> T:
            return convert(await call_method(method, *args))

        owner = getattr(method, "__self__", None)
        name = getattr(method, "__name__", "the environment")
        name = name if owner is None else f"{type(owner).__name__}.{name}"
        try:
            return await run_with_timeout(code.run(call), self._settings.tool_deadline_s, name)
        except ToolFailureError:
            raise
        except Exception as error:  # the user's code
            raise ToolFailureError(f"{name} raised {type(error).__name__}: {error}") from error


def check_reward(reward: float) -> float:
    """Return the reward of a turn; raise `ToolFailureError` unless it is finite."""
    if not math.isfinite(reward):
        raise ToolFailureError(f"the reward of a turn is {reward}, which is not a finite number")
    return reward


def to_step(value: Any) -> Step:
    """Convert what an environment returned: a `Step`, (messages, reward, done), or the five values of Gymnasium."""
    if isinstance(value, tuple):
        if len(value) == 5:
            observation, reward, terminated, truncated, _ = value
            return Step(to_messages(observation), float(reward), bool(terminated or truncated))
        messages, reward, done = value
        return Step(to_messages(messages), float(reward), bool(done))
    return value if isinstance(value, Step) else Step(to_messages(value.messages), float(value.reward), value.done)


def to_messages(value: Any) -> list[dict[str, Any]]:
    """Return a list of messages; text becomes one message of the user."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [dict(message) for message in value]
