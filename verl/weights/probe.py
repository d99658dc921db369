"""Proof that weights arrived: the trainer and an engine must give the same log-probs to the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from verl.errors import WeightSyncError

__all__ = ["Probe", "compare"]

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}
"""Largest mean |difference| of log-probs that rounding explains, by the coarser dtype of the two sides."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A few fixed sequences of token ids, and how far trainer and engine may differ on them."""

    sequences: tuple[tuple[int, ...], ...]
    tolerance: float

    @classmethod
    def random(cls, vocabulary: int, *, tolerance: float, count: int = 2, length: int = 24, seed: int = 0) -> Probe:
        """Random tokens touch every layer and, over the sequences, many rows of the embedding."""
        draw = Random(seed)
        return cls(tuple(tuple(draw.randrange(vocabulary) for _ in range(length)) for _ in range(count)), tolerance)


def compare(
    probe: Probe,
    trainer: Sequence[Sequence[float]],
    engines: Mapping[int, Sequence[Sequence[float]]],
    *,
    version: int,
    before: Sequence[Sequence[float]] | None = None,
) -> float:
    """The largest mean |difference| over the engines; raises `WeightSyncError` when it exceeds the tolerance.

    `trainer[s][t]` and `engines[number][s][t]` are log-probs; `before` are the trainer's at the version before this
    one: they tell an engine that kept its old weights from one that received wrong ones.
    """
    worst = 0.0
    for number, engine in engines.items():
        difference = _distance(trainer, engine)
        worst = max(worst, difference)
        if difference <= probe.tolerance:
            continue
        stale = before is not None and _distance(before, engine) < difference / 2
        cause = (
            f"it still answers as version {version - 1} did: the update did not reach it"
            if stale
            else "its weights are not the trainer's: a tensor was lost, renamed, cast or not repacked on the way"
        )
        raise WeightSyncError(
            f"rollout engine {number} does not hold version {version} of the weights: on the probe its log-probs are "
            f"{difference:.3g} from the trainer's on average, and at most {probe.tolerance:.3g} is allowed; {cause}. "
            "If both sides are right and only rounding differs, raise actor_rollout_ref.rollout.probe_tolerance."
        )
    return worst


def _distance(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    pairs = [(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)
