"""Records that cross process and package boundaries. No torch, no ray: numpy and plain Python.

A `Prompt` is read from the data; an episode requests one or more `Completion`s from an engine and ends as a `Sample`;
the sample goes to the object store and the controller keeps a `SampleHandle`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # reward workers import these records too, and start faster without numpy
    import numpy as np
    import numpy.typing as npt
    import torch


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, with the arguments of the reward function. `raw` is the text or messages of the data.

    `teacher_token_ids` are the prompt in the teacher's own chat template, if it is used.

    >>> prompt = Prompt(row=7, token_ids=[1, 2, 10, 3], data_source="addition", ground_truth="046")
    """

    row: int
    token_ids: list[int]
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    raw: Any = None
    teacher_token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one response is sampled. `temperature=0` is greedy; a `seed` makes it reproducible.

    Generation ends after any of `stop_token_ids`, which is part of the response. With `keep_sampling_mask`, which needs
    a `top_k`, the completion has `kept_ids`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    keep_sampling_mask: bool = False

    @staticmethod
    def make_seed(seed: int, split: str, group: int, index: int) -> int:
        """Return the seed of one response in a run with `seed`: a hash of all arguments."""
        return hash_seed(seed, split, group, index)


def hash_seed(*parts: int | str) -> int:
    """Return a seed of 32 bits that depends on all parts, so that streams of random numbers do not overlap."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "little")


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one `generate` call: the new tokens, each with its log-prob and weight version.

    `finish_reason` is "stop" (the model ended its response; the end token is included) or "length". `routed_experts`,
    if requested, are the experts [tokens, layers, k] of the prompt and the new tokens, except the last: it has not been
    an input yet. `engine` is the index of the rollout engine that generated it, -1 if unknown. `kept_ids`, if
    requested, are the tokens [tokens, K] among which each new token was drawn: the new token first, then the `top_k`
    most likely ones, in place of those that were dropped the new token again. `logprobs` are normalized over them.
    `earlier_engines` are those that were lost before `engine` continued their tokens, and `preemptions` counts how
    often the engine dropped the cache of the request to make room for others; both are not part of the result, and not
    compared.
    """

    token_ids: list[int]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finish_reason: str
    routed_experts: npt.NDArray[np.integer] | None = None
    engine: int = -1
    kept_ids: npt.NDArray[np.int32] | None = None
    preemptions: int = 0
    earlier_engines: frozenset[int] = frozenset()

    def __eq__(self, other: object) -> bool:
        import numpy as np

        if not isinstance(other, Completion):
            return NotImplemented
        names = ("token_ids", "logprobs", "versions", "finish_reason", "routed_experts", "engine", "kept_ids")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)


FailureKind = Literal["error", "timeout", "died", "invalid"]
"""The function raised; timed out; its process ended; its result is not a finite number."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A finite score, and the other finite numbers that the reward function returned.

    >>> Scored(0.5, {"format": 1.0})
    Scored(score=0.5, metrics={'format': 1.0})
    """

    score: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """A failed reward call. `message` names the function, the cause, the response and a fix."""

    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class SamplePreview:
    """One response with its score, to be shown to the user."""

    data_source: str
    response: str
    ground_truth: Any
    score: float


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished episode: flat arrays over its T tokens, prompt included.

    `mask[t]` is True where the model generated token t (prompts and tool output are False). `logprobs` and `versions`
    are 0 and -1 where the mask is False. `group` is the index of the prompt in the data stream, shared by the samples
    of one prompt. A sample with a `failure` has no score and is not trained on. `baseline` is the score of the greedy
    response to the same prompt, if requested. `routed_experts` are the experts [tokens, layers, k] of the first tokens,
    those that were an input of the engine. `teacher_prompt` is the prompt in the teacher's own chat template,
    which it reads instead of the policy's. `turn_rewards` are the parts of the score that single turns earned, each
    with the position of the last token of its turn; the rest of the score belongs to the last token. An episode with
    several `branches` is as many samples. They agree in `index`, the position of the episode in its group, and in all
    that describes the episode: score, metrics, failure, finish_reason, engines. `shares` are then 1 / the number of
    branches that contain a token, and `turn_rewards` has at position 0 what was earned before the branch began.
    `episode_tokens` are the generated tokens of the whole episode, each counted once; 0: those of the sample.
    `turns` are, for each turn of the branch, the position of its last token, its index in the episode, its own reward,
    and the state that it began in; empty: one turn. `kept_ids` are those of the generated tokens: [mask.sum(), K].
    `times` are when the episode started, when its generation ended, and when its score was known (Unix time).
    `preemptions` are those of all its completions.

    >>> sample = Sample(
    ...     group=3, tokens=np.array([1, 2, 9, 9], np.int32), mask=np.array([0, 0, 1, 1], bool), score=1.0,
    ...     logprobs=np.array([0, 0, -.1, -.2], np.float32), versions=np.array([-1, -1, 5, 5], np.int32))
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
    routed_experts: npt.NDArray[np.integer] | None = None
    teacher_prompt: npt.NDArray[np.int32] | None = None
    engines: frozenset[int] = frozenset()  # the rollout engines that generated it, or its baseline
    turn_rewards: tuple[tuple[int, float], ...] = ()
    turns: tuple[tuple[int, int, float, int], ...] = ()
    branches: int = 1
    shares: npt.NDArray[np.float32] | None = None
    episode_tokens: int = 0
    index: int = 0
    kept_ids: npt.NDArray[np.int32] | None = None
    times: tuple[float, float, float] = (0.0, 0.0, 0.0)
    preemptions: int = 0


@dataclass(frozen=True)  # without slots, which are slow to pickle
class SampleHandle:
    """What the controller knows about a sample: a reference to it, and what planning needs. No arrays.

    `tokens` counts prompt and response, `teacher_tokens` the same in the teacher's own chat template (0 without one),
    `prompt_tokens` those before the first generated one (0 if unknown), `generated` the generated ones of the whole
    episode; `version` is the oldest weight version used, `versions` the number of versions from there to the newest.
    `index` is the position of the episode within its group: (group, index) identifies an episode of a run. If it has
    several `branches`, there are as many samples with that index; `one_per_episode` selects one of them.
    `final_answer` is its vote among the responses to a validation prompt. `row` is the index of the prompt in its data
    set, -1 if unknown. `repetition` is the share of its responses that repeats itself (`verl.workers.repetition`).
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
    final_answer: str = ""
    teacher_tokens: int = 0
    prompt_tokens: int = 0
    engines: frozenset[int] = frozenset()
    branches: int = 1
    versions: int = 1
    row: int = -1
    repetition: float = 0.0
    preemptions: int = 0


def one_per_episode(handles: Iterable[SampleHandle]) -> list[SampleHandle]:
    """Return the handle of each episode's last branch, for statistics that count an episode once."""
    return list({(each.group, each.index) if each.branches > 1 else id(each): each for each in handles}.values())


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The box of a distributed tensor that one rank has.

    Args:
        tensor: The box; None where the rank has nothing to contribute.
        offsets: Where the box begins in the whole tensor.
        shape: The shape of the whole tensor.
        dtype: The type of the whole tensor, to which `tensor` is converted when it is copied.

    >>> LocalShard(torch.ones(2, 4), (2, 0), (4, 4), torch.float32)  # the lower half of a matrix
    """

    tensor: torch.Tensor | None
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def copy_to(self, whole: torch.Tensor) -> None:
        """Copy the box to its place in the whole tensor; the rest is left as it is."""
        if self.tensor is not None:
            sides = zip(self.offsets, self.tensor.shape, strict=True)
            whole[tuple(slice(start, start + length) for start, length in sides)].copy_(self.tensor)
