"""Checks that the steps, ranks and tools of a profile exist."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.batch_sizes import count_train_ranks
from verl.config.paths import format_value
from verl.config.schema import Config, SftConfig

_KEY = "trainer.profile"


def find_profile_conflicts(config: Config | SftConfig) -> Iterator[str]:
    """Yield what cannot be profiled. With trainer.device=auto the run asks again, when the device is known."""
    trainer, steps = config.trainer, config.trainer.profile_steps
    if not steps:
        return
    if trainer.total_training_steps is not None and max(steps) > trainer.total_training_steps:
        yield (
            f"{_KEY}.steps: {max(steps)} is after the last step (trainer.total_training_steps="
            f"{trainer.total_training_steps}); set {_KEY}.steps=[{trainer.total_training_steps}]"
        )
    ranks, profile = count_train_ranks(config), trainer.profile
    if not profile.all_ranks and max(profile.ranks, default=0) >= ranks:
        yield (
            f"{_KEY}.ranks: {max(profile.ranks)} does not exist: the run has {ranks} train ranks, counted from 0; set "
            f"{_KEY}.ranks=[{ranks - 1}]"
        )
    yield from _check_tools(config)


def _check_tools(config: Config | SftConfig) -> Iterator[str]:
    trainer, tools = config.trainer, config.trainer.profile.tools
    if trainer.device == "cpu" and (unfit := [tool for tool in tools if tool != "torch"]):
        yield (
            f"{_KEY}.tools: {format_value(unfit)} requires a GPU, but the run is on CPU (trainer.device); set "
            f"{_KEY}.tools=[torch], whose traces hold the allocations too"
        )
    elif "nsys" in tools and trainer.local:
        yield (
            f"{_KEY}.tools: nsys starts with the processes of a run, but trainer.local=true has none; set "
            f"{_KEY}.tools=[torch], or run the command under nsys profile yourself"
        )
    elif {"nsys", "torch"} <= set(tools):
        yield (
            f"{_KEY}.tools: torch and nsys cannot record the same GPU at once (both use CUPTI); set {_KEY}.tools=[nsys]"
        )
