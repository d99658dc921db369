"""JSON schema: the response is JSON that is valid under the schema of its row.

The last fenced block after `</think>` is graded, or all text after `</think>` if it has no block. JSON inside prose is
not searched for: no program could use such a response.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, NoReturn

from verl.errors import RewardError

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
        valid = float(validator.is_valid(value))
    except Unresolvable as error:
        raise _schema_error(data_source, text, error) from error
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
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        schema = json.loads(text)
        kind = validator_for(schema)
        kind.check_schema(schema)
    except (ValueError, TypeError, AttributeError, SchemaError) as error:
        raise _schema_error(data_source, text, error) from error
    return kind(schema, registry=Registry())  # an empty registry: a $ref is never fetched from the network


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
