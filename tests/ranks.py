"""Ranks in separate processes that never outlive their parent."""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from verl.cluster.actors import free_port

__all__ = ["free_port", "run_ranks"]


def run_ranks(main: Callable[..., None], world: int, *args: Any, deadline_s: float) -> None:
    """Run `main(rank, *args)` in `world` processes. None of them is left when this returns or raises."""
    context = mp.spawn(_rank, (main, *args), world, join=False, daemon=True)
    end = time.monotonic() + deadline_s
    try:
        while not context.join(timeout=max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                raise TimeoutError(f"{main.__name__} on {world} ranks did not end within {deadline_s:g} s")
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def _rank(rank: int, main: Callable[..., None], *args: Any) -> None:
    # torch sends SIGINT when the parent dies; as an exception it would wait for the end of a collective.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(rank, *args)
    # A normal exit may abort: gloo threads outlive their group (pytorch issue 190489).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
