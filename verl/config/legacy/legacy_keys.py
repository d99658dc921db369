"""The tables of legacy keys, and how the keys and values of a launch script are looked up in them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path as File
from typing import Any, NamedTuple

from verl.config.legacy.key_rules import KeyRule, Kind
from verl.config.paths import Path, Tree, format_value, iter_leaves, join_path, set_path

_OFF = ("false", "0", "none", "disabled")
_GROUP = re.compile(r"\{([^{}]+,[^{}]+)\}")
_STEPS = re.compile(r"global_steps_(\d+)")


class OtherDefault(NamedTuple):
    """The default of a setting where a launch script comes from.

    `is_kept` says whether a migrated command sets it, since a run would otherwise give other results or speed.
    """

    value: str
    reason: str
    is_kept: bool = True


@dataclass(frozen=True, slots=True)
class LegacyKeys:
    """The legacy keys of one run type. An entry of a section is valid for all keys below it; the longest match wins.

    Attributes:
        aliases: Alias -> canonical key.
        sections: Short name of a section -> section; these are aliases too.
        value_aliases: Canonical key -> alias of a value, as `format_value` writes it -> canonical value.
        unset_by_null: Settings that cannot be null; where launch scripts set them to null, they are not given.
        rules: Key that is not a setting -> answer.
        refused_values: Setting or section -> pattern of values -> the missing feature that they need.
        default_choices: Section -> members of Hydra's config groups that are what verl does anyway.
        defaults: Setting -> its default in launch scripts.
    """

    aliases: Mapping[str, str]
    sections: Mapping[str, str]
    value_aliases: Mapping[str, Mapping[str, Any]]
    unset_by_null: frozenset[str]
    rules: Mapping[str, KeyRule]
    refused_values: Mapping[str, Mapping[str, str]]
    default_choices: Mapping[str, Sequence[str]]
    defaults: Mapping[str, OtherDefault]

    def resolve_alias(self, path: Path) -> Path:
        """Return the canonical path of an alias, and any other path unchanged."""
        for _ in range(len(self.aliases)):  # a canonical key may start with another alias: actor.lora_rank
            for length in range(len(path), 0, -1):
                target = self.aliases.get(join_path(path[:length]))
                if target is not None:
                    path = (*target.split("."), *path[length:])
                    break
            else:
                return path
        raise AssertionError(f"the aliases of {join_path(path)} are circular")

    def canonicalize(self, path: Path, value: Any, hints: list[str]) -> tuple[Path, Any]:
        """Return the canonical path and value of a setting, and add a hint for each alias but short section names."""
        target = self.resolve_alias(path)
        if target != path and target != (*self.sections.get(path[0], "").split("."), *path[1:]):
            hints.append(f"{join_path(path)} is an alias of {join_path(target)}")
        return target, self._canonicalize_value(join_path(target), value, hints)

    def canonicalize_tree(self, tree: Mapping[str, Any], hints: list[str], problems: list[str]) -> Tree:
        """Return the same settings under their canonical keys; one setting with two values is a problem."""
        result: Tree = {}
        seen: dict[Path, tuple[Path, Any]] = {}
        for path, value in iter_leaves(tree):
            target, meant = self.canonicalize(path, value, hints)
            if self.unsets(target, meant):
                continue
            if target in seen and seen[target][1] != meant:
                first, other = seen[target]
                key, new, old = join_path(target), format_value(meant), format_value(other)
                problems.append(
                    f"{join_path(path)}: {new} contradicts {join_path(first)}={old}: both are {key}; keep only "
                    f"{key}={new}"
                )
            seen[target] = (path, meant)
            set_path(result, target, meant)
        return result

    def unsets(self, path: Path, value: Any) -> bool:
        """Whether the value of a canonical path means that the setting is not given."""
        return value is None and join_path(path) in self.unset_by_null

    def find_rule(self, path: Path) -> KeyRule | None:
        """Return the answer to a key; None if there is none."""
        if path[-1] == "_target_":
            return KeyRule("ignored", "names a class of another implementation")
        keys = (join_path(path[:length]) for length in range(len(path), 0, -1))
        return next((self.rules[key] for key in keys if key in self.rules), None)

    def find_refused_value(self, path: Path, value: Any) -> str | None:
        """Return the problem of a setting or section whose value needs a missing feature."""
        key = join_path(path)
        for pattern, feature in self.refused_values.get(key, {}).items():
            if re.fullmatch(pattern, str(value)):
                return KeyRule("needs", feature).describe(key, value)
        return None

    def is_default_choice(self, path: Path, value: Any) -> bool:
        """Whether a section is given a member of a config group that needs nothing."""
        return value in self.default_choices.get(join_path(path), ())

    def _canonicalize_value(self, key: str, value: Any, hints: list[str]) -> Any:
        known = self.value_aliases.get(key, {})
        meant: Any
        if isinstance(value, list):
            meant = [known.get(item, item) if isinstance(item, str) else item for item in value]
        elif isinstance(value, str | bool | int):
            meant = known.get(format_value(value), value)
        else:
            return value
        if key == "trainer.resume_from_path" and isinstance(value, str) and not File(value).expanduser().exists():
            meant = _STEPS.sub(r"global_step_\1", value)
        if meant != value:
            hints.append(f"{key}={format_value(value)} is an alias of {key}={format_value(meant)}")
        return meant


class _Tables:
    """The content of a TOML file of this folder, in the notation that is described at the top of train_keys.toml."""

    def __init__(self, name: str) -> None:
        self.content = tomllib.loads(File(__file__).with_name(name).read_text(encoding="utf-8"))
        self.sections: dict[str, str] = self.content.get("sections", {})

    def expand(self, pattern: str, *texts: str) -> Iterator[list[str]]:
        """Yield each key of a pattern, followed by the texts about it."""
        number = count(1)
        template = _GROUP.sub(lambda _: f"{{{next(number)}}}", pattern)
        for choice in product(*(group.split(",") for group in _GROUP.findall(pattern))):
            key, *filled = (text.format("", *choice) for text in (template, *texts))
            yield [self.expand_section(key), *filled]

    def expand_section(self, key: str) -> str:
        """Return a key with its first section written in full."""
        first, dot, rest = key.partition(".")
        return self.sections.get(first, first) + dot + rest

    def read(self, table: str) -> dict[str, Any]:
        """Return key -> entry."""
        entries = self.content.get(table, {}).items()
        return {key: entry for pattern, entry in entries for (key,) in self.expand(pattern)}

    def read_rules(self, table: str, kind: Kind) -> dict[str, KeyRule]:
        """Return key -> answer."""
        rules = {}
        for text, entries in self.content.get(table, {}).items():
            for entry in [entries] if isinstance(entries, str) else entries:
                left, _, instead = entry.partition(" -> ")
                pattern, _, values = left.partition("=")
                harmless = _OFF if values == "off" else tuple(filter(None, values.split("|")))
                for key, reason, other in self.expand(pattern, text, instead):
                    rules[key] = KeyRule(kind, reason, harmless, self.expand_section(other))
        return rules


def read_legacy_keys(name: str) -> LegacyKeys:
    """Return the legacy keys of one run type from its file."""
    tables = _Tables(name)
    aliases = (pair for alias, key in tables.content["aliases"].items() for pair in tables.expand(alias, key))
    switches = tables.read_rules("switches", "needs")
    switched = {
        key.rpartition(".")[0]: KeyRule("ignored", f"{key} turns on {rule.text}, which is not supported yet")
        for key, rule in switches.items()
    }
    kept, others = tables.read("kept_defaults"), tables.read("other_defaults")
    return LegacyKeys(
        aliases=tables.sections | {alias: tables.expand_section(key) for alias, key in aliases},
        sections=tables.sections,
        value_aliases={
            key: {alias: None if value == "null" else value for alias, value in values.items()}
            for key, values in tables.read("value_aliases").items()
        },
        unset_by_null=frozenset(tables.read("unset_by_null")),
        rules={
            **tables.read_rules("always_on", "always on"),
            **tables.read_rules("ignored", "ignored"),
            **tables.read_rules("needs", "needs"),
            **switched,
            **switches,
        },
        refused_values=tables.read("refused_values"),
        default_choices=tables.read("default_choices"),
        defaults={
            **{key: OtherDefault(value, reason) for key, (value, reason) in kept.items()},
            **{key: OtherDefault(value, reason, is_kept=False) for key, (value, reason) in others.items()},
        },
    )


TRAIN_KEYS = read_legacy_keys("train_keys.toml")
SFT_KEYS = read_legacy_keys("sft_keys.toml")
