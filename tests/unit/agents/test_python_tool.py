"""Programs of the model wait for each other, also across processes, and the wait does not count as their time."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl.agents import python_tool
from verl.agents.errors import ToolFailureError
from verl.agents.python_tool import python, take_slot
from verl.config.schema.reward import SandboxConfig
from verl.rewards.sandbox.sandbox import ProgramResult

pytestmark = pytest.mark.unit

RUN_S = 0.3
HOLD_A_SLOT = """
import sys, time
from pathlib import Path
from verl.agents import python_tool
python_tool.get_user_folder = lambda: Path(sys.argv[1])
python_tool.take_slot(1)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Run one program at a time, each for `RUN_S`, and list them."""
    ran = list[str]()

    def run(code: str, **_: Any) -> ProgramResult:
        ran.append(code)
        time.sleep(RUN_S)
        return ProgramResult("ok", 0, "42\n", "", RUN_S)

    monkeypatch.setattr(python_tool, "get_user_folder", lambda: tmp_path)
    monkeypatch.setattr(python_tool, "check_requirements", lambda **_: None)
    monkeypatch.setattr(python_tool.sandbox, "run", run)
    python_tool.start_interpreter(SandboxConfig(max_programs=1))
    ran.clear()
    yield ran
    python_tool._interpreters.clear()


async def test_waiting_for_other_programs_does_not_count_as_time_of_a_call() -> None:
    results = await asyncio.gather(*(python.call({"code": "1"}, 2 * RUN_S) for _ in range(5)))
    assert [result.text for result in results] == ["42\n"] * 5


async def test_a_program_that_runs_too_long_exceeds_its_timeout_and_one_that_waits_never_starts(
    programs: list[str],
) -> None:
    calls = [asyncio.ensure_future(python.call({"code": str(index)}, RUN_S / 2)) for index in range(2)]
    await asyncio.sleep(0.05)
    calls[1].cancel()
    with pytest.raises(ToolFailureError, match="python did not return within"):
        await calls[0]
    await asyncio.sleep(2 * RUN_S)
    assert programs == ["0"]


async def test_processes_of_a_machine_share_their_slots(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD_A_SLOT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        waiting = asyncio.ensure_future(asyncio.to_thread(take_slot, 1))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        other.kill()
        await asyncio.wait_for(waiting, 10)
