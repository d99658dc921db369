"""The rollout actors: one engine each, in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray

from verl.cluster.group import call
from verl.cluster.pool import DevicePool
from verl.errors import ConfigError
from verl.types import Completion, SamplingParams

__all__ = ["RemoteEngine", "RolloutActor"]

START_DEADLINE_S = 900.0
SYNC_DEADLINE_S = 900.0


class RolloutActor:
    """Hosts a `RolloutEngine`. Every method is a coroutine: requests interleave on the actor's event loop."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self._name, self._settings = name, settings

    async def start(self) -> None:
        self._engine = _make_engine(self._name, self._settings)
        await self._engine.start()

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        return await self._engine.generate(token_ids, sampling)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await self._engine.score(token_ids)

    async def load_weights(self, parcels: Sequence[ray.ObjectRef], version: int) -> None:
        await self._engine.load_weights(await asyncio.gather(*parcels), version)

    async def version(self) -> int:
        return await self._engine.version()

    async def weight_transfer(self, method: str, *args: Any) -> None:
        """A step of vLLM's weight-transfer handshake, driven by its trainer-side engine."""
        await getattr(self._engine, method)(*args)

    async def close(self) -> None:
        if hasattr(self, "_engine"):
            await self._engine.close()


def _make_engine(name: str, settings: dict[str, Any]) -> Any:
    if name == "vllm":
        from verl.rollout.vllm import VllmEngine, VllmSettings

        return VllmEngine(VllmSettings(**settings))
    if name == "hf":
        from verl.rollout.hf import HfEngine

        return HfEngine(**settings)
    if name == "fake":
        from verl.rollout.fake import FakeRolloutEngine

        return FakeRolloutEngine(**settings)
    raise ConfigError([f"actor_rollout_ref.rollout.name: {name!r} is not an engine; use vllm or hf"])


class RemoteEngine:
    """A `RolloutEngine` that lives in a rollout actor. Can be sent to other processes."""

    def __init__(self, actor: Any, number: int) -> None:
        self.actor, self.number = actor, number
        self._started = False

    @classmethod
    def place(
        cls, pool: DevicePool, number: int, *, device: int, share: float, name: str, settings: dict[str, Any]
    ) -> RemoteEngine:
        """Ask Ray for the process; it comes up while the caller goes on."""
        worker = ray.remote(RolloutActor).options(max_concurrency=100_000, **pool.options(device, share=share))
        return cls(worker.remote(name, settings), number)

    async def start(self) -> None:
        await self._call("start", deadline_s=START_DEADLINE_S)
        self._started = True

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        return await self._call("generate", token_ids, sampling, deadline_s=None)  # the pool watches over these

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await self._call("score", token_ids)

    async def load_weights(self, parcels: Sequence[Any], version: int) -> None:
        await self._call("load_weights", parcels, version, deadline_s=SYNC_DEADLINE_S)

    async def version(self) -> int:
        return await self._call("version")

    async def close(self) -> None:
        """End the process; an engine that has started first ends its own children."""
        try:
            if self._started:
                await self._call("close", deadline_s=30.0)
        finally:
            ray.kill(self.actor)

    async def _call(self, method: str, *args: Any, deadline_s: float | None = 600.0) -> Any:
        reference = getattr(self.actor, method).remote(*args)
        return await call(reference, what=f"rollout engine {self.number}: {method}", deadline_s=deadline_s)
