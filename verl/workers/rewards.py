"""The reward actors: one reward model each, in a process of its own; and the pool of them that episode workers ask."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl.cluster.pool import DevicePool
from verl.cluster.remote import Remote, spawn
from verl.cluster.waits import DEFAULTS, Deadlines
from verl.errors import ConfigError, EngineError
from verl.rewards.model import SETTING, Batcher, RewardModel, Unscored

__all__ = ["RemoteRewardModel", "RewardActor", "RewardModelPool", "RewardModelSettings"]


@dataclass(frozen=True, slots=True)
class RewardModelSettings:
    """What a reward actor builds itself from: the engine, its arguments, and how it is asked."""

    name: str
    arguments: dict[str, Any]
    batch: int
    deadline_s: float


class RewardActor:
    """Hosts a `RewardModel`. Every method is a coroutine: what comes while it is busy waits for the next batch."""

    def __init__(self, settings: RewardModelSettings) -> None:
        self._settings = settings

    async def start(self) -> None:
        self._model = _make_model(self._settings.name, self._settings.arguments)
        await self._model.start()
        self._batcher = Batcher(self._model, self._settings.batch, self._settings.deadline_s)

    async def score(self, token_ids: Sequence[int]) -> float | Unscored:
        return await self._batcher.score(token_ids)

    async def is_there(self) -> bool:
        return True

    async def close(self) -> None:
        if hasattr(self, "_model"):
            await self._model.close()


def _make_model(name: str, arguments: dict[str, Any]) -> RewardModel:
    if name == "hf":
        from verl.rewards.model_hf import HfRewardModel

        return HfRewardModel(**arguments)
    if name == "vllm":
        from verl.rollout.vllm import VllmSettings
        from verl.rollout.vllm_reward import VllmRewardModel

        return VllmRewardModel(VllmSettings(**arguments))
    if name == "fake":
        from verl.rewards.model import FakeRewardModel

        return FakeRewardModel(**arguments)
    raise ConfigError([f"{SETTING}.rollout.name: {name!r} runs no reward model; use hf or vllm"])


class RemoteRewardModel(Remote):
    """A reward model that lives in a reward actor."""

    kind = "reward model"

    @classmethod
    def place(
        cls,
        pool: DevicePool,
        number: int,
        *,
        device: int,
        share: float,
        settings: RewardModelSettings,
        deadlines: Deadlines = DEFAULTS,
    ) -> RemoteRewardModel:
        return cls(spawn(RewardActor, settings, pool=pool, device=device, share=share), number, deadlines)

    async def score(self, token_ids: Sequence[int]) -> float | Unscored:
        return await self._call("score", token_ids, deadline=None)  # the actor and the pool watch over these

    async def is_there(self) -> bool:
        return await self._call("is_there", deadline=self.deadlines.reply)


class Scores(Protocol):
    """What the pool needs of a reward model: an `EngineError` says that its process is lost."""

    async def score(self, token_ids: Sequence[int]) -> float | Unscored: ...
    async def is_there(self) -> bool: ...


class RewardModelPool:
    """Several reward models that look like one: each conversation goes to the one with the fewest tokens to read.

    The actors keep the deadlines; the pool looks, every `patience_s` that an answer takes, whether its actor is still
    there. One that is not is asked no more, and what it was to score is failed.
    """

    def __init__(self, models: Sequence[Scores], *, patience_s: float = DEFAULTS.reply.seconds) -> None:
        self._there = list(models)
        self._load = {id(model): 0 for model in models}
        self._patience_s = patience_s
        self._lost = ""

    async def score(self, token_ids: Sequence[int]) -> float | Unscored:
        """The number for one conversation, or why there is none."""
        if not self._there:
            return self._unscored()
        model = min(self._there, key=lambda one: self._load[id(one)])
        self._load[id(model)] += len(token_ids)
        try:
            return await self._watched(model, asyncio.ensure_future(model.score(token_ids)))
        except EngineError as error:
            self._there = [one for one in self._there if one is not model]
            self._lost = str(error)
            return self._unscored()
        finally:
            self._load[id(model)] -= len(token_ids)

    async def _watched(self, model: Scores, request: asyncio.Future[float | Unscored]) -> float | Unscored:
        try:
            while not (await asyncio.wait([request], timeout=self._patience_s))[0]:
                await model.is_there()
        finally:
            request.cancel()  # of no effect on one that is done
        return request.result()

    def _unscored(self) -> Unscored:
        mend = f"if its process lacked memory, lower {SETTING}.micro_batch_size_per_gpu; Ray's logs say how it ended"
        return Unscored("died", self._lost, mend)
