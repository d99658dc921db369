"""The loss of Ray's own processes is noticed, and interrupts what runs."""

import asyncio

import pytest
from simulated_clock import simulate

from verl.cluster import monitor
from verl.cluster.monitor import Endpoint, wait_for_loss, watch_cluster
from verl.errors import ProcessLostError

pytestmark = pytest.mark.unit

GCS = Endpoint("Ray's GCS", "127.0.0.1", 6379, 5.0)
REMOTE_GCS = Endpoint("Ray's GCS", "10.0.0.1", 6379, 40.0)


def wait(endpoint: Endpoint, is_up: list[bool]) -> tuple[str, float]:
    """Return what is lost and when, if it is reachable as in `is_up`, every 2 s."""

    async def run() -> tuple[str, float]:
        replies = iter(is_up)

        async def check(_: Endpoint) -> bool:
            return next(replies, False)

        return await wait_for_loss([endpoint], check), asyncio.get_running_loop().time()

    return simulate(run())


def test_a_dead_gcs_is_named_after_its_grace_period() -> None:
    lost, seconds = wait(GCS, [True, True])
    assert lost.startswith("Ray's GCS at 127.0.0.1:6379 has not accepted a connection for 6 s")
    assert seconds == 10.0


def test_a_gcs_that_comes_back_in_time_is_not_lost() -> None:
    restart = [False] * 15 + [True]
    assert wait(REMOTE_GCS, restart * 3)[1] > 3 * 32


async def test_the_block_is_interrupted_with_the_loss_after_leaving_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = []

    async def lost(_: object) -> str:
        return "Ray's GCS has died"

    monkeypatch.setattr(monitor, "is_connected", lambda: True)
    monkeypatch.setattr(monitor, "find_endpoints", list)
    monkeypatch.setattr(monitor, "wait_for_loss", lost)
    monkeypatch.setattr(monitor, "disconnect", lambda: left.append(True))
    monkeypatch.setattr(monitor, "disable_auto_init", lambda: None)
    with pytest.raises(ProcessLostError, match="GCS has died"):
        async with watch_cluster():
            await asyncio.sleep(60)
    assert left == [True]
    await asyncio.sleep(0)  # the task itself is not cancelled any more


async def test_a_cancellation_by_others_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "is_connected", lambda: False)

    async def work() -> None:
        async with watch_cluster():
            await asyncio.sleep(60)

    working = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
