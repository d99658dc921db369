"""What the errors that end a run say: the cause, where, when, and a file to read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError
from recording_console import RecordingConsole

from verl import cli
from verl.cluster.actors import await_reply
from verl.cluster.hangs.pending_calls import CallTarget
from verl.errors import ConfigError, EngineError, note_on_error
from verl.trainer.records.failure import record_failure

pytestmark = pytest.mark.unit

TOKEN = "hf_" + "a" * 34


async def fail(error: Exception) -> None:
    raise error


def test_an_error_says_during_which_stages_and_step_it_happened() -> None:
    console = RecordingConsole()
    with (
        pytest.raises(ValueError, match="the cause") as raised,
        console.running_step(3),
        console.stage("updating the model"),
    ):
        raise ValueError("the cause")
    assert raised.value.__notes__ == ["while updating the model", "in step 3"]


def test_a_block_that_is_cancelled_gets_no_note() -> None:
    with pytest.raises(asyncio.CancelledError) as raised, note_on_error("while waiting"):
        raise asyncio.CancelledError
    assert not hasattr(raised.value, "__notes__")


def test_wrong_settings_get_no_note_since_they_name_their_place() -> None:
    with pytest.raises(ConfigError) as raised, note_on_error("while checking the settings"):
        raise ConfigError(["trainer.nnodes: 0 must be at least 1"])
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize("cause", [EngineError("out of memory"), ValueError("a bug")])
def test_the_error_of_a_worker_says_in_which_process_it_happened(cause: Exception) -> None:
    text = f"ray::TrainWorker.update() (pid=4321, ip=127.0.0.1, actor_id=1)\n{cause!r}"
    error = RayTaskError("update", text, cause).as_instanceof_cause()
    with pytest.raises(type(cause)) as raised:
        asyncio.run(await_reply(fail(error), action="update", target=CallTarget("train worker", 1)))
    assert raised.value.__notes__ == ["in train worker 1 (update), pid 4321"]


def test_the_command_prints_the_notes_of_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(*_: Any) -> int:
        error = EngineError("the cause")
        error.add_note("in step 3")
        raise error

    monkeypatch.setattr(cli, "_dispatch", crash)
    assert cli.main(["train"]) == cli.USAGE_ERROR
    assert capsys.readouterr().err == "the cause\nin step 3\n"


def test_the_report_has_the_traceback_without_secrets_and_is_named_by_the_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no access") as raised, note_on_error("in step 3"):
        raise ValueError(f"no access with {TOKEN}")
    record_failure(raised.value, tmp_path)
    (file,) = (tmp_path / "errors").iterdir()
    text = file.read_text()
    assert "in test_the_report_has_the_traceback" in text
    assert "in step 3" in text
    assert TOKEN not in text
    assert raised.value.__notes__[-1] == f"full report: {file}"


def test_a_folder_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    (tmp_path / "errors").touch()
    error = ValueError("the cause")
    record_failure(error, tmp_path)
    assert not hasattr(error, "__notes__")
