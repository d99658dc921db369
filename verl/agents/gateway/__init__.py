"""An OpenAI-compatible endpoint per episode, and the agents that use it. Needs the extra `agents`."""
