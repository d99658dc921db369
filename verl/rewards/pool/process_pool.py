"""Runs user code in worker processes: one that hangs, dies or uses too much memory is replaced, without other harm.

`ProcessPool.submit` returns the future of a result and does not raise for a single call. The pool has a thread with an
event loop, so that it can be called from any thread and event loop, and a busy caller delays no call. Each worker has a
supervisor (`supervisor.py`), which kills the worker with all processes it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import pickle
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Generic, Self

from verl.errors import RewardError
from verl.redaction import redact
from verl.rewards.pool.job import Job, Q, R
from verl.rewards.pool.supervisor import KILL, READY, ExitReport
from verl.rewards.pool.worker import HEADER
from verl.rewards.process_usage import kill_processes, list_descendants
from verl.rewards.result import format_timeout
from verl.waiting import EventLoopThread

LOAD_TIMEOUT_S = 300.0
_MAX_LOAD_FAILURES = 3
_BATCH_WAIT_S = 0.02
_MAX_CONCURRENT = 64  # calls of an async function in one process
_ASYNC_GRACE_S = 2.0  # an async worker ends late calls itself; it is killed if it has not done so by then
_MAX_MESSAGE_BYTES = 16 << 20
_CLOSE_S = 10.0

_BOOT = (
    "import sys; control, channel, memory, *sys.path = sys.argv[1:]; "
    "from verl.rewards.pool.supervisor import main; main(int(control), int(channel), int(memory))"
)
_SUPERVISOR_LOST = ExitReport(None, "the process that supervises it was killed", is_supervisor_lost=True)

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Call(Generic[Q, R]):
    """One call of the user code, from submission to result."""

    request: Q
    pickled: bytes
    timeout_s: float
    future: Future[R]
    submitted: float
    started: float = 0.0
    is_alone: bool = False  # it was one of several when a worker ended: the next worker gets it alone
    was_killed: bool = False  # another process killed the worker during this call


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
        self.job, self.timeout_s, self.memory_mb = job, timeout_s, memory_mb
        self._workers = [_Worker(self) for _ in range(workers)]
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: deque[_Call[Q, R]] = deque()
        self._load_failures = 0
        self._closed_because: str | None = None
        self._started: Future[None] = Future()
        self._warnings: set[str] = set()
        self._thread: EventLoopThread | None = None

    def open(self) -> None:
        """Start the workers. Calls wait for the first of them."""
        self._thread = EventLoopThread("user-code-pool")
        self._thread.submit(self._start_workers()).result()

    async def start(self) -> None:
        """Start the workers and wait for the first; raise a `RewardError` if the code cannot be loaded."""
        self.open()
        await asyncio.shield(asyncio.wrap_future(self._started))

    def submit(self, request: Q, timeout_s: float | None = None) -> Future[R]:
        """Return the future result of a call, which raises a `RewardError` only if the code can no longer be loaded."""
        future = Future[R]()
        if self._closed_because is not None:
            future.set_exception(RewardError(self._closed_because))
            return future
        assert self._thread is not None
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self._waiting.append(_Call(request, pickle.dumps(request), timeout_s, future, self._thread.loop.time()))
        self._thread.loop.call_soon_threadsafe(self.dispatch)
        return future

    def close(self) -> None:
        """End all processes and the thread; fail all pending calls."""
        if self._thread is not None:
            self._thread.submit(self._end_workers()).result()
            self._thread.close()
            self._thread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- The methods below run on the pool's thread.

    async def _start_workers(self) -> None:
        for worker in self._workers:
            self._tasks.append(asyncio.create_task(worker.run()))
            self._tasks[-1].add_done_callback(self._on_task_done)

    async def _end_workers(self) -> None:
        self._fail_all(f"{self.job.label}: the pool of its processes was closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._fail_all(f"{self.job.label}: the pool of its processes failed: {task.exception()!r}")

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
            _log.warning("%s", redact(text))

    def requeue(self, calls: Sequence[_Call[Q, R]]) -> None:
        """Put calls whose worker ended, but not because of them, first in the queue."""
        self._waiting.extendleft(reversed(calls))

    def dispatch(self) -> None:
        """Send what is waiting to workers with free slots."""
        if self._closed_because is not None:
            self._fail_all(self._closed_because)
        batch_size = self.job.batch_size
        while self._waiting:
            worker = max(self._workers, key=lambda one: one.free_slots(self._waiting[0]))
            if worker.free_slots(self._waiting[0]) <= 0:
                return
            loop = asyncio.get_running_loop()
            age = loop.time() - self._waiting[0].submitted
            if batch_size and len(self._waiting) < batch_size and age < _BATCH_WAIT_S:
                loop.call_later(_BATCH_WAIT_S - age, self.dispatch)
                return
            if calls := list(islice(self._take_uncancelled(), batch_size or 1)):
                worker.send(calls)

    def _take_uncancelled(self) -> Iterator[_Call[Q, R]]:
        while self._waiting:
            call = self._waiting.popleft()
            if call.future.running() or call.future.set_running_or_notify_cancel():
                yield call


class _Worker(Generic[Q, R]):
    """One worker process after another, each with its supervisor. Used on the pool's event loop only.

    A process loads the code, serves calls, and ends: by itself, because a call exceeded its timeout, because it is
    retired, or with its supervisor. Then the call that caused it fails, and the others are made again.
    """

    def __init__(self, pool: ProcessPool[Q, R]) -> None:
        self._pool = pool
        self.calls: dict[int, _Call[Q, R]] = {}  # in flight, oldest first
        self._call_ids = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._reset()

    def _reset(self) -> None:
        self._is_ready = self._is_concurrent = self._is_retiring = self._is_ending = self._is_late = False
        self._refusal = self._kill_reason = ""
        self._report = _SUPERVISOR_LOST

    async def run(self) -> None:
        """Run one process after another until the pool is closed."""
        while not self._pool.is_closed:
            self._reset()
            await self._run_process()
            self._settle(self._report)
            self._pool.dispatch()

    async def _run_process(self) -> None:
        """Start a process and its supervisor, and return when both have ended."""
        with contextlib.ExitStack() as stack:
            replies, self._channel, their_channel = await _open_socket_pair(stack)
            reports, self._control, their_control = await _open_socket_pair(stack)
            supervisor = self._start_supervisor(their_control, their_channel)
            reading = asyncio.create_task(self._read(replies, self._on_worker_message))
            exit_timeout_s = _CLOSE_S
            try:
                self._write((self._pool.job, self._pool.timeout_s))
                self._set_timer(LOAD_TIMEOUT_S, self._kill, f"took more than {LOAD_TIMEOUT_S:g} s")
                await self._read(reports, self._on_supervisor_message)
                self._is_ending = True
                if self._report is _SUPERVISOR_LOST:  # the supervisor may be stopped rather than dead
                    exit_timeout_s = 0.0
                else:
                    await reading  # no process is left that could send a reply
            finally:
                self._clear_timer()
                reading.cancel()
                stack.close()  # then the supervisor kills its worker and exits
                await _wait_for_exit(supervisor, exit_timeout_s)

    def _start_supervisor(self, control: socket.socket, channel: socket.socket) -> subprocess.Popen[bytes]:
        with control, channel:
            fds = [control.fileno(), channel.fileno()]
            command = [sys.executable, "-c", _BOOT, *map(str, fds), str(self._pool.memory_mb or 0), *sys.path]
            null = subprocess.DEVNULL
            return subprocess.Popen(command, stdin=null, stdout=null, pass_fds=fds, start_new_session=True)

    async def _read(self, stream: asyncio.StreamReader, handle: Callable[[dict[str, Any]], None]) -> None:
        """Handle all JSON messages of a process that is not trusted, each behind its length."""
        try:
            while True:
                [size] = HEADER.unpack(await stream.readexactly(HEADER.size))
                if size > _MAX_MESSAGE_BYTES:
                    raise ValueError(f"a message of {size} bytes")
                handle(json.loads(await stream.readexactly(size)))
        except (EOFError, OSError):
            return
        except (ValueError, KeyError, TypeError, RecursionError):
            self._kill("wrote into a socket that is not its own")

    def _write(self, message: object) -> None:
        payload = pickle.dumps(message)
        self._channel.write(HEADER.pack(len(payload)) + payload)

    def _kill(self, reason: str = "") -> None:
        """Order the worker killed; the supervisor reports when it, and all processes it started, have ended."""
        if not self._is_ending:
            self._is_ending, self._kill_reason = True, reason
            self._control.write(KILL)
            self._set_timer(_CLOSE_S, self._control.transport.abort)

    def _set_timer(self, seconds: float, callback: Callable[..., None], *args: Any) -> None:
        self._clear_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, callback, *args)

    def _clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def free_slots(self, next_call: _Call[Q, R]) -> int:
        """Return how many more calls it can take now; below 1: none."""
        if not self._is_ready or self._is_retiring or self._is_ending:
            return 0
        if next_call.is_alone or any(call.is_alone for call in self.calls.values()):
            return int(not self.calls)
        return (_MAX_CONCURRENT if self._is_concurrent else 1) - len(self.calls)

    def send(self, calls: Sequence[_Call[Q, R]]) -> None:
        batch = {next(self._call_ids): call for call in calls}
        for call in calls:
            call.started = asyncio.get_running_loop().time()
        self.calls |= batch
        self._write([(call_id, call.pickled) for call_id, call in batch.items()])
        self._watch_oldest()

    def _watch_oldest(self) -> None:
        """Set the timer to the timeout of the oldest call."""
        if not self.calls:
            return self._clear_timer()
        oldest = next(iter(self.calls.values()))
        grace_s = _ASYNC_GRACE_S if self._is_concurrent else 0.0
        age_s = asyncio.get_running_loop().time() - oldest.started
        self._set_timer(oldest.timeout_s + grace_s - age_s, self._on_late)

    def _on_late(self) -> None:
        self._is_late = not self._is_ending
        self._kill()

    def _on_worker_message(self, message: dict[str, Any]) -> None:
        if "call" in message:
            self._on_reply(message)
        elif "ready" in message and not self._is_ready:
            self._is_ready, self._is_concurrent = True, message["ready"]["is_concurrent"]
            self._pool.on_loaded()
            self._control.write(READY)
            self._clear_timer()
        elif "refused" in message:
            self._refusal = message["refused"]
        elif "warning" in message:
            self._pool.warn(message["warning"])
        elif "retire" in message:
            self._retire(message["retire"])
        self._pool.dispatch()

    def _on_supervisor_message(self, message: dict[str, Any]) -> None:
        if "exited" in message:
            self._is_ending, self._report = True, ExitReport(**message["exited"])
        elif "retire" in message:
            self._retire(message["retire"])

    def _retire(self, reason: str) -> None:
        """Replace the worker as soon as it has no calls."""
        _log.info("%s: its process is replaced: %s", self._pool.job.label, reason)
        self._is_retiring = True
        if self._is_ready and not self.calls:
            self._kill()

    def _on_reply(self, message: dict[str, Any]) -> None:
        if message["call"] not in self.calls:
            return
        result = self._pool.job.decode(message)
        self.calls.pop(message["call"]).future.set_result(result)
        if self._is_ending:
            return
        self._watch_oldest()
        if self._is_retiring and not self.calls:
            self._kill()

    def _settle(self, report: ExitReport) -> None:
        """After a worker ended: fail the calls that caused it, and make the others again."""
        report = replace(report, reason=report.reason or self._kill_reason)
        job = self._pool.job
        if not self._is_ready:
            cause = report.add_details(f"could not be loaded: {report.describe()}")
            return self._pool.on_load_failed(self._refusal or f"{job.label}: {cause}")
        calls, self.calls = list(self.calls.values()), {}
        guilty = calls if not self._is_concurrent or len(calls) == 1 else []
        if report.was_killed() and not self._is_late and job.is_repeatable:
            # Probably from outside, e.g. for lack of memory: each call is made once more, alone, before it is blamed.
            guilty = [call for call in guilty if call.was_killed]
            for call in calls:
                call.was_killed = True
        for call in guilty:
            cause = report.add_details(format_timeout(call.timeout_s) if self._is_late else report.describe())
            call.future.set_result(job.fail("timeout" if self._is_late else "died", cause, call.request))
        innocent = [call for call in calls if call not in guilty]
        for call in innocent:
            call.is_alone = True
        self._pool.requeue(innocent)


async def _open_socket_pair(
    stack: contextlib.ExitStack,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, socket.socket]:
    """Return the streams of one socket, and the socket that is connected to it."""
    ours, theirs = socket.socketpair()
    stack.callback(theirs.close)
    reader, writer = await asyncio.open_connection(sock=ours)
    stack.callback(writer.transport.abort)
    return reader, writer, theirs


async def _wait_for_exit(supervisor: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait for a supervisor, and so all processes below it; kill those that are left after the timeout."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while supervisor.poll() is None:
                await asyncio.sleep(0.005)
    if supervisor.poll() is None:
        kill_processes([*list_descendants(supervisor.pid), supervisor.pid])
        supervisor.wait()
