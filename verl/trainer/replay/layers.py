"""Finds the first layer in which a rollout engine, or the trainer, differs from transformers with the same weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from typing import cast

import torch
from torch import Tensor

from verl.config.features import get_quantization
from verl.config.rollout_engines import get_rollout_engine
from verl.errors import EngineError
from verl.rollout.engine import InspectableEngine, load_weights, make_engine
from verl.rollout.hf import HfEngine
from verl.rollout.settings import RolloutEngineSettings
from verl.trainer.build.worker_settings import coarsest_dtype, engine_settings
from verl.trainer.replay.step import RecordedStep
from verl.training.fsdp.engine import FsdpEngine
from verl.training.policy.trainer import PolicyTrainer
from verl.weights.bucket import WeightBucket, pack
from verl.weights.layer_outputs import LayerOutputs, compare_states, find_layers
from verl.weights.probe import TOLERANCES
from verl.workers.train_settings import TrainSettings

FLOOR = 1e-4
"""A relative difference that two implementations in float32 may have."""
FACTOR = 4.0
"""How many times the difference may be larger than that of rounding, which is measured with transformers."""
QUANTIZED = 0.3
"""A relative difference that FP8 explains, which transformers does not have."""


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """How far the states after a layer are from those of transformers in float32, relative to their size.

    `rounding` is transformers in the data type of the engine or the trainer, whichever is coarser.
    """

    layer: int
    rounding: float
    trainer: float
    engine: float


@dataclass(frozen=True, slots=True)
class LayerComparison:
    """The differences of all layers on one sequence.

    Args:
        layers: In their order.
        gap: The mean difference of the log-probs of trainer and engine.
        tolerance: What rounding explains of it.
        floor: The difference of a layer that needs no explanation.
    """

    layers: list[LayerDifference]
    gap: float
    tolerance: float
    floor: float = FLOOR

    def find_first(self, side: str) -> int | None:
        """Return the first layer in which "trainer" or "engine" differs by more than rounding explains."""
        for each in self.layers:
            if getattr(each, side) > max(self.floor, FACTOR * each.rounding):
                return each.layer
        return None


class Comparer:
    """Compares engines with a policy that has loaded the weights of a recorded step."""

    def __init__(self, recorded: RecordedStep, policy: PolicyTrainer) -> None:
        self._config, self._policy, self._device = recorded.config, policy, policy.actor.settings.device
        self._settings: TrainSettings = recorded.settings(self._device)

    async def run(self, tokens: Sequence[int]) -> LayerComparison:
        """Start the engine of the run with the policy's weights, and compare it on one sequence."""
        async with self.start_engine() as engine:
            await load_weights(engine, self.pack_weights(), 0)
            return await self.compare(engine, tokens)

    @asynccontextmanager
    async def start_engine(self) -> AsyncIterator[InspectableEngine]:
        """Start the rollout engine of the run, without compiled layers."""
        rollout = self._config.actor_rollout_ref.rollout
        spec, settings = get_rollout_engine(rollout.name), engine_settings(self._config, self._device, 0)
        if "enforce_eager" in {each.name for each in fields(settings)}:
            settings = replace(settings, enforce_eager=True)  # type: ignore[call-arg]
        engine = make_engine(spec, settings, rollout.python, self._settings.external_modules)
        if not issubclass(type(engine), InspectableEngine):  # an instance in another process seems to have any method
            reason = "it has no compute_hidden_states, or runs in another process"
            raise EngineError(f"{spec.title} cannot be compared layer by layer: {reason}")
        try:
            await engine.start()
            yield cast(InspectableEngine, engine)
        finally:
            await engine.close()

    def pack_weights(self) -> Iterable[WeightBucket]:
        """Return the policy's weights as a weight sync sends them."""
        actor, settings = self._policy.actor, self._settings
        gather = actor.adapter_weights if settings.sync_adapter_only else actor.weights
        dtype: torch.dtype = getattr(torch, settings.sync_dtype)
        return pack(gather(dtype), max_bytes=settings.sync_bucket_bytes, dtype=dtype)

    async def compare(self, engine: InspectableEngine, tokens: Sequence[int]) -> LayerComparison:
        """Compare an engine that has loaded the weights, the trainer, and transformers on one sequence."""
        coarsest = coarsest_dtype(self._config, self._device)
        exact = await self._run_transformers("float32", tokens)
        rounded = await self._run_transformers(coarsest if coarsest != "fp8" else self._settings.sync_dtype, tokens)
        outputs = LayerOutputs(self._find_layers())
        [trainer] = self._policy.compute_logprobs([tokens])
        trained, sampled = outputs.take(len(tokens)), await engine.compute_hidden_states(tokens)
        [logprobs] = await engine.compute_logprobs([tokens])
        return LayerComparison(
            layers=[
                LayerDifference(k, *(compare_states(states[k], expected) for states in (rounded, trained, sampled)))
                for k, expected in enumerate(exact)
            ],
            gap=float((torch.tensor(trainer) - torch.tensor(logprobs)).abs().mean()),
            tolerance=TOLERANCES[coarsest],
            floor=FLOOR if get_quantization(self._config) is None else QUANTIZED,
        )

    def _find_layers(self) -> list[torch.nn.Module]:
        actor = self._policy.actor
        if not isinstance(actor, FsdpEngine):
            raise EngineError(f"{type(actor).__name__}: its layers cannot be compared with those of an engine")
        backbone = actor.model.backbone
        return find_layers(backbone, backbone.config.get_text_config().num_hidden_layers)

    async def _run_transformers(self, dtype: str, tokens: Sequence[int]) -> list[Tensor]:
        model = self._settings.actor
        engine = HfEngine(
            RolloutEngineSettings(
                model.model_path, dtype=dtype, device=self._device, trust_remote_code=model.trust_remote_code
            )
        )
        await engine.start()
        weights = self._policy.actor.weights(getattr(torch, dtype))
        await load_weights(engine, pack(weights, max_bytes=self._settings.sync_bucket_bytes), 0)
        return await engine.compute_hidden_states(tokens)
