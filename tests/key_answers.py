"""What becomes of any key of a launch script: a setting, another name of one, or an answer of the rules."""

from __future__ import annotations

from typing import Literal, NamedTuple

from verl.config.load import AnyRunType
from verl.config.paths import find_setting, join_path


class Answer(NamedTuple):
    """`target` is the setting that a key stands for, `text` a reason or the name of a missing feature."""

    kind: Literal["setting", "renamed", "forwarded", "always on", "ignored", "needs", "unknown"]
    target: str = ""
    text: str = ""


def find_answer(key: str, run_type: AnyRunType) -> Answer:
    """Return what becomes of a key, whatever its value."""
    path = tuple(key.split("."))
    canonical = run_type.legacy.resolve_alias(path)
    target = join_path(canonical)
    setting = find_setting(canonical, run_type.root)
    if setting is not None:
        if canonical == path:
            return Answer("setting", target)
        return Answer("forwarded" if ".engine_kwargs.vllm." in target else "renamed", target)
    rule = run_type.legacy.find_rule(canonical)
    if rule is None:
        return Answer("unknown", target)
    accepted = f" (accepted: {', '.join(rule.harmless)})" if rule.harmless else ""
    return Answer(rule.kind, "", rule.text + accepted)
