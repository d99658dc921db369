"""Blocking tools run in processes of their own, and programs of the model in the sandbox."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import sample_tools

import verl
from verl.agents.errors import ToolError, ToolFailureError
from verl.agents.python_tool import python
from verl.agents.tools.function_tools import call_tool
from verl.agents.tools.processes import open_pool
from verl.agents.tools.results import ToolResult

pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True, scope="module")
def _end_processes() -> Iterator[None]:
    yield
    open_pool().close()
    open_pool.cache_clear()


async def test_a_tool_that_hangs_or_ends_its_process_is_a_failure() -> None:
    with pytest.raises(ToolFailureError, match=r"hang: did not return within 0.05 s"):
        await call_tool({"hang": sample_tools.hang}, "hang", {}, 0.05)
    with pytest.raises(ToolFailureError, match="crash: ended its process with exit code 3"):
        await call_tool({"crash": sample_tools.crash}, "crash", {}, 30)


async def test_a_tool_that_raises_returns_an_error_to_the_model() -> None:
    mistake = await call_tool({"divide": sample_tools.divide}, "divide", {"a": 1, "b": 0}, 30)
    assert isinstance(mistake, ToolError)
    assert str(mistake) == "ZeroDivisionError: division by zero"


async def test_blocking_functions_run_in_other_processes_also_after_one_was_lost() -> None:
    with pytest.raises(ToolFailureError):
        await sample_tools.crash.call({}, 30)
    result = await sample_tools.add.call({"a": 2, "b": 3}, 30)
    assert '"sum": 5' in result.text
    assert f'"process": {os.getpid()}' not in result.text
    assert (await sample_tools.divide.call({"a": 1, "b": 2}, 30)) == ToolResult("0.5", 0.5)


async def test_a_function_without_a_file_runs_in_another_process_too() -> None:
    offset = 5

    @verl.tool
    def shift(n: int) -> int:
        """Shift."""
        return n + offset

    assert (await shift.call({"n": 1}, 30)).text == "6"


async def test_a_call_whose_process_was_killed_is_not_made_again(tmp_path: Path) -> None:
    file = tmp_path / "calls"
    with pytest.raises(ToolFailureError, match="kill_own_process: its process died of SIGKILL"):
        await sample_tools.kill_own_process.call({"file": str(file)}, 30)
    assert (await sample_tools.add.call({"a": 2, "b": 3}, 30)).text.startswith('{"sum": 5')
    assert file.read_text() == "called\n"


async def test_long_results_arrive_and_endless_ones_are_truncated() -> None:
    assert (await sample_tools.write_much.call({"count": 1_000_000}, 30)).text == "é" * 1_000_000
    text = (await sample_tools.write_much.call({"count": 3_000_000}, 30)).text
    assert len(text) < 1_100_000
    assert text.startswith("é" * 500_000)
    assert text.endswith("é" * 500_000)


async def test_programs_of_the_model_run_in_the_sandbox() -> None:
    assert (await python.call({"code": "print(6 * 7)"}, 60)).text == "42\n"
    with pytest.raises(ToolError, match="ZeroDivisionError"):
        await python.call({"code": "print('before'); 1 / 0"}, 60)
    with pytest.raises(ToolError):
        await python.call({"code": f"import os; os.kill({os.getpid()}, 9)"}, 60)
