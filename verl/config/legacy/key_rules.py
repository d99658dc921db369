"""Answers to keys of launch scripts that are not settings here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from verl.config.paths import Path, format_value, join_path

Kind = Literal["always on", "ignored", "needs"]


@dataclass(frozen=True, slots=True)
class KeyRule:
    """The answer to one key, or to all keys of a section.

    `text` is the reason of a key that is accepted, and the name of the missing feature of one that is refused.
    """

    kind: Kind
    text: str
    harmless: tuple[str, ...] = ()
    """Values with which a refused key needs nothing, as `format_value` writes them."""
    instead: str = ""
    """The setting to use in place of a refused key, or a sentence that begins with `use`."""

    def refuses(self, value: Any) -> bool:
        """Whether the key with this value needs a feature that is missing."""
        return self.kind == "needs" and format_value(value).lower() not in self.harmless

    def describe(self, key: str, value: Any) -> str:
        """Return the problem, or the hint, about a key with a value."""
        shown = format_value(value)
        if self.refuses(value):
            harmless = [item for item in self.harmless if item not in ("null", "")]
            fix = self.instead or "remove it"
            fix = fix if fix.startswith(("use ", "remove ")) else f"set {fix} instead"
            fix += f", or set {key}={harmless[0]}" if harmless else ""
            return f"{key}: {shown} requires {self.text}, which is not supported yet; {fix}"
        if self.kind == "needs":
            return f"{key}={shown} has no effect: it turns off {self.text}, which is not supported yet"
        if self.kind == "always on":
            return f"{key}={shown} has no effect: always on here: {self.text}"
        return f"{key}={shown} has no effect: {self.text}"


class Rules(NamedTuple):
    """The answers of one run type.

    `keys` maps keys to answers: a key answers for all keys below it, and the longest match wins. `values` maps settings
    and sections to patterns of values that need a missing feature, with its name. `choices` maps sections to the
    members of Hydra's config groups that are what verl does anyway.
    """

    keys: Mapping[str, KeyRule]
    values: Mapping[str, Mapping[str, str]]
    choices: Mapping[str, tuple[str, ...]]


def always_on(reason: str) -> KeyRule:
    """Accept a key that asks for what is always done here."""
    return KeyRule("always on", reason)


def ignored(reason: str) -> KeyRule:
    """Accept a key that changes no results, or has no effect here."""
    return KeyRule("ignored", reason)


def missing(feature: str, *harmless: str, instead: str = "") -> KeyRule:
    """Refuse a key by the name of a missing feature, except with the `harmless` values."""
    return KeyRule("needs", feature, (*harmless, "null", ""), instead)


def switch(section: str, feature: str, name: str = "enable", instead: str = "") -> dict[str, KeyRule]:
    """Refuse a section of a missing feature if its switch is on; the other keys have no effect without the switch."""
    return {
        section: ignored(f"{section}.{name} turns on {feature}, which is not supported yet"),
        f"{section}.{name}": missing(feature, "false", instead=instead),
    }


def find_rule(path: Path, rules: Rules) -> KeyRule | None:
    """Return the answer to a key; None if there is none."""
    if path[-1] == "_target_":
        return ignored("names a class of another implementation")
    keys = (join_path(path[:length]) for length in range(len(path), 0, -1))
    return next((rules.keys[key] for key in keys if key in rules.keys), None)


def find_refused_value(path: Path, value: Any, rules: Rules) -> str | None:
    """Return the problem of a setting or section whose value needs a missing feature."""
    key = join_path(path)
    features = (name for pattern, name in rules.values.get(key, {}).items() if re.fullmatch(pattern, str(value)))
    feature = next(features, None)
    return None if feature is None else missing(feature).describe(key, value)


def is_default_choice(path: Path, value: Any, rules: Rules) -> bool:
    """Whether a section is given a member of a config group that needs nothing."""
    return value in rules.choices.get(join_path(path), ())
