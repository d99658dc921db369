r"""MATH and similar: the content of the last `\boxed{...}`, compared with the ground truth by math-verify.

A response without a box, or with one that cannot be parsed, is wrong. So is one that leaves the work to the grader: a
sum, an integral or a limit where the ground truth has none. A ground truth that cannot be parsed is an error.

The timeouts of math-verify are disabled: they are alarm signals, which fail outside the main thread. Expressions that
would take too long are not evaluated, and what still takes too long is undecided (`math_limits`).
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from types import ModuleType
from typing import Any

from verl.errors import RewardError
from verl.installation import format_install_hint
from verl.rewards.scorers.math_limits import (
    MAX_BITS,
    TooLongError,
    count_bits,
    differ_at_a_point,
    is_contradiction,
    limit_cpu_time,
)
from verl.rewards.scorers.units import read_unit

MAX_LENGTH = 1_000  # characters
MAX_CPU_S = 5.0  # for one answer; exceeding the timeout of a response would be a failure
MAX_DEPTH = 12  # of brackets: the time of the parser grows exponentially with it

_UNEVALUATED = ("Sum", "Product", "Integral", "Limit", "Derivative")
# Evaluated while parsing, so its size must be checked before.
_BASE = re.compile(r"\d\s*_\s*\{?\s*(\d+)")
_SPACE = r"(?:\s|~|\\[,;:! ])+"
_DIGIT_GROUPS = re.compile(rf"(?<![\d.,^_])\d{{1,3}}(?:{_SPACE}\d{{3}})+(?!{_SPACE}?\d)")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)")  # as LaTeX reads it: each argument is one digit
# A product or a mixed number for math-verify: 1 0 is 0, 10 20 is 30. After an exponent of one digit it is a product.
_ADJACENT_NUMBERS = re.compile(rf"(?<!\^)\d{_SPACE}\d|\d{_SPACE}0")
_TOO_LARGE = re.compile(r"binom\s*\{[^{}]*(?:\d{6}|binom)|sqrt\s*\[[^]]*(?:\d{4}|[!^\\])|(?:gcd|lcm).*[!^]")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    r"""Return 1.0 if the last box equals the ground truth: an answer in LaTeX, or a solution with a `\boxed` one.

    `parsed` is whether the box could be parsed, `undecided` whether math-verify failed to compare it, as it does for
    some pairs of different forms, such as x > 3 and x \neq 3; they count as different.
    """
    truth = _parse_truth(str(ground_truth))
    boxed = last_boxed(solution_str)
    try:
        with limit_cpu_time(MAX_CPU_S):
            return _compare(data_source, str(ground_truth), truth, _parse(boxed) if boxed is not None else _NOTHING)
    except TooLongError:
        return _result(is_undecided=True)


def _compare(data_source: str, ground_truth: str, truth: _Answer, answer: _Answer) -> dict[str, float]:
    if answer.text and answer.text == truth.text:
        return _result(is_right=True)
    if truth.value is None:
        raise RewardError(
            f"data_source {data_source!r}: math-verify cannot parse the ground truth {ground_truth[:200]!r}; "
            "set reward_model.ground_truth to one answer in LaTeX, such as \\frac{1}{2}, or to a solution with a "
            "\\boxed one, or remove the row"
        )
    if answer.value is None or (_is_unevaluated(answer.value) and not _is_unevaluated(truth.value)):
        return _result(is_parsed=answer.value is not None)
    bases, units = _BASE.findall(answer.text), (read_unit(truth.text), read_unit(answer.text))  # math-verify drops both
    if is_contradiction(answer.value) or (bases and bases != _BASE.findall(truth.text)):
        return _result()
    if None not in units and units[0] != units[1]:
        return _result()
    if not truth.is_percent and not answer.is_percent and differ_at_a_point(truth.value, answer.value):
        return _result()
    try:
        return _result(is_right=_are_equal(truth, answer))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - math-verify on arbitrary text
        return _result(is_undecided=True)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}`; None without one, or if it is not closed."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[start:]) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if brace.group() == "}" and depth == 0:
            return text[text.index("{", start) + 1 : start + brace.start()]
    return None


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer as cleaned text, as a sympy expression (None if it cannot be parsed), and whether it ends in a %."""

    text: str
    value: Any
    is_percent: bool


_NOTHING = _Answer("", None, False)


@lru_cache(maxsize=256)
def _parse_truth(ground_truth: str) -> _Answer:
    """Return the parsed ground truth, without a value if it does not equal itself, like 0/0."""
    boxed = last_boxed(ground_truth)
    truth = _parse(ground_truth if boxed is None else boxed)
    try:
        return truth if truth.value is not None and _are_equal(truth, truth) else replace(truth, value=None)
    except Exception:  # noqa: BLE001 - the traceback of the library would not help the user
        return replace(truth, value=None)


@lru_cache(maxsize=256)
def _parse(answer: str) -> _Answer:
    text = " ".join(answer.replace("$", " ").split())
    is_percent = re.search(r"%\W*$", text) is not None
    text = re.sub(r"\s*\\?%", "", text)  # math-verify 0.9 fails silently on a percent sign
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _DIGIT_GROUPS.sub(lambda found: re.sub(r"\D", "", found[0]), text)
    if _ADJACENT_NUMBERS.search(text):
        return _Answer(text, None, is_percent)
    if not text or len(text) > MAX_LENGTH or _bracket_depth(text) > MAX_DEPTH or _TOO_LARGE.search(text):
        return _Answer(text, None, is_percent)
    try:
        value = _parse_latex(text)
        return _Answer(text, None if count_bits(value) > MAX_BITS else value, is_percent)
    except RecursionError:
        return _Answer(text, None, is_percent)


def _parse_latex(text: str) -> Any:
    library = _math_verify()
    values = library.parse(
        f"$${text}$$",
        [library.LatexExtractionConfig(boxed_match_priority=-1)],
        fallback_mode="no_fallback",  # only a complete parse
        extraction_mode="first_match",  # no other candidate if the first fails
        parsing_timeout=None,
        raise_on_error=True,
    )
    return values[0] if values else None


def _are_equal(truth: _Answer, answer: _Answer) -> bool:
    """Return whether two answers are equal; 50% is both 50 and 0.5 if the other has no percent sign."""

    def values(one: _Answer, other: _Answer) -> list[Any]:
        is_ambiguous = one.is_percent and not other.is_percent and getattr(one.value, "is_number", False)
        return [one.value, one.value / 100] if is_ambiguous else [one.value]

    verify = _math_verify().verify
    return bool(verify(values(truth, answer), values(answer, truth), timeout_seconds=None, raise_on_error=True))


def _is_unevaluated(expression: Any) -> bool:
    return type(expression).__name__ in _UNEVALUATED or any(map(_is_unevaluated, getattr(expression, "args", ())))


def _bracket_depth(text: str) -> int:
    return max(accumulate((char in "([{") - (char in ")]}") for char in text), default=0)


def _result(*, is_right: bool = False, is_parsed: bool = True, is_undecided: bool = False) -> dict[str, float]:
    right = float(is_right)
    return {"score": right, "acc": right, "parsed": float(is_parsed), "undecided": float(is_undecided)}


@lru_cache(maxsize=1)
def _math_verify() -> ModuleType:
    try:
        import math_verify
    except ImportError as error:
        raise RewardError(
            f"The math scorer needs math-verify, which cannot be imported ({error}); {format_install_hint('math')}"
        ) from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about disabled timeouts
    return math_verify
