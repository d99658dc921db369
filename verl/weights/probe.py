"""Verification of a weight sync: trainer and engine must give the same log-probs for the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from verl.errors import WeightSyncError

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}
"""Largest mean |difference| of log-probs that rounding explains, by the coarser dtype of both sides."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Fixed sequences of token ids, and how much trainer and engine may differ on them."""

    sequences: tuple[tuple[int, ...], ...]
    tolerance: float

    @classmethod
    def random(cls, vocabulary: int, *, tolerance: float, count: int = 2, length: int = 24, seed: int = 0) -> Probe:
        """Return random sequences, which exercise every layer and many rows of the embedding."""
        random = Random(seed)
        return cls(tuple(tuple(random.randrange(vocabulary) for _ in range(length)) for _ in range(count)), tolerance)


def compare(
    probe: Probe,
    trainer: Sequence[Sequence[float]],
    engines: Mapping[int, Sequence[Sequence[float]]],
    *,
    version: int,
    previous: Sequence[Sequence[float]] | None = None,
) -> float:
    """Return the largest mean |difference| over the engines; `WeightSyncError` if it exceeds the tolerance.

    `trainer[s][t]` and `engines[index][s][t]` are log-probs. `previous`, the trainer's at the version before,
    distinguishes an engine that kept its old weights from one that received wrong ones.
    """
    worst = 0.0
    for index, engine in engines.items():
        difference = _distance(trainer, engine)
        worst = max(worst, difference)
        if difference <= probe.tolerance:
            continue
        is_stale = previous is not None and _distance(previous, engine) < difference / 2
        cause = (
            f"it still has version {version - 1}: the update did not reach it"
            if is_stale
            else "its weights are not the trainer's: a tensor was lost, renamed, cast or not repacked"
        )
        raise WeightSyncError(
            f"rollout engine {index} does not hold version {version} of the weights: its log-probs of the probe differ "
            f"from the trainer's by {difference:.3g} on average; at most {probe.tolerance:.3g} is allowed; {cause}. "
            "If only rounding differs, increase actor_rollout_ref.rollout.probe_tolerance."
        )
    return worst


def _distance(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    pairs = [(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)
