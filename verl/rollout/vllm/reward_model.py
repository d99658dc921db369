"""vLLM's pooling runner as a reward model, for models that read their score at the last token."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoModelForSequenceClassification
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils import cached_file

from verl.errors import ConfigError, EngineError
from verl.rewards.models.hf import read_config
from verl.rewards.models.interface import SETTING, check_tokens
from verl.rollout.vllm.engine import VllmSettings, environment, map_engine_errors, stderr_tail

__all__ = ["VllmRewardModel"]

_SAFETENSORS = ("model.safetensors.index.json", "model.safetensors")


class VllmRewardModel:
    """A `RewardModel` on vLLM. One event loop owns it; it starts vLLM's own worker processes and ends them.

    vLLM reads the score at the last token, transformers at the last one that has not the id that pads. So tokens of
    that id are cut off at the end: where the end token pads, the two would differ in every finished answer.
    """

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._requests = itertools.count()

    async def start(self) -> None:
        settings = self._settings
        config = read_config(settings.model_path, trust=settings.trust_remote_code)
        kind: Any = AutoModelForSequenceClassification._model_mapping.get(type(config), None)
        if not (isinstance(kind, type) and issubclass(kind, GenericForSequenceClassification)):
            raise ConfigError(
                [
                    f"{SETTING}.rollout.name: vllm runs reward models that read their score at the last token, and "
                    f"{', '.join(config.architectures or ['this one'])} is none of them; set {SETTING}.rollout.name=hf"
                ]
            )
        if not any(name.endswith("score.weight") for name in _weights(settings.model_path)):
            # vLLM starts all the same, and scores by whatever lay in the memory of the head
            raise ConfigError(
                [
                    f"{SETTING}.model_path={settings.model_path}: lacks the weights score.weight in safetensors: vLLM "
                    "finds no trained head; name a model that was saved as AutoModelForSequenceClassification, or set "
                    f"{SETTING}.rollout.name=hf"
                ]
            )
        text = config.get_text_config()
        self._padding, self._vocabulary = text.pad_token_id, text.vocab_size
        os.environ.update(environment(settings))
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**_engine_arguments(settings)))
        except Exception as error:  # the cause stands on the standard error of vLLM's own process, which is also ours
            raise EngineError(f"vLLM did not start with the reward model: {error}\n{stderr_tail()}") from error
        self._limit = self._llm.model_config.max_model_len

    def check_input(self, token_ids: Sequence[int]) -> str | None:
        return check_tokens(token_ids, self._limit, self._vocabulary)

    async def score(self, batch: Sequence[Sequence[int]]) -> list[float]:
        with map_engine_errors():
            return list(await asyncio.gather(*(self._score(tokens) for tokens in batch)))

    async def close(self) -> None:
        if hasattr(self, "_llm"):
            self._llm.shutdown()
            del self._llm  # now: at the interpreter's end its finaliser would find half of its modules gone

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


def _weights(path: str) -> set[str]:
    """The names of the weights of a model, of which only the headers are read."""
    found = [cached_file(path, name, _raise_exceptions_for_missing_entries=False) for name in _SAFETENSORS]
    index, whole = found
    if index is not None:
        return set(json.loads(Path(index).read_text())["weight_map"])
    if whole is None:
        return set()
    with safe_open(whole, "pt") as file:
        return set(file.keys())


def _engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    from verl.rollout.vllm.transfer import EXTENSION

    arguments: dict[str, Any] = {
        "worker_extension_cls": EXTENSION,
        "model": settings.model_path,
        "runner": "pooling",
        "dtype": settings.dtype,
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel,
        "enforce_eager": settings.enforce_eager,
        "trust_remote_code": settings.trust_remote_code,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }
    if settings.device != "cpu":
        arguments["gpu_memory_utilization"] = settings.memory_fraction
    return arguments | settings.kwargs
