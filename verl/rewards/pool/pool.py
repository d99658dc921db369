"""Scores answers in processes of their own: one that hangs, dies or eats memory is replaced, and nobody else notices.

`RewardPool.score` gives a `Scored` or a `Failed`, never a 0 for a failure, and never raises for what one answer did.
The pool has a thread with an event loop, so it can be asked from any thread and any loop, and a caller that is busy
makes no call late. Each worker has a keeper (`keeper.py`), which ends it with all that it started.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any

from verl.errors import RewardError
from verl.rewards.pool.in_process import InProcessRewards
from verl.rewards.pool.worker_handle import Call, RewardPoolSettings, WorkerHandle
from verl.rewards.result import RewardInput, RewardResult
from verl.rewards.reward_function import format_function_name

__all__ = ["RewardClient", "RewardPool", "open_rewards"]

_LOAD_TRIES = 3
_MOMENT_S = 0.02

_log = logging.getLogger(__name__)


class RewardPool:
    """`workers` processes that score. Consumes answers, produces outcomes; touches nothing else.

    `reward` are the arguments of `load_reward`. The deadline of a call runs from its start: waiting for a worker, or
    for a worker's function to be loaded, is not counted. Async functions are called for many answers at once; with
    `batch_size` the function is a batched one, and gets what is waiting, up to so many.

    >>> with ScorePool({"path": "my_reward.py"}, workers=2, deadline_s=30) as pool:
    ...     await pool.start()
    ...     await pool.score("gsm8k", "... #### 72", "72")
    Scored(score=1.0, metrics={})
    """

    def __init__(
        self,
        reward: Mapping[str, Any],
        *,
        workers: int = 1,
        deadline_s: float = 300.0,
        memory_mb: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        self._scoring = RewardPoolSettings(
            reward=dict(reward) | ({"batched": True} if batch_size else {}),
            where=format_function_name(
                reward.get("path"), reward.get("name", "compute_score"), reward.get("functions", ())
            ),
            deadline_s=deadline_s,
            memory_mb=memory_mb or 0,
            batch_size=batch_size,
        )
        self._loop = asyncio.new_event_loop()
        self._seats = [WorkerHandle(self._scoring, self, self._loop) for _ in range(workers)]
        self._waiting: deque[Call] = deque()
        self._numbers = 0
        self._is_woken = False
        self._loading_failed = 0
        self._broken: str | None = None
        self._started: Future[None] = Future()
        self._noted: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="score-pool", daemon=True)

    @property
    def deadline_s(self) -> float:
        return self._scoring.deadline_s

    async def start(self) -> None:
        """Start the workers; a `RewardError` when the function cannot be loaded. The first ready one is waited for."""
        self._thread.start()
        await asyncio.shield(asyncio.wrap_future(self._started))

    async def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> RewardResult:
        """The outcome of one answer; a `RewardError` only when the function itself can no longer be loaded."""
        return await asyncio.wrap_future(self.submit(RewardInput(data_source, solution_str, ground_truth, extra_info)))

    def submit(self, answer: RewardInput) -> Future[RewardResult]:
        """As `score`, for callers without an event loop."""
        call = Call(answer, pickle.dumps(tuple(answer)), Future(), self._loop.time())
        if self._broken is not None:
            call.future.set_exception(RewardError(self._broken))
            return call.future
        self._waiting.append(call)
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self.dispatch)
        return call.future

    def close(self) -> None:
        """End all processes and the thread; what still waits is refused."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what follows runs on the pool's own thread

    def _run(self) -> None:
        minding = [self._loop.create_task(seat.mind()) for seat in self._seats]
        for task in minding:
            task.add_done_callback(self._on_minder_gone)
        try:
            self._loop.run_forever()
        finally:
            self._refuse(f"{self._scoring.where}: the pool that scores was closed")
            for task in minding:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*minding, return_exceptions=True))
            for seat in self._seats:
                seat.let_go()
            self._loop.run_until_complete(asyncio.sleep(0))  # sockets are closed in the loop's next round
            for seat in self._seats:
                seat.wait()

    def _on_minder_gone(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._refuse(f"{self._scoring.where}: its pool failed: {task.exception()!r}")

    def _refuse(self, message: str) -> None:
        """The end: whoever waits, and whoever comes, is told so."""
        self._broken = self._broken or message
        calls = [*self._waiting, *(call for seat in self._seats for call in seat.calls.values())]
        self._waiting.clear()
        for seat in self._seats:
            seat.calls.clear()
        if not self._started.done():
            self._started.set_exception(RewardError(message))
        for call in calls:
            if not call.future.done():
                call.future.set_exception(RewardError(message))

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be scored."""
        return self._broken is not None

    def loaded(self) -> None:
        """A seat has the function, and is ready."""
        self._loading_failed = 0
        if not self._started.done():
            self._started.set_result(None)

    def not_loaded(self, why: str) -> None:
        """A seat could not load it: the end at the start; later only when it happens again and again."""
        self._loading_failed += 1
        if self._loading_failed >= (_LOAD_TRIES if self._started.done() else 1):
            self._refuse(why)

    def note(self, text: str) -> None:
        """Something to be said once, whichever seat says it first."""
        if text not in self._noted:
            self._noted.add(text)
            _log.warning("%s", text)

    def give_back(self, calls: Sequence[Call]) -> None:
        """Calls whose worker ended through no fault of theirs: they are next."""
        self._waiting.extendleft(reversed(calls))

    def dispatch(self) -> None:
        """Hand what is waiting to the workers that have room."""
        self._is_woken = False
        if self._broken is not None:
            self._refuse(self._broken)
        batch_size = self._scoring.batch_size
        while self._waiting:
            seat = max(self._seats, key=lambda one: one.room(self._waiting[0]))
            size = min(seat.room(self._waiting[0]), -(-len(self._waiting) // len(self._seats)))
            if size == 0:
                return
            if batch_size:
                age = self._loop.time() - self._waiting[0].submitted
                if len(self._waiting) < batch_size and age < _MOMENT_S:
                    self._loop.call_later(_MOMENT_S - age, self.dispatch)
                    return
                size = batch_size
            calls = list(islice(self._take(), size))
            if calls:
                seat.send({self._number(): call for call in calls})

    def _take(self) -> Iterator[Call]:
        while self._waiting:
            call = self._waiting.popleft()
            if call.is_running or call.future.set_running_or_notify_cancel():
                call.is_running = True
                yield call

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


RewardClient = RewardPool | InProcessRewards


def open_rewards(reward: Mapping[str, Any], *, workers: int = 1, **limits: Any) -> RewardClient:
    """Who scores: `workers` processes; or without any this one, where a breakpoint works and limits are not kept."""
    return RewardPool(reward, workers=workers, **limits) if workers else InProcessRewards(reward, **limits)
