"""Optimizers of a training engine, and the scaling of losses that float16 needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.training.fsdp.model import PackedModel
from verl.training.optim.low_precision import LowPrecisionAdamW
from verl.training.optim.muon import Muon
from verl.training.settings import EngineSettings
from verl.training.tensors import group_by_mesh


def build_optimizer(model: PackedModel, settings: EngineSettings) -> torch.optim.Optimizer:
    options = optimizer_options(settings)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.optimizer == "muon":
        hidden = _hidden_matrices(model)
        return Muon(
            [parameter for parameter in trained if parameter in hidden],
            [parameter for parameter in trained if parameter not in hidden],
            momentum=settings.muon_momentum,
            adjust_lr=settings.muon_adjust_lr,
            dtype=torch.float32 if settings.compute_dtype == "float32" else torch.bfloat16,
            **options,
        )
    if settings.optimizer == "adamw_8bit" or settings.stochastic_rounding:
        return LowPrecisionAdamW(
            trained,
            rounds_stochastically=settings.stochastic_rounding,
            quantizes_moments=settings.optimizer == "adamw_8bit",
            **options,
        )
    return torch.optim.AdamW([{"params": group} for group in group_by_mesh(trained)], fused=True, **options)


def _hidden_matrices(model: PackedModel) -> set[Tensor]:
    """Return the matrices of the decoder layers, and the stacks of matrices of their experts."""
    return {
        parameter
        for layer in model.layers()
        for name, parameter in layer.named_parameters()
        if parameter.ndim == 2 or (parameter.ndim == 3 and "experts" in name)
    }


def optimizer_options(settings: EngineSettings) -> dict[str, Any]:
    return {
        "lr": settings.schedule.lr,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }


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
