"""`python -m verl.trainer.main_ppo` and `verl train`: parse, assemble, run, close."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from verl.config.load import Loaded, load
from verl.config.sizes import derived_sizes, render_sizes
from verl.errors import VerlError
from verl.tracking.console import Console

__all__ = ["main", "train"]


async def train(loaded: Loaded, console: Console) -> None:
    """One run, from settings to the last step."""
    from verl.trainer.build import assemble  # late: settings are checked before torch is imported

    for hint in loaded.hints:
        console.note(f"hint: {hint}")
    console.banner(render_sizes(derived_sizes(loaded.config)), title="sizes of a step")
    async with assemble(loaded.config, console) as trainer:
        await trainer.fit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run every point of the sweep (one without `-m`), one after another; the exit code."""
    for loaded in load(sys.argv[1:] if argv is None else argv):
        console = Console()
        if loaded.sweep:
            console.note(f"sweep: {' '.join(loaded.sweep)}")
        asyncio.run(train(loaded, console))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VerlError as error:
        sys.stderr.write(f"verl: {error}\n")
        sys.exit(2)
