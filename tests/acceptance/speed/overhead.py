"""What a run records and shows costs at most 2% of a step: samples, metrics, phases, the line of a step and the panel.

One run in one process (`trainer.local`), in which steps with and without records and display take turns. CPU time is
counted, not wall time, which says little on a machine that others use too: every function that records or shows
something is timed by the CPU clock of its thread, and a step by that of the process, in the steps in which these
functions do nothing. The panel is drawn by the clock, not by the step: the CPU time of one drawing counts as often as
it is drawn in the time of a step on one free core.

What Ray adds in a distributed run, a copy of the numbers of the recorded tokens between processes, is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import rich.console
import rich.live
from _common import finish, sized_for_addition
from save_cost import enlarge

from verl.config.load import load
from verl.demo.assets import make_assets
from verl.tracking.buffered_sink import BufferedSink
from verl.tracking.console import Console
from verl.tracking.panel import HZ
from verl.tracking.sinks import ConsoleSink
from verl.trainer.build.rl_builder import build_trainer
from verl.trainer.records.samples import SampleRecorder
from verl.workers.episodes import EpisodeWorker

BOUND = 0.02
WARM_UP = 2


class Costs:
    """The CPU seconds of recording and showing, by what is recorded; nothing is while `is_on` is false."""

    def __init__(self) -> None:
        self.seconds, self.calls = Counter[str](), Counter[str]()
        self.is_on = True

    def measure(self, part: str, function: Callable[..., Any], *, is_drawn: bool = False) -> Callable[..., Any]:
        """Return the function, timed. Only what `is_drawn` runs while nothing is recorded: it shows the last state."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on and not is_drawn:
                return None
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.thread_time() - start
                self.calls[part] += 1

        return timed

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Time everything that a run records or shows."""
        parts = (
            ("samples: choice", SampleRecorder, "record_trained"),
            ("samples: files", EpisodeWorker, "_write_samples"),
            ("metrics, phases, positions", BufferedSink, "log"),
            ("line of a step", ConsoleSink, "log"),
        )
        changed = [patch.object(kind, name, self.measure(part, getattr(kind, name))) for part, kind, name in parts]
        changed.append(patch("verl.tracking.live_lines.Live.refresh", self.measure("panel", _refresh, is_drawn=True)))
        for each in changed:
            each.start()
        try:
            yield
        finally:
            for each in changed:
                each.stop()


_refresh = rich.live.Live.refresh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a tiny model and few steps; the share is not held")
    short = parser.parse_args().short
    costs = Costs()
    with tempfile.TemporaryDirectory(prefix="verl-overhead-") as directory:
        folder = Path(directory)
        make_assets(folder)
        if not short:
            enlarge(folder / "model", hidden=256, layers=6)
        off = asyncio.run(run(folder, costs, pairs=2 if short else 10, length=8 if short else 64))
        samples, lines = len(list((folder / "run" / "samples").glob("*"))), read_lines(folder / "run")
    step_s, recorded = statistics.median(off), samples
    per_step = {part: seconds / recorded for part, seconds in costs.seconds.items() if part != "panel"}
    per_step["panel"] = costs.seconds["panel"] / max(1, costs.calls["panel"]) * HZ * step_s
    share = sum(per_step.values()) / step_s
    for part, seconds in per_step.items():
        print(f"{part:<28}{1000 * seconds:8.2f} ms  {seconds / step_s:7.2%}", flush=True)
    is_complete = len(per_step) == 5 and recorded == lines and costs.calls["samples: files"] == recorded
    finish(
        "overhead",
        is_complete and (short or share <= BOUND),
        share=round(share, 4),
        bound=BOUND,
        step_cpu_s=round(step_s, 3),
        parts_ms={part: round(1000 * seconds, 2) for part, seconds in per_step.items()},
        recorded_steps=recorded,
        steps_without=len(off),
        drawings=costs.calls["panel"],
    )


def read_lines(run: Path) -> int:
    """Return how many steps have a line in phases.jsonl."""
    return len((run / "phases.jsonl").read_text().splitlines())


async def run(folder: Path, costs: Costs, pairs: int, length: int) -> list[float]:
    """Train; return the CPU seconds of the steps in which nothing was recorded."""
    [loaded] = load(settings(folder, length))
    terminal = rich.console.Console(
        file=(folder / "terminal").open("w", encoding="utf-8"), force_terminal=True, width=120
    )
    console, off = Console(out=terminal), list[float]()
    with costs.measuring():
        async with build_trainer(loaded.config, console) as loop:
            console.is_animated = True  # no panel in a local run, for the sake of debuggers
            await loop.task.begin(0)
            with console.panel():
                for index in range(WARM_UP + 2 * pairs):
                    if index == WARM_UP:
                        costs.seconds.clear()
                    costs.is_on = index >= WARM_UP and index % 2 == 0
                    seconds = await step(loop)
                    if index >= WARM_UP and not costs.is_on:
                        off.append(seconds)
                    print(f"{'recorded' if costs.is_on else 'without':<10}{seconds:6.2f} s of CPU", flush=True)
    return off


async def step(loop: Any) -> float:
    """Do one step as the training loop does, and wait for its records; return its CPU seconds."""
    start = time.process_time()
    await loop._step()
    await asyncio.gather(*loop.task._records.samples._tasks.values())
    return time.process_time() - start


def settings(folder: Path, length: int) -> list[str]:
    return [
        *sized_for_addition(folder),
        "trainer.local=True",
        "actor_rollout_ref.rollout.name=hf",
        f"data.train_batch_size={4 if length < 16 else 16}",
        f"data.max_response_length={length}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "trainer.total_training_steps=1000",
        "trainer.val_before_train=False",
        "data.val_files=null",
    ]


if __name__ == "__main__":
    main()
