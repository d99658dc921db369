"""Waits end with their work, at their timeout, or all together; cancelled ones leave nothing behind."""

import asyncio

import pytest
from simulated_clock import simulate

from verl.waiting import Waits, with_timeout

pytestmark = pytest.mark.unit


def test_a_timeout_says_how_long_it_waited_and_cancels_the_work() -> None:
    async def scenario() -> asyncio.Future[None]:
        work = asyncio.ensure_future(asyncio.sleep(100))
        with pytest.raises(TimeoutError, match="no reply within 5 s"):
            await with_timeout(work, 5)
        assert asyncio.get_running_loop().time() == 5
        return work

    assert simulate(scenario()).cancelled()


def test_a_timeout_of_the_work_itself_is_passed_on() -> None:
    async def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        simulate(with_timeout(fail(), 5))
    with pytest.raises(TimeoutError, match="its own"):
        simulate(with_timeout(fail(), lambda: 5.0))


def test_a_timeout_can_be_extended() -> None:
    ends = [10.0, 25.0]

    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            await with_timeout(asyncio.sleep(100), lambda: ends[loop.time() >= 10] - loop.time())
        return loop.time()

    assert simulate(scenario()) == 25


def test_an_interrupt_ends_all_waits_with_its_error_and_no_later_one() -> None:
    async def scenario() -> list[str | BaseException]:
        waits = Waits()
        first = [asyncio.ensure_future(waits.wait(asyncio.sleep(seconds, "done"))) for seconds in (1, 9, 9)]
        await asyncio.sleep(5)
        waits.interrupt(OSError("gone"))
        waits.interrupt(OSError("gone"))
        later = asyncio.ensure_future(waits.wait(asyncio.sleep(9, "done")))
        results = await asyncio.gather(*first, later, return_exceptions=True)
        assert not waits
        return results

    first, *interrupted, later = simulate(scenario())
    assert (first, later) == ("done", "done")
    assert [str(error) for error in interrupted] == ["gone", "gone"]
