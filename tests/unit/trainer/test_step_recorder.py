"""Which steps are recorded for a replay, and what happens when that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
from recording_console import RecordingConsole

from verl.config.load import load_for_replay
from verl.data.plan import Plan
from verl.errors import CheckpointError, VerlError
from verl.trainer.records.replay import RESULT, StepRecorder, get_step_folder
from verl.trainer.replay.step import list_steps, open_step, read_settings
from verl.workers.train import PolicyGroup

pytestmark = pytest.mark.unit

PLAN = Plan([], {}, [])


class Policy:
    """Writes a file instead of a step."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    async def record_step(self, plan: Plan, folder: str) -> None:
        if self._error is not None:
            raise self._error
        Path(folder).mkdir(parents=True)
        (Path(folder) / "batch").write_text("new")


def make_recorder(folder: Path, error: Exception | None = None) -> tuple[StepRecorder, RecordingConsole]:
    console = RecordingConsole()
    return StepRecorder(folder, [3], cast(PolicyGroup, Policy(error)), console), console


async def record(recorder: StepRecorder, step: int, **metrics: float) -> None:
    await recorder.begin(step, PLAN)
    recorder.finish(step, metrics)


async def test_only_the_named_steps_are_recorded(tmp_path: Path) -> None:
    recorder, console = make_recorder(tmp_path)
    for step in (2, 3, 4):
        await record(recorder, step, loss=0.5)
    assert list_steps(tmp_path) == [3]
    folder = get_step_folder(tmp_path, 3)
    assert json.loads((folder / RESULT).read_text()) == {"step": 3, "metrics": {"loss": 0.5}}
    assert console.messages == [f"recorded step 3: verl replay {tmp_path} --step 3"]


async def test_a_step_without_its_result_is_not_recorded(tmp_path: Path) -> None:
    recorder, _ = make_recorder(tmp_path)
    await recorder.begin(3, PLAN)
    assert list_steps(tmp_path) == []  # the run was killed during the update
    await record(make_recorder(tmp_path)[0], 3)
    assert [path.name for path in (tmp_path / "replay").iterdir()] == ["step_00000003"]


async def test_a_step_that_is_trained_again_replaces_the_first_one(tmp_path: Path) -> None:
    recorder, _ = make_recorder(tmp_path)
    await record(recorder, 3)
    (get_step_folder(tmp_path, 3) / "batch").write_text("old")
    await record(recorder, 3)
    assert (get_step_folder(tmp_path, 3) / "batch").read_text() == "new"


@pytest.mark.parametrize("error", [CheckpointError("the disk is full"), OSError("the disk is full")])
async def test_training_continues_if_a_step_cannot_be_written(tmp_path: Path, error: Exception) -> None:
    recorder, console = make_recorder(tmp_path, error)
    await record(recorder, 3)
    assert list_steps(tmp_path) == []
    assert console.messages == ["step 3 was not recorded for a replay; training continues: the disk is full"]


async def test_a_step_that_is_not_recorded_is_answered_with_those_that_are(tmp_path: Path) -> None:
    await record(make_recorder(tmp_path)[0], 3)
    with pytest.raises(VerlError, match=r"step 4 is not recorded \(recorded: 3\)\. Set trainer\.replay\.steps=\[4\]"):
        open_step(tmp_path, 4)


def test_the_settings_are_those_of_the_start_that_trained_the_step(tmp_path: Path) -> None:
    def start(step: int, rate: float) -> str:
        return json.dumps(
            {
                "step": step,
                "total_steps": 10,
                "settings": {
                    "actor_rollout_ref.actor.optim.lr": {"value": rate, "origin": "command line"},
                    "actor_rollout_ref.rollout.name": {"value": "vllm", "origin": "default"},
                },
            }
        )

    (tmp_path / "starts.jsonl").write_text("\n".join([start(0, 0.1), start(2, 0.2), start(5, 0.3)]))
    rates = [read_settings(tmp_path, step)[0]["actor_rollout_ref"]["actor"]["optim"]["lr"] for step in (1, 2, 3, 5, 6)]
    assert rates == [0.1, 0.1, 0.2, 0.2, 0.3]
    config = load_for_replay(read_settings(tmp_path, 3)[0], ["optim.lr=0.5"])
    assert (config.actor_rollout_ref.rollout.name, config.actor_rollout_ref.actor.optim.lr) == ("vllm", 0.5)
    (tmp_path / "starts.jsonl").unlink()
    with pytest.raises(VerlError, match=r"starts\.jsonl: cannot be read"):
        read_settings(tmp_path, 3)
