"""`verl gpu-check` runs stages as processes: one that crashes or hangs has failed, and the next one follows."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from verl.gpu_check import processes, runner
from verl.gpu_check.stage import CheckFailedError, Checks, Context, State

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context("cpu", 0, tmp_path)


def make_python(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let a shell script be the process of every stage. Its arguments are -m verl.gpu_check STAGE CONTEXT RESULT."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


def test_a_crash_is_a_failure_and_the_next_stage_follows(
    context: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = '{"state": "ok", "text": "1 check", "checks": 1, "figures": {}}'
    make_python(tmp_path, monkeypatch, f'[ "$3" = engine ] && echo boom && exit 3; echo \'{result}\' > "$5"')
    first, second = runner.run_stages(["engine", "attention"], context, 60.0)
    assert (first.state, first.text) == (State.FAILED, "its process has ended with code 3: boom")
    assert first.output == ["boom"]
    assert (second.state, second.checks) == (State.OK, 1)


def test_a_result_of_a_process_that_hangs_does_not_count(
    context: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_python(tmp_path, monkeypatch, 'echo waiting; sleep 600 & echo "$!" > "$4.pid"; wait')
    start = time.monotonic()
    [result] = runner.run_stages(["engine"], context, 2.0)
    assert (result.state, result.text) == (State.FAILED, "did not end within 2 s: waiting")
    assert time.monotonic() - start < 60
    pid = int((tmp_path / "engine.context.json.pid").read_text())
    until = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "its child still runs"
        time.sleep(0.1)


def test_nothing_follows_a_machine_with_wrong_versions(
    context: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_python(tmp_path, monkeypatch, "exit 1")
    first, second = runner.run_stages(["versions", "attention"], context, 60.0)
    assert (first.state, second.state) == (State.FAILED, State.SKIPPED)
    assert second.text == "after versions has failed"
    assert not runner.has_passed([first, second])
    assert not runner.has_passed([second]), "nothing was checked"


def test_processes_share_memory_and_wrong_bytes_are_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Checks()
    processes.check_sharing(context, checks)
    assert checks.count == 2
    monkeypatch.setattr(processes, "_run_each", lambda function, calls: [
        {name: each + 1 for name, each in function(*arguments).items()} for arguments in calls
    ])  # fmt: skip
    with pytest.raises(CheckFailedError, match="another process reads other bytes of tensor 'a'"):
        processes.check_sharing(context, Checks())


def test_gloo_sums_between_two_processes_and_wrong_sums_are_found(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = Checks()
    processes.check_collectives(context, checks)
    assert checks.figures == {"gloo ranks": 2}
    monkeypatch.setattr(processes, "_run_each", lambda function, calls: [[], ["all-reduce"]])
    with pytest.raises(CheckFailedError, match="gloo, rank 1 of 2: wrong results of all-reduce"):
        processes.check_collectives(context, Checks())
