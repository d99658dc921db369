"""Ray's own record of a process that it ended for lack of memory is found, and is about that process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.contract, pytest.mark.rotating(5)]

SCRIPT = """
import asyncio, time, ray
from verl.cluster.actors import await_reply
from verl.cluster.hangs.pending_calls import CallTarget

class Worker:
    def work(self):
        time.sleep(60)

async def call(**options):
    actor = ray.remote(Worker).options(num_cpus=0, **options).remote()
    try:
        await await_reply(actor.work.remote(), action="work", target=CallTarget("worker", 3))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")

ray.init(num_cpus=1, include_dashboard=False)
asyncio.run(call())
asyncio.run(call(max_restarts=-1))
"""


def test_ended_and_restarted_actors_name_the_full_memory(tmp_path: Path) -> None:
    memory = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "250", "RAY_ADDRESS": "local"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=os.environ | memory, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ProcessLostError")]
    assert len(lines) == 2, done.stdout + done.stderr
    for line in lines:
        assert "worker 3: work: its process has died: Ray ended it because the memory of node" in line
        assert "the largest processes: " in line
