"""What processes have written to stderr, where it is a file."""

from __future__ import annotations

import os
from pathlib import Path

_TAIL_BYTES = 1 << 16


def tail_stderr(lines: int = 30) -> str:
    """Return the end of this process's stderr if that is a file, as in a Ray worker."""
    file = Path(os.path.realpath("/proc/self/fd/2"))
    return format_tail(file, lines) if file.is_file() else "See the messages above."


def format_tail(file: Path, lines: int) -> str:
    """Return the last lines of a file, indented below its path."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        tail = stream.read().decode(errors="replace").splitlines()[-lines:]
    return "\n".join([f"The end of {file}:", *(f"  | {line}" for line in tail)])
