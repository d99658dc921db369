"""A rollout engine that computes the whole sequence again for every token, for several requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl.config.batch_sizes import get_max_sequence_tokens
from verl.config.features import rollout_dtype
from verl.config.schema import Config
from verl.errors import WeightSyncError
from verl.rollout.settings import RolloutEngineSettings
from verl.types import Completion, SamplingParams
from verl.weights.bucket import SharedBucket, WeightBucket, load_hf, to_hf, unpack


@dataclass(frozen=True, slots=True)
class ToySettings(RolloutEngineSettings):
    max_num_seqs: int = 4  # requests at once
    greeting: str = ""  # an argument of the engine itself

    @classmethod
    def from_config(cls, config: Config, device: str, index: int) -> ToySettings:
        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        return cls(
            model.path,
            rollout_dtype(config, device),
            device,
            get_max_sequence_tokens(config),
            max_num_seqs=rollout.max_num_seqs or 4,
            **rollout.engine_kwargs.external,
        )


class ToyEngine:
    def __init__(self, settings: ToySettings) -> None:
        self.settings = settings
        self._slots = asyncio.Semaphore(settings.max_num_seqs)
        self._running = 0
        self._is_idle = asyncio.Condition()
        self._version = -1
        self._received: dict[str, torch.Tensor] = {}

    async def start(self) -> None:
        config = AutoConfig.from_pretrained(self.settings.model_path)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.settings.dtype))
        self._model = model.to(self.settings.device).eval()

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        async with self._slots:
            self._running += 1
            try:
                return await asyncio.to_thread(self._generate, list(token_ids), sampling)
            finally:
                self._running -= 1
                async with self._is_idle:
                    self._is_idle.notify_all()

    async def generate_all(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        return list(await asyncio.gather(*(self.generate(*request) for request in requests)))

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [
            self._logprobs(list(each))[:-1].gather(-1, torch.tensor(each)[1:, None])[:, 0].tolist()
            for each in sequences
        ]

    async def start_weight_update(self) -> None:
        async with self._is_idle:
            await self._is_idle.wait_for(lambda: not self._running)
        self._received = {}

    async def load_bucket(self, bucket: WeightBucket | SharedBucket) -> None:
        self._received |= dict(unpack(bucket.slots, torch.from_numpy(bucket.data.copy())))

    async def finish_weight_update(self, version: int) -> None:
        expected = {name for name, _ in to_hf(self._model, self._model.named_parameters())}
        if expected != self._received.keys():
            raise WeightSyncError(f"weights do not fit: {sorted(expected ^ self._received.keys())}")
        load_hf(self._model, self._received.items())
        self._version, self._received = version, {}

    async def sleep(self) -> None:
        """Keep the weights: there is no device to share."""

    async def version(self) -> int:
        return self._version

    async def close(self) -> None:
        """Nothing runs outside of this process."""

    @torch.no_grad()
    def _logprobs(self, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
        logits = self._model(torch.tensor([tokens], device=self.settings.device)).logits[0].float()
        return (logits / (temperature or 1.0)).log_softmax(-1).cpu()

    def _generate(self, prompt: list[int], sampling: SamplingParams) -> Completion:
        random = torch.Generator()
        _ = random.seed() if sampling.seed is None else random.manual_seed(sampling.seed)
        tokens: list[int] = []
        logprobs: list[float] = []
        finish_reason = "length"
        while len(tokens) < sampling.max_tokens and finish_reason != "stop":
            last = self._logprobs(prompt + tokens, sampling.temperature)[-1]
            token = int(last.argmax() if sampling.temperature == 0 else last.exp().multinomial(1, generator=random))
            tokens.append(token)
            logprobs.append(0.0 if sampling.temperature == 0 else float(last[token]))
            finish_reason = "stop" if token in sampling.stop_token_ids else "length"
        versions = np.full(len(tokens), self._version, np.int32)
        return Completion(tokens, np.array(logprobs, np.float32), versions, finish_reason)
