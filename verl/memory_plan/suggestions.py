"""Suggests settings with which a run fits into memory: the cheapest changes first, and no more than are needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from verl.config.batch_sizes import count_train_ranks, get_max_sequence_tokens
from verl.config.features import uses_critic
from verl.config.paths import change_settings, format_value, get_value
from verl.config.schema.conditions import ACTOR, ROLLOUT
from verl.config.schema.root import Config
from verl.config.train_engines import get_train_engine
from verl.errors import ConfigError
from verl.memory_plan.accelerators import GIB
from verl.memory_plan.device_memory import MemoryPlan
from verl.memory_plan.run_plan import BuildSettings, plan_memory
from verl.models.model_folder import read_config
from verl.models.model_support import heads_problem

_MODEL, _REF = "actor_rollout_ref.model", "actor_rollout_ref.ref"

Changes = Mapping[str, Any]
"""Key of a setting -> value."""


Evaluate = Callable[[Changes], MemoryPlan | None]
"""Returns the memory of a run with changed settings, None if they cannot be combined."""


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """New values of settings that belong together, and what they cost."""

    values: Changes
    cost: str


def find_changes(evaluate: Evaluate, options: Sequence[SettingsChange], memory: int) -> list[SettingsChange]:
    """Return the changes with which a run fits on devices with `memory` bytes; empty if none of them suffice.

    `options` are tried in order; an option that does not help is dropped.
    """

    def count_missing(changes: Sequence[SettingsChange]) -> float:
        plan = evaluate(_merge(changes))
        return math.inf if plan is None else plan.shortfall(memory)

    chosen: list[SettingsChange] = []
    missing = count_missing([])
    for option in options:
        if not missing:
            break
        left = count_missing([*chosen, option])
        if left < missing:
            chosen, missing = [*chosen, option], left
    if missing:
        return []
    for option in list(chosen):  # drop what a later change made superfluous
        others = [each for each in chosen if each is not option]
        if not count_missing(others):
            chosen = others
    chosen = _drop_replaced(chosen)
    for change in list(chosen):  # an earlier option for the same settings costs less
        others = [each for each in chosen if each is not change]
        same = (each for each in options[: options.index(change)] if each.values.keys() == change.values.keys())
        if enough := next((each for each in same if not count_missing([*others, each])), None):
            chosen = [enough if each is change else each for each in chosen]
    return chosen


def _merge(changes: Sequence[SettingsChange]) -> dict[str, Any]:
    return {key: value for change in changes for key, value in change.values.items()}


def _drop_replaced(changes: Sequence[SettingsChange]) -> list[SettingsChange]:
    """Drop a change whose settings a later change sets again."""
    return [
        change
        for index, change in enumerate(changes)
        if not any(change.values.keys() <= later.values.keys() for later in changes[index + 1 :])
    ]


def suggest_settings(config: Config, memory: int, build: BuildSettings) -> list[SettingsChange]:
    """Return the changes with which a run fits on devices with `memory` bytes; empty if none is found."""

    def evaluate(values: Changes) -> MemoryPlan | None:
        try:
            return plan_memory(change_settings(config, values), build)
        except ConfigError:  # a layout that the model or the number of ranks does not permit
            return None

    options = list(_options(config))
    for layout in ((), *((each,) for each in _layout_options(config))):
        given = _merge(layout)
        if (run := evaluate(given)) is None:
            continue
        changes = find_changes(partial(_evaluate_with, evaluate, given), options, memory)
        if changes or not run.shortfall(memory):
            return [*layout, *changes]
    return []


def _evaluate_with(evaluate: Evaluate, given: Changes, values: Changes) -> MemoryPlan | None:
    return evaluate({**given, **values})


def memory_note(config: Config, memory: int, build: BuildSettings) -> str | None:
    """Return what does not fit on devices with `memory` bytes and what to set; None if all fits or nothing is known."""
    try:
        problems = plan_memory(config, build).problems(memory)
    except ConfigError:  # config.json is not on this machine; loading the model reports what is wrong
        return None
    if not problems:
        return None
    phases = "; ".join(f"{phase}: {problem}" for phase, problem in problems.items())
    changes = suggest_settings(config, memory, build)
    fix = "; it fits with " + " ".join(format_changes(changes)) if changes else "; `verl plan` says more"
    return f"by estimate, this run does not fit into the {memory / GIB:.0f} GiB of a device: {phases}{fix}"


def format_changes(changes: Sequence[SettingsChange]) -> list[str]:
    """Return the changes as they are written on the command line."""
    return [f"{key}={format_value(value)}" for change in changes for key, value in change.values.items()]


def describe_current(config: Config, change: SettingsChange) -> str:
    """Return the current values of the settings of a change."""
    return ", ".join(format_value(get_value(config, key)) for key in change.values)


def _options(config: Config) -> Iterator[SettingsChange]:
    """Yield changes that reduce memory, in the order of docs/out_of_memory.md: each costs more than those before."""
    model, actor, rollout = (
        config.actor_rollout_ref.model,
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
    )
    if not model.enable_gradient_checkpointing:
        yield SettingsChange({f"{_MODEL}.enable_gradient_checkpointing": True}, "about a third more time per update")
    if actor.strategy == "fsdp2" and not actor.fsdp_config.reshard_after_forward:
        yield SettingsChange({f"{ACTOR}.fsdp_config.reshard_after_forward": True}, "layers are gathered twice")
    if rollout.free_cache_engine is False:
        yield SettingsChange({f"{ROLLOUT}.free_cache_engine": True}, "the engine wakes up once per step")
    yield from _offload_options(config)
    width = rollout.tensor_model_parallel_size
    for size in (2, 4, 8):
        if size > width and config.trainer.n_gpus_per_node % size == 0:
            yield SettingsChange({f"{ROLLOUT}.tensor_model_parallel_size": size}, f"one engine per {size} devices")
    limit = "ppo_max_token_len_per_gpu" if actor.use_dynamic_bsz else "ppo_micro_batch_size_per_gpu"
    least = get_max_sequence_tokens(config) if actor.use_dynamic_bsz else 1
    value = getattr(actor, limit) // 2
    while value >= least:
        yield SettingsChange({f"{ACTOR}.{limit}": value}, "smaller passes, a little slower")
        value //= 2
    for size in (2, 4, 8) if actor.strategy == "fsdp2" else ():
        fits = config.trainer.n_gpus_per_node % size == 0 and not heads_problem(model.path, size)
        if size > actor.ulysses_sequence_parallel_size and fits:
            cost = f"{size} ranks share each sequence, and exchange it twice per layer"
            yield SettingsChange({f"{ACTOR}.ulysses_sequence_parallel_size": size}, cost)
    for share in (0.6, 0.7, 0.8, 0.4, 0.3, 0.2):
        yield SettingsChange({f"{ROLLOUT}.gpu_memory_utilization": share}, "share of a device for the engine")
    if actor.strategy == "fsdp2":
        cost = "AdamW runs on the CPU, and every pass copies all weights"
        yield SettingsChange({f"{ACTOR}.fsdp_config.offload_policy": True}, cost)


def _offload_options(config: Config) -> Iterator[SettingsChange]:
    """Yield what the training engine can keep off the device while it is idle."""
    actor, section = config.actor_rollout_ref.actor, get_train_engine(config.actor_rollout_ref.actor.strategy).section
    if actor.strategy == "megatron":
        yield SettingsChange({f"{ACTOR}.megatron.grad_offload": True}, "gradients are zeroed once per update")
    yield SettingsChange({f"{_REF}.{section}.param_offload": True}, "a copy of the reference each way per step")
    yield SettingsChange({f"{ACTOR}.{section}.optimizer_offload": True}, "a copy of the moments each way per update")
    cost = "a copy of the weights each way, a few times per step"
    yield SettingsChange({f"{ACTOR}.{section}.param_offload": True}, cost)


def _layout_options(config: Config) -> Iterator[SettingsChange]:
    """Yield layouts of Megatron-Core that the model and the ranks permit, those over fewest ranks first."""
    if config.actor_rollout_ref.actor.strategy != "megatron":
        return
    ranks, content = count_train_ranks(config), read_config(config.actor_rollout_ref.model.path)
    sections = (ACTOR, "critic") if uses_critic(config) else (ACTOR,)
    experts, heads, layers = (
        [size for size in range(1, ranks + 1) if int(content.get(name) or 1) % size == 0]
        for name in ("num_experts", "num_key_value_heads", "num_hidden_layers")
    )
    layouts = [
        (tensor, pipeline, expert)
        for tensor, pipeline, expert in product(heads, layers, experts)
        if config.trainer.n_gpus_per_node % tensor == ranks % (tensor * pipeline) == ranks % (pipeline * expert) == 0
    ]
    names = [f"megatron.{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert")]
    for layout in sorted(layouts, key=lambda sizes: (sizes[0] * sizes[1], sizes[1], sizes[2])):
        values = dict(zip(names, layout, strict=True))
        changes = {f"{section}.{name}": size for section in sections for name, size in values.items()}
        new = {key: size for key, size in changes.items() if get_value(config, key) != size}
        if new:
            yield SettingsChange(new, "tensor ranks exchange tokens in every layer, and stages wait for each other")
