"""JSON by a schema: the answer is JSON that is valid by the row's own JSON schema, or it is not.

What stands in the last fenced block counts, or the whole answer where there is none; thoughts up to `</think>` are left
out. Nothing is searched for in prose: an answer that must be dug out is not one that a program can use.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, NoReturn

from verl.errors import RewardError

__all__ = ["answer_text", "compute_score"]

_FENCE = re.compile(r"^[ \t]*```[^\n`]*$", re.MULTILINE)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """1.0 when the answer is valid by the ground truth: a JSON schema, as text or as a dict. `parsed`: it is JSON."""
    text = ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth)
    validator = _validator(data_source, text)
    try:
        answer = json.loads(answer_text(solution_str), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {"score": 0.0, "acc": 0.0, "parsed": 0.0}
    from referencing.exceptions import Unresolvable

    try:
        valid = float(validator.is_valid(answer))
    except Unresolvable as error:
        raise _bad_schema(data_source, text, error) from error
    return {"score": valid, "acc": valid, "parsed": 1.0}


def answer_text(text: str) -> str:
    """The last fenced block, else everything.

    >>> answer_text('<think>{}</think> Here it is:\\n```json\\n{"a": 1}\\n```')
    '{"a": 1}'
    """
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
        raise _bad_schema(data_source, text, error) from error
    return kind(schema, registry=Registry())  # an own registry: a $ref is never fetched from the network


def _bad_schema(data_source: str, text: str, error: Exception) -> RewardError:
    reason = getattr(error, "message", None) or str(error)
    return RewardError(
        f"data_source {data_source!r}: the ground truth {text[:200]!r} is no JSON schema ({reason.splitlines()[0]}); "
        "reward_model.ground_truth must be a complete schema; write it as JSON text, since columns of dicts in parquet "
        "gain every key of every row"
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
