"""Episodes: how they are scored, and the runner that turns a prompt into scored samples."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from verl.agents.deterministic_batcher import DeterministicBatcher, Generate
from verl.agents.transcript import Transcript
from verl.errors import ConfigError
from verl.rewards.models.interface import SETTING, ScoringFailure
from verl.rewards.models.tokenization import EncodeConversation
from verl.rewards.result import RewardInput, make_failure
from verl.rewards.settings import OverlongPenalty
from verl.types import Completion, Failed, Prompt, Sample, SamplingParams, Scored

Episode = Callable[[Prompt, Generate, SamplingParams], Awaitable[Transcript]]


async def single_turn(prompt: Prompt, generate: Generate, sampling: SamplingParams) -> Transcript:
    """Generate one response to the prompt."""
    transcript = Transcript()
    transcript.add(prompt.token_ids, await generate(prompt.token_ids, sampling))
    return transcript


EpisodeScorer = Callable[[Prompt, Transcript, str], Awaitable[Scored | Failed]]
"""(prompt, transcript, response as text) -> its score, or why there is none."""


def score_by_function(score: Callable[[str, str, Any, dict[str, Any]], Awaitable[Scored | Failed]]) -> EpisodeScorer:
    """Return a scorer that calls a reward function.

    `extra_info` also has a raw prompt as `raw_prompt`, and the conversation of several turns as `messages`.
    """

    async def score_episode(prompt: Prompt, transcript: Transcript, response: str) -> Scored | Failed:
        more = {"raw_prompt": prompt.raw, "messages": transcript.messages}
        extra = {**prompt.extra_info, **{name: value for name, value in more.items() if value is not None}}
        return await score(prompt.data_source, response, prompt.ground_truth, extra)

    return score_episode


def score_by_model(
    encode: EncodeConversation, score: Callable[[Sequence[int]], Awaitable[float | ScoringFailure]]
) -> EpisodeScorer:
    """Return a scorer that passes the whole conversation to a reward model."""

    async def score_episode(prompt: Prompt, transcript: Transcript, response: str) -> Scored | Failed:
        graded = RewardInput(prompt.data_source, response, prompt.ground_truth)
        try:
            turns = [(turn.context, turn.completion.token_ids) for turn in transcript.last.path()]
            tokens = encode(prompt, turns, response)
        except Exception as error:  # noqa: BLE001 - a chat template is code of the model's author
            message = f"its chat template rejects the conversation: {error}"
            return make_failure("error", SETTING, message, graded, "Fix the template, or the prompts that it rejects.")
        result = await score(tokens)
        if isinstance(result, ScoringFailure):
            return make_failure(result.kind, SETTING, result.message, graded, result.fix)
        return Scored(result)

    return score_episode


async def skip_scoring(prompt: Prompt, transcript: Transcript, response: str) -> Scored:
    """Give 0 to every response, in a run that does not learn from rewards."""
    return Scored(0.0)


async def refuse_to_score(prompt: Prompt, transcript: Transcript, response: str) -> Scored | Failed:
    """Fail an episode that has no score, in a run whose episodes score themselves.

    An episode that a limit ended before its agent could return a score gets 0, besides the rewards of its turns.
    """
    if transcript.is_truncated:
        return Scored(0.0, {"episode/ended_unscored": 1.0})
    graded = RewardInput(prompt.data_source, response, prompt.ground_truth)
    fix = "Return a number from the agent, or set reward.custom_reward_function.path"
    return make_failure("invalid", "the agent", "returned no score, and the run has no reward", graded, fix)


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


class EpisodeRunner:
    """Runs the episodes of a prompt concurrently and scores each as soon as it ends."""

    def __init__(
        self,
        generate: Generate,
        score: EpisodeScorer,
        decode: Callable[[Sequence[int]], str],
        episode: Episode = single_turn,
        start_episode: Callable[[], Generate] | None = None,
    ) -> None:
        """`start_episode` returns what the turns of one episode use instead of `generate`."""
        self._score, self._episode = score, episode
        self._start_episode = start_episode or (lambda: generate)
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
        score: EpisodeScorer | None = None,
    ) -> list[Sample]:
        """Return the samples of one episode per seed (None: not seeded), in the order of the seeds.

        With `greedy_baseline` a greedy response is generated as well; its score becomes the `baseline` of the samples.
        `overlong` penalizes long responses. With a `batcher` each episode takes a slot. `score` replaces the scorer.
        """
        samplings = [replace(sampling, seed=seed) for seed in seeds]
        if greedy_baseline:
            samplings.append(replace(sampling, temperature=0.0, seed=None, keep_sampling_mask=False))
        slots = [nullcontext(self._start_episode()) if batcher is None else batcher.slot() for _ in samplings]
        episodes = await asyncio.gather(
            *(
                self._run_one(prompt, group, index, each, overlong, slot, score or self._score)
                for index, (each, slot) in enumerate(zip(samplings, slots, strict=True))
            )
        )
        greedy = episodes.pop()[0] if greedy_baseline else None
        samples = [sample for samples in episodes for sample in samples]
        if greedy is None:
            return samples
        if greedy.failure is not None:  # no baseline
            return [replace(sample, failure=sample.failure or greedy.failure) for sample in samples]
        return [replace(each, baseline=greedy.score, engines=each.engines | greedy.engines) for each in samples]

    async def _run_one(
        self,
        prompt: Prompt,
        group: int,
        index: int,
        sampling: SamplingParams,
        overlong: OverlongPenalty | None,
        slot: AbstractContextManager[Generate],
        score_episode: EpisodeScorer,
    ) -> list[Sample]:
        start = time.time()
        with slot as generate:
            transcript = await self._episode(prompt, generate, sampling)
        generated = time.time()
        if not transcript.turns:  # the episode failed before its first request
            transcript.add(prompt.token_ids, Completion([], np.empty(0, np.float32), np.empty(0, np.int32), "stop"))
        result = await self._score_transcript(prompt, transcript, score_episode)
        if isinstance(result, Failed):
            return [replace(each, failure=result) for each in transcript.to_samples(group, index, math.nan, {})]
        turn_rewards = sum(turn.reward for turn in transcript.turns)
        score, metrics = result.score + turn_rewards, transcript.metrics | result.metrics
        if overlong is not None:
            penalty = overlong.compute(transcript.response_length)
            score, metrics = score + penalty, metrics | {"raw_score": score, "overlong_penalty": penalty}
        teacher_prompt = _get_teacher_prompt(prompt, transcript)
        samples = transcript.to_samples(group, index, score, metrics)
        times = (start, generated, time.time())
        return [replace(sample, teacher_prompt=teacher_prompt, times=times) for sample in samples]

    async def _score_transcript(self, prompt: Prompt, transcript: Transcript, score: EpisodeScorer) -> Scored | Failed:
        """Return the episode's own score, or else the result of the scorer for the last turn."""
        if transcript.failure is not None:
            return transcript.failure
        if transcript.score is not None:
            return Scored(transcript.score)
        return await score(prompt, transcript, self.decode(transcript.last.completion.token_ids))


def _get_teacher_prompt(prompt: Prompt, transcript: Transcript) -> npt.NDArray[np.int32] | None:
    """Return the prompt in the teacher's own chat template, if it is used; refuse episodes of several turns."""
    if prompt.teacher_token_ids is None:
        return None
    if len(transcript.turns) > 1 or transcript.last.context != prompt.token_ids:
        raise ConfigError(
            [
                "distillation.teacher.use_own_chat_template: true supports only episodes of one response that directly "
                "follows its prompt, but an episode has other tokens that were not generated; set it to false"
            ]
        )
    return np.array(prompt.teacher_token_ids, np.int32)
