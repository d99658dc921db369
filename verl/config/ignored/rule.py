"""What makes settings do nothing: one row of the tables beside this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["IgnoredRule"]


@dataclass(frozen=True, slots=True)
class IgnoredRule:
    """Settings that do nothing while `when` holds."""

    keys: tuple[str, ...]
    when: Callable[[Any], bool]
    why: str
    rests_on: tuple[str, ...]
