"""The moments of the engine's optimiser as the user's: what a loop of one's own saves, and begins again with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.training.fsdp import FsdpEngine

__all__ = ["show_moments", "take_moments"]


def show_moments(engine: FsdpEngine, optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.state` holds the engine's tensors themselves: no copies, and always those of the last step."""
    assert engine.optimizer is not None
    for own, theirs in _pairs(engine, optimizer):
        if own in engine.optimizer.state:
            optimizer.state[theirs] = {name: _local(value) for name, value in engine.optimizer.state[own].items()}


def take_moments(engine: FsdpEngine, optimizer: torch.optim.Optimizer) -> None:
    """Begin with the moments that the user's optimiser has, such as from `load_state_dict`."""
    assert engine.optimizer is not None
    for own, theirs in _pairs(engine, optimizer):
        if held := optimizer.state.get(theirs):
            moments = {name: torch.zeros_like(own, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
            for name, moment in moments.items():
                _local(moment).copy_(held[name])
            engine.optimizer.state[own] = {"step": torch.tensor(float(held["step"]), device=engine.device), **moments}


def _pairs(engine: FsdpEngine, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """The parameters of the engine, and those of the optimiser that stand for them."""
    own, theirs = list(engine.model.hf.parameters()), optimizer.param_groups[0]["params"]
    if [each.shape for each in own] != [each.shape for each in theirs]:
        raise ConfigError(
            [
                f"optimizer: its {len(theirs)} parameters must be the {len(own)} of the model, in their order: "
                "AdamW(model.parameters(), ...)"
            ]
        )
    return zip(own, theirs, strict=True)


def _local(value: Tensor) -> Tensor:
    """Of the only rank: the whole tensor."""
    return value.to_local() if isinstance(value, DTensor) else value
