"""Suggests settings with which a run fits into memory: the fastest layout, and as few other changes as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import gcd, inf
from typing import Any

from verl.config.batch_sizes import (
    count_engine_devices,
    count_train_ranks,
    get_max_sequence_tokens,
    uses_dynamic_batches,
)
from verl.config.checks import megatron
from verl.config.features import uses_critic
from verl.config.paths import change_settings, format_value, get_value
from verl.config.rollout_engines import get_rollout_engine
from verl.config.schema.actor import ActorConfig
from verl.config.schema.conditions import ACTOR, REF, ROLLOUT
from verl.config.schema.critic import CriticConfig
from verl.config.schema.root import Config
from verl.config.train_engines import get_train_engine
from verl.errors import ConfigError
from verl.memory_plan.accelerators import GIB, Device, assume_device
from verl.memory_plan.device_memory import MemoryPlan
from verl.memory_plan.run_plan import DEVICE, BuildSettings, get_cluster, get_workload, has_shared_devices, plan_memory
from verl.memory_plan.step_time import estimate_step
from verl.models.model_folder import count_experts, read_config
from verl.models.model_support import heads_problem
from verl.training.settings import CHUNK_POSITIONS

_SMALL_CHUNK = 1024

Changes = Mapping[str, Any]
"""Key of a setting -> value."""


Evaluate = Callable[[Changes], MemoryPlan | None]
"""Returns the memory of a run with changed settings, None if they cannot be combined."""

NOTICEABLE = 1.05
"""How much faster a step must be estimated to be, to be worth another change."""


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """New values of settings that belong together, and what they cost."""

    values: Changes
    cost: str


Layout = tuple[SettingsChange, ...]
"""Changes of how devices share models, empty for the layout of the run."""


def find_changes(evaluate: Evaluate, options: Sequence[SettingsChange], memory: int) -> list[SettingsChange]:
    """Return the changes with which a run fits on devices with `memory` bytes; empty if none of them suffice.

    `options` are tried in order; an option that does not help is dropped. All of them need the least memory.
    """

    def count_missing(changes: Sequence[SettingsChange]) -> float:
        plan = evaluate(_merge(changes))
        return inf if plan is None else plan.shortfall(memory)

    chosen: list[SettingsChange] = []
    missing = count_missing([])
    if not missing or count_missing(options):
        return []
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


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Changes with which a run fits, its memory with them, and the estimated seconds of a step."""

    changes: tuple[SettingsChange, ...]
    plan: MemoryPlan
    seconds: float

    @property
    def values(self) -> dict[str, Any]:
        """The new values of settings, by their keys."""
        return _merge(self.changes)

    def is_better(self, other: Suggestion | None) -> bool:
        """Whether this one is clearly faster, or about as fast and changes fewer settings."""
        if other is None or self.seconds * NOTICEABLE < other.seconds:
            return True
        return self.seconds <= other.seconds * NOTICEABLE and len(self.values) < len(other.values)


def rank_suggestions(config: Config, device: Device, build: BuildSettings) -> list[Suggestion]:
    """Return settings with which a run fits: the best for each width of engines, and the best of all first.

    If the run fits as it is set, nothing but that width is changed.
    """
    config = change_settings(config, {"trainer.device": DEVICE})
    cluster, load = get_cluster(config, device), get_workload(config)

    def evaluate(values: Changes) -> MemoryPlan | None:
        try:
            changed = change_settings(config, values)
            return None if any(megatron.find_conflicts(changed)) else plan_memory(changed, build)
        except ConfigError:  # a layout that the model or the number of ranks does not permit
            return None

    def suggest(changes: Sequence[SettingsChange]) -> Suggestion | None:
        plan = evaluate(_merge(changes))
        if plan is None or (plan.engine is not None and plan.engine.missing_cache(device.memory)):
            return None  # no other setting gives an engine a cache
        return Suggestion(tuple(changes), plan, estimate_step(plan, cluster, load))

    def find_best(width: Layout, options: Sequence[SettingsChange]) -> Suggestion | None:
        """Return the best suggestion with engines of that width. A layout is only made slower by further options."""
        best = None
        candidates = filter(None, (suggest((*width, *layout)) for layout in layouts))
        for candidate in sorted(candidates, key=lambda each: each.seconds):
            if candidate.is_better(best):
                changes = find_changes(partial(_evaluate_with, evaluate, candidate.values), options, device.memory)
                found = suggest((*candidate.changes, *changes)) if changes else candidate
                if found is not None and not found.plan.shortfall(device.memory) and found.is_better(best):
                    best = found
        return best

    as_set = evaluate({})
    fits = as_set is not None and not as_set.shortfall(device.memory)
    layouts, options = ([()], []) if fits else (list(_layouts(config)), list(_options(config)))
    for more in ([], list(_last_resort(config))):
        found = [each for width in _engine_widths(config) if (each := find_best(width, [*options, *more])) is not None]
        if found:
            break
    best: Suggestion | None = None
    for each in found:
        best = each if each.is_better(best) else best
    return sorted(found, key=lambda each: (each is not best, each.seconds))


def suggest_settings(config: Config, device: Device, build: BuildSettings) -> list[SettingsChange]:
    """Return the changes with which a run fits on such devices; empty if it fits as it is set, or if none are found."""
    ranked = rank_suggestions(config, device, build)
    fits_as_set = any(not each.changes for each in ranked)
    return [] if fits_as_set or not ranked else list(ranked[0].changes)


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
    changes = suggest_settings(config, assume_device(memory), build)
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
    actor, trained = config.actor_rollout_ref.actor, _trained_models(config)
    if (config.actor_rollout_ref.model.logprob_chunk_size or CHUNK_POSITIONS) > _SMALL_CHUNK:
        change = {"actor_rollout_ref.model.logprob_chunk_size": _SMALL_CHUNK}
        yield SettingsChange(change, "smaller chunks, a little slower")
    cost = "about a third more time per update"
    if not config.actor_rollout_ref.model.enable_gradient_checkpointing:
        yield SettingsChange({"actor_rollout_ref.model.enable_gradient_checkpointing": True}, cost)
    if uses_critic(config) and not config.critic.model.enable_gradient_checkpointing:
        yield SettingsChange({"critic.model.enable_gradient_checkpointing": True}, cost)
    for key, model in trained.items():
        if model.strategy == "fsdp2" and not model.fsdp_config.reshard_after_forward:
            yield SettingsChange({f"{key}.fsdp_config.reshard_after_forward": True}, "layers are gathered twice")
    if config.actor_rollout_ref.rollout.free_cache_engine is False:
        yield SettingsChange({f"{ROLLOUT}.free_cache_engine": True}, "the engine wakes up once per step")
    yield from _offload_options(config)
    for key, model in trained.items():
        is_dynamic = uses_dynamic_batches(config) if model.use_dynamic_bsz is None else model.use_dynamic_bsz
        limit = "ppo_max_token_len_per_gpu" if is_dynamic else "ppo_micro_batch_size_per_gpu"
        least = get_max_sequence_tokens(config) if is_dynamic else 1
        value = (getattr(model, limit) or getattr(actor, limit)) // 2
        while value >= least:
            yield SettingsChange({f"{key}.{limit}": value}, "smaller passes, a little slower")
            value //= 2


def _trained_models(config: Config) -> dict[str, ActorConfig | CriticConfig]:
    """Return the settings of the trained models by their keys."""
    return {ACTOR: config.actor_rollout_ref.actor} | ({"critic": config.critic} if uses_critic(config) else {})


def _last_resort(config: Config) -> Iterator[SettingsChange]:
    """Yield the changes that are proposed only if nothing else suffices."""
    for key, model in _trained_models(config).items():
        if model.strategy == "fsdp2":
            cost = "AdamW runs on the CPU, and every pass copies all weights"
            yield SettingsChange({f"{key}.fsdp_config.offload_policy": True}, cost)


def _offload_options(config: Config) -> Iterator[SettingsChange]:
    """Yield what the training engine can keep off the device while it is idle."""
    sections = {
        key: f"{key}.{get_train_engine(model.strategy).section}" for key, model in _trained_models(config).items()
    }
    for section in sections.values():
        if section.endswith(".megatron"):
            yield SettingsChange({f"{section}.grad_offload": True}, "gradients are zeroed once per update")
    reference = sections[ACTOR].replace(ACTOR, REF)
    yield SettingsChange({f"{reference}.param_offload": True}, "a copy of the reference each way per step")
    for section in sections.values():
        yield SettingsChange({f"{section}.optimizer_offload": True}, "a copy of the moments each way per update")
    for section in sections.values():
        cost = "a copy of the weights each way, a few times per step"
        yield SettingsChange({f"{section}.param_offload": True}, cost)


def _engine_widths(config: Config) -> Iterator[Layout]:
    """Yield the numbers of devices of an engine that the model and the machines permit."""
    yield ()
    rollout, path = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model.path
    others = count_engine_devices(config) // rollout.tensor_model_parallel_size
    per_node = gcd(count_train_ranks(config), config.trainer.n_gpus_per_node)
    for size in (1, 2, 4, 8) if _can_set(config, "tensor_model_parallel_size") else ():
        fits = per_node % (size * others) == 0 and not heads_problem(path, size)
        if fits and size != rollout.tensor_model_parallel_size:
            devices = f"{size * others} device{'s' * (size * others > 1)}"
            yield (SettingsChange({f"{ROLLOUT}.tensor_model_parallel_size": size}, f"one engine per {devices}"),)


def _layouts(config: Config) -> Iterator[Layout]:
    """Yield how train ranks share sequences or layers, combined with how much of a device engines use."""
    current = config.actor_rollout_ref.rollout.gpu_memory_utilization
    shares = sorted((0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8), key=lambda share: abs(share - current))
    changes = [
        SettingsChange({f"{ROLLOUT}.gpu_memory_utilization": share}, "share of a device for the engine")
        for share in (shares if _can_set(config, "gpu_memory_utilization") else ())
        if share != current
    ]
    is_megatron = config.actor_rollout_ref.actor.strategy == "megatron"
    train = _megatron_layouts(config) if is_megatron else _ulysses_sizes(config)
    for layout in product([None, *train], [None, *changes]):
        yield tuple(change for change in layout if change is not None)


def _can_set(config: Config, name: str) -> bool:
    """Return whether engines have a setting, and use the devices of train ranks."""
    rollout = config.actor_rollout_ref.rollout
    return has_shared_devices(config) and name in get_rollout_engine(rollout.name).capabilities.settings


def _ulysses_sizes(config: Config) -> Iterator[SettingsChange]:
    """Yield the numbers of ranks that may share each sequence."""
    actor, path = config.actor_rollout_ref.actor, config.actor_rollout_ref.model.path
    for size in (2, 4, 8) if actor.strategy == "fsdp2" else ():
        fits = config.trainer.n_gpus_per_node % size == 0 and not heads_problem(path, size)
        if size > actor.ulysses_sequence_parallel_size and fits:
            cost = f"{size} ranks share each sequence, and exchange it twice per layer"
            yield SettingsChange({f"{ACTOR}.ulysses_sequence_parallel_size": size}, cost)


def _megatron_layouts(config: Config) -> Iterator[SettingsChange]:
    """Yield layouts of Megatron-Core that the model and the ranks permit."""
    ranks, content = count_train_ranks(config), read_config(config.actor_rollout_ref.model.path)
    heads = int(content.get("num_attention_heads") or 1)
    experts, groups, layers = (
        [size for size in range(1, ranks + 1) if int(count or 1) % size == 0]
        for count in (
            count_experts(content),
            content.get("num_key_value_heads") or heads,
            content.get("num_hidden_layers"),
        )
    )
    layouts = [
        (tensor, context, pipeline, expert)
        for tensor, context, pipeline, expert in product(groups, (1, 2, 4, 8), layers, experts)
        if config.trainer.n_gpus_per_node % (tensor * context)
        == heads % (tensor * context)
        == ranks % (tensor * context * pipeline)
        == ranks % (pipeline * expert)
        == 0
    ]
    kinds = ("tensor_model", "context", "pipeline_model", "expert_model")
    names = [f"megatron.{kind}_parallel_size" for kind in kinds]
    for layout in layouts:
        values = dict(zip(names, layout, strict=True))
        sections = [*_trained_models(config), REF]
        changes = {f"{section}.{name}": size for section in sections for name, size in values.items()}
        changes = {key: size for key, size in changes.items() if get_value(config, key) is not None}  # as the actor's
        new = {key: size for key, size in changes.items() if get_value(config, key) != size}
        if new:
            yield SettingsChange(new, "ranks exchange tokens in every layer, and stages wait for each other")
