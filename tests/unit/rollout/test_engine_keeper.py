"""An engine that is lost is ended, started, brought to the current weights, probed and opened; or given up, loudly."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from simulated_clock import simulate

from verl.errors import EngineError, ProcessLostError
from verl.rollout.supervisor import EngineEvent, EngineState, EngineSupervisor, within
from verl.weights.probe import Probe
from verl.weights.sync import HostTransport, WeightSync

pytestmark = pytest.mark.unit

PROBE = Probe(sequences=((1, 2, 3),), tolerance=1e-3)
NAMES = ["lost", "restarting", "syncing", "probing", "ready"]


class Model:
    """A trainer with one weight, that can die."""

    def __init__(self) -> None:
        self.weight, self.packed, self.is_gone = 0.0, 0, False

    async def pack_weights(self) -> Sequence[float]:
        if self.is_gone:
            raise ProcessLostError("train worker 1: pack_weights: its process has died")
        self.packed += 1
        return [self.weight]

    async def send_weights(self, backend: str, receivers: Sequence[object], version: int) -> None:
        raise AssertionError("not this way")

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[self.weight - token for token in sequence[1:]] for sequence in sequences]


class Engine:
    """A second to end, ten to start and two to load; dies and hangs as it is told."""

    def __init__(self) -> None:
        self.failing_starts = 0
        self.loads_nothing = self.dies_in_load = False
        self.starts, self.end_s = 0, 1.0
        self._begin()

    def _begin(self) -> None:
        self.is_up, self.is_started, self.hangs, self.is_open = True, True, False, False
        self.weight, self.held = -1.0, -1

    async def ready(self) -> bool:
        await self._reach()
        return self.is_open

    async def open(self, version: int) -> None:
        await self._reach()
        if self.held != version:
            raise ProcessLostError("another process")
        self.is_open = True

    async def end(self) -> None:
        await asyncio.sleep(self.end_s)
        self.is_up = self.is_open = self.hangs = False

    async def start(self) -> None:
        self.starts += 1
        await asyncio.sleep(10)
        if self.failing_starts:
            self.failing_starts -= 1
            raise EngineError("out of memory")
        self._begin()

    async def load_weights(self, parcels: Sequence[float], version: int) -> None:
        await self._reach()
        await asyncio.sleep(2)
        if self.dies_in_load:
            self.dies_in_load, self.is_up = False, False
        await self._reach()
        if not self.loads_nothing:
            [self.weight] = parcels
        self.held = version

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        await self._reach()
        return [self.weight - token for token in token_ids[1:]]

    async def version(self) -> int:
        await self._reach()
        return self.held

    async def _reach(self) -> None:
        while self.is_up and self.hangs:
            await asyncio.sleep(1)
        if not self.is_up:
            raise ProcessLostError("the process has died")


class Crew:
    """A model, engines, their keeper and the publisher, at version 0."""

    def __init__(self, count: int, **settings: Any) -> None:
        self.events: list[EngineEvent] = []
        self.model, self.engines = Model(), [Engine() for _ in range(count)]
        self.keeper = EngineSupervisor(self.engines, self.events.append, **settings)
        self.publisher = WeightSync(self.model, self.engines, HostTransport(), PROBE, self.keeper)

    async def start(self) -> None:
        self.keeper.start(self.publisher.join)
        await self.publisher.publish(0)
        self.events.clear()

    async def step(self, version: int) -> None:
        async with self.publisher.changing():
            await asyncio.sleep(5)
            self.model.weight = float(version)
        await self.publisher.publish(version)

    def moves_of(self, number: int) -> list[str]:
        return [event.now.value for event in self.events if event.number == number]

    def states(self) -> list[str]:
        return [state.value for state in self.keeper.states]


def scene(count: int, **settings: Any) -> Callable[[Callable[[Crew], Coroutine[Any, Any, None]]], Callable[[], None]]:
    def decorate(test: Callable[[Crew], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        async def play() -> None:
            crew = Crew(count, **settings)
            await crew.start()
            await test(crew)
            await crew.keeper.close()

        def run() -> None:
            simulate(play())

        run.__name__ = test.__name__
        return run

    return decorate


@scene(2)
async def test_the_first_publish_opens_the_engines(crew: Crew) -> None:
    assert crew.states() == ["ready", "ready"]
    assert all(engine.is_open for engine in crew.engines)


@scene(2)
async def test_a_heartbeat_finds_the_dead_and_brings_it_back_with_the_current_weights(crew: Crew) -> None:
    await crew.step(1)
    crew.engines[0].is_up = False
    await asyncio.sleep(60)
    assert crew.moves_of(0) == NAMES
    assert crew.moves_of(1) == []
    assert (crew.engines[0].weight, crew.engines[0].held, crew.engines[0].is_open) == (1.0, 1, True)
    assert crew.events[0].why == "the process has died"
    assert crew.events[-1].seconds == pytest.approx(13)  # end, start, load
    await crew.step(2)
    assert [engine.held for engine in crew.engines] == [2, 2]


@scene(2, answer_s=20)
async def test_one_that_does_not_answer_is_lost_also_in_the_middle_of_a_publish(crew: Crew) -> None:
    crew.engines[1].hangs = True
    await crew.step(1)
    assert crew.events[0].why == "no answer within 20 s"
    assert crew.engines[0].held == 1
    assert crew.states()[0] == "ready"
    await asyncio.sleep(60)
    assert crew.moves_of(1) == NAMES
    assert crew.engines[1].held == 1


@scene(1)
async def test_one_that_was_replaced_or_shut_is_lost(crew: Crew) -> None:
    crew.engines[0]._begin()
    await asyncio.sleep(60)
    assert crew.moves_of(0) == NAMES
    assert "replaced" in crew.events[0].why


@scene(2)
async def test_a_publish_goes_on_without_one_that_dies_in_it_and_ends_only_when_that_answers_nobody(crew: Crew) -> None:
    crew.engines[0].dies_in_load = True
    await crew.step(1)
    assert not crew.engines[0].is_up
    assert crew.states() == ["restarting", "ready"]
    await crew.step(2)  # 5 s of update, in which it waits to join
    await asyncio.sleep(30)
    assert crew.states() == ["ready", "ready"]
    assert [engine.held for engine in crew.engines] == [2, 2]


@scene(1)
async def test_a_publish_to_nobody_is_caught_up_by_who_comes_back(crew: Crew) -> None:
    crew.engines[0].is_up = False
    await asyncio.sleep(11)
    await crew.step(1)
    assert crew.states() == ["restarting"]
    assert crew.model.packed == 1  # for version 0: nobody was there to send the next one to
    await asyncio.sleep(30)
    assert (crew.states(), crew.engines[0].weight) == (["ready"], 1.0)


@scene(1)
async def test_nobody_joins_while_the_trained_weights_are_not_those_of_the_last_publish(crew: Crew) -> None:
    async with crew.publisher.changing():
        crew.engines[0].is_up = False
        crew.model.weight = 7.0
        await asyncio.sleep(100)
        assert crew.states() == ["syncing"]
    await asyncio.sleep(100)
    assert crew.states() == ["syncing"]
    await crew.publisher.publish(1)
    await asyncio.sleep(10)
    assert (crew.states(), crew.engines[0].held, crew.engines[0].weight) == (["ready"], 1, 7.0)


@scene(2, start_s=900.0)
async def test_an_end_may_take_as_long_as_a_start_and_no_longer(crew: Crew) -> None:
    engine = crew.engines[0]
    engine.is_up, engine.end_s = False, 890.0
    await asyncio.sleep(1000)
    assert crew.moves_of(0) == NAMES
    crew.events.clear()
    engine.is_up, engine.end_s = False, 910.0
    await asyncio.sleep(1000)
    engine.end_s = 1.0
    assert crew.moves_of(0)[:3] == ["lost", "restarting", "lost"]
    assert "no answer within 900 s" in crew.events[2].why


@scene(2)
async def test_failing_starts_are_tried_again_later_and_later(crew: Crew) -> None:
    crew.engines[0].is_up, crew.engines[0].failing_starts = False, 3
    await asyncio.sleep(120)
    assert crew.moves_of(0) == ["lost", "restarting"] * 4 + NAMES[2:]
    assert crew.events[-1].seconds == pytest.approx(4 * 11 + 1 + 2 + 4 + 2)


@scene(2, max_restarts=2)
async def test_wrong_weights_are_never_opened_and_given_up(crew: Crew) -> None:
    await crew.step(1)
    crew.engines[0].is_up, crew.engines[0].loads_nothing = False, True
    await asyncio.sleep(300)
    assert crew.states() == ["given up", "ready"]
    assert not crew.engines[0].is_open
    assert "2 restarts in a row failed, the last one: rollout engine 0 does not hold version 1" in crew.events[-1].why
    await crew.step(2)
    assert crew.engines[1].held == 2


@scene(1, max_restarts=2)
async def test_with_none_left_every_wait_ends_and_says_why(crew: Crew) -> None:
    crew.engines[0].is_up, crew.engines[0].failing_starts = False, 9
    with pytest.raises(EngineError, match=r"no rollout engine is left.*2 times.*engine 0: out of memory"):
        await crew.keeper.guard(asyncio.sleep(10_000))
    assert asyncio.get_running_loop().time() < 100
    with pytest.raises(EngineError, match="no rollout engine is left"):
        await crew.publisher.publish(1)


@scene(1)
async def test_a_train_worker_that_is_gone_is_the_runs_loss_and_ends_every_wait(crew: Crew) -> None:
    crew.model.is_gone = True
    crew.engines[0].is_up = False
    with pytest.raises(ProcessLostError, match="train worker 1"):
        await crew.keeper.guard(asyncio.sleep(10_000))
    assert crew.states() == ["syncing"]


@scene(1)
async def test_a_guarded_wait_gives_what_it_waited_for_or_its_error(crew: Crew) -> None:
    assert await crew.keeper.guard(asyncio.sleep(1, "done")) == "done"
    with pytest.raises(EngineError, match="another matter"):
        await crew.keeper.guard(_raise(EngineError("another matter")))


@scene(1)
async def test_a_keeper_that_fails_itself_ends_the_run(crew: Crew) -> None:
    def fail(event: EngineEvent) -> None:
        raise OSError("the console is gone")

    crew.keeper._report = fail
    crew.engines[0].is_up = False
    with pytest.raises(OSError, match="the console is gone"):
        await crew.keeper.guard(asyncio.sleep(10_000))


@scene(1, answer_s=20)
async def test_one_that_hangs_while_it_joins_is_ended_and_does_not_hold_the_run(crew: Crew) -> None:
    crew.engines[0].is_up = False
    while crew.states() != ["syncing"]:
        await asyncio.sleep(0.1)
    crew.engines[0].hangs = True
    await crew.step(1)
    assert asyncio.get_running_loop().time() < 70
    await asyncio.sleep(60)
    assert (crew.states(), crew.engines[0].held) == (["ready"], 1)


@scene(1)
async def test_a_move_that_makes_no_sense_is_refused(crew: Crew) -> None:
    with pytest.raises(RuntimeError, match="cannot go from ready to probing"):
        crew.keeper.carried(0)


@scene(1)
async def test_a_beat_that_is_cancelled_as_its_answer_comes_is_cancelled(crew: Crew) -> None:
    async def ask_for_ever() -> None:
        while True:
            await within(asyncio.sleep(0), 10)

    for turns in range(6):
        asking = asyncio.ensure_future(ask_for_ever())
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking], timeout=1)
        assert asking.cancelled()


def test_an_event_reads_as_a_sentence() -> None:
    event = EngineEvent(3, EngineState.PROBING, EngineState.READY, "", 41.6)
    assert str(event) == "rollout engine 3 is ready after 42 s (was probing)"


async def _raise(error: Exception) -> None:
    raise error
