"""The reward pool with real processes: what a function does to its process does not affect others."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import children
from rotation import rotate_rest

from verl.errors import RewardError
from verl.rewards.pool.pool import RewardPool
from verl.rewards.result import Failed, RewardInput, RewardResult, Scored
from verl.rewards.settings import RewardFunctionSettings

pytestmark = [pytest.mark.contract, pytest.mark.timeout(120)]

IMPORTS = "import asyncio, os, signal, sys, time\n"
HEAD = f"{IMPORTS}def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
ASYNC = HEAD.replace("def compute", "async def compute")
BATCH = "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
WRITE_EVERYWHERE = """
    for fd in os.listdir('/proc/self/fd'):
        if 'socket' in os.path.realpath('/proc/self/fd/' + fd):
            os.write(int(fd), b'x' * 100)
    time.sleep(60)
"""
FAIR = 20.0
"""Seconds: a timeout that no well-behaved function here comes near, even on a busy machine."""

Pool = Callable[..., RewardPool]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """Return a factory of pools for a function given as text; check that nothing of them is left after the test."""
    gc.collect()  # what other tests left open is not closed in the middle of this one
    before = open_files()
    made = []

    def make(body: str, head: str = HEAD, batch_size: int | None = None, **settings: Any) -> RewardPool:
        file = tmp_path / "my_reward.py"
        file.write_text(head + textwrap.indent(textwrap.dedent(body), "    "))
        settings = {"batch_size": batch_size, "timeout_s": FAIR, **settings}
        made.append(RewardPool(RewardFunctionSettings(str(file), **settings)))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert children() == []
    assert open_files() <= before
    assert not any(thread.name == "reward-pool" for thread in threading.enumerate())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def one(pool: RewardPool, response: str = "46", **extra: Any) -> RewardResult:
    return await pool.score("sums", response, "46", extra)


async def started(pool: RewardPool) -> RewardPool:
    await pool.start()
    return pool


async def test_scores_metrics_and_extra_info_cross_the_processes(pool: Pool) -> None:
    body = "return {'score': solution_str == ground_truth, 'where': extra_info['where'], 'text': 'skipped'}"
    ready = await started(pool(body))
    assert await one(ready, where=3) == Scored(1.0, {"where": 3.0})
    assert await one(ready, "47", where=4) == Scored(0.0, {"where": 4.0})


async def test_a_process_with_many_open_files_has_a_pool(pool: Pool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert await one(await started(pool("return 1"))) == Scored(1.0)
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_metric_that_is_not_a_number_is_named_once(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    ready = await started(pool("return {'score': 1, 'text': 'skipped', 'lacking': None}", workers=2))
    await asyncio.gather(*(one(ready) for _ in range(20)))
    notes = [record.getMessage() for record in caplog.records if "'text'" in record.getMessage()]
    assert len(notes) == 1
    assert "my_reward.py:compute_score: 'text' is 'skipped', which is not a number" in notes[0]
    assert "lacking" not in caplog.text


async def test_an_exception_has_the_users_frames_and_the_worker_lives_on(pool: Pool) -> None:
    ready = await started(pool("if solution_str == 'bad': return {}['gone']\nreturn os.getpid()"))
    process = await one(ready)
    failed = await one(ready, "bad")
    assert isinstance(failed, Failed)
    assert failed.kind == "error"
    assert "KeyError: 'gone'" in failed.message
    assert "worker.py" not in failed.message
    assert "'bad'" in failed.message
    assert await one(ready) == process


@pytest.mark.parametrize(
    ("body", "kind", "part"),
    rotate_rest(
        2,
        [
            ("os.kill(os.getpid(), signal.SIGKILL)", "died", "SIGKILL"),
            ("sys.exit(3)", "error", "SystemExit: 3"),
            ("raise KeyboardInterrupt", "error", "KeyboardInterrupt"),
            ("input()", "error", "EOFError"),
            ("return None", "invalid", "returned None as the score"),
            ("return float('nan')", "invalid", "returned nan as the score"),
            ("os._exit(3)", "died", "exit code 3"),
            ("os.kill(os.getpid(), 40)", "died", "died of signal 40"),  # a real-time signal without a name
            ("os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)", "died", "supervises it"),
            ("os.closerange(3, 10_000)\nreturn 1.0", "died", "file descriptors"),
            ("print('I was here', flush=True)\nos.abort()", "died", "I was here"),
            ("import ctypes\nctypes.string_at(0)", "died", "line 5 in compute_score"),
            (WRITE_EVERYWHERE, "died", "not its own"),
        ],
        keep=3,
    ),
)
async def test_the_end_of_a_worker_is_explained_and_the_next_call_is_served(
    pool: Pool, body: str, kind: str, part: str
) -> None:
    ready = await started(pool("if solution_str != 'bad': return 1.0\n" + textwrap.dedent(body)))
    failed = await one(ready, "bad")
    assert isinstance(failed, Failed), failed
    assert failed.kind == kind, failed.message
    assert part in failed.message
    assert "'bad'" in failed.message
    assert await one(ready) == Scored(1.0)


@pytest.mark.parametrize(
    "hang",
    rotate_rest(
        4,
        [
            "while True: pass",
            "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\ntime.sleep(3600)",
            "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
            "while True: print('flood' * 1000)",
        ],
    ),
)
async def test_a_hang_is_ended_at_its_timeout_and_shows_its_line(pool: Pool, hang: str) -> None:
    ready = await started(pool(f"if solution_str != 'bad': return 1.0\n{hang}", timeout_s=3.0))
    failed, *others = await asyncio.gather(one(ready, "bad"), *(one(ready) for _ in range(20)))
    assert isinstance(failed, Failed)
    assert failed.kind == "timeout"
    assert "did not return within 3 s" in failed.message
    if "sigmask" not in hang:
        assert "in compute_score" in failed.message
    assert others == [Scored(1.0)] * 20


@pytest.mark.parametrize("end", rotate_rest(0, ["os._exit(1)", "os.closerange(3, 10_000)", "os.abort()"]))
async def test_only_calls_that_ended_their_worker_fail_among_many_short_calls(pool: Pool, end: str) -> None:
    ready = await started(pool(f"if solution_str.startswith('bad'): {end}\nreturn 1.0", workers=2))
    responses = [f"bad {number}" if number % 40 == 7 else "good" for number in range(400)]
    found = await asyncio.gather(*(one(ready, response) for response in responses))
    assert [isinstance(outcome, Failed) for outcome in found] == [response != "good" for response in responses]
    assert all(
        repr(response) in outcome.message
        for response, outcome in zip(responses, found, strict=True)
        if isinstance(outcome, Failed)
    )


async def test_waiting_for_a_worker_does_not_count_toward_the_timeout(pool: Pool) -> None:
    ready = await started(pool("time.sleep(0.5)\nreturn 1.0", timeout_s=10.0))
    assert await asyncio.gather(*(one(ready) for _ in range(24))) == [Scored(1.0)] * 24


@pytest.mark.rotating(0)
async def test_several_workers_run_concurrently(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    body = """
        os.chdir(solution_str)
        open(str(os.getpid()), 'w').close()
        while len(os.listdir()) < 4:
            time.sleep(0.01)
        return os.getpid()
    """
    ready = await started(pool(body, workers=4))
    found = await asyncio.gather(*(one(ready, str(tmp_path / "here")) for _ in range(4)))
    assert len({outcome.score for outcome in found if isinstance(outcome, Scored)}) == 4


@pytest.mark.rotating(1)
async def test_memory_is_limited_and_a_leak_is_replaced_between_calls(pool: Pool) -> None:
    body = "if solution_str == 'bad': bytearray(1 << 31)\nkept = globals().setdefault('kept', [])\n"
    body += "kept.append(b'x' * (1 << 23))\ntime.sleep(0.05 if len(kept) < 45 else 1)\nreturn os.getpid()"
    ready = await started(pool(body, memory_mb=600))
    failed = await one(ready, "bad")
    assert isinstance(failed, Failed)
    assert "MemoryError" in failed.message
    assert "reward.memory_mb" in failed.message
    found = [await one(ready) for _ in range(100)]
    assert all(isinstance(outcome, Scored) for outcome in found)
    assert len({outcome.score for outcome in found if isinstance(outcome, Scored)}) > 1


@pytest.mark.rotating(3)
async def test_files_read_through_mappings_are_not_counted_as_memory(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(300 << 20))
    body = f"""
        import mmap
        mapped = mmap.mmap(os.open({str(tmp_path / "large")!r}, os.O_RDONLY), 0, prot=mmap.PROT_READ)
        assert not any(mapped[at] for at in range(0, len(mapped), 4096))
        time.sleep(1)
        eaten = []
        while solution_str == "bad":
            eaten.append(b"x" * (1 << 20))
        return 1.0
    """
    ready = await started(pool(body, memory_mb=200))
    assert isinstance(await one(ready), Scored)
    failed = await one(ready, "bad")
    assert isinstance(failed, Failed)
    assert failed.kind == "error"
    assert "MemoryError" in failed.message


@pytest.mark.rotating(2)
async def test_shared_memory_is_limited(pool: Pool) -> None:
    body = "import mmap\nshared = mmap.mmap(-1, 1 << 29)\nfor at in range(0, 1 << 29, 4096): shared[at] = 1\n"
    body += "time.sleep(60)"
    ready = await started(pool(body, memory_mb=200))
    failed = await one(ready)
    assert isinstance(failed, Failed)
    assert failed.kind == "died"
    assert "its limit is 200 MB" in failed.message


@pytest.mark.rotating(5)
async def test_daemons_end_with_their_worker(pool: Pool) -> None:
    body = """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
        os.wait()
        if solution_str == 'bad':
            os._exit(1)
        return 1.0
    """
    ready = await started(pool(body))
    assert await one(ready) == Scored(1.0)
    assert len(children()) == 3  # supervisor, worker, daemon
    assert isinstance(await one(ready, "bad"), Failed)
    assert len(children()) <= 2


@pytest.mark.rotating(4)
async def test_a_worker_with_many_leftover_processes_is_replaced(pool: Pool) -> None:
    ready = await started(pool("if os.fork() == 0:\n    time.sleep(600)\ntime.sleep(0.02)\nreturn 1.0"))
    most = 0
    while len(now := children()) >= most:  # until there are fewer: they have been cleared away
        most = len(now)
        assert most < 200
        assert await one(ready) == Scored(1.0)


async def test_a_forked_copy_of_the_worker_does_not_reply(pool: Pool) -> None:
    ready = await started(pool("os.fork()\nreturn float(solution_str)"))
    for value in range(10):
        assert await one(ready, str(value)) == Scored(float(value))


async def test_the_working_directory_is_the_same_for_every_call(pool: Pool) -> None:
    ready = await started(pool("here = os.getcwd()\nos.chdir('/')\nreturn float(here == solution_str)"))
    for _ in range(3):
        assert await one(ready, os.getcwd()) == Scored(1.0)


async def test_async_calls_run_concurrently_and_only_the_late_one_fails(pool: Pool) -> None:
    body = "await asyncio.sleep(600 if solution_str == 'bad' else 1)\nreturn len(asyncio.all_tasks())"
    ready = await started(pool(body, ASYNC, timeout_s=3.0))
    first = await asyncio.gather(*(one(ready) for _ in range(50)))
    assert max(outcome.score for outcome in first if isinstance(outcome, Scored)) > 25
    failed, again = await asyncio.gather(one(ready, "bad"), one(ready))
    assert isinstance(failed, Failed)
    assert failed.kind == "timeout"
    assert "my_reward.py" in failed.message
    assert isinstance(again, Scored)


@pytest.mark.parametrize(("body", "kind"), [("os._exit(3)", "died"), ("time.sleep(60)", "timeout")])
async def test_only_the_async_call_that_ended_the_worker_fails(pool: Pool, body: str, kind: str) -> None:
    body = f"await asyncio.sleep(0.3)\nif solution_str == 'bad':\n    {body}\nawait asyncio.sleep(0.3)\nreturn 1.0"
    ready = await started(pool(body, ASYNC, timeout_s=3.0))
    found = await asyncio.gather(one(ready, "bad"), *(one(ready) for _ in range(8)))
    assert [outcome.kind for outcome in found if isinstance(outcome, Failed)] == [kind]
    assert found[1:] == [Scored(1.0)] * 8


async def test_a_batched_function_gets_what_is_waiting(pool: Pool) -> None:
    ready = await started(pool("return [len(solution_strs)] * len(solution_strs)", BATCH, batch_size=8))
    found = await asyncio.gather(*(one(ready) for _ in range(20)))
    sizes = [outcome.score for outcome in found if isinstance(outcome, Scored)]
    assert len(sizes) == 20
    assert max(sizes) == 8


@pytest.mark.parametrize(
    ("body", "part"), [("return [1.0]", "1 results for 3"), ("return 1.0", "returns a list"), ("1 / 0", "ZeroDivision")]
)
async def test_a_batch_that_fails_fails_for_each_of_its_responses(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, body: str, part: str
) -> None:
    monkeypatch.setattr("verl.rewards.pool.process_pool._BATCH_WAIT_S", 60.0)  # the batch is sent when it is full
    ready = await started(pool(body, BATCH, batch_size=3))
    found = await asyncio.gather(*(one(ready) for _ in range(3)))
    assert all(isinstance(outcome, Failed) and part in outcome.message for outcome in found)


@pytest.mark.parametrize(
    ("head", "part"),
    [
        ("import not_there_at_all\n" + HEAD, "imports 'not_there_at_all'"),
        ("import os\nos._exit(5)\n" + HEAD, "exit code 5"),
        ("def compute_score(question, reply):\n", "has the signature (question, reply)"),
    ],
)
async def test_a_function_that_cannot_be_loaded_fails_at_the_start(pool: Pool, head: str, part: str) -> None:
    with pytest.raises(RewardError, match=r"my_reward\.py") as caught:
        await pool("return 1.0", head).start()
    assert part in str(caught.value)


async def test_a_function_that_can_no_longer_be_loaded_ends_the_run(pool: Pool, tmp_path: Path) -> None:
    ready = await started(pool("os._exit(1)"))
    (tmp_path / "my_reward.py").unlink()
    assert isinstance(await one(ready), Failed)
    with pytest.raises(RewardError, match="no such file"):
        await one(ready)


def test_the_pool_serves_any_thread_and_event_loop(pool: Pool) -> None:
    ready = pool("return float(solution_str)", workers=2)
    asyncio.run(ready.start())
    found: list[list[RewardResult]] = []

    async def some() -> list[RewardResult]:
        return await asyncio.gather(*(one(ready, str(number)) for number in range(20)))

    threads = [threading.Thread(target=lambda: found.append(asyncio.run(some()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[Scored(float(number)) for number in range(20)]] * 4
    assert ready.submit(RewardInput("sums", "7", "7")).result(timeout=60) == Scored(7.0)


async def test_what_cannot_be_pickled_is_the_callers_error(pool: Pool) -> None:
    ready = await started(pool("return 1.0"))
    with pytest.raises((TypeError, AttributeError), match="pickle"):
        await one(ready, what=lambda: None)
    assert await one(ready) == Scored(1.0)


async def test_a_cancelled_call_does_not_affect_others(pool: Pool) -> None:
    ready = await started(pool("time.sleep(0.2)\nreturn float(solution_str)"))
    calls = [asyncio.ensure_future(one(ready, str(number))) for number in range(6)]
    await asyncio.sleep(0.1)
    for call in calls[:4]:
        call.cancel()
    assert await asyncio.gather(*calls[4:]) == [Scored(4.0), Scored(5.0)]


async def test_a_closed_pool_rejects_calls(pool: Pool) -> None:
    ready = await started(pool("time.sleep(60)"))
    call = asyncio.ensure_future(one(ready))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(ready.close)
    with pytest.raises(RewardError, match="closed"):
        await call
    with pytest.raises(RewardError, match="closed"):
        await one(ready)


async def test_closing_leaves_no_call_pending(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    ready = await started(pool("if solution_str == '1999': time.sleep(60)\nreturn 1.0", workers=2, timeout_s=120.0))
    calls = [ready.submit(RewardInput("sums", str(number), "")) for number in range(2000)]
    await asyncio.wrap_future(calls[50])
    await asyncio.to_thread(ready.close)
    assert all(call.done() for call in calls)
    assert isinstance(calls[-1].exception(), RewardError)
    assert caplog.records == []


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_all_processes_end_with_the_owner_of_the_pool(tmp_path: Path, end: signal.Signals) -> None:
    (tmp_path / "my_reward.py").write_text(
        f"{HEAD}    if os.fork() == 0:\n        os.setsid()\n        time.sleep(600)\n    time.sleep(600)\n"
    )
    (tmp_path / "owner.py").write_text(
        "import asyncio, sys\nfrom verl.rewards.pool.pool import RewardPool\n"
        "from verl.rewards.settings import RewardFunctionSettings\n"
        "async def main():\n"
        "    pool = RewardPool(RewardFunctionSettings(sys.argv[1]))\n"
        "    await pool.start()\n"
        "    print('started', flush=True)\n"
        "    await pool.score('', '', '')\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, str(tmp_path / "owner.py"), str(tmp_path / "my_reward.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "started\n"
        until = time.monotonic() + 30
        while len(found := psutil.Process(owner.pid).children(recursive=True)) < 3:  # supervisor, worker, its child
            assert time.monotonic() < until
            time.sleep(0.05)
        owner.send_signal(end)
    gone, alive = psutil.wait_procs(found, timeout=10)
    assert alive == []
    assert len(gone) == 3
