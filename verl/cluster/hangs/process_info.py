"""The state of processes on this machine as the system sees it, and their Python stacks, including their children.

A process that has called `enable_stack_dumps` writes its stacks into memory: by a thread of its own, while no other one
runs Python; or by a signal, if C code keeps that thread waiting. (A signal that arrives while threads run Python may
crash the process: their frames change as they are read.) A process that has not called it, or is stopped, is read from
outside by py-spy, where that is permitted.
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
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

import psutil

SIGNAL = signal.SIGUSR2
_MEMFD = "verl-stacks"
_THREAD_S, _SIGNAL_S, _QUIET_S, _PY_SPY_S = 5.0, 3.0, 0.2, 8.0
_MAX_PROCESSES = 24
_MAX_DEPTH = 12  # frames further out only show that torch.distributed has called back into a model
_COLLECTIVE = re.compile(r"torch/(distributed/|_C/_distributed)")
_VERL = re.compile(r"/verl/(workers|trainer|training|agents|rollout|rewards)/")


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One process. Frames are `function (file:line)`, the innermost first, one tuple per thread."""

    pid: int
    name: str
    state: str
    threads: tuple[tuple[str, ...], ...] = ()
    remark: str = ""

    @property
    def is_stopped(self) -> bool:
        return self.state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    @property
    def is_gone(self) -> bool:
        return self.state in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)

    @property
    def collective_frame(self) -> str:
        """The frame of torch.distributed in which it waits for other ranks, if any."""
        return next((f for frames in self.threads for f in frames[:_MAX_DEPTH] if _COLLECTIVE.search(f)), "")

    @property
    def current_frame(self) -> str:
        """The innermost frame of the first thread that runs code of verl, or else of the first thread."""
        working = [frames for frames in self.threads if any(_VERL.search(frame) for frame in frames)]
        return next((frames[0] for frames in working or self.threads), "")

    def describe(self) -> str:
        """Return its state, and what to do about it, as the rest of a sentence."""
        if self.is_stopped:
            return f"is stopped (by SIGSTOP or a debugger); resume it with kill -CONT {self.pid}"
        if self.is_gone:
            return "has exited"
        if self.state == psutil.STATUS_DISK_SLEEP:
            return "is in uninterruptible sleep (D state): a file system or driver does not respond"
        return f"is alive ({self.state})" + (f" in {self.current_frame}" if self.current_frame else "")

    def format(self) -> str:
        lines = [f"pid {self.pid} {self.name}: {self.describe()}", *([f"  {self.remark}"] if self.remark else [])]
        for index, frames in enumerate(self.threads):
            lines += [f"  thread {index} (most recent call first)", *(f"    {frame}" for frame in frames)]
        return "\n".join(lines)


@cache
def enable_stack_dumps() -> None:
    """Make this process write its stacks into memory whenever `inspect_processes` asks for them."""
    if hasattr(os, "memfd_create"):  # Linux only; elsewhere there is py-spy
        requests, writer = os.pipe()
        memory = os.memfd_create(f"{_MEMFD}-{os.getpid()}-{writer}")  # tells others where to write requests
        faulthandler.register(SIGNAL, memory, all_threads=True)
        threading.Thread(target=_dump_on_request, args=(requests, memory), name="verl-stacks", daemon=True).start()


def _dump_on_request(requests: int, memory: int) -> None:
    while os.read(requests, 1):
        faulthandler.dump_traceback(memory, all_threads=True)


def dump_own_stacks() -> str:
    """Return the stacks of this process, as faulthandler prints them."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def inspect_processes(pids: Sequence[int]) -> list[list[ProcessInfo]]:
    """Return for each pid of this machine the process and all its descendants."""
    trees = [_list_tree(pid) for pid in pids]
    with ThreadPoolExecutor(max_workers=16) as threads:
        infos = iter(list(threads.map(_inspect, [process for tree in trees for process in tree])))
    return [
        [next(infos) for _ in tree] or [ProcessInfo(pid, "", psutil.STATUS_DEAD)]
        for pid, tree in zip(pids, trees, strict=True)
    ]


def _list_tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)][:_MAX_PROCESSES]
    except psutil.NoSuchProcess:
        return []


def _inspect(process: psutil.Process) -> ProcessInfo:
    try:
        command = (process.cmdline() or [process.name()])[0].strip()
        name = command if "python" not in Path(command).name else process.name()
        info = ProcessInfo(process.pid, name, str(process.status()))
    except psutil.Error:
        return ProcessInfo(process.pid, "", psutil.STATUS_DEAD)
    if info.is_gone:
        return info
    text, remark = "" if info.is_stopped else _request_dump(info.pid), ""
    if not text:
        text, remark = _run_py_spy(info.pid)
    return ProcessInfo(info.pid, name, info.state, tuple(_parse_threads(text)), remark)


def _request_dump(pid: int) -> str:
    """Return the stacks that the process writes; empty if it has no memory for them, and so no signal handler."""
    if pid == os.getpid():
        return dump_own_stacks()
    if (memory := _find_memfd(pid)) is None:  # the signal would kill it
        return ""
    with contextlib.suppress(OSError), memory.open("rb") as file:
        owner, writer = re.findall(r"\d+", os.readlink(memory))[:2]
        if int(owner) == pid:  # not a child that has inherited the memory, but not the thread
            requests = Path(f"/proc/{pid}/fd/{writer}")
            if text := _read_growth(file, lambda: requests.write_bytes(b"1"), _THREAD_S):
                return text
        return _read_growth(file, lambda: os.kill(pid, SIGNAL), _SIGNAL_S)
    return ""


def _read_growth(file: BinaryIO, request: Callable[[], object], timeout_s: float) -> str:
    """Return what is appended to a file after a request."""
    start, until = file.seek(0, os.SEEK_END), time.monotonic() + timeout_s
    request()
    size, grown_at = start, time.monotonic()
    while time.monotonic() < until and (size == start or time.monotonic() - grown_at < _QUIET_S):
        time.sleep(0.01)
        if (now := file.seek(0, os.SEEK_END)) != size:
            size, grown_at = now, time.monotonic()
    file.seek(start)
    return file.read().decode(errors="replace")


def _find_memfd(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if f"memfd:{_MEMFD}-" in os.readlink(file):
                    return file
    return None


def _run_py_spy(pid: int) -> tuple[str, str]:
    """Return (stacks, reason if there are none). The process is not paused."""
    program = shutil.which("py-spy", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if program is None:
        return "", "stack unknown: the process does not respond, and py-spy is not installed"
    command = [program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_S)
    except subprocess.TimeoutExpired:
        return "", f"stack unknown: py-spy could not read it within {_PY_SPY_S:g} s"
    if result.returncode == 0:
        return result.stdout, ""
    return result.stdout, f"stack unknown: {(result.stderr.strip().splitlines() or ['py-spy failed'])[-1]}"


def _parse_threads(text: str) -> list[tuple[str, ...]]:
    """Return the frames of each thread, the main thread first, from the output of faulthandler or py-spy."""
    threads: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append([])
        elif frame := re.match(r'\s+File "(.+)", line (\S+) in (.+)', line):
            threads[-1].append(f"{frame[3]} ({frame[1]}:{frame[2]})")
        elif frame := re.match(r"\s+(.+ \(.+:\d+\))$", line):
            threads[-1].append(frame[1])
    parsed = [tuple(frames) for frames in threads if frames]
    return parsed[::-1] if "most recent call first" in text else parsed  # faulthandler prints the main thread last
