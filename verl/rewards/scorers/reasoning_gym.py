"""Tasks of the package `reasoning-gym` (data files `reasoning_gym://TASK`): the score of the task's own verifier.

The last `<answer>...</answer>` is graded, or the whole response without one. Some verifiers evaluate the answer as
Python; an answer to their tasks that could do more than compute scores 0 and never reaches them.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from verl.data.reasoning_gym import load_task
from verl.errors import RewardError
from verl.installation import format_install_hint

# Tasks whose verifiers call `eval` or sympy's `parse_expr` (reasoning-gym 0.1.25).
_LITERALS = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
_EXPRESSIONS = {
    *("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"),
}
_FUNCTIONS = {
    *("Abs", "abs", "acos", "asin", "atan", "cos", "cosh", "exp", "ln", "log", "pi", "sin", "sinh", "sqrt", "tan"),
    *("tanh", "sec", "csc", "cot"),
}
_TUPLES = {"arc_agi", "rearc"}  # their verifiers compare grids with tuples, which JSON does not have
_UNREADABLE = (AttributeError, LookupError, TypeError, ValueError)  # what verifiers raise for answers of another form
_MAX_EVALUATED = 500  # characters
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
        try:
            score = float(_load(task, info["options"]).score_answer(answer, entry))
        except _UNREADABLE:
            is_readable = False
    return {"score": score, "solved": float(score >= 1.0), "unreadable": float(not is_readable)}


def is_harmless(task: str, answer: str) -> bool:
    """Return whether the task's verifier can only compute with an answer, not run code that it names."""
    if task in _LITERALS:
        return len(answer) <= _MAX_EVALUATED and not re.search(r"[(.*]", answer)  # no call, attribute or large result
    if task in _EXPRESSIONS:
        plain = re.sub(r"\d+(\.\d*)?[eE][+-]?\d+", "1", answer)
        names = re.findall(r"[^\W\d]\w*", plain)
        is_known = all(name in _FUNCTIONS or re.fullmatch("[A-Za-z]", name) for name in names)
        is_plain = re.fullmatch(r"[\w\s+\-*/^(),.=]*", plain) and not re.search(r"\.\s*[^\W\d]|_", plain)
        return len(answer) <= _MAX_EVALUATED and is_known and bool(is_plain)
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
