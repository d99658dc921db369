"""Waits have a name, an owner and a deadline; what is late is found once, at half of it and when it is over."""

import asyncio
import json
from collections.abc import Awaitable
from contextlib import ExitStack

import pytest
from simulated_clock import simulate

from verl.cluster import group
from verl.cluster.group import call
from verl.cluster.hangs.detector import TICK_S, HangDetector, StalledCall
from verl.cluster.hangs.heartbeat import HeartbeatMonitor
from verl.cluster.hangs.pending_calls import (
    DEFAULT_DEADLINES,
    CallTarget,
    Deadline,
    Deadlines,
    PendingCalls,
    Progress,
    format_targets,
)
from verl.config.schema.trainer import DeadlinesConfig
from verl.errors import ProcessLostError

pytestmark = pytest.mark.unit

ENGINE = CallTarget("rollout engine", 0)
MINUTE = Deadline(60.0, "trainer.deadlines.generation")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def waits(clock: Clock) -> PendingCalls:
    return PendingCalls(clock)


def summarize(lates: list[StalledCall]) -> list[tuple[str, str, bool]]:
    return [(late.action, format_targets(late.targets), late.over) for late in lates]


def test_a_wait_is_open_while_it_lasts_also_when_it_fails(waits: PendingCalls) -> None:
    def divide() -> float:
        with waits.track_call("divide", target=ENGINE, deadline=MINUTE):
            assert [wait.action for wait in waits.active()] == ["divide"]
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        divide()
    assert waits.active() == []


def test_a_wait_is_said_at_half_its_deadline_and_when_it_is_over_and_once_each(
    waits: PendingCalls, clock: Clock
) -> None:
    lookout = HangDetector(waits, "controller")
    heard = []
    with waits.track_call("generate", target=ENGINE, deadline=MINUTE):
        for _ in range(200):
            clock.now += TICK_S
            heard += [(clock.now - 1000.0, late) for late in lookout.look()]
    assert [(at, late.over) for at, late in heard] == [(30.0, False), (60.0, True)]
    late = heard[1][1]
    assert "controller has waited 60 s, since" in late.words()
    assert late.words().endswith("for rollout engine 0 to generate")
    assert late.deadline == MINUTE
    assert len(late.table) == 1
    assert "trainer.deadlines.generation=60" in late.table[0]


def test_an_owner_that_finishes_something_has_the_whole_deadline_again(waits: PendingCalls, clock: Clock) -> None:
    lookout, progress = HangDetector(waits, "controller"), Progress()
    with waits.track_call("generate", target=ENGINE, deadline=MINUTE, progress=progress) as wait:
        for _ in range(10):
            clock.now += 29
            progress.at = clock()
            assert (lookout.look(), wait.remaining_s) == ([], 60.0)
        clock.now += 60
        assert summarize(lookout.look()) == [("generate", "rollout engine 0", True)]


def test_many_waits_for_one_kind_to_do_one_thing_are_one_line(waits: PendingCalls, clock: Clock) -> None:
    lookout = HangDetector(waits, "controller")
    ranks = [
        waits.track_call("update", target=CallTarget("train worker", rank), deadline=MINUTE, peers=5)
        for rank in range(5)
    ]
    for rank in ranks:
        rank.__enter__()
        clock.now += 0.1
    ranks[1].__exit__(None, None, None)
    clock.now = 1060.05  # the deadline of rank 0; those of the others are less than a tick away
    [late] = lookout.look()
    assert (format_targets(late.targets), late.over, late.peers) == ("train workers 0, 2-4", True, 5)
    clock.now += 10
    assert lookout.look() == []


def test_the_same_wait_is_told_again_when_it_is_late_another_time(waits: PendingCalls, clock: Clock) -> None:
    lookout = HangDetector(waits, "controller")
    for _ in range(2):
        with waits.track_call("generate", target=ENGINE, deadline=MINUTE):
            clock.now += 61
            assert summarize(lookout.look()) == [("generate", "rollout engine 0", True)]
        assert lookout.look() == []


def test_what_is_slow_all_the_time_is_not_said_all_the_time(waits: PendingCalls, clock: Clock) -> None:
    lookout, heard = HangDetector(waits, "controller"), 0
    for _ in range(30):  # 20 minutes of calls that each take two thirds of their deadline
        with waits.track_call("generate", target=ENGINE, deadline=MINUTE):
            clock.now += 40
            heard += len(lookout.look())
        lookout.look()
    assert heard == 2


def test_waits_for_the_same_are_counted_in_the_table(waits: PendingCalls, clock: Clock) -> None:
    lookout = HangDetector(waits, "episode worker 3")
    with ExitStack() as open_waits:
        for _ in range(3):
            open_waits.enter_context(waits.track_call("generate", target=ENGINE, deadline=MINUTE))
        clock.now += 60
        [late] = lookout.look()
    [line] = late.table
    assert "generate (3 times)" in line
    assert line.startswith("episode worker 3")


def test_what_is_late_can_be_sent(waits: PendingCalls, clock: Clock) -> None:
    lookout = HangDetector(waits, "episode worker 0")
    with waits.track_call("generate", target=ENGINE, deadline=MINUTE):
        clock.now += 60
        [late] = lookout.look()
    assert StalledCall.from_json(json.loads(json.dumps(late.to_json()))) == late


def test_every_deadline_knows_its_setting() -> None:
    read = Deadlines.read(DeadlinesConfig(generation=7))
    assert str(read.generation) == "trainer.deadlines.generation=7"
    assert {getattr(DEFAULT_DEADLINES, name).setting for name in DeadlinesConfig.model_fields} == {
        f"trainer.deadlines.{name}" for name in DeadlinesConfig.model_fields
    }
    assert DEFAULT_DEADLINES.longest_s == 3600


def on_the_loops_clock(monkeypatch: pytest.MonkeyPatch) -> PendingCalls:
    waits = PendingCalls(lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(group, "track_call", waits.track_call)
    return waits


def test_a_call_that_is_not_answered_ends_at_its_deadline_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = on_the_loops_clock(monkeypatch)

    async def scenario() -> float:
        with pytest.raises(
            ProcessLostError, match=r"60 s waiting for rollout engine 0 \(generate\)\. Increase .*deadlines\.generation"
        ):
            await call(asyncio.sleep(1000), action="generate", target=ENGINE, deadline=MINUTE)
        return asyncio.get_running_loop().time()

    assert simulate(scenario()) == 60
    assert waits.active() == []


def test_a_call_may_take_longer_while_others_of_its_owner_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_loops_clock(monkeypatch)
    progress = Progress()

    def asked(seconds: float) -> Awaitable[float]:
        answer = asyncio.sleep(seconds, seconds)
        return call(answer, action="generate", target=ENGINE, deadline=MINUTE, progress=progress)

    async def scenario() -> list[float | BaseException]:
        return await asyncio.gather(*(asked(s) for s in (50, 100, 150, 300)), return_exceptions=True)

    *answered, lost = simulate(scenario())
    assert answered == [50, 100, 150]
    assert isinstance(lost, ProcessLostError)


def test_work_of_a_process_that_is_there_may_take_for_ever_and_that_of_one_that_is_not_ends() -> None:
    asked: list[float] = []

    async def is_there() -> None:
        asked.append(asyncio.get_running_loop().time())
        if len(asked) > 5:
            raise ProcessLostError("gone")

    async def scenario() -> list[str | BaseException]:
        monitor = HeartbeatMonitor(is_there, every_s=60)
        work = [monitor.watch(asyncio.sleep(200 + k / 100, "done")) for k in range(50)]
        work += [monitor.watch(asyncio.sleep(10_000, "never")) for _ in range(50)]
        return await asyncio.gather(*work, return_exceptions=True)

    results = simulate(scenario())
    assert results[:50] == ["done"] * 50
    assert all(isinstance(result, ProcessLostError) for result in results[50:])
    assert asked == [60, 120, 180, 240, 300, 360]
