"""What a run cannot start without: required settings, installed packages, and supported features."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from verl.config.features import list_adapters
from verl.config.paths import format_value, get_value, is_overridden
from verl.config.rollout_engines import IN_PROCESS_ENGINE, get_rollout_engine
from verl.config.schema import MISSING, Config, Section, Setting, SftConfig, collect_settings
from verl.config.schema.rules import ROLLOUT
from verl.installation import format_install_hint

_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_EXAMPLES = {"data.train_files": "train.parquet", "actor_rollout_ref.model.path": _MODEL, "model.path": _MODEL}
_LOGGER_EXTRAS = {"wandb": "wandb", **dict.fromkeys(("mlflow", "swanlab", "tensorboard", "trackio"), "tracking")}
"""Logger, which is also the name of its package -> the extra that installs it; other loggers need none."""


def find_missing(config: Section) -> Iterator[str]:
    """Yield required settings that are not given, and packages that are not installed."""
    assert isinstance(config, Config | SftConfig)
    for key, setting in collect_settings(type(config)).items():
        if setting.required and get_value(config, key) == MISSING:
            yield f"{key}: is required; set {key}={_EXAMPLES[key]}"
    for section, peft in list_adapters(config):
        if peft.lora_rank > 0 and not _is_installed("peft"):
            yield (
                f"{section}.lora_rank: {peft.lora_rank} requires the package PEFT; {format_install_hint('lora')}, or "
                f"set {section}.lora_rank=0 to train all weights"
            )
    for section, name in _list_engines(config):
        engine = get_rollout_engine(name)
        if engine.find_problem is not None and (reason := engine.load(engine.find_problem)()):
            yield f"{section}.name: {name} {reason}, or set {section}.name={IN_PROCESS_ENGINE} to use transformers"
    loggers = config.trainer.logger
    absent = [name for name in loggers if name in _LOGGER_EXTRAS and not _is_installed(name)]
    rest = format_value([name for name in loggers if name not in absent] or ["console"])
    for name in absent:
        hint = format_install_hint(_LOGGER_EXTRAS[name])
        yield f"trainer.logger: {name} requires a package; {hint}, or set trainer.logger={rest}"


def find_unsupported(config: Section) -> Iterator[str]:
    """Yield settings in use that are declared but not supported yet."""
    for key, setting in collect_settings(type(config)).items():
        if isinstance(setting.planned, tuple):
            yield from _find_planned_values(config, setting, setting.planned)
        elif setting.planned and is_overridden(config, key):
            value, default = format_value(get_value(config, key)), format_value(setting.default)
            yield f"{key}: {value} is not supported yet; set {key}={default}"


def _find_planned_values(config: Section, setting: Setting, planned: tuple[Any, ...]) -> Iterator[str]:
    value = get_value(config, setting.key)
    for item in value if isinstance(value, list) else [value]:
        if item in planned:
            supported = ", ".join(str(choice) for choice in setting.choices if choice not in planned)
            fix = f"{setting.key}={format_value(setting.default)}"
            yield f"{setting.key}: {item} is not supported yet (supported: {supported}); set {fix}"


def _list_engines(config: Config | SftConfig) -> Iterator[tuple[str, str]]:
    if isinstance(config, Config):
        yield ROLLOUT, config.actor_rollout_ref.rollout.name
        if config.reward.reward_model.enable:
            yield "reward.reward_model.rollout", config.reward.reward_model.rollout.name


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name, as wandb creates, has no origin
