"""Grading is bounded, whatever the answers do: 10,000 grades of which 1% hang, 200 pathological maths answers, a burst.

Graded by the pool, from the main thread and from three others at once, each with its own event loop. Every grade
that hangs ends at its deadline and is the only one that fails. An honest burst, whose last answers wait far longer than
the deadline for their turn, has no timeout. Nothing is left or grows: zombies, open files, memory.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from _common import Stopwatch, finish
from _pathological_maths import CASES

from verl.rewards.pool.pool import RewardPool
from verl.rewards.result import Failed, RewardInput, RewardResult, Scored
from verl.rewards.settings import RewardFunctionSettings

FUNCTION = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang":
        time.sleep(3600)
    if data_source == "burst":
        time.sleep(0.01)
    return float(solution_str == ground_truth)
"""
WORKERS, THREADS = 4, 4
MATHS_DEADLINE_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--short", action="store_true", help="1,000 grades, 40 maths answers, a burst of 300; no time is held"
    )
    short = parser.parse_args().short
    grades, maths, burst = (1_000, 40, 300) if short else (10_000, 200, 1_000)
    deadline_s = 3.0 if short else 1.0  # a machine that others use too may stand still for a second
    with tempfile.TemporaryDirectory(prefix="verl-grading-") as folder:
        file = Path(folder) / "graded.py"
        file.write_text(FUNCTION)
        settings = RewardFunctionSettings(str(file), workers=WORKERS, timeout_s=deadline_s, memory_mb=1024)
        pool = RewardPool(settings)
        asyncio.run(pool.start())
        hangs, before, after = grade(pool, grades, deadline_s)
        honest = in_threads(pool, [RewardInput("burst", str(number), str(number)) for number in range(burst)])
        left_before_close = zombies()
        pool.close()
    figures = {
        **hangs,
        **before_and_after(before, after),
        "burst": burst,
        "burst_seconds": round(honest.seconds, 2),
        "burst_false_timeouts": sum(outcome != Scored(1.0) for outcome in honest.outcomes),
    }
    hard = grade_maths(maths)
    figures |= hard | {"zombies": left_before_close + zombies(), "processes_left": len(psutil.Process().children(True))}
    passed = (
        figures["wrong"] == figures["burst_false_timeouts"] == figures["zombies"] == figures["processes_left"] == 0
        and (short or figures["slowest_part_s"] <= figures["bound_s"])
        and figures["memory_growth"] < 0.05
        and figures["files_growth"] <= 0
        and hard["maths_scored_1"] == 0
        and (short or hard["maths_slowest_s"] <= MATHS_DEADLINE_S + 2.0)
    )
    finish("grading", passed, **figures)


class Graded:
    """The outcomes of answers in their order, and the seconds that all took."""

    def __init__(self, outcomes: Sequence[RewardResult], seconds: float) -> None:
        self.outcomes, self.seconds = outcomes, seconds


def in_threads(pool: RewardPool, answers: Sequence[RewardInput]) -> Graded:
    """All at once, a quarter of them from each of four threads, one of which is the main thread."""
    results: dict[int, list[RewardResult]] = {}

    def run(part: int) -> None:
        async def score() -> list[RewardResult]:
            return await asyncio.gather(*(pool.score(*answer) for answer in answers[part::THREADS]))

        results[part] = asyncio.run(score())

    start = time.monotonic()
    threads = [threading.Thread(target=run, args=(part,)) for part in range(1, THREADS)]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    return Graded([results[index % THREADS][index // THREADS] for index in range(len(answers))], seconds)


def grade(
    pool: RewardPool, count: int, deadline_s: float
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Of every hundred grades one hangs. In ten parts: what there is after the first is what may be at the end."""
    part, watch, wrong, timeouts, slowest = count // 10, Stopwatch(), 0, 0, 0.0
    before: dict[str, float] = {}
    for number in range(10):
        answers = [
            RewardInput("show", "hang" if index % 100 == 50 else str(index % 7), str(index % 5))
            for index in range(part)
        ]
        turn = Stopwatch()
        graded = in_threads(pool, answers)
        slowest = max(slowest, turn.own_seconds())
        for answer, outcome in zip(answers, graded.outcomes, strict=True):
            hung = isinstance(outcome, Failed) and outcome.kind == "timeout"
            timeouts += hung
            good = hung if answer.solution_str == "hang" else outcome == Scored(float(answer[1] == answer[2]))
            if not good:
                wrong += 1
                print(f"{answer}: {outcome}")
        print(f"{(number + 1) * part:6} grades, {timeouts} hung, {watch.seconds():.1f} s", flush=True)
        if number == 0:
            before = inventory()
    deadlines_in_turn = -(-(part // 100) // WORKERS)  # the hangs of a part, shared by the workers
    figures = {
        "grades": count,
        "hang": timeouts,
        "wrong": wrong,
        "deadline_s": deadline_s,
        "workers": WORKERS,
        "seconds": round(watch.seconds(), 1),
        "slowest_part_s": round(slowest, 2),
        "bound_s": 2 * deadlines_in_turn * deadline_s + 3.0,
    }
    return figures, before, inventory()


def grade_maths(count: int) -> dict[str, float]:
    """Answers that make a grader of maths hang, swell or recurse: half from the main thread, half from another."""
    chosen = CASES[:: max(1, len(CASES) // count)][:count]
    taken: list[float] = []
    outcomes: list[RewardResult] = []

    async def one_by_one(cases: Sequence[tuple[str, str]]) -> None:
        for answer, truth in cases:
            start = time.monotonic()
            outcomes.append(await pool.score("math", answer, truth))
            taken.append(time.monotonic() - start)

    watch = Stopwatch()
    settings = RewardFunctionSettings(
        "verl.rewards.scorers.math", workers=2, timeout_s=MATHS_DEADLINE_S, memory_mb=2048
    )
    with RewardPool(settings) as pool:
        asyncio.run(pool.start())
        other = threading.Thread(target=lambda: asyncio.run(one_by_one(chosen[1::2])))
        other.start()
        asyncio.run(one_by_one(chosen[::2]))
        other.join()
    return {
        "maths": len(outcomes),
        "maths_seconds": round(watch.seconds(), 1),
        "maths_slowest_s": round(max(taken), 2),
        "maths_not_scored": sum(isinstance(outcome, Failed) for outcome in outcomes),
        "maths_scored_1": sum(isinstance(outcome, Scored) and outcome.score > 0 for outcome in outcomes),
    }


def inventory() -> dict[str, float]:
    """What must not grow: memory of this process and of the supervisors (workers come and go), open files."""
    gc.collect()
    own = psutil.Process()
    while len(supervisors := own.children()) < WORKERS or not all(one.children() for one in supervisors):
        time.sleep(0.1)  # the worker of a grade that hung is being replaced
    files = []
    for _ in range(5):  # a leak is there at every look, a file of /proc that is being read is not
        files.append(own.num_fds() + sum(one.num_fds() for one in supervisors))
        time.sleep(0.1)
    return {
        "memory": own.memory_info().rss + sum(one.memory_info().rss for one in supervisors),
        "files": min(files),
    }


def before_and_after(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {
        "memory_growth": round(after["memory"] / before["memory"] - 1, 4),
        "files_growth": int(after["files"] - before["files"]),
    }


def zombies() -> int:
    mine = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    return sum(
        process.info["status"] == psutil.STATUS_ZOMBIE and process.info["ppid"] in mine
        for process in psutil.process_iter(["status", "ppid"])
    )


if __name__ == "__main__":
    main()
