"""What `verl replay` says about metrics and layers that differ."""

from __future__ import annotations

import math

import pytest

from verl.commands.runs.replay import describe_layers, describe_metrics, find_differences
from verl.trainer.replay.layers import LayerComparison, LayerDifference

pytestmark = pytest.mark.unit


def test_metrics_differ_beyond_the_tolerance_absolute_and_relative() -> None:
    recorded = {"loss": 0.0, "norm": 100.0, "nan": math.nan, "gone": 1.0, "perf/memory": 1.0}
    replayed = {"loss": 5e-7, "norm": 100.00005, "nan": math.nan, "new": 1.0, "perf/memory": 2.0}
    assert find_differences(recorded, replayed, 1e-6) == ["gone", "new"]
    assert find_differences(recorded, replayed, 1e-7) == ["loss", "norm", "gone", "new"]
    assert find_differences({"nan": math.nan}, {"nan": 1.0}, 1e-6) == ["nan"]


def test_the_verdict_names_what_differs() -> None:
    *_, verdict = describe_metrics({"loss": 1.0}, {"loss": 1.0}, [], 1e-6)
    assert verdict == "the same: no metric differs by more than 1e-06"
    lines = list(describe_metrics({"loss": 1.0, "norm": 2.0}, {"loss": 1.5, "norm": 2.0}, ["loss"], 1e-6))
    assert lines[1].endswith("5.0e-01  differs")
    assert lines[-1] == "1 of 2 metrics differ by more than 1e-06: loss"


def compare(*engine: float, gap: float = 0.0, rounding: float = 0.0, trainer: float = 0.0) -> LayerComparison:
    layers = [LayerDifference(k, rounding, trainer, each) for k, each in enumerate(engine)]
    return LayerComparison(layers, gap, tolerance=1e-3)


@pytest.mark.parametrize(
    ("comparison", "recorded_gap", "verdict"),
    [
        (compare(0, 0.1, 0.2), 0.1, "the engine first differs in layer 1 from transformers with the same weights"),
        (compare(0.1, 0.1), 0.1, "layer 0 from transformers with the same weights; the embedding comes before it, too"),
        (compare(0, 0, trainer=0.1), 0.1, "the trainer first differs in layer 0"),
        (compare(0.03, 0.03, rounding=0.01), 0.0, "trainer and engine agree in all layers"),
        (compare(0.05, 0.05, rounding=0.01), 0.0, "the engine first differs in layer 0"),
        (compare(0, 0, gap=0.1), 0.1, "the final norm or the output head differs"),
        (compare(0, 0), 0.1, "in the run, the engine had older or other weights"),
        (compare(0, 0), 0.0, "trainer and engine agree in all layers"),
    ],
)
def test_the_first_layer_beyond_rounding_is_named(
    comparison: LayerComparison, recorded_gap: float, verdict: str
) -> None:
    assert verdict in list(describe_layers(comparison, recorded_gap))[-1]


def test_the_layer_is_marked_in_the_table() -> None:
    lines = list(describe_layers(compare(0, 0.1, 0.2), 0.1))
    assert [line.endswith("<- engine") for line in lines[1:4]] == [False, True, False]
