"""Settings of asynchronous runs that set others: the batch, the number of steps, staleness, and where engines run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from verl.config.paths import Tree, change_settings, delete_path, format_value, get_path, get_value
from verl.config.schema import Config, Section
from verl.config.schema.conditions import ACTOR, ROLLOUT

C = TypeVar("C", bound=Section)

_ASYNC = "async_training"
_FACTORS = (f"{_ASYNC}.require_batches", f"{_ASYNC}.trigger_parameter_sync_step")
_BATCH, _STEPS = "data.train_batch_size", "trainer.total_training_steps"
_STALENESS, _RUN_AHEAD = "trainer.max_staleness", f"{_ASYNC}.staleness_threshold"

Effect = tuple[str, Mapping[str, Any]]
"""A setting with its value, and the values that it gives other settings."""


def delete_empty_batch(tree: Tree) -> None:
    """Delete data.train_batch_size=0, which launch scripts write where the size follows from other settings."""
    is_derived = any(get_path(tree, tuple(key.split("."))) is not None for key in _FACTORS)
    if is_derived and get_path(tree, ("data", "train_batch_size")) == 0:
        delete_path(tree, ("data", "train_batch_size"))


def resolve_asynchronous(config: C, hints: list[str], origins: dict[str, str]) -> C:
    """Return the settings with those that others set, with a hint for each that changes."""
    if not isinstance(config, Config):
        return config
    resolved = config
    for read in (_read_trainer_mode, _read_run_ahead, _read_batch, _read_prompts):
        source, values = read(resolved)
        changes = {key: value for key, value in values.items() if value != get_value(resolved, key)}
        if changes:
            shown = " and ".join(_show_change(resolved, key, value) for key, value in changes.items())
            hints.append(f"{source} sets {shown}")
            origins |= dict.fromkeys(changes, source)
        resolved = change_settings(resolved, values)
    return resolved


def _read_trainer_mode(config: Config) -> Effect:
    v1 = config.trainer.v1
    mode, values = v1.trainer_mode, dict[str, Any]()
    if mode is None:
        return "", values
    if not _is_given(config, _STALENESS):
        values[_STALENESS] = 0 if mode == "sync" else v1.sampler.max_off_policy_threshold
    if mode != "sync":
        values["actor_rollout_ref.hybrid_engine"] = mode == "colocate_async"
        if config.async_training.staleness_threshold is None:
            section = v1.colocate_async if mode == "colocate_async" else v1.separate_async
            values[_RUN_AHEAD] = float(section.num_warmup_batches)
    return f"trainer.v1.trainer_mode={mode}", values


def _read_run_ahead(config: Config) -> Effect:
    run_ahead = config.async_training.staleness_threshold
    if run_ahead is None or _is_given(config, _STALENESS):
        return "", {}
    return f"{_RUN_AHEAD}={run_ahead:g}", {_STALENESS: math.ceil(run_ahead) + 1}


def _read_batch(config: Config) -> Effect:
    factors, mini = [get_value(config, key) for key in _FACTORS], config.actor_rollout_ref.actor.ppo_mini_batch_size
    given = {key: value for key, value in zip(_FACTORS, factors, strict=True) if isinstance(value, int)}
    if not given:
        return "", {}
    source = " x ".join([*(f"{key}={value}" for key, value in given.items()), f"{ACTOR}.ppo_mini_batch_size={mini}"])
    return source, {_BATCH: mini * math.prod(given.values())}


def _read_prompts(config: Config) -> Effect:
    prompts, batch = config.actor_rollout_ref.rollout.total_rollout_steps, config.data.train_batch_size
    if prompts is None:
        return "", {}
    rounding = f", which is not whole ({prompts / batch:.4g})," if prompts % batch else ""
    source = f"{ROLLOUT}.total_rollout_steps={prompts} / {_BATCH}={batch}{rounding}"
    return source, {_STEPS: max(1, prompts // batch)}


def _show_change(config: Config, key: str, value: Any) -> str:
    replaced = f" (not {format_value(get_value(config, key))}, as given)" if _is_given(config, key) else ""
    return f"{key}={format_value(value)}{replaced}"


def _is_given(config: Config, key: str) -> bool:
    *section, name = key.split(".")
    return name in get_path(config, tuple(section)).model_fields_set
