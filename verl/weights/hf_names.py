"""What weights are called outside of a model: in checkpoints, and by the engines that load them.

transformers may hold in one tensor what a checkpoint has in several, such as the experts of a mixture. It knows the way
back, and takes it when it saves a model; here it is taken for weights on their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check_names", "load_hf", "to_hf"]


def to_hf(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a model's parameters as a checkpoint of it has them; views of the tensors where that can be."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in weights:
        yield from revert_weight_conversion(model, {name: tensor}).items()


@torch.no_grad()
def load_hf(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write weights, by the names that a checkpoint has, into the model's own tensors.

    Of a tensor that stands for several, transformers gives some as copies, and writing to those is writing to nobody.
    Where their numbers came from is found out by having the numbers 0, 1, 2 ... take the same way.
    """
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    home: dict[str, tuple[str, Tensor | None]] = {}
    for name, tensor in own.items():
        for key, part in to_hf(model, [(name, tensor)]):
            is_view = part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            home[key] = name, part if is_view else None
    places: dict[str, dict[str, Tensor]] = {}  # of one tensor at a time: they take as much memory as it, and more
    for key, weight in weights:
        name, view = home[key]
        if view is not None:
            view.copy_(weight)
            continue
        if name not in places:
            numbers = torch.arange(own[name].numel(), device=own[name].device).view(own[name].shape)
            places = {name: dict(to_hf(model, [(name, numbers)]))}
        own[name].put_(places[name][key], weight.to(own[name]))


def check_names(model: PreTrainedModel, path: str) -> None:
    """Refuse a model that has several tensors where its checkpoint has one: they travel one at a time."""
    from transformers.core_model_loading import revert_weight_conversion

    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    whole = revert_weight_conversion(model, weights)
    if odd := whole.keys() ^ dict(to_hf(model, weights.items())).keys():
        raise EngineError(
            f"model {path} ({model.config.model_type}): {sorted(odd)[0]} is made of several weights in a checkpoint; "
            "such a model can be neither published nor exported weight by weight, and is not supported"
        )
