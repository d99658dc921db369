"""The poisons of `poison.py`: each patches one part of a run in this process, which then runs the command."""

from __future__ import annotations

import errno
import math
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from ray.exceptions import OutOfDiskError

from verl.checkpoint.files import ChecksummedFile
from verl.cli import main
from verl.cluster import actors, object_store
from verl.rollout.hf import HfEngine
from verl.tracking.sinks import JsonlSink
from verl.trainer.build import placement
from verl.training.fsdp.engine import FsdpEngine
from verl.training.policy.trainer import PolicyTrainer
from verl.workers import episodes
from verl.workers.rollout import RolloutActor

FROM = 3  # the first step that is poisoned
BATCH, RESPONSES = 4, 2


def replace(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute for the rest of this process; AttributeError if there is nothing to replace."""
    patch.object(owner, name, value).start()


def nan_gradients(folder: Path) -> None:
    """The loss is NaN from step `FROM` on."""
    backward = FsdpEngine._backward

    def poisoned(self: FsdpEngine, batch: Any, loss: Any, *rest: Any) -> Any:
        def broken(*inputs: Any) -> Any:
            share, metrics = loss(*inputs)
            return share * (math.nan if self.step >= FROM - 1 else 1.0), metrics

        return backward(self, batch, broken, *rest)

    replace(FsdpEngine, "_backward", poisoned)


def nan_weights(folder: Path) -> None:
    """One weight is NaN after step `FROM`."""
    update = PolicyTrainer.update

    def poisoned(self: PolicyTrainer, plan: Any) -> dict[str, float]:
        metrics = update(self, plan)
        if self._steps == FROM:
            actor: Any = self.actor
            parameter = next(iter(actor.model.parameters()))
            with torch.no_grad():
                getattr(parameter, "_local_tensor", parameter).view(-1)[::7] = math.nan
        return metrics

    replace(PolicyTrainer, "update", poisoned)


def wrong_engines(folder: Path) -> None:
    """From version `FROM` on, all engines return wrong log-probs."""
    _shift_logprobs(lambda engine: True)


def wrong_engine(folder: Path) -> None:
    """From version `FROM` on, the first process of the second of two engines returns wrong log-probs."""
    made: list[HfEngine] = []
    start, kill = HfEngine.start, actors.kill_actor

    async def record(self: HfEngine) -> None:
        made.append(self)
        await start(self)

    def replace_process(actor: Any, *, restarts: bool = False) -> None:
        instance = actor._instance
        if restarts and isinstance(instance, RolloutActor):
            instance.__init__(instance._spec, instance._settings)  # type: ignore[misc]
        else:
            kill(actor, restarts=restarts)

    replace(HfEngine, "start", record)
    replace(actors, "kill_actor", replace_process)
    replace(placement, "count_engines", lambda config: 2)
    _shift_logprobs(lambda engine: engine is made[1])


def _shift_logprobs(is_wrong: Callable[[HfEngine], bool]) -> None:
    compute = HfEngine.compute_logprobs

    async def poisoned(self: HfEngine, sequences: Any) -> list[list[float]]:
        shift = 1.0 if self._version >= FROM and is_wrong(self) else 0.0
        return [[value + shift for value in each] for each in await compute(self, sequences)]

    replace(HfEngine, "compute_logprobs", poisoned)


def failing_tracker(folder: Path) -> None:
    """A tracker that cannot be reached for most of the run."""
    calls = iter(range(10**6))

    class Run:
        def log(self, metrics: Any, step: int) -> None:
            if next(calls) in range(1, 3):
                raise ConnectionError("connection refused by the tracker")
            with (folder / "tracked.txt").open("a") as file:
                file.write(f"{step}\n")

        def finish(self) -> None: ...

    fake = types.ModuleType("wandb")
    fake.__spec__ = ModuleSpec("wandb", None, origin=__file__)  # otherwise it does not count as installed
    fake.init = lambda **_: Run()  # type: ignore[attr-defined]
    sys.modules["wandb"] = fake


def full_metrics_disk(folder: Path) -> None:
    """The disk of metrics.jsonl is full for a while."""
    log, calls = JsonlSink.log, iter(range(10**6))

    def poisoned(self: JsonlSink, metrics: Any, step: int) -> None:
        if next(calls) in range(2, 4):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        log(self, metrics, step)

    replace(JsonlSink, "log", poisoned)


def full_checkpoint_disk(folder: Path) -> None:
    """The disk is full when the checkpoint of step `FROM` is written."""
    write = ChecksummedFile.write

    def poisoned(self: ChecksummedFile, data: Any) -> None:
        if f"global_step_{FROM}/actor" in str(self.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        write(self, data)

    replace(ChecksummedFile, "write", poisoned)


def full_object_store(folder: Path) -> None:
    """The object store and its disk are full when the samples of step `FROM` are stored."""
    put, count = episodes.put, iter(range(10**6))
    limit = BATCH * RESPONSES * (FROM - 1)

    def poisoned(value: Any) -> Any:
        if next(count) < limit:
            return put(value)
        with object_store.map_full_errors():
            raise OutOfDiskError("disk is full")

    replace(episodes, "put", poisoned)


def none(folder: Path) -> None:
    """No poison: resuming, infinite rewards and learning rates come from the settings."""


def run(poison: str, folder: Path, arguments: Sequence[str], output: Path) -> NoReturn:
    """Run a command with a poison in this process, which writes all its output to a file and exits."""
    with output.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    globals()[poison](folder)
    sys.exit(main(list(arguments)))
