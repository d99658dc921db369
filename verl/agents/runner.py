"""Runs the episodes of one prompt side by side and scores each the moment it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from verl.agents.episode import Episode, Generate, single_turn
from verl.types import Prompt, Sample, SamplingParams

__all__ = ["EpisodeRunner", "Score"]

Score = Callable[[str, str, Any, dict[str, Any]], Awaitable[tuple[float, dict[str, float]]]]
"""(data_source, solution_str, ground_truth, extra_info) -> (score, further numbers)."""


class EpisodeRunner:
    """Turns a prompt into scored samples. Consumes prompts, produces samples; touches nothing else."""

    def __init__(
        self,
        generate: Generate,
        score: Score,
        decode: Callable[[Sequence[int]], str],
        episode: Episode = single_turn,
    ) -> None:
        self._generate, self._score, self._decode, self._episode = generate, score, decode, episode

    async def run(
        self, prompt: Prompt, group: int, seeds: Sequence[int | None], sampling: SamplingParams
    ) -> list[Sample]:
        """One sample per seed, in the order of the seeds (None draws freely)."""
        return await asyncio.gather(*(self._one(prompt, group, replace(sampling, seed=seed)) for seed in seeds))

    async def _one(self, prompt: Prompt, group: int, sampling: SamplingParams) -> Sample:
        transcript = await self._episode(prompt, self._generate, sampling)
        answer = self._decode(transcript.answer())
        score, metrics = await self._score(prompt.data_source, answer, prompt.ground_truth, prompt.extra_info)
        return transcript.sample(group, score, metrics)
