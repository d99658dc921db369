"""The keeper of one scoring process: starts it, watches it, and ends it together with everything that it started.

A small process between the pool and the user's code. It adopts what the code leaves behind (Linux: a child subreaper),
so also a daemon that has gone into a session of its own is found and ended. It reads what the code prints and keeps the
last of it, so a flood blocks nothing. A new worker is a fork of it, which costs milliseconds and not an interpreter.
When the pool's process ends, however it ends, the keeper ends everything and goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from verl.rewards.pool import worker
from verl.rewards.pool.worker import HEADER

__all__ = ["KILL", "READY", "START", "descendants", "main"]

START, READY, KILL = b"s", b"r", b"k"
"""What the pool says: start a worker on the socket sent along; it is ready, what it holds now is its own; end it."""

_TICK_S = 0.25
_TAIL = 4096
_MANY_PROCESSES = 16
_TOO_MANY_PROCESSES = 256
_WORN_SHARE = 0.6
_STACK_WAIT_S = 3.0

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(control_fd: int, memory_mb: int) -> NoReturn:
    """Keep workers for the pool at the other end of `control_fd`; a `memory_mb` of 0 is no limit."""
    keeper = _Keeper(socket.socket(fileno=control_fd), memory_mb << 20)
    with contextlib.suppress(OSError):  # the pool is gone in the middle of a report
        keeper.run()
    keeper.end_all()
    os._exit(0)


class _Keeper:
    """At most one worker at a time. Touches its own descendants only."""

    def __init__(self, control: socket.socket, memory: int) -> None:
        self._control, self._memory, self._parent = control, memory, os.getppid()
        self._pid: int | None = None
        self._status: int | None = None
        self._output = _Tail()
        self._stack = _Tail()
        self._baseline, self._processes, self._is_worn, self._looked = 0, 0, False, 0.0
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken.fileno())
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._obey)
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: self._wake.recv(4096))

    def run(self) -> None:
        """Until the pool is gone."""
        while os.getppid() == self._parent:
            for key, _ in self._selector.select(_TICK_S if self._pid else 4 * _TICK_S):
                if key.data() == b"":
                    return
            self._reap()
            if self._pid is None:
                continue
            if self._status is not None:
                self._end("")
            elif time.monotonic() - self._looked > _TICK_S:
                self._look()

    def end_all(self) -> None:
        """Kill and reap all descendants, until there are none: those of a killed one become children of ours."""
        while True:
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if self._pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)
            if not self._reap():
                return
            time.sleep(0.001)

    def _obey(self) -> bytes:
        order, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        if order == START:
            self._start(socket.socket(fileno=fds[0]))
        elif order == READY:
            tree = self._tree()
            self._baseline, self._processes = max(map(_held, tree), default=0), len(tree)
        elif order == KILL and self._pid is not None:
            self._ask_where_it_is()
            self._end("")
        return order

    def _start(self, channel: socket.socket) -> None:
        output, stack = os.pipe(), os.pipe()
        self._status, self._is_worn, self._looked = None, False, time.monotonic()
        self._baseline = self._processes = 0
        self._pid = os.fork()
        if self._pid == 0:
            self._become_worker(channel, output, stack)
        channel.close()
        for tail, (read_end, write_end) in ((self._output, output), (self._stack, stack)):
            os.close(write_end)
            tail.open(read_end)
            self._selector.register(read_end, selectors.EVENT_READ, self._reader(tail))

    def _become_worker(self, channel: socket.socket, output: tuple[int, int], stack: tuple[int, int]) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            for one in (self._control, self._wake, self._woken, self._selector):
                one.close()
            os.close(output[0])
            os.close(stack[0])
            os.dup2(output[1], 1)
            os.dup2(output[1], 2)
            os.close(output[1])
            sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
            faulthandler.enable(stack[1])
            faulthandler.register(signal.SIGUSR2, stack[1], all_threads=True)
            _limit(resource.RLIMIT_CORE, 0)
            if self._memory:
                _limit(resource.RLIMIT_DATA, self._memory)
            with contextlib.suppress(OSError):  # where memory runs out, the machine takes this one and not the trainer
                Path("/proc/self/oom_score_adj").write_text("1000")
            worker.serve(channel)
        except BaseException:  # noqa: BLE001 - nothing of the keeper may run in the worker
            import traceback

            traceback.print_exc()
        os._exit(1)

    def _reader(self, tail: _Tail) -> Callable[[], None]:
        def read() -> None:
            if tail.fd is not None and not tail.read():
                self._selector.unregister(tail.fd)
                tail.close()

        return read

    def _reap(self) -> bool:
        """Take leave of all who have ended; False when there is nobody left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._pid:
                self._status = status

    def _look(self) -> None:
        """Memory and processes: worn is told to the pool, which replaces between calls; too much is ended here."""
        self._looked = time.monotonic()
        tree = self._tree()
        held = max(map(_held, tree), default=0)
        if self._memory and held > self._memory:
            self._ask_where_it_is()
            self._end(f"used {held >> 20:,} MB of memory; its limit is {self._memory >> 20:,} MB (reward.memory_mb)")
        elif len(tree) > self._processes + _TOO_MANY_PROCESSES:
            self._end(f"had {len(tree)} processes; at most {_TOO_MANY_PROCESSES} are let live")
        elif self._baseline and not self._is_worn:
            enough = self._baseline + _WORN_SHARE * (self._memory - self._baseline)
            if self._memory and held > enough:
                self._tell(worn=f"it holds {held >> 20:,} MB of memory, {self._baseline >> 20:,} MB at its start")
            elif len(tree) > self._processes + _MANY_PROCESSES:
                self._tell(worn=f"it left {len(tree) - self._processes} processes behind")
            else:
                return
            self._is_worn = True

    def _tree(self) -> list[int]:
        return descendants(os.getpid()) or [pid for pid in (self._pid,) if pid]

    def _ask_where_it_is(self) -> None:
        """Let it write down its stack, which it can also while it is busy in C code; the wait for it is short."""
        assert self._pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGUSR2)
        until = time.monotonic() + _STACK_WAIT_S
        while time.monotonic() < until and not (self._stack.data and self._stack.is_silent_for(0.2)):
            self._output.read()
            self._stack.read()
            time.sleep(0.002)

    def _end(self, why: str) -> None:
        self.end_all()
        for tail in (self._output, self._stack):
            if tail.fd is not None:
                tail.read()
                self._selector.unregister(tail.fd)
                tail.close()
        texts = {"output": self._output.text(), "stack": self._stack.text()}
        self._pid, status = None, self._status
        self._tell(ended={"status": status, "why": why, **texts})

    def _tell(self, **message: Any) -> None:
        payload = json.dumps(message).encode()
        self._control.sendall(HEADER.pack(len(payload)) + payload)


class _Tail:
    """The last few thousand bytes of what comes out of a pipe."""

    def __init__(self) -> None:
        self.fd: int | None = None
        self.data = b""
        self._heard = 0.0

    def open(self, fd: int) -> None:
        self.fd, self.data = fd, b""
        os.set_blocking(fd, False)

    def read(self) -> bool:
        """Take what is there; False when it has ended. At most a few pieces, so that a flood does not keep us here."""
        for _ in range(16):
            try:
                piece = os.read(self.fd, 1 << 16) if self.fd is not None else b""
            except BlockingIOError:
                return True
            if not piece:
                return False
            self.data, self._heard = (self.data + piece)[-_TAIL:], time.monotonic()
        return True

    def is_silent_for(self, seconds: float) -> bool:
        return time.monotonic() - self._heard > seconds

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def text(self) -> str:
        return self.data.decode(errors="replace").strip()


def descendants(pid: int) -> list[int]:
    """All processes below this one, as Linux tells them; elsewhere none."""
    found, unseen = [], [pid]
    while unseen:
        threads = f"/proc/{unseen.pop()}/task"
        with contextlib.suppress(OSError):  # it has just ended
            for thread in os.listdir(threads):
                children = [int(child) for child in Path(f"{threads}/{thread}/children").read_text().split()]
                found += children
                unseen += children
    return found


def _held(pid: int) -> int:
    """Bytes that are its own, private or shared. Code mapped from files is not counted, as RLIMIT_DATA does not.

    So private memory is always refused by the kernel, as a MemoryError that the function can be told of; what is ended
    here is memory that only others of the kernel's counters see.
    """
    with contextlib.suppress(OSError):  # it has just ended
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return 0


def _limit(which: int, most: int) -> None:
    hard = resource.getrlimit(which)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, most))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
