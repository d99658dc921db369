"""What a run cannot start without: required settings, installed packages, supported features."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from verl.config.checks.conflict import Conflict
from verl.config.features import list_engines, list_trained_models
from verl.config.interpreters import find_interpreter_problem
from verl.config.paths import format_value, get_value
from verl.config.rollout_engines import IN_PROCESS_ENGINE, get_rollout_engine
from verl.config.schema import MISSING, Config, Section, SftConfig, collect_settings
from verl.config.schema.rollout import RolloutConfig
from verl.installation import format_install_hint

_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_EXAMPLES = {"data.train_files": "train.parquet", "actor_rollout_ref.model.path": _MODEL, "model.path": _MODEL}
_LOGGER_EXTRAS = {"wandb": "wandb", **dict.fromkeys(("mlflow", "swanlab", "tensorboard", "trackio"), "tracking")}
"""Logger, which is also the name of its package -> the extra that installs it; other loggers need none."""


def find_missing(config: Section) -> Iterator[Conflict]:
    """Yield required settings that are not given, and packages that are not installed."""
    assert isinstance(config, Config | SftConfig)
    for key, setting in collect_settings(type(config)).items():
        if setting.required and get_value(config, key) == MISSING:
            yield Conflict(key, "is required", f"={_EXAMPLES[key]}")
    for model in list_trained_models(config):
        key, rank = f"{model.key}.peft.lora_rank", model.settings.peft.lora_rank
        if rank > 0 and not _is_installed("peft"):
            fix = f"{format_install_hint('lora')}, or set {key}=0 to train all weights"
            yield Conflict(key, f"{rank} requires the package PEFT", fix)
    for section, engine in list_engines(config):
        spec = get_rollout_engine(engine.name)
        python = engine.python if isinstance(engine, RolloutConfig) else None
        if python is not None:
            if problem := find_interpreter_problem(str(Path(python).expanduser()), spec):
                yield Conflict(f"{section}.python", f"{problem}, or set {section}.python=null")
        elif spec.find_problem is not None and (problem := spec.load(spec.find_problem)()):
            reason = f"{engine.name} {problem}, or set {section}.name={IN_PROCESS_ENGINE} to use transformers"
            yield Conflict(f"{section}.name", reason)
    loggers = config.trainer.logger
    absent = [name for name in loggers if name in _LOGGER_EXTRAS and not _is_installed(name)]
    rest = format_value([name for name in loggers if name not in absent] or ["console"])
    for name in absent:
        fix = f"{format_install_hint(_LOGGER_EXTRAS[name])}, or set trainer.logger={rest}"
        yield Conflict("trainer.logger", f"{name} requires a package", fix)


def find_unsupported(config: Section) -> Iterator[Conflict]:
    """Yield values in use that are declared but not supported yet."""
    for key, setting in collect_settings(type(config)).items():
        value, default = get_value(config, key), f"={format_value(setting.default)}"
        for item in value if isinstance(value, list) else [value]:
            if setting.planned and item in setting.planned:
                supported = ", ".join(str(choice) for choice in setting.choices if choice not in setting.planned)
                yield Conflict(key, f"{item} is not supported yet (supported: {supported})", default)


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name, as wandb creates, has no origin
