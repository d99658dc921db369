"""Runs commands in a terminal and records what they print, with the longest silence."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>()][A-Z0-9]?")
_READ = 65536


@dataclass(frozen=True, slots=True)
class Session:
    """What a command printed in a terminal."""

    code: int
    raw: str
    seconds: float
    longest_silence_s: float  # between the first output and the last
    silent_after: str  # the end of the output before the longest silence
    first_output_s: float  # from the start

    @property
    def text(self) -> str:
        """The output without escape sequences; each redrawn line is a line of its own."""
        return ESCAPES.sub("", self.raw).replace("\r\n", "\n").replace("\r", "\n")


def record(
    command: list[str],
    folder: Path,
    *,
    log: Path,
    timeout_s: float = 600.0,
    interrupt_after: str | None = None,
    environment: dict[str, str] | None = None,
    columns: int = 120,
) -> Session:
    """Run a command in `folder` to its end and write its output to `log`.

    Args:
        interrupt_after: Press Ctrl-C as soon as this text is printed.
    """
    leader, follower = pty.openpty()
    size = {"COLUMNS": str(columns), "LINES": "40", "TERM": "xterm-256color"}
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=os.environ | size | (environment or {}),
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(follower)

    def interrupt_if_due(raw: bytes) -> bool:
        if interrupt_after is None or interrupt_after.encode() not in raw:
            return False
        os.write(leader, b"\x03")
        return True

    try:
        raw, first, silence_s, silent_at = _read_all(leader, start + timeout_s, interrupt_if_due)
        code = process.wait(timeout=10)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        os.close(leader)
    seconds, silent_after = time.monotonic() - start, _last_line(raw[:silent_at])
    session = Session(code, raw.decode(errors="replace"), seconds, silence_s, silent_after, first - start)
    log.write_text(f"$ {' '.join(command)}\n{session.text}\n[exit code {code}, {session.seconds:.1f} s]\n")
    return session


def _take_terminal() -> None:
    """Make the terminal on standard input that of the new session, so that Ctrl-C reaches it."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read_all(leader: int, until: float, interrupt_if_due: Callable[[bytes], bool]) -> tuple[bytes, float, float, int]:
    """Return the output, when its first part came, the longest silence after that, and how much came before it."""
    raw, first, last, silence_s, silent_at, is_interrupted = b"", 0.0, 0.0, 0.0, 0, False
    while time.monotonic() < until:
        if not select.select([leader], [], [], 0.5)[0]:
            continue
        try:
            part = os.read(leader, _READ)
        except OSError:  # all writers have closed the terminal
            break
        if not part:
            break
        now = time.monotonic()
        if last and now - last > silence_s:
            silence_s, silent_at = now - last, len(raw)
        raw, first, last = raw + part, first or now, now
        is_interrupted = is_interrupted or interrupt_if_due(raw)
    return raw, first, silence_s, silent_at


def _last_line(raw: bytes) -> str:
    lines = ESCAPES.sub("", raw.decode(errors="replace")).replace("\r", "\n").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")
