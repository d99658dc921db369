"""Tools, environments and agents as Python objects become settings that workers can load."""

from pathlib import Path
from typing import Any

import pytest

import verl
from verl import GRPOTrainer
from verl.agents.tools.sources import load_functions
from verl.custom_functions import load_function
from verl.errors import ConfigError

pytestmark = pytest.mark.unit

ROLLOUT = "actor_rollout_ref.rollout"


@verl.tool
async def lookup(key: str) -> str:
    """Look up."""
    return key


def double(n: int) -> int:
    """Double."""
    return 2 * n


class Game:
    def reset(self, row: Any) -> str:
        return "Guess."

    def step(self, reply: Any) -> tuple[str, float, bool]:
        return "", 1.0, True


def settings(folder: Path, **objects: Any) -> dict[str, Any]:
    trainer = GRPOTrainer("model", prompts=["Hello"], folder=folder, **objects)
    return {key: value for key, value in trainer._settings(["Hello"], folder).items() if key.startswith(ROLLOUT)}


def test_functions_are_tools_with_and_without_the_decorator(tmp_path: Path) -> None:
    found = settings(tmp_path, tools=[lookup, double])
    assert found[f"{ROLLOUT}.multi_turn.enable"] is True
    tools = load_functions(found[f"{ROLLOUT}.multi_turn.function_tool_path"])
    assert [tool.name for tool in tools] == ["lookup", "double"]
    assert tools[1](4) == 8


def test_a_class_is_an_environment_and_a_function_an_agent(tmp_path: Path) -> None:
    async def agent(task: Any, model: Any) -> float:
        return 1.0

    found = settings(tmp_path, environment=Game, agent=agent)
    environment = load_function(found[f"{ROLLOUT}.multi_turn.environment"], {}, "environment")
    assert environment().reset({}) == "Guess."
    assert load_function(found[f"{ROLLOUT}.agent.default_agent_loop"], {}, "agent").__name__ == "agent"


def test_import_paths_are_unchanged_and_without_agents_nothing_is_set(tmp_path: Path) -> None:
    found = settings(tmp_path, environment="games:Game")
    assert found[f"{ROLLOUT}.multi_turn.environment"] == "games:Game"
    assert f"{ROLLOUT}.multi_turn.enable" not in settings(tmp_path)


def test_objects_that_cannot_be_pickled_are_a_configuration_error(tmp_path: Path) -> None:
    with (tmp_path / "open.txt").open("w") as file:

        def write(text: str) -> str:
            file.write(text)
            return ""

        with pytest.raises(ConfigError, match="tools: cannot be sent to the workers"):
            settings(tmp_path, tools=[write])
