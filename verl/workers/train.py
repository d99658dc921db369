"""The train workers: one process per rank, each with its shard of all models that it trains; and their clients."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar

from verl.algorithms.settings import AlgorithmSettings
from verl.cluster.actors import ActorGroup, free_port, get_node_address, get_objects
from verl.cluster.device_pool import PlacementPool
from verl.cluster.hangs.pending_calls import DEFAULT_DEADLINES, MARGIN_S, CallTarget, Deadlines
from verl.data.plan import Plan, RankPlan
from verl.errors import CheckpointError, DivergenceError, EngineError
from verl.tracking.metrics import resident_gib
from verl.training.settings import FsdpSettings, ProfileSettings

if TYPE_CHECKING:  # torch is imported where it is used: see BaseTrainWorker
    from verl.checkpoint.background import BackgroundWriter
    from verl.checkpoint.files import FileChecksum
    from verl.training.profiler import StepProfiler
    from verl.workers.weight_packer import WeightPacker

G = TypeVar("G", bound="RankGroup")
P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W", bound="BaseTrainWorker")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """The settings of one rank: the model that it trains, and how it is saved."""

    actor: FsdpSettings
    seed: int = 0
    tokenizer_path: str | None = None  # None: the model's
    save_hf: bool = False
    save_contents: Mapping[str, Sequence[str]] | None = None  # by checkpoint folder; None: all
    load_contents: Mapping[str, Sequence[str]] | None = None
    deadlines: Deadlines = DEFAULT_DEADLINES
    memory_advice: str = ""  # the settings that reduce memory use, for the message of an out-of-memory error


class Checkpointable(Protocol):
    """What a rank trains. `states` and `load_states` are collective."""

    def engines(self) -> Mapping[str, Any]:
        """Return the `TrainEngine`s by their folder in a checkpoint."""
        ...

    def states(self, contents: Mapping[str, Collection[str]] | None = None) -> dict[str, dict[str, Any]]:
        """Return the state to be saved, by checkpoint folder."""
        ...

    def load_states(self, states: dict[str, dict[str, Any]]) -> None: ...


class BaseTrainWorker:
    """The actor of one rank. Imports torch in `start` only, to leave the cores to the slow start of the engines.

    Subclasses have a `start(address, settings)` that calls `join` and sets `_trained`.
    """

    _settings: RankSettings
    _trained: Checkpointable

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._listener: socket.socket | None = None
        self._profiler: StepProfiler | None = None

    def address(self) -> tuple[str, int] | None:
        """Return where rank 0 listens from now on; None for other ranks.

        A port that is only chosen could be taken by the time all ranks have imported torch.
        """
        if self._rank != 0:
            return None
        self._listener = socket.create_server((get_node_address(), 0), backlog=self._world_size)
        host, port = self._listener.getsockname()
        return host, port

    def visible_devices(self) -> str:
        """Return the accelerators that Ray has assigned to this process, for the engines that share them."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def join(self, address: tuple[str, int], settings: RankSettings) -> None:
        """Join the process group of all ranks."""
        from verl.training.process_group import init_process_group

        host, port = address
        self._settings = settings
        # The controller times out first: it can name the missing rank, those in the collective cannot.
        timeout_s = settings.deadlines.longest_s + MARGIN_S
        device = settings.actor.device
        init_process_group(self._rank, self._world_size, host, port, device, timeout_s, self._listener)

    def leave(self) -> None:
        """Leave the process group, and stop recording, in a process that continues without it."""
        from verl.training.process_group import close_process_group

        self.stop_profile()
        close_process_group()

    def save(self, directory: str, trainer: Mapping[str, Any]) -> None:
        """Copy the state and write it in the background; see `poll_save`. Diverged models are not saved."""
        states = self._trained.states(self._settings.save_contents)
        engines = self._trained.engines()
        for folder in states:
            if problem := engines[folder].find_divergence():
                raise DivergenceError(
                    f"train worker: {folder}: training has diverged: {problem}. Nothing was saved in {directory}; "
                    "earlier checkpoints are intact. Rerun with a lower learning rate (optim.lr) to resume from the "
                    "last one."
                )
        finishing = [self._write_model_files, *[self._write_merged] * self._settings.save_hf]
        self._writer.start(states, Path(directory), trainer, finishing)

    def poll_save(self, wait: bool) -> float | None:
        """Return how many seconds writing took, or None while it is in progress; raise its errors."""
        return self._writer.seconds if self._writer.poll(wait=wait) else None

    @cached_property
    def _writer(self) -> BackgroundWriter:
        from verl.checkpoint.background import BackgroundWriter

        return BackgroundWriter()

    def _write_model_files(self, directory: Path) -> dict[str, FileChecksum]:
        """Write what `from_pretrained` needs besides the weights."""
        from verl.checkpoint.files import make_directory, write
        from verl.training.model_files import read_model_files

        if not hasattr(self, "_model_files"):
            model, tokenizer = self._settings.actor, self._settings.tokenizer_path
            self._model_files = read_model_files(model.model_path, tokenizer, trust_remote_code=model.trust_remote_code)
        folder = Path("actor", "huggingface")
        make_directory(directory / folder)
        return {str(folder / name): write(directory / folder / name, data) for name, data in self._model_files.items()}

    def _write_merged(self, directory: Path) -> dict[str, FileChecksum]:
        """Write the weights for `from_pretrained` from the new shards, and compare them with the shards."""
        from transformers import AutoConfig

        from verl.checkpoint.export import compare_weights, export_weights
        from verl.training.model_files import base_weights_reader, read_saved_weights

        folder, trust = Path("actor", "huggingface"), self._settings.actor.trust_remote_code
        config = AutoConfig.from_pretrained(directory / folder, trust_remote_code=trust)

        def weights() -> Iterator[tuple[str, Any]]:
            base = base_weights_reader(trust_remote_code=trust)
            return read_saved_weights(directory / "actor", config, base=base, trust_remote_code=trust)

        written = export_weights(weights(), directory / folder)
        if gaps := compare_weights(weights(), directory / folder):
            problems = "; ".join(gaps[:3])
            raise CheckpointError(f"{directory / folder}: the merged weights differ from the shards: {problems}")
        return {str(folder / name): each for name, each in written.items()}

    def verify(self, directory: str) -> list[str]:
        """Return what is wrong with this rank's part of a checkpoint's files."""
        from verl.checkpoint.manifest import find_corruption

        return find_corruption(Path(directory), rank=self._rank, ranks=self._world_size)

    def load(self, directory: str) -> None:
        from verl.checkpoint.save import load
        from verl.checkpoint.shared_index import read_index_once
        from verl.training.lora import check_base

        states = self._trained.states(self._settings.load_contents)
        indices = {folder: read_index_once(Path(directory, folder)) for folder in states}
        for folder, state in states.items():
            if "base" in state and (saved := indices[folder].values_below("base.")):
                check_base(state["base"], saved)
        loaded = {folder: load(state, Path(directory, folder), indices[folder]) for folder, state in states.items()}
        self._trained.load_states(loaded)

    def peak_memory(self) -> dict[str, float]:
        """Return the peak of allocated device memory since the last call, as a metric; nothing on CPU."""
        import torch

        if self._settings.actor.device == "cpu":
            return {}
        peak = torch.accelerator.max_memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        return {"perf/max_memory_allocated_gib": peak / 2**30}

    def start_profile(self, settings: ProfileSettings, step: int) -> None:
        """Start to record a step, if this rank is to be profiled."""
        from verl.training.profiler import StepProfiler

        if self._rank in settings.ranks:
            device = self._settings.actor.device
            self._profiler = StepProfiler(settings, step=step, rank=self._rank, device=device)

    def stop_profile(self) -> None:
        """Stop recording, and write what was recorded."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None


def explain_out_of_memory(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """Re-raise an out-of-memory error of a worker's method as an `EngineError` that names settings to change."""

    @wraps(method)
    def explained(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        import torch

        try:
            return method(self, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            reason = str(error).partition("\n")[0]
            raise EngineError(
                f"train worker {self._rank}: {method.__name__}: out of device memory: {reason}\n"
                f"{self._settings.memory_advice}"
            ) from error

    return explained


class RankGroup(ActorGroup):
    """The client of all ranks of a model."""

    worker: ClassVar[type[BaseTrainWorker]]

    def __init__(self, actors: Sequence[Any], deadlines: Deadlines = DEFAULT_DEADLINES) -> None:
        super().__init__("train worker", actors)
        self._deadlines = deadlines

    @classmethod
    def spawn(
        cls: type[G],
        pool: PlacementPool,
        ranks: int,
        *,
        deadlines: Deadlines = DEFAULT_DEADLINES,
        nsys: Mapping[int, Mapping[str, str]] | None = None,
    ) -> G:
        """Spawn the actors, each with a device of its own, without waiting for their processes.

        `nsys` has the options of the ranks that run under Nsight Systems.
        """
        under = nsys or {}
        actors = [
            pool.spawn(cls.worker, rank, ranks, device=rank, share=1, nsys=under.get(rank)) for rank in range(ranks)
        ]
        return cls(actors, deadlines)

    async def visible_devices(self) -> list[str]:
        """Return the accelerators of each rank, as CUDA_VISIBLE_DEVICES names them."""
        return await self.call("visible_devices", deadline=self._deadlines.start)

    async def start(self, settings: RankSettings) -> list[str]:
        """Start all ranks; return their notes for the user, without duplicates."""
        address = (await self.call("address", deadline=self._deadlines.start))[0]
        notes = await self.call("start", address, settings, deadline=self._deadlines.start)
        return list(dict.fromkeys(note for rank in notes for note in rank))

    async def save(self, directory: str, trainer: Mapping[str, Any]) -> None:
        await self.call("save", directory, trainer, deadline=self._deadlines.checkpoint)

    async def poll_save(self, *, wait: bool) -> float | None:
        parts = await self.call("poll_save", wait, deadline=self._deadlines.checkpoint)
        return None if None in parts else max(parts)

    async def verify(self, directory: str) -> list[str]:
        """Return what is wrong with a checkpoint's files, each of which is read by one rank."""
        parts = await self.call("verify", directory, deadline=self._deadlines.checkpoint)
        return list(dict.fromkeys(problem for part in parts for problem in part))

    async def load(self, directory: str) -> None:
        await self.call("load", directory, deadline=self._deadlines.checkpoint)

    async def start_profile(self, settings: ProfileSettings, step: int) -> None:
        await self.call("start_profile", settings, step, deadline=self._deadlines.train)

    async def stop_profile(self) -> None:
        await self.call("stop_profile", deadline=self._deadlines.checkpoint)  # it writes files, as a save does


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings(RankSettings):
    """The settings of a train worker: its models and the algorithm."""

    algorithm: AlgorithmSettings
    reference: FsdpSettings | None = None
    reference_is_actor: bool = False  # with its adapter disabled
    critic: FsdpSettings | None = None
    prime: FsdpSettings | None = None  # PRIME's reward model
    prime_reference: FsdpSettings | None = None  # None: `reference`
    teacher: FsdpSettings | None = None
    sync_dtype: str = "bfloat16"
    sync_adapter_only: bool = False  # the engines load the base model themselves
    sync_bucket_bytes: int = 512 * 2**20
    is_one_machine: bool = True  # where all engines are, too
    shares_devices: bool = False  # with engines, which use the memory that is freed here
    engine_width: int = 1  # devices of an engine


class TrainWorker(BaseTrainWorker):
    """The actor of one rank of a policy and its other models."""

    _settings: TrainSettings

    @explain_out_of_memory
    def start(self, address: tuple[str, int], settings: TrainSettings) -> list[str]:
        """Join the other ranks and load the models; return notes for the user.

        New weights are initialized alike on all ranks; afterwards their random states differ.
        """
        import torch

        from verl.training.fsdp import BaseModelReference, FsdpEngine
        from verl.training.policy import PolicyTrainer, PrimeRewardModel, load_functions
        from verl.training.teacher import TeacherEngine

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
            prime = PrimeRewardModel(FsdpEngine(settings.prime), prime_reference, beta=algorithm.prime_beta)
        teacher: Any = None if settings.teacher is None else TeacherEngine(FsdpEngine(settings.teacher))
        self._policy = self._trained = PolicyTrainer(
            actor,
            algorithm,
            reference=reference,
            critic=make_engine(settings.critic),
            prime=prime,
            teacher=teacher,
        )
        torch.manual_seed(settings.seed + 1 + self._rank)
        self._sync_dtype, self._deadlines = getattr(torch, settings.sync_dtype), settings.deadlines
        return actor.notes

    @explain_out_of_memory
    def prepare(self, plan: RankPlan) -> dict[str, float]:
        """Get this rank's samples from the object store and compute what the update needs."""
        samples = get_objects(
            plan.refs,
            action="get the samples",
            target=CallTarget("object store"),
            deadline=self._deadlines.train,
        )
        return self._policy.prepare(samples, plan) | {"perf/train_worker_rss_gib": resident_gib()}

    @explain_out_of_memory
    def update(self, plan: RankPlan) -> dict[str, float]:
        with self._freeing_memory():
            return self._policy.update(plan) | self.peak_memory()

    @explain_out_of_memory
    def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        with self._freeing_memory():
            return self._policy.compute_logprobs(sequences)

    @explain_out_of_memory
    def pack_bucket(self, is_first: bool) -> Any:
        """Gather the next weights, or those of the adapter; rank 0 returns them in a bucket, and None at the end."""
        with self._freeing_memory():
            if is_first:
                self._packer.start()
            return self._packer.pack_next()

    def free_buckets(self) -> None:
        self._packer.free()

    @cached_property
    def _packer(self) -> WeightPacker:
        from verl.workers.weight_packer import WeightPacker

        actor: Any = self._policy.actor
        gather = actor.adapter_weights if self._settings.sync_adapter_only else actor.weights
        return WeightPacker(
            lambda: gather(self._sync_dtype),
            self._rank,
            max_bytes=self._settings.sync_bucket_bytes,
            is_one_machine=self._settings.is_one_machine,
        )

    def send_weights(self, backend: str, engines: Sequence[Any], version: int) -> None:
        """Send the weights by vLLM's trainer-side engine. Needs GPUs, so that CI does not run it."""
        from verl.rollout.vllm.sender import VllmSender

        def client(method: str, arguments: Callable[[int], tuple[Any, ...]]) -> None:
            replies = [engine.weight_transfer.remote(method, *arguments(k)) for k, engine in enumerate(engines)]
            get_objects(replies, action=method, target=CallTarget("rollout engines"), deadline=self._deadlines.weights)

        actor: Any = self._policy.actor
        if not hasattr(self, "_sender"):
            self._sender = VllmSender(
                backend,
                client,
                actor,
                self._rank,
                dtype=self._sync_dtype,
                engines=len(engines),
                width=self._settings.engine_width,
                bucket_bytes=self._settings.sync_bucket_bytes,
                address=(get_node_address(), free_port()),
            )
        with self._freeing_memory():
            self._sender.send(version)

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
        return (await self.call("prepare", per_rank=plan.ranks, deadline=self._deadlines.train))[0]

    async def update(self, plan: Plan) -> dict[str, float]:
        parts = [rank.without_refs() for rank in plan.ranks]
        return (await self.call("update", per_rank=parts, deadline=self._deadlines.train))[0]

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return (await self.call("compute_logprobs", sequences, deadline=self._deadlines.weights))[0]

    async def pack_weights(self) -> AsyncGenerator[Any, None]:
        packing = asyncio.ensure_future(self._pack_bucket(is_first=True))
        try:
            while (bucket := await packing) is not None:
                packing = asyncio.ensure_future(self._pack_bucket(is_first=False))
                yield bucket
            await self.call("free_buckets", deadline=self._deadlines.weights)
        finally:
            packing.cancel()  # no effect once it is done

    async def _pack_bucket(self, *, is_first: bool) -> Any:
        return (await self.call("pack_bucket", is_first, deadline=self._deadlines.weights))[0]

    async def send_weights(self, backend: str, receivers: Sequence[Any], version: int) -> None:
        engines = [receiver.actor for receiver in receivers]
        await self.call("send_weights", backend, engines, version, deadline=self._deadlines.weights)
