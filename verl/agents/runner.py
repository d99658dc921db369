"""Runs the episodes of one prompt side by side and scores each the moment it ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from verl.agents.deterministic_batcher import DeterministicBatcher
from verl.agents.episode import Episode, Generate, single_turn
from verl.agents.scoring import EpisodeScorer
from verl.rewards.overlong import OverlongPenalty
from verl.types import Failed, Prompt, Sample, SamplingParams

__all__ = ["EpisodeRunner"]


class EpisodeRunner:
    """Turns a prompt into scored samples. Consumes prompts, produces samples; touches nothing else."""

    def __init__(
        self,
        generate: Generate,
        score: EpisodeScorer,
        decode: Callable[[Sequence[int]], str],
        episode: Episode = single_turn,
    ) -> None:
        self._generate, self._score, self._episode = generate, score, episode
        self.decode = decode

    async def run(
        self,
        prompt: Prompt,
        group: int,
        seeds: Sequence[int | None],
        sampling: SamplingParams,
        *,
        greedy_baseline: bool = False,
        overlong: OverlongPenalty | None = None,
        batcher: DeterministicBatcher | None = None,
    ) -> list[Sample]:
        """One sample per seed, in the order of the seeds (None draws freely).

        With `greedy_baseline` one more answer is written beside them, greedily; the others carry its score as their
        `baseline`, and it is not among them. With `overlong` a score is shaped by the length of its answer.
        In a `batcher` each episode asks from a seat of its own.
        """
        draws = [replace(sampling, seed=seed) for seed in seeds]
        if greedy_baseline:
            draws.append(replace(sampling, temperature=0.0, seed=None))
        slots = [nullcontext(self._generate) if batcher is None else batcher.slot() for _ in draws]
        samples = await asyncio.gather(
            *(self._one(prompt, group, draw, overlong, slot) for draw, slot in zip(draws, slots, strict=True))
        )
        if not greedy_baseline:
            return samples
        greedy = samples.pop()
        if greedy.failure is not None:  # nothing to compare them with
            return [replace(sample, failure=sample.failure or greedy.failure) for sample in samples]
        return [replace(sample, baseline=greedy.score) for sample in samples]

    async def _one(
        self,
        prompt: Prompt,
        group: int,
        sampling: SamplingParams,
        overlong: OverlongPenalty | None,
        slot: AbstractContextManager[Generate],
    ) -> Sample:
        with slot as generate:
            transcript = await self._episode(prompt, generate, sampling)
        tokens = transcript.answer()
        outcome = await self._score(prompt, transcript, self.decode(tokens))
        if isinstance(outcome, Failed):
            return replace(transcript.sample(group, math.nan, {}), failure=outcome)
        score, metrics = outcome.score, outcome.metrics
        if overlong is not None:
            penalty = overlong.compute(len(tokens))
            score, metrics = score + penalty, metrics | {"raw_score": score, "overlong_penalty": penalty}
        return transcript.sample(group, score, metrics)
