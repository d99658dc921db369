"""The memory of a run from its settings, and the settings that reduce it, for `verl plan` and before a run starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl.budget.advice import Change, find_changes
from verl.budget.devices import GIB
from verl.budget.memory import ModelMemory, PassSize
from verl.budget.model_shape import ModelShape, read_config
from verl.budget.run import EngineMemory, RunMemory
from verl.budget.timing import Workload
from verl.config.batch_sizes import (
    BatchSizes,
    count_data_ranks,
    count_engine_devices,
    count_train_ranks,
    get_actor_batch_sizes,
    get_critic_batch_sizes,
    get_max_sequence_tokens,
    get_ulysses_size,
)
from verl.config.paths import format_value, get_value, set_path
from verl.config.schema.actor import RefConfig
from verl.config.schema.rollout import RolloutConfig
from verl.config.schema.root import Config
from verl.config.schema.rules import ACTOR, ROLLOUT
from verl.errors import ConfigError
from verl.trainer.setup import with_changes
from verl.trainer.worker_settings import train_settings
from verl.training.families import heads_problem
from verl.training.settings import FsdpSettings

DEVICE = "cuda"
_MANY_STEPS = 1_000_000  # the number of steps does not matter here
_MODEL, _REF = "actor_rollout_ref.model", "actor_rollout_ref.ref"


def run_memory(config: Config) -> RunMemory:
    """Return the memory of a run on accelerators, whatever trainer.device says."""
    settings = train_settings(config, config.trainer.total_training_steps or _MANY_STEPS, DEVICE)
    update, micro_batches = _update_size(config, get_actor_batch_sizes(config))
    models = {"actor": _model(config, settings.actor, update, micro_batches)}
    if settings.critic is not None:
        models["critic"] = _model(config, settings.critic, *_update_size(config, get_critic_batch_sizes(config)))
    if settings.prime is not None:
        models["prime"] = _model(config, settings.prime, update, micro_batches)
    frozen = {"reference": settings.reference, "prime reference": settings.prime_reference, "teacher": settings.teacher}
    models |= {name: _model(config, each, update, None) for name, each in frozen.items() if each is not None}
    return RunMemory(models, _engine(config), _reward_share(config))


def run_workload(config: Config) -> Workload:
    """Return the sequences of a step, at their maximum length."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    epochs = get_actor_batch_sizes(config).epochs
    return Workload(data.train_batch_size * rollout.n, data.max_prompt_length, data.max_response_length, epochs)


def suggest_settings(config: Config, memory: int) -> list[Change]:
    """Return the changes with which a run fits on devices with `memory` bytes; empty if none is found."""
    return find_changes(lambda values: run_memory(change_settings(config, values)), list(_options(config)), memory)


def change_settings(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the settings with some values replaced, by their dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        set_path(tree, tuple(key.split(".")), value)
    return with_changes(config, tree)


def memory_note(config: Config, memory: int) -> str | None:
    """Return what does not fit on devices with `memory` bytes and what to set; None if all fits or nothing is known."""
    try:
        problems = run_memory(config).problems(memory)
    except ConfigError:  # a model whose configuration is not here; loading it reports what is wrong
        return None
    if not problems:
        return None
    phases = "; ".join(f"{phase}: {problem}" for phase, problem in problems.items())
    changes = suggest_settings(config, memory)
    fix = "; it fits with " + " ".join(format_changes(changes)) if changes else "; `verl plan` says more"
    return f"by estimate, this run does not fit into the {memory / GIB:.0f} GiB of a device: {phases}{fix}"


def format_changes(changes: Sequence[Change]) -> list[str]:
    """Return the changes as they are written on the command line."""
    return [f"{key}={format_value(value)}" for change in changes for key, value in change.values.items()]


def _model(config: Config, settings: FsdpSettings, update: PassSize, micro_batches: int | None) -> ModelMemory:
    content = read_config(settings.model_path)
    if content is None:
        raise ConfigError(
            [
                f"{settings.model_path}: its config.json is not on this machine; download it (hf download "
                f"{settings.model_path} config.json) and set the path of the folder or of the file"
            ]
        )
    shape = ModelShape.from_config(content, settings.model_path, has_value_head=settings.head == "value")
    sharded_over = getattr(settings, "fsdp_size", -1)
    ranks = count_train_ranks(config) if sharded_over < 1 else sharded_over
    section: RolloutConfig | RefConfig = config.actor_rollout_ref.rollout
    if micro_batches is None:
        section = config.actor_rollout_ref.ref
    forward = _forward_size(config, section, update)
    if micro_batches is None:
        return ModelMemory(shape, settings, ranks, forward)
    return ModelMemory(shape, settings, ranks, forward, update, micro_batches)


def _update_size(config: Config, sizes: BatchSizes) -> tuple[PassSize, int]:
    """Return the largest micro-batch of an update, and how many of them it has."""
    rollout, ranks = config.actor_rollout_ref.rollout, count_data_ranks(config)
    samples = -(-min(sizes.mini_batch, config.data.train_batch_size) * rollout.n // ranks)
    if sizes.micro_batch_samples is None:
        assert sizes.micro_batch_tokens is not None
        longest = get_max_sequence_tokens(config)
        return _by_tokens(config, sizes.micro_batch_tokens), -(-samples * longest // sizes.micro_batch_tokens)
    micro = min(sizes.micro_batch_samples, samples)
    return _by_samples(config, micro), -(-samples // micro)


def _forward_size(config: Config, section: RolloutConfig | RefConfig, update: PassSize) -> PassSize:
    """Return the largest micro-batch of a log-prob pass; as large as that of an update if the settings are null."""
    if config.actor_rollout_ref.actor.use_dynamic_bsz:
        tokens = section.log_prob_max_token_len_per_gpu
        return update if tokens is None else _by_tokens(config, tokens * get_ulysses_size(config))
    samples = section.log_prob_micro_batch_size_per_gpu
    return update if samples is None else _by_samples(config, samples)


def _by_samples(config: Config, samples: int) -> PassSize:
    return _on_rank(config, samples * get_max_sequence_tokens(config))


def _by_tokens(config: Config, tokens: int) -> PassSize:
    return _on_rank(config, max(tokens, get_max_sequence_tokens(config)))


def _on_rank(config: Config, tokens: int) -> PassSize:
    """Return the part of a micro-batch that one rank computes; several may share its tokens."""
    tokens = -(-tokens // get_ulysses_size(config))
    longest = get_max_sequence_tokens(config)
    return PassSize(tokens, tokens * min(config.data.max_response_length, longest) // longest)


def _engine(config: Config) -> EngineMemory | None:
    if not config.actor_rollout_ref.hybrid_engine:
        return None  # it has devices of its own
    rollout = config.actor_rollout_ref.rollout
    content = read_config(config.actor_rollout_ref.model.path)
    assert content is not None
    wanted = getattr(rollout, "free_cache_engine", False)
    return EngineMemory(
        ModelShape.from_config(content),
        share=rollout.gpu_memory_utilization,
        width=count_engine_devices(config),
        sleeps=config.trainer.max_staleness == 0 if wanted is None else wanted,
        sequences=rollout.max_num_seqs,
        tokens=get_max_sequence_tokens(config),
    )


def _reward_share(config: Config) -> float:
    model = config.reward.reward_model
    return model.rollout.gpu_memory_utilization if model.enable else 0.0


def _options(config: Config) -> Iterator[Change]:
    """Yield changes that reduce memory, in the order of docs/out_of_memory.md: each costs more than those before."""
    model, actor, rollout = (
        config.actor_rollout_ref.model,
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
    )
    fsdp = f"{ACTOR}.fsdp_config"
    if not model.enable_gradient_checkpointing:
        yield Change({f"{_MODEL}.enable_gradient_checkpointing": True}, "about a third more time per update")
    if not actor.fsdp_config.reshard_after_forward:
        yield Change({f"{fsdp}.reshard_after_forward": True}, "layers are gathered twice")
    if getattr(rollout, "free_cache_engine", None) is False:
        yield Change({f"{ROLLOUT}.free_cache_engine": True}, "the engine wakes up once per step")
    yield Change({f"{_REF}.fsdp_config.param_offload": True}, "a copy of the reference each way per step")
    yield Change({f"{fsdp}.optimizer_offload": True}, "a copy of the moments each way per update")
    yield Change({f"{fsdp}.param_offload": True}, "a copy of the weights each way, a few times per step")
    width = rollout.tensor_model_parallel_size
    for size in (2, 4, 8):
        if size > width and config.trainer.n_gpus_per_node % size == 0:
            yield Change({f"{ROLLOUT}.tensor_model_parallel_size": size}, f"one engine per {size} devices")
    limit = "ppo_max_token_len_per_gpu" if actor.use_dynamic_bsz else "ppo_micro_batch_size_per_gpu"
    least = get_max_sequence_tokens(config) if actor.use_dynamic_bsz else 1
    value = getattr(actor, limit) // 2
    while value >= least:
        yield Change({f"{ACTOR}.{limit}": value}, "smaller passes, a little slower")
        value //= 2
    for size in (2, 4, 8):
        fits = config.trainer.n_gpus_per_node % size == 0 and not heads_problem(model.path, size)
        if size > actor.ulysses_sequence_parallel_size and fits:
            cost = f"{size} ranks share each sequence, and exchange it twice per layer"
            yield Change({f"{ACTOR}.ulysses_sequence_parallel_size": size}, cost)
    for share in (0.6, 0.7, 0.8, 0.4, 0.3, 0.2):
        yield Change({f"{ROLLOUT}.gpu_memory_utilization": share}, "of a device for the engine's weights and cache")
    yield Change({f"{fsdp}.offload_policy": True}, "AdamW runs on the CPU, and every pass copies all weights")


def describe_current(config: Config, change: Change) -> str:
    """Return the current values of the settings of a change."""
    return ", ".join(format_value(get_value(config, key)) for key in change.values)
