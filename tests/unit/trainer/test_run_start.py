"""What every run starts with: what is said before its first step, and what it goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.config.load import load, load_sft
from verl.config.schema import Config, SftConfig
from verl.tracking.console import Console
from verl.trainer.fitting import Timetable
from verl.trainer.sft_build import _timetable as sft_timetable
from verl.trainer.start import open_tracker

pytestmark = pytest.mark.unit


def run_of(folder: Path, *settings: str) -> Config:
    needed = ["data.train_files=a.parquet", "actor_rollout_ref.model.path=some/model"]
    return load([*needed, f"trainer.default_local_dir={folder}", *settings])[0].config


def sft_of(folder: Path, *settings: str) -> SftConfig:
    needed = ["data.train_files=a.parquet", "model.path=some/model"]
    return load_sft([*needed, f"trainer.default_local_dir={folder}", *settings])[0].config


def test_supervised_training_saves_its_last_step_unless_told_otherwise(tmp_path: Path) -> None:
    class Data:
        train = range(40)

    def saves(*settings: str) -> list[int]:
        table = sft_timetable(sft_of(tmp_path, "data.train_batch_size=10", *settings), Data())  # type: ignore[arg-type]
        return [step for step in range(1, table.total_steps + 1) if table.saves_at(step)]

    assert saves() == [4]
    assert saves("trainer.save_freq=3") == [3, 4]
    assert saves("trainer.save_freq=-1") == []


@pytest.mark.parametrize(
    ("settings", "warned"), [([], True), (["trainer.save_freq=-1"], False), (["trainer.save_freq=null"], False)]
)
def test_that_nothing_will_be_saved_is_said_unless_it_was_asked_for(
    tmp_path: Path, settings: list[str], warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_of(tmp_path, *settings)
    open_tracker(config, Console(), Timetable(1, 3, save_every=config.trainer.save_freq), 0).close()
    assert ("nothing will be saved (trainer.save_freq=-1)" in capsys.readouterr().out) == warned
