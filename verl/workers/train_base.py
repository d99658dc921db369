"""The base of all train workers: one process per rank, in one process group; saving, loading, profiling."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar

from verl.child_process import keep_sigterm_blocked
from verl.cluster.actors import ActorGroup, get_node_address
from verl.cluster.cuda_build import find_torch_problem
from verl.cluster.device_pool import PlacementPool
from verl.cluster.hangs.pending_calls import DEFAULT_TIMEOUTS, MARGIN_S, Timeouts
from verl.custom_functions import import_external
from verl.errors import CheckpointError, ConfigError, DivergenceError, EngineError, VerlError
from verl.tracking.phases import PHASES, PhaseRow, PhaseTimes
from verl.training.layout import RankLayout
from verl.training.settings import ProfileSettings
from verl.workers.rank_speed import PROBE_S, time_matrix_product
from verl.workers.train_settings import RankSettings

if TYPE_CHECKING:  # torch is imported where it is used: see BaseTrainWorker
    from verl.checkpoint.background import BackgroundWriter
    from verl.checkpoint.files import FileChecksum
    from verl.training.engine import TrainEngine
    from verl.training.profiler import StepProfiler

_log = logging.getLogger(__name__)

G = TypeVar("G", bound="RankGroup")
P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W", bound="BaseTrainWorker")


class Checkpointable(Protocol):
    """The models that a rank trains. `states` and `load_states` are collective."""

    def engines(self) -> Mapping[str, TrainEngine[Any]]:
        """Return the engines by their folder in a checkpoint."""
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
        keep_sigterm_blocked()
        self._rank, self._world_size = rank, world_size
        self._phases = PhaseTimes(f"train {rank}")
        self._listener: socket.socket | None = None
        self._profiler: StepProfiler | None = None
        self._divergence: str | None = None  # what `check` has found in the current models; None: not called

    def address(self) -> tuple[str, int] | None:
        """Return where rank 0 listens from now on; None for other ranks.

        Other processes could take a port that is not bound yet by the time all ranks have imported torch.
        """
        if self._rank != 0:
            return None
        self._listener = socket.create_server((get_node_address(), 0), backlog=self._world_size)
        host, port = self._listener.getsockname()
        return host, port

    def visible_devices(self) -> str:
        """Return the accelerators that Ray has assigned to this process, for the engines that share them."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def find_device_problem(self) -> str:
        """Return why torch cannot use this rank's accelerator, and on which node; empty if it can."""
        if not (problem := find_torch_problem()):
            return ""
        import torch

        if torch.cuda.is_available():  # NVIDIA's compatibility packages let older drivers run a newer CUDA
            return ""
        return f"{problem}; node {socket.gethostname()}"

    def device_name(self) -> str:
        """Return the name of this rank's accelerator, as its driver gives it."""
        import torch

        return torch.cuda.get_device_name()

    def join(self, address: tuple[str, int], settings: RankSettings) -> None:
        """Import the modules of the user and join the process group of all ranks."""
        import_external(settings.external_modules)
        from verl.training.process_group import init_process_group

        host, port = address
        self._settings = settings
        # The controller times out first: it can name the missing rank, the ranks in the collective cannot.
        timeout_s = settings.timeouts.longest_s + MARGIN_S
        device = settings.actor.device
        if settings.deterministic:
            from verl.training.determinism import enable_determinism

            enable_determinism()
        init_process_group(
            self._rank, self._world_size, host, port, device, timeout_s, self._listener, get_node_address()
        )

    def leave(self) -> None:
        """Leave the process group, and stop recording, in a process that continues without it."""
        from verl.training.process_group import close_process_group

        self.stop_profile()
        close_process_group()
        if hasattr(self, "_settings") and self._settings.deterministic:
            from verl.training.determinism import disable_determinism

            disable_determinism()

    def check(self) -> None:
        """Find out whether a trained model has diverged, which takes a pass of each; see `save`."""
        self._divergence = ""
        for folder, engine in self._trained.engines().items():
            if problem := engine.find_divergence():
                self._divergence = f"{folder}: training has diverged: {problem}"
                return

    def save(self, directory: str, trainer: Mapping[str, Any], is_last: bool = False) -> None:
        """Copy the state and write it in the background; see `poll_save`. Diverged models are not saved.

        Needs no memory of the device if `check` was called: engines that share it may be awake.
        """
        if self._divergence is None:
            self.check()
        if self._divergence:
            raise DivergenceError(
                f"train worker: {self._divergence}. Nothing was saved in {directory}; earlier checkpoints are intact. "
                "Rerun with a lower learning rate (optim.lr) to resume from the last one."
            )
        states = self._trained.states(self._settings.save_contents)
        finishing = [self._write_model_files]
        if self._settings.save_hf:
            finishing.append(self._write_merged)
        elif self._settings.save_hf is None and is_last:
            finishing.append(self._try_to_write_merged)
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

    def _try_to_write_merged(self, directory: Path) -> dict[str, FileChecksum]:
        """Write merged weights that nobody asked for: the checkpoint is complete without them, if they fail."""
        try:
            return self._write_merged(directory)
        except (OSError, ValueError, RuntimeError, VerlError) as error:
            _log.warning("%s has no model for from_pretrained (run verl merge): %s", directory, error)
            for file in (directory / "actor" / "huggingface").glob("*.safetensors*"):
                file.unlink()
            return {}

    def verify(self, directory: str) -> list[str]:
        """Return what is wrong with this rank's part of a checkpoint's files."""
        from verl.checkpoint.manifest import find_corruption

        return find_corruption(Path(directory), rank=self._rank, ranks=self._world_size)

    def load(self, directory: str) -> None:
        from verl.checkpoint.save import load_folders

        self._trained.load_states(load_folders(self._trained.states(self._settings.load_contents), Path(directory)))
        self._divergence = None

    def peak_memory(self) -> dict[str, float]:
        """Return the peak of allocated device memory since the last call, as a metric; nothing on CPU."""
        import torch

        if self._settings.actor.device == "cpu":
            return {}
        peak = torch.accelerator.max_memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        return {"perf/max_memory_allocated_gib": peak / 2**30}

    def probe_speed(self) -> dict[str, float]:
        """Return how long this rank needs for a small matrix product; nothing if there is no other rank."""
        return {PROBE_S: time_matrix_product(self._settings.actor.device)} if self._world_size > 1 else {}

    def take_phases(self) -> dict[str, Any]:
        """Return what this rank did and when, to be added to the metrics of a reply."""
        return {PHASES: self._phases.take()}

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

    def __init__(self, actors: Sequence[Any], timeouts: Timeouts = DEFAULT_TIMEOUTS) -> None:
        super().__init__("train worker", actors)
        self._timeouts = timeouts
        self.layout = RankLayout.of_adjacent(len(self.actors))
        self._phases: list[PhaseRow] = []

    @classmethod
    def spawn(
        cls: type[G],
        pool: PlacementPool,
        ranks: int,
        *,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        nsys: Mapping[int, Mapping[str, str]] | None = None,
    ) -> G:
        """Spawn the actors, each with a device of its own, without waiting for their processes.

        `nsys` has the options of the ranks that run under Nsight Systems.
        """
        under = nsys or {}
        actors = [
            pool.spawn(cls.worker, rank, ranks, device=rank, share=1, nsys=under.get(rank)) for rank in range(ranks)
        ]
        return cls(actors, timeouts)

    def take_phases(self) -> list[PhaseRow]:
        """Return what all ranks did and when, from the replies since the last call."""
        rows, self._phases = self._phases, []
        return rows

    def _collect_phases(self, replies: Iterable[dict[str, Any]]) -> None:
        """Keep the phases of replies, and leave their metrics."""
        for reply in replies:
            self._phases += reply.pop(PHASES, [])

    async def visible_devices(self) -> list[str]:
        """Return the accelerators of each rank, as CUDA_VISIBLE_DEVICES names them."""
        return await self.call("visible_devices", timeout=self._timeouts.start)

    async def check_devices(self) -> None:
        """Raise if torch cannot use the accelerator of a rank."""
        problems = await self.call("find_device_problem", timeout=self._timeouts.start)
        if found := list(dict.fromkeys(filter(None, problems))):
            raise ConfigError(found)

    async def device_name(self) -> str:
        """Return the name of the accelerators."""
        return (await self.call("device_name", timeout=self._timeouts.start))[0]

    async def start(self, settings: RankSettings) -> list[str]:
        """Start all ranks; return their notes for the user, without duplicates."""
        self.layout = settings.actor.layout(len(self.actors))
        address = (await self.call("address", timeout=self._timeouts.start))[0]
        notes = await self.call("start", address, settings, timeout=self._timeouts.start)
        return list(dict.fromkeys(note for rank in notes for note in rank))

    async def check(self) -> None:
        """Find out whether the models have diverged, while their devices have room for a pass; a save needs to know."""
        await self.call("check", timeout=self._timeouts.train)

    async def save(self, directory: str, trainer: Mapping[str, Any], *, is_last: bool = False) -> None:
        await self.call("save", directory, trainer, is_last, timeout=self._timeouts.checkpoint)

    async def poll_save(self, *, wait: bool) -> float | None:
        timeout = self._timeouts.checkpoint if wait else self._timeouts.reply
        parts = await self.call("poll_save", wait, timeout=timeout)
        return None if None in parts else max(parts)

    async def verify(self, directory: str) -> list[str]:
        """Return what is wrong with a checkpoint's files, each of which is read by one rank."""
        parts = await self.call("verify", directory, timeout=self._timeouts.checkpoint)
        return list(dict.fromkeys(problem for part in parts for problem in part))

    async def load(self, directory: str) -> None:
        await self.call("load", directory, timeout=self._timeouts.checkpoint)

    async def start_profile(self, settings: ProfileSettings, step: int) -> None:
        await self.call("start_profile", settings, step, timeout=self._timeouts.train)

    async def stop_profile(self) -> None:
        await self.call("stop_profile", timeout=self._timeouts.checkpoint)  # it writes files, as a save does
