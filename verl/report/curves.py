"""The curves of the page: which metrics come first, in which groups, and at which steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from verl.tracking.run_folder import StepMetrics, merge_names

MAX_STEPS = 2_000
"""More steps than this are thinned out. Steps with a validation are kept."""

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Reward",
        (
            *("reward/mean", "reward/std", "reward/groups_without_signal", "reward/error_rate", "reward/timeout_rate"),
            *("sampling/dropped_score_mean", "data/prompts_dropped"),
        ),
    ),
    ("Validation", ("val/*/mean@*", "val/*/best@*", "val/*/pass@*", "val/loss", "val/*")),
    (
        "Policy update",
        (
            *("actor/kl", "actor/kl_loss", "actor/reward_kl", "actor/distillation_kl", "actor/ppo_kl"),
            *("actor/entropy", "actor/grad_norm", "actor/pg_loss", "actor/pg_clipfrac", "actor/lr"),
            *("actor/skipped_steps", "critic/advantages/mean", "critic/vf_loss", "critic/explained_variance"),
            *("critic/grad_norm", "train/loss", "train/grad_norm", "train/lr", "train/skipped_steps"),
        ),
    ),
    (
        "Lengths",
        (
            *("response_length/mean", "response_length/max", "response_length/clip_ratio", "prompt_length/mean"),
            *("episode/turns*", "tools/calls*", "episode/truncated"),
        ),
    ),
    ("Time", ("timing_s/step", "timing_s/gen", "timing_s/prepare", "timing_s/update", "timing_s/sync")),
    (
        "Throughput and memory",
        (
            *("perf/throughput", "perf/throughput_per_device", "perf/tokens_per_s/*", "perf/mfu/*"),
            *("perf/max_memory_allocated_gib", "perf/train_worker_rss_gib", "perf/controller_rss_gib"),
        ),
    ),
    (
        "Trainer and engine mismatch",
        (
            *("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max", "training/rollout_probs_corr"),
            *("training/rollout_is_ess", "training/rollout_ess", "training/rollout_rejected", "weights/probe_gap"),
        ),
    ),
    (
        "Staleness",
        (
            *("training/staleness", "training/staleness_mean", "training/versions_in_response_*"),
            *("perf/trainer_idle", "perf/generation_idle"),
        ),
    ),
    ("Faults", ("faults/*",)),
)
"""Title -> names of metrics; `*` is any text. A metric belongs to the first group that names it."""


def group_metrics(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the groups that have metrics, with their names in the order of the patterns."""
    rest = list(names)
    for title, patterns in GROUPS:
        chosen = list(dict.fromkeys(name for pattern in patterns for name in rest if fnmatchcase(name, pattern)))
        if chosen:
            yield title, chosen
        rest = [name for name in rest if name not in chosen]


def list_notable(metrics: Sequence[StepMetrics]) -> list[str]:
    """Return the names of metrics that are not always 0, as counts of problems are; rewards and validations always."""
    return [
        name
        for name in merge_names(metrics)
        if name == "reward/mean" or name.startswith("val/") or any(each.values.get(name) for each in metrics)
    ]


def thin_out(metrics: Sequence[StepMetrics]) -> tuple[list[StepMetrics], int]:
    """Return every n-th step, the steps with a validation and the last one; and n."""
    stride = max(1, math.ceil(len(metrics) / MAX_STEPS))
    return [
        each
        for position, each in enumerate(metrics)
        if position % stride == 0
        or position == len(metrics) - 1
        or any(name.startswith("val/") for name in each.values)
    ], stride


def make_columns(metrics: Sequence[StepMetrics]) -> dict[str, Any]:
    """Return steps, times, and the values of each metric by step: null where there is none."""
    return {
        "steps": [each.step for each in metrics],
        "times": [round(each.time, 1) for each in metrics],
        "values": {name: [to_json(each.values.get(name)) for each in metrics] for name in merge_names(metrics)},
    }


def to_json(value: float | None, digits: int = 6) -> float | str | None:
    """Return a number with few digits; NaN and infinities as strings, which JSON does not have."""
    if value is None:
        return None
    if math.isfinite(value):
        return float(f"{value:.{digits}g}")
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
