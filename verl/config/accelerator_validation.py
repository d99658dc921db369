"""Checks of settings that only some devices and rollout engines support.

With trainer.device=auto the run repeats them, once the device is known.
"""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.features import get_quantization
from verl.config.rollout_engines import DEFAULT_ENGINE, PARALLEL_SIZES, get_rollout_engine, list_rollout_engines
from verl.config.schema import Config
from verl.config.schema.rules import ROLLOUT
from verl.errors import ConfigError

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
    engine = get_rollout_engine(config.actor_rollout_ref.rollout.name)
    if engine.find_conflicts is not None:
        yield from engine.load(engine.find_conflicts)(config)


def find_layout_problems(config: Config) -> Iterator[str]:
    """Yield sizes of engines that are not supported on CPUs."""
    rollout = config.actor_rollout_ref.rollout
    engine = get_rollout_engine(rollout.name)
    for name in PARALLEL_SIZES:
        key, size = f"{ROLLOUT}.{name}", getattr(rollout, name)
        if size > 1 and name in engine.capabilities.accelerator_settings:
            yield f"{key}: {size} needs accelerators: {engine.title} does not support it on CPUs; set {key}=1"


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
        if config.trainer.device not in get_rollout_engine(name).capabilities.deterministic_devices:
            yield (
                f"{section}.name: {name} has no batch-invariant mode on GPUs, which trainer.deterministic=true needs; "
                f"set {section}.name={DEFAULT_ENGINE}, {off}"
            )


def _check_quantization(config: Config) -> Iterator[str]:
    """Check that the engines can quantize their weights."""
    rollout = config.actor_rollout_ref.rollout
    engine = get_rollout_engine(rollout.name)
    is_given = rollout.quantization is not None
    setting, value, off = ("quantization", rollout.quantization, "null") if is_given else ("dtype", "fp8", "auto")
    key = f"{ROLLOUT}.{setting}"
    if "quantization" not in engine.capabilities.settings:
        able = " or ".join(list_rollout_engines(supporting="quantization"))
        yield f"{key}: {value} requires {ROLLOUT}.name={able}, but {ROLLOUT}.name={rollout.name}; set {key}={off}"
    elif config.trainer.device == "cpu" and "quantization" in engine.capabilities.accelerator_settings:
        yield (
            f"{key}: {value} requires accelerators: {engine.title} has no FP8 kernels for the CPU (trainer.device); "
            f"set {key}={off}"
        )
    if rollout.dtype == "float32" and is_given:
        yield (
            f"{ROLLOUT}.dtype: float32 is not supported by quantized engines, which compute in 16 bits; set "
            f"{ROLLOUT}.dtype=bfloat16, or {ROLLOUT}.quantization=null"
        )
