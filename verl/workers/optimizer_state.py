"""Exchange of settings and state between the training engine's optimizer and the user's, which users save."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.errors import ConfigError
from verl.training.settings import Schedule

if TYPE_CHECKING:
    from verl.training.fsdp.engine import FsdpEngine


def read_optimizer(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the settings of the engine's optimizer."""
    if optimizer is None:
        return {}
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or len(optimizer.param_groups) != 1:
        raise ConfigError([f"optimizer: {type(optimizer).__name__} must be an AdamW with one parameter group"])
    group = optimizer.param_groups[0]
    return {"schedule": Schedule(group["lr"]), **{name: group[name] for name in ("betas", "eps", "weight_decay")}}


def expose_moments(engine: FsdpEngine, optimizer: torch.optim.Optimizer) -> None:
    """Put the engine's state into `optimizer.state`: the tensors themselves, without copies."""
    assert engine.optimizer is not None
    for parameter, user_parameter in _pair_parameters(engine, optimizer):
        if state := engine.optimizer.state.get(parameter):
            optimizer.state[user_parameter] = {name: _to_local(value) for name, value in state.items()}


def load_moments(engine: FsdpEngine, optimizer: torch.optim.Optimizer) -> None:
    """Copy the state of the user's optimizer, such as from `load_state_dict`, into the engine's."""
    assert engine.optimizer is not None
    for parameter, user_parameter in _pair_parameters(engine, optimizer):
        if state := optimizer.state.get(user_parameter):
            moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
            for name, moment in moments.items():
                _to_local(moment).copy_(state[name])
            step = torch.tensor(float(state["step"]), device=engine.device)
            engine.optimizer.state[parameter] = {"step": step, **moments}


def _pair_parameters(engine: FsdpEngine, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the parameters of the engine with those of the user's optimizer."""
    ours, theirs = list(engine.model.hf.parameters()), optimizer.param_groups[0]["params"]
    if [each.shape for each in ours] != [each.shape for each in theirs]:
        raise ConfigError(
            [
                f"optimizer: must have the {len(ours)} parameters of the model in their order, not {len(theirs)} "
                "others: AdamW(model.parameters(), ...)"
            ]
        )
    return zip(ours, theirs, strict=True)


def _to_local(value: Tensor) -> Tensor:
    """Return the whole tensor: there is only one rank."""
    return value.to_local() if isinstance(value, DTensor) else value
