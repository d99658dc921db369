"""Adaptive samplers follow scores, and a resumed run draws exactly what an uninterrupted one does."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.config.schema.algorithm import FilterGroupsConfig
from verl.data.adaptive import SAMPLERS, AdaptiveSampler, DifficultySampler, ReplaySampler
from verl.data.samplers import PromptStream
from verl.errors import DataError
from verl.trainer.buffer.episode_buffer import EpisodeBuffer
from verl.types import SampleHandle

pytestmark = pytest.mark.unit


class Hardest:
    """A user's sampler: the row of the lowest total so far, with a memory of its draws."""

    def __init__(self, rows: int, seed: int, column: Callable[[str], list[Any]]) -> None:
        self.totals, self.draws = [0.0] * rows, [seed % rows]

    def row(self, position: int) -> int:
        counts = Counter(self.draws)
        row = min(range(len(self.totals)), key=lambda each: (self.totals[each] + counts[each], each))
        self.draws = [*self.draws, row][-4:]
        return row

    def record(self, row: int, scores: Sequence[float]) -> None:
        self.totals[row] += sum(scores)

    def state(self) -> dict[str, Any]:
        return {"totals": self.totals, "draws": self.draws}

    def load_state(self, state: dict[str, Any]) -> None:
        self.totals, self.draws = state["totals"], state["draws"]


KINDS: dict[str, Callable[..., Any]] = {**SAMPLERS, "hardest": Hardest}


def make(kind: str, rows: int = 9, seed: int = 1, **kwargs: Any) -> AdaptiveSampler:
    return AdaptiveSampler(KINDS[kind], kind, rows, seed, {}.__getitem__, kwargs)


def scores_of(position: int, row: int) -> list[float]:
    """Two responses, of which some cannot be scored; many rows are always or never solved."""
    draw = random.Random(position * 1000 + row)
    return [float(draw.random() < row / 8) for _ in range(2) if draw.random() < 0.9]


class Run:
    """Training with a buffer whose episodes finish in any order."""

    def __init__(self, stream: PromptStream, batch: int, staleness: int, is_dynamic: bool, timing: int) -> None:
        self.rows: list[tuple[int, int]] = []
        self._timing, self._batch = random.Random(timing), batch
        self.buffer = EpisodeBuffer(
            self.run_group,
            stream,
            batch,
            max_staleness=staleness,
            signal=FilterGroupsConfig(metric="score", max_num_gen_batches=3) if is_dynamic else None,
        )

    async def run_group(self, position: int, row: int) -> list[SampleHandle]:
        self.rows.append((position, row))
        for _ in range(self._timing.randrange(6)):
            await asyncio.sleep(0)
        return [SampleHandle(None, position, 4, 2, score, 10**6) for score in [*scores_of(position, row), 0.5]]

    async def train(self, first: int, steps: int) -> list[str]:
        """Return the state after every step, as a checkpoint holds it."""
        states = []
        for version in range(first, first + steps):
            self.buffer.advance(version)
            await self.buffer.take(self._batch)
            states.append(json.dumps(self.buffer.state()))
        await self.buffer.close()
        return states


@given(
    kind=st.sampled_from(list(KINDS)),
    batch=st.integers(1, 5),
    is_dynamic=st.booleans(),
    steps=st.integers(2, 8),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_run_resumed_after_any_step_draws_the_same_prompts(
    kind: str, batch: int, is_dynamic: bool, steps: int, data: st.DataObject
) -> None:
    stop = data.draw(st.integers(1, steps - 1))

    async def run() -> None:
        whole = Run(PromptStream(make(kind)), batch, 0, is_dynamic, timing=1)
        states = await whole.train(0, steps)
        stream = PromptStream(make(kind))
        stream.load(json.loads(states[stop - 1]))
        assert json.dumps(stream.state()) == states[stop - 1]
        resumed = Run(stream, batch, 0, is_dynamic, timing=2)
        assert await resumed.train(stop, steps - stop) == states[stop:]
        position = json.loads(states[stop - 1])["position"]
        assert dict(resumed.rows) == {at: row for at, row in whole.rows if at >= position}

    asyncio.run(run())


def test_replay_draws_hard_prompts_more_often_and_the_others_in_epochs() -> None:
    rows, hard = 40, {3, 17}
    stream, counts = PromptStream(make("replay", rows, fraction=0.25)), Counter[int]()
    for step in range(60):
        drawn = [next(stream)[1] for _ in range(8)]
        counts.update(drawn)
        if step >= 10:  # two epochs: all rows have been scored
            assert sum(row in hard for row in drawn) >= 2, "a quarter of each batch"
        stream.record([float(row not in hard)] * 4 for row in drawn)
    easy = [counts[row] for row in range(rows) if row not in hard]
    assert min(counts[row] for row in hard) > 4 * max(easy)
    assert max(easy) - min(easy) <= 1, "each once per epoch"


def test_difficulty_prefers_prompts_that_are_solved_sometimes() -> None:
    sampler = DifficultySampler(30, 0, {}.__getitem__)
    counts, position = Counter[int](), 0
    for _ in range(100):
        drawn = [sampler.row(position + k) for k in range(10)]
        assert len(set(drawn)) == 10, "a prompt is not drawn again while it is in flight"
        position += 10
        counts.update(drawn)
        for row in drawn:
            sampler.record(row, [[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]][row % 3])
    middle = sum(count for row, count in counts.items() if row % 3 == 1)
    assert middle > 2 * (counts.total() - middle)
    assert min(counts.values()) > 0, "the floor keeps all of them"


def test_a_mean_follows_recent_scores_and_a_group_without_scores_changes_nothing() -> None:
    sampler = ReplaySampler(2, 0, {}.__getitem__)
    for scores in ([1.0, 1.0], [0.0, 0.0], [], [5.0]):
        sampler.row(0)
        sampler.record(1, scores)
    assert sampler.state()["means"] == [0.75]


async def test_scores_are_recorded_in_the_order_of_the_stream_without_the_overlong_penalty() -> None:
    recorded: list[tuple[int, list[float]]] = []

    class Recorder(Hardest):
        def row(self, position: int) -> int:
            return position

        def record(self, row: int, scores: Sequence[float]) -> None:
            recorded.append((row, list(scores)))

    async def slow_first(position: int, row: int) -> list[SampleHandle]:
        await asyncio.sleep(0.01 if position == 0 else 0)
        return [SampleHandle(None, position, 4, 2, -9.0, 0, metrics={"raw_score": float(row)})]

    stream = PromptStream(AdaptiveSampler(Recorder, "mine", 9, 0, {}.__getitem__, {}))
    buffer = EpisodeBuffer(slow_first, stream, 3)
    buffer.advance(0)
    await buffer.take(3)
    assert recorded == [(0, [0.0]), (1, [1.0]), (2, [2.0])]
    await buffer.close()


def test_another_sampler_or_other_arguments_do_not_resume() -> None:
    state = PromptStream(make("replay", fraction=0.5)).state()
    with pytest.raises(DataError, match="sampler_kwargs"):
        PromptStream(make("replay")).load(state)
    with pytest.raises(DataError, match="sampler replay"):
        PromptStream(make("difficulty")).load(state)


def test_what_a_custom_sampler_does_wrong_is_named() -> None:
    def broken(**methods: Any) -> AdaptiveSampler:
        return AdaptiveSampler(type("Broken", (Hardest,), methods), "mine:Broken", 4, 0, {}.__getitem__, {})

    with pytest.raises(DataError, match=r"data\.sampler=mine:Broken has no method record; an adaptive sampler has row"):
        broken(record=None)
    with pytest.raises(DataError, match="returned 4 at position 7; rows go from 0 to 3"):
        broken(row=lambda self, position: 4).row(7)
    with pytest.raises(DataError, match="changes when it is saved as JSON"):
        broken(state=lambda self: {1: (2, 3)}).state()


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        ("replay", {"fraction": 1.0}),
        ("replay", {"threshold": 0.0}),
        ("difficulty", {"target": 2}),
        ("difficulty", {"floor": 0}),
    ],
)
def test_values_out_of_range_are_refused(kind: str, kwargs: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        make(kind, **kwargs)
