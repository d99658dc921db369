"""The train workers: one process per rank, each with its shard of the policy and of the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.algorithms.settings import Method
from verl.cluster.group import ActorGroup, fetch
from verl.cluster.handles import own_address, put
from verl.cluster.pool import Places
from verl.cluster.session import free_port
from verl.cluster.waits import DEFAULTS, MARGIN_S, Deadlines, Owner
from verl.data.plan import Plan, RankPlan
from verl.errors import CheckpointError
from verl.tracking.metrics import resident_gib
from verl.training.settings import FsdpSettings

if TYPE_CHECKING:  # torch is imported where it is used: see TrainWorker
    from verl.checkpoint.files import FileSum

__all__ = ["PolicyGroup", "TrainSettings", "TrainWorker"]

PARCEL_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What a train worker builds itself from: its models, and the algorithm that says what they do."""

    actor: FsdpSettings
    method: Method
    reference: FsdpSettings | None = None
    critic: FsdpSettings | None = None
    process: FsdpSettings | None = None  # PRIME's reward model
    process_reference: FsdpSettings | None = None  # what it is compared with; None: the reference
    publish_dtype: str = "bfloat16"
    seed: int = 0
    tokenizer_path: str | None = None  # None: with the model
    save_hf: bool = False
    save_contents: Mapping[str, Sequence[str]] | None = None  # by folder of a checkpoint; None: all
    load_contents: Mapping[str, Sequence[str]] | None = None
    deadlines: Deadlines = DEFAULTS


class TrainWorker:
    """The actor of one rank. Imports torch when it starts: until then the cores belong to the engines' long start."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def address(self) -> tuple[str, int]:
        """Where rank 0 can be met by the others."""
        return own_address(), free_port()

    def start(self, address: tuple[str, int], settings: TrainSettings) -> None:
        """Join the other ranks and load the models. New weights are the same everywhere, later draws differ by rank."""
        import torch

        from verl.training.fsdp import FsdpEngine
        from verl.training.group import init_process_group
        from verl.training.policy import Policy, ProcessRewards, functions_of

        def engine(wanted: FsdpSettings | None) -> FsdpEngine | None:
            return None if wanted is None else FsdpEngine(wanted)

        functions_of(settings.method)
        host, port = address
        self._deadlines = settings.deadlines
        # The controller gives up first: it names the rank that is missing, which those in the collective cannot know.
        patience_s = self._deadlines.longest_s + MARGIN_S
        init_process_group(self._rank, self._world_size, host, port, settings.actor.device, patience_s)
        torch.manual_seed(settings.seed)
        method, reference = settings.method, engine(settings.reference)
        process = None
        if settings.process is not None:
            compared = engine(settings.process_reference) or reference
            assert compared is not None
            process = ProcessRewards(
                FsdpEngine(settings.process), compared, beta=method.process_beta, coef=method.process_coef
            )
        self._policy = Policy(
            FsdpEngine(settings.actor), method, reference=reference, critic=engine(settings.critic), process=process
        )
        torch.manual_seed(settings.seed + 1 + self._rank)
        self._publish_dtype, self._settings = settings.publish_dtype, settings

    def leave(self) -> None:
        """Leave the other ranks, for a process that goes on without them."""
        from verl.training.group import close_process_group

        close_process_group()

    def prepare(self, plan: RankPlan) -> dict[str, float]:
        """Pull this rank's samples out of the object store and compute what the update needs."""
        samples = fetch(plan.refs, what="give the samples", of=Owner("object store"), deadline=self._deadlines.train)
        return self._policy.prepare(samples, plan) | {"perf/train_worker_rss_gib": resident_gib()}

    def update(self, plan: RankPlan) -> dict[str, float]:
        return self._policy.update(plan)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._policy.score(sequences)

    def pack_weights(self) -> list[Any]:
        """Gather the full weights; rank 0 lays them into the object store and returns where they are."""
        import torch

        from verl.weights.parcel import pack

        weights = self._policy.actor.weights()
        if self._rank > 0:
            for _ in weights:  # the gathering is collective
                pass
            return []
        dtype = getattr(torch, self._publish_dtype)
        return [put(parcel) for parcel in pack(weights, max_bytes=PARCEL_BYTES, dtype=dtype)]

    def send_weights(self, backend: str, engines: Sequence[Any], version: int) -> None:
        """Push the weights by vLLM's own trainer-side engine. Wired, but not run on a machine without GPUs."""
        import torch

        from verl.rollout.vllm_send import VllmSender

        def client(method: str, arguments: Callable[[int], tuple[Any, ...]]) -> None:
            asked = [engine.weight_transfer.remote(method, *arguments(k)) for k, engine in enumerate(engines)]
            fetch(asked, what=method, of=Owner("rollout engines"), deadline=self._deadlines.weights)

        if not hasattr(self, "_sender"):
            self._sender = VllmSender(
                backend,
                client,
                self._policy.actor,
                self._rank,
                dtype=getattr(torch, self._publish_dtype),
                engines=len(engines),
                address=self.address(),
            )
        self._sender.send(version)

    def save(self, directory: str, trainer: Mapping[str, Any]) -> None:
        """Copy the state; it is written while training goes on. See `saved`."""
        if not hasattr(self, "_writer"):
            from verl.checkpoint.background import BackgroundWriter

            self._writer = BackgroundWriter()
        states = self._policy.states(self._settings.save_contents)
        finishing = [self._write_model_files, *[self._write_merged] * self._settings.save_hf]
        self._writer.start(states, Path(directory), trainer, finishing)

    def saved(self, wait: bool) -> bool:
        """Whether it is written; what went wrong with it is raised here."""
        return not hasattr(self, "_writer") or self._writer.finished(wait=wait)

    def _write_model_files(self, directory: Path) -> dict[str, FileSum]:
        """What `from_pretrained` needs beside the weights, for whoever exports them."""
        from verl.checkpoint.files import make_directory, write
        from verl.training.model_files import model_files

        if not hasattr(self, "_model_files"):
            model, tokenizer = self._settings.actor, self._settings.tokenizer_path
            self._model_files = model_files(model.model_path, tokenizer, trust_remote_code=model.trust_remote_code)
        folder = Path("actor", "huggingface")
        make_directory(directory / folder)
        return {str(folder / name): write(directory / folder / name, data) for name, data in self._model_files.items()}

    def _write_merged(self, directory: Path) -> dict[str, FileSum]:
        """The weights for `from_pretrained`, from the shards that were just written; held against them once more."""
        from verl.checkpoint.export import checkpoint_weights, export_weights, weight_gaps
        from verl.training.model_files import exported_form

        shards, folder = directory / "actor", Path("actor", "huggingface")
        form = exported_form(directory / folder, trust_remote_code=self._settings.actor.trust_remote_code)
        written = export_weights(checkpoint_weights(shards, **form), directory / folder)
        if gaps := weight_gaps(checkpoint_weights(shards, **form), directory / folder):
            raise CheckpointError(f"{directory / folder}: is not what was to be written: {'; '.join(gaps[:3])}")
        return {str(folder / name): each for name, each in written.items()}

    def verify(self, directory: str) -> list[str]:
        """What is wrong with this rank's part of a checkpoint's files."""
        from verl.checkpoint.manifest import damage_of

        return damage_of(Path(directory), rank=self._rank, ranks=self._world_size)

    def load(self, directory: str) -> None:
        from verl.checkpoint.save import load

        states = self._policy.states(self._settings.load_contents)
        self._policy.load_states({folder: load(state, Path(directory, folder)) for folder, state in states.items()})


class PolicyGroup:
    """All train workers as the trainer sees them: one policy."""

    def __init__(self, group: ActorGroup, deadlines: Deadlines = DEFAULTS) -> None:
        self._group, self._deadlines = group, deadlines

    @classmethod
    def place(cls, pool: Places, ranks: int, *, share: float, deadlines: Deadlines = DEFAULTS) -> PolicyGroup:
        """Ask for the processes; they come up while the caller goes on."""
        actors = [pool.spawn(TrainWorker, rank, ranks, device=rank, share=share) for rank in range(ranks)]
        return cls(ActorGroup("train worker", actors), deadlines)

    async def start(self, settings: TrainSettings) -> None:
        address = (await self._group.call("address", deadline=self._deadlines.start))[0]
        await self._group.call("start", address, settings, deadline=self._deadlines.start)

    async def prepare(self, plan: Plan) -> dict[str, float]:
        return (await self._group.call("prepare", per_rank=plan.ranks, deadline=self._deadlines.train))[0]

    async def update(self, plan: Plan) -> dict[str, float]:
        parts = [rank.without_refs() for rank in plan.ranks]
        return (await self._group.call("update", per_rank=parts, deadline=self._deadlines.train))[0]

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return (await self._group.call("score", sequences, deadline=self._deadlines.weights))[0]

    async def pack_weights(self) -> Sequence[Any]:
        return (await self._group.call("pack_weights", deadline=self._deadlines.weights))[0]

    async def send_weights(self, backend: str, receivers: Sequence[Any], version: int) -> None:
        engines = [receiver.actor for receiver in receivers]
        await self._group.call("send_weights", backend, engines, version, deadline=self._deadlines.weights)

    async def save(self, directory: str, trainer: Mapping[str, Any]) -> None:
        await self._group.call("save", directory, trainer, deadline=self._deadlines.checkpoint)

    async def saved(self, *, wait: bool) -> bool:
        return all(await self._group.call("saved", wait, deadline=self._deadlines.checkpoint))

    async def verify(self, directory: str) -> list[str]:
        """What is wrong with the files of a checkpoint; each rank reads a part of them."""
        parts = await self._group.call("verify", directory, deadline=self._deadlines.checkpoint)
        return list(dict.fromkeys(words for part in parts for words in part))

    async def load(self, directory: str) -> None:
        await self._group.call("load", directory, deadline=self._deadlines.checkpoint)

    def close(self) -> None:
        self._group.close()
