"""Which devices the rollout engines and reward models of a run use.

Ray assigns every device to one train worker. Engines and reward models on the same devices reserve no GPU in Ray: they
run on the node of these train workers, and CUDA_VISIBLE_DEVICES is set explicitly. An engine of several devices uses
adjacent devices of one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from verl.cluster.device_pool import PlacementPool
from verl.config.batch_sizes import count_engine_devices, count_engines
from verl.config.features import scores_responses
from verl.config.rollout_engines import get_rollout_engine
from verl.config.schema.root import Config
from verl.trainer.build.worker_settings import engine_settings, reward_model_settings, timeouts
from verl.workers.rewards import RemoteRewardModel
from verl.workers.rollout import RemoteEngine


def place_engines(
    config: Config,
    pool: PlacementPool,
    device: str,
    accelerators: Sequence[str] | None = None,
    *,
    load_format: str | None = None,
) -> list[RemoteEngine]:
    """Spawn the rollout engines, spread over the devices.

    Args:
        config: The settings of the run.
        pool: The devices.
        device: The type of the devices.
        accelerators: Those of the train workers, by rank; None: there are none, and engines own their devices.
        load_format: Replaces the setting.
    """
    spec = get_rollout_engine(config.actor_rollout_ref.rollout.name)
    count, width = count_engines(config), count_engine_devices(config)
    at_once = -(-count * width // pool.count)  # engines on a device; several only on CPU cores
    engines = []
    for index in range(count):
        first = index * width % pool.count
        settings = engine_settings(config, device, index)
        if load_format is not None:
            settings = replace(settings, load_format=load_format)
        engine = RemoteEngine.spawn(
            pool,
            index,
            spec,
            settings,
            config.actor_rollout_ref.model.external_modules,
            config.actor_rollout_ref.rollout.python,
            ",".join((accelerators or ())[first : first + width]),
            device=first,
            share=width / at_once if accelerators is None else 0,
            timeouts=timeouts(config),
        )
        engines.append(engine)
    return engines


def place_reward_models(
    config: Config, pool: PlacementPool, device: str, accelerators: Sequence[str]
) -> list[RemoteRewardModel]:
    """Spawn the replicas of the reward model, from the last device down."""
    model = config.reward.reward_model
    if not model.enable or not scores_responses(config):
        return []
    width = model.rollout.tensor_model_parallel_size
    models = []
    for index in range(model.replicas):
        first = pool.count - width - index * width % pool.count
        replica = RemoteRewardModel.spawn(
            pool,
            index,
            reward_model_settings(config, device, index),
            ",".join(accelerators[first : first + width]),
            device=first,
            timeouts=timeouts(config),
        )
        models.append(replica)
    return models
