"""Settings of the Megatron-Core engine. Imports no torch, because the controller creates them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from verl.config.features import resolve_dtype
from verl.training.layout import RankLayout
from verl.training.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class MegatronSettings(EngineSettings):
    """Settings of a `MegatronEngine`.

    Weights and gradients are `compute_dtype` and float32; the optimizer's own copy of the weights is float32.
    """

    engine: ClassVar[str] = "megatron"

    tensor_parallel_size: int = 1  # ranks that share the matrices of every layer, and the vocabulary
    pipeline_parallel_size: int = 1  # stages of layers
    context_parallel_size: int = 1  # ranks that share the tokens of a sequence, and get the same batches
    first_stage_layers: int | None = None  # layers of the first and the last stage; None: the same as the others
    last_stage_layers: int | None = None
    grad_offload: bool = False  # free the memory of gradients while the engine is idle

    @classmethod
    def from_section(cls, section: Any, model_path: str, device: str) -> Self:
        can_offload = device != "cpu"
        return cls(
            model_path,
            device=device,
            compute_dtype=resolve_dtype(section.dtype, device),
            tensor_parallel_size=section.tensor_model_parallel_size,
            pipeline_parallel_size=section.pipeline_model_parallel_size,
            expert_parallel_size=section.expert_model_parallel_size,
            context_parallel_size=section.context_parallel_size,
            param_offload=can_offload and section.param_offload,
            grad_offload=can_offload and section.grad_offload,
            optimizer_offload=can_offload and section.optimizer_offload,
            first_stage_layers=section.override_transformer_config.num_layers_in_first_pipeline_stage,
            last_stage_layers=section.override_transformer_config.num_layers_in_last_pipeline_stage,
        )

    def freeze(self, *, param_offload: bool) -> Self:
        """Return the same settings for a model that is never updated."""
        return replace(EngineSettings.freeze(self, param_offload=param_offload), grad_offload=False)

    @property
    def model_parallel_size(self) -> int:
        """The number of ranks that have one copy of the model, apart from experts."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_batch(self) -> int:
        """The number of ranks of a stage that get the same batches."""
        return self.tensor_parallel_size * self.context_parallel_size

    def layout(self, world_size: int) -> RankLayout:
        """Return which ranks get the same samples: tensor ranks change fastest, then context, data, stages."""
        adjacent = self.ranks_per_batch
        data_size = max(1, world_size // (adjacent * self.pipeline_parallel_size))
        return RankLayout(tuple(rank // adjacent % data_size for rank in range(world_size)))
