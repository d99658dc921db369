"""Validation: held-out prompts, answered and scored by the same episodes as training, never trained on."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator

from verl.tracking.diagnosis import explain_all_zero
from verl.trainer.statistics import pass_at_k
from verl.types import Failed, SampleHandle

__all__ = ["Evaluator"]

RIGHT = 0.5
"""A score from which on an answer is right."""


class Evaluator:
    """Answers every held-out prompt `n` times and reports per data source the mean score and, with several answers,
    the unbiased pass@k for powers of two; the mean overall too.

    `answer(row)` returns the samples of one prompt; `sources[row]` names where it came from; `preview(source)` shows
    one of the latest answers in words. `warnings` are those of the last validation; each source is warned of once.
    """

    def __init__(
        self,
        answer: Callable[[int], Awaitable[list[SampleHandle]]],
        sources: list[str],
        *,
        batch: int | None = None,
        preview: Callable[[str], Awaitable[str]],
    ) -> None:
        self._answer, self._sources, self._batch = answer, sources, batch or len(sources)
        self._exhibit, self._warned = preview, set[str]()
        self.warnings: list[str] = []

    async def evaluate(self) -> dict[str, float]:
        start = time.perf_counter()
        scores: dict[str, list[float]] = defaultdict(list)
        by_prompt: dict[str, list[list[float]]] = defaultdict(list)
        cut: Counter[str] = Counter()
        failures: list[Failed] = []
        count = 1
        for first in range(0, len(self._sources), self._batch):
            rows = range(first, min(first + self._batch, len(self._sources)))
            for row, samples in zip(rows, await asyncio.gather(*map(self._answer, rows)), strict=True):
                found = [sample.score for sample in samples if sample.failure is None]
                scores[self._sources[row]] += found
                by_prompt[self._sources[row]].append(found)
                failures += [sample.failure for sample in samples if sample.failure is not None]
                cut[self._sources[row]] += sum(sample.finish_reason == "length" for sample in samples)
                count = len(samples)
        means = {f"val/{source}/mean@{count}": _mean(found) for source, found in sorted(scores.items())}
        for source, prompts in sorted(by_prompt.items()):
            means |= {f"val/{source}/pass@{k}": _mean(found) for k, found in _passes(prompts, count)}
        self.warnings = [await self._warning(source, found, cut[source]) for source, found in self._new_zeros(scores)]
        if len(scores) > 1 and "all" not in scores:
            everything = [score for found in scores.values() for score in found]
            means[f"val/all/mean@{count}"] = _mean(everything)
        if failures:  # left out of the means, and said
            means["val/unscored"] = float(len(failures))
            self.warnings.append(f"validation: {len(failures)} answers could not be scored; {failures[0].message}")
        return means | {"timing_s/validation": time.perf_counter() - start}

    def _new_zeros(self, scores: dict[str, list[float]]) -> list[tuple[str, list[float]]]:
        found = [(source, all_of) for source, all_of in scores.items() if all_of and not any(all_of)]
        return [(source, all_of) for source, all_of in found if source not in self._warned]

    async def _warning(self, source: str, scores: list[float], cut: int) -> str:
        self._warned.add(source)
        return explain_all_zero(source, len(scores), cut, await self._exhibit(source))


def _passes(prompts: list[list[float]], most: int) -> Iterator[tuple[int, list[float]]]:
    """(k, pass@k of every prompt with so many scored answers)."""
    for k in (2**power for power in range(1, most.bit_length())):
        enough = [found for found in prompts if len(found) >= k]
        if enough:
            yield k, [pass_at_k(len(found), sum(score >= RIGHT for score in found), k) for found in enough]


def _mean(scores: list[float]) -> float:
    return sum(scores) / len(scores) if scores else math.nan
