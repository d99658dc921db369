"""What the workers of all training engines share: joining, saving, loading; and their client."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from verl.cluster.device_pool import PlacementPool
from verl.cluster.group import ActorGroup
from verl.cluster.handles import get_node_address
from verl.cluster.hangs import DEFAULT_DEADLINES, MARGIN_S, Deadline, Deadlines
from verl.errors import CheckpointError
from verl.training.settings import FsdpSettings

if TYPE_CHECKING:  # torch is imported where it is used: see BaseTrainWorker
    from verl.checkpoint.files import FileChecksum

G = TypeVar("G", bound="RankGroup")


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
    """What a rank trains. Both methods are collective."""

    def states(self, contents: Mapping[str, Collection[str]] | None = None) -> dict[str, dict[str, Any]]:
        """Return the state to be saved, by checkpoint folder."""
        ...

    def load_states(self, states: dict[str, dict[str, Any]]) -> None: ...


class BaseTrainWorker:
    """The actor of one rank. Imports torch in `start` only, to leave the cores to the slow start of the engines.

    Subclasses have a `start(address, settings)` that calls `join` and sets `_trained`.
    """

    _trained: Checkpointable

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._listener: socket.socket | None = None

    def address(self) -> tuple[str, int] | None:
        """Return where rank 0 listens from now on; None for other ranks.

        A port that is only chosen could be taken by the time all ranks have imported torch.
        """
        if self._rank != 0:
            return None
        self._listener = socket.create_server((get_node_address(), 0), backlog=self._world_size)
        host, port = self._listener.getsockname()
        return host, port

    def join(self, address: tuple[str, int], settings: RankSettings) -> None:
        """Join the process group of all ranks."""
        from verl.training.process_group import init_process_group

        host, port = address
        self._settings: RankSettings = settings
        # The controller times out first: it can name the missing rank, those in the collective cannot.
        timeout_s = settings.deadlines.longest_s + MARGIN_S
        device = settings.actor.device
        init_process_group(self._rank, self._world_size, host, port, device, timeout_s, self._listener)

    def leave(self) -> None:
        """Leave the process group, in a process that continues without it."""
        from verl.training.process_group import close_process_group

        close_process_group()

    def save(self, directory: str, trainer: Mapping[str, Any]) -> None:
        """Copy the state and write it in the background; see `poll_save`."""
        if not hasattr(self, "_writer"):
            from verl.checkpoint.background import BackgroundWriter

            self._writer = BackgroundWriter()
        states = self._trained.states(self._settings.save_contents)
        finishing = [self._write_model_files, *[self._write_merged] * self._settings.save_hf]
        self._writer.start(states, Path(directory), trainer, finishing)

    def poll_save(self, wait: bool) -> float | None:
        """Return how many seconds writing took, or None while it is in progress; raise its errors."""
        if not hasattr(self, "_writer"):
            return 0.0
        return self._writer.seconds if self._writer.poll(wait=wait) else None

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
        from verl.checkpoint.shards import read_values
        from verl.training.lora import check_base

        states = self._trained.states(self._settings.load_contents)
        for folder, state in states.items():
            if "base" in state and (saved := read_values(Path(directory, folder), "base.")):
                check_base(state["base"], saved)
        self._trained.load_states({folder: load(state, Path(directory, folder)) for folder, state in states.items()})


class RankGroup:
    """The client of all ranks of a model."""

    worker: ClassVar[type[BaseTrainWorker]]

    def __init__(self, group: ActorGroup, deadlines: Deadlines = DEFAULT_DEADLINES) -> None:
        self._group, self._deadlines = group, deadlines
        self._lock = asyncio.Lock()

    @classmethod
    def spawn(
        cls: type[G], pool: PlacementPool, ranks: int, *, share: float, deadlines: Deadlines = DEFAULT_DEADLINES
    ) -> G:
        """Spawn the actors, without waiting for their processes."""
        actors = [pool.spawn(cls.worker, rank, ranks, device=rank, share=share) for rank in range(ranks)]
        return cls(ActorGroup("train worker", actors), deadlines)

    async def _call(
        self, method: str, *args: Any, deadline: Deadline, per_rank: Sequence[Any] | None = None
    ) -> list[Any]:
        """Call all ranks, one call at a time: the deadline starts when they are free.

        A weight sync to an engine that has restarted may have to wait for a save of an hour, without a timeout.
        """
        async with self._lock:
            return await self._group.call(method, *args, deadline=deadline, per_rank=per_rank)

    async def start(self, settings: RankSettings) -> list[str]:
        """Start all ranks; return their notes for the user, without duplicates."""
        address = (await self._call("address", deadline=self._deadlines.start))[0]
        notes = await self._call("start", address, settings, deadline=self._deadlines.start)
        return list(dict.fromkeys(note for rank in notes for note in rank))

    async def save(self, directory: str, trainer: Mapping[str, Any]) -> None:
        await self._call("save", directory, trainer, deadline=self._deadlines.checkpoint)

    async def poll_save(self, *, wait: bool) -> float | None:
        parts = await self._call("poll_save", wait, deadline=self._deadlines.checkpoint)
        return None if None in parts else max(parts)

    async def verify(self, directory: str) -> list[str]:
        """Return what is wrong with a checkpoint's files, each of which is read by one rank."""
        parts = await self._call("verify", directory, deadline=self._deadlines.checkpoint)
        return list(dict.fromkeys(problem for part in parts for problem in part))

    async def load(self, directory: str) -> None:
        await self._call("load", directory, deadline=self._deadlines.checkpoint)

    def close(self) -> None:
        self._group.close()
