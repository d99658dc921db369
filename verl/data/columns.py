"""The arguments of a reward function, from the columns of a row.

`data_source`, `ground_truth` and `extra_info` may be columns, or fields of the column `reward_model`; the ground truth
may also be called `answer`. All other columns are added to `extra_info`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.errors import DataError

TRUTHS = ("ground_truth", "answer")
"""Columns of the ground truth if `reward_model` has none; the first that exists is used."""


def extract_reward_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return `data_source`, `ground_truth` and `extra_info` from all columns of a row except the prompt.

    >>> extract_reward_fields({"data_source": "sums", "reward_model": {"ground_truth": "46"}, "level": 2})
    {'data_source': 'sums', 'ground_truth': '46', 'extra_info': {'level': 2}}
    """
    source = resolve_data_source(fields.pop("data_source", None), fields.get("reward_model"))
    extra, model, truth = fields.pop("extra_info", None), fields.pop("reward_model", None), None
    if isinstance(model, Mapping):
        model = dict(model)
        truth = model.pop("ground_truth", None)
        model.pop("data_source", None)
        fields |= {**(model.pop("extra_info", None) or {}), **model}
    elif isinstance(model, str) and model.lstrip().startswith("{"):
        raise DataError(
            f"column 'reward_model' holds text, {model[:60]!r}; it must hold the fields themselves, such as "
            '{"ground_truth": ...}. Write the file again without json.dumps or str around them'
        )
    elif model is not None:
        fields["reward_model"] = model
    for column in TRUTHS:
        if truth is None:
            truth = fields.pop(column, None)
    if isinstance(extra, Mapping):
        fields |= extra
    elif extra is not None:
        fields["extra_info"] = extra
    return {"data_source": source, "ground_truth": truth, "extra_info": fields}


def resolve_data_source(column: Any, reward_model: Any) -> str:
    """Return the data source of a row: its column, or the field of `reward_model`, or ""."""
    if column is None and isinstance(reward_model, Mapping):
        column = reward_model.get("data_source")
    return "" if column is None else str(column)
