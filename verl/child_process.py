"""Processes that end with their parent, parents that adopt orphans, and workers that SIGTERM does not reach."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing import resource_tracker

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies, whatever this process is doing.

    The kernel watches the thread that has started this process, not the whole parent.

    Args:
        parent: The process id of the parent, if it may have died before this call.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def keep_sigterm_blocked() -> None:
    """Keep SIGTERM blocked in this process and its children if it is, as for Ray's processes in a Slurm job.

    Python's resource tracker, which `multiprocessing` starts, unblocks it in the process that starts it; so it is
    started here, with the signal mask put back.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if signal.SIGTERM in mask:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
