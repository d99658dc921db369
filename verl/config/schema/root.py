"""The root of all settings of `verl train`."""

from __future__ import annotations

from verl.config.schema.actor import ActorConfig, ModelConfig, RefConfig
from verl.config.schema.algorithm import AlgorithmConfig
from verl.config.schema.base import Section, section, setting
from verl.config.schema.conditions import HAS_ADVANTAGES, HAS_CRITIC, needs
from verl.config.schema.critic import CriticConfig
from verl.config.schema.data import DataConfig
from verl.config.schema.distillation import DistillationConfig
from verl.config.schema.reward import RewardConfig
from verl.config.schema.rollout import RolloutConfig
from verl.config.schema.trainer import AsyncTrainingConfig, RayConfig, SkipConfig, TrainerConfig


class ActorRolloutRefConfig(Section):
    hybrid_engine: bool = setting(True)
    """Rollout engines use the devices of the train workers; false: devices of their own, in addition."""
    model: ModelConfig = section(ModelConfig, "The model that is trained.")
    actor: ActorConfig = section(ActorConfig, "Training of the policy.")
    rollout: RolloutConfig = section(RolloutConfig, "Generation.")
    ref: RefConfig = section(RefConfig, "The reference policy.")


class Config(Section):
    """All settings of a training run. Create it with `verl.config.load`, which also validates across settings."""

    data: DataConfig = section(DataConfig, "The prompts.")
    actor_rollout_ref: ActorRolloutRefConfig = section(
        ActorRolloutRefConfig, "The policy: model, training, generation."
    )
    critic: CriticConfig = section(CriticConfig, "The value model of PPO.", only_if=(HAS_ADVANTAGES, HAS_CRITIC))
    reward: RewardConfig = section(RewardConfig, "How responses are scored.")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "Advantages from rewards.")
    distillation: DistillationConfig = section(
        DistillationConfig, "On-policy distillation from a teacher.", only_if=needs("distillation.enable")
    )
    trainer: TrainerConfig = section(TrainerConfig, "The run: duration, devices, checkpoints, logging.")
    async_training: AsyncTrainingConfig = section(
        AsyncTrainingConfig, "Asynchronous training: how far generation runs ahead, and the size of a batch."
    )
    skip: SkipConfig = section(SkipConfig, "Stages to skip while debugging or measuring others.")
    ray_kwargs: RayConfig = section(RayConfig, "Ray.")
