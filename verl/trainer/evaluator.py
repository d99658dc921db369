"""Validation: prompts that are not trained on, with the same episodes and rewards as training."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from itertools import chain

from verl.rewards.score_statistics import majority_score, pass_counts, pass_rates
from verl.types import Failed, SampleHandle, one_per_episode

PASS_SCORE = 0.5
"""The lowest score of a correct response."""


class Evaluator:
    """Samples responses to every validation prompt and reports, by data source and overall, the mean score; with n
    responses to a prompt also the unbiased pass@k for powers of two and n, and maj@n, the score of the majority.

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

    async def evaluate(self, record: Callable[[list[SampleHandle]], None] | None = None) -> dict[str, float]:
        """Return the metrics of a validation. `record` is called with its samples."""
        start = time.perf_counter()
        recorded: list[SampleHandle] = []
        by_prompt: dict[str, list[list[SampleHandle]]] = defaultdict(list)
        truncated: Counter[str] = Counter()
        failures: list[Failed] = []
        count = 1
        for first in range(0, len(self._sources), self._batch):
            rows = range(first, min(first + self._batch, len(self._sources)))
            groups = await asyncio.gather(*map(self._run_prompt, rows))
            for row, group in zip(rows, groups, strict=True):
                recorded += group if record is not None else []
                samples = one_per_episode(group)
                source, count = self._sources[row], len(samples)
                by_prompt[source].append([sample for sample in samples if sample.failure is None])
                failures += [sample.failure for sample in samples if sample.failure is not None]
                truncated[source] += sum(sample.finish_reason == "length" for sample in samples)
        if record is not None:
            record(recorded)
        scores = {
            source: [sample.score for sample in chain.from_iterable(prompts)] for source, prompts in by_prompt.items()
        }
        metrics = {f"val/{source}/mean@{count}": _mean(scores[source]) for source in sorted(scores)}
        if count > 1:
            for source, prompts in sorted(by_prompt.items()):
                metrics |= {f"val/{source}/{name}": value for name, value in _compare(prompts, count).items()}
        if len(scores) > 1 and "all" not in scores:
            metrics[f"val/all/mean@{count}"] = _mean(list(chain.from_iterable(scores.values())))
        self.warnings = []
        for source, values in scores.items():
            if values and not any(values) and source not in self._warned:
                self._warned.add(source)
                preview = await self._preview(source)
                self.warnings.append(_explain_all_zero(source, len(values), truncated[source], preview))
        if failures:
            metrics["val/unscored"] = float(len(failures))
            self.warnings.append(f"validation: {len(failures)} responses could not be scored; {failures[0].message}")
        return metrics | {"timing_s/validation": time.perf_counter() - start}


def _compare(prompts: list[list[SampleHandle]], count: int) -> dict[str, float]:
    """Return pass@k and maj@n of prompts with `count` responses each, of which some may not be scored."""
    scores = [[sample.score for sample in samples] for samples in prompts]
    rates = {f"pass@{k}": pass_rates(scores, k, PASS_SCORE) for k in pass_counts(count) if k > 1}
    rates[f"maj@{count}"] = [
        majority_score([sample.final_answer for sample in samples], values)
        for samples, values in zip(prompts, scores, strict=True)
        if samples
    ]
    return {name: _mean(values) for name, values in rates.items() if values}


def _explain_all_zero(source: str, responses: int, truncated: int, preview: str) -> str:
    """Return advice about a validation in which all responses to a data source got 0."""
    cut = f"{truncated} of them were truncated: try a larger data.max_response_length. " if truncated else ""
    shown = f"{preview}. " if preview else ""
    return (
        f"validation: all {responses} responses to data source {source!r} got 0. {shown}{cut}"
        "Check that the prompts ask for the format that the scorer expects, that validation rows look like training "
        "rows (`verl data` shows both), and that validation is greedy "
        "(actor_rollout_ref.rollout.val_kwargs.temperature=0)"
    )


def _mean(scores: list[float]) -> float:
    return sum(scores) / len(scores) if scores else math.nan
