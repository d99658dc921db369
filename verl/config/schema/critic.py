"""`critic.*`: the value model of PPO."""

from __future__ import annotations

from verl.config.schema.actor import (
    Aggregation,
    CheckpointConfig,
    FsdpConfig,
    MegatronConfig,
    OptimConfig,
    PeftConfig,
    TrainEngineName,
)
from verl.config.schema.base import Count, Positive, Section, section, setting
from verl.config.schema.conditions import DYNAMIC, OnlyIf, may_batch_by_samples, may_batch_by_tokens
from verl.config.train_engines import DEFAULT_ENGINE

_DYNAMIC = (".use_dynamic_bsz", DYNAMIC, "trainer.device")
_BY_TOKENS = OnlyIf(
    _DYNAMIC,
    lambda critic, *actor: may_batch_by_tokens(*actor) if critic is None else critic,
    "use_dynamic_bsz of the critic is false",
)
_BY_SAMPLES = OnlyIf(
    _DYNAMIC,
    lambda critic, *actor: may_batch_by_samples(*actor) if critic is None else not critic,
    "use_dynamic_bsz of the critic is true",
)


class CriticModelConfig(Section):
    path: str | None = setting(None)
    """Initial model of the critic; null: the actor's."""
    enable_gradient_checkpointing: bool = setting(True)
    """Recompute activations in the backward pass."""


class CriticOptimConfig(OptimConfig):
    lr: Positive = setting(1e-5)
    """Learning rate."""


class CriticConfig(Section):
    enable: bool | None = setting(None)
    """Train a critic; null: only with gae. For custom estimators that return (advantages, returns)."""
    strategy: TrainEngineName = setting(DEFAULT_ENGINE)
    """Training engine."""
    model: CriticModelConfig = section(CriticModelConfig, "The value model.")
    optim: CriticOptimConfig = section(CriticOptimConfig, "Optimizer and learning rate schedule.")
    ppo_mini_batch_size: Count | None = setting(None, unit="prompts")
    """Prompts per optimizer step; null: same as the actor."""
    ppo_micro_batch_size_per_gpu: Count = setting(8, unit="samples", only_if=_BY_SAMPLES)
    """Samples per rank and pass."""
    use_dynamic_bsz: bool | None = setting(None)
    """Limit micro-batches by tokens instead of samples; null: same as the actor."""
    ppo_max_token_len_per_gpu: Count | None = setting(None, unit="tokens", only_if=_BY_TOKENS)
    """Maximum tokens per micro-batch; null: same as the actor."""
    ppo_epochs: Count | None = setting(None, unit="passes")
    """Passes over the responses of a step; null: same as the actor."""
    loss_agg_mode: Aggregation = setting("token-mean")
    """How per-token losses are reduced."""
    cliprange_value: Positive = setting(0.5)
    """Clip range of a value around the old value."""
    grad_clip: Positive = setting(1.0)
    """Maximum norm of the gradient."""
    fsdp_config: FsdpConfig = section(FsdpConfig, "Sharded training (FSDP2).")
    megatron: MegatronConfig = section(MegatronConfig, "Megatron-Core (strategy=megatron).")
    peft: PeftConfig = section(PeftConfig, "LoRA adapter; the value head is trained in full.")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "Contents of checkpoints.")
