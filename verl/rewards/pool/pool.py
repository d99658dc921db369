"""Scores responses in separate processes: one that hangs, dies or uses too much memory is replaced, without other harm.

`RewardPool.score` returns a `Scored` or a `Failed`, never a 0 for a failure, and does not raise for a single response.
The pool has a thread with an event loop, so that it can be called from any thread and event loop, and a busy caller
delays no call. Each worker has a supervisor (`supervisor.py`), which kills it with all processes it started.
"""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any

from verl.errors import RewardError
from verl.rewards.pool.worker_handle import Call, WorkerHandle
from verl.rewards.result import RewardInput, RewardResult
from verl.rewards.reward_function import RewardFunction
from verl.rewards.settings import RewardFunctionSettings, RewardPoolSettings

_MAX_LOAD_FAILURES = 3
_BATCH_WAIT_S = 0.02

_log = logging.getLogger(__name__)


class RewardPool:
    """Worker processes that score responses.

    The deadline of a call begins when a worker gets it: waiting for a worker, or for the function to be loaded, does
    not count. Async functions are called for many responses concurrently, batched ones with what is waiting.
    """

    def __init__(self, settings: RewardPoolSettings) -> None:
        self._settings, self._label = settings, settings.function.label
        self._loop = asyncio.new_event_loop()
        self._workers = [WorkerHandle(settings, self, self._loop) for _ in range(settings.workers)]
        self._waiting: deque[Call] = deque()
        self._load_failures = 0
        self._closed_because: str | None = None
        self._started: Future[None] = Future()
        self._warnings: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)

    @property
    def deadline_s(self) -> float:
        return self._settings.deadline_s

    async def start(self) -> None:
        """Start the workers and wait for the first; raise a `RewardError` if the function cannot be loaded."""
        self._thread.start()
        await asyncio.shield(asyncio.wrap_future(self._started))

    async def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> RewardResult:
        """Score one response; raise a `RewardError` only if the function can no longer be loaded."""
        return await asyncio.wrap_future(self.submit(RewardInput(data_source, solution_str, ground_truth, extra_info)))

    def submit(self, request: RewardInput) -> Future[RewardResult]:
        """Score one response, for callers without an event loop."""
        call = Call(request, pickle.dumps(tuple(request)), Future(), self._loop.time())
        if self._closed_because is not None:
            call.future.set_exception(RewardError(self._closed_because))
            return call.future
        self._waiting.append(call)
        self._loop.call_soon_threadsafe(self.dispatch)
        return call.future

    def close(self) -> None:
        """End all processes and the thread; fail all pending calls."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- The methods below run on the pool's thread.

    def _run(self) -> None:
        tasks = [self._loop.create_task(worker.run()) for worker in self._workers]
        for task in tasks:
            task.add_done_callback(self._on_task_done)
        try:
            self._loop.run_forever()
        finally:
            self._fail_all(f"{self._label}: the reward pool was closed")
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            for worker in self._workers:
                worker.disconnect()
            self._loop.run_until_complete(asyncio.sleep(0))  # sockets are closed in the loop's next iteration
            for worker in self._workers:
                worker.wait()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._fail_all(f"{self._label}: the reward pool failed: {task.exception()!r}")

    def _fail_all(self, message: str) -> None:
        """Fail all pending and future calls."""
        self._closed_because = self._closed_because or message
        calls = [*self._waiting, *(call for worker in self._workers for call in worker.calls.values())]
        self._waiting.clear()
        for worker in self._workers:
            worker.calls.clear()
        futures: list[Future[Any]] = [self._started, *(call.future for call in calls)]
        for future in futures:
            if not future.done():
                future.set_exception(RewardError(message))

    @property
    def is_closed(self) -> bool:
        return self._closed_because is not None

    def on_loaded(self) -> None:
        self._load_failures = 0
        if not self._started.done():
            self._started.set_result(None)

    def on_load_failed(self, reason: str) -> None:
        """Give up at once at the start; later only after several failures in a row."""
        self._load_failures += 1
        if self._load_failures >= (_MAX_LOAD_FAILURES if self._started.done() else 1):
            self._fail_all(reason)

    def warn(self, text: str) -> None:
        """Log a warning once, whichever worker sends it first."""
        if text not in self._warnings:
            self._warnings.add(text)
            _log.warning("%s", text)

    def requeue(self, calls: Sequence[Call]) -> None:
        """Put calls whose worker ended, but not because of them, first in the queue."""
        self._waiting.extendleft(reversed(calls))

    def dispatch(self) -> None:
        """Send what is waiting to workers with free slots."""
        if self._closed_because is not None:
            self._fail_all(self._closed_because)
        batch_size = self._settings.function.batch_size if self._settings.function.is_batched else None
        while self._waiting:
            worker = max(self._workers, key=lambda one: one.free_slots(self._waiting[0]))
            if worker.free_slots(self._waiting[0]) <= 0:
                return
            age = self._loop.time() - self._waiting[0].submitted
            if batch_size and len(self._waiting) < batch_size and age < _BATCH_WAIT_S:
                self._loop.call_later(_BATCH_WAIT_S - age, self.dispatch)
                return
            if calls := list(islice(self._take_uncancelled(), batch_size or 1)):
                worker.send(calls)

    def _take_uncancelled(self) -> Iterator[Call]:
        while self._waiting:
            call = self._waiting.popleft()
            if call.future.running() or call.future.set_running_or_notify_cancel():
                yield call


class InProcessRewards:
    """The interface of `RewardPool`, with the function on the caller's thread: it may stop at a breakpoint."""

    deadline_s = math.inf

    def __init__(self, settings: RewardFunctionSettings) -> None:
        self._settings = settings

    async def start(self) -> None:
        self._reward = RewardFunction.load(self._settings)

    async def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> RewardResult:
        return await self._reward.score_request(RewardInput(data_source, solution_str, ground_truth, extra_info))

    def close(self) -> None:
        """Do nothing: there are no other processes."""

    def __enter__(self) -> InProcessRewards:
        return self

    def __exit__(self, *_: object) -> None: ...


RewardClient = RewardPool | InProcessRewards


def open_rewards(settings: RewardPoolSettings) -> RewardClient:
    """Return a pool of processes; without workers, score in this process, with breakpoints and without limits."""
    return RewardPool(settings) if settings.workers else InProcessRewards(settings.function)
