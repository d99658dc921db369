"""Settings of episodes with several turns. Plain records, which workers receive by pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """How a prompt becomes an episode of several turns. Limits are per episode unless noted otherwise.

    `agent` is "tool_agent", "single_turn" or `module:function`; a row's own `agent_name` comes first. `functions` are
    files with `@verl.tool` functions, `tool_file` lists tool classes and servers in YAML.
    """

    agent: str = "tool_agent"
    environment: str | None = None  # module:class
    functions: str | None = None
    tool_file: str | None = None
    tool_server: str | None = None  # a URL
    format: str | None = None  # of tool calls; None: that of the chat template
    max_turns: int | None = None  # of the model
    max_user_turns: int | None = None  # of tools or the environment
    max_parallel_calls: int = 1  # of one turn
    max_invalid_calls: int = 3
    max_tool_response_length: int = 256  # characters
    tool_response_truncate_side: str = "middle"
    max_sequence_tokens: int = 1 << 30
    branch_per_turn: bool = False
    deadline_s: float = 3600.0
    tool_deadline_s: float = 60.0
    gateway: bool = True  # for agents that take a URL
    gateway_host: str = "127.0.0.1"
    gateway_port: int = 0  # the first of those to try; 0: any
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
