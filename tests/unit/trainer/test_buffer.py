"""The buffer starts what the staleness allows, and no more; it hands out in order, and fails loudly."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.data.order import InOrder
from verl.data.stream import PromptStream
from verl.errors import WeightSyncError
from verl.trainer.buffer import EpisodeBuffer
from verl.types import SampleHandle

pytestmark = pytest.mark.unit


def stream() -> PromptStream:
    return PromptStream(InOrder(1000))


def handle(group: int, version: int = 0) -> SampleHandle:
    return SampleHandle(ref=None, group=group, tokens=4, generated=2, score=0.0, version=version)


@given(batch=st.integers(1, 5), staleness=st.integers(0, 3), steps=st.integers(1, 5))
def test_no_group_starts_that_could_become_staler_than_allowed(batch: int, staleness: int, steps: int) -> None:
    async def run() -> None:
        version, started = 0, {}

        async def episode(position: int, row: int) -> list[SampleHandle]:
            started[position] = version
            return [handle(position, version)]

        buffer = EpisodeBuffer(episode, stream(), batch, max_staleness=staleness)
        for version in range(steps):
            buffer.advance(version)
            await asyncio.sleep(0)
            taken = await buffer.take(batch)
            assert [sample.group for sample in taken] == list(range(version * batch, (version + 1) * batch))
            assert all(version - sample.version <= staleness for sample in taken)
        assert len(started) == batch * (steps + staleness)
        await buffer.close()

    asyncio.run(run())


async def test_groups_come_in_the_order_of_the_data_not_of_their_completion() -> None:
    async def slow_first(position: int, row: int) -> list[SampleHandle]:
        await asyncio.sleep(0.01 if position == 0 else 0)
        return [handle(position)]

    buffer = EpisodeBuffer(slow_first, stream(), 3)
    buffer.advance(0)
    assert [sample.group for sample in await buffer.take(3)] == [0, 1, 2]


async def test_a_failed_episode_fails_the_wait_with_its_own_error() -> None:
    async def broken(position: int, row: int) -> list[SampleHandle]:
        if position == 1:
            raise ZeroDivisionError("reward")
        await asyncio.sleep(60)
        return []

    buffer = EpisodeBuffer(broken, stream(), 2)
    buffer.advance(0)
    with pytest.raises(ZeroDivisionError, match="reward"):
        await asyncio.wait_for(buffer.take(2), 1)


async def test_waiting_for_groups_that_may_never_start_is_refused() -> None:
    async def never(position: int, row: int) -> list[SampleHandle]:
        return []

    buffer = EpisodeBuffer(never, stream(), 2)
    buffer.advance(0)
    with pytest.raises(RuntimeError, match="wait without end"):
        await buffer.take(3)
    await buffer.close()


async def test_a_resumed_buffer_goes_on_with_the_first_prompt_that_was_not_trained_on() -> None:
    seen: list[int] = []

    async def episode(position: int, row: int) -> list[SampleHandle]:
        seen.append(position)
        return [handle(position, version=3)]

    stopped = EpisodeBuffer(episode, stream(), 2, max_staleness=1)
    stopped.advance(3)
    await stopped.take(2)  # two more have started, and are not trained on
    state = stopped.state()
    await stopped.close()

    again = stream()
    again.load(state)
    resumed = EpisodeBuffer(episode, again, 2)
    seen.clear()
    resumed.advance(3)
    await resumed.take(2)
    assert seen == [2, 3]


async def test_an_answer_that_is_too_old_stops_the_run() -> None:
    async def old(position: int, row: int) -> list[SampleHandle]:
        return [handle(position, version=1)]

    buffer = EpisodeBuffer(old, stream(), 1)
    buffer.advance(2)
    with pytest.raises(WeightSyncError, match=r"written by version 1 .* version 2 .*trainer\.max_staleness"):
        await buffer.take(1)
