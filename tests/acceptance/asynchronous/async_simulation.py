"""Asynchronous training under simulation: no sample is too stale, dropped, skipped or trained twice.

The runs of show-simulation, all with a staleness of 1 to 8 versions: generation runs ahead of training by some batches,
weights change under running requests, engines may sleep under them, some episodes have several turns and some take 20
times as long as others. Held for each seed, over kills, joins, leaves, resumes, failures and dynamic sampling: no token
is staler than `max_staleness` when it is trained; every position of the data is trained exactly once, or rejected, or
dropped; after every step all groups that have started are trained, will not be trained, or run; the checkpoint of the
step names exactly the positions that are done; at the end nothing has started that is not trained, so that long
episodes are as frequent in what is trained as in what has started; every wait ends.

50,000 seeds, 1,000 with `--short`. `--seed N` runs one and prints what happens in it.
"""

from __future__ import annotations

from _simulation import make_parser, run_seeds


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--short", action="store_true")
    run_seeds("async_simulation", parser.parse_args(), asynchronous=True)


if __name__ == "__main__":
    main()
