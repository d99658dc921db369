"""Trees of settings: a tree is nested dicts, a path is a tuple of names, a key is a path joined by dots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from verl.config.schema import Config, Section, Setting, collect_settings

Path = tuple[str, ...]
Tree = dict[str, Any]

_SIMILAR = 0.75  # minimum similarity of the last names of two keys
_SAME = 0.85  # similarity above which they are the same name with a typo
_LAST_WEIGHT = 0.65  # weight of the last name, against the full key
_BONUS = 0.05  # for keys that are supported, and for keys of the policy
_SECURITY = ("trust_remote_code", "require")


def join_path(path: Path) -> str:
    """Return the key of a path."""
    return ".".join(str(name) for name in path)


def iter_leaves(tree: Mapping[Any, Any], parent: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value that is not a non-empty dict, with its path."""
    for name, value in tree.items():
        path = (*parent, name)
        if isinstance(value, Mapping) and value:
            yield from iter_leaves(value, path)
        else:
            yield path, value


def set_path(tree: Tree, path: Path, value: Any) -> None:
    """Set `value` at `path`, creating dicts as needed; a dict is merged, anything else replaces the old value."""
    for name in path[:-1]:
        below = tree.get(name)
        if not isinstance(below, dict):
            below = tree[name] = {}
        tree = below
    if isinstance(value, Mapping) and isinstance(tree.get(path[-1]), dict):
        for below_path, leaf in iter_leaves(value):
            set_path(tree[path[-1]], below_path, leaf)
    else:
        tree[path[-1]] = value


def delete_path(tree: Tree, path: Path) -> bool:
    """Delete the value at `path`, and dicts above it that become empty; return whether there was one."""
    name, *rest = path
    if name not in tree:
        return False
    if rest:
        if not isinstance(tree[name], dict) or not delete_path(tree[name], tuple(rest)):
            return False
        if tree[name]:
            return True
    del tree[name]
    return True


def get_path(tree: Any, path: Path) -> Any:
    """Return the value at `path` of a tree or a `Config`; None if there is none."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else getattr(tree, name, None)
    return tree


def find_setting(path: Path, root: type[Section] = Config) -> Setting | None:
    """Return the setting at `path`, or the open dictionary that contains it; None if the key is unknown."""
    settings = collect_settings(root)
    for length in range(len(path), 0, -1):
        setting = settings.get(join_path(path[:length]))
        if setting is not None:
            return setting if length == len(path) or setting.open else None
    return None


def suggest_key(
    key: str,
    candidates: Iterable[str] | None = None,
    root: type[Section] = Config,
    accepts_value: Callable[[str], bool] = lambda candidate: True,
) -> str | None:
    """Return the known key that `key` was probably meant to be, compared by its last name first.

    A setting that does not accept the given value is suggested only if its name is nearly the same. Settings that
    decide what code may run are never suggested.
    """
    settings = collect_settings(root)
    if candidates is None:
        candidates = [setting.key for setting in settings.values() if setting.section is None]
    full, last = SequenceMatcher(b=key), SequenceMatcher(b=key.rpartition(".")[2])
    ranked: list[tuple[float, float, str]] = []
    for candidate in candidates:
        name = candidate.rpartition(".")[2]
        last.set_seq1(name)
        if name in _SECURITY or last.real_quick_ratio() < _SIMILAR or (similarity := last.ratio()) < _SIMILAR:
            continue
        full.set_seq1(candidate)
        is_supported = candidate in settings and settings[candidate].planned_parent is None
        bonus = _BONUS * (is_supported + candidate.startswith("actor_rollout_ref."))
        ranked.append((_LAST_WEIGHT * similarity + (1 - _LAST_WEIGHT) * full.ratio() + bonus, similarity, candidate))
    ranked.sort(key=lambda item: (-item[0], item[2]))
    return next((key for _, same, key in ranked if same >= _SAME or accepts_value(key)), None)


def format_value(value: Any) -> str:
    """Return a value as it is written in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(format_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{format_value(item)}" for name, item in value.items()) + "}"
    return str(value)
