"""What checks find: a `Finding` each, collected in a `Report` with what was checked and what could not be."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum


class Severity(IntEnum):
    """How serious a finding is; the most serious is the smallest."""

    ERROR = 0
    """The run would not start, or would stop."""
    WARNING = 1
    """The run would start, but probably not do what is wanted."""
    NOTE = 2


_PLACE = re.compile(r"(command line|\S+): ")
_VERBS = (
    *("add", "check", "choose", "convert", "create", "declare", "describe", "did you mean", "download", "fill", "fix"),
    *("free", "give", "increase", "install", "its name must", "lower", "make", "merge", "move", "name", "open", "put"),
    *("quote", "read", "remove", "rename", "rerun", "rewrite", "run", "save", "see", "set", "start", "use", "write"),
)
_OTHERS = r"every message needs|each line must|it must be|supported are|(?:settings of [\w.]+|available):"
_FIX = re.compile(rf"(?:[;:.,] |\n *)(?=(?:{'|'.join(_VERBS)})\b(?!\.\w)|{_OTHERS})", re.IGNORECASE)
"""Where the fix begins: messages name it last, as an instruction."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, where, and what to do about it.

    >>> Finding.from_message("trainer.nnodes: 0 must be at least 1; set trainer.nnodes=1").fix
    'set trainer.nnodes=1'
    """

    severity: Severity
    place: str
    problem: str
    fix: str = ""

    @classmethod
    def from_message(cls, message: str, severity: Severity = Severity.ERROR, place: str = "") -> Finding:
        """Split a message of the form "place: problem; fix". `place` is where it is, if the message does not say."""
        start = None if place else _PLACE.match(message)
        if start is not None:
            place, message = start[1], message[start.end() :]
        end = _FIX.search(message)
        if end is None:
            return cls(severity, place, message)
        return cls(severity, place, message[: end.start()], message[end.end() :])


@dataclass(slots=True)
class Report:
    """The findings of all checks, and one line for each topic that was checked or not."""

    findings: list[Finding] = field(default_factory=list)
    checked: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    """The topics with errors."""

    def add(self, topic: str, findings: Iterable[Finding]) -> None:
        """Add the findings of a topic, each once."""
        for finding in findings:
            if finding not in self.findings:
                self.findings.append(finding)
            if finding.severity == Severity.ERROR:
                self.failed.add(topic)

    @property
    def sorted_findings(self) -> list[Finding]:
        """The findings, most serious first, and otherwise in the order of the checks."""
        return sorted(self.findings, key=lambda finding: finding.severity)

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)
