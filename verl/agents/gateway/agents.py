"""Agents that do not import verl: functions of a task, a URL and a key, which call the model with any SDK."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl.agents.builtin_agents import Agent, Task
from verl.agents.chat_model import ChatModel
from verl.agents.user_code import run_in_thread, survive_exit
from verl.config.schema.conditions import ROLLOUT
from verl.config.schema.rollout import RolloutConfig
from verl.errors import ConfigError
from verl.installation import format_install_hint
from verl.waiting import EventLoopThread

if TYPE_CHECKING:
    from verl.agents.gateway.server import Gateway


class GatewayAgents:
    """Plays agents that take `base_url` and `api_key`. The gateway of a worker is started for the first such agent."""

    def __init__(self, rollout: RolloutConfig) -> None:
        self._settings, self._max_invalid_calls = rollout.gateway, rollout.multi_turn.max_invalid_calls
        self._thread: EventLoopThread | None = None  # of all agents that are coroutines
        self._starting: asyncio.Task[Gateway] | None = None

    def adapt(self, agent: Callable[..., Any]) -> Agent:
        """Return an agent that takes a model, from one that takes a URL; return other agents unchanged."""
        names = list(inspect.signature(agent).parameters)
        if "base_url" not in names:
            return agent
        name = getattr(agent, "__name__", type(agent).__name__)
        if not self._settings.enable:
            raise ConfigError([f"{ROLLOUT}.gateway.enable: the agent {name} takes a base_url; set it to true"])
        if "api_key" not in names:
            raise ConfigError(
                [f"{ROLLOUT}.agent.default_agent_loop: {name} takes a base_url; add the parameter api_key"]
            )

        async def play(task: Task, model: ChatModel) -> Any:
            return await self._play(agent, task, model)

        play.__name__ = name
        return play

    async def close(self) -> None:
        if self._starting is not None:
            await (await self._starting).close()
        if self._thread is not None:
            self._thread.close(wait=False)

    async def _play(self, agent: Callable[..., Any], task: Task, model: ChatModel) -> Any:
        """Return the score that the agent returned. A limit of the episode has ended the agent if it raises."""
        if self._starting is None or self._thread is None:
            self._thread, self._starting = EventLoopThread("agents"), asyncio.ensure_future(self._start())
        gateway = await asyncio.shield(self._starting)
        with gateway.open(model, self._max_invalid_calls) as session:
            try:
                urls = {"base_url": session.base_url, "api_key": session.key}
                score = await _run_agent(self._thread, agent, task, **urls)
            except Exception:
                if (cause := session.failure or session.limit) is not None:
                    raise cause from None
                raise
            if session.failure is not None:
                raise session.failure
            if session.limit is not None and not model.transcript.turns:
                raise session.limit
            return score

    async def _start(self) -> Gateway:
        try:
            from verl.agents.gateway.server import Gateway
        except ImportError as error:
            raise ConfigError(
                [f"{ROLLOUT}.gateway.enable: {error.name} is not installed: {format_install_hint('agents')}"]
            ) from error
        gateway = Gateway(self._settings.host, self._settings.port)
        await gateway.start()
        return gateway


async def _run_agent(thread: EventLoopThread, agent: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of an agent, which runs outside the worker's event loop: requests are served even if it blocks.

    A function that is not a coroutine gets a thread of its own. A call that never ends cannot be killed.
    """
    if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(type(agent).__call__):
        result = agent(*args, **kwargs)
    else:
        result = await run_in_thread(lambda: agent(*args, **kwargs))
    if inspect.isawaitable(result):
        return await asyncio.wrap_future(thread.submit(survive_exit(result)))
    return result
