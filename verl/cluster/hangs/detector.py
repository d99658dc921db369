"""The watchdog: says who waits for whom since when, and writes down where everybody stands when a deadline has passed.

Each process has one, a thread of its own, so that it also sees when the event loop is blocked. Those of workers tell
the controller's (`census.py`), which alone speaks on the console and writes the reports.
"""

from __future__ import annotations

import faulthandler
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verl.cluster.hangs.pending_calls import CallTarget, Deadline, PendingCall, PendingCalls, format_targets
from verl.cluster.hangs.process_info import ProcessInfo
from verl.redaction import redact

__all__ = ["HangDetector", "ProcessInspector", "ProcessLocation", "Reporter", "StalledCall", "Watchdog", "diagnose"]

TICK_S = 0.5
SAID_AGAIN_S = 600.0
_FEW, _PAUSE_S = 8, 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessLocation:
    """Where a process is: on which node of the cluster, and which process there."""

    pid: int
    node: str
    host: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True)
class StalledCall:
    """Waits of one process for one thing, past half of their deadline or all of it."""

    waiter: str
    action: str
    targets: tuple[CallTarget, ...]
    age_s: float
    since: float  # by the wall clock
    deadline: Deadline
    over: bool
    peers: int = 0  # how many were asked the same: those who are no owners any more have answered
    table: tuple[str, ...] = ()  # all waits of the process, one a line
    evidence: str = ""  # what is known already, where nobody has to be asked

    def words(self) -> str:
        began = time.strftime("%H:%M:%S", time.localtime(self.since))
        targets = format_targets(self.targets)
        return f"{self.waiter} has waited {self.age_s:.0f} s, since {began}, for {targets} to {self.action}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> StalledCall:
        targets = tuple(CallTarget(*target) for target in found["targets"])
        return cls(
            **{**found, "targets": targets, "deadline": Deadline(*found["deadline"]), "table": tuple(found["table"])}
        )


class HangDetector:
    """Finds the waits of one process that are worth a word, once each. Knows only its clock."""

    def __init__(self, waits: PendingCalls, waiter: str) -> None:
        self._waits, self._waiter = waits, waiter
        self._over: set[tuple[str, CallTarget]] = set()
        self._said: dict[tuple[str, CallTarget], float] = {}

    def look(self) -> list[StalledCall]:
        """What has come to be late since the last look. Waits for several of a kind to do the same are one."""
        now, waits = self._waits.clock(), self._waits.active()
        over, half = (
            {(w.action, w.target) for w in waits if w.remaining_s <= share * w.deadline.seconds} for share in (0.0, 0.5)
        )
        risen = over - self._over
        self._over = over
        kinds = {(action, target.kind) for action, target in risen}
        risen |= {
            (w.action, w.target) for w in waits if (w.action, w.target.kind) in kinds and w.remaining_s <= 2 * TICK_S
        }
        self._over |= risen
        slow = {key for key in half - over - risen if now - self._said.get(key, float("-inf")) > SAID_AGAIN_S}
        self._said |= dict.fromkeys(slow, now)
        return [*self._late(waits, risen, True), *self._late(waits, slow, False)]

    def _late(self, waits: Sequence[PendingCall], keys: set[tuple[str, CallTarget]], over: bool) -> list[StalledCall]:
        groups: dict[tuple[str, str], list[PendingCall]] = {}
        for wait in waits:
            if (wait.action, wait.target) in keys:
                groups.setdefault((wait.action, wait.target.kind), []).append(wait)
        table = format_pending(self._waiter, waits)
        return [self._of(group, over, table) for group in groups.values()]

    def _of(self, group: Sequence[PendingCall], over: bool, table: tuple[str, ...]) -> StalledCall:
        oldest = max(group, key=lambda wait: wait.elapsed_s)
        return StalledCall(
            waiter=self._waiter,
            action=oldest.action,
            targets=tuple(sorted({wait.target for wait in group})),
            age_s=oldest.elapsed_s,
            since=time.time() - oldest.elapsed_s,
            deadline=oldest.deadline,
            over=over,
            peers=oldest.peers,
            table=table,
        )


def format_pending(waiter: str, waits: Sequence[PendingCall]) -> tuple[str, ...]:
    """All waits of a process as lines of a table; those for the same thing of the same owner are one line."""
    groups: dict[tuple[str, CallTarget], list[PendingCall]] = {}
    for wait in waits:
        groups.setdefault((wait.action, wait.target), []).append(wait)
    lines = []
    for (action, target), group in groups.items():
        oldest = max(group, key=lambda wait: wait.elapsed_s)
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - oldest.elapsed_s))
        many = f" ({len(group)} times)" if len(group) > 1 else ""
        lines.append(
            f"{waiter:<18}  {target!s:<22}  {action + many:<30}  {since}  {oldest.elapsed_s:7.0f} s  {oldest.deadline}"
        )
    return tuple(lines)


class Watchdog:
    """The thread that looks. What `report` returns, the place of a report, is told to whoever waits."""

    def __init__(
        self,
        waits: PendingCalls,
        waiter: str,
        report: Callable[[StalledCall], str],
        also: Callable[[], None] = lambda: None,
    ) -> None:
        self._waits, self._heed, self._also = waits, report, also
        self._lookout = HangDetector(waits, waiter)
        self._reports: dict[tuple[str, str], str] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verl-watchdog", daemon=True)

    def start(self) -> None:
        self._waits.is_watched = True
        self._thread.start()

    def close(self) -> None:
        self._waits.is_watched = False
        self._ending.set()
        self._thread.join()

    def look(self) -> None:
        """Tell of what is late now; whoever waits for it learns where the report is."""
        for late in self._lookout.look():
            report = self._heed(late)
            if late.over:
                self._reports[late.action, late.targets[0].kind] = report
        for wait in self._waits.active():
            if wait.remaining_s <= 2 * TICK_S and not wait.report:
                wait.report = self._reports.get((wait.action, wait.target.kind), "")
        self._also()

    def _run(self) -> None:
        while not self._ending.wait(TICK_S):
            try:
                self.look()
            except Exception:  # noqa: BLE001 - what it could not say must not end what it watches
                _log.exception("the watchdog could not tell of a wait")
                self._ending.wait(_PAUSE_S)


class ProcessInspector(Protocol):
    """Who can say where the processes are, and where they stand."""

    def places(self, targets: Sequence[CallTarget]) -> dict[CallTarget, ProcessLocation]: ...
    def look(self, places: Mapping[CallTarget, ProcessLocation]) -> dict[CallTarget, list[ProcessInfo]]: ...


@dataclass
class Reporter:
    """Speaks for all watchdogs of a run, and writes the reports: `<folder>/<time>.txt`."""

    folder: Path
    say: Callable[[str], None]
    warn: Callable[[str], None]
    witnesses: ProcessInspector
    own_table: Callable[[], Sequence[str]] = field(default=tuple)

    def report(self, late: StalledCall) -> str:
        """Say it; of one past its deadline, write the report and return where it is."""
        if not late.over:
            self.say(f"{late.words()}; it gives up after {late.deadline.seconds:g} s ({late.deadline})")
            return ""
        places = self.witnesses.places(late.targets)
        seen = self.witnesses.look(places) if not late.evidence else {}
        found = [late.evidence] if late.evidence else diagnose(late, places, seen)
        path = self._write(late, found, places, seen)
        first = found[0].splitlines()[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        self.warn(f"{late.words()}: that is its deadline ({late.deadline}). {first}{more}. The whole report: {path}")
        return path

    def _write(
        self,
        late: StalledCall,
        found: Sequence[str],
        places: Mapping[CallTarget, ProcessLocation],
        seen: Mapping[CallTarget, Sequence[ProcessInfo]],
    ) -> str:
        now = time.time()
        parts = [
            time.strftime("%Y-%m-%d %H:%M:%S: ", time.localtime(now))
            + f"{late.words()}; its deadline: {late.deadline}",
            "\n".join(["What was found", *(f"  {line}" for line in found)]),
            "\n".join(
                [
                    "Who waits, for whom, to do what, since when, for how long, until when",
                    *(f"  {line}" for line in dict.fromkeys((*self.own_table(), *late.table))),
                ]
            ),
        ]
        for target in late.targets:
            place = places.get(target)
            head = f"{target}: {place}" if place else f"{target}: {_unseen(target)}"
            parts.append("\n".join([head, *(one.page() for one in seen.get(target, ()))]))
        parts.append(f"this process, which runs the watchdog\n{_own_stacks()}")
        self.folder.mkdir(parents=True, exist_ok=True)
        stamp = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{int(now % 1 * 1000):03d}"
        path = self.folder / f"{stamp}.txt"
        path.write_text(redact("\n\n".join(parts)) + "\n")
        return str(path)


def diagnose(
    late: StalledCall, places: Mapping[CallTarget, ProcessLocation], seen: Mapping[CallTarget, Sequence[ProcessInfo]]
) -> list[str]:
    """What the stacks and states say, in sentences; the most telling first."""

    def named(target: CallTarget) -> str:
        return f"{target} ({places[target]})" if target in places else str(target)

    broken = [
        f"{named(target)} {one.words()}"
        if one.pid == places[target].pid
        else f"{named(target)}: its child process {one.pid} ({one.name}) {one.words()}"
        for target, processes in seen.items()
        for one in processes
        if one.is_frozen or (one.is_gone and one.pid == places[target].pid)
    ]
    absent = [
        f"{named(target)}: " + ("its node does not answer" if target in places else _unseen(target))
        for target in late.targets
        if not seen.get(target)
    ]
    whole = {target: found for target, found in seen.items() if found and not any(one.is_frozen for one in found)}
    inside = {target: frame for target, found in whole.items() for one in found if (frame := one.collective)}
    outside = [target for target in whole if target not in inside]
    kind = late.targets[0].kind
    answered = [target for n in range(late.peers) if (target := CallTarget(kind, n)) not in late.targets]
    lines = broken + absent
    if inside:
        wait = f"{format_targets(list(inside))} wait{'s' if len(inside) == 1 else ''}"
        missed = f"misses the collective in which {wait}"
        lines += [f"{named(target)} {missed}: it {whole[target][0].words()}" for target in outside[:_FEW]]
        lines += [f"{format_targets(answered)} {missed}: it has answered already"] if answered else []
        lines += [f"{wait} in {next(iter(inside.values()))}"]
    else:
        lines += [f"{named(target)} {whole[target][0].words()}" for target in outside[:_FEW]]
    return lines


def _unseen(target: CallTarget) -> str:
    return "it does not answer" if target.number is None else "its process has not come up"  # a file system has none


def _own_stacks() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
