"""The interface of episodes, and the simplest one, a single turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from verl.types import Completion, Prompt, Sample, SamplingParams

Generate = Callable[[Sequence[int], SamplingParams], Awaitable[Completion]]


@dataclass
class Transcript:
    """The tokens of an episode so far. Generated tokens are stored as they are, never decoded and tokenized again."""

    tokens: list[int]
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = "stop"

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
        self.logprobs += completion.logprobs
        self.versions += completion.versions
        self.finish_reason = completion.finish_reason

    def get_response(self) -> list[int]:
        """Return all generated tokens."""
        return [token for token, generated in zip(self.tokens, self.mask, strict=True) if generated]

    def to_sample(self, group: int, score: float, metrics: dict[str, float]) -> Sample:
        return Sample(
            group=group,
            tokens=np.array(self.tokens, np.int32),
            mask=np.array(self.mask, np.bool_),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            score=score,
            finish_reason=self.finish_reason,
            metrics=metrics,
        )

    def _pad(self, count: int) -> None:
        self.mask += [False] * count
        self.logprobs += [0.0] * count
        self.versions += [-1] * count


Episode = Callable[[Prompt, Generate, SamplingParams], Awaitable[Transcript]]


async def single_turn(prompt: Prompt, generate: Generate, sampling: SamplingParams) -> Transcript:
    """Generate one response to the prompt."""
    transcript = Transcript(list(prompt.token_ids))
    transcript.append_completion(await generate(transcript.tokens, sampling))
    return transcript
