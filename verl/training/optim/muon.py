"""Muon: orthogonalized momentum for the matrices of hidden layers, and AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a x + b x^3 + c x^5: takes singular values from (0, 1] to about 1
_ITERATIONS = 5


class Muon(torch.optim.AdamW):
    """Moves each matrix of `hidden` along its momentum with all singular values set to about 1; AdamW for `others`.

    A sharded matrix is gathered first, one at a time, so that the result does not depend on the number of ranks; the
    momentum stays sharded. A stack of matrices (the experts of a layer, sharded by expert) is not gathered: each rank
    does its own. Nesterov momentum; the computation is in `dtype`.

    `adjust_lr`: "match_rms_adamw" scales updates to the usual size of AdamW's (0.2 per element at learning rate 1),
    "original" by sqrt(max(1, rows / columns)).
    """

    def __init__(
        self,
        hidden: Sequence[Tensor],
        others: Sequence[Tensor],
        *,
        momentum: float = 0.95,
        adjust_lr: str = "match_rms_adamw",
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        groups = [{"params": hidden, "use_muon": True}, {"params": others, "use_muon": False}]
        super().__init__([group for group in groups if group["params"]], fused=True, **options)
        self._momentum, self._adjust_lr, self._dtype = momentum, adjust_lr, dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"] if group["use_muon"] else ():
                if parameter.grad is not None:
                    self._update(parameter, group)
                    parameter.grad = None  # so that AdamW skips it
        super().step()

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        if not state:
            state["step"] = torch.zeros(())  # torch's AdamW expects one in every state
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["step"] += 1
        momentum = state["momentum_buffer"].lerp_(grad, 1 - self._momentum)
        direction = _orthogonalize_whole(grad.lerp(momentum, self._momentum).to(self._dtype))
        weights = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        scale = group["lr"] * self._lr_factor(*parameter.shape[-2:])
        weights.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction.to(weights), alpha=scale)

    def _lr_factor(self, rows: int, columns: int) -> float:
        if self._adjust_lr == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return U V^T, approximately, of matrices [..., m, n] = U S V^T: singular values become 0.7 to 1.2."""
    a, b, c = _NEWTON_SCHULZ
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def _orthogonalize_whole(update: Tensor) -> Tensor:
    """Return this rank's part of the orthogonalized matrix, or of the stack of matrices."""
    if not isinstance(update, DTensor):
        return orthogonalize(update)
    if update.ndim > 2:
        return orthogonalize(update.to_local())
    mesh = update.device_mesh
    on_device = cast(DTensor, update.to(mesh.device_type))  # also if the state is offloaded
    whole = orthogonalize(on_device.full_tensor())
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=update.placements).to_local()
