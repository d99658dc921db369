"""The reward actors: one reward model each, in a process of its own; and the pool of them that episode workers ask."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from verl.cluster.device_pool import PlacementPool
from verl.cluster.handles import end
from verl.cluster.hangs.heartbeat import HeartbeatMonitor
from verl.cluster.hangs.pending_calls import DEFAULT_DEADLINES, MARGIN_S, Deadlines
from verl.cluster.hangs.registry import report_wait_start
from verl.cluster.remote import RemoteActor
from verl.errors import ConfigError, EngineError, ProcessLostError, WorkerTimeoutError
from verl.rewards.models.batcher import Batcher
from verl.rewards.models.interface import SETTING, RewardModel, ScoringFailure
from verl.rollout.replica_pool import MAX_LOSSES, PoisonRequestError, Replica, ReplicaHandle, ReplicaPool

__all__ = ["RemoteRewardModel", "RewardActor", "RewardModelPool", "RewardModelSettings"]

T = TypeVar("T")

MOST_TOGETHER = 2  # reward models that a conversation may lose beside others; then it is asked for alone
MOST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class RewardModelSettings:
    """What a reward actor builds itself from: the engine, its arguments, and how it is asked."""

    name: str
    arguments: dict[str, Any]
    batch: int
    deadline_s: float


class RewardActor:
    """Hosts a `RewardModel`. Every method is a coroutine: what comes while it is busy waits for the next batch.

    Ray puts a new process in the place of one that died. Whoever lost the old one starts it, several may; the model is
    read once.
    """

    def __init__(self, settings: RewardModelSettings) -> None:
        self._settings = settings
        self._model: RewardModel | None = None
        self._batcher: Batcher | None = None
        self._starting = asyncio.Lock()

    async def has_started(self) -> bool:
        return self._model is not None

    async def start(self) -> None:
        async with self._starting:
            if self._batcher is None:
                await self.close()  # what is left of a model that was lost
                self._model = _make_model(self._settings.name, self._settings.arguments)
                await self._model.start()
                self._batcher = Batcher(self._model, self._settings.batch, self._settings.deadline_s)

    async def is_ready(self) -> bool:
        return self._batcher is not None

    async def score(self, token_ids: Sequence[int]) -> float | ScoringFailure:
        if (batcher := self._batcher) is None:
            raise ProcessLostError("its process was replaced, and has not started yet")
        try:
            return await batcher.score(token_ids)
        except ProcessLostError:
            if self._batcher is batcher:  # and `start` has not been here since
                self._batcher = None
            raise

    async def close(self) -> None:
        if self._model is not None:
            await self._model.close()


def _make_model(name: str, arguments: dict[str, Any]) -> RewardModel:
    if name == "hf":
        from verl.rewards.models.hf import HfRewardModel

        return HfRewardModel(**arguments)
    if name == "vllm":
        from verl.rollout.vllm.engine import VllmSettings
        from verl.rollout.vllm.reward_model import VllmRewardModel

        return VllmRewardModel(VllmSettings(**arguments))
    if name == "fake":
        from verl.rewards.models.interface import FakeRewardModel

        return FakeRewardModel(**arguments)
    raise ConfigError([f"{SETTING}.rollout.name: {name!r} runs no reward model; use hf or vllm"])


class RemoteRewardModel(RemoteActor):
    """A reward model that lives in a reward actor."""

    kind = "reward model"

    @classmethod
    def spawn(
        cls,
        pool: PlacementPool,
        number: int,
        *,
        device: int,
        share: float,
        settings: RewardModelSettings,
        deadlines: Deadlines = DEFAULT_DEADLINES,
    ) -> RemoteRewardModel:
        actor = pool.spawn(RewardActor, settings, device=device, share=share, is_async=True, restarts=True)
        return cls(actor, number, deadlines)

    async def score(self, token_ids: Sequence[int]) -> float | ScoringFailure:
        return await self._call("score", token_ids, deadline=None)  # the actor and the pool watch over these

    async def is_ready(self) -> bool:
        return await self._call("is_ready", deadline=self.deadlines.reply)

    async def lost(self, why: str) -> None:
        await asyncio.to_thread(report_wait_start, f"start again ({why})", self.target, self.deadlines.start)

    async def end(self) -> None:
        """As any, but without waiting for the new process: another who has lost it may have started that already."""
        end(self.actor, restarts=True)


class PooledRewardModel(ReplicaHandle, Protocol):
    """A reward model as the pool needs it; it is ready when it has started."""

    async def score(self, token_ids: Sequence[int]) -> float | ScoringFailure: ...

    async def start(self) -> None:
        """Returns when it can score; at once when it can already."""
        ...

    async def end(self) -> None:
        """End its process, whatever state it is in; there will be a new one to `start`."""
        ...

    async def lost(self, why: str) -> None:
        """Tell those who want to know."""
        ...


class RewardModelPool(ReplicaPool[PooledRewardModel]):
    """Several reward models that look like one: each conversation goes to the one with the fewest tokens to read.

    The actors keep the deadlines; the pool looks, every `look_s` that an answer takes, whether its actor is still
    there. One that is not is started again, and what it was to score goes to others, or to itself when it is back. A
    conversation that was with several when they were lost is then asked for alone, so that one that ends them is told
    from those that were only beside it; and given up at last.
    """

    kind = "reward model"

    def __init__(
        self,
        models: Sequence[PooledRewardModel],
        *,
        look_s: float = DEFAULT_DEADLINES.reply.seconds,
        recovery_timeout_s: float = DEFAULT_DEADLINES.start.seconds + MARGIN_S,
        poll_interval_s: float = 1.0,
    ) -> None:
        super().__init__(
            models,
            recovery_timeout_s=recovery_timeout_s,
            reply_timeout_s=look_s + MARGIN_S,
            poll_interval_s=poll_interval_s,
        )
        self._heartbeats = [HeartbeatMonitor(model.is_ready, look_s) for model in models]
        self._one_alone = asyncio.Lock()

    async def score(self, token_ids: Sequence[int]) -> float | ScoringFailure:
        """The number for one conversation, or why there is none."""
        losses: list[str] = []
        ask = partial(self._request_with_retry, lambda model: model.score(token_ids), len(token_ids), losses)
        try:
            try:
                return await ask(MOST_TOGETHER)
            except PoisonRequestError:
                async with self._one_alone:
                    return await ask(MAX_LOSSES)
        except PoisonRequestError as error:
            return _unscored(
                f"was reading a conversation of {len(token_ids):,} tokens when its process was lost, {MAX_LOSSES} "
                f"times; it is not tried again: it may be what ends them. {error}"
            )
        except EngineError as error:
            return _unscored(str(error))

    async def _await_reply(self, replica: Replica[PooledRewardModel], request: asyncio.Future[T]) -> T:
        return await self._heartbeats[replica.index].watch(request)

    async def _recover(self, replica: Replica[PooledRewardModel], hangs: bool) -> None:
        """By a new start of the process that Ray puts in its place; one that hangs or fails in that is ended for it."""
        model, pause_s, end = replica.handle, self._poll_interval_s, replica.reason
        with suppress(Exception):  # it comes back also if nobody can be told
            await model.lost(end)
        while True:
            if hangs:
                with suppress(Exception):  # the boundary of a process: it may be gone already
                    await model.end()
            try:
                return await model.start()
            except Exception as error:  # noqa: BLE001 - likewise: whatever it is, it has not started
                hangs = isinstance(error, WorkerTimeoutError) or not isinstance(error, ProcessLostError)
                if hangs:
                    replica.reason = f"{end}; and it did not start again: {error}"
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)


def _unscored(what: str) -> ScoringFailure:
    mend = f"if its process lacked memory, lower {SETTING}.micro_batch_size_per_gpu; Ray's logs say how it ended"
    return ScoringFailure("died", what, mend)
