"""Tools: what the model sees of a function, and what it gets back from calls that work, fail and never return."""

from pathlib import Path
from typing import Any

import pytest
import sample_tools

import verl
from verl.agents.errors import ToolError, ToolFailureError
from verl.agents.tools.function_tools import FunctionTool, call_tool
from verl.agents.tools.results import ToolResult, truncate_text
from verl.agents.tools.sources import load_functions, load_sources
from verl.config.schema.rollout import MultiTurnConfig
from verl.errors import ConfigError

pytestmark = pytest.mark.unit

FILE = sample_tools.__file__
ROW = {"extra_info": {"values": {"red": "7"}}}


@pytest.fixture(scope="module")
def tools() -> dict[str, FunctionTool]:
    return {tool.name: tool.bind(ROW) for tool in load_functions(FILE)}


def test_signature_and_docstring_are_the_schema_and_the_row_is_hidden(tools: dict[str, FunctionTool]) -> None:
    function = tools["lookup"].schema["function"]
    assert function["name"] == "lookup"
    assert function["description"] == "Return the value of a key."
    assert function["parameters"]["required"] == ["key"]
    assert function["parameters"]["properties"] == {
        "key": {"description": "The name of the value.", "type": "string"},
        "count": {"default": 1, "description": "How often to repeat it.", "type": "integer"},
    }


def test_a_tool_is_still_the_function() -> None:
    @verl.tool
    def double(n: int) -> int:
        """Double."""
        return 2 * n

    assert double(4) == 8
    assert double.__doc__ == "Double."


def test_variable_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="declare each argument by name"):

        @verl.tool
        def any_of(*names: str) -> str:
            return ""


async def test_every_episode_looks_up_its_own_row(tools: dict[str, FunctionTool]) -> None:
    other = tools["lookup"].bind({"extra_info": {"values": {"red": "9"}}})
    assert (await tools["lookup"].call({"key": "red"}, 5)).text == "7"
    assert (await other.call({"key": "red", "count": 2}, 5)).text == "99"


async def test_mistakes_of_the_model_come_back_as_text(tools: dict[str, FunctionTool]) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("lookup", {"key": "blue"}),
        ("lookup", {"keys": "red"}),
        ("lookup", {"key": "red", "count": "many"}),
        ("search", {}),
        ("lookup", {"key": "red"}),
    ]
    *mistakes, right = [await call_tool(tools, *call, 30) for call in calls]
    assert all(isinstance(each, ToolError) for each in mistakes)
    texts = list(map(str, mistakes))
    assert texts[0] == "there is no key 'blue'"
    assert "key: Field required" in texts[1]
    assert "keys: Extra inputs are not permitted" in texts[1]
    assert "count: Input should be a valid integer" in texts[2]
    assert texts[3].startswith("there is no tool 'search'; there are: add, crash")
    assert right == ToolResult("7")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("never", "never did not return within 0.05 s"),
        ("unreachable", "ConnectionRefusedError"),
    ],
)
async def test_a_tool_that_cannot_run_is_a_failure_and_not_an_answer(
    tools: dict[str, FunctionTool], name: str, reason: str
) -> None:
    with pytest.raises(ToolFailureError, match=reason):
        await call_tool(tools, name, {}, 0.05)


@pytest.mark.parametrize(
    ("side", "text"),
    [("left", "...(truncated)...6789"), ("right", "0123...(truncated)..."), ("middle", "01...(truncated)...89")],
)
def test_long_results_are_truncated_on_the_side_that_is_set(side: str, text: str) -> None:
    assert truncate_text("0123456789", 4, side) == text
    assert truncate_text("0123", 4, side) == "0123"


class Counter:
    """A tool class with a state per episode."""

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None) -> None:
        self.step = config["step"]
        self.counts: dict[str, int] = {}
        self.released: list[str] = []

    async def create(self, instance_id: str, start: int = 0) -> None:
        self.counts[instance_id] = start

    async def execute(self, instance_id: str, parameters: dict[str, Any]) -> tuple[str, float, dict[str, Any]]:
        self.counts[instance_id] += self.step * parameters["times"]
        return str(self.counts[instance_id]), 0.25, {}

    def release(self, instance_id: str) -> None:
        self.released.append(instance_id)


COUNTER = """
tools:
  - class_name: test_tools.Counter
    config: {type: native, step: 2}
    tool_schema:
      type: function
      function: {name: count, description: Count., parameters: {type: object, properties: {times: {type: integer}}}}
"""


async def test_a_tool_class_keeps_its_state_within_an_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    file = tmp_path / "tools.yaml"
    file.write_text(COUNTER)
    [source] = load_sources(MultiTurnConfig(tool_config_path=str(file)))
    row = {"extra_info": {"tools_kwargs": {"count": {"create_kwargs": {"start": 10}}}}}
    async with source.open(row) as [first], source.open({}) as [second]:
        assert (await first.call({"times": 1}, 5)) == ToolResult("12", 0.25)
        assert (await first.call({"times": 1}, 5)).text == "14"
        assert (await second.call({"times": 1}, 5)).text == "2"
    assert len(source._tool.released) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (MultiTurnConfig(function_tool_path="no_such_file.py"), "there is no file"),
        (MultiTurnConfig(function_tool_path=__file__.replace("test_tools", "test_episode")), "has no tools"),
        (MultiTurnConfig(tool_config_path="no_such_file.yaml"), "cannot be read"),
    ],
)
def test_wrong_files_of_tools_are_configuration_errors(settings: MultiTurnConfig, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_sources(settings)


def test_two_tools_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    file = tmp_path / "tools.yaml"
    file.write_text(COUNTER.replace("name: count", "name: lookup"))
    with pytest.raises(ConfigError, match="two tools 'lookup'"):
        load_sources(MultiTurnConfig(function_tool_path=FILE, tool_config_path=str(file)))
