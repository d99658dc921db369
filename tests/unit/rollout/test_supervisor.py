"""An engine that is lost is ended, started, synced, probed and enabled; or given up, with an error."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

import pytest
from simulated_clock import simulate

from verl.errors import EngineError, ProcessLostError
from verl.rollout.engine import EngineView
from verl.rollout.supervisor import EngineEvent, EngineState, EngineSupervisor
from verl.waiting import with_timeout
from verl.weights.probe import Probe
from verl.weights.sync import HostTransport, WeightSync

pytestmark = pytest.mark.unit

PROBE = Probe(sequences=((1, 2, 3),), tolerance=1e-3)
NAMES = ["lost", "restarting", "syncing", "probing", "ready"]


class Model:
    """A trainer with one weight, that can die."""

    def __init__(self) -> None:
        self.weight, self.packed, self.is_gone = 0.0, 0, False

    async def pack_weights(self) -> AsyncGenerator[float, None]:
        if self.is_gone:
            raise ProcessLostError("train worker 1: pack_weights: its process has died")
        self.packed += 1
        yield self.weight

    async def send_weights(self, backend: str, receivers: Sequence[object], version: int) -> None:
        raise AssertionError("not this way")

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[self.weight - token for token in sequence[1:]] for sequence in sequences]


class Engine:
    """A second to end, ten to start and two to load; dies and hangs on demand."""

    def __init__(self) -> None:
        self.failing_starts = 0
        self.loads_nothing = self.dies_in_load = False
        self.starts, self.end_s, self.is_closed = 0, 1.0, False
        self._begin()

    def _begin(self) -> None:
        self.is_up, self.is_started, self.hangs, self.is_enabled = True, True, False, False
        self.weight, self.held, self.is_asleep = -1.0, -1, False

    async def is_ready(self) -> bool:
        await self._reach()
        return self.is_enabled

    async def enable(self, version: int) -> None:
        await self._reach()
        if self.held != version:
            raise ProcessLostError("another process")
        self.is_enabled = True

    async def sleep(self) -> None:
        await self._reach()
        self.is_asleep = True

    async def end(self) -> None:
        await asyncio.sleep(self.end_s)
        self.is_up = self.is_enabled = self.hangs = False

    async def close(self) -> None:
        self.is_up = self.is_enabled = False
        self.is_closed = True

    async def start(self) -> None:
        self.starts += 1
        await asyncio.sleep(10)
        if self.failing_starts:
            self.failing_starts -= 1
            raise EngineError("out of memory")
        self._begin()

    async def start_weight_update(self) -> None:
        await self._reach()

    async def load_bucket(self, bucket: float) -> None:
        await self._reach()
        await asyncio.sleep(2)
        if self.dies_in_load:
            self.dies_in_load, self.is_up = False, False
        await self._reach()
        if not self.loads_nothing:
            self.weight = bucket

    async def finish_weight_update(self, version: int) -> None:
        await self._reach()
        self.held, self.is_asleep = version, False

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        await self._reach()
        return [[self.weight - token for token in each[1:]] for each in sequences]

    async def version(self) -> int:
        await self._reach()
        return self.held

    async def _reach(self) -> None:
        while self.is_up and self.hangs:
            await asyncio.sleep(1)
        if not self.is_up:
            raise ProcessLostError("the process has died")


class Scene:
    """A model, engines, their supervisor and the weight sync, at version 0."""

    def __init__(self, count: int, **settings: Any) -> None:
        self.events: list[EngineEvent] = []
        self.model, self.engines = Model(), [Engine() for _ in range(count)]
        self.views: list[list[int]] = []  # that pools were told
        self.pools_are_idle = asyncio.Event()
        self.pools_are_idle.set()
        self.supervisor = EngineSupervisor(self.engines, self.events.append, **settings)
        self.supervisor.follow(self.update_pools)
        self.weights = WeightSync(self.model, self.supervisor, HostTransport(), PROBE)

    async def start(self) -> None:
        self.supervisor.start(self.weights.sync_one)
        await self.weights.sync(0)
        self.events.clear()

    async def update_pools(self, view: EngineView) -> None:
        self.views.append(list(view.engines))
        await self.pools_are_idle.wait()

    def spawn(self, engine_id: int) -> Engine:
        self.engines.append(Engine())
        self.engines[-1].is_up = False  # until it is started
        return self.engines[engine_id]

    async def step(self, version: int) -> None:
        async with self.weights.updating():
            await asyncio.sleep(5)
            self.model.weight = float(version)
        await self.weights.sync(version)

    def moves_of(self, number: int) -> list[str]:
        return [event.state.value for event in self.events if event.engine_id == number]

    def states(self) -> list[str]:
        return [state.value for state in self.supervisor.states.values()]


def scene(count: int, **settings: Any) -> Callable[[Callable[[Scene], Coroutine[Any, Any, None]]], Callable[[], None]]:
    def decorate(test: Callable[[Scene], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        async def play() -> None:
            run = Scene(count, **settings)
            await run.start()
            await test(run)
            await run.supervisor.close()

        def play_in_simulated_time() -> None:
            simulate(play())

        play_in_simulated_time.__name__ = test.__name__
        return play_in_simulated_time

    return decorate


@scene(2)
async def test_the_first_sync_enables_the_engines(run: Scene) -> None:
    assert run.states() == ["ready", "ready"]
    assert all(engine.is_enabled for engine in run.engines)


@scene(2)
async def test_a_dead_engine_is_found_by_a_heartbeat_and_restarted_with_the_current_weights(run: Scene) -> None:
    await run.step(1)
    run.engines[0].is_up = False
    await asyncio.sleep(60)
    assert run.moves_of(0) == NAMES
    assert run.moves_of(1) == []
    assert (run.engines[0].weight, run.engines[0].held, run.engines[0].is_enabled) == (1.0, 1, True)
    assert run.events[0].reason == "the process has died"
    assert run.events[-1].seconds == pytest.approx(13)  # end, start, load
    await run.step(2)
    assert [engine.held for engine in run.engines] == [2, 2]


@scene(2, reply_timeout_s=20)
async def test_an_engine_that_does_not_reply_is_lost_even_during_a_sync(run: Scene) -> None:
    run.engines[1].hangs = True
    await run.step(1)
    assert run.events[0].reason == "no reply within 20 s"
    assert run.engines[0].held == 1
    assert run.states()[0] == "ready"
    await asyncio.sleep(60)
    assert run.moves_of(1) == NAMES
    assert run.engines[1].held == 1


@scene(1)
async def test_an_engine_that_was_replaced_or_disabled_is_lost(run: Scene) -> None:
    run.engines[0]._begin()
    await asyncio.sleep(60)
    assert run.moves_of(0) == NAMES
    assert "replaced" in run.events[0].reason


@scene(2)
async def test_a_sync_continues_without_an_engine_that_dies_and_waits_until_its_process_has_ended(
    run: Scene,
) -> None:
    run.engines[0].dies_in_load = True
    await run.step(1)
    assert not run.engines[0].is_up
    assert run.states() == ["restarting", "ready"]
    await run.step(2)  # 5 s of update, in which it waits to join
    await asyncio.sleep(30)
    assert run.states() == ["ready", "ready"]
    assert [engine.held for engine in run.engines] == [2, 2]


@scene(1)
async def test_an_engine_that_recovers_gets_the_weights_of_a_sync_without_engines(run: Scene) -> None:
    run.engines[0].is_up = False
    await asyncio.sleep(11)
    await run.step(1)
    assert run.states() == ["restarting"]
    assert run.model.packed == 1  # for version 0: nobody was there to send the next one to
    await asyncio.sleep(30)
    assert (run.states(), run.engines[0].weight) == (["ready"], 1.0)


@scene(1)
async def test_no_engine_is_synced_while_the_trained_weights_are_not_those_of_the_last_sync(run: Scene) -> None:
    async with run.weights.updating():
        run.engines[0].is_up = False
        run.model.weight = 7.0
        await asyncio.sleep(100)
        assert run.states() == ["syncing"]
    await asyncio.sleep(100)
    assert run.states() == ["syncing"]
    await run.weights.sync(1)
    await asyncio.sleep(10)
    assert (run.states(), run.engines[0].held, run.engines[0].weight) == (["ready"], 1, 7.0)


@scene(2, start_timeout_s=900.0)
async def test_ending_an_engine_has_the_timeout_of_a_start(run: Scene) -> None:
    engine = run.engines[0]
    engine.is_up, engine.end_s = False, 890.0
    await asyncio.sleep(1000)
    assert run.moves_of(0) == NAMES
    run.events.clear()
    engine.is_up, engine.end_s = False, 910.0
    await asyncio.sleep(1000)
    engine.end_s = 1.0
    assert run.moves_of(0)[:3] == ["lost", "restarting", "lost"]
    assert "no reply within 900 s" in run.events[2].reason


@scene(2)
async def test_failed_starts_are_retried_with_increasing_pauses(run: Scene) -> None:
    run.engines[0].is_up, run.engines[0].failing_starts = False, 3
    await asyncio.sleep(120)
    assert run.moves_of(0) == ["lost", "restarting"] * 4 + NAMES[2:]
    assert run.events[-1].seconds == pytest.approx(4 * 11 + 1 + 2 + 4 + 2)


@scene(2, max_restarts=2)
async def test_an_engine_with_wrong_weights_is_never_enabled_and_finally_given_up(run: Scene) -> None:
    await run.step(1)
    run.engines[0].is_up, run.engines[0].loads_nothing = False, True
    await asyncio.sleep(300)
    assert run.states() == ["given up", "ready"]
    assert not run.engines[0].is_enabled
    assert "2 restarts in a row failed, the last one: rollout engine 0 does not hold version 1" in run.events[-1].reason
    await run.step(2)
    assert run.engines[1].held == 2


@scene(1, max_restarts=2)
async def test_without_engines_every_wait_fails_with_the_reason(run: Scene) -> None:
    run.engines[0].is_up, run.engines[0].failing_starts = False, 9
    with pytest.raises(EngineError, match=r"All rollout engines failed after 2 restarts.*engine 0: out of memory"):
        await run.supervisor.run_while_available(asyncio.sleep(10_000))
    assert asyncio.get_running_loop().time() < 100
    with pytest.raises(EngineError, match="All rollout engines failed"):
        await run.weights.sync(1)


@scene(1)
async def test_the_loss_of_a_train_worker_ends_every_wait(run: Scene) -> None:
    run.model.is_gone = True
    run.engines[0].is_up = False
    with pytest.raises(ProcessLostError, match="train worker 1"):
        await run.supervisor.run_while_available(asyncio.sleep(10_000))
    assert run.states() == ["syncing"]


@scene(1)
async def test_run_while_available_returns_the_result_or_raises_the_error(run: Scene) -> None:
    assert await run.supervisor.run_while_available(asyncio.sleep(1, "done")) == "done"
    with pytest.raises(EngineError, match="another matter"):
        await run.supervisor.run_while_available(_raise(EngineError("another matter")))


@scene(1)
async def test_an_error_in_the_supervisor_ends_the_run(run: Scene) -> None:
    def fail(event: EngineEvent) -> None:
        raise OSError("the console is gone")

    run.supervisor._report = fail
    run.engines[0].is_up = False
    with pytest.raises(OSError, match="the console is gone"):
        await run.supervisor.run_while_available(asyncio.sleep(10_000))


@scene(1, reply_timeout_s=20)
async def test_an_engine_that_hangs_in_a_sync_is_ended_and_does_not_block_the_run(run: Scene) -> None:
    run.engines[0].is_up = False
    while run.states() != ["syncing"]:
        await asyncio.sleep(0.1)
    run.engines[0].hangs = True
    await run.step(1)
    assert asyncio.get_running_loop().time() < 70
    await asyncio.sleep(60)
    assert (run.states(), run.engines[0].held) == (["ready"], 1)


@scene(1)
async def test_an_illegal_change_of_state_raises(run: Scene) -> None:
    with pytest.raises(RuntimeError, match="cannot go from ready to probing"):
        run.supervisor.mark_synced(0)


@scene(1)
async def test_a_heartbeat_can_be_cancelled_when_its_reply_arrives(run: Scene) -> None:
    async def ask_for_ever() -> None:
        while True:
            await with_timeout(asyncio.sleep(0), 10)

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


@scene(2, shares_devices=True)
async def test_engines_that_sleep_during_training_are_not_lost(run: Scene) -> None:
    await run.weights.free_devices()
    await asyncio.sleep(100)  # heartbeats
    assert all(engine.is_asleep for engine in run.engines)
    assert run.states() == ["ready", "ready"]
    await run.step(1)
    assert not any(engine.is_asleep for engine in run.engines)


@scene(2, shares_devices=True)
async def test_an_engine_that_dies_asleep_starts_when_the_trainer_no_longer_needs_its_device(run: Scene) -> None:
    await run.weights.free_devices()
    run.engines[0].is_up = False
    await asyncio.sleep(100)
    assert run.engines[0].starts == 0
    assert run.states() == ["restarting", "ready"]
    await run.step(1)
    await asyncio.sleep(100)
    assert run.states() == ["ready", "ready"]
    assert run.engines[0].weight == 1.0


@scene(2, shares_devices=True)
async def test_training_waits_for_an_engine_that_is_starting_and_puts_it_to_sleep(run: Scene) -> None:
    run.engines[0].is_up = False
    await asyncio.sleep(16)  # found by a heartbeat, ended, and starting
    assert run.engines[0].starts == 1
    assert not run.engines[0].is_up
    await run.weights.free_devices()
    assert run.engines[0].is_asleep
    await run.step(1)
    await asyncio.sleep(100)
    assert run.states() == ["ready", "ready"]


@scene(2, shares_devices=[1])
async def test_only_engines_on_lent_devices_sleep_and_pools_prefer_the_others(run: Scene) -> None:
    await run.weights.free_devices()
    assert [engine.is_asleep for engine in run.engines] == [False, True]
    assert run.supervisor.view.asleep == {1}
    await run.step(1)
    assert [engine.is_asleep for engine in run.engines] == [False, False]
    assert [engine.held for engine in run.engines] == [1, 1]
    assert run.supervisor.view.asleep == set()
    await asyncio.sleep(1)
    assert run.views == [[0, 1]] * 2, "a view for each change"


@scene(2, shares_devices=[1])
async def test_an_engine_on_its_own_devices_is_restarted_while_the_trainer_uses_those_that_it_lends(run: Scene) -> None:
    await run.weights.free_devices()
    for engine in run.engines:
        engine.is_up = False
    await asyncio.sleep(100)
    assert [engine.starts for engine in run.engines] == [1, 0]
    assert run.states() == ["syncing", "restarting"], "the trained weights are not yet those of the engines"
    await run.step(1)
    await asyncio.sleep(100)
    assert run.states() == ["ready", "ready"]
    assert [engine.weight for engine in run.engines] == [1.0, 1.0]


@scene(1)
async def test_engines_on_devices_of_their_own_do_not_sleep(run: Scene) -> None:
    await run.weights.free_devices()
    assert not run.engines[0].is_asleep


@scene(2)
async def test_an_engine_that_joins_is_started_synced_and_probed_before_it_gets_requests(run: Scene) -> None:
    await run.step(1)
    assert run.supervisor.add(run.spawn) == 2
    await asyncio.sleep(5)
    assert (run.states(), run.views) == (["ready", "ready", "joining"], [])
    await asyncio.sleep(20)
    assert run.moves_of(2) == ["syncing", "probing", "ready"]
    assert [(event.joins, round(event.seconds)) for event in run.events[-1:]] == [(True, 12)]
    assert (run.engines[2].weight, run.engines[2].held, run.engines[2].is_enabled) == (1.0, 1, True)
    assert run.views == [[0, 1, 2]]
    await run.step(2)
    assert [engine.held for engine in run.engines] == [2, 2, 2]


@scene(1)
async def test_an_engine_that_fails_to_join_is_tried_again_and_then_restarted_like_the_others(run: Scene) -> None:
    def spawn(engine_id: int) -> Engine:
        engine = run.spawn(engine_id)
        engine.failing_starts = 1
        return engine

    run.supervisor.add(spawn)
    await asyncio.sleep(60)
    assert run.moves_of(1) == NAMES
    assert run.views == [[0, 1]]
    run.engines[1].is_up = False
    await asyncio.sleep(60)
    assert run.moves_of(1) == NAMES * 2
    assert not run.events[-1].joins
    assert run.views == [[0, 1]], "pools find out about losses by themselves"


@scene(1)
async def test_an_engine_does_not_join_while_the_trained_weights_change(run: Scene) -> None:
    async with run.weights.updating():
        run.supervisor.add(run.spawn)
        run.model.weight = 7.0
        await asyncio.sleep(100)
        assert run.states() == ["ready", "syncing"]
    await run.weights.sync(1)
    await asyncio.sleep(10)
    assert (run.states(), run.engines[1].weight) == (["ready", "ready"], 7.0)


@scene(1, shares_devices=True)
async def test_an_engine_joins_when_the_trainer_has_freed_the_devices(run: Scene) -> None:
    await run.weights.free_devices()
    run.supervisor.add(run.spawn)
    await asyncio.sleep(100)
    assert (run.states(), run.engines[1].starts) == (["ready", "joining"], 0)
    await run.step(1)
    await asyncio.sleep(20)
    assert (run.states(), run.engines[1].held) == (["ready", "ready"], 1)


@scene(2)
async def test_an_engine_that_leaves_finishes_its_requests_with_the_current_weights(run: Scene) -> None:
    run.pools_are_idle.clear()
    leaving = asyncio.ensure_future(run.supervisor.remove(0, drain_timeout_s=600))
    await asyncio.sleep(1)
    assert (run.states(), run.views) == (["draining", "ready"], [[1]])
    await run.step(1)
    assert (run.engines[0].held, run.engines[0].is_enabled) == (1, True)
    run.pools_are_idle.set()
    await leaving
    assert run.moves_of(0) == ["draining", "left"]
    assert run.engines[0].is_closed
    assert run.supervisor.states.keys() == {1}
    assert run.supervisor.engines == [run.engines[1]]
    await run.step(2)
    assert [engine.held for engine in run.engines] == [1, 2]
    assert run.supervisor.add(run.spawn) == 2, "ids are not used again"


@scene(2)
async def test_requests_that_exceed_the_drain_timeout_are_stopped(run: Scene) -> None:
    run.pools_are_idle.clear()
    leaving = asyncio.ensure_future(run.supervisor.remove(0, drain_timeout_s=30))
    await asyncio.sleep(29)
    assert run.engines[0].is_up
    await asyncio.sleep(5)
    assert not run.engines[0].is_up
    assert not leaving.done(), "pools may still wait for replies of the old process"
    run.pools_are_idle.set()
    await leaving


@scene(2)
async def test_an_engine_that_dies_while_it_leaves_is_not_restarted(run: Scene) -> None:
    run.pools_are_idle.clear()
    leaving = asyncio.ensure_future(run.supervisor.remove(0, drain_timeout_s=600))
    await asyncio.sleep(1)
    run.engines[0].is_up = False
    await asyncio.sleep(60)
    run.pools_are_idle.set()
    await leaving
    assert run.moves_of(0) == ["draining", "lost", "left"]
    assert run.engines[0].starts == 0


@scene(2)
async def test_an_engine_that_is_being_restarted_leaves_at_once(run: Scene) -> None:
    run.engines[0].is_up = False
    await asyncio.sleep(15)
    assert run.states() == ["restarting", "ready"]
    await run.supervisor.remove(0, drain_timeout_s=600)
    assert (run.states(), run.moves_of(0)[-1], run.engines[0].is_closed) == (["ready"], "left", True)
    await run.step(1)


@scene(2)
async def test_the_last_engine_cannot_leave_and_none_leaves_twice(run: Scene) -> None:
    run.pools_are_idle.clear()
    leaving = asyncio.ensure_future(run.supervisor.remove(0, drain_timeout_s=600))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="engine 0 is already leaving"):
        await run.supervisor.remove(0, drain_timeout_s=600)
    with pytest.raises(ValueError, match="engine 1 cannot leave: no other engine would be left"):
        await run.supervisor.remove(1, drain_timeout_s=600)
    run.pools_are_idle.set()
    await leaving


@scene(2, start_timeout_s=100)
async def test_an_engine_that_cannot_be_ended_when_it_leaves_ends_the_run(run: Scene) -> None:
    run.engines[0].end_s = 1000.0
    run.pools_are_idle.clear()
    with pytest.raises(ProcessLostError, match="rollout engine 0 could not be ended"):
        await run.supervisor.remove(0, drain_timeout_s=600)
    with pytest.raises(ProcessLostError, match="rollout engine 0 could not be ended"):
        await run.supervisor.run_while_available(asyncio.sleep(1))
