"""Answers are scored while others are still written: with a reward as slow as generation, a step is hardly longer.

A stand-in for the engine writes answers in a fixed number of seats, each as long as the other; the reward takes as long
as the engine does, in total and for each answer. Each answer is scored the moment it is finished, by the pool. The step
may take 1.25 times what generation alone takes; one after the other they would take 2.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from _common import finish

from verl.rewards.outcome import Scored
from verl.rewards.pool import ScorePool

SEATS = 8
SECONDS = 0.25
PLAIN = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
PLAIN += "    time.sleep(SECONDS)\n    return 1.0\n"
ASYNC = f"async {PLAIN}".replace("time.sleep", "await asyncio.sleep")
BATCH = "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
BATCH += "    time.sleep(SECONDS)\n    return [1.0] * len(solution_strs)\n"
KINDS = {"plain": (PLAIN, SEATS, None), "async": (ASYNC, 1, None), "batch": (BATCH, 2, SEATS)}
"""Name -> (function, processes, size of a batch)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a third of the answers")
    answers = 64 if parser.parse_args().short else 192
    ratios = {}
    with tempfile.TemporaryDirectory(prefix="verl-overlap-") as folder:
        for kind, (function, workers, batch_size) in KINDS.items():
            file = Path(folder) / f"{kind}.py"
            file.write_text(f"import asyncio, time\nSECONDS = {SECONDS}\n{function}")
            with ScorePool({"path": str(file)}, workers=workers, batch_size=batch_size, deadline_s=60) as pool:
                alone, step, after = asyncio.run(measure(pool, answers))
            ratios[kind] = round(step / alone, 3)
            print(f"{kind}: generation {alone:.2f} s, step {step:.2f} s, one after the other {after:.2f} s")
    finish("reward_overlap", max(ratios.values()) <= 1.25, answers=answers, step_over_generation=ratios, bound=1.25)


async def measure(pool: ScorePool, answers: int) -> tuple[float, float, float]:
    """(generation alone, the step, generation and then the reward)."""
    await pool.start()
    await asyncio.gather(*(pool.score("show", "warm", "") for _ in range(SEATS)))
    seats = asyncio.Semaphore(SEATS)

    async def generate() -> None:
        async with seats:
            await asyncio.sleep(SECONDS)

    async def episode() -> None:
        await generate()
        assert await pool.score("show", "written", "") == Scored(1.0)

    start = time.monotonic()
    await asyncio.gather(*(generate() for _ in range(answers)))
    alone = time.monotonic() - start
    await asyncio.gather(*(episode() for _ in range(answers)))
    step = time.monotonic() - start - alone
    await asyncio.gather(*(generate() for _ in range(answers)))
    await asyncio.gather(*(pool.score("show", "written", "") for _ in range(answers)))
    return alone, step, time.monotonic() - start - alone - step


if __name__ == "__main__":
    main()
