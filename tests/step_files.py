"""Writes the table in docs/architecture.md of the files of verl/ whose functions run during one step, by stage.

python tests/step_files.py [--write]

Profiles all threads of a local GRPO run, which is one process, during its second step: the first also imports modules.
`--write` replaces the table in the page.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/architecture.md"
TABLE = re.compile(r"^The \d+ files whose functions run[^\n]*\n\n(?:\|.*\n)+", re.MULTILINE)

_IN_STEP = ContextVar("in_step", default=False)
"""True in the task of the step and the tasks and threads that it starts; not in background tasks of the run."""


class Recorder:
    """A profile function that records each file of verl/ with the stage in which one of its functions runs first."""

    def __init__(self) -> None:
        self.stage = ""
        self.stages: dict[str, str] = {}
        self._package = f"{ROOT / 'verl'}{os.sep}"

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(self._package) and _IN_STEP.get():
            self.stages.setdefault(path.removeprefix(self._package), self.stage)


def profile_step(folder: Path) -> dict[str, list[str]]:
    """Run two local steps, and return the files of the second by stage: the names of its `timing_s/` metrics."""
    from verl.cli import main
    from verl.demo.assets import make_assets
    from verl.trainer import rl_trainer

    recorder = Recorder()
    step, timer = rl_trainer.RLTrainer.step, rl_trainer.timer

    async def recorded(self: rl_trainer.RLTrainer, version: int) -> Any:
        recorder.stage = "gen"  # episodes start before its timer
        _IN_STEP.set(version == 1)
        task = asyncio.ensure_future(step(self, version))
        _IN_STEP.set(False)
        return await task

    @contextmanager
    def with_stage(times: Any, name: str) -> Iterator[None]:
        recorder.stage = recorder.stage if name == "step" else name
        with timer(times, name):
            yield
        recorder.stage = "sync" if name == "update" else recorder.stage  # the only stage that has no timer here

    rl_trainer.RLTrainer.step, rl_trainer.timer = recorded, with_stage  # type: ignore[method-assign]
    assets = make_assets(folder / "assets")
    settings = [
        *(f"actor_rollout_ref.model.path={assets.model}", "actor_rollout_ref.rollout.name=hf", "trainer.local=True"),
        *(f"data.train_files={assets.train}", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2"),
        *("data.max_prompt_length=8", "data.max_response_length=4", "trainer.total_training_steps=2"),
        *("trainer.save_freq=-1", f"trainer.default_local_dir={folder / 'run'}"),
    ]
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    code = main(["train", *settings])
    sys.setprofile(None)
    assert code == 0, "the run failed"
    by_stage: dict[str, list[str]] = {}
    for file, stage in recorder.stages.items():
        by_stage.setdefault(stage, []).append(file)
    return by_stage


def format_table(files: dict[str, list[str]]) -> str:
    count = sum(map(len, files.values()))
    rows = [f"| `{stage}` | {', '.join(f'`{file}`' for file in sorted(files[stage]))} |" for stage in files]
    heading = (
        f"The {count} files whose functions run in one step of a local GRPO run, in the stage that calls them first"
    )
    return "\n".join([f"{heading}:", "", "| stage | files below `verl/` |", "| --- | --- |", *rows, ""])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        table = format_table(profile_step(Path(folder)))
    if "--write" in sys.argv:
        PAGE.write_text(TABLE.sub(lambda _: table, PAGE.read_text()))
    print(table, end="")
