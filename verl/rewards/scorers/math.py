r"""MATH and its kin: what stands in the last `\boxed{...}`, held against the ground truth by math-verify.

The last box counts, whatever stands before it; an answer without one, or one that cannot be read as maths, is wrong. So
is one that leaves the work to the grader: a sum, an integral or a limit where the ground truth has none. A ground truth
that cannot be read is an error.

math-verify's own limits of time are switched off: they are alarm signals, which fail outside of a main thread, and in
one end as "not equal", a 0 that nobody sees. What would take for ever is not begun (`math_limits`); the rest is
bounded by the deadline of whoever calls.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

from verl.errors import RewardError
from verl.rewards.scorers.math_limits import is_immense, plainly_differ

__all__ = ["compute_score", "last_boxed"]

LONGEST = 1_000  # characters
DEEPEST = 12  # arguments in braces; other brackets, at which the parser tries everything twice, count double

_UNDONE = ("Sum", "Product", "Integral", "Limit", "Derivative")
_BRACKET = re.compile(
    r"(?P<argument>(?<=[A-Za-z^_}\]])\{)|(?P<open>[(\[{]|\\l(?:floor|ceil)\b)|[)\]}]|\\r(?:floor|ceil)\b"
)
# Computed while it is read, so its size must be known before.
_HOPELESS = re.compile(r"binom\s*\{[^{}]*(?:\d{6}|binom)|sqrt\s*\[[^]]*(?:\d{4}|[!^\\])|(?:gcd|lcm).*[!^]")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    r"""1.0 when the last box equals the ground truth: an answer in LaTeX, or a solution that holds a `\boxed` one.

    `parsed` says whether the box could be read; `undecided` whether math-verify failed to compare what it had read. It
    does so for some pairs of different forms, such as x > 3 and x \neq 3, and they count as different.
    """
    truth = _truth(str(ground_truth))
    boxed = last_boxed(solution_str)
    answer = _read(boxed) if boxed is not None else _NOTHING
    if answer.text and answer.text == truth.text:
        return _outcome(right=True)
    if truth.value is None:
        raise RewardError(
            f"data_source {data_source!r}: math-verify cannot read the ground truth {str(ground_truth)[:200]!r}; "
            "reward_model.ground_truth must be one answer in LaTeX, such as \\frac{1}{2}, or a solution with a \\boxed "
            "one: mend the row or drop it"
        )
    if answer.value is None or (_leaves_work(answer.value) and not _leaves_work(truth.value)):
        return _outcome(parsed=answer.value is not None)
    if not truth.percent and not answer.percent and plainly_differ(truth.value, answer.value):
        return _outcome()
    try:
        return _outcome(right=_equal(truth, answer))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - foreign code on foreign text; what it is worth is said above
        return _outcome(undecided=True)


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` or `\fbox{...}`; None without one, or if it is never closed.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[start:]) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if brace.group() == "}" and depth == 0:
            return text[text.index("{", start) + 1 : start + brace.start()]
    return None


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer as tidied text, as a sympy expression (None when it cannot be read), and whether it ended in a %."""

    text: str
    value: Any
    percent: bool


_NOTHING = _Answer("", None, False)


@lru_cache(maxsize=256)
def _truth(ground_truth: str) -> _Answer:
    """A ground truth is of use if math-verify can read it and finds it equal to itself: not so for 0/0."""
    boxed = last_boxed(ground_truth)
    truth = _read(ground_truth if boxed is None else boxed)
    try:
        return truth if truth.value is not None and _equal(truth, truth) else replace(truth, value=None)
    except Exception:  # noqa: BLE001 - the reader of the message can do nothing with the library's traceback
        return replace(truth, value=None)


@lru_cache(maxsize=256)
def _read(answer: str) -> _Answer:
    text = " ".join(answer.replace("$", " ").split())
    percent = re.search(r"%\W*$", text) is not None
    text = re.sub(r"\s*\\?%", "", text)  # math-verify 0.9 fails on a percent sign, and says nothing
    if not text or len(text) > LONGEST or _depth(text) > DEEPEST or _HOPELESS.search(text):
        return _Answer(text, None, percent)
    try:
        value = _parse(text)
        return _Answer(text, None if is_immense(value) else value, percent)
    except RecursionError:
        return _Answer(text, None, percent)


def _parse(text: str) -> Any:
    library = _math_verify()
    found = library.parse(
        f"$${text}$$",
        [library.LatexExtractionConfig(boxed_match_priority=-1)],
        fallback_mode="no_fallback",  # only what was understood
        extraction_mode="first_match",  # no second choice when the last is not
        parsing_timeout=None,
        raise_on_error=True,
    )
    return found[0] if found else None


def _equal(truth: _Answer, answer: _Answer) -> bool:
    """Whether they are the same, 50% being 50 and 0.5 alike where the other has no percent sign."""

    def readings(one: _Answer, other: _Answer) -> list[Any]:
        is_both = one.percent and not other.percent and getattr(one.value, "is_number", False)
        return [one.value, one.value / 100] if is_both else [one.value]

    return bool(
        _math_verify().verify(
            readings(truth, answer), readings(answer, truth), timeout_seconds=None, raise_on_error=True
        )
    )


def _leaves_work(expression: Any) -> bool:
    return type(expression).__name__ in _UNDONE or any(map(_leaves_work, getattr(expression, "args", ())))


def _depth(text: str) -> int:
    depth = deepest = 0
    open_brackets: list[int] = []
    for bracket in _BRACKET.finditer(text):
        if bracket["argument"] or bracket["open"]:
            open_brackets.append(1 if bracket["argument"] else 2)
            depth += open_brackets[-1]
            deepest = max(deepest, depth)
        elif open_brackets:
            depth -= open_brackets.pop()
    return deepest


def _outcome(*, right: bool = False, parsed: bool = True, undecided: bool = False) -> dict[str, float]:
    return {"score": float(right), "acc": float(right), "parsed": float(parsed), "undecided": float(undecided)}


@lru_cache(maxsize=1)
def _math_verify() -> ModuleType:
    try:
        import math_verify
    except ImportError as error:
        raise RewardError(
            f"the scorer for MATH needs math-verify, which cannot be imported here ({error}); "
            "install it with: pip install 'verl[math]'"
        ) from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits of time are off: they are
    return math_verify
