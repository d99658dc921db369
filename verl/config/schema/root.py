"""The root of all settings."""

from __future__ import annotations

from verl.config.schema.actor import ActorConfig, ModelConfig, RefConfig
from verl.config.schema.algorithm import AlgorithmConfig
from verl.config.schema.base import Section, section
from verl.config.schema.critic import CriticConfig
from verl.config.schema.data import DataConfig
from verl.config.schema.reward import RewardConfig
from verl.config.schema.rollout import RolloutConfig
from verl.config.schema.trainer import RayConfig, TrainerConfig

__all__ = ["ActorRolloutRefConfig", "Config"]


class ActorRolloutRefConfig(Section):
    model: ModelConfig = section(ModelConfig, "The model that is trained.")
    actor: ActorConfig = section(ActorConfig, "How it is trained.")
    rollout: RolloutConfig = section(RolloutConfig, "How it generates.")
    ref: RefConfig = section(RefConfig, "The reference that it is held to.")


class Config(Section):
    """All settings of a run, frozen. Made by `verl.config.load`, which checks them against each other too."""

    data: DataConfig = section(DataConfig, "Which prompts, how many, how long.")
    actor_rollout_ref: ActorRolloutRefConfig = section(
        ActorRolloutRefConfig, "The policy: model, training, generation."
    )
    critic: CriticConfig = section(CriticConfig, "The value model of PPO.")
    reward: RewardConfig = section(RewardConfig, "How answers are scored.")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "From scores to advantages.")
    trainer: TrainerConfig = section(TrainerConfig, "How long, on how much, what is kept and who is told.")
    ray_kwargs: RayConfig = section(RayConfig, "Ray.")
