"""The settings of `verl sft`: supervised fine-tuning, with the sections of `verl train` where they apply."""

from __future__ import annotations

from typing import Any, Literal

from verl.config.schema.actor import (
    ActorCheckpointConfig,
    FsdpConfig,
    MegatronConfig,
    ModelConfig,
    OptimConfig,
    PeftConfig,
    TrainEngineName,
)
from verl.config.schema.base import Count, Positive, Section, section, setting
from verl.config.schema.conditions import needs, needs_given, unless, unless_given
from verl.config.schema.trainer import RayConfig, RunConfig
from verl.config.train_engines import DEFAULT_ENGINE

_NO_CONVERSATIONS = unless_given(".messages_key", ", and its conversations are used instead")


class SftDataConfig(Section):
    train_files: str | list[str] = setting(required=True)
    """Training examples: Parquet or JSONL, one file or a list; paths, or addresses such as hf://datasets/..."""
    val_files: str | list[str] | None = setting(None)
    """Validation examples; null: no validation."""
    prompt_key: str = setting("prompt", only_if=_NO_CONVERSATIONS)
    """Column of the prompt: a formatted string, or chat messages."""
    response_key: str = setting("response", only_if=_NO_CONVERSATIONS)
    """Column of the response, a string; only it is trained on."""
    messages_key: str | None = setting(None)
    """Column of conversations, instead of prompt and response; assistant turns are trained on."""
    tools_key: str | None = setting(None)
    """Column of the tools of a conversation, for the chat template; a list, or its JSON."""
    train_batch_size: Count = setting(256, unit="examples")
    """Examples per optimizer step over all ranks."""
    micro_batch_size_per_gpu: Count = setting(4, unit="examples", only_if=unless(".packing", True))
    """Examples per rank and pass; does not change the gradient."""
    packing: bool = setting(False)
    """Limit micro-batches by tokens (max_token_len_per_gpu) instead of examples."""
    max_token_len_per_gpu: Count = setting(16384, unit="tokens", only_if=needs(".packing"))
    """Maximum tokens per micro-batch; a longer example runs alone."""
    max_length: int = setting(2048, unit="tokens", ge=2)
    """Maximum length of an example, prompt and response together."""
    truncation: Literal["error", "left", "right"] = setting("error")
    """How a longer example is handled: an error at startup, or the side that is cut off."""
    shuffle: bool = setting(True)
    """Shuffle the training examples every epoch."""
    seed: int | None = setting(None, only_if=needs(".shuffle"))
    """Seed of the shuffling; null: trainer.seed."""
    num_workers: int | None = setting(None, unit="processes", ge=0)
    """Processes that tokenize examples at startup; null: chosen by size; 0: none."""
    cache_dir: str | None = setting(None)
    """Cache directory of example lengths; null: ~/.cache/verl."""
    train_max_samples: int = setting(-1, unit="rows", ge=-1)
    """Maximum training rows, from the first; -1: all."""
    val_max_samples: int = setting(-1, unit="rows", ge=-1, only_if=needs_given(".val_files"))
    """Maximum validation rows, from the first; -1: all."""
    apply_chat_template_kwargs: dict[str, Any] = setting({})
    """Keyword arguments for the tokenizer's chat template."""


class SftModelConfig(ModelConfig):
    strategy: TrainEngineName = setting(DEFAULT_ENGINE)
    """Training engine."""
    ulysses_sequence_parallel_size: Count = setting(1)
    """Ranks that share the tokens of every sequence, for long ones; they must divide the attention heads."""
    fsdp_config: FsdpConfig = section(FsdpConfig, "Sharded training (FSDP2).")
    megatron: MegatronConfig = section(MegatronConfig, "Megatron-Core (strategy=megatron).")
    peft: PeftConfig = section(PeftConfig, "LoRA adapter.")


class SftOptimConfig(OptimConfig):
    lr: Positive = setting(1e-5)
    """Learning rate."""
    grad_clip: Positive | None = setting(1.0)
    """Maximum norm of the gradient; null: no clipping."""


class SftConfig(Section):
    """All settings of a supervised run. Create it with `verl.config.load`, which also validates across settings."""

    data: SftDataConfig = section(SftDataConfig, "The examples.")
    model: SftModelConfig = section(SftModelConfig, "The model that is trained.")
    optim: SftOptimConfig = section(SftOptimConfig, "Optimizer and learning rate schedule.")
    checkpoint: ActorCheckpointConfig = section(ActorCheckpointConfig, "Contents of checkpoints.")
    trainer: RunConfig = section(RunConfig, "The run: duration, devices, checkpoints, logging.")
    ray_kwargs: RayConfig = section(RayConfig, "Ray.")
