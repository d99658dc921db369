"""A tool class of show-episodes, which counts its sessions. Its calls take a random time."""

from __future__ import annotations

import asyncio
from typing import Any


class Notebook:
    """Keeps the notes of an episode."""

    opened: dict[str, list[str]] = {}  # noqa: RUF012 - shared on purpose: all sessions of the process
    sessions = 0

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None) -> None:
        self._scale_s = float(config["scale_s"])

    async def create(self, instance_id: str) -> None:
        Notebook.sessions += 1
        Notebook.opened[instance_id] = []

    async def execute(self, instance_id: str, parameters: dict[str, Any]) -> str:
        notes = Notebook.opened[instance_id]
        await asyncio.sleep(self._scale_s * float(parameters["delay"]))
        notes.append(str(parameters["delay"]))
        return f"{len(notes)} notes"

    async def release(self, instance_id: str) -> None:
        del Notebook.opened[instance_id]
