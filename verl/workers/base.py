"""The ranks of a training engine as processes: what they have in common, whatever they train by."""

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
from verl.cluster.hangs.pending_calls import DEFAULT_DEADLINES, MARGIN_S, Deadline, Deadlines
from verl.errors import CheckpointError
from verl.training.settings import FsdpSettings

if TYPE_CHECKING:  # torch is imported where it is used: see RankWorker
    from verl.checkpoint.files import FileChecksum

__all__ = ["BaseTrainWorker", "RankGroup", "RankSettings"]

G = TypeVar("G", bound="RankGroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """What a rank is told: the model that it trains, and how it is saved."""

    actor: FsdpSettings
    seed: int = 0
    tokenizer_path: str | None = None  # None: with the model
    save_hf: bool = False
    save_contents: Mapping[str, Sequence[str]] | None = None  # by folder of a checkpoint; None: all
    load_contents: Mapping[str, Sequence[str]] | None = None
    deadlines: Deadlines = DEFAULT_DEADLINES
    memory_advice: str = ""  # the settings that reduce memory use, for the message of an out-of-memory error


class Trained(Protocol):
    """What a rank trains, as saving needs it. Both are collective."""

    def states(self, contents: Mapping[str, Collection[str]] | None = None) -> dict[str, dict[str, Any]]:
        """What a checkpoint must hold, by folder."""
        ...

    def load_states(self, states: dict[str, dict[str, Any]]) -> None: ...


class BaseTrainWorker:
    """The actor of one rank. Imports torch when it starts: until then the cores belong to the others' long start.

    Who inherits it has a `start(address, settings)`, in which it calls `join` and sets `_trained`.
    """

    _trained: Trained

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._listener: socket.socket | None = None

    def address(self) -> tuple[str, int] | None:
        """Where rank 0 can be met: it listens from now on. A port that is only chosen may be another's when it is used,
        since all ranks import torch in between."""
        if self._rank != 0:
            return None
        self._listener = socket.create_server((get_node_address(), 0), backlog=self._world_size)
        host, port = self._listener.getsockname()
        return host, port

    def join(self, address: tuple[str, int], settings: RankSettings) -> None:
        """Meet the other ranks."""
        from verl.training.process_group import init_process_group

        host, port = address
        self._settings: RankSettings = settings
        # The controller gives up first: it names the rank that is missing, which those in the collective cannot know.
        patience_s = settings.deadlines.longest_s + MARGIN_S
        device = settings.actor.device
        init_process_group(self._rank, self._world_size, host, port, device, patience_s, self._listener)

    def leave(self) -> None:
        """Leave the other ranks, for a process that goes on without them."""
        from verl.training.process_group import close_process_group

        close_process_group()

    def save(self, directory: str, trainer: Mapping[str, Any]) -> None:
        """Copy the state; it is written while training goes on. See `saved`."""
        if not hasattr(self, "_writer"):
            from verl.checkpoint.background import BackgroundWriter

            self._writer = BackgroundWriter()
        states = self._trained.states(self._settings.save_contents)
        finishing = [self._write_model_files, *[self._write_merged] * self._settings.save_hf]
        self._writer.start(states, Path(directory), trainer, finishing)

    def poll_save(self, wait: bool) -> float | None:
        """The seconds that it took to write it, None while it goes on; what went wrong with it is raised here."""
        if not hasattr(self, "_writer"):
            return 0.0
        return self._writer.seconds if self._writer.poll(wait=wait) else None

    def _write_model_files(self, directory: Path) -> dict[str, FileChecksum]:
        """What `from_pretrained` needs beside the weights, for whoever exports them."""
        from verl.checkpoint.files import make_directory, write
        from verl.training.model_files import read_model_files

        if not hasattr(self, "_model_files"):
            model, tokenizer = self._settings.actor, self._settings.tokenizer_path
            self._model_files = read_model_files(model.model_path, tokenizer, trust_remote_code=model.trust_remote_code)
        folder = Path("actor", "huggingface")
        make_directory(directory / folder)
        return {str(folder / name): write(directory / folder / name, data) for name, data in self._model_files.items()}

    def _write_merged(self, directory: Path) -> dict[str, FileChecksum]:
        """The weights for `from_pretrained`, from the shards that were just written; held against them once more."""
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
            raise CheckpointError(f"{directory / folder}: is not what was to be written: {'; '.join(gaps[:3])}")
        return {str(folder / name): each for name, each in written.items()}

    def verify(self, directory: str) -> list[str]:
        """What is wrong with this rank's part of a checkpoint's files."""
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
    """All ranks as the trainer sees them: one model."""

    worker: ClassVar[type[BaseTrainWorker]]

    def __init__(self, group: ActorGroup, deadlines: Deadlines = DEFAULT_DEADLINES) -> None:
        self._group, self._deadlines = group, deadlines
        self._turn = asyncio.Lock()

    @classmethod
    def spawn(
        cls: type[G], pool: PlacementPool, ranks: int, *, share: float, deadlines: Deadlines = DEFAULT_DEADLINES
    ) -> G:
        """Ask for the processes; they come up while the caller goes on."""
        actors = [pool.spawn(cls.worker, rank, ranks, device=rank, share=share) for rank in range(ranks)]
        return cls(ActorGroup("train worker", actors), deadlines)

    async def _call(
        self, method: str, *args: Any, deadline: Deadline, per_rank: Sequence[Any] | None = None
    ) -> list[Any]:
        """As the group's; but ranks do one thing at a time, and a deadline begins when they are free for it. Weights
        that an engine asks for which comes back may stand behind a save of an hour, and nobody is lost."""
        async with self._turn:
            return await self._group.call(method, *args, deadline=deadline, per_rank=per_rank)

    async def start(self, settings: RankSettings) -> list[str]:
        """Returns what the user should know of it, once, whichever ranks say it."""
        address = (await self._call("address", deadline=self._deadlines.start))[0]
        notes = await self._call("start", address, settings, deadline=self._deadlines.start)
        return list(dict.fromkeys(note for rank in notes for note in rank))

    async def save(self, directory: str, trainer: Mapping[str, Any]) -> None:
        await self._call("save", directory, trainer, deadline=self._deadlines.checkpoint)

    async def poll_save(self, *, wait: bool) -> float | None:
        parts = await self._call("poll_save", wait, deadline=self._deadlines.checkpoint)
        return None if None in parts else max(parts)

    async def verify(self, directory: str) -> list[str]:
        """What is wrong with the files of a checkpoint; each rank reads a part of them."""
        parts = await self._call("verify", directory, deadline=self._deadlines.checkpoint)
        return list(dict.fromkeys(words for part in parts for words in part))

    async def load(self, directory: str) -> None:
        await self._call("load", directory, deadline=self._deadlines.checkpoint)

    def close(self) -> None:
        self._group.close()
