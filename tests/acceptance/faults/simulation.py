"""The controller under simulation: whatever dies, hangs or comes late, no sample is lost, repeated or too stale.

The real buffer, pools, supervisor and weight sync run whole trainings on a simulated clock, around simulated engines
and a simulated trainer (tests/simulated_run.py). A seed decides the sizes, the staleness, dynamic sampling, prompts
that are dropped, engines that join and leave, and what goes wrong: engines that die (also while they start, load, are
probed or enabled), freeze, hang, lose replies, are replaced behind our back, come back with wrong weights or never; a
controller or a train worker that dies and resumes from the last checkpoint. Held for each seed: every step trains
exactly the positions of the stream that it should, in order; no token is staler than `max_staleness`, and each is
labelled with the version of the weights that drew it, verified on its engine; no request goes to an engine that has
left; every wait ends; with rounds of requests the responses are those of a run without faults. Some seeds are run
again in another process, to see that they repeat exactly.

50,000 seeds, 1,000 with `--short`. `--seed N` runs one and prints what happens in it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import traceback
from collections import Counter
from multiprocessing import get_context

from _common import Stopwatch, finish  # isort: skip - puts tests/ on the path
from simulated_run import Outcome, Violation, run_seed
from simulated_scenario import Scenario

COUNTED = ("steps", "faults", "restarts", "retries", "resumes", "given_up", "joins", "leaves")
REPEATED = 20  # seeds that are run twice
CHUNK = 50


def look(seed: int) -> tuple[int, str, Counter[str], str]:
    """(seed, what it broke, what happened, a fingerprint of it)."""
    try:
        outcome = run_seed(seed)
    except Violation as error:
        return seed, str(error), Counter(), ""
    counts = Counter({name: getattr(outcome, name) for name in COUNTED})
    counts["simulated_s"] = round(outcome.seconds)
    counts[f"ended: {outcome.ended_early or 'all steps done'}"] = 1
    return seed, "", counts, fingerprint(outcome)


def fingerprint(outcome: Outcome) -> str:
    return hashlib.sha256("\n".join(outcome.history).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    if options.seed is not None:
        sys.exit(show(options.seed))
    count = options.seeds or (1_000 if options.short else 50_000)
    watch, total, broken, prints = Stopwatch(), Counter[str](), [], {}
    seeds = range(options.first, options.first + count)
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        for number, (seed, wrong, counts, found) in enumerate(pool.imap_unordered(look, seeds, CHUNK), 1):
            total += counts
            if seed < options.first + REPEATED:
                prints[seed] = found
            if wrong:
                broken.append(seed)
                print(f"seed {seed}: {wrong}\n  again: make show-simulation ARGS='--seed {seed}'", flush=True)
            if number % 5_000 == 0:
                print(f"{watch.seconds():6.1f}s {number:,} seeds, {len(broken)} broken", flush=True)
    unlike = [seed for seed, found in prints.items() if look(seed)[3] != found]
    for seed in unlike:
        print(f"seed {seed} did not repeat exactly", flush=True)
    finish(
        "simulation",
        not broken and not unlike,
        seeds=count,
        broken=broken[:20],
        unlike=unlike,
        repeated=len(prints),
        seconds=round(watch.seconds(), 1),
        **dict(sorted(total.items())),
    )


def show(seed: int) -> int:
    """One seed: what it is, what happens, and how it ends."""
    print(Scenario.draw(seed))
    try:
        outcome = run_seed(seed)
    except Violation as error:
        print("\n".join(error.history))
        traceback.print_exception(error)
        return 1
    print("\n".join(outcome.history))
    print(f"ended: {outcome.ended_early or 'all steps done'}")
    return 0


if __name__ == "__main__":
    main()
