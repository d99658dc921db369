"""Runs training from settings to the last step; restarts it from its last checkpoint when a process or Ray is lost."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from verl.checkpoint.lock import run_lock
from verl.checkpoint.manifest import find_free_folder
from verl.cluster.monitor import watch_cluster
from verl.config.batch_sizes import render_sizes
from verl.config.load import LoadedConfig
from verl.config.paths import change_settings
from verl.config.schema import Config, SftConfig
from verl.errors import ProcessLostError
from verl.tracking.console import Console
from verl.trainer.next_steps import describe_end, describe_stop, resume_command
from verl.trainer.records.failure import record_failure
from verl.trainer.restarts import RestartTracker, resume_from_own
from verl.trainer.shutdown import StopController
from verl.trainer.train_loop import TrainLoop, TrainTask

C = TypeVar("C", Config, SftConfig)
Build: TypeAlias = Callable[[C, RestartTracker], AbstractAsyncContextManager[TrainLoop[TrainTask]]]

_GC_THRESHOLDS = (100_000, 50, 100)  # Python's own are (700, 10, 10)


async def train(
    config: Config,
    console: Console,
    reward: Callable[..., Any] | None = None,
    *,
    origins: Mapping[str, str] | None = None,
) -> int:
    """Train with reinforcement learning; return the exit code.

    `reward` is a function object, instead of the path of its file in the settings. `origins` say where the given
    settings come from.
    """
    from verl.trainer.build.preflight import check_rl_run
    from verl.trainer.build.rl_builder import build_trainer  # imports Ray, after the settings have been checked

    with console.stage("checking models, data and the reward function", is_logged=False):
        await check_rl_run(config, reward)
    console.banner(render_sizes(config), title="sizes of a step")
    return await run(
        config,
        console,
        lambda config, restarts: build_trainer(config, console, restarts=restarts, reward=reward, origins=origins),
    )


async def run(config: C, console: Console, build: Build[C]) -> int:
    """Build the trainer, train, close it; return the exit code. The run's folder stays locked over all restarts."""
    if config.trainer.save_freq == -1:
        console.note(
            "hint: nothing will be saved (trainer.save_freq=-1), and the trained model is lost when the run ends; "
            "without this setting, the run saves after its last step"
        )
    folder = config.trainer.checkpoint_dir
    async with run_lock(folder, console.note) as run_id:
        try:
            return await _run(config, console, build, RestartTracker(console, config.trainer.faults, run_id))
        except Exception as error:
            record_failure(error, folder)
            raise


async def _run(config: C, console: Console, build: Build[C], restarts: RestartTracker) -> int:
    stop = StopController.by_time(config.trainer.max_hours, config.trainer.stop_margin)
    if limit := stop.describe_limit():
        console.note(limit)
    with stop.on_sigterm(console.note):
        while True:
            loop = None
            try:
                stop.is_starting = True
                async with watch_cluster(), build(config, restarts) as loop:
                    stop.is_starting = False
                    with rare_garbage_collection():
                        await _fit(loop, stop, console)
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


async def _fit(loop: TrainLoop[TrainTask], stop: StopController, console: Console) -> None:
    try:
        await loop.fit(stop)
    except asyncio.CancelledError:
        console.note(f"stopping during step {loop.version + 1}: ending all processes")
        raise


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


def run_all(points: Sequence[LoadedConfig[C]], train: Callable[..., Coroutine[Any, Any, int]]) -> int:
    """Run every point of a sweep (one without `-m`), one after another; return the exit code.

    `train` is called with the settings, a console, and the `origins` of the settings.
    """
    for loaded in points:
        console = Console()
        console.hints(loaded.hints)
        if loaded.sweep:
            console.note(f"sweep: {' '.join(loaded.sweep)}")
        config = with_free_folder(with_sweep_folder(loaded), console.note)
        try:
            code = asyncio.run(train(config, console, origins=loaded.origins))
        except KeyboardInterrupt:
            console.note(describe_stop(config.trainer.checkpoint_dir, resume_command(config)))
            raise
        if code:
            console.note(describe_stop(config.trainer.checkpoint_dir, resume_command(config)))
            return code
        console.note(describe_end(config, "the same command"))
    return 0


def with_free_folder(config: C, say: Callable[[str], None]) -> C:
    """Return the settings with a folder of its own for a run that starts over where another one has saved."""
    trainer, folder = config.trainer, config.trainer.checkpoint_dir
    if continues_in(folder, trainer.resume_mode, trainer.resume_from_path):
        return config
    if (free := find_free_folder(folder)) == folder:
        return config
    say(f"{folder} holds the checkpoints of another run, which are kept: this run writes to {free}")
    return change_settings(config, {"trainer.default_local_dir": str(free)})


def continues_in(folder: Path, resume_mode: str, resume_from_path: str | None) -> bool:
    """Return whether a run continues the run of its own folder, and not one of another folder or none."""
    resumed_from = Path(resume_from_path or "").expanduser().absolute().parent
    return resume_mode == "auto" or (resume_mode == "path" and resumed_from == folder.absolute())


def with_sweep_folder(loaded: LoadedConfig[C]) -> C:
    """Return the settings of one point of a sweep with its own checkpoint directory: points must not resume each other.

    Example: `checkpoints/verl/default/trainer.seed=2`.
    """
    if not loaded.sweep:
        return loaded.config
    point = re.sub(r"[^\w.=+-]+", "_", ",".join(loaded.sweep))
    folder = loaded.config.trainer.checkpoint_dir / point
    return change_settings(loaded.config, {"trainer.default_local_dir": str(folder)})
