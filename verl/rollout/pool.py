"""Several engines that look like one: each request goes to the one with the least to do, and again if that is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from random import randrange
from typing import Protocol, TypeVar

from verl.errors import EngineError, NoAnswerError, ProcessLostError
from verl.rollout.keeper import EngineState, within
from verl.types import Completion, SamplingParams

__all__ = ["EnginePool", "PooledEngine", "Request"]

T = TypeVar("T")
Request = tuple[Sequence[int], SamplingParams]

MOST_LOSSES = 5  # of engines that one request ran on; then it is probably the request that ends them


class PooledEngine(Protocol):
    """A rollout engine as the pool needs it: one that may be lost, and come back under the same handle."""

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion: ...
    async def generate_all(self, requests: Sequence[Request]) -> list[Completion]: ...

    async def ready(self) -> bool:
        """Whether it holds weights that were proved and could generate; `ProcessLostError` while it is down."""
        ...

    async def shut(self, why: str) -> None:
        """Somebody waited for it in vain: it shall not be ready before it has been restarted."""
        ...


@dataclass(eq=False)
class _Seat:
    """One engine as this pool sees it."""

    number: int
    engine: PooledEngine
    state: EngineState = EngineState.READY  # or LOST
    why: str = ""  # it was lost
    load: int = 0  # outstanding tokens
    last_finish: float = float("-inf")
    has_batch: bool = False
    returning: asyncio.Future[None] | None = None


class EnginePool:
    """Routes by outstanding work: tokens of the prompt plus tokens that may still come.

    A request may wait as long as its engine makes progress. An engine whose process is gone, or that finishes nothing
    for `stall_s`, is lost: what ran on it runs again elsewhere, exactly as it was asked, and it gets nothing more until
    it says that it is ready. While none is ready requests wait, for `patience_s` at most. A request that has seen
    several engines end is an error of its own. Ties begin at an engine of the pool's own choice, so that many pools do
    not all run to the first one.
    """

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
        self._seats = [_Seat(number, engine) for number, engine in enumerate(engines)]
        self._first = randrange(len(engines))
        self._stall_s, self._patience_s = stall_s, patience_s
        self._answer_s, self._ask_every_s = answer_s, ask_every_s
        self._news = asyncio.Event()  # an engine came back, or has done its batch
        self.losses = 0  # of engines
        self.runs_again = 0  # of requests

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        """One answer, of whichever engine gave it first: the caller hears of no engine that was lost on the way."""
        work = len(token_ids) + sampling.max_tokens
        return await self._answered(lambda engine: engine.generate(token_ids, sampling), work, [token_ids])

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

    def close(self) -> None:
        """Ask after no engine any more."""
        for seat in self._seats:
            if seat.returning is not None:
                seat.returning.cancel()

    @property
    def load(self) -> tuple[int, ...]:
        """Outstanding tokens per engine."""
        return tuple(seat.load for seat in self._seats)

    @property
    def states(self) -> tuple[EngineState, ...]:
        return tuple(seat.state for seat in self._seats)

    async def _batch(self, batch: Sequence[Request], own: int) -> list[Completion]:
        work = sum(len(token_ids) + sampling.max_tokens for token_ids, sampling in batch)
        prompts = [token_ids for token_ids, _ in batch]
        return await self._answered(lambda engine: engine.generate_all(batch), work, prompts, own)

    async def _answered(
        self,
        ask: Callable[[PooledEngine], Awaitable[T]],
        work: int,
        prompts: Sequence[Sequence[int]],
        own: int | None = None,
    ) -> T:
        """Ask one engine after the other until one answers. A batch (`own`: of that engine) shares it with no other.

        Once a request has lost an engine, it asks the next one whether it is there before it goes to it. So what counts
        against the request is an engine that was there and was then lost; many may go at once, with their machine.
        """
        losses: list[str] = []
        while len(losses) < MOST_LOSSES:
            seat = await self._free_seat(own)
            with self._seated(seat, work, is_batch=own is not None):
                if losses and not await self._is_there(seat):
                    continue
                try:
                    return await self._watched(seat, asyncio.ensure_future(ask(seat.engine)))
                except ProcessLostError as error:
                    losses.append(f"engine {seat.number}: {error}")
                    self.runs_again += len(prompts)
        what = f"{len(prompts)} requests, the first" if len(prompts) > 1 else "a request"
        raise EngineError(
            f"{what} of {len(prompts[0])} tokens that begin with {list(prompts[0][:8])}, ran on {MOST_LOSSES} rollout "
            f"engines that were then lost; it is not tried again: it may be what ends them. {'; '.join(losses)}. Leave "
            "that prompt out of data.train_files, or give the engines more memory "
            "(actor_rollout_ref.rollout.gpu_memory_utilization, max_num_seqs)"
        )

    async def _free_seat(self, own: int | None) -> _Seat:
        while True:
            ready = [seat for seat in self._seats if seat.state is EngineState.READY]
            if free := [seat for seat in ready if own is None or not seat.has_batch]:
                return min(free, key=lambda seat: (seat.number != own, seat.load, self._distance(seat)))
            try:
                await within(self._news.wait(), self._patience_s)
            except asyncio.TimeoutError:
                if ready:  # with a batch, over which somebody watches
                    continue
                ends = "; ".join(f"engine {seat.number}: {seat.why}" for seat in self._seats)
                raise EngineError(
                    f"no rollout engine came back within {self._patience_s:.0f} s. How they were lost: {ends}"
                ) from None

    def _distance(self, seat: _Seat) -> int:
        return (seat.number - self._first) % len(self._seats)

    @contextmanager
    def _seated(self, seat: _Seat, work: int, *, is_batch: bool) -> Iterator[None]:
        seat.load += work
        seat.has_batch |= is_batch
        try:
            yield
        finally:
            seat.load -= work
            if is_batch:
                seat.has_batch = False
                self._tell()

    async def _watched(self, seat: _Seat, request: asyncio.Future[T]) -> T:
        """The answer; `ProcessLostError` also if the engine has finished nothing for too long."""
        clock = asyncio.get_running_loop().time
        since = clock()
        try:
            while not request.done():
                sign_of_life = max(since, seat.last_finish)
                await asyncio.wait([request], timeout=max(0.0, sign_of_life + self._stall_s - clock()))
                if not request.done() and sign_of_life == max(since, seat.last_finish):
                    raise NoAnswerError(
                        f"rollout engine {seat.number} has finished no request for {self._stall_s:.0f} s, with "
                        f"{seat.load:,} tokens still to do: it hangs, or one answer takes longer than that"
                    )
            answer = request.result()
        except ProcessLostError as error:
            self._lose(seat, str(error), hangs=isinstance(error, NoAnswerError))
            raise
        finally:
            request.cancel()  # of no effect on one that is done
        seat.last_finish = clock()
        return answer

    async def _is_there(self, seat: _Seat) -> bool:
        try:
            is_ready = await within(seat.engine.ready(), self._answer_s)
            why = "it is not ready"
        except (EngineError, asyncio.TimeoutError) as error:
            is_ready, why = False, str(error)
        if not is_ready:
            self._lose(seat, why)
        return is_ready and seat.state is EngineState.READY

    def _lose(self, seat: _Seat, why: str, *, hangs: bool = False) -> None:
        """It gets nothing more until it says that it is ready; what runs on it notices by itself, or is lucky."""
        if seat.state is EngineState.LOST:
            return
        seat.state, seat.why = EngineState.LOST, why
        self.losses += 1
        seat.returning = asyncio.ensure_future(self._return(seat, hangs))

    async def _return(self, seat: _Seat, hangs: bool) -> None:
        if hangs:  # and may still tell its keeper that all is well
            with suppress(EngineError, asyncio.TimeoutError):
                await within(seat.engine.shut(seat.why), self._answer_s)
        is_ready = False
        while not is_ready:
            await asyncio.sleep(self._ask_every_s)
            with suppress(Exception):  # the boundary of a process: whatever it is, it is not ready
                is_ready = await within(seat.engine.ready(), self._answer_s)
        seat.state, seat.last_finish = EngineState.READY, asyncio.get_running_loop().time()
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
