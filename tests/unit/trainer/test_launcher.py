"""Restarts of a run: which checkpoint it resumes from after a lost process."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console

from verl.checkpoint import lock
from verl.checkpoint.files import write
from verl.checkpoint.manifest import CheckpointDir
from verl.config.load import LoadedConfig
from verl.config.schema import SftConfig
from verl.errors import CheckpointError, ProcessLostError
from verl.tracking.console import Console
from verl.trainer.checkpointing import Checkpointer
from verl.trainer.launcher import run, run_all, with_free_folder
from verl.trainer.restarts import RestartTracker
from verl.trainer.train_loop import LoopSchedule, TrainLoop

pytestmark = pytest.mark.unit


class Ranks:
    """They write and commit at once, and are dead when they are asked whether they have."""

    def __init__(self, *, commits: bool) -> None:
        self.commits = commits

    async def save(self, directory: str, trainer: Mapping[str, Any], *, is_last: bool = False) -> None:
        folder, step = Path(directory), int(directory.rpartition("_")[2])
        if self.commits:
            CheckpointDir(folder.parent).commit(step, {"shard": write(folder / "shard", b"weights")}, trainer)

    async def poll_save(self, *, wait: bool) -> float | None:
        raise ProcessLostError("train worker 1: saved: its process has died")


class Dying:
    """It saves after its first step, and loses a process in its second."""

    async def step(self, version: int) -> Any:
        if version:
            raise ProcessLostError("train worker 1: update: its process has died")
        return {}

    async def begin(self, version: int) -> None: ...
    async def prepare_save(self, version: int) -> None: ...

    async def diagnose(self, metrics: Any, version: int) -> list[Any]:
        return []

    async def validate(self, version: int) -> None: ...

    def state(self, version: int) -> dict[str, Any]:
        return {}


def settings(folder: Path, **trainer: Any) -> SftConfig:
    return SftConfig.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train_files": "rows.parquet"},
            "trainer": {"default_local_dir": str(folder), **trainer},
        }
    )


async def modes_of_two_starts(config: SftConfig, ranks: Ranks) -> list[str]:
    modes: list[str] = []
    console, tracker = Console(io.StringIO()), SimpleNamespace(log=lambda *_: None)

    @asynccontextmanager
    async def build_trainer(config: SftConfig, restarts: RestartTracker) -> AsyncIterator[TrainLoop]:
        modes.append(config.trainer.resume_mode)
        checkpointer = Checkpointer(ranks, CheckpointDir(config.trainer.checkpoint_dir), console)
        total = 1 if len(modes) == 2 else 10  # the second run has nothing left to do
        schedule = LoopSchedule(1, total, save_every=1)
        yield TrainLoop(Dying(), schedule, checkpointer, tracker, console, restarts, version=len(modes) - 1)  # type: ignore[arg-type]

    assert await run(config, console, build_trainer) == 0
    return modes


@pytest.mark.parametrize("mode", ["disable", "path"])
async def test_a_run_resumes_from_a_checkpoint_that_was_not_polled_yet(tmp_path: Path, mode: str) -> None:
    config = settings(tmp_path, resume_mode=mode, resume_from_path=str(tmp_path / "global_step_9"), save_freq=1)
    assert await modes_of_two_starts(config, Ranks(commits=True)) == [mode, "auto"]
    assert CheckpointDir(tmp_path).latest() == 1


async def test_a_run_in_the_folder_of_another_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LOCAL_TIMEOUT_S", 0.0)
    async with lock.run_lock(tmp_path, print):
        with pytest.raises(CheckpointError, match="another run uses this folder"):
            await modes_of_two_starts(settings(tmp_path), Ranks(commits=True))
        assert [path.name for path in tmp_path.iterdir()] == [".run.lock"]


async def test_sigterm_during_the_start_stops_at_once_with_its_exit_code(tmp_path: Path) -> None:
    closed: list[str] = []

    @asynccontextmanager
    async def build_trainer(config: SftConfig, restarts: RestartTracker) -> AsyncIterator[TrainLoop]:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            closed.append("engines")
        yield  # type: ignore[misc]

    out = io.StringIO()
    assert await run(settings(tmp_path), Console(out=rich.console.Console(file=out, width=200)), build_trainer) == 143
    assert closed == ["engines"]
    assert "asked to stop at once (SIGTERM during the start)" in out.getvalue()


async def test_a_run_that_is_asked_to_stop_does_not_restart_after_a_lost_process(tmp_path: Path) -> None:
    starts: list[int] = []
    out = io.StringIO()
    console, tracker = Console(out=rich.console.Console(file=out, width=200)), SimpleNamespace(log=lambda *_: None)

    class Asked(Dying):
        async def step(self, version: int) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.01)
            raise ProcessLostError("train worker 1: update: its process has died")

    @asynccontextmanager
    async def build_trainer(config: SftConfig, restarts: RestartTracker) -> AsyncIterator[TrainLoop]:
        starts.append(1)
        checkpointer = Checkpointer(Ranks(commits=False), CheckpointDir(tmp_path), console)
        yield TrainLoop(Asked(), LoopSchedule(1, 10), checkpointer, tracker, console, restarts)  # type: ignore[arg-type]

    assert await run(settings(tmp_path), console, build_trainer) == 143
    assert starts == [1]
    assert "asked to stop (SIGTERM): stopped; rerun the command" in out.getvalue()


async def test_an_incomplete_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    directory = CheckpointDir(tmp_path).begin(1)  # left by an older run
    CheckpointDir(tmp_path).commit(1, {"shard": write(directory / "shard", b"old")})
    config = settings(tmp_path, resume_mode="disable", save_freq=1)
    assert await modes_of_two_starts(config, Ranks(commits=False)) == ["disable", "disable"]


def test_starting_over_keeps_the_checkpoints_of_an_earlier_run(tmp_path: Path) -> None:
    run, said = tmp_path / "run", []
    CheckpointDir(run).begin(1)  # interrupted, so there is nothing to keep
    assert with_free_folder(settings(run, resume_mode="disable"), said.append).trainer.checkpoint_dir == run
    CheckpointDir(run).commit(1, {})
    assert with_free_folder(settings(run), said.append).trainer.checkpoint_dir == run
    same = settings(run, resume_mode="path", resume_from_path=str(run / "global_step_1"))
    assert with_free_folder(same, said.append).trainer.checkpoint_dir == run
    assert said == []
    other = settings(run, resume_mode="path", resume_from_path=str(tmp_path / "other" / "global_step_1"))
    for config in (settings(run, resume_mode="disable"), other):
        assert with_free_folder(config, said.append).trainer.checkpoint_dir == tmp_path / "run-2"
    assert "holds the checkpoints of another run" in said[0]


@pytest.mark.parametrize(("settings_", "warned"), [({}, False), ({"save_freq": -1}, True), ({"save_freq": 5}, False)])
def test_a_run_that_saves_nothing_says_so_at_start_and_end(
    tmp_path: Path, settings_: dict[str, Any], warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def build_trainer(config: SftConfig, restarts: RestartTracker) -> AsyncIterator[Any]:
        if config.trainer.save_freq != -1:
            CheckpointDir(tmp_path).begin(3)
            CheckpointDir(tmp_path).commit(3, {})
        yield SimpleNamespace(fit=lambda stop: asyncio.sleep(0), version=3)

    async def train(config: SftConfig, console: Console, *, origins: Mapping[str, str]) -> int:
        return await run(config, console, build_trainer)

    assert run_all([LoadedConfig(settings(tmp_path, **settings_))], train) == 0
    out = capsys.readouterr().out
    assert ("nothing will be saved (trainer.save_freq=-1)" in out) == warned
    assert ("so the trained model is gone" in out) == warned
    assert (f"verl merge {tmp_path} --target_dir merged" in out) != warned


def test_an_interrupted_run_names_its_last_checkpoint_and_the_command_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def train(config: SftConfig, console: Console, *, origins: Mapping[str, str]) -> int:
        raise KeyboardInterrupt

    CheckpointDir(tmp_path).begin(3)
    CheckpointDir(tmp_path).commit(3, {})
    monkeypatch.setattr("sys.argv", ["verl", "sft", "data.train_files=my rows.parquet"])
    with pytest.raises(KeyboardInterrupt):
        run_all([LoadedConfig(settings(tmp_path))], train)
    out = capsys.readouterr().out
    assert f"the last checkpoint is {tmp_path}/global_step_3; to resume:" in out
    assert "verl sft 'data.train_files=my rows.parquet'\n" in out
