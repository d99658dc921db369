"""What a run has left in its folder, and the commands that continue from there."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from verl.checkpoint.manifest import CheckpointDir
from verl.config.schema import Config, SftConfig


def describe_end(config: Config | SftConfig, resume: str) -> str:
    """Return where the results of a finished run are, and the commands to evaluate, export and continue it."""
    folder = config.trainer.checkpoint_dir
    files = {"metrics": folder / "metrics.jsonl"}
    if isinstance(config, Config) and config.trainer.val_only:
        return f"validated\n{_format_rows(files)}"
    if (checkpoint := find_last_checkpoint(folder)) is None or config.trainer.save_freq == -1:
        saved = "nothing was saved (trainer.save_freq=-1), so the trained model is gone; remove the setting to keep it"
        return f"finished: {saved}\n{_format_rows(files)}"
    export = f"verl merge {folder} --target_dir merged"
    model = checkpoint / "actor" / "huggingface"
    if has_weights := any(model.glob("*.safetensors")):
        files["model"] = model
    files["checkpoint"] = checkpoint
    given = config.data.val_files or "test.parquet"
    prompts = shlex.join([given] if isinstance(given, str) else given)
    setting = f"actor_rollout_ref.model.path={model if has_weights else 'merged'}"
    generate = f"verl generate {prompts} --output responses.parquet {setting}"
    more = f"{resume} with a larger trainer.total_training_steps or total_epochs"
    commands = {"generate": generate, "evaluate": "verl eval responses.parquet", "export": export, "train on": more}
    return f"finished\n{_format_rows(files)}\nnext\n{_format_rows(commands)}"


def describe_stop(folder: Path, resume: str) -> str:
    """Return the last checkpoint of a run that ended early, and how to resume from it."""
    if (checkpoint := find_last_checkpoint(folder)) is None:
        return f"{folder} has no checkpoint to resume from; to save some on the way: trainer.save_freq=20 (steps)"
    return f"the last checkpoint is {checkpoint}; to resume:\n  {resume}"


def find_last_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint to resume from; None without one."""
    checkpoints = CheckpointDir(folder)
    return None if (step := checkpoints.latest()) is None else checkpoints.step_dir(step)


def resume_command(config: Config | SftConfig) -> str:
    """Return the command line of this process, with the settings by which it resumes the run."""
    trainer = config.trainer
    added = ["trainer.resume_mode=auto", f"trainer.default_local_dir={trainer.checkpoint_dir}"]
    if {"-m", "--multirun"} & {*sys.argv}:  # the folder of each run follows from the sweep
        added = added[:1]
    return shlex.join(["verl", *sys.argv[1:], *([] if trainer.resume_mode == "auto" else added)])


def _format_rows(rows: Mapping[str, object]) -> str:
    return "\n".join(f"  {name:<12}{value}" for name, value in rows.items())
