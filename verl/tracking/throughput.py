"""Tokens per second of a step and of its phases, and how much of the devices' peak the policy model uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verl.models.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Throughput:
    """Computes the `perf/*` metrics of a step.

    Args:
        devices: The number of devices of the train workers.
        rollout_devices: The number of devices of the engines, which may be the same.
        epochs: How often a step trains on its samples.
        shape: The shape of the policy model, for the model FLOPs utilization (MFU).
        peak: Floating-point operations per second of a device; None if unknown.
        is_asynchronous: Whether responses are generated during the whole step: with staleness, if engines do not sleep.
        has_own_engines: Whether they are generated on other devices than those of the train workers.
    """

    devices: int
    rollout_devices: int
    epochs: int = 1
    shape: ModelShape | None = None
    peak: float | None = None
    is_asynchronous: bool = False
    has_own_engines: bool = False

    def measure(self, plan: Mapping[str, float], times: Mapping[str, float], idle_s: float = 0.0) -> dict[str, float]:
        """Return the metrics from those of the plan, the seconds of the phases, and those without any generation."""
        step, waited = times["timing_s/step"], times["timing_s/gen"]
        if self.is_asynchronous:
            times = {**times, "timing_s/gen": step}
        tokens, generated = plan["plan/tokens"], plan["plan/generated_tokens"]
        work = {"gen": generated, "prepare": tokens, "update": self.epochs * tokens}
        speed = {phase: count / max(times[f"timing_s/{phase}"], 1e-9) for phase, count in work.items()}
        total = tokens / step
        metrics = {"perf/throughput": total, "perf/throughput_per_device": total / self.devices}
        metrics |= {f"perf/tokens_per_s/{phase}": value for phase, value in speed.items()}
        if self.is_asynchronous and self.has_own_engines:
            metrics |= {"perf/trainer_idle": waited / step, "perf/generation_idle": min(idle_s / step, 1.0)}
        if self.shape is None or self.peak is None:
            return metrics
        operations = self.shape.count_operations(context=tokens / plan["plan/samples"] / 2)
        return metrics | {
            "perf/mfu/gen": operations * speed["gen"] / (self.rollout_devices * self.peak),
            "perf/mfu/update": 3 * operations * speed["update"] / (self.devices * self.peak),  # backward: two passes
        }
