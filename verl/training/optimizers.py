"""Optimizers of a training engine, and the scaling of losses that float16 needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from verl.training.settings import FsdpSettings


def build_optimizer(parameters: Iterable[Tensor], settings: FsdpSettings) -> torch.optim.Optimizer:
    """Return the optimizer of the trainable parameters."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if settings.stochastic_rounding:
        return StochasticAdamW(trained, **optimizer_options(settings))
    return torch.optim.AdamW(trained, fused=True, **optimizer_options(settings))


def optimizer_options(settings: FsdpSettings) -> dict[str, Any]:
    """Return the options of the optimizer that are settings."""
    return {
        "lr": settings.schedule.lr,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }


class StochasticAdamW(torch.optim.AdamW):
    """AdamW for bfloat16 weights: updates are computed in float32 and then rounded up or down at random.

    A small update moves few weights but those far enough, so that the mean movement is right. Rounding to the nearest
    would drop every update below 1/512 of a weight. The moments are in float32.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):  # torch has cast them to the type of the weights
                moments = state_dict["state"][index][name]
                self.state[parameter][name] = moments.to(parameter.device, torch.float32, copy=True)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        weights = _local(parameter)
        exact = weights.float()
        adamw(
            [exact],
            [_local(parameter.grad).float()],  # type: ignore[arg-type]
            [_local(state["exp_avg"])],
            [_local(state["exp_avg_sq"])],
            [],
            [state["step"]],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        weights.copy_(round_stochastically(exact))


def round_stochastically(values: Tensor) -> Tensor:
    """Round float32 to bfloat16, up or down with probabilities that make the expectation exact."""
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
    return ((bits + noise) & -(1 << 16)).view(torch.float32).bfloat16()  # the upper half is the bfloat16 number


class LossScaler:
    """The factor of a float16 loss, without which small gradients become 0: the same on all ranks.

    Halved when a gradient is not finite, whose optimizer step is skipped, and doubled after `interval` steps without.
    For other data types it is 1.
    """

    def __init__(self, dtype: str, *, scale: float = 2.0**16, interval: int = 200) -> None:
        self.is_active, self._interval, self._good_steps = dtype == "float16", interval, 0
        self.scale = scale if self.is_active else 1.0

    def record(self, *, is_finite: bool) -> None:
        """Adjust the factor after an update."""
        self._good_steps = self._good_steps + 1 if is_finite else 0
        if self.is_active and not is_finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.is_active and self._good_steps == self._interval:
            self.scale, self._good_steps = self.scale * 2, 0

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        if self.is_active:
            self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
