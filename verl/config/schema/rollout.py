"""`actor_rollout_ref.rollout.*`: the engines that generate."""

from __future__ import annotations

from typing import Any, Literal

from verl.config.schema.base import Section, section, setting

__all__ = ["RolloutConfig", "ValidationSampling"]


class ValidationSampling(Section):
    temperature: float = setting(0.0, "Sampling temperature in validation; 0: greedy.", ge=0)
    top_p: float = setting(1.0, "Nucleus sampling in validation.", gt=0, le=1)
    top_k: int = setting(-1, "Draw from the k likeliest tokens; -1: from all.", ge=-1)
    n: int = setting(1, "Answers per validation prompt.", unit="answers", ge=1)
    do_sample: bool | None = setting(None, "False: greedy whatever the temperature; null: the temperature decides.")


class MultiTurnConfig(Section):
    enable: bool = setting(False, "Episodes of several turns, with tools.")
    max_turns: int | None = setting(None, "Most turns of the model in an episode; null: no limit.", unit="turns", ge=1)
    tool_server: str | None = setting(None, "URL of a server that runs the tools.")


class EngineArguments(Section):
    vllm: dict[str, Any] = setting({}, "Engine arguments of vLLM, passed as they are.")
    sglang: dict[str, Any] = setting({}, "Server arguments of SGLang, passed as they are.", planned=True)


class RolloutConfig(Section):
    name: Literal["vllm", "sglang", "hf"] = setting(
        "vllm", "Rollout engine; hf: transformers, for debugging.", planned=("sglang",)
    )
    n: int = setting(1, "Answers per prompt; GRPO needs a group, 8 or more.", unit="answers", ge=1)
    temperature: float = setting(1.0, "Sampling temperature.", ge=0)
    top_p: float = setting(1.0, "Nucleus sampling.", gt=0, le=1)
    top_k: int = setting(-1, "Draw from the k likeliest tokens; -1: from all.", ge=-1)
    val_kwargs: ValidationSampling = section(ValidationSampling, "Sampling in validation.")
    num_engines: int | None = setting(
        None, "Engines; null: all devices, tensor_model_parallel_size each.", unit="engines", ge=1
    )
    tensor_model_parallel_size: int = setting(1, "Devices that share one engine.", unit="devices", ge=1, planned=True)
    gpu_memory_utilization: float = setting(
        0.5, "Share of an accelerator's memory that an engine takes.", unit="share", gt=0, le=1
    )
    cpu_cache_gib: int = setting(1, "Memory of an engine's key-value cache on a CPU.", unit="GiB", ge=1)
    max_num_seqs: int = setting(256, "Sequences that an engine generates at once.", unit="sequences", ge=1)
    max_num_batched_tokens: int | None = setting(
        None, "Tokens that an engine takes in one pass; null: the engine decides.", unit="tokens", ge=1
    )
    max_model_len: int | None = setting(
        None,
        "Longest sequence of an engine; null: data.max_prompt_length + data.max_response_length.",
        unit="tokens",
        ge=2,
    )
    enforce_eager: bool = setting(True, "No CUDA graphs: a quicker start, slower generation.")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = setting(
        "auto", "Type of the computation; auto: that of the actor.", planned=("fp8",)
    )
    load_format: Literal["dummy", "auto", "safetensors"] = setting(
        "dummy", "What an engine loads at its start; dummy: nothing, if the first publish brings all weights."
    )
    weight_transport: Literal["auto", "host", "nccl", "ipc"] = setting(
        "auto", "How weights reach the engines; auto: host memory. nccl and ipc are vLLM's own, not run on a GPU yet."
    )
    lora_transport: Literal["auto", "adapter", "merged"] = setting(
        "auto",
        "With an adapter, what reaches the engines: it alone, or all weights; auto: it alone where they can.",
    )
    probe_tolerance: float | None = setting(
        None, "Largest mean difference of log-probs to the trainer after a publish; null: by dtype.", unit="nats", gt=0
    )
    calculate_log_probs: bool = setting(
        True, "Report how far the engine's log-probs are from the trainer's; always on."
    )
    log_prob_micro_batch_size_per_gpu: int | None = setting(
        None, "Samples a rank takes at once for the old log-probs; null: as the actor.", unit="samples", ge=1
    )
    log_prob_max_token_len_per_gpu: int | None = setting(
        None, "Tokens a rank takes at once with use_dynamic_bsz; null: as the actor.", unit="tokens", ge=1
    )
    engine_kwargs: EngineArguments = section(EngineArguments, "Arguments for the engine itself.")
    multi_turn: MultiTurnConfig = section(MultiTurnConfig, "Conversations and tools.", planned=True)
