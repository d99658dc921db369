"""`verl train`: reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence

from verl.commands.arguments import SETTINGS_HELP
from verl.config.load import load
from verl.tracking.console import Console

HELP = f"""\
usage: verl train [--dry-run] [settings]

Train a model with reinforcement learning. If trainer.save_freq saves checkpoints, rerun the command to resume.

options:
  --dry-run               start nothing, and print all that is wrong, as `verl doctor` does

{SETTINGS_HELP}
example:
  verl train data.train_files=train.parquet actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
actor_rollout_ref.rollout.n=8
"""


def main(argv: Sequence[str]) -> int:
    """Train once per point of the sweep (once without `-m`); return the exit code."""
    if "--dry-run" in argv:
        from verl.commands import doctor

        return doctor.main([argument for argument in argv if argument != "--dry-run"])
    points = load(argv)
    with Console().stage("importing libraries", is_logged=False):  # after the settings have been checked
        import verl.trainer.build.rl_builder  # noqa: F401
        from verl.trainer.launcher import run_all, train

    return run_all(points, train)
