"""Where real processes stand: one that answers, one that cannot, one that never said it would, one that is gone."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from verl.cluster.hangs.process_info import look

pytestmark = [pytest.mark.contract, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

SLEEPER = "def sleeper():\n    print('up', flush=True)\n    time.sleep(600)\n"
IMPORT = "from verl.cluster.hangs.process_info import enable_stack_dumps"
ANSWERS = f"import time\n{IMPORT}\n{SLEEPER}enable_stack_dumps()\nsleeper()"
SILENT = f"import time\n{SLEEPER}sleeper()"
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


def test_a_process_that_answers_shows_its_stack_as_often_as_it_is_asked() -> None:
    with running(ANSWERS) as pid:
        for _ in range(3):
            [[seen]] = look([pid])
            assert seen.stands_in.startswith("sleeper (<string>:")
            assert seen.threads[0][1].startswith("<module>")
            assert (seen.is_frozen, seen.is_gone, seen.remark) == (False, False, "")


def test_a_frozen_process_is_said_to_be_frozen_and_goes_on_afterwards() -> None:
    with running(ANSWERS) as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)  # it stops when its turn on a core comes
        [[seen]] = look([pid])
        assert seen.is_frozen
        assert f"kill -CONT {pid}" in seen.words()
        os.kill(pid, signal.SIGCONT)
        assert look([pid])[0][0].stands_in.startswith("sleeper")


def test_a_process_that_never_said_it_would_answer_survives_being_looked_at() -> None:
    with running(SILENT) as pid:
        [[seen]] = look([pid])
        assert psutil.Process(pid).is_running()
        assert seen.state != psutil.STATUS_DEAD
        assert seen.threads or seen.remark  # py-spy may not be allowed to read it: then that is said


def test_children_are_seen_with_their_parent() -> None:
    with running(PARENT) as pid:
        [family] = look([pid])
        assert [seen.pid for seen in family] == [pid, psutil.Process(pid).children()[0].pid]


def test_a_process_that_is_gone_is_said_to_have_ended_and_does_not_disturb_the_others() -> None:
    with running(SILENT) as gone:
        pass
    with running(ANSWERS) as pid:
        [[first], [second]] = look([gone, pid])
    assert first.words() == "has ended"
    assert second.stands_in.startswith("sleeper")
