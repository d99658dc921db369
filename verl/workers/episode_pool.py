"""The trainer's client of all episode workers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

from verl.agents.deterministic_batcher import resolve_futures
from verl.cluster.device_pool import PlacementPool
from verl.cluster.group import await_reply
from verl.cluster.handles import kill_actor
from verl.cluster.hangs import DEFAULT_DEADLINES, CallTarget, Deadline, Deadlines, HeartbeatMonitor, register_actor
from verl.types import SampleHandle, SamplePreview
from verl.workers.episodes import EpisodeSettings, EpisodeWorker, GroupRequest
from verl.workers.rewards import RemoteRewardModel
from verl.workers.rollout import RemoteEngine


class EpisodePool:
    """All episode workers: takes group requests, returns sample handles.

    `deterministic`: requests made in one turn of the event loop, such as all groups of a step, form one round, and
    rounds run one after the other, so that batch composition does not depend on timing. Needs a single worker.
    """

    def __init__(
        self, actors: Sequence[Any], *, deterministic: bool = False, deadlines: Deadlines = DEFAULT_DEADLINES
    ) -> None:
        self._actors, self._deadlines = list(actors), deadlines
        self._turn = itertools.cycle(range(len(self._actors)))
        self._heartbeats = [
            HeartbeatMonitor(partial(self._call, index, "ping", deadline=deadlines.reply), deadlines.reply.seconds)
            for index in range(len(self._actors))
        ]
        self._deterministic = deterministic
        self._round: list[tuple[GroupRequest, asyncio.Future[list[SampleHandle] | None]]] = []
        self._round_lock = asyncio.Lock()

    @classmethod
    def spawn(
        cls,
        pool: PlacementPool,
        count: int,
        settings: EpisodeSettings,
        engines: Sequence[RemoteEngine],
        reward_models: Sequence[RemoteRewardModel] = (),
        *,
        deterministic: bool = False,
    ) -> EpisodePool:
        actors = [
            pool.spawn(EpisodeWorker, settings, engines, reward_models, is_async=True)
            for _ in range(1 if deterministic else count)
        ]
        return cls(actors, deterministic=deterministic, deadlines=settings.deadlines)

    async def start(self) -> None:
        for index, actor in enumerate(self._actors):
            register_actor(actor, _target(index))
        starts = (self._call(index, "start", deadline=self._deadlines.start) for index in range(len(self._actors)))
        await asyncio.gather(*starts)

    async def run(self, request: GroupRequest) -> list[SampleHandle] | None:
        """Return the samples of one prompt in the order of the seeds, or None if its row is too long and left out."""
        if not self._deterministic:
            return await self._run(next(self._turn), "run", request)
        loop = asyncio.get_running_loop()
        if not self._round:
            loop.call_soon(lambda: asyncio.ensure_future(self._run_round()))
        result: asyncio.Future[list[SampleHandle] | None] = loop.create_future()
        self._round.append((request, result))
        return await result

    async def _run_round(self) -> None:
        pending, self._round = self._round, []
        async with self._round_lock:
            samples = self._run(0, "run_round", [request for request, _ in pending])
            await resolve_futures([result for _, result in pending], samples)

    async def preview_sample(self, split: str, data_source: str | None = None) -> SamplePreview | None:
        """Return one of the latest samples of a split and, if given, data source."""
        for index in range(len(self._actors)):
            preview = await self._call(index, "preview_sample", split, data_source, deadline=self._deadlines.reply)
            if preview is not None:
                return preview
        return None

    async def _run(self, index: int, method: str, work: Any) -> Any:
        """Run episodes without a deadline: engines and rewards have theirs, the worker only has to respond to pings."""
        return await self._heartbeats[index].watch(self._call(index, method, work, deadline=None))

    async def _call(self, index: int, method: str, *args: Any, deadline: Deadline | None) -> Any:
        reply = getattr(self._actors[index], method).remote(*args)
        return await await_reply(reply, action=method, target=_target(index), deadline=deadline)

    def close(self) -> None:
        for actor in self._actors:
            kill_actor(actor)


def _target(index: int) -> CallTarget:
    return CallTarget("episode worker", index)
