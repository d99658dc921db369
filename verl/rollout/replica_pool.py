"""Several engines that look like one: each request goes to the one with the least to do, and again if that is lost."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from random import randrange
from typing import Generic, Protocol, TypeVar

from verl.errors import EngineError, ProcessLostError, WorkerTimeoutError
from verl.rollout.supervisor import EngineState, within
from verl.types import Completion, SamplingParams

__all__ = ["EnginePool", "PoisonRequestError", "PooledEngine", "Replica", "ReplicaHandle", "ReplicaPool", "Request"]

T = TypeVar("T")
M = TypeVar("M", bound="ReplicaHandle")
Request = tuple[Sequence[int], SamplingParams]

MAX_LOSSES = 5  # of engines that one request ran on; then it is probably the request that ends them


class ReplicaHandle(Protocol):
    """One of a pool: it may be lost, and come back under the same handle."""

    async def is_ready(self) -> bool:
        """Whether it could answer; `ProcessLostError` while it is down."""
        ...


class PoisonRequestError(EngineError):
    """A request was running on so many members when they were lost that it may be what ends them."""


@dataclass(eq=False)
class Replica(Generic[M]):
    """One member as this pool sees it."""

    index: int
    handle: M
    is_ready: bool = True  # or lost
    reason: str = ""  # it was lost
    load: int = 0  # outstanding tokens
    has_batch: bool = False
    returning: asyncio.Future[None] | None = None


class ReplicaPool(ABC, Generic[M]):
    """Sends each request to the replica with the least outstanding work, and again elsewhere if that one is lost.

    A lost replica gets no requests until it has recovered. While none is available requests wait, for at most
    `recovery_timeout_s`. Ties are broken from a random starting index, so that many pools do not all favor the first
    replica. Subclasses define how a request is watched and how a replica recovers.
    """

    kind: str

    def __init__(
        self, members: Sequence[M], *, recovery_timeout_s: float, reply_timeout_s: float, poll_interval_s: float
    ) -> None:
        self._replicas = [Replica(index, handle) for index, handle in enumerate(members)]
        self._first = randrange(len(members))
        self._recovery_timeout_s, self._reply_timeout_s, self._poll_interval_s = (
            recovery_timeout_s,
            reply_timeout_s,
            poll_interval_s,
        )
        self._none_since = 0.0  # if none is there
        self._news = asyncio.Event()  # one came back, or has done its batch
        self.losses = 0  # of members
        self.retries = 0  # of requests

    def close(self) -> None:
        """Ask after none any more."""
        for replica in self._replicas:
            if replica.returning is not None:
                replica.returning.cancel()

    @property
    def load(self) -> tuple[int, ...]:
        """Outstanding tokens per member."""
        return tuple(replica.load for replica in self._replicas)

    @abstractmethod
    async def _await_reply(self, replica: Replica[M], request: asyncio.Future[T]) -> T:
        """What comes of a request; `ProcessLostError` also if that has to be taken for lost."""

    @abstractmethod
    async def _recover(self, replica: Replica[M], hangs: bool) -> None:
        """Returns when a member that was lost is there again. `hangs`: nobody knows whether its process is gone."""

    async def _request_with_retry(
        self,
        ask: Callable[[M], Awaitable[T]],
        work: int,
        losses: list[str],
        most_losses: int,
        *,
        own: int | None = None,
        requests: int = 1,
    ) -> T:
        """Ask one after the other until one answers. A batch (`own`: of that member) shares it with no other.

        Once a request has lost a member, it asks the next one whether it is there before it goes to it. So what counts
        against the request is one that was there and was then lost; many may go at once, with their machine.
        """
        while len(losses) < most_losses:
            replica = await self._free_seat(own)
            with self._seated(replica, work, is_batch=own is not None):
                if losses and not await self._is_there(replica):
                    continue
                request = asyncio.ensure_future(ask(replica.handle))
                try:
                    return await self._await_reply(replica, request)
                except ProcessLostError as error:
                    self._lose(replica, str(error), hangs=isinstance(error, WorkerTimeoutError))
                    losses.append(self._told(replica, str(error)))
                    self.retries += requests
                finally:
                    request.cancel()  # of no effect on one that is done
        raise PoisonRequestError("; ".join(losses))

    async def _free_seat(self, own: int | None) -> Replica[M]:
        clock = asyncio.get_running_loop().time
        while True:
            ready = [replica for replica in self._replicas if replica.is_ready]
            if free := [replica for replica in ready if own is None or not replica.has_batch]:
                return min(free, key=lambda replica: (replica.index != own, replica.load, self._distance(replica)))
            recovery_timeout_s = (
                self._recovery_timeout_s if ready else self._none_since + self._recovery_timeout_s - clock()
            )
            if recovery_timeout_s <= 0:
                raise EngineError(
                    f"no {self.kind} came back within {self._recovery_timeout_s:.0f} s. How they were lost: "
                    + "; ".join(self._told(replica, replica.reason) for replica in self._replicas)
                )
            with suppress(asyncio.TimeoutError):
                await within(self._news.wait(), recovery_timeout_s)

    def _distance(self, replica: Replica[M]) -> int:
        return (replica.index - self._first) % len(self._replicas)

    def _told(self, replica: Replica[M], reason: str) -> str:
        return f"{self.kind.split()[-1]} {replica.index}: {reason}"

    @contextmanager
    def _seated(self, replica: Replica[M], work: int, *, is_batch: bool) -> Iterator[None]:
        replica.load += work
        replica.has_batch |= is_batch
        try:
            yield
        finally:
            replica.load -= work
            if is_batch:
                replica.has_batch = False
                self._tell()

    async def _is_there(self, replica: Replica[M]) -> bool:
        try:
            is_ready = await within(replica.handle.is_ready(), self._reply_timeout_s)
            reason = "it is not ready"
        except (EngineError, asyncio.TimeoutError) as error:
            is_ready, reason = False, str(error)
        if not is_ready:
            self._lose(replica, reason)
        return is_ready and replica.is_ready

    def _lose(self, replica: Replica[M], reason: str, *, hangs: bool = False) -> None:
        """It gets nothing more until it is back; what runs on it notices by itself, or is lucky."""
        if not replica.is_ready:
            return
        replica.is_ready, replica.reason = False, reason
        self.losses += 1
        if not any(replica.is_ready for replica in self._replicas):
            self._none_since = asyncio.get_running_loop().time()
        replica.returning = asyncio.ensure_future(self._return(replica, hangs))

    async def _return(self, replica: Replica[M], hangs: bool) -> None:
        await self._recover(replica, hangs)
        replica.is_ready = True
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class PooledEngine(ReplicaHandle, Protocol):
    """A rollout engine as the pool needs it; it is ready when it holds weights that were proved."""

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion: ...
    async def generate_all(self, requests: Sequence[Request]) -> list[Completion]: ...

    async def disable(self, reason: str) -> None:
        """Somebody waited for it in vain: it shall not be ready before it has been restarted."""
        ...


class EnginePool(ReplicaPool[PooledEngine]):
    """Routes by outstanding work: tokens of the prompt plus tokens that may still be generated.

    A request may wait as long as its engine makes progress. An engine whose process is gone, or that finishes nothing
    for `stall_timeout_s`, is lost until it reports that it is ready; restarting it is the supervisor's job. A request
    that was running on `MAX_LOSSES` engines when they were lost fails.
    """

    kind = "rollout engine"

    def __init__(
        self,
        engines: Sequence[PooledEngine],
        *,
        stall_timeout_s: float = 1800.0,
        recovery_timeout_s: float = 3600.0,
        reply_timeout_s: float = 60.0,
        poll_interval_s: float = 1.0,
    ) -> None:
        if not engines:
            raise EngineError(
                "a pool needs at least one rollout engine; set actor_rollout_ref.rollout.num_engines >= 1"
            )
        super().__init__(
            engines,
            recovery_timeout_s=recovery_timeout_s,
            reply_timeout_s=reply_timeout_s,
            poll_interval_s=poll_interval_s,
        )
        self._stall_timeout_s = stall_timeout_s
        self._last_finish = [float("-inf")] * len(engines)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        """One answer, of whichever engine gave it first: the caller hears of no engine that was lost on the way."""
        work = len(token_ids) + sampling.max_tokens
        return await self._blamed(lambda engine: engine.generate(token_ids, sampling), work, [token_ids])

    async def generate_all(self, requests: Sequence[Request]) -> list[Completion]:
        """Request i by engine i modulo their number, each engine's in one call: nothing depends on the clock.

        Neither does it on losses: the whole batch of an engine that is lost runs again, unchanged and by itself, on one
        that has nothing else to do.
        """
        count = len(self._replicas)
        batches = [asyncio.ensure_future(self._batch(requests[k::count], k)) for k in range(min(count, len(requests)))]
        try:
            answers = await asyncio.gather(*batches)
        finally:
            for batch in batches:
                batch.cancel()
        return [answers[index % count][index // count] for index in range(len(requests))]

    @property
    def states(self) -> tuple[EngineState, ...]:
        return tuple(EngineState.READY if replica.is_ready else EngineState.LOST for replica in self._replicas)

    async def _batch(self, batch: Sequence[Request], own: int) -> list[Completion]:
        work = sum(len(token_ids) + sampling.max_tokens for token_ids, sampling in batch)
        prompts = [token_ids for token_ids, _ in batch]
        return await self._blamed(lambda engine: engine.generate_all(batch), work, prompts, own)

    async def _blamed(
        self,
        ask: Callable[[PooledEngine], Awaitable[T]],
        work: int,
        prompts: Sequence[Sequence[int]],
        own: int | None = None,
    ) -> T:
        """The answer; or an error that names the request, if it is to blame."""
        try:
            return await self._request_with_retry(ask, work, [], MAX_LOSSES, own=own, requests=len(prompts))
        except PoisonRequestError as losses:
            what = f"{len(prompts)} requests, the first" if len(prompts) > 1 else "a request"
            raise EngineError(
                f"{what} of {len(prompts[0])} tokens that begin with {list(prompts[0][:8])}, ran on {MAX_LOSSES} "
                f"rollout engines that were then lost; it is not tried again: it may be what ends them. {losses}. "
                "Leave that prompt out of data.train_files, or give the engines more memory "
                "(actor_rollout_ref.rollout.gpu_memory_utilization, max_num_seqs)"
            ) from None

    async def _await_reply(self, replica: Replica[PooledEngine], request: asyncio.Future[T]) -> T:
        """The answer; `ProcessLostError` also if the engine has finished nothing for too long."""
        clock = asyncio.get_running_loop().time
        since = clock()
        while not request.done():
            sign_of_life = max(since, self._last_finish[replica.index])
            await asyncio.wait([request], timeout=max(0.0, sign_of_life + self._stall_timeout_s - clock()))
            if not request.done() and sign_of_life == max(since, self._last_finish[replica.index]):
                raise WorkerTimeoutError(
                    f"rollout engine {replica.index} has finished no request for {self._stall_timeout_s:.0f} s, with "
                    f"{replica.load:,} tokens still to do: it hangs, or one answer takes longer than that"
                )
        answer = request.result()
        self._last_finish[replica.index] = clock()
        return answer

    async def _recover(self, replica: Replica[PooledEngine], hangs: bool) -> None:
        if hangs:  # and may still tell its keeper that all is well
            with suppress(EngineError, asyncio.TimeoutError):
                await within(replica.handle.disable(replica.reason), self._reply_timeout_s)
        is_ready = False
        while not is_ready:
            await asyncio.sleep(self._poll_interval_s)
            with suppress(Exception):  # the boundary of a process: whatever it is, it is not ready
                is_ready = await within(replica.handle.is_ready(), self._reply_timeout_s)
        self._last_finish[replica.index] = asyncio.get_running_loop().time()
