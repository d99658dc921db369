"""DAPO on data of which 70 % of the prompts give no signal: none of them is trained on, and fewer steps are needed.

Of the training prompts 40 % are worth 0 whatever the answer, 30 % are worth 1, the rest are two-digit sums. DAPO and
GRPO (`examples/algorithms`) start from the same model, on real engines. Every batch that DAPO trains on must be free of
groups without signal, and held-out accuracy must reach the target in fewer optimiser steps than with GRPO. `--short`
(CI) runs a few steps of DAPO alone, and looks at the batches.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from _common import finish, metrics_of, sized_for_addition, train

from verl.demo.assets import make_assets
from verl.demo.warmup import warm_up

METRIC = "val/addition/mean@1"
TARGET = 0.75
EVERY = 2
UPDATES_A_STEP = 2
SILENT = 0.7


def silence(path: Path) -> float:
    """Make 70 % of the prompts worthless, evenly over the file; returns the share."""
    table = pq.read_table(path)
    fixed = [(k % 2 if k % 10 < 10 * SILENT else -1) for k in range(table.num_rows)]
    rows = [{"fixed": value} for value in fixed]
    column = table.schema.get_field_index("extra_info")
    table = table.remove_column(column) if column >= 0 else table
    pq.write_table(table.append_column("extra_info", pa.array(rows)), path)
    return sum(value >= 0 for value in fixed) / len(fixed)


def run(name: str, assets: Path, steps: int, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of one run, empty if it failed."""
    folder = assets / name
    code, _ = train(
        *sized_for_addition(assets),
        "data.train_batch_size=64",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={64 // UPDATES_A_STEP}",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        f"reward.custom_reward_function.path={Path(__file__).with_name('_hard_rewards.py')}",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={EVERY}",
        f"trainer.default_local_dir={folder}",
        *overrides,
        config=f"examples/algorithms/{name}.yaml",
        deadline_s=1800,
    )
    return metrics_of(folder) if code == 0 else []


def curve(lines: list[dict[str, Any]]) -> list[float]:
    return [round(line[METRIC], 4) for line in lines if METRIC in line]


def updates_to_target(accuracies: list[float]) -> int | None:
    """Optimiser steps until the first validation that reaches the target."""
    reached = [k for k, accuracy in enumerate(accuracies) if accuracy >= TARGET]
    return reached[0] * EVERY * UPDATES_A_STEP if reached else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="verl-dapo-") as directory:
        assets = Path(directory)
        make_assets(assets)
        print(f"before reinforcement learning: {warm_up(assets)}", flush=True)
        silent = silence(assets / "train.parquet")
        sizes = ("data.max_response_length=8", "reward.overlong_buffer.len=2")
        dapo = run("dapo", assets, 4 if options.short else 16, *sizes)
        grpo = [] if options.short else run("grpo", assets, 48, "data.max_response_length=8")
    steps = [line for line in dapo if "reward/groups_without_signal" in line]
    trained_without_signal = max((line["reward/groups_without_signal"] for line in steps), default=1.0)
    dropped = sum(line["sampling/groups_dropped"] for line in steps)
    generated = sum(line["sampling/groups_generated"] for line in steps)
    clean = bool(steps) and trained_without_signal == 0 and dropped > 0
    dapo_updates, grpo_updates = updates_to_target(curve(dapo)), updates_to_target(curve(grpo))
    # A GRPO that never gets there needed more than all of its steps.
    quicker = dapo_updates is not None and bool(grpo) and (grpo_updates is None or dapo_updates < grpo_updates)
    finish(
        "dapo",
        clean and (options.short or quicker),
        short=options.short,
        prompts_without_signal=round(silent, 3),
        groups_without_signal_in_trained_batches=trained_without_signal,
        groups_dropped_of_generated=round(dropped / max(generated, 1), 3),
        target=TARGET,
        optimiser_steps_dapo=dapo_updates,
        optimiser_steps_grpo=grpo_updates,
        curve_dapo=curve(dapo),
        curve_grpo=curve(grpo),
    )


if __name__ == "__main__":
    main()
