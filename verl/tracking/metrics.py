"""Metrics by name; docs/tracking.md describes those that the console and `verl.diagnosis` read."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

import psutil


class Metrics(dict[str, float]):
    """A dict of floats that can be merged."""

    @classmethod
    def merge(cls, *parts: Mapping[str, float]) -> Metrics:
        """Return all parts as one. Times with the same name are added; any other duplicate raises `ValueError`."""
        merged = cls()
        for part in parts:
            for name, value in part.items():
                if name.startswith("timing_s/"):
                    merged[name] = merged.get(name, 0.0) + float(value)
                elif name in merged:
                    raise ValueError(f"metric {name!r}: reported twice, {merged[name]!r} and {value!r}; rename one")
                else:
                    merged[name] = float(value)
        return merged


@contextmanager
def timer(metrics: MutableMapping[str, float], name: str) -> Iterator[None]:
    """Add the seconds spent in the block to `timing_s/<name>`, even if it raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        key = f"timing_s/{name}"
        metrics[key] = metrics.get(key, 0.0) + time.perf_counter() - start


def resident_gib() -> float:
    """Return the resident memory of this process in GiB."""
    return psutil.Process().memory_info().rss / 2**30
