"""A rollout engine without a model, for contract tests and for load tests of the data plane."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from verl.types import Completion, SamplingParams
from verl.weights.bucket import SharedBucket, WeightBucket


class FakeRolloutEngine:
    """Draws tokens uniformly from `vocabulary`, each taking `seconds_per_token`; greedy decoding repeats token 0.

    Responses have `max_tokens` tokens unless a stop token is drawn.
    """

    def __init__(self, vocabulary: int = 64, *, seed: int = 0, seconds_per_token: float = 0.0) -> None:
        self.vocabulary = vocabulary
        self.seconds_per_token = seconds_per_token
        self.started = False
        self._random = np.random.default_rng(seed)
        self._version = -1
        self.is_asleep = False

    async def start(self) -> None:
        self.started = True

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        assert not self.is_asleep, "a request to an engine that sleeps"
        random = self._random if sampling.seed is None else np.random.default_rng(sampling.seed)
        if sampling.temperature == 0:
            drawn = np.zeros(sampling.max_tokens, np.int64)
        else:
            drawn = random.integers(0, self.vocabulary, sampling.max_tokens)
        tokens: list[int] = drawn.tolist()
        stops = [index for index, token in enumerate(tokens) if token in sampling.stop_token_ids]
        if stops:
            tokens = tokens[: stops[0] + 1]
        await asyncio.sleep(self.seconds_per_token * len(tokens))
        logprob = 0.0 if sampling.temperature == 0 else -float(np.log(self.vocabulary))
        logprobs = np.full(len(tokens), logprob, np.float32)
        versions = np.full(len(tokens), self._version, np.int32)
        return Completion(tokens, logprobs, versions, "stop" if stops else "length")

    async def generate_all(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        return list(await asyncio.gather(*(self.generate(*request) for request in requests)))

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-float(np.log(self.vocabulary))] * (len(each) - 1) for each in sequences]

    async def start_weight_update(self) -> None:
        self.is_asleep = False

    async def load_bucket(self, bucket: WeightBucket | SharedBucket) -> None:
        """Its responses do not depend on the weights."""

    async def finish_weight_update(self, version: int) -> None:
        self._version = version

    async def sleep(self) -> None:
        self.is_asleep = True

    async def version(self) -> int:
        return self._version

    async def close(self) -> None:
        self.started = False
