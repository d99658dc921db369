"""Validation: prompts that are not trained on, with the same episodes and rewards as training."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from itertools import chain

from verl.tracking.diagnosis import explain_all_zero
from verl.trainer.statistics import pass_at_k
from verl.types import Failed, SampleHandle

PASS_SCORE = 0.5
"""The lowest score of a correct response."""


class Evaluator:
    """Samples responses to every validation prompt and reports, by data source and overall, the mean score; with
    several responses to a prompt also the unbiased pass@k for powers of two.

    `run_prompt(row)` returns the samples of one prompt; `sources[row]` is its data source; `preview(source)` describes
    one of the latest responses. `warnings` are those of the last validation; there is one per source in a run.
    """

    def __init__(
        self,
        run_prompt: Callable[[int], Awaitable[list[SampleHandle]]],
        sources: list[str],
        *,
        batch: int | None = None,
        preview: Callable[[str], Awaitable[str]],
    ) -> None:
        self._run_prompt, self._sources, self._batch = run_prompt, sources, batch or len(sources)
        self._preview, self._warned = preview, set[str]()
        self.warnings: list[str] = []

    async def evaluate(self) -> dict[str, float]:
        start = time.perf_counter()
        by_prompt: dict[str, list[list[float]]] = defaultdict(list)
        truncated: Counter[str] = Counter()
        failures: list[Failed] = []
        count = 1
        for first in range(0, len(self._sources), self._batch):
            rows = range(first, min(first + self._batch, len(self._sources)))
            for row, samples in zip(rows, await asyncio.gather(*map(self._run_prompt, rows)), strict=True):
                source, count = self._sources[row], len(samples)
                by_prompt[source].append([sample.score for sample in samples if sample.failure is None])
                failures += [sample.failure for sample in samples if sample.failure is not None]
                truncated[source] += sum(sample.finish_reason == "length" for sample in samples)
        scores = {source: list(chain.from_iterable(prompts)) for source, prompts in by_prompt.items()}
        metrics = {f"val/{source}/mean@{count}": _mean(scores[source]) for source in sorted(scores)}
        for source, prompts in sorted(by_prompt.items()):
            metrics |= {f"val/{source}/pass@{k}": _mean(passes) for k, passes in _pass_rates(prompts, count)}
        if len(scores) > 1 and "all" not in scores:
            metrics[f"val/all/mean@{count}"] = _mean(list(chain.from_iterable(scores.values())))
        self.warnings = [await self._warn(source, scores[source], truncated[source]) for source in self._zeros(scores)]
        if failures:
            metrics["val/unscored"] = float(len(failures))
            self.warnings.append(f"validation: {len(failures)} responses could not be scored; {failures[0].message}")
        return metrics | {"timing_s/validation": time.perf_counter() - start}

    def _zeros(self, scores: dict[str, list[float]]) -> list[str]:
        """Return the sources that have only scores of 0 and no warning yet."""
        zeros = (source for source, values in scores.items() if values and not any(values))
        return [source for source in zeros if source not in self._warned]

    async def _warn(self, source: str, scores: list[float], truncated: int) -> str:
        self._warned.add(source)
        return explain_all_zero(source, len(scores), truncated, await self._preview(source))


def _pass_rates(prompts: list[list[float]], max_count: int) -> Iterator[tuple[int, list[float]]]:
    """Yield k and the pass@k of every prompt with at least k scored responses."""
    for k in (2**power for power in range(1, max_count.bit_length())):
        if enough := [scores for scores in prompts if len(scores) >= k]:
            yield k, [pass_at_k(len(scores), sum(score >= PASS_SCORE for score in scores), k) for scores in enough]


def _mean(scores: list[float]) -> float:
    return sum(scores) / len(scores) if scores else math.nan
