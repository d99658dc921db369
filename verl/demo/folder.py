"""Paths of the demo's files. Imports nothing heavy, so that settings are checked at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RESPONSE_LENGTH = 4
"""Three digits and the end token."""


@dataclass(frozen=True, slots=True)
class Assets:
    """Paths of the demo's files."""

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
