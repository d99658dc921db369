"""What metrics are called in Prometheus: `reward/mean` is `verl_reward_mean`, in base units."""

from __future__ import annotations

import re
from typing import NamedTuple

_LABELED = {
    "timing_s/": ("verl_timing_seconds", "phase"),
    "perf/tokens_per_s/": ("verl_perf_tokens_per_second", "phase"),
    "perf/mfu/": ("verl_perf_mfu", "phase"),
}
"""Beginning of a metric -> its name, and the label that the rest becomes."""

_UNITS = {"_gib": ("_bytes", 2.0**30), "_s": ("_seconds", 1.0)}

COUNTERS = {
    "plan/tokens": ("verl_tokens", "Tokens of prompts and responses that were trained."),
    "plan/generated_tokens": ("verl_generated_tokens", "Generated tokens that were trained."),
}
"""Metric of a step -> the counter that adds it up, and what it counts."""


class Sample(NamedTuple):
    """The name of a metric in Prometheus, its labels, and the factor that converts its value."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()
    factor: float = 1.0


def to_sample(metric: str) -> Sample:
    """Return the name of a metric. Parts that vary are labels: `timing_s/gen` is `verl_timing_seconds{phase="gen"}`.

    `val/<data source>/<metric>` is `verl_val{data_source=..., metric=...}`.
    """
    for start, (name, label) in _LABELED.items():
        if metric.startswith(start):
            return Sample(name, ((label, metric.removeprefix(start)),))
    top, _, rest = metric.partition("/")
    source, slash, last = rest.rpartition("/")
    if top == "val" and slash:
        return Sample("verl_val", (("data_source", source), ("metric", last)))
    for suffix, (unit, factor) in _UNITS.items():
        if metric.endswith(suffix):
            return Sample(_plain(metric.removesuffix(suffix)) + unit, factor=factor)
    return Sample(_plain(metric))


def _plain(metric: str) -> str:
    return "verl_" + re.sub(r"[^a-zA-Z0-9]+", "_", metric).strip("_")
