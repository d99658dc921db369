"""Who scores an episode: a function, a reward model, or both added up. A failure is never a 0."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from verl.agents.episode import Transcript
from verl.rewards.models.interface import SETTING, ScoringFailure
from verl.rewards.models.tokenization import EncodeConversation
from verl.rewards.result import RewardInput, make_failure
from verl.types import Failed, Prompt, Scored

__all__ = ["EpisodeScorer", "score_by_function", "score_by_model", "weighted_sum"]

EpisodeScorer = Callable[[Prompt, Transcript, str], Awaitable[Scored | Failed]]
"""(prompt, what was said, text of the answer) -> what became of it."""


def score_by_function(score: Callable[[str, str, Any, dict[str, Any]], Awaitable[Scored | Failed]]) -> EpisodeScorer:
    """A reward function, told what it is promised; a prompt that was kept is `raw_prompt` in its `extra_info`."""

    async def scored(prompt: Prompt, transcript: Transcript, answer: str) -> Scored | Failed:
        extra = prompt.extra_info if prompt.raw is None else {**prompt.extra_info, "raw_prompt": prompt.raw}
        return await score(prompt.data_source, answer, prompt.ground_truth, extra)

    return scored


def score_by_model(
    read: EncodeConversation, score: Callable[[Sequence[int]], Awaitable[float | ScoringFailure]]
) -> EpisodeScorer:
    """A reward model that reads the whole conversation."""

    async def scored(prompt: Prompt, transcript: Transcript, answer: str) -> Scored | Failed:
        about = RewardInput(prompt.data_source, answer, prompt.ground_truth)
        try:
            tokens = read(prompt, transcript.tokens, answer)
        except Exception as error:  # noqa: BLE001 - a chat template is a program of the model's author
            what = f"its chat template refuses the conversation: {error}"
            return make_failure(
                "error", SETTING, what, about, "mend the template, or the prompts that it does not take"
            )
        found = await score(tokens)
        if isinstance(found, ScoringFailure):
            return make_failure(found.kind, SETTING, found.message, about, found.fix)
        return Scored(found)

    return scored


def weighted_sum(function: EpisodeScorer, model: EpisodeScorer, weight: float) -> EpisodeScorer:
    """Function + weight * model, asked at the same time; both are metrics."""

    async def scored(prompt: Prompt, transcript: Transcript, answer: str) -> Scored | Failed:
        first, second = await asyncio.gather(function(prompt, transcript, answer), model(prompt, transcript, answer))
        if isinstance(first, Failed):
            return first
        if isinstance(second, Failed):
            return second
        metrics = {**first.metrics, "function_score": first.score, "model_score": second.score}
        return Scored(first.score + weight * second.score, metrics)

    return scored
