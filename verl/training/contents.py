"""Which parts of an engine's state a checkpoint holds, as the settings name them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["CONTENTS", "select_contents"]

CONTENTS = {"model": ("model", "base"), "optimizer": ("optimizer",), "extra": ("schedule", "rng", "policy")}
"""What a checkpoint may hold of an engine, and the parts of its state that this is."""


def select_contents(
    states: Mapping[str, dict[str, Any]], contents: Mapping[str, Collection[str]] | None
) -> dict[str, dict[str, Any]]:
    """Of the states of each folder what is wanted of it, or all where nothing is said; empty ones left out.

    >>> chosen({"actor": {"model": 1, "rng": 2}, "critic": {"model": 3}}, {"actor": ["extra"], "critic": []})
    {'actor': {'rng': 2}}
    """
    found = {}
    for folder, state in states.items():
        wanted = {part for content in (contents or {}).get(folder, CONTENTS) for part in CONTENTS.get(content, ())}
        found[folder] = {part: value for part, value in state.items() if part in wanted}
    return {folder: state for folder, state in found.items() if state}
