"""What a rule consists of, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from verl.diagnosis.history import History

Check = Callable[[History], str | None]
"""Returns the evidence of a problem in one line, with its numbers; None without a problem."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A problem of training that can be seen in metrics. Texts are Markdown: metrics and settings are in backticks.

    Args:
        name: Lowercase words with hyphens, for `verl explain NAME`.
        check: Looks for the problem in a run.
        metrics: The metrics that `check` reads; History keeps their earlier values.
        meaning: What the problem is, and what causes it.
        limits: When the rule warns, and why not earlier.
        remedy: What to try, as the end of a sentence: it follows the evidence.
        sft_remedy: The same in supervised fine-tuning; "" if the rule does not apply there.
    """

    name: str
    check: Check
    metrics: tuple[str, ...]
    meaning: str
    limits: str
    remedy: str
    sft_remedy: str = ""


class Advice(NamedTuple):
    """A warning in one line, and the name of its rule; "" if it is not from a rule."""

    text: str
    rule: str = ""
