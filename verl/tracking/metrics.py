"""Metrics by name. The console and the diagnosis read these:

reward/mean, /min, /max, /std         rewards of the step's responses
critic/score/mean, ...                the same, of the trained responses; critic/rewards/mean, ... after the KL penalty
critic/advantages/mean, ...           advantages of the generated tokens; critic/returns/mean, ... with a critic
reward/groups_without_signal          share of prompts whose responses all got the same reward
response_length/mean, /clip_ratio     generated tokens; share of responses truncated by the length limit
actor/kl, /kl_loss                    KL divergence from the reference, mean over tokens; the same as a term of the loss
actor/distillation_kl                 KL divergence from the teacher, mean over tokens; /distillation_clipfrac: share of
                                      tokens whose KL is beyond distillation.loss_max_clamp
actor/ppo_kl                          KL divergence from the policy before the update
actor/entropy, /pg_clipfrac, /grad_norm, /skipped_steps
train/loss, /lr, /grad_norm, /skipped_steps   supervised fine-tuning; val/loss: its validation
training/rollout_probs_diff_mean      |trainer's - engine's probability| of the sampled tokens
timing_s/gen, /prepare, /update, /sync, /step
perf/throughput                       tokens per second over the whole step
perf/controller_rss_gib               resident memory of the controller; perf/train_worker_rss_gib of a train rank
perf/max_memory_allocated_gib         peak of a train rank's device memory in a step, on accelerators
val/<data source>/<metric>            validation, e.g. val/addition/mean@1
"""

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
