"""Runs the episodes of a prompt concurrently and scores each as soon as it ends."""

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


class EpisodeRunner:
    """Turns prompts into scored samples."""

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
        """Return one sample per seed (None: not seeded), in their order.

        With `greedy_baseline` also a greedy response is generated; its score becomes the `baseline` of the samples.
        `overlong` penalizes long responses. With a `batcher` each episode takes a slot.
        """
        samplings = [replace(sampling, seed=seed) for seed in seeds]
        if greedy_baseline:
            samplings.append(replace(sampling, temperature=0.0, seed=None))
        slots = [nullcontext(self._generate) if batcher is None else batcher.slot() for _ in samplings]
        samples = await asyncio.gather(
            *(self._run_one(prompt, group, each, overlong, slot) for each, slot in zip(samplings, slots, strict=True))
        )
        if not greedy_baseline:
            return samples
        greedy = samples.pop()
        if greedy.failure is not None:  # no baseline
            return [replace(sample, failure=sample.failure or greedy.failure) for sample in samples]
        return [replace(sample, baseline=greedy.score) for sample in samples]

    async def _run_one(
        self,
        prompt: Prompt,
        group: int,
        sampling: SamplingParams,
        overlong: OverlongPenalty | None,
        slot: AbstractContextManager[Generate],
    ) -> Sample:
        with slot as generate:
            transcript = await self._episode(prompt, generate, sampling)
        tokens = transcript.get_response()
        result = await self._score(prompt, transcript, self.decode(tokens))
        if isinstance(result, Failed):
            return replace(transcript.to_sample(group, math.nan, {}), failure=result)
        score, metrics = result.score, result.metrics
        if overlong is not None:
            penalty = overlong.compute(len(tokens))
            score, metrics = score + penalty, metrics | {"raw_score": score, "overlong_penalty": penalty}
        return transcript.to_sample(group, score, metrics)
