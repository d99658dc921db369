"""Blocking tools run in processes of their own, and programs of the model in the sandbox."""

import asyncio
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import sample_tools
from agent_config import agent_config
from chat_bpe import bpe_tokenizer

import verl
from verl.agents import python_tool
from verl.agents.agent_episode import AgentEpisode
from verl.agents.errors import ToolError, ToolFailureError
from verl.agents.python_tool import python
from verl.agents.tools.function_tools import call_tool
from verl.agents.tools.processes import open_pool
from verl.agents.tools.results import ToolResult
from verl.config.paths import change_settings
from verl.config.schema.reward import SandboxConfig
from verl.errors import RewardError

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


@pytest.fixture
def _default_interpreter() -> Iterator[None]:
    yield
    python_tool._interpreters.clear()


@pytest.mark.usefixtures("_default_interpreter")
async def test_programs_obey_the_settings_of_the_sandbox_and_wait_for_each_other() -> None:
    python_tool.start_interpreter(SandboxConfig(seconds=1, memory_mb=256, max_programs=1))
    with pytest.raises(ToolError, match="timeout"):
        await python.call({"code": "while True: pass"}, 60)
    with pytest.raises(ToolError, match=r"MemoryError|memory"):
        await python.call({"code": "print(len(bytearray(300 << 20)))"}, 60)
    program = {"code": "import time; start = time.time(); time.sleep(0.3); print(start, time.time())"}
    results = await asyncio.gather(*(python.call(program, 60) for _ in range(3)))
    spans = sorted(tuple(map(float, result.text.split())) for result in results)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.usefixtures("_default_interpreter")
async def test_a_sandbox_that_fails_is_a_failure_and_not_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RewardError("sandbox: namespaces did not start")

    interpreter = python_tool.start_interpreter(SandboxConfig())
    monkeypatch.setattr(interpreter, "_run", fail)
    with pytest.raises(ToolFailureError, match="the sandbox failed: sandbox: namespaces did not start"):
        await call_tool({"python": python}, "python", {"code": "print(1)"}, 60)


def test_a_remote_sandbox_that_does_not_answer_is_found_at_start(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("from verl.agents.python_tool import python\n")
    config = agent_config(function_tool_path=str(tmp_path / "tools.py"))
    config = change_settings(config, {"reward.sandbox.url": "http://127.0.0.1:9"})
    with pytest.raises(RewardError, match=r"check reward\.sandbox\.url"):
        AgentEpisode(config, bpe_tokenizer())


async def test_programs_of_the_model_run_in_the_sandbox() -> None:
    assert (await python.call({"code": "print(6 * 7)"}, 60)).text == "42\n"
    with pytest.raises(ToolError, match="ZeroDivisionError"):
        await python.call({"code": "print('before'); 1 / 0"}, 60)
    with pytest.raises(ToolError):
        await python.call({"code": f"import os; os.kill({os.getpid()}, 9)"}, 60)
