"""The buffer starts groups as far as the staleness allows, returns them in order, and raises the errors of episodes."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.config.schema.algorithm import FilterGroupsConfig
from verl.data.samplers import PromptStream, SequentialSampler
from verl.errors import DataError, ProcessLostError, RewardError, WeightSyncError
from verl.trainer.buffer.episode_buffer import EpisodeBuffer
from verl.types import SampleHandle

pytestmark = pytest.mark.unit


def stream() -> PromptStream:
    return PromptStream(SequentialSampler(1000))


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


async def test_a_step_without_any_score_is_an_error() -> None:
    async def unscored(position: int, row: int) -> list[SampleHandle]:
        return []

    buffer = EpisodeBuffer(unscored, stream(), 2)
    buffer.advance(0)
    with pytest.raises(RewardError, match="none of the responses to 2 prompts could be scored"):
        await buffer.take(2)


async def test_samples_of_an_unverified_engine_are_discarded_if_their_group_had_started() -> None:
    version = 0

    async def by_both(position: int, row: int) -> list[SampleHandle]:
        return [replace(handle(position, version), index=engine, engines=frozenset([engine])) for engine in (0, 1)]

    buffer = EpisodeBuffer(by_both, stream(), 2, max_staleness=2)
    buffer.advance(0)
    assert len(await buffer.take(2)) == 4
    buffer.discard_from([1])
    version = 1
    buffer.advance(1)
    assert [sample.index for sample in await buffer.take(2)] == [0, 0]
    assert buffer.metrics == {"faults/samples_discarded": 2.0}
    assert "2 samples of rollout engines" in buffer.warnings[0]
    buffer.advance(2)
    assert len(await buffer.take(2)) == 2
    buffer.advance(3)
    assert len(await buffer.take(2)) == 4, "groups that start later run on a new process"
    assert not buffer.metrics
    await buffer.close()


async def test_a_step_whose_samples_are_all_discarded_restarts_the_run() -> None:
    async def by_one(position: int, row: int) -> list[SampleHandle]:
        return [replace(handle(position), engines=frozenset([1]))]

    buffer = EpisodeBuffer(by_one, stream(), 2)
    buffer.advance(0)
    buffer.discard_from([1])
    with pytest.raises(ProcessLostError, match="were not verified"):
        await buffer.take(2)


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
    with pytest.raises(RuntimeError, match="would wait forever"):
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


async def test_a_stale_response_stops_the_run() -> None:
    async def old(position: int, row: int) -> list[SampleHandle]:
        return [handle(position, version=1)]

    buffer = EpisodeBuffer(old, stream(), 1)
    buffer.advance(2)
    with pytest.raises(WeightSyncError, match=r"a response of version 1 .* version 2, .*trainer\.max_staleness"):
        await buffer.take(1)


@given(
    dropped=st.lists(st.booleans(), min_size=1, max_size=9).filter(lambda pattern: not all(pattern)),
    no_signal=st.lists(st.booleans(), min_size=1, max_size=9).filter(lambda pattern: not all(pattern)),
    batch=st.integers(1, 4),
    max_batches=st.integers(0, 3),
    dynamic=st.booleans(),
)
def test_a_run_with_dropped_prompts_equals_a_run_on_data_without_them(
    dropped: list[bool], no_signal: list[bool], batch: int, max_batches: int, dynamic: bool
) -> None:
    """The takes of a stream with such prompts are those of a stream without them, also after a resume."""

    def is_dropped(position: int) -> bool:
        return dropped[position % len(dropped)]

    there = [position for position in range(3000) if not is_dropped(position)]

    async def takes(*, gaps: bool, resume_at: int | None = None) -> list[object]:
        version, found = 0, []

        async def episode(position: int, row: int) -> list[SampleHandle] | None:
            if gaps and is_dropped(position):
                return None
            number = there.index(position) if gaps else position
            for _ in range(number % 3):
                await asyncio.sleep(0)
            scores = (0.0, 0.0) if no_signal[number % len(no_signal)] else (0.0, 1.0)
            return [SampleHandle(None, number, 4, 2, score, version) for score in scores]

        def buffer(order: PromptStream) -> EpisodeBuffer:
            signal = FilterGroupsConfig(metric="score", max_num_gen_batches=max_batches) if dynamic else None
            return EpisodeBuffer(episode, order, batch, signal=signal)

        feed = buffer(PromptStream(SequentialSampler(3000)))
        for version in range(4):
            feed.advance(version)
            try:
                found.append([sample.group for sample in await feed.take(batch)])
            except RewardError:
                found.append("nothing with signal")
                break
            if version == resume_at:
                again = PromptStream(SequentialSampler(3000))
                again.load(feed.state())
                await feed.close()
                feed = buffer(again)
        await feed.close()
        return found

    expected = asyncio.run(takes(gaps=False))
    assert asyncio.run(takes(gaps=True)) == expected
    assert asyncio.run(takes(gaps=True, resume_at=1)) == expected


async def test_dropped_prompts_are_counted_and_reported_once() -> None:
    async def episode(position: int, row: int) -> list[SampleHandle] | None:
        return None if position in (1, 2, 7) else [handle(position, version=position // 2)]

    buffer = EpisodeBuffer(episode, stream(), 2)
    seen = []
    for version in range(4):
        buffer.advance(version)
        await buffer.take(2)
        seen.append((buffer.metrics, len(buffer.warnings)))
    counts = [{"data/prompts_dropped": count} for count in (2.0, 0.0, 1.0, 0.0)]
    assert seen == [(counts[0], 1), (counts[1], 0), (counts[2], 0), (counts[3], 0)]


async def test_data_with_only_overlong_prompts_ends_the_run() -> None:
    async def episode(position: int, row: int) -> list[SampleHandle] | None:
        return None

    buffer = EpisodeBuffer(episode, stream(), 2)
    buffer.advance(0)
    with pytest.raises(DataError, match=r"201 of the last 201 prompts are longer than data\.max_prompt_length"):
        await asyncio.wait_for(buffer.take(2), 10)
    await buffer.close()
