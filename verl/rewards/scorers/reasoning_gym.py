"""Tasks of the package `reasoning-gym` (data files `reasoning_gym://TASK`): the score of the task's own verifier.

The last `<answer>...</answer>` is graded, or the whole response without one. Some verifiers evaluate the answer as
Python; an answer to their tasks that could do more than compute scores 0 and never reaches them. So does an answer with
a number that takes too long to compute.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from verl.data.reasoning_gym import load_task
from verl.errors import RewardError
from verl.installation import format_install_hint
from verl.rewards.scorers.math_limits import MAX_BITS, TooLongError, count_bits, limit_cpu_time

# Tasks whose verifiers call `eval` or sympy's `parse_expr` (reasoning-gym 0.1.25).
_LITERALS = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
_ARITHMETIC = {"countdown", "puzzle24"}
_EXPRESSIONS = {*_ARITHMETIC, "intermediate_integration", "polynomial_multiplication", "simple_integration"}
_FUNCTIONS = {
    *("Abs", "abs", "acos", "asin", "atan", "cos", "cosh", "exp", "ln", "log", "pi", "sin", "sinh", "sqrt", "tan"),
    *("tanh", "sec", "csc", "cot"),
}
_COMPLEX = {"complex_arithmetic"}  # its verifier gives 1 for "nan"
_TUPLES = {"arc_agi", "rearc"}  # their verifiers compare grids with tuples, which JSON does not have
_UNREADABLE = (  # what verifiers raise for answers of another form
    *(ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError, TooLongError),
)
_MAX_EVALUATED = 500  # characters
_MAX_CPU_S = 10.0
_LARGE_EXPONENT = re.compile(r"\d[eE][+-]?\d[\d_]{3,}")  # fractions write out all of its digits
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """Return the verifier's score, from 0 to 1, whether the task is solved, and whether the answer was unreadable."""
    task, info = data_source.partition("/")[2], extra_info or {}
    if not isinstance(info.get("entry"), str) or not isinstance(info.get("options"), str):
        raise RewardError(
            f"data_source {data_source!r}: the row has no entry of the task; "
            f"use data.train_files=reasoning_gym://{task}"
        )
    answer = (_ANSWER.findall(solution_str) or [solution_str])[-1].strip()
    entry = json.loads(info["entry"])
    if task in _TUPLES:
        entry = _to_tuples(entry)
    score, is_readable = 0.0, answer == entry["answer"] or is_harmless(task, answer)
    if is_readable:
        verifier = _load(task, info["options"])
        try:
            with limit_cpu_time(_MAX_CPU_S):
                score = float(verifier.score_answer(answer, entry))
        except _UNREADABLE:
            is_readable = False
    return {"score": score, "solved": float(score >= 1.0), "unreadable": float(not is_readable)}


def is_harmless(task: str, answer: str) -> bool:
    """Return whether the task's verifier can only compute with an answer, not run code that it names, and in time."""
    if _LARGE_EXPONENT.search(answer):
        return False
    if task in _COMPLEX:
        return not re.search("nan|inf", answer, re.IGNORECASE)
    if task in _LITERALS:
        return len(answer) <= _MAX_EVALUATED and not re.search(r"[(.*<]", answer)  # no call, attribute or large result
    if task in _EXPRESSIONS:
        plain = re.sub(r"\d+(\.\d*)?[eE][+-]?\d+", "1", answer)
        names = re.findall(r"[^\W\d]\w*", plain)
        is_known = not (names and task in _ARITHMETIC) and all(
            name in _FUNCTIONS or re.fullmatch("[A-MPRT-Za-z]", name) for name in names
        )
        is_plain = re.fullmatch(r"[\w\s+\-*/^(),.=]*", plain) and not re.search(r"\.\s*[^\W\d]|_", plain)
        return len(answer) <= _MAX_EVALUATED and is_known and bool(is_plain) and _is_small(answer)
    return True


def _is_small(answer: str) -> bool:
    """Return whether an expression has no number such as 9**9**9; its syntax may be wrong."""
    import sympy

    try:
        return count_bits(sympy.parse_expr(answer, evaluate=False)) <= MAX_BITS
    except Exception:  # noqa: BLE001 - the verifier finds it, too
        return True


def _to_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_tuples(part) for key, part in value.items()}
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


@lru_cache(maxsize=256)
def _load(task: str, options: str) -> Any:
    try:
        return load_task(task, json.loads(options))
    except (ImportError, ValueError, TypeError, AssertionError) as error:
        hint = format_install_hint("reasoning-gym")
        raise RewardError(f"the task {task!r} of reasoning-gym cannot be loaded: {error}. Run {hint}") from error
