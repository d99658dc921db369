"""The train workers: one process per rank, each with its shard of the policy and of the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl.algorithms.settings import AlgorithmSettings
from verl.cluster.group import fetch
from verl.cluster.handles import get_node_address, put
from verl.cluster.hangs.pending_calls import CallTarget
from verl.cluster.ports import free_port
from verl.data.plan import Plan, RankPlan
from verl.tracking.metrics import resident_gib
from verl.training.settings import FsdpSettings
from verl.workers.base import BaseTrainWorker, RankGroup, RankSettings
from verl.workers.out_of_memory import explain_out_of_memory

__all__ = ["PolicyGroup", "TrainSettings", "TrainWorker"]

BUCKET_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings(RankSettings):
    """What a train worker builds itself from: its models, and the algorithm that says what they do."""

    algorithm: AlgorithmSettings
    reference: FsdpSettings | None = None
    reference_is_actor: bool = False  # the reference is the actor with its adapter off
    critic: FsdpSettings | None = None
    process: FsdpSettings | None = None  # PRIME's reward model
    process_reference: FsdpSettings | None = None  # what it is compared with; None: the reference
    publish_dtype: str = "bfloat16"
    publish_adapter: bool = False  # the engines hold the rest already


class TrainWorker(BaseTrainWorker):
    """The actor of one rank of a policy."""

    @explain_out_of_memory
    def start(self, address: tuple[str, int], settings: TrainSettings) -> list[str]:
        """Join the other ranks and load the models. New weights are the same everywhere, later draws differ by rank.

        Returns what the user should know of it.
        """
        import torch

        from verl.training.fsdp import FsdpEngine
        from verl.training.policy import PolicyTrainer, PrimeRewardModel, load_functions
        from verl.training.policy.reference import BaseModelReference

        def engine(wanted: FsdpSettings | None) -> FsdpEngine | None:
            return None if wanted is None else FsdpEngine(wanted)

        load_functions(settings.algorithm)
        self.join(address, settings)
        torch.manual_seed(settings.seed)
        algorithm, actor = settings.algorithm, FsdpEngine(settings.actor)
        reference: Any = BaseModelReference(actor) if settings.reference_is_actor else engine(settings.reference)
        prime = None
        if settings.process is not None:
            compared = engine(settings.process_reference) or reference
            assert compared is not None
            prime = PrimeRewardModel(
                FsdpEngine(settings.process), compared, beta=algorithm.prime_beta, coef=algorithm.prime_coef
            )
        self._policy = self._trained = PolicyTrainer(
            actor, algorithm, reference=reference, critic=engine(settings.critic), prime=prime
        )
        torch.manual_seed(settings.seed + 1 + self._rank)
        self._publish_dtype, self._publish_adapter = settings.publish_dtype, settings.publish_adapter
        self._deadlines = settings.deadlines
        return actor.notes

    @explain_out_of_memory
    def prepare(self, plan: RankPlan) -> dict[str, float]:
        """Pull this rank's samples out of the object store and compute what the update needs."""
        samples = fetch(
            plan.refs, action="give the samples", target=CallTarget("object store"), deadline=self._deadlines.train
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
        """Gather the weights, or the adapter alone; rank 0 lays them into the object store and says where."""
        import torch

        from verl.weights.bucket import pack

        actor: Any = self._policy.actor
        weights = actor.adapter_weights() if self._publish_adapter else actor.weights()
        if self._rank > 0:
            for _ in weights:  # the gathering is collective
                pass
            return []
        dtype = getattr(torch, self._publish_dtype)
        return [put(bucket) for bucket in pack(weights, max_bytes=BUCKET_BYTES, dtype=dtype)]

    def send_weights(self, backend: str, engines: Sequence[Any], version: int) -> None:
        """Push the weights by vLLM's own trainer-side engine. Wired, but not run on a machine without GPUs."""
        import torch

        from verl.rollout.vllm.sender import VllmSender

        def client(method: str, arguments: Callable[[int], tuple[Any, ...]]) -> None:
            asked = [engine.weight_transfer.remote(method, *arguments(k)) for k, engine in enumerate(engines)]
            fetch(asked, action=method, target=CallTarget("rollout engines"), deadline=self._deadlines.weights)

        if not hasattr(self, "_sender"):
            self._sender = VllmSender(
                backend,
                client,
                self._policy.actor,
                self._rank,
                dtype=getattr(torch, self._publish_dtype),
                engines=len(engines),
                address=(get_node_address(), free_port()),
            )
        self._sender.send(version)


class PolicyGroup(RankGroup):
    """All train workers as the trainer sees them: one policy."""

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
