"""`python -m verl.trainer.main_ppo` and `verl train`: parse, assemble, run, close."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from verl.config.load import Loaded, load
from verl.config.schema.root import Config
from verl.config.sizes import derived_sizes, render_sizes
from verl.errors import ProcessLostError
from verl.tracking.console import Console
from verl.trainer.faults import Faults, goes_on
from verl.trainer.stopping import Stopping

__all__ = ["main", "train"]


async def train(config: Config, console: Console, reward: Callable[..., Any] | None = None) -> int:
    """One run, from settings to the last step; its exit code. It begins again when it loses a part of its state.

    `reward` is a function that was given as one, instead of by the path of its file.
    """
    from verl.trainer.build import assemble  # late: settings are checked before Ray is imported

    console.banner(render_sizes(derived_sizes(config)), title="sizes of a step")
    stopping = Stopping.by_time(config.trainer.max_hours, config.trainer.stop_margin)
    if outlook := stopping.outlook():
        console.note(outlook)
    faults = Faults(console, config.trainer.faults)
    while True:
        trainer = None
        try:
            async with assemble(config, console, faults=faults, reward=reward) as trainer:
                with stopping.on_sigterm():
                    await trainer.fit(stopping)
            return stopping.exit_code
        except ProcessLostError as error:
            if trainer is not None and trainer.saver.last is not None:
                config = goes_on(config)
            faults.restart(error, None if trainer is None else trainer.version)
        except asyncio.CancelledError:
            if not stopping.exit_code:
                raise
            console.note("asked to end at once (SIGTERM twice)")
            return stopping.exit_code


def main(argv: Sequence[str]) -> int:
    """Run every point of the sweep (one without `-m`), one after another; the exit code."""
    for loaded in load(argv):
        console = Console()
        for hint in loaded.hints:
            console.note(f"hint: {hint}")
        if loaded.sweep:
            console.note(f"sweep: {' '.join(loaded.sweep)}")
        if code := asyncio.run(train(own_folder(loaded), console)):
            return code
    return 0


def own_folder(loaded: Loaded) -> Config:
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


if __name__ == "__main__":
    from verl.cli import main as command_line

    sys.exit(command_line(["train", *sys.argv[1:]]))
