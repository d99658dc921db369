"""The supervisor of one worker: starts it, watches it, and kills it together with all processes it started.

A small process between the pool and the user's code. It adopts orphans, so it finds and kills even a daemon in another
session. It reads the worker's output and keeps the end of it, so that a flood of output blocks nothing. When the pool's
process ends, however it ends, the supervisor kills everything and exits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import selectors
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from verl.child_process import adopt_orphans, end_with_parent
from verl.rewards.pool import worker
from verl.rewards.process_usage import kill_processes, list_descendants
from verl.rewards.reward_function import OUR_FILES

READY, KILL = b"r", b"k"
"""Orders of the pool: take the worker's memory now as the baseline; kill the worker."""

_TICK_S = 0.25
_TAIL_BYTES = 4096
_RETIRE_PROCESSES = 16  # more leftover processes: the worker is replaced between calls
_MAX_PROCESSES = 256  # more: it is killed
_RETIRE_MEMORY = 0.6  # share of the memory between baseline and limit: the worker is replaced between calls
_STACK_WAIT_S = 3.0


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


def main(control_fd: int, channel_fd: int, memory_mb: int) -> NoReturn:
    """Supervise a worker that serves calls on `channel_fd`, for the pool at the other end of `control_fd`.

    A `memory_mb` of 0 means no limit.
    """
    supervisor = _Supervisor(socket.socket(fileno=control_fd), socket.socket(fileno=channel_fd), memory_mb << 20)
    with contextlib.suppress(OSError):  # the pool ended during a report
        supervisor.run()
    supervisor.kill_all()
    os._exit(0)


class _Supervisor:
    """Forks the worker, and watches it until its end."""

    def __init__(self, control: socket.socket, channel: socket.socket, memory_limit: int) -> None:
        self._control, self._memory_limit, self._parent = control, memory_limit, os.getppid()
        self._exit_code: int | None = None
        self._base_memory, self._base_processes, self._is_retiring = 0, 0, False
        self._output, self._stack_fd = b"", os.memfd_create("stack")
        self._output_fd, output_writer = os.pipe()
        adopt_orphans()
        self._pid = os.fork()
        if self._pid == 0:
            self._become_worker(channel, output_writer)
        channel.close()
        os.close(output_writer)
        os.set_blocking(self._output_fd, False)

    def run(self) -> None:
        """Watch the worker until it ends, exceeds a limit, or the pool ends it; then kill it and report its end."""
        reason = self._watch()
        self.kill_all()
        self._read_output()
        stack = os.pread(self._stack_fd, 1 << 20, 0)[-_TAIL_BYTES:]
        self._send(exited=asdict(ExitReport(self._exit_code, reason, _decode(self._output), _decode(stack))))

    def kill_all(self) -> None:
        """Kill and reap all descendants until none are left: those of a killed process become our children."""
        while self._reap():
            kill_processes(list_descendants(os.getpid()))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
            time.sleep(0.001)

    def _watch(self) -> str:
        """Return when the worker has ended or has to end, with the reason if that is a limit."""
        sources, checked = selectors.DefaultSelector(), time.monotonic()
        sources.register(self._control, selectors.EVENT_READ)
        sources.register(self._output_fd, selectors.EVENT_READ)
        with contextlib.suppress(OSError):  # without a pidfd, the end of the worker is noticed at the next tick
            sources.register(os.pidfd_open(self._pid), selectors.EVENT_READ)
        while os.getppid() == self._parent:
            ready = [key.fd for key, _ in sources.select(_TICK_S)]
            if self._output_fd in ready and not self._read_output():
                sources.unregister(self._output_fd)
            if self._control.fileno() in ready:
                order = self._control.recv(1)
                if order == KILL:
                    self._capture_stack()
                if order != READY:
                    return ""
                self._base_memory, self._base_processes = self._measure()
            self._reap()
            if self._exit_code is not None:
                return ""
            if time.monotonic() - checked > _TICK_S:
                checked = time.monotonic()
                if reason := self._check_limits():
                    return reason
        return ""

    def _become_worker(self, channel: socket.socket, output_fd: int) -> NoReturn:
        try:
            os.setsid()
            end_with_parent()
            self._control.close()
            os.close(self._output_fd)
            os.dup2(output_fd, 1)
            os.dup2(output_fd, 2)
            os.close(output_fd)
            sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
            faulthandler.enable(self._stack_fd)
            faulthandler.register(signal.SIGUSR2, self._stack_fd, all_threads=True)
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

    def _read_output(self) -> bool:
        """Read what is available, at most 1 MiB at once; return False at the end of the pipe."""
        for _ in range(16):
            try:
                piece = os.read(self._output_fd, 1 << 16)
            except BlockingIOError:
                return True
            if not piece:
                return False
            self._output = (self._output + piece)[-_TAIL_BYTES:]
        return True

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

    def _check_limits(self) -> str:
        """Return the limit that the worker exceeds, or ""; have one that comes close replaced between calls."""
        memory, processes = self._measure()
        limit, base, left = self._memory_limit, self._base_memory, processes - self._base_processes
        if limit and memory > limit:
            self._capture_stack()
            return f"used {memory >> 20:,} MB of memory; its limit is {limit >> 20:,} MB (reward.memory_mb)"
        if left > _MAX_PROCESSES:
            return f"had {processes} processes; at most {_MAX_PROCESSES} are allowed"
        if base and not self._is_retiring:
            if limit and memory > base + _RETIRE_MEMORY * (limit - base):
                self._retire(f"it uses {memory >> 20:,} MB of memory, {base >> 20:,} MB at its start")
            elif left > _RETIRE_PROCESSES:
                self._retire(f"it left {left} processes behind")
        return ""

    def _retire(self, reason: str) -> None:
        self._is_retiring = True
        self._send(retire=reason)

    def _measure(self) -> tuple[int, int]:
        """Return the memory of the largest process of the worker, and the number of its processes."""
        pids = list_descendants(os.getpid())
        return max(map(_measure_memory, pids), default=0), len(pids)

    def _capture_stack(self) -> None:
        """Have the worker write its stack, which also works while it runs C code, and wait for it briefly."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGUSR2)
        size, until = 0, time.monotonic() + _STACK_WAIT_S
        while time.monotonic() < until and (size == 0 or os.fstat(self._stack_fd).st_size > size):
            size = os.fstat(self._stack_fd).st_size
            time.sleep(0.1 if size else 0.002)

    def _send(self, **message: Any) -> None:
        self._control.sendall(worker.encode(message))


def _decode(output: bytes) -> str:
    return output.decode(errors="replace").strip()


def _measure_memory(pid: int) -> int:
    """Return the bytes of anonymous and shared memory of a process, without files that it maps.

    RLIMIT_DATA makes the kernel refuse private memory with a MemoryError; the checks here catch the rest.
    """
    with contextlib.suppress(OSError):  # the process has just ended
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return 0
