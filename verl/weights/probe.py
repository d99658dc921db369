"""The probe of a weight sync: log-probs of fixed sequences, by which an engine with other weights is found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05, "fp8": 0.8}
"""Largest mean |difference| of log-probs that rounding explains, by the coarser dtype of both sides, if the train
engine cannot simulate rounding: about twice what was measured for a real model of 135 million parameters."""

LEAST_TOLERANCES = {"float32": 2e-4, "float16": 2e-3, "bfloat16": 1e-2, "fp8": 0.1}
"""The tolerance of a model that rounding moves even less: kernels also differ in what they compute in float32."""

MARGIN = 3.0
"""Factor between how far rounding moves the log-probs of the trainer, and the tolerance. An engine with the same
weights differs by about 0.7 to 1 times the former (`make show-probe`)."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Fixed sequences of token ids, and how much trainer and engine may differ on them.

    With a `dtype`, the coarser one of both sides, the tolerance follows from how far rounding to it moves the log-probs
    of the trainer.
    """

    sequences: tuple[tuple[int, ...], ...]
    tolerance: float
    dtype: str | None = None

    @classmethod
    def random(
        cls,
        vocabulary: int,
        *,
        tolerance: float,
        dtype: str | None = None,
        count: int = 8,
        length: int = 32,
        seed: int = 0,
    ) -> Probe:
        """Return random sequences, which exercise every layer and many rows of the embedding."""
        random = Random(seed)
        sequences = tuple(tuple(random.randrange(vocabulary) for _ in range(length)) for _ in range(count))
        return cls(sequences, tolerance, dtype)

    def calibrate(self, rounding: float | None) -> Probe:
        """Return the probe for a model whose log-probs are moved by `rounding`; unchanged if that is not known."""
        if self.dtype is None or rounding is None or not math.isfinite(rounding):
            return self
        return replace(self, tolerance=max(LEAST_TOLERANCES[self.dtype], MARGIN * rounding))


def compare_logprobs(
    probe: Probe,
    trainer: Sequence[Sequence[float]],
    engines: Mapping[int, Sequence[Sequence[float]]],
    *,
    version: int,
    previous: Sequence[Sequence[float]] | None = None,
) -> tuple[float, dict[int, str]]:
    """Return the largest mean |difference| within the tolerance, and a message for each engine that exceeds it.

    `trainer[s][t]` and `engines[id][s][t]` are log-probs. `previous`, the trainer's at the version before,
    distinguishes an engine that kept its old weights from one that received wrong ones.
    """
    worst, mismatches = 0.0, {}
    for engine_id, engine in engines.items():
        difference = _distance(trainer, engine)
        if difference <= probe.tolerance:
            worst = max(worst, difference)
            continue
        is_stale = previous is not None and _distance(previous, engine) < difference / 2
        cause = (
            f"it still has version {version - 1}: the update did not reach it"
            if is_stale
            else "its weights are not the trainer's: a tensor was lost, renamed, cast or not repacked"
        )
        mismatches[engine_id] = (
            f"rollout engine {engine_id} does not hold version {version} of the weights: its log-probs of the probe "
            f"differ from the trainer's by {difference:.3g} on average; at most {probe.tolerance:.3g} is allowed; "
            f"{cause}. If only rounding differs, increase actor_rollout_ref.rollout.probe_tolerance."
        )
    return worst, mismatches


def _distance(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    pairs = [(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)
