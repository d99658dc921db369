"""Stacks and states of real processes: with and without stack dumps, stopped, and gone."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import psutil
import pytest

from verl.cluster.hangs import process_info
from verl.cluster.hangs.process_info import inspect_processes

pytestmark = [pytest.mark.contract, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

SLEEPER = "def sleeper():\n    print('up', flush=True)\n    time.sleep(600)\n"
IMPORT = "from verl.cluster.hangs.process_info import enable_stack_dumps"
DUMPS = f"import time\n{IMPORT}\n{SLEEPER}enable_stack_dumps()\nsleeper()"
SILENT = f"import time\n{SLEEPER}sleeper()"
HOLD = "def holder():\n    print('up', flush=True)\n    ctypes.PyDLL(None).sleep(600)\n"
HOLDER = f"import ctypes\n{IMPORT}\n{HOLD}enable_stack_dumps()\nholder()"
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SILENT!r}])"


@contextmanager
def running(program: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process.pid
    finally:
        for one in (*psutil.Process(process.pid).children(recursive=True), process):
            one.kill()
        process.wait()


def test_a_process_with_stack_dumps_shows_its_stack_every_time() -> None:
    with running(DUMPS) as pid:
        for _ in range(3):
            [[info]] = inspect_processes([pid])
            assert info.current_frame.startswith("sleeper (<string>:")
            assert info.threads[0][1].startswith("<module>")
            assert (info.is_stopped, info.is_gone, info.remark) == (False, False, "")


def test_a_process_is_asked_by_signal_only_if_no_thread_of_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    kill = Mock(side_effect=os.kill)
    monkeypatch.setattr(os, "kill", kill)
    with running(DUMPS) as pid:
        inspect_processes([pid])
        kill.assert_not_called()
    with running(HOLDER) as pid:  # C code that never releases the interpreter
        [[info]] = inspect_processes([pid])
        kill.assert_called_with(pid, process_info.SIGNAL)
    assert info.current_frame.startswith("holder (<string>:")


def test_a_stopped_process_is_recognized_and_can_continue() -> None:
    with running(DUMPS) as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)  # it stops when its turn on a core comes
        [[info]] = inspect_processes([pid])
        assert info.is_stopped
        assert f"kill -CONT {pid}" in info.describe()
        os.kill(pid, signal.SIGCONT)
        assert inspect_processes([pid])[0][0].current_frame.startswith("sleeper")


def test_a_process_without_stack_dumps_survives_the_inspection() -> None:
    with running(SILENT) as pid:
        [[info]] = inspect_processes([pid])
        assert psutil.Process(pid).is_running()
        assert info.state != psutil.STATUS_DEAD
        assert info.threads or info.remark  # py-spy may not be permitted to read it


def test_children_are_seen_with_their_parent() -> None:
    with running(PARENT) as pid:
        [family] = inspect_processes([pid])
        assert [info.pid for info in family] == [pid, psutil.Process(pid).children()[0].pid]


def test_a_process_that_is_gone_does_not_affect_the_others() -> None:
    with running(SILENT) as gone:
        pass
    with running(DUMPS) as pid:
        [[first], [second]] = inspect_processes([gone, pid])
    assert first.describe() == "has exited"
    assert second.current_frame.startswith("sleeper")
