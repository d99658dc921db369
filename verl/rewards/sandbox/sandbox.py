"""Runs a program that a model wrote, isolated and under limits, and reports how it ended.

    result = run("print(int(input()) + 1)", stdin="41")
    result.status, result.stdout                                # "ok", "42\\n"

Nothing that the program does raises an error here, and all its processes are killed when its main process exits or its
time is over. A RewardError means that this machine could not run the program. Safe to use from threads and processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import marshal
import math
import os
import resource
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config.schema.reward import SandboxConfig
from verl.errors import RewardError
from verl.rewards.process_usage import (
    exceeds_disk,
    kill_processes,
    list_descendants,
    resident_bytes,
    socket_bytes,
    total_memory,
)
from verl.rewards.sandbox import isolation
from verl.rewards.sandbox.seccomp import build_seccomp_filter

_log = logging.getLogger(__name__)
_START_SECONDS = 60.0
_CHECK_SECONDS = 0.05
_EXIT_SECONDS = 10.0
_EVERY_SEAL = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run. The kernel limits the memory of each process; the sum of all is checked while it runs."""

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    processes: int = 32
    open_files: int = 128
    file_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20
    output_bytes: int = 8 << 20


def read_limits(settings: SandboxConfig) -> Limits:
    """Return the limits of `reward.sandbox.*`."""
    return Limits(
        seconds=settings.seconds,
        memory_bytes=settings.memory_mb << 20,
        processes=settings.processes,
        output_bytes=settings.output_mb << 20,
    )


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended, and what it printed.

    `status` is `ok`, `error` (a nonzero exit code), `killed` (by a signal), or the limit that the program exceeded:
    `timeout`, `memory`, `processes`, `disk` or `output`. `seconds` run until the end of its last process.
    """

    status: str
    exit_code: int | None
    stdout: str
    stderr: str
    seconds: float


def run(
    source: str,
    *,
    stdin: str | int = "",
    stdout: int | None = None,
    files: Mapping[str, str | bytes] | None = None,
    limits: Limits | None = None,
    argv: Sequence[str] = (),
    folders: Sequence[str] = (),
    kind: str | None = None,
) -> ProgramResult:
    """Run `source` as a Python program with `files` in its working directory and `argv` as its arguments.

    `stdin` and `stdout` may be file descriptors, to connect two programs; they are closed here. `folders` are absolute
    paths at which the program finds empty writable folders, except with `limits`. `kind` is the kind of isolation
    (default: `best_isolation()`).
    """
    limits = limits or Limits()
    kind = kind or best_isolation()
    user = isolation.choose_user()
    with contextlib.ExitStack() as stack:
        folder = "/"
        if kind == "limits":
            folder = tempfile.mkdtemp(prefix="sandbox-")
            stack.callback(_remove, folder)
            if user is not None:
                os.chown(folder, user, user)
        task = {
            "kind": kind,
            "source": source,
            "files": dict(files or {}),
            "argv": list(argv),
            "writable": ["/tmp", "/dev/shm", *folders],
            "package_paths": isolation.package_paths(),
            "user": user,
            "rlimits": _rlimits(limits, kind),
            "landlock_version": isolation.landlock_version() if kind == "limits" else 0,
            "landlock_rules": isolation.landlock_rules(folder),
            "seccomp_filter": build_seccomp_filter(shares_user=kind == "limits" and user is None),
        }
        process, status_fd = _start(stack, kind, task, folder, limits.disk_bytes, folders, stdin, stdout)
        with process:
            monitor = _Monitor(process, status_fd, kind, folder, limits)
            try:
                monitor.wait()
            finally:
                _kill_all(process, kind)
            return monitor.result()


def _start(
    stack: contextlib.ExitStack,
    kind: str,
    task: Any,
    folder: str,
    disk_bytes: int,
    folders: Sequence[str],
    stdin: str | int,
    stdout: int | None,
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the guest, isolated; return its process, and the descriptor from which its status is read."""
    status_fd, report_fd = os.pipe()
    stack.callback(os.close, status_fd)
    try:
        task_fd = stack.enter_context(_anonymous_file(marshal.dumps(task)))
        guest = [*isolation.python_command(), "-c", _guest_source(), str(task_fd), str(report_fd)]
        command = isolation.build_command(kind, guest, disk_bytes, folders)
        if command is None:
            raise RewardError(f"sandbox: the tool for {kind!r} is not installed; install the package `bubblewrap`")
        input_fd = stdin
        if isinstance(input_fd, str):
            input_fd = stack.enter_context(_anonymous_file(input_fd.encode(errors="replace")))
        process = subprocess.Popen(
            command,
            stdin=input_fd,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.PIPE,
            pass_fds=(task_fd, report_fd),
            env=isolation.ENVIRONMENT,
            cwd=folder,
            start_new_session=True,
        )
        return process, status_fd
    finally:
        for fd in (report_fd, stdin, stdout):
            if isinstance(fd, int):
                os.close(fd)


@functools.cache
def best_isolation() -> str:
    """Return the best isolation that works on this machine: `bubblewrap`, `namespaces` or `limits`.

    Logs a warning about what the others lack.
    """
    reasons = []
    for kind in isolation.KINDS:
        try:
            probe = run("import json; print('inside')", kind=kind)
        except RewardError as error:
            reasons.append(str(error))
            continue
        if probe.stdout == "inside\n":
            if reasons:
                _log.warning("sandbox: %s (%s)", isolation.describe(kind), "; ".join(reasons))
            return kind
        reasons.append(f"{kind}: {probe.stderr.strip()[-300:]}")
    raise RewardError(
        f"sandbox: no program can be run safely on this machine; {isolation.WAYS}; or, as root, use a Python that "
        "other users can read\n  " + "\n  ".join(reasons)
    )


def require_isolation(kind: str) -> None:
    """Raise a RewardError unless `kind` or a better isolation works on this machine."""
    best = best_isolation()
    if isolation.KINDS.index(best) > isolation.KINDS.index(kind):
        raise RewardError(
            f"reward.sandbox.require={kind}: {isolation.describe(best)}. To fix it, {isolation.WAYS}; "
            f"or, if {best} is enough for these programs, set reward.sandbox.require={best}"
        )


class _Monitor:
    """Reads the output of one running program, and checks its limits."""

    def __init__(
        self, process: subprocess.Popen[bytes], status_fd: int, kind: str, folder: str, limits: Limits
    ) -> None:
        self._process, self._status_fd, self._limits = process, status_fd, limits
        self._kind, self._folder = kind, folder
        self._output: dict[int, bytearray] = {status_fd: bytearray()}
        self._exceeded: str | None = None
        self._started_at = self._checked_at = time.monotonic()
        self._ends_at = self._started_at + _START_SECONDS

    def wait(self) -> None:
        """Return when the program has exited or exceeded a limit."""
        pipes = [pipe.fileno() for pipe in (self._process.stdout, self._process.stderr) if pipe is not None]
        with selectors.DefaultSelector() as selector:
            for fd in (self._status_fd, *pipes):
                os.set_blocking(fd, False)
                self._output.setdefault(fd, bytearray())
                selector.register(fd, selectors.EVENT_READ)
            while self._exceeded is None:
                has_exited = self._process.poll() is not None
                # With every pipe closed, nothing announces the exit of the process.
                interval = _CHECK_SECONDS if selector.get_map() else 0.002
                timeout = 0 if has_exited else max(0.0, min(interval, self._ends_at - time.monotonic()))
                for key, _ in selector.select(timeout):
                    if not self._read(key.fd):
                        selector.unregister(key.fd)
                now = time.monotonic()
                if has_exited and not selector.select(0):
                    return
                if now > self._ends_at:
                    self._exceeded = "timeout"
                elif self._output[self._status_fd] and now - self._checked_at > _CHECK_SECONDS:
                    self._checked_at = now
                    self._exceeded = self._exceeded or self._find_exceeded_limit()

    def _read(self, fd: int) -> bool:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        output = self._output[fd]
        if fd == self._status_fd and data and not output:
            self._started_at = time.monotonic()
            self._ends_at = self._started_at + self._limits.seconds
        output += data
        if fd != self._status_fd and len(output) > self._limits.output_bytes:
            self._exceeded = "output"
        return bool(data)

    def _find_exceeded_limit(self) -> str | None:
        pids, memory_bytes = list_descendants(self._process.pid), self._limits.memory_bytes
        if not pids:
            return None
        if len(pids) > self._limits.processes + 4:
            return "processes"
        in_kernel = sum(map(socket_bytes, pids))
        if sum(map(resident_bytes, pids)) + in_kernel > memory_bytes and total_memory(pids) + in_kernel > memory_bytes:
            return "memory"
        is_bare = self._kind == "limits"
        programs, folder = (pids, self._folder) if is_bare else (pids[1:], None)  # the first one is the guard
        return "disk" if exceeds_disk(programs, folder, self._limits.disk_bytes) else None

    def result(self) -> ProgramResult:
        ended = time.monotonic()
        started, _, status = self._output.pop(self._status_fd).decode(errors="replace").partition("\n")
        texts = [text[: self._limits.output_bytes].decode(errors="replace") for text in self._output.values()]
        stdout, stderr = texts if len(texts) == 2 else ("", *texts)
        if not started:
            late = f" within {_START_SECONDS:g} s" if self._exceeded == "timeout" else ""
            why = stderr.strip()[-300:] or f"exit code {self._process.returncode}"
            raise RewardError(f"sandbox: {self._kind} did not start{late}: {why}")
        # Without a status the guard was killed: only the program can have done that.
        is_known = status.strip().isdecimal() and self._exceeded is None
        code = os.waitstatus_to_exitcode(int(status)) if is_known else None
        return ProgramResult(self._exceeded or _name_status(code), code, stdout, stderr, ended - self._started_at)


def _name_status(code: int | None) -> str:
    if code == -signal.SIGXCPU:
        return "timeout"
    return "killed" if code is None or code < 0 else "error" if code else "ok"


def _rlimits(limits: Limits, kind: str) -> list[tuple[int, int]]:
    wanted = {
        resource.RLIMIT_CPU: math.ceil(limits.seconds) + 1,
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_SIGPENDING: 1024,  # also of timers
        resource.RLIMIT_NPROC: isolation.limit_processes(kind, limits.processes),
    }
    hard = {name: resource.getrlimit(name)[1] for name in wanted}
    return [(name, limit if hard[name] < 0 else min(limit, hard[name])) for name, limit in wanted.items()]


@functools.cache
def _guest_source() -> str:
    return Path(__file__).with_name("guest.py").read_text()


@contextlib.contextmanager
def _anonymous_file(content: bytes) -> Iterator[int]:
    """Yield a read-only descriptor of a file in memory with `content`, which nobody can change any more.

    Unlike a pipe, it needs no writer.
    """
    with open(os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), 0o444)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _EVERY_SEAL)
        fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _remove(folder: str) -> None:
    """Remove the folder of a program, even if it is deeply nested or not readable."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        subprocess.run(["sh", "-c", 'chmod -R u+rwx "$0"; rm -rf "$0"', folder], stderr=subprocess.DEVNULL, check=False)


def _kill_all(process: subprocess.Popen[bytes], kind: str) -> None:
    """Kill the program and wait for its end.

    The guest goes first, and the rest with it. The outermost process reaps them, so it is killed only if it does not.
    """
    if process.poll() is None:
        if kind == "limits":
            process.terminate()
        else:
            kill_processes(list_descendants(process.pid))
        try:
            process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            while below := list_descendants(process.pid):
                kill_processes(below)
            kill_processes([process.pid])
            process.wait()
