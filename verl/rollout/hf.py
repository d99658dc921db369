"""transformers as a rollout engine: slow, simple and deterministic; for debugging and as a reference."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from verl.errors import WeightSyncError
from verl.models.model_support import attention_for, making_model
from verl.rollout.settings import RolloutEngineSettings
from verl.types import Completion, SamplingParams
from verl.weights.bucket import SharedBucket, WeightBucket, load_hf, to_hf, unpack
from verl.weights.layer_outputs import LayerOutputs, find_layers


class HfEngine:
    """Runs one request at a time, so that a response depends on its own prompt and seed only."""

    def __init__(self, settings: RolloutEngineSettings) -> None:
        self._path, self._trust = settings.model_path, settings.trust_remote_code
        self._dtype, self._device = getattr(torch, settings.dtype), torch.device(settings.device)
        self._reads_weights = settings.load_format != "dummy"
        self._lock = asyncio.Lock()
        self._version = -1
        self._new_weights: dict[str, Tensor] = {}
        self._is_updating = False
        self._may_generate = asyncio.Event()  # else weight updates and probes would wait for all requests in the queue
        self._may_generate.set()

    async def start(self) -> None:
        config = AutoConfig.from_pretrained(self._path, trust_remote_code=self._trust)
        options: dict[str, Any] = {
            "dtype": self._dtype,
            "attn_implementation": attention_for(config),
            "trust_remote_code": self._trust,
        }
        model: Any
        with making_model:
            if self._reads_weights:
                model = AutoModelForCausalLM.from_pretrained(self._path, config=config, **options)
            else:
                model = AutoModelForCausalLM.from_config(config, **options)
        self._model = model.to(self._device).eval()

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        while True:
            await self._may_generate.wait()
            async with self._lock:
                if self._may_generate.is_set():  # else an update or a probe came first
                    return await asyncio.to_thread(self._generate, list(token_ids), sampling)

    async def generate_all(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        return [await self.generate(*request) for request in requests]

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self._may_generate.clear()
        try:
            async with self._lock:
                return [self._compute_logprobs(each) for each in sequences]
        finally:
            if not self._is_updating:
                self._may_generate.set()

    async def compute_hidden_states(self, token_ids: Sequence[int]) -> list[Tensor]:
        outputs = LayerOutputs(find_layers(self._model, self._model.config.get_text_config().num_hidden_layers))
        await self.compute_logprobs([token_ids])
        return outputs.take(len(token_ids))

    async def start_weight_update(self) -> None:
        self._is_updating = True
        self._may_generate.clear()
        self._new_weights = {}

    async def load_bucket(self, bucket: WeightBucket | SharedBucket) -> None:
        self._new_weights |= dict(unpack(bucket.slots, torch.from_numpy(bucket.data.copy())))

    async def finish_weight_update(self, version: int) -> None:
        try:
            async with self._lock:
                self._load(self._new_weights)
                self._version = version
        finally:  # an engine that has refused the weights still has its old ones
            self._new_weights, self._is_updating = {}, False
            self._may_generate.set()

    async def sleep(self) -> None:
        async with self._lock:
            self._model.to("cpu")

    async def version(self) -> int:
        return self._version

    async def close(self) -> None:
        """Nothing runs outside this process."""

    def _load(self, weights: dict[str, Tensor]) -> None:
        expected = {name for name, _ in to_hf(self._model, self._model.named_parameters())}
        if wrong := expected ^ weights.keys():
            missing, unexpected = sorted(wrong & expected), sorted(wrong - expected)
            raise WeightSyncError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
        load_hf(self._model, weights.items())
        self._model.to(self._device)  # wakes it

    @torch.no_grad()
    def _compute_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        tokens = torch.tensor(token_ids, device=self._device)
        logits = self._model(tokens[None]).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].tolist()

    @torch.no_grad()
    def _generate(self, token_ids: list[int], sampling: SamplingParams) -> Completion:
        random = torch.Generator(self._device)
        if sampling.seed is None:
            random.seed()
        else:
            random.manual_seed(sampling.seed)
        step = torch.tensor([token_ids], device=self._device)
        tokens: list[int] = []
        logprobs: list[float] = []
        kept_ids: list[list[int]] = []
        cache, finish_reason = None, "length"
        while len(tokens) < sampling.max_tokens and finish_reason != "stop":
            output = self._model(step, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            token, logprob, ids = _draw(output.logits[0, -1].float(), sampling, random)
            tokens.append(token)
            logprobs.append(logprob)
            kept_ids.append(ids)
            step = torch.tensor([[token]], device=self._device)
            finish_reason = "stop" if token in sampling.stop_token_ids else "length"
        versions = np.full(len(tokens), self._version, np.int32)
        kept = np.array(kept_ids, np.int32) if sampling.keep_sampling_mask else None
        return Completion(tokens, np.array(logprobs, np.float32), versions, finish_reason, kept_ids=kept)


def _draw(logits: Tensor, sampling: SamplingParams, random: torch.Generator) -> tuple[int, float, list[int]]:
    """Draw one token; return the token, its log-prob in the distribution that it was drawn from, and its `kept_ids`.

    Tokens beyond `top_k` that are as likely as the last of them are also drawn from, but not part of `kept_ids`.
    """
    if sampling.temperature == 0:
        token = int(logits.argmax())
        return token, 0.0, [token]
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= sampling.top_p
        logits = logits.index_fill(0, order[beyond], -torch.inf)
    token = int(torch.multinomial(logits.softmax(-1), 1, generator=random))
    if not sampling.keep_sampling_mask:
        return token, float(logits.log_softmax(-1)[token]), []
    likely = logits.topk(min(sampling.top_k, logits.numel()))
    kept = [token, *likely.indices.where(likely.values.isfinite(), token).tolist()]
    normalizer = logits[sorted(set(kept))].logsumexp(-1)
    return token, float(logits[token] - normalizer), kept
