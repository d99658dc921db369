"""A console that records its messages instead of printing them."""

from __future__ import annotations

import io

import rich.console

from verl.tracking.console import Console


class RecordingConsole(Console):
    def __init__(self) -> None:
        super().__init__(out=rich.console.Console(file=io.StringIO()))
        self.messages: list[str] = []

    def note(self, text: str) -> None:
        self.messages.append(text)

    advice = note
