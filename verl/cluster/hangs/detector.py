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

from verl.cluster.hangs.pending_calls import Deadline, Owner, Wait, Waits, together
from verl.cluster.hangs.process_info import Seen
from verl.redaction import redact

__all__ = ["HangDetector", "Late", "Place", "ProcessInspector", "Reporter", "Watchdog", "verdict"]

TICK_S = 0.5
SAID_AGAIN_S = 600.0
_FEW, _PAUSE_S = 8, 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is: on which node of the cluster, and which process there."""

    pid: int
    node: str
    host: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True)
class Late:
    """Waits of one process for one thing, past half of their deadline or all of it."""

    waiter: str
    what: str
    owners: tuple[Owner, ...]
    age_s: float
    since: float  # by the wall clock
    deadline: Deadline
    over: bool
    peers: int = 0  # how many were asked the same: those who are no owners any more have answered
    table: tuple[str, ...] = ()  # all waits of the process, one a line
    evidence: str = ""  # what is known already, where nobody has to be asked

    def words(self) -> str:
        began = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"{self.waiter} has waited {self.age_s:.0f} s, since {began}, for {together(self.owners)} to {self.what}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Late:
        owners = tuple(Owner(*owner) for owner in found["owners"])
        return cls(
            **{**found, "owners": owners, "deadline": Deadline(*found["deadline"]), "table": tuple(found["table"])}
        )


class HangDetector:
    """Finds the waits of one process that are worth a word, once each. Knows only its clock."""

    def __init__(self, waits: Waits, waiter: str) -> None:
        self._waits, self._waiter = waits, waiter
        self._over: set[tuple[str, Owner]] = set()
        self._said: dict[tuple[str, Owner], float] = {}

    def look(self) -> list[Late]:
        """What has come to be late since the last look. Waits for several of a kind to do the same are one."""
        now, waits = self._waits.clock(), self._waits.open()
        over, half = ({(w.what, w.of) for w in waits if w.left <= share * w.deadline.seconds} for share in (0.0, 0.5))
        risen = over - self._over
        self._over = over
        kinds = {(what, of.kind) for what, of in risen}
        risen |= {(w.what, w.of) for w in waits if (w.what, w.of.kind) in kinds and w.left <= 2 * TICK_S}
        self._over |= risen
        slow = {key for key in half - over - risen if now - self._said.get(key, float("-inf")) > SAID_AGAIN_S}
        self._said |= dict.fromkeys(slow, now)
        return [*self._late(waits, risen, True), *self._late(waits, slow, False)]

    def _late(self, waits: Sequence[Wait], keys: set[tuple[str, Owner]], over: bool) -> list[Late]:
        groups: dict[tuple[str, str], list[Wait]] = {}
        for wait in waits:
            if (wait.what, wait.of) in keys:
                groups.setdefault((wait.what, wait.of.kind), []).append(wait)
        table = rows(self._waiter, waits)
        return [self._of(group, over, table) for group in groups.values()]

    def _of(self, group: Sequence[Wait], over: bool, table: tuple[str, ...]) -> Late:
        oldest = max(group, key=lambda wait: wait.age)
        return Late(
            waiter=self._waiter,
            what=oldest.what,
            owners=tuple(sorted({wait.of for wait in group})),
            age_s=oldest.age,
            since=time.time() - oldest.age,
            deadline=oldest.deadline,
            over=over,
            peers=oldest.peers,
            table=table,
        )


def rows(waiter: str, waits: Sequence[Wait]) -> tuple[str, ...]:
    """All waits of a process as lines of a table; those for the same thing of the same owner are one line."""
    groups: dict[tuple[str, Owner], list[Wait]] = {}
    for wait in waits:
        groups.setdefault((wait.what, wait.of), []).append(wait)
    lines = []
    for (what, of), group in groups.items():
        oldest = max(group, key=lambda wait: wait.age)
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - oldest.age))
        many = f" ({len(group)} times)" if len(group) > 1 else ""
        lines.append(f"{waiter:<18}  {of!s:<22}  {what + many:<30}  {since}  {oldest.age:7.0f} s  {oldest.deadline}")
    return tuple(lines)


class Watchdog:
    """The thread that looks. What `heed` returns, the place of a report, is told to whoever waits."""

    def __init__(
        self, waits: Waits, waiter: str, heed: Callable[[Late], str], also: Callable[[], None] = lambda: None
    ) -> None:
        self._waits, self._heed, self._also = waits, heed, also
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
                self._reports[late.what, late.owners[0].kind] = report
        for wait in self._waits.open():
            if wait.left <= 2 * TICK_S and not wait.report:
                wait.report = self._reports.get((wait.what, wait.of.kind), "")
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

    def places(self, owners: Sequence[Owner]) -> dict[Owner, Place]: ...
    def look(self, places: Mapping[Owner, Place]) -> dict[Owner, list[Seen]]: ...


@dataclass
class Reporter:
    """Speaks for all watchdogs of a run, and writes the reports: `<folder>/<time>.txt`."""

    folder: Path
    say: Callable[[str], None]
    warn: Callable[[str], None]
    witnesses: ProcessInspector
    own_table: Callable[[], Sequence[str]] = field(default=tuple)

    def heed(self, late: Late) -> str:
        """Say it; of one past its deadline, write the report and return where it is."""
        if not late.over:
            self.say(f"{late.words()}; it gives up after {late.deadline.seconds:g} s ({late.deadline})")
            return ""
        places = self.witnesses.places(late.owners)
        seen = self.witnesses.look(places) if not late.evidence else {}
        found = [late.evidence] if late.evidence else verdict(late, places, seen)
        path = self._write(late, found, places, seen)
        first = found[0].splitlines()[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        self.warn(f"{late.words()}: that is its deadline ({late.deadline}). {first}{more}. The whole report: {path}")
        return path

    def _write(
        self,
        late: Late,
        found: Sequence[str],
        places: Mapping[Owner, Place],
        seen: Mapping[Owner, Sequence[Seen]],
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
        for owner in late.owners:
            place = places.get(owner)
            head = f"{owner}: {place}" if place else f"{owner}: {_unseen(owner)}"
            parts.append("\n".join([head, *(one.page() for one in seen.get(owner, ()))]))
        parts.append(f"this process, which runs the watchdog\n{_own_stacks()}")
        self.folder.mkdir(parents=True, exist_ok=True)
        stamp = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{int(now % 1 * 1000):03d}"
        path = self.folder / f"{stamp}.txt"
        path.write_text(redact("\n\n".join(parts)) + "\n")
        return str(path)


def verdict(late: Late, places: Mapping[Owner, Place], seen: Mapping[Owner, Sequence[Seen]]) -> list[str]:
    """What the stacks and states say, in sentences; the most telling first."""

    def named(owner: Owner) -> str:
        return f"{owner} ({places[owner]})" if owner in places else str(owner)

    broken = [
        f"{named(owner)} {one.words()}"
        if one.pid == places[owner].pid
        else f"{named(owner)}: its child process {one.pid} ({one.name}) {one.words()}"
        for owner, processes in seen.items()
        for one in processes
        if one.is_frozen or (one.is_gone and one.pid == places[owner].pid)
    ]
    absent = [
        f"{named(owner)}: " + ("its node does not answer" if owner in places else _unseen(owner))
        for owner in late.owners
        if not seen.get(owner)
    ]
    whole = {owner: found for owner, found in seen.items() if found and not any(one.is_frozen for one in found)}
    inside = {owner: frame for owner, found in whole.items() for one in found if (frame := one.collective)}
    outside = [owner for owner in whole if owner not in inside]
    kind = late.owners[0].kind
    answered = [owner for n in range(late.peers) if (owner := Owner(kind, n)) not in late.owners]
    lines = broken + absent
    if inside:
        wait = f"{together(list(inside))} wait{'s' if len(inside) == 1 else ''}"
        missed = f"misses the collective in which {wait}"
        lines += [f"{named(owner)} {missed}: it {whole[owner][0].words()}" for owner in outside[:_FEW]]
        lines += [f"{together(answered)} {missed}: it has answered already"] if answered else []
        lines += [f"{wait} in {next(iter(inside.values()))}"]
    else:
        lines += [f"{named(owner)} {whole[owner][0].words()}" for owner in outside[:_FEW]]
    return lines


def _unseen(owner: Owner) -> str:
    return "it does not answer" if owner.number is None else "its process has not come up"  # a file system has none


def _own_stacks() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
