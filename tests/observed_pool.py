"""An engine pool that counts what it did, and shows what it knows about its engines."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from verl.errors import ProcessLostError
from verl.rollout.replica_pool import EnginePool, Replica, ReplicaPool
from verl.rollout.supervisor import EngineState

T = TypeVar("T")


def list_loads(pool: ReplicaPool[Any]) -> tuple[int, ...]:
    """Return the outstanding tokens of each replica."""
    return tuple(replica.load for replica in pool._replicas.values())


class ObservedPool(EnginePool):
    """Counts losses of engines and retries of requests."""

    losses = retries = 0

    @property
    def load(self) -> tuple[int, ...]:
        return list_loads(self)

    @property
    def states(self) -> dict[int, EngineState]:
        return {
            engine_id: EngineState.READY if replica.is_ready else EngineState.LOST
            for engine_id, replica in self._replicas.items()
        }

    async def _await_reply(self, replica: Replica[Any], request: asyncio.Future[T]) -> T:
        try:
            return await super()._await_reply(replica, request)
        except ProcessLostError:
            self.retries += 1
            raise

    def _set_lost(self, replica: Replica[Any], reason: str, *, hangs: bool = False) -> None:
        self.losses += replica.is_ready
        super()._set_lost(replica, reason, hangs=hangs)
