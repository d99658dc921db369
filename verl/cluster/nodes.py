"""What the nodes of a running cluster have: versions of packages and resources."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from verl.cluster.device_pool import run_on_node
from verl.cluster.environment import list_versions
from verl.cluster.gpu_record import GpuRecord, read_record
from verl.cluster.session import connect, disconnect

_REPLY_S = 30.0


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node. `versions` are None if it did not respond, or cannot import verl: `problem` says why."""

    name: str
    gpus: int
    cpus: int
    versions: dict[str, str] | None
    problem: str = ""


def inspect_nodes(options: Mapping[str, Any]) -> list[NodeReport]:
    """Join the cluster that `options` (of `ray.init`) or RAY_ADDRESS name, ask every node, and leave it."""
    connect(options)
    try:
        tasks = {run_on_node(node["NodeID"], list_versions): node for node in ray.nodes() if node["Alive"]}
        ready, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=_REPLY_S)
        return [_describe(node, task if task in ready else None) for task, node in tasks.items()]
    finally:
        disconnect()


def read_gpu_records(nodes: Collection[str]) -> dict[str, GpuRecord]:
    """Return what `verl gpu-check` has found on nodes of the cluster, given by their ids; the keys are their names."""
    names = {node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in ray.nodes()}
    tasks = {run_on_node(node, read_record): names[node] for node in nodes}
    ready, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=_REPLY_S)
    return {name: _read_reply(task if task in ready else None) for task, name in tasks.items()}


def _read_reply(task: ray.ObjectRef | None) -> GpuRecord:
    if task is None:
        return GpuRecord(problem=f"no reply within {_REPLY_S:g} s")
    try:
        record: GpuRecord = ray.get(task)
    except RayError as error:
        return GpuRecord(problem=str(error).strip().splitlines()[-1])
    return record


def _describe(node: Mapping[str, Any], task: ray.ObjectRef | None) -> NodeReport:
    name, resources = str(node["NodeManagerHostname"]), node["Resources"]
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    if task is None:
        return NodeReport(name, gpus, cpus, None, f"does not respond within {_REPLY_S:g} s")
    try:
        return NodeReport(name, gpus, cpus, ray.get(task))
    except RayError as error:
        return NodeReport(name, gpus, cpus, None, str(error).strip().splitlines()[-1])
