"""Which parts of an engine's state a checkpoint holds, as named in the settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

CONTENTS = {"model": ("model", "base"), "optimizer": ("optimizer",), "extra": ("schedule", "rng", "policy")}
"""Setting -> parts of an engine's state."""


def select_contents(
    states: Mapping[str, dict[str, Any]], contents: Mapping[str, Collection[str]] | None
) -> dict[str, dict[str, Any]]:
    """Return the wanted parts of each folder's state, all of them by default; folders without any are left out.

    >>> select_contents({"actor": {"model": 1, "rng": 2}, "critic": {"model": 3}}, {"actor": ["extra"], "critic": []})
    {'actor': {'rng': 2}}
    """
    selected = {}
    for folder, state in states.items():
        wanted = {part for content in (contents or {}).get(folder, CONTENTS) for part in CONTENTS.get(content, ())}
        selected[folder] = {part: value for part, value in state.items() if part in wanted}
    return {folder: state for folder, state in selected.items() if state}
