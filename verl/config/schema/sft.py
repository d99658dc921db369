"""The settings of `verl sft`: supervised training, with the sections of reinforcement learning where they fit."""

from __future__ import annotations

from typing import Any, Literal

from verl.config.schema.actor import ActorCheckpointConfig, FsdpConfig, ModelConfig, OptimConfig, PeftConfig
from verl.config.schema.base import Interval, Section, section, setting
from verl.config.schema.trainer import RayConfig, RunConfig

__all__ = ["SftConfig", "SftDataConfig"]


class SftDataConfig(Section):
    train_files: str | list[str] = setting(
        None, "Training examples: Parquet or JSONL, one file or a list.", required=True
    )
    val_files: str | list[str] | None = setting(None, "Held-out examples for validation; null: no validation.")
    prompt_key: str = setting("prompt", "Column of the prompt: a finished string, or chat messages.")
    response_key: str = setting("response", "Column of the answer, a string; it alone is trained.")
    messages_key: str | None = setting(
        None, "Column of whole conversations, instead of prompt and answer; the assistant's turns are trained."
    )
    tools_key: str | None = setting(
        None, "Column of the tools that a conversation may call, for the chat template; a list, or JSON of one."
    )
    train_batch_size: int = setting(256, "Examples of an optimiser step, over all ranks.", unit="examples", ge=1)
    micro_batch_size_per_gpu: int = setting(
        4, "Examples a rank takes at once; changes speed and memory, never the gradient.", unit="examples", ge=1
    )
    packing: bool = setting(False, "Fill micro-batches up to a number of tokens instead of examples.")
    max_token_len_per_gpu: int = setting(
        16384, "That number of tokens; only an example that is itself longer exceeds it.", unit="tokens", ge=1
    )
    max_length: int = setting(2048, "Longest example, prompt and answer together.", unit="tokens", ge=2)
    truncation: Literal["error", "left", "right"] = setting(
        "error", "What happens to a longer one: an error at start, or which side is cut."
    )
    shuffle: bool = setting(True, "Draw the training examples in a new random order every epoch.")
    seed: int | None = setting(None, "Seed of that order; null: trainer.seed.")
    num_workers: int | None = setting(
        None, "Processes that tokenise examples at start; null: as many as pay; 0: none.", unit="processes", ge=0
    )
    cache_dir: str | None = setting(None, "Where lengths of examples are kept for the next start; null: ~/.cache/verl.")
    train_max_samples: int = setting(-1, "Use only the first so many training rows; -1: all.", unit="rows", ge=-1)
    val_max_samples: int = setting(-1, "Use only the first so many validation rows; -1: all.", unit="rows", ge=-1)
    apply_chat_template_kwargs: dict[str, Any] = setting({}, "Passed to the tokenizer's chat template as they are.")


class SftModelConfig(ModelConfig):
    fsdp_config: FsdpConfig = section(FsdpConfig, "Sharded training.")
    peft: PeftConfig = section(PeftConfig, "An adapter (LoRA).")


class SftOptimConfig(OptimConfig):
    lr: float = setting(1e-5, "Learning rate of AdamW; steps once per optimiser step.", gt=0)
    grad_clip: float | None = setting(1.0, "Largest norm of the gradient; longer ones are scaled down.", gt=0)


class SftRunConfig(RunConfig):
    save_freq: Interval | None = setting(
        None,
        "A checkpoint every so many steps, and after the last; null: after the last alone; -1: never.",
        unit="steps",
    )


class SftConfig(Section):
    """All settings of a supervised run, frozen. Made by `verl.config.load`, which checks them against each other."""

    data: SftDataConfig = section(SftDataConfig, "Which examples, how many at once, how long.")
    model: SftModelConfig = section(SftModelConfig, "The model that is trained.")
    optim: SftOptimConfig = section(SftOptimConfig, "Optimiser and its schedule.")
    checkpoint: ActorCheckpointConfig = section(ActorCheckpointConfig, "Contents of checkpoints.")
    trainer: SftRunConfig = section(SftRunConfig, "How long, on how much, what is kept and who is told.")
    ray_kwargs: RayConfig = section(RayConfig, "Ray.")
