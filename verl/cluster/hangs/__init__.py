"""Hang detection. Every call to another process is tracked with its target and deadline (`pending_calls`); a watchdog
thread in each process looks for late ones (`detector`). Workers send theirs to the controller through the registry
actor (`registry`), which inspects the processes involved (`process_info`), names the cause and writes a report
(`report`).

Imported by cluster, workers and trainer; imports config, errors and redaction only.
"""

from verl.cluster.hangs.deadlines import DEFAULT_DEADLINES, MARGIN_S, UNLIMITED_S, Deadline, Deadlines
from verl.cluster.hangs.pending_calls import CallTarget, HeartbeatMonitor, Progress, format_report_hint, track_call
from verl.cluster.hangs.registry import register_actor, report_failed_call, report_restart, watch_for_hangs

__all__ = [
    "DEFAULT_DEADLINES",
    "MARGIN_S",
    "UNLIMITED_S",
    "CallTarget",
    "Deadline",
    "Deadlines",
    "HeartbeatMonitor",
    "Progress",
    "format_report_hint",
    "register_actor",
    "report_failed_call",
    "report_restart",
    "track_call",
    "watch_for_hangs",
]
