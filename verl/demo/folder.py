"""Where the demo's files are. Imports nothing, so that the settings can be checked at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["ANSWER_LENGTH", "Assets"]

ANSWER_LENGTH = 4
"""Three digits and the end token."""


@dataclass(frozen=True, slots=True)
class Assets:
    """Where the demo's files are."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def train(self) -> Path:
        return self.folder / "train.parquet"

    @property
    def test(self) -> Path:
        return self.folder / "test.parquet"
