"""Numbers of each token: log-probs, advantages, entropies, versions. Whole groups, as many as fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import pyarrow as pa

from verl.report.sample_texts import SampleSet, iter_groups
from verl.tracking.run_folder import RunFolder

COLUMNS = ("token_ids", "pieces", "mask", "versions", "rollout_logprobs", "logprobs", "advantages", "entropies")
LOGPROB_STEPS, GAP_STEPS, ADVANTAGE_STEPS = 100, 1_000, 1_000
"""Log-probs and entropies are rounded to 1/100, differences of log-probs and advantages to 1/1000."""


def choose_groups(data: SampleSet, budget: int) -> dict[int, list[int]]:
    """Return file -> positions of the samples whose tokens are stored.

    The first group of every file comes first, then the second ones, and so on, until the tokens exceed the budget.
    Newer files come before older ones.
    """
    by_file: dict[int, list[list[int]]] = {}
    for group in iter_groups(data.samples):
        by_file.setdefault(data.samples[group[0]].file, []).append(group)
    chosen: dict[int, list[int]] = {}
    for groups in zip_longest(*(by_file[file] for file in sorted(by_file, reverse=True))):
        for group in groups:
            tokens = sum(data.samples[position].generated for position in group or ())
            if not group or not tokens or tokens > budget:
                continue
            budget -= tokens
            chosen.setdefault(data.samples[group[0]].file, []).extend(group)
    return chosen


def read_tokens(folder: RunFolder, data: SampleSet, file: int, positions: Sequence[int]) -> dict[int, Any]:
    """Return position -> the tokens of a sample after its prompt, for samples of one file."""
    rows = [data.samples[position].row for position in positions]
    table = folder.read_samples(data.files[file], COLUMNS).take(pa.array(rows))
    return {
        position: tokens
        for position, row in zip(positions, table.to_pylist(), strict=True)
        if (tokens := _make_tokens(row)) is not None
    }


def _make_tokens(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the values of the tokens from the first generated one on; None if nothing was generated."""
    mask = row.get("mask") or []
    if True not in mask:
        return None
    start = mask.index(True)
    values = {name: row[name][start:] if row.get(name) else None for name in COLUMNS}
    rollout, logprobs = (_to_array(values[name]) for name in ("rollout_logprobs", "logprobs"))
    gaps = None if rollout is None or logprobs is None else logprobs - rollout
    return {
        "ids": values["token_ids"],
        "pieces": values["pieces"],
        "generated": [int(each) for each in mask[start:]],
        "versions": values["versions"],
        "rollout_logprobs": _round(rollout, LOGPROB_STEPS),
        "gaps": _round(gaps, GAP_STEPS),
        "advantages": _round(_to_array(values["advantages"]), ADVANTAGE_STEPS),
        "entropies": _round(_to_array(values["entropies"]), LOGPROB_STEPS),
    }


def _to_array(values: Sequence[float | None] | None) -> np.ndarray | None:
    return None if values is None else np.array(values, np.float64)


def _round(values: np.ndarray | None, steps: int) -> list[int | None] | None:
    """Return multiples of 1 / `steps`; None for what is not finite."""
    if values is None:
        return None
    finite = np.isfinite(values)
    rounded = np.where(finite, np.round(values * steps), 0).astype(np.int64).tolist()
    return [number if is_finite else None for number, is_finite in zip(rounded, finite.tolist(), strict=True)]
