"""A run from its settings to its last step, whatever it trains by. It begins again when a part of its state is lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from verl.checkpoint.lock import run_lock
from verl.config.batch_sizes import derive_sizes, render_sizes
from verl.config.load import LoadedConfig
from verl.config.schema import Config, SftConfig
from verl.errors import ProcessLostError
from verl.tracking.console import Console
from verl.trainer.restarts import RestartTracker, resume_from_own
from verl.trainer.shutdown import StopController
from verl.trainer.train_loop import TrainLoop

__all__ = ["run", "run_all", "train", "with_sweep_folder"]

C = TypeVar("C", Config, SftConfig)


async def train(config: Config, console: Console, reward: Callable[..., Any] | None = None) -> int:
    """Train with reinforcement learning; return the exit code.

    `reward` is a function object, instead of the path of its file in the settings.
    """
    from verl.trainer.build import build_trainer  # imports Ray, after the settings have been checked

    console.banner(render_sizes(derive_sizes(config)), title="sizes of a step")
    return await run(
        config, console, lambda config, restarts: build_trainer(config, console, restarts=restarts, reward=reward)
    )


async def run(
    config: C, console: Console, build_trainer: Callable[[C, RestartTracker], AbstractAsyncContextManager[TrainLoop]]
) -> int:
    """Assemble, fit, close; the exit code. The run's folder is its own over all restarts."""
    async with run_lock(config.trainer.checkpoint_dir, console.note):
        return await _run(config, console, build_trainer)


async def _run(
    config: C, console: Console, build_trainer: Callable[[C, RestartTracker], AbstractAsyncContextManager[TrainLoop]]
) -> int:
    stopping = StopController.by_time(config.trainer.max_hours, config.trainer.stop_margin)
    if describe_deadline := stopping.describe_deadline():
        console.note(describe_deadline)
    restarts = RestartTracker(console, config.trainer.faults)
    with stopping.on_sigterm():
        while True:
            trainer = None
            try:
                stopping.is_starting = True
                async with build_trainer(config, restarts) as trainer:
                    stopping.is_starting = False
                    await trainer.fit(stopping)
                return stopping.exit_code
            except ProcessLostError as error:
                if trainer is not None and await trainer.checkpointer.has_saved():
                    config = resume_from_own(config)
                if reason := stopping.reason():
                    console.advice(f"{error}\n    {reason}: ended; start again to go on from the last checkpoint")
                    return stopping.exit_code
                restarts.restart(error, None if trainer is None else trainer.version)
            except asyncio.CancelledError:
                if not stopping.exit_code:
                    raise
                when = "while it started" if stopping.is_starting else "twice"
                console.note(f"asked to end at once (SIGTERM {when})")
                return stopping.exit_code


def run_all(points: Sequence[LoadedConfig[C]], train: Callable[[C, Console], Coroutine[Any, Any, int]]) -> int:
    """Every point of a sweep (one without `-m`), one after another; the exit code."""
    for loaded in points:
        console = Console()
        console.hints(loaded.hints)
        if loaded.sweep:
            console.note(f"sweep: {' '.join(loaded.sweep)}")
        if code := asyncio.run(train(with_sweep_folder(loaded), console)):
            return code
    return 0


def with_sweep_folder(loaded: LoadedConfig[C]) -> C:
    """The settings of one point of a sweep, with a checkpoint directory of its own: points must not resume each other.

    >>> own_folder(load(["-m", "trainer.seed=1,2", ...])[1]).trainer.checkpoint_dir
    PosixPath('checkpoints/verl/default/trainer.seed=2')
    """
    if not loaded.sweep:
        return loaded.config
    point = re.sub(r"[^\w.=+-]+", "_", ",".join(loaded.sweep))
    trainer = loaded.config.trainer
    changed = trainer.model_copy(update={"default_local_dir": str(trainer.checkpoint_dir / point)})
    return loaded.config.model_copy(update={"trainer": changed})
