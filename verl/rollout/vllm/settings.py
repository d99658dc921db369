"""Settings of a vLLM engine, built from the settings of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from verl.config.batch_sizes import CPU_SEQUENCES
from verl.config.features import (
    frees_engine_memory,
    get_quantization,
    syncs_adapter_only,
    transport_name,
)
from verl.rollout.settings import RolloutEngineSettings, assign_cores
from verl.types import hash_seed

if TYPE_CHECKING:
    from typing import Self

    from verl.config.schema import Config

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's max_lora_rank."""

_SAME_NAMES = (
    *("max_num_seqs", "max_num_batched_tokens", "data_parallel_size"),
    *("gpu_memory_utilization", "enforce_eager", "cpu_cache_gib"),
)
"""Settings with the name of their field."""


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The adapters that an engine will receive; it reserves memory for `max_rank`."""

    rank: int
    alpha: int
    targets: str | Sequence[str]
    max_rank: int


@dataclass(frozen=True, slots=True)
class VllmSettings(RolloutEngineSettings):
    """Settings of a vLLM engine. `kwargs` and `ENGINE_ARGUMENTS` are passed to vLLM's engine arguments unchanged."""

    dtype: str = "bfloat16"
    quantization: str | None = None  # how the weights are quantized when they are loaded
    max_num_seqs: int | None = None  # None: see `max_sequences`
    max_num_batched_tokens: int | None = None  # None: vLLM chooses
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1  # this and the next two sizes: on accelerators only
    data_parallel_size: int = 1
    expert_parallel: bool = False
    gpu_memory_utilization: float = 0.5
    enforce_eager: bool | None = None  # None: see `is_eager`
    weight_backend: str = "host"
    adapter: AdapterSettings | None = None  # the engine loads the model, and receives adapters instead of weights
    routed_experts: bool = False  # return the experts of every token
    max_logprobs: int | None = None  # log-probs of a token that a request may ask for; None: vLLM's default
    fp32_lm_head: bool = False  # compute logits in float32
    sleeps: bool = False  # the device is shared with a trainer: see `sleep`
    seed: int = 0
    batch_invariant: bool = False  # results do not depend on the other requests of a batch; not on the CPU
    cpu_cache_gib: int = 1
    cpu_cores: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Config, device: str, index: int) -> Self:
        """Return the settings of engine `index` of a run on devices of type `device`."""
        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        adapter = _adapter_settings(config) if syncs_adapter_only(config, device) else None
        return replace(
            super(VllmSettings, cls).from_config(config, device, index),
            **{name: getattr(rollout, name) for name in _SAME_NAMES},
            load_format="auto" if adapter and rollout.load_format == "dummy" else rollout.load_format,
            quantization=get_quantization(config),
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            pipeline_parallel_size=rollout.pipeline_model_parallel_size,
            expert_parallel=rollout.expert_parallel_size > 1,
            weight_backend=transport_name(config),
            adapter=adapter,
            routed_experts=config.actor_rollout_ref.actor.router_replay.mode == "R3",
            max_logprobs=rollout.top_k if rollout.keep_sampling_mask else None,
            fp32_lm_head=model.fp32_lm_head,
            sleeps=frees_engine_memory(config, device),
            seed=hash_seed(config.trainer.seed, "engine", index),
            batch_invariant=config.trainer.deterministic and device != "cpu",
            cpu_cores=assign_cores(index, rollout.tensor_model_parallel_size) if device == "cpu" else "",
            kwargs=rollout.engine_kwargs.vllm,
        )

    @property
    def processes(self) -> int:
        """The number of vLLM's worker processes, one for each device."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def is_eager(self) -> bool:
        """Whether nothing is compiled or captured in CUDA graphs; by default only on the CPU."""
        return self.device == "cpu" if self.enforce_eager is None else self.enforce_eager

    @property
    def max_sequences(self) -> int | None:
        """Maximum sequences at once; None: vLLM chooses, which it does by device on accelerators."""
        if self.max_num_seqs is not None or self.device != "cpu":
            return self.max_num_seqs
        return min(CPU_SEQUENCES, self.max_num_batched_tokens or CPU_SEQUENCES)


def _adapter_settings(config: Config) -> AdapterSettings:
    peft = config.actor_rollout_ref.actor.peft
    max_rank = next(rank for rank in LORA_RANKS if rank >= peft.lora_rank)
    return AdapterSettings(peft.lora_rank, peft.lora_alpha, peft.target_modules, max_rank)
