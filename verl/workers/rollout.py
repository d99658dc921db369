"""The rollout actors: one engine each, in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from verl.cluster.device_pool import PlacementPool
from verl.cluster.hangs.pending_calls import DEFAULT_DEADLINES, Deadlines, Progress
from verl.cluster.remote import RemoteActor
from verl.errors import ConfigError, ProcessLostError
from verl.types import Completion, SamplingParams

__all__ = ["RemoteEngine", "RolloutActor", "make_engine"]


class RolloutActor:
    """Hosts a `RolloutEngine`. Every method is a coroutine: requests interleave on the actor's event loop.

    It answers requests once it is open, which it is not before its weights were proved: Ray puts a new process in the
    place of one that died, and that one knows nothing.
    """

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self._name, self._settings = name, settings
        self._made: Any = None
        self._disabled_reason = "it holds no weights yet"
        self._loading = asyncio.Lock()

    async def has_started(self) -> bool:
        return self._made is not None

    async def start(self) -> None:
        self._made = make_engine(self._name, self._settings)
        await self._made.start()

    async def enable(self, version: int) -> None:
        """Answer requests from now on; for who has the weights of `version`."""
        if (found := await self._engine.version()) != version:
            raise ProcessLostError(f"its process was replaced: it holds version {found} of the weights, not {version}")
        self._disabled_reason = ""

    async def disable(self, why: str) -> None:
        self._disabled_reason = why

    async def is_ready(self) -> bool:
        """Whether it is open, and the engine behind it answers; while it loads weights it cannot."""
        if not self._disabled_reason and not self._loading.locked():
            await self._engine.version()
        return not self._disabled_reason

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        return await self._enabled.generate(token_ids, sampling)

    async def generate_all(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        return await self._enabled.generate_all(requests)

    @property
    def _engine(self) -> Any:
        if self._made is None:
            raise ProcessLostError("its process was replaced, and has not started yet")
        return self._made

    @property
    def _enabled(self) -> Any:
        if self._disabled_reason:
            raise ProcessLostError(f"it takes no requests: {self._disabled_reason}")
        return self._engine

    async def compute_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return await self._engine.compute_logprobs(token_ids)

    async def load_weights(self, buckets: Sequence[Any], version: int) -> None:
        async with self._loading:  # one after the other, also when the caller of the first has gone
            await self._engine.load_weights(await asyncio.gather(*buckets), version)

    async def version(self) -> int:
        return await self._engine.version()

    async def weight_transfer(self, method: str, *args: Any) -> None:
        """A step of vLLM's weight-transfer handshake, driven by its trainer-side engine."""
        async with self._loading:
            await getattr(self._engine, method)(*args)

    async def close(self) -> None:
        if self._made is not None:
            await self._made.close()


def make_engine(name: str, settings: dict[str, Any]) -> Any:
    """A `RolloutEngine` in this process, not yet started."""
    if name == "vllm":
        from verl.rollout.vllm.engine import AdapterSettings, VllmEngine, VllmSettings

        adapter = settings.get("adapter")
        return VllmEngine(VllmSettings(**settings | {"adapter": adapter and AdapterSettings(**adapter)}))
    if name == "hf":
        from verl.rollout.hf import HfEngine

        return HfEngine(**settings)
    if name == "fake":
        from verl.rollout.fake import FakeRolloutEngine

        return FakeRolloutEngine(**settings)
    raise ConfigError([f"actor_rollout_ref.rollout.name: {name!r} is not an engine; use vllm or hf"])


class RemoteEngine(RemoteActor):
    """A `RolloutEngine` that lives in a rollout actor."""

    kind = "rollout engine"

    def __init__(self, actor: Any, number: int, deadlines: Deadlines = DEFAULT_DEADLINES) -> None:
        super().__init__(actor, number, deadlines)
        self._progress = Progress()  # an engine may take its time as long as it finishes something

    @classmethod
    def spawn(
        cls,
        pool: PlacementPool,
        number: int,
        *,
        device: int,
        share: float,
        name: str,
        settings: dict[str, Any],
        deadlines: Deadlines = DEFAULT_DEADLINES,
    ) -> RemoteEngine:
        actor = pool.spawn(RolloutActor, name, settings, device=device, share=share, is_async=True, restarts=True)
        return cls(actor, number, deadlines)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        return await self._call(
            "generate", token_ids, sampling, deadline=self.deadlines.generation, progress=self._progress
        )

    async def generate_all(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        return await self._call("generate_all", requests, deadline=self.deadlines.generation)

    async def is_ready(self) -> bool:
        return await self._call("is_ready", deadline=self.deadlines.reply)

    async def enable(self, version: int) -> None:
        await self._call("enable", version, deadline=self.deadlines.reply)

    async def disable(self, why: str) -> None:
        await self._call("disable", why, deadline=self.deadlines.reply)

    async def compute_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return await self._call("compute_logprobs", token_ids, deadline=self.deadlines.weights)

    async def load_weights(self, buckets: Sequence[Any], version: int) -> None:
        await self._call("load_weights", buckets, version, deadline=self.deadlines.weights)

    async def version(self) -> int:
        return await self._call("version", deadline=self.deadlines.weights)
