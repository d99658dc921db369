"""How much faster asynchronous steps are than synchronous ones, on the same devices and with long-tailed lengths.

python async_throughput.py [--short] [--real] [--plot FILE]

The real buffer decides what starts and what is trained; engines and training are simulated (tests/simulated_slots.py):
64 slots that write a token per second each, 16 prompts with 4 responses per step, lognormal lengths with a mean of 100
tokens. Training takes a share of the synchronous step, from none to half. Synchronous steps use all devices for
generation, and then for training. Asynchronous ones, with a staleness S of 1, 2, 4 and 8, do the same without waiting
for the longest responses (shared), or split the devices, as well as they can be split (separate). Slots are as fast
however many are busy, so these figures are upper bounds.

`--real` also compares runs of the tiny model with Ray, FSDP2 and vLLM on the cores of this machine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from _common import finish, metrics_of, short_grpo, train  # isort: skip - puts tests/ on the path
from _plots import draw_bars
from simulated_slots import Figures, SlotRun, Workload

SHARES = (0.125, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9)  # of the devices, for generation
TRAINING = (0.0, 0.1, 0.25, 0.5)  # share of the synchronous step
STALENESS = (1, 2, 4, 8)
LIMIT = 2.5  # at S=4, with free training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rows = simulate_all(short=options.short)
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    free = {str(row["sigma"]): row["shared"] for row in rows if row["training"] == 0.0 and row["staleness"] == 4}
    if options.plot:
        chosen = [row for row in rows if row["sigma"] == 1.0]
        bars = [(f"S={row['staleness']}, training {row['training']:.0%}", row["shared"], True) for row in chosen]
        draw_bars(options.plot, "Asynchronous steps on shared devices, relative to synchronous ones", bars, "times")
    real = compare_runs(steps=6 if options.short else 16) if options.real else {}
    finish(
        "async_throughput",
        min(free.values()) >= LIMIT and all(row["staleness_max"] <= row["staleness"] for row in rows),
        free_training_at_4=free,
        allowed=LIMIT,
        rows=rows,
        **({"real": real} if real else {}),
    )


def simulate_all(*, short: bool) -> list[dict[str, Any]]:
    """Return the ratios to synchronous steps; in the short form for one spread, few steps and fewer splits."""
    rows = []
    steps, shares = (25, (0.5, 0.75)) if short else (60, SHARES)
    for sigma in (1.0,) if short else (1.0, 1.3):
        generation_s = SlotRun(Workload(sigma, 0.0), 0, 0.0, steps=steps).run().step_s
        for part in (0.0, 0.25) if short else TRAINING:
            work = Workload(sigma, generation_s * part / (1.0 - part))
            before = SlotRun(work, 0, 0.0, steps=steps).run()
            for staleness in (1, 4) if short else STALENESS:
                shared = SlotRun(work, staleness, 1.0, steps=steps).run()
                split, separate = find_split(work, staleness, steps, shares if part else ())
                rows.append(
                    {
                        "sigma": sigma,
                        "training": part,
                        "staleness": staleness,
                        "shared": round(before.step_s / shared.step_s, 2),
                        "shared_busy": round(shared.slots_busy, 2),
                        "staleness_mean": round(shared.staleness_mean, 2),
                        "staleness_max": max(shared.staleness_max, separate.staleness_max if separate else 0),
                    }
                    | describe_separate(before, split, separate)
                )
    return rows


def find_split(work: Workload, staleness: int, steps: int, shares: tuple[float, ...]) -> tuple[float, Figures | None]:
    """Return the share of the devices that generates where steps are shortest, and what such a run is like."""
    runs = {share: SlotRun(work, staleness, 1.0, share, steps).run() for share in shares}
    if not runs:
        return 0.0, None
    best = min(runs, key=lambda share: runs[share].step_s)
    return best, runs[best]


def describe_separate(before: Figures, split: float, separate: Figures | None) -> dict[str, Any]:
    if separate is None:
        return {}
    return {
        "separate": round(before.step_s / separate.step_s, 2),
        "generating": split,
        "separate_busy": round(separate.slots_busy, 2),
        "trainer_waits": round(separate.trainer_waits, 2),
    }


def compare_runs(steps: int) -> dict[str, Any]:
    """Return the seconds per step of real runs here: synchronous, shared, separate, and with a lent device."""
    from verl.demo.assets import make_assets

    figures: dict[str, Any] = {}
    separate = ["actor_rollout_ref.hybrid_engine=False", "actor_rollout_ref.rollout.n_gpus_per_node=1"]
    modes = {
        "synchronous": [],
        "shared": ["trainer.max_staleness=2"],
        "separate": ["trainer.max_staleness=2", *separate],
        "lent": ["trainer.max_staleness=2", *separate, "actor_rollout_ref.rollout.lend_train_devices=True"],
    }
    with tempfile.TemporaryDirectory(prefix="verl-async-") as directory:
        make_assets(Path(directory))
        for mode, overrides in modes.items():
            run = Path(directory) / mode
            settings = [
                *short_grpo(Path(directory), prompts=32, steps=steps),
                "trainer.n_gpus_per_node=1",
                "actor_rollout_ref.rollout.num_engines=1",
                f"trainer.default_local_dir={run}",
                *overrides,
            ]
            code, _ = train(*settings, deadline_s=900)
            lines = [line for line in metrics_of(run) if "timing_s/step" in line][2:] if code == 0 else []
            if not lines:
                return figures | {mode: f"exit code {code}"}
            step_s = sum(line["timing_s/step"] for line in lines) / len(lines)
            figures[mode] = {
                "step_s": round(step_s, 2),
                "waiting_s": round(sum(line["timing_s/gen"] for line in lines) / len(lines), 2),
                "generation_idle": round(sum(line.get("perf/generation_idle", 0.0) for line in lines) / len(lines), 2),
                "ratio": round(figures["synchronous"]["step_s"] / step_s, 2) if mode != "synchronous" else 1.0,
            }
    return figures


if __name__ == "__main__":
    main()
