"""What the rules of the diagnosis say about a run: as it has recorded it, and from its metrics where it has not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from verl.diagnosis.diagnosis import REMIND_AFTER, diagnose
from verl.tracking.run_folder import RunFolder, RunWarning, StepMetrics

MOST_STEPS = 3_000
"""The last steps of a run to which the rules are applied afterwards: each time they look back over all of them."""


def read_advice(folder: RunFolder, metrics: Sequence[StepMetrics]) -> list[RunWarning]:
    """Return the warnings of a run by step, and what the rules find besides in the metrics of its last 3,000 steps."""
    recorded, times = folder.read_warnings(), {each.step: each.time for each in metrics}
    found = [
        RunWarning(step, times[step], advice.text, advice.rule)
        for step, advice in diagnose((each.step, each.values) for each in metrics[-MOST_STEPS:])
        if not is_recorded(step, advice.rule, recorded)
    ]
    return sorted([*recorded, *found], key=lambda each: each.step)


def is_recorded(step: int, rule: str, recorded: Iterable[RunWarning]) -> bool:
    """Return whether the run has said the same itself: it repeats advice now and then only, and after each resume."""
    return any(each.rule == rule and abs(each.step - step) < REMIND_AFTER for each in recorded)


def list_latest(advice: Sequence[RunWarning]) -> list[tuple[RunWarning, int]]:
    """Return the last warning of each rule, and how often it came; of warnings without a rule each text is its own."""
    kinds = {each: each.rule or each.text for each in advice}
    latest = {kind: each for each, kind in kinds.items()}
    return [(each, sum(kind == other for other in kinds.values())) for kind, each in latest.items()]
