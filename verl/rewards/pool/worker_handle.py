"""One worker of the pool, as the pool's event loop sees it: a supervisor process, and its current worker process.

A worker is started, loads the function, serves calls, and ends: by itself, because a call exceeded its timeout,
because it is retired, or with its supervisor. Then the call that caused it fails, and the others are made again.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol

from verl.rewards.pool.job import Job, Q, R
from verl.rewards.pool.supervisor import KILL, READY, START, ExitReport
from verl.rewards.pool.worker import HEADER
from verl.rewards.process_usage import kill_processes, list_descendants
from verl.rewards.result import format_timeout

LOAD_TIMEOUT_S = 300.0
_MAX_CONCURRENT = 64  # calls of an async function in one process
_ASYNC_GRACE_S = 2.0  # an async worker ends late calls itself; it is killed if it has not done so by then
_MAX_MESSAGE_BYTES = 16 << 20
_CLOSE_S = 10.0

_BOOT = (
    "import sys; control, memory, *sys.path = sys.argv[1:]; "
    "from verl.rewards.pool.supervisor import main; main(int(control), int(memory))"
)

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Call(Generic[Q, R]):
    """One call of the user code, from submission to result."""

    request: Q
    pickled: bytes
    timeout_s: float
    future: Future[R]
    submitted: float
    started: float = 0.0
    is_alone: bool = False  # it was one of several when a worker ended: the next worker gets it alone
    was_killed: bool = False  # with its worker, from outside


class PoolCallbacks(Protocol[Q, R]):
    """What a worker handle reports to the pool."""

    @property
    def is_closed(self) -> bool: ...
    def on_loaded(self) -> None: ...
    def on_load_failed(self, reason: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def requeue(self, calls: Sequence[Call[Q, R]]) -> None: ...
    def dispatch(self) -> None: ...


class WorkerHandle(Generic[Q, R]):
    """A supervisor and its current worker. Used on the pool's event loop only."""

    def __init__(
        self,
        job: Job[Q, R],
        timeout_s: float,
        memory_mb: int | None,
        pool: PoolCallbacks[Q, R],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._job, self._timeout_s, self._memory_mb, self._pool, self._loop = job, timeout_s, memory_mb, pool, loop
        self.calls: dict[int, Call[Q, R]] = {}  # in flight, oldest first
        self._call_ids = itertools.count()
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._exited: asyncio.Future[ExitReport] = loop.create_future()
        self._control: socket.socket | None = None
        self._control_transport: asyncio.Transport | None = None
        self._channel: asyncio.Transport | None = None
        self._channel_copy: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reset()

    def _reset(self) -> None:
        self._is_ready = self._is_concurrent = self._is_retiring = self._is_ending = self._is_late = False
        self._refusal = self._kill_reason = ""

    # ---- Processes

    async def run(self) -> None:
        """Run one worker after another until the pool is closed."""
        while not self._pool.is_closed:
            if self._supervisor is None:
                await self._start_supervisor()
            self._reset()
            await self._start_worker()
            report = await self._exited
            self._set_timer(None)
            self._close_channel()
            if report.is_supervisor_lost:
                self._drop_supervisor()
            self._settle(report)
            self._pool.dispatch()

    async def _start_supervisor(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", _BOOT, str(theirs.fileno()), str(self._memory_mb or 0), *sys.path]
        self._supervisor = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._control = ours
        reader = _MessageReader(self._on_supervisor_message, self._on_supervisor_lost, self._on_garbage)
        self._control_transport = await self._connect(ours, reader)

    async def _start_worker(self) -> None:
        self._exited = self._loop.create_future()
        ours, theirs = socket.socketpair()
        self._channel_copy = ours.dup()
        self._channel_reader = _MessageReader(self._on_worker_message, lambda: None, self._on_garbage)
        with theirs:
            self._channel = await self._connect(ours, self._channel_reader)
            self._send_order(START, theirs)
        self._write((self._job, self._timeout_s))
        self._set_timer(LOAD_TIMEOUT_S, self._kill, f"took more than {LOAD_TIMEOUT_S:g} s")

    async def _connect(self, sock: socket.socket, reader: _MessageReader) -> asyncio.Transport:
        transport, _ = await self._loop.create_connection(lambda: reader, sock=sock)
        return transport

    def _close_channel(self) -> None:
        """Read the replies that the worker sent before it ended; a transport drops them when a write fails."""
        if self._channel_copy is not None:
            with contextlib.suppress(OSError), self._channel_copy:
                self._channel_copy.setblocking(False)
                while data := self._channel_copy.recv(1 << 16):
                    self._channel_reader.data_received(data)
            self._channel_copy = None
        if self._channel is not None:
            self._channel.abort()

    def _send_order(self, order: bytes, channel: socket.socket | None = None) -> None:
        assert self._control is not None
        try:
            socket.send_fds(self._control, [order], [] if channel is None else [channel.fileno()])
        except OSError:
            self._on_supervisor_lost()

    def _write(self, message: object) -> None:
        assert self._channel is not None
        payload = pickle.dumps(message)
        self._channel.write(HEADER.pack(len(payload)) + payload)

    def _kill(self, reason: str = "") -> None:
        """Order the worker killed; the supervisor reports when it, and all processes it started, have ended."""
        if self._is_ending:
            return
        self._is_ending, self._kill_reason = True, reason
        self._send_order(KILL)
        self._set_timer(_CLOSE_S, self._on_supervisor_lost)

    def _set_timer(self, seconds: float | None, callback: Callable[..., None] | None = None, *args: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None or callback is None else self._loop.call_later(seconds, callback, *args)

    def _on_garbage(self) -> None:
        self._kill("wrote into a socket that is not its own")

    def _on_supervisor_lost(self) -> None:
        self._on_exit(ExitReport(None, "the process that supervises it was killed", is_supervisor_lost=True))

    def _on_exit(self, report: ExitReport) -> None:
        self._is_ending = True
        if not self._exited.done():
            self._exited.set_result(report)

    def _drop_supervisor(self) -> None:
        """Kill the supervisor, which may be stopped rather than dead, with its descendants."""
        assert self._supervisor is not None
        assert self._control_transport is not None
        kill_processes(list_descendants(self._supervisor.pid))
        self._supervisor.kill()
        self._supervisor.wait()
        self._control_transport.abort()
        self._supervisor = None

    def disconnect(self) -> None:
        """Close the sockets; the supervisor then kills its worker and exits."""
        self._close_channel()
        if self._control_transport is not None:
            self._control_transport.abort()

    def wait(self) -> None:
        """Wait for the supervisor to exit, and so all processes below it."""
        if self._supervisor is not None:
            try:
                self._supervisor.wait(timeout=_CLOSE_S)
            except subprocess.TimeoutExpired:
                self._drop_supervisor()

    # ---- Calls

    def free_slots(self, next_call: Call[Q, R]) -> int:
        """Return how many more calls it can take now; below 1: none."""
        if not self._is_ready or self._is_retiring or self._is_ending:
            return 0
        if next_call.is_alone or any(call.is_alone for call in self.calls.values()):
            return int(not self.calls)
        return (_MAX_CONCURRENT if self._is_concurrent else 1) - len(self.calls)

    def send(self, calls: Sequence[Call[Q, R]]) -> None:
        batch = {next(self._call_ids): call for call in calls}
        for call in calls:
            call.started = self._loop.time()
        self.calls |= batch
        self._write([(call_id, call.pickled) for call_id, call in batch.items()])
        self._watch_oldest()

    def _watch_oldest(self) -> None:
        """Set the timer to the timeout of the oldest call."""
        if not self.calls:
            return self._set_timer(None)
        oldest = next(iter(self.calls.values()))
        grace_s = _ASYNC_GRACE_S if self._is_concurrent else 0.0
        self._set_timer(oldest.started + oldest.timeout_s + grace_s - self._loop.time(), self._on_late)

    def _on_late(self) -> None:
        self._is_late = not self._is_ending
        self._kill()

    def _on_worker_message(self, message: dict[str, Any]) -> None:
        if "call" in message:
            self._on_reply(message)
        elif "ready" in message and not self._is_ready:
            self._is_ready, self._is_concurrent = True, message["ready"]["is_concurrent"]
            self._pool.on_loaded()
            self._send_order(READY)
            self._set_timer(None)
        elif "refused" in message:
            self._refusal = message["refused"]
        elif "warning" in message:
            self._pool.warn(message["warning"])
        elif "retire" in message:
            self._retire(message["retire"])
        self._pool.dispatch()

    def _on_supervisor_message(self, message: dict[str, Any]) -> None:
        if "exited" in message:
            self._on_exit(ExitReport(**message["exited"]))
        elif "retire" in message:
            self._retire(message["retire"])

    def _retire(self, reason: str) -> None:
        """Replace the worker as soon as it has no calls."""
        _log.info("%s: its process is replaced: %s", self._job.label, reason)
        self._is_retiring = True
        if self._is_ready and not self.calls:
            self._kill()

    def _on_reply(self, message: dict[str, Any]) -> None:
        if message["call"] not in self.calls:
            return
        result = self._job.decode(message)
        self.calls.pop(message["call"]).future.set_result(result)
        if self._is_ending:
            return
        self._watch_oldest()
        if self._is_retiring and not self.calls:
            self._kill()

    def _settle(self, report: ExitReport) -> None:
        """After a worker ended: fail the calls that caused it, and make the others again."""
        report = replace(report, reason=report.reason or self._kill_reason)
        if not self._is_ready:
            cause = report.add_details(f"could not be loaded: {report.describe()}")
            return self._pool.on_load_failed(self._refusal or f"{self._job.label}: {cause}")
        calls, self.calls = list(self.calls.values()), {}
        guilty = calls if not self._is_concurrent or len(calls) == 1 else []
        if report.was_killed() and not self._is_late and self._job.is_repeatable:
            # Probably from outside, e.g. for lack of memory: each call is made once more, alone, before it is blamed.
            guilty = [call for call in guilty if call.was_killed]
            for call in calls:
                call.was_killed = True
        for call in guilty:
            cause = report.add_details(format_timeout(call.timeout_s) if self._is_late else report.describe())
            call.future.set_result(self._job.fail("timeout" if self._is_late else "died", cause, call.request))
        innocent = [call for call in calls if call not in guilty]
        for call in innocent:
            call.is_alone = True
        self._pool.requeue(innocent)


class _MessageReader(asyncio.Protocol):
    """Reads JSON messages behind their length from a process that is not trusted."""

    def __init__(
        self, on_message: Callable[[dict[str, Any]], None], on_lost: Callable[[], None], on_garbage: Callable[[], None]
    ) -> None:
        self._on_message, self._on_lost, self._on_garbage = on_message, on_lost, on_garbage
        self._buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while len(self._buffer) >= HEADER.size:
                end = HEADER.size + HEADER.unpack_from(self._buffer)[0]
                if end > _MAX_MESSAGE_BYTES:
                    raise ValueError(f"a message of {end} bytes")
                if len(self._buffer) < end:
                    return
                message = json.loads(self._buffer[HEADER.size : end])
                del self._buffer[:end]
                self._on_message(message)
        except (ValueError, KeyError, TypeError):
            self._buffer.clear()
            self._on_garbage()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()
