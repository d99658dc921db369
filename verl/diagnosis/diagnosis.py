"""Applies all rules to a run, while it goes on or after its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from verl.diagnosis.history import History
from verl.diagnosis.reward_rules import NO_SIGNAL, is_uniform
from verl.diagnosis.rule import Advice, Rule
from verl.diagnosis.rules import RULES

Metrics = Mapping[str, float]
REMIND_AFTER = 50
"""The steps after which advice of the same rule is repeated."""


class Diagnosis:
    """The problems of one run. Advice of the same rule is repeated only after `remind_after` steps.

    The metrics of supervised fine-tuning have a `train/loss`; rules that make no sense for them are not applied.
    """

    def __init__(self, remind_after: int = REMIND_AFTER, rules: Sequence[Rule] = RULES) -> None:
        self._remind_after, self._rules, self._is_sft = remind_after, rules, False
        self._history = History({name for rule in rules for name in rule.metrics})
        self._last_advised: dict[str, int] = {}

    def advise(self, metrics: Metrics, step: int, preview: str = "") -> list[Advice]:
        """Return advice about the metrics of a step, or of the validation after it.

        Args:
            metrics: Of the step or the validation.
            step: The number of steps done.
            preview: Describes a response, to show when all rewards are equal.
        """
        self._history.record(metrics, step)
        self._is_sft |= "train/loss" in metrics
        advice = []
        for rule in self._rules:
            remedy = rule.sft_remedy if self._is_sft else rule.remedy
            evidence = rule.check(self._history) if remedy else None
            if evidence is None or not self._is_due(rule, step):
                continue
            shown = f". {preview}" if preview and rule is NO_SIGNAL and is_uniform(metrics) else ""
            advice.append(Advice(f"{evidence}; {remedy.replace('`', '')}{shown}", rule.name))
        return advice

    def _is_due(self, rule: Rule, step: int) -> bool:
        is_due = rule.name not in self._last_advised or step - self._last_advised[rule.name] >= self._remind_after
        if is_due:
            self._last_advised[rule.name] = step
        return is_due


def diagnose(run: Iterable[tuple[int, Metrics]]) -> list[tuple[int, Advice]]:
    """Return the advice about a run that has ended, with the step of each.

    >>> folder = RunFolder(Path("checkpoints/verl/default"))  # doctest: +SKIP
    >>> diagnose((each.step, each.values) for each in folder.read_metrics())  # doctest: +SKIP
    """
    diagnosis = Diagnosis()
    return [(step, advice) for step, metrics in run for advice in diagnosis.advise(metrics, step)]
