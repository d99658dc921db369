"""Finds calls that are past half of their timeout or all of it, in a thread, since event loops may be blocked."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from verl.cluster.hangs.pending_calls import CallTarget, PendingCall, PendingCalls, Timeout, format_targets

TICK_S = 0.5
REPEAT_S = 600.0  # a call that is slow every time is mentioned this often
_PAUSE_S = 10.0

_log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class StalledCall:
    """Calls of one process with the same action to targets of one kind, past half of their timeout or all of it."""

    caller: str
    action: str
    targets: tuple[CallTarget, ...]
    elapsed_s: float
    since: float  # wall-clock time
    timeout: Timeout
    is_overdue: bool
    peers: int = 0  # size of the group that got the call; members that are not among the targets have returned
    pending: tuple[str, ...] = ()  # all pending calls of the caller, formatted
    cause: str = ""  # if known, no process is inspected

    def describe(self) -> str:
        started = time.strftime("%H:%M:%S", time.localtime(self.since))
        targets = format_targets(self.targets)
        return f"{self.caller} has waited {self.elapsed_s:.0f} s, since {started}, for {targets} to {self.action}"


class HangDetector:
    """Finds newly stalled calls among the pending ones. Depends on nothing but their clock."""

    def __init__(self, calls: PendingCalls, caller: str) -> None:
        self._calls, self._caller = calls, caller
        self._overdue: set[tuple[str, CallTarget]] = set()
        self._mentioned: dict[tuple[str, CallTarget], float] = {}

    def poll(self) -> list[StalledCall]:
        """Return what has stalled since the last poll, each once; calls to several targets of a kind are one."""
        now, was_overdue, self._overdue = self._calls.clock(), self._overdue, set()
        overdue, slow = [], []
        for group in _group_by(self._calls.list_calls(), lambda call: (call.action, call.target.kind)).values():
            expired = [call for call in group if call.remaining_s <= 0]
            if any(call.key not in was_overdue for call in expired):
                # Ranks are called one after the other: calls about to expire belong to the same report.
                expired = [call for call in group if call.remaining_s <= 2 * TICK_S]
                overdue.append(self._summarize(expired, is_overdue=True))
            self._overdue |= {call.key for call in expired}
            late = [
                call
                for call in group
                if call.remaining_s <= call.timeout.seconds / 2
                and call.key not in self._overdue
                and now - self._mentioned.get(call.key, float("-inf")) > REPEAT_S
            ]
            if late:
                self._mentioned |= {call.key: now for call in late}
                slow.append(self._summarize(late, is_overdue=False))
        return overdue + slow

    def _summarize(self, calls: Sequence[PendingCall], is_overdue: bool) -> StalledCall:
        oldest = max(calls, key=lambda call: call.elapsed_s)
        return StalledCall(
            caller=self._caller,
            action=oldest.action,
            targets=tuple(sorted({call.target for call in calls})),
            elapsed_s=oldest.elapsed_s,
            since=time.time() - oldest.elapsed_s,
            timeout=oldest.timeout,
            is_overdue=is_overdue,
            peers=oldest.peers,
            pending=format_pending(self._caller, self._calls),
        )


def format_pending(caller: str, calls: PendingCalls) -> tuple[str, ...]:
    """Return pending calls as lines of a table; the same calls to the same target share a line."""
    lines = []
    for (action, target), group in _group_by(calls.list_calls(), lambda call: call.key).items():
        oldest = max(group, key=lambda call: call.elapsed_s)
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - oldest.elapsed_s))
        count = f" ({len(group)} times)" if len(group) > 1 else ""
        lines.append(
            f"{caller:<18}  {target!s:<22}  {action + count:<30}  {since}  {oldest.elapsed_s:7.0f} s  {oldest.timeout}"
        )
    return tuple(lines)


def _group_by(calls: Sequence[PendingCall], key: Callable[[PendingCall], K]) -> dict[K, list[PendingCall]]:
    groups: dict[K, list[PendingCall]] = {}
    for call in calls:
        groups.setdefault(key(call), []).append(call)
    return groups


class Watchdog:
    """The thread that polls a detector. `report` handles a stalled call and returns the path of its report."""

    def __init__(
        self,
        calls: PendingCalls,
        caller: str,
        report: Callable[[StalledCall], str],
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._calls, self._report, self._on_tick = calls, report, on_tick
        self._detector = HangDetector(calls, caller)
        self._reports: dict[tuple[str, str], str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verl-watchdog", daemon=True)

    def start(self) -> None:
        self._calls.is_watched = True
        self._thread.start()

    def close(self) -> None:
        self._calls.is_watched = False
        self._stop.set()
        self._thread.join()

    def tick(self) -> None:
        """Report newly stalled calls, and set the path of the report on all calls that it covers."""
        for stalled in self._detector.poll():
            path = self._report(stalled)
            if stalled.is_overdue:
                self._reports[stalled.action, stalled.targets[0].kind] = path
        for call in self._calls.list_calls():
            if call.remaining_s <= 2 * TICK_S and not call.report:
                call.report = self._reports.get((call.action, call.target.kind), "")
        self._on_tick()

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            try:
                self.tick()
            except Exception:  # noqa: BLE001 - a failed report must not stop the run
                _log.exception("The watchdog failed to report a stalled call")
                self._stop.wait(_PAUSE_S)
