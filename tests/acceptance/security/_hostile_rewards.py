"""Reward functions that do what they should not, each of them only for some responses."""

import asyncio
import builtins
import contextlib
import ctypes
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
import time

_kept = []


def _is_bad(solution_str, extra_info, every):
    return solution_str.startswith("bad") or (every and extra_info["index"] % every == 0)


def _reward(misdeed):
    """A reward function from what it does to a bad response; with `every` 5, to all responses of each fifth prompt."""

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, every=0):
        return misdeed() if _is_bad(solution_str, extra_info, every) else float(solution_str == ground_truth)

    return compute_score


def _async_reward(misdeed):
    async def compute_score(data_source, solution_str, ground_truth, extra_info=None, every=0):
        await asyncio.sleep(0)
        return await misdeed() if _is_bad(solution_str, extra_info, every) else float(solution_str == ground_truth)

    return compute_score


# ---- they raise


@_reward
def raises_key_error():
    return {}["gone"]


@_reward
def raises_megabytes():
    raise ValueError("x" * 10_000_000)


@_reward
def raises_base_exception():
    raise type("Stop", (BaseException,), {})("everything")


@_reward
def raises_what_cannot_be_shown():
    raise type("Odd", (Exception,), {"__str__": lambda self: 1 / 0})


@_reward
def raises_stop_iteration():
    return next(iter(()))


@_reward
def recurses():
    return recurses("", "bad", "")


@_async_reward
async def raises_while_async():
    raise ConnectionError("the judge is away")


@_async_reward
async def cancels_itself():
    raise asyncio.CancelledError


# ---- they hang


@_reward
def loops():
    while True:
        pass


@_reward
def sleeps():
    time.sleep(3600)


@_reward
def waits_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@_reward
def backtracks():
    return re.match("(a+)+$", "a" * 60 + "b")


@_reward
def ignores_signals():
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    time.sleep(3600)


@_reward
def blocks_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(3600)


@_reward
def waits_for_its_child():
    subprocess.run(["sleep", "3600"])


@_reward
def hangs_when_it_is_read():
    return type("Slow", (), {"__float__": lambda self: time.sleep(3600)})()


@_async_reward
async def awaits_for_ever():
    await asyncio.Event().wait()


@_async_reward
async def blocks_the_loop():
    time.sleep(3600)


@_async_reward
async def swallows_its_cancellation():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


@_reward
def stops_its_process():
    os.kill(os.getpid(), signal.SIGSTOP)


# ---- they end


@_reward
def exits():
    sys.exit("enough")


@_reward
def exits_at_once():
    os._exit(0)


@_reward
def kills_itself():
    os.kill(os.getpid(), signal.SIGKILL)


@_reward
def kills_its_group():
    os.killpg(0, signal.SIGKILL)


@_reward
def kills_its_supervisor():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)


@_reward
def stops_its_supervisor():
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(3600)


@_reward
def reads_address_zero():
    ctypes.string_at(0)


@_reward
def aborts():
    os.abort()


@_reward
def becomes_another_program():
    os.execv("/bin/sh", ["sh", "-c", "exit 7"])


@_reward
def closes_all_files():
    os.closerange(0, 1000)
    return 1.0


@_async_reward
async def exits_while_async():
    os._exit(9)


# ---- they eat memory


@_reward
def asks_for_a_terabyte():
    return len(bytearray(1 << 40))


@_reward
def eats_memory():
    eaten = []
    while True:
        eaten.append(b"x" * (1 << 22))


@_reward
def eats_shared_memory():
    shared = mmap.mmap(-1, 1 << 30)
    for at in range(0, 1 << 30, 4096):
        shared[at] = 1
    time.sleep(3600)


@_reward
def leaks():
    _kept.append(b"x" * (1 << 24))
    return 1.0


# ---- they return something that is not a number


@_reward
def returns_none():
    return None


@_reward
def returns_nan():
    return float("nan")


@_reward
def returns_infinity():
    return {"score": float("inf")}


@_reward
def returns_text():
    return "1.0"


@_reward
def returns_a_hundred_megabytes():
    return "x" * (1 << 26)


@_reward
def returns_a_list():
    return [1.0]


@_reward
def returns_a_number_too_large():
    return 10**400


@_reward
def returns_a_dict_without_score():
    return {"acc": 1.0}


@_reward
def returns_a_huge_dict():
    return {"score": 1.0} | dict.fromkeys(range(200_000), 1.0)


@_reward
def returns_what_has_no_repr():
    return type("Odd", (), {"__repr__": lambda self: 1 / 0})()


# ---- they are loud


@_reward
def prints_a_flood():
    for _ in range(2000):
        print("flood " * 1000)
    return 1.0


@_reward
def floods_for_ever():
    while True:
        os.write(2, b"flood " * 10_000)


# ---- they fork


@_reward
def forks_and_both_return():
    os.fork()
    return 1.0


@_reward
def leaves_a_daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(0)
    os.wait()
    return 1.0


@_reward
def leaves_a_stubborn_daemon_and_dies():
    if os.fork() == 0:
        os.setsid()
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        if os.fork() == 0:
            os.environ.clear()
            os.execve("/bin/sleep", ["sleep", "3600"], {})
        os._exit(0)
    os._exit(5)


@_reward
def leaves_many_children():
    for _ in range(40):
        if os.fork() == 0:
            time.sleep(3600)
    time.sleep(0.5)
    return 1.0


# ---- they change what is around them


@_reward
def changes_directory():
    os.chdir("/")
    return 1.0


@_reward
def clears_the_environment():
    os.environ.clear()
    sys.path.clear()
    return 1.0


@_reward
def patches_modules():
    json.dumps = os.getpid = os.write = time.time = asyncio.run = None
    sys.stdout = sys.stderr = None
    return 1.0


@_reward
def patches_builtins():
    builtins.open = builtins.print = builtins.sum = None
    return 1.0


@_reward
def forgets_modules():
    sys.modules.clear()
    return 1.0


@_reward
def forgets_an_alarm():
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return 1.0


@_reward
def leaves_a_busy_thread():
    threading.Thread(target=lambda: time.sleep(3600)).start()
    return 1.0
