"""What the controller makes of a stalled call: a line on the console, a diagnosis, and a report with all stacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl.cluster.hangs.detector import StalledCall
from verl.cluster.hangs.pending_calls import CallTarget, format_targets
from verl.cluster.hangs.process_info import ProcessInfo, dump_own_stacks
from verl.private_files import make_folder
from verl.redaction import redact


@dataclass(frozen=True, slots=True)
class ProcessLocation:
    """A process of the cluster."""

    pid: int
    node: str
    host: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


Locations = Mapping[CallTarget, ProcessLocation]
Processes = Mapping[CallTarget, Sequence[ProcessInfo]]
"""The process of each target, then its children. Targets that could not be inspected are missing."""


@dataclass
class Reporter:
    """Reports the stalled calls of all processes of a run: to the console, and in `<folder>/<time>.txt`."""

    folder: Path
    note: Callable[[str], None]
    warn: Callable[[str], None]
    locate: Callable[[Sequence[CallTarget]], Locations]
    inspect: Callable[[Locations], Processes]
    list_pending: Callable[[], Sequence[str]] = tuple  # in this process

    def report(self, stalled: StalledCall) -> str:
        """Print the call; if it is overdue, also write a report and return its path."""
        if not stalled.is_overdue:
            self.note(f"{stalled.describe()}; timeout after {stalled.timeout.seconds:g} s ({stalled.timeout})")
            return ""
        locations = self.locate(stalled.targets)
        processes = {} if stalled.cause else self.inspect(locations)
        findings = [stalled.cause] if stalled.cause else diagnose(stalled, locations, processes)
        path = self._write(stalled, findings, locations, processes)
        first, more = findings[0].splitlines()[0], f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        self.warn(f"{stalled.describe()}: timeout exceeded ({stalled.timeout}). {first}{more}. Full report: {path}")
        return path

    def _write(self, stalled: StalledCall, findings: Sequence[str], locations: Locations, processes: Processes) -> str:
        now = time.time()
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        parts = [
            f"{clock}: {stalled.describe()}; timeout: {stalled.timeout}",
            _section("Findings", findings),
            _section(
                "Pending calls: caller, target, action, since, elapsed, timeout",
                dict.fromkeys((*self.list_pending(), *stalled.pending)),
            ),
        ]
        for target in stalled.targets:
            location = locations.get(target) or _describe_missing(target)
            parts.append("\n".join([f"{target}: {location}", *(info.format() for info in processes.get(target, ()))]))
        parts.append(f"This process, which runs the watchdog\n{dump_own_stacks()}")
        make_folder(self.folder)
        stamp = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{int(now % 1 * 1000):03d}"
        path = self.folder / f"{stamp}.txt"
        path.write_text(redact("\n\n".join(parts)) + "\n")
        return str(path)


def _section(title: str, lines: Iterable[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])


def diagnose(stalled: StalledCall, locations: Locations, processes: Processes) -> list[str]:
    """Return what process states and stacks say about the cause, the most likely one first."""

    def name(target: CallTarget) -> str:
        return f"{target} ({locations[target]})" if target in locations else str(target)

    lines = [
        f"{name(target)} {info.describe()}"
        if info.pid == locations[target].pid
        else f"{name(target)}: its child process {info.pid} ({info.name}) {info.describe()}"
        for target, infos in processes.items()
        for info in infos
        if info.is_stopped or (info.is_gone and info.pid == locations[target].pid)
    ]
    lines += [
        f"{name(target)}: " + ("its node does not respond" if target in locations else _describe_missing(target))
        for target in stalled.targets
        if not processes.get(target)
    ]
    running = {target: infos for target, infos in processes.items() if not any(info.is_stopped for info in infos)}
    inside = {target: frame for target, infos in running.items() for info in infos if (frame := info.collective_frame)}
    outside = [target for target, infos in running.items() if infos and target not in inside]
    if not inside:
        return lines + [f"{name(target)} {running[target][0].describe()}" for target in outside]
    waiting = f"{format_targets(list(inside))} wait{'s' if len(inside) == 1 else ''}"
    missing = f"did not join the collective in which {waiting}"
    lines += [f"{name(target)} {missing}: it {running[target][0].describe()}" for target in outside]
    kind = stalled.targets[0].kind
    if returned := [target for n in range(stalled.peers) if (target := CallTarget(kind, n)) not in stalled.targets]:
        lines.append(f"{format_targets(returned)} {missing}: the call has returned already")
    return [*lines, f"{waiting} in {next(iter(inside.values()))}"]


def _describe_missing(target: CallTarget) -> str:
    return "does not respond" if target.index is None else "its process has not started"  # a file system has none
