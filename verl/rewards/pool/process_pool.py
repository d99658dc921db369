"""Runs user code in worker processes: one that hangs, dies or uses too much memory is replaced, without other harm.

`ProcessPool.submit` returns the future of a result and does not raise for a single call. The pool has a thread with an
event loop, so that it can be called from any thread and event loop, and a busy caller delays no call. Each worker has a
supervisor (`supervisor.py`), which kills the worker with all processes it started.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any, Generic, Self

from verl.errors import RewardError
from verl.rewards.pool.job import Job, Q, R
from verl.rewards.pool.worker_handle import Call, WorkerHandle

_MAX_LOAD_FAILURES = 3
_BATCH_WAIT_S = 0.02

_log = logging.getLogger(__name__)


class ProcessPool(Generic[Q, R]):
    """Worker processes that run the calls of a job.

    The timeout of a call begins when a worker gets it: waiting for a worker, or for the code to be loaded, does not
    count. Async functions run many calls concurrently, batched ones get all calls that are waiting.

    Args:
        job: What the workers run.
        workers: The number of processes.
        timeout_s: The limit of one call, unless `submit` gets another one.
        memory_mb: The limit of each process; None for no limit.
    """

    def __init__(self, job: Job[Q, R], workers: int, timeout_s: float, memory_mb: int | None = None) -> None:
        self._job, self._timeout_s = job, timeout_s
        self._loop = asyncio.new_event_loop()
        self._workers = [WorkerHandle(job, timeout_s, memory_mb, self, self._loop) for _ in range(workers)]
        self._waiting: deque[Call[Q, R]] = deque()
        self._load_failures = 0
        self._closed_because: str | None = None
        self._started: Future[None] = Future()
        self._warnings: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="user-code-pool", daemon=True)

    def open(self) -> None:
        """Start the workers. Calls wait for the first of them."""
        self._thread.start()

    async def start(self) -> None:
        """Start the workers and wait for the first; raise a `RewardError` if the code cannot be loaded."""
        self.open()
        await asyncio.shield(asyncio.wrap_future(self._started))

    def submit(self, request: Q, timeout_s: float | None = None) -> Future[R]:
        """Return the future result of a call, which raises a `RewardError` only if the code can no longer be loaded."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        call = Call(request, pickle.dumps(request), timeout_s, Future[R](), self._loop.time())
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

    def __enter__(self) -> Self:
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
            self._fail_all(f"{self._job.label}: the pool of its processes was closed")
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
            self._fail_all(f"{self._job.label}: the pool of its processes failed: {task.exception()!r}")

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

    def requeue(self, calls: Sequence[Call[Q, R]]) -> None:
        """Put calls whose worker ended, but not because of them, first in the queue."""
        self._waiting.extendleft(reversed(calls))

    def dispatch(self) -> None:
        """Send what is waiting to workers with free slots."""
        if self._closed_because is not None:
            self._fail_all(self._closed_because)
        batch_size = self._job.batch_size
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

    def _take_uncancelled(self) -> Iterator[Call[Q, R]]:
        while self._waiting:
            call = self._waiting.popleft()
            if call.future.running() or call.future.set_running_or_notify_cancel():
                yield call
