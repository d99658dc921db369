"""Loading a Hugging Face model for training on packed sequences."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from verl.data.flat_batch import FlatBatch
from verl.errors import EngineError
from verl.models.hub import local_path
from verl.models.model_safety import PICKLED, model_problems
from verl.models.model_support import LAYER_TYPES, MODEL_ATTENTION, making_model
from verl.training.fsdp.lora import add_adapter
from verl.training.fsdp.model import PackedCausalLM, PackedModel, PackedValueModel, ScoredBackbone
from verl.training.fsdp.shared_prompts import find_shared_prompts
from verl.training.kernels.attention import PACKED_ATTENTION, activate_flash_attention, register_attention
from verl.training.settings import EngineSettings, Head
from verl.training.sharded_loading import (
    SlicingError,
    Sources,
    compute_buffers,
    fill,
    find_files,
    find_sources,
    find_unused,
    materialize,
)
from verl.training.tensors import parse_dtype
from verl.weights.bucket import check_names

logger = logging.getLogger(__name__)
HOST = torch.device("cpu")


def load_model(
    settings: EngineSettings, shard: Callable[[PackedModel], torch.device] = lambda model: HOST
) -> PackedCausalLM | PackedValueModel:
    """Load a model and verify that packing does not change its results, both on all ranks together.

    `shard` is called with a model whose parameters are on the meta device; it returns the device for its shards. Each
    rank then reads its own rows. Without `shard` the model stays whole, in host memory.

    Dropout is disabled, whatever the model's configuration says: an update must see the log-probs computed before it.
    """
    path = settings.model_path
    for problem in model_problems(local_path(path), trust_remote_code=settings.trust_remote_code):
        raise EngineError(problem)
    register_attention()
    disable_progress_bar()
    with making_model:
        hf, sources, note = open_model(settings)
    activate_flash_attention(settings.device, hf.config)
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    _check_layers(hf, path)
    check_names(hf, path)
    names = {id(tensor): name for name, tensor in hf.state_dict(keep_vars=True).items()}
    model: PackedCausalLM | PackedValueModel
    if settings.head == "tokens":
        model = PackedCausalLM(hf, settings.logprob_chunk, fp32_head=settings.fp32_lm_head)
    else:
        model = PackedValueModel(ScoredBackbone(hf))
    model.eval()
    model.note = note
    if settings.lora is not None:
        add_adapter(model, settings.lora, path)
    if settings.gradient_checkpointing and settings.trainable:
        model.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    pending = {name: names[id(parameter)] for name, parameter in model.named_parameters() if parameter.is_meta}
    device = shard(model)
    materialize(model, device)
    for name, parameter in model.named_parameters():
        if name in pending:
            fill(parameter, sources[pending[name]])
    _enable_packing(model, settings, device)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def open_model(settings: EngineSettings) -> tuple[PreTrainedModel, Sources, str]:
    """Return a model with its parameters on the meta device and where they are stored; or a whole model and why."""
    path = settings.model_path
    options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(path, **options)
        _zero_dropout_rates(config)
        model_class = select_model_class(config, settings.head)
        options |= {"dtype": parse_dtype(settings.param_dtype), "attn_implementation": MODEL_ATTENTION}
        try:
            return *_open_in_slices(path, config, model_class, **options), ""
        except SlicingError as reason:
            note = f"model {path}: every rank loads the whole model into host memory before it is sharded: {reason}"
            return model_class.from_pretrained(path, config=config, **options), {}, note
    except pickle.UnpicklingError as error:
        raise EngineError(f"model {path}: {PICKLED}") from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise EngineError(f"model {path}: cannot be loaded: {error}") from error


def _open_in_slices(
    path: str, config: PreTrainedConfig, model_class: Any, *, dtype: torch.dtype, **options: Any
) -> tuple[PreTrainedModel, Sources]:
    if options["trust_remote_code"] and getattr(config, "auto_map", None):
        raise SlicingError("its code is not part of transformers")
    files = find_files(path)
    with torch.device("meta"):
        hf = model_class.from_config(config, dtype=dtype, **options)
    if dtype != torch.float32 and (hf._keep_in_fp32_modules or hf._keep_in_fp32_modules_strict):
        raise SlicingError(f"some of its modules stay in float32 in a model of {dtype}")
    sources = find_sources(hf, files)
    if unused := find_unused(hf, files, sources):
        logger.warning("model %s: %d tensors in its files are not used: %s", path, len(unused), ", ".join(unused[:3]))
    compute_buffers(hf)
    for name, buffer in hf.named_buffers():
        if name in sources:
            fill(buffer, sources[name])
    return hf, sources


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


_SAMPLE = ((3, 1, 4, 1, 5, 9, 2), (3, 1, 4, 8), (3, 1, 4, 6), (2, 7))
_SAMPLE_PROMPT = 3  # tokens


@torch.no_grad()
def _enable_packing(model: PackedCausalLM | PackedValueModel, settings: EngineSettings, device: torch.device) -> None:
    """Replace the model's attention, and verify on a sample that packed sequences give the same results as single ones.

    With `shared_prompts`, also if they share a prompt. Half of the digits of the data type in which the model computes
    must agree; the rest is left to rounding. All ranks compute the same sample, on shards if the model is sharded.
    """
    for method in ("forward_unpacked", "forward_packed"):
        register_fsdp_forward_method(model, method)
    config, lengths = model.backbone.config, [len(sequence) for sequence in _SAMPLE]
    # Token ids spread over the vocabulary.
    tokens = torch.tensor([token for sequence in _SAMPLE for token in sequence]) * 7919
    tokens %= config.get_text_config().vocab_size
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    batch = FlatBatch(tokens, offsets, torch.zeros(len(tokens), dtype=torch.bool))
    batch = batch.with_(mask=batch.positions >= _SAMPLE_PROMPT)
    shared = find_shared_prompts(batch) if settings.shared_prompts else None
    batch = batch.to(device)
    unpacked = [model.forward_unpacked(sequence) for sequence in batch.tokens.split(lengths)]
    model.backbone.set_attn_implementation(PACKED_ATTENTION)
    expected, largest = torch.cat([values for values, _ in unpacked]), max(size for _, size in unpacked)
    limit = math.sqrt(torch.finfo(parse_dtype(settings.compute_dtype)).eps) * largest + 1e-5  # log-probs are float32
    for prompts in [None] if shared is None else [None, shared.to(device)]:
        gap = float((model.forward_packed(batch.tokens, batch.positions, lengths, prompts) - expected).abs().max())
        if not gap <= limit:
            which, fix = "", "this model type is not supported"
            if prompts is not None:
                which, fix = " that share a prompt", "set actor_rollout_ref.actor.use_prefix_grouper=False"
            raise EngineError(
                f"model {settings.model_path} ({config.model_type}): {model.verified} of packed sequences{which} "
                f"differ from those of single sequences by {gap:.2g}, more than rounding explains ({limit:.2g}); {fix}"
            )
