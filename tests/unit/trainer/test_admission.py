"""Admission limits how many groups start; another selection policy keeps the promises of the buffer."""

import asyncio
from collections.abc import Collection
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.data.samplers import PromptStream, SequentialSampler
from verl.trainer.buffer.admission import Admission
from verl.trainer.buffer.episode_buffer import EpisodeBuffer
from verl.trainer.buffer.groups import Group
from verl.types import SampleHandle

pytestmark = pytest.mark.unit


def start_all(admission: Admission, position: int) -> int:
    """Start groups from `position` on until no more are allowed; return the next position."""
    while admission.may_start(position):
        admission.record_started()
        position += 1
    return position


@pytest.mark.parametrize(("run_ahead", "started"), [(0, [4, 8, 12]), (1, [8, 12, 16]), (0.3, [5, 9, 13])])
def test_each_version_allows_one_more_batch(run_ahead: float, started: list[int]) -> None:
    admission, position = Admission(4, run_ahead=run_ahead), 0
    for version, expected in enumerate(started, start=7):  # counted from the first version, as after a resume
        admission.advance(version, 0, 0)
        position = start_all(admission, position)
        assert position == expected


def test_rejected_groups_are_replaced_up_to_the_bound_of_the_search() -> None:
    admission = Admission(2, max_batches=2)
    admission.advance(0, 0, 0)
    position = start_all(admission, 0)
    for _ in range(9):
        admission.record_rejected()
    assert start_all(admission, position) == 4, "2 batches of 2 may be searched"


def test_dropped_prompts_are_replaced_beyond_the_bound() -> None:
    admission = Admission(2, max_batches=1)
    admission.advance(0, 0, 0)
    position = start_all(admission, 0)
    for _ in range(3):
        admission.record_dropped()
        position = start_all(admission, position)
    assert position == 5
    admission.advance(1, 2, 3)  # a take has seen the first two positions
    assert start_all(admission, position) == 7


class EarliestDeadlineFirst:
    """Takes what has finished, oldest version first, unless the rest could then not be trained in time."""

    def __init__(self, max_staleness: int) -> None:
        self._max_staleness = max_staleness

    async def select(self, groups: Collection[Group], count: int, version: int) -> list[Group]:
        while True:
            finished = sorted((group for group in groups if group.task.done()), key=lambda group: group.version)
            chosen = finished[:count]
            deadlines = [group.version + self._max_staleness for group in groups if group not in chosen]
            last = version + self._max_staleness
            if len(chosen) == count and all(
                sum(deadline <= until for deadline in deadlines) <= count * (until - version)
                for until in range(version, last + 1)
            ):
                return chosen
            running = [group.task for group in groups if not group.task.done()]
            assert running, "it would wait forever"
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)


@given(seed=st.integers(0, 10**6), batch=st.integers(1, 4), staleness=st.integers(0, 3))
def test_a_policy_that_takes_groups_out_of_order_trains_each_group_once_and_in_time(
    seed: int, batch: int, staleness: int
) -> None:
    draw, steps = Random(seed), 12

    async def run() -> None:
        version, taken = 0, list[int]()

        async def episode(position: int, row: int) -> list[SampleHandle]:
            started = version
            for _ in range(draw.choice([0, 1, 5, 40])):
                await asyncio.sleep(0)
            return [SampleHandle(None, position, 4, 2, 0.0, started)]

        policy = EarliestDeadlineFirst(staleness)
        stream = PromptStream(SequentialSampler(1000))
        buffer = EpisodeBuffer(episode, stream, batch, max_staleness=staleness, selection=policy)
        for version in range(steps):
            buffer.advance(version)
            taken += [sample.group for sample in await buffer.take(batch)]  # raises if one of them is too stale
            untaken = set(range(stream.position)).difference(taken)
            assert buffer.position == min(untaken, default=stream.position), "the first position to run again"
        assert len(set(taken)) == len(taken) == batch * steps
        await buffer.close()

    asyncio.run(run())
