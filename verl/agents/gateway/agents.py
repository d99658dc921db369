"""Agents that do not import verl: functions of a task, a URL and a key, which call the model with any SDK."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl.agents.builtin_agents import Agent, Task
from verl.agents.chat_model import ChatModel
from verl.agents.errors import LoopBlockedError
from verl.agents.user_code import UserCode
from verl.config.schema.conditions import ROLLOUT
from verl.config.schema.rollout import RolloutConfig
from verl.errors import ConfigError
from verl.installation import format_install_hint

if TYPE_CHECKING:
    from verl.agents.gateway.server import Gateway


class GatewayAgents:
    """Plays agents that take `base_url` and `api_key`. The gateway of a worker is started for the first such agent."""

    def __init__(self, rollout: RolloutConfig, *, accepts_rewards: bool = True) -> None:
        self._accepts_rewards = accepts_rewards
        self._settings, self._max_invalid_calls = rollout.gateway, rollout.multi_turn.max_invalid_calls
        self._starting: asyncio.Task[Gateway] | None = None

    def adapt(self, agent: Callable[..., Any]) -> Agent:
        """Return an agent of the user, which takes a model or a URL, as one that runs off the worker's event loop."""
        names = list(inspect.signature(agent).parameters)
        name, takes_url = getattr(agent, "__name__", type(agent).__name__), "base_url" in names
        if takes_url and not self._settings.enable:
            raise ConfigError([f"{ROLLOUT}.gateway.enable: the agent {name} takes a base_url; set it to true"])
        if takes_url and "api_key" not in names:
            raise ConfigError(
                [f"{ROLLOUT}.agent.default_agent_loop: {name} takes a base_url; add the parameter api_key"]
            )
        if takes_url:
            _import_gateway()

        async def play(task: Task, model: ChatModel) -> Any:
            async with UserCode(agent) as code:
                if takes_url:
                    return await self._play(code, agent, task, model)
                return await code.run(agent, task, model)

        play.__name__ = name
        return play

    async def close(self) -> None:
        if self._starting is not None:
            await (await self._starting).close()

    async def _play(self, code: UserCode, agent: Callable[..., Any], task: Task, model: ChatModel) -> Any:
        """Return the score that the agent returned. A limit of the episode has ended the agent if it raises."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        gateway = await asyncio.shield(self._starting)
        with gateway.open(model, self._max_invalid_calls) as session:
            try:
                keys = {"base_url": session.base_url, "api_key": session.key}
                if "reward_key" in inspect.signature(agent).parameters:
                    keys["reward_key"] = session.reward_key
                score = await code.run(agent, task, **keys)
            except LoopBlockedError:
                raise
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
        gateway = _import_gateway()(self._settings, accepts_rewards=self._accepts_rewards)
        await gateway.start()
        return gateway


def _import_gateway() -> type[Gateway]:
    """Import the server, which takes a second, before the first episode and only for agents that need it."""
    try:
        from verl.agents.gateway.server import Gateway
    except ImportError as error:
        raise ConfigError(
            [f"{ROLLOUT}.gateway.enable: {error.name} is not installed: {format_install_hint('agents')}"]
        ) from error
    return Gateway
