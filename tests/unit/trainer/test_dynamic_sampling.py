"""Dynamic sampling: a take depends on the order of the data and on which groups have signal, never on timing."""

import asyncio
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from weakref import WeakSet

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.config.schema.algorithm import FilterGroupsConfig
from verl.data.samplers import PromptStream, SequentialSampler
from verl.errors import ConfigError, RewardError, VerlError
from verl.trainer.buffer.episode_buffer import EpisodeBuffer
from verl.trainer.buffer.signal import group_has_signal
from verl.types import SampleHandle

pytestmark = pytest.mark.unit


def group_of(position: int, scores: list[float], version: int = 0, **fields: Any) -> list[SampleHandle]:
    return [
        SampleHandle("array", position, tokens=4, generated=2, score=score, version=version, **fields)
        for score in scores
    ]


@dataclass
class World:
    """Prompts whose signal is a pattern over their positions, answered in an order that a seed shuffles."""

    pattern: list[bool]
    disorder: int
    version: int = 0
    started: list[int] = field(default_factory=list)

    def has_signal(self, position: int) -> bool:
        return self.pattern[position % len(self.pattern)]

    async def run_group(self, position: int, row: int) -> list[SampleHandle]:
        version = self.version
        self.started.append(position)
        for _ in range(Random(f"{self.disorder}/{position}").randrange(12)):
            await asyncio.sleep(0)
        return group_of(position, [0.0, 1.0] if self.has_signal(position) else [0.5, 0.5], version)

    def expected(self, first: int, count: int, bound: float) -> tuple[list[int], int]:
        """The groups that a take from `first` on must return, and where the next one goes on."""
        found: list[int] = []
        position = first
        while len(found) < count and position - first < bound:
            found += [position] if self.has_signal(position) else []
            position += 1
        return found, position


def groups(samples: list[SampleHandle]) -> list[int]:
    return sorted({sample.group for sample in samples})


@given(
    pattern=st.lists(st.booleans(), min_size=1, max_size=12).filter(any),
    disorder=st.integers(0, 1000),
    batch=st.integers(1, 4),
    max_batches=st.integers(0, 4),
    pauses=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    stop_after=st.integers(0, 8),
)
def test_takes_follow_the_stream_within_the_bound_also_after_a_resume(
    pattern: list[bool],
    disorder: int,
    batch: int,
    max_batches: int,
    pauses: list[int],
    stop_after: int,
) -> None:
    """Order, bound and position without staleness, under any order of completion."""
    world = World(pattern, disorder)
    bound = max_batches * batch or float("inf")

    def buffer(stream: PromptStream) -> EpisodeBuffer:
        return EpisodeBuffer(
            world.run_group,
            stream,
            batch,
            signal=FilterGroupsConfig(metric="score", max_num_gen_batches=max_batches),
        )

    async def run() -> None:
        stream = PromptStream(SequentialSampler(7))
        feed, first = buffer(stream), 0
        for step, pause in enumerate(pauses):
            world.version = step
            feed.advance(step)
            expected, following = world.expected(first, batch, bound)
            if not expected:
                with pytest.raises(RewardError, match=f"0 of {int(bound)} groups .* {first} to {following - 1} of"):
                    await feed.take(batch)
                break
            samples = await feed.take(batch)
            assert [sample.group for sample in samples] == [group for group in expected for _ in range(2)]
            looked_at = following - first
            assert (
                feed.metrics.items()
                >= {
                    "sampling/groups_generated": looked_at,
                    "sampling/groups_dropped": looked_at - len(expected),
                    "sampling/gen_batches": looked_at / batch,
                }.items()
            )
            assert len(feed.warnings) == (len(expected) < batch)
            assert feed.state()["position"] == following
            assert sorted(world.started) == list(range(following)), "nothing is written that is not looked at"
            first = following
            for _ in range(pause):
                await asyncio.sleep(0)
            if step == stop_after:
                state = feed.state()
                await feed.close()
                world.started = list(range(first))
                stream = PromptStream(SequentialSampler(7))
                stream.load(state)
                feed = buffer(stream)
        assert len(set(world.started)) == len(world.started), "no prompt is drawn twice"
        await feed.close()

    asyncio.run(run())


async def test_a_replacement_starts_while_others_still_run() -> None:
    others = asyncio.Event()
    started: list[int] = []

    async def run_group(position: int, row: int) -> list[SampleHandle]:
        started.append(position)
        if position == 1:
            await others.wait()
        return group_of(position, [0.0, 0.0] if position == 0 else [0.0, 1.0])

    buffer = EpisodeBuffer(
        run_group,
        PromptStream(SequentialSampler(9)),
        2,
        signal=FilterGroupsConfig(metric="score", max_num_gen_batches=0),
    )
    buffer.advance(0)
    taking = asyncio.ensure_future(buffer.take(2))
    for _ in range(5):
        await asyncio.sleep(0)
    assert started == [0, 1, 2]
    others.set()
    assert groups(await taking) == [1, 2]


async def test_rejected_samples_are_released_from_the_object_store_at_once() -> None:
    class Array:
        """Something that a weak reference can watch."""

    stored: WeakSet[Array] = WeakSet()

    async def run_group(position: int, row: int) -> list[SampleHandle]:
        samples = group_of(position, [0.0, 0.0] if position < 3 else [0.0, 1.0])
        samples = [replace(sample, ref=Array()) for sample in samples]
        stored.update(sample.ref for sample in samples)
        return samples

    buffer = EpisodeBuffer(
        run_group,
        PromptStream(SequentialSampler(9)),
        2,
        signal=FilterGroupsConfig(metric="score", max_num_gen_batches=0),
    )
    buffer.advance(0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(stored) == 4
    assert {sample.ref for sample in await buffer.take(2)} == set(stored)


async def test_a_smaller_batch_comes_with_a_warning_and_a_full_one_without() -> None:
    world = World([True, False, False, False], 0)
    buffer = EpisodeBuffer(
        world.run_group,
        PromptStream(SequentialSampler(9)),
        2,
        signal=FilterGroupsConfig(metric="score", max_num_gen_batches=2),
    )
    buffer.advance(0)
    assert groups(await buffer.take(2)) == [0]
    [words] = buffer.warnings
    assert "1 of 4 groups have different scores, 2 are needed" in words
    assert "the mean score of the others is 0.5" in words
    assert "actor_rollout_ref.rollout.temperature" in words
    assert buffer.metrics["sampling/dropped_score_mean"] == 0.5

    world.pattern, world.version = [True], 1
    buffer.advance(1)
    assert groups(await buffer.take(2)) == [4, 5]
    assert buffer.warnings == []
    assert buffer.metrics == {
        "sampling/groups_generated": 2.0,
        "sampling/groups_dropped": 0.0,
        "sampling/gen_batches": 1.0,
    }


async def test_a_long_search_warns_at_increasing_intervals() -> None:
    world, said = World([False] * 85 + [True] * 2, 0), []
    buffer = EpisodeBuffer(
        world.run_group,
        PromptStream(SequentialSampler(9)),
        2,
        signal=FilterGroupsConfig(metric="score", max_num_gen_batches=0),
        warn=lambda text: said.append(text),
    )
    buffer.advance(0)
    assert groups(await buffer.take(2)) == [85, 86]
    assert [int(words.split(" of ")[1].split()[0]) for words in said] == [20, 40, 80]
    assert all("searched without a bound" in words and "rollout.temperature" in words for words in said)


async def test_without_dynamic_sampling_nothing_is_dropped_or_counted() -> None:
    world = World([False], 0)
    buffer = EpisodeBuffer(world.run_group, PromptStream(SequentialSampler(9)), 2)
    buffer.advance(0)
    assert groups(await buffer.take(2)) == [0, 1]
    assert (buffer.metrics, buffer.warnings) == ({}, [])


async def test_an_error_of_the_signal_filter_fails_the_take() -> None:
    world = World([True], 0)
    buffer = EpisodeBuffer(
        world.run_group,
        PromptStream(SequentialSampler(9)),
        2,
        signal=FilterGroupsConfig(metric="words", max_num_gen_batches=0),
    )
    buffer.advance(0)
    with pytest.raises(VerlError, match=r"filter_groups\.metric=words"):
        await buffer.take(2)
    await buffer.close()


@pytest.mark.parametrize("name", ["score", "seq_reward", "seq_final_reward", "acc"])
def test_scores_that_differ_are_signal(name: str) -> None:
    assert group_has_signal(group_of(0, [0.0, 0.0, 1.0]), name)
    assert not group_has_signal(group_of(0, [0.25, 0.25, 0.25]), name)
    assert not group_has_signal(group_of(0, [0.25]), name), "the others could not be scored"


@pytest.mark.parametrize(("name", "expected"), [("score", False), ("acc", False), ("seq_final_reward", True)])
def test_length_penalties_alone_are_not_a_signal(name: str, expected: bool) -> None:
    wrong = [
        handle
        for penalty in (0.0, -0.5)
        for handle in group_of(0, [penalty], metrics={"raw_score": 0.0, "overlong_penalty": penalty})
    ]
    assert group_has_signal(wrong, name) == expected


def test_a_named_number_is_compared_instead_of_the_score() -> None:
    same = group_of(0, [0.0, 0.5], metrics={"acc": 1.0})
    assert not group_has_signal(same, "acc")
    assert group_has_signal([*same, *group_of(0, [0.0], metrics={"acc": 0.0})], "acc")


def test_a_missing_metric_is_an_error_that_lists_those_that_exist() -> None:
    with pytest.raises(
        ConfigError, match=r"metric=tests: .* prompt 3 has no such number; choose one of score, format, words"
    ):
        group_has_signal(group_of(3, [0.0, 1.0], metrics={"words": 2.0, "format": 1.0}), "tests")
