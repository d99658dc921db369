"""What is laid into shared memory goes when it is done with; what killed processes have left, with the next start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from verl.rollout import shared_memory as shared
from verl.rollout.shared_memory import PREFIX, remove_stale, shared_folder
from verl.rollout.vllm.engine import VllmEngine, VllmSettings

pytestmark = pytest.mark.unit

NOBODY = 2**22 + 1  # no process has a larger number than 2**22


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared, "_memory_dir", lambda: tmp_path)
    return tmp_path


def left_by(memory: Path, process: int) -> Path:
    folder = memory / f"{PREFIX}{process}-abc"
    folder.mkdir()
    (folder / "bucket").write_bytes(b"weights")
    return folder


def test_a_folder_is_there_for_a_while_and_for_nobody_else(memory: Path) -> None:
    with shared_folder() as folder:
        (folder / "bucket").write_bytes(b"weights")
        assert folder.parent == memory
        assert folder.stat().st_mode & 0o077 == 0
        remove_stale()
        assert (folder / "bucket").exists()
    assert list(memory.iterdir()) == []


def test_what_a_killed_process_has_left_is_swept_and_nothing_else(memory: Path) -> None:
    gone, alive = left_by(memory, NOBODY), left_by(memory, os.getpid())
    foreign = memory / "torch_1234"
    foreign.mkdir()
    remove_stale()
    assert sorted(memory.iterdir()) == sorted([alive, foreign])
    assert not gone.exists()


def test_what_a_process_of_another_container_holds_stays(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr(os, "getpid", lambda: NOBODY)  # it has a number there that nobody has here
        held = shared_folder()
        folder = held.__enter__()
    remove_stale()
    assert folder.exists()
    held.__exit__(None, None, None)


def test_what_belongs_to_another_user_stays(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = left_by(memory, NOBODY)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    remove_stale()
    assert folder.exists()


async def test_an_engine_that_starts_sweeps(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = left_by(memory, NOBODY)

    def environment(settings: Any) -> dict[str, str]:
        raise SystemExit  # what comes next is vLLM

    monkeypatch.setattr("verl.rollout.vllm.engine.environment", environment)
    with pytest.raises(SystemExit):
        await VllmEngine(VllmSettings("model")).start()
    assert not folder.exists()
