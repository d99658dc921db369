"""Where the value of each setting comes from: its default, a YAML file, or the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from verl.config.legacy.legacy_keys import LegacyKeys
from verl.config.paths import Path, iter_leaves, join_path

if TYPE_CHECKING:  # importing Hydra takes a third of a second
    from hydra.core.override_parser.types import Override

DEFAULT = "default"
COMMAND_LINE = "command line"


def trace_origins(
    tree: Mapping[str, Any], source: str, overrides: Iterable[Override], legacy: LegacyKeys
) -> dict[str, str]:
    """Return key -> origin of the settings that are given, entries of open dictionaries included.

    Args:
        tree: The settings before the overrides, under their canonical keys.
        source: Where these settings come from.
        overrides: The overrides in their order; an alias is named in the origin.
        legacy: The aliases of the run type.
    """
    origins = {join_path(path): source for path, _ in iter_leaves(tree)}
    for override in overrides:
        given: Path = tuple(override.key_or_group.split("."))
        value = override.value()
        if override.is_delete():
            _remove(origins, join_path(legacy.resolve_alias(given)))
            continue
        for path, _ in iter_leaves(value, given) if isinstance(value, dict) and value else [(given, value)]:
            target = legacy.resolve_alias(path)
            _remove(origins, join_path(target))
            origins[join_path(target)] = COMMAND_LINE if target == path else f"{COMMAND_LINE}, as {join_path(path)}"
    return origins


def find_origin(origins: Mapping[str, str], key: str) -> str:
    """Return the origin of a setting, or all origins of the entries of a dictionary."""
    given = dict.fromkeys(origin for name, origin in origins.items() if f"{name}.".startswith(f"{key}."))
    return "; ".join(given) or DEFAULT


def _remove(origins: dict[str, str], key: str) -> None:
    for name in [name for name in origins if f"{name}.".startswith(f"{key}.")]:
        del origins[name]
