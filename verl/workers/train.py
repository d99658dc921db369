"""The train workers: one process per rank, each with its shard of all models of a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl.algorithms.settings import AlgorithmSettings
from verl.cluster.group import get_objects
from verl.cluster.handles import get_node_address, put
from verl.cluster.hangs import CallTarget
from verl.cluster.ports import free_port
from verl.data.plan import Plan, RankPlan
from verl.tracking.metrics import resident_gib
from verl.training.settings import FsdpSettings
from verl.workers.base import BaseTrainWorker, RankGroup, RankSettings
from verl.workers.out_of_memory import explain_out_of_memory

BUCKET_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings(RankSettings):
    """The settings of a train worker: its models and the algorithm."""

    algorithm: AlgorithmSettings
    reference: FsdpSettings | None = None
    reference_is_actor: bool = False  # with its adapter disabled
    critic: FsdpSettings | None = None
    prime: FsdpSettings | None = None  # PRIME's reward model
    prime_reference: FsdpSettings | None = None  # None: `reference`
    sync_dtype: str = "bfloat16"
    sync_adapter_only: bool = False  # the engines load the base model themselves


class TrainWorker(BaseTrainWorker):
    """The actor of one rank of a policy and its other models."""

    @explain_out_of_memory
    def start(self, address: tuple[str, int], settings: TrainSettings) -> list[str]:
        """Join the other ranks and load the models; return notes for the user.

        New weights are initialized alike on all ranks; afterwards their random states differ.
        """
        import torch

        from verl.training.fsdp import FsdpEngine
        from verl.training.policy import PolicyTrainer, PrimeRewardModel, load_functions
        from verl.training.policy.reference import BaseModelReference

        def make_engine(model: FsdpSettings | None) -> FsdpEngine | None:
            return None if model is None else FsdpEngine(model)

        load_functions(settings.algorithm)
        self.join(address, settings)
        torch.manual_seed(settings.seed)
        algorithm, actor = settings.algorithm, FsdpEngine(settings.actor)
        reference: Any = BaseModelReference(actor) if settings.reference_is_actor else make_engine(settings.reference)
        prime = None
        if settings.prime is not None:
            prime_reference = make_engine(settings.prime_reference) or reference
            assert prime_reference is not None
            prime = PrimeRewardModel(
                FsdpEngine(settings.prime), prime_reference, beta=algorithm.prime_beta, coef=algorithm.prime_coef
            )
        self._policy = self._trained = PolicyTrainer(
            actor, algorithm, reference=reference, critic=make_engine(settings.critic), prime=prime
        )
        torch.manual_seed(settings.seed + 1 + self._rank)
        self._sync_dtype, self._sync_adapter_only = getattr(torch, settings.sync_dtype), settings.sync_adapter_only
        self._deadlines = settings.deadlines
        return actor.notes

    @explain_out_of_memory
    def prepare(self, plan: RankPlan) -> dict[str, float]:
        """Get this rank's samples from the object store and compute what the update needs."""
        samples = get_objects(
            plan.refs, action="get the samples", target=CallTarget("object store"), deadline=self._deadlines.train
        )
        return self._policy.prepare(samples, plan) | {"perf/train_worker_rss_gib": resident_gib()}

    @explain_out_of_memory
    def update(self, plan: RankPlan) -> dict[str, float]:
        return self._policy.update(plan)

    @explain_out_of_memory
    def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._policy.compute_logprobs(sequences)

    @explain_out_of_memory
    def pack_weights(self) -> list[Any]:
        """Gather the weights, or only the adapter; rank 0 puts them into the object store and returns references."""
        from verl.weights.bucket import pack

        actor: Any = self._policy.actor
        weights = actor.adapter_weights() if self._sync_adapter_only else actor.weights()
        if self._rank > 0:
            for _ in weights:  # gathering is collective
                pass
            return []
        return [put(bucket) for bucket in pack(weights, max_bytes=BUCKET_BYTES, dtype=self._sync_dtype)]

    def send_weights(self, backend: str, engines: Sequence[Any], version: int) -> None:
        """Send the weights by vLLM's trainer-side engine. Needs GPUs, so that CI does not run it."""
        from verl.rollout.vllm.sender import VllmSender

        def client(method: str, arguments: Callable[[int], tuple[Any, ...]]) -> None:
            replies = [engine.weight_transfer.remote(method, *arguments(k)) for k, engine in enumerate(engines)]
            get_objects(replies, action=method, target=CallTarget("rollout engines"), deadline=self._deadlines.weights)

        if not hasattr(self, "_sender"):
            self._sender = VllmSender(
                backend,
                client,
                self._policy.actor,
                self._rank,
                dtype=self._sync_dtype,
                engines=len(engines),
                address=(get_node_address(), free_port()),
            )
        self._sender.send(version)


class PolicyGroup(RankGroup):
    """The client of all train workers of a policy."""

    worker = TrainWorker

    async def prepare(self, plan: Plan) -> dict[str, float]:
        return (await self._call("prepare", per_rank=plan.ranks, deadline=self._deadlines.train))[0]

    async def update(self, plan: Plan) -> dict[str, float]:
        parts = [rank.without_refs() for rank in plan.ranks]
        return (await self._call("update", per_rank=parts, deadline=self._deadlines.train))[0]

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return (await self._call("compute_logprobs", sequences, deadline=self._deadlines.weights))[0]

    async def pack_weights(self) -> Sequence[Any]:
        return (await self._call("pack_weights", deadline=self._deadlines.weights))[0]

    async def send_weights(self, backend: str, receivers: Sequence[Any], version: int) -> None:
        engines = [receiver.actor for receiver in receivers]
        await self._call("send_weights", backend, engines, version, deadline=self._deadlines.weights)
