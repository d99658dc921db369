"""Environments of other libraries, whose actions are numbers or objects, played with messages.

    from verl.agents.adapters import adapt_environment

    make_lake = adapt_environment(lambda row: gymnasium.make("FrozenLake-v1", render_mode="ansi"), read_action=int)

and `multi_turn.environment=lakes.py:make_lake`. The library's object has `reset` and `step`, coroutines or not, which
return Gymnasium's tuples, or an object with `observation`, `reward` and `done`, as clients of OpenEnv do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from verl.agents.builtin_agents import Step, to_step
from verl.agents.user_code import call_method


def adapt_environment(
    make: Callable[[Mapping[str, Any]], Any],
    *,
    read_action: Callable[[str], Any],
    write_observation: Callable[[Any], str] = str,
) -> Callable[[], AdaptedEnvironment]:
    """Return a factory of environments for verl.

    Args:
        make: Returns the library's object for a row of the data.
        read_action: Parses the action from a reply; a `ValueError` is shown to the model, which may try again.
        write_observation: Returns an observation as text for the model.
    """
    return partial(AdaptedEnvironment, make, read_action, write_observation)


class AdaptedEnvironment:
    """One episode with an object of another library."""

    def __init__(
        self,
        make: Callable[[Mapping[str, Any]], Any],
        read_action: Callable[[str], Any],
        write_observation: Callable[[Any], str],
    ) -> None:
        self._make, self._read_action, self._write = make, read_action, write_observation
        self._environment: Any = None

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the prompt, with the first observation at the end of its last message."""
        self._environment = await call_method(self._make, row)
        result = await call_method(self._environment.reset)
        observation = result[0] if isinstance(result, tuple) else result.observation
        *earlier, last = row["prompt"]
        return [*earlier, {**last, "content": f"{last['content']}\n\n{self._write(observation)}"}]

    async def step(self, reply: Any) -> Step:
        try:
            action = self._read_action(reply.content)
        except ValueError as error:
            return Step([{"role": "user", "content": f"Error: {error}"}])
        result = await call_method(self._environment.step, action)
        if isinstance(result, tuple):
            return to_step((self._write(result[0]), result[1] or 0.0, *result[2:]))
        return to_step((self._write(result.observation), result.reward or 0.0, result.done))

    async def close(self) -> None:
        if hasattr(self._environment, "close"):
            await call_method(self._environment.close)
