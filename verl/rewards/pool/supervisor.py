"""The supervisor of one worker: starts it, watches it, and kills it together with all processes it started.

A small process between the pool and the user's code. It adopts orphans (Linux: a child subreaper), so that it finds and
kills even a daemon in another session. It reads the worker's output and keeps the end of it, so that a flood of output
blocks nothing. A new worker is a fork of it, which takes milliseconds. When the pool's process ends, however it ends,
the supervisor kills everything and exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import selectors
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from verl.child_process import end_with_parent
from verl.rewards.pool import worker
from verl.rewards.process_usage import kill_processes, list_descendants
from verl.rewards.reward_function import OUR_FILES

START, READY, KILL = b"s", b"r", b"k"
"""Orders of the pool: start a worker on the attached socket; take its memory now as the baseline; kill it."""

_TICK_S = 0.25
_TAIL_BYTES = 4096
_RETIRE_PROCESSES = 16  # more leftover processes: the worker is replaced between calls
_MAX_PROCESSES = 256  # more: it is killed
_RETIRE_MEMORY = 0.6  # share of the memory between baseline and limit: the worker is replaced between calls
_STACK_WAIT_S = 3.0

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class ExitReport:
    """How a worker ended: its exit code (below 0: a signal), why it was killed by us, its last output and stack."""

    exit_code: int | None
    reason: str = ""
    output: str = ""
    stack: str = ""
    is_supervisor_lost: bool = False

    def was_killed(self) -> bool:
        """Return whether the worker was probably killed from outside, e.g. by the kernel's OOM killer."""
        return self.is_supervisor_lost or (not self.reason and self.exit_code == -signal.SIGKILL)

    def describe(self) -> str:
        if self.reason:
            return self.reason
        assert self.exit_code is not None
        if self.exit_code < 0:
            names = {int(one): one.name for one in signal.Signals}  # most real-time signals have no name
            return f"its process died of {names.get(-self.exit_code, f'signal {-self.exit_code}')}"
        if self.exit_code == worker.SOCKET_CLOSED:
            return "closed file descriptors that are not its own (os.closerange?)"
        return f"ended its process with exit code {self.exit_code} (os._exit?)"

    def add_details(self, cause: str) -> str:
        """Append the user's part of the stack, and the last output."""
        frames = [line for line in self.stack.splitlines() if line.lstrip().startswith("File ")]
        is_ours = [any(file in line for file in (*OUR_FILES, "/asyncio/")) for line in frames]
        if users := frames[: [*is_ours, True].index(True)]:
            cause += "\nIts stack (innermost first):\n" + "\n".join(users[:12])
        return f"{cause}\nIts last output:\n{self.output[-1000:]}" if self.output else cause


def main(control_fd: int, memory_mb: int) -> NoReturn:
    """Supervise workers for the pool at the other end of `control_fd`; a `memory_mb` of 0 means no limit."""
    supervisor = _Supervisor(socket.socket(fileno=control_fd), memory_mb << 20)
    with contextlib.suppress(OSError):  # the pool ended during a report
        supervisor.run()
    supervisor.kill_all()
    os._exit(0)


class _Supervisor:
    """Runs at most one worker at a time."""

    def __init__(self, control: socket.socket, memory_limit: int) -> None:
        self._control, self._memory_limit, self._parent = control, memory_limit, os.getppid()
        self._pid: int | None = None
        self._exit_code: int | None = None
        self._output: _Tail
        self._stack: _Tail
        self._base_memory, self._base_processes, self._is_retiring, self._checked = 0, 0, False, 0.0
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._wakeup, wakeup_writer = self._wakeup_pair = socket.socketpair()
        for end in self._wakeup_pair:
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_writer.fileno())
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._handle_order)
        self._selector.register(self._wakeup, selectors.EVENT_READ, lambda: self._wakeup.recv(4096))

    def run(self) -> None:
        """Serve until the pool is gone."""
        while os.getppid() == self._parent:
            for key, _ in self._selector.select(_TICK_S if self._pid else 4 * _TICK_S):
                if key.data() == b"":
                    return
            self._reap()
            if self._pid is None:
                continue
            if self._exit_code is not None:
                self._end_worker("")
            elif time.monotonic() - self._checked > _TICK_S:
                self._check_limits()

    def kill_all(self) -> None:
        """Kill and reap all descendants until none are left: those of a killed process become our children."""
        while True:
            kill_processes(list_descendants(os.getpid()))
            if self._pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)
            if not self._reap():
                return
            time.sleep(0.001)

    def _handle_order(self) -> bytes:
        order, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        if order == START:
            self._start_worker(socket.socket(fileno=fds[0]))
        elif order == READY:
            pids = self._list_worker_processes()
            self._base_memory, self._base_processes = max(map(_measure_memory, pids), default=0), len(pids)
        elif order == KILL and self._pid is not None:
            self._capture_stack()
            self._end_worker("")
        return order

    def _start_worker(self, channel: socket.socket) -> None:
        output, stack = os.pipe(), os.pipe()
        self._exit_code, self._is_retiring, self._checked = None, False, time.monotonic()
        self._base_memory = self._base_processes = 0
        self._pid = os.fork()
        if self._pid == 0:
            self._become_worker(channel, output, stack)
        channel.close()
        os.close(output[1])
        os.close(stack[1])
        self._output, self._stack = _Tail(output[0]), _Tail(stack[0])
        for tail in (self._output, self._stack):
            self._selector.register(tail.fd, selectors.EVENT_READ, partial(self._read, tail))

    def _become_worker(self, channel: socket.socket, output: tuple[int, int], stack: tuple[int, int]) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            end_with_parent()
            for one in (self._control, *self._wakeup_pair, self._selector):
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
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if self._memory_limit:
                hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
                limit = self._memory_limit if hard == resource.RLIM_INFINITY else min(self._memory_limit, hard)
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            with contextlib.suppress(OSError):  # the kernel's OOM killer shall take this process, not the trainer
                Path("/proc/self/oom_score_adj").write_text("1000")
            worker.serve(channel)
        except BaseException:  # noqa: BLE001 - nothing of the supervisor may run in the worker
            import traceback

            traceback.print_exc()
        os._exit(1)

    def _read(self, tail: _Tail, *, is_last: bool = False) -> None:
        """Read what is available from a pipe, and close it at its end."""
        if not tail.is_closed and (not tail.read() or is_last):
            self._selector.unregister(tail.fd)
            tail.close()

    def _reap(self) -> bool:
        """Reap all children that have ended; return whether any are left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._pid:
                self._exit_code = os.waitstatus_to_exitcode(status)

    def _check_limits(self) -> None:
        """Kill a worker that exceeds a limit; have one that comes close replaced between calls."""
        self._checked = time.monotonic()
        pids = self._list_worker_processes()
        memory, limit, base = max(map(_measure_memory, pids), default=0), self._memory_limit, self._base_memory
        if limit and memory > limit:
            self._capture_stack()
            self._end_worker(f"used {memory >> 20:,} MB of memory; its limit is {limit >> 20:,} MB (reward.memory_mb)")
        elif len(pids) > self._base_processes + _MAX_PROCESSES:
            self._end_worker(f"had {len(pids)} processes; at most {_MAX_PROCESSES} are allowed")
        elif base and not self._is_retiring:
            if limit and memory > base + _RETIRE_MEMORY * (limit - base):
                self._send(retire=f"it uses {memory >> 20:,} MB of memory, {base >> 20:,} MB at its start")
            elif len(pids) > self._base_processes + _RETIRE_PROCESSES:
                self._send(retire=f"it left {len(pids) - self._base_processes} processes behind")
            else:
                return
            self._is_retiring = True

    def _list_worker_processes(self) -> list[int]:
        return list_descendants(os.getpid()) or [pid for pid in (self._pid,) if pid]

    def _capture_stack(self) -> None:
        """Have the worker write its stack, which also works while it runs C code, and wait for it briefly."""
        assert self._pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGUSR2)
        until = time.monotonic() + _STACK_WAIT_S
        while time.monotonic() < until and not (self._stack.data and self._stack.is_silent_for(0.2)):
            self._output.read()
            self._stack.read()
            time.sleep(0.002)

    def _end_worker(self, reason: str) -> None:
        """Kill the worker with all its processes, and report its end."""
        self.kill_all()
        self._read(self._output, is_last=True)
        self._read(self._stack, is_last=True)
        self._pid = None
        self._send(exited=asdict(ExitReport(self._exit_code, reason, self._output.text(), self._stack.text())))

    def _send(self, **message: Any) -> None:
        self._control.sendall(worker.encode(message))


class _Tail:
    """The last few thousand bytes from a pipe."""

    def __init__(self, fd: int) -> None:
        self.fd, self.data, self.is_closed, self._last_read = fd, b"", False, 0.0
        os.set_blocking(fd, False)

    def read(self) -> bool:
        """Read what is available, at most 1 MiB at once; return False at the end of the pipe."""
        for _ in range(16):
            try:
                piece = b"" if self.is_closed else os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return True
            if not piece:
                return False
            self.data, self._last_read = (self.data + piece)[-_TAIL_BYTES:], time.monotonic()
        return True

    def is_silent_for(self, seconds: float) -> bool:
        return time.monotonic() - self._last_read > seconds

    def close(self) -> None:
        os.close(self.fd)
        self.is_closed = True

    def text(self) -> str:
        return self.data.decode(errors="replace").strip()


def _measure_memory(pid: int) -> int:
    """Return the bytes of anonymous and shared memory of a process, without files that it maps.

    RLIMIT_DATA makes the kernel refuse private memory with a MemoryError; the checks here catch the rest.
    """
    with contextlib.suppress(OSError):  # the process has just ended
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return 0


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
