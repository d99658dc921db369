"""Loading a Hugging Face model for training on packed sequences."""

from __future__ import annotations

import math
import pickle
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from verl.errors import EngineError
from verl.model_safety import MODEL_ATTENTION, PICKLED, local_path, model_problems
from verl.training.families import LAYER_TYPES
from verl.training.lora import add_adapter
from verl.training.model import (
    PACKED_ATTENTION,
    PackedCausalLM,
    PackedValueModel,
    ScoredBackbone,
    register_attention,
)
from verl.training.settings import Head, LoraSettings
from verl.weights.bucket import check_names


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    head: Head = "tokens",
    chunk: int | None = None,
    fp32_head: bool = False,
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    lora: LoraSettings | None = None,
) -> PackedCausalLM | PackedValueModel:
    """Load a model into host memory and verify that packing does not change its results.

    Dropout is disabled, whatever the model's configuration says: an update must see the log-probs computed before it.
    """
    for problem in model_problems(local_path(path), trust_remote_code=trust_remote_code):
        raise EngineError(problem)
    register_attention()
    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        _zero_dropout_rates(config)
        hf = select_model_class(config, head).from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=MODEL_ATTENTION, trust_remote_code=trust_remote_code
        )
    except pickle.UnpicklingError as error:
        raise EngineError(f"model {path}: {PICKLED}") from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise EngineError(f"model {path}: cannot be loaded: {error}") from error
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    _check_layers(hf, path)
    check_names(hf, path)
    model = PackedCausalLM(hf, chunk, fp32_head=fp32_head) if head == "tokens" else PackedValueModel(ScoredBackbone(hf))
    _enable_packing(model.eval(), path)
    if lora is not None:
        add_adapter(model, lora, path)
    if gradient_checkpointing:
        model.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


_CLASSIFIERS = {
    "ForTokenClassification": AutoModelForTokenClassification,
    "ForSequenceClassification": AutoModelForSequenceClassification,
}


def select_model_class(config: PreTrainedConfig, head: Head) -> Any:
    """Return the auto class to load: a causal model, unless a critic's checkpoint has a scalar head."""
    name = (config.architectures or [""])[0]
    if head == "value" and config.num_labels == 1:
        for suffix, model_class in _CLASSIFIERS.items():
            if name.endswith(suffix):
                return model_class
    return AutoModelForCausalLM


def _zero_dropout_rates(config: PreTrainedConfig) -> None:
    """Set every dropout rate to 0: `attention_dropout`, `resid_pdrop`, `layerdrop` and the like."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in part.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)


def _check_layers(hf: PreTrainedModel, path: str) -> None:
    config = hf.config.get_text_config()
    if unsupported := set(getattr(config, "layer_types", None) or LAYER_TYPES) - LAYER_TYPES:
        raise EngineError(
            f"model {path} ({config.model_type}): layers of type {', '.join(sorted(unsupported))} cannot be trained on "
            f"packed sequences; supported are {', '.join(sorted(LAYER_TYPES))}"
        )


_SAMPLE_LENGTHS = (7, 4, 4)


@torch.no_grad()
def _enable_packing(model: PackedCausalLM | PackedValueModel, path: str) -> None:
    """Replace the model's attention, and verify on a sample that packed sequences give the same results as single ones.

    Half of the digits of the weights' dtype must agree; the rest is left to rounding.
    """
    lengths, config = _SAMPLE_LENGTHS, model.backbone.config
    # Token ids spread over the vocabulary, the same on every rank.
    tokens = torch.arange(sum(lengths)) * 7919 % config.get_text_config().vocab_size
    positions = torch.cat([torch.arange(length) for length in lengths])
    unpacked = [model.forward_unpacked(sequence) for sequence in tokens.split(list(lengths))]
    model.backbone.set_attn_implementation(PACKED_ATTENTION)
    expected, largest = torch.cat([values for values, _ in unpacked]), max(size for _, size in unpacked)
    gap = float((model.forward_packed(tokens, positions, lengths) - expected).abs().max())
    limit = math.sqrt(torch.finfo(model.backbone.dtype).eps) * largest + 1e-5  # log-probs are float32
    if not gap <= limit:
        raise EngineError(
            f"model {path} ({config.model_type}): {model.verified} of packed sequences differ from those of single "
            f"sequences by {gap:.2g}, more than rounding explains ({limit:.2g}); this model type is not supported"
        )
