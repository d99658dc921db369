"""Checks that engines fit onto the devices, and that weights can reach them."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.batch_sizes import count_engine_devices, count_group_devices
from verl.config.checks.conflict import Conflict
from verl.config.features import list_engines
from verl.config.rollout_engines import get_rollout_engine, list_rollout_engines
from verl.config.schema import Config
from verl.config.schema.conditions import ROLLOUT
from verl.config.schema.reward import RewardRolloutConfig
from verl.config.schema.rollout import RolloutConfig

_HYBRID = "actor_rollout_ref.hybrid_engine"
_LENDING = f"{ROLLOUT}.lend_train_devices"


def find_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield settings of devices that cannot work together."""
    yield from find_transport_conflicts(config)
    yield from _check_separate_devices(config)
    for section, engine in list_engines(config):
        yield from _check_width(config, section, engine)
    limited = list_rollout_engines(supporting="gpu_memory_utilization")
    used = [engine.gpu_memory_utilization for _, engine in list_engines(config) if engine.name in limited]
    is_shared = config.actor_rollout_ref.hybrid_engine or config.actor_rollout_ref.rollout.lend_train_devices
    if config.trainer.device == "cuda" and is_shared and sum(used) > 1:
        shares = " + ".join(f"{share:g}" for share in used)
        yield Conflict(
            f"{ROLLOUT}.gpu_memory_utilization",
            f"{shares} of the reward model on the same device is more than its memory",
            "=0.5 and reward.reward_model.rollout.gpu_memory_utilization=0.4",
        )


def find_transport_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield why weights and adapters cannot reach the engines."""
    rollout, rank = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.peft.lora_rank
    transport, key, engine = rollout.weight_transport, f"{ROLLOUT}.weight_transport", get_rollout_engine(rollout.name)
    max_rank = engine.capabilities.max_lora_rank
    is_direct, is_shared = transport in ("nccl", "ipc"), config.actor_rollout_ref.hybrid_engine
    if is_direct and config.trainer.device == "cpu":
        yield Conflict(key, f"{transport} requires accelerators, but trainer.device=cpu", "=host")
    elif is_direct and transport not in engine.capabilities.device_transports:
        yield Conflict(key, f"{transport} is not supported by rollout.name={rollout.name}", "=host")
    elif is_direct and rollout.python is not None:
        yield Conflict(key, f"{transport} does not reach another Python environment ({ROLLOUT}.python)", "=host")
    elif is_direct and rollout.lend_train_devices:
        yield Conflict(key, f"{transport} does not reach both kinds of engines ({_LENDING}=True)", "=host")
    elif is_direct and (transport == "ipc") != is_shared:
        # NCCL refuses two processes on one device; CUDA IPC does not reach other devices.
        other, where = ("ipc", "the same devices") if transport == "nccl" else ("nccl", "devices of their own")
        reason = f"{transport} is not possible to engines on {where} ({_HYBRID}={is_shared})"
        yield Conflict(key, reason, f"={other}, or host")
    if rank == 0 or rollout.lora_transport != "adapter":
        return
    for is_unfit, reason in (
        (max_rank == 0, f"rollout.name={rollout.name} loads full models"),
        (is_direct, f"weight_transport={transport} sends full models"),
        (rank > max_rank > 0, f"{engine.title} supports ranks up to {max_rank}"),
    ):
        if is_unfit:
            yield Conflict(f"{ROLLOUT}.lora_transport", f"adapter is not supported: {reason}", "=merged")


def _check_separate_devices(config: Config) -> Iterator[Conflict]:
    """Check that engines which do not share the devices of the train workers have devices of their own."""
    if config.actor_rollout_ref.hybrid_engine:
        return
    if config.trainer.local:
        yield Conflict(_HYBRID, "False is not possible with trainer.local=true, which runs all in one process", "=True")
    elif config.actor_rollout_ref.rollout.n_gpus_per_node is None:
        yield Conflict(f"{ROLLOUT}.n_gpus_per_node", f"engines need devices of their own with {_HYBRID}=False", "=N")
    width, per_node = count_engine_devices(config), config.trainer.n_gpus_per_node
    if config.actor_rollout_ref.rollout.lend_train_devices and per_node % width:
        reason = (
            f"an engine needs {width} devices of one node, and trainer.n_gpus_per_node={per_node} is not a multiple"
        )
        yield Conflict(_LENDING, f"True is not possible: {reason}", "=False")


def _check_width(config: Config, section: str, engine: RolloutConfig | RewardRolloutConfig) -> Iterator[Conflict]:
    """Check that an engine of several devices fits onto the nodes."""
    key, size = f"{section}.tensor_model_parallel_size", engine.tensor_model_parallel_size
    width = count_engine_devices(config) if section == ROLLOUT else size
    more = "" if width == size else f" x {width // size} (pipeline x data parallel size)"
    nodes, per_node, widest = "trainer", config.trainer.n_gpus_per_node, count_group_devices(config)
    if isinstance(engine, RolloutConfig) and not config.actor_rollout_ref.hybrid_engine:
        nodes, per_node, widest = ROLLOUT, engine.n_gpus_per_node or width, width
    if width > 1 and config.trainer.local:
        reason = "needs several processes, but trainer.local=true runs all in one"
        yield Conflict(key, f"{size}{more} {reason}", "=1")
    elif per_node % width or widest % width:
        whole = per_node if per_node % width else widest
        fitting = max(size for size in range(1, width) if whole % size == 0)
        reason = f"the devices of the widest engine, {widest}, are not a multiple of it"
        if per_node % width:
            reason = f"{nodes}.n_gpus_per_node={per_node} is not a multiple of it"
            reason += ", and engines on several nodes are not supported yet" if width > per_node else ""
        fix = f"={fitting}" if width == size else f"reduce them to {fitting} devices"
        yield Conflict(key, f"{size}{more} is not possible: {reason}", fix)
