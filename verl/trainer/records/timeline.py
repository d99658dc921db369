"""Ray's timeline of tasks and actors, with the phases of the steps as one more process."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl.tracking.run_folder import Phase

_MICROSECONDS = 1e6


def add_phases(timeline: Path, phases: Iterable[Phase]) -> None:
    """Add the phases to a file in Chrome's trace format, one thread per worker; not those before its first event."""
    events: list[dict[str, Any]] = json.loads(timeline.read_text(encoding="utf-8"))
    begin = min((event["ts"] for event in events if "ts" in event), default=0.0)
    process = 1 + max((event["pid"] for event in events), default=-1)
    threads: dict[str, int] = {}
    for phase in phases:
        if phase.end * _MICROSECONDS < begin:
            continue
        thread = threads.setdefault(phase.worker, len(threads))
        place = {"pid": process, "tid": thread, "ts": phase.start * _MICROSECONDS}
        duration = (phase.end - phase.start) * _MICROSECONDS
        events.append({"ph": "X", "cat": "verl", "name": phase.name, **place, "dur": duration})
    events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": "verl: phases of the steps"}})
    for worker, thread in threads.items():
        events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": worker}})
    timeline.write_text(json.dumps(events), encoding="utf-8")
