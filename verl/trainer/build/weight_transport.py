"""How weights go to the engines on GPUs where the settings leave it open (`weight_transport=auto`).

They go from device to device only in ways that `verl gpu-check` has tried, on every node of the run as it is now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from verl.cluster.gpu_record import GpuRecord
from verl.config.batch_sizes import count_engine_devices
from verl.config.checks.engine_placement import find_transport_conflicts
from verl.config.features import syncs_adapter_only
from verl.config.paths import change_settings
from verl.config.schema import Config
from verl.config.schema.conditions import ROLLOUT
from verl.config.train_engines import DEFAULT_ENGINE
from verl.errors import list_some

KEY = f"{ROLLOUT}.weight_transport"
_STAGES = {"ipc": ("versions", "sharing", "train-ipc"), "nccl": ("versions", "collectives", "train-nccl")}
"""The stages of `verl gpu-check` that have to pass."""
_WIDE_STAGE = "train-tp2"
"""Also required for engines of several devices."""
_NAMES = {"ipc": "by CUDA IPC", "nccl": "by NCCL"}


def choose_transport(
    config: Config, device: str, read_records: Callable[[], Mapping[str, GpuRecord]]
) -> tuple[str, str]:
    """Return the transport for `auto`, and a line for the user that says why it was chosen.

    Args:
        config: The settings of the run.
        device: The type of its devices.
        read_records: Returns what `verl gpu-check` has found on each node of the run, by the node's name.
    """
    fast = "ipc" if config.actor_rollout_ref.hybrid_engine else "nccl"
    if obstacle := _find_obstacle(config, device, fast) or _find_unchecked(config, fast, read_records()):
        return "host", f"weights go to the engines through host memory ({KEY}=auto): {obstacle}"
    return fast, f"weights go to the engines {_NAMES[fast]} ({KEY}=auto), with which `verl gpu-check` has passed"


def _find_obstacle(config: Config, device: str, transport: str) -> str:
    """Return why the settings need host memory, or are not what `verl gpu-check` tries; empty if neither."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    if config.trainer.local:
        return "trainer.local=true runs all in one process"
    if syncs_adapter_only(config, device):
        return "only the adapter is sent"
    direct = change_settings(config, {KEY: transport, "trainer.device": device})
    for conflict in find_transport_conflicts(direct):
        return conflict.reason
    if actor.strategy != DEFAULT_ENGINE:
        return f"`verl gpu-check` does not try {transport} with strategy={actor.strategy}"
    if count_engine_devices(config) != rollout.tensor_model_parallel_size:
        return f"`verl gpu-check` does not try {transport} with pipeline or data parallel engines"
    return ""


def _find_unchecked(config: Config, transport: str, records: Mapping[str, GpuRecord]) -> str:
    """Return what `verl gpu-check` has not tried, or found wrong, on the nodes of the run; empty if all is right."""
    if transport == "nccl" and len(records) > 1:
        reason = f"`verl gpu-check` does not try the network between the {len(records)} nodes of the run"
        return f"{reason}; set {KEY}=nccl to use it all the same"
    wanted = {*_STAGES[transport], *([_WIDE_STAGE] if count_engine_devices(config) > 1 else [])}
    problems = {
        node: record.problem or f"`verl gpu-check` has not passed {', '.join(sorted(wanted - record.passed))}"
        for node, record in records.items()
        if not wanted <= record.passed
    }
    if not problems:
        return ""
    found = list_some([f"{problem} on {node}" for node, problem in problems.items()])
    return f"{found}; run `verl gpu-check` once, and later runs send weights {_NAMES[transport]}"
