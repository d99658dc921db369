"""Where the processes of a run are placed: Ray with nodes of 8 GPUs that do not exist, real actors, no model.

For engines of 1, 2, 4 and 8 devices on 4 nodes, with and without a reward model next to them: every train worker has a
device of its own; the devices of an engine are on one node, and are those of train workers; no device is in more
engines than it has shares for. The same with half of the nodes for engines alone (hybrid_engine=False), whose devices
are those of no train worker. What cannot be placed is refused in the settings, before anything starts, with a reason.
The ranks of a node are adjacent, which Ray's bundles are not: also on 8 nodes, for blocks of every width.
`--short` (CI): 2 nodes of 2, engines of 1 and 2 devices.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from _common import finish  # isort: skip - puts tests/ on the path

import ray
from ray.cluster_utils import Cluster

from verl.cluster.device_pool import DevicePool
from verl.config.batch_sizes import count_group_devices, count_rollout_devices, count_train_ranks
from verl.config.load import load_dict
from verl.config.schema.root import Config
from verl.errors import ConfigError
from verl.trainer.build.placement import place_engines, place_reward_models
from verl.workers.train import PolicyGroup

IMPOSSIBLE = {
    "rollout.tensor_model_parallel_size=3": "is not a multiple of it",
    "rollout.tensor_model_parallel_size=16": "is not a multiple of it",
    "rollout.num_engines=64": "must not exceed",
}
Device = tuple[str, str]  # node, accelerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    nodes, gpus = (2, 2) if options.short else (4, 8)
    problems, placed, pools, unsorted = check_refusals(nodes, gpus), 0, 0, 0
    for count in (nodes, 2 * nodes):
        with fake_cluster(count, gpus):
            for width in (1, 2, 4, 8) * 2:  # Ray's order changes from one reservation to the next
                if width <= gpus:
                    split, was_unsorted = check_order(count, gpus, width)
                    problems, pools, unsorted = problems + split, pools + 1, unsorted + was_unsorted
    with fake_cluster(nodes, gpus):
        for width in [width for width in (1, 2, 4, 8) if width <= gpus]:
            for reward_width in (0, 1, width) if width > 1 else (0, 1):
                config = configure(nodes, gpus, width, reward_width)
                table = asyncio.run(place(config))
                placed += len(table)
                problems += check(table, config, f"width {width}, reward model {reward_width}")
            config = configure(nodes // 2, gpus, width, 0, *separate(nodes // 2, gpus))
            table = asyncio.run(place(config))
            placed += len(table)
            problems += check(table, config, f"width {width}, devices of their own")
    for problem in problems:
        print(problem)
    finish(
        "placement",
        not problems,
        devices=nodes * gpus,
        actors=placed,
        pools=pools,
        bundles_not_in_node_order=unsorted,
        problems=len(problems),
    )


@contextmanager
def fake_cluster(nodes: int, gpus: int) -> Iterator[None]:
    """Start nodes with GPUs that do not exist."""
    cluster = Cluster()
    for _ in range(nodes):
        cluster.add_node(num_cpus=gpus, num_gpus=gpus, object_store_memory=80 * 2**20)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def check_order(nodes: int, gpus: int, width: int) -> tuple[list[str], bool]:
    """Return whether the devices of a node are apart in a pool of all devices, and whether Ray's bundles were."""
    pool = DevicePool.reserve(nodes * gpus, "cuda", width=width, fix="add nodes")
    try:
        order, bundles = pool.list_nodes(), pool._bundle_nodes
    finally:
        pool.close()
    letters = {node: chr(65 + index) for index, node in enumerate(dict.fromkeys(bundles))}
    print(f"{nodes} nodes, width {width}: bundles {''.join(letters[node] for node in bundles)}")
    return find_split_nodes(order, f"{nodes} nodes, width {width}"), bool(find_split_nodes(bundles, ""))


def find_split_nodes(order: Sequence[str], case: str) -> list[str]:
    """Return the nodes whose devices, in the order of ranks, are not adjacent."""
    runs = Counter(node for node, _ in groupby(order))
    return [f"{case}: the ranks of node {node[:6]} are in {count} parts" for node, count in runs.items() if count > 1]


def separate(nodes: int, gpus: int) -> tuple[str, ...]:
    """Settings of engines with devices of their own."""
    rollout = "actor_rollout_ref.rollout"
    return "actor_rollout_ref.hybrid_engine=False", f"{rollout}.nnodes={nodes}", f"{rollout}.n_gpus_per_node={gpus}"


def configure(nodes: int, gpus: int, width: int, reward_width: int, *more: str) -> Config:
    settings = [
        "actor_rollout_ref.model.path=model",
        "data.train_files=train.parquet",
        "trainer.device=cuda",
        f"trainer.nnodes={nodes}",
        f"trainer.n_gpus_per_node={gpus}",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={width}",
        *more,
    ]
    if reward_width:
        model = "reward.reward_model"
        settings += [f"{model}.enable=True", f"{model}.model_path=reward", f"{model}.rollout.name=vllm"]
        settings += [f"{model}.rollout.tensor_model_parallel_size={reward_width}", f"{model}.replicas=2"]
    return load_dict({}, settings).config


async def place(config: Config) -> list[tuple[str, list[Device]]]:
    """Return the devices of every actor."""
    ranks, width = count_train_ranks(config), count_group_devices(config)
    pool = DevicePool.reserve(ranks, "cuda", width=width, fix="add nodes")
    policy = PolicyGroup.spawn(pool, ranks)
    accelerators = await policy.visible_devices()
    own = pool
    if config.actor_rollout_ref.hybrid_engine:
        engines = place_engines(config, pool, "cuda", accelerators)
    else:
        own_width = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        own = DevicePool.reserve(count_rollout_devices(config), "cuda", width=own_width, fix="add nodes")
        engines = place_engines(config, own, "cuda")
    models = place_reward_models(config, pool, "cuda", accelerators)
    try:
        table = [
            (f"train worker {rank}", await find_devices(actor, accelerators[rank]))
            for rank, actor in enumerate(policy.actors)
        ]
        for remote in (*engines, *models):
            table.append((str(remote.target), await find_devices(remote.actor)))
        for name, devices in table:
            print(f"{name:<18} {' '.join(f'{node}:{gpu}' for node, gpu in devices)}")
        return table
    finally:
        for actor in (*policy.actors, *(remote.actor for remote in (*engines, *models))):
            ray.kill(actor)
        for each in {id(pool): pool, id(own): own}.values():
            each.close()


async def find_devices(actor: Any, accelerators: str | None = None) -> list[Device]:
    def look(instance: Any) -> tuple[str, str]:
        accelerators = getattr(instance, "_accelerators", "") or os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return ray.get_runtime_context().get_node_id()[:6], accelerators

    node, own = await actor.__ray_call__.remote(look)
    return [(node, gpu) for gpu in (own if accelerators is None else accelerators).split(",")]


def check(table: list[tuple[str, list[Device]]], config: Config, case: str) -> list[str]:
    owned = Counter(device for name, devices in table if name.startswith("train") for device in devices)
    used = Counter(device for name, devices in table if name.startswith("rollout") for device in devices)
    problems = [f"{device} belongs to {count} train workers" for device, count in owned.items() if count > 1]
    problems += [f"{device} is in {count} engines" for device, count in used.items() if count > 1]
    is_shared = config.actor_rollout_ref.hybrid_engine
    fits = set(used) == set(owned) if is_shared else not set(used) & set(owned)
    if (len(owned), len(used)) != (count_train_ranks(config), count_rollout_devices(config)) or not fits:
        problems.append(f"{len(owned)} devices are trained on, engines use {len(used)}")
    for name, devices in table:
        width = 1 if name.startswith("train") else config.actor_rollout_ref.rollout.tensor_model_parallel_size
        if name.startswith("reward"):
            width = config.reward.reward_model.rollout.tensor_model_parallel_size
        allowed = set(owned) if is_shared else set(owned) | set(used)
        if len(set(devices)) != width or not set(devices) <= allowed:
            problems.append(f"{name} has {devices} instead of {width} devices of one node")
    nodes = [devices[0][0] for name, devices in table if name.startswith("train")]
    return [f"{case}: {problem}" for problem in problems] + find_split_nodes(nodes, case)


def check_refusals(nodes: int, gpus: int) -> list[str]:
    problems = []
    for setting, reason in IMPOSSIBLE.items():
        try:
            configure(nodes, gpus, 1, 0, f"actor_rollout_ref.{setting}")
            problems.append(f"{setting} was not refused")
        except ConfigError as error:
            print(error)
            if reason not in str(error):
                problems.append(f"{setting} was refused for another reason: {error}")
    return problems


if __name__ == "__main__":
    main()
