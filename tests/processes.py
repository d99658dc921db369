"""Which processes the tests have started."""

from __future__ import annotations

import contextlib

import psutil

__all__ = ["children"]


def children() -> list[psutil.Process]:
    """All that run below this one, but for Python's resource tracker: once started, it serves the whole session."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.append(child)
    return found
