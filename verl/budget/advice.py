"""Finds settings with which a run fits: the cheapest changes first, and no more of them than are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.budget.run import RunMemory

Changes = Mapping[str, Any]
"""Key of a setting -> value."""


@dataclass(frozen=True, slots=True)
class Change:
    """New values of settings that belong together, and what they cost."""

    values: Changes
    cost: str


def find_changes(evaluate: Callable[[Changes], RunMemory], options: Sequence[Change], memory: int) -> list[Change]:
    """Return the changes with which a run fits on devices with `memory` bytes; empty if none of them suffice.

    `evaluate` returns the memory of the run with changed settings. `options` are tried in order, and those that do not
    help are left out.
    """
    chosen: list[Change] = []
    missing = evaluate({}).shortfall(memory)
    for option in options:
        if not missing:
            break
        left = evaluate(_merge([*chosen, option])).shortfall(memory)
        if left < missing:
            chosen, missing = [*chosen, option], left
    if missing:
        return []
    for option in list(chosen):  # one that a later one made superfluous
        others = [each for each in chosen if each is not option]
        if not evaluate(_merge(others)).shortfall(memory):
            chosen = others
    return _drop_replaced(chosen)


def _merge(changes: Sequence[Change]) -> dict[str, Any]:
    return {key: value for change in changes for key, value in change.values.items()}


def _drop_replaced(changes: Sequence[Change]) -> list[Change]:
    """Leave out a change whose settings a later one changes again."""
    return [
        change
        for index, change in enumerate(changes)
        if not any(change.values.keys() <= later.values.keys() for later in changes[index + 1 :])
    ]
