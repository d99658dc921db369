"""Checks of settings that only some devices support. With trainer.device=auto the run asks again, when it is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl.config.features import get_quantization
from verl.config.schema import Config
from verl.config.schema.rules import ROLLOUT
from verl.errors import ConfigError

INVARIANT_BACKENDS = ("FLASH_ATTN", "FLASH_ATTN_MLA", "FLEX_ATTENTION", "TRITON_ATTN", "TRITON_MLA")
"""vLLM's attention backends whose results do not depend on the other requests of a batch, on NVIDIA GPUs."""

MIN_CAPABILITY = (8, 0)
"""The compute capability that vLLM's batch-invariant kernels and torch's variable-length attention need."""


def find_accelerator_conflicts(config: Config) -> Iterator[str]:
    """Yield settings that the device of the run cannot fulfill."""
    if config.trainer.deterministic and config.trainer.device == "cuda":
        yield from _check_determinism(config)
    if get_quantization(config) is not None:
        yield from _check_quantization(config)
    if config.trainer.device == "cpu":
        yield from find_layout_problems(config)


def find_layout_problems(config: Config) -> Iterator[str]:
    """Yield sizes of engines that vLLM does not have on CPUs."""
    rollout = config.actor_rollout_ref.rollout
    for name in ("pipeline_model_parallel_size", "data_parallel_size", "expert_parallel_size"):
        key, size = f"{ROLLOUT}.{name}", getattr(rollout, name)
        if size > 1:
            yield f"{key}: {size} needs accelerators: vLLM on CPUs has only tensor_model_parallel_size; set {key}=1"


def check_capability(capability: tuple[int, int]) -> None:
    """Raise for a GPU on which a run cannot be deterministic."""
    if capability < MIN_CAPABILITY:
        needed, present = (".".join(map(str, version)) for version in (MIN_CAPABILITY, capability))
        raise ConfigError(
            [
                f"trainer.deterministic: true requires GPUs with compute capability {needed} or later (A100, H100), "
                f"for batch-invariant kernels, but a GPU of this run has {present}; set trainer.deterministic=false"
            ]
        )


def _check_determinism(config: Config) -> Iterator[str]:
    """Check that all results on GPUs come from deterministic kernels, in batches of any composition."""
    rollout, reward_model = config.actor_rollout_ref.rollout, config.reward.reward_model
    off = "or set trainer.deterministic=false"
    engines: list[tuple[str, str]] = [(ROLLOUT, rollout.name)]
    if reward_model.enable:
        engines.append(("reward.reward_model.rollout", reward_model.rollout.name))
    for section, name in engines:
        if name == "hf":
            yield (
                f"{section}.name: hf has no batch-invariant mode on GPUs, which trainer.deterministic=true needs; set "
                f"{section}.name=vllm, {off}"
            )
    key = f"{ROLLOUT}.engine_kwargs.vllm"
    for argument, backend in _list_attention_backends(rollout.engine_kwargs.vllm):
        if backend.upper() not in INVARIANT_BACKENDS:
            yield (
                f"{key}.{argument}: {backend} is not batch-invariant in vLLM, which trainer.deterministic=true needs; "
                f"set {key}.{argument}=FLASH_ATTN, {off}"
            )


def _check_quantization(config: Config) -> Iterator[str]:
    """Check that vLLM can quantize the weights of the engines."""
    rollout = config.actor_rollout_ref.rollout
    is_given = rollout.quantization is not None
    setting, value, off = ("quantization", rollout.quantization, "null") if is_given else ("dtype", "fp8", "auto")
    key = f"{ROLLOUT}.{setting}"
    if rollout.name == "hf":
        yield f"{key}: {value} requires {ROLLOUT}.name=vllm, but {ROLLOUT}.name=hf; set {key}={off}"
    elif config.trainer.device == "cpu":
        yield (
            f"{key}: {value} requires accelerators: vLLM has no FP8 kernels for the CPU (trainer.device); set "
            f"{key}={off}"
        )
    if rollout.dtype == "float32" and is_given:
        yield (
            f"{ROLLOUT}.dtype: float32 is not supported by quantized engines, which compute in 16 bits; set "
            f"{ROLLOUT}.dtype=bfloat16, or {ROLLOUT}.quantization=null"
        )


def _list_attention_backends(arguments: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the attention backends that are requested from vLLM, with the names of the arguments."""
    config = arguments.get("attention_config")
    nested = config.get("backend") if isinstance(config, dict) else None
    for name, backend in (
        ("attention_backend", arguments.get("attention_backend")),
        ("attention_config.backend", nested),
    ):
        if backend is not None and str(backend).lower() != "auto":
            yield name, str(backend)
