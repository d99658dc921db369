"""How fast each train rank computes by itself: in a step all ranks take the same time, that of the slowest one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median_low

PROBE_S = "perf/compute_probe_s"
_REPEATS = 3


def time_matrix_product(device: str) -> float:
    """Return the seconds of a small matrix product on the device of this rank, the shortest of three."""
    import torch

    size = 256 if device == "cpu" else 2048
    matrix = torch.ones(size, size, device=device)

    def run() -> float:
        start = time.perf_counter()
        matrix @ matrix
        if device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - start

    run()  # libraries are loaded, and pending work of the device ends
    return min(run() for _ in range(_REPEATS))


def compare_ranks(seconds: Sequence[float]) -> dict[str, float]:
    """Return which rank is the slowest, and its time relative to the median rank; nothing for a single rank."""
    if len(seconds) < 2:
        return {}
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return {
        "perf/slowest_rank": float(slowest),
        "perf/slowest_rank_slowdown": seconds[slowest] / max(median_low(seconds), 1e-9),
    }


def compare_replies(replies: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return what `compare_ranks` returns, from the metrics of all ranks."""
    return compare_ranks([reply[PROBE_S] for reply in replies if PROBE_S in reply])
