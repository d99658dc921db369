"""The records that cross a boundary between processes or packages. No torch, no ray: numpy and plain Python.

The life of one answer: a `Prompt` is read from the data; an episode asks an engine for a `Completion` (any number of
times) and ends as a `Sample`; the sample goes to the object store and the controller keeps a `SampleHandle`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # a process that scores answers reads these records too, and starts sooner without numpy
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "Completion",
    "Failed",
    "FailureKind",
    "Prompt",
    "Sample",
    "SampleHandle",
    "SamplePreview",
    "SamplingParams",
    "Scored",
]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, as token ids, with all that a reward function is told about it. `raw` is the prompt as the data has
    it, messages or text, where it was asked for.

    >>> Prompt(row=7, token_ids=[1, 2, 10, 3], data_source="addition", ground_truth="046")
    """

    row: int
    token_ids: list[int]
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    raw: Any = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one answer is drawn. `temperature=0` is greedy; a `seed` makes the draw repeatable.

    Generation ends after any of `stop_token_ids`; the token itself belongs to the answer.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What one call of `generate` returns: the new tokens, each with its log-prob and the version that made it.

    `finish_reason` is "stop" (the model ended its answer; the end token is included) or "length".
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str


FailureKind = Literal["error", "timeout", "died", "invalid"]
"""Of a reward function: it raised; it was late; its process ended; what it returned is no number."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A finite score, and the other finite numbers that the reward function returned with it.

    >>> Scored(0.5, {"format": 1.0})
    Scored(score=0.5, metrics={'format': 1.0})
    """

    score: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """No score, through no fault of the answer. `message` names the function, the cause, the answer and the mend."""

    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class SamplePreview:
    """One answer as its scorer saw it, to be shown where the numbers raise a question."""

    data_source: str
    response: str
    ground_truth: Any
    score: float


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished episode: flat arrays over its T tokens, prompt included.

    `mask[t]` is True where the model generated token t (prompts and tool output are False). `logprobs` and `versions`
    are 0 and -1 where the mask is False. `group` is the place of the prompt in the data stream, shared by the samples
    of one prompt. With a `failure` it has no score, and is left out of training. `baseline` is the score of the
    greedy answer to the same prompt, where one was asked for.

    >>> Sample(group=3, tokens=np.array([1, 2, 9, 9], np.int32), mask=np.array([0, 0, 1, 1], bool),
    ...        logprobs=np.array([0, 0, -.1, -.2], np.float32), versions=np.array([-1, -1, 5, 5], np.int32), score=1.0)
    """

    group: int
    tokens: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    score: float
    finish_reason: str = "stop"
    metrics: dict[str, float] = field(default_factory=dict)
    baseline: float | None = None
    failure: Failed | None = None


@dataclass(frozen=True, slots=True)
class SampleHandle:
    """All that the controller knows of a sample: where it lies and what planning needs. Numbers, never arrays.

    `tokens` counts prompt and answer, `generated` what the model wrote, `version` the oldest weights that wrote any.
    `index` is the position of the response within its group: (group, index) identifies a sample of a run.
    """

    ref: Any
    group: int
    tokens: int
    generated: int
    score: float
    version: int
    finish_reason: str = "stop"
    metrics: dict[str, float] = field(default_factory=dict)
    baseline: float | None = None
    failure: Failed | None = None
    index: int = 0
