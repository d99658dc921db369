"""Devices count only if their node responds: Ray still lists those of a node that was lost a moment ago."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import NodeDiedError

from verl.cluster import device_pool
from verl.cluster.device_pool import count_live_devices

pytestmark = pytest.mark.unit

FIRST, SECOND, THIRD = ("1" * 56, "2" * 56, "3" * 56)  # ids


class Cluster:
    """The nodes `listed` by Ray, with 4 GPUs each: some respond, pings to `lost` ones fail, others never return."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, listed: dict[str, bool], lost: str = "", silent: str = ""
    ) -> None:
        self.lost, self.silent, self.rounds = lost, silent, 0
        self.listed = [
            {"NodeID": name, "Alive": is_alive, "Resources": {"CPU": 8.0, "GPU": 4.0}}
            for name, is_alive in listed.items()
        ]
        for function in ("nodes", "remote", "wait", "get"):
            monkeypatch.setattr(device_pool.ray, function, getattr(self, function))

    def nodes(self) -> list[dict[str, Any]]:
        self.rounds += 1
        return self.listed

    def remote(self, _ping: Any) -> Any:
        def options(*, scheduling_strategy: Any, **_: Any) -> Any:
            assert not scheduling_strategy.soft, "another node must not reply instead"
            return SimpleNamespace(remote=lambda: scheduling_strategy.node_id)

        return SimpleNamespace(options=options)

    def wait(self, replies: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        assert num_returns == len(replies)
        return [name for name in replies if name != self.silent], [name for name in replies if name == self.silent]

    def get(self, reply: str) -> bool:
        if reply == self.lost:
            raise NodeDiedError("the node was lost")
        return True


async def test_all_devices_of_responding_nodes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, {FIRST: True, SECOND: True, THIRD: False})
    assert await count_live_devices("cuda", 8) == 8
    assert await count_live_devices("cpu", 16) == 16
    assert cluster.rounds == 2, "nobody waits once there are enough"


@pytest.mark.parametrize("state", ["lost", "silent"])
async def test_a_node_that_was_lost_does_not_count_although_ray_lists_it(
    monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    Cluster(monkeypatch, {FIRST: True, SECOND: True}, **{state: SECOND})
    assert await count_live_devices("cuda", 8) == 4


async def test_the_count_is_repeated_until_the_devices_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, {FIRST: True, SECOND: True}, lost=SECOND)

    def nodes() -> list[dict[str, Any]]:
        cluster.rounds += 1
        if cluster.rounds == 3:
            cluster.lost = ""
        return cluster.listed

    monkeypatch.setattr(device_pool.ray, "nodes", nodes)
    monkeypatch.setattr(device_pool, "_COUNT_INTERVAL_S", 0.01)
    assert await count_live_devices("cuda", 8, timeout_s=60) == 8
    assert cluster.rounds == 3
