"""The documented import path of the helpers in `verl.agents.adapters.blocking_agent`."""

from verl.agents.adapters.blocking_agent import format_conversation, generate_response

__all__ = ["format_conversation", "generate_response"]
