"""Timeouts hold whatever coroutines of the user do, and code that blocks disturbs no other episode."""

import asyncio
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agent_config import agent_config
from scripted_model import ScriptedModel

import verl
from verl.agents import user_code
from verl.agents.agent_episode import AgentEpisode
from verl.agents.builtin_agents import EnvironmentAgent, Task
from verl.agents.chat_model import ChatModel
from verl.agents.clock import start_clock, stop_clocks
from verl.agents.errors import LoopBlockedError, ToolFailureError
from verl.agents.transcript import Transcript
from verl.agents.user_code import UserCode, run_with_timeout
from verl.types import Prompt, SamplingParams

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]

LIMIT_S, BLOCK_S = 0.5, 20.0
HELD_S = 10.0  # far below the time for which the code blocks, on a busy machine
SAMPLING = SamplingParams(max_tokens=400)


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Give each test a shared loop of its own, and release what blocks at its end."""
    for name, value in (("_shared", None), ("_blocking", {}), ("_abandoned", {}), ("WATCH_S", 1.0)):
        monkeypatch.setattr(user_code, name, value)
    RELEASE.clear()
    yield RELEASE
    RELEASE.set()


RELEASE = threading.Event()


def block(seconds: float = BLOCK_S) -> None:
    RELEASE.wait(seconds)


def make_prompt(row: int = 0) -> Prompt:
    return Prompt(row, [1], raw=[{"role": "user", "content": "Go."}], extra_info={"row": row})


def call_tool(prompt: str) -> str:
    return '<tool_call>{"name": "slow_tool", "arguments": {}}</tool_call>'


@verl.tool
async def slow_tool() -> str:
    """Block the event loop."""
    block()
    return "late"


async def test_a_tool_that_blocks_its_event_loop_fails_at_its_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(ToolFailureError, match="slow_tool did not return within"):
        await slow_tool.call({}, LIMIT_S)
    assert time.monotonic() - start < HELD_S


async def test_the_stack_of_the_code_that_blocks_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ToolFailureError):
        await slow_tool.call({}, LIMIT_S)
    [record] = [each for each in caplog.records if each.name == user_code.__name__]
    assert "slow_tool blocks the event loop" in record.getMessage()
    assert "in slow_tool\n    block()" in record.getMessage()


async def test_the_event_loop_of_the_worker_is_never_blocked() -> None:
    gaps, last = [0.0], time.monotonic()

    async def measure() -> None:
        nonlocal last
        while True:
            await asyncio.sleep(0.05)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    measuring = asyncio.ensure_future(measure())
    with pytest.raises(ToolFailureError):
        await slow_tool.call({}, LIMIT_S)
    measuring.cancel()
    assert max(gaps) < HELD_S


async def block_in_row_0(task: Task, model: ChatModel) -> float:
    await model.chat(task.messages)
    if task.row["extra_info"]["row"] == 0:
        block()
    await asyncio.sleep(0.1)
    return 1.0


async def block_by_url_in_row_0(task: Task, base_url: str, api_key: str) -> float:
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(timeout=60, headers=headers, verify=False) as client:  # certificates take a while
        await client.post(f"{base_url}/chat/completions", json={"messages": task.messages})
    if task.row["extra_info"]["row"] == 0:
        block()
    await asyncio.sleep(0.1)
    return 1.0


@pytest.mark.parametrize("agent", [block_in_row_0, block_by_url_in_row_0])
async def test_an_agent_that_blocks_times_out_alone(agent: Callable[..., Any]) -> None:
    model = ScriptedModel(lambda prompt: "yes")
    episode = AgentEpisode(agent_config(agent="test", deadline_s=6.0), model.tokenizer, agent=agent)
    start = time.monotonic()
    transcripts = await asyncio.gather(*(episode(make_prompt(row), model.generate, SAMPLING) for row in range(6)))
    assert time.monotonic() - start < BLOCK_S
    assert [each.is_truncated for each in transcripts] == [True, *[False] * 5]
    assert [each.score for each in transcripts[1:]] == [1.0] * 5
    assert all(each.metrics["episode/attempts"] == 1.0 for each in transcripts), "being held up is not a failure"
    await episode.close()


async def test_code_that_blocked_once_gets_event_loops_of_its_own() -> None:
    async def sleep_and_block() -> int:
        block()
        return threading.get_ident()

    async def work() -> int:
        await asyncio.sleep(0)
        return threading.get_ident()

    async with UserCode(sleep_and_block) as code:
        with pytest.raises(ToolFailureError):
            await run_with_timeout(code.run(sleep_and_block), 0.2, "first")
    async with UserCode(work) as shared, UserCode(sleep_and_block) as own:
        blocking = asyncio.ensure_future(own.run(sleep_and_block))
        threads = {await run_with_timeout(shared.run(work), HELD_S, "other") for _ in range(3)}
        RELEASE.set()
        assert len(threads) == 1
        assert await blocking not in threads


async def test_code_that_computes_while_another_call_exceeds_its_timeout_has_not_blocked() -> None:
    async def wait() -> None:
        await asyncio.sleep(HELD_S)

    async def compute() -> str:
        block(0.6)
        return "done"

    async with UserCode(wait) as code, UserCode(compute) as other:
        waiting = asyncio.ensure_future(run_with_timeout(code.run(wait), 0.2, "wait"))
        await asyncio.sleep(0.1)
        assert await run_with_timeout(other.run(compute), HELD_S, "compute") == "done"
        with pytest.raises(ToolFailureError, match="wait did not return within"):
            await waiting
    assert not user_code._blocking


async def test_tasks_that_keep_an_event_loop_busy_in_turns_have_not_blocked() -> None:
    async def compute() -> None:
        block(0.3)

    async with UserCode(compute) as code:
        computing = [asyncio.ensure_future(code.run(compute)) for _ in range(6)]
        await asyncio.sleep(0.05)
        assert not await user_code.replace_blocked_loop()
        await asyncio.gather(*computing)
    assert not user_code._blocking


async def test_code_that_blocked_waits_for_a_loop_of_its_own_and_its_clock_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(user_code, "MAX_OWN_LOOPS", 2)

    async def blocks() -> int:
        block(0.3)
        return threading.get_ident()

    async def play() -> int:
        async with UserCode(blocks) as code:
            return int(await code.run(blocks))

    user_code._blocking[UserCode(blocks)._owner] = asyncio.Semaphore(user_code.MAX_OWN_LOOPS)
    before = threading.active_count()
    playing = [asyncio.ensure_future(run_with_timeout(play(), 0.8, "play")) for _ in range(8)]
    await asyncio.sleep(0.2)
    assert threading.active_count() <= before + 2
    assert len(set(await asyncio.gather(*playing))) >= 2, "8 x 0.3 s on 2 loops, and none exceeds 0.8 s"


async def test_calls_that_wait_at_once_stop_the_clock_once() -> None:
    with start_clock() as clock:
        with stop_clocks(), stop_clocks():
            await asyncio.sleep(0.2)
        await asyncio.sleep(0.1)
    assert 0.05 < clock.read() < 0.19


async def test_coroutines_share_an_event_loop_and_thereby_their_locks() -> None:
    lock = asyncio.Lock()

    async def work() -> int:
        async with lock:
            await asyncio.sleep(0.01)
            return id(asyncio.get_running_loop())

    async def run() -> int:
        async with UserCode(work) as code:
            return await code.run(work)

    loops = await asyncio.gather(*(run() for _ in range(8)))
    assert set(loops) == {loops[0]}
    assert loops[0] != id(asyncio.get_running_loop())


async def test_a_task_that_exits_or_stops_the_loop_does_not_end_the_calls_of_others() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def hostile() -> None:
        leaving = asyncio.ensure_future(leave())
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.05)
        assert leaving.done()

    async def work() -> str:
        await asyncio.sleep(0.3)
        return "done"

    async with UserCode(work) as code, UserCode(hostile) as other:
        working = asyncio.ensure_future(code.run(work))
        await run_with_timeout(other.run(hostile), HELD_S, "hostile")
        assert await run_with_timeout(working, HELD_S, "work") == "done"


async def test_a_callback_that_blocks_repeats_all_calls_of_its_loop() -> None:
    async def hostile() -> None:
        asyncio.get_running_loop().call_soon(block)
        await asyncio.sleep(60)

    async def work() -> None:
        await asyncio.sleep(60)

    async with UserCode(work) as code, UserCode(hostile) as other:
        calls = [asyncio.ensure_future(each) for each in (code.run(work), other.run(hostile))]
        await asyncio.sleep(0.2)
        assert await user_code.replace_blocked_loop()
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), HELD_S)
    assert [type(each) for each in results] == [LoopBlockedError] * 2


class Counting:
    """An environment of one step, which counts how often one is closed."""

    closed = 0

    async def reset(self, row: dict[str, Any]) -> str:
        return "Go."

    async def step(self, reply: Any) -> tuple[str, float, bool]:
        return "", 1.0, True

    async def close(self) -> None:
        type(self).closed += 1


async def test_an_episode_between_two_calls_is_repeated_when_its_loop_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Counting, "closed", 0)
    script, loops = ScriptedModel(lambda prompt: "yes"), list[user_code.UserLoop]()

    async def generate(token_ids: list[int], sampling: SamplingParams) -> Any:
        if not loops:
            assert user_code._shared is not None
            loops.append(user_code._shared)
            monkeypatch.setattr(user_code, "_shared", None)
            loops[0].replace()
            await asyncio.to_thread(loops[0]._thread.join)
        return await script.generate(token_ids, sampling)

    config = agent_config()
    episode = AgentEpisode(config, script.tokenizer)
    episode._agents["tool_agent"] = EnvironmentAgent(config.actor_rollout_ref.rollout.multi_turn, Counting)
    transcript = await episode(make_prompt(), generate, SAMPLING)
    assert loops, "the loop was replaced"
    assert transcript.failure is None
    assert transcript.metrics["episode/attempts"] == 1.0
    assert Counting.closed == 2, "the environment of the attempt that was given up is closed, too"


class Endless:
    """Yields messages without end."""

    def reset(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        return ({"role": "user", "content": str(each)} for each in itertools.takewhile(self.goes_on, itertools.count()))

    @staticmethod
    def goes_on(number: int) -> bool:
        time.sleep(0.001)
        return not RELEASE.is_set()

    async def step(self, reply: Any) -> None:
        raise NotImplementedError


class BlocksWhenMade:
    def __init__(self) -> None:
        block()


class BlocksInStep:
    def reset(self, row: dict[str, Any]) -> str:
        return "Go."

    def step(self, reply: Any) -> None:
        block()


async def play(make: Callable[[], Any], **limits: Any) -> Transcript:
    model = ScriptedModel(lambda prompt: "yes")
    config = agent_config(tool_deadline_s=LIMIT_S, **limits)
    episode = AgentEpisode(config, model.tokenizer)
    episode._agents["tool_agent"] = EnvironmentAgent(config.actor_rollout_ref.rollout.multi_turn, make)
    return await episode(make_prompt(), model.generate, SAMPLING)


@pytest.mark.parametrize("make", [Endless, BlocksWhenMade, BlocksInStep])
async def test_an_environment_that_blocks_fails_at_its_timeout(make: Callable[[], Any]) -> None:
    start = time.monotonic()
    transcript = await play(make)
    assert time.monotonic() - start < HELD_S
    assert transcript.failure is not None
    assert "did not return within 0.5 s" in transcript.failure.message


async def test_calls_that_never_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "MAX_ABANDONED", 3)
    before = threading.active_count()
    for _ in range(6):
        async with UserCode(block) as code:
            with pytest.raises(ToolFailureError) as raised:
                await run_with_timeout(code.run(block), 0.05, "block")
    assert "3 calls that exceeded their timeout have not ended" in str(raised.value)
    assert threading.active_count() <= before + 4  # and the event loop
    RELEASE.set()
    while user_code._abandoned:
        await asyncio.sleep(0.01)
    async with UserCode(block) as code:
        await run_with_timeout(code.run(block), HELD_S, "block")


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="interrupts threads of CPython")
@pytest.mark.parametrize("is_async", [False, True])
async def test_code_that_spins_beyond_its_timeout_is_ended(is_async: bool) -> None:
    def spin() -> None:
        while True:
            time.monotonic()

    async def spin_in_loop() -> None:
        spin()

    function = spin_in_loop if is_async else spin
    async with UserCode(function) as code:
        with pytest.raises(ToolFailureError):
            await run_with_timeout(code.run(function), 0.1, "spin")
    end = time.monotonic() + HELD_S
    while user_code._abandoned and time.monotonic() < end:
        await asyncio.sleep(0.01)
    assert not user_code._abandoned
