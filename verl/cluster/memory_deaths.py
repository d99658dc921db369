"""Processes that Ray has ended because the memory of their machine was full: which machine, and what filled it."""

from __future__ import annotations

import asyncio
import re

from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayError

from verl.cluster.ray_private import find_memory_death

LARGEST = 3  # processes that are named
_WAITS_S = (0.0, 0.25, 0.75)
_NODE = re.compile(r"IP: ([^,]+),.*? was ([\d.]+)GB used / ([\d.]+)GB limit")
_PROCESS = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)


async def explain_death(error: RayError) -> str | None:
    """Return which machine's memory was full if that ended the process that did not reply; None if it did not.

    Calls to an actor that Ray starts again fail without a reason; Ray's record of the dead process, which may arrive a
    moment later, has it.
    """
    if isinstance(error, OutOfMemoryError):
        return summarize(str(error))
    if not isinstance(error, ActorUnavailableError) or error.actor_id is None:
        return None
    for seconds in _WAITS_S:
        await asyncio.sleep(seconds)
        if report := find_memory_death(error.actor_id):
            return summarize(report)
    return None


def summarize(report: str) -> str:
    """Return Ray's report of forty lines in one."""
    node = _NODE.search(report)
    where = f"the memory of node {node[1]} was full ({node[2]} of {node[3]} GiB)" if node else "the memory was full"
    processes = _PROCESS.findall(report)[:LARGEST]
    largest = ", ".join(f"{command.strip()[:60]} ({size} GiB, pid {pid})" for pid, size, command in processes)
    return f"Ray ended it because {where}" + (f"; the largest processes: {largest}" if largest else "")
