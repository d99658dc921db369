"""Rows on which a reward function is tried, and the reference solutions that they contain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.data.dataset import extract_reward_fields
from verl.data.files import Files, FileSet
from verl.errors import DataError

_SOLUTIONS = ("solution", "answer", "response", "reference", "completion", "output")
"""Columns that may hold a whole reference solution."""
_FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>", "The answer is {}.")
"""How a model may write the ground truth."""


@dataclass(frozen=True, slots=True)
class RewardRow:
    """One row of the data, as a reward function gets it; `references` are solutions that should score high."""

    location: str
    prompt: Any
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    references: tuple[str, ...]


def read_reward_rows(files: Files, prompt_key: str, count: int) -> list[RewardRow]:
    """Return up to `count` rows, spread evenly over the files; rows that cannot be read are left out."""
    data = FileSet(files)
    step = max(1, data.total_rows // count)
    rows = []
    for number in range(0, data.total_rows, step)[:count]:
        file, index = data.locate(number)
        try:
            fields = file.row(index)
            prompt = fields.pop(prompt_key, None)
            rewards = extract_reward_fields(fields)
        except DataError:  # reported with the prompts
            continue
        references = list_references(rewards["ground_truth"], rewards["extra_info"])
        rewards["extra_info"] = {**rewards["extra_info"], "raw_prompt": prompt}
        rows.append(RewardRow(file.location(index), prompt, references=references, **rewards))
    return rows


def list_references(ground_truth: Any, extra_info: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what may be a reference solution: whole solutions of the row, and its ground truth in usual forms.

    >>> list_references("4", {"solution": "2 + 2 = 4"})[:3]
    ('2 + 2 = 4', '4', '#### 4')
    """
    found = [extra_info[name] for name in _SOLUTIONS if isinstance(extra_info.get(name), str)]
    if isinstance(ground_truth, str | int | float):
        found += [form.format(ground_truth) for form in _FORMS]
    elif isinstance(ground_truth, list) and ground_truth and isinstance(ground_truth[0], str):
        found += [form.format(ground_truth[0]) for form in _FORMS]
    return tuple(dict.fromkeys(found))
