"""Settings without effect: which do nothing beside which others, and why. None of them goes unsaid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl.config.mutes.algorithm import ALGORITHM, POLICY_LOSS
from verl.config.mutes.data import DATA
from verl.config.mutes.generation import GENERATION
from verl.config.mutes.mute import IgnoredRule
from verl.config.mutes.rewards import REWARDS
from verl.config.mutes.training import OF_ANY_RUN, TRAINING
from verl.config.paths import written
from verl.config.problems import ConfigProblem, changed, value_of
from verl.config.schema import Section

__all__ = ["IgnoredRule", "mute_of", "without_effect"]

_MUTES = (*ALGORITHM, *POLICY_LOSS, *TRAINING, *OF_ANY_RUN, *GENERATION, *REWARDS, *DATA)


def without_effect(config: Section, mutes: Sequence[IgnoredRule] | None = None) -> Iterator[ConfigProblem]:
    """Every setting that was given and does nothing, with the first reason for it."""
    mutes = _MUTES if mutes is None else mutes
    for key in dict.fromkeys(key for mute in mutes for key in mute.keys):
        mute = mute_of(config, key, mutes) if changed(config, key) else None
        if mute is not None:
            value = written(value_of(config, key))
            yield ConfigProblem((key, *mute.rests_on), f"{key}={value} has no effect: {mute.why}")


def mute_of(config: Section, key: str, mutes: Sequence[IgnoredRule] | None = None) -> IgnoredRule | None:
    """Why the setting of that key does nothing in this run, whatever its value; None if it is in effect."""
    return next((mute for mute in (_MUTES if mutes is None else mutes) if key in mute.keys and mute.when(config)), None)
