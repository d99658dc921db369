"""What weights are called outside of a model: in checkpoints, and by the engines that load them.

transformers may hold in one tensor what a checkpoint has in several, such as the experts of a mixture. It knows the way
back, and takes it when it saves a model; here it is taken for weights on their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from verl.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["as_saved", "check_names"]


def as_saved(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a model's parameters as a checkpoint of it has them; views of the tensors where that can be."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in weights:
        yield from revert_weight_conversion(model, {name: tensor}).items()


def check_names(model: PreTrainedModel, path: str) -> None:
    """Refuse a model that has several tensors where its checkpoint has one: they travel one at a time."""
    from transformers.core_model_loading import revert_weight_conversion

    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    whole = revert_weight_conversion(model, weights)
    if odd := whole.keys() ^ dict(as_saved(model, weights.items())).keys():
        raise EngineError(
            f"model {path} ({model.config.model_type}): {sorted(odd)[0]} is made of several weights in a checkpoint; "
            "such a model can be neither published nor exported weight by weight, and is not supported"
        )
