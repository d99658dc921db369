"""Settings of episodes with several turns, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.config.paths import change_settings
from verl.config.schema import Config


def agent_config(agent: str = "tool_agent", *, gateway: Mapping[str, Any] | None = None, **multi_turn: Any) -> Config:
    """Return settings with the given ones of `multi_turn`, for sequences of any length."""
    rollout = {
        "agent": {"default_agent_loop": agent},
        "gateway": gateway or {},
        "multi_turn": {"enable": True, **multi_turn},
    }
    return Config.model_validate({"data": {"max_response_length": 1 << 30}, "actor_rollout_ref": {"rollout": rollout}})


def change_limits(config: Config, **multi_turn: Any) -> Config:
    """Return the settings with some of `multi_turn` changed."""
    section = "actor_rollout_ref.rollout.multi_turn"
    return change_settings(config, {f"{section}.{name}": value for name, value in multi_turn.items()})
