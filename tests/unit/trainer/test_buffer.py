"""The buffer starts what the staleness allows, and no more; it hands out in order, and fails loudly."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.trainer.buffer import EpisodeBuffer
from verl.types import SampleHandle

pytestmark = pytest.mark.unit


def handle(group: int, version: int = 0) -> SampleHandle:
    return SampleHandle(ref=None, group=group, tokens=4, generated=2, score=0.0, version=version)


@given(batch=st.integers(1, 5), staleness=st.integers(0, 3), steps=st.integers(1, 5))
def test_no_group_starts_that_could_become_staler_than_allowed(batch: int, staleness: int, steps: int) -> None:
    async def run() -> None:
        version, started = 0, {}

        async def episode(position: int) -> list[SampleHandle]:
            started[position] = version
            return [handle(position, version)]

        buffer = EpisodeBuffer(episode, batch, max_staleness=staleness)
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
    async def slow_first(position: int) -> list[SampleHandle]:
        await asyncio.sleep(0.01 if position == 0 else 0)
        return [handle(position)]

    buffer = EpisodeBuffer(slow_first, 3)
    buffer.advance(0)
    assert [sample.group for sample in await buffer.take(3)] == [0, 1, 2]


async def test_a_failed_episode_fails_the_wait_with_its_own_error() -> None:
    async def broken(position: int) -> list[SampleHandle]:
        if position == 1:
            raise ZeroDivisionError("reward")
        await asyncio.sleep(60)
        return []

    buffer = EpisodeBuffer(broken, 2)
    buffer.advance(0)
    with pytest.raises(ZeroDivisionError, match="reward"):
        await asyncio.wait_for(buffer.take(2), 1)


async def test_waiting_for_groups_that_may_never_start_is_refused() -> None:
    async def never(position: int) -> list[SampleHandle]:
        return []

    buffer = EpisodeBuffer(never, 2)
    buffer.advance(0)
    with pytest.raises(RuntimeError, match="wait without end"):
        await buffer.take(3)
    await buffer.close()


async def test_a_resumed_buffer_goes_on_with_the_next_prompt() -> None:
    seen = []

    async def episode(position: int) -> list[SampleHandle]:
        seen.append(position)
        return [handle(position)]

    buffer = EpisodeBuffer(episode, 2, position=6)
    buffer.advance(3)
    await buffer.take(2)
    assert seen == [6, 7]
