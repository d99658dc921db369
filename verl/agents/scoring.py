"""Scorers of episodes: a reward function, a reward model, or their weighted sum. A failure is never a 0."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from verl.agents.episode import Transcript
from verl.rewards.models.interface import SETTING, ScoringFailure
from verl.rewards.models.tokenization import EncodeConversation
from verl.rewards.result import RewardInput, make_failure
from verl.types import Failed, Prompt, Scored

EpisodeScorer = Callable[[Prompt, Transcript, str], Awaitable[Scored | Failed]]
"""(prompt, transcript, response as text) -> its score, or why there is none."""


def score_by_function(score: Callable[[str, str, Any, dict[str, Any]], Awaitable[Scored | Failed]]) -> EpisodeScorer:
    """Return a scorer that calls a reward function; a raw prompt is passed as `raw_prompt` in `extra_info`."""

    async def score_episode(prompt: Prompt, transcript: Transcript, response: str) -> Scored | Failed:
        extra = prompt.extra_info if prompt.raw is None else {**prompt.extra_info, "raw_prompt": prompt.raw}
        return await score(prompt.data_source, response, prompt.ground_truth, extra)

    return score_episode


def score_by_model(
    encode: EncodeConversation, score: Callable[[Sequence[int]], Awaitable[float | ScoringFailure]]
) -> EpisodeScorer:
    """Return a scorer that passes the whole conversation to a reward model."""

    async def score_episode(prompt: Prompt, transcript: Transcript, response: str) -> Scored | Failed:
        graded = RewardInput(prompt.data_source, response, prompt.ground_truth)
        try:
            tokens = encode(prompt, transcript.tokens, response)
        except Exception as error:  # noqa: BLE001 - a chat template is code of the model's author
            message = f"its chat template rejects the conversation: {error}"
            return make_failure("error", SETTING, message, graded, "Fix the template, or the prompts that it rejects.")
        result = await score(tokens)
        if isinstance(result, ScoringFailure):
            return make_failure(result.kind, SETTING, result.message, graded, result.fix)
        return Scored(result)

    return score_episode


def weighted_sum(function: EpisodeScorer, model: EpisodeScorer, weight: float) -> EpisodeScorer:
    """Return a scorer for function + weight * model, with both scores as metrics."""

    async def score_episode(*episode: Any) -> Scored | Failed:
        first, second = await asyncio.gather(function(*episode), model(*episode))
        if isinstance(first, Failed):
            return first
        if isinstance(second, Failed):
            return second
        metrics = {**first.metrics, "function_score": first.score, "model_score": second.score}
        return Scored(first.score + weight * second.score, metrics)

    return score_episode
