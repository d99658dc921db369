"""Checks that engines fit onto the devices, and that weights can reach them."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.batch_sizes import count_engine_devices, count_group_devices
from verl.config.rollout_engines import get_rollout_engine, list_rollout_engines
from verl.config.schema import Config
from verl.config.schema.reward import RewardRolloutConfig
from verl.config.schema.rollout import RolloutConfig
from verl.config.schema.rules import ROLLOUT


def find_conflicts(config: Config) -> Iterator[str]:
    """Yield settings of devices that cannot work together."""
    yield from _check_transports(config)
    yield from _check_separate_devices(config)
    yield from _check_widths(config)


def _check_transports(config: Config) -> Iterator[str]:
    """Check that weights and adapters can reach the engines."""
    rollout, rank = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.peft.lora_rank
    engine, transport = get_rollout_engine(rollout.name), rollout.weight_transport
    is_direct, max_rank = transport in ("nccl", "ipc"), engine.capabilities.max_lora_rank
    is_supported = transport in engine.capabilities.device_transports
    if is_direct and (config.trainer.device == "cpu" or not is_supported):
        reason = f"an engine that has it, but rollout.name={rollout.name}"
        if config.trainer.device == "cpu":
            reason = "accelerators, but trainer.device=cpu"
        yield f"{ROLLOUT}.weight_transport: {transport} requires {reason}; set {ROLLOUT}.weight_transport=host"
    elif is_direct and (transport == "ipc") != config.actor_rollout_ref.hybrid_engine:
        # NCCL refuses two processes on one device; CUDA IPC does not reach other devices.
        other, where = ("ipc", "the same devices") if transport == "nccl" else ("nccl", "devices of their own")
        yield (
            f"{ROLLOUT}.weight_transport: {transport} is not possible to engines on {where} "
            f"(actor_rollout_ref.hybrid_engine={config.actor_rollout_ref.hybrid_engine}); set "
            f"{ROLLOUT}.weight_transport={other}, or host"
        )
    if rank == 0 or rollout.lora_transport != "adapter":
        return
    for is_unfit, reason in (
        (max_rank == 0, f"rollout.name={rollout.name} loads full models"),
        (is_direct, f"weight_transport={transport} sends full models"),
        (rank > max_rank > 0, f"{engine.title} supports ranks up to {max_rank}"),
    ):
        if is_unfit:
            yield f"{ROLLOUT}.lora_transport: adapter is not supported: {reason}; set {ROLLOUT}.lora_transport=merged"


def _check_separate_devices(config: Config) -> Iterator[str]:
    """Check that engines which do not share the devices of the train workers have some of their own."""
    if config.actor_rollout_ref.hybrid_engine:
        return
    if config.trainer.local:
        yield (
            "actor_rollout_ref.hybrid_engine: False is not possible with trainer.local=true, which runs all in one "
            "process; set actor_rollout_ref.hybrid_engine=True"
        )
    elif config.actor_rollout_ref.rollout.n_gpus_per_node is None:
        yield (
            f"{ROLLOUT}.n_gpus_per_node: engines need devices of their own with actor_rollout_ref.hybrid_engine=False; "
            f"set {ROLLOUT}.n_gpus_per_node=N"
        )


def _check_widths(config: Config) -> Iterator[str]:
    """Check that engines of several devices fit onto the nodes, and onto the memory of the devices."""
    rollout, model = config.actor_rollout_ref.rollout, config.reward.reward_model
    engines: list[tuple[str, RolloutConfig | RewardRolloutConfig]] = [(ROLLOUT, rollout)]
    if model.enable:
        engines.append(("reward.reward_model.rollout", model.rollout))
    is_shared = config.actor_rollout_ref.hybrid_engine
    for section, engine in engines:
        key, size = f"{section}.tensor_model_parallel_size", engine.tensor_model_parallel_size
        width = count_engine_devices(config) if section == ROLLOUT else size
        more = "" if width == size else f" x {width // size} (pipeline x data parallel size)"
        nodes, per_node, widest = "trainer", config.trainer.n_gpus_per_node, count_group_devices(config)
        if section == ROLLOUT and not is_shared:
            nodes, per_node, widest = ROLLOUT, rollout.n_gpus_per_node or width, width
        if width > 1 and config.trainer.local:
            yield f"{key}: {size}{more} needs several processes, but trainer.local=true runs all in one; set {key}=1"
        elif per_node % width or widest % width:
            whole = per_node if per_node % width else widest
            fitting = [size for size in range(1, width) if whole % size == 0]
            reason = (
                f"{nodes}.n_gpus_per_node={per_node} is not a multiple of it, and the devices of an engine have to be "
                "on one node"
                if per_node % width
                else f"the devices of the widest engine, {widest}, are not a multiple of it"
            )
            fix = f"set {key}={fitting[-1]}" if width == size else f"reduce them to {fitting[-1]} devices"
            yield f"{key}: {size}{more} is not possible: {reason}; {fix}"
    with_limit = list_rollout_engines(supporting="gpu_memory_utilization")
    used = [engine.gpu_memory_utilization for _, engine in engines if engine.name in with_limit]
    if config.trainer.device == "cuda" and is_shared and sum(used) > 1:
        yield (
            f"{ROLLOUT}.gpu_memory_utilization: {' + '.join(f'{share:g}' for share in used)} of the reward model on "
            f"the same device is more than its memory; set {ROLLOUT}.gpu_memory_utilization=0.5 and "
            "reward.reward_model.rollout.gpu_memory_utilization=0.4"
        )
