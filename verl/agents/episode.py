"""Episodes: their tokens, how they are scored, and the runner that turns a prompt into scored samples."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from verl.agents.deterministic_batcher import DeterministicBatcher, Generate
from verl.errors import ConfigError
from verl.rewards.models.interface import SETTING, ScoringFailure
from verl.rewards.models.tokenization import EncodeConversation
from verl.rewards.result import RewardInput, make_failure
from verl.rewards.settings import OverlongPenalty
from verl.types import Completion, Failed, Prompt, Sample, SamplingParams, Scored


@dataclass
class Transcript:
    """The tokens of an episode so far. Generated tokens are stored as they are, never decoded and tokenized again."""

    tokens: list[int]
    mask: list[bool] = field(default_factory=list)
    logprobs: list[npt.NDArray[np.float32]] = field(default_factory=list)  # of each part
    versions: list[npt.NDArray[np.int32]] = field(default_factory=list)  # of each part
    finish_reason: str = "stop"
    routed_experts: npt.NDArray[np.integer] | None = None  # of the first tokens, if the engine returns them
    engines: set[int] = field(default_factory=set)  # that generated parts of it

    def __post_init__(self) -> None:
        self._pad(len(self.tokens))

    def append_context(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the model did not generate: tool output, or the next user message."""
        self.tokens += token_ids
        self._pad(len(token_ids))

    def append_completion(self, completion: Completion) -> None:
        """Append generated tokens, on which the model is trained."""
        self.tokens += completion.token_ids
        self.mask += [True] * len(completion.token_ids)
        self.logprobs.append(np.asarray(completion.logprobs, np.float32))
        self.versions.append(np.asarray(completion.versions, np.int32))
        self.finish_reason = completion.finish_reason
        if (routed := completion.routed_experts) is not None:
            known = routed[:0] if self.routed_experts is None else self.routed_experts
            # Tokens of earlier turns keep the experts that they were generated with.
            self.routed_experts = np.concatenate([known, routed[len(known) :]])
        self.engines.add(completion.engine)

    def get_response(self) -> list[int]:
        """Return all generated tokens."""
        return [token for token, generated in zip(self.tokens, self.mask, strict=True) if generated]

    def to_sample(self, group: int, score: float, metrics: dict[str, float]) -> Sample:
        return Sample(
            group=group,
            tokens=np.array(self.tokens, np.int32),
            mask=np.array(self.mask, np.bool_),
            logprobs=np.concatenate(self.logprobs),
            versions=np.concatenate(self.versions),
            score=score,
            finish_reason=self.finish_reason,
            metrics=metrics,
            routed_experts=self.routed_experts,
            engines=frozenset(self.engines),
        )

    def _pad(self, count: int) -> None:
        self.mask += [False] * count
        self.logprobs.append(np.zeros(count, np.float32))
        self.versions.append(np.full(count, -1, np.int32))


Episode = Callable[[Prompt, Generate, SamplingParams], Awaitable[Transcript]]


async def single_turn(prompt: Prompt, generate: Generate, sampling: SamplingParams) -> Transcript:
    """Generate one response to the prompt."""
    transcript = Transcript(list(prompt.token_ids))
    transcript.append_completion(await generate(transcript.tokens, sampling))
    return transcript


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


async def skip_scoring(prompt: Prompt, transcript: Transcript, response: str) -> Scored:
    """Give 0 to every response, in a run that does not learn from rewards."""
    return Scored(0.0)


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
        score: EpisodeScorer | None = None,
    ) -> list[Sample]:
        """Return one sample per seed (None: not seeded), in their order.

        With `greedy_baseline` also a greedy response is generated; its score becomes the `baseline` of the samples.
        `overlong` penalizes long responses. With a `batcher` each episode takes a slot. `score` replaces the scorer.
        """
        samplings = [replace(sampling, seed=seed) for seed in seeds]
        if greedy_baseline:
            samplings.append(replace(sampling, temperature=0.0, seed=None))
        slots = [nullcontext(self._generate) if batcher is None else batcher.slot() for _ in samplings]
        samples = await asyncio.gather(
            *(
                self._run_one(prompt, group, each, overlong, slot, score or self._score)
                for each, slot in zip(samplings, slots, strict=True)
            )
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
        score_episode: EpisodeScorer,
    ) -> Sample:
        with slot as generate:
            transcript = await self._episode(prompt, generate, sampling)
        tokens = transcript.get_response()
        teacher_prompt = _get_teacher_prompt(prompt, transcript)
        result = await score_episode(prompt, transcript, self.decode(tokens))
        if isinstance(result, Failed):
            return replace(transcript.to_sample(group, math.nan, {}), failure=result)
        score, metrics = result.score, result.metrics
        if overlong is not None:
            penalty = overlong.compute(len(tokens))
            score, metrics = score + penalty, metrics | {"raw_score": score, "overlong_penalty": penalty}
        return replace(transcript.to_sample(group, score, metrics), teacher_prompt=teacher_prompt)


def _get_teacher_prompt(prompt: Prompt, transcript: Transcript) -> npt.NDArray[np.int32] | None:
    """Return the prompt in the teacher's own chat template, if it is used; refuse episodes of several turns."""
    if prompt.teacher_token_ids is None:
        return None
    count = len(prompt.token_ids)
    if (
        transcript.tokens[:count] != prompt.token_ids
        or any(transcript.mask[:count])
        or not all(transcript.mask[count:])
    ):
        raise ConfigError(
            [
                "distillation.teacher.use_own_chat_template: true supports only episodes of one response that directly "
                "follows its prompt, but an episode has other tokens that were not generated; set it to false"
            ]
        )
    return np.array(prompt.teacher_token_ids, np.int32)
