"""Runs training from settings to the last step; restarts it from its last checkpoint when a process or Ray is lost."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeAlias, TypeVar

from verl.checkpoint.lock import run_lock
from verl.cluster.monitor import watch_cluster
from verl.config.batch_sizes import render_sizes
from verl.config.load import LoadedConfig
from verl.config.schema import Config, SftConfig
from verl.errors import ProcessLostError
from verl.tracking.console import Console
from verl.trainer.restarts import RestartTracker, resume_from_own
from verl.trainer.shutdown import StopController
from verl.trainer.train_loop import TrainLoop, TrainTask

C = TypeVar("C", Config, SftConfig)
Build: TypeAlias = Callable[[C, RestartTracker], AbstractAsyncContextManager[TrainLoop[TrainTask]]]

_GC_THRESHOLDS = (100_000, 50, 100)  # Python's own are (700, 10, 10)


async def train(config: Config, console: Console, reward: Callable[..., Any] | None = None) -> int:
    """Train with reinforcement learning; return the exit code.

    `reward` is a function object, instead of the path of its file in the settings.
    """
    from verl.trainer.build.rl_builder import build_trainer  # imports Ray, after the settings have been checked

    console.banner(render_sizes(config), title="sizes of a step")
    return await run(
        config, console, lambda config, restarts: build_trainer(config, console, restarts=restarts, reward=reward)
    )


async def run(config: C, console: Console, build: Build[C]) -> int:
    """Build the trainer, train, close it; return the exit code. The run's folder stays locked over all restarts."""
    async with run_lock(config.trainer.checkpoint_dir, console.note) as run_id:
        return await _run(config, console, build, RestartTracker(console, config.trainer.faults, run_id))


async def _run(config: C, console: Console, build: Build[C], restarts: RestartTracker) -> int:
    stop = StopController.by_time(config.trainer.max_hours, config.trainer.stop_margin)
    if limit := stop.describe_limit():
        console.note(limit)
    with stop.on_sigterm():
        while True:
            loop = None
            try:
                stop.is_starting = True
                async with watch_cluster(), build(config, restarts) as loop:
                    stop.is_starting = False
                    with rare_garbage_collection():
                        await loop.fit(stop)
                return stop.exit_code
            except ProcessLostError as error:
                if loop is not None and await loop.checkpointer.has_saved():
                    config = resume_from_own(config)
                if reason := stop.reason():
                    console.advice(f"{error}\n    {reason}: stopped; rerun the command to resume")
                    return stop.exit_code
                restarts.restart(error, None if loop is None else loop.version)
            except asyncio.CancelledError:
                if not stop.exit_code:
                    raise
                when = "during the start" if stop.is_starting else "twice"
                console.note(f"asked to stop at once (SIGTERM {when})")
                return stop.exit_code


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Exclude existing objects from garbage collection, and collect new ones less often, during the block.

    The thousands of pending calls of a step make Python search all objects several times. Imported modules, such as
    torch, have hundreds of thousands: 0.2 s each time, in which nothing else runs.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def run_all(points: Sequence[LoadedConfig[C]], train: Callable[[C, Console], Coroutine[Any, Any, int]]) -> int:
    """Run every point of a sweep (one without `-m`), one after another; return the exit code."""
    for loaded in points:
        console = Console()
        console.hints(loaded.hints)
        if loaded.sweep:
            console.note(f"sweep: {' '.join(loaded.sweep)}")
        if code := asyncio.run(train(with_sweep_folder(loaded), console)):
            return code
    return 0


def with_sweep_folder(loaded: LoadedConfig[C]) -> C:
    """Return the settings of one point of a sweep with its own checkpoint directory: points must not resume each other.

    Example: `checkpoints/verl/default/trainer.seed=2`.
    """
    if not loaded.sweep:
        return loaded.config
    point = re.sub(r"[^\w.=+-]+", "_", ",".join(loaded.sweep))
    trainer = loaded.config.trainer
    trainer = trainer.model_copy(update={"default_local_dir": str(trainer.checkpoint_dir / point)})
    return loaded.config.model_copy(update={"trainer": trainer})
