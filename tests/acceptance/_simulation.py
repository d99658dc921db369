"""Runs the seeds of a simulation, and prints what is wrong with them."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import traceback
from collections import Counter
from functools import partial
from multiprocessing import get_context

from _common import Stopwatch, finish  # isort: skip - puts tests/ on the path
from simulated_run import Outcome, Violation, run_seed
from simulated_scenario import Scenario

COUNTED = ("steps", "faults", "restarts", "retries", "resumes", "given_up", "joins", "leaves")
REPEATED = 20  # seeds that are run twice
CHUNK = 50


def look(seed: int, *, asynchronous: bool = False) -> tuple[int, str, Counter[str], str]:
    """(seed, what it broke, what happened, a fingerprint of it)."""
    try:
        outcome = run_seed(seed, asynchronous=asynchronous)
    except Violation as error:
        return seed, str(error), Counter(), ""
    counts = Counter({name: getattr(outcome, name) for name in COUNTED})
    counts["simulated_s"] = round(outcome.seconds)
    counts[f"ended: {outcome.ended_early or 'all steps done'}"] = 1
    return seed, "", counts, fingerprint(outcome)


def fingerprint(outcome: Outcome) -> str:
    return hashlib.sha256("\n".join(outcome.history).encode()).hexdigest()


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all simulations."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    return parser


def run_seeds(name: str, options: argparse.Namespace, *, asynchronous: bool = False) -> None:
    """Run the chosen seeds, print what they broke, and end the process."""
    if options.seed is not None:
        sys.exit(show(options.seed, asynchronous=asynchronous))
    count = options.seeds or (1_000 if options.short else 50_000)
    watch, total, broken, prints = Stopwatch(), Counter[str](), [], {}
    seeds, work = range(options.first, options.first + count), partial(look, asynchronous=asynchronous)
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        for number, (seed, wrong, counts, found) in enumerate(pool.imap_unordered(work, seeds, CHUNK), 1):
            total += counts
            if seed < options.first + REPEATED:
                prints[seed] = found
            if wrong:
                broken.append(seed)
                script = name.replace("_", "-")
                print(f"seed {seed}: {wrong}\n  again: make show-{script} ARGS='--seed {seed}'", flush=True)
            if number % 5_000 == 0:
                print(f"{watch.seconds():6.1f}s {number:,} seeds, {len(broken)} broken", flush=True)
    unlike = [seed for seed, found in prints.items() if work(seed)[3] != found]
    for seed in unlike:
        print(f"seed {seed} did not repeat exactly", flush=True)
    finish(
        name,
        not broken and not unlike,
        seeds=count,
        broken=broken[:20],
        unlike=unlike,
        repeated=len(prints),
        seconds=round(watch.seconds(), 1),
        **dict(sorted(total.items())),
    )


def show(seed: int, *, asynchronous: bool) -> int:
    """One seed: what it is, what happens, and how it ends."""
    print(Scenario.draw(seed, asynchronous=asynchronous))
    try:
        outcome = run_seed(seed, asynchronous=asynchronous)
    except Violation as error:
        print("\n".join(error.history))
        traceback.print_exception(error)
        return 1
    print("\n".join(outcome.history))
    print(f"ended: {outcome.ended_early or 'all steps done'}")
    return 0
