"""SIGTERM that is blocked in a worker, as in a Slurm job, does not reach the processes that the worker starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]

SIGNALED_TREE = """
import multiprocessing, os, signal, sys, time
if __name__ == "__main__":
    from verl.child_process import keep_sigterm_blocked
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    keep_sigterm_blocked()
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    time.sleep(2)
    for pid in (child.pid, os.getpid()):
        os.kill(pid, signal.SIGTERM)
    time.sleep(1)
    print(child.is_alive())
    child.kill()
    child.join()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-u", "-c", script]
    return subprocess.run(command, env=environment, process_group=0, capture_output=True, text=True, timeout=240)


def test_sigterm_that_is_blocked_stays_blocked_in_processes_that_a_worker_starts() -> None:
    done = run(SIGNALED_TREE)
    assert done.stdout == "True\n", done.stderr
