"""Garbage collection of a controller that waits for thousands of calls at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (100_000, 50, 100)  # Python's own are (700, 10, 10)


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Leave out what exists already, and collect the rest less often, during the block.

    Pending calls make Python search all objects several times per step. Those of imported modules, such as torch,
    are hundreds of thousands: 0.2 s each time, in which nothing else runs.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
