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

from _simulation import make_parser, run_seeds


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--short", action="store_true")
    run_seeds("simulation", parser.parse_args())


if __name__ == "__main__":
    main()
