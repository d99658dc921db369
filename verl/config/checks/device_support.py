"""Checks of settings that only some devices and rollout engines support.

With trainer.device=auto these checks are repeated once the device is known.
"""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.checks.conflict import Conflict
from verl.config.features import get_quantization, list_engines
from verl.config.rollout_engines import DEFAULT_ENGINE, PARALLEL_SIZES, get_rollout_engine, list_rollout_engines
from verl.config.schema import Config
from verl.config.schema.conditions import ROLLOUT
from verl.errors import ConfigError
from verl.models.model_folder import is_moe

MIN_CAPABILITY = (8, 0)
"""The compute capability that vLLM's batch-invariant kernels and torch's variable-length attention need."""


def find_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield settings that the device of the run does not support."""
    if config.trainer.deterministic and config.trainer.device != "auto":
        yield from _check_determinism(config)
    if get_quantization(config) is not None:
        yield from _check_quantization(config)
    if config.trainer.device == "cpu":
        yield from find_cpu_conflicts(config)
    engine = get_rollout_engine(config.actor_rollout_ref.rollout.name)
    if engine.find_conflicts is not None:
        yield from engine.load(engine.find_conflicts)(config)


def find_cpu_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield parallel sizes and adapters that the rollout engine does not support on CPUs."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    engine = get_rollout_engine(rollout.name)
    for name in PARALLEL_SIZES:
        size = getattr(rollout, name)
        if size > 1 and name in engine.capabilities.accelerator_settings:
            reason = f"{size} needs accelerators: {engine.title} does not support it on CPUs"
            yield Conflict(f"{ROLLOUT}.{name}", reason, "=1")
    if config.actor_rollout_ref.actor.peft.lora_rank and rollout.lora_transport == "adapter" and is_moe(model.path):
        reason = f"adapter needs accelerators with an MoE model: {engine.title}'s kernels for it are in Triton"
        yield Conflict(f"{ROLLOUT}.lora_transport", reason, "=merged")


def check_capability(capability: tuple[int, int]) -> None:
    """Raise for a GPU on which a run cannot be deterministic."""
    if capability < MIN_CAPABILITY:
        needed, present = (".".join(map(str, version)) for version in (MIN_CAPABILITY, capability))
        reason = (
            f"true requires GPUs with compute capability {needed} or later (A100, H100), for batch-invariant kernels, "
            f"but a GPU of this run has {present}"
        )
        raise ConfigError([Conflict("trainer.deterministic", reason, "=false")])


def _check_determinism(config: Config) -> Iterator[Conflict]:
    """Check that all engines repeat their results to the bit, in batches of any composition."""
    for section, engine in list_engines(config):
        device = config.trainer.device
        if device not in get_rollout_engine(engine.name).capabilities.deterministic_devices:
            reason = (
                f"{engine.name} does not repeat results to the bit on {device}, which trainer.deterministic=true needs"
            )
            yield Conflict(f"{section}.name", reason, f"={DEFAULT_ENGINE}, or set trainer.deterministic=false")


def _check_quantization(config: Config) -> Iterator[Conflict]:
    """Check that the engines can quantize their weights."""
    rollout = config.actor_rollout_ref.rollout
    is_given = rollout.quantization is not None
    name, value, off = ("quantization", rollout.quantization, "=null") if is_given else ("dtype", "fp8", "=auto")
    key, engine = f"{ROLLOUT}.{name}", get_rollout_engine(rollout.name)
    if "quantization" not in engine.capabilities.settings:
        able = " or ".join(list_rollout_engines(supporting="quantization"))
        yield Conflict(key, f"{value} requires {ROLLOUT}.name={able}, but {ROLLOUT}.name={rollout.name}", off)
    elif config.trainer.device == "cpu" and "quantization" in engine.capabilities.accelerator_settings:
        reason = f"{value} requires accelerators: {engine.title} has no FP8 kernels for the CPU (trainer.device)"
        yield Conflict(key, reason, off)
    if rollout.dtype == "float32" and is_given:
        reason = "float32 is not supported by quantized engines, which compute in 16 bits"
        yield Conflict(f"{ROLLOUT}.dtype", reason, f"=bfloat16, or {ROLLOUT}.quantization=null")
