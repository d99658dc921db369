"""Conversion between a model's parameters and the weights of its Hugging Face checkpoint, one at a time.

transformers may hold in one tensor what a checkpoint has in several, such as the experts of a mixture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def to_hf(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of parameters as a checkpoint has them; views of the tensors where possible."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in weights:
        yield from revert_weight_conversion(model, {name: tensor}).items()


@torch.no_grad()
def load_hf(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write weights, by their names in a checkpoint, into the model's parameters.

    Where the conversion of a parameter returns copies instead of views, converting the numbers 0, 1, 2, ... in its
    place shows which elements they came from.
    """
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    targets: dict[str, tuple[str, Tensor | None]] = {}
    for name, tensor in parameters.items():
        for key, part in to_hf(model, [(name, tensor)]):
            is_view = part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            targets[key] = name, part if is_view else None
    indices: dict[str, dict[str, Tensor]] = {}  # of one parameter at a time, since they are larger than it
    for key, weight in weights:
        name, view = targets[key]
        if view is not None:
            view.copy_(weight)
            continue
        if name not in indices:
            positions = torch.arange(parameters[name].numel(), device=parameters[name].device)
            indices = {name: dict(to_hf(model, [(name, positions.view(parameters[name].shape))]))}
        parameters[name].put_(indices[name][key], weight.to(parameters[name]))


def check_names(model: PreTrainedModel, path: str) -> None:
    """Raise for a model that has several parameters where its checkpoint has one: they are converted one at a time."""
    from transformers.core_model_loading import revert_weight_conversion

    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    whole = revert_weight_conversion(model, weights)
    if odd := whole.keys() ^ dict(to_hf(model, weights.items())).keys():
        raise EngineError(
            f"model {path} ({model.config.model_type}): {sorted(odd)[0]} is made of several parameters; such a model "
            "cannot be synced or exported weight by weight, and is not supported"
        )
