"""Runs a program that a model wrote, in walls and under limits, and says how it ended.

    outcome = run("print(int(input()) + 1)", stdin="41")
    outcome.status, outcome.stdout                              # "ok", "42\\n"

Nothing that the program does raises here, outlives its deadline or is left behind: when its main process ends or the
deadline comes, all its processes end. A RewardError means that the machine could not run it, which says nothing about
the program. From any thread, and from many processes at once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import marshal
import math
import os
import resource
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import RewardError
from verl.rewards.sandbox import isolation

__all__ = ["Limits", "ProgramResult", "best_isolation", "require_isolation", "run"]

_log = logging.getLogger(__name__)
_START_SECONDS = 60.0
_LOOK_SECONDS = 0.05
_DEATH_SECONDS = 10.0
_PAGE = resource.getpagesize()
_MOST_FILES = 10_000
_OWN = ("/tmp", "/dev/shm")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use. Memory is held twice: each process by the kernel, all of them together by watching."""

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    processes: int = 32
    open_files: int = 128
    file_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20
    output_bytes: int = 8 << 20


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended, and what it printed.

    `status` is `ok`; `error`, an exit code that is not 0; `killed`, a signal; or the limit that it crossed: `timeout`,
    `memory`, `processes`, `disk` or `output`. `seconds` are from its first line to the end of its last process.
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
    kind: str | None = None,
) -> ProgramResult:
    """The outcome of `source` as a Python program, with `files` in its folder and `argv` as its arguments.

    `stdin` and `stdout` may be descriptors, to join two programs; they are closed here once the program holds them.
    `kind` asks for walls other than the best (`best_isolation`).
    """
    limits = limits or Limits()
    kind = kind or best_isolation()
    user = isolation.user()
    with contextlib.ExitStack() as held:
        folder = held.enter_context(_folder(user)) if kind == "limits" else "/"
        rlimits = _rlimits(limits, kind)
        task = {
            "source": source,
            "files": dict(files or {}),
            "argv": list(argv),
            "packages": isolation.packages(),
            "alone": kind != "limits",
            "user": user,
            "limits": rlimits,
            "system_calls": isolation.system_calls(signals=kind != "limits" or user is not None),
        }
        told = held.enter_context(_file(marshal.dumps(task)))
        status, report = os.pipe()
        held.callback(os.close, status)
        inside = [*isolation.python(), "-c", _inside(), str(told), str(report)]
        try:
            command = isolation.build(kind, inside, limits.disk_bytes)
            if command is None:
                raise RewardError(f"sandbox: the tool for {kind!r} is not installed; install the package `bubblewrap`")
            process = subprocess.Popen(
                command,
                stdin=held.enter_context(_file(stdin.encode(errors="replace"))) if isinstance(stdin, str) else stdin,
                stdout=subprocess.PIPE if stdout is None else stdout,
                stderr=subprocess.PIPE,
                pass_fds=(told, report),
                env=isolation.ENVIRONMENT,
                cwd=folder,
                start_new_session=True,
            )
        finally:
            for fd in (report, stdin, stdout):
                if isinstance(fd, int):
                    os.close(fd)
        with process:
            watch = _Watch(process, status, kind, folder, limits)
            try:
                watch.until_the_end()
            finally:
                _end(process, kind)
            return watch.outcome()


@functools.cache
def best_isolation() -> str:
    """The best walls that work on this machine: `bubblewrap`, `namespaces` or `limits`. Tried once a process.

    A warning says in words what is missing.
    """
    reasons = []
    for kind in isolation.KINDS:
        try:
            probe = run("import json; print('inside')", kind=kind)
        except RewardError as error:
            reasons.append(str(error))
            continue
        if probe.stdout == "inside\n":
            if kind in isolation.MISSING:
                _log.warning("sandbox: %s (%s)", isolation.MISSING[kind], "; ".join(reasons))
            return kind
        reasons.append(f"{kind}: {probe.stderr.strip()[-300:]}")
    raise RewardError(
        "sandbox: no program can be run safely on this machine; install the package `bubblewrap`, or, as root, a "
        "Python that other users can read, or use a remote sandbox by URL\n  " + "\n  ".join(reasons)
    )


def require_isolation(kind: str) -> None:
    """A RewardError unless these walls, or better ones, work on this machine."""
    best = best_isolation()
    if isolation.KINDS.index(best) > isolation.KINDS.index(kind):
        raise RewardError(
            f"reward.sandbox.require={kind}: {isolation.MISSING[best]}; "
            f"or, if {best} are walls enough for these programs, set reward.sandbox.require={best}"
        )


class _Watch:
    """One running program: reads what it prints, looks at what it uses, and notes the limit that it crosses."""

    def __init__(self, process: subprocess.Popen[bytes], status: int, kind: str, folder: str, limits: Limits) -> None:
        self._process, self._status, self._limits = process, status, limits
        self._kind, self._folder = kind, folder
        self._text: dict[int, bytearray] = {status: bytearray()}
        self._crossed: str | None = None
        self._begun = self._started_at = self._looked = time.monotonic()
        self._deadline = self._begun + _START_SECONDS

    def until_the_end(self) -> None:
        pipes = [pipe.fileno() for pipe in (self._process.stdout, self._process.stderr) if pipe is not None]
        with selectors.DefaultSelector() as selector:
            for fd in (self._status, *pipes):
                os.set_blocking(fd, False)
                self._text.setdefault(fd, bytearray())
                selector.register(fd, selectors.EVENT_READ)
            while self._crossed is None:
                over = self._process.poll() is not None
                for key, _ in selector.select(0 if over else self._patience(len(selector.get_map()))):
                    if not self._read(key.fd):
                        selector.unregister(key.fd)
                now = time.monotonic()
                if over and not selector.select(0):
                    return
                if now > self._deadline:
                    self._crossed = "timeout"
                elif self._text[self._status] and now - self._looked > _LOOK_SECONDS:
                    self._looked = now
                    self._crossed = self._crossed or self._greed()

    def _patience(self, open_pipes: int) -> float:
        # With every pipe closed the end of the process is the only news, and nothing announces it.
        return max(0.0, min(_LOOK_SECONDS if open_pipes else 0.002, self._deadline - time.monotonic()))

    def _read(self, fd: int) -> bool:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        text = self._text[fd]
        if fd == self._status and data and not text:
            self._started_at = time.monotonic()
            self._deadline = self._started_at + self._limits.seconds
        text += data
        if fd != self._status and len(text) > self._limits.output_bytes:
            self._crossed = "output"
        return bool(data)

    def _greed(self) -> str | None:
        tree = _tree(self._process.pid)
        if not tree:
            return None
        if len(tree) > self._limits.processes + 4:
            return "processes"
        if sum(map(_resident, tree)) > self._limits.memory_bytes and _memory(tree) > self._limits.memory_bytes:
            return "memory"
        if self._kind == "limits":
            return "disk" if _fills(self._folder, self._limits.disk_bytes) else None
        return "disk" if any(_entries(f"/proc/{tree[0]}/root{folder}") > _MOST_FILES for folder in _OWN) else None

    def outcome(self) -> ProgramResult:
        ended = time.monotonic()
        started, _, status = self._text.pop(self._status).decode().partition("\n")
        texts = [text[: self._limits.output_bytes].decode(errors="replace") for text in self._text.values()]
        stdout, stderr = texts if len(texts) == 2 else ("", *texts)
        if not started:
            late = f" within {_START_SECONDS:g} s" if self._crossed == "timeout" else ""
            why = stderr.strip()[-300:] or f"exit code {self._process.returncode}"
            raise RewardError(f"sandbox: {self._kind} did not start{late}: {why}")
        code = os.waitstatus_to_exitcode(int(status)) if status.strip() and self._crossed is None else None
        return ProgramResult(self._crossed or _named(code), code, stdout, stderr, ended - self._started_at)


def _named(code: int | None) -> str:
    if code == -signal.SIGXCPU:
        return "timeout"
    return "killed" if code is None or code < 0 else "error" if code else "ok"


def _rlimits(limits: Limits, kind: str) -> list[tuple[int, int]]:
    most = {
        resource.RLIMIT_CPU: math.ceil(limits.seconds) + 1,
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_CORE: 0,
    }
    if isolation.counts_processes(kind):
        most[resource.RLIMIT_NPROC] = limits.processes
    hard = {what: resource.getrlimit(what)[1] for what in most}
    return [(what, most[what] if hard[what] < 0 else min(most[what], hard[what])) for what in most]


@functools.cache
def _inside() -> str:
    return Path(__file__).with_name("guest.py").read_text()


@contextlib.contextmanager
def _file(content: bytes) -> Iterator[int]:
    """A descriptor of a file without a name that holds `content`. A pipe would need somebody to fill it."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        os.fchmod(file.fileno(), 0o444)  # so that a program of another user may open /dev/stdin
        yield file.fileno()


@contextlib.contextmanager
def _folder(user: int | None) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder:
        if user is not None:
            os.chown(folder, user, user)
        yield folder


def _end(process: subprocess.Popen[Any], kind: str) -> None:
    """Ends the program and waits for it.

    Its guard goes first, and the rest with it; the outermost process reaps them, so it is killed only if it fails to.
    """
    if process.poll() is None:
        if kind == "limits":
            process.terminate()
        else:
            for pid in _tree(process.pid):
                _kill(pid)
        try:
            process.wait(_DEATH_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in (*_tree(process.pid), process.pid):
                _kill(pid)
            process.wait()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _tree(pid: int) -> list[int]:
    """All processes below `pid`."""
    found: list[int] = []
    todo = [pid]
    while todo:
        below = _children(todo.pop())
        found += below
        todo += below
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def _memory(pids: Sequence[int]) -> int:
    """What they hold together, with what they share counted once: exact, and slower than the sum of `_resident`."""
    held = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            held += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            held += _resident(pid)
    return held


def _entries(folder: str) -> int:
    """Files on the file system of `folder`: each costs memory of the kernel, which its size does not limit."""
    with contextlib.suppress(OSError):
        system = os.statvfs(folder)
        return system.f_files - system.f_ffree
    return 0


def _fills(folder: str, most: int) -> bool:
    """Whether what lies in `folder` is more than `most` bytes, or too many files."""
    held = count = 0
    for path, _, names in os.walk(folder):
        for name in names:
            count += 1
            with contextlib.suppress(OSError):
                held += os.lstat(os.path.join(path, name)).st_size
            if held > most or count > _MOST_FILES:
                return True
    return False
