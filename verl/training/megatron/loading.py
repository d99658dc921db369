"""Reads the weights of a Hugging Face model into a Megatron-Core stage: each rank only its own part of the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from verl.errors import EngineError
from verl.models.hub import local_path
from verl.models.model_safety import model_problems
from verl.models.model_support import making_model
from verl.training.fsdp.model import ScoredBackbone
from verl.training.fsdp.model_loader import open_model
from verl.training.kernels.attention import activate_flash_attention
from verl.training.megatron.settings import MegatronSettings
from verl.training.megatron.supported_models import find_problem
from verl.training.megatron.transformer import PackedGPTModel, build_config, build_stage
from verl.training.megatron.weight_map import Box, map_weights
from verl.training.sharded_loading import Sources, fill
from verl.training.tensors import parse_dtype
from verl.types import LocalShard
from verl.weights.bucket import check_names


@dataclass
class StageModel:
    """The pipeline stage of a rank, and the transformers model that it is a part of.

    Attributes:
        module: The stage.
        config: Megatron's configuration.
        hf: The transformers model, without weights: for names and shapes.
        shapes: The shape of each of its parameters; tied ones once, in the same order on every rank.
        boxes: What this rank has of them.
        tied: Other names of parameters, under which a checkpoint has them, too.
        dtype: The data type of the weights.
        notes: Messages for the user.
    """

    module: PackedGPTModel
    config: TransformerConfig
    hf: PreTrainedModel
    shapes: dict[str, tuple[int, ...]]
    boxes: dict[str, Box]
    tied: dict[str, str]
    dtype: torch.dtype
    notes: list[str]

    @property
    def vocabulary(self) -> int:
        size: int = self.hf.config.vocab_size
        return size

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the data type of a weight: a critic's head is float32."""
        return torch.float32 if name.startswith("score.") else self.dtype


def load_stage(settings: MegatronSettings, device: torch.device) -> StageModel:
    """Build the stage of this rank and read its weights. Collective."""
    path = settings.model_path
    for problem in model_problems(local_path(path), trust_remote_code=settings.trust_remote_code):
        raise EngineError(problem)
    disable_progress_bar()
    with making_model:
        hf, sources, note = open_model(settings)
    if problem := find_problem(hf.config.to_dict(), settings):
        raise EngineError(problem)
    check_names(hf, path)
    activate_flash_attention(device, hf.config)
    tensors = hf.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in tensors.items()}
    whole: nn.Module = hf if settings.head == "tokens" else ScoredBackbone(hf)
    parameters = dict(whole.named_parameters())
    sources = {name: sources[names[id(each)]] for name, each in parameters.items() if each.is_meta}
    frequencies = find_frequencies(hf, settings).to(device)
    head = None
    if settings.head == "value":
        score = cast(nn.Linear, whole.score)
        head = nn.Linear(score.in_features, 1, bias=score.bias is not None, dtype=torch.float32, device=device)
    config = build_config(hf.config, settings)
    padding_index = getattr(hf.get_input_embeddings(), "padding_idx", None)
    module = build_stage(config, hf.config, frequencies, padding_index, head)
    shapes = {name: tuple(each.shape) for name, each in parameters.items()}
    boxes = map_weights(module, config, shapes)
    _check_complete(boxes, shapes, path)
    values = {name: parameter.data for name, parameter in module.named_parameters()}
    for tensor in values.values():
        tensor.zero_()  # the padding of the vocabulary
    for name, box in boxes.items():
        box.write(_read(box, parameters[name], sources), values)
    nn.Module.to(hf, "meta")
    firsts = {id(each): name for name, each in parameters.items()}
    tied = {name: firsts[id(each)] for name, each in tensors.items() if firsts.get(id(each), name) != name}
    tied = {} if settings.head == "value" else tied
    dtype = parse_dtype(settings.compute_dtype)
    return StageModel(module, config, hf, shapes, boxes, tied, dtype, [note] if note else [])


def find_frequencies(hf: PreTrainedModel, settings: MegatronSettings) -> Tensor:
    """Return the rotary frequencies [D / 2] that transformers computes, whatever scales them."""
    rotary: Any = hf.base_model.rotary_emb
    if rotary.attention_scaling != 1.0:
        raise EngineError(
            f"model {settings.model_path}: strategy=megatron does not support rotary embeddings that scale the "
            "attention (rope_parameters); use strategy=fsdp2"
        )
    frequencies: Tensor = rotary.inv_freq.float().clone()
    return frequencies


def _read(box: Box, parameter: Tensor, sources: Sources) -> Tensor:
    """Return a box from the files, or from a model that could not be read in slices."""
    if not parameter.is_meta:
        return parameter.detach()[box.index]
    rows = torch.empty(box.sizes[0], *box.shape[1:], dtype=parameter.dtype)
    fill(LocalShard(rows, (box.offsets[0], *(0 for _ in box.shape[1:])), box.shape, parameter.dtype), sources[box.name])  # type: ignore[arg-type]
    return rows[(slice(None), *box.index[1:])]


def _check_complete(boxes: Mapping[str, Box], shapes: Mapping[str, tuple[int, ...]], path: str) -> None:
    """Raise unless the boxes of all ranks fill every parameter, each element once. Collective."""
    counts = {name: torch.Size(box.sizes).numel() for name, box in boxes.items() if box.is_first}
    gathered: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, counts)
    for name, shape in shapes.items():
        held = sum(part.get(name, 0) for part in gathered)
        if held != torch.Size(shape).numel():
            raise EngineError(f"model {path}: Megatron has {held} elements of {name}, transformers {tuple(shape)}")
