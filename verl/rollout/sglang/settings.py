"""Settings of an SGLang engine, built from the settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from verl.config.batch_sizes import CPU_SEQUENCES
from verl.config.features import frees_engine_memory
from verl.rollout.settings import RolloutEngineSettings, assign_cores
from verl.types import hash_seed

if TYPE_CHECKING:
    from typing import Self

    from verl.config.schema import Config

WEIGHT_LOADER = "verl.rollout.sglang.weight_loader.load_message"

CONTEXT_MARGIN = 8
"""Tokens by which SGLang's limit exceeds `max_model_len`: it refuses longer prompts and shortens longer responses."""

_SAME_NAMES = (
    *("max_num_seqs", "max_num_batched_tokens", "load_format"),
    *("gpu_memory_utilization", "enforce_eager", "cpu_cache_gib"),
)
"""Settings with the name of their field."""


@dataclass(frozen=True, slots=True)
class SglangSettings(RolloutEngineSettings):
    """Settings of an SGLang engine. `kwargs` are passed to SGLang's server arguments unchanged."""

    dtype: str = "bfloat16"
    max_num_seqs: int | None = None  # None: 256 on the CPU, else SGLang chooses
    max_num_batched_tokens: int | None = None  # None: SGLang chooses
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1  # on accelerators only
    gpu_memory_utilization: float = 0.5
    enforce_eager: bool | None = None  # None: only on the CPU
    fp32_lm_head: bool = False  # compute logits in float32
    sleeps: bool = False  # the device is shared with a trainer: see `sleep`
    seed: int = 0
    cpu_cache_gib: int = 1
    cpu_cores: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Config, device: str, index: int) -> Self:
        """Return the settings of engine `index` of a run on devices of type `device`."""
        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        return replace(
            super(SglangSettings, cls).from_config(config, device, index),
            **{name: getattr(rollout, name) for name in _SAME_NAMES},
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            expert_parallel_size=rollout.expert_parallel_size,
            fp32_lm_head=model.fp32_lm_head,
            sleeps=frees_engine_memory(config, device),
            seed=hash_seed(config.trainer.seed, "engine", index),
            cpu_cores=assign_cores(index, rollout.tensor_model_parallel_size) if device == "cpu" else "",
            kwargs=rollout.engine_kwargs.sglang,
        )

    def make_arguments(self, cache_tokens: int | None) -> dict[str, Any]:
        """Return SGLang's server arguments. `cache_tokens` limits the key-value cache; None: SGLang measures."""
        is_cpu = self.device == "cpu"
        arguments: dict[str, Any] = {
            "model_path": self.model_path,
            "dtype": self.dtype,
            "device": self.device,
            "load_format": self.load_format,
            "trust_remote_code": self.trust_remote_code,
            "tp_size": self.tensor_parallel_size,
            "random_seed": self.seed,
            "skip_tokenizer_init": True,
            "log_level": "error",
            "custom_weight_loader": [WEIGHT_LOADER],
            "enable_priority_scheduling": True,  # for the probe
            "disable_priority_preemption": True,  # the probe comes when nothing runs
            "disable_cuda_graph": is_cpu if self.enforce_eager is None else self.enforce_eager,
            "enable_fp32_lm_head": self.fp32_lm_head,
        }
        if self.max_model_len is not None:
            arguments["context_length"] = self.max_model_len + CONTEXT_MARGIN
        if is_cpu or self.max_num_seqs is not None:
            arguments["max_running_requests"] = self.max_num_seqs or CPU_SEQUENCES
        if self.max_num_batched_tokens is not None:
            arguments |= dict.fromkeys(("chunked_prefill_size", "max_prefill_tokens"), self.max_num_batched_tokens)
        if is_cpu:
            arguments |= {
                "attention_backend": "torch_native",
                "sampling_backend": "pytorch",
                "grammar_backend": "none",
                "disable_overlap_schedule": True,
                "sleep_on_idle": True,  # else its process occupies a core
                "max_total_tokens": cache_tokens,
            }
        else:
            arguments |= {
                "mem_fraction_static": self.gpu_memory_utilization,
                "ep_size": self.expert_parallel_size,
                "enable_memory_saver": self.sleeps,
            }
        return arguments | self.kwargs

    def make_environment(self) -> dict[str, str]:
        """Return variables that SGLang reads: those that change numbers are forced, others are the user's to set."""
        forced = {
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for `CONTEXT_MARGIN`
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs at the temperature of the request
            "SGLANG_MAX_NEW_TOKENS_LIMIT": "0",
        }
        if self.device != "cpu":
            return forced
        forced["SGLANG_USE_CPU_ENGINE"] = "1"
        return forced | {"SGLANG_CPU_OMP_THREADS_BIND": self.cpu_cores, "TORCH_COMPILE_DISABLE": "1"}
