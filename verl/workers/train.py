"""The train workers of a policy: each rank with its shard of all models that the algorithm needs; and their client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from verl.cluster.actors import free_port, get_node_address, get_objects
from verl.cluster.hangs.pending_calls import MARGIN_S, CallTarget
from verl.data.plan import Plan, RankPlan
from verl.tracking.metrics import resident_gib
from verl.types import Sample
from verl.workers.rank_speed import compare_replies
from verl.workers.sample_rows import TokenValues
from verl.workers.train_base import BaseTrainWorker, RankGroup, explain_out_of_memory
from verl.workers.train_settings import TrainSettings, build_policy

if TYPE_CHECKING:
    from verl.weights.sender import WeightSender
    from verl.workers.weight_packer import WeightPacker


class TrainWorker(BaseTrainWorker):
    """The actor of one rank of a policy and its other models."""

    _settings: TrainSettings
    _plan: RankPlan  # for the current step
    _sender: WeightSender | None = None

    @explain_out_of_memory
    def start(self, address: tuple[str, int], settings: TrainSettings) -> list[str]:
        """Join the other ranks and load the models; return notes for the user.

        New weights are initialized alike on all ranks; afterwards their random states differ.
        """
        import torch

        from verl.training.policy.trainer import load_functions

        load_functions(settings.algorithm)
        self.join(address, settings)
        torch.manual_seed(settings.seed)
        self._policy = self._trained = build_policy(settings)
        torch.manual_seed(settings.seed + 1 + self._rank)
        self._sync_dtype, self._timeouts = getattr(torch, settings.sync_dtype), settings.timeouts
        return list(self._policy.actor.notes)

    @explain_out_of_memory
    def prepare(self, plan: RankPlan) -> dict[str, Any]:
        """Get this rank's samples from the object store and compute what the update needs."""
        with self._phases.measure("prepare"):
            samples = self._get_samples(plan)
            self._plan = plan.without_refs()
            metrics = {"perf/train_worker_rss_gib": resident_gib()} | self.probe_speed()
            metrics |= self._policy.prepare(samples, plan)
        return metrics | self.take_phases()

    @explain_out_of_memory
    def record_step(self, plan: RankPlan, folder: str) -> None:
        """Write the models and this rank's samples before `prepare`, so that the step can be replayed."""
        from verl.training.policy.recorded_step import write_step

        with self._freeing_memory():
            write_step(Path(folder), self._policy, self._get_samples(plan), plan, self._settings.actor.device)

    def _get_samples(self, plan: RankPlan) -> list[Sample]:
        return get_objects(
            plan.refs, action="get the samples", target=CallTarget("object store"), timeout=self._timeouts.train
        )

    @explain_out_of_memory
    def update(self) -> dict[str, Any]:
        """Update the policy on what was prepared."""
        self._divergence = None
        with self._phases.measure("update"), self._freeing_memory():
            metrics = self._policy.update(self._plan) | self.peak_memory()
        return metrics | self.take_phases()

    @explain_out_of_memory
    def check(self) -> None:
        with self._freeing_memory():
            super().check()

    def read_tokens(self, indices: Sequence[int]) -> list[TokenValues]:
        """Return what was computed for the tokens of some samples of this rank, between `prepare` and `update`."""
        return [TokenValues(*self._policy.read_tokens(index)) for index in indices]

    @explain_out_of_memory
    def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        with self._freeing_memory():
            return self._policy.compute_logprobs(sequences)

    @explain_out_of_memory
    def measure_rounding(self, sequences: Sequence[Sequence[int]], dtype: str) -> float | None:
        with self._freeing_memory():
            return self._policy.measure_rounding(sequences, dtype)

    @explain_out_of_memory
    def pack_bucket(self, is_first: bool) -> Any:
        """Return the next weights, or those of the adapter, in a bucket, and None at the end; for rank 0."""
        with self._phases.measure("sync", continues=True), self._freeing_memory():
            if is_first:
                self._packer.start()
            return self._packer.pack_next()

    def finish_buckets(self) -> dict[str, Any]:
        """Free the buckets, after gathering the weights that were not packed: the other ranks wait for it."""
        with self._phases.measure("sync", continues=True), self._freeing_memory():
            self._packer.finish()
        return self.take_phases()

    @explain_out_of_memory
    def gather_weights(self) -> dict[str, Any]:
        """Take part while rank 0 packs; for all other ranks."""
        with self._phases.measure("sync"), self._freeing_memory():
            self._packer.take_part()
        return self.take_phases()

    @cached_property
    def _packer(self) -> WeightPacker:
        from verl.workers.weight_packer import WeightPacker

        actor = self._policy.actor
        gather = actor.adapter_weights if self._settings.sync_adapter_only else actor.weights
        return WeightPacker(
            lambda: gather(self._sync_dtype),
            shards=lambda: None if self._settings.sync_adapter_only else actor.local_shards(self._sync_dtype),
            max_bytes=self._settings.sync_bucket_bytes,
            is_one_machine=self._settings.is_one_machine,
        )

    def send_weights(self, transport: str, engines: Sequence[Any], version: int) -> dict[str, Any]:
        """Send the weights by the sender of the rollout engine. Needs GPUs, so that CI does not run it."""

        def client(method: str, arguments: Callable[[int], tuple[Any, ...]]) -> None:
            replies = [engine.weight_transfer.remote(method, *arguments(k)) for k, engine in enumerate(engines)]
            get_objects(replies, action=method, target=CallTarget("rollout engines"), timeout=self._timeouts.weights)

        if self._sender is None:
            from verl.weights.sender import SenderSettings

            assert self._settings.weight_sender is not None, "the transport is checked against the engine"
            settings = SenderSettings(
                transport,
                self._rank,
                dtype=self._sync_dtype,
                engines=len(engines),
                width=self._settings.engine_width,
                bucket_bytes=self._settings.sync_bucket_bytes,
                address=(get_node_address(), free_port()),
            )
            self._sender = resolve_name(self._settings.weight_sender)(settings, self._policy.actor, client)
        with self._phases.measure("sync"), self._freeing_memory():
            self._sender.send(version)
        return self.take_phases()

    @contextmanager
    def _freeing_memory(self) -> Iterator[None]:
        """Return memory that is no longer used to the device at the end, for the engines that share it."""
        import torch

        yield
        if self._settings.shares_devices and self._settings.actor.device != "cpu":
            torch.accelerator.empty_cache()  # torch would keep it for its own later use


class PolicyGroup(RankGroup):
    """The client of all train workers of a policy."""

    worker = TrainWorker

    async def prepare(self, plan: Plan) -> dict[str, float]:
        replies = await self.call("prepare", per_rank=self.layout.spread(plan.ranks), timeout=self._timeouts.train)
        self._collect_phases(replies)
        return replies[0] | compare_replies(replies)

    async def record_step(self, plan: Plan, folder: str) -> None:
        """Write the step to a folder before it is prepared."""
        await self.call("record_step", folder, per_rank=self.layout.spread(plan.ranks), timeout=self._timeouts.train)

    def read_tokens(self, indices: Sequence[Sequence[int]]) -> list[Any]:
        """Return a reference to the `TokenValues` of some samples of each data rank; None where there are none."""
        actors = self.layout.collect(self.actors)
        return [actor.read_tokens.remote(each) if each else None for actor, each in zip(actors, indices, strict=True)]

    async def update(self) -> dict[str, float]:
        """Update the policy on what was prepared."""
        replies = await self.call("update", timeout=self._timeouts.train)
        self._collect_phases(replies)
        return replies[0]

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return (await self.call("compute_logprobs", sequences, timeout=self._timeouts.weights))[0]

    async def measure_rounding(self, sequences: Sequence[Sequence[int]], dtype: str) -> float | None:
        """Return how far rounding to `dtype` moves the log-probs of the sequences; None if nobody knows."""
        replies = await self.call("measure_rounding", sequences, dtype, timeout=self._timeouts.weights)
        return None if replies[0] is None else float(replies[0])

    async def pack_weights(self) -> AsyncGenerator[Any, None]:
        """Yield the weights in buckets. Rank 0 is called for each of them, the others once: they may be 1,000."""
        collect, timeout = self._collect_phases, self._timeouts.weights
        pause_s = timeout.seconds + MARGIN_S  # while engines load a bucket, one of which may hang
        async with self.call_others("gather_weights", timeout=timeout, pause_s=pause_s, collect=collect) as call_first:
            packing = asyncio.ensure_future(call_first("pack_bucket", True))
            try:
                while (bucket := await packing) is not None:
                    packing = asyncio.ensure_future(call_first("pack_bucket", False))
                    yield bucket
            finally:
                packing.cancel()  # no effect once it is done
                collect([await call_first("finish_buckets")])

    async def send_weights(self, backend: str, receivers: Sequence[Any], version: int) -> None:
        engines = [receiver.actor for receiver in receivers]
        self._collect_phases(await self.call("send_weights", backend, engines, version, timeout=self._timeouts.weights))
