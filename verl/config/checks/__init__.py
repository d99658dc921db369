"""Checks of settings against each other: conflicts, which are errors, and hints about probable mistakes.

Each module checks one topic and yields `Conflict` records. The lists below say which checks each type of run needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from verl.config.checks import (
    algorithm,
    asynchronous,
    device_support,
    engine_placement,
    generation,
    ignored,
    megatron,
    requirements,
    train_engine,
    trainer,
    training,
)
from verl.config.checks.conflict import Conflict
from verl.config.schema import Section

Check = Callable[..., Iterator[Conflict | str]]

GENERATION_CONFLICTS: tuple[Check, ...] = (
    requirements.find_unsupported,
    generation.find_conflicts,
    device_support.find_conflicts,
)
"""What matters whenever responses are generated or scored, with or without training."""
GENERATION_HINTS: tuple[Check, ...] = (generation.find_hints,)

SFT_CONFLICTS: tuple[Check, ...] = (
    requirements.find_unsupported,
    train_engine.find_conflicts,
    megatron.find_conflicts,
    training.find_conflicts,
    trainer.find_conflicts,
    trainer.find_profile_conflicts,
)
SFT_HINTS: tuple[Check, ...] = (training.find_sft_hints, ignored.find_ignored_settings)

TRAIN_CONFLICTS: tuple[Check, ...] = (
    *GENERATION_CONFLICTS,
    generation.find_training_conflicts,
    *SFT_CONFLICTS[1:],
    generation.find_data_conflicts,
    engine_placement.find_conflicts,
    training.find_routing_conflicts,
    algorithm.find_conflicts,
    asynchronous.find_conflicts,
)
TRAIN_HINTS: tuple[Check, ...] = (
    generation.find_training_hints,
    generation.find_data_hints,
    training.find_hints,
    algorithm.find_hints,
    asynchronous.find_hints,
    ignored.find_ignored_settings,
)


def run_checks(checks: Sequence[Check], config: Section) -> list[str]:
    """Return what the checks find, as text."""
    return [str(conflict) for check in checks for conflict in check(config)]
