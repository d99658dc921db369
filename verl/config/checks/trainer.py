"""Checks of checkpoints, validation and profiles, which every type of run has."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.batch_sizes import count_train_ranks
from verl.config.checks.conflict import Conflict
from verl.config.features import get_checkpoint_settings, saves_hf
from verl.config.paths import format_value
from verl.config.schema import Config, SftConfig

_KEY, _TOOLS = "trainer.profile", "trainer.profile.tools"


def find_conflicts(config: Config | SftConfig) -> Iterator[Conflict]:
    """Yield what a run could not save, resume or validate."""
    trainer = config.trainer
    section, checkpoint = get_checkpoint_settings(config)
    if saves_hf(config) and "model" not in checkpoint.save_contents:
        reason = "trainer.save_hf and hf_model require the weights of the checkpoint"
        yield Conflict(
            f"{section}.save_contents", reason, "add model, or set trainer.save_hf=False and remove hf_model"
        )
    if isinstance(config, Config) and config.skip.rollout.enable and config.trainer.deterministic:
        reason = "responses of another run are not a function of the settings, as trainer.deterministic=true promises"
        yield Conflict("skip.rollout.enable", reason, "=false")
    if trainer.test_freq > 0 and config.data.val_files is None:
        reason = f"{trainer.test_freq} requires validation data"
        yield Conflict("trainer.test_freq", reason, "set data.val_files=test.parquet")
    if trainer.resume_mode == "path" and trainer.resume_from_path is None:
        fix = f"set trainer.resume_from_path={trainer.checkpoint_dir}/global_step_100"
        yield Conflict("trainer.resume_mode", "path requires a checkpoint", fix)


def find_profile_conflicts(config: Config | SftConfig) -> Iterator[Conflict]:
    """Yield what cannot be profiled. With trainer.device=auto the check is repeated once the device is known."""
    trainer, profile, steps = config.trainer, config.trainer.profile, config.trainer.profile_steps
    if not steps:
        return
    last, ranks, tools = trainer.total_training_steps, count_train_ranks(config), profile.tools
    if last is not None and max(steps) > last:
        reason = f"{max(steps)} is after the last step (trainer.total_training_steps={last})"
        yield Conflict(f"{_KEY}.steps", reason, f"=[{last}]")
    if not profile.all_ranks and max(profile.ranks, default=0) >= ranks:
        reason = f"{max(profile.ranks)} does not exist: the run has {ranks} train ranks, counted from 0"
        yield Conflict(f"{_KEY}.ranks", reason, f"=[{ranks - 1}]")
    if trainer.device == "cpu" and (unfit := [tool for tool in tools if tool != "torch"]):
        reason = f"{format_value(unfit)} requires a GPU, but the run is on CPU (trainer.device)"
        yield Conflict(_TOOLS, reason, "=[torch], whose traces hold the allocations too")
    elif "nsys" in tools and trainer.local:
        reason = "nsys starts with the processes of a run, but trainer.local=true has none"
        yield Conflict(_TOOLS, reason, "=[torch], or run the command under nsys profile yourself")
    elif {"nsys", "torch"} <= set(tools):
        yield Conflict(_TOOLS, "torch and nsys cannot record the same GPU at once (both use CUPTI)", "=[nsys]")
