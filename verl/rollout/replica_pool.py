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

__all__ = ["EnginePool", "Member", "PoisonRequestError", "Pool", "PooledEngine", "Request", "Seat"]

T = TypeVar("T")
M = TypeVar("M", bound="Member")
Request = tuple[Sequence[int], SamplingParams]

MOST_LOSSES = 5  # of engines that one request ran on; then it is probably the request that ends them


class Member(Protocol):
    """One of a pool: it may be lost, and come back under the same handle."""

    async def ready(self) -> bool:
        """Whether it could answer; `ProcessLostError` while it is down."""
        ...


class PoisonRequestError(EngineError):
    """A request was running on so many members when they were lost that it may be what ends them."""


@dataclass(eq=False)
class Seat(Generic[M]):
    """One member as this pool sees it."""

    number: int
    member: M
    is_ready: bool = True  # or lost
    why: str = ""  # it was lost
    load: int = 0  # outstanding tokens
    has_batch: bool = False
    returning: asyncio.Future[None] | None = None


class Pool(ABC, Generic[M]):
    """Members that are asked in the order of their load, and who of them is there.

    One that is lost gets nothing more until it is back; what ran on it runs again elsewhere, exactly as it was asked.
    While none is there requests wait, until that has been so for `patience_s`. Ties begin at a member of the pool's own
    choice, so that many pools do not all run to the first one. Subclasses know how to watch over a request, and how a
    member comes back.
    """

    kind: str

    def __init__(self, members: Sequence[M], *, patience_s: float, answer_s: float, ask_every_s: float) -> None:
        self._seats = [Seat(number, member) for number, member in enumerate(members)]
        self._first = randrange(len(members))
        self._patience_s, self._answer_s, self._ask_every_s = patience_s, answer_s, ask_every_s
        self._none_since = 0.0  # if none is there
        self._news = asyncio.Event()  # one came back, or has done its batch
        self.losses = 0  # of members
        self.runs_again = 0  # of requests

    def close(self) -> None:
        """Ask after none any more."""
        for seat in self._seats:
            if seat.returning is not None:
                seat.returning.cancel()

    @property
    def load(self) -> tuple[int, ...]:
        """Outstanding tokens per member."""
        return tuple(seat.load for seat in self._seats)

    @abstractmethod
    async def _watched(self, seat: Seat[M], request: asyncio.Future[T]) -> T:
        """What comes of a request; `ProcessLostError` also if that has to be taken for lost."""

    @abstractmethod
    async def _come_back(self, seat: Seat[M], hangs: bool) -> None:
        """Returns when a member that was lost is there again. `hangs`: nobody knows whether its process is gone."""

    async def _answered(
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
            seat = await self._free_seat(own)
            with self._seated(seat, work, is_batch=own is not None):
                if losses and not await self._is_there(seat):
                    continue
                request = asyncio.ensure_future(ask(seat.member))
                try:
                    return await self._watched(seat, request)
                except ProcessLostError as error:
                    self._lose(seat, str(error), hangs=isinstance(error, WorkerTimeoutError))
                    losses.append(self._told(seat, str(error)))
                    self.runs_again += requests
                finally:
                    request.cancel()  # of no effect on one that is done
        raise PoisonRequestError("; ".join(losses))

    async def _free_seat(self, own: int | None) -> Seat[M]:
        clock = asyncio.get_running_loop().time
        while True:
            ready = [seat for seat in self._seats if seat.is_ready]
            if free := [seat for seat in ready if own is None or not seat.has_batch]:
                return min(free, key=lambda seat: (seat.number != own, seat.load, self._distance(seat)))
            patience_s = self._patience_s if ready else self._none_since + self._patience_s - clock()
            if patience_s <= 0:
                raise EngineError(
                    f"no {self.kind} came back within {self._patience_s:.0f} s. How they were lost: "
                    + "; ".join(self._told(seat, seat.why) for seat in self._seats)
                )
            with suppress(asyncio.TimeoutError):
                await within(self._news.wait(), patience_s)

    def _distance(self, seat: Seat[M]) -> int:
        return (seat.number - self._first) % len(self._seats)

    def _told(self, seat: Seat[M], why: str) -> str:
        return f"{self.kind.split()[-1]} {seat.number}: {why}"

    @contextmanager
    def _seated(self, seat: Seat[M], work: int, *, is_batch: bool) -> Iterator[None]:
        seat.load += work
        seat.has_batch |= is_batch
        try:
            yield
        finally:
            seat.load -= work
            if is_batch:
                seat.has_batch = False
                self._tell()

    async def _is_there(self, seat: Seat[M]) -> bool:
        try:
            is_ready = await within(seat.member.ready(), self._answer_s)
            why = "it is not ready"
        except (EngineError, asyncio.TimeoutError) as error:
            is_ready, why = False, str(error)
        if not is_ready:
            self._lose(seat, why)
        return is_ready and seat.is_ready

    def _lose(self, seat: Seat[M], why: str, *, hangs: bool = False) -> None:
        """It gets nothing more until it is back; what runs on it notices by itself, or is lucky."""
        if not seat.is_ready:
            return
        seat.is_ready, seat.why = False, why
        self.losses += 1
        if not any(seat.is_ready for seat in self._seats):
            self._none_since = asyncio.get_running_loop().time()
        seat.returning = asyncio.ensure_future(self._return(seat, hangs))

    async def _return(self, seat: Seat[M], hangs: bool) -> None:
        await self._come_back(seat, hangs)
        seat.is_ready = True
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class PooledEngine(Member, Protocol):
    """A rollout engine as the pool needs it; it is ready when it holds weights that were proved."""

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion: ...
    async def generate_all(self, requests: Sequence[Request]) -> list[Completion]: ...

    async def shut(self, why: str) -> None:
        """Somebody waited for it in vain: it shall not be ready before it has been restarted."""
        ...


class EnginePool(Pool[PooledEngine]):
    """Routes by outstanding work: tokens of the prompt plus tokens that may still come.

    A request may wait as long as its engine makes progress. An engine whose process is gone, or that finishes nothing
    for `stall_s`, is lost until it says that it is ready; to bring it back is the keeper's. A request that has seen
    several engines end is an error of its own.
    """

    kind = "rollout engine"

    def __init__(
        self,
        engines: Sequence[PooledEngine],
        *,
        stall_s: float = 1800.0,
        patience_s: float = 3600.0,
        answer_s: float = 60.0,
        ask_every_s: float = 1.0,
    ) -> None:
        if not engines:
            raise EngineError(
                "a pool needs at least one rollout engine; set actor_rollout_ref.rollout.num_engines >= 1"
            )
        super().__init__(engines, patience_s=patience_s, answer_s=answer_s, ask_every_s=ask_every_s)
        self._stall_s = stall_s
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
        count = len(self._seats)
        batches = [asyncio.ensure_future(self._batch(requests[k::count], k)) for k in range(min(count, len(requests)))]
        try:
            answers = await asyncio.gather(*batches)
        finally:
            for batch in batches:
                batch.cancel()
        return [answers[number % count][number // count] for number in range(len(requests))]

    @property
    def states(self) -> tuple[EngineState, ...]:
        return tuple(EngineState.READY if seat.is_ready else EngineState.LOST for seat in self._seats)

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
            return await self._answered(ask, work, [], MOST_LOSSES, own=own, requests=len(prompts))
        except PoisonRequestError as losses:
            what = f"{len(prompts)} requests, the first" if len(prompts) > 1 else "a request"
            raise EngineError(
                f"{what} of {len(prompts[0])} tokens that begin with {list(prompts[0][:8])}, ran on {MOST_LOSSES} "
                f"rollout engines that were then lost; it is not tried again: it may be what ends them. {losses}. "
                "Leave that prompt out of data.train_files, or give the engines more memory "
                "(actor_rollout_ref.rollout.gpu_memory_utilization, max_num_seqs)"
            ) from None

    async def _watched(self, seat: Seat[PooledEngine], request: asyncio.Future[T]) -> T:
        """The answer; `ProcessLostError` also if the engine has finished nothing for too long."""
        clock = asyncio.get_running_loop().time
        since = clock()
        while not request.done():
            sign_of_life = max(since, self._last_finish[seat.number])
            await asyncio.wait([request], timeout=max(0.0, sign_of_life + self._stall_s - clock()))
            if not request.done() and sign_of_life == max(since, self._last_finish[seat.number]):
                raise WorkerTimeoutError(
                    f"rollout engine {seat.number} has finished no request for {self._stall_s:.0f} s, with "
                    f"{seat.load:,} tokens still to do: it hangs, or one answer takes longer than that"
                )
        answer = request.result()
        self._last_finish[seat.number] = clock()
        return answer

    async def _come_back(self, seat: Seat[PooledEngine], hangs: bool) -> None:
        if hangs:  # and may still tell its keeper that all is well
            with suppress(EngineError, asyncio.TimeoutError):
                await within(seat.member.shut(seat.why), self._answer_s)
        is_ready = False
        while not is_ready:
            await asyncio.sleep(self._ask_every_s)
            with suppress(Exception):  # the boundary of a process: whatever it is, it is not ready
                is_ready = await within(seat.member.ready(), self._answer_s)
        self._last_finish[seat.number] = asyncio.get_running_loop().time()
