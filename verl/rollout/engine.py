"""The interface of a rollout engine: what verl needs from vLLM, SGLang or transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from verl.config.rollout_engines import RolloutEngineSpec
from verl.rollout.settings import RolloutEngineSettings
from verl.types import Completion, SamplingParams

if TYPE_CHECKING:  # buckets import torch, which many users of this interface do not need
    from prometheus_client import Metric
    from torch import Tensor

    from verl.weights.bucket import SharedBucket, WeightBucket


class RolloutEngine(Protocol):
    """A model that generates. Token ids in, token ids out; text never crosses this interface."""

    async def start(self) -> None:
        """Start the engine; return when the engine can generate. Its weights are unspecified until the first load."""
        ...

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        """Continue `token_ids`.

        Log-probs belong to the distribution that the tokens were drawn from, or, if the engine's capabilities say so,
        to the distribution before truncation by `top_p` and `top_k`.
        """
        ...

    async def generate_all(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        """Continue all requests as one batch: no request begins before all have arrived, and nothing else runs.

        With a seed in every request, the same requests and weights give the same tokens and log-probs, to the bit, on
        the engine's deterministic devices.
        """
        ...

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probs of each sequence's tokens but the first, at temperature 1: the probe of a weight sync.

        Requests that were running before the weight update go on after the probe, not before it.
        """
        ...

    async def start_weight_update(self) -> None:
        """Prepare to replace all weights; no request runs until `finish_weight_update`.

        An earlier update that was not finished is dropped. An engine that sleeps wakes as far as it needs to.
        """
        ...

    async def load_bucket(self, bucket: WeightBucket | SharedBucket) -> None:
        """Load a part of the weights. The memory of the bucket may be freed afterwards."""
        ...

    async def finish_weight_update(self, version: int) -> None:
        """Use the new weights, as `version`, and drop caches of the old weights.

        An engine that continues requests does so with the next request, which is the probe.
        """
        ...

    async def sleep(self) -> None:
        """Free the device's memory, weights included; the next weight update wakes the engine.

        No request may follow before that update, and only an engine whose capabilities say that it continues requests
        may have running ones.
        """
        ...

    async def version(self) -> int:
        """Return the version of the weights in use; -1 before the first load."""
        ...

    async def close(self) -> None:
        """End the engine and every process that it started."""
        ...


@runtime_checkable
class InspectableEngine(RolloutEngine, Protocol):
    """A rollout engine that can be compared with the trainer layer by layer, while it does nothing else."""

    async def compute_hidden_states(self, token_ids: Sequence[int]) -> list[Tensor]:
        """Return the hidden states of a sequence after each decoder layer; see `LayerOutputs.take`."""
        ...


class ManagedEngine(RolloutEngine, Protocol):
    """A rollout engine in a process that may be lost and replaced, while the handle stays.

    It starts disabled, and rejects requests (`generate`, `generate_all`) with `ProcessLostError` until its weights have
    been verified. Before it has started, all methods but `is_ready` do so.
    """

    async def is_ready(self) -> bool:
        """Return whether it is enabled and can generate; the heartbeat. `ProcessLostError` without a process."""
        ...

    async def enable(self, version: int) -> None:
        """Accept requests from now on; `ProcessLostError` unless the engine has `version`, unlike a new process."""
        ...

    async def disable(self, reason: str) -> None:
        """Reject requests until the engine has been restarted: one of them has timed out."""
        ...

    async def read_metrics(self) -> list[Metric]:
        """Return what the engine counts for Prometheus; nothing if it counts nothing."""
        ...

    async def end(self) -> None:
        """End the process, whatever its state; return once it can no longer reply to anyone."""
        ...


@dataclass(frozen=True)
class EngineView:
    """The engines that pools send requests to, each a `ManagedEngine`, by id. A newer view has a higher version.

    Engines that are `asleep` get new requests only if no other engine is available.
    """

    version: int
    engines: Mapping[int, Any]
    asleep: frozenset[int] = frozenset()

    @classmethod
    def of(cls, engines: Iterable[Any]) -> EngineView:
        """Return the first view; ids count from 0."""
        return cls(0, dict(enumerate(engines)))


def make_engine(
    spec: RolloutEngineSpec, settings: RolloutEngineSettings, python: str | None = None, modules: Sequence[str] = ()
) -> RolloutEngine:
    """Return an engine that has not started yet.

    Args:
        spec: The engine.
        settings: Its settings, of the type that the spec names.
        python: The interpreter of another environment that runs the engine; None: this one, and this process unless
            the engine needs its own.
        modules: Modules of the user that another process imports first.
    """
    if python is not None or spec.needs_own_process:
        from verl.rollout.isolated.engine import IsolatedEngine

        engine: Any = IsolatedEngine(spec, settings, python or sys.executable, modules)
    else:
        engine = spec.load(spec.engine)(settings)
    return engine


async def load_weights(engine: RolloutEngine, buckets: Iterable[WeightBucket], version: int) -> None:
    """Replace all weights of an engine in this process."""
    await engine.start_weight_update()
    for bucket in buckets:
        await engine.load_bucket(bucket)
    await engine.finish_weight_update(version)
