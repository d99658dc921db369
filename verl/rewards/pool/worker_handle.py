"""One place in the pool: a keeper, and the worker process that it keeps now, as the pool's event loop sees them.

A worker is started, gets ready, takes calls, and ends some time: by itself, because a call was late, because it is worn
out, or with its keeper. However it ends, the call whose fault it was is told so, and the others are given back.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from verl.rewards.pool.exit_report import how_it_ended, was_killed, with_stack
from verl.rewards.pool.supervisor import KILL, READY, START, descendants
from verl.rewards.pool.worker import HEADER
from verl.rewards.result import Failed, FailureKind, RewardInput, RewardResult, Scored, format_timeout, make_failure

__all__ = ["Call", "RewardPoolSettings", "WorkerHandle"]

LOAD_DEADLINE_S = 300.0
_SIDE_BY_SIDE = 64
_GRACE_S = 2.0
_STOOD_STILL_S = 0.5
_LONGEST_MESSAGE = 1 << 20
_CLOSE_S = 10.0
_AHEAD, _BRIEF_S = 16, 0.005

_BOOT = (
    "import sys; control, memory, *sys.path = sys.argv[1:]; "
    "from verl.rewards.pool.supervisor import main; main(int(control), int(memory))"
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RewardPoolSettings:
    """What is the same for all seats: the arguments of `load_reward`, its name in messages, and the limits."""

    reward: dict[str, Any]
    where: str
    deadline_s: float
    memory_mb: int
    batch_size: int | None


@dataclass(eq=False, slots=True)
class Call:
    """One answer on its way."""

    answer: RewardInput
    pickled: bytes
    future: Future[RewardResult]
    submitted: float
    started: float = 0.0
    is_running: bool = False
    alone: bool = False  # it was beside others when a worker had to end: the next one has it for itself
    was_killed: bool = False  # with its worker, from outside


class PoolCallbacks(Protocol):
    """What a seat tells the pool."""

    @property
    def is_over(self) -> bool: ...
    def loaded(self) -> None: ...
    def not_loaded(self, why: str) -> None: ...
    def note(self, text: str) -> None: ...
    def give_back(self, calls: Sequence[Call]) -> None: ...
    def dispatch(self) -> None: ...


class WorkerHandle:
    """A keeper, and the worker that it keeps now. Lives on the loop of the pool that owns it."""

    def __init__(self, scoring: RewardPoolSettings, owner: PoolCallbacks, loop: asyncio.AbstractEventLoop) -> None:
        self._scoring, self._owner, self._loop = scoring, owner, loop
        self.calls: dict[int, Call] = {}  # in flight, oldest first
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
        """One worker after the other, as long as there is something to score."""
        while not self._owner.is_over:
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
            self._owner.dispatch()

    async def _start_keeper(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", _BOOT, str(theirs.fileno()), str(self._scoring.memory_mb), *sys.path]
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
        with theirs:
            self._channel = await self._listen(ours, self._from_worker)
            self._order(START, theirs)
        self._write((self._scoring.reward, self._scoring.deadline_s))
        self._timer = self._loop.call_later(LOAD_DEADLINE_S, self._end, f"took more than {LOAD_DEADLINE_S:g} s")

    async def _listen(self, sock: socket.socket, messages: _Messages) -> asyncio.Transport:
        transport, _ = await self._loop.create_connection(lambda: messages, sock=sock)
        return transport

    def _close_channel(self) -> None:
        """Read what the worker had answered before it ended. The transport forgets it when a write found nobody."""
        if self._leftovers is not None:
            with contextlib.suppress(OSError), self._leftovers:
                self._leftovers.setblocking(False)
                while data := self._leftovers.recv(1 << 16):
                    self._from_worker.data_received(data)
            self._leftovers = None
        if self._channel is not None:
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

    def let_go(self) -> None:
        """The keeper sees that nobody is there any more, and goes."""
        self._close_channel()
        if self._control_transport is not None:
            self._control_transport.abort()

    def wait(self) -> None:
        """Until the keeper is gone, and so all processes below it."""
        if self._keeper is not None:
            try:
                self._keeper.wait(timeout=_CLOSE_S)
            except subprocess.TimeoutExpired:
                self._drop_keeper()

    # ---- its calls

    def room(self, next_call: Call) -> int:
        """How many calls it can take now. A plain function has one; while its calls are brief, more lie ready."""
        busy = len(self.calls)
        if not self._is_ready or self._is_worn or self._is_ending:
            return 0
        if next_call.alone or any(call.alone for call in self.calls.values()):
            return int(busy == 0)
        if self._side_by_side:
            return _SIDE_BY_SIDE - busy
        most = _AHEAD if self._mean_s < _BRIEF_S and not self._scoring.batch_size else 1
        return most - busy if busy <= most // 2 else 0

    def send(self, calls: dict[int, Call]) -> None:
        now, is_idle = self._loop.time(), not self.calls
        for place, call in enumerate(calls.values()):
            starts_now = self._side_by_side or self._scoring.batch_size or (is_idle and place == 0)
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
        return self._scoring.deadline_s + (_GRACE_S if self._side_by_side else 0.0)

    def _on_time(self) -> None:
        """End a worker whose call is late. A timer that is late itself tells of a machine that stood still."""
        self._timer = None
        if self.calls:
            oldest = next(iter(self.calls.values()))
            over = self._loop.time() - oldest.started - self._patience_s
            if over > _STOOD_STILL_S:
                oldest.started += 2 * over  # as long again as nobody ran
            elif over >= 0:
                self._is_late = True
                self._end()
        self._watch()

    def _on_worker(self, message: dict[str, Any]) -> None:
        if "number" in message:
            self._on_answer(message)
        elif "ready" in message:
            self._is_ready, self._side_by_side = True, message["ready"]["side_by_side"]
            self._owner.loaded()
            self._order(READY)
            self._stop_timer()
        elif "refused" in message:
            self._refused = message["refused"]
        elif "note" in message:
            self._owner.note(message["note"])
        elif "worn" in message:
            self._on_worn(message["worn"])
        self._owner.dispatch()

    def _on_keeper(self, message: dict[str, Any]) -> None:
        if "ended" in message:
            self._on_ended(message["ended"])
        elif "worn" in message:
            self._on_worn(message["worn"])

    def _on_worn(self, why: str) -> None:
        _log.info("%s: its process is replaced: %s", self._scoring.where, why)
        self._is_worn = True
        if self._is_ready and not self.calls:
            self._end()

    def _on_answer(self, message: dict[str, Any]) -> None:
        call = self.calls.pop(message["number"], None)
        if call is None:
            return
        outcome: RewardResult
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
        scoring, report = self._scoring, report | {"why": report["why"] or self._why}
        if not self._is_ready:
            what = with_stack(f"could not be loaded: {how_it_ended(report)}", report)
            return self._owner.not_loaded(self._refused or f"{scoring.where}: {what}")
        calls, self.calls = self.calls, {}
        started = {number for number, call in calls.items() if call.started < math.inf}
        guilty = started if not self._side_by_side or len(started) == 1 else set()
        if was_killed(report) and not self._is_late:
            # By somebody else, it seems: each is made once more, and alone, before it is to blame.
            guilty = {number for number in guilty if calls[number].was_killed}
            for number in started:
                calls[number].was_killed = True
        kind: FailureKind = "timeout" if self._is_late else "died"
        what = with_stack(format_timeout(scoring.deadline_s) if self._is_late else how_it_ended(report), report)
        for number in guilty:
            call = calls.pop(number)
            call.future.set_result(make_failure(kind, scoring.where, what, call.answer))
        for number, call in calls.items():
            call.alone = number in started
        self._owner.give_back(list(calls.values()))


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
