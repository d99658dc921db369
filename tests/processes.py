"""Which processes the tests have started."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

__all__ = ["children", "working_in"]


def children() -> list[psutil.Process]:
    """All that run below this one, but for Python's resource tracker: once started, it serves the whole session."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.append(child)
    return found


def working_in(folder: Path) -> list[psutil.Process]:
    """All processes that work in this folder or below it."""
    found = psutil.process_iter(["cwd", "cmdline"])
    return [process for process in found if process.info["cwd"] and Path(process.info["cwd"]).is_relative_to(folder)]
