"""vLLM's pooling runner as a reward model, for models that read their score at the last token."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from transformers import AutoModelForSequenceClassification
from transformers.modeling_layers import GenericForSequenceClassification

from verl.errors import ConfigError
from verl.models.hub import find_weights
from verl.rewards.models.hf import read_config
from verl.rewards.models.interface import SETTING, check_tokens
from verl.rewards.settings import RewardModelSettings
from verl.rollout.vllm.engine import map_engine_errors, start_vllm
from verl.rollout.vllm.settings import VllmSettings


class VllmRewardModel:
    """A `RewardModel` on vLLM. One event loop owns it; it starts and ends vLLM's worker processes.

    vLLM reads the score at the last token, transformers at the last one that is not padding. So trailing padding
    tokens are removed: where the end token is also the padding, every finished response would differ.
    """

    def __init__(self, settings: RewardModelSettings) -> None:
        self._settings = VllmSettings(
            settings.model_path,
            settings.dtype,
            settings.device,
            load_format="auto",
            max_num_seqs=settings.batch,
            gpu_memory_utilization=settings.memory_fraction,
            trust_remote_code=settings.trust_remote_code,
            tensor_parallel_size=settings.tensor_parallel_size,
            batch_invariant=settings.deterministic and settings.device != "cpu",
            cpu_cores=settings.cpu_cores,
        )
        self._arguments: dict[str, Any] = {"runner": "pooling"}
        if settings.deterministic and settings.device == "cpu":  # scored alone, and not from what others left
            self._arguments["enable_prefix_caching"] = False
        self._requests = itertools.count()

    async def start(self) -> None:
        settings = self._settings
        config = read_config(settings.model_path, trust=settings.trust_remote_code)
        kind: Any = AutoModelForSequenceClassification._model_mapping.get(type(config), None)
        if not (isinstance(kind, type) and issubclass(kind, GenericForSequenceClassification)):
            raise ConfigError(
                [
                    f"{SETTING}.rollout.name: vllm runs reward models that read their score at the last token, and "
                    f"{', '.join(config.architectures or ['this one'])} is not one; set {SETTING}.rollout.name=hf"
                ]
            )
        if not any(name.endswith("score.weight") for name in _weight_names(settings.model_path)):
            # vLLM would start nevertheless, and score with an uninitialized head
            raise ConfigError(
                [
                    f"{SETTING}.model_path={settings.model_path}: has no weights score.weight in safetensors, so vLLM "
                    "has no trained head; use a model saved as AutoModelForSequenceClassification, or set "
                    f"{SETTING}.rollout.name=hf"
                ]
            )
        text = config.get_text_config()
        self._padding, self._vocabulary = text.pad_token_id, text.vocab_size
        self._llm = await start_vllm(settings, self._arguments)
        self._limit = self._llm.model_config.max_model_len

    def check_input(self, token_ids: Sequence[int]) -> str | None:
        return check_tokens(token_ids, self._limit, self._vocabulary)

    async def score(self, batch: Sequence[Sequence[int]]) -> list[float]:
        with map_engine_errors():
            return list(await asyncio.gather(*(self._score(tokens) for tokens in batch)))

    async def close(self) -> None:
        if hasattr(self, "_llm"):
            self._llm.shutdown()
            del self._llm  # now: at interpreter exit its finalizer would find modules gone

    async def _score(self, token_ids: Sequence[int]) -> float:
        from vllm import PoolingParams
        from vllm.inputs import TokensPrompt

        end = len(token_ids)
        while end > 1 and token_ids[end - 1] == self._padding:
            end -= 1
        prompt = TokensPrompt(prompt_token_ids=list(token_ids[:end]))
        params = PoolingParams(task="classify", use_activation=False)
        final: Any = None
        async for output in self._llm.encode(prompt, params, str(next(self._requests))):
            final = output
        return float(final.outputs.data[0])


def _weight_names(path: str) -> set[str]:
    """Return the names of the weights of a model in safetensors format; only headers are read."""
    try:
        return set(find_weights(path))
    except FileNotFoundError:
        return set()
