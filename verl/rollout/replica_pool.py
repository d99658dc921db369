"""Several equal engines behind one interface: requests go to the least loaded one, and are retried if it is lost."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from random import random
from typing import Generic, Protocol, TypeVar

from verl.errors import CorruptEngineError, EngineError, ProcessLostError, WorkerTimeoutError
from verl.rollout.completions import PartialResponse, check_completion
from verl.rollout.engine import EngineView, ManagedEngine
from verl.types import Completion, SamplingParams
from verl.waiting import with_timeout

T = TypeVar("T")
M = TypeVar("M", bound="ReplicaHandle")
Request = tuple[Sequence[int], SamplingParams]

SPILL = 8  # requests that the engine of a prompt may be ahead of the least loaded one
MAX_LOSSES = 5  # a request that ran on so many lost replicas is the likely cause


class ReplicaHandle(Protocol):
    """A replica that may be lost and recover under the same handle."""

    async def is_ready(self) -> bool:
        """Return whether it accepts requests; `ProcessLostError` while it is down."""
        ...


class PoisonRequestError(EngineError):
    """A request was running on several replicas when they were lost, and may be what crashes them."""


@dataclass(eq=False)
class Replica(Generic[M]):
    """One replica as a pool sees it."""

    id: int
    handle: M
    is_ready: bool = True
    has_left: bool = False  # for good; requests may still run on it
    is_asleep: bool = False  # requests would wait
    reason: str = ""  # why it was lost
    load: int = 0  # outstanding tokens
    last_finish: float = -math.inf  # when it last finished a request
    has_batch: bool = False
    tie_break: float = field(default_factory=random)  # many pools must not all favor the same replica
    recovery: asyncio.Future[None] | None = None


@dataclass(eq=False)
class PromptAffinity:
    """The replica that has a prompt in its cache, while responses to the prompt are requested."""

    replica_id: int | None = None
    users: int = 0


class ReplicaPool(ABC, Generic[M]):
    """Sends each request to the replica with the least outstanding work, and again elsewhere if that one is lost.

    A lost replica gets no requests until it has recovered. While none is available requests wait, for at most
    `recovery_timeout_s`. Subclasses define how a request is watched and how a replica recovers.
    """

    kind: str

    def __init__(
        self, handles: Mapping[int, M], *, recovery_timeout_s: float, reply_timeout_s: float, poll_interval_s: float
    ) -> None:
        self._replicas = {replica_id: Replica(replica_id, handle) for replica_id, handle in handles.items()}
        self._recovery_timeout_s, self._reply_timeout_s = recovery_timeout_s, reply_timeout_s
        self._poll_interval_s = poll_interval_s
        self._unavailable_since = 0.0
        self._changed = asyncio.Event()  # a replica has joined, recovered, finished its batch, or left

    def close(self) -> None:
        """Stop waiting for replicas to recover."""
        for replica in self._replicas.values():
            if replica.recovery is not None:
                replica.recovery.cancel()

    @abstractmethod
    async def _await_reply(self, replica: Replica[M], request: asyncio.Future[T]) -> T:
        """Return the reply to a request; `ProcessLostError` if it, or its replica, has to be considered lost."""

    @abstractmethod
    async def _recover(self, replica: Replica[M], hangs: bool) -> None:
        """Return when a lost replica is available again. `hangs`: its process may still exist."""

    async def _request_with_retry(
        self,
        send: Callable[[Replica[M]], Awaitable[T]],
        tokens: int,
        losses: list[str],
        max_losses: int,
        *,
        preferred: int | None = None,
        affinity: PromptAffinity | None = None,
    ) -> T:
        """Send to one replica after another until one replies. A batch (`preferred`: its replica) runs alone there.

        Once a request has lost a replica, the next one is asked whether it is ready first. So only replicas that were
        up and then lost count against the request; many may go down at once with their machine. A replica that left
        does not count either.
        """
        while len(losses) < max_losses:
            replica = await self._select(preferred)
            if affinity is not None:
                replica = self._prefer_cached(replica, affinity, tokens)
            with self._occupy(replica, tokens, is_batch=preferred is not None):
                if losses and not await self._check_ready(replica):
                    continue
                request = asyncio.ensure_future(send(replica))
                try:
                    return await self._await_reply(replica, request)
                except ProcessLostError as error:
                    if not replica.has_left:
                        lives_on = isinstance(error, (WorkerTimeoutError, CorruptEngineError))
                        self._set_lost(replica, str(error), hangs=lives_on)
                        losses.append(self._describe(replica, str(error)))
                finally:
                    request.cancel()  # no effect once it is done
        raise PoisonRequestError("; ".join(losses))

    async def _select(self, preferred: int | None) -> Replica[M]:
        clock = asyncio.get_running_loop().time
        while True:
            ready = [replica for replica in self._replicas.values() if replica.is_ready]
            if free := [replica for replica in ready if preferred is None or not replica.has_batch]:
                return min(free, key=lambda one: (one.id != preferred, one.is_asleep, one.load, one.tie_break))
            timeout_s = self._recovery_timeout_s
            if not ready:
                timeout_s += self._unavailable_since - clock()
            if timeout_s <= 0:
                raise EngineError(
                    f"no {self.kind} recovered within {self._recovery_timeout_s:.0f} s. They were lost because: "
                    + "; ".join(self._describe(replica, replica.reason) for replica in self._replicas.values())
                )
            with suppress(asyncio.TimeoutError):
                await with_timeout(self._changed.wait(), timeout_s)

    def _prefer_cached(self, least_loaded: Replica[M], affinity: PromptAffinity, tokens: int) -> Replica[M]:
        """Return the replica that knows the prompt, unless it sleeps or has too much to do; the prompt then moves."""
        known = None if affinity.replica_id is None else self._replicas.get(affinity.replica_id)
        if (
            known is not None
            and known.is_ready
            and known.is_asleep <= least_loaded.is_asleep
            and known.load - least_loaded.load <= SPILL * tokens
        ):
            return known
        affinity.replica_id = least_loaded.id
        return least_loaded

    def _describe(self, replica: Replica[M], reason: str) -> str:
        return f"{self.kind.split()[-1]} {replica.id}: {reason}"

    @contextmanager
    def _occupy(self, replica: Replica[M], tokens: int, *, is_batch: bool) -> Iterator[None]:
        replica.load += tokens
        replica.has_batch |= is_batch
        try:
            yield
        finally:
            replica.load -= tokens
            if is_batch:
                replica.has_batch = False
            if is_batch or replica.has_left:
                self._notify()

    async def _check_ready(self, replica: Replica[M]) -> bool:
        try:
            is_ready = await with_timeout(replica.handle.is_ready(), self._reply_timeout_s)
            reason = "it is not ready"
        except (TimeoutError, EngineError) as error:
            is_ready, reason = False, str(error)
        if not is_ready:
            self._set_lost(replica, reason)
        return is_ready and replica.is_ready

    def _set_lost(self, replica: Replica[M], reason: str, *, hangs: bool = False) -> None:
        """Send it nothing until it has recovered; requests running on it notice by themselves, or still finish."""
        if not replica.is_ready:
            return
        replica.is_ready, replica.reason = False, reason
        self._check_available()
        replica.recovery = asyncio.ensure_future(self._recover_and_use(replica, hangs))

    def _check_available(self) -> None:
        if not any(replica.is_ready for replica in self._replicas.values()):
            self._unavailable_since = asyncio.get_running_loop().time()

    async def _recover_and_use(self, replica: Replica[M], hangs: bool) -> None:
        await self._recover(replica, hangs)
        replica.is_ready = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class EnginePool(ReplicaPool[ManagedEngine]):
    """Routes by outstanding work: tokens of the prompt plus tokens that may still be generated.

    Responses to the same prompt go to the same engine, which then computes the prompt once, up to `SPILL` of them.
    A request may wait as long as its engine makes progress. An engine whose process is gone, or that finishes nothing
    for `stall_timeout_s`, is lost until it reports that it is ready; the supervisor restarts it. A request that was
    running on `MAX_LOSSES` engines when they were lost fails. `update` follows engines that join and leave.
    """

    kind = "rollout engine"

    def __init__(
        self,
        view: EngineView,
        *,
        stall_timeout_s: float = 1800.0,
        recovery_timeout_s: float = 3600.0,
        reply_timeout_s: float = 60.0,
        poll_interval_s: float = 1.0,
    ) -> None:
        if not view.engines:
            raise EngineError(
                "a pool needs at least one rollout engine; set actor_rollout_ref.rollout.num_engines >= 1"
            )
        super().__init__(
            view.engines,
            recovery_timeout_s=recovery_timeout_s,
            reply_timeout_s=reply_timeout_s,
            poll_interval_s=poll_interval_s,
        )
        self._stall_timeout_s = stall_timeout_s
        self._view_version = view.version
        self._affinities: dict[tuple[int, ...], PromptAffinity] = {}

    async def update(self, view: EngineView) -> None:
        """Send requests to the engines of `view` from now on; return when none runs on an engine that left."""
        left: list[Replica[ManagedEngine]] = []
        if view.version > self._view_version:  # else a newer view was faster
            self._view_version = view.version
            left = [replica for replica_id, replica in self._replicas.items() if replica_id not in view.engines]
            for replica in left:
                self._forget(replica)
            for engine_id, engine in view.engines.items():
                replica = self._replicas.setdefault(engine_id, Replica(engine_id, engine))
                replica.is_asleep = engine_id in view.asleep
            self._check_available()
            self._notify()
        while any(replica.load for replica in left):
            await self._changed.wait()

    def _forget(self, replica: Replica[ManagedEngine]) -> None:
        replica.has_left, replica.is_ready = True, False
        if replica.recovery is not None:
            replica.recovery.cancel()
        del self._replicas[replica.id]

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, turns: PromptAffinity | None = None
    ) -> Completion:
        """Return one response; engines that are lost meanwhile are invisible to the caller, and what they had generated
        is continued elsewhere."""
        is_first = turns is None or turns.replica_id is None
        with self._share_affinity(token_ids) if is_first else nullcontext(turns) as affinity:
            tokens = len(token_ids) + sampling.max_tokens
            response = PartialResponse(token_ids, sampling)

            async def send(replica: Replica[ManagedEngine]) -> Completion:
                return await response.complete(replica.handle, replica.id)

            completion = await self._request(send, tokens, [token_ids], affinity=affinity)
        if turns is not None:
            turns.replica_id = completion.engine
        return completion

    def start_episode(self) -> Callable[[Sequence[int], SamplingParams], Awaitable[Completion]]:
        """Return `generate` for the turns of an episode: they stay on one engine, which has the earlier ones cached."""
        return partial(self.generate, turns=PromptAffinity())

    @contextmanager
    def _share_affinity(self, token_ids: Sequence[int]) -> Iterator[PromptAffinity]:
        prompt = tuple(token_ids)
        affinity = self._affinities.setdefault(prompt, PromptAffinity())
        affinity.users += 1
        try:
            yield affinity
        finally:
            affinity.users -= 1
            if not affinity.users:
                del self._affinities[prompt]

    async def generate_all(self, requests: Sequence[Request]) -> list[Completion]:
        """Run request i on engine i modulo their count, each engine's in one call: nothing depends on timing.

        Results do not depend on losses either: the batch of a lost engine runs again, unchanged and alone, on an idle
        engine.
        """
        engine_ids = list(self._replicas) or [-1]  # without engines, the batch waits for the first one
        count = len(engine_ids)
        batches = [
            asyncio.ensure_future(self._generate_batch(requests[k::count], engine_id))
            for k, engine_id in enumerate(engine_ids[: len(requests)])
        ]
        try:
            replies = await asyncio.gather(*batches)
        finally:
            for batch in batches:
                batch.cancel()
        return [replies[index % count][index // count] for index in range(len(requests))]

    async def _generate_batch(self, batch: Sequence[Request], preferred: int) -> list[Completion]:
        tokens = sum(len(token_ids) + sampling.max_tokens for token_ids, sampling in batch)
        prompts = [token_ids for token_ids, _ in batch]

        async def send(replica: Replica[ManagedEngine]) -> list[Completion]:
            return [check_completion(each, replica.id) for each in await replica.handle.generate_all(batch)]

        return await self._request(send, tokens, prompts, preferred)

    async def _request(
        self,
        send: Callable[[Replica[ManagedEngine]], Awaitable[T]],
        tokens: int,
        prompts: Sequence[Sequence[int]],
        preferred: int | None = None,
        affinity: PromptAffinity | None = None,
    ) -> T:
        try:
            return await self._request_with_retry(send, tokens, [], MAX_LOSSES, preferred=preferred, affinity=affinity)
        except PoisonRequestError as losses:
            subject = f"{len(prompts)} requests, the first" if len(prompts) > 1 else "a request"
            raise EngineError(
                f"{subject} of {len(prompts[0])} tokens that begin with {list(prompts[0][:8])}, ran on {MAX_LOSSES} "
                f"rollout engines that were then lost; it is not retried: it may be what crashes them. {losses}. "
                "Remove that prompt from data.train_files, or give the engines more memory "
                "(actor_rollout_ref.rollout.gpu_memory_utilization, max_num_seqs)"
            ) from None

    async def _await_reply(self, replica: Replica[ManagedEngine], request: asyncio.Future[T]) -> T:
        """Return the reply; `ProcessLostError` also if the engine has finished nothing for too long."""
        clock = asyncio.get_running_loop().time
        since = clock()
        while not request.done():
            last_progress = max(since, replica.last_finish)
            await asyncio.wait([request], timeout=max(0.0, last_progress + self._stall_timeout_s - clock()))
            if not request.done() and last_progress == max(since, replica.last_finish):
                raise WorkerTimeoutError(
                    f"rollout engine {replica.id} has finished no request for {self._stall_timeout_s:.0f} s, with "
                    f"{replica.load:,} tokens outstanding: it hangs, or one response takes longer than that"
                )
        reply = request.result()
        replica.last_finish = clock()
        return reply

    async def _recover(self, replica: Replica[ManagedEngine], hangs: bool) -> None:
        if hangs:  # its heartbeat may still be fine
            with suppress(EngineError, asyncio.TimeoutError):
                await with_timeout(replica.handle.disable(replica.reason), self._reply_timeout_s)
        is_ready = False
        while not is_ready:
            await asyncio.sleep(self._poll_interval_s)
            with suppress(Exception):  # process boundary: with any error, the replica is not ready
                is_ready = await with_timeout(replica.handle.is_ready(), self._reply_timeout_s)
        replica.last_finish = asyncio.get_running_loop().time()
