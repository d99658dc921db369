"""Asynchronous training learns as much from as many samples: the addition task with a staleness of 4, and with none.

make show-async-learning [ARGS="--seeds 3"]

The settings of show-learning on two ranks and two vLLM engines, with three seeds each: the same number of steps of the
same size, synchronous and with `trainer.max_staleness=4`, everything else at its defaults, so that importance weights
are on, and validations run during training. Held: held-out greedy accuracy at the end differs by no more than the
seeds do (twice the standard error of the difference of the means, at least 0.03), some responses were older than the
weights that they trained, and every validation that is due was done.

`--short`: one seed and 20 steps; accuracy rises by 0.15, as in the short form of show-learning.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from _common import finish, metrics_of, sized_for_addition, train  # isort: skip - puts tests/ on the path

from verl.demo.assets import make_assets
from verl.demo.warmup import warm_up

EXAMPLE = "examples/grpo/grpo_config.yaml"
METRIC = "val/addition/mean@1"
STALENESS = 4
VALIDATIONS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    steps, seeds = options.steps or (20 if options.short else 60), 1 if options.short else options.seeds
    accuracy: dict[int, list[float]] = {0: [], STALENESS: []}
    ages: list[float] = []
    with tempfile.TemporaryDirectory(prefix="verl-async-learning-") as directory:
        folder = Path(directory)
        make_assets(folder)
        print(f"before reinforcement learning: {warm_up(folder)}", flush=True)
        for seed in range(1, seeds + 1):
            for staleness in (STALENESS,) if options.short else (0, STALENESS):
                code, _ = train(
                    *sized_for_addition(folder),
                    "data.train_batch_size=64",
                    "actor_rollout_ref.actor.optim.lr=3e-4",
                    f"trainer.max_staleness={staleness}",
                    f"trainer.seed={seed}",
                    f"trainer.total_training_steps={steps}",
                    f"trainer.test_freq={steps // VALIDATIONS}",
                    config=EXAMPLE,
                    deadline_s=1800,
                )
                if code != 0:
                    finish("async_learning", False, exit_code=code, staleness=staleness, seed=seed)
                lines = metrics_of(folder / "run")
                first, *_, last = found = [line[METRIC] for line in lines if METRIC in line]
                if len(found) != 1 + VALIDATIONS:
                    finish("async_learning", False, validations=len(found), staleness=staleness, seed=seed)
                accuracy[staleness].append(last)
                ages += [
                    line.get("training/staleness_mean", 0.0) for line in lines if staleness and "reward/mean" in line
                ]
    figures = {
        "steps": steps,
        "before": round(first, 3),
        "accuracy": {
            f"staleness {staleness}": [round(each, 3) for each in found] for staleness, found in accuracy.items()
        },
        "mean_age": round(statistics.mean(ages), 2),
    }
    if options.short:
        finish("async_learning", last - first >= 0.15 and max(ages) > 0, short=True, **figures)
    means = {staleness: statistics.mean(found) for staleness, found in accuracy.items()}
    error = sum(statistics.variance(found) / len(found) for found in accuracy.values()) ** 0.5
    allowed = max(0.03, 2 * error)
    difference = means[STALENESS] - means[0]
    finish(
        "async_learning",
        abs(difference) <= allowed and max(ages) > 0,
        short=False,
        difference=round(difference, 4),
        allowed=round(allowed, 4),
        **figures,
    )


if __name__ == "__main__":
    main()
