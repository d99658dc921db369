"""Adapters for code that is not written for verl: Gymnasium and OpenEnv environments, agents that are plain loops."""

from verl.agents.adapters.gym_adapter import adapt_environment

__all__ = ["adapt_environment"]
