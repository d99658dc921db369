"""Answers to keys of launch scripts that are not settings here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from verl.config.paths import format_value

Kind = Literal["always on", "ignored", "needs"]


@dataclass(frozen=True, slots=True)
class KeyRule:
    """The answer to one key, or to all keys of a section.

    Attributes:
        kind: Whether the key asks for what is always done here, has no effect on results, or needs a missing feature.
        text: The reason why the key is accepted, or the name of the missing feature.
        harmless: Values with which the key needs no feature, as `format_value` writes them.
        instead: The setting to use in place of a refused key, or a sentence that begins with `use`.
    """

    kind: Kind
    text: str
    harmless: tuple[str, ...] = ()
    instead: str = ""

    def refuses(self, value: Any) -> bool:
        """Whether the key with this value needs a feature that is missing."""
        return self.kind == "needs" and format_value(value).lower() not in (*self.harmless, "null", "")

    def describe(self, key: str, value: Any) -> str:
        """Return the problem, or the hint, about a key with a value."""
        shown = format_value(value)
        if self.refuses(value):
            fix = self.instead or "remove it"
            fix = fix if fix.startswith(("use ", "remove ")) else f"set {fix} instead"
            fix += f", or set {key}={self.harmless[0]}" if self.harmless else ""
            return f"{key}: {shown} requires {self.text}, which is not supported yet; {fix}"
        reason = {
            "always on": f"always on here: {self.text}",
            "ignored": self.text,
            "needs": f"it turns off {self.text}, which is not supported yet",
        }[self.kind]
        return f"{key}={shown} has no effect: {reason}"
