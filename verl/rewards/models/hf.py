"""Reward models on transformers: any `AutoModelForSequenceClassification` with one label; its logit is the score."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from verl.errors import ConfigError
from verl.models.hub import local_path
from verl.models.model_safety import PICKLED, model_problems
from verl.models.model_support import attention_for, making_model
from verl.rewards.models.interface import SETTING, check_tokens
from verl.rewards.settings import RewardModelSettings


class HfRewardModel:
    """Scores one batch after the other on its own thread.

    A sequence gets the score that transformers gives to it alone. Batches are padded on the right, and causal models
    read the score at the last token other than the padding token. A model without a padding token gets an id that ends
    no sequence of the batch.
    """

    def __init__(self, settings: RewardModelSettings) -> None:
        self._path, self._trust = settings.model_path, settings.trust_remote_code
        self._dtype, self._device = settings.dtype, settings.device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")

    async def start(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    def check_input(self, token_ids: Sequence[int]) -> str | None:
        return check_tokens(token_ids, self._limit, self._vocabulary)

    async def score(self, batch: Sequence[Sequence[int]]) -> list[float]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._score, batch)

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> None:
        config = read_config(self._path, trust=self._trust)
        try:
            with making_model:
                model, info = AutoModelForSequenceClassification.from_pretrained(
                    self._path,
                    config=config,
                    dtype=getattr(torch, self._dtype),
                    attn_implementation=attention_for(config),
                    trust_remote_code=self._trust,
                    output_loading_info=True,
                )
        except pickle.UnpicklingError as error:
            raise ConfigError([f"{SETTING}.model_path={self._path}: {PICKLED}"]) from error
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigError([f"{SETTING}.model_path={self._path}: cannot be loaded: {error}"]) from error
        missing = sorted(info["missing_keys"])
        if missing:  # transformers initializes them randomly
            names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            problem = f"has no weights {names}; use a model that was saved as AutoModelForSequenceClassification"
            raise ConfigError([f"{SETTING}.model_path={self._path}: {problem}"])
        self._model: PreTrainedModel = model.to(self._device).eval()
        self._padding = config.get_text_config().pad_token_id
        self._limit = _max_length(model)
        self._vocabulary = model.get_input_embeddings().num_embeddings

    @torch.inference_mode()
    def _score(self, batch: Sequence[Sequence[int]]) -> list[float]:
        padding = self._padding
        if padding is None:
            padding = min(set(range(len(batch) + 1)) - {tokens[-1] for tokens in batch})
            self._model.config.get_text_config().pad_token_id = padding
        longest = max(map(len, batch))
        ids = torch.tensor([[*tokens, *[padding] * (longest - len(tokens))] for tokens in batch], device=self._device)
        mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in batch], device=ids.device)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        return self._model(**inputs).logits[:, 0].float().tolist()


def read_config(path: str, *, trust: bool = False) -> PreTrainedConfig:
    """Return the model's configuration; raise a `ConfigError` if it is unsafe or not that of a reward model."""
    if problems := [*model_problems(local_path(path), trust_remote_code=trust)]:
        raise ConfigError([f"{SETTING}.model_path: {problem}" for problem in problems])
    setting = f"{SETTING}.model_path={path}"
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{setting}: no model found: {error}"]) from error
    name = ", ".join(config.architectures or ["the model"])
    is_classifier = "SequenceClassification" in name or not config.architectures
    if not is_classifier and "AutoModelForSequenceClassification" not in (getattr(config, "auto_map", None) or {}):
        problem = (
            f"was saved as {name}, but a reward model is an AutoModelForSequenceClassification; for a model that "
            "judges in words, set reward.custom_reward_function.path=verl.rewards.judge"
        )
        raise ConfigError([f"{setting}: {problem}"])
    if config.num_labels != 1:
        problem = f"{name} has {config.num_labels} labels; use a model with one (num_labels: 1 in its config.json)"
        raise ConfigError([f"{setting}: {problem}"])
    return config


def _max_length(model: PreTrainedModel) -> int | None:
    """Return how many tokens the model supports; some reserve the first rows of their position table for padding."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None or limit <= 0 else int(limit)
