"""SIGTERM to all processes of a run reaches the controller, and not the processes that it needs to save."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]

SIGNALED_GROUP = """
import os, signal, time, ray
from verl.cluster.session import connect, disconnect
connect({"address": "local", "num_cpus": 1})
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
counter = ray.remote(max_restarts=0)(type("Counter", (), {"get": lambda self: os.getpid()})).remote()
before = ray.get(counter.get.remote())
os.killpg(0, signal.SIGTERM)
time.sleep(2)
print(len(heard), ray.get(counter.get.remote()) == before)
disconnect()
"""

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


def test_a_signal_to_the_group_of_a_controller_leaves_the_cluster_that_it_has_started() -> None:
    done = run(SIGNALED_GROUP)
    assert (done.returncode, done.stdout) == (0, "1 True\n"), done.stderr


def test_sigterm_that_is_blocked_stays_blocked_in_processes_that_a_worker_starts() -> None:
    done = run(SIGNALED_TREE)
    assert done.stdout == "True\n", done.stderr
