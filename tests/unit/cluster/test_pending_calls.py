"""Pending calls have an action, a target and a timeout; stalled ones are found at half of it, and when it is over."""

import asyncio
import pickle
from collections.abc import Awaitable
from contextlib import ExitStack

import pytest
from simulated_clock import simulate

from verl.cluster import actors
from verl.cluster.actors import await_reply
from verl.cluster.hangs.detector import TICK_S, HangDetector, StalledCall
from verl.cluster.hangs.pending_calls import (
    DEFAULT_TIMEOUTS,
    CallTarget,
    HeartbeatMonitor,
    PendingCalls,
    Progress,
    Timeout,
    Timeouts,
    format_targets,
)
from verl.config.schema.trainer import DeadlinesConfig
from verl.errors import ProcessLostError

pytestmark = pytest.mark.unit

ENGINE = CallTarget("rollout engine", 0)
MINUTE = Timeout(60.0, "trainer.deadlines.generation")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def calls(clock: Clock) -> PendingCalls:
    return PendingCalls(clock)


def summarize(stalled_calls: list[StalledCall]) -> list[tuple[str, str, bool]]:
    return [(stalled.action, format_targets(stalled.targets), stalled.is_overdue) for stalled in stalled_calls]


def test_a_call_is_pending_until_it_returns_or_fails(calls: PendingCalls) -> None:
    def divide() -> float:
        with calls.track_call("divide", target=ENGINE, timeout=MINUTE):
            assert [call.action for call in calls.list_calls()] == ["divide"]
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        divide()
    assert calls.list_calls() == []


def test_a_call_is_reported_once_at_half_its_timeout_and_once_when_it_is_overdue(
    calls: PendingCalls, clock: Clock
) -> None:
    detector = HangDetector(calls, "controller")
    heard = []
    with calls.track_call("generate", target=ENGINE, timeout=MINUTE):
        for _ in range(200):
            clock.now += TICK_S
            heard += [(clock.now - 1000.0, stalled) for stalled in detector.poll()]
    assert [(when, stalled.is_overdue) for when, stalled in heard] == [(30.0, False), (60.0, True)]
    stalled = heard[1][1]
    assert "controller has waited 60 s, since" in stalled.describe()
    assert stalled.describe().endswith("for rollout engine 0 to generate")
    assert stalled.timeout == MINUTE
    assert len(stalled.pending) == 1
    assert "trainer.deadlines.generation=60" in stalled.pending[0]


def test_progress_of_the_target_restarts_the_timeout(calls: PendingCalls, clock: Clock) -> None:
    detector, progress = HangDetector(calls, "controller"), Progress()
    with calls.track_call("generate", target=ENGINE, timeout=MINUTE, progress=progress) as call:
        for _ in range(10):
            clock.now += 29
            progress.finished_at = clock()
            assert (detector.poll(), call.remaining_s) == ([], 60.0)
        clock.now += 60
        assert summarize(detector.poll()) == [("generate", "rollout engine 0", True)]


def test_the_same_call_to_many_targets_is_one_line(calls: PendingCalls, clock: Clock) -> None:
    detector = HangDetector(calls, "controller")
    ranks = [
        calls.track_call("update", target=CallTarget("train worker", rank), timeout=MINUTE, peers=5)
        for rank in range(5)
    ]
    for rank in ranks:
        rank.__enter__()
        clock.now += 0.1
    ranks[1].__exit__(None, None, None)
    clock.now = 1060.05  # the timeout of rank 0; those of the others are less than a tick away
    [stalled] = detector.poll()
    assert (format_targets(stalled.targets), stalled.is_overdue, stalled.peers) == ("train workers 0, 2-4", True, 5)
    clock.now += 10
    assert detector.poll() == []


def test_a_call_that_stalls_again_is_reported_again(calls: PendingCalls, clock: Clock) -> None:
    detector = HangDetector(calls, "controller")
    for _ in range(2):
        with calls.track_call("generate", target=ENGINE, timeout=MINUTE):
            clock.now += 61
            assert summarize(detector.poll()) == [("generate", "rollout engine 0", True)]
        assert detector.poll() == []


def test_calls_that_are_always_slow_are_reported_now_and_then(calls: PendingCalls, clock: Clock) -> None:
    detector, heard = HangDetector(calls, "controller"), 0
    for _ in range(30):  # 20 minutes of calls that each take two thirds of their timeout
        with calls.track_call("generate", target=ENGINE, timeout=MINUTE):
            clock.now += 40
            heard += len(detector.poll())
        detector.poll()
    assert heard == 2


def test_equal_calls_are_counted_in_the_table(calls: PendingCalls, clock: Clock) -> None:
    detector = HangDetector(calls, "episode worker 3")
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(calls.track_call("generate", target=ENGINE, timeout=MINUTE))
        clock.now += 60
        [stalled] = detector.poll()
    [line] = stalled.pending
    assert "generate (3 times)" in line
    assert line.startswith("episode worker 3")


def test_stalled_calls_can_be_sent(calls: PendingCalls, clock: Clock) -> None:
    detector = HangDetector(calls, "episode worker 0")
    with calls.track_call("generate", target=ENGINE, timeout=MINUTE):
        clock.now += 60
        [stalled] = detector.poll()
    assert pickle.loads(pickle.dumps(stalled)) == stalled


def test_every_timeout_knows_its_setting() -> None:
    read = Timeouts.from_config(DeadlinesConfig(generation=7))
    assert str(read.generation) == "trainer.deadlines.generation=7"
    assert {getattr(DEFAULT_TIMEOUTS, name).setting for name in DeadlinesConfig.model_fields} == {
        f"trainer.deadlines.{name}" for name in DeadlinesConfig.model_fields
    }
    assert DEFAULT_TIMEOUTS.longest_s == 3600


def on_the_loops_clock(monkeypatch: pytest.MonkeyPatch) -> PendingCalls:
    calls = PendingCalls(lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(actors, "track_call", calls.track_call)
    return calls


def test_a_call_times_out_at_its_timeout_and_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = on_the_loops_clock(monkeypatch)

    async def scenario() -> float:
        with pytest.raises(
            ProcessLostError, match=r"60 s waiting for rollout engine 0 \(generate\)\. Increase .*deadlines\.generation"
        ):
            await await_reply(asyncio.sleep(1000), action="generate", target=ENGINE, timeout=MINUTE)
        return asyncio.get_running_loop().time()

    assert simulate(scenario()) == 60
    assert calls.list_calls() == []


def test_a_call_may_take_longer_while_its_target_finishes_others(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_loops_clock(monkeypatch)
    progress = Progress()

    def asked(seconds: float) -> Awaitable[float]:
        answer = asyncio.sleep(seconds, seconds)
        return await_reply(answer, action="generate", target=ENGINE, timeout=MINUTE, progress=progress)

    async def scenario() -> list[float | BaseException]:
        return await asyncio.gather(*(asked(s) for s in (50, 100, 150, 300)), return_exceptions=True)

    *answered, lost = simulate(scenario())
    assert answered == [50, 100, 150]
    assert isinstance(lost, ProcessLostError)


def test_work_without_a_timeout_goes_on_until_its_process_stops_responding() -> None:
    asked: list[float] = []

    async def ping() -> None:
        asked.append(asyncio.get_running_loop().time())
        if len(asked) > 5:
            raise ProcessLostError("gone")

    async def scenario() -> list[str | BaseException]:
        monitor = HeartbeatMonitor(ping, interval_s=60)
        work = [monitor.watch(asyncio.sleep(200 + k / 100, "done")) for k in range(50)]
        work += [monitor.watch(asyncio.sleep(10_000, "never")) for _ in range(50)]
        return await asyncio.gather(*work, return_exceptions=True)

    results = simulate(scenario())
    assert results[:50] == ["done"] * 50
    assert all(isinstance(result, ProcessLostError) for result in results[50:])
    assert asked == [60, 120, 180, 240, 300, 360]
