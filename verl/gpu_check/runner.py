"""Runs stages, each in a process of its own, and writes the report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from verl.cluster.environment import collect_report
from verl.cluster.gpu_record import record_stage
from verl.config.rollout_engines import DEFAULT_ENGINE
from verl.gpu_check.stage import Context, Result, State
from verl.gpu_check.stages import FIRST
from verl.redaction import redact

OUTPUT_LINES = 200  # of a stage that has failed
END_S = 30.0


def run_stages(names: Sequence[str], context: Context, timeout_s: float) -> Iterator[Result]:
    """Run stages one after another; if the first of all fails, the others are skipped."""
    blocked = ""
    for name in names:
        if blocked:
            yield Result(name, State.SKIPPED, blocked)
            continue
        result = _run_stage(name, context, timeout_s)
        if name == FIRST and result.state == State.FAILED:
            blocked = f"after {FIRST} has failed"
        yield result


def _run_stage(name: str, context: Context, timeout_s: float) -> Result:
    start, folder = time.monotonic(), context.folder
    given, found, log = (folder / f"{name}.{kind}" for kind in ("context.json", "result.json", "log"))
    given.write_text(json.dumps(asdict(context), default=str), encoding="utf-8")
    command = [sys.executable, "-m", "verl.gpu_check", name, str(given), str(found), str(os.getpid())]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    seconds, lines = time.monotonic() - start, _read_log(log)
    if code is not None and found.exists():
        result = json.loads(found.read_text(encoding="utf-8"))
        result["state"] = state = State(result["state"])
        result["text"] = _hide(result["text"])
        return Result(name, **result, seconds=seconds, output=lines if state == State.FAILED else ())
    reason = f"did not end within {timeout_s:g} s" if code is None else f"its process has ended with code {code}"
    return Result(name, State.FAILED, f"{reason}: {lines[-1] if lines else 'no output'}", seconds, output=lines)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started: first it is asked to."""
    if process.poll() is not None:
        return
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        for each in children:
            with suppress(psutil.NoSuchProcess):  # a process with its number would be another one
                each.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_log(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [_hide(line) for line in lines if line.strip()][-OUTPUT_LINES:]


def _hide(text: str) -> str:
    """Remove secrets and the home directory."""
    home = str(Path.home())
    return redact(text.replace(home, "~") if len(home) > 1 else text)


def remember(context: Context, result: Result) -> None:
    """Record on this machine whether a stage passes on its GPUs, for runs with `weight_transport=auto`."""
    if context.device == "cuda" and context.engine == DEFAULT_ENGINE and result.state != State.SKIPPED:
        record_stage(result.stage, has_passed=result.state == State.OK)


def make_report(context: Context, results: Sequence[Result]) -> dict[str, Any]:
    """Return what a user can attach to an issue."""
    return {
        "device": context.device,
        "model": _hide(context.model or "tiny"),
        "passed": has_passed(results),
        "stages": [asdict(result) for result in results],
        "environment": collect_report(),
    }


def has_passed(results: Sequence[Result]) -> bool:
    """Whether no stage has failed, and some were not skipped."""
    states = {result.state for result in results}
    return State.FAILED not in states and State.OK in states
