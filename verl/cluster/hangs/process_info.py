"""Where a process stands: its state as the system sees it, and its Python stacks, for it and for its children.

A process that has called `enable_stack_dumps` writes its stacks into memory of its own when a signal asks for them,
even while it is busy in C code. One that has not, or is frozen, is read from outside by py-spy, where that is allowed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

__all__ = ["ProcessInfo", "enable_stack_dumps", "look"]

SIGNAL = signal.SIGUSR2
_MEMORY = "verl-stacks"
_ANSWER_S, _QUIET_S, _PY_SPY_S = 3.0, 0.2, 8.0
_MOST = 24
_COLLECTIVE = re.compile(r"torch/(distributed/|_C/_distributed)")
_OURS = re.compile(r"/verl/(workers|trainer|training|agents|rollout|rewards)/")
_DEEP = 12


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One process as it was found. Frames are `function (file:line)`, the innermost first, thread by thread."""

    pid: int
    name: str
    state: str
    threads: tuple[tuple[str, ...], ...] = ()
    remark: str = ""

    @property
    def is_frozen(self) -> bool:
        return self.state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    @property
    def is_gone(self) -> bool:
        return self.state in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)

    @property
    def collective(self) -> str:
        """The frame of torch.distributed in which it waits for other ranks; empty if it does not."""
        return next((f for frames in self.threads for f in frames[:_DEEP] if _COLLECTIVE.search(f)), "")

    @property
    def stands_in(self) -> str:
        """The innermost frame of the thread that works: the one with a frame of ours, or else the first."""
        working = [frames for frames in self.threads if any(_OURS.search(frame) for frame in frames)]
        return next((frames[0] for frames in working or self.threads), "")

    def words(self) -> str:
        """Its state in plain words, and what to do about it."""
        if self.is_frozen:
            return f"is frozen (stopped by a signal such as SIGSTOP, or by a debugger); kill -CONT {self.pid} wakes it"
        if self.is_gone:
            return "has ended"
        if self.state == psutil.STATUS_DISK_SLEEP:
            return "sits in the system's kernel and cannot be interrupted: a file system or a driver does not answer"
        where = f": it stands in {self.stands_in}" if self.stands_in else ""
        return f"is alive ({self.state}){where}"

    def page(self) -> str:
        lines = [f"pid {self.pid} {self.name}: {self.words()}", *([f"  {self.remark}"] if self.remark else [])]
        for number, frames in enumerate(self.threads):
            lines += [f"  thread {number}, the innermost call first", *(f"    {frame}" for frame in frames)]
        return "\n".join(lines)


@cache
def enable_stack_dumps() -> None:
    """From now on this process writes down its stacks when `look` asks for them."""
    if hasattr(os, "memfd_create"):  # Linux; elsewhere py-spy must do
        faulthandler.register(SIGNAL, os.memfd_create(_MEMORY), all_threads=True)


def look(pids: Sequence[int]) -> list[list[ProcessInfo]]:
    """Each of these processes of this machine, with all below it."""
    trees = [_tree(pid) for pid in pids]
    with ThreadPoolExecutor(max_workers=16) as threads:  # each is waited for
        seen = iter(list(threads.map(_look, [process for tree in trees for process in tree])))
    return [
        [next(seen) for _ in tree] or [ProcessInfo(pid, "", psutil.STATUS_DEAD)]
        for pid, tree in zip(pids, trees, strict=True)
    ]


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)][:_MOST]
    except psutil.NoSuchProcess:
        return []


def _look(process: psutil.Process) -> ProcessInfo:
    try:
        name = (process.cmdline() or [process.name()])[0].strip()
        state = str(process.status())
    except psutil.Error:
        return ProcessInfo(process.pid, "", psutil.STATUS_DEAD)
    seen = ProcessInfo(process.pid, name if "python" not in Path(name).name else process.name(), state)
    if seen.is_gone:
        return seen
    text = "" if seen.is_frozen else _asked(process.pid)
    remark = ""
    if not text:
        text, remark = _read_from_outside(process.pid)
    return ProcessInfo(seen.pid, seen.name, state, tuple(_threads(text)), remark)


def _asked(pid: int) -> str:
    """Let it write its stacks, if it has said that it will: to any other process this signal would be the end."""
    memory = _memory_of(pid)
    if memory is None or not _catches(pid):
        return ""
    with contextlib.suppress(OSError), memory.open("rb") as file:
        before, until = file.seek(0, os.SEEK_END), time.monotonic() + _ANSWER_S
        os.kill(pid, SIGNAL)
        size, heard = before, time.monotonic()
        while time.monotonic() < until and (size == before or time.monotonic() - heard < _QUIET_S):
            time.sleep(0.01)
            if (now := file.seek(0, os.SEEK_END)) != size:
                size, heard = now, time.monotonic()
        file.seek(before)
        return file.read().decode(errors="replace")
    return ""


def _memory_of(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if f"memfd:{_MEMORY}" in os.readlink(file):
                    return file
    return None


def _catches(pid: int) -> bool:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        mask = next(line for line in lines if line.startswith("SigCgt")).split()[1]
        return bool(int(mask, 16) >> (SIGNAL - 1) & 1)
    return False


def _read_from_outside(pid: int) -> tuple[str, str]:
    """(what py-spy prints, why there is nothing). It only reads: the process is not stopped for it."""
    program = shutil.which("py-spy", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if program is None:
        return "", "its stack is not known: it does not answer, and py-spy is not installed"
    command = [program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_S)
    except subprocess.TimeoutExpired:
        return "", f"its stack is not known: py-spy could not read it within {_PY_SPY_S:g} s"
    summarize = done.stderr.strip().splitlines()
    return (
        done.stdout,
        "" if done.returncode == 0 else f"its stack is not known: {summarize[-1] if summarize else 'py-spy failed'}",
    )


def _threads(text: str) -> list[tuple[str, ...]]:
    """Thread by thread, the main one first, from both ways of writing: faulthandler's, which has it last, and py-spy's.

    >>> _threads('Thread 0x1 (most recent call first):\n  File "x.py", line 3 in f')
    [('f (x.py:3)',)]
    >>> _threads("Thread 7 (idle)\n    f (x.py:3)")
    [('f (x.py:3)',)]
    """
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            found.append([])
        elif at := re.match(r'\s+File "(.+)", line (\S+) in (.+)', line):
            found[-1].append(f"{at[3]} ({at[1]}:{at[2]})")
        elif at := re.match(r"\s+(.+ \(.+:\d+\))$", line):
            found[-1].append(at[1])
    threads = [tuple(frames) for frames in found if frames]
    return threads[::-1] if "most recent call first" in text else threads
