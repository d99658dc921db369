"""How far rounding moves the results of a model: passes with noise of its size in the output of every weight matrix.

Two engines that hold the same weights differ by the order in which their kernels add and by what they round. Both act
like noise in every layer, whose effect depends on the model: its depth, its width, and how sharp its log-probs are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

NOISE = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8, "fp8": 2**-4.3}
"""Dtype -> standard deviation of the noise, as a share of the outputs' own size, in a pass that computes more exactly.

In FP8 engines round weights and activations, each by 2**-4 / sqrt(3) on average; in the others also what is between the
matrices. A pass in the same dtype rounds that by itself, differently with any noise: half of it is enough then.
`make show-probe` compares the results with those of real rounding.
"""


@contextmanager
def rounding_noise(model: nn.Module, dtype: str, seed: int = 0) -> Iterator[None]:
    """Add noise of the size of rounding to `dtype` to the output of each weight matrix, the same for the same seed.

    Compiled layers run uncompiled meanwhile: they would not see the hooks.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def add(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        device = output.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        size = output.float().square().mean(-1, keepdim=True).sqrt()
        noise = torch.randn(output.shape, generator=generators[device], device=device)
        scale = NOISE[dtype] / (2 if str(output.dtype) == f"torch.{dtype}" else 1)
        return (output.float() + scale * size * noise).to(output.dtype)

    matrices = [
        module for module in model.modules() if any(weight.ndim > 1 for weight in module.parameters(recurse=False))
    ]
    handles = [module.register_forward_hook(add) for module in matrices]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()
