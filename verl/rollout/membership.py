"""Membership: the rollout engines of a run by id. Engines may join and leave during the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

E = TypeVar("E")


@dataclass(frozen=True)
class EngineView(Generic[E]):
    """The engines that pools send requests to, by id. A newer view has a higher version. Can be pickled."""

    version: int
    engines: Mapping[int, E]

    @classmethod
    def of(cls, engines: Iterable[E]) -> EngineView[E]:
        """Return the view of engines that never change; their ids count from 0."""
        return cls(0, dict(enumerate(engines)))


class EngineMembership(Generic[E]):
    """The engines of a run. One per run, in the controller; the supervisor adds and removes members.

    Pools, also in other processes, follow `view`. The engines of the start are in the view at once. An engine that
    joins is published when it can serve requests, and withdrawn before it leaves. An id is never used twice.
    """

    def __init__(self, engines: Iterable[E]) -> None:
        self.view = EngineView.of(engines)
        self.engines: dict[int, E] = dict(self.view.engines)  # also those that are not in the view
        self._next_id = len(self.engines)
        self._followers: list[Callable[[EngineView[E]], Awaitable[None]]] = []

    def follow(self, follower: Callable[[EngineView[E]], Awaitable[None]]) -> None:
        """Call `follower` with each new view; it returns when it has no request left on engines outside the view."""
        self._followers.append(follower)

    def add(self, spawn: Callable[[int], E]) -> int:
        """Add the engine that `spawn` returns for its id; return the id."""
        engine_id = self._next_id
        self._next_id += 1
        self.engines[engine_id] = spawn(engine_id)
        return engine_id

    def remove(self, engine_id: int) -> None:
        """Forget an engine that has ended."""
        del self.engines[engine_id]

    def publish(self, engine_id: int) -> asyncio.Future[Any]:
        """Let pools send requests to an engine. Await the result to know that all followers have heard of it."""
        return self._change({**self.view.engines, engine_id: self.engines[engine_id]})

    def withdraw(self, engine_id: int) -> asyncio.Future[Any]:
        """Let pools send no more requests to an engine. Await the result until those that run there have ended."""
        return self._change({other: engine for other, engine in self.view.engines.items() if other != engine_id})

    def _change(self, engines: Mapping[int, E]) -> asyncio.Future[Any]:
        self.view = EngineView(self.view.version + 1, engines)
        return asyncio.gather(*(follower(self.view) for follower in self._followers))
