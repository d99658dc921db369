"""Scores answers in processes of their own: one that hangs, dies or eats memory is replaced, and nobody else notices.

`ScorePool.score` gives a `Scored` or a `Failed`, never a 0 for a failure, and never raises for what one answer did. The
pool has a thread with an event loop, so it can be asked from any thread and any loop, and a caller that is busy makes
no call late. Each worker has a keeper (`keeper.py`), which ends it with all that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Any

from verl.errors import RewardError
from verl.rewards.keeper import KILL, READY, START, descendants
from verl.rewards.outcome import Answer, Failed, FailureKind, Outcome, Scored, failure, late
from verl.rewards.report import how_it_ended, with_stack
from verl.rewards.score import named
from verl.rewards.worker import HEADER

__all__ = ["ScorePool"]

LOAD_DEADLINE_S = 300.0
_LOAD_TRIES = 3
_SIDE_BY_SIDE = 64
_GRACE_S = 2.0
_MOMENT_S = 0.02
_LONGEST_MESSAGE = 1 << 20
_CLOSE_S = 10.0
_AHEAD, _BRIEF_S = 16, 0.005

_BOOT = (
    "import sys; control, memory, *sys.path = sys.argv[1:]; "
    "from verl.rewards.keeper import main; main(int(control), int(memory))"
)

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Call:
    answer: Answer
    pickled: bytes
    future: Future[Outcome]
    submitted: float
    started: float = 0.0
    is_running: bool = False
    alone: bool = False  # it was beside others when a worker had to end: the next one has it for itself


class ScorePool:
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
        self._reward = dict(reward) | ({"batched": True} if batch_size else {})
        self._where = named(reward.get("path"), reward.get("name", "compute_score"), reward.get("functions", ()))
        self._deadline_s, self._memory_mb, self._batch_size = deadline_s, memory_mb or 0, batch_size
        self._waiting: deque[_Call] = deque()
        self._workers: list[_Worker] = []
        self._numbers = 0
        self._is_woken = False
        self._loading_failed = 0
        self._broken: str | None = None
        self._started: Future[None] = Future()
        self._notes: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(workers,), name="score-pool", daemon=True)

    async def start(self) -> None:
        """Start the workers; a `RewardError` when the function cannot be loaded. The first ready one is waited for."""
        self._thread.start()
        await asyncio.shield(asyncio.wrap_future(self._started))

    async def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> Outcome:
        """The outcome of one answer; a `RewardError` only when the function itself can no longer be loaded."""
        return await asyncio.wrap_future(self.submit(Answer(data_source, solution_str, ground_truth, extra_info)))

    def submit(self, answer: Answer) -> Future[Outcome]:
        """As `score`, for callers without an event loop."""
        call = _Call(answer, pickle.dumps(tuple(answer)), Future(), self._loop.time())
        if self._broken is not None:
            call.future.set_exception(RewardError(self._broken))
            return call.future
        self._waiting.append(call)
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._dispatch)
        return call.future

    def close(self) -> None:
        """End all processes and the thread; what still waits is refused."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def __enter__(self) -> ScorePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what follows runs on the pool's own thread

    def _run(self, workers: int) -> None:
        self._workers = [_Worker(self) for _ in range(workers)]
        minding = [self._loop.create_task(one.mind()) for one in self._workers]
        for task in minding:
            task.add_done_callback(self._on_minder_gone)
        try:
            self._loop.run_forever()
        finally:
            for task in minding:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*minding, return_exceptions=True))
            for one in self._workers:
                one.close()
            self._refuse(f"{self._where}: the pool that scores was closed")

    def _on_minder_gone(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._refuse(f"{self._where}: its pool failed: {task.exception()!r}")

    def _refuse(self, message: str) -> None:
        self._broken = self._broken or message
        calls = [*self._waiting, *(call for worker in self._workers for call in worker.calls.values())]
        self._waiting.clear()
        if not self._started.done():
            self._started.set_exception(RewardError(message))
        for call in calls:
            if not call.future.done():
                call.future.set_exception(RewardError(message))

    def _dispatch(self) -> None:
        """Hand what is waiting to the workers that have room."""
        self._is_woken = False
        if self._broken is not None:
            self._refuse(self._broken)
        while self._waiting:
            worker = max(self._workers, key=lambda one: one.room(self._waiting[0]))
            size = min(worker.room(self._waiting[0]), -(-len(self._waiting) // len(self._workers)))
            if size == 0:
                return
            if self._batch_size:
                age = self._loop.time() - self._waiting[0].submitted
                if len(self._waiting) < self._batch_size and age < _MOMENT_S:
                    self._loop.call_later(_MOMENT_S - age, self._dispatch)
                    return
                size = self._batch_size
            calls = list(islice(self._take(), size))
            if calls:
                worker.send({self._number(): call for call in calls})

    def _take(self) -> Iterator[_Call]:
        while self._waiting:
            call = self._waiting.popleft()
            if call.is_running or call.future.set_running_or_notify_cancel():
                call.is_running = True
                yield call

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


class _Worker:
    """One place in the pool: a keeper, and the worker that it keeps now."""

    def __init__(self, pool: ScorePool) -> None:
        self._pool, self._loop = pool, pool._loop
        self.calls: dict[int, _Call] = {}  # in flight, oldest first
        self._keeper: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._leftovers: socket.socket | None = None
        self._control: socket.socket | None = None
        self._control_transport: asyncio.Transport | None = None
        self._channel: asyncio.Transport | None = None
        self._begin()

    def _begin(self) -> None:
        self._is_ready = self._side_by_side = self._is_worn = self._is_ending = False
        self._refused, self._why, self._is_late = "", "", False
        self._mean_s = _BRIEF_S
        self._timer: asyncio.TimerHandle | None = None

    # ---- its life

    async def mind(self) -> None:
        """One worker after the other, as long as the pool lives."""
        while self._pool._broken is None:
            if self._keeper is None:
                await self._start_keeper()
            self._begin()
            await self._start_worker()
            report = await self._ended
            self._stop_timer()
            self._close_channel()
            if report.get("keeper"):
                self._drop_keeper()
            self._settle(report)
            self._pool._dispatch()

    async def _start_keeper(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", _BOOT, str(theirs.fileno()), str(self._pool._memory_mb), *sys.path]
        self._keeper = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._control = ours
        self._control_transport = await self._listen(
            ours, _Messages(self._on_keeper, self._on_keeper_lost, self._on_nonsense)
        )

    async def _start_worker(self) -> None:
        assert self._control is not None
        self._ended = self._loop.create_future()
        ours, theirs = socket.socketpair()
        self._leftovers = ours.dup()
        self._from_worker = _Messages(self._on_worker, lambda: None, self._on_nonsense)
        self._channel = await self._listen(ours, self._from_worker)
        self._order(START, theirs)
        theirs.close()
        self._write((self._pool._reward, self._pool._deadline_s))
        self._timer = self._loop.call_later(LOAD_DEADLINE_S, self._end, f"took more than {LOAD_DEADLINE_S:g} s")

    async def _listen(self, sock: socket.socket, messages: _Messages) -> asyncio.Transport:
        transport, _ = await self._loop.create_connection(lambda: messages, sock=sock)
        return transport

    def _close_channel(self) -> None:
        """Read what the worker had answered before it ended. The transport forgets it when a write found nobody."""
        if self._leftovers is None or self._channel is None:
            return
        with contextlib.suppress(OSError), self._leftovers:
            self._leftovers.setblocking(False)
            while data := self._leftovers.recv(1 << 16):
                self._from_worker.data_received(data)
        self._leftovers = None
        self._channel.abort()

    def _order(self, order: bytes, channel: socket.socket | None = None) -> None:
        assert self._control is not None
        try:
            socket.send_fds(self._control, [order], [] if channel is None else [channel.fileno()])
        except OSError:
            self._on_keeper_lost()

    def _write(self, message: object) -> None:
        assert self._channel is not None
        payload = pickle.dumps(message)
        self._channel.write(HEADER.pack(len(payload)) + payload)

    def _end(self, why: str = "") -> None:
        """Have the worker ended; the keeper reports when it, and all that it started, is gone."""
        if self._is_ending:
            return
        self._is_ending, self._why = True, why
        self._order(KILL)
        self._stop_timer()
        self._timer = self._loop.call_later(_CLOSE_S, self._on_keeper_lost)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_nonsense(self) -> None:
        self._end("wrote into a socket that is not its own")

    def _on_keeper_lost(self) -> None:
        self._on_ended({"keeper": True, "status": None, "why": "the process that watches over it was ended"})

    def _on_ended(self, report: dict[str, Any]) -> None:
        self._is_ending = True
        if not self._ended.done():
            self._ended.set_result(report)

    def _drop_keeper(self) -> None:
        """Also when it was stopped and not killed: its worker dies with it."""
        assert self._keeper is not None
        assert self._control_transport is not None
        for pid in descendants(self._keeper.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._keeper.kill()
        self._keeper.wait()
        self._control_transport.abort()
        self._keeper = None

    def close(self) -> None:
        """The keeper sees that we are gone, and goes."""
        self._close_channel()
        if self._control_transport is not None:
            self._control_transport.abort()
        self._loop.run_until_complete(asyncio.sleep(0))  # the sockets are closed in the loop's next round
        if self._keeper is not None:
            try:
                self._keeper.wait(timeout=_CLOSE_S)
            except subprocess.TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()

    # ---- its calls

    def room(self, next_call: _Call) -> int:
        """How many calls it can take now. A plain function has one; while its calls are brief, more lie ready."""
        busy = len(self.calls)
        if not self._is_ready or self._is_worn or self._is_ending:
            return 0
        if next_call.alone or any(call.alone for call in self.calls.values()):
            return int(busy == 0)
        if self._side_by_side:
            return _SIDE_BY_SIDE - busy
        most = _AHEAD if self._mean_s < _BRIEF_S and not self._pool._batch_size else 1
        return most - busy if busy <= most // 2 else 0

    def send(self, calls: dict[int, _Call]) -> None:
        now, is_idle = self._loop.time(), not self.calls
        for place, call in enumerate(calls.values()):
            starts_now = self._side_by_side or self._pool._batch_size or (is_idle and place == 0)
            call.started = now if starts_now else math.inf
        self.calls |= calls
        self._write([(number, call.pickled) for number, call in calls.items()])
        self._watch()

    def _watch(self) -> None:
        """Wake up when the oldest call may be late. One that waits in an async function is ended there, by itself."""
        if self._timer is None and self.calls:
            self._timer = self._loop.call_at(next(iter(self.calls.values())).started + self._patience_s, self._on_time)

    @property
    def _patience_s(self) -> float:
        return self._pool._deadline_s + (_GRACE_S if self._side_by_side else 0.0)

    def _on_time(self) -> None:
        self._timer = None
        if self.calls and next(iter(self.calls.values())).started + self._patience_s <= self._loop.time():
            self._is_late = True
            self._end()
        self._watch()

    def _on_worker(self, message: dict[str, Any]) -> None:
        if "number" in message:
            self._on_answer(message)
        elif "ready" in message:
            self._is_ready, self._side_by_side = True, message["ready"]["side_by_side"]
            self._pool._loading_failed = 0
            if not self._pool._started.done():
                self._pool._started.set_result(None)
            self._order(READY)
            self._stop_timer()
        elif "refused" in message:
            self._refused = message["refused"]
        elif "note" in message and message["note"] not in self._pool._notes:
            self._pool._notes.add(message["note"])
            _log.warning("%s", message["note"])
        elif "worn" in message:
            self._on_worn(message["worn"])
        self._pool._dispatch()

    def _on_keeper(self, message: dict[str, Any]) -> None:
        if "ended" in message:
            self._on_ended(message["ended"])
        elif "worn" in message:
            self._on_worn(message["worn"])

    def _on_worn(self, why: str) -> None:
        _log.info("%s: its process is replaced: %s", self._pool._where, why)
        self._is_worn = True
        if self._is_ready and not self.calls:
            self._end()

    def _on_answer(self, message: dict[str, Any]) -> None:
        call = self.calls.pop(message["number"], None)
        if call is None:
            return
        outcome: Outcome
        if "failed" in message:
            outcome = Failed(message["failed"], message["message"])
        else:
            outcome = Scored(message["score"], message["metrics"])
        call.future.set_result(outcome)
        if self._is_ending:
            return
        now = self._loop.time()
        self._mean_s = 0.8 * self._mean_s + 0.2 * (now - call.started)
        if self.calls:
            oldest = next(iter(self.calls.values()))
            oldest.started = min(oldest.started, now)
        self._watch()
        if self._is_worn and not self.calls:
            self._end()

    def _settle(self, report: dict[str, Any]) -> None:
        """A worker has ended: whose fault it was is told so, the others' calls are made again."""
        pool, report = self._pool, report | {"why": report["why"] or self._why}
        if not self._is_ready:
            pool._loading_failed += 1
            if pool._loading_failed >= (_LOAD_TRIES if pool._started.done() else 1):
                what = with_stack(f"could not be loaded: {how_it_ended(report)}", report)
                pool._refuse(self._refused or f"{pool._where}: {what}")
            return
        calls, self.calls = self.calls, {}
        started = {number for number, call in calls.items() if call.started < math.inf}
        guilty = started if not self._side_by_side or len(started) == 1 else set()
        kind: FailureKind = "timeout" if self._is_late else "died"
        what = with_stack(late(pool._deadline_s) if self._is_late else how_it_ended(report), report)
        for number, call in reversed(calls.items()):
            if number in guilty:
                call.future.set_result(failure(kind, pool._where, what, call.answer))
            else:
                call.alone = number in started
                pool._waiting.appendleft(call)


class _Messages(asyncio.Protocol):
    """JSON behind its length, from a process that we do not trust."""

    def __init__(
        self, hear: Callable[[dict[str, Any]], None], lost: Callable[[], None], nonsense: Callable[[], None]
    ) -> None:
        self._hear, self._lost, self._nonsense = hear, lost, nonsense
        self._buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while len(self._buffer) >= HEADER.size:
                end = HEADER.size + HEADER.unpack_from(self._buffer)[0]
                if end > _LONGEST_MESSAGE:
                    raise ValueError(f"a message of {end} bytes")
                if len(self._buffer) < end:
                    return
                message = json.loads(self._buffer[HEADER.size : end])
                del self._buffer[:end]
                self._hear(message)
        except (ValueError, KeyError, TypeError):
            self._buffer.clear()
            self._nonsense()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()
