"""Ray actors that host reward models, and the pool through which episode workers use them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pkgutil import resolve_name
from typing import TypeVar

from verl.child_process import keep_sigterm_blocked
from verl.cluster.actors import RemoteActor, kill_actor, use_accelerators
from verl.cluster.hangs.pending_calls import DEFAULT_TIMEOUTS, MARGIN_S, HeartbeatMonitor
from verl.cluster.hangs.registry import report_restart
from verl.custom_functions import import_external
from verl.errors import EngineError, ProcessLostError, WorkerTimeoutError
from verl.rewards.models.batcher import Batcher
from verl.rewards.models.interface import SETTING, RewardModel, ScoringFailure
from verl.rewards.settings import RewardModelSettings
from verl.rollout.replica_pool import MAX_LOSSES, PoisonRequestError, Replica, ReplicaPool

T = TypeVar("T")

MAX_SHARED_LOSSES = 2  # models lost while they scored a conversation in a batch; then it is scored alone
MAX_PAUSE_S = 60.0


class RewardActor:
    """Hosts a `RewardModel`. Requests that arrive while the model is busy form the next batch.

    Ray replaces a process that died. All pools that lost it may call `start`; the model is loaded once.
    """

    def __init__(self, settings: RewardModelSettings, accelerators: str = "") -> None:
        """Hold the settings until `start`. `accelerators`: devices of other processes, for CUDA_VISIBLE_DEVICES."""
        keep_sigterm_blocked()
        self._settings, self._accelerators = settings, accelerators
        self._model: RewardModel | None = None
        self._batcher: Batcher | None = None
        self._starting = asyncio.Lock()

    async def has_started(self) -> bool:
        return self._model is not None

    async def start(self) -> None:
        async with self._starting:
            if self._batcher is None:
                await self.close()  # the model that was lost
                use_accelerators(self._accelerators)
                import_external(self._settings.external_modules)
                self._model = _make_model(self._settings)
                await self._model.start()
                self._batcher = Batcher(self._model, self._settings.batch, self._settings.deadline_s)

    async def is_ready(self) -> bool:
        return self._batcher is not None

    async def score(self, token_ids: Sequence[int]) -> float | ScoringFailure:
        if (batcher := self._batcher) is None:
            raise ProcessLostError("its process was restarted and has not loaded the model yet")
        try:
            return await batcher.score(token_ids)
        except ProcessLostError:
            if self._batcher is batcher:  # not replaced by `start` meanwhile
                self._batcher = None
            raise

    async def close(self) -> None:
        if self._model is not None:
            await self._model.close()


def _make_model(settings: RewardModelSettings) -> RewardModel:
    model: RewardModel = resolve_name(settings.factory)(settings)
    return model


class RemoteRewardModel(RemoteActor):
    """A reward model in a reward actor."""

    kind = "reward model"
    actor_class = RewardActor

    async def score(self, token_ids: Sequence[int]) -> float | ScoringFailure:
        return await self._call("score", token_ids, timeout=None)  # the actor and the pool have timeouts

    async def is_ready(self) -> bool:
        return await self._call("is_ready", timeout=self.timeouts.reply)

    async def report_lost(self, reason: str) -> None:
        await asyncio.to_thread(report_restart, f"start again ({reason})", self.target, self.timeouts.start)

    async def end(self) -> None:
        """End the process without waiting for the new one, which another pool may have started already."""
        kill_actor(self.actor, restarts=True)


class RewardModelPool(ReplicaPool[RemoteRewardModel]):
    """Several reward models behind one interface: a conversation goes to the model with the fewest outstanding tokens.

    The actors enforce the timeouts of batches; every `heartbeat_s` of a request the pool checks that the actor is
    alive. A lost model is started again, and its conversations go to other models, or to the same one once it has
    recovered. A conversation that was on several models when they were lost is scored alone, since it may be what
    kills them, and finally fails.
    """

    kind = "reward model"

    def __init__(
        self,
        models: Sequence[RemoteRewardModel],
        *,
        heartbeat_s: float = DEFAULT_TIMEOUTS.reply.seconds,
        recovery_timeout_s: float = DEFAULT_TIMEOUTS.start.seconds + MARGIN_S,
        poll_interval_s: float = 1.0,
    ) -> None:
        super().__init__(
            dict(enumerate(models)),
            recovery_timeout_s=recovery_timeout_s,
            reply_timeout_s=heartbeat_s + MARGIN_S,
            poll_interval_s=poll_interval_s,
        )
        self._heartbeats = [HeartbeatMonitor(model.is_ready, heartbeat_s) for model in models]
        self._alone = asyncio.Lock()

    async def score(self, token_ids: Sequence[int]) -> float | ScoringFailure:
        """Return the score of one conversation, or why it has none."""
        losses: list[str] = []
        request = partial(
            self._request_with_retry, lambda replica: replica.handle.score(token_ids), len(token_ids), losses
        )
        try:
            try:
                return await request(MAX_SHARED_LOSSES)
            except PoisonRequestError:
                async with self._alone:
                    return await request(MAX_LOSSES)
        except PoisonRequestError as error:
            return _make_failure(
                f"lost its process {MAX_LOSSES} times while it scored a conversation of {len(token_ids):,} tokens, "
                f"which is not tried again: it may be the cause. {error}"
            )
        except EngineError as error:
            return _make_failure(str(error))

    async def _await_reply(self, replica: Replica[RemoteRewardModel], request: asyncio.Future[T]) -> T:
        return await self._heartbeats[replica.id].watch(request)

    async def _recover(self, replica: Replica[RemoteRewardModel], hangs: bool) -> None:
        """Start the model in the process that Ray restarts; first end a process that hangs or failed to start."""
        model, pause_s, reason = replica.handle, self._poll_interval_s, replica.reason
        with suppress(Exception):  # recover even if the report fails
            await model.report_lost(reason)
        while True:
            if hangs:
                with suppress(Exception):  # process boundary: it may be gone already
                    await model.end()
            try:
                return await model.start()
            except Exception as error:  # noqa: BLE001 - process boundary: any error means that it has not started
                hangs = isinstance(error, WorkerTimeoutError) or not isinstance(error, ProcessLostError)
                if hangs:
                    replica.reason = f"{reason}; and it did not start again: {error}"
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)


def _make_failure(message: str) -> ScoringFailure:
    fix = f"If its process ran out of memory, decrease {SETTING}.micro_batch_size_per_gpu; see Ray's logs for its end"
    return ScoringFailure("died", message, fix)
