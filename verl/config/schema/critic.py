"""`critic.*`: the value model of PPO."""

from __future__ import annotations

from typing import Literal

from verl.config.schema.actor import Aggregation, CheckpointConfig, FsdpConfig, OptimConfig, PeftConfig
from verl.config.schema.base import Section, section, setting
from verl.config.schema.rules import OnlyIf

_DYNAMIC = (".use_dynamic_bsz", "actor_rollout_ref.actor.use_dynamic_bsz")
_BY_TOKENS = OnlyIf(
    _DYNAMIC, lambda own, actor: actor if own is None else own, "use_dynamic_bsz of the critic is false"
)
_BY_SAMPLES = OnlyIf(
    _DYNAMIC, lambda own, actor: not (actor if own is None else own), "use_dynamic_bsz of the critic is true"
)


class CriticModelConfig(Section):
    path: str | None = setting(None, "Initial model of the critic; null: the actor's.")
    enable_gradient_checkpointing: bool = setting(True, "Recompute activations in the backward pass.")


class CriticOptimConfig(OptimConfig):
    lr: float = setting(1e-5, "Learning rate of AdamW.", gt=0)


class CriticConfig(Section):
    enable: bool | None = setting(
        None, "Train a critic; null: only with gae. For custom estimators that return (advantages, returns)."
    )
    strategy: Literal["fsdp2", "megatron"] = setting("fsdp2", "Training engine.", planned=("megatron",))
    model: CriticModelConfig = section(CriticModelConfig, "The value model.")
    optim: CriticOptimConfig = section(CriticOptimConfig, "Optimizer and learning rate schedule.")
    ppo_mini_batch_size: int | None = setting(
        None, "Prompts per optimizer step; null: same as the actor.", unit="prompts", ge=1
    )
    ppo_micro_batch_size_per_gpu: int = setting(
        8, "Samples per rank and pass.", unit="samples", ge=1, only_if=_BY_SAMPLES
    )
    use_dynamic_bsz: bool | None = setting(
        None, "Limit micro-batches by tokens instead of samples; null: same as the actor."
    )
    ppo_max_token_len_per_gpu: int | None = setting(
        None, "Maximum tokens per micro-batch; null: same as the actor.", unit="tokens", ge=1, only_if=_BY_TOKENS
    )
    ppo_epochs: int | None = setting(
        None, "Passes over the responses of a step; null: same as the actor.", unit="passes", ge=1
    )
    loss_agg_mode: Aggregation = setting("token-mean", "How per-token losses are reduced.")
    cliprange_value: float = setting(0.5, "Clip range of a value around the old value.", gt=0)
    grad_clip: float = setting(1.0, "Maximum norm of the gradient.", gt=0)
    fsdp_config: FsdpConfig = section(FsdpConfig, "Sharded training (FSDP2).")
    peft: PeftConfig = section(PeftConfig, "LoRA adapter; the value head is trained in full.")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "Contents of checkpoints.")
