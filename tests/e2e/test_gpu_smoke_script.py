"""`make gpu-smoke` on a machine without a GPU: its short form trains, saves and resumes in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), pytest.mark.rotating(4)]

SCRIPT = Path(__file__).parents[1] / "gpu" / "smoke.py"


def test_the_short_form_trains_saves_and_resumes() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--short"], capture_output=True, text=True, timeout=900)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[-1] == {"name": "gpu-smoke", "cases": 1, "on_gpus": False, "pass": True}
    assert lines[0]["probe_gap"] < 1e-3
    assert lines[0]["estimate"]["gib"] > 0
