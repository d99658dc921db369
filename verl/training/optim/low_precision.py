"""AdamW with weights or moments of few bits: bfloat16 weights rounded at random, moments quantized to 8 bits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

BLOCK = 256
"""Values of a row that share a scale. Blocks end with their row, so that no shard ends inside one."""
MIN_SIZE = 4096
"""Elements from which on a matrix has quantized moments; those of biases, norms and small matrices are float32."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class LowPrecisionAdamW(torch.optim.AdamW):
    """AdamW that computes in float32, one parameter at a time, and stores weights or moments in fewer bits.

    `rounds_stochastically`: bfloat16 weights are rounded up or down at random. A small update moves few weights but
    those far enough, so that the mean movement is right; rounding to the nearest would drop every update below 1/512
    of a weight.

    `quantizes_moments`: block-wise 8-bit moments: `NAME_codes`, with the shape of the parameter, and `NAME_scales`
    [rows, blocks per row]. Both are sharded like the parameter, so the number of ranks changes no code. Otherwise
    moments are float32.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        rounds_stochastically: bool = False,
        quantizes_moments: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(parameters, **options)
        self._rounds_stochastically, self._quantizes_moments = rounds_stochastically, quantizes_moments

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
            for name, value in state_dict["state"][index].items():
                if name != "step":  # torch has cast it to the type of the weights
                    self.state[parameter][name] = value.to(parameter.device, copy=True)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self._initial_state(parameter))
        weights = _local(parameter)
        exact = weights.float()
        moments = [_read_moment(state, name) for name in _MOMENTS]
        adamw(
            [exact],
            [_local(parameter.grad).float()],  # type: ignore[arg-type]
            moments[:1],
            moments[1:],
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
        for name, moment in zip(_MOMENTS, moments, strict=True):
            _write_moment(state, name, moment)
        weights.copy_(round_stochastically(exact) if self._rounds_stochastically else exact)

    def _initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {"step": torch.zeros(())}
        for name in _MOMENTS:
            if self._quantizes_moments and parameter.ndim > 1 and parameter.numel() >= MIN_SIZE:
                blocks = -(-math.prod(parameter.shape[1:]) // BLOCK)
                state[f"{name}_codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
                state[f"{name}_scales"] = _zeros_by_row(parameter, blocks)
            else:
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        return state


def round_stochastically(values: Tensor) -> Tensor:
    """Round float32 to bfloat16, up or down with probabilities that make the expectation exact."""
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
    return ((bits + noise) & -(1 << 16)).view(torch.float32).bfloat16()  # the upper half is the bfloat16 number


def quantize(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the nearest codes, with the shape of `values` [rows, ...], and the scales [rows, blocks per row].

    A positive value of an unsigned tensor never becomes 0: AdamW divides by the root of its second moment.
    """
    rows = values.flatten(1)
    blocks = F.pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    table = code_table(signed, values.device)
    shares = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    codes = torch.bucketize(shares, (table[1:] + table[:-1]) / 2, out_int32=True)
    if not signed:
        codes += (codes == 0) & (blocks > 0)
    return codes.flatten(1)[:, : rows.shape[1]].to(torch.uint8).view(values.shape), scales


def dequantize(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the float32 values of codes [rows, ...] and scales [rows, blocks per row]."""
    rows = codes.flatten(1)
    shares = code_table(signed, codes.device).index_select(0, rows.flatten().int()).view(rows.shape)
    return (shares * scales.repeat_interleave(BLOCK, dim=1)[:, : rows.shape[1]]).view(codes.shape)


@cache
def code_table(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values of codes, ascending: dynamic quantization (Dettmers et al., 8-bit optimizers, 2021).

    Every decade from 1e-7 to 1 has twice as many values as the one below it; and there are 0 and 1.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (exponent + (0 if signed else 1)) + 1, dtype=torch.float64)
        middles = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - 6)).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def _read_moment(state: dict[str, Tensor], name: str) -> Tensor:
    if name in state:
        return _local(state[name])
    return dequantize(_local(state[f"{name}_codes"]), _local(state[f"{name}_scales"]), signed=name == "exp_avg")


def _write_moment(state: dict[str, Tensor], name: str, moment: Tensor) -> None:
    if name not in state:  # float32 moments were updated in place
        codes, scales = quantize(moment, signed=name == "exp_avg")
        _local(state[f"{name}_codes"]).copy_(codes)
        _local(state[f"{name}_scales"]).copy_(scales)


def _zeros_by_row(parameter: Tensor, columns: int) -> Tensor:
    """Return zeros [rows, columns], sharded by rows like the parameter."""
    zeros = torch.zeros(_local(parameter).shape[0], columns, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return zeros
    mesh, shape = parameter.device_mesh, torch.Size((parameter.shape[0], columns))
    sharded = DTensor.from_local(zeros, mesh, parameter.placements, run_check=False, shape=shape, stride=(columns, 1))
    return sharded.to(parameter.device)  # from_local moves it to the device of the mesh, also if state is offloaded


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
