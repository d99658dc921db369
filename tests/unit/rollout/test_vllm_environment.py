"""The variables that vLLM gets, where the user's own ones are kept and files stay private; how its end is described."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from verl.private_files import is_private
from verl.rollout.vllm.engine import environment, find_engine_error
from verl.rollout.vllm.settings import VllmSettings

pytestmark = pytest.mark.unit


def test_variables_of_the_user_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert "VLLM_LOGGING_LEVEL" not in environment(VllmSettings("model"))


def test_temporary_files_and_sockets_are_private_also_in_a_temporary_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # where it is kept once it has been looked up
    variables = environment(VllmSettings("model"))
    for name in ("TMPDIR", "VLLM_RPC_BASE_PATH"):
        folder = Path(variables[name])
        assert folder.parent == tmp_path
        assert is_private(os.lstat(folder))


def test_batch_invariance_is_set_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert environment(VllmSettings("model", device="cuda", batch_invariant=True))["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in environment(VllmSettings("model", device="cuda"))


def test_the_exception_that_ended_vllms_process_is_found_in_its_output() -> None:
    before = "(EngineCore pid=7) ERROR 11-19 18:51:29 [core.py:1512] "
    lines = [
        "ValueError: of something else",
        f"{before}Traceback (most recent call last):",
        f"{before}torch.OutOfMemoryError: CUDA out of memory\r",
        "(MainProcess pid=8) ERROR 11-19 18:51:29 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: dead",
    ]
    assert find_engine_error("\n".join(lines)) == "torch.OutOfMemoryError: CUDA out of memory"
    assert find_engine_error(lines[0]) == ""  # as after SIGKILL
