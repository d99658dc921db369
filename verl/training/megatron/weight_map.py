"""The weights of a Megatron-Core model as boxes of the parameters that transformers has.

mbridge converts whole tensors, which is not enough for checkpoints that any layout can load; it also expects the names
of Transformer Engine, and changes its tables for all later models when the embeddings of one are tied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from verl.errors import EngineError
from verl.training.megatron.transformer import PackedGPTModel

Values = Mapping[str, Tensor]
"""A tensor for each of the parameters of this rank's stage, by their names there: weights, or moments of them."""


@dataclass(frozen=True)
class Piece:
    """The `view` of a parameter of the stage that fills the box, or the row `expert` of it."""

    source: str
    view: Callable[[Tensor], Tensor]
    expert: int | None = None

    def find_place(self, box: Tensor) -> Tensor:
        """Return the part of the box that this piece fills."""
        return box if self.expert is None else box[self.expert]


@dataclass
class Box:
    """The part of a parameter of transformers that this rank has.

    Attributes:
        name: The parameter's name in transformers.
        shape: The shape of the whole parameter.
        offsets: Where the box begins in it.
        sizes: The shape of the box.
        is_first: Whether this rank is the first of those that have the same box.
        pieces: What it consists of.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    is_first: bool
    pieces: list[Piece] = field(default_factory=list)

    @property
    def index(self) -> tuple[slice, ...]:
        """The box in the whole parameter."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def read(self, values: Values) -> Tensor:
        """Return a copy of the box."""
        first = values[self.pieces[0].source]
        box = torch.empty(self.sizes, dtype=first.dtype, device=first.device)
        for piece in self.pieces:
            view = piece.view(values[piece.source])
            piece.find_place(box).view(view.shape).copy_(view)
        return box

    def write(self, box: Tensor, values: Values) -> None:
        """Copy the box to its pieces."""
        for piece in self.pieces:
            view = piece.view(values[piece.source])
            view.copy_(piece.find_place(box).reshape(view.shape))


def map_weights(
    model: PackedGPTModel, config: TransformerConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Box]:
    """Return the box of each parameter of transformers of which this rank has a part.

    Args:
        model: The stage of this rank.
        config: Its configuration.
        shapes: The parameters of the transformers model and their shapes.
    """
    boxes: dict[str, Box] = {}
    for source, parameter in model.named_parameters():
        for name, offsets, sizes, is_first, piece in _find_parts(source, parameter, model, config):
            if name not in shapes:
                raise EngineError(f"Megatron's {source} would be {name}, which the model in transformers does not have")
            if source in _VOCABULARY:  # padded to a multiple of the ranks
                count = min(sizes[0], shapes[name][0] - offsets[0])
                if count <= 0:
                    continue
                sizes, piece = (count, sizes[1]), Piece(source, _rows(0, count))
            box = boxes.setdefault(name, Box(name, shapes[name], offsets, sizes, is_first))
            box.pieces.append(piece)
    return boxes


_Part = tuple[str, tuple[int, ...], tuple[int, ...], bool, Piece]
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc1|fc2)\.weight")
_VOCABULARY = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
}
"""Weights of which every tensor parallel rank has the rows of some tokens."""
_COPIES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
"""Weights of a layer of which every tensor parallel rank has a copy."""
_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
"""Weights of a layer of which every tensor parallel rank has some columns."""


def _find_parts(source: str, parameter: Tensor, model: PackedGPTModel, config: TransformerConfig) -> Iterator[_Part]:
    """Yield what a parameter of the stage consists of."""
    rank, size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    shape = tuple(parameter.shape)
    zeros = (0,) * len(shape)
    is_first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    if source in _VOCABULARY:
        is_copy = source == "output_layer.weight" and model.share_embeddings_and_output_weights
        name = "model.embed_tokens.weight" if is_copy else _VOCABULARY[source]
        yield name, (rank * shape[0], 0), shape, is_first and not is_copy, Piece(source, _whole)
        return
    if source in ("decoder.final_layernorm.weight", "value_head.weight", "value_head.bias"):
        name = source.replace("value_head", "score").replace("decoder.final_layernorm", "model.norm")
        yield name, zeros, shape, is_first and rank == 0, Piece(source, _whole)
        return
    if (match := _LAYER.fullmatch(source)) is None:
        raise EngineError(f"Megatron's {source} has no counterpart in transformers")
    layer, suffix = f"model.layers.{model.decoder.layers[int(match[1])].layer_number - 1}.", match[2]
    if suffix in _COPIES:
        yield layer + _COPIES[suffix], zeros, shape, is_first and rank == 0, Piece(source, _whole)
    elif suffix in _COLUMNS:
        yield layer + _COLUMNS[suffix], (0, rank * shape[1]), shape, is_first, Piece(source, _whole)
    elif suffix == "mlp.linear_fc1.weight":
        half = shape[0] // 2
        for index, name in enumerate(("gate_proj", "up_proj")):
            piece = Piece(source, _rows(index * half, (index + 1) * half))
            yield f"{layer}mlp.{name}.weight", (rank * half, 0), (half, shape[1]), is_first, piece
    elif suffix in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        yield from _attention(layer, source, shape, rank, is_first, config, config.num_query_groups // size)
    elif (expert := _EXPERT.fullmatch(suffix)) is not None:
        yield _expert(layer, source, shape, int(expert[1]), expert[2], config)
    else:
        raise EngineError(f"Megatron's {source} has no counterpart in transformers")


def _attention(
    layer: str,
    source: str,
    shape: tuple[int, ...],
    rank: int,
    is_first: bool,
    config: TransformerConfig,
    groups: int,
) -> Iterator[_Part]:
    """Query, key and value heads, which Megatron keeps by groups: the queries of a group, its key, its value."""
    width, queries = config.kv_channels, config.num_attention_heads // config.num_query_groups
    kind, starts = source.rpartition(".")[2], (0, queries, queries + 1)
    for name, start, count in zip("qkv", starts, (queries, 1, 1), strict=True):
        rows = groups * count * width
        piece = Piece(source, _heads(groups, start * width, (start + count) * width))
        offsets, sizes = (rank * rows, *(0 for _ in shape[1:])), (rows, *shape[1:])
        yield f"{layer}self_attn.{name}_proj.{kind}", offsets, sizes, is_first, piece


def _expert(layer: str, source: str, shape: tuple[int, ...], index: int, part: str, config: TransformerConfig) -> _Part:
    """One of the experts of this rank, which transformers keeps in one parameter with the others."""
    count = config.num_moe_experts // config.expert_model_parallel_size
    first = parallel_state.get_expert_model_parallel_rank() * count
    name = "gate_up_proj" if part == "fc1" else "down_proj"
    is_first = parallel_state.get_expert_data_parallel_rank() == 0
    piece = Piece(source, _whole, index)
    return f"{layer}mlp.experts.{name}", (first, 0, 0), (count, *shape), is_first, piece


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _rows(start: int, stop: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[start:stop]


def _heads(groups: int, start: int, stop: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.unflatten(0, (groups, -1))[:, start:stop]
