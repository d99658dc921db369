"""JSON schema: the response is JSON that is valid under the schema of its row.

The last fenced block after `</think>` is graded, or all text after `</think>` if it has no block. JSON inside prose is
not searched for: no program could use such a response.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NoReturn

from verl.errors import RewardError
from verl.rewards.scorers.math_limits import TooLongError, limit_cpu_time

MAX_CPU_S = 5.0  # for one response; exceeding the timeout of a response would be a failure
MAX_PATTERN_S = 1.0  # for one text and pattern
_FENCE = re.compile(r"^[ \t]*```[^\n`]*$", re.MULTILINE)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """Return 1.0 if the response is valid under the ground truth: a JSON schema, as text or dict."""
    text = ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth)
    validator = _validator(data_source, text)
    try:
        value = json.loads(extract_json(solution_str), object_pairs_hook=_reject_duplicates, parse_constant=_reject)
    except (ValueError, RecursionError):
        return {"score": 0.0, "acc": 0.0, "parsed": 0.0}
    from referencing.exceptions import Unresolvable

    try:
        with limit_cpu_time(MAX_CPU_S):
            valid = float(validator.is_valid(value))
    except Unresolvable as error:
        raise _schema_error(data_source, text, error) from error
    except (RecursionError, TooLongError, TimeoutError, ArithmeticError):  # no valid response needs as much
        valid = 0.0
    return {"score": valid, "acc": valid, "parsed": 1.0}


def extract_json(text: str) -> str:
    """Return the last fenced block, or everything without one."""
    text = text.rpartition("</think>")[2]
    fences = list(_FENCE.finditer(text))
    if len(fences) < 2:
        return text.strip()
    opening, closing = fences[len(fences) // 2 * 2 - 2 :][:2]
    return text[opening.end() : closing.start()].strip()


@lru_cache(maxsize=256)
def _validator(data_source: str, text: str) -> Any:
    from jsonschema import SchemaError
    from jsonschema.validators import extend, validator_for
    from referencing import Registry

    _limit_time_of_patterns()
    try:
        schema = json.loads(text)
        kind = validator_for(schema)
        kind.check_schema(schema)
    except (ValueError, TypeError, AttributeError, SchemaError) as error:
        raise _schema_error(data_source, text, error) from error
    patterns = {"pattern": _check_pattern, "patternProperties": _check_pattern_properties}
    kind = extend(kind, patterns)
    return kind(schema, registry=Registry())  # an empty registry: a $ref is never fetched from the network


def _check_pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    """Match a pattern with a timeout, which the module `re` does not have."""
    from jsonschema import ValidationError

    if validator.is_type(value, "string") and not _search(pattern, value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _check_pattern_properties(validator: Any, patterns: Any, value: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(value, "object"):
        for pattern, subschema in patterns.items():
            for key, each in value.items():
                if _search(pattern, key):
                    yield from validator.descend(each, subschema, path=key, schema_path=pattern)


def _limit_time_of_patterns() -> None:
    """Match the patterns of additionalProperties and unevaluatedProperties with a timeout; calling it again is a no-op.

    jsonschema 4 searches by the module `re` in functions that several keywords share, so that a slow pattern hangs.
    Remove this patch when the function that searches can be chosen.
    """
    from jsonschema import _legacy_keywords, _utils

    for module in (_utils, _legacy_keywords):
        module.re = SimpleNamespace(search=_search)


def _search(pattern: str, text: str) -> bool:
    import regex

    return regex.search(pattern, text, timeout=MAX_PATTERN_S) is not None


def _schema_error(data_source: str, text: str, error: Exception) -> RewardError:
    reason = getattr(error, "message", None) or str(error)
    return RewardError(
        f"data_source {data_source!r}: the ground truth {text[:200]!r} is not a JSON schema "
        f"({reason.splitlines()[0]}); set reward_model.ground_truth to a complete schema, and write it as JSON text: "
        "dicts in Parquet columns gain the keys of all rows"
    )


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("duplicate key")
    return dict(pairs)


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
