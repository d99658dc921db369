"""With staleness, steps take groups as they finish; each is trained exactly once, in time, whatever happens."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_clock import simulate

from verl.config.schema.algorithm import FilterGroupsConfig
from verl.data.samplers import PromptStream, SequentialSampler
from verl.trainer.buffer.episode_buffer import EpisodeBuffer
from verl.trainer.buffer.selection import Selection
from verl.types import SampleHandle

pytestmark = pytest.mark.unit

LENGTHS = (0.1, 1.0, 1.0, 5.0, 50.0, 300.0)  # seconds that groups take; a step takes up to 20


@dataclass
class Run:
    """A run on a simulated clock, which is stopped and resumed; a seed decides everything."""

    batch: int
    staleness: int
    run_ahead: float
    steps: int
    no_signal: float = 0.0
    dropped: float = 0.0
    resumes: int = 0
    draw: Random = field(default_factory=Random)
    trained: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    saved: dict[str, Any] | None = None
    version: int = 0

    async def run_group(self, position: int, row: int) -> list[SampleHandle] | None:
        version = self.version
        await asyncio.sleep(Random(f"{position} {version}").choice(LENGTHS))
        kind = Random(f"kind {position}").random()
        if kind < self.dropped:
            return None
        scores = (0.5, 0.5) if kind < self.dropped + self.no_signal else (0.0, 1.0)
        return [SampleHandle(None, position, 4, 2, score, version, index=int(score)) for score in scores]

    async def train(self) -> None:
        """Train, and save after some steps; a resume loses all that came after the save."""
        kept, resumes = (0, [], []), self.resumes
        while True:
            version, trained, ages = kept
            self.trained, self.ages = [*trained], [*ages]
            stream = PromptStream(SequentialSampler(100_000))
            if self.saved is not None:
                stream.load(self.saved)
            signal = FilterGroupsConfig(metric="score", max_num_gen_batches=0) if self.no_signal else None
            buffer = EpisodeBuffer(
                self.run_group,
                stream,
                self.batch,
                max_staleness=self.staleness,
                run_ahead=self.run_ahead,
                signal=signal,
                steps=self.steps - version,
            )
            last = self.draw.randrange(self.steps) if resumes else self.steps
            for step in range(version, max(version, last)):
                self.version = step
                await self.step(buffer)
                if self.draw.random() < 0.5:
                    self.saved = buffer.state()
                    kept = (step + 1, [*self.trained], [*self.ages])
            self.rest = sorted(buffer._groups)
            self.state = buffer.state()
            await buffer.close()
            if resumes == 0:
                return
            resumes -= 1

    async def step(self, buffer: EpisodeBuffer) -> None:
        buffer.advance(self.version)
        await asyncio.sleep(0)
        samples = await buffer.take(self.batch)
        positions = Counter(sample.group for sample in samples)
        assert set(positions.values()) == {2}
        assert len(positions) == self.batch
        self.trained += positions
        self.ages += [self.version - sample.version for sample in samples]
        await asyncio.sleep(self.draw.uniform(0, 20))


def run(seed: int, batch: int, staleness: int, ahead: float, **options: Any) -> Run:
    made = Run(batch, staleness, ahead * staleness, 12, draw=Random(seed), **options)
    simulate(made.train())  # raises if it waits forever
    return made


sizes = {
    "seed": st.integers(0, 10**6),
    "batch": st.integers(1, 5),
    "staleness": st.integers(0, 4),
    "ahead": st.sampled_from([0.0, 0.25, 0.5, 1.0]),
}


@given(**sizes)
@settings(max_examples=60, deadline=None)
def test_every_group_is_trained_once_and_never_staler_than_allowed(**drawn: Any) -> None:
    done = run(**drawn)
    assert max(done.ages) <= done.staleness
    assert len(set(done.trained)) == len(done.trained) == done.batch * done.steps
    assert done.rest == [], "no group starts that no step would train"


@given(
    **sizes, no_signal=st.sampled_from([0.0, 0.3, 0.7]), dropped=st.sampled_from([0.0, 0.2]), resumes=st.integers(0, 3)
)
@settings(max_examples=80, deadline=None)
def test_no_position_is_skipped_or_repeated_over_resumes_rejections_and_drops(**drawn: Any) -> None:
    done = run(**drawn)
    assert len(set(done.trained)) == len(done.trained) == done.batch * done.steps
    assert max(done.ages) <= done.staleness
    consumed = set(range(done.state["position"])) | set(done.state.get("consumed", ()))
    kinds = {position: Random(f"kind {position}").random() for position in range(max(consumed) + 1)}
    unusable = {position for position, kind in kinds.items() if kind < done.dropped + done.no_signal}
    assert set(done.trained) <= consumed <= set(done.trained) | unusable, "a checkpoint names what is done"
    assert not unusable & set(done.trained)


def test_long_groups_do_not_hold_up_short_ones_until_they_have_to() -> None:
    async def episode(position: int, row: int) -> list[SampleHandle]:
        await asyncio.sleep(1000.0 if position == 0 else 1.0)
        return [SampleHandle(None, position, 4, 2, 0.0, 0)]

    async def train() -> list[list[int]]:
        loop = asyncio.get_running_loop()
        buffer = EpisodeBuffer(episode, PromptStream(SequentialSampler(99)), 2, max_staleness=3, run_ahead=1)
        taken, times = [], []
        for version in range(4):
            buffer.advance(version)
            taken.append([sample.group for sample in await buffer.take(2)])
            times.append(loop.time())
        await buffer.close()
        assert times[2] < 10
        assert times[3] >= 1000
        return taken

    assert simulate(train()) == [[1, 2], [3, 4], [5, 6], [0, 7]]


def test_the_rule_waits_for_groups_that_would_become_too_old() -> None:
    selection = Selection(2, max_staleness=1)
    for _ in range(4):
        selection.record_started(0)
    for _ in range(2):
        selection.record_finished(0)
    assert selection.can_take(2, version=0), "two are left for the next step"
    assert not selection.can_take(2, version=1), "none may be left"
