"""Hostile tools, servers, agents and environments: none stalls a worker, sets a score or exhausts it.

make show-hostile-agents [ARGS=--short]

Each module in `MODULES` has `ATTACKS`: functions, coroutines or not, by name or with docstrings that say what is
attempted. Each runs against the code that a worker runs, and raises unless the attack fails. Meanwhile the
event loop of the worker is measured: it may stall for `STALL_S` at most, although code blocks for 30 s, and the memory
of the process may grow by `GROWTH_MIB` at most, although servers send far more. Both are generous, for a machine that
does other work. At the end, threads, processes and open files are bounded. `--short` (CI) is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import inspect
import logging
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from _common import finish

from verl.agents import user_code

MODULES = ("_hostile_code", "_hostile_contents", "_hostile_network")
STALL_S = 3.0
GROWTH_MIB = 600
TIME_S = 90.0  # for one attack

Attack = Callable[..., Awaitable[None] | None]


class LoopMeter:
    """The longest time for which the event loop of this process did not run, although there was a core for it.

    Time for which threads of this process wait for a core, because other processes use them, is not counted.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        while True:
            start, waited = time.monotonic(), read_waiting_s()
            await asyncio.sleep(0.02)
            gap = time.monotonic() - start - 0.02
            if gap > self.longest_s:
                self.longest_s = max(self.longest_s, gap - max(0.0, read_waiting_s() - waited))


def read_waiting_s() -> float:
    """Return how long threads of this process have waited for a core so far."""
    total = 0
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/schedstat") as file:
            total += int(file.read().split()[1])
    return total / 1e9


def read_memory_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def count_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def list_children() -> list[str]:
    found = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:
            found += file.read().split()
    return found


async def make_attack(attack: Attack) -> None:
    """Run an attack, in a thread unless it is a coroutine. One with a parameter gets a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="verl-hostile-") as folder:
        args = [Path(folder)] if inspect.signature(attack).parameters else []
        if inspect.iscoroutinefunction(inspect.unwrap(getattr(attack, "func", attack))):
            result = attack(*args)
        else:
            result = await asyncio.to_thread(attack, *args)
        if inspect.isawaitable(result):
            await result


def list_attacks(module: str) -> dict[str, Attack]:
    attacks = importlib.import_module(module).ATTACKS
    return dict(attacks) if isinstance(attacks, Mapping) else {attack.__name__: attack for attack in attacks}


async def attempt(attack: Attack) -> tuple[str | None, float]:
    """Return what an attack achieved, if anything, and the longest stall of the event loop."""
    meter, before = LoopMeter(), read_memory_mib()
    metering = asyncio.ensure_future(meter.run())
    problem = None
    try:
        await asyncio.wait_for(make_attack(attack), TIME_S)
    except TimeoutError:
        problem = f"still ran after {TIME_S:g} s"
    except AssertionError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"succeeded: {str(error) or where.line}"
    except Exception as error:  # noqa: BLE001 - a problem of the attack itself
        problem = f"{type(error).__name__}: {error}"
    metering.cancel()
    if problem is None and meter.longest_s > STALL_S:
        problem = f"stalled the event loop for {meter.longest_s:.1f} s"
    if problem is None and (growth := read_memory_mib() - before) > GROWTH_MIB:
        problem = f"took {growth:.0f} MiB"
    return problem, meter.longest_s


async def run(attacks: Mapping[str, Attack]) -> dict[str, Any]:
    problems: dict[str, str] = {}
    slowest, stall = 0.0, 0.0
    threads, files = threading.active_count(), count_files()
    for name, attack in attacks.items():
        start = time.monotonic()
        problem, longest = await attempt(attack)
        slowest, stall = max(slowest, time.monotonic() - start), max(stall, longest)
        print(f"{time.monotonic() - start:6.1f}s  loop {longest:5.2f}s  {name}: {problem or 'failed, as it should'}")
        if problem:
            problems[name] = problem
    if children := list_children():
        problems["processes"] = f"{len(children)} are left"
    left = {"threads": threading.active_count() - threads, "files": count_files() - files}
    if left["threads"] > user_code.MAX_ABANDONED + 16:
        problems["threads"] = f"{left['threads']} are left"
    if left["files"] > 64:
        problems["files"] = f"{left['files']} are left"
    return {"attacks": len(attacks), "problems": problems, "stall_s": round(stall, 2), "slowest_s": round(slowest, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("names", nargs="*", help="these attacks alone")
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # attacks are reported by hundreds of lines
    attacks = {name: attack for module in MODULES for name, attack in list_attacks(module).items()}
    if options.names:
        attacks = {name: attacks[name] for name in options.names}
    figures = asyncio.run(run(attacks))
    enough = options.names or figures["attacks"] >= 80
    finish("hostile_agents", enough and not figures["problems"], **figures, limits_s=[STALL_S, TIME_S])


if __name__ == "__main__":
    main()
