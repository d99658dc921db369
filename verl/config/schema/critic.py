"""`critic.*`: the value model of PPO."""

from __future__ import annotations

from typing import Literal

from verl.config.schema.actor import Aggregation, CheckpointConfig, FsdpConfig, OptimConfig, PeftConfig
from verl.config.schema.base import Section, section, setting

__all__ = ["CriticConfig"]


class CriticModelConfig(Section):
    path: str | None = setting(None, "Model that the critic starts from; null: the actor's.")
    enable_gradient_checkpointing: bool = setting(True, "Recompute activations in the backward pass.")


class CriticOptimConfig(OptimConfig):
    lr: float = setting(1e-5, "Learning rate of AdamW; steps once per optimiser step.", gt=0)


class CriticConfig(Section):
    enable: bool | None = setting(
        None, "Train a critic; null: with gae alone. For an estimator of your own that returns (advantages, returns)."
    )
    strategy: Literal["fsdp2", "megatron"] = setting("fsdp2", "Training engine.", planned=("megatron",))
    model: CriticModelConfig = section(CriticModelConfig, "The value model.")
    optim: CriticOptimConfig = section(CriticOptimConfig, "Optimiser and its schedule.")
    ppo_mini_batch_size: int | None = setting(
        None, "Prompts per optimiser step; null: as the actor.", unit="prompts", ge=1
    )
    ppo_micro_batch_size_per_gpu: int = setting(8, "Samples a rank takes at once.", unit="samples", ge=1)
    use_dynamic_bsz: bool | None = setting(
        None, "Fill micro-batches up to a number of tokens instead of samples; null: as the actor."
    )
    ppo_max_token_len_per_gpu: int | None = setting(
        None, "That number of tokens; null: as the actor.", unit="tokens", ge=1
    )
    ppo_epochs: int | None = setting(
        None, "Passes over the answers of a step; null: as the actor.", unit="passes", ge=1
    )
    loss_agg_mode: Aggregation = setting("token-mean", "How the losses of tokens become one number.")
    cliprange_value: float = setting(0.5, "How far a value may move from the old one.", gt=0)
    grad_clip: float = setting(1.0, "Largest norm of the gradient.", gt=0)
    fsdp_config: FsdpConfig = section(FsdpConfig, "Sharded training.")
    peft: PeftConfig = section(PeftConfig, "An adapter (LoRA); the value head is trained whole beside it.")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "Contents of checkpoints.")
