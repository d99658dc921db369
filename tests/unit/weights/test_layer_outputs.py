"""Layers are found and recorded in models that return their states in different ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from verl.errors import EngineError
from verl.weights.layer_outputs import LayerOutputs, compare_states, find_layers

pytestmark = pytest.mark.unit

TOKENS, SIZE = 5, 8


class Layer(nn.Module):
    """Adds to the stream, as its `kind` of model does: returns the sum, in a tuple, or the two parts of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.kind = kind

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Any:
        stream = hidden if residual is None else hidden + residual
        if self.kind == "parts":
            return self.experts[0](stream), stream
        added = stream + self.experts[0](stream)
        return (added, torch.ones(2, 2)) if self.kind == "tuple" else added


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(3))

    def forward(self, states: Tensor) -> None:
        output: Any = (states,)
        for layer in self.layers:
            output = layer(*(output[:2] if layer.kind == "parts" else output[:1]))
            output = output if isinstance(output, tuple) else (output,)


def run(kind: str, states: Tensor, parts: int = 1) -> list[Tensor]:
    model = Model(kind)
    outputs = LayerOutputs(find_layers(model, 3))
    for part in states.chunk(parts):
        model(part if kind == "parts" else part[None])  # engines have no batch dimension
    taken = outputs.take(TOKENS)
    model(states)  # no longer recorded
    return taken


@pytest.mark.parametrize(("kind", "parts"), [("sum", 1), ("tuple", 1), ("parts", 1), ("parts", 2)])
def test_the_same_stream_is_recorded_however_layers_return_it(kind: str, parts: int) -> None:
    states = torch.randn(TOKENS + 1, SIZE, generator=torch.Generator().manual_seed(1))  # one more was generated
    expected = run("sum", states)
    found = run(kind, states, parts)
    assert [each.shape for each in expected] == [(1, TOKENS, SIZE)] * 3
    assert max(compare_states(a, b) for a, b in zip(found, expected, strict=True)) < 1e-6
    assert compare_states(found[0] * 1.1, expected[0]) == pytest.approx(0.1, rel=1e-3)


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(EngineError, match="Model: has no list of 4 layers"):
        find_layers(Model("sum"), 4)


def test_a_layer_that_did_not_run_is_named() -> None:
    model = Model("sum")
    outputs = LayerOutputs(find_layers(model, 3))
    model.layers[0](torch.zeros(1, TOKENS, SIZE))
    with pytest.raises(EngineError, match="layer 1 of the model did not run"):
        outputs.take(TOKENS)
