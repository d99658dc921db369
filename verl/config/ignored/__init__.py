"""Settings without effect: which do nothing beside which others, and why. None of them goes unsaid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl.config.ignored.algorithm import ALGORITHM, POLICY_LOSS
from verl.config.ignored.data import DATA
from verl.config.ignored.generation import GENERATION
from verl.config.ignored.rewards import REWARDS
from verl.config.ignored.rule import IgnoredRule
from verl.config.ignored.training import OF_ANY_RUN, TRAINING
from verl.config.paths import format_value
from verl.config.problems import ConfigProblem, get_value, is_overridden
from verl.config.schema import Section

__all__ = ["IgnoredRule", "find_ignored_rule", "find_ignored_settings"]

_MUTES = (*ALGORITHM, *POLICY_LOSS, *TRAINING, *OF_ANY_RUN, *GENERATION, *REWARDS, *DATA)


def find_ignored_settings(config: Section, ignored: Sequence[IgnoredRule] | None = None) -> Iterator[ConfigProblem]:
    """Every setting that was given and does nothing, with the first reason for it."""
    ignored = _MUTES if ignored is None else ignored
    for key in dict.fromkeys(key for mute in ignored for key in mute.keys):
        mute = find_ignored_rule(config, key, ignored) if is_overridden(config, key) else None
        if mute is not None:
            value = format_value(get_value(config, key))
            yield ConfigProblem((key, *mute.rests_on), f"{key}={value} has no effect: {mute.why}")


def find_ignored_rule(config: Section, key: str, ignored: Sequence[IgnoredRule] | None = None) -> IgnoredRule | None:
    """Why the setting of that key does nothing in this run, whatever its value; None if it is in effect."""
    return next(
        (mute for mute in (_MUTES if ignored is None else ignored) if key in mute.keys and mute.when(config)), None
    )
