"""Numbers with names. The names that the console and the diagnosis read, so that all write them alike:

reward/mean, /min, /max, /std         scores of the step's answers
reward/groups_without_signal          share of prompts whose answers all got the same score
response_length/mean, /clip_ratio     generated tokens; share of answers that the length limit cut
actor/kl, /kl_loss                    divergence from the reference, mean over tokens; the same as a term of the loss
actor/ppo_kl                          divergence from the policy that the update starts from
actor/entropy, /pg_clipfrac, /grad_norm, /skipped_steps
train/loss, /lr, /grad_norm, /skipped_steps   of supervised training; val/loss: its validation
training/rollout_probs_diff_mean      |trainer's - engine's probability| of the sampled tokens
timing_s/gen, /prep, /update, /sync, /step
perf/throughput                       tokens a second, over the whole step
perf/controller_rss_gib               resident memory of the controller; perf/train_worker_rss_gib of a train rank
val/<data source>/<metric>            validation, e.g. val/addition/mean@1
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

import psutil

__all__ = ["Metrics", "resident_gib", "timer"]


class Metrics(dict[str, float]):
    """A dict of floats that knows how to take in others.

    >>> Metrics.merge({"reward/mean": 0.5}, {"timing_s/gen": 1.0}, {"timing_s/gen": 0.5})
    {'reward/mean': 0.5, 'timing_s/gen': 1.5}
    """

    @classmethod
    def merge(cls, *parts: Mapping[str, float]) -> Metrics:
        """All parts in one. Times under one name add up; any other name given twice is our mistake, and raises."""
        merged = cls()
        for part in parts:
            for name, value in part.items():
                if name.startswith("timing_s/"):
                    merged[name] = merged.get(name, 0.0) + float(value)
                elif name in merged:
                    raise ValueError(f"metric {name!r}: is given twice, {merged[name]!r} and {value!r}; rename one")
                else:
                    merged[name] = float(value)
        return merged


@contextmanager
def timer(metrics: MutableMapping[str, float], name: str) -> Iterator[None]:
    """Adds the seconds spent inside to `timing_s/<name>`, also when the inside raises.

    >>> with timer(metrics, "gen"):
    ...     groups = await buffer.take(64)
    """
    start = time.perf_counter()
    try:
        yield
    finally:
        key = f"timing_s/{name}"
        metrics[key] = metrics.get(key, 0.0) + time.perf_counter() - start


def resident_gib() -> float:
    """Resident memory of this process in GiB."""
    return psutil.Process().memory_info().rss / 2**30
