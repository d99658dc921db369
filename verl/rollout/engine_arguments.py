"""Checks of `engine_kwargs`, the arguments that a user gives to an engine directly. Imports no engine."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from verl.config.checks.conflict import Conflict


@dataclass(frozen=True, slots=True)
class ArgumentRules:
    """Which arguments of an engine a user may set.

    Attributes:
        key: The setting that holds the arguments.
        description: What an argument is, as in "an engine argument of the installed vLLM".
        settings: Arguments that have a setting of their own, which is validated.
        reserved: Arguments whose values verl depends on.
        unsupported: Arguments that are refused, unless they are off, and why.
    """

    key: str
    description: str
    settings: Mapping[str, str]
    reserved: Collection[str]
    unsupported: Mapping[str, str] = field(default_factory=dict)

    def find_conflicts(self, arguments: Mapping[str, Any], known: Collection[str]) -> Iterator[Conflict]:
        """Yield arguments that must not be set, and those that are not in `known`, which is empty if unknown."""
        for name, value in arguments.items():
            key = f"{self.key}.{name}"
            if name in self.settings:
                yield Conflict(key, "has its own setting", f"set {self.settings[name]} instead")
            elif name in self.reserved:
                yield Conflict(key, "is set by verl and cannot be changed", "remove it")
            elif name in self.unsupported:
                if not _is_off(value):
                    yield Conflict(key, self.unsupported[name], "remove it")
            elif known and name not in known:
                yield Conflict(key, f"is not {self.description}", self._suggest(name, known))

    def _suggest(self, name: str, known: Collection[str]) -> str:
        allowed = [other for other in known if other not in (*self.reserved, *self.unsupported)]
        close = get_close_matches(name, allowed, n=1, cutoff=0.75)
        return f"did you mean {self.settings.get(close[0], f'{self.key}.{close[0]}')}?" if close else "remove it"


def read_fields(source: Path, classes: Collection[str] | None = None) -> frozenset[str]:
    """Return the annotated fields of the classes of a module, all or those named, without importing it."""
    return frozenset(
        statement.target.id
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and (classes is None or node.name in classes)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )


def _is_off(value: object) -> bool:
    """Return whether an argument with this value is not used: a switch, a size or a name."""
    return value is None or value is False or (value is not True and value in (1, "auto", "null", "off"))
