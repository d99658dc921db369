"""Trees of settings: a tree is nested dicts, a path is a tuple of names, a key is a path joined by dots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any, TypeVar

from verl.config.schema import Config, Section, Setting, collect_settings

Path = tuple[str, ...]
Tree = dict[str, Any]
S = TypeVar("S", bound=Section)

_SECURITY = {"trust_remote_code", "require"}


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


def get_value(config: Section, key: str) -> object:
    """Return the value of a setting by its dotted key."""
    return get_path(config, tuple(key.split(".")))


def with_changes(section: S, changes: Mapping[str, Any]) -> S:
    """Return a copy of frozen settings with some replaced, section by section."""
    update = {
        name: with_changes(getattr(section, name), value) if isinstance(value, Mapping) else value
        for name, value in changes.items()
    }
    return section.model_copy(update=update)


def change_settings(section: S, values: Mapping[str, Any]) -> S:
    """Return a copy of frozen settings with some values replaced, by their dotted keys."""
    tree: Tree = {}
    for key, value in values.items():
        set_path(tree, tuple(key.split(".")), value)
    return with_changes(section, tree)


def is_overridden(config: Section, key: str) -> bool:
    """Whether the setting has a value other than its default."""
    setting = collect_settings(type(config))[key]
    return setting.section is None and get_value(config, key) != setting.default


_OTHER_NAMES = {
    "data.train_batch_size": ("batch_size", "per_device_train_batch_size", "global_batch_size"),
    "data.max_response_length": ("max_new_tokens", "max_completion_length", "max_tokens"),
    "actor_rollout_ref.actor.optim.lr": ("learning_rate",),
    "actor_rollout_ref.rollout.n": ("num_generations", "group_size", "num_samples_per_prompt"),
    "actor_rollout_ref.model.path": ("model_name_or_path", "model_name", "pretrain"),
    "trainer.total_epochs": ("num_train_epochs", "num_epochs", "epochs", "max_epochs"),
    "trainer.total_training_steps": ("max_steps", "num_steps", "total_steps"),
    "trainer.default_local_dir": ("output_dir", "save_dir", "save_path"),
    "trainer.save_freq": ("save_steps", "save_interval"),
    "trainer.test_freq": ("eval_steps", "eval_freq", "eval_interval"),
}
"""Setting -> its names in other programs."""


def suggest_key(key: str, root: type[Section] = Config, aliases: Iterable[str] = ()) -> str | None:
    """Return the setting, or alias, that `key` was probably meant to be: one with nearly the same last name.

    Only a misspelled name, or a known name in a wrong section, is corrected: `ppo_micro_batch_size` is not meant to be
    `ppo_mini_batch_size`. Settings that decide what code may run are never suggested.
    """
    parent, _, last = key.rpartition(".")
    others = {
        name: setting for setting, names in _OTHER_NAMES.items() if setting in collect_settings(root) for name in names
    }
    if last in others:
        return others[last]
    by_name: dict[str, list[str]] = defaultdict(list)
    for known in (*(setting.key for setting in collect_settings(root).values() if setting.section is None), *aliases):
        by_name[known.rpartition(".")[2]].append(known)

    def rate(known: str) -> float:
        section, _, name = known.rpartition(".")
        similarity = 2 * SequenceMatcher(None, name, last).ratio() + SequenceMatcher(None, section, parent).ratio()
        return similarity + 0.2 * known.startswith("actor_rollout_ref.")  # the settings of the policy are used most

    words = {word for name in by_name for word in name.split("_") if len(word) > 2}

    def is_likely(known: str) -> bool:
        section, _, name = known.rpartition(".")
        if name == last:  # if several sections have the name: one that is spelled nearly the same, or the policy's
            is_near = SequenceMatcher(None, section, parent).ratio() > 0.8
            return is_near or len(by_name[name]) == 1 or known.startswith("actor_rollout_ref.")
        if SequenceMatcher(None, name, last).ratio() > 0.94:
            return True
        parts = name.split("_")
        unknown = [word for word in last.split("_") if word not in parts]  # a word with a meaning is not misspelled
        return bool(unknown) and all(word not in words or get_close_matches(word, parts, 1, 0.8) for word in unknown)

    close = get_close_matches(last, by_name.keys() - _SECURITY, n=5, cutoff=0.8)
    found = [known for name in close for known in by_name[name] if is_likely(known)]
    if found:
        return max(found, key=rate)
    return next((others[name] for name in get_close_matches(last, others, n=1, cutoff=0.9)), None)


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
