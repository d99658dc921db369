"""What becomes of any key of a launch script: a setting, another name of one, or an answer of the rules."""

from __future__ import annotations

from typing import Literal, NamedTuple

from verl.config.legacy.aliases import resolve_alias
from verl.config.legacy.key_rules import find_rule
from verl.config.load import AnyRunType
from verl.config.paths import find_setting, join_path

AnswerKind = Literal["setting", "renamed", "forwarded", "always on", "ignored", "needs", "unknown"]


class Answer(NamedTuple):
    """`target` is the setting that a key stands for, `text` a reason or the name of a missing feature."""

    kind: AnswerKind
    target: str = ""
    text: str = ""


def find_answer(key: str, run_type: AnyRunType) -> Answer:
    """Return what becomes of a key, whatever its value."""
    path = tuple(key.split("."))
    canonical = resolve_alias(path, run_type.aliases)
    target = join_path(canonical)
    setting = find_setting(canonical, run_type.root)
    if setting is not None:
        if canonical == path:
            return Answer("setting", target, "not supported yet" if setting.planned is True else "")
        is_forwarded = ".engine_kwargs.vllm." in target
        return Answer("forwarded" if is_forwarded else "renamed", target)
    rule = find_rule(canonical, run_type.rules)
    if rule is None:
        return Answer("unknown", target)
    harmless = [value for value in rule.harmless if value not in ("null", "")]
    accepted = f" (accepted: {', '.join(harmless)})" if harmless else ""
    return Answer(rule.kind, "", rule.text + accepted)
