"""The variables that vLLM gets: the user's own ones are kept, but its files stay private."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from verl.private_files import is_private
from verl.rollout.vllm.engine import environment
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
