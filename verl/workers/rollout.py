"""The rollout actors, each with one engine, and their client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from verl.child_process import keep_sigterm_blocked
from verl.cluster.actors import RemoteActor, use_accelerators
from verl.cluster.hangs.pending_calls import DEFAULT_TIMEOUTS, Progress, Timeouts
from verl.config.rollout_engines import RolloutEngineSpec
from verl.custom_functions import import_external
from verl.errors import ProcessLostError
from verl.rollout.engine import RolloutEngine, make_engine
from verl.rollout.engine_metrics import collect_engine_metrics
from verl.rollout.settings import RolloutEngineSettings
from verl.types import Completion, SamplingParams

if TYPE_CHECKING:
    from prometheus_client import Metric

    from verl.weights.bucket import SharedBucket, WeightBucket


class RolloutActor:
    """Hosts a `RolloutEngine`. Every method is a coroutine: requests run concurrently on the actor's event loop.

    It starts disabled and rejects requests until its weights have been verified, since Ray may replace its process at
    any time by one without weights.
    """

    def __init__(
        self,
        spec: RolloutEngineSpec,
        settings: RolloutEngineSettings,
        external_modules: Sequence[str] = (),
        python: str | None = None,
        accelerators: str = "",
    ) -> None:
        """Hold the settings until `start`.

        Args:
            spec: The engine.
            settings: The settings of the engine.
            external_modules: Modules of the user to import before the engine is built.
            python: The interpreter of another environment that runs the engine; None: this process runs it.
            accelerators: Those of other processes to use, as CUDA_VISIBLE_DEVICES names them.
        """
        keep_sigterm_blocked()
        self._spec, self._settings, self._accelerators = spec, settings, accelerators
        self._external_modules, self._python = external_modules, python
        self._started_engine: RolloutEngine | None = None
        self._disabled_reason = "it has no weights yet"
        self._loading = asyncio.Lock()
        self._accepts = asyncio.Event()  # new requests; not from the start of a weight update until its probe
        self._accepts.set()
        self._is_updating = False

    async def has_started(self) -> bool:
        return self._started_engine is not None

    async def start(self) -> None:
        use_accelerators(self._accelerators)
        if self._python is None:
            import_external(self._external_modules)
        self._started_engine = make_engine(self._spec, self._settings, self._python, self._external_modules)
        await self._started_engine.start()

    async def enable(self, version: int) -> None:
        """Accept requests, if the engine has the weights of `version`."""
        if (current := await self._engine.version()) != version:
            raise ProcessLostError(f"its process was replaced: it has version {current} of the weights, not {version}")
        self._disabled_reason = ""

    async def disable(self, reason: str) -> None:
        self._disabled_reason = reason

    async def is_ready(self) -> bool:
        """Return whether it is enabled; raise if its engine, unless it is loading weights, does not respond."""
        if not self._disabled_reason and not self._loading.locked():
            await self._engine.version()
        return not self._disabled_reason

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        await self._accepts.wait()
        return await self._enabled.generate(token_ids, sampling)

    async def generate_all(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        await self._accepts.wait()
        return await self._enabled.generate_all(requests)

    @property
    def _engine(self) -> RolloutEngine:
        if self._started_engine is None:
            raise ProcessLostError("its process was replaced, and has not started yet")
        return self._started_engine

    @property
    def _updating(self) -> RolloutEngine:
        if not self._is_updating:
            raise ProcessLostError("its process was replaced during an update of its weights")
        return self._engine

    @property
    def _enabled(self) -> RolloutEngine:
        if self._disabled_reason:
            raise ProcessLostError(f"it is disabled: {self._disabled_reason}")
        return self._engine

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probs of the probe; from now on requests run with the weights that it has seen."""
        logprobs = await self._engine.compute_logprobs(sequences)
        if not self._is_updating:
            self._accepts.set()
        return logprobs

    async def start_weight_update(self) -> None:
        async with self._loading:  # serially, even if the first caller has gone
            self._accepts.clear()
            await self._engine.start_weight_update()
            self._is_updating = True

    async def load_bucket(self, bucket: WeightBucket | SharedBucket) -> None:
        async with self._loading:
            await self._updating.load_bucket(bucket)

    async def finish_weight_update(self, version: int) -> None:
        async with self._loading:
            await self._updating.finish_weight_update(version)
            self._is_updating = False

    async def sleep(self) -> None:
        """Free the device's memory; new requests wait until weights have been loaded and probed."""
        async with self._loading:
            self._accepts.clear()
            await self._engine.sleep()

    async def version(self) -> int:
        return await self._engine.version()

    async def read_metrics(self) -> list[Metric]:
        """Return what the engine counts in this process for Prometheus."""
        return collect_engine_metrics()

    async def weight_transfer(self, method: str, *args: Any) -> None:
        """Run a step of the engine's own weight transfer, which its weight sender on the train workers drives."""
        if method in ("start_weight_update", "finish_weight_update"):
            return await getattr(self, method)(*args)
        async with self._loading:
            await getattr(self._engine, method)(*args)

    async def close(self) -> None:
        if self._started_engine is not None:
            await self._started_engine.close()


class RemoteEngine(RemoteActor):
    """A `RolloutEngine` in a rollout actor."""

    kind = "rollout engine"
    actor_class = RolloutActor
    methods: ClassVar = {
        "generate_all": "generation",
        **dict.fromkeys(("is_ready", "enable", "disable"), "reply"),
        **dict.fromkeys(("start_weight_update", "load_bucket", "finish_weight_update"), "weights"),
        **dict.fromkeys(("compute_logprobs", "version", "sleep"), "weights"),
    }

    def __init__(self, actor: Any, index: int, timeouts: Timeouts = DEFAULT_TIMEOUTS) -> None:
        super().__init__(actor, index, timeouts)
        self._progress = Progress()  # a busy engine may be slow, as long as it finishes requests

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        return await self._call(
            "generate", token_ids, sampling, timeout=self.timeouts.generation, progress=self._progress
        )

    async def read_metrics(self) -> list[Metric]:
        """Return what the engine counts for Prometheus. The caller has to limit the time: a hang is not reported."""
        return await self._call("read_metrics", timeout=None)
