"""The hidden states after each decoder layer, by which a trainer and an engine with the same weights are compared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verl.errors import EngineError


def find_layers(model: nn.Module, count: int) -> list[nn.Module]:
    """Return the `count` decoder layers of a model."""
    for module in model.modules():  # from the outside in: a list of as many experts comes later
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise EngineError(f"{type(model).__name__}: has no list of {count} layers, so they cannot be compared")


class LayerOutputs:
    """Records what layers return, from now on until `take`."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._parts: list[list[Tensor]] = [[] for _ in layers]
        self._hooks = [layer.register_forward_hook(partial(self._record, index)) for index, layer in enumerate(layers)]

    def take(self, tokens: int) -> list[Tensor]:
        """Return the states after each layer, of the first `tokens` tokens since the start: [1 or 2, T, D] float32.

        Layers that leave the sum with their residual to the next layer, as in vLLM, have two: without and with it.
        """
        for hook in self._hooks:
            hook.remove()
        if not all(self._parts):
            raise EngineError(f"layer {self._parts.index([])} of the model did not run here, so it cannot be compared")
        return [torch.cat(parts, 1)[:, :tokens] for parts in self._parts]

    def _record(self, index: int, module: nn.Module, inputs: Any, output: Any) -> None:
        hidden, *others = output if isinstance(output, tuple) else (output,)
        states = [hidden.detach().cpu().float()]
        if others and isinstance(others[0], Tensor) and others[0].shape == hidden.shape:
            states.append(states[0] + others[0].detach().cpu().float())
        self._parts[index].append(torch.stack([each.reshape(-1, hidden.shape[-1]) for each in states]))


def compare_states(states: Tensor, expected: Tensor) -> float:
    """Return the mean over tokens of the relative difference of states [1 or 2, T, D] from the expected ones."""
    [expected] = expected
    difference = (states - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-12)
    return float(difference.mean(-1).min())
