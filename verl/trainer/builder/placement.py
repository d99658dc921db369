"""Places rollout engines and reward models on the devices of a run, next to the train workers."""

from __future__ import annotations

from typing import Any

from verl.cluster.device_pool import PlacementPool
from verl.config.batch_sizes import count_engines
from verl.config.schema.root import Config
from verl.trainer.worker_settings import deadlines, engine_settings, reward_model_settings
from verl.workers.rewards import RemoteRewardModel
from verl.workers.rollout import RemoteEngine

TRAIN_SHARE = 0.5
"""Part of a device that Ray reserves for its train worker."""


def place_engines(config: Config, pool: PlacementPool, device: str, **changes: Any) -> list[RemoteEngine]:
    """Reserve processes for the rollout engines, spread over the devices; `changes` replace engine settings."""
    rollout = config.actor_rollout_ref.rollout
    width = rollout.tensor_model_parallel_size
    count = count_engines(config)
    return [
        RemoteEngine.spawn(
            pool,
            index,
            device=index * width % pool.count,
            share=_engine_share(config) / -(-count * width // pool.count),
            name=rollout.name,
            settings=engine_settings(config, device, index) | changes,
            deadlines=deadlines(config),
        )
        for index in range(count)
    ]


def place_reward_models(config: Config, pool: PlacementPool, device: str) -> list[RemoteRewardModel]:
    """Reserve processes for the replicas of the reward model, from the last device down."""
    model = config.reward.reward_model
    if not model.enable:
        return []
    share = (1 - TRAIN_SHARE - _engine_share(config)) / -(-model.replicas // pool.count)
    return [
        RemoteRewardModel.spawn(
            pool,
            index,
            device=pool.count - 1 - index % pool.count,
            share=share,
            settings=reward_model_settings(config, device, index),
            deadlines=deadlines(config),
        )
        for index in range(model.replicas)
    ]


def _engine_share(config: Config) -> float:
    return (1 - TRAIN_SHARE) / (2 if config.reward.reward_model.enable else 1)
