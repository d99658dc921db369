"""The memory of a device in every phase of an RL run: all models of a rank, and the rollout engine that shares it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

from verl.memory_plan.accelerators import GIB
from verl.memory_plan.megatron_memory import MegatronMemory
from verl.memory_plan.model_memory import ModelMemory, Usage
from verl.models.model_shape import ModelShape

RESERVED = 2 * GIB  # driver and communication library of a train worker
ASLEEP = 1 * GIB  # driver and graphs of a sleeping engine
USABLE = 0.95  # share of a device; the rest is lost to fragmentation
ENGINE_ACTIVATIONS = 2 * GIB  # in vLLM's largest pass
ENGINE_BYTES = 2  # per weight, and per number in the KV cache

TrainMemory = ModelMemory | MegatronMemory
"""The memory of a model, by its training engine."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """A rollout engine that uses the fraction `share` of each of `width` devices.

    An engine that `sleeps` frees its weights and its cache while models are trained on the same devices.
    """

    shape: ModelShape
    share: float
    width: int = 1
    sleeps: bool = False
    sequences: int | None = None  # generated at once, at most; None: vLLM chooses
    tokens: int = 1024  # maximum length of a sequence

    @property
    def weights(self) -> int:
        return ENGINE_BYTES * self.shape.parameters // self.width

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token on one device; if there are fewer heads than devices, heads are copied."""
        heads = max(self.shape.kv_heads / self.width, 1.0)
        return int(2 * ENGINE_BYTES * self.shape.layers * heads * self.shape.head_width)

    def cache(self, memory: int) -> int:
        """Return what is left for keys and values; negative if the engine cannot start."""
        return int(self.share * memory) - self.weights - ENGINE_ACTIVATIONS

    def missing_cache(self, memory: int) -> int:
        """Return the bytes that are missing for the keys and values of one sequence."""
        return max(0, self.tokens * self.token_bytes - self.cache(memory))

    def usage(self, memory: int) -> Usage:
        """Return its usage while it generates."""
        cache = max(0, self.cache(memory))
        return Usage(engine_weights=self.weights, kv_cache=cache, reserved=ENGINE_ACTIVATIONS)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The models on every rank by name ("actor" is the policy), and the engine on the same device, if any.

    `reserved_share` is the fraction of the device that another process uses, such as a reward model.
    """

    models: Mapping[str, TrainMemory]
    engine: EngineMemory | None = None
    reserved_share: float = 0.0

    def phases(self, memory: int) -> dict[str, Usage]:
        """Return the highest usage of each phase, in the order of a step, on a device with `memory` bytes."""
        others = Usage(reserved=RESERVED + int(self.reserved_share * memory))
        awake, asleep, loading = self._engine_states(memory)
        actor = self.models["actor"]
        trained = {name: model for name, model in self.models.items() if model.update is not None}
        phases = {
            "load": self._highest({name: model.at_load() for name, model in self.models.items()}, is_first=True)
            + asleep,
            "generation": _sum(model.at_rest() for model in self.models.values()) + awake,
            "log-probs": self._highest({name: model.in_logprobs() for name, model in self.models.items()}) + asleep,
            "update": self._highest({name: model.in_update() for name, model in trained.items()}) + asleep,
            "weight sync": self._highest({"actor": actor.in_weight_sync()}) + loading,
            "probe": self._highest({"actor": actor.in_probe()}) + awake,
            "save": self._highest({name: model.in_save() for name, model in trained.items()}) + awake,
        }
        return {phase: usage + others for phase, usage in phases.items()}

    def _engine_states(self, memory: int) -> tuple[Usage, Usage, Usage]:
        """Return the usage of the engine while it generates, while models are trained, and while it loads weights."""
        if self.engine is None:
            return Usage(), Usage(), Usage()
        awake = self.engine.usage(memory)
        if not self.engine.sleeps:
            return awake, awake, awake
        return awake, Usage(reserved=ASLEEP), Usage(engine_weights=awake.engine_weights, reserved=ASLEEP)

    def problems(self, memory: int) -> dict[str, str]:
        """Return phase -> why it does not fit; empty if all do."""
        usable = int(USABLE * memory)
        problems = {
            phase: f"{usage.total / GIB:.1f} GiB of {usable / GIB:.1f}"
            for phase, usage in self.phases(memory).items()
            if usage.total > usable
        }
        if self.engine is not None and self.engine.missing_cache(memory):
            room, weights = self.engine.cache(memory) / GIB, self.engine.weights / GIB
            have = f"{room:.1f} GiB" if room > 0 else "no memory"
            problems["generation"] = f"the engine has {have} left for its cache after {weights:.1f} GiB of weights"
        return problems

    def peak(self, memory: int) -> int:
        """Return the highest usage of all phases."""
        return max(usage.total for usage in self.phases(memory).values())

    def shortfall(self, memory: int) -> int:
        """Return the bytes by which the run does not fit, over all phases, and what an engine lacks for its cache."""
        usable = int(USABLE * memory)
        missing = sum(max(0, usage.total - usable) for usage in self.phases(memory).values())
        return missing + (self.engine.missing_cache(memory) if self.engine is not None else 0)

    def _highest(self, active: Mapping[str, Usage], *, is_first: bool = False) -> Usage:
        """Return the highest usage with one of the models active and the others at rest; at first without moments."""
        resting = {name: model.at_rest(with_moments=not is_first) for name, model in self.models.items()}
        totals = [usage + _sum(resting[other] for other in resting if other != name) for name, usage in active.items()]
        return max(totals, key=lambda usage: usage.total)


def _sum(usages: Iterable[Usage]) -> Usage:
    return reduce(Usage.__add__, usages, Usage())
