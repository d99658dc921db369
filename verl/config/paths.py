"""Keys and trees: a tree of settings is nested dicts, a path is a tuple of names, a key is a path joined by dots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from verl.config.schema import Config, Section, Setting, collect_settings

__all__ = [
    "Path",
    "Tree",
    "delete_path",
    "find_setting",
    "format_value",
    "get_path",
    "iter_leaves",
    "join_path",
    "set_path",
    "suggest_key",
]

Path = tuple[str, ...]
Tree = dict[str, Any]

_SIMILAR = 0.62  # below this, two keys have nothing to do with each other
_LAST = 0.65  # weight of the last name, against the whole key
_BUILT = 0.05  # of two keys that are equally like, the one that does something
_POLICY = 0.05  # and the policy's own, before those of the models beside it


def join_path(path: Path) -> str:
    return ".".join(str(name) for name in path)


def iter_leaves(tree: Mapping[Any, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is not a dict with something in it, with its path."""
    for name, value in tree.items():
        path = (*above, name)
        if isinstance(value, Mapping) and value:
            yield from iter_leaves(value, path)
        else:
            yield path, value


def set_path(tree: Tree, path: Path, value: Any) -> None:
    """Put `value` at `path`, making the dicts on the way; a dict joins what is there, anything else replaces it."""
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
    """Take away what is at `path`, and the dicts above that become empty; False if nothing was there."""
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
    """The value at `path` of a tree or of a `Config`; None where there is none."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else getattr(tree, name, None)
    return tree


def find_setting(path: Path, root: type[Section] = Config) -> Setting | None:
    """The setting that `path` names, or the open dictionary that it lies in; None if the key is unknown."""
    known = collect_settings(root)
    found = known.get(join_path(path))
    if found is not None:
        return found
    for length in range(len(path) - 1, 0, -1):
        found = known.get(join_path(path[:length]))
        if found is not None:
            return found if found.open else None
    return None


def suggest_key(key: str, candidates: Iterable[str] | None = None, root: type[Section] = Config) -> str | None:
    """The known key that `key` was probably meant to be: like it in its last name first, then as a whole."""
    known = collect_settings(root)
    if candidates is None:
        candidates = [found.key for found in known.values() if found.section is None]
    whole, last = SequenceMatcher(b=key), SequenceMatcher(b=key.rpartition(".")[2])

    def end_likeness(candidate: str) -> float:
        last.set_seq1(candidate.rpartition(".")[2])
        return last.ratio()

    best, most = None, _SIMILAR
    for end, candidate in sorted(((end_likeness(candidate), candidate) for candidate in candidates), reverse=True):
        if _LAST * end + (1 - _LAST) + _BUILT + _POLICY < most:
            break  # no candidate from here on can be liker
        whole.set_seq1(candidate)
        built = candidate in known and known[candidate].planned_parent is None
        policy = candidate.startswith("actor_rollout_ref.")
        likeness = _LAST * end + (1 - _LAST) * whole.ratio() + _BUILT * built + _POLICY * policy
        if likeness > most:
            best, most = candidate, likeness
    return best


def format_value(value: Any) -> str:
    """A value as it is written in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(format_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{format_value(item)}" for name, item in value.items()) + "}"
    return str(value)
