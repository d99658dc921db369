"""A Megatron-Core model of a Hugging Face configuration: its layers, its rotary embeddings, its packed attention.

Transformer Engine is not used, even where it is installed: attention is the engine's packed attention, as in FSDP2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedConfig

from verl.training.kernels.attention import attend_packed
from verl.training.megatron.settings import MegatronSettings
from verl.training.sequence_parallel import SequenceGroup
from verl.training.tensors import parse_dtype


@dataclass
class Packing(PackedSeqParams):
    """Sequences laid end to end, for `PackedAttention`; its arguments are those of `attend_packed`.

    With a `group`, its ranks share their tokens (context parallelism).
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    group: SequenceGroup | None = None


class RMSNorm(nn.RMSNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        # Each rank normalizes some of the tokens, or some of the heads, so Megatron adds up their gradients.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - torch declares no such name


class PackedAttention(nn.Module):
    """Causal attention within each of the packed sequences, for the heads of this rank."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Packing | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend: query [T, 1, heads, D], key and value [T, 1, groups, D] -> [T, 1, heads * D]."""
        assert packed_seq_params is not None, "all batches are packed"
        attend: Callable[..., Tensor] = attend_packed
        if packed_seq_params.group is not None:
            attend = partial(packed_seq_params.group.attend, attend_packed)
        out = attend(
            *(states.squeeze(1) for states in (query, key, value)), scaling=self._scale, **packed_seq_params.arguments
        )
        return out.flatten(1).unsqueeze(1)


class PackedGPTModel(GPTModel):
    """A pipeline stage that returns hidden states, also in the last stage, where the head is applied in chunks."""

    def __init__(
        self, inverse_frequencies: Tensor, padding_index: int | None, head: nn.Module | None, **arguments: Any
    ) -> None:
        super().__init__(position_embedding_type="none", **arguments)
        self._inverse_frequencies, self._padding_index = inverse_frequencies, padding_index
        if head is not None and self.post_process:
            del self.output_layer
            self.value_head = head

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, **arguments: Any) -> tuple[Any, ...]:
        """Add the rotary angles [T, 1, 1, D] of positions [1, T], whatever sequences they belong to."""
        states, _, *others = super()._preprocess(input_ids=input_ids, position_ids=position_ids, **arguments)
        if states is not None and self._padding_index is not None:
            rank = parallel_state.get_tensor_model_parallel_rank() if self.config.sequence_parallel else 0
            is_padding = (input_ids[0] == self._padding_index).unflatten(0, (-1, len(states)))[rank]
            # In transformers too, the embedding of this token gets no gradient as an input.
            states = torch.where(is_padding[:, None, None], states.detach(), states)
        angles = position_ids[0].float()[:, None] * self._inverse_frequencies
        return states, torch.cat([angles, angles], -1)[:, None, None], *others

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    @property
    def output_weight(self) -> Tensor:
        """The weights of the output layer [V / ranks, H], in the last stage."""
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight


def build_config(config: PreTrainedConfig, settings: MegatronSettings) -> TransformerConfig:
    """Return Megatron's configuration of a model: nothing dropped out, nothing fused, any length."""
    dtype = parse_dtype(settings.compute_dtype)
    moe: dict[str, Any] = {}
    if config.model_type == "qwen3_moe":
        moe = {
            "num_moe_experts": config.num_experts,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_topk": config.num_experts_per_tok,
            # The softmax of the chosen experts' logits is that of all logits, normalized over the chosen ones.
            "moe_router_pre_softmax": not config.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": False,
            "moe_router_dtype": "fp32",
        }
    heads = config.num_attention_heads
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // heads,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.model_type in ("qwen3", "qwen3_moe"),
        add_qkv_bias=config.model_type == "qwen2",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=settings.tensor_parallel_size,
        pipeline_model_parallel_size=settings.pipeline_parallel_size,
        num_layers_in_first_pipeline_stage=settings.first_stage_layers,
        num_layers_in_last_pipeline_stage=settings.last_stage_layers,
        expert_model_parallel_size=settings.expert_parallel_size,
        expert_tensor_parallel_size=1,
        context_parallel_size=settings.context_parallel_size,
        sequence_parallel=settings.tensor_parallel_size > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Needed for the marks of tensor parallel weights, without which the gradient norm is silently wrong.
        perform_initialization=True,
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # demanded by variable_seq_lengths, even for dense models
        attention_backend=AttnBackend.unfused,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **_recompute(settings),
        **moe,
    )


def build_stage(
    config: TransformerConfig,
    hf: PreTrainedConfig,
    frequencies: Tensor,
    padding_index: int | None,
    head: nn.Module | None,
) -> PackedGPTModel:
    """Return the pipeline stage of this rank, with uninitialized weights."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = ModuleSpec(module=PackedAttention)
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=RMSNorm)
    size = config.tensor_model_parallel_size
    stage = PackedGPTModel(
        frequencies,
        padding_index,
        head,
        config=config,
        transformer_layer_spec=layers,
        vocab_size=math.ceil(hf.vocab_size / size) * size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=head is None and bool(hf.tie_word_embeddings),
    )
    for name, parameter in stage.named_parameters():
        if ".experts." in name:
            # Whole experts see only the tokens of one tensor parallel rank. Megatron would not add up their gradients
            # over those ranks if expert_model_parallel_size is 1.
            setattr(parameter, "allreduce", False)  # noqa: B010 - torch declares no such name
    return stage


def _leave(weight: Tensor) -> Tensor:
    """Leave a weight as it is: it will be read from files."""
    return weight


def _recompute(settings: MegatronSettings) -> dict[str, Any]:
    if not (settings.gradient_checkpointing and settings.trainable):
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
